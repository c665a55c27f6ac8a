"""Where etcd is, who we are there, and the prefix that is ours: what an `etcd://` URL says."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import grpc

from backends.base import StoreConfigurationError
from backends.options import parse_options, shown

_FILES = ("ca", "cert", "key", "password_file")
_OPTIONS = {"tls": ("true", "false"), "server_name": (), **dict.fromkeys(_FILES, ())}


@dataclass(frozen=True)
class EtcdUrl:
    """`etcd://[user:password@]host[:2379][,host[:2379]]/prefix[?tls=true&ca=&cert=&key=&server_name=&password_file=]`

    Hosts are IPv4 addresses, DNS names and [IPv6 addresses], in any mix. User, password and prefix are
    percent-decoded; with `password_file` the password is read from there at each login, so that it can be changed.
    Without `ca` the server's certificate is checked against gRPC's own list of authorities.
    """

    targets: tuple[str, ...]
    """As gRPC writes them."""
    prefix: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises StoreConfigurationError."""
        scheme, separator, rest = url.partition("://")
        if scheme != "etcd" or not separator:
            raise StoreConfigurationError("an etcd store's URL starts with etcd://")
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        login, _, hosts = authority.rpartition("@")
        prefix = unquote(path).rstrip("/")
        if not prefix:
            raise StoreConfigurationError("an etcd store's URL needs a prefix for its keys: etcd://host:2379/prefix")
        options = parse_options(url, query, _OPTIONS)
        user, _, password = login.partition(":")
        password_file = options.get("password_file")
        if user and not (password or password_file):
            raise StoreConfigurationError("etcd: a user needs a password or a password_file")
        if (password_file and password) or ((password or password_file) and not user):
            raise StoreConfigurationError("etcd: give one user and one password, in the URL or as password_file")
        tls = options.get("tls") == "true"
        if not tls and options.keys() & {"ca", "cert", "key", "server_name"}:
            raise StoreConfigurationError("etcd: ca, cert, key and server_name need tls=true")
        if ("cert" in options) != ("key" in options):
            raise StoreConfigurationError("etcd: a client certificate is a cert and a key")
        files = {name: Path(options[name]) for name in _FILES if name in options}
        for name, file in files.items():
            if not file.is_file():
                raise StoreConfigurationError(f"etcd: {name}: there is no file {file}")
        targets = tuple(_target(host) for host in hosts.split(","))
        if not all(targets):
            raise StoreConfigurationError(f"{shown(url)!r}: each host is written as host:port; IPv6 in [brackets]")
        return cls(
            targets=targets,
            prefix=prefix,
            user=unquote(user) or None,
            password=unquote(password) or None,
            tls=tls,
            server_name=options.get("server_name"),
            **files,
        )

    def read_password(self) -> str:
        if self.password_file is None:
            return self.password or ""
        return self.password_file.read_text(encoding="utf-8").strip()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Raises StoreConfigurationError when a certificate or key cannot be read or does not match."""
        if not self.tls:
            return None
        try:
            # gRPC only says "handshake failed" later, in its own log; the ssl module checks now and says why.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if self.ca:
                context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as error:
            raise StoreConfigurationError(f"etcd: the TLS files do not work: {error}") from error
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes() if self.ca else None,
            self.key.read_bytes() if self.key else None,
            self.cert.read_bytes() if self.cert else None,
        )


def _target(host: str) -> str:
    """One endpoint as a gRPC target: `ipv4:10.0.0.1:2379`, `ipv6:[::1]:2379`, `dns:///etcd:2379`; empty: it is none."""
    bracketed = host.startswith("[")
    name, found, rest = host[1:].partition("]") if bracketed else host.partition(":")
    if bracketed and not (found and rest[:1] in ("", ":")):
        return ""
    port = (rest[1:] if rest else "2379") if bracketed else (rest if found else "2379")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        return ""
    try:
        if bracketed:
            return f"ipv6:[{ipaddress.IPv6Address(name)}]:{port}"
        if name.replace(".", "").isdigit():
            return f"ipv4:{ipaddress.IPv4Address(name)}:{port}"
    except ValueError:
        return ""
    return f"dns:///{name}:{port}"
