"""The client's side of the data plane: our HTTP/1.1 protocol under uvicorn's server.

uvicorn keeps what it is good at: listening, the lifespan, draining, and the control plane's requests, which its own
protocol serves. Proxied requests are ours from the parser on, because every layer between a client's socket and a
turn costs more than the turn itself:
- a turn runs in the read callback that completed its request, without a task (`app/http/inplace.py`), and writes to the
  client's transport from the worker's read callback;
- the response head travels with the first piece of the body when that is there, in one system call;
- one timer for all connections watches how long each is idle, or slow to send its request, instead of one per request.

And because a router must be exact where an application server need not be: requests that two readers could take for
different ones are refused (RFC 9112 11.2), heads and waits are bounded, bodies to HTTP/1.0 clients end by closing,
offers to change the protocol are declined but for WebSocket, and every error has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import functools
import http
import logging
import re
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.errors import ClientDisconnected, TurnError, error_response
from app.http.headers import Header, connection_named
from app.http.inplace import Wake, Write, direct_write

log = logging.getLogger("coatcheck.server")


class Turn(Protocol):
    """What is told of the client, once it has been opened for an exchange."""

    def start(self) -> None: ...
    def cancel(self) -> None: ...
    def client_left(self) -> None: ...
    def client_took(self) -> None: ...


class Proxy(Protocol):
    """Opens a turn for each exchange."""

    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn: ...


class ClientLimits(msgspec.Struct, frozen=True):
    """Bounds of what a client may send: bytes, and seconds (0: none)."""

    head_bytes: int = 65536
    head_wait: float = 30.0
    """From a request's first byte to the end of its head."""
    body_wait: float = 60.0
    """Without a byte of its body."""
    idle: float = 5.0
    """Between requests."""


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}
_DOTS = re.compile(rb"(?:^|[/\\])\.{1,2}(?:[/\\;]|$)")
"""A segment that would lead elsewhere (RFC 3986 5.2.4)."""
_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?", re.ASCII)
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect"})
_LARGE = 65536
"""Bytes of a body from which on it goes past the parser, which would copy it."""
_LEFT_OVER = 64 << 20
_LINGER = 30.0
_LINGER_IDLE = 2.0
"""Bytes that are still read after the last answer, seconds in all, and seconds without any. A connection that is closed
with bytes unread is reset, and its client would lose the answer (RFC 9112 9.6)."""
_RESET = struct.pack("ii", 1, 0)


