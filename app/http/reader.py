"""A client's requests, read: the bytes of a connection are made exchanges, and what two readers could understand
differently is refused (RFC 9112 11.2). The parser is httptools (llhttp), as it is for answers."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

import httptools

from app.errors import TurnError
from app.http.exchange import Connection, Exchange, Proxy, head_bytes
from app.http.headers import OF_CONNECTION, Header, connection_named
from app.http.origins import Origins, is_preflight

Route = Callable[[str], Proxy | None]
"""The proxy that answers to a path, if any."""

_DOTS = re.compile(rb"(?:^|[/\\])\.{1,2}(?:[/\\;]|$)")
"""A segment that would lead elsewhere (RFC 3986 5.2.4)."""
_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?", re.ASCII)
_LOOKED_AT = OF_CONNECTION | {b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"}
_LARGE = 65536
"""Bytes of a body from which on it goes past the parser, which would copy it."""
_SHORT = 256
"""Bytes of a url, or a host, that may be remembered."""
_NO_TARGET = (b"", b"", "", False, b"")
_ENDLESS = sys.maxsize
_ALLOWED = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"


class Reader:
    """Takes the bytes of a connection for requests, each a new Exchange, and refuses what two readers could understand
    differently. Its `on_` methods are called by httptools, in the order of the bytes."""

    def __init__(self, connection: Connection, route: Route, origins: Origins | None, limit: int) -> None:
        """`limit`: bytes that a head may have, and what goes with the chunks of a body."""
        self._connection, self._route, self._origins, self._limit = connection, route, origins, limit
        self._exchange: Exchange | None = None
        """What was read last; its body may still be coming, also after its answer."""
        self.in_head = False
        """From a head's first byte to its end. `_url` and `_headers` are what has come of it; among them how many
        `_hosts` (an invalid one counts as two), and what `_seldom` is said."""
        self._url = b""
        self._headers: list[Header] = []
        self._hosts = 0
        self._seldom: list[Header] = []
        self._url_before: bytes | None = None
        self._host_before: bytes | None = None
        """What was read last, if it is short: a client says it again with each request. The `_target` is the url's."""
        self._target = _NO_TARGET
        self._may_be_large = False
        self._announced = b""
        """The length of a body that has not come to its end, and may not have begun; how much of it `_came`."""
        self._came = 0
        self._without_offer = b""
        """The head that has just come, without the offer to change the protocol that it made: to be read instead."""
        self._past = 0
        """Bytes that go to the exchange as they come, past the parser: the rest of a large body, or all (_ENDLESS)."""
        self._overhead = 0
        """Bytes since the last that were of use: of an endless head, or of what goes with the chunks of a body."""
        self._is_overhead = True
        self._parser = self._new_parser()

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what follows is not served, and no error
        return parser

    def close(self) -> None:
        """It holds us: left alone, both would be garbage for the collector."""
        self._parser = self._exchange = None

    def marked(self, headers: list[Header]) -> list[Header]:
        """Of the answer to what was read last, as far as it came."""
        origins = self._origins
        crossing = None if origins is None else origins.asked(unquote(self._url.decode("latin-1")), self._headers)
        return headers if crossing is None else crossing.marked(headers)

    @property
    def path(self) -> bytes:
        """Of the request that is being read, as far as it has come; nothing between two."""
        with contextlib.suppress(TurnError):
            return _read_target.__wrapped__(self._url)[0]
        return b""

    @property
    def in_body(self) -> bool:
        """Whether the client owes bytes of a body. In another protocol it owes nothing."""
        return self._exchange is not None and self._exchange.more_body and self._past != _ENDLESS

    def feed(self, data: bytes) -> None:
        """Raises TurnError for what cannot be read; nothing may follow that."""
        if self._past:
            data = self._pass(data)
            if not data:
                return
        self._is_overhead = True
        limit = self._limit
        self._may_be_large = self.in_head or len(data) > limit
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                if not self._without_offer:
                    self._past = _ENDLESS
                    self._pass(data)
                    return
                data, self._without_offer = self._without_offer + data, b""
                self._parser = self._new_parser()  # this one may have seen the last request of the connection
                continue
            except httptools.HttpParserCallbackError as error:
                if isinstance(error.__context__, TurnError):
                    raise error.__context__ from None
                raise
            except httptools.HttpParserError as error:
                raise _not_http() from error
            break
        if self._announced and not self.in_head:  # and its body has not come to its end
            missing = int(self._announced) - self._came
            if missing > _LARGE:
                self._past, self._announced = missing, b""
        if self._is_overhead:
            self._overhead += len(data)
            if self._overhead > limit:
                raise _head_too_large(limit)
        else:
            self._overhead = 0

    def _pass(self, data: bytes) -> bytes:
        """What there is nothing to parse of. Returns what comes behind it."""
        assert self._exchange is not None
        piece = data if len(data) <= self._past else data[: self._past]
        self._exchange.feed(piece)
        if self._past != _ENDLESS:
            self._past -= len(piece)
            if not self._past:
                self._url = b""
                self._exchange.received()
                self._parser = self._new_parser()
        return data[len(piece) :]

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._announced = b""
        self._hosts = self._came = 0
        if self._seldom:
            self._seldom = []
        self._is_overhead = False
        self.in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # a trailer: those end here
        name = name.lower()
        if name in _LOOKED_AT:
            if name == b"host":
                if value == self._host_before:
                    self._hosts += 1
                elif _is_host(value):
                    self._hosts += 1
                    self._host_before = value if len(value) <= _SHORT else None
                else:
                    self._hosts += 2
            elif name == b"content-length":
                self._announced = value  # a number: llhttp has taken it for one
            else:
                self._seldom.append((name, value))
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.in_head = self._is_overhead = False
        parser, url, headers, origins = self._parser, self._url, self._headers, self._origins
        seldom = self._seldom
        if self._may_be_large and len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > self._limit:
            raise _head_too_large(self._limit)
        keep_alive = http_1_1 = parser.should_keep_alive()
        # Without a word of the connection only HTTP/1.1 keeps it, and llhttp takes long to say its version.
        if seldom or not keep_alive:
            coded = _is_coded(seldom)
            version = parser.get_http_version()
            http_1_1 = version == "1.1"
            if not http_1_1 and (version != "1.0" or self._hosts > 1 or coded):
                raise _not_http()
        if http_1_1 and self._hosts != 1:
            raise TurnError("invalid_request", "a request needs exactly one valid Host")
        method = parser.get_method()
        if method == b"CONNECT":
            raise TurnError("invalid_request", "this router makes no tunnels")
        if url != self._url_before:
            self._target = (_read_target if len(url) <= _SHORT else _read_target.__wrapped__)(url)
            self._url_before = url if len(url) <= _SHORT else None
        raw_path, query, path, strays, authority = self._target
        proxy = self._route(path)
        if proxy is not None:
            if strays:
                raise TurnError("invalid_request", "the path of the request leads elsewhere")
            if method == b"TRACE":  # it would tell what we add on the way (RFC 9110 9.3.8)
                raise TurnError("method_not_allowed", "TRACE is not allowed", headers=((b"allow", _ALLOWED),))
        if authority:  # what Host says counts for nothing then (RFC 9112 3.2.2)
            headers = [(b"host", authority), *(pair for pair in headers if pair[0] != b"host")]
        switches = b""
        if seldom and parser.should_upgrade():
            if proxy is not None and http_1_1 and method == b"GET":
                switches = _websocket(headers)
            if not switches:
                # Go on as if it had offered nothing (RFC 9110 7.8): Java's client does in every request. httptools
                # takes what follows for no HTTP then, be it the body.
                line = request_line(method, url, http_1_1)
                self._without_offer = head_bytes(line, (pair for pair in headers if pair[0] != b"upgrade"))
                return
        mark = None
        if origins is not None and (crossing := origins.asked(path, headers)) is not None:
            if is_preflight(method, headers):
                proxy = crossing
            else:
                mark = crossing.marked
        connection = self._connection
        answerer = connection if proxy is None else proxy
        self._exchange = exchange = Exchange(connection, answerer, method, raw_path, query, headers)
        # What is said here is seldom so: an exchange has it otherwise by itself.
        if mark is not None:
            exchange.mark = mark
        if not http_1_1:
            exchange.http_1_1 = exchange.keep_alive = False
        elif not keep_alive:
            exchange.keep_alive = False
        if seldom and http_1_1 and _expects_continue(seldom):
            exchange.expects_continue = True
        if switches:
            exchange.switches = switches
        connection.enqueue(exchange)

    def on_body(self, body: bytes) -> None:
        self._is_overhead = False
        self._came += len(body)
        self._exchange.feed(body)  # type: ignore[union-attr]

    def on_message_complete(self) -> None:
        if not self._without_offer:
            self._url = self._announced = b""
            self._exchange.received()  # type: ignore[union-attr]


