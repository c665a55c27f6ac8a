"""Where the names of workers lead, by the system's resolver. A name server's trouble is its own: what it said last goes
on while it says nothing, and a name that is not answered delays nobody who asks for another.

The system's calls block for as long as the name server likes, and event loops have few threads for them. So each name
has a thread of its own while it is being looked up, and never two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("coatcheck.names")

_FRESH = 5.0
"""Seconds for which an answer is used without asking again."""
_PATIENCE = 0.25
"""Seconds that are waited for a newer answer, while there is an older one."""
_ASK_AGAIN = 1.0
"""Seconds after a lookup that failed."""

Address = tuple[socket.AddressFamily, Any]
"""A family, and an address as its sockets have it."""
LookUp = Callable[[str], list[Address]]
"""Blocks. Raises OSError."""


class NoAddress(OSError):
    """Of this name no address is known, nor was one ever."""


def look_up(host: str) -> list[Address]:
    """By the system. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [(socket.AddressFamily(entry[0]), entry[4]) for entry in found]


class _Name:
    """What is known of one name. `failing`: the last lookup failed, or is late; it is not waited for."""

    __slots__ = ("addresses", "ask_at", "asked", "failing")

    def __init__(self) -> None:
        self.addresses: list[Address] = []
        self.ask_at = 0.0
        self.asked: asyncio.Future[None] | None = None
        self.failing = False


class Names:
    """The names of one router's workers. Within one event loop."""

    def __init__(self, look_up: LookUp = look_up, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._look_up, self._clock = look_up, clock
        self._names: dict[str, _Name] = {}

    def knows(self, host: str) -> bool:
        """Whether there is an address of it, however old."""
        name = self._names.get(host)
        return name is not None and bool(name.addresses)

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Of a name, with `port`. Raises NoAddress where none is known, as late as the system says so."""
        name = self._names.get(host)
        if name is None:
            name = self._names[host] = _Name()
        if name.asked is None and self._clock() >= name.ask_at:
            self._ask(host, name)
        if name.asked is not None and not (name.addresses and name.failing):
            # Not cancelled with us: others wait for it as well.
            done, _ = await asyncio.wait({name.asked}, timeout=_PATIENCE if name.addresses else None)
            if not done and not name.failing:
                name.failing = True
                log.warning("the name %s is not answered; what was known of it goes on", host)
        if not name.addresses:
            raise NoAddress(f"the name {host} cannot be looked up")
        return [(family, (address[0], port, *address[2:])) for family, address in name.addresses]

    def _ask(self, host: str, name: _Name) -> None:
        loop = asyncio.get_running_loop()
        name.asked = asked = loop.create_future()

        def answered(found: list[Address], failure: OSError | None) -> None:
            name.asked = None
            if found:
                name.addresses = found
                name.ask_at = self._clock() + _FRESH
                if name.failing:
                    log.warning("the name %s is answered again", host)
                name.failing = False
            else:
                name.ask_at = self._clock() + _ASK_AGAIN
                if not name.failing:
                    goes_on = "what was known of it goes on" if name.addresses else "nothing is known of it"
                    log.warning("the name %s cannot be looked up (%s); %s", host, failure, goes_on)
                name.failing = True
            if not asked.done():
                asked.set_result(None)

        def ask() -> None:
            found: list[Address] = []
            failure: OSError | None = None
            try:
                found = self._look_up(host)
            except OSError as error:
                failure = error
            except UnicodeError as error:  # no name at all
                failure = OSError(str(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                loop.call_soon_threadsafe(answered, found, failure)

        # A daemon: nobody waits for a name server at the end.
        threading.Thread(target=ask, name=f"look up {host}", daemon=True).start()
