"""The network's part: ports that stay ours, and a TCP proxy that loses what it is told to lose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
from types import TracebackType
from typing import Self

_FIRST_PORT, _SHARE, _SHARES = 20_000, 2_000, 6
"""All below those that Linux gives to connections (`ip_local_port_range`)."""
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Loopback ports for servers that bind them later, or again after they were killed.

    No connection takes one of these meanwhile, none is given twice, and the processes of one parallel run draw from
    shares of their own.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST_PORT + number % _SHARES * _SHARE
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(first, first + _SHARE)
        with socket.socket() as holder, contextlib.suppress(OSError):
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            holder.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                found.append(port)
    return found


class TcpProxy:
    """Listens on a free loopback port, or `listener`, and passes bytes to and from `host:port`; with `tls`, what comes
    is TLS and ends here."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        records: bool = False,
    ) -> None:
        self.host = host
        self.upstream_port = port
        self.port = 0
        self._listener = listener.dup() if listener else socket.create_server(("127.0.0.1", 0))
        self._tls = tls
        self.drop_replies = False
        """Requests arrive, answers do not."""
        self.heard: list[tuple[bytearray, bytearray]] = []
        """If it `records`: of each connection what has come for `host:port`, and what has come back."""
        self._records = records
        self.black_hole = False
        """Nothing arrives, and new connections are accepted."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, sock=self._listener, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.sever()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def sever(self) -> None:
        """Reset every connection; new ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_writer: asyncio.StreamWriter | None = None
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self.host, self.upstream_port)
            self._writers |= {writer, upstream_writer}
            self.heard.append((bytearray(), bytearray()))
            asked, told = self.heard[-1]
            await asyncio.gather(
                self._pump(reader, upstream_writer, asked), self._pump(upstream_reader, writer, told, replies=True)
            )
        except (OSError, asyncio.CancelledError):
            pass  # Either side may go at any time, and so may the test.
        finally:
            for end in filter(None, (writer, upstream_writer)):
                end.transport.abort()
                self._writers.discard(end)
            self._tasks.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heard: bytearray,
        *,
        replies: bool = False,
    ) -> None:
        while data := await reader.read(65536):
            if self._records:
                heard += data
            if not (self.black_hole or (replies and self.drop_replies)):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, NotImplementedError):  # TLS has no half that could be closed
            writer.write_eof()
