"""Header work on byte pairs: what travels through the router and what ends at it.

Names are lower-case, as ASGI has them.
"""

from __future__ import annotations

from collections.abc import Iterable

Header = tuple[bytes, bytes]

# RFC 9110 7.6.1: fields of one connection, never of the message. `proxy-connection` is what old clients really send.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

# Ours to say anew: the worker's address, the framing of the body that we buffered, and the continue we already gave.
_NOT_TO_WORKER = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


def connection_named(value: bytes) -> set[bytes]:
    """The fields that a Connection header declares to be hop-by-hop (RFC 9110 7.6.1)."""
    return {token.strip().lower() for token in value.split(b",")} - {b"close", b"keep-alive", b""}


def request_head(
    method: str, target: bytes, host: bytes, headers: Iterable[Header], body_length: int | None, extra: bytes
) -> bytes:
    """The head of a request to a worker, ready to write.

    `body_length` in bytes, None for a request without a body; `extra` is finished header lines of our own, each
    ending in CRLF.
    """
    drop: frozenset[bytes] | set[bytes] = _NOT_TO_WORKER
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), target, host)]
    for name, value in headers:
        if name == b"connection":
            drop = drop | connection_named(value)
    for name, value in headers:
        if name not in drop:
            lines.append(b"%b: %b\r\n" % (name, value))
    if body_length is not None:
        lines.append(b"content-length: %d\r\n" % body_length)
    lines.append(extra)
    lines.append(b"\r\n")
    return b"".join(lines)


def response_headers(headers: list[Header], status: int) -> list[Header]:
    """A worker's response headers without what belongs to its connection; a new list that the caller may extend."""
    drop: frozenset[bytes] | set[bytes] = HOP_BY_HOP
    for name, value in headers:
        if name == b"connection":
            drop = drop | connection_named(value)
    if status in (204, 304):
        # RFC 9112 6.3: these have no body whatever the header says, and the server in front checks its length.
        drop = drop | {b"content-length"}
    return [pair for pair in headers if pair[0] not in drop and not pair[0].startswith(b"x-coatcheck-")]


def header(headers: Iterable[Header], wanted: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for name, value in headers:
        if name == wanted:
            return value
    return None
