"""Sessions and their targets, agreed with every other replica through the claim store.

A turn gets a `Binding`, its hold on its session. The hot path, `Binding.bind_cached`, makes no I/O: it uses a proven
entry (`entries.py`) as it is. Otherwise the claim is read, made or replaced (`_Resolver`), and only when the store
cannot answer is an unproven entry used. That is done once for all turns that ask meanwhile: they wait together, may
each leave at any time, and when it fails the next one tries by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.errors import TurnError
from app.fleet.capacity import Full
from app.fleet.policies import Policy, least_loaded, rendezvous
from app.fleet.workers import Fleet, Target
from app.metrics import Metrics
from app.sessions.entries import Entries, Entry, Snapshot, View
from app.sessions.upkeep import Claims, Closer, Renewer, StoreState, Tasks, at_once, watch
from backends.base import Claim, ClaimStore, StoreError
from backends.singleflight import SingleFlight

log = logging.getLogger("coatcheck.affinity")

_REBINDS_PER_TURN = 3
_MOVES = 6
_MOVES_WINDOW = 30.0
"""A session is moved at most so often within so many seconds by one replica: two that see the fleet differently must
not fight over it."""
_MOVES_REMEMBERED = 10_000
_KEEP_TRIES = 3
_KEPT_STATUSES = frozenset({408, 409, 425, 429})
"""With 5xx: the client will try the turn again, so a final turn that was answered so keeps its claim."""

Resolution = Callable[[], Coroutine[Any, Any, tuple[Entry, str]]]
"""Makes a session's entry, and says how it came to it."""


class Placement(msgspec.Struct, frozen=True):
    """Where a turn would have its session, should no claim stand."""

    candidates: tuple[Target, ...] = ()
    """What the client's hint names; empty: no hint."""
    parent: str | None = None
    """The key of the session whose prefix this one shares."""
    refusal: TurnError | None = None
    """Only a claim that stands will do, else this is raised."""
    slot: Target | None = None
    """Where the turn holds a slot already: there it goes, if it is free to choose."""
    kept: bool = False
    """It is no session but something that a worker keeps, which nobody can move."""


