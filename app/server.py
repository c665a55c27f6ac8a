"""The client's side of the data plane under uvicorn: its HTTP protocol, with our own response writer for proxied paths.

uvicorn's parser, pipelining and flow control stay. What differs, and why:
- the response head is written together with the first piece of the body when that follows at once, as it does in every
  answer that is not a stream: one system call and one packet less (measured: a fifth of a JSON turn's CPU);
- header names and values are not checked again: they come from llhttp or from us;
- a body to an HTTP/1.0 client is ended by closing, never chunked, which such a client cannot read (RFC 9112 7.1);
- a response that its worker did not complete is cut without the noise of a fault of the application;
- a request that is not HTTP gets an error of OpenAI's shape;
- an offer to change the protocol (h2c, WebSocket) is declined and its request served, body and all;
- a turn may ask to be called when its client leaves (`coatcheck.on_disconnect` in the scope), which spares it a pending
  `receive()`, and is also told when another request was pipelined behind it.
The proxy itself stays plain ASGI and runs under any server.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.errors import TurnError, error_response
from app.proxy import BODY_FOLLOWS, ON_DISCONNECT

log = logging.getLogger("coatcheck.server")

Application = Callable[..., Coroutine[Any, Any, None]]


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(200, 600)}


class ClientProtocol(HttpToolsProtocol):
    """One client connection. `client_protocol` makes the class that uvicorn is given as `http=`."""

    route: Callable[[str], Application | None]
    """The application whose answers to a path go through our writer, if any."""
    draining: Callable[[], bool]
    """Whether the process is about to stop."""
    _serving: Response | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.draining():
            # Whoever keeps this connection alive (a load balancer) must not write the next request into it just as it
            # is closed: a request that may have been received cannot be sent again.
            cycle.keep_alive = False
        proxy = self.route(cycle.scope["path"])
        if proxy is not None:
            app = proxy
            self._serving = cycle = Response(cycle, self.loop)  # type: ignore[assignment]  # all that is used of one
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._decline_upgrade()
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _decline_upgrade(self) -> None:
        """Go on as if the request had offered no other protocol (RFC 9110 7.8), as Java's client does in every one.
        httptools takes the head for the whole message then, and the body for something else."""
        framing = [
            b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")
        ]
        if framing and not self.cycle.response_complete:
            self.cycle.more_body = True
            self.parser = _parser_in_body(self, b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._serving is not None:
            self._serving.left()
            self._serving = None

    def send_400_response(self, msg: str) -> None:
        answering = self._serving._cycle if self._serving is not None else self.cycle
        if answering is not None and answering.response_started and not answering.response_complete:
            self.transport.close()  # an error amid the bytes of another answer would be taken for a part of it
            return
        status, headers, body = error_response(TurnError("invalid_request", "the request is not valid HTTP/1.1"))
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        self.transport.write(b"".join([_STATUS_LINES[status], *lines, b"connection: close\r\n\r\n", body]))
        self.transport.close()


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
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    parser.feed_data(head)
    callbacks.in_head = False
    return parser


def client_protocol(
    route: Callable[[str], Application | None], draining: Callable[[], bool] = lambda: False
) -> type[ClientProtocol]:
    """The protocol class that gives requests for a path straight to the application that `route` answers, if any, and
    which ends each connection with its next answer while `draining`."""
    methods = {"route": staticmethod(route), "draining": staticmethod(draining)}
    return type("ClientProtocol", (ClientProtocol,), methods)


class Response:
    """Writes one response for uvicorn's request cycle, whose state it keeps as the cycle itself would."""

    __slots__ = ("_chunked", "_cycle", "_flush", "_head", "_left", "_loop", "_no_body")

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._loop = loop
        self._head: bytes | None = None
        self._flush: asyncio.Handle | None = None
        self._chunked = False
        self._no_body = False
        self._left: Callable[[], None] | None = None
        cycle.scope[ON_DISCONNECT] = self.on_disconnect  # type: ignore[literal-required]

    def on_disconnect(self, left: Callable[[], None]) -> None:
        """`left` is called once, in the loop, when the client leaves before the answer is complete."""
        cycle = self._cycle
        self._left = left
        cycle.flow.resume_reading()  # as a receive() would: a connection that is not read is not seen to close
        if cycle.disconnected:
            left()

    def left(self) -> None:
        """The connection is gone."""
        left, self._left = self._left, None
        if self._cycle.response_complete:
            return  # the client, or we, closed after the answer: nobody left early
        self._cycle.disconnected = True
        if left is not None:
            left()

    async def run_asgi(self, app: Application) -> None:
        cycle = self._cycle
        try:
            await app(cycle.scope, cycle.receive, self.send)
        except Exception:
            log.exception("a turn failed after its answer had begun")
        finally:
            if not cycle.response_complete and not cycle.disconnected:
                self._write_head()
                cycle.transport.close()  # without the end that the client waits for
            cycle.on_response = _nothing
            self._left = None
            del cycle.scope[ON_DISCONNECT]  # type: ignore[misc]  # it holds us: left alone, all this would be a cycle

    async def send(self, message: Any) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if message["type"] == "http.response.body":
            self._body(cycle, message.get("body", b""), message.get("more_body", False))
        else:
            self._start(cycle, message["status"], message["headers"])
            if BODY_FOLLOWS not in message:
                # A stream's first piece may be long in coming: the client is not kept from the head.
                self._flush = self._loop.call_soon(self._write_head)

    def _start(self, cycle: RequestResponseCycle, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        self._no_body = cycle.scope["method"] == "HEAD" or status in (204, 304)
        sized = False
        lines = [_STATUS_LINES[status]]
        for name, value in headers:
            if name == b"content-length":
                sized = True
            lines += (name, b": ", value, b"\r\n")
        if not sized and not self._no_body:
            if cycle.scope["http_version"] == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                cycle.keep_alive = False
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def _write_head(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._cycle.disconnected:
            self._cycle.transport.write(head)

    def _body(self, cycle: RequestResponseCycle, body: bytes, more: bool) -> None:
        head = self._head
        if self._no_body:
            data = b""
        elif self._chunked:
            if body:
                data = b"%x\r\n%b\r\n" % (len(body), body) if more else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            else:
                data = b"" if more else b"0\r\n\r\n"
        else:
            data = body
        if head is not None:
            self._head = None
            if self._flush is not None:
                self._flush.cancel()
            data = head + data
        if data:
            cycle.transport.write(data)
        if not more:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()


def _nothing() -> None:
    pass
