"""What is asked of the kernel about connections, beyond what event loops offer: life signs, what has been acknowledged,
and a connection to the first of several addresses that answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import select
import socket
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from app.http.names import Address

_PROBE_AFTER, _PROBE_EVERY, _PROBES = 60, 15, 4
"""Seconds of silence after which the other host is asked whether it is there, seconds between the questions, and how
many it may leave unanswered: below the idle limits of usual firewalls and balancers, and a lost host costs two
minutes."""
_UNACKNOWLEDGED = _PROBE_AFTER + _PROBE_EVERY * _PROBES
"""Seconds that what was sent to a client may be unacknowledged before it counts as gone; the system's own limit is a
quarter of an hour."""
_NEXT_ADDRESS_AFTER = 0.25
"""Seconds (RFC 8305 5)."""
_MOST_UNREAD = 8 << 20
_INFO_BYTES = 216
_ACKED_AT, _SENT_AT, _SENT_AGAIN_AT = 120, 200, 208
"""Of Linux's `struct tcp_info`: tcpi_bytes_acked, tcpi_bytes_sent, tcpi_bytes_retrans."""


def ask_for_life(raw: Any) -> None:
    """Notice when the host at the other end has gone without a word. `raw`: a socket, or what a transport has of one;
    accepted sockets have it from the one that listens."""
    with contextlib.suppress(OSError):  # of a unix socket
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def give_up_on_silence(raw: Any, patience: float) -> None:
    """As `ask_for_life`, for what was sent and is not taken. The system counts what finds no room as well, and may not
    be quicker there than `patience`, in seconds (0: for ever)."""
    if patience:
        with contextlib.suppress(OSError):
            longest = max(_UNACKNOWLEDGED, patience + _PROBE_EVERY)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(longest * 1000))


class Progress(NamedTuple):
    """Of what was written to a connection, in bytes since its beginning, which counts as one."""

    left: int
    """Sent, each byte once."""
    acked: int
    """Acknowledged by the other host."""


def progress(raw: Any) -> Progress | None:
    """None where the kernel does not tell."""
    try:
        info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _INFO_BYTES:
        return None
    acked, sent, again = (struct.unpack_from("Q", info, at)[0] for at in (_ACKED_AT, _SENT_AT, _SENT_AGAIN_AT))
    return Progress(1 + sent - again, acked)


def unread(raw: Any) -> bytes:
    """What has come and was not read, of a connection that is broken: nothing more will come. At most 8 MiB."""
    pieces: list[bytes] = []
    fd, limit = raw.fileno(), _MOST_UNREAD
    while limit > 0:
        try:
            piece = os.read(fd, limit)
        except OSError:
            break
        if not piece:
            break
        limit -= len(piece)
        pieces.append(piece)
    return b"".join(pieces)


def is_quiet(raw: Any) -> bool:
    """Whether nothing has come that was not read, and the other side has not ended."""
    events = select.poll()
    events.register(raw.fileno(), select.POLLIN | select.POLLRDHUP)
    return not events.poll(0)


def is_numeric(host: str) -> bool:
    """Whether it is an address, not a name."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True


async def dial(found: Iterable[Address]) -> socket.socket:
    """A connection to the first of a name's addresses that takes one; the next is tried after 250 ms, or as soon as the
    one before has failed (RFC 8305). Raises OSError."""
    loop = asyncio.get_running_loop()
    addresses = alternating(found)
    attempts: set[asyncio.Task[socket.socket]] = set()
    failures: list[OSError] = []
    try:
        while addresses or attempts:
            if addresses:
                attempts.add(loop.create_task(_connect(addresses.pop(0))))
            done, attempts = await asyncio.wait(
                attempts, timeout=_NEXT_ADDRESS_AFTER if addresses else None, return_when=asyncio.FIRST_COMPLETED
            )
            made = [task.result() for task in done if task.exception() is None]
            for late in made[1:]:
                late.close()
            if made:
                return made[0]
            failures += [error for task in done if isinstance(error := task.exception(), OSError)]
    finally:
        for task in attempts:
            task.cancel()
            task.add_done_callback(_close_late)
    raise _of_all(failures)


def alternating(addresses: Iterable[Address]) -> list[Address]:
    """Each once, the families by turns, beginning with the first one's (RFC 8305 4)."""
    kinds: dict[socket.AddressFamily, list[Address]] = {}
    for address in dict.fromkeys(addresses):
        kinds.setdefault(address[0], []).append(address)
    rounds = itertools.zip_longest(*kinds.values())
    return [address for turn in rounds for address in turn if address is not None]


async def _connect(address: Address) -> socket.socket:
    raw = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, address[1])
    except BaseException:  # also when cancelled: the socket is nobody else's yet
        raw.close()
        raise
    return raw


def _close_late(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _of_all(failures: list[OSError]) -> OSError:
    """Refused only if all refused: where one did not answer, the worker may be there."""
    others = [failure for failure in failures if failure.errno != errno.ECONNREFUSED]
    return (others or failures or [OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))])[0]
