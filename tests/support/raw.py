"""A client and a worker that speak bytes, and between them a router as `coatcheck serve` runs it.

Well-behaved clients and servers cannot show how the router takes what is wrong on the wire: odd framing, silence, a
close at a given byte. Both ends here are sockets without any stream in between, so that what came before a reset is not
lost. The router (`Live`) runs in a thread, on a loop of its own, and is known only by its ports: what it is made of may
change without a word here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from app.config import Settings
from app.main import create_app
from app.serve import Server
from tests.support import http_model
from tests.support.http_model import Answer, Incomplete, Request

LIMIT = 10.0
"""Seconds that anything awaited here may take."""
_BLOCK = 1 << 18

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
OK_NORMAL = b"200\r\ncontent-type: application/json\r\n\r\n{}"
"""As `Answer.normal` has it."""
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
POST = b"POST /v1/x HTTP/1.1\r\nhost: r.example\r\n"


def post(*lines: bytes, body: bytes = b"{}", target: bytes = b"/v1/x") -> bytes:
    """A request with a length."""
    head = [b"POST %b HTTP/1.1" % target, b"host: r.example", *lines, b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, b"", body])


def get(target: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"GET %b HTTP/1.1" % target, b"host: r.example", *lines, b"", b""])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class End:
    """One end of a connection. `buffer`: what has come and was not taken."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self.buffer = bytearray()
        self.sent = 0
        """Bytes that the kernel has taken, to a block."""
        self.ended = ""
        """How the other side has ended: "closed" or "reset"; or "left", by `close` or `reset` here."""
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, *pieces: bytes, pause: float = 0.001) -> None:
        """Each piece in a segment of its own, as far as the kernel lets us. Raises ConnectionError."""
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(pause)
            for at in range(0, len(piece), _BLOCK):
                block = piece[at : at + _BLOCK]
                async with asyncio.timeout(LIMIT):
                    await asyncio.get_running_loop().sock_sendall(self.raw, block)
                self.sent += len(block)

    async def more(self, limit: float | None = LIMIT) -> bool:
        """Whether something came. Raises TimeoutError."""
        if self.ended:
            return False
        async with asyncio.timeout(limit):
            try:
                data = await asyncio.get_running_loop().sock_recv(self.raw, _BLOCK)
            except ConnectionError:
                self.ended = "reset"
                return False
        if not data:
            self.ended = "closed"
        self.buffer += data
        return bool(data)

    async def until(self, marker: bytes) -> bytes:
        """What comes up to `marker` and with it. Raises ConnectionError."""
        while (found := self.buffer.find(marker)) < 0:
            if not await self.more():
                raise ConnectionError(f"ended without {marker!r} after {bytes(self.buffer)!r}")
        return self._take(found + len(marker))

    async def skip(self, marker: bytes) -> None:
        """As `until`, but for bytes that are too many to be kept."""
        while marker not in self.buffer:
            del self.buffer[: 1 - len(marker)]
            if not await self.more():
                raise ConnectionError(f"ended without {marker!r}")
        await self.until(marker)

    async def exactly(self, size: int) -> bytes:
        """Raises ConnectionError."""
        while len(self.buffer) < size:
            if not await self.more():
                raise ConnectionError(f"ended after {len(self.buffer)} of {size} bytes")
        return self._take(size)

    async def rest(self, limit: float = LIMIT) -> bytes:
        """Until the other side ends."""
        while await self.more(limit):
            pass
        return self._take(len(self.buffer))

    async def gone(self) -> None:
        """Wait until the other side ends, however long, and whatever it says."""
        while await self.more(None):
            self.buffer.clear()

    def finish_sending(self) -> None:
        self.raw.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.ended = self.ended or "left"
        self.raw.close()

    def reset(self) -> None:
        """Close as a process does that was killed."""
        with contextlib.suppress(OSError):
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def _take(self, size: int) -> bytes:
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        return taken


class Client(End):
    async def answer(self, method: bytes = b"POST") -> Answer:
        """The next answer, which may be cut; by the strict reading, so a malformed one raises."""
        while True:
            try:
                answer, rest = http_model.read_answer(self.buffer, method, bool(self.ended))
            except Incomplete:
                if not await self.more() and not self.buffer:
                    raise ConnectionError(f"the connection was {self.ended} without an answer") from None
            else:
                self.buffer[:] = rest
                return answer

    async def closed(self) -> bool:
        """Whether the router ends the connection with nothing more to say."""
        return await self.rest() == b""


