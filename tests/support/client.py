"""Clients of a router that runs in the test's own loop, where the test sees what is inside it and can stop it anywhere.

They come in as in production: by real sockets, to the client protocol as uvicorn's server makes it. A `Call` does what
a client may do, when it is told to: it sends piece by piece, stops reading, leaves. Usual clients do so only by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import uvicorn
from uvicorn.server import ServerState

from tests.support import http_model
from tests.support.http_model import Answer, Header, Incomplete
from tests.support.raw import END, Client, chunk, until

_LITTLE = 4096
"""Bytes of a kernel's buffer for a connection of which little is to be on its way."""


class Entrance:
    """Where clients come in. `config`: the server's, its `http` the client protocol."""

    def __init__(self, config: uvicorn.Config) -> None:
        config.load()
        self._config = config
        self._door = socket.create_server(("127.0.0.1", 0))
        self._made: list[tuple[asyncio.Transport, ServerState]] = []

    async def connect(self, *, peer: str | None = None, little: bool = False) -> tuple[Client, ServerState]:
        """A client's connection, and what a server knows of it alone: `connections` is empty when the router has seen
        its end, `tasks` when nothing runs for it.

        `peer`: the address that it seems to come from. `little`: the kernel keeps little of what is on its way.
        """
        raw = socket.socket()
        if little:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LITTLE)
        raw.connect(self._door.getsockname())
        accepted, _ = self._door.accept()
        if little:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LITTLE)
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind: Any = self._config.http_protocol_class
        if peer is not None:
            kind = _seen_from(kind, peer)
        state = ServerState()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(
            lambda: kind(config=self._config, server_state=state, app_state={}, _loop=loop), accepted
        )
        self._made.append((transport, state))
        return Client(raw), state

    async def close(self) -> None:
        """Cut every client that is still there, and wait until nothing runs for any."""
        self._door.close()
        for transport, state in self._made:
            if state.connections:
                transport.abort()
        await until(lambda: not any(state.connections or state.tasks for _, state in self._made))


