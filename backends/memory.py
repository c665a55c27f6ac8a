"""Claims, and the records beside them, in this process's memory.

Promises that a read which starts after a write has returned sees it (LINEARIZABLE), exact expiry at 1.25 x TTL, and
stamps. It does not reach other processes, and its claims go with the process: for one replica, and for tests.

Bounded: at `capacity` the claim that would expire soonest makes room for the new one (subscribers are told), because a
full table that refuses new sessions is worse than an idle session that is placed again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from array import array
from collections.abc import AsyncIterator, Callable
from math import inf

import msgspec

from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimOutcome,
    ClaimValue,
    CloseOutcome,
    Deleted,
    Event,
    Reset,
    StoreUnavailable,
)
from backends.fanout import MAILBOX_SIZE, FanOut
from backends.registry import Put, RegistryChange, RegistryEvent, Removed, by_name, check_kind, check_name, check_record

STAMP_SLOTS = 1 << 16


class MemoryStore:
    """`clock` returns monotonic seconds. Nothing here awaits, so each call is atomic in its event loop."""

    across_processes = False

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        capacity: int = 1_000_000,
        mailbox_size: int = MAILBOX_SIZE,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, should be at least 1")
        self._clock = clock
        self._capacity = capacity
        self._claims: dict[str, Claim] = {}
        # (expires_at, key, revision), soonest first. A renewed or closed claim leaves its old entry behind until that
        # comes up or `_keep` builds the list anew.
        self._expiries: list[tuple[float, str, int]] = []
        self._revisions = itertools.count(1)
        self._stamps = array("Q", bytes(8 * STAMP_SLOTS))
        self._fanout: FanOut[Deleted] = FanOut(mailbox_size)
        self._registry = MemoryRegistry(clock, mailbox_size)
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def registry(self) -> MemoryRegistry:
        return self._registry

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        now = self._begin()
        standing = self._claims.get(key)
        if standing is not None:
            return ClaimOutcome(standing, standing.value.nonce == proposal.nonce)
        while len(self._claims) >= self._capacity:
            self._remove_soonest()
        claim = Claim(key=key, value=proposal, revision=next(self._revisions), expires_at=now + LIFETIME * ttl)
        self._keep(claim)
        return ClaimOutcome(claim, True)

    async def get(self, key: str) -> Claim | None:
        self._begin()
        return self._claims.get(key)

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        now = self._begin()
        standing = self._claims.get(claim.key)
        if standing is None or standing.revision != claim.revision:
            raise ClaimLost(f"claim {claim.key} does not stand any more")
        renewed = msgspec.structs.replace(standing, expires_at=max(standing.expires_at, now + LIFETIME * ttl))
        self._keep(renewed)
        return renewed

    async def close(self, claim: Claim) -> CloseOutcome:
        self._begin()
        standing = self._claims.get(claim.key)
        if standing is None:
            return CloseOutcome.GONE
        if standing.revision != claim.revision:
            return CloseOutcome.SUPERSEDED
        self._remove(standing)
        return CloseOutcome.CLOSED

    async def subscribe(self) -> AsyncIterator[Event]:
        self._begin()
        mailbox = self._fanout.join()
        mailbox.put(Reset())
        try:
            async for event in mailbox:
                yield event
        finally:
            self._fanout.leave(mailbox)

    def stamp(self, key: str) -> int:
        return self._stamps[int(key[:4], 16)]

    async def check(self) -> None:
        self._begin()

    async def aclose(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._fanout.end()
        self._registry.end()

    def _begin(self) -> float:
        """Now, with everything gone that has expired by now."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            self._remove_soonest()
        return now

    def _keep(self, claim: Claim) -> None:
        self._claims[claim.key] = claim
        heapq.heappush(self._expiries, (claim.expires_at, claim.key, claim.revision))
        if len(self._expiries) > 2 * len(self._claims) + 64:
            self._expiries = [(held.expires_at, key, held.revision) for key, held in self._claims.items()]
            heapq.heapify(self._expiries)
        self._set_alarm()

    def _remove_soonest(self) -> None:
        """Drops one expiry, and its claim unless that has been renewed or closed since."""
        expires_at, key, revision = heapq.heappop(self._expiries)
        standing = self._claims.get(key)
        if standing is not None and standing.revision == revision and standing.expires_at == expires_at:
            self._remove(standing)

    def _remove(self, claim: Claim) -> None:
        del self._claims[claim.key]
        slot = int(claim.key[:4], 16)
        self._stamps[slot] += 1
        self._fanout.publish(Deleted(claim.key, before=claim.revision + 1))

    def _set_alarm(self) -> None:
        """One timer, for the soonest expiry: subscribers hear of it though nobody calls."""
        loop = asyncio.get_running_loop()
        delay = max(0.0, self._expiries[0][0] - self._clock()) + 0.001
        if self._alarm is not None:
            if self._alarm.when() <= loop.time() + delay:
                return
            self._alarm.cancel()
        self._alarm = loop.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._begin()
        if self._expiries:
            self._set_alarm()


