"""The deployment of `docker-compose.yml`, run as processes: the same commands, health checks and nginx.conf, in which
only `service:port` is replaced by a free port on the loopback. No container is needed, and no nginx: where there is
none, a balancer of our own stands in for it and nginx.conf is still read and checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import itertools
import json
import os
import re
import selectors
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import SETTINGS
from app.sources import read_settings
from tests.e2e.conftest import new_session
from tests.support.etcd import ETCD_BINARIES, ETCDCTL
from tests.support.fronts import NGINX, nginx_text
from tests.support.processes import (
    START_LIMIT,
    STOP_LIMIT,
    Process,
    Processes,
    Replica,
    Worker,
    clear_faults,
    metrics,
    order_fault,
    total,
    turns,
)
from tests.support.tcp import free_ports
from tests.support.wire import Answer, Cut, Wire, ask, turn

REPO = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((REPO / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = {k: v for k, v in COMPOSE["services"].items() if "profiles" not in v}
PROFILED: dict[str, dict[str, Any]] = {k: v for k, v in COMPOSE["services"].items() if "profiles" in v}
"""Those that are started only when asked for; not run here."""
DOCKERFILE = (REPO / "Dockerfile").read_text()
NGINX_CONF = (REPO / "deploy" / "nginx.conf").read_text()
pytestmark = pytest.mark.timeout(300)  # eight services start before the first test

DONE = b"data: [DONE]"
FRONT = "nginx"
FRONT_PORT = 8080
ETCD_PEER_PORT = 2380


def services_that(command: str) -> list[str]:
    """Those whose command line begins with `command`."""
    return [name for name, service in SERVICES.items() if service.get("command", [""])[0] == command]


REPLICAS, WORKERS = services_that("serve"), services_that("mock")


# --- compose, as processes -------------------------------------------------------------------------------------------


class Stack:
    """The services of docker-compose.yml, each started when those that it depends on are healthy."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._folder = processes.folder
        self._ports: dict[tuple[str, int], int] = {}
        self.processes: dict[str, Process] = {}
        self._balancer: _Balancer | None = None

    def __enter__(self) -> Stack:
        self.start(*SERVICES)
        return self

    def __exit__(self, *_: object) -> None:
        """Those in front first, so that no one misses what it depends on."""
        if self._balancer is not None:
            self._balancer.stop()
        for name in (FRONT, *REPLICAS):
            if name in self.processes:
                self.processes[name].terminate()
        for name in REPLICAS:
            if name in self.processes:
                self.processes[name].wait(STOP_LIMIT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port(FRONT, FRONT_PORT)}"

    @property
    def workers(self) -> list[Worker]:
        return [Worker(name, f"http://127.0.0.1:{self._port(name, 9001)}", self.processes[name]) for name in WORKERS]

    @property
    def replicas(self) -> list[Replica]:
        return [Replica(f"http://127.0.0.1:{self._port(name, 8000)}", self.processes[name]) for name in REPLICAS]

    def start(self, *names: str) -> None:
        """Start services after those that they depend on; returns when all are healthy. Passes over running ones."""
        needed: set[str] = set()
        for name in filter(self._is_absent, names):
            for other, terms in SERVICES[name].get("depends_on", {}).items():
                assert terms["condition"] == "service_healthy"
                needed.add(other)
        if needed:
            self.start(*sorted(needed))
        absent = list(filter(self._is_absent, names))
        for name in absent:
            self._launch(name)
        for name in absent:
            self._wait_healthy(name)

    def stop(self, name: str) -> int:
        """As `docker compose stop`: SIGTERM, and the grace period that the service asks for. Answers the exit code."""
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(_seconds(SERVICES[name]["stop_grace_period"]))

    def is_healthy(self, name: str) -> bool:
        check = SERVICES[name]["healthcheck"]
        return self.run_health_check(name, check["test"], _seconds(check["timeout"]))

    def run_health_check(self, name: str, test: Sequence[str], limit: float) -> bool:
        assert test[0] == "CMD", "the images have no shell in common"
        program, *arguments = (self.translate(name, word) for word in test[1:])
        known = {"python": sys.executable, "etcdctl": str(ETCDCTL)}
        found = known.get(program) or shutil.which(program)
        if found is None:
            return _answers(arguments[-1])  # a fetcher that this machine does not have
        done = subprocess.run(
            [found, *arguments], env=os.environ | {"ETCDCTL_API": "3"}, capture_output=True, timeout=5 * limit
        )
        return done.returncode == 0

    def translate(self, name: str, text: str) -> str:
        """`text` of this service with its places on the loopback."""
        text = text.replace("/var/lib/etcd", str(self._folder / "etcd"))
        text = re.sub(r"^--port=(\d+)$", lambda found: f"--port={self._port(name, int(found[1]))}", text)
        text = re.sub(r"(?<==)0\.0\.0\.0$", "127.0.0.1", text)
        places = "|".join(map(re.escape, SERVICES))
        return re.sub(
            rf"\b(?:({places})|0\.0\.0\.0|127\.0\.0\.1):(\d+)",
            lambda found: f"127.0.0.1:{self._port(found[1] or name, int(found[2]))}",
            text,
        )

    def nginx_conf(self) -> Path:
        """nginx.conf with our places, and the temporary files of whoever runs the tests."""
        text = self.translate(FRONT, NGINX_CONF)
        text = text.replace(f"listen {FRONT_PORT};", f"listen 127.0.0.1:{self._port(FRONT, FRONT_PORT)};")
        path = self._folder / "nginx.conf"
        path.write_text(nginx_text(text, self._folder))
        return path

    def nginx_command(self) -> list[str]:
        # One process that dies with us; as root it would give its worker a user who cannot read our folder.
        extra = f"pid {self._folder / 'nginx.pid'}; daemon off; master_process off;"
        assert NGINX is not None
        return [NGINX, "-p", str(self._folder), "-c", str(self.nginx_conf()), "-g", extra]

    def _is_absent(self, name: str) -> bool:
        return name not in self.processes and not (name == FRONT and self._balancer)

    def _launch(self, name: str) -> None:
        if name == FRONT and NGINX is None:
            places = [("127.0.0.1", self._port(replica, 8000)) for replica in REPLICAS]
            self._balancer = _Balancer(self._port(FRONT, FRONT_PORT), places)
            return
        log = self._folder / f"{len(self._processes.all)}-{name}.log"
        process = self.processes[name] = Process(name, self._command(name), log)
        self._processes.all.append(process)

    def _wait_healthy(self, name: str) -> None:
        give_up_at = time.monotonic() + START_LIMIT
        process = self.processes.get(name)
        # A check is a process of its own: those that are sure to fail would only make the services slower to start.
        while not (self._listens(name) and self.is_healthy(name)):
            assert process is None or process.alive, f"{name} has ended:\n{process.output()}"
            assert time.monotonic() < give_up_at, f"{name} does not get healthy:\n{process and process.output()}"
            time.sleep(0.05)

    def _listens(self, name: str) -> bool:
        place = next(place for place in self._ports if place[0] == name)
        try:
            socket.create_connection(("127.0.0.1", self._port(*place)), timeout=5).close()
        except OSError:
            return False
        return True

    def _command(self, name: str) -> list[str]:
        if name == FRONT:
            return self.nginx_command()
        command = [self.translate(name, word) for word in SERVICES[name]["command"]]
        if name == "etcd":
            assert Path(command[0]).name == "etcd"
            peers = (
                f"http://127.0.0.1:{self._port(name, ETCD_PEER_PORT)}"  # in a container of its own, the default does
            )
            own = [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
            cluster = [f"--initial-cluster=etcd={peers}", "--unsafe-no-fsync"]
            return [str(ETCD_BINARIES["etcd-3.5"]), *command[1:], *own, *cluster]
        return [sys.executable, "-m", "app", *command]

    def _port(self, name: str, port: int) -> int:
        if (name, port) not in self._ports:
            (self._ports[name, port],) = free_ports(1)
        return self._ports[name, port]


class _Balancer:
    """Round robin by connection: what is left of nginx's part where there is no nginx."""

    def __init__(self, port: int, places: Sequence[tuple[str, int]]) -> None:
        turn_of = itertools.cycle(range(len(places)))
        lock = threading.Lock()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with lock:
                    first = next(turn_of)
                for step in range(len(places)):
                    with contextlib.suppress(OSError):
                        upstream = socket.create_connection(places[(first + step) % len(places)], timeout=5)
                        break
                else:
                    return
                with upstream, contextlib.suppress(OSError):
                    upstream.settimeout(None)
                    _pump(self.request, upstream)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _pump(client: socket.socket, upstream: socket.socket) -> None:
    """Bytes both ways, until either side ends."""
    with selectors.DefaultSelector() as ready:
        ready.register(client, selectors.EVENT_READ, upstream)
        ready.register(upstream, selectors.EVENT_READ, client)
        while True:
            for key, _ in ready.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(65536)
                if not data:
                    return
                key.data.sendall(data)


def _seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def stack(module_processes: Processes) -> Iterator[Stack]:
    with Stack(module_processes) as stack:
        yield stack


# --- turns through the front -----------------------------------------------------------------------------------------


async def where(stack: Stack, sessions: Sequence[str]) -> dict[str, list[str]]:
    """The workers of each session's turns, by the workers' own records."""
    found: dict[str, list[str]] = {session: [] for session in sessions}
    for worker in stack.workers:
        for record in await turns(worker):
            if record["session"] in found:
                found[record["session"]].append(worker.name)
    return found


async def talk(stack: Stack, session: str, count: int, **options: Any) -> list[Answer]:
    """A session's turns, one after the other, each on a connection of its own."""
    return [await turn(stack.url, session=session, **options) for _ in range(count)]


async def turns_taken(stack: Stack) -> list[float]:
    return [total(await metrics(replica), "coatcheck_turns_total") for replica in stack.replicas]


async def test_sessions_stay_at_their_worker_while_the_front_alternates_between_replicas(stack: Stack) -> None:
    before = await turns_taken(stack)
    sessions = [new_session() for _ in range(40)]
    answers = await asyncio.gather(*(talk(stack, session, 3) for session in sessions))
    assert {answer.status for each in answers for answer in each} == {200}
    served = await where(stack, sessions)
    assert {len(workers) for workers in served.values()} == {3}
    assert [session for session, workers in served.items() if len(set(workers)) > 1] == []
    for session, each in zip(sessions, answers, strict=True):
        assert {answer.worker for answer in each} == set(served[session])
    assert len({workers[0] for workers in served.values()}) == len(WORKERS)
    taken = [after - earlier for after, earlier in zip(await turns_taken(stack), before, strict=True)]
    assert sum(taken) == 120
    assert min(taken) >= 40, f"the front does not alternate: {taken}"


async def test_tokens_come_through_the_front_while_later_ones_are_being_made(stack: Stack) -> None:
    session = new_session()
    async with await Wire.to(stack.url) as wire:
        wire.chat(session=session, stream=True, tokens=100)
        assert (await wire.head()).status == 200
        await wire.read()
        first_at = time.time()
        await wire.until(DONE)
    (record,) = [record for worker in stack.workers for record in await turns(worker, session)]
    assert record["completion_tokens"] == 100
    # A hundred tokens take half a second; any buffer in between would have kept the first until the end.
    assert first_at < record["end"] - 0.1


async def test_a_final_turn_closes_its_claim_for_both_replicas(stack: Stack) -> None:
    session = new_session()
    opening = await talk(stack, session, 4)
    assert opening[0].affinity == "created"
    assert "created" not in [answer.affinity for answer in opening[1:]]
    (final,) = await talk(stack, session, 1, final=True)
    assert final.worker == opening[0].worker
    assert [answer.affinity for answer in await talk(stack, session, 1)] == ["created"]


async def test_a_broken_stream_does_not_become_a_complete_one_on_its_way_through_the_front(stack: Stack) -> None:
    session = new_session()
    (opening,) = await talk(stack, session, 1)
    worker = next(worker for worker in stack.workers if worker.name == opening.worker)
    await order_fault(worker, mode="reset", after_tokens=3)
    async with await Wire.to(stack.url) as wire:
        wire.chat(session=session, stream=True, tokens=50)
        await wire.head()
        got = await wire.until(b'"error"')
        with pytest.raises(Cut):
            got += await wire.body()
    assert DONE not in got


async def test_a_body_of_the_largest_size_passes_and_a_larger_one_is_refused_in_openais_shape(stack: Stack) -> None:
    limit = SETTINGS["max_body_bytes"].field.default
    filling = "x" * (limit - 4096)
    assert (await turn(stack.url, content=filling)).status == 200
    refused = await ask(stack.url, "POST", "/v1/chat/completions", [("content-length", str(limit + 1))])
    assert refused.status == 413
    assert refused.json["error"]["code"] == "request_too_large"


async def test_a_head_up_to_the_routers_limit_passes_and_the_router_refuses_what_is_above_it(stack: Stack) -> None:
    limit = SETTINGS["max_header_bytes"].field.default
    for filling, status in ((limit - 1500, 400), (limit + 2000, 431)):
        for target, headers in (("/v1/x", [("x-long", "x" * filling)]), ("/v1/x?" + "q" * filling, [])):
            answer = await ask(stack.url, "POST", target, [("x-dynamo-session-id", "a b"), *headers], b"{}")
            assert (answer.status, answer.json["error"]["code"][:5]) == (status, "head_" if status == 431 else "inval")


async def test_restarting_one_replica_after_the_other_loses_no_turn_and_moves_no_session(stack: Stack) -> None:
    sessions = [new_session() for _ in range(20)]
    await asyncio.gather(*(talk(stack, session, 1) for session in sessions))
    for worker in stack.workers:
        await order_fault(worker, mode="slow", itl_ms=20, times=None)  # four seconds a stream
    streams = [asyncio.create_task(_stream(stack, session)) for session in sessions]
    give_up_at = time.monotonic() + 30
    while await _running(stack) < len(sessions):
        assert time.monotonic() < give_up_at, "the streams do not run at once"
    for worker in stack.workers:
        await clear_faults(worker)
    for name in REPLICAS:
        assert await asyncio.to_thread(stack.stop, name) == 0
        try:
            answers = await asyncio.gather(*(talk(stack, session, 2) for session in sessions))
        finally:
            await asyncio.to_thread(stack.start, name)
        assert {answer.status for each in answers for answer in each} == {200}
        while not min(await turns_taken(stack)):  # until the front has noticed that the replica is back
            assert (await turn(stack.url)).status == 200
    for body in await asyncio.gather(*streams):
        assert DONE in body
    served = await where(stack, sessions)
    assert {len(workers) for workers in served.values()} == {2 + 2 * len(REPLICAS)}
    assert [session for session, workers in served.items() if len(set(workers)) > 1] == []


async def _stream(stack: Stack, session: str) -> bytes:
    async with await Wire.to(stack.url) as wire:
        wire.chat(session=session, stream=True, tokens=200)
        await wire.head()
        return await wire.body()


async def _running(stack: Stack) -> int:
    return sum([(await ask(worker.url, target="/mock/state")).json["active"] for worker in stack.workers])


# --- what the files say ----------------------------------------------------------------------------------------------


def test_every_service_is_checked_restarted_and_waited_for() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert "environment" not in service, f"{name}: what is set there is easily a secret"
        assert "build" in service or re.fullmatch(r"\S+:v?\d[\w.-]+", service["image"]), f"{name}: pin the image"
    assert set(SERVICES[FRONT]["depends_on"]) == set(REPLICAS)
    for name in REPLICAS:
        assert set(SERVICES[name]["depends_on"]) == {*WORKERS, "etcd"}
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published == [f"127.0.0.1:{FRONT_PORT}:{FRONT_PORT}"]
    for name, service in PROFILED.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for other, terms in service.get("depends_on", {}).items():
            assert terms == {"condition": "service_healthy"}
            assert {*COMPOSE["services"][other].get("profiles", service["profiles"])} == {*service["profiles"]}
    mounted = [volume for each in COMPOSE["services"].values() for volume in each.get("volumes", ())]
    assert {volume.split(":")[0] for volume in mounted if not volume.startswith(".")} == set(COMPOSE["volumes"])
    for volume in mounted:
        assert not volume.startswith(".") or (REPO / volume.split(":")[0]).exists(), volume


def test_prometheus_scrapes_every_replica_and_worker_and_grafana_asks_it() -> None:
    folder = REPO / "deploy"
    config = yaml.safe_load((folder / "prometheus" / "prometheus.yaml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert targets["coatcheck"] == [f"{name}:{_flags(name)['port'][0]}" for name in REPLICAS]
    assert targets["workers"] == [f"{name}:{_flags(name)['port'][0]}" for name in WORKERS]
    assert all((folder / "prometheus" / file).exists() for file in config["rule_files"])
    sources = yaml.safe_load((folder / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    assert [source["url"] for source in sources["datasources"]] == ["http://prometheus:9090"]
    boards = yaml.safe_load((folder / "grafana" / "provisioning" / "dashboards" / "coatcheck.yaml").read_text())
    (board,) = [volume for volume in PROFILED["grafana"]["volumes"] if volume.endswith(".json:ro")]
    assert Path(board.split(":")[1]).parent == Path(boards["providers"][0]["options"]["path"])


def test_the_router_before_vllm_takes_its_options() -> None:
    service = PROFILED["router-vllm"]
    flags: dict[str, Any] = _flags("router-vllm")
    lists = {name for name in flags if SETTINGS[name].field.annotation == tuple[str, ...]}
    settings = read_settings({k: v if k in lists else v[0] for k, v in flags.items()}).settings
    assert settings.workers.worker == ("http://vllm:8000,name=vllm",)
    assert settings.process.drain_delay + settings.process.drain_timeout < _seconds(service["stop_grace_period"])
    assert "--port=8000" in PROFILED["vllm"]["command"]


def test_replicas_differ_in_nothing_and_get_the_time_that_they_drain() -> None:
    assert len(REPLICAS) >= 2
    assert len({json.dumps(SERVICES[name], sort_keys=True) for name in REPLICAS}) == 1
    flags = _flags(REPLICAS[0])
    limit = float(flags["drain_timeout"][0]) + float(flags.get("drain_delay", ["0"])[0])
    assert _seconds(SERVICES[REPLICAS[0]]["stop_grace_period"]) > limit
    named = {url.partition(",name=")[0]: url.partition(",name=")[2] for url in flags["worker"]}
    assert named == {f"http://{name}:{_flags(name)['port'][0]}": name for name in WORKERS}


def test_a_health_check_fails_when_nobody_answers(stack: Stack) -> None:
    for name in (REPLICAS[0], WORKERS[0], "etcd"):
        check = SERVICES[name]["healthcheck"]["test"]
        nowhere = [re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:1", word) for word in check]
        assert not stack.run_health_check(name, nowhere, 5)


def test_the_image_is_built_from_what_the_package_needs_and_runs_as_nobody() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    lines = re.sub(r"\\\n\s*", " ", DOCKERFILE).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    sources = {source for word, rest in steps if word == "COPY" for source in rest.split()[:-1]}
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {*(name.removesuffix("*") for name in packages), "pyproject.toml", "constraints.txt"}
    assert sources == needed | {project["project"]["readme"], *project["project"]["license-files"]}
    ignore = (REPO / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == sources
    assert not any(fnmatch.fnmatch(source, line) for source in sources for line in ignore if line.startswith("**"))
    by_word = Counter(word for word, _ in steps)
    last = dict(steps)
    assert by_word["FROM"] == by_word["USER"] == by_word["ENTRYPOINT"] == 1
    assert last["FROM"] == "python:3.11-slim"
    assert int(last["USER"]) > 0
    assert json.loads(last["ENTRYPOINT"]) == ["coatcheck"]
    assert "coatcheck" in project["project"]["scripts"]
    assert "-c constraints.txt" in last["RUN"]


def test_nginx_conf_fits_the_services_and_keeps_streams_and_turns_whole() -> None:
    http = _block(_parse(NGINX_CONF), "http")
    upstream, server = _block(http, "upstream"), _block(http, "server")
    defaults = {name: setting.field.default for name, setting in SETTINGS.items()}
    flags = _flags(REPLICAS[0])
    servers = [words[1:] for words, _ in upstream if words[0] == "server"]
    addresses = sorted(f"{name}:{_flags(name)['port'][0]}" for name in REPLICAS)
    for last in (False, True):
        assert sorted(words[0] for words in servers if ("backup" in words) is last) == addresses
    assert _value(server, "listen") == str(FRONT_PORT)
    assert _value(server, "proxy_http_version") == "1.1"
    assert _value(server, "proxy_buffering") == "off"
    assert ["proxy_set_header", "Connection", "$connection_header"] in [words for words, _ in server]
    maps = {words[2]: {each[0]: each[1] for each, _ in block} for words, block in http if words[0] == "map"}
    for name, value in (("$connection_header", "upgrade"), ("$upgrade_header", "websocket")):
        assert maps[name] == {"default": '""', '"~*^websocket$"': value}, "others keep their connections"
    assert _value(server, "underscores_in_headers") == "on"
    number, size = _value(server, "large_client_header_buffers").split()
    assert int(number) * int(size[:-1]) > defaults["max_header_bytes"] >> 10
    assert int(size[:-1]) > defaults["max_header_bytes"] >> 10
    assert all("resolve" in words for words, _ in upstream if words[0] == "server"), "names are looked up again"
    assert _value(http, "resolver").startswith("127.0.0.11 "), "Docker's"
    own = {status: words[-1] for words, _ in server if words[0] == "error_page" for status in words[1:-1]}
    assert {"400", "404", "408", "413", "414", "494", "500", "501", "502", "503", "504"} <= set(own)
    errors = {words[-1]: block for words, block in _block(server, "location /nginx-error/") if words[0] == "location"}
    for page in own.values():
        ((status, text),) = [words[1:] for words, _ in errors[page] if words[0] == "return"]
        error = json.loads(text.strip("'").replace("\\n", ""))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert page == f"/nginx-error/{status}"
    assert "max_body_bytes" not in flags
    assert _value(server, "client_max_body_size") == f"{defaults['max_body_bytes'] >> 20}m"
    assert _seconds(_value(server, "proxy_read_timeout")) > defaults["first_byte_timeout"]
    assert _seconds(_value(server, "proxy_read_timeout")) > defaults["idle_timeout"]
    assert _seconds(_value(upstream, "keepalive_timeout")) < defaults["keepalive_timeout"]
    # A POST that was sent is never sent again.
    assert _value(server, "proxy_next_upstream").split() == ["error", "timeout"]
    proxied = [words[1:] for words, block in server if words[0] == "location" and ["proxy_pass"] in _names(block)]
    assert proxied == [["/v1/"], ["=", "/ready"]], "metrics and administration are not for clients"


def test_nginx_takes_its_configuration(stack: Stack) -> None:
    if NGINX is None:
        _parse(stack.nginx_conf().read_text())  # the braces at least
        return
    done = subprocess.run([*stack.nginx_command(), "-t"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "emerg" not in done.stderr


def _flags(name: str) -> dict[str, list[str]]:
    """Option → values, of a service's command line."""
    found: dict[str, list[str]] = {}
    for word in COMPOSE["services"][name]["command"][1:]:
        option, _, value = word.removeprefix("--").partition("=")
        found.setdefault(option.replace("-", "_"), []).append(value)
    return found


Directives = list[tuple[list[str], Any]]


def _parse(text: str) -> Directives:
    """nginx's syntax: (words, block or None) each."""
    tokens = re.findall(r"#[^\n]*|'[^']*'|\"[^\"]*\"|[{};]|[^\s{};]+", text)
    stack: list[Directives] = [[]]
    words: list[str] = []
    for token in tokens:
        if token.startswith("#"):
            continue
        if token == ";":
            assert words
            stack[-1].append((words, None))
            words = []
        elif token == "{":
            block: Directives = []
            stack[-1].append((words, block))
            stack.append(block)
            words = []
        elif token == "}":
            assert not words, f"no semicolon after {' '.join(words)}"
            stack.pop()
        else:
            words.append(token)
    assert len(stack) == 1
    assert not words
    return stack[0]


def _block(directives: Directives, name: str) -> Directives:
    (block,) = [block for words, block in directives if name in (words[0], " ".join(words))]
    assert isinstance(block, list)
    return block


def _value(directives: Directives, name: str) -> str:
    (words,) = [words for words, _ in directives if words[0] == name]
    return " ".join(words[1:])


def _names(block: Directives) -> list[list[str]]:
    return [words[:1] for words, _ in block]