class Peer(End):
    """The worker's end."""

    def __init__(self, raw: socket.socket, worker: Worker, number: int) -> None:
        super().__init__(raw)
        self.worker, self.number = worker, number

    async def request(self) -> Request:
        """The next whole request, by the strict reading. Raises ConnectionError at the end."""
        while True:
            try:
                request, rest = http_model.read_request(self.buffer)
            except Incomplete:
                if not await self.more(LIMIT if self.buffer else None):
                    raise ConnectionError("the router closed the connection") from None
            else:
                self.worker.heads.append(bytes(self.buffer.partition(b"\r\n\r\n")[0]) + b"\r\n\r\n")
                self.buffer[:] = rest
                self.worker.requests.append(request)
                self.worker.carriers.append(self.number)
                return request

    async def head(self) -> bytes:
        """The next request's head alone, noted as one."""
        head = await self.until(b"\r\n\r\n")
        self.worker.heads.append(head)
        return head

    async def chunk(self, *pieces: bytes) -> None:
        """Each piece as one chunk."""
        await self.send(*map(chunk, pieces), pause=0)


Script = Callable[[Peer], Awaitable[None]]


def answers(*pieces: bytes) -> Script:
    """The same to every request."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*pieces)

    return script


def tells(*pieces: bytes, stays: bool = True) -> Script:
    """One answer to one request; then the worker closes, or stays until the router leaves."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces)
        if stays:
            await peer.gone()

    return script


async def echoes(peer: Peer) -> None:
    """Says each request's body back."""
    while True:
        request = await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(request.body), request.body))


def to_each(script: Callable[[Peer, Request], Awaitable[None]]) -> Script:
    """The same script for every request."""

    async def played(peer: Peer) -> None:
        while True:
            await script(peer, await peer.request())

    return played


