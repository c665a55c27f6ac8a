"""HTTP/1.1 connections to workers, and the pool of idle ones.

One connection carries one exchange at a time. The response head wakes the turn in place; from then on body bytes are
*pushed* into the turn's sink from `data_received`, without a future or a task switch per piece. The parser is httptools
(llhttp), the one that uvicorn has in front, so both sides read HTTP alike.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import re
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from app.http.headers import Header
from app.http.inplace import Wake, direct_write

_HEAD_BYTES = 256 * 1024
"""A worker's response head may not be longer."""

_STALE_WITHIN = 1.0
"""Seconds after the request in which the end of a reused connection is the one that the worker had begun before it;
later, the worker may have been at work on the request."""

# The router's own limits, not the worker's state.
_OUR_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class AttemptFailed(Exception):
    """One attempt at a worker failed; the subclass names the phase."""


class ConnectFailed(AttemptFailed):
    """No connection: refused, unreachable, unresolvable, TLS refused, or not within the limit. Surely nothing ran."""


class ConnectRefused(ConnectFailed):
    """The host answered that nobody listens there: the worker's process is gone."""


class LocalLimit(AttemptFailed):
    """The router is out of sockets or memory. Not the worker's fault; surely nothing ran."""


class StaleConnection(AttemptFailed):
    """A reused connection closed at once, before any byte of a response: the worker had closed it while it was idle."""


class ConnectionBroken(AttemptFailed):
    """Closed or reset after the request was sent. The worker may have begun to work on it."""


class BadResponse(AttemptFailed):
    """What the worker sent is not HTTP/1.1."""


class AttemptTimeout(AttemptFailed):
    """The worker was silent longer than a limit allows."""


class Expected(enum.Enum):
    """What the request lets the worker answer."""

    ANSWER = enum.auto()
    HEAD = enum.auto()
    """A head that may announce a body, without it: the method was HEAD."""
    SWITCH = enum.auto()
    """An answer, or 101 and then bytes of another protocol."""


OnInterim = Callable[[int, list[Header]], None]
"""Told of a 1xx response, other than 100: status and headers."""


class Sink(Protocol):
    """Takes a response body as it comes. Called from the event loop's read callback: must not block."""

    def on_data(self, data: bytes, end: bool) -> None:
        """Some body bytes (may be none when `end`); `end` says that the message is complete, and comes last."""

    def on_chunk(self, frame: bytes, start: int) -> None:
        """One whole chunk as it came, framing and all; its data is `frame[start:-2]`."""

    def on_failure(self, failure: AttemptFailed) -> None:
        """The body will not be completed."""


