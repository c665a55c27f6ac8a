"""Where the router listens: addresses as they are written, unix sockets, and whether others can reach them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from app.sessions.tenants import is_loopback_address

_UNIX = "unix:"
_PATH_LIMIT = 107
"""Bytes; `sun_path` of unix(7), with its end."""
_ELSEWHERE = ("192.0.2.1", 9)
"""Nobody's (RFC 5737)."""


class Place(NamedTuple):
    """HOST:PORT, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """As `coatcheck sessions --url` takes it."""
        return self.url_by("http")

    def url_by(self, scheme: str) -> str:
        return str(self) if self.path is not None else f"{scheme}://{self}"

    @property
    def is_local(self) -> bool:
        """Only this machine can connect."""
        return self.path is not None or is_loopback(self.host)


def read_place(text: str) -> Place:
    """From `HOST:PORT`, `[IPV6]:PORT` or `unix:/path`. Raises ValueError."""
    if text.startswith(_UNIX):
        return Place(path=read_socket_path(text))
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdecimal() and int(port) <= 65535
    if not colon or not bare or not is_port or (":" in bare) != (bare != host) or "/" in bare:
        raise ValueError("write HOST:PORT, [IPV6]:PORT or unix:/path")
    return Place(bare, int(port))


def read_socket_path(text: str) -> Path:
    """From `unix:/path`, or `/path` where nothing else can be meant. Raises ValueError."""
    path = Path(text.removeprefix(_UNIX).removeprefix("//") if text.startswith(_UNIX) else text)
    if not path.is_absolute() or len(os.fsencode(path)) > _PATH_LIMIT:
        raise ValueError(f"a unix socket is unix:/path, its path absolute and at most {_PATH_LIMIT} bytes long")
    return path


def read_peer_address(text: str) -> Place:
    """From `HOST`, `HOST:PORT`, `IPV6` or `[IPV6]:PORT`; port 0: not said. Raises ValueError."""
    with contextlib.suppress(ValueError):
        return Place(str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))))
    place = read_place(text if ":" in text else f"{text}:0")
    if place.path is not None:
        raise ValueError("write HOST, HOST:PORT or [IPV6]:PORT")
    return place


def is_unspecified(host: str) -> bool:
    """Whether it stands for every address of this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def own_address(towards: Iterable[tuple[str, int]]) -> str:
    """The address that this machine uses towards the first of these that has one, else towards other networks; nothing
    is sent. Where it has none, the loopback's."""
    for host, port in (*towards, _ELSEWHERE):
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def network_name() -> str:
    """Names the network that this process's loopback is of: who has the same name can connect to it."""
    said = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        said = f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    return hashlib.blake2b(said.encode(), digest_size=8, person=b"coatcheck-net").hexdigest()


def is_loopback(host: str) -> bool:
    """Whether all that `host`, an address or a name, means here is the loopback: nobody else can connect to it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return bool(found) and all(is_loopback_address(str(entry[4][0])) for entry in found)


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def listen_at_path(path: Path, mode: int = 0o600) -> socket.socket:
    """A unix socket that only our user (and root) may connect to, or whoever `mode` says. One that a killed router left
    behind is replaced. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(mode)  # before it listens: nobody can have connected
        listener.listen()
    except BaseException:  # whatever it is goes on to the caller; the socket is nobody else's yet
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def removed_at_end(path: Path) -> Iterator[None]:
    """For what `listen_at_path` has made; what somebody else has put there in the meantime stays."""
    made = path.lstat()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(made, path.lstat()):
                path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno != errno.ECONNREFUSED
        return True
