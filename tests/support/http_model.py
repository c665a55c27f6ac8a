"""HTTP/1.1 as it is written: a strict reading of messages, and what a proxy does to them. Slow, short and obviously
right, so that the router can be compared with it; shares no code with the router.

Sections are of RFC 9112 unless said otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Header = tuple[bytes, bytes]

HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}  # RFC 9110 7.6.1
OURS_TO_WORKER = {b"host", b"content-length", b"transfer-encoding", b"x-request-id"} | {
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"x-forwarded-host",
}
OURS_TO_CLIENT = {b"content-length", b"transfer-encoding", b"connection", b"x-request-id"}
UNHINDERED = ((b"x-accel-buffering", b"no"), (b"cache-control", b"no-cache"))
"""What the router adds to streams of events."""
ENDS_HERE = {b"expect", b"forwarded", b"x-real-ip"}
"""Of a request from a peer that is not trusted."""

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_request_line = re.compile(rb"(%b) +([\x21\x22\x24-\x7e]+) +HTTP/1\.([01])" % _TOKEN).fullmatch  # 3: any space will do
_status_line = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?").fullmatch
_field_line = re.compile(rb"(%b):[ \t]*([\t\x20-\x7e\x80-\xff]*)" % _TOKEN).fullmatch
_host = re.compile(rb"(?:[0-9A-Za-z._~!$&'()*+,;=%\-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?").fullmatch
_chunk_line = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?").fullmatch
_digits = re.compile(rb"[0-9]{1,18}").fullmatch


class Malformed(Exception):
    """Not HTTP/1.1."""


class Incomplete(Exception):
    """More bytes may make a message of it."""


@dataclass(frozen=True)
class Message:
    headers: list[Header]
    """Names in lower case, values without the white space around them."""
    body: bytes
    framing: str
    """none, length, chunked or close"""

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def get(self, name: bytes) -> bytes | None:
        return next(iter(self.all(name)), None)


@dataclass(frozen=True)
class Request(Message):
    method: bytes
    target: bytes
    minor: int

    @property
    def normal(self) -> bytes:
        """As it is written, without the lines that are the router's to say."""
        return _written(b"%b %b HTTP/1.%d" % (self.method, self.target, self.minor), self, OURS_TO_WORKER)


@dataclass(frozen=True)
class Answer(Message):
    status: int
    minor: int
    interim: list[Answer]
    """The 1xx answers before it."""
    complete: bool = True
    """False: the connection ended before the message."""

    @property
    def normal(self) -> bytes:
        """As it is written, without the lines that are the router's to say."""
        kept = [pair for pair in self.headers if not pair[0].startswith(b"x-coatcheck-") and pair not in UNHINDERED]
        return _written(b"%d" % self.status, Message(kept, self.body, self.framing), OURS_TO_CLIENT)


def _written(first: bytes, message: Message, ours: set[bytes]) -> bytes:
    lines = [b"%b: %b" % pair for pair in message.headers if pair[0] not in ours]
    return b"\r\n".join([first, *lines, b"", message.body])


# -- reading


def read_request(data: bytes | bytearray) -> tuple[Request, bytes]:
    """The first request of `data`, and the rest. Raises Malformed or Incomplete."""
    first, headers, at = _head(data, _request_line)
    method, target, minor = first[1], first[2], int(first[3])
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (minor and not hosts) or not all(map(_host, hosts)):
        raise Malformed("3.2: one Host, and a valid one")
    length, chunked = _framing(headers)
    if chunked and not minor:
        raise Malformed("6.1: HTTP/1.0 has no transfer codings")
    if chunked:
        body, at = _chunked(data, at)
        framing = "chunked"
    else:
        body, at = _exactly(data, at, length or 0)
        framing = "none" if length is None else "length"
    return Request(headers, body, framing, method, target, minor), bytes(data[at:])


def read_answer(data: bytes | bytearray, method: bytes, ended: bool) -> tuple[Answer, bytes]:
    """The first final answer of `data` to a request of `method`, and the rest; `ended`: nothing will follow `data`.
    Raises Malformed or Incomplete."""
    interim: list[Answer] = []
    while True:
        first, headers, at = _head(data, _status_line)
        minor, status = int(first[1]), int(first[2])
        if 100 <= status < 200 and status != 101:
            interim.append(Answer(headers, b"", "none", status, minor, []))
            data = data[at:]
            continue
        length, chunked = _framing(headers)
        framing = "chunked" if chunked else "close" if length is None else "length"
        complete = True
        body = b""
        try:
            if method == b"HEAD" or status in (101, 204, 304):
                framing = "none"
            elif chunked:
                body, at = _chunked(data, at)
            elif length is not None:
                body, at = _exactly(data, at, length)
            elif not ended:
                raise Incomplete
            else:
                body, at = bytes(data[at:]), len(data)
        except Incomplete:
            if not ended:
                raise
            body, at, complete = (_chunks_of(data, at) if chunked else bytes(data[at:])), len(data), False
        return Answer(headers, body, framing, status, minor, interim, complete), bytes(data[at:])