class ClientProtocol(HttpToolsProtocol):
    """One client connection. `client_protocol` makes the class that uvicorn is given as `http=`."""

    route: Callable[[str], Proxy | None]
    """The proxy that answers to a path, if any."""
    draining: Callable[[], bool]
    """Whether the process is about to stop."""
    limits: ClientLimits
    watchman: Watchman

    write: Write
    peer: str | None = None
    scheme_name = b""
    cycle: Any
    _since = 0.0
    """When what we wait for began; for a body, its last byte."""
    _awaits_head = False
    """A request has begun and its head is not complete."""
    _overhead = 0
    """Bytes since the last that were of use: of an endless head, or of what goes with the chunks of a body."""
    _is_overhead = True
    _may_be_large = False
    _hosts = 0
    _coded = False
    _current: Any = None
    """What is being answered; `cycle` is what was read last."""
    _next: Exchange | None = None
    """To be started when the parser has returned."""
    _declared = 0
    """The length that the head said which has just come."""
    _body_left = 0
    """Of a large body."""
    _tunnel: Exchange | None = None
    """The connection speaks another protocol now."""
    _lingers = 0.0
    """When the last answer was sent, if the client was still sending."""
    _left_over = 0
    _error: TurnError | None = None
    """What follows cannot be read, and why."""

    # -- asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.write = direct_write(transport)
        self.peer = self.client[0] if self.client else None
        self.scheme_name = b"https" if self.scheme == "https" else b"http"
        self._since = self.loop.time()
        self.watchman.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.watchman.forget(self)
        self.write = _nowhere
        current, self.cycle = self._current, None
        self._next = None
        self.pipeline.clear()
        super().connection_lost(exc)
        if type(current) is Exchange:
            current.left()
        elif current is not None and not current.response_complete:
            current.disconnected = True
            current.message_event.set()

    def data_received(self, data: bytes) -> None:
        if not self._awaits_head:
            self._since = self.loop.time()
        if self._tunnel is not None:
            self._tunnel.feed(data)
            self._tunnel.wake()
            return
        if self._body_left:
            data = self._take_body(data)
            if not data:
                self.cycle.wake()
                return
        if self._error is not None or self._lingers:
            self._left_over += len(data)
            if self._left_over > _LEFT_OVER:
                self.transport.close()
            return
        try:
            self._parse(data)
        except TurnError as error:
            self._refuse(error)
            return
        exchange, current = self._next, self._current
        if exchange is not None:
            self._next = None
            exchange.begin()
        elif type(current) is Exchange:
            current.wake()

    def _take_body(self, data: bytes) -> bytes:
        """Of a large body of known length nothing is left to parse. Answers what comes behind it."""
        piece = data if len(data) <= self._body_left else data[: self._body_left]
        self._body_left -= len(piece)
        self.cycle.feed(piece)
        if not self._body_left:
            self.cycle.received()
            self.parser = _request_parser(self)
        return data[len(piece) :]

    def _parse(self, data: bytes) -> None:
        """Raises TurnError."""
        self._is_overhead = True
        self._may_be_large = self._awaits_head or len(data) > self.limits.head_bytes
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                exchange = self.cycle
                if type(exchange) is Exchange and exchange.switches:
                    self._tunnel = exchange
                    exchange.feed(data)
                    return
                self._decline_upgrade()
                if data:
                    continue
            except httptools.HttpParserCallbackError as error:
                if isinstance(error.__context__, TurnError):
                    raise error.__context__ from None
                raise
            except httptools.HttpParserError as error:
                raise _not_http() from error
            break
        if self._declared > _LARGE and type(self.cycle) is Exchange:
            self._body_left = self.cycle.missing(self._declared)
        self._declared = 0
        self._overhead = self._overhead + len(data) if self._is_overhead else 0
        if self._overhead > self.limits.head_bytes:
            raise _head_too_large(self.limits.head_bytes)

    def resume_writing(self) -> None:
        super().resume_writing()
        if type(self._current) is Exchange:
            self._current.took()

    def look_after(self, now: float) -> None:
        """Called every now and then: close what is idle, refuse what is slow."""
        limits, cycle = self.limits, self.cycle
        waited = now - self._since
        if self._lingers:
            if waited > _LINGER_IDLE or now - self._lingers > _LINGER:
                self.transport.close()
            return
        if self._awaits_head:
            if limits.head_wait and waited > limits.head_wait:
                self._refuse(TurnError("request_timeout", f"no complete request within {limits.head_wait:g} s"))
        elif cycle is None or cycle.response_complete:
            if waited > limits.idle and not self.pipeline:
                self.transport.close()
        elif self._tunnel is not None or not cycle.more_body or self.flow.read_paused:
            pass  # nothing is expected of the client, or nothing is taken from it
        elif limits.body_wait and waited > limits.body_wait:
            self._refuse(TurnError("request_timeout", f"nothing of the request body for {limits.body_wait:g} s"))

    # -- the parser's side

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._hosts, self._coded = 0, False
        self._awaits_head = True
        self._is_overhead = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._awaits_head:
            return  # a trailer: those end here
        name = name.lower()
        if name in _ONCE:
            if name == b"host":
                self._hosts += 1 if _is_host(value) else 2
            elif name == b"content-length":
                self._declared = int(value)  # llhttp has taken it for one
            elif name == b"expect":
                self.expect_100_continue = value.lower() == b"100-continue"
            elif self._coded or value.strip().lower() != b"chunked":
                raise TurnError("invalid_request", "the only transfer coding that is understood is chunked")
            else:
                self._coded = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._awaits_head = self._is_overhead = False
        parser, url = self.parser, self.url
        version = parser.get_http_version()
        if self._may_be_large and len(url) + sum(map(_header_size, self.headers)) > self.limits.head_bytes:
            raise _head_too_large(self.limits.head_bytes)
        if version == "1.1":
            if self._hosts != 1:
                raise TurnError("invalid_request", "a request needs exactly one valid Host")
        elif version != "1.0" or self._hosts > 1 or self._coded:
            raise _not_http()
        method = parser.get_method()
        if method == b"CONNECT":
            raise TurnError("invalid_request", "this router makes no tunnels")
        raw_path, query, path, strays = (_read_target if len(url) <= 256 else _read_target.__wrapped__)(url)
        proxy = self.route(path)
        if proxy is None:
            self._serve_control(raw_path + b"?" + query if query else raw_path)
            return
        if strays:
            raise TurnError("invalid_request", "the path of the request leads elsewhere")
        before = self.cycle
        exchange = Exchange(self, proxy, method, raw_path, query, version == "1.1")
        self.cycle = exchange  # with all that uvicorn uses of one
        if before is None or before.response_complete:
            self._start(exchange)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, None))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        self._is_overhead = False
        cycle = self.cycle
        if type(cycle) is Exchange:
            cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if type(cycle) is Exchange:
            cycle.received()
        else:
            super().on_message_complete()

    def _serve_control(self, url: bytes) -> None:
        headers, expects = self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers = self.scope["headers"] = headers
        super().on_headers_complete()

    def _start(self, exchange: Exchange) -> None:
        if self.draining():
            # Whoever keeps this connection alive (a load balancer) must not write the next request into it just as it
            # is closed: a request that may have been received cannot be sent again.
            exchange.keep_alive = False
        self._current = self._next = exchange
        self.tasks.add(exchange)  # type: ignore[arg-type]  # waited for, and cancelled, at shutdown

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if type(cycle) is Exchange:
            self._start(cycle)
            self.loop.call_soon(self._start_next)
            return
        if self.draining():
            cycle.keep_alive = False
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def _start_next(self) -> None:
        exchange, self._next = self._next, None
        if exchange is not None and not exchange.disconnected:
            exchange.begin()

    def on_response_complete(self) -> None:
        self._current = None
        self._since = self.loop.time()
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._lingers:
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._error is not None:
            self._answer_error(self._error)

    def ended(self, exchange: Exchange) -> None:
        """The turn has ended."""
        self.tasks.discard(exchange)

    def _decline_upgrade(self) -> None:
        """Go on as if the request had offered no other protocol (RFC 9110 7.8), as Java's client does in every one.
        httptools takes the head for the whole message then, and the body for something else."""
        cycle = self.cycle
        framing = [
            b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")
        ]
        if framing and not cycle.response_complete:
            cycle.more_body = True
            self.parser = _parser_in_body(self, b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    # -- refusing

    def send_400_response(self, msg: str) -> None:
        self._refuse(_not_http())

    def _refuse(self, error: TurnError) -> None:
        """Answer what is no proper request, after all that came before it, and close. Nothing after it is read."""
        if self._error is not None:
            return
        self._error = error
        self._awaits_head = False
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete:  # it is this one that is wrong
            if type(cycle) is not Exchange:
                self.transport.close()
                return
            if cycle.give_up(error):
                return
            if cycle is self._next:
                self._next = self._current = None
                self.ended(cycle)
            else:
                self.pipeline.popleft()
        if self._next is not None:
            exchange, self._next = self._next, None
            exchange.begin()
        elif type(self._current) is Exchange:
            self._current.wake()
        if self._current is None:
            self._answer_error(error)

    def _answer_error(self, error: TurnError) -> None:
        status, headers, body = error_response(error)
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        self.transport.write(b"".join([_STATUS_LINES[status], *lines, b"connection: close\r\n\r\n", body]))
        self.hang_up()

    def hang_up(self) -> None:
        """The last answer was written: close, but let a client that is still sending read it first."""
        cycle = self.cycle
        sending = self._error is not None or self._awaits_head or (cycle is not None and cycle.more_body)
        if not sending or self._tunnel is not None:
            self.transport.close()
        elif not self._lingers:
            self._since = self._lingers = self.loop.time()
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()


def client_protocol(
    route: Callable[[str], Proxy | None],
    draining: Callable[[], bool] = lambda: False,
    limits: ClientLimits | None = None,
) -> type[ClientProtocol]:
    """The protocol class that gives requests for a path to the proxy that `route` answers, if any, and which ends each
    connection with its next answer while `draining`."""
    limits = limits or ClientLimits()
    attributes = {
        "route": staticmethod(route),
        "draining": staticmethod(draining),
        "limits": limits,
        "watchman": Watchman(limits),
    }
    return type("ClientProtocol", (ClientProtocol,), attributes)


class Watchman:
    """One timer for the waits of all connections."""

    def __init__(self, limits: ClientLimits) -> None:
        waits = [wait for wait in (limits.head_wait, limits.body_wait, limits.idle) if wait]
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


class Exchange:
    """One proxied request and its answer, as `app.turn.turn.Client`, and as that of a cycle which uvicorn looks at."""

    # Defaults in the class: most requests never set most of these.
    switches = b""
    disconnected = False
    response_started = False
    response_complete = False
    more_body = True
    _size = 0
    """Bytes that wait for the turn; after the answer, bytes that nobody wants."""
    _least = 1
    _news: Wake | None = None
    _refusal: TurnError | None = None
    _turn: Turn | None = None
    _head: bytes | None = None
    _chunked = False
    _no_body = False
    _sized = False

    def __init__(
        self, protocol: ClientProtocol, proxy: Proxy, method: bytes, raw_path: bytes, query: bytes, http_1_1: bool
    ) -> None:
        parser = protocol.parser
        self._protocol, self._proxy = protocol, proxy
        self._transport = protocol.transport
        self.peer, self.scheme = protocol.peer, protocol.scheme_name
        self._http_1_1 = http_1_1
        self.method, self.raw_path, self.query, self.headers = method, raw_path, query, protocol.headers
        self.keep_alive: bool = http_1_1 and parser.should_keep_alive()
        self.waiting_for_100_continue = protocol.expect_100_continue
        if http_1_1 and self.method == b"GET" and parser.should_upgrade():
            self.switches = _websocket(protocol.headers)
        self._pieces: list[bytes] = []

    # -- the request's coming

    def begin(self) -> None:
        self._turn = turn = self._proxy.open(self, self._ended)
        turn.start()

    def feed(self, data: bytes) -> None:
        """A piece of the body has come. Its turn hears of it by `wake`."""
        self._size += len(data)
        if self.response_complete:
            if self._size > _LEFT_OVER:
                self._transport.close()
            return
        if data:
            self._pieces.append(data)
        if self._size > HIGH_WATER_LIMIT and self._size >= self._least:
            self._protocol.flow.pause_reading()

    def missing(self, length: int) -> int:
        """How much of a body of this length has not come."""
        return length - self._size if self.more_body and not self.response_complete else 0

    def received(self) -> None:
        """The body is complete."""
        if not self.switches:
            self.more_body = False

    def wake(self) -> None:
        news = self._news
        if news is not None and (self._size >= self._least or not self.more_body):
            self._news = None
            news.set()

    def give_up(self, error: TurnError) -> bool:
        """The rest of the body cannot be read. Answers whether the turn has begun: then it takes care of the answer."""
        if self._turn is None:
            return False
        self.keep_alive = False
        self._refusal = error
        news, self._news = self._news, None
        if news is not None:
            news.set()
        return True

    def left(self) -> None:
        """The connection is gone."""
        self.disconnected = True
        if self.response_complete:
            return  # the client, or we, closed after the answer: nobody left early
        news, self._news = self._news, None
        if news is not None:
            news.set()  # which may end the turn
        if self._turn is not None:
            self._turn.client_left()
        else:
            self._protocol.ended(self)  # also when its turn has never begun

    def took(self) -> None:
        if self._turn is not None:
            self._turn.client_took()

    def cancel(self, msg: object = None) -> None:
        """As uvicorn does with the tasks that did not end in time."""
        if self._turn is not None:  # not in place: the set that we are in is being gone through
            self._protocol.loop.call_soon(self._turn.cancel)

    def _ended(self, fault: Exception | None) -> None:
        self._turn = None
        if fault is not None:
            log.error("a turn failed after its answer had begun", exc_info=fault)
        if not self.response_complete and not self.disconnected:
            self.flush()
            self._cut()
        self._protocol.ended(self)

    def _cut(self) -> None:
        """Close without the end that the client waits for. Where closing is the end, only a reset says that it is
        none."""
        if self.response_started and not self._sized and not self._chunked:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
        else:
            self._transport.close()

    # -- what a turn asks for

    async def receive(self, least: int = 1) -> tuple[bytes, bool]:
        self._least = least
        if self.waiting_for_100_continue:
            self.waiting_for_100_continue = False
            if self.more_body and not self._pieces and not self.response_started:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.more_body and self._size < least:
            if self._refusal is None and not self.disconnected:
                self._protocol.flow.resume_reading()
                self._news = news = Wake()
                await news
            if self._refusal is not None and self.more_body and self._size < least:
                raise self._refusal
        if self.disconnected:
            raise ClientDisconnected
        pieces, self._pieces = self._pieces, []
        self._size = 0
        self._protocol.flow.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), self.more_body

    def watch(self) -> None:
        # A connection that is not read is not seen to close.
        self._protocol.flow.resume_reading()

    def interim(self, status: int, headers: list[Header]) -> None:
        if self._http_1_1 and not self.response_started and not self.disconnected:
            lines = [b"%b: %b\r\n" % pair for pair in headers]
            self._transport.write(b"".join([_STATUS_LINES[status], *lines, b"\r\n"]))

    def start(self, status: int, headers: list[Header]) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [_STATUS_LINES[status]]
        if status == 101:
            lines += (b"connection: upgrade\r\nupgrade: ", self.switches, b"\r\n")
            self.keep_alive = False
        elif self.switches:
            self.keep_alive = False  # what was sent behind the request is no HTTP
        self._no_body = self.method == b"HEAD" or status in (204, 304)
        self._sized = self._no_body or status == 101
        for name, value in headers:
            if name == b"content-length":
                self._sized = True
            lines += (name, b": ", value, b"\r\n")
        if not self._sized:
            if self._http_1_1:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False
        if not self.keep_alive and status != 101:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def write(self, data: bytes, end: bool) -> bool:
        if self.disconnected:
            return True
        if self._no_body:
            data = b""
        elif self._chunked:
            if data:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if end else b"%x\r\n%b\r\n" % (len(data), data)
            elif end:
                data = b"0\r\n\r\n"
        if self._head is not None:
            data = self._head + data
            self._head = None
        protocol = self._protocol
        if data:
            protocol.write(data)
        if end:
            self.response_complete = True
            self._pieces = []
            if not self.keep_alive:
                protocol.hang_up()
            protocol.on_response_complete()
            return True
        return not protocol.flow.write_paused

    def write_chunk(self, frame: bytes, start: int) -> bool:
        if self._head is not None or not self._chunked:
            return self.write(frame[start:-2], False)
        protocol = self._protocol
        protocol.write(frame)
        return not protocol.flow.write_paused

    def flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self.disconnected:
            self._protocol.write(head)


