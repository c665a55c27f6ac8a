"""Header work on byte pairs: what travels through the router and what ends at it.

Names are lower-case, as ASGI has them. A request's headers are gone through once (`sort_request`).
"""

from __future__ import annotations

import functools
import ipaddress
import re
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

OF_CONNECTION = frozenset({b"connection", b"proxy-connection"})
"""What may say whether a connection is kept; llhttp knows both."""

# Ours to say anew: the worker's address, the framing of the body that we buffered, the continue that we already gave,
# and the request's id.
NOT_TO_WORKER = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}

# A worker may repeat the id that it was sent; ours goes to the client once.
_NOT_TO_CLIENT = HOP_BY_HOP | {b"x-request-id"}

_BODILESS = (204, 304)
_line = b": ".join


def sort_request(
    headers: Sequence[Header], wanted: frozenset[bytes], kept_back: frozenset[bytes] = NOT_TO_WORKER
) -> tuple[bytes, Noted]:
    """The header lines that go on to the worker, all but those `kept_back`, and the values of the `wanted` ones."""
    passed: list[Header] = []
    noted: Noted = {}
    for pair in headers:
        name, value = pair
        if name in wanted:
            if name in noted:
                noted[name].append(value)
            else:
                noted[name] = [value]
        if name not in kept_back:
            passed.append(pair)
        elif name == b"connection" and connection_named(value):
            drop = {b"connection"}.union(*(connection_named(line) for key, line in headers if key == b"connection"))
            return sort_request([pair for pair in headers if pair[0] not in drop], wanted, kept_back)
    return b"\r\n".join([*map(_line, passed), b""]), noted


FORWARDED = frozenset(
    {b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"x-real-ip", b"forwarded"}
)
"""What proxies say of who sent a request. Anybody can say it, so only the word of trusted ones is passed on."""


class Forwarding:
    """What workers are told of who sent a request."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        """`trusted`: the proxies in front of us, as addresses or networks; `unix`: who comes by a unix socket; `*`:
        everybody. Raises ValueError."""
        texts = list(trusted)
        self._everybody = "*" in texts
        self._nameless = self._everybody or "unix" in texts
        self._networks = [ipaddress.ip_network(text) for text in texts if text not in ("*", "unix")]
        self.trusts_some = bool(texts)

    def trusts(self, peer: str | None) -> bool:
        """Whether `peer`, an address, may say for whom it speaks; None: one without, by a unix socket."""
        if peer is None:
            return self._nameless
        if self._everybody or not self._networks:
            return self._everybody
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def lines(self, peer: str, scheme: bytes, noted: Noted, trusted: bool) -> bytes:
        """Our own header lines, from the request's `noted` headers, which hold `host` and those of `FORWARDED`."""
        host = noted[b"host"][0] if b"host" in noted else b""  # of an HTTP/1.0 client
        if not peer:
            return self._nameless_lines(scheme, host, noted, trusted)
        if not trusted:
            return (_forwarded if len(host) <= 256 else _forwarded.__wrapped__)(peer, scheme, host)
        lines = b"x-forwarded-for: %b\r\n" % b", ".join([*noted.get(b"x-forwarded-for", ()), peer.encode()])
        if b"x-forwarded-proto" not in noted:
            lines += b"x-forwarded-proto: %b\r\n" % scheme
        if host and b"x-forwarded-host" not in noted:
            lines += b"x-forwarded-host: %b\r\n" % host
        return lines

    def _nameless_lines(self, scheme: bytes, host: bytes, noted: Noted, trusted: bool) -> bytes:
        """Of who came by a unix socket: there is no address to tell."""
        passed = noted if trusted else {}
        lines = b""
        if b"x-forwarded-for" in passed:
            lines += b"x-forwarded-for: %b\r\n" % b", ".join(passed[b"x-forwarded-for"])
        if b"x-forwarded-proto" not in passed:
            lines += b"x-forwarded-proto: %b\r\n" % scheme
        if host and b"x-forwarded-host" not in passed:
            lines += b"x-forwarded-host: %b\r\n" % host
        return lines


@functools.lru_cache(maxsize=1024)
def _forwarded(peer: str, scheme: bytes, host: bytes) -> bytes:
    lines = b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\n" % (peer.encode(), scheme)
    return lines + b"x-forwarded-host: %b\r\n" % host if host else lines


