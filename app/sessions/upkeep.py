"""What is done for claims between turns: they are closed, renewed and watched, and a store that is away is waited for.

Here alone the store's methods are called."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from app.fleet.workers import Target
from app.metrics import Metrics
from app.sessions.entries import Entries, Entry
from app.sessions.peers import Peers
from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimOutcome,
    ClaimStore,
    ClaimValue,
    CloseOutcome,
    OutcomeUnknown,
    Reset,
    StoreError,
)

log = logging.getLogger("coatcheck.affinity")
T = TypeVar("T")

_TRIES = 3
_AT_ONCE = 32
_LONGEST_PAUSE = 5.0


class StoreState(enum.Enum):
    UP = "up"
    READ_ONLY = "read-only"
    """Claims can be read but not made."""
    AWAY = "away"


class Tasks:
    """What runs in the background until `aclose`."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of the affinity failed", exc_info=task.exception())

    async def aclose(self) -> None:
        tasks = set(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Claims:
    """The claim store as this replica finds it: every call is measured, and one that fails tells that the store is
    away, until a `check` of it succeeds."""

    def __init__(
        self,
        store: ClaimStore,
        metrics: Metrics,
        tasks: Tasks,
        *,
        replica: str,
        ttl: float,
        kept_ttl: float,
        clock: Callable[[], float],
        meanwhile: str,
        returned: Callable[[], Awaitable[None]],
    ) -> None:
        """`meanwhile`: what happens to new sessions while the store is away, for the log. `returned` is called when it
        is back."""
        self._store, self._metrics, self._tasks = store, metrics, tasks
        self._replica, self._meanwhile, self._returned = replica, meanwhile, returned
        self.ttl, self._kept_ttl, self.clock = ttl, kept_ttl, clock
        self.state = StoreState.UP
        self._up = asyncio.Event()
        """Set exactly while the state is UP."""
        self._up.set()

    async def get(self, key: str) -> Claim | None:
        return await self._call("get", lambda: self._store.get(key))

    async def create(self, key: str, target: Target, generation: int, *, kept: bool = False) -> ClaimOutcome:
        """`kept`: of something that a worker keeps, as for `renew`."""
        ttl = self._kept_ttl if kept else self.ttl
        # One proposal, so one nonce, for every try: a create whose reply was lost is recognised as our own.
        value = ClaimValue(
            worker=target.worker.name,
            rank=target.rank,
            replica=self._replica,
            generation=generation,
            created_at=int(time.time()),
        )
        return await self._call("create", lambda: self._store.create_or_get(key, value, ttl), _TRIES)

    async def renew(self, claim: Claim, *, kept: bool = False) -> Claim:
        ttl = self._kept_ttl if kept else self.ttl
        return await self._call("renew", lambda: self._store.renew(claim, ttl))

    async def close(self, claim: Claim, tries: int = _TRIES) -> CloseOutcome:
        return await self._call("close", lambda: self._store.close(claim), tries)

    async def pause(self, seconds: float) -> None:
        """Before something is tried again: so long, or until the store is back and a little more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._up.wait()
        await asyncio.sleep(min(seconds, 0.25))

    async def _call(self, op: str, call: Callable[[], Awaitable[T]], tries: int = 1) -> T:
        """A lost reply is resolved by asking again."""
        for last in (*(False,) * (tries - 1), True):
            started = time.perf_counter()
            outcome = "ok"
            try:
                return await call()
            except StoreError as error:
                outcome = "lost" if isinstance(error, ClaimLost) else "failed"
                if isinstance(error, OutcomeUnknown) and not last:
                    continue
                if outcome == "failed":
                    self._failed(error)
                raise
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            finally:
                self._metrics.store_seconds.observe(time.perf_counter() - started, (op, outcome))
        raise AssertionError("unreachable")

    def _failed(self, error: StoreError) -> None:
        if self.state is StoreState.UP:
            self.state = StoreState.AWAY
            self._up.clear()
            log.error("the claim store is away (%s); known sessions go on, new ones are %s", error, self._meanwhile)
            self._tasks.spawn(self._await_return())

    async def _await_return(self) -> None:
        delay = 0.05
        while True:
            try:
                await self._store.check()
                break
            except Exception as error:
                if not isinstance(error, StoreError):
                    # A fault of the store's code must not end the waiting unseen: the store would stay away for ever.
                    log.exception("the claim store's check failed; it is asked again")
            try:
                await self._store.get("0" * 40)
                self.state = StoreState.READ_ONLY
            except StoreError:
                self.state = StoreState.AWAY
            await asyncio.sleep(delay)
            delay = min(2 * delay, 1.0)
        self.state = StoreState.UP
        self._up.set()
        log.warning("the claim store is back")
        await self._returned()


async def watch(store: ClaimStore, entries: Entries, metrics: Metrics) -> None:
    """Tell the entries what the store says of claims that go, and whether it can be relied on to say so. Endless."""
    delay = 0.05
    while True:
        try:
            async for event in store.subscribe():
                if isinstance(event, Reset):
                    delay = 0.05
                    entries.watched(True)
                    metrics.resets.inc()
                else:
                    entries.deleted(event)
        except StoreError as error:
            if entries.watching:
                log.warning("the claim store's watch is lost; claims are read before use: %s", error)
        except Exception:
            # A fault of the store's code must not end the watch unseen: entries would stay proven for ever.
            log.exception("the claim store's watch failed; it is begun again")
        finally:
            entries.watched(False)
        await asyncio.sleep(delay)
        delay = min(2 * delay, 2.0)


class Closer:
    """Closes the claims of sessions that have ended, again and again until it is done or the claim has expired."""

    def __init__(
        self, entries: Entries, claims: Claims, peers: Peers, metrics: Metrics, tasks: Tasks, *, limit: float
    ) -> None:
        """`limit`: seconds that anybody waits for a close; it goes on in the background."""
        self._entries, self._claims, self._peers, self._metrics, self._tasks = entries, claims, peers, metrics, tasks
        self._limit = limit
        self._closings: dict[str, asyncio.Task[None]] = {}
        """The latest of each session; it waits for the one before it."""

    def __len__(self) -> int:
        return len(self._closings)

    def is_closing(self, key: str) -> bool:
        return key in self._closings

    def begin(self, entry: Entry) -> asyncio.Task[None] | None:
        """End what is known of the session here, and begin to close its claim if it has one."""
        if self._entries.find(entry.key) is entry:
            self._entries.forget(entry.key)
        claim, entry.claim, entry.closing = entry.claim, None, False
        entry.unprove()
        if claim is None and (self._claims.state is StoreState.UP or not self._peers):
            return None
        task = self._tasks.spawn(self._close(entry.key, claim, self._closings.get(entry.key)))
        self._closings[entry.key] = task
        task.add_done_callback(lambda done: self._closed(entry.key, done))
        return task

    async def close(self, entry: Entry) -> None:
        """Returns when the claim is closed, or after the limit."""
        await self._wait(self.begin(entry))

    async def wait(self, key: str | None = None) -> None:
        """For the close of a session that is under way, if any, or for all; but not longer than the limit."""
        await self._wait(*(self._closings.values() if key is None else [self._closings.get(key)]))

    async def _wait(self, *tasks: asyncio.Task[None] | None) -> None:
        if pending := [task for task in tasks if task is not None]:
            await asyncio.wait(pending, timeout=self._limit)

    def _closed(self, key: str, task: asyncio.Task[None]) -> None:
        if self._closings.get(key) is task:
            del self._closings[key]

    async def _close(self, key: str, claim: Claim | None, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        if self._claims.state is not StoreState.UP and await self._close_by_peers(key, claim):
            return
        if claim is None:
            return
        until = claim.expires_at or self._claims.clock() + LIFETIME * self._claims.ttl
        delay = 0.05
        while True:
            try:
                outcome = await self._claims.close(claim, tries=1)
            except StoreError:
                if self._claims.clock() >= until:
                    self._metrics.closes.inc("expired")
                    return
                if await self._close_by_peers(key, claim):
                    return
                await self._claims.pause(delay)
                delay = min(2 * delay, _LONGEST_PAUSE)
            else:
                self._metrics.closes.inc(outcome.value)
                if outcome is CloseOutcome.SUPERSEDED:
                    log.debug("a final turn found its claim superseded; the successor stands")
                await self._peers.tell("closed", claim.key, claim.revision)
                return

    async def _close_by_peers(self, key: str, claim: Claim | None) -> bool:
        """Without the store here: whether a peer that has it has closed the claim. All are told that the session has
        ended, so that none claims it again."""
        if not self._peers:
            return False
        revision = None if claim is None else claim.revision
        await self._peers.tell("ended", key, revision)
        outcome = await self._peers.close_for_us(key, revision)
        if outcome is not None:
            self._metrics.closes.inc(outcome)
        return outcome is not None


class Renewer:
    """Keeps claims alive whose sessions are in use."""

    def __init__(self, entries: Entries, claims: Claims, tasks: Tasks) -> None:
        self._entries, self._claims, self._tasks = entries, claims, tasks
        self._overdue: dict[str, Entry] = {}
        """Claims whose renewal was due while the store was away, or failed."""

    def soon(self, entry: Entry) -> None:
        """The claim is due to be renewed."""
        if entry.claim is None or entry.renewing:
            return
        if self._claims.state is not StoreState.UP:
            self._overdue[entry.key] = entry
            return
        entry.renewing = True  # at once: a turn may ask again, at its end, before the renewal has begun
        self._tasks.spawn(self._renew(entry, entry.claim))

    async def keep_alive(self) -> None:
        """Renew the claims of turns that run longer than a quarter of the TTL. Endless."""
        while True:
            await asyncio.sleep(min(self._claims.ttl / 8, 30.0))
            now = self._claims.clock()
            for entry in list(self._entries.active.values()):
                if now >= entry.renew_at:
                    self.soon(entry)

    async def catch_up(self) -> None:
        """Renew what the store, which is back, could not be asked for."""
        overdue, self._overdue = list(self._overdue.values()), {}
        await at_once(self._renew_at_last, overdue)

    async def _renew_at_last(self, entry: Entry) -> None:
        if entry.claim is not None and not entry.renewing:
            entry.renewing = True
            await self._renew(entry, entry.claim, last=True)

    async def _renew(self, entry: Entry, claim: Claim, *, last: bool = False) -> None:
        """`last`: not to be tried again at the store's next return (a store that is away for renewals alone returns
        at once)."""
        try:
            renewed = await self._claims.renew(claim, kept=entry.kept)
        except ClaimLost:
            if entry.claim is claim:
                entry.unprove()
        except StoreError:
            entry.renew_at = self._claims.clock() + 1.0
            if not last:
                self._overdue[entry.key] = entry
        else:
            if entry.claim is claim:
                self._entries.refresh(entry, renewed)
        finally:
            entry.renewing = False


async def at_once(work: Callable[[T], Awaitable[None]], items: list[T]) -> None:
    """The work for each of them, some at the same time."""
    for start in range(0, len(items), _AT_ONCE):
        await asyncio.gather(*(work(item) for item in items[start : start + _AT_ONCE]))
