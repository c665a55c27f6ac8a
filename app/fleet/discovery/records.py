"""Workers from the registry: the records under `workers/` that `coatcheck register` keeps, or a mock worker, or others.

A record's name is the worker's. Its value is JSON; readers ignore fields that they do not know. A record that cannot be
read, or whose address nobody here can reach, costs only itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from app.fleet.discovery.source import Said, Trouble, View
from app.fleet.specs import Described, WorkerError, WorkerSpec, normal_url
from backends.base import StoreError
from backends.registry import Put, Registry, Removed

WORKERS = "workers"
"""The kind of the records."""
_AGAIN_AFTER = (0.1, 0.5, 1.0, 2.0)
"""Seconds until a registry that did not answer is asked again, by how often in a row that was."""


class WorkerRecord(Described, frozen=True, kw_only=True, omit_defaults=True):
    """What is written of a worker, by its name."""

    host: str = ""
    """Whose loopback the URL means, where it means one (`this_host`)."""
    version: int = 1

    def spec(self, name: str, host: str) -> WorkerSpec:
        """As the fleet has it, for a router on `host`. Raises ValueError with why it cannot be used."""
        check_reachable(normal_url(self.url), from_here=bool(host) and self.host == host)
        return self.checked(name)


encode_record = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(WorkerRecord).decode
"""Raises ValueError (msgspec's are)."""


def this_host() -> str:
    """Tells whose loopback is meant by 127.0.0.1: the same for processes that share it, and for no others. Empty where
    the system does not tell."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
        return hashlib.blake2b(f"{boot} {network}".encode(), digest_size=8, person=b"coatcheck-host").hexdigest()
    return ""


def check_reachable(url: str, *, from_here: bool) -> None:
    """Raises WorkerError when the address in a worker's URL leads nobody to it, or only those on its own machine, and
    the URL comes from another one."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        loopback, nowhere = host == "localhost" or host.endswith(".localhost"), False
    else:
        mapped = getattr(address, "ipv4_mapped", None) or address
        loopback, nowhere = mapped.is_loopback, mapped.is_unspecified
    if nowhere:
        raise WorkerError(f"{url} is where a server listens, not where it is; register its address")
    if loopback and not from_here:
        raise WorkerError(f"{url} leads to it on its own machine only, which is not this one; register its address")


class Records(msgspec.Struct, frozen=True):
    """Every record of a kind."""

    by_name: dict[str, bytes]
    emptied: bool = False
    """None is left, and each was seen to go."""
    rewound: bool = False
    """The registry is not the one that was read before, or has gone back in time."""


async def follow(registry: Registry, kind: str, again: asyncio.Event | None = None) -> AsyncIterator[Records | Trouble]:
    """The records of a kind whenever they change, and why they cannot be read. Does not end. One that did not answer is
    asked again at once when `again` is set."""
    failures = 0
    while True:
        records: dict[str, bytes] = {}
        try:
            events = registry.watch(kind)
            try:
                async for event in events:
                    failures, emptied, rewound = 0, False, False
                    match event:
                        case Put(name, value):
                            records[name] = value
                        case Removed(name):
                            emptied = records.pop(name, None) is not None and not records
                        case _:
                            rewound = event.rewound
                            records = dict(await registry.list(kind))
                    yield Records(dict(records), emptied, rewound)
            finally:
                await _close(events)
            why = "its watch has ended"
        except StoreError as error:
            why = str(error)
        yield Trouble(why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_AFTER[min(failures, len(_AGAIN_AFTER) - 1)]):
                await (again or asyncio.Event()).wait()
        if again is not None:
            again.clear()
        failures += 1


class _Closable(Protocol):
    def aclose(self) -> Awaitable[None]: ...


async def _close(events: object) -> None:
    if hasattr(events, "aclose"):
        closable: _Closable = events
        await closable.aclose()


class _Read(NamedTuple):
    """A record, and what it says; None: it cannot be used, and why."""

    value: bytes
    spec: WorkerSpec | None
    why: str = ""


class RegistrySource:
    """The workers that are registered."""

    def __init__(
        self, registry: Registry, label: str, *, host: str, close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`host`: `this_host()`. `close` gives up what the registry stands on, where that is ours."""
        self.label = label
        self._registry, self._host, self._close = registry, host, close
        self._read: dict[str, _Read] = {}
        """What the records say. Each is read once, however often others change."""
        self._again = asyncio.Event()

    async def says(self) -> AsyncIterator[Said]:
        async for said in follow(self._registry, WORKERS, self._again):
            yield said if isinstance(said, Trouble) else self._view(said)

    def look(self) -> None:
        """Its watch tells, while it stands."""
        self._again.set()

    async def aclose(self) -> None:
        if self._close is not None:
            await self._close()

    def _view(self, records: Records) -> View:
        before = self._read
        self._read = {
            name: known if (known := before.get(name)) and known.value == value else self._read_one(name, value)
            for name, value in sorted(records.by_name.items())
        }
        workers = tuple(each.spec for each in self._read.values() if each.spec is not None)
        refused = tuple(f"{name}: {each.why}" for name, each in self._read.items() if each.spec is None)
        return View(workers, refused, records.emptied)

    def _read_one(self, name: str, value: bytes) -> _Read:
        try:
            return _Read(value, decode_record(value).spec(name, self._host))
        except ValueError as error:
            return _Read(value, None, str(error))