class MemoryRegistry:
    """Records in this process's memory, which end exactly at their TTL. As above, each call is atomic."""

    def __init__(self, clock: Callable[[], float], mailbox_size: int = MAILBOX_SIZE) -> None:
        self._clock = clock
        self._mailbox_size = mailbox_size
        self._records: dict[str, dict[str, tuple[bytes, float]]] = {}
        """By kind and name: the value, and when it ends."""
        self._watchers: dict[str, FanOut[RegistryChange]] = {}
        """By kind, for those that somebody watches."""
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False

    async def put(self, kind: str, name: str, value: bytes, ttl: float | None) -> None:
        check_record(kind, name, value, ttl)
        now = self._begin()
        records = self._records.setdefault(kind, {})
        known = records.get(name)
        records[name] = (value, inf if ttl is None else now + ttl)
        if known is None or known[0] != value:
            self._publish(kind, Put(name, value))
        self._set_alarm()

    async def remove(self, kind: str, name: str) -> None:
        check_name(kind, name)
        self._begin()
        self._remove(kind, name)

    async def list(self, kind: str) -> dict[str, bytes]:
        check_kind(kind)
        self._begin()
        return {name: value for name, (value, _) in self._records.get(kind, {}).items()}

    def watch(self, kind: str) -> AsyncIterator[RegistryEvent]:
        check_kind(kind)
        return self._watch(kind)

    async def _watch(self, kind: str) -> AsyncIterator[RegistryEvent]:
        self._begin()
        watchers = self._watchers.setdefault(kind, FanOut(self._mailbox_size, by_name))
        mailbox = watchers.join()
        mailbox.put(Reset())
        try:
            async for event in mailbox:
                yield event
        finally:
            watchers.leave(mailbox)
            if not watchers:
                self._watchers.pop(kind, None)

    def end(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for watchers in tuple(self._watchers.values()):
            watchers.end()

    def _begin(self) -> float:
        """Now, with everything gone that has ended by now. There are few records: each is looked at."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        now = self._clock()
        for kind, records in tuple(self._records.items()):
            for name in [name for name, (_, ends_at) in records.items() if ends_at <= now]:
                self._remove(kind, name)
        return now

    def _remove(self, kind: str, name: str) -> None:
        records = self._records.get(kind, {})
        if records.pop(name, None) is not None:
            self._publish(kind, Removed(name))
            if not records:
                del self._records[kind]

    def _publish(self, kind: str, event: RegistryChange) -> None:
        if kind in self._watchers:
            self._watchers[kind].publish(event)

    def _set_alarm(self) -> None:
        """One timer, for the next end: watchers hear of it though nobody calls."""
        soonest = min((ends_at for records in self._records.values() for _, ends_at in records.values()), default=inf)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if soonest < inf:
            delay = max(0.0, soonest - self._clock()) + 0.001
            self._alarm = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        self._begin()
        self._set_alarm()