@functools.lru_cache(maxsize=1024)
def _is_host(value: bytes) -> bool:
    """Whether a Host header has a host, and a port perhaps, or nothing (RFC 9110 7.2)."""
    return _HOST.fullmatch(value.strip()) is not None


def _nowhere(data: bytes) -> None:
    """Where what is written to a lost connection goes."""


def _header_size(header: Header) -> int:
    return len(header[0]) + len(header[1]) + 4


@functools.lru_cache(maxsize=1024)
def _read_target(url: bytes) -> tuple[bytes, bytes, str, bool]:
    """Of a request target: path and query as they came, the path as it is meant, and whether that leads elsewhere
    by dots. Raises TurnError for what names no resource of ours."""
    if b"#" in url:
        raise TurnError("invalid_request", "a request target has no fragment")
    if not url.startswith(b"/"):
        # The absolute form (RFC 9112 3.2.2); its authority means no more to us than Host does.
        scheme, found, rest = url.partition(b"://")
        if not found or scheme.lower() not in (b"http", b"https"):
            raise TurnError("invalid_request", "the request target is not a path")
        authority, slash, path = rest.partition(b"/")
        if b"?" in authority:
            raise TurnError("invalid_request", "the request target has no path")
        url = slash + path or b"/"
    raw_path, _, query = url.partition(b"?")
    try:
        meant = unquote(raw_path.decode("ascii"))
    except UnicodeDecodeError:
        raise TurnError("invalid_request", "the request target is not ASCII") from None
    return raw_path, query, meant, _DOTS.search(meant.encode("utf-8", "replace")) is not None


