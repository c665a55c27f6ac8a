"""A worker's answer, read. The parser is httptools (llhttp), as it is for requests: both sides read HTTP alike."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any

import httptools

from app.http.headers import OF_CONNECTION, Header, header

_HEAD_BYTES = 256 * 1024
"""A worker's response head may not be longer, nor what comes with its body: trailers, extensions of chunks."""
_LOOKED_AT = OF_CONNECTION | {b"transfer-encoding"}
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)")


class NotHttp(Exception):
    """What the worker sent is not HTTP/1.1, or not to be read in one way alone."""


class Expected(enum.Enum):
    """What the request lets the worker answer."""

    ANSWER = enum.auto()
    HEAD = enum.auto()
    """A head that may announce a body, without it: the method was HEAD."""
    SWITCH = enum.auto()
    """An answer, or 101 and then bytes of another protocol."""


OnInterim = Callable[[int, list[Header]], None]
"""Told of a 1xx response, other than 100: status and headers."""


class Response:
    """What has come of one response, as httptools tells it. Made with its connection, begun anew for each request.

    `pieces` is the body that nobody has taken yet. `open_ended`: the head does not tell how long it is, and where not
    even chunks do, the connection's end is its end (`close_delimited`). `raw`: after 101 the bytes are another
    protocol's, and not parsed. `_seen` is what has come of a head that is not complete; `_refusal`, why the parser will
    not read it.
    """

    __slots__ = (
        "_chunk_ended",
        "_expected",
        "_head_bytes",
        "_interim",
        "_overhead",
        "_parser",
        "_plain",
        "_refusal",
        "_seen",
        "close_delimited",
        "complete",
        "headers",
        "keep_alive",
        "on_interim",
        "open_ended",
        "pieces",
        "raw",
        "status",
    )

    def __init__(self) -> None:
        self._parser: Any = self._new_parser()
        # Of these only the last response of a connection leaves anything behind.
        self.close_delimited = self.raw = self._interim = self._chunk_ended = False
        self._plain = True
        self._seen = b""
        self._refusal: httptools.HttpParserError | None = None
        self.begin(Expected.ANSWER, None)

    def _new_parser(self) -> Any:
        parser = httptools.HttpResponseParser(self)
        parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)  # nobody takes them for anything else
        return parser

    def begin(self, expected: Expected, on_interim: OnInterim | None) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.complete = self.open_ended = False
        self.keep_alive = True
        self._expected, self.on_interim = expected, on_interim
        self._head_bytes = self._overhead = 0
        self.pieces: list[bytes] = []

    def drop(self) -> None:
        """The connection is gone. The parser holds our callbacks: end the reference cycle."""
        self._parser = None

    def feed(self, data: bytes) -> bool:
        """What the worker sent. Returns whether the stream stands between two chunks now. Raises NotHttp."""
        self._chunk_ended = False
        if self.raw:
            self.pieces.append(data)
            return False
        has_head = self.status != 0
        try:
            if self._refusal is not None:
                self._mend(data, self._refusal)
            else:
                try:
                    self._parser.feed_data(data)
                except httptools.HttpParserError as error:
                    if has_head or self.status or isinstance(error, httptools.HttpParserCallbackError):
                        raise
                    self._refusal = error
                    self._mend(data, error)
        except httptools.HttpParserUpgrade as switch:  # nothing else than that 101 raises it
            self.pieces.append(data[switch.args[0] :])
        except httptools.HttpParserError as error:
            if not self.complete:
                if isinstance(error.__context__, NotHttp):
                    raise error.__context__ from None
                raise NotHttp(f"the worker's response is not valid HTTP: {error}") from error
            self.keep_alive = False  # a complete answer followed by rubbish: the answer stands
        if not has_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES and (not self.status or _size(self.headers) > _HEAD_BYTES):
                self.status = 0  # no head that could be relayed
                raise NotHttp(f"the worker's response head is longer than {_HEAD_BYTES} bytes")
            self._seen = b"" if self.status else self._seen + data
        elif not self.pieces and not self.complete:
            self._overhead += len(data)
            if self._overhead > _HEAD_BYTES:
                raise NotHttp(f"the worker sends more than {_HEAD_BYTES} bytes that belong to no body")
        elif self._overhead:
            self._overhead = 0
        # Within the size of the next chunk there is no other line end.
        return self._chunk_ended and not self.complete and data.endswith(b"\r\n")

    def _mend(self, data: bytes, refusal: httptools.HttpParserError) -> None:
        """Raises HttpParserError or HttpParserUpgrade."""
        mended = _with_one_length(self._seen + data, refusal)
        if mended:
            self._refusal = None
            self._parser = self._new_parser()
            self.headers = []
            self._interim = False
            self._parser.feed_data(mended)

    # -- httptools' side

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a second response to one request
        elif self.headers:  # of an interim response
            self.headers = []
            self.open_ended = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # later ones are trailers, which end here
            name = name.lower()
            if name in _LOOKED_AT:
                self._plain = False
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.keep_alive = self._parser.should_keep_alive()
        # Without a word of the connection only HTTP/1.1 keeps it, and llhttp takes long to say its version. Kept means
        # as well that the head tells where the body ends.
        if not (self._plain and self.keep_alive):
            self._look_closer()
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                if self._expected is not Expected.SWITCH:
                    raise NotHttp("the worker switched protocols without being asked")
                self.status, self.raw, self.keep_alive = status, True, False
                self.close_delimited = self.open_ended = True
            else:
                self._interim = True
                if status != 100 and self.on_interim is not None:  # 100 answers what ends here
                    self.on_interim(status, self.headers)
            return
        self.status = status
        if self._expected is Expected.HEAD:
            # llhttp does not know the request's method and would wait for the body that the header announces. Whoever
            # announces one where there is none may send it all the same, and it would be the next one's answer.
            self.complete = True
            self._parser = self._new_parser()
            if self._announces_body():
                self.keep_alive = False
        elif status in (204, 304):
            if self._announces_body():
                self.keep_alive = False
        elif not self.keep_alive and not self.open_ended and header(self.headers, b"content-length") is None:
            self.close_delimited = self.open_ended = True  # RFC 9112 6.3, rule 8

    def _look_closer(self) -> None:
        """What a head says that is not like most. Raises NotHttp."""
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            raise NotHttp("the worker's response has a transfer coding other than chunked")
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise NotHttp("the worker speaks another version of HTTP")
        self._plain = True  # for the next head
        self.open_ended = bool(codings)

    def _announces_body(self) -> bool:
        length = header(self.headers, b"content-length")
        return self.open_ended or (length is not None and length.strip(b"0") != b"")

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


def _size(headers: list[Header]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _with_one_length(data: bytes, refusal: httptools.HttpParserError) -> bytes:
    """`data`, from the beginning of an answer on, without the repetitions of a Content-Length that says the same every
    time (RFC 9112 6.3): the parser refuses these. Interim answers before it are left out: those were read. Empty: its
    head is not there yet. Raises `refusal` for what cannot be read in this way either."""
    head, end, rest = data.partition(b"\r\n\r\n")
    while end and _INTERIM.match(head):
        head, end, rest = rest.partition(b"\r\n\r\n")
    lines, lengths = [], []
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon and name.lower() == b"content-length":
            lengths += [each.strip(b" \t") for each in value.split(b",")]
        else:
            lines.append(line)
    if not head.startswith(b"HTTP/1.") or not lengths:
        raise refusal
    if not end:
        return b""
    if len(lengths) < 2 or len(set(lengths)) > 1 or not lengths[0].isdigit():
        raise refusal
    return b"\r\n".join([*lines, b"content-length: " + lengths[0], b"", rest])
