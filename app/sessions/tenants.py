"""Who may use the router, and as which tenant. A session's key includes its tenant, so that nobody can join, read or
close another tenant's session.

Keys are kept as SHA-256 hashes: they are long and random (`coatcheck key` makes them), so a slow hash would add cost
and no safety. A file of them has one `TENANT sha256:HEX` a line; several keys may mean one tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from app.errors import TurnError
from app.http.headers import FORWARDED, Header, Noted

NOBODY = b""
"""The one tenant of a router without keys."""

CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
"""Where a client says its key: as OpenAI's clients do (Bearer), or as Anthropic's."""
PROTOCOLS = b"sec-websocket-protocol"
"""Where a page of OpenAI's realtime API says it, which can set no other header."""
FOREIGN = frozenset({b"api-key", b"x-goog-api-key", b"cookie"})
"""Credentials that mean nothing here."""
_KEY_PROTOCOL = b"openai-insecure-api-key."
_ELSEWHERE = frozenset({b"x-api-key", PROTOCOLS})

_is_tenant = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch
_is_hash = re.compile(r"sha256:[0-9a-f]{64}").fullmatch


class Tenants:
    """API keys and whose they are."""

    def __init__(self, by_hash: dict[str, bytes]) -> None:
        """`by_hash`: hex of a key's SHA-256 → tenant. Empty: everybody may, as one tenant."""
        self._by_hash = by_hash

    def __len__(self) -> int:
        return len(self._by_hash)

    def canonical(self) -> bytes:
        """Which key is whose, the same for any two files that say the same."""
        return b"".join(b"%b %b\n" % (key.encode(), tenant) for key, tenant in sorted(self._by_hash.items()))

    def authenticate(self, noted: Noted) -> bytes:
        """The tenant of a request. As `recognise`."""
        return self.recognise(noted)[0]

    def recognise(self, noted: Noted) -> tuple[bytes, Header | None]:
        """The tenant of a request, and the header with the key that proves it. One valid key is enough, whatever else
        stands beside it. `noted` holds the values of CREDENTIALS and PROTOCOLS. Raises TurnError `invalid_api_key`."""
        if not self._by_hash:
            return NOBODY, None
        values = noted.get(b"authorization")
        if values is not None and len(values) == 1 and _ELSEWHERE.isdisjoint(noted):
            # As nearly all say it.
            scheme, _, key = values[0].partition(b" ")
            if scheme == b"Bearer" and (whose := self._tenant_of(key)) is not None:
                return whose, (b"authorization", values[0])
        given = _credentials(noted)
        if not given:
            raise _invalid("no API key was given; send it as Authorization: Bearer KEY")
        found: dict[bytes, Header] = {}
        for key, said in given:
            tenant = self._tenant_of(key)
            if tenant is not None:
                found.setdefault(tenant, said)
        if not found:
            raise _invalid("the API key is not valid here")
        if len(found) > 1:
            raise _invalid(f"the request has keys of {len(found)} tenants; send those of one")
        return next(iter(found.items()))

    def _tenant_of(self, key: bytes) -> bytes | None:
        presented = hashlib.sha256(key).hexdigest()
        # The dictionary finds by the hash of a secret, whose timing tells nothing of the secret; the last word is
        # constant-time all the same.
        tenant = self._by_hash.get(presented)
        stored = presented if tenant is not None else "0" * 64
        return tenant if hmac.compare_digest(presented, stored) else None


def _invalid(message: str) -> TurnError:
    # RFC 9110 15.5.2: a 401 says how to authenticate.
    return TurnError("invalid_api_key", message, headers=((b"www-authenticate", b"Bearer"),))


def credential(noted: Noted) -> bytes | None:
    """The first key that a request carries, or None."""
    given = _credentials(noted)
    return given[0][0] if given else None


def _credentials(noted: Noted) -> list[tuple[bytes, Header]]:
    """The keys that a request carries, each with the header that says it to a worker."""
    given: list[tuple[bytes, Header]] = []
    for value in noted.get(b"authorization", ()):
        scheme, _, key = value.strip().partition(b" ")
        if scheme.lower() == b"bearer" and key.strip():
            given.append((key.strip(), (b"authorization", value.strip())))
    keys = (value.strip() for value in noted.get(b"x-api-key", ()))
    given += [(key, (b"x-api-key", key)) for key in keys if key]
    for word in _protocols(noted):
        key = word.removeprefix(_KEY_PROTOCOL)
        if key and key != word:
            given.append((key, (b"authorization", b"Bearer " + key)))
    return given


def protocols_without_keys(noted: Noted) -> bytes:
    """The value of PROTOCOLS for a worker; nothing where all of them were keys."""
    return b", ".join(word for word in _protocols(noted) if not word.startswith(_KEY_PROTOCOL))


def _protocols(noted: Noted) -> list[bytes]:
    words = (word.strip() for value in noted.get(PROTOCOLS, ()) for word in value.split(b","))
    return [word for word in words if word]


def read_keys(path: Path) -> Tenants:
    """Raises ValueError with line and remedy, OSError."""
    by_hash: dict[str, bytes] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].split()
        if not text:
            continue
        if len(text) != 2 or not _is_tenant(text[0]) or not _is_hash(text[1]):
            raise ValueError(f"line {number} is not TENANT sha256:HEX; `coatcheck key TENANT` makes such lines")
        if by_hash.setdefault(text[1].removeprefix("sha256:"), text[0].encode()) != text[0].encode():
            raise ValueError(f"line {number} gives a key to {text[0]} that another tenant has; make a new one")
    if not by_hash:
        raise ValueError("it has no keys; `coatcheck key TENANT` makes a line of it")
    return Tenants(by_hash)


