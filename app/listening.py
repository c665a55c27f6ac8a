"""Where the router listens: addresses as they are written, unix sockets, and whether others can reach them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from app.sessions.tenants import is_loopback_address

_UNIX = "unix:"
_PATH_LIMIT = 107
"""Bytes; `sun_path` of unix(7), with its end."""


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
        return str(self) if self.path is not None else f"http://{self}"

    @property
    def is_local(self) -> bool:
        """Only this machine can connect."""
        return self.path is not None or is_loopback(self.host)


def read_place(text: str) -> Place:
    """From `HOST:PORT`, `[IPV6]:PORT` or `unix:/path`. Raises ValueError."""
    if text.startswith(_UNIX):
        path = Path(text.removeprefix(_UNIX).removeprefix("//"))
        if not path.is_absolute() or len(os.fsencode(path)) > _PATH_LIMIT:
            raise ValueError(f"a unix socket is unix:/path, its path absolute and at most {_PATH_LIMIT} bytes long")
        return Place(path=path)
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdecimal() and int(port) <= 65535
    if not colon or not bare or not is_port or (":" in bare) != (bare != host) or "/" in bare:
        raise ValueError("write HOST:PORT, [IPV6]:PORT or unix:/path")
    return Place(bare, int(port))


def is_loopback(host: str) -> bool:
    """Whether all that `host`, an address or a name, means here is the loopback: nobody else can connect to it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return bool(found) and all(is_loopback_address(str(entry[4][0])) for entry in found)


def listen_at_path(path: Path) -> socket.socket:
    """A unix socket that only our user (and root) may connect to. One that a killed router left behind is replaced.
    Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # before it listens: nobody can have connected
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
