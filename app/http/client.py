"""The client's side: our HTTP/1.1 connection under uvicorn's server.

uvicorn keeps what it is good at: listening, the lifespan, draining, and the control plane's requests, each of which is
handed to its own protocol together with the connection. Requests for workers are ours from the parser on, because every
layer between a client's socket and a turn costs more than the turn itself:
- a turn runs in the read callback that completed its request, without a task (`app/http/inplace.py`), and writes to the
  client's transport from the worker's read callback (`app/http/exchange.py`);
- one timer for all connections watches how long each is idle, or slow to send its request, instead of one per request.

And because a router must be exact where an application server need not be: requests that two readers could take for
different ones are refused (`app/http/reader.py`), heads and waits are bounded, bodies to HTTP/1.0 clients end by
closing, offers to change the protocol are declined but for WebSocket, and every error has the shape of the API that was
asked.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.errors import ClientDisconnected, TurnError, error_response
from app.http import tcp
from app.http.exchange import STATUS_LINES, Connection, Exchange, Turn, head_bytes
from app.http.inplace import Driven, taken_by_peer
from app.http.origins import Origins
from app.http.reader import Reader, Route, request_line


class ClientLimits(msgspec.Struct, frozen=True):
    """Bounds of what a client may send: bytes, and seconds (0: none)."""

    head_bytes: int = 65536
    head_wait: float = 30.0
    """From a request's first byte to the end of its head."""
    body_wait: float = 60.0
    """Without a byte of its body."""
    idle: float = 5.0
    """Between requests."""
    read_wait: float = 300.0
    """Without taking anything of what it is answered."""


_NOT_HANDED_OVER = frozenset({b"connection", b"content-length", b"transfer-encoding", b"expect"})
_CONTROL_BODY = 1 << 20
"""Bytes that the body of a request to the control plane may have."""
_LAST_WORDS = 0.2
"""Seconds that a connection without a request may still bring one when we stop."""
_LINGER = 30.0
_LINGER_IDLE = 2.0
"""Seconds in all, and seconds without a byte, that are read on after the last answer. A connection that is closed with
bytes unread is reset, and its client would lose the answer (RFC 9112 9.6)."""


