"""TLS towards workers: between the event loop's transport and a `WorkerConnection`, a transport to the one and a
protocol to the other.

The event loops have TLS of their own. Theirs, when a write fails, closes the socket before anybody hears of it, and
keeps to itself what would decrypt the rest: the answer of a worker that did not wait for the request's end (413, say)
is lost. Here what had come is read as it is without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, cast

from app.http import tcp
from app.http.inplace import Write, direct_write

_RECORD = 16384
"""Bytes of plaintext that a record has at most (RFC 8446 5.1)."""
_TOGETHER = 16 * _RECORD
"""Bytes that are encrypted before they are sent."""


class Truncated(ConnectionError):
    """The connection was closed without TLS's own end: whoever did it need not be the worker (RFC 8446 6.1)."""


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """Client-side TLS over one connection. `protocol` is told of it when the handshake is done, and all that comes at
    once is one piece to it, as it would be without TLS.

    `context` must not let the other side renegotiate (ssl.OP_NO_RENEGOTIATION): writing never waits for reading here.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, context: ssl.SSLContext, server_name: str
    ) -> None:
        super().__init__({"sslcontext": context})
        self._protocol = protocol
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._settled: asyncio.Future[None] = loop.create_future()
        """The handshake is done, or will not be."""
        self._told = False
        """`protocol` knows of the connection."""
        self._closing = self._ended = False
        self._failure: Exception | None = None
        self._raw: asyncio.Transport | None = None
        self._socket: Any = None
        self._send: Write = _nowhere

    async def shake_hands(self) -> None:
        """Wait until `protocol` has the connection. Raises OSError, of which ssl.SSLError is one; then, and when it is
        cancelled, the connection is cut."""
        try:
            await self._settled
            if self._failure is not None:
                raise self._failure
        except BaseException:  # also when cancelled: the connection is nobody else's yet, and it is raised on
            self.abort()
            raise

    # -- the transport's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(data)
        while left and not self.is_closing():
            while left and self._outgoing.pending < _TOGETHER:
                left = left[self._tls.write(left) :]
            self._flush()

    def is_closing(self) -> bool:
        return self._closing or self._raw is None or self._raw.is_closing()

    def close(self) -> None:
        """Say that this is the end, and close when it has left; what the other side still says is not waited for."""
        if self.is_closing():
            return
        self._closing = True
        with contextlib.suppress(ssl.SSLError):  # it wants the other side's end
            self._tls.unwrap()
        self._flush()
        assert self._raw is not None
        self._raw.close()

    def abort(self) -> None:
        self._closing = True
        if self._raw is not None:
            self._raw.abort()

    def pause_reading(self) -> None:
        assert self._raw is not None
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        assert self._raw is not None
        self._raw.resume_reading()

    def get_write_buffer_size(self) -> int:
        return 0 if self._raw is None else self._raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        found = super().get_extra_info(name)
        return found if found is not None or self._raw is None else self._raw.get_extra_info(name, default)

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._socket = transport.get_extra_info("socket")
        self._send = direct_write(self._raw)
        self._advance()

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._told or self._advance():
            self._deliver()

    def eof_received(self) -> None:
        if not self._ended and self._failure is None:
            self._failure = Truncated("the worker closed the connection without the end of TLS")

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        if exc is not None and self._told and self._failure is None:
            # Found out by writing, perhaps: the worker may have answered before it had read everything, and closed.
            self._incoming.write(tcp.unread(self._socket))
            self._deliver()
        if self._failure is None:
            self._failure = exc
        if self._told:
            self._protocol.connection_lost(self._failure)
        elif self._failure is None:
            self._failure = Truncated("the connection was closed within the handshake of TLS")
        self._settle()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # -- TLS

    def _advance(self) -> bool:
        """The handshake, as far as what has come allows. Returns whether it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._flush()
        self._told = True
        self._protocol.connection_made(self)
        self._settle()
        return True

    def _deliver(self) -> None:
        """All that has come, in one piece, and then the end, if it is there."""
        pieces: list[bytes] = []
        failure = None
        while self._incoming.pending or self._tls.pending():
            try:
                piece = self._tls.read(_RECORD)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                failure = error
                break
            if not piece:
                self._ended = True
                break
            pieces.append(piece)
        self._flush()
        if pieces:
            self._protocol.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if failure is not None:
            self._fail(failure)
        elif self._ended:
            self._protocol.eof_received()
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._send(self._outgoing.read())

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        self._flush()  # it may say why
        self.abort()
        if not self._told:
            self._settle()

    def _settle(self) -> None:
        if not self._settled.done():
            self._settled.set_result(None)


def _nowhere(data: bytes) -> None:
    """There is no connection yet."""
