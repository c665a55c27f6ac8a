"""HTTP/1.1 connections to workers, and the pool of idle ones.

One connection carries one exchange at a time. The response head wakes the turn in place; from then on body bytes are
*pushed* into the turn's sink from `data_received`, without a future or a task switch per piece.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ssl
from collections import deque
from types import TracebackType
from typing import Any, Protocol, cast

from app.http import tcp
from app.http.inplace import Wake, direct_write
from app.http.names import Names, NoAddress
from app.http.response import Expected, NotHttp, OnInterim, Response
from app.http.tls import TlsTransport, Truncated

_IDLE_A_WHILE = 0.1
"""Seconds without a request after which a connection is looked at before it is used: what came just now may be waiting
behind the event that brought the request."""

_LATE, _EXTENSIONS = 0.05, 3
"""Seconds by which a timer is late that had to wait for our own loop; see `_Limit`."""

# The router's own limits, not the worker's state.
_OUR_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class AttemptFailed(Exception):
    """One attempt at a worker failed; the subclass names the phase."""


class ConnectFailed(AttemptFailed):
    """No connection: refused, unreachable, TLS refused, or not within the limit. Surely nothing ran."""


class ConnectRefused(ConnectFailed):
    """The host answered that nobody listens there: the worker's process is gone."""


class ConnectReset(ConnectFailed):
    """The host took the connection and dropped it at once: what listens there is dying, or has no room."""


class NameUnknown(ConnectFailed):
    """The worker's name could not be looked up, now or ever: the name server's trouble, and nothing of the worker."""


class LocalLimit(AttemptFailed):
    """The router is out of sockets or memory. Not the worker's fault; surely nothing ran."""


class StaleConnection(AttemptFailed):
    """A reused connection turned out to be closed: the worker had ended it while it was idle, and has read nothing."""


class ConnectionBroken(AttemptFailed):
    """Closed or reset after the request was sent. The worker may have begun to work on it."""


class BadResponse(AttemptFailed):
    """What the worker sent is not HTTP/1.1."""


class AttemptTimeout(AttemptFailed):
    """The worker was silent longer than a limit allows."""


class Sink(Protocol):
    """Takes a response body as it comes. Called from the event loop's read callback: must not block."""

    def on_data(self, data: bytes, end: bool) -> None:
        """Some body bytes (may be none when `end`); `end` says that the message is complete, and comes last."""

    def on_chunk(self, frame: bytes, start: int) -> None:
        """One whole chunk as it came, framing and all; its data is `frame[start:-2]`."""

    def on_failure(self, failure: AttemptFailed) -> None:
        """The body will not be completed."""