def _websocket(headers: Sequence[Header]) -> bytes:
    """`websocket` if that is what a request asks to go on with (RFC 6455 4.1), else nothing."""
    named = any(b"upgrade" in connection_named(value) for name, value in headers if name == b"connection")
    asked = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    bodiless = not any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)
    return b"websocket" if named and asked == [b"websocket"] and bodiless else b""


def _not_http() -> TurnError:
    return TurnError("invalid_request", "the request is not valid HTTP/1.1")


def _head_too_large(limit: int) -> TurnError:
    return TurnError("head_too_large", f"the head of the request is larger than {limit} bytes")


def _request_parser(callbacks: object) -> Any:
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # of pipelined requests, as uvicorn's own
    return parser


def _parser_in_body(protocol: HttpToolsProtocol, head: bytes) -> Any:
    """A parser that tells `protocol` what comes after `head`, and nothing of `head` itself."""

    class Callbacks:
        in_head = True

        def __getattr__(self, name: str) -> Any:
            told = getattr(protocol, name)
            if name == "on_message_complete":
                return told  # of a body of no bytes the head is the end
            return lambda *args: None if self.in_head else told(*args)

    callbacks = Callbacks()
    parser = _request_parser(callbacks)
    parser.feed_data(head)
    callbacks.in_head = False
    return parser
