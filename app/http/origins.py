"""Pages of other sites: which may use the router from a browser (the Fetch standard's CORS protocol).

Keys travel in headers that pages set themselves, so credentials in its sense (cookies) are never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from app.errors import TurnError, error_response
from app.http.exchange import Exchange, Turn
from app.http.headers import Header, header

_is_origin = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+", re.ASCII).fullmatch
_are_names = re.compile(rb"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII).fullmatch
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED = (
    b"X-Request-ID, X-Coatcheck-Worker, X-Coatcheck-Rank, X-Coatcheck-Affinity, X-Coatcheck-Replica, Retry-After, "
    b"X-Should-Retry, *"
)
"""What scripts may read. Older browsers know no `*` there."""
_REMEMBERED = b"7200"
"""Seconds that a browser may remember a preflight; Chromium takes no more."""


class Origins:
    """Those that the operator allows."""

    def __init__(self, allowed: Iterable[str], private: Callable[[str], bool] = lambda path: False) -> None:
        """`allowed`: as browsers write them, or `*`; `private`: paths that no page may use. Raises ValueError."""
        texts = list(allowed)
        self._private = private
        self._everybody = "*" in texts
        self._allowed = frozenset(map(_normal, (text for text in texts if text != "*")))

    def asked(self, path: str, headers: Iterable[Header]) -> Crossing | None:
        """None: no browser says from where it asks, or the path is for no page."""
        origin = header(headers, b"origin")
        if origin is None or self._private(path):
            return None
        return Crossing(origin, self._everybody or origin.decode("latin-1").strip().lower() in self._allowed)


def _normal(text: str) -> str:
    """Raises ValueError."""
    origin = text.lower().removesuffix("/")
    if origin == "null" or not _is_origin(origin):
        raise ValueError(f"{text!r} is no origin; write one like https://chat.example.com, or * for any")
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], "/"))


class Crossing:
    """One request of a page, whose origin is allowed or not. A Proxy, which answers it where it is a preflight."""

    def __init__(self, origin: bytes, allowed: bool) -> None:
        self.origin, self.allowed = origin, allowed

    def marked(self, headers: Iterable[Header]) -> list[Header]:
        """An answer's headers with our word on who may read it in place of any other."""
        kept = [pair for pair in headers if not pair[0].startswith(b"access-control-")]
        kept.append((b"vary", b"Origin"))
        if self.allowed:
            kept += ((b"access-control-allow-origin", self.origin), (b"access-control-expose-headers", _EXPOSED))
        return kept

    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn:
        return _Preflight(self, exchange, over)


def is_preflight(method: bytes, headers: Sequence[Header]) -> bool:
    """Of a request that has an Origin."""
    return method == b"OPTIONS" and header(headers, b"access-control-request-method") is not None


class _Preflight:
    """A browser's question before a request, which carries no key: answered at once."""

    def __init__(self, crossing: Crossing, exchange: Exchange, over: Callable[[Exception | None], None]) -> None:
        self._crossing, self._exchange, self._over = crossing, exchange, over

    def start(self) -> None:
        exchange = self._exchange
        if self._crossing.allowed:
            status, headers, body = 204, _permission(exchange.headers), b""
        else:
            origin = self._crossing.origin.decode("latin-1")
            error = TurnError("forbidden", f"pages of {origin} may not ask here; allowed-origins does not name it")
            status, headers, body = error_response(error)
        if exchange.more_body:
            exchange.keep_alive = False
        exchange.start(status, [*self._crossing.marked(()), *headers])
        exchange.write(body, True)
        self._over(None)

    def cancel(self) -> None: ...
    def client_left(self) -> None: ...
    def client_took(self) -> None: ...


def _permission(headers: Sequence[Header]) -> list[Header]:
    names = header(headers, b"access-control-request-headers") or b""
    allowed: list[Header] = [(b"access-control-allow-methods", _METHODS)]
    if _are_names(names.strip()):
        allowed.append((b"access-control-allow-headers", names.strip()))
    if header(headers, b"access-control-request-private-network") == b"true":
        allowed.append((b"access-control-allow-private-network", b"true"))
    allowed.append((b"access-control-max-age", _REMEMBERED))
    allowed.append((b"vary", b"Access-Control-Request-Method, Access-Control-Request-Headers"))
    return allowed