class WorkerConnection(asyncio.Protocol):
    """One connection. `send` begins an exchange, `relay` starts the push, `release` ends it.

    Invariant: `_head` is set from `send` until the head or a failure; `_sink` is set from `relay` until the end or a
    failure; a connection is in its pool exactly when neither holds and `_exchange` is False.

    Waking the turn and pushing into its sink run the turn in place, which may end the exchange, and another one may
    begin here at once. So each of these calls is the last thing that its caller does.

    Long because all that a socket's callbacks touch is here: reading is `Response`'s, the kernel's word `tcp`'s.

    What the worker's kernel has acknowledged tells whether the worker can have read a request: `_before` is what it has
    acknowledged when nothing of this exchange's request is, `_written` when all is that was written (without TLS).
    """

    __slots__ = (
        "_before",
        "_between_chunks",
        "_ended",
        "_exchange",
        "_failure",
        "_head",
        "_loop",
        "_paused",
        "_pool",
        "_room",
        "_sink",
        "_socket",
        "_tls",
        "_transport",
        "_used",
        "_wake",
        "_write",
        "_written",
        "connected",
        "first_byte",
        "heard",
        "quiet_since",
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
        self._ended = self._tls = False
        self._socket: Any = None
        self._before = self._written = 0
        self._room: Wake | None = None
        self._sink: Sink | None = None
        self._head: Wake | None = None
        self._wake = Wake()
        """Of every exchange: whoever waits for one's head waits no more when the next begins."""
        self._failure: AttemptFailed | None = None
        self.heard = False
        """Something has come or was sent, or could not come, since `quiet_for` was asked."""
        self.quiet_since = 0.0
        """By the loop's time; of an idle one, since when it is."""

    # -- the turn's side

    def send(
        self,
        head: bytes,
        body: bytes,
        *,
        expected: Expected = Expected.ANSWER,
        on_interim: OnInterim | None = None,
        more: bool = False,
    ) -> Wake:
        """Write a request. The wake is set when the head of the `response` is there; it raises StaleConnection,
        ConnectionBroken or BadResponse. `more`: other pieces of the body follow by `write`."""
        transport = self._transport
        assert transport is not None
        self.response.begin(expected, on_interim)
        self.first_byte = False
        self._exchange = True
        self.uploading = more
        self._head = wake = self._wake
        wake.reset()
        self.heard = True
        if self._tls:
            self._count()
        size = len(body)
        self._before = self._written
        self._written += len(head) + size
        if transport.is_closing():
            self._fail(StaleConnection("the worker had closed the idle connection"))
        else:
            self._write(head)
            if size:
                self._write(body)
        return wake

    async def write(self, data: bytes) -> None:
        """Go on with a request body, as fast as the worker takes it."""
        assert self._transport is not None
        if self.connected and self._exchange:
            self._transport.write(data)
            self._written += len(data)
            self.heard = True  # while we send, nobody expects an answer
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
            self.heard = True  # the wait was not the worker's
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def quiet_for(self, now: float) -> float:
        """How many seconds it has been silent, as far as is known by being asked now and then: to note the time of
        each piece would cost as much as the piece."""
        if self.heard:
            self.heard, self.quiet_since = False, now
        return now - self.quiet_since

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
            if self._paused:
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
        self._socket = transport.get_extra_info("socket")
        self._tls = transport.get_extra_info("sslcontext") is not None
        self.connected = True
        tcp.ask_for_life(self._socket)
        self._count()

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        response = self.response
        self.connected = False
        self._pool.closed(self)
        if exc is not None and self._exchange and not response.complete and self._failure is None and not self._tls:
            # Found out by writing, perhaps: the worker may have answered before it had read everything, and closed.
            # (TLS has told it already.)
            last_words = tcp.unread(self._socket)
            if last_words:
                self._paused = False
                self.data_received(last_words)
        self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        response = self.response
        response.drop()
        self.resume_writing()
        if not self._exchange or response.complete or self._failure is not None:
            return
        if response.close_delimited and (exc is None or self._ended):
            response.keep_alive = False
            response.complete = True
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.on_data(b"", True)
        elif not self.first_byte and self._was_closed_before(exc is None or self._ended or type(exc) is Truncated):
            self._fail(StaleConnection("the worker had closed the idle connection"))
        elif response.status:
            self._fail(ConnectionBroken("the worker closed the connection before the response was complete"))
        elif self.first_byte:
            self._fail(ConnectionBroken("the worker closed the connection within the head of a response"))
        else:
            self._fail(
                ConnectionBroken("the worker closed the connection without a response; it may have read the request")
            )

    def _was_closed_before(self, ended: bool) -> bool:
        """Whether the worker had closed the connection when the request came, and has read nothing of it.

        What a worker says acknowledges what it had got till then, its end (`ended`) too. A reset does not: whoever is
        killed may have read what is not acknowledged, but for what has never left."""
        seen = tcp.progress(self._socket) if self._used else None
        if seen is None or seen.acked > self._before:
            return False
        return ended or seen.left <= self._before

    def _count(self) -> None:
        """What is acknowledged stands for what was written; always true but while something is on its way."""
        seen = tcp.progress(self._socket)
        self._written = seen.acked if seen is not None else 0

    def is_quiet(self) -> bool:
        """Of an idle connection: nothing has come that nobody has asked for."""
        return self._tls or tcp.is_quiet(self._socket)

    def pause_writing(self) -> None:
        self._room = Wake()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set()

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._between_chunks:
            # Most reads of a stream are one chunk. It needs no parser, which is left between two chunks as it was, and
            # no new framing.
            opening = _opening(len(data))
            if data.startswith(opening) and data.endswith(b"\r\n") and self._sink is not None:
                self._sink.on_chunk(data, len(opening[0]))
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
        except NotHttp as bad:
            self.fail(BadResponse(str(bad)))
            return
        if response.status == 408 and self._head is not None and self._was_closed_before(True):
            # The worker's farewell to an idle connection, on its way when we wrote (RFC 9110 15.5.9).
            response.status = 0
            self.first_byte = False
            self.fail(StaleConnection("the worker had given the idle connection up"))
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


@functools.lru_cache(maxsize=4096)
def _opening(size: int) -> tuple[bytes, ...]:
    """The line, in either spelling, with which one chunk begins that is `size` bytes long with all its framing; none
    where there is no such chunk."""
    for digits in range(1, 9):
        length = size - digits - 4
        if length > 0 and len(b"%x" % length) == digits:
            return b"%x\r\n" % length, b"%X\r\n" % length
    return ()


class _Limit:
    """Ends its block with TimeoutError after so many seconds. When that comes late, our own loop had no time, and may
    not have seen yet what came in time: then it waits on for as long as it was late, up to the seconds again, and not
    more than `_EXTENSIONS` times."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop, self._timeout, self._seconds = loop, asyncio.timeout(None), seconds
        self._left = _EXTENSIONS
        self._due = loop.time() + seconds
        self._alarm = loop.call_at(self._due, self._ring)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.cancel()
        await self._timeout.__aexit__(kind, fault, trace)

    def _ring(self) -> None:
        now = self._loop.time()
        late = now - self._due
        if late > _LATE and self._left:
            self._left -= 1
            self._due = now + min(late, self._seconds)
            self._alarm = self._loop.call_at(self._due, self._ring)
        else:
            self._timeout.reschedule(now)


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
        names: Names | None = None,
    ) -> None:
        """`connect_limit`, `idle_limit` in seconds. The idle limit is below the usual 5 s of servers like uvicorn, so
        that we seldom write into a connection that is being closed at the other end. `names`: shared by those whose
        hosts may be the same."""
        self._host, self._port, self._tls = host, port, tls
        self._names = names or Names()
        self._server_name = server_name
        self._is_name = not tcp.is_numeric(host)
        self.connect_limit, self._idle_limit, self._max_idle = connect_limit, idle_limit, max_idle
        self._idle: deque[WorkerConnection] = deque()
        self._all: set[WorkerConnection] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def open(self) -> int:
        return len(self._all)

    def beside(self, connect_limit: float, *, idle_limit: float) -> Pool:
        """Another one to the same worker, for what is not to wait for turns, nor they for it. Limits in seconds."""
        return Pool(
            self._host,
            self._port,
            tls=self._tls,
            server_name=self._server_name,
            connect_limit=connect_limit,
            idle_limit=idle_limit,
            max_idle=1,
            names=self._names,
        )

    def take(self) -> WorkerConnection | None:
        """The most recently used idle connection, or None: then `connect`."""
        while self._idle:
            connection = self._idle.pop()
            if connection._loop.time() - connection.quiet_since < _IDLE_A_WHILE or connection.is_quiet():
                return connection
            connection.close()
        return None

    async def connect(self) -> WorkerConnection:
        """A new connection. Raises ConnectFailed or LocalLimit."""
        loop = asyncio.get_running_loop()
        try:
            async with _Limit(loop, self.connect_limit):
                connection = await self._open(loop)
        except TimeoutError as error:
            if self._is_name and not self._names.knows(self._host):
                raise NameUnknown(f"the name {self._host} was not answered") from error
            raise ConnectFailed(f"no connection within {self.connect_limit:g} s") from error
        except NoAddress as error:
            raise NameUnknown(str(error)) from error
        except OSError as error:  # ssl.SSLError and socket.gaierror are OSErrors
            if error.errno in _OUR_FAULT:
                raise LocalLimit(f"the router cannot open another connection: {error.strerror}") from error
            kind = ConnectReset if isinstance(error, ConnectionError) else ConnectFailed
            if error.errno == errno.ECONNREFUSED:
                kind = ConnectRefused
            raise kind(error.strerror or str(error) or type(error).__name__) from error
        # Counted only now: uvloop never says connection_lost to one whose making was cancelled after connection_made.
        if connection.connected:
            self._all.add(connection)
        return connection

    async def _open(self, loop: asyncio.AbstractEventLoop) -> WorkerConnection:
        where: dict[str, Any] = {"host": self._host, "port": self._port}
        if self._is_name:
            where = {"sock": await tcp.dial(await self._names.addresses(self._host, self._port))}
        connection = WorkerConnection(loop, self)
        between = None
        if self._tls is not None:
            between = TlsTransport(loop, connection, self._tls, self._server_name or self._host)
        try:
            await loop.create_connection(lambda: between or connection, **where)
        except BaseException:  # also when cancelled: the socket is nobody else's yet
            if "sock" in where:
                where["sock"].close()
            raise
        if between is not None:
            await between.shake_hands()
        return connection

    def give(self, connection: WorkerConnection) -> None:
        """Take back a connection that is ready for the next request."""
        if self._closing or len(self._idle) >= self._max_idle:
            connection.close()
            return
        loop = connection._loop
        connection.quiet_since = loop.time()
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
        while self._idle and self._idle[0].quiet_since <= oldest:
            self._idle.popleft().close()
        self._reaper = (
            loop.call_at(self._idle[0].quiet_since + self._idle_limit, self._reap, loop) if self._idle else None
        )

    def close(self) -> None:
        """Close idle connections now and busy ones when they are released."""
        self._closing = True
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        while self._idle:
            self._idle.pop().close()
