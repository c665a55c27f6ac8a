"""Header work on byte pairs: what travels through the router and what ends at it.

Names are lower-case, as ASGI has them. A request's headers are gone through once (`sort_request`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]
Noted = dict[bytes, list[bytes]]
"""The values of the headers that mean something to the router, in their order."""

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

# Ours to say anew: the worker's address, the framing of the body that we buffered, the continue that we already gave,
# and the request's id.
NOT_TO_WORKER = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}

# A worker may repeat the id that it was sent; ours goes to the client once.
_NOT_TO_CLIENT = HOP_BY_HOP | {b"x-request-id"}

_BODILESS = (204, 304)


def sort_request(
    headers: Sequence[Header], wanted: frozenset[bytes], kept_back: frozenset[bytes] = NOT_TO_WORKER
) -> tuple[bytes, Noted]:
    """The header lines that go on to the worker, all but those `kept_back`, and the values of the `wanted` ones."""
    lines: list[bytes] = []
    noted: Noted = {}
    for name, value in headers:
        if name in wanted:
            noted.setdefault(name, []).append(value)
        if name not in kept_back:
            lines += (name, b": ", value, b"\r\n")
        elif name == b"connection" and connection_named(value):
            drop = {b"connection"}.union(*(connection_named(line) for key, line in headers if key == b"connection"))
            return sort_request([pair for pair in headers if pair[0] not in drop], wanted, kept_back)
    return b"".join(lines), noted


def connection_named(value: bytes) -> set[bytes]:
    """The fields that a Connection header declares to be hop-by-hop (RFC 9110 7.6.1)."""
    return {token.strip().lower() for token in value.split(b",")} - {b"close", b"keep-alive", b""}


def response_headers(headers: list[Header], status: int) -> list[Header]:
    """A worker's response headers without what belongs to its connection; a new list that the caller may extend."""
    kept = []
    for pair in headers:
        name = pair[0]
        if name not in _NOT_TO_CLIENT:
            if not name.startswith(b"x-coatcheck-"):
                kept.append(pair)
        elif name == b"connection" and connection_named(pair[1]):
            drop = {b"connection"}.union(*(connection_named(value) for key, value in headers if key == b"connection"))
            return response_headers([other for other in headers if other[0] not in drop], status)
    if status in _BODILESS:
        # RFC 9112 6.3: these have no body whatever the header says, and the server in front checks its length.
        return [pair for pair in kept if pair[0] != b"content-length"]
    return kept


def header(headers: Iterable[Header], wanted: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for name, value in headers:
        if name == wanted:
            return value
    return None
