"""TLS, towards workers and towards clients: between the event loop's transport and the protocol of a connection, a
transport to the one and a protocol to the other.

The event loops have TLS of their own. Theirs, when a write fails, closes the socket before anybody hears of it, and
keeps to itself what would decrypt the rest: the answer of a worker that did not wait for the request's end (413, say)
is lost. Here what had come is read as it is without TLS. And what is written leaves in the same call, encrypted, as it
does without: theirs waits for the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
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
    """TLS over one connection that we have made. `protocol` is told of it when the handshake is done, and all that
    comes at once is one piece to it, as it would be without TLS.

    `context` must not let the other side renegotiate (ssl.OP_NO_RENEGOTIATION): writing never waits for reading here.

    Most of its methods are those of asyncio's transports and protocols.
    """

    _peer = "the worker"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.Protocol,
        context: ssl.SSLContext,
        server_name: str | None,
    ) -> None:
        """`server_name`: whose certificate it must be; None: we have the certificate."""
        super().__init__({"sslcontext": context})
        self._loop, self._protocol = loop, protocol
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = server_name is None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=ours, server_hostname=server_name)
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
            self._failure = Truncated(f"{self._peer} closed the connection without the end of TLS")

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        if exc is not None and self._told and self._failure is None:
            self._read_on()
        if self._failure is None:
            self._failure = exc
        if self._told:
            self._protocol.connection_lost(self._failure)
        elif self._failure is None:
            self._failure = Truncated("the connection was closed within the handshake of TLS")
        self._settle()

    def _read_on(self) -> None:
        """The connection broke. Found out by writing, perhaps: the worker may have answered before it had read
        everything, and closed."""
        self._incoming.write(tcp.unread(self._socket))
        self._deliver()

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


class AcceptedTls(TlsTransport):
    """TLS over one connection that a client has made."""

    _peer = "the client"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.Protocol,
        context: ssl.SSLContext,
        *,
        limit: float,
        connections: set[Any],
    ) -> None:
        """`limit`: seconds for the handshake; 0: none. `connections`: those that a server tells to `shutdown` when it
        stops; this one is among them until `protocol` has it."""
        super().__init__(loop, protocol, context, None)
        self._limit, self._connections = limit, connections
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._limit:
            self._timer = self._loop.call_later(self._limit, self.abort)
        self._connections.add(self)
        super().connection_made(transport)

    def shutdown(self) -> None:
        self.abort()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def can_write_eof(self) -> bool:
        return False  # what the other side still says would be refused from then on (RFC 5246 7.2.1)

    def _read_on(self) -> None:
        """Nobody is there who could be answered."""

    def _fail(self, failure: Exception) -> None:
        if not self._told and getattr(failure, "reason", "") == "HTTP_REQUEST":
            self._send(_NO_TLS)
        super()._fail(failure)

    def _settle(self) -> None:
        super()._settle()
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()


def server_context(certificates: Path, key: Path | None) -> ssl.SSLContext:
    """For `AcceptedTls`. `certificates`: the server's and those that lead to its CA, in PEM; `key`: its private key;
    None: it is in the same file. Raises OSError, of which ssl.SSLError is one: they are not such files, or do not fit
    together. Raises ValueError: the key has a password."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates, key, password=_no_password)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


_NO_TLS = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: 40\r\n\r\n"
    b"this port speaks TLS: use an https URL.\n"
)


def _no_password() -> str:
    """In place of OpenSSL's own question at the terminal."""
    raise ValueError("the key has a password; write it to a file without one")


def _nowhere(data: bytes) -> None:
    """There is no connection yet."""