class Worker:
    """Does exactly what its scripts say: one is played for each connection, which is closed when it ends.

    `scripts`: for the first connections in turn; the last one for all others. `listener`: listens already, and goes on
    to when this has ended, so that many tests can use one router; else the worker has a loopback port of its own.
    """

    def __init__(self, *scripts: Script, listener: socket.socket | None = None) -> None:
        self._scripts = scripts
        self._listener = listener.dup() if listener else socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[Request] = []
        """Whole ones, in the order of their ends."""
        self.carriers: list[int] = []
        """The numbers of the connections that they came by."""
        self.heads: list[bytes] = []
        """As they came; of requests, too, whose body was left to the script."""
        self.peers: list[Peer] = []
        """Every connection that there was."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def normals(self) -> list[bytes]:
        return [request.normal for request in self.requests]

    @property
    def sent(self) -> int:
        return sum(peer.sent for peer in self.peers)

    async def __aenter__(self) -> Self:
        self._spawn(self._accept())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: Any) -> None:
        await self.die()
        if kind is None and self._faults:
            raise self._faults[0]

    async def die(self) -> None:
        """As a process does: nobody listens any more, and its connections are gone. Within a script, that goes on."""
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._listener.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            raw, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            peer = Peer(raw, self, len(self.peers))
            self.peers.append(peer)
            self._spawn(self._play(peer, self._scripts[min(peer.number, len(self._scripts) - 1)]))

    async def _play(self, peer: Peer, script: Script) -> None:
        try:
            await script(peer)
        except ConnectionError:
            pass  # the router may leave at any time
        except Exception as fault:
            self._faults.append(fault)
        finally:
            peer.close()

    def nothing_came(self) -> bool:
        """No request, whole or begun, has reached it."""
        return not self.requests and not self.heads and not any(peer.buffer for peer in self.peers)


class Live:
    """`with Live(**settings) as live`: a router, and the sockets where its workers listen (`live.worker`)."""

    def __init__(self, *, workers: int = 1, absent: int = 0, **settings: Any) -> None:
        """`absent`: as many workers more, before the others, at whose address nobody listens."""
        with contextlib.ExitStack() as stack:

            def bound(listens: bool) -> socket.socket:
                raw = stack.enter_context(socket.socket())
                raw.bind(("127.0.0.1", 0))
                if listens:
                    raw.listen(512)
                return raw

            self._door = bound(True)
            nobodies = [bound(False) for _ in range(absent)]
            self._listeners = [bound(True) for _ in range(workers)]
            ports = [raw.getsockname()[1] for raw in (*nobodies, *self._listeners)]
            urls = tuple(f"http://127.0.0.1:{port},name=w{number}" for number, port in enumerate(ports))
            usual = {"claims": "memory://", "worker": urls, "drain_timeout": 1}
            usual |= {"probe_path": "off", "models_interval": 0}
            made = Settings.flat(**(usual | settings))
            self._server = Server(create_app(made), made)
            self._sockets = stack.pop_all()
        self.broken = False
        """A test has left it in disorder; others had better not use it."""
        self.port = self._door.getsockname()[1]
        self.worker_port = ports[absent] if workers else 0
        self._thread = threading.Thread(target=self._server.run, args=([self._door],), name="router")

    def __enter__(self) -> Self:
        self._thread.start()
        give_up_at = time.monotonic() + LIMIT
        while not self._server.started:
            assert self._thread.is_alive()
            assert time.monotonic() < give_up_at
            time.sleep(0.002)
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self._sockets.close()

    def stop(self) -> None:
        """Returns when it has stopped."""
        self._server.should_exit = True
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the router does not stop"

    @contextlib.asynccontextmanager
    async def worker(self, script: Script, *, number: int = 0) -> AsyncIterator[Worker]:
        """A worker until the block is left; then the router must be at rest."""
        try:
            async with Worker(script, listener=self._listeners[number]) as worker:
                yield worker
            await self.rest()
        except BaseException:
            self.broken = True
            raise

    async def connect(self, receive_buffer: int = 0) -> Client:
        raw = socket.socket()
        raw.setblocking(False)
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        return Client(raw)

    @contextlib.asynccontextmanager
    async def client(self, receive_buffer: int = 0) -> AsyncIterator[Client]:
        client = await self.connect(receive_buffer)
        with contextlib.closing(client):
            yield client

    async def samples(self) -> dict[str, float]:
        """What it counts, with its labels in the name."""
        async with self.client() as client:
            await client.send(get(b"/metrics", b"connection: close"))
            text = (await client.answer(b"GET")).body.decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def count(self, name: str) -> float:
        """A metric's sum over all labels."""
        return sum(value for key, value in (await self.samples()).items() if key.partition("{")[0] == name)

    async def rest(self, limit: float = LIMIT) -> None:
        """Wait until nothing runs and no connection to a worker is open. Raises AssertionError."""
        await until(self._at_rest, limit, "the router does not come to rest")

    async def _at_rest(self) -> bool:
        samples = await self.samples()
        assert not samples.get('coatcheck_turns_total{model="other",outcome="failed"}'), "a fault of the router's own"
        gauges = ("turns_running", "in_flight", "session_turns_active", "worker_connections")
        return not any(
            value for name, value in samples.items() if name.partition("{")[0].removeprefix("coatcheck_") in gauges
        )


class Kept:
    """A router that tests share, until one of them fails."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._live: Live | None = None

    def get(self) -> Live:
        if self._live is not None and self._live.broken:
            self.close()
        if self._live is None:
            self._live = Live(**self._settings).__enter__()
        return self._live

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.__exit__(None, None, None)


async def until(
    condition: Callable[[], Awaitable[object] | object], limit: float = 3 * LIMIT, what: str = "it does not come about"
) -> None:
    """Poll for what others bring about, the longer it takes the more rarely. Raises AssertionError."""
    give_up_at = time.monotonic() + limit
    pause = 0.002
    while True:
        answer = condition()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < give_up_at, what
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, 0.02)


async def still(count: Callable[[], int], quiet_for: float = 0.1) -> None:
    """Wait until a number has stood still for a while, as what is sent does when every buffer is full."""
    last, since = -1, 0.0

    def stands() -> bool:
        nonlocal last, since
        if count() != last:
            last, since = count(), time.monotonic()
        return time.monotonic() - since > quiet_for

    await until(stands, what="it does not come to a stop")


def openai_error(answer: Answer, statuses: Sequence[int], code: str | None = None) -> None:
    """Check that it is an error of OpenAI's shape."""
    assert answer.status in statuses, answer.normal
    assert answer.complete
    assert answer.get(b"content-type") == b"application/json"
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert code is None or error["code"] == code, error
