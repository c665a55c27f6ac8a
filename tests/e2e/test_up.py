"""`coatcheck up` as its user sees it: real processes, real ports, the printed commands run as they are printed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.processes import alive
from tests.support.tcp import free_ports

ROOT = Path(__file__).parents[2]
QUESTION = {"model": "mock-model", "messages": [{"role": "user", "content": "Where is my coat?"}]}
SMALL = ("--replicas", "1", "--workers", "1")


class Up:
    """A running `coatcheck up`; `text` is what it printed until it was up."""

    def __init__(self, state: Path, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "up", "--state", str(state), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=state,
        )
        self.text = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if line.strip() == "END":  # the last command's end
                break
        self.replicas = re.findall(r"replica +(http://\S+)", self.text)
        self.workers = re.findall(r"worker +(http://\S+)", self.text)
        self.children = _children(self.process.pid)

    def stop(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end. Raises TimeoutExpired long before a running turn would end by itself."""
        self.process.send_signal(number)
        self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def up(state: Path, *arguments: str) -> Iterator[Up]:
    running = Up(state, *arguments)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One for the tests that leave it running."""
    with up(tmp_path_factory.mktemp("up"), *own_ports(), "--ttft-ms", "1") as it:
        assert len(it.children) == 4
        yield it
        it.stop(signal.SIGTERM)
        assert it.process.returncode == 0
        assert not any(map(alive, it.children))


def own_ports() -> list[str]:
    """The first of a few that are free now; `up` goes on to others if they no longer are."""
    port, worker_port = free_ports(2)
    return ["--port", str(port), "--worker-port", str(worker_port)]


class Degraded(Exception):
    """On a machine without time the store does not answer by its deadline, and a session goes by its hash meanwhile."""


def with_a_store_that_answers(check: Callable[[str], None]) -> None:
    """Once; on a machine without time again, with another session's id."""
    for number in range(20):
        try:
            return check(f"session-{number}")
        except Degraded:
            time.sleep(0.5)
    raise AssertionError("the store is never there in time")


def ask(url: str, session: str, **headers: str) -> httpx.Response:
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json=QUESTION,
        headers={"X-Dynamo-Session-ID": session, **headers},
        trust_env=False,
        timeout=20,
    )
    assert answer.status_code == 200, answer.text
    if answer.headers["X-Coatcheck-Affinity"] == "degraded":
        raise Degraded
    return answer