class ClientProtocol(Connection):
    """One client connection. `client_protocol` says how it comes to be.

    What uvicorn shares with a protocol, and all that we use of it: the arguments that it makes one with, which we only
    pass on, and in them `server_state`, whose `connections` it tells to `shutdown()` when it stops and waits for, and
    whose `tasks` it waits for and then cancels. See `shutdown`, `hand_over` and `Exchange.cancel`.
    """

    def __init__(
        self,
        route: Route,
        draining: Callable[[], bool],
        limits: ClientLimits,
        watchman: Watchman,
        origins: Origins | None,
        **uvicorns: Any,
    ) -> None:
        self.limits = limits
        self._draining, self._watchman, self._uvicorns = draining, watchman, uvicorns
        self._connections: set[Any] = uvicorns["server_state"].connections
        self._tasks: set[Any] = uvicorns["server_state"].tasks
        self._reader = Reader(self, route, origins, limits.head_bytes)
        self._queue: deque[Exchange] = deque()
        """What was read and is not answered: the first is, when it has begun; the last may still get its body."""
        self.read_paused = self.write_paused = False
        self._since = 0.0
        """When what we wait for began; for a body, its last byte. As it was last looked after: what has `_stirred`
        since then begins then."""
        self._stirred = False
        self._error: TurnError | None = None
        """What follows cannot be read, and why; answered behind the queue."""
        self._lingers = 0.0
        """When the last answer was sent, if the client was still sending. The queue is empty then."""
        self._waits = self._taken = 0
        """Of what waits to be taken by the client, when we looked last: whether there is any, as a size; and how much
        it had taken before, in bytes. Neither has changed since `_took_at`."""
        self._took_at = 0.0

    # -- asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._connections.add(self)
        self._watchman.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        current = self._queue[0] if self._queue else None
        self._leave()
        if current is not None:
            current.left()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if not reader.in_head:
            self._stirred = True
        if self._error is not None or self._lingers:
            self.unwanted(len(data))
            return
        try:
            reader.feed(data)
        except TurnError as error:
            self._refuse(error)
        else:
            self._advance()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._queue:
            self._queue[0].took()

    def _leave(self) -> None:
        """Nothing is read from the transport or written to it any more."""
        self._watchman.forget(self)
        self._connections.discard(self)
        self.write = _nowhere
        self.read_paused = False
        self._reader.close()
        self._queue.clear()

    # -- uvicorn's side

    def shutdown(self) -> None:
        """Close behind what is to be answered, and behind a request that is on its way: to close a connection with
        bytes unread resets it, and whoever sent them (a load balancer) may not send them again."""
        if self._queue:
            self._queue[-1].keep_alive = False
        else:
            self.loop.call_later(_LAST_WORDS, self._part)

    def _part(self) -> None:
        if self._queue:
            self._queue[-1].keep_alive = False
        elif self in self._connections and not self.transport.is_closing():  # else another protocol has it
            raw = self.transport.get_extra_info("socket")
            if raw is None or tcp.is_quiet(raw):
                self.transport.close()
            else:
                self.loop.call_soon(self.shutdown)  # it is read first

    def hand_over(self, request: bytes) -> None:
        """Give the connection to uvicorn's own protocol, which answers this request and closes it."""
        self.resume_reading()
        self._leave()
        control = HttpToolsProtocol(**self._uvicorns)
        control.connection_made(self.transport)
        self.transport.set_protocol(control)
        if self.write_paused:
            control.pause_writing()
        control.data_received(request)

    # -- its exchanges

    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn:
        return _ControlTurn(self, exchange, over)

    def enqueue(self, exchange: Exchange) -> None:
        if self._queue:
            self.pause_reading()
        self._queue.append(exchange)

    def _advance(self) -> None:
        """Let the first in the queue go on; behind the last one goes the refusal of what came then."""
        if self._queue:
            exchange = self._queue[0]
            if exchange.begun:
                exchange.wake()
                return
            if self._draining():
                # Whoever keeps this connection alive (a load balancer) must not write the next request into it just as
                # it is closed: a request that may have been received cannot be sent again.
                exchange.keep_alive = False
            self._tasks.add(exchange)  # waited for, and cancelled, at shutdown
            exchange.begin()
        elif self._error is not None and not self._lingers and not self.transport.is_closing():
            status, headers, body = error_response(self._error, self._reader.path)
            headers = self._reader.marked(headers)
            self.transport.write(head_bytes(STATUS_LINES[status], [*headers, (b"connection", b"close")]) + body)
            self._hang_up()

    def answered(self, keep_alive: bool) -> None:
        """The answer to the first in the queue is complete."""
        self._queue.popleft()
        self._stirred = True
        self.left_over = 0
        if not keep_alive:
            self._hang_up()
        elif not self.transport.is_closing():
            if self.read_paused:
                self.resume_reading()
            if self._queue or self._error is not None:
                self.loop.call_soon(self._advance)

    def ended(self, exchange: Exchange) -> None:
        """Its turn has ended."""
        self._tasks.discard(exchange)

    # -- its end

    def look_after(self, now: float) -> None:
        """Called every now and then: close what is idle, refuse what is slow."""
        if self._stirred:
            self._stirred, self._since = False, now
        limits, reader, waited = self.limits, self._reader, now - self._since
        if self._has_stopped_reading(now):
            self.transport.abort()
        elif self._lingers:
            if waited > _LINGER_IDLE or now - self._lingers > _LINGER:
                self.transport.close()
        elif reader.in_head:
            if limits.head_wait and waited > limits.head_wait:
                self._refuse(TurnError("request_timeout", f"no complete request within {limits.head_wait:g} s"))
        elif not self._queue:
            if waited > limits.idle:
                self.transport.close()
        elif not self.read_paused and reader.in_body and limits.body_wait and waited > limits.body_wait:
            self._refuse(TurnError("request_timeout", f"nothing of the request body for {limits.body_wait:g} s"))

    def _has_stopped_reading(self, now: float) -> bool:
        """Whether something has waited for it for longer than is allowed, and it took nothing."""
        before, self._waits = self._waits, self.transport.get_write_buffer_size()
        if not self._waits or not self.limits.read_wait:
            return False
        taken = taken_by_peer(self.transport)
        if taken != self._taken or not before or (taken < 0 and self._waits < before):
            self._taken, self._took_at = taken, now
        return now - self._took_at > self.limits.read_wait

    def _refuse(self, error: TurnError) -> None:
        """Answer what is no proper request, after all that came before it, and close. Nothing after it is read."""
        if self._error is not None:
            return
        self._error = error
        self._reader.in_head = False
        if self._queue and self._queue[-1].more_body:  # it is this one that is wrong
            if self._queue[-1].begun:
                self._queue[-1].give_up(error)
                return
            self._queue.pop()
        self._advance()

    def _hang_up(self) -> None:
        """The last answer was written: close, but let a client that is still sending read it first."""
        self._queue.clear()
        reader = self._reader
        if self._error is None and not reader.in_head and not reader.in_body:
            self.transport.close()
            return
        self._since = self._lingers = self.loop.time()
        self.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def client_protocol(
    route: Route,
    draining: Callable[[], bool] = lambda: False,
    limits: ClientLimits | None = None,
    origins: Origins | None = None,
) -> type[asyncio.Protocol]:
    """What uvicorn is given as `http=`: makes the protocol that gives requests for a path to the proxy that `route`
    answers, if any, and which ends each connection with its next answer while `draining`; pages of `origins` may use
    it. uvicorn only calls it, and asks for no more of a class."""
    limits = limits or ClientLimits()
    made = functools.partial(ClientProtocol, route, draining, limits, Watchman(limits), origins)
    return cast(type[asyncio.Protocol], made)