def _head(data: bytes | bytearray, pattern: object) -> tuple[re.Match[bytes], list[Header], int]:
    start = 0
    while data[start : start + 1] in (b"\r", b"\n"):  # 2.2, 3: an empty line before a message is ignored
        start += 1
    end = data.find(b"\r\n\r\n", start)
    lines = bytes(data[start : end if end >= 0 else None]).split(b"\r\n")
    first = pattern(lines[0])  # type: ignore[operator]
    if first is None and (end >= 0 or len(lines) > 1):
        raise Malformed("3, 4: the first line")
    headers = []
    for line in lines[1:] if end >= 0 else lines[1:-1]:
        field = _field_line(line)
        if field is None:
            raise Malformed("5: a field line")
        headers.append((field[1].lower(), field[2].rstrip(b" \t")))
    if end < 0:
        raise Incomplete
    assert first is not None
    return first, headers, end + 4


def _framing(headers: list[Header]) -> tuple[int | None, bool]:
    """The declared length, and whether the body is chunked (6.3)."""
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or lengths):
        raise Malformed("6.1, 6.3: an unknown coding, or two ways to frame a body")
    if len(lengths) > 1 or not all(map(_digits, lengths)):
        raise Malformed("6.3: one Content-Length, of digits")
    return (int(lengths[0]) if lengths else None), bool(codings)


def _exactly(data: bytes | bytearray, at: int, length: int) -> tuple[bytes, int]:
    if len(data) < at + length:
        raise Incomplete
    return bytes(data[at : at + length]), at + length


def _chunked(data: bytes | bytearray, at: int) -> tuple[bytes, int]:
    """7.1. Extensions and trailers are read over."""
    spans = []
    while True:
        line, at = _line(data, at)
        size = _chunk_line(line)
        if size is None:
            raise Malformed("7.1: a chunk's size")
        length = int(size[1], 16)
        if not length:
            break
        if len(data) >= at + length + 2 and data[at + length : at + length + 2] != b"\r\n":
            raise Malformed("7.1: a chunk's end")
        spans.append((at, at + length))
        at += length + 2
    while True:
        line, at = _line(data, at)
        if not line:
            return b"".join(bytes(data[start:end]) for start, end in spans), at
        if _field_line(line) is None:
            raise Malformed("7.1.2: a trailer")


def _chunks_of(data: bytes | bytearray, at: int) -> bytes:
    """What there is of a chunked body that was cut."""
    body = b""
    while (end := data.find(b"\r\n", at)) >= 0:
        length = int(bytes(data[at:end]).split(b";")[0], 16)
        body += bytes(data[end + 2 : end + 2 + length])
        at = end + 2 + length + 2
    return body


def _line(data: bytes | bytearray, at: int) -> tuple[bytes, int]:
    end = data.find(b"\r\n", at)
    if end < 0:
        if b"\n" in data[at:] or b"\0" in data[at:]:
            raise Malformed("2.2: a bare LF, or NUL")
        raise Incomplete
    return bytes(data[at:end]), end + 2


# -- what a proxy does


def forwarded(request: Request) -> bytes:
    """What the worker is to get of it, in the form of `Request.normal`."""
    kept = _travelling(request.headers, ENDS_HERE | {b"proxy-authorization", b"proxy-connection"})
    return Request(kept, request.body, "", request.method, origin_form(request.target), 1).normal


def returned(answer: Answer) -> bytes:
    """What the client is to get of it, in the form of `Answer.normal`."""
    kept = _travelling(answer.headers, {b"proxy-authenticate", b"proxy-connection"})
    return Answer(kept, answer.body, "", answer.status, 1, []).normal


def _travelling(headers: list[Header], ends: set[bytes]) -> list[Header]:
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [pair for pair in headers if pair[0] not in HOP_BY_HOP | ends | named]


def origin_form(target: bytes) -> bytes:
    """3.2.2: of an absolute target the path and the query."""
    absolute = re.fullmatch(rb"(?i:https?)://[^/?]*(.*)", target)
    return target if absolute is None else absolute[1]
