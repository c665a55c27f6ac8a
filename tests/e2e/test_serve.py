"""`coatcheck serve` as a process: its signals, its draining, and several processes on one port."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from app import children
from app.config import Settings
from app.reloading import Rereading
from app.serve import serve as serve_here
from app.sockets import listen
from app.sources import read_settings
from tests.support.nursery import Child, nursery
from tests.support.processes import alive

ROOT = Path(__file__).parents[2]


class Router:
    """A running `coatcheck serve` with one worker that takes connections and never answers."""

    def __init__(self, *arguments: str, anew: bool = False) -> None:
        """`anew`: as users start it, not forked."""
        self._worker = socket.create_server(("127.0.0.1", 0))
        worker = f"http://127.0.0.1:{self._worker.getsockname()[1]}"
        unasked = ("--probe-path=off", "--models-interval=0")
        reading, writing = os.pipe()
        self.stderr = os.fdopen(reading)
        command = ["app", "serve", "--port=0", *unasked, "--worker", worker, *arguments]
        self.process: subprocess.Popen[bytes] | Child
        if anew:
            self.process = subprocess.Popen([sys.executable, "-m", *command], stdout=writing, stderr=writing, cwd=ROOT)
        else:
            self.process = nursery().start(command, os.environ, writing, writing)
        os.close(writing)
        self.announcement = self.stderr.readline()
        found = re.search(r"http://\S+:\d+", self.announcement)
        assert found, self.announcement
        self.url = found[0]
        self.client = httpx.Client(trust_env=False, verify=False, timeout=10)

    def status(self, path: str) -> int:
        """0 when it cannot be reached."""
        try:
            return self.client.get(self.url + path).status_code
        except httpx.TransportError:
            return 0

    @contextlib.contextmanager
    def running_turn(self) -> Iterator[list[str]]:
        """A turn that waits for the worker; leaves in the list how it ended for the client."""
        ends: list[str] = []

        def take_turn() -> None:
            try:
                answer = httpx.post(
                    f"{self.url}/v1/chat/completions", json={"model": "m"}, trust_env=False, verify=False, timeout=30
                )
                ends.append(str(answer.status_code))
            except httpx.TransportError as error:
                ends.append(type(error).__name__)

        turn = threading.Thread(target=take_turn)
        turn.start()
        try:
            assert holds(lambda: "coatcheck_turns_running 1.0" in self.client.get(f"{self.url}/metrics").text)
            yield ends
        finally:
            turn.join(30)

    def end(self, within: float) -> str:
        """Wait for the end; answers what it said on stderr since the announcement."""
        self.process.wait(within)
        return self.stderr.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.stderr.close()
        self.client.close()
        self._worker.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Router]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, anew: bool = False) -> Router:
            router = Router(*arguments, anew=anew)
            stack.callback(router.close)
            return router

        yield start


def holds(condition: Callable[[], bool], within: float = 20.0) -> bool:
    give_up = time.monotonic() + within
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def test_ready_fails_first_then_turns_get_their_time_and_are_cut_without_noise(serve: Callable[..., Router]) -> None:
    router = serve("--claims", "memory://", "--drain-delay", "1", "--drain-timeout", "1")
    assert "1 worker, claims in memory://, replica " in router.announcement
    assert router.status("/ready") == 200
    with router.running_turn() as ends:
        router.process.send_signal(signal.SIGINT)
        assert holds(lambda: router.status("/ready") == 503)
        assert router.status("/health") == 200
        said = router.end(within=10)
    assert router.process.returncode == 0
    assert "Traceback" not in said
    assert ends != ["200"]


def test_a_second_signal_ends_it_at_once(serve: Callable[..., Router]) -> None:
    router = serve("--claims", "memory://", "--drain-timeout", "60")
    with router.running_turn():
        router.process.send_signal(signal.SIGTERM)
        assert holds(lambda: router.status("/health") == 0)
        assert router.process.poll() is None
        router.process.send_signal(signal.SIGTERM)
        assert "Traceback" not in router.end(within=5)
    assert router.process.returncode == -signal.SIGTERM


def test_several_processes_share_a_port_and_a_dead_one_is_replaced(
    serve: Callable[..., Router], tmp_path: Path
) -> None:
    router = serve("--claims", tmp_path.as_uri(), "--processes", "2", "--replica", "east")
    assert "replica east-1 to -2" in router.announcement
    pid = router.process.pid

    def pids() -> set[int]:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}

    def counted() -> tuple[int, int]:
        """By one scrape: processes that it is of, and turns that were rejected."""
        text = httpx.get(f"{router.url}/metrics", trust_env=False, verify=False, timeout=30).text
        rejected = re.findall(r'coatcheck_turns_total\{.*outcome="rejected"\} (\S+)', text)
        found = re.findall(r"^coatcheck_processes (\S+)", text, re.M)
        return int(float(found[0])) if found else 0, sum(int(float(each)) for each in rejected)

    first = pids()
    assert len(first) == 2
    assert holds(lambda: router.status("/ready") == 200)
    for _ in range(20):  # each on a connection of its own, which either takes
        refused = httpx.get(
            f"{router.url}/v1/x", headers={"x-dynamo-session-id": "a b"}, trust_env=False, verify=False, timeout=30
        )
        assert refused.status_code == 400
    assert holds(lambda: counted() == (2, 20))
    assert [counted()[1] for _ in range(6)] == [20] * 6, "whichever is asked answers for both"
    victim = first.pop()
    os.kill(victim, signal.SIGKILL)
    assert holds(lambda: len(pids() - {victim}) == 2)
    assert holds(lambda: router.status("/ready") == 200)
    assert counted()[1] == 20, "what the dead one had counted still counts"
    assert holds(lambda: counted() == (2, 20))

    last = pids()
    router.process.send_signal(signal.SIGTERM)
    said = router.end(within=10)
    assert router.process.returncode == 0
    assert f"process {victim} was killed by SIGKILL" in said
    assert not any(map(alive, last))


def test_the_processes_do_not_outlive_a_killed_parent(serve: Callable[..., Router], tmp_path: Path) -> None:
    router = serve("--claims", tmp_path.as_uri(), "--processes", "2")
    assert holds(lambda: router.status("/health") == 200)
    pid = router.process.pid
    pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    router.process.kill()
    assert holds(lambda: not any(map(alive, pids)))


def test_processes_that_cannot_start_end_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    flags = {"host": "127.0.0.1", "port": "0", "processes": "2", "claims": "file:///unused"}
    rereading = Rereading(Settings.flat(**flags), lambda: read_settings(flags), None)
    monkeypatch.setattr(children, "start", start)
    try:
        assert serve_here(rereading) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_while_draining_each_answer_ends_its_connection(serve: Callable[..., Router]) -> None:
    """A load balancer must not write a request into a connection that is just being closed."""
    router = serve("--drain-delay", "30")
    bad = {"x-dynamo-session-id": "a b"}
    kept = router.client.post(f"{router.url}/v1/chat/completions", content=b"{}", headers=bad)
    assert (kept.status_code, kept.headers.get("connection")) == (400, None)
    router.process.send_signal(signal.SIGTERM)
    assert holds(lambda: router.status("/ready") == 503)
    refused = router.client.post(f"{router.url}/v1/chat/completions", content=b"{}", headers=bad)
    health = router.client.get(f"{router.url}/health")
    assert (refused.status_code, refused.headers["connection"]) == (400, "close")
    assert (health.status_code, health.headers["connection"]) == (200, "close")


def test_who_has_connected_when_the_port_closes_is_answered(serve: Callable[..., Router]) -> None:
    """The kernel takes connections before we do, and resets those that wait when the port closes."""
    router = serve()
    port = int(router.url.rpartition(":")[2])
    router.process.send_signal(signal.SIGSTOP)
    waiting = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(20)]
    for each in waiting:
        each.sendall(b"POST /v1/x HTTP/1.1\r\nhost: r\r\nx-dynamo-session-id: a b\r\ncontent-length: 2\r\n\r\n{}")
    router.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)  # longer than it takes to look whether it is to end
    router.process.send_signal(signal.SIGCONT)
    for each in waiting:
        with each, each.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 400 Bad Request\r\n"
            assert answer.read().endswith(b"}")  # those that were answered before the signal is heard are closed idle
    assert router.process.wait(10) == 0


def test_all_addresses_means_those_of_both_families(serve: Callable[..., Router]) -> None:
    router = serve("--host", "::")
    port = int(re.search(r":(\d+)", router.announcement.partition("http://[::]")[2])[1])  # type: ignore[index]
    assert f"http://[::]:{port} and http://0.0.0.0:{port}" in router.announcement
    for host in ("127.0.0.1", "[::1]"):
        assert router.client.get(f"http://{host}:{port}/health").status_code == 200


def test_one_address_means_that_one(serve: Callable[..., Router]) -> None:
    router = serve("--host", "::1")
    port = int(router.url.rpartition(":")[2])
    with pytest.raises(httpx.ConnectError):
        router.client.get(f"http://127.0.0.1:{port}/health")


def test_as_many_files_may_be_open_as_the_system_allows(serve: Callable[..., Router]) -> None:
    """A connection is one; the soft limit is 1024 in most shells."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = min(hard, 4096) if hard > 0 else 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024) if soft > 0 else 1024, hard))
    try:
        router = serve("--claims", "memory://", anew=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = Path(f"/proc/{router.process.pid}/limits").read_text()
    found = re.search(r"Max open files\s+(\d+)\s+(\d+)", limits)
    assert found
    assert found[1] == found[2]
    assert int(found[1]) >= allowed
    assert f"{found[1]} open files" in router.announcement


def test_clients_that_vanish_are_noticed() -> None:
    """What is accepted has it from what listens."""
    [listener] = listen("127.0.0.1", 0, patience=60)
    with listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