class Watchman:
    """One timer for the waits of all connections."""

    def __init__(self, limits: ClientLimits) -> None:
        waits = [wait for wait in (limits.head_wait, limits.body_wait, limits.idle, limits.read_wait) if wait]
        self._every = min(1.0, max(0.02, min(waits) / 4)) if waits else 0.0
        self._watched: set[ClientProtocol] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: ClientProtocol) -> None:
        self._watched.add(connection)
        if self._timer is None and self._every:
            self._timer = connection.loop.call_later(self._every, self._round, connection.loop)

    def forget(self, connection: ClientProtocol) -> None:
        self._watched.discard(connection)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._timer = loop.call_later(self._every, self._round, loop)
        for connection in tuple(self._watched):
            connection.look_after(now)


class _ControlTurn:
    """A request to the control plane, which gets only whole ones: so what is promised of slow and endless bodies, of
    leave to send them and of the order of answers holds there too, and the application never waits for a client."""

    def __init__(self, connection: ClientProtocol, client: Exchange, over: Callable[[Exception | None], None]) -> None:
        self._connection, self._client = connection, client
        self._driven = Driven(lambda _: over(None), over)

    def start(self) -> None:
        self._driven.start(self._run())

    def cancel(self) -> None:
        self._driven.cancel()

    # `receive` says that the client has left, and nothing is written that it could be slow to take.
    def client_left(self) -> None: ...
    def client_took(self) -> None: ...

    async def _run(self) -> None:
        client = self._client
        client.keep_alive = False
        try:
            body, _ = await client.receive(_CONTROL_BODY + 1)
            if len(body) > _CONTROL_BODY:
                raise TurnError("request_too_large", f"the body of the request is larger than {_CONTROL_BODY} bytes")
        except ClientDisconnected:
            return
        except TurnError as error:
            status, headers, answer = error_response(error, client.raw_path)
            client.start(status, headers)
            client.write(answer, True)
            return
        target = client.raw_path + b"?" + client.query if client.query else client.raw_path
        headers = [pair for pair in client.headers if pair[0] not in _NOT_HANDED_OVER]
        headers += ((b"connection", b"close"), (b"content-length", b"%d" % len(body)))
        client.response_complete = True  # as far as we are concerned
        self._connection.hand_over(head_bytes(request_line(client.method, target, client.http_1_1), headers) + body)


def _nowhere(data: bytes) -> None:
    """Where what is written to a lost connection goes."""