ANYWHERE = Placement()
_WHERE_KEPT = Placement(kept=True)


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
        """What this turn is counted in, once."""
        self._over = False
        self.how = "none"
        """How the turn came to its target (AFFINITY_OUTCOMES); none until it is bound."""

    def bind_cached(self) -> bool:
        """Join the session by what is known here, without I/O. False: then `bind`."""
        affinity = self._affinity
        now = affinity._clock()
        entry = affinity._entries.join(self._key, now)
        if entry is None:
            return False
        if now >= entry.renew_at:
            affinity._renewer.soon(entry)
        self._entry, self.target = entry, entry.target
        self.how = "cached" if entry.claim is not None else "degraded"
        return True

    async def bind(self, placement: Placement) -> None:
        """Join the session through the store: the claim that stands, or a new one as `placement` says.

        `how` is then created, stored, cached (another turn here was already at it, or the store could not confirm),
        rebound or degraded. Raises TurnError `no_worker`, `store_unavailable` or the placement's refusal, or Full where
        it would be placed and nobody has room; then nothing is held.
        """
        affinity = self._affinity
        known = affinity._entries.find(self._key)
        if known is not None:
            self._hold(known)  # a turn of the session already: a final one that ends meanwhile leaves the close to us
        try:
            resolve = functools.partial(affinity._resolver.resolve, self._key, placement)
            self._came(await affinity._agreed(self._key, resolve, self._hold))
        except BaseException:  # also when cancelled: what is held is given back, and it is raised on
            self._let_go()
            raise

    async def rebind(self, lost: frozenset[str], placement: Placement) -> None:
        """Move the session off workers that cannot be reached (`lost`: the names of all that the turn has found), to
        where the client's hint or the policy says. When it raises TurnError the old hold stands."""
        affinity = self._affinity
        for _ in range(_REBINDS_PER_TURN):
            current = affinity._entries.find(self._key) or self._entry
            assert current is not None
            if current.target.worker.name not in lost:
                self._move(current)  # another turn has moved it
            else:
                move = functools.partial(affinity._resolver.move, self._key, current.claim, lost, placement)
                await affinity._agreed(self._key, move, self._move)
            if self._over or self.target.worker.name not in lost:
                break
        else:
            raise TurnError("no_worker", "the session's worker cannot be reached and no other one could be agreed on")
        self._came("degraded" if self._entry is not None and self._entry.claim is None else "rebound")

    def _came(self, how: str) -> None:
        self.how = how
        if self._entry is not None and self._affinity._logs(self._key):
            rank = "" if self.target.rank is None else f" rank {self.target.rank}"
            log.info("session %s %s at %s%s", self._key[:12], how, self.target.worker.name, rank)

    def _hold(self, entry: Entry) -> None:
        """Be a turn of this entry, in place of what was held. Nothing is held any more when the turn is over."""
        if self._over or entry is self._entry:
            return
        self._affinity._entries.enter(entry)
        self._let_go()
        self._entry, self.target = entry, entry.target

    def _move(self, entry: Entry) -> None:
        """As `_hold`; the pending close goes with the session."""
        old = self._entry
        if old is not None and old is not entry:
            entry.closing, old.closing = entry.closing or old.closing, False
        self._hold(entry)

    def _let_go(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._affinity._entries.leave(entry)
            if entry.closing and not entry.active:
                self._affinity._closer.begin(entry)

    @property
    def own(self) -> bool:
        """The claim is this turn's alone: it has made it, and no other turn here has joined."""
        return self.how == "created" and self._entry is not None and self._entry.active == 1

    def answered(self, status: int) -> None:
        """The worker has begun to answer."""
        if self._final and self._entry is not None and _ends(status):
            self._entry.closing = True

    def end(self) -> None:
        """End the session with its last turn here."""
        if self._entry is not None:
            self._entry.closing = True

    @property
    def holds_end(self) -> bool:
        """The end of the answer must wait for `close`: the session is ending and this is its last turn here."""
        entry = self._entry
        return entry is not None and entry.closing and entry.active == 1

    async def close(self) -> None:
        """When the end is held, close the claim. Returns when it is closed, or after `close_limit`: then it is tried
        on in the background until the claim's TTL."""
        if self._entry is not None and self.holds_end:
            await self._affinity._closer.close(self._entry)

    async def refused(self, status: int) -> None:
        """The turn is answered with an error of our own. A final turn that is refused for good ends its session all
        the same: the client will not send it again."""
        if _ends(status):
            await self.left()
            await self.close()

    async def left(self) -> None:
        """The client has left. A final turn ends its session all the same."""
        if self._final and self._entry is not None:
            self._entry.closing = True  # closed when this turn is released
        elif self._final:
            with contextlib.suppress(TurnError):  # the store is away; the claim ends by its TTL
                await self._affinity.end(self._key)

    def release(self) -> None:
        """The turn is over. Idempotent. The last one out closes the claim in the background when that is due; what a
        `bind` brings that is still on its way is not held any more."""
        self._over = True
        entry, self._entry = self._entry, None
        if entry is not None:
            affinity = self._affinity
            affinity._entries.leave(entry)
            if entry.closing and not entry.active:
                affinity._closer.begin(entry)
            elif affinity._clock() >= entry.renew_at:
                affinity._renewer.soon(entry)


class _Resolver:
    """Decides where a session is: reads its claim, makes one, or replaces one. One at a time for each session."""

    def __init__(
        self,
        entries: Entries,
        claims: Claims,
        closer: Closer,
        fleet: Fleet,
        policy: Policy,
        metrics: Metrics,
        *,
        refuse: bool,
        parent_slack: int,
    ) -> None:
        self._entries, self._claims, self._closer = entries, claims, closer
        self._fleet, self._policy, self._metrics = fleet, policy, metrics
        self._refuse, self._parent_slack = refuse, parent_slack
        self._moves: OrderedDict[str, tuple[float, ...]] = OrderedDict()
        """When sessions were moved lately, the longest unmoved first."""

    async def resolve(self, key: str, placement: Placement) -> tuple[Entry, str]:
        """The session's entry, and how it came to it. Raises TurnError."""
        claims = self._claims
        known = self._entries.find(key)
        if claims.state is StoreState.UP:
            await self._closer.wait(key)
        if claims.state is StoreState.AWAY:
            return self._without_store(key, known, placement)
        snapshot = self._entries.snapshot(key)
        try:
            claimed = known is not None and known.claim is not None
            if claimed or placement.refusal is not None or claims.state is StoreState.READ_ONLY:
                claim = await claims.get(key)
                if claim is not None:
                    return await self._adopt(claim, "stored", placement, snapshot)
                if claimed:
                    if self._entries.find(key) is known:
                        self._entries.forget(key)
                    known = None
                if claims.state is StoreState.READ_ONLY:
                    return self._without_store(key, known, placement)
            if known is not None:
                target = known.target
            elif placement.refusal is not None:
                raise placement.refusal
            else:
                target = await self._place(placement)
            with target.reserve():
                outcome = await claims.create(key, target, 0, kept=placement.kept)
            return await self._adopt(outcome.claim, "created" if outcome.created else "stored", placement, snapshot)
        except StoreError:
            return self._without_store(key, known, placement)

    async def keep(self, key: str, target: Target) -> tuple[Entry, str]:
        """Have what `target` has just made claimed there: a claim that says another target is of something that is no
        more. Known here in any case, and claimed when the store is back. `how`: created or degraded."""
        claims, entries = self._claims, self._entries
        known = entries.find(key)
        if known is None or known.target is not target:
            known = Entry(key, target)
            known.kept = True
            entries.install(known)
        if claims.state is StoreState.UP:
            with contextlib.suppress(StoreError):
                for generation in range(_KEEP_TRIES):
                    snapshot = entries.snapshot(key)
                    claim = (await claims.create(key, target, generation, kept=True)).claim
                    if (claim.value.worker, claim.value.rank) == (target.worker.name, target.rank):
                        return entries.note(claim, target, snapshot, kept=True), "created"
                    await claims.close(claim)
        return known, "degraded"

    async def move(
        self, key: str, claim: Claim | None, lost: frozenset[str], placement: Placement
    ) -> tuple[Entry, str]:
        """Close the observed claim and make one away from the lost workers; whoever is first decides where."""
        candidates = tuple(target for target in placement.candidates if target.worker.name not in lost)
        elsewhere = Placement(candidates, slot=placement.slot)
        if self._claims.state is not StoreState.UP:
            return self._without_store(key, None, elsewhere, lost)
        # One turn that finds several workers lost, one after the other, is one move.
        if len(lost) <= 1 and not self._may_move(key):
            raise TurnError(
                "no_worker", f"the session was moved {_MOVES} times within {_MOVES_WINDOW:g} s; it is left for a while"
            )
        snapshot = self._entries.snapshot(key)
        try:
            # Before the claim is closed: where nothing can be chosen, it stays.
            target = await self._place(elsewhere, lost)
            with target.reserve():
                if claim is not None:
                    await self._claims.close(claim)
                generation = 0 if claim is None else claim.value.generation + 1
                outcome = await self._claims.create(key, target, generation)
            there = self._fleet.find(outcome.claim.value.worker, outcome.claim.value.rank)
            if there is not None:
                return self._entries.note(outcome.claim, there, snapshot), "rebound"
        except StoreError:
            pass
        # Or another replica's fleet differs; do not fight it.
        return self._without_store(key, None, elsewhere, lost)

    async def _adopt(self, claim: Claim, how: str, placement: Placement, snapshot: Snapshot) -> tuple[Entry, str]:
        name = claim.value.worker
        target = self._fleet.find(name, claim.value.rank)
        if target is not None:
            return self._entries.note(claim, target, snapshot, kept=placement.kept), how
        if placement.kept:
            raise TurnError("gone", "the worker that kept it is gone")
        # The worker may be here without that rank: then it is not lost.
        lost = frozenset({name}) if self._fleet.worker(name) is None else frozenset[str]()
        return await self.move(claim.key, claim, lost, placement)

    def _without_store(
        self, key: str, known: Entry | None, placement: Placement, lost: frozenset[str] = frozenset()
    ) -> tuple[Entry, str]:
        if known is not None and known.target.worker.known:
            if self._entries.find(key) is None:
                self._entries.install(known)
            if known.claim is None:
                return known, "degraded"
            self._metrics.unproven.inc()
            return known, "cached"
        if self._refuse or placement.refusal is not None:
            raise TurnError("store_unavailable", "the claim store cannot be reached; the session cannot be placed")
        entry = Entry(key, rendezvous(key, placement.candidates or self._candidates(lost, degraded=True)))
        self._entries.install(entry)
        return entry, "degraded"

    async def choose(self, placement: Placement, lost: frozenset[str] = frozenset()) -> tuple[Target, str, str]:
        """The target of a session that has no claim, and why: the client's hint, else its parent, else the policy. Last
        what became of following the parent, if there is one: followed, unknown or passed_over. Only looks."""
        if placement.candidates:
            return least_loaded(placement.candidates), "hint", ""
        if placement.slot is not None:
            return placement.slot, "policy", ""
        candidates, parent = self._candidates(lost), ""
        if placement.parent is not None:
            near = await self._near(placement.parent)
            candidates = self._candidates(lost)  # as they are now
            if near in candidates and near.load - min(target.load for target in candidates) <= self._parent_slack:
                return near, "parent", "followed"
            parent = "unknown" if near is None else "passed_over"
        return self._policy(candidates), "policy", parent

    async def _place(self, placement: Placement, lost: frozenset[str] = frozenset()) -> Target:
        target, why, parent = await self.choose(placement, lost)
        if target.full and target is not placement.slot and why != "hint":
            raise Full("fleet_full", "every worker has as many turns as it may have")
        if parent:
            self._metrics.parents.inc(parent)
        self._fleet.note_placed(target)
        return target

    async def _near(self, parent: str) -> Target | None:
        entry = self._entries.find(parent)
        if entry is not None:
            return entry.target
        claim = await self._claims.get(parent)
        return None if claim is None else self._fleet.find(claim.value.worker, claim.value.rank)

    def _candidates(self, lost: frozenset[str], *, degraded: bool = False) -> list[Target]:
        # What is full here may have room elsewhere: without the store, replicas agree only on what all see alike.
        candidates = self._fleet.candidates(lost, trials=not degraded, with_full=degraded)
        if not candidates:
            raise TurnError("no_worker", "no worker can take the turn")
        return candidates

    def _may_move(self, key: str) -> bool:
        now = self._claims.clock()
        recent = tuple(at for at in self._moves.get(key, ()) if now - at < _MOVES_WINDOW)
        if len(recent) >= _MOVES:
            return False
        self._moves[key] = (*recent, now)
        self._moves.move_to_end(key)
        if len(self._moves) > _MOVES_REMEMBERED:
            self._moves.popitem(last=False)
        return True


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
        kept_ttl: float = 0.0,
        max_stale: float = 60.0,
        capacity: int = 100_000,
        refuse_on_outage: bool = False,
        close_limit: float = 2.0,
        parent_slack: int = 16,
        log_share: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl`, `kept_ttl` (of what workers keep; 0: as `ttl`), `max_stale`, `close_limit` in seconds; `capacity` in
        entries; `clock` must be the store's. A child session follows its parent unless that target has over
        `parent_slack` turns more than the least loaded one. `log_share` of the sessions (0 to 1; by their hash, so the
        same on every replica) have each decision logged."""
        self._store, self._fleet, self._metrics, self._clock = store, fleet, metrics, clock
        self._log_below = int(log_share * 0x10000)
        self._close_limit = close_limit
        kept_ttl = kept_ttl or ttl
        self._tasks = tasks = Tasks()
        self._entries = entries = Entries(
            store.stamp, ttl=ttl, kept_ttl=kept_ttl, max_stale=max_stale, capacity=capacity, clock=clock
        )
        self.census, self.page = entries.census, entries.page
        self._claims = claims = Claims(
            store,
            metrics,
            tasks,
            replica=replica,
            ttl=ttl,
            kept_ttl=kept_ttl,
            clock=clock,
            meanwhile="refused" if refuse_on_outage else "placed by hash until it returns",
            returned=self._reconcile,
        )
        self._closer = closer = Closer(entries, claims, metrics, tasks, limit=close_limit)
        self._renewer = Renewer(entries, claims, tasks)
        self._resolver = _Resolver(
            entries, claims, closer, fleet, policy, metrics, refuse=refuse_on_outage, parent_slack=parent_slack
        )
        self._flights: SingleFlight[str, tuple[Entry, str]] = SingleFlight(outlives=False)

    # -- life

    def start(self) -> None:
        """Begin to watch the store and to keep the claims of long turns alive."""
        self._tasks.spawn(watch(self._store, self._entries, self._metrics))
        self._tasks.spawn(self._renewer.keep_alive())

    async def aclose(self) -> None:
        """Finish pending closes within `close_limit`, then stop everything. The store is the caller's to close."""
        await self._closer.wait()
        await self._tasks.aclose()

    @property
    def state(self) -> StoreState:
        return self._claims.state

    @property
    def watching(self) -> bool:
        return self._entries.watching

    @property
    def size(self) -> int:
        return len(self._entries)

    @property
    def active_turns(self) -> int:
        return sum(entry.active for entry in self._entries.active.values())

    @property
    def pending_closes(self) -> int:
        return len(self._closer)

    # -- a turn's side

    def session(self, key: str, *, final: bool) -> Binding:
        """A turn's hold on the session. Nothing is bound or claimed yet."""
        return Binding(self, key, final)

    async def keep(self, key: str, target: Target) -> str:
        """Have what `target` keeps found by everybody from now on. Returns how that went: kept, or alone (by this
        replica, until the store can be told), after `close_limit` at the latest."""
        entry = self._entries.find(key)
        if entry is not None and entry.target is target and self._entries.proven(entry, self._clock()):
            return "kept"
        task = self._tasks.spawn(self._keep(key, target))
        await asyncio.wait({task}, timeout=self._close_limit)
        entry = self._entries.find(key)
        return "kept" if task.done() and entry is not None and entry.claim is not None else "alone"

    async def _keep(self, key: str, target: Target) -> None:
        resolve = functools.partial(self._resolver.keep, key, target)
        while True:
            with contextlib.suppress(TurnError):  # of another turn that looked for it just before it was
                await self._agreed(key, resolve, lambda _: None)
                return

    async def choose(self, placement: Placement) -> tuple[Target, str]:
        """Where a session without a claim would be placed now, and why: hint, parent or policy. Only looks.
        Raises TurnError as `Binding.bind`."""
        if placement.refusal is not None:
            raise placement.refusal
        try:
            target, why, _ = await self._resolver.choose(placement)
        except StoreError:
            raise TurnError("store_unavailable", "the claim store cannot be reached") from None
        return target, why

    async def _agreed(self, key: str, work: Resolution, take: Callable[[Entry], None]) -> str:
        """Wait for what `work`, or what another turn has begun already, makes of the session, and take it. Returns how
        the turn came to it."""
        while True:
            with self._flights.join(key, work) as seat:
                await seat.ended()
                if not seat.cancelled and not seat.handed_over:  # else try by ourselves: that trouble was not ours
                    entry, how = seat.result()
                    take(entry)
                    return how if seat.first or how not in ("created", "rebound") else "cached"

    def _logs(self, key: str) -> bool:
        """Whether the decisions about this session are logged."""
        return self._log_below > 0 and int(key[:4], 16) < self._log_below

    # -- from outside a turn

    async def look_up(self, key: str) -> View:
        """What is known of a session. Never creates or renews."""
        entry = self._entries.find(key)
        view = View(key, None, None, 0, "none") if entry is None else self._entries.view(entry)
        if view.source == "memory":
            return view
        try:
            claim = await self._claims.get(key)
        except StoreError:
            if entry is None:
                raise TurnError("store_unavailable", "the claim store cannot be reached") from None
            return view
        if claim is not None:
            return View(key, claim, self._fleet.find(claim.value.worker, claim.value.rank), view.active, "store")
        return view if view.source == "degraded" else View(key, None, None, view.active, "none")

    async def end(self, key: str) -> str:
        """Close a session whatever it is: closed, pending (its turns here end first, or the store must return), gone
        or superseded. Raises TurnError `store_unavailable` when nothing is known of it."""
        entry = self._entries.find(key)
        if entry is not None and entry.active:
            entry.closing = True
            return "pending"
        try:
            # What stands is closed, not what was known: the caller means the session, and has seen nothing of ours.
            claim = await self._claims.get(key)
            outcome = "gone" if claim is None else (await self._claims.close(claim)).value
        except StoreError as error:
            current = self._entries.find(key)
            if current is not None and not current.active and self._closer.begin(current) is not None:
                return "pending"
            raise TurnError("store_unavailable", "the claim store cannot be reached") from error
        if claim is not None:
            self._metrics.closes.inc(outcome)
        current = self._entries.find(key)
        if current is not None and not current.active:
            self._entries.forget(key)
        return outcome

    # -- back

    async def _reconcile(self) -> None:
        """Claim what was placed without the store, at the worker where it is, and renew what it could not be asked."""
        await at_once(self._claim_at_last, [entry.key for entry in self._entries if entry.claim is None])
        if self.state is StoreState.UP:
            await self._renewer.catch_up()

    async def _claim_at_last(self, key: str) -> None:
        entry = self._entries.find(key)
        if self.state is StoreState.UP and entry is not None and entry.claim is None:
            binding = self.session(key, final=False)
            with contextlib.suppress(TurnError):
                await binding.bind(_WHERE_KEPT if entry.kept else ANYWHERE)
            binding.release()


def _ends(status: int) -> bool:
    """Whether a final turn that is answered so ends its session."""
    return status < 500 and status not in _KEPT_STATUSES