def connection_named(value: bytes) -> set[bytes]:
    """The fields that a Connection header declares to be hop-by-hop (RFC 9110 7.6.1)."""
    return {token.strip().lower() for token in value.split(b",")} - {b"close", b"keep-alive", b""}


_ADDRESSES = frozenset({b"location", b"content-location", b"link", b"refresh"})
_LOOKED_AT = _NOT_TO_CLIENT | _ADDRESSES
_UNHINDERED = ((b"x-accel-buffering", b"no"), (b"cache-control", b"no-cache"))
"""What keeps fronts (nginx and those that read its header; caches) from holding a stream of events back."""


def response_headers(headers: list[Header], status: int, origin: Origin | None = None) -> list[Header]:
    """A worker's response headers without what belongs to its connection, and with its own addresses made paths; a new
    list that the caller may extend."""
    kept = []
    for pair in headers:
        name = pair[0]
        if name not in _LOOKED_AT:
            if name[:12] != b"x-coatcheck-":
                kept.append(pair)
        elif name in _ADDRESSES:
            kept.append((name, origin.hide(name, pair[1])) if origin is not None else pair)
        elif name == b"connection" and connection_named(pair[1]):
            drop = {b"connection"}.union(*(connection_named(value) for key, value in headers if key == b"connection"))
            return response_headers([other for other in headers if other[0] not in drop], status, origin)
    if status in _BODILESS or status < 200:
        # RFC 9112 6.3: these have no body whatever the header says, and the server in front checks its length.
        return [pair for pair in kept if pair[0] != b"content-length"]
    return kept


def let_events_through(headers: list[Header]) -> None:
    """Add to a client's headers what keeps fronts from holding a stream of events back, if it is one."""
    said = dict(headers)
    if said.get(b"content-type", b"")[:17].lower() == b"text/event-stream":
        headers += [pair for pair in _UNHINDERED if pair[0] not in said]


class Origin:
    """Where a worker is, as it may say it in an answer. Clients cannot reach it, and shall not learn where it is: what
    it has itself becomes a path of ours."""

    def __init__(self, scheme: bytes, authority: bytes, base_path: bytes) -> None:
        """`authority` with its port; `base_path` is what every path there begins with, without a slash at its end."""
        self._scheme, self._authority, self._base = scheme, authority.lower(), base_path

    def hide(self, name: bytes, value: bytes) -> bytes:
        """The value of a header that has an address in it, or several."""
        if name == b"link":
            return _LINKED.sub(lambda found: b"<%b>" % self.path_of(found[1]), value)
        if name == b"refresh":
            return _REFRESHED.sub(lambda found: found[1] + self.path_of(found[2]), value)
        return self.path_of(value)

    def path_of(self, url: bytes) -> bytes:
        """Of an address of the worker; any other is left as it is."""
        found = _URL.fullmatch(url)
        if found is None:
            return self._below_base(url) if self._base and url[:1] == b"/" else url
        scheme, authority, path = found.groups()
        scheme = scheme.lower() if scheme else self._scheme
        host = authority.rpartition(b"@")[2].lower()
        if not _PORTED.search(host):
            host = host.removesuffix(b":") + (b":443" if scheme == b"https" else b":80")
        if host != self._authority:
            return url
        path = self._below_base(path if path[:1] == b"/" else b"/" + path)
        # RFC 3986 4.2: a path that begins with two slashes would be taken for another host.
        return b"/." + path if path[1:2] in (b"/", b"\\") else path

    def _below_base(self, path: bytes) -> bytes:
        rest = path[len(self._base) :]
        if not path.startswith(self._base) or rest[:1] not in (b"", b"/", b"?", b"#"):
            return path
        return rest if rest[:1] == b"/" else b"/" + rest


_URL = re.compile(rb"(?:(https?):)?//([^/?#\\]*)(.*)", re.IGNORECASE | re.DOTALL)
_PORTED = re.compile(rb":\d+$")
_LINKED = re.compile(rb"<([^>]*)>")
_REFRESHED = re.compile(rb"""^([\d.\s]+[;,]\s*(?:url\s*=\s*)?["']?)([^"']*)""", re.IGNORECASE)


def header(headers: Iterable[Header], wanted: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for name, value in headers:
        if name == wanted:
            return value
    return None