def new_key(tenant: str) -> tuple[str, str]:
    """A fresh key and its line for the file. Raises ValueError."""
    if not _is_tenant(tenant):
        raise ValueError(f"{tenant!r} is no tenant name: 1 to 64 letters, digits, dots, dashes and underscores")
    key = "ck-" + secrets.token_urlsafe(32)
    return key, f"{tenant} sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def checked_key(key: str) -> str:
    """A key that a header can carry. Raises ValueError."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("a key is visible ASCII characters without spaces")
    return key


def read_key(path: Path) -> str:
    """The one key in a file. Raises ValueError, OSError."""
    return checked_key(read_secret(path))


def read_secret(path: Path) -> str:
    """The one secret in a file, without the white space around it. Raises ValueError, OSError."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8 text; write the secret into it as text") from None
    if not secret:
        raise ValueError("the file holds no secret; write one into it")
    return secret


ADMIN_TOKEN = b"x-coatcheck-admin-token"


_BETWEEN = FORWARDED | {
    b"via",
    b"x-forwarded",
    b"x-forwarded-server",
    b"x-forwarded-ssl",
    b"x-forwarded-prefix",
    b"x-original-forwarded-for",
    b"x-client-ip",
    b"x-cluster-client-ip",
    b"x-envoy-external-address",
    b"true-client-ip",
    b"cf-connecting-ip",
    b"fly-client-ip",
}
"""What whoever forwards a request for somebody else may add to it."""
_LOOKED_AT = frozenset({ADMIN_TOKEN, b"host", b"origin", b"sec-fetch-site"}) | CREDENTIALS | _BETWEEN
_OWN_SITES = frozenset({b"none", b"same-origin"})
"""What Fetch Metadata says of requests that no other site's page has made."""
_own_name = re.compile(rb"(?:localhost\.?|([0-9.]+)|\[([0-9a-f:.]+)\])(?::\d*)?", re.IGNORECASE).fullmatch


class Admins:
    """Who may see and close any session: who has the token. Without one, whoever asks on this machine, by a name that
    is the machine's own wherever it is looked up, and for himself.

    What cannot be told apart from that: a program on this machine that forwards bytes for others, with their word for
    the Host. A token or a unix socket is for such machines.
    """

    def __init__(self, token: str = "", *, local: bool = True, at_path: bool = False) -> None:
        """`token`: what proves it; empty: there is none. `local`: only this machine can connect to where the requests
        come; `at_path`: that is a unix socket, and its permissions say who."""
        self._token = token.encode()
        self._local, self._at_path = local, at_path

    def allows(self, host: str | None, headers: Iterable[Header]) -> bool:
        """`host`: the peer's address; `headers`: the request's, names lower-case."""
        return self.refusal(host, headers) is None

    def refusal(self, host: str | None, headers: Iterable[Header]) -> str | None:
        """Why the request is not an admin's, for whoever sent it; None: it is."""
        if not self._local and not self._token:
            return "the admin API needs an admin token, and this router has none: set admin-token or admin-listen"
        noted: Noted = {}
        for name, value in headers:
            if name in _LOOKED_AT:
                noted.setdefault(name, []).append(value)
        if self._token:
            given = noted.get(ADMIN_TOKEN, [None])[0] or credential(noted)
            proven = given is not None and hmac.compare_digest(given, self._token)
            if not proven and given is not None:
                return "the admin API needs the admin token, and what was sent is another one"
            return None if proven else "the admin API needs the admin token"
        if not self._at_path and not is_loopback_address(host or ""):
            return "the admin API is for this machine, or needs the admin token"
        # A load balancer on this machine also comes from here, and speaks for anybody.
        if not _BETWEEN.isdisjoint(noted):
            return "the admin API is not for a proxy without the admin token"
        # A forwarder that adds nothing keeps the Host that its clients use; so does the browser of a page whose name
        # was looked up a second time and is now our address.
        hosts = noted.get(b"host", [])
        if len(hosts) != 1 or not _is_own(hosts[0]):
            return "the admin API without the admin token is at localhost, 127.0.0.1 or [::1] only, by that Host"
        own = (b"http://" + hosts[0].lower(), b"https://" + hosts[0].lower())
        if any(origin.lower() not in own for origin in noted.get(b"origin", ())):
            return "the admin API without the admin token is not for other sites' pages"
        # W3C Fetch Metadata: browsers say it of requests without an Origin too; no page can change it.
        if any(site.lower() not in _OWN_SITES for site in noted.get(b"sec-fetch-site", ())):
            return "the admin API without the admin token is not for other sites' pages"
        return None

    def refusal_to_look(self, host: str | None, headers: Iterable[Header]) -> str | None:
        """Why the request may not see as much of the fleet as `/metrics` tells. Where there is a token anybody may, but
        not who shows a wrong one, and thinks that it is right."""
        if self._token and all(name != ADMIN_TOKEN for name, _ in headers):
            return None
        return self.refusal(host, headers)

    def refusal_to_act(self, host: str | None, headers: Iterable[Header]) -> str | None:
        """Why the request may not change anything: as `refusal`, and no page of another site may have it made, token or
        not."""
        for name, value in headers:
            if name == b"sec-fetch-site" and value.lower() not in _OWN_SITES:
                return "the admin API does nothing for other sites' pages"
        return self.refusal(host, headers)


def _is_own(host: bytes) -> bool:
    """Whether a Host names this machine and can name no other."""
    found = _own_name(host.strip())
    address = found and (found[1] or found[2])
    return bool(found) and (not address or is_loopback_address(address.decode()))


def is_loopback_address(text: str) -> bool:
    """Whether it is an address, and one of the loopback's."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # An IPv4 peer of a socket that is bound to all addresses.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
