"""What nginx, HAProxy and Envoy do in front of replicas with the files of `deploy/`, each where it is installed. The
replicas are scripted, so that what reached which of them is known; nginx before real ones: test_deploy.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest
import yaml

from app.config import SETTINGS
from tests.support.fronts import CONF, INSTALLED, RESOLVES_FROM, front_command, nginx_version
from tests.support.nameserver import NameServer
from tests.support.processes import Process, Processes, wait_until
from tests.support.wire import Answer, Wire, ask

pytestmark = pytest.mark.timeout(120)
LIMIT = SETTINGS["max_header_bytes"].field.default
JSON = [("content-type", "application/json")]
LOOKS_UP_AGAIN = [
    name for name in INSTALLED if name == "haproxy" or (name == "nginx" and nginx_version() >= RESOLVES_FROM)
]
"""Of these; how Envoy is told of a name server is not worth a test, and an older nginx cannot."""
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class ScriptedReplica:
    """Answers what its path asks for, and keeps every head that it was sent but those of `/ready`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.heads: list[bytes] = []
        self.ready = True
        self.checks = 0
        """How often it was asked for that."""
        self.left = asyncio.Event()
        """The client of a `/v1/hang` has gone."""
        self.go = asyncio.Event()
        """Lets `/v1/stream` end."""
        self.host, self.port = host, port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._connected, self.host, self.port, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in tuple(self._writers):  # also of a task that was cancelled before it began
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            self._writers.clear()
            self._server = None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._answer(reader, writer):
                    pass
        except asyncio.CancelledError:
            pass  # the end of the test
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].partition(b"?")[0]
        lines = head.lower().split(b"\r\n")
        length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")), 0)
        await reader.readexactly(length)
        if path == b"/ready":
            self.checks += 1
            writer.write(OK if self.ready else b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n")
            return True
        self.heads.append(head)
        if path == b"/v1/break":
            return False
        if path == b"/v1/own-error":
            writer.write(b"HTTP/1.1 503 X\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nours")
        elif path == b"/v1/websocket":
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n")
            writer.write(b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n")
            while data := await reader.read(1000):
                writer.write(data.upper())
            return False
        elif path == b"/v1/hang":
            with contextlib.suppress(ConnectionError):
                await reader.read(1)
            self.left.set()
            return False
        elif path == b"/v1/stream":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await self.go.wait()
            writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        else:
            writer.write(OK)
        return True


class Front:
    def __init__(self, name: str, url: str, replicas: list[ScriptedReplica]) -> None:
        self.name, self.url, self.replicas = name, url, replicas

    @property
    def heads(self) -> list[bytes]:
        """Of what reached any replica."""
        return [head for replica in self.replicas for head in replica.heads]

    async def post(self, path: str = "/v1/chat/completions", headers: list[tuple[str, str]] = JSON) -> Answer:
        return await ask(self.url, "POST", path, headers, b"{}")


def _free_port() -> int:
    """Below the range from which the kernel takes ports for connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as holder, contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", port))
            return port


@pytest.fixture(params=INSTALLED)
async def front(request: pytest.FixtureRequest, processes: Processes, tmp_path: Path) -> AsyncIterator[Front]:
    replicas = [await ScriptedReplica().start() for _ in range(2)]
    front = await _started(request.param, processes, tmp_path, replicas)
    yield front
    for process in processes.all:
        process.terminate()
    for replica in replicas:
        await replica.stop()


async def _started(
    name: str, processes: Processes, folder: Path, replicas: list[ScriptedReplica], names: str = ""
) -> Front:
    """`names`: the address of a name server that knows `replica-1.test` and so on."""
    port = _free_port()
    command = front_command(name, folder, port, [replica.port for replica in replicas], names)
    process = Process(name, command, folder / "front.log")
    processes.all.append(process)
    front = Front(name, f"http://127.0.0.1:{port}", replicas)

    async def is_up() -> bool:
        assert process.alive, process.output()
        with contextlib.suppress(OSError, EOFError, Exception):
            return (await ask(front.url, target="/ready")).status == 200
        return False

    await wait_until(is_up, 30)
    return front


def in_openais_shape(answer: Answer) -> bool:
    error = answer.json["error"]
    return set(error) == {"message", "type", "param", "code"} and (answer.get("content-type") or "").startswith(
        "application/json"
    )


async def test_only_turns_and_readiness_pass(front: Front) -> None:
    assert (await front.post()).status == 200
    for path in ("/metrics", "/admin/workers", "/", "/nginx-error/502", "/v2/x"):
        answer = await ask(front.url, target=path)
        assert answer.status == 404, path
        assert in_openais_shape(answer)
    assert len(front.heads) == 1


async def test_a_replica_that_cannot_be_connected_to_is_passed_over(front: Front) -> None:
    await front.replicas[0].stop()
    assert {(await front.post()).status for _ in range(8)} == {200}
    assert len(front.replicas[1].heads) == 8


@pytest.mark.parametrize("name", LOOKS_UP_AGAIN)
async def test_a_replica_that_has_got_another_address_is_found(name: str, processes: Processes, tmp_path: Path) -> None:
    """As a container that was started anew; both replicas are one here, so that no other one takes its turns."""
    before = await ScriptedReplica().start()
    now = await ScriptedReplica("127.0.0.2", before.port).start()
    with NameServer() as names:
        names.records = {(f"replica-{number}.test", "A"): [before.host] for number in (1, 2)}
        front = await _started(name, processes, tmp_path, [before, before], names.address)
        assert (await front.post()).status == 200
        assert len(before.heads) == 1
        assert not now.heads
        names.records = {key: [now.host] for key in names.records}
        await before.stop()
        await wait_until(lambda: _answers(front), 60)
        assert {(await front.post()).status for _ in range(4)} == {200}
        assert len(now.heads) == 5
    processes.all[-1].terminate()
    await now.stop()


async def test_where_none_seems_well_turns_are_tried_all_the_same(front: Front) -> None:
    """One restarts, and the other was too busy to say that it is ready, or has broken a turn."""
    gone, other = front.replicas
    await gone.stop()
    other.ready = False
    if front.name != "nginx":  # which does not ask
        checks = other.checks
        await wait_until(lambda: other.checks >= checks + 4, 30)
    for _ in range(3):
        assert (await front.post("/v1/break")).status in (502, 503)
        assert (await front.post()).status == 200


async def test_with_no_replica_the_error_has_openais_shape(front: Front) -> None:
    for replica in front.replicas:
        await replica.stop()
    for _ in range(2):
        answer = await front.post()
        assert answer.status in (502, 503)
        assert in_openais_shape(answer)


async def test_a_turn_that_was_sent_is_not_sent_again(front: Front) -> None:
    for number in range(4):
        answer = await front.post(f"/v1/break?{number}")
        assert answer.status in (502, 503)
        assert in_openais_shape(answer)
    await wait_until(lambda: _answers(front), 30)  # nginx passes both over for a second now
    # On a connection that was kept, too.
    await asyncio.gather(*(front.post() for _ in range(8)))
    assert (await front.post("/v1/break?kept")).status in (502, 503)
    tried = Counter(head.split(b" ")[1] for head in front.heads if b"/v1/break" in head)
    assert tried[b"/v1/break?0"] == tried[b"/v1/break?kept"] == 1
    assert set(tried.values()) == {1}


async def _answers(front: Front) -> bool:
    return (await front.post()).status == 200


async def test_errors_of_the_replicas_pass_as_they_are(front: Front) -> None:
    answer = await front.post("/v1/own-error")
    assert (answer.status, answer.get("retry-after"), answer.body) == (503, "7", b"ours")
    assert len(front.heads) == 1, "a 503 is not tried elsewhere: the replica was asked"


async def test_a_websocket_is_opened_and_carries_bytes_both_ways(front: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    with contextlib.closing(writer):
        writer.write(b"GET /v1/websocket HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n")
        writer.write(b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert answer.startswith(b"HTTP/1.1 101 ")
        writer.write(b"shout")
        assert await asyncio.wait_for(reader.readexactly(5), 10) == b"SHOUT"
    (head,) = front.heads
    assert b"upgrade: websocket" in head.lower()


async def test_another_offer_is_not_taken_and_costs_no_connection(front: Front) -> None:
    h2c = [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "AAMAAABkAAQAAP__")]
    assert (await front.post(headers=[*JSON, *h2c])).status == 200
    (head,) = front.heads
    if front.name == "nginx":
        assert b"upgrade" not in head.lower()


async def test_each_event_comes_as_it_is_sent(front: Front) -> None:
    async with await Wire.to(front.url) as wire:
        wire.request("POST", "/v1/stream", JSON, b"{}")
        assert (await wire.head()).status == 200
        await asyncio.wait_for(wire.until(b"data: 1\n\n"), 10)
        for replica in front.replicas:
            replica.go.set()
        assert b"data: 2" in await wire.body()


async def test_a_client_that_leaves_ends_its_turn(front: Front) -> None:
    async with await Wire.to(front.url) as wire:
        wire.request("POST", "/v1/hang", JSON, b"{}")
        await wait_until(lambda: front.heads, 30)
    await wait_until(lambda: any(replica.left.is_set() for replica in front.replicas), 30)


async def test_headers_pass_with_their_names_and_up_to_the_routers_own_limit(front: Front) -> None:
    assert (await front.post(headers=[*JSON, ("session_id", "s1"), ("x-long", "x" * (LIMIT - 1500))])).status == 200
    (head,) = front.heads
    assert b"session_id: s1" in head.lower()
    assert b"x" * (LIMIT - 1500) in head
    assert b"x-forwarded-for: " in head.lower(), "the replicas must know that this is not the machine itself"
    assert (await front.post("/v1/models?" + "q" * (LIMIT - 1500))).status == 200
    # What is a little above the limit, too: the router says what is wrong with it.
    assert (await front.post(headers=[("x-long", "x" * (LIMIT + 2000))])).status == 200
    many = [(f"x-{number}", "v" * 60) for number in range(400)]
    assert (await front.post(headers=[*JSON, *many])).status == 200


async def test_its_own_refusals_are_in_openais_shape(front: Front) -> None:
    body_limit = SETTINGS["max_body_bytes"].field.default
    if front.name != "envoy":  # there the replicas refuse it
        answer = await ask(front.url, "POST", "/v1/chat/completions", [("content-length", str(body_limit + 1))])
        assert answer.status == 413
        assert in_openais_shape(answer)
    for target, headers in (("/v1/x?" + "q" * 200_000, []), ("/v1/x", [("x-long", "x" * 200_000)])):
        answer = await ask(front.url, "GET", target, headers)
        assert answer.status in (400, 414, 431)
        assert front.name == "haproxy" or in_openais_shape(answer)  # its parser has no other words
    async with await Wire.to(front.url) as wire:
        wire._methods.append("GET")
        wire.write(b"GET /v1/x HTTP/1.1\r\nhost: a\r\nbad header: x\r\n\r\n")
        answer = await wire.answer()
        assert answer.status == 400
        assert front.name == "haproxy" or in_openais_shape(answer)
    assert front.heads == []


# --- what the files say, wherever none of them is installed ----------------------------------------------------------


def test_haproxy_tries_again_only_what_was_not_sent_and_looks_at_readiness() -> None:
    lines = [line.split("#")[0].split() for line in CONF["haproxy"].read_text().splitlines()]
    said = {" ".join(words) for words in lines if words}
    assert {"retry-on conn-failure", "option abortonclose", "option forwardfor", "option httpchk GET /ready"} <= said
    timeouts = {words[1]: words[2] for words in lines if words[:1] == ["timeout"]}
    for name in ("client", "server"):
        assert float(timeouts[name].removesuffix("s")) > SETTINGS["first_byte_timeout"].field.default
    assert f"req.body_size gt {SETTINGS['max_body_bytes'].field.default}" in CONF["haproxy"].read_text()


def test_envoy_tries_again_only_what_was_not_sent_and_looks_at_readiness() -> None:
    said = yaml.safe_load(CONF["envoy"].read_text())["static_resources"]
    (listener,), (cluster,) = said["listeners"], said["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["upgrade_configs"] == [{"upgrade_type": "websocket"}]
    assert float(manager["stream_idle_timeout"][:-1]) > SETTINGS["first_byte_timeout"].field.default
    assert manager["max_request_headers_kb"] * 1024 > LIMIT
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["match"] for route in routes] == [{"prefix": "/v1/"}, {"path": "/ready"}, {"prefix": "/"}]
    for route in routes[:2]:
        assert route["route"]["retry_policy"]["retry_on"] == "connect-failure"
        assert route["route"]["timeout"] == "0s"
    assert [filters["name"] for filters in manager["http_filters"]] == ["envoy.filters.http.router"]
    assert cluster["health_checks"][0]["http_health_check"] == {"path": "/ready"}
    assert cluster["type"] == "STRICT_DNS"
    options = cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    idle = options["common_http_protocol_options"]["idle_timeout"]
    assert float(idle[:-1]) < SETTINGS["keepalive_timeout"].field.default
