"""Sessions and their targets, agreed with every other replica through the claim store.

The only caller of the store. What it holds locally is a cache of claims with the count of turns that use each
(`Entry`); the hot path, `Binding.bind_cached`, makes no I/O. An entry is *proven* while the store's watch is alive and
continuous since the claim was read, for at most `max_stale` seconds, and until the claim may have expired; otherwise
the claim is read again before the entry is used. Only when the store cannot answer is an unproven entry used as it is.

Everything slow about one session (reading, creating, rebinding) is one shared `_Resolution`: turns that arrive
together wait for it together, may each leave at any time, and when it fails the next one tries by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import enum
import functools
import heapq
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from app.errors import TurnError
from app.fleet.policies import Policy, least_loaded, rendezvous
from app.fleet.workers import Fleet, Target
from app.metrics import Metrics
from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimStore,
    ClaimValue,
    CloseOutcome,
    Deleted,
    OutcomeUnknown,
    Reset,
    StoreError,
    StoreUnavailable,
)

log = logging.getLogger("coatcheck.affinity")
T = TypeVar("T")

_UNPROVEN = 0
_CREATE_TRIES = 3
_REBINDS_PER_TURN = 3
_MOVES = 6
_MOVES_WINDOW = 30.0
"""A session is moved at most so often within so many seconds by one replica: two that see the fleet differently must
not fight over it."""
_MOVES_REMEMBERED = 10_000
_RECONCILE_AT_ONCE = 32
_KEPT_STATUSES = frozenset({408, 409, 425, 429})
"""With 5xx: the client will try the turn again, so a final turn that was answered so keeps its claim."""


class StoreState(enum.Enum):
    UP = "up"
    READ_ONLY = "read-only"
    """Claims can be read but not made."""
    AWAY = "away"


class Placement(msgspec.Struct, frozen=True):
    """Where a turn would have its session, should no claim stand."""

    candidates: tuple[Target, ...] = ()
    """What the client asked for; empty: no wish."""
    parent: str | None = None
    """The key of the session whose prefix this one shares."""
    refusal: TurnError | None = None
    """Only a claim that stands will do, else this is raised."""


ANYWHERE = Placement()


class View(msgspec.Struct, frozen=True):
    """What is known of a session; nothing is created or renewed to know it."""

    key: str
    claim: Claim | None
    target: Target | None
    """None when there is none, or when the claim names a worker that this replica does not have."""
    active: int
    """Its turns on this replica."""
    source: str
    """memory (proven), store, unproven (the store cannot answer), degraded (placed without the store) or none."""


class Entry:
    """One session on this replica. `active` counts its turns here; `claim` is None while it is placed without a store.

    An entry is in `Affinity._active` when `active > 0`, in `_idle` when 0, and in neither once it was replaced or
    closed, whatever its count.
    """

    __slots__ = ("active", "claim", "closing", "good_until", "key", "proof", "renew_at", "renewing", "stamp", "target")

    def __init__(self, key: str, target: Target) -> None:
        self.key = key
        self.target = target
        self.claim: Claim | None = None
        self.active = 0
        self.closing = False
        """A final turn has decided that the claim is closed when the last turn here ends."""
        self.proof = _UNPROVEN
        self.stamp = 0
        self.good_until = 0.0
        self.renew_at = 0.0
        self.renewing = False


class _Resolution:
    """One answer that several turns wait for, and the load that it announces at its target meanwhile."""

    __slots__ = ("deleted", "held", "reserved", "task", "waiters")

    def __init__(self) -> None:
        self.task: asyncio.Task[tuple[Entry, str]] | None = None
        self.waiters = 0
        self.deleted: list[Deleted] = []
        """What the watch said of this key while we were reading."""
        self.reserved: Target | None = None
        self.held: list[Entry] = []
        """What the session was here before, and the answer; held until every waiter has joined, so that nothing closes
        or drops them meanwhile: a waiter is a turn of the session, and the last one out closes."""

    def reserve(self, target: Target) -> None:
        self.unreserve()
        self.reserved = target
        target.reserved += 1

    def unreserve(self) -> None:
        if self.reserved is not None:
            self.reserved.reserved -= 1
            self.reserved = None


class Binding:
    """A turn's hold on its session, from `Affinity.session`.

    Only it knows when the end of an answer must wait for the close, and how a turn's end ends the session. `bind` and
    `rebind` are to be run in a task, which may be cancelled; so are `close`, `refused` and `left`, which should not be.
    """

    __slots__ = ("_affinity", "_entry", "_final", "_key", "_over", "how", "target")

    target: Target
    """Where the session is. Set once it is bound."""

    def __init__(self, affinity: Affinity, key: str, final: bool) -> None:
        self._affinity, self._key, self._final = affinity, key, final
        self._entry: Entry | None = None
        self._over = False
        self.how = "none"
        """How the turn came to its target (AFFINITY_OUTCOMES); none until it is bound."""

    def bind_cached(self) -> bool:
        """Join the session by what is known here, without I/O. False: then `bind`."""
        entry = self._affinity._bind_cached(self._key)
        if entry is None:
            return False
        self._entry, self.target = entry, entry.target
        self.how = "degraded" if entry.claim is None else "cached"
        return True

    async def bind(self, placement: Placement) -> None:
        """Join the session through the store: the claim that stands, or a new one as `placement` says.

        `how` is then created, stored, cached (another turn here was already at it, or the store could not confirm),
        rebound or degraded. Raises TurnError `no_worker`, `store_unavailable` or the placement's refusal.
        """
        self._hold(*await self._affinity._bind(self._key, placement))

    async def rebind(self, lost: frozenset[str], placement: Placement) -> None:
        """Move the session off workers that cannot be reached (`lost`: the names of all that the turn has found), to
        where the client's hint or the policy says. When it raises TurnError the old hold stands."""
        assert self._entry is not None
        self._hold(*await self._affinity._rebind(self._entry, lost, placement))

    def _hold(self, entry: Entry, how: str) -> None:
        if self._over:  # its task was cancelled too late
            self._affinity._release(entry)
            return
        if self._entry is not None:
            self._affinity._leave(self._entry)
        self._entry, self.target, self.how = entry, entry.target, how

    def answered(self, status: int) -> None:
        """The worker has begun to answer."""
        if self._final and _ends(status) and self._entry is not None:
            self._entry.closing = True

    @property
    def holds_end(self) -> bool:
        """The end of the answer must wait for `close`: the session is ending and this is its last turn here."""
        entry = self._entry
        return entry is not None and entry.closing and entry.active == 1

    async def close(self) -> None:
        """When the end is held, close the claim. Returns when it is closed, or after `close_limit`: then it is tried
        on in the background until the claim's TTL."""
        if self.holds_end:
            assert self._entry is not None
            await self._affinity._close(self._entry)

    async def refused(self, status: int) -> None:
        """The turn is answered with an error of our own. A final turn that is refused for good ends its session all
        the same: the client will not send it again."""
        if self._final and _ends(status):
            await self.left()
            await self.close()

    async def left(self) -> None:
        """The client has left. A final turn ends its session all the same."""
        if not self._final:
            return
        if self._entry is not None:
            self._entry.closing = True  # closed when this turn is released
        else:
            with contextlib.suppress(TurnError):  # the store is away; the claim ends by its TTL
                await self._affinity.end(self._key)

    def release(self) -> None:
        """The turn is over. Idempotent. The last one out closes the claim in the background when that is due; what a
        `bind` that is still on its way brings is given back then."""
        self._over = True
        entry, self._entry = self._entry, None
        if entry is not None:
            self._affinity._release(entry)