class Response:
    """What has come of one response, as httptools tells it. Made with its connection, begun anew for each request.

    `pieces` is the body that nobody has taken yet. `framed` says that the head tells where the body ends, else the
    connection's end does (`close_delimited`). `raw`: after 101 the bytes are another protocol's, and not parsed.
    """

    __slots__ = (
        "_chunk_ended",
        "_coded",
        "_expected",
        "_framed",
        "_head_bytes",
        "_interim",
        "_parser",
        "close_delimited",
        "complete",
        "headers",
        "keep_alive",
        "on_interim",
        "pieces",
        "raw",
        "status",
    )

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self.begin(Expected.ANSWER, None)

    def begin(self, expected: Expected, on_interim: OnInterim | None) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.complete = self.close_delimited = self.raw = False
        self.keep_alive = True
        self._expected, self.on_interim = expected, on_interim
        self._head_bytes = 0
        self._interim = self._framed = self._coded = self._chunk_ended = False
        self.pieces: list[bytes] = []

    def drop(self) -> None:
        """The connection is gone. The parser holds our callbacks: end the reference cycle."""
        self._parser = None

    def feed(self, data: bytes) -> bool:
        """What the worker sent. Returns whether the stream stands between two chunks now. Raises BadResponse."""
        self._chunk_ended = False
        if self.raw:
            self.pieces.append(data)
            return False
        has_head = self.status != 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:  # nothing else than that 101 raises it
            self.pieces.append(data[switch.args[0] :])
        except httptools.HttpParserError as error:
            if not self.complete:
                if isinstance(error.__context__, BadResponse):
                    raise error.__context__ from None
                raise BadResponse(f"the worker's response is not valid HTTP: {error}") from error
            self.keep_alive = False  # a complete answer followed by rubbish: the answer stands
        if not has_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES and (not self.status or _size(self.headers) > _HEAD_BYTES):
                self.status = 0  # no head that could be relayed
                raise BadResponse(f"the worker's response head is longer than {_HEAD_BYTES} bytes")
        # Within the size of the next chunk there is no other line end.
        return self._chunk_ended and not self.complete and data.endswith(b"\r\n")

    # -- httptools' side

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a second response to one request
        elif self.headers:  # of an interim response
            self.headers = []
            self._framed = self._coded = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # later ones are trailers, which end here
            name = name.lower()
            if name == b"content-length":
                self._framed = True
            elif name == b"transfer-encoding":
                if self._coded or value.strip().lower() != b"chunked":
                    raise BadResponse("the worker's response has a transfer coding other than chunked")
                self._framed = self._coded = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise BadResponse("the worker speaks another version of HTTP")
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                if self._expected is not Expected.SWITCH:
                    raise BadResponse("the worker switched protocols without being asked")
                self.status, self.raw, self.keep_alive, self.close_delimited = status, True, False, True
            else:
                self._interim = True
                if status != 100 and self.on_interim is not None:  # 100 answers what ends here
                    self.on_interim(status, self.headers)
            return
        self.status = status
        self.keep_alive = self._parser.should_keep_alive()
        if self._expected is Expected.HEAD:
            # llhttp does not know the request's method and would wait for the body that the header announces.
            self.complete = True
            self._parser = httptools.HttpResponseParser(self)
        elif not self._framed and status not in (204, 304):
            self.close_delimited = True  # RFC 9112 6.3, rule 8
            self.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self.pieces.append(body)
        else:
            self.keep_alive = False  # the body of an answer to HEAD: nobody knows where it ends

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self.raw:
            self.complete = True