def cached_tokens(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_session_has_one_worker_at_both_replicas_until_its_final_turn(shared: Up) -> None:
    with_a_store_that_answers(partial(has_one_worker_until_its_final_turn, shared.replicas))
    with_a_store_that_answers(partial(sessions_spread, shared.replicas[0]))


def sessions_spread(replica: str, name: str) -> None:
    assert len({ask(replica, f"{name}-{number}").headers["X-Coatcheck-Worker"] for number in range(4)}) == 2


def has_one_worker_until_its_final_turn(replicas: Sequence[str], session: str) -> None:
    first, second = replicas
    answers = [ask(first, session), ask(second, session)]
    assert [answer.headers["X-Coatcheck-Affinity"] for answer in answers] == ["created", "stored"]
    give_up = time.monotonic() + 60
    # A replica is ready before its watch has been shown to be alive; until then it reads a claim before each use.
    while (how := answers[-1].headers["X-Coatcheck-Affinity"]) != "cached":
        assert how == "stored"
        assert time.monotonic() < give_up
        time.sleep(0.05)
        answers.append(ask(first, session))
    assert len({answer.headers["X-Coatcheck-Worker"] for answer in answers}) == 1
    assert cached_tokens(answers[0]) == 0
    assert cached_tokens(answers[1]) > 0

    final = ask(second, session, **{"X-Dynamo-Session-Final": "true"})
    assert final.headers["X-Coatcheck-Worker"] == answers[0].headers["X-Coatcheck-Worker"]
    assert ask(first, session).headers["X-Coatcheck-Affinity"] == "created"


def test_the_printed_commands_work_as_they_are_printed(shared: Up) -> None:
    assert "\x1b" not in shared.text  # output that is not for a terminal is plain
    curls = re.findall(r"^curl .*$", shared.text, re.MULTILINE)
    assert len(curls) == 3
    said = [bash(command) for command in curls]
    assert '"object":"chat.completion"' in said[0]
    workers = [re.findall(r"^x-coatcheck-worker: (\S+)", text, re.MULTILINE | re.IGNORECASE) for text in said[1:]]
    assert workers[0] == workers[1] != []
    assert re.search(r'"cached_tokens":[1-9]', said[2])

    snippet = re.search(r"^\S*python\S* - <<'END'\n.*^END$", shared.text, re.MULTILINE | re.DOTALL)
    assert snippet
    assert "usage" in bash(snippet[0]).lower()

    top = re.search(r"^  page .*/admin/  or  (.*) top --url http://\S+$", shared.text, re.MULTILINE)
    assert top
    assert "coatcheck" in bash(f"{top[1]} --version")


def test_the_readmes_commands_work_as_they_are_written(shared: Up) -> None:
    """In their order; only the ports are those of this run."""
    with_a_store_that_answers(lambda _: the_readmes_commands_work(shared))


def the_readmes_commands_work(shared: Up) -> None:
    said = run_blocks(ROOT / "README.md", shared)
    if any(re.search(r"^x-coatcheck-affinity: degraded", text, re.MULTILINE | re.IGNORECASE) for text in said):
        raise Degraded
    plain, first, second, streamed, final = said
    assert '"object":"chat.completion"' in plain

    def header(text: str, name: str) -> str:
        found = re.search(rf"^{name}: (\S+)", text, re.MULTILINE | re.IGNORECASE)
        assert found, text
        return found[1]

    assert len({header(text, "X-Coatcheck-Worker") for text in (first, second, final)}) == 1
    assert [header(text, "X-Coatcheck-Affinity") for text in (first, second)] == ["created", "stored"]
    assert re.search(r'"cached_tokens":[1-9]', second)
    assert streamed.strip()
    assert ask(shared.replicas[1], "ticket-42").headers["X-Coatcheck-Affinity"] == "created"


def test_the_documents_commands_work_as_they_are_written(shared: Up) -> None:
    said = {page.name: run_blocks(page, shared) for page in ROOT.glob("docs/*.md")}
    table, figures = said["simulate.md"]
    assert [line.split()[0] for line in table.splitlines()] == ["policy", "least-loaded", "turns", "oracle"]
    assert '"split_sessions": 0' in figures
    (dry_run,) = said["operating.md"]
    assert re.search(r'"worker":"w-\w{10}"', dry_run)


def run_blocks(page: Path, up: Up) -> list[str]:
    """What the blocks of a page that are marked `bash` or `python` print."""
    said = []
    for language, text in re.findall(r"^```(bash|python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for number, url in enumerate(up.replicas):
            text = text.replace(f"http://127.0.0.1:{8000 + number}", url)
        said.append(bash(text if language == "bash" else f"{shlex.quote(sys.executable)} - <<'END'\n{text}END\n"))
    return said


def bash(script: str) -> str:
    # A `coatcheck` in it is the one beside this interpreter.
    environment = without_proxies() | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def test_ctrl_c_stops_everything_even_while_turns_run(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL, *own_ports(), "--itl-ms", "5000") as it:
        assert len(it.children) == 2
        body = {**QUESTION, "stream": True}
        with (
            httpx.Client(trust_env=False, verify=False) as client,
            client.stream("POST", f"{it.replicas[0]}/v1/chat/completions", json=body) as stream,
        ):
            next(stream.iter_lines())
            it.stop(signal.SIGINT)
        assert it.process.returncode == 0
        assert not any(map(alive, it.children))


def test_nothing_outlives_up_when_it_is_killed_and_taken_ports_are_replaced(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
        it = stack.enter_context(up(tmp_path, *SMALL, "--port", str(taken[0]), "--worker-port", str(taken[1])))
        for port in taken:
            assert f"Port {port} is taken" in it.text
            assert f":{port}" not in "".join([*it.replicas, *it.workers])
        ask(it.replicas[0], "s1")

        it.process.kill()
        it.process.wait()
        assert gone(it.children, within=10)


def test_one_that_dies_stops_all_with_1(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL, *own_ports()) as it:
        os.kill(it.children[0], signal.SIGKILL)
        assert it.process.stdout is not None
        said = it.process.stdout.read()
        assert it.process.wait(20) == 1
        assert "was killed by SIGKILL" in said
        assert gone(it.children, within=10)


def gone(pids: list[int], *, within: float) -> bool:
    give_up = time.monotonic() + within
    while any(map(alive, pids)):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]
