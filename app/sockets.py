"""The sockets that a router listens at, made of its settings."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app import Trouble
from app.config import Settings
from app.http.tcp import ask_for_life, give_up_on_silence
from app.listening import Place, is_unspecified, listen_at_path, own_address, read_peer_address, removed_at_end

BACKLOG = 4096
_MODE_OF_UDS = 0o660
"""Of the unix socket for clients: a proxy that runs as somebody else is of our group."""


class Listeners(NamedTuple):
    public: list[socket.socket]
    admin: list[socket.socket]
    """Empty: the admin API is served on the public ones."""


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[Listeners]:
    """Those for clients and admins. Raises Trouble."""
    public, admin = settings.listen.place, settings.access.admin_place
    with contextlib.ExitStack() as stack:

        def bound(place: Place, host: str, port: str, mode: int = 0o600) -> list[socket.socket]:
            try:
                if place.path is not None:
                    sockets = [listen_at_path(place.path, mode)]
                else:
                    sockets = listen(place.host, place.port, patience=settings.limits.client_read_timeout)
            except OSError as error:
                remedy = f"choose another {host}"
                if error.errno == errno.EADDRINUSE:
                    remedy = f"free it or choose another {port}"
                elif error.errno == errno.EACCES and place.path is None:
                    # What is below net.ipv4.ip_unprivileged_port_start.
                    remedy = f"low ports need CAP_NET_BIND_SERVICE; give this process that, or choose a higher {port}"
                raise Trouble(f"cannot listen on {place}: {error.strerror}; {remedy}") from None
            for listener in sockets:
                stack.enter_context(contextlib.closing(listener))
            if place.path is not None:
                stack.enter_context(removed_at_end(place.path))
            return sockets

        yield Listeners(
            bound(public, *(("--uds",) * 2 if public.path is not None else ("--host", "--port")), _MODE_OF_UDS),
            bound(admin, "--admin-listen", "--admin-listen") if admin is not None else [],
        )


@contextlib.contextmanager
def peer_listeners(settings: Settings) -> Iterator[list[socket.socket]]:
    """One process's own; empty: it has no peers. Raises Trouble."""
    place = settings.peer_place
    with contextlib.ExitStack() as stack:
        sockets = [] if place is None else _listen_for_peers(place, settings.listen.processes)
        for listener in sockets:
            stack.enter_context(contextlib.closing(listener))
        yield sockets


def _listen_for_peers(place: Place, processes: int) -> list[socket.socket]:
    """At the first port from `place.port` on that no other of so many processes has; 0: at any. Raises Trouble."""
    last = place.port + processes - 1 if place.port else 0
    for port in range(place.port, last + 1):
        try:
            return listen(place.host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                remedy = "choose another --peer-listen, or off"
                said = f"cannot listen for the other replicas on {Place(place.host, port)}"
                raise Trouble(f"{said}: {error.strerror}; {remedy}") from None
    raise AssertionError("unreachable")


def advertised(settings: Settings, sockets: Sequence[socket.socket]) -> Place | None:
    """Where other replicas are told to connect to."""
    if not sockets:
        return None
    host, port = sockets[0].getsockname()[:2]
    chosen = settings.listen.peer_address
    if chosen is not None:
        said = read_peer_address(chosen)
        return Place(said.host, said.port or port)
    return Place(own_address(settings.store.places) if is_unspecified(host) else host, port)


def listen(host: str, port: int, *, patience: float = 0.0) -> list[socket.socket]:
    """Bound sockets for every address that `host` means, all with one port. `patience`: seconds that a client may take
    nothing; 0: no limit. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses: list[tuple[int, tuple[Any, ...]]] = list(dict.fromkeys((entry[0], entry[4]) for entry in found))
    if [address[0] for _, address in addresses] == ["::"]:
        # Every address of this machine, as everybody takes it to mean. In two sockets, so that clients of IPv4 keep
        # theirs as it is written.
        addresses.append((socket.AF_INET, ("0.0.0.0", port)))
    sockets: list[socket.socket] = []
    absent = None
    for family, address in addresses:
        shared_port = sockets[0].getsockname()[1] if sockets else port
        try:
            listener = socket.create_server(
                (address[0], shared_port, *address[2:]),
                family=family,
                backlog=BACKLOG,
            )
        except OSError as error:
            failure = OSError(error.errno, os.strerror(error.errno or errno.EIO))
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                absent = failure  # a name may have an address of a family that this machine does not use
                continue
            for bound in sockets:
                bound.close()
            raise failure from error
        # What it accepts has these from it.
        ask_for_life(listener)
        give_up_on_silence(listener, patience)
        sockets.append(listener)
    if not sockets:
        raise absent or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return sockets


def where(listener: socket.socket) -> Place:
    """That it is bound to."""
    name = listener.getsockname()
    return Place(path=Path(name)) if isinstance(name, str) else Place(*name[:2])