class WorkerConnection(asyncio.Protocol):
    """One connection. `send` begins an exchange, `relay` starts the push, `release` ends it.

    Invariant: `_head` is set from `send` until the head or a failure; `_sink` is set from `relay` until the end or a
    failure; a connection is in its pool exactly when neither holds and `_exchange` is False.

    Waking the turn and pushing into its sink run the turn in place, which may end the exchange, and another one may
    begin here at once. So each of these calls is the last thing that its caller does.
    """

    __slots__ = (
        "_between_chunks",
        "_exchange",
        "_failure",
        "_head",
        "_loop",
        "_paused",
        "_pool",
        "_room",
        "_sink",
        "_transport",
        "_used",
        "_write",
        "connected",
        "first_byte",
        "idle_since",
        "last_read",
        "response",
        "uploading",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Pool) -> None:
        self._loop, self._pool = loop, pool
        self._transport: asyncio.Transport | None = None
        self.response = Response()
        self.connected = False
        self.first_byte = False
        """Of this exchange."""
        self.uploading = False
        """The request body is still being sent."""
        self._exchange = self._used = self._paused = self._between_chunks = False
        self._room: Wake | None = None
        self._sink: Sink | None = None
        self._head: Wake | None = None
        self._failure: AttemptFailed | None = None
        self.idle_since = self.last_read = 0.0

    # -- the turn's side

    def send(
        self,
        head: bytes,
        body: bytes,
        *,
        expected: Expected,
        on_interim: OnInterim | None = None,
        more: bool = False,
    ) -> Wake:
        """Write a request. The wake is set when the head of the `response` is there; it raises StaleConnection,
        ConnectionBroken or BadResponse. `more`: other pieces of the body follow by `write`."""
        assert self._transport is not None
        self.response.begin(expected, on_interim)
        self.first_byte = self._between_chunks = False
        self._exchange = True
        self.uploading = more
        self._head = wake = Wake()
        self.last_read = self._loop.time()
        if self._transport.is_closing():
            self._fail(StaleConnection("the worker had closed the idle connection"))
        elif body and len(body) <= 65536:
            self._write(head + body)
        else:
            self._write(head)
            if body:
                self._write(body)
        return wake

    async def write(self, data: bytes) -> None:
        """Go on with a request body, as fast as the worker takes it."""
        assert self._transport is not None
        if self.connected and self._exchange:
            self._transport.write(data)
            self.last_read = self._loop.time()  # while we send, nobody expects an answer
            if self._room is not None:
                await self._room

    def relay(self, sink: Sink) -> None:
        """Push the body into `sink` from now on, beginning with what has already come."""
        response = self.response
        pieces, response.pieces = response.pieces, []
        if response.complete:
            sink.on_data(b"".join(pieces), True)
            return
        self._sink = sink
        if pieces:
            sink.on_data(b"".join(pieces), False)
        if self._failure is not None:
            self._sink = None
            sink.on_failure(self._failure)

    def pause(self) -> None:
        """Stop reading: the client is slower than the worker."""
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.last_read = self._loop.time()  # the wait was not the worker's
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def fail(self, failure: AttemptFailed) -> None:
        """Give the exchange up (a limit was exceeded, the client left) and cut the connection."""
        self._cut()
        self._fail(failure)

    def release(self) -> None:
        """End the exchange: back to the pool when the response was complete, else cut. Idempotent."""
        if not self._exchange:
            return
        self._exchange = self._between_chunks = False
        self._sink = self._head = None
        self.response.on_interim = None
        transport, response = self._transport, self.response
        if (
            response.complete
            and response.keep_alive
            and self.connected
            and not self.uploading
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        ):
            self.resume()
            self._used = True
            self._pool.give(self)
        else:
            self._cut()

    def close(self) -> None:
        """Close when what was written has left."""
        if self._transport is not None:
            self._transport.close()

    def _cut(self) -> None:
        if self._transport is None:
            return
        if self.response.raw:
            self._transport.close()  # in another protocol what was said last may matter
        else:
            self._transport.abort()

    def _fail(self, failure: AttemptFailed) -> None:
        if self._failure is None:
            self._failure = failure
        head, self._head = self._head, None
        sink, self._sink = self._sink, None
        if head is not None:
            if self.response.status:
                head.set()  # what came before is relayed first
            else:
                head.fail(failure)
        elif sink is not None:
            sink.on_failure(failure)

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._write = direct_write(self._transport)
        self.connected = True

    def connection_lost(self, exc: Exception | None) -> None:
        response = self.response
        self.connected = False
        response.drop()
        self._pool.closed(self)
        self.resume_writing()
        if not self._exchange or response.complete or self._failure is not None:
            return
        if response.close_delimited and exc is None:
            response.keep_alive = False
            response.complete = True
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.on_data(b"", True)
        elif self._used and not self.first_byte and self._loop.time() - self.last_read < _STALE_WITHIN:
            self._fail(StaleConnection("the worker had closed the idle connection"))
        elif response.status:
            self._fail(ConnectionBroken("the worker closed the connection before the response was complete"))
        else:
            self._fail(ConnectionBroken("the worker closed the connection without a response"))

    def pause_writing(self) -> None:
        self._room = Wake()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set()

    def data_received(self, data: bytes) -> None:
        self.last_read = self._loop.time()
        if self._between_chunks:
            # Most reads of a stream are one chunk. It needs no parser, which is left between two chunks as it was, and
            # no new framing.
            end = data.find(b"\r\n", 1, 9)
            size = len(data) - end - 4
            if (
                size > 0 < end
                and data[:end] in (b"%x" % size, b"%X" % size)
                and data.endswith(b"\r\n")
                and self._sink is not None
            ):
                self._sink.on_chunk(data, end + 2)
                return
        response = self.response
        if not self._exchange or response.complete:
            # Bytes nobody asked for: the stream of messages cannot be trusted any more.
            response.keep_alive = False
            self._cut()
            return
        self.first_byte = True
        try:
            self._between_chunks = response.feed(data)
        except BadResponse as bad:
            self.fail(bad)
            return
        head, sink = self._head, self._sink
        if head is not None:
            if response.status:
                self._head = None
                head.set()
        elif sink is not None and (response.pieces or response.complete):
            pieces, response.pieces = response.pieces, []
            if response.complete:
                self._sink = None
            sink.on_data(pieces[0] if len(pieces) == 1 else b"".join(pieces), response.complete)


