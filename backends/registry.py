"""The contract of a registry: small named records beside the claims, which replicas and workers tell each other.

Each store offers one, `ClaimStore.registry`, over the same connection and with what the store guarantees (`backends`).
A record is bytes under a *kind* and a *name*; the last writer stands. This module says what each registry must do;
`tests/stores/test_registry.py` checks each sentence against every store.

**Lifetime.** A record put with a `ttl` stands that long from the call on, and at most `LIFETIME * ttl`; its owner puts
it again before. One put without stands until it is removed. A record does not die with the connection that made it.

**Errors** are the claim store's: `StoreUnavailable`, surely not applied; `OutcomeUnknown`, perhaps applied: call again
with the same arguments, which is safe. Every call ends within the store's deadline, and may be cancelled. A registry
that is away does not make the claims unavailable, nor the other way round: each call speaks for itself.

**Events.** `watch` first yields `Reset` when its watch stands: list the kind then, and at every later `Reset`. After it
each change of a record yields `Put` or `Removed`, in order per name; a `Put` of what already stood is left out where
the store can tell, and several changes of one name may be told as the last of them. When the watch is not shown to be
alive any more it raises `StoreUnavailable`; it never falls silent.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from backends.events import Reset

MAX_NAME = 128
"""Characters of a record's name, visible ASCII; a kind is up to 32 lower-case letters and hyphens."""
MAX_VALUE = 65_536
"""Bytes of a record's value."""


_KIND = re.compile(r"[a-z-]{1,32}")
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME}}}")


class Put(msgspec.Struct, frozen=True):
    """The record has this value from now on."""

    name: str
    value: bytes


class Removed(msgspec.Struct, frozen=True):
    """There is no record of that name any more: removed, or expired."""

    name: str


RegistryChange = Put | Removed
RegistryEvent = RegistryChange | Reset


class Registry(Protocol):
    """See the module's docstring for what each method promises. ValueError: an argument is out of bounds."""

    async def put(self, kind: str, name: str, value: bytes, ttl: float | None) -> None:
        """Make the record, or replace it. `ttl` in seconds; None: until it is removed.

        Raises StoreUnavailable or OutcomeUnknown."""
        ...

    async def remove(self, kind: str, name: str) -> None:
        """Idempotent. Raises StoreUnavailable or OutcomeUnknown."""
        ...

    async def list(self, kind: str) -> dict[str, bytes]:
        """Every record of the kind that stands, by its name. Raises StoreUnavailable, also when it could read only
        some of them: never a part for the whole."""
        ...

    def watch(self, kind: str) -> AsyncIterator[RegistryEvent]:
        """Changes from now on. Raises StoreUnavailable from the iterator. Several may watch one kind at once."""
        ...


def by_name(change: RegistryChange) -> str:
    """The subject of a change (see `backends.fanout`): only the last of each name need wait for a slow watcher."""
    return change.name


def check_kind(kind: str) -> None:
    """Raises ValueError."""
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} is no kind of record: up to 32 lower-case letters and hyphens")


def check_name(kind: str, name: str) -> None:
    """Raises ValueError."""
    check_kind(kind)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a record: up to {MAX_NAME} visible ASCII characters")


def check_record(kind: str, name: str, value: bytes, ttl: float | None) -> None:
    """Raises ValueError."""
    check_name(kind, name)
    if len(value) > MAX_VALUE:
        raise ValueError(f"the value of {name!r} is {len(value)} bytes, at most {MAX_VALUE} are allowed")
    if ttl is not None and not 0 < ttl < math.inf:
        raise ValueError(f"the ttl of {name!r} is {ttl}, should be a positive number of seconds, or None")