def _is_coded(seldom: Sequence[Header]) -> bool:
    """Whether the body is in chunks. Raises TurnError for any other transfer coding."""
    codings = [value for name, value in seldom if name == b"transfer-encoding"]
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
        raise TurnError("invalid_request", "the only transfer coding that is understood is chunked")
    return bool(codings)


def _expects_continue(seldom: Sequence[Header]) -> bool:
    return [value.lower() for name, value in seldom if name == b"expect"][-1:] == [b"100-continue"]


def _is_host(value: bytes) -> bool:
    """Whether a Host header has a host, and a port perhaps, or nothing (RFC 9110 7.2)."""
    return _HOST.fullmatch(value.strip()) is not None


def request_line(method: bytes, target: bytes, http_1_1: bool) -> bytes:
    return b"%b %b HTTP/1.%d\r\n" % (method, target, http_1_1)


@functools.lru_cache(maxsize=1024)
def _read_target(url: bytes) -> tuple[bytes, bytes, str, bool, bytes]:
    """Of a request target: path and query as they came (a mark without a query is the path's), the path as it is
    meant, whether that leads elsewhere by dots, and the authority, if it has one. Raises TurnError for what names no
    resource of ours."""
    if b"#" in url:
        raise TurnError("invalid_request", "a request target has no fragment")
    authority = b""
    if not url.startswith(b"/"):
        # The absolute form (RFC 9112 3.2.2)
        scheme, found, rest = url.partition(b"://")
        if not found or scheme.lower() not in (b"http", b"https"):
            raise TurnError("invalid_request", "the request target is not a path")
        authority, slash, path = rest.partition(b"/")
        if b"?" in authority:
            raise TurnError("invalid_request", "the request target has no path")
        authority = authority.rpartition(b"@")[2]
        if authority[:1] in (b"", b":") or not _is_host(authority):
            raise TurnError("invalid_request", "the request target names no host")
        url = slash + path or b"/"
    raw_path, _, query = url.partition(b"?")
    try:
        meant = unquote(raw_path.decode("ascii"))
    except UnicodeDecodeError:
        raise TurnError("invalid_request", "the request target is not ASCII") from None
    strays = _DOTS.search(meant.encode("utf-8", "replace")) is not None
    return raw_path if query else url, query, meant, strays, authority


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