class Pool:
    """The connections to one worker: the idle ones, newest first, and how many are open.

    `take` decides without awaiting; `connect` awaits without deciding.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        connect_limit: float = 5.0,
        idle_limit: float = 4.0,
        max_idle: int = 1024,
    ) -> None:
        """`connect_limit`, `idle_limit` in seconds. The idle limit is below the usual 5 s of servers like uvicorn, so
        that we seldom write into a connection that is being closed at the other end."""
        self._host, self._port, self._tls = host, port, tls
        self._server_name = server_name
        self._connect_limit, self._idle_limit, self._max_idle = connect_limit, idle_limit, max_idle
        self._idle: deque[WorkerConnection] = deque()
        self._all: set[WorkerConnection] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def open(self) -> int:
        return len(self._all)

    def take(self) -> WorkerConnection | None:
        """The most recently used idle connection, or None: then `connect`."""
        if self._idle:
            return self._idle.pop()
        return None

    async def connect(self) -> WorkerConnection:
        """A new connection. Raises ConnectFailed or LocalLimit."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_limit):
                _, connection = await loop.create_connection(
                    lambda: WorkerConnection(loop, self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=(self._server_name or self._host) if self._tls else None,
                )
        except TimeoutError as error:
            raise ConnectFailed(f"no connection within {self._connect_limit:g} s") from error
        except OSError as error:  # ssl.SSLError and socket.gaierror are OSErrors
            if error.errno in _OUR_FAULT:
                raise LocalLimit(f"the router cannot open another connection: {error.strerror}") from error
            kind = ConnectRefused if _refused(error) else ConnectFailed
            raise kind(error.strerror or str(error) or type(error).__name__) from error
        # Counted only now: uvloop never says connection_lost to one whose making was cancelled after connection_made.
        if connection.connected:
            self._all.add(connection)
        return connection

    def give(self, connection: WorkerConnection) -> None:
        """Take back a connection that is ready for the next request."""
        if self._closing or len(self._idle) >= self._max_idle:
            connection.close()
            return
        loop = connection._loop
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._reaper is None:
            self._reaper = loop.call_later(self._idle_limit, self._reap, loop)

    def closed(self, connection: WorkerConnection) -> None:
        self._all.discard(connection)
        with_idle = self._idle
        if connection in with_idle:
            with_idle.remove(connection)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        oldest = loop.time() - self._idle_limit
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.popleft().close()
        self._reaper = (
            loop.call_at(self._idle[0].idle_since + self._idle_limit, self._reap, loop) if self._idle else None
        )

    def close(self) -> None:
        """Close idle connections now and busy ones when they are released."""
        self._closing = True
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        while self._idle:
            self._idle.pop().close()


def _size(headers: list[Header]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _refused(error: OSError) -> bool:
    """Where a name has several addresses, the loop tells of all in one text, without a number."""
    if error.errno is not None:
        return error.errno == errno.ECONNREFUSED
    numbers = re.findall(r"\[Errno (\d+)\]", str(error))
    return bool(numbers) and set(numbers) == {str(int(errno.ECONNREFUSED))}