class Call:
    """One request on a connection of its own, and the answer as far as it has come."""

    def __init__(
        self,
        entrance: Entrance,
        headers: Sequence[Header] = (),
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        host: str = "router",
        query: bytes = b"",
        body: bytes | list[bytes] = b"{}",
        ends: bool = True,
        peer: str | None = None,
        little: bool = False,
    ) -> None:
        """`body`: with a length, or pieces, each written by itself, as chunks unless a header declares a length;
        without `ends` more would follow, which never comes. The rest as for `Entrance.connect`."""
        self._method, self._entrance = method.encode(), entrance
        self._how: dict[str, Any] = {"peer": peer, "little": little}
        names = {name for name, _ in headers}
        lines = [b"%b %b HTTP/1.1" % (self._method, path.encode() + (b"?" + query if query else b""))]
        lines.append(b"host: %b" % host.encode())
        lines += [b"%b: %b" % pair for pair in headers]
        pieces = body if isinstance(body, list) else [body] if body else []
        if b"transfer-encoding" in names or (b"content-length" not in names and (isinstance(body, list) or not ends)):
            if b"transfer-encoding" not in names:
                lines.append(b"transfer-encoding: chunked")
            pieces = [*map(chunk, pieces), *([END] if ends else [])]
        elif pieces and b"content-length" not in names:
            lines.append(b"content-length: %d" % len(pieces[0]))
        head = b"\r\n".join([*lines, b"", b""])
        self._pieces = [head, *pieces] if isinstance(body, list) else [head + b"".join(pieces)]
        self._end: Client | None = None
        self._state: ServerState | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()
        self._read: tuple[int, Answer | None] = (-1, None)
        self.on_data: Callable[[bytes], Awaitable[None]] | None = None
        """Awaited with each piece of the answer as it has come, before anything more is read."""

    # -- what a client does

    async def connect(self) -> Self:
        if self._end is None:
            self._end, self._state = await self._entrance.connect(**self._how)
        return self

    def start(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def finish(self) -> Self:
        """Until the answer, or the connection, has ended and nothing runs for it in the router any more."""
        if self._task is None:
            self.start()
        assert self._task is not None
        async with asyncio.timeout(60):
            await self._task
        state = self._state
        assert state is not None
        await until(lambda: not state.tasks and not (self._leaving.is_set() and state.connections))
        return self

    def leave(self) -> None:
        """Close the connection, when the request has been sent as far as it was to be."""
        self._leaving.set()

    def stall(self) -> None:
        """Read no more."""
        self._reads.clear()

    def go_on(self) -> None:
        """Read again, and as fast as others do."""
        if self._end is not None:
            self._end.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._reads.set()

    def cut(self) -> None:
        """What uvicorn does with the turns that outlive the limit of its shutdown."""
        assert self._state is not None
        for task in tuple(self._state.tasks):
            task.cancel(msg="Task cancelled, timeout graceful shutdown exceeded")

    async def _run(self) -> None:
        await self.connect()
        assert self._end is not None
        sending, reading = asyncio.create_task(self._send(self._end)), asyncio.create_task(self._receive(self._end))
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await (reading if reading.done() else sending)
        finally:
            for task in (sending, reading, leaving):
                task.cancel()
            await asyncio.gather(sending, reading, leaving, return_exceptions=True)
            self._end.close()

    async def _send(self, end: Client) -> None:
        with contextlib.suppress(ConnectionError):
            await end.send(*self._pieces)

    async def _receive(self, end: Client) -> None:
        while not self.complete:
            await self._reads.wait()
            before = len(end.buffer)
            if not await end.more(None):
                return
            if self.on_data is not None:
                await self.on_data(bytes(end.buffer[before:]))

    # -- what it was answered

    @property
    def answer(self) -> Answer | None:
        """As far as it has come; None: not its head. By the strict reading: a malformed one raises."""
        end = self._end
        if end is None:
            return None
        size, answer = self._read
        if size != len(end.buffer):
            with contextlib.suppress(Incomplete):
                answer, _ = http_model.read_answer(end.buffer, self._method, True)
                if answer.complete:
                    answer = dataclasses.replace(answer, complete=self.complete)
            self._read = (len(end.buffer), answer)
        return answer

    @property
    def complete(self) -> bool:
        if self._end is None:
            return False
        try:
            _, rest = http_model.read_answer(self._end.buffer, self._method, False)
        except Incomplete:
            return False
        assert not rest, "more than one answer"
        return True

    @property
    def status(self) -> int:
        """0: there is no head yet."""
        return 0 if self.answer is None else self.answer.status

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Without those of the framing that an answer of any length has."""
        assert self.answer is not None
        pairs = [pair for pair in self.answer.headers if pair != (b"transfer-encoding", b"chunked")]
        assert len(dict(pairs)) == len(pairs), "a header twice"
        return dict(pairs)

    @property
    def body(self) -> bytes:
        return b"" if self.answer is None else self.answer.body

    @property
    def events(self) -> list[bytes]:
        """Of a stream, those that are whole."""
        return self.body.split(b"\n\n")[:-1]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def _seen_from(kind: Callable[..., Any], peer: str) -> Callable[..., Any]:
    """Makes client protocols that are told that their connection comes from `peer`: no test has such an address."""

    def make(**arguments: Any) -> Any:
        protocol = kind(**arguments)
        told = protocol.connection_made
        protocol.connection_made = lambda transport: told(_Afar(transport, peer))
        return protocol

    return make


class _Afar:
    """A transport, or its socket, which says of its other end that it is elsewhere."""

    def __init__(self, inner: Any, peer: str) -> None:
        self._inner, self._peer = inner, (peer, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def getpeername(self) -> tuple[str, int]:
        return self._peer

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self._peer
        found = self._inner.get_extra_info(name, default)
        return _Afar(found, self._peer[0]) if name == "socket" and found is not None else found