class Affinity:
    """Binds sessions to targets. `start` inside the running loop; `aclose` before the loop ends."""

    def __init__(
        self,
        store: ClaimStore,
        fleet: Fleet,
        policy: Policy,
        metrics: Metrics,
        *,
        replica: str,
        ttl: float,
        max_stale: float = 60.0,
        capacity: int = 100_000,
        refuse_on_outage: bool = False,
        close_limit: float = 2.0,
        parent_slack: int = 16,
        log_share: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl`, `max_stale`, `close_limit` in seconds; `capacity` in entries; `clock` must be the store's. A child
        session follows its parent unless that target has over `parent_slack` turns more than the least loaded one.
        `log_share` of the sessions (0 to 1; by their hash, so the same on every replica) have each decision logged."""
        self._store, self._fleet, self._policy, self._metrics = store, fleet, policy, metrics
        self._replica, self._ttl, self._max_stale, self._capacity = replica, ttl, max_stale, capacity
        self._refuse, self._close_limit, self._clock = refuse_on_outage, close_limit, clock
        self._parent_slack = parent_slack
        self._among_hinted = least_loaded()
        self._log_below = int(log_share * 0x10000)
        self._stamp = store.stamp
        self._moves: OrderedDict[str, tuple[float, ...]] = OrderedDict()
        self._active: dict[str, Entry] = {}
        self._idle: OrderedDict[str, Entry] = OrderedDict()
        self._resolutions: dict[str, _Resolution] = {}
        self._closings: dict[str, asyncio.Task[None]] = {}
        self._epoch = 0
        self._proof = _UNPROVEN
        """The watch's current stretch of continuity; _UNPROVEN while it is not shown to be alive."""
        self._state = StoreState.UP
        self._up = asyncio.Event()
        self._up.set()
        self._unrenewed: dict[str, Entry] = {}
        """Claims whose renewal was due while the store was away."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._monitor: asyncio.Task[None] | None = None

    # -- life

    def start(self) -> None:
        """Begin to watch the store and to keep the claims of long turns alive."""
        self._spawn(self._watch())
        self._spawn(self._keep_alive())

    async def aclose(self) -> None:
        """Finish pending closes within `close_limit`, then stop everything. The store is the caller's to close."""
        pending = set(self._closings.values())
        if pending:
            await asyncio.wait(pending, timeout=self._close_limit)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def state(self) -> StoreState:
        return self._state

    @property
    def watching(self) -> bool:
        return self._proof != _UNPROVEN

    @property
    def size(self) -> int:
        return len(self._active) + len(self._idle)

    @property
    def active_turns(self) -> int:
        return sum(entry.active for entry in self._active.values())

    @property
    def pending_closes(self) -> int:
        return len(self._closings)

    # -- a turn's side

    def session(self, key: str, *, final: bool) -> Binding:
        """A turn's hold on the session. Nothing is bound or claimed yet."""
        return Binding(self, key, final)

    def _bind_cached(self, key: str) -> Entry | None:
        """Each entry that is answered must be given to `_release` once."""
        entry = self._active.get(key)
        if entry is None:
            entry = self._idle.get(key)
            if entry is None:
                return None
        elif entry.closing:
            entry.active += 1  # the turns that are still here decide where; the pending close stands
            return entry
        if not self._proven(entry):
            return None
        if self._clock() >= entry.renew_at:
            self._renew_soon(entry)
        return self._enter(entry)

    async def _bind(self, key: str, placement: Placement = ANYWHERE) -> tuple[Entry, str]:
        bound = await self._shared(key, functools.partial(self._resolve, key, placement))
        self._log(bound)
        return bound

    async def _rebind(self, entry: Entry, lost: frozenset[str], placement: Placement) -> tuple[Entry, str]:
        """Answers what takes the place of the caller's hold on `entry`, which is the caller's to leave."""
        for _ in range(_REBINDS_PER_TURN):
            current = self._current(entry.key) or entry
            if current.target.worker.name not in lost:
                moved = self._enter(current)  # another turn has moved it
                break
            moved, _ = await self._shared(
                entry.key, functools.partial(self._replace, entry.key, current.claim, lost, placement)
            )
            if moved.target.worker.name not in lost:
                break
            self._release(moved)
        else:
            raise TurnError("no_worker", "the session's worker cannot be reached and no other one could be agreed on")
        moved.closing = moved.closing or entry.closing
        bound = moved, "degraded" if moved.claim is None else "rebound"
        self._log(bound)
        return bound

    def _release(self, entry: Entry) -> None:
        """A turn of the session has ended. The last one out closes the claim in the background when that is due."""
        self._leave(entry)
        self._close_if_due(entry)
        if self._clock() >= entry.renew_at:
            self._renew_soon(entry)

    async def _close(self, entry: Entry) -> None:
        task = self._begin_close(entry)
        if task is not None:
            await asyncio.wait({task}, timeout=self._close_limit)

    # -- from outside a turn

    async def look_up(self, key: str) -> View:
        """What is known of a session. Never creates or renews."""
        entry = self._current(key)
        active = entry.active if entry is not None else 0
        if entry is not None and entry.claim is not None and self._proven(entry):
            return View(key, entry.claim, entry.target, active, "memory")
        try:
            claim = await self._call("get", self._store.get(key))
        except StoreError:
            if entry is None:
                raise TurnError("store_unavailable", "the claim store cannot be reached") from None
            return View(key, entry.claim, entry.target, active, "unproven" if entry.claim else "degraded")
        if claim is not None:
            return View(key, claim, self._fleet.find(claim.value.worker, claim.value.rank), active, "store")
        if entry is not None and entry.claim is None:
            return View(key, None, entry.target, active, "degraded")
        return View(key, None, None, active, "none")

    async def end(self, key: str) -> str:
        """Close a session whatever it is: closed, pending (its turns here end first, or the store must return), gone
        or superseded. Raises TurnError `store_unavailable` when nothing is known of it."""
        entry = self._current(key)
        if entry is not None and entry.active:
            entry.closing = True
            return "pending"
        try:
            # What stands is closed, not what was known: the caller means the session, and has seen nothing of ours.
            claim = await self._call("get", self._store.get(key))
            if claim is None:
                self._forget(key)
                return "gone"
            outcome = await self._repeat("close", lambda: self._store.close(claim))
        except StoreError as error:
            current = self._current(key)
            if current is not None and not current.active and self._begin_close(current) is not None:
                return "pending"
            raise TurnError("store_unavailable", "the claim store cannot be reached") from error
        self._metrics.closes.inc(outcome.value)
        current = self._current(key)
        if current is not None and not current.active:
            self._forget(key)
        return outcome.value

    async def choose(self, placement: Placement) -> tuple[Target, str]:
        """Where a session without a claim would be placed now, and why: hint, parent or policy. Takes nobody's turn.
        Raises TurnError as `bind`."""
        if placement.refusal is not None:
            raise placement.refusal
        try:
            return await self._choose(placement, look=True)
        except StoreError:
            raise TurnError("store_unavailable", "the claim store cannot be reached") from None

    def census(self) -> Counter[str]:
        """How many sessions this replica knows, by the name of their worker."""
        return Counter(entry.target.worker.name for table in (self._active, self._idle) for entry in table.values())

    def page(self, after: str, limit: int, worker: str = "") -> list[View]:
        """The first `limit` of the sessions that this replica knows, by their keys, of those after `after` and at
        `worker` (empty: any)."""
        entries = heapq.nsmallest(
            limit,
            (
                entry
                for table in (self._active, self._idle)
                for key, entry in table.items()
                if key > after and worker in ("", entry.target.worker.name)
            ),
            key=lambda entry: entry.key,
        )
        views = []
        for entry in entries:
            source = "degraded" if entry.claim is None else "memory" if self._proven(entry) else "unproven"
            views.append(View(entry.key, entry.claim, entry.target, entry.active, source))
        return views

    # -- the local table

    def _proven(self, entry: Entry) -> bool:
        return (
            entry.proof == self._proof != _UNPROVEN
            and self._clock() < entry.good_until
            and self._stamp(entry.key) == entry.stamp
            and entry.target.worker.known
        )

    def _enter(self, entry: Entry) -> Entry:
        if not entry.active:
            self._idle.pop(entry.key, None)
            self._active[entry.key] = entry
        entry.active += 1
        return entry

    def _leave(self, entry: Entry) -> None:
        entry.active -= 1
        if not entry.active and self._active.get(entry.key) is entry:
            del self._active[entry.key]
            self._idle[entry.key] = entry
            self._trim()

    def _install(self, entry: Entry) -> None:
        """Make this the key's entry; one that it replaces lives on only in the turns that hold it."""
        self._forget(entry.key)
        if entry.active:
            self._active[entry.key] = entry
        else:
            self._idle[entry.key] = entry
            self._trim()

    def _forget(self, key: str) -> None:
        self._active.pop(key, None)
        self._idle.pop(key, None)

    def _trim(self) -> None:
        while self._idle and len(self._idle) + len(self._active) > self._capacity:
            self._idle.popitem(last=False)

    # -- one session's slow path

    async def _shared(
        self, key: str, work: Callable[[_Resolution], Coroutine[Any, Any, tuple[Entry, str]]]
    ) -> tuple[Entry, str]:
        while True:
            resolution = self._resolutions.get(key)
            mine = resolution is None
            if resolution is None:
                resolution = self._resolutions[key] = _Resolution()
                known = self._current(key)
                if known is not None:
                    resolution.held.append(self._enter(known))
                resolution.task = asyncio.create_task(self._answer(work, resolution))
                resolution.task.add_done_callback(functools.partial(self._resolved, key, resolution))
            task = resolution.task
            assert task is not None
            resolution.waiters += 1
            try:
                # Not shield(): when every waiter leaves, nobody is left to hear of an exception.
                await _ended(task)
                if task.cancelled() or (not mine and task.exception() is not None):
                    continue  # its initialiser's trouble is not ours: try by ourselves
                entry, outcome = task.result()
                return self._enter(entry), outcome if mine or outcome not in ("created", "rebound") else "cached"
            finally:
                resolution.waiters -= 1
                if not resolution.waiters:
                    self._disband(resolution)
                    task.cancel()  # does nothing to one that is done

    async def _answer(
        self, work: Callable[[_Resolution], Coroutine[Any, Any, tuple[Entry, str]]], resolution: _Resolution
    ) -> tuple[Entry, str]:
        entry, outcome = await work(resolution)
        resolution.held.append(self._enter(entry))
        return entry, outcome

    def _disband(self, resolution: _Resolution) -> None:
        """Nobody waits for it any more."""
        resolution.unreserve()
        held, resolution.held = resolution.held, []
        for entry in held:
            self._leave(entry)
            self._close_if_due(entry)

    def _resolved(self, key: str, resolution: _Resolution, _: object) -> None:
        if self._resolutions.get(key) is resolution:
            del self._resolutions[key]
        assert resolution.task is not None
        if not resolution.task.cancelled():
            resolution.task.exception()  # its waiters tell; mark it as seen when none is left
        if not resolution.waiters:
            self._disband(resolution)

    async def _resolve(self, key: str, placement: Placement, resolution: _Resolution) -> tuple[Entry, str]:
        known = self._current(key)
        closing = self._closings.get(key)
        if closing is not None and self._state is StoreState.UP:
            await asyncio.wait({closing}, timeout=self._close_limit)
        if self._state is StoreState.AWAY:
            return self._without_store(key, known, placement)
        proof, stamp = self._proof, self._stamp(key)
        try:
            claimed = known is not None and known.claim is not None
            if claimed or placement.refusal is not None or self._state is StoreState.READ_ONLY:
                claim = await self._call("get", self._store.get(key))
                if claim is not None:
                    return await self._adopt(key, claim, "stored", placement, proof, stamp, resolution)
                if claimed:
                    if self._current(key) is known:
                        self._forget(key)
                    known = None
                if self._state is StoreState.READ_ONLY:
                    return self._without_store(key, known, placement)
            if known is not None:
                target = known.target
            elif placement.refusal is not None:
                raise placement.refusal
            else:
                target, _ = await self._choose(placement)
            resolution.reserve(target)
            outcome = await self._create(key, target, 0)
            how = "created" if outcome.created else "stored"
            return await self._adopt(key, outcome.claim, how, placement, proof, stamp, resolution)
        except StoreError:
            return self._without_store(key, known, placement)

    async def _replace(
        self, key: str, claim: Claim | None, lost: frozenset[str], placement: Placement, resolution: _Resolution
    ) -> tuple[Entry, str]:
        """Close the observed claim and make one elsewhere; whoever is first decides where."""
        elsewhere = Placement(candidates=_without(placement.candidates, lost))
        if self._state is not StoreState.UP:
            return self._without_store(key, None, elsewhere, lost)
        # One turn that finds several workers lost, one after the other, is one move.
        if len(lost) <= 1 and not self._may_move(key):
            raise TurnError(
                "no_worker", f"the session was moved {_MOVES} times within {_MOVES_WINDOW:g} s; it is left for a while"
            )
        proof, stamp = self._proof, self._stamp(key)
        try:
            # Before the claim is closed: where nothing can be chosen, it stays.
            target, _ = await self._choose(elsewhere, lost)
            resolution.reserve(target)
            generation = 0
            if claim is not None:
                generation = claim.value.generation + 1
                await self._repeat("close", lambda: self._store.close(claim))
            outcome = await self._create(key, target, generation)
            target_there = self._fleet.find(outcome.claim.value.worker, outcome.claim.value.rank)
            if target_there is None:
                # Another replica's fleet differs; do not fight it.
                return self._without_store(key, None, elsewhere, lost)
            return self._hold(key, outcome.claim, target_there, proof, stamp, resolution), "rebound"
        except StoreError:
            return self._without_store(key, None, elsewhere, lost)

    async def _adopt(
        self, key: str, claim: Claim, how: str, placement: Placement, proof: int, stamp: int, resolution: _Resolution
    ) -> tuple[Entry, str]:
        target = self._fleet.find(claim.value.worker, claim.value.rank)
        if target is None:
            name = claim.value.worker
            # The worker may be here without that rank: then it is not lost.
            lost = frozenset({name}) if self._fleet.worker(name) is None else frozenset[str]()
            return await self._replace(key, claim, lost, placement, resolution)
        return self._hold(key, claim, target, proof, stamp, resolution), how

    def _hold(self, key: str, claim: Claim, target: Target, proof: int, stamp: int, resolution: _Resolution) -> Entry:
        """Note a claim that was just read. `proof` and `stamp` are from before it was read."""
        entry = self._current(key)
        if entry is None or not _continues(entry, claim, target):
            entry = Entry(key, target)
            self._install(entry)
        self._refresh(entry, claim)
        gone = any(event.before is None or event.before > claim.revision for event in resolution.deleted)
        entry.proof = _UNPROVEN if gone else proof
        entry.stamp = stamp
        return entry

    def _refresh(self, entry: Entry, claim: Claim) -> None:
        now = self._clock()
        entry.claim = claim
        entry.good_until = now + self._max_stale
        entry.renew_at = 0.0
        if claim.expires_at:
            entry.good_until = min(entry.good_until, claim.expires_at)
            entry.renew_at = claim.expires_at - self._ttl

    def _without_store(
        self, key: str, known: Entry | None, placement: Placement, lost: frozenset[str] = frozenset()
    ) -> tuple[Entry, str]:
        if known is not None and known.target.worker.known:
            if self._current(key) is None:
                self._install(known)
            if known.claim is not None:
                self._metrics.unproven.inc()
                return known, "cached"
            return known, "degraded"
        if self._refuse or placement.refusal is not None:
            raise TurnError("store_unavailable", "the claim store cannot be reached; the session cannot be placed")
        candidates = placement.candidates or self._candidates(lost)
        entry = Entry(key, rendezvous(key, candidates))
        self._install(entry)
        return entry, "degraded"

    def _current(self, key: str) -> Entry | None:
        return self._active.get(key) or self._idle.get(key)

    async def _choose(
        self, placement: Placement, lost: frozenset[str] = frozenset(), *, look: bool = False
    ) -> tuple[Target, str]:
        """The target of a session that has no claim, and why: the client's hint, else its parent, else the policy.
        `look`: nothing is counted, and no turn of a policy is taken."""
        if placement.candidates:
            pick: Policy = copy.copy(self._among_hinted) if look else self._among_hinted
            return pick(placement.candidates), "hint"
        candidates = self._candidates(lost)
        if placement.parent is not None:
            near = await self._near(placement.parent)
            candidates = self._candidates(lost)  # as they are now
            follows = near in candidates and near.load - min(t.load for t in candidates) <= self._parent_slack
            if not look:
                self._metrics.parents.inc("followed" if follows else "unknown" if near is None else "passed_over")
            if follows:
                assert near is not None
                return near, "parent"
        pick = copy.copy(self._policy) if look else self._policy
        return pick(candidates), "policy"

    async def _near(self, parent: str) -> Target | None:
        entry = self._current(parent)
        if entry is not None:
            return entry.target
        claim = await self._call("get", self._store.get(parent))
        return None if claim is None else self._fleet.find(claim.value.worker, claim.value.rank)

    def _candidates(self, lost: frozenset[str] = frozenset()) -> list[Target]:
        candidates = self._fleet.candidates(lost)
        if not candidates:
            raise TurnError("no_worker", "no worker can take the turn")
        return candidates

    def _may_move(self, key: str) -> bool:
        now = self._clock()
        recent = tuple(at for at in self._moves.get(key, ()) if now - at < _MOVES_WINDOW)
        if len(recent) >= _MOVES:
            return False
        self._moves[key] = (*recent, now)
        self._moves.move_to_end(key)
        if len(self._moves) > _MOVES_REMEMBERED:
            self._moves.popitem(last=False)
        return True

    def _log(self, bound: tuple[Entry, str]) -> None:
        entry, how = bound
        if self._log_below and int(entry.key[:4], 16) < self._log_below:
            rank = "" if entry.target.rank is None else f" rank {entry.target.rank}"
            log.info("session %s %s at %s%s", entry.key[:12], how, entry.target.worker.name, rank)

    async def _create(self, key: str, target: Target, generation: int) -> Any:
        # One proposal, so one nonce, for every try: a create whose reply was lost is recognised as our own.
        value = ClaimValue(
            worker=target.worker.name,
            rank=target.rank,
            replica=self._replica,
            generation=generation,
            created_at=int(time.time()),
        )
        return await self._repeat("create", lambda: self._store.create_or_get(key, value, self._ttl))

    async def _repeat(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        """Resolve a lost reply by asking again, a bounded number of times."""
        for attempt in range(_CREATE_TRIES):
            try:
                return await self._call(op, call(), note=attempt == _CREATE_TRIES - 1)
            except OutcomeUnknown:
                if attempt == _CREATE_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    async def _call(self, op: str, call: Awaitable[T], *, note: bool = True) -> T:
        started = time.perf_counter()
        outcome = "ok"
        try:
            return await call
        except StoreError as error:
            outcome = "lost" if isinstance(error, ClaimLost) else "failed"
            if outcome == "failed" and (note or isinstance(error, StoreUnavailable)):
                self._store_failed(error)
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._metrics.store_seconds.observe(time.perf_counter() - started, (op, outcome))

    # -- closing and renewing

    def _close_if_due(self, entry: Entry) -> None:
        if entry.closing and not entry.active:
            self._begin_close(entry)

    def _begin_close(self, entry: Entry) -> asyncio.Task[None] | None:
        if self._current(entry.key) is entry:
            self._forget(entry.key)
        claim, entry.claim, entry.closing = entry.claim, None, False
        entry.proof = _UNPROVEN
        entry.renew_at = float("inf")
        if claim is None:
            return None
        task = self._spawn(self._close_surely(claim, self._closings.get(entry.key)))
        self._closings[entry.key] = task
        task.add_done_callback(lambda done: self._closed(entry.key, done))
        return task

    def _closed(self, key: str, task: asyncio.Task[None]) -> None:
        if self._closings.get(key) is task:
            del self._closings[key]

    async def _close_surely(self, claim: Claim, earlier: asyncio.Task[None] | None) -> None:
        """Close, again and again until it is known to be done or the claim has expired by itself."""
        if earlier is not None:
            await asyncio.wait({earlier})
        until = claim.expires_at or self._clock() + LIFETIME * self._ttl
        delay = 0.05
        while True:
            try:
                outcome = await self._call("close", self._store.close(claim))
            except StoreError:
                if self._clock() >= until:
                    self._metrics.closes.inc("expired")
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._up.wait()
                await asyncio.sleep(min(delay, 0.25))
                delay = min(2 * delay, 5.0)
            else:
                self._metrics.closes.inc(outcome.value)
                if outcome is CloseOutcome.SUPERSEDED:
                    log.debug("a final turn found its claim superseded; the successor stands")
                return

    def _renew_soon(self, entry: Entry) -> None:
        if entry.claim is None or entry.renewing:
            return
        if self._state is not StoreState.UP:
            self._unrenewed[entry.key] = entry
            return
        entry.renewing = True
        self._spawn(self._renew(entry, entry.claim))

    async def _renew(self, entry: Entry, claim: Claim, *, last: bool = False) -> None:
        """`last`: not to be tried again at the store's next return (a store that is away for renewals alone returns
        at once)."""
        try:
            renewed = await self._call("renew", self._store.renew(claim, self._ttl))
        except ClaimLost:
            if entry.claim is claim:
                entry.proof = _UNPROVEN
                entry.renew_at = float("inf")  # the next turn reads what stands there
        except StoreError:
            entry.renew_at = self._clock() + 1.0
            if not last:
                self._unrenewed[entry.key] = entry
        else:
            if entry.claim is claim:
                # A renewal proves that the claim stood just now, but not what the watch missed: `proof` stays.
                self._refresh(entry, renewed)
        finally:
            entry.renewing = False

    async def _keep_alive(self) -> None:
        """Renew the claims of turns that run longer than a quarter of the TTL."""
        while True:
            await asyncio.sleep(min(self._ttl / 8, 30.0))
            now = self._clock()
            for entry in list(self._active.values()):
                if now >= entry.renew_at:
                    self._renew_soon(entry)

    # -- the store's state

    async def _watch(self) -> None:
        delay = 0.05
        while True:
            try:
                async for event in self._store.subscribe():
                    if isinstance(event, Reset):
                        delay = 0.05
                        self._epoch += 1
                        self._proof = self._epoch
                        self._metrics.resets.inc()
                    else:
                        self._deleted(event)
            except StoreError as error:
                if self._proof != _UNPROVEN:
                    log.warning("the claim store's watch is lost; claims are read before use: %s", error)
            except Exception:
                # A fault of the store's code must not end the watch unseen: entries would stay proven for ever.
                log.exception("the claim store's watch failed; it is begun again")
            finally:
                self._proof = _UNPROVEN
            await asyncio.sleep(delay)
            delay = min(2 * delay, 2.0)

    def _deleted(self, event: Deleted) -> None:
        resolution = self._resolutions.get(event.key)
        if resolution is not None:
            resolution.deleted.append(event)
        entry = self._current(event.key)
        if entry is None or entry.claim is None:
            return
        if event.before is not None and entry.claim.revision >= event.before:
            return  # the end of a predecessor
        if entry.active:
            entry.proof = _UNPROVEN
        else:
            self._forget(event.key)

    def _store_failed(self, error: StoreError) -> None:
        if self._state is StoreState.UP:
            self._state = StoreState.AWAY
            self._up.clear()
            log.error(
                "the claim store is away (%s); known sessions go on, new ones are %s",
                error,
                "refused" if self._refuse else "placed by hash until it returns",
            )
            self._monitor = self._spawn(self._await_return())

    async def _await_return(self) -> None:
        delay = 0.05
        while True:
            try:
                await self._store.check()
            except Exception as error:
                if not isinstance(error, StoreError):
                    # A fault of the store's code must not end the waiting unseen: the store would stay away for ever.
                    log.exception("the claim store's check failed; it is asked again")
                self._state = await self._readable()
                await asyncio.sleep(delay)
                delay = min(2 * delay, 1.0)
            else:
                break
        self._state = StoreState.UP
        self._up.set()
        log.warning("the claim store is back")
        await self._reconcile()

    async def _readable(self) -> StoreState:
        try:
            await self._store.get("0" * 40)
        except StoreError:
            return StoreState.AWAY
        return StoreState.READ_ONLY

    async def _reconcile(self) -> None:
        """Claim what was placed without the store, at the worker where it is, and renew what it could not be asked."""
        keys = [entry.key for table in (self._active, self._idle) for entry in table.values() if entry.claim is None]
        for start in range(0, len(keys), _RECONCILE_AT_ONCE):
            if self._state is not StoreState.UP:
                return
            await asyncio.gather(*(self._claim_at_last(key) for key in keys[start : start + _RECONCILE_AT_ONCE]))
        overdue, self._unrenewed = list(self._unrenewed.values()), {}
        for start in range(0, len(overdue), _RECONCILE_AT_ONCE):
            await asyncio.gather(*(self._renew_at_last(entry) for entry in overdue[start : start + _RECONCILE_AT_ONCE]))

    async def _renew_at_last(self, entry: Entry) -> None:
        if entry.claim is not None and not entry.renewing:
            entry.renewing = True
            await self._renew(entry, entry.claim, last=True)

    async def _claim_at_last(self, key: str) -> None:
        entry = self._current(key)
        if entry is not None and entry.claim is None:
            with contextlib.suppress(TurnError):
                bound, _ = await self._bind(key)
                self._release(bound)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of the affinity failed", exc_info=task.exception())


def _ends(status: int) -> bool:
    """Whether a final turn that is answered so ends its session."""
    return status < 500 and status not in _KEPT_STATUSES


async def _ended(task: asyncio.Task[Any]) -> None:
    """As `asyncio.wait` of one task, which costs half a task more."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(_: object) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(tell)
    await ended


def _without(candidates: tuple[Target, ...], lost: frozenset[str]) -> tuple[Target, ...]:
    return tuple(target for target in candidates if target.worker.name not in lost)


def _continues(entry: Entry, claim: Claim, target: Target) -> bool:
    """The entry is of this very claim, or was placed without the store where the claim now says."""
    if entry.claim is None:
        return entry.target is target
    return entry.claim.revision == claim.revision and entry.claim.value.nonce == claim.value.nonce
