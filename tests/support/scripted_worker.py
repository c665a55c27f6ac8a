"""A worker that does exactly what a test says, byte by byte: odd framing, garbage, silence, a close at a given moment.

Mock workers are well-behaved HTTP servers, which most faults on the wire cannot come from. This one also proves order
without clocks: a script can wait for what the client has already got.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Request:
    """As it came."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    """Names in lower case."""
    body: bytes
    connection: int
    """The number of the connection that it came by, from 0."""

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class Exchange:
    """One request and the connection that waits for its answer."""

    def __init__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self._reader, self._writer = reader, writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def chunk(self, *pieces: bytes) -> None:
        """Each piece as one chunk."""
        await self.send(*(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces))

    async def left(self) -> None:
        """Wait until the router has closed the connection."""
        with contextlib.suppress(ConnectionError):
            assert not await self._reader.read(1), "the router sent more than one request at once"

    def close(self) -> None:
        """A clean end of the connection."""
        self._writer.close()

    def reset(self) -> None:
        """The end of a worker that has crashed."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    @property
    def closing(self) -> bool:
        return self._writer.is_closing()


Script = Callable[[Exchange], Awaitable[None]]


class ScriptedWorker:
    """`async with ScriptedWorker(listener, script) as worker`: the script is run for each request.

    `listener` listens already and goes on to when this has ended, so that one router can be used by many tests.
    """

    def __init__(self, listener: socket.socket, script: Script, *, tls: ssl.SSLContext | None = None) -> None:
        self._listener, self._script, self._tls = listener, script, tls
        self.requests: list[Request] = []
        self.connections = 0
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[Exception] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, sock=self._listener.dup(), ssl=self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        if error is None and self._failures:
            raise self._failures[0]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number, self.connections = self.connections, self.connections + 1
        try:
            while not writer.is_closing() and (request := await _read_request(reader, number)):
                self.requests.append(request)
                await self._script(Exchange(request, reader, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the router may leave at any time, and so may the test
        except Exception as failure:
            self._failures.append(failure)
        finally:
            self._tasks.discard(task)
            writer.close() if writer.is_closing() else writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = int(dict(headers).get("content-length", 0))
    return Request(method, target, headers, await reader.readexactly(length), connection)
