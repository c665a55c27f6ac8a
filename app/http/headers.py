"""Header work on byte pairs: what travels through the router and what ends at it.

Names are lower-case, as ASGI has them. A request's headers are gone through once (`sort_request`).
"""

from __future__ import annotations

import ipaddress
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
        b"proxy-authentication-info",
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
    for pair in headers:
        name, value = pair
        if name in wanted:
            if name in noted:
                noted[name].append(value)
            else:
                noted[name] = [value]
        if name not in kept_back:
            lines.append(b": ".join(pair))
        elif name == b"connection" and connection_named(value):
            drop = {b"connection"}.union(*(connection_named(line) for key, line in headers if key == b"connection"))
            return sort_request([pair for pair in headers if pair[0] not in drop], wanted, kept_back)
    lines.append(b"")
    return b"\r\n".join(lines), noted


FORWARDED = frozenset(
    {b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"x-real-ip", b"forwarded"}
)
"""What proxies say of who sent a request. Anybody can say it, so only the word of trusted ones is passed on."""


class Forwarding:
    """What workers are told of who sent a request."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        """`trusted`: the proxies in front of us, as addresses or networks; `*`: everybody. Raises ValueError."""
        texts = list(trusted)
        self._everybody = "*" in texts
        self._networks = [ipaddress.ip_network(text) for text in texts if text != "*"]

    def trusts(self, peer: str | None) -> bool:
        """Whether `peer`, an address, may say for whom it speaks."""
        if self._everybody or not self._networks:
            return self._everybody
        try:
            address = ipaddress.ip_address(peer or "")
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def lines(self, peer: bytes, scheme: bytes, noted: Noted, trusted: bool) -> bytes:
        """Our own header lines, from the request's `noted` headers, which hold `host` and those of `FORWARDED`."""
        host = noted[b"host"][0] if b"host" in noted else b""  # of an HTTP/1.0 client
        if host and not trusted:
            return b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\nx-forwarded-host: %b\r\n" % (peer, scheme, host)
        if not trusted:
            return b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\n" % (peer, scheme)
        lines = b"x-forwarded-for: %b\r\n" % b", ".join([*noted.get(b"x-forwarded-for", ()), peer])
        if b"x-forwarded-proto" not in noted:
            lines += b"x-forwarded-proto: %b\r\n" % scheme
        if host and b"x-forwarded-host" not in noted:
            lines += b"x-forwarded-host: %b\r\n" % host
        return lines


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
    if status in _BODILESS or status < 200:
        # RFC 9112 6.3: these have no body whatever the header says, and the server in front checks its length.
        return [pair for pair in kept if pair[0] != b"content-length"]
    return kept


def without_origin(headers: list[Header], authority: bytes) -> list[Header]:
    """A redirect's headers with the addresses of the worker itself, whose `authority` that is, made paths: clients
    cannot reach it, and shall not learn where it is."""
    return [
        (name, _path_at(value, authority)) if name in (b"location", b"content-location") else (name, value)
        for name, value in headers
    ]


def _path_at(url: bytes, authority: bytes) -> bytes:
    _, found, rest = url.partition(b"//")
    at, slash, path = rest.partition(b"/")
    if not found or url[:1] not in b"hH/" or at.lower() != authority or path.startswith(b"/"):
        return url  # a path with two slashes would be taken for another host
    return slash + path or b"/"


def header(headers: Iterable[Header], wanted: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for name, value in headers:
        if name == wanted:
            return value
    return None
