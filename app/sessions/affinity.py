"""Sessions and their targets, agreed with every other replica through the claim store.

A turn gets a `Binding`, its hold on its session. The hot path, `Binding.bind_cached`, makes no I/O: it uses a proven
entry (`entries.py`) as it is. Otherwise the claim is read, made or replaced (`resolver.py`), and only when the store
cannot answer is an unproven entry used. That is done once for all turns that ask meanwhile: they wait together, may
each leave at any time, and when it fails the next one tries by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from app.errors import TurnError
from app.fleet.naming import Naming
from app.fleet.policies import Policy
from app.fleet.workers import Fleet, Target
from app.logs import event, shown
from app.metrics import Metrics
from app.sessions.claims import Claims, StoreState, Tasks
from app.sessions.desk import Desk
from app.sessions.endings import EndingFiles
from app.sessions.entries import Entries, Entry, View
from app.sessions.peers import Ask, Peers
from app.sessions.placing import ANYWHERE, WHERE_KEPT, Placement, Placer
from app.sessions.resolver import Resolver
from app.sessions.upkeep import Closer, Renewer, at_once, watch
from backends.base import Claim, ClaimStore, ClaimUnreadable, StoreError
from backends.singleflight import SingleFlight

log = logging.getLogger("coatcheck.affinity")

_REBINDS_PER_TURN = 3
_KEPT_STATUSES = frozenset({408, 409, 425, 429})
"""With 5xx: the client will try the turn again, so a final turn that was answered so keeps its claim."""

Resolution = Callable[[], Coroutine[Any, Any, tuple[Entry, str]]]
"""Makes a session's entry, and says how it came to it."""


class Binding:
    """A turn's hold on its session, from `Affinity.session`.

    Only it knows when the end of an answer must wait for the close, and how a turn's end ends the session. `bind` and
    `rebind` are to be run in a task, which may be cancelled; so are `close`, `refused` and `left`, which should not be.
    There is a method for each thing that may become of a turn.
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
            self._came(await affinity._agreed(self._key, resolve, self._hold), placement)
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
                move = functools.partial(affinity._resolver.move, self._key, current.claim, lost, placement, current)
                await affinity._agreed(self._key, move, self._move)
            if self._over or self.target.worker.name not in lost:
                break
        else:
            raise TurnError("no_worker", "the session's worker cannot be reached and no other one could be agreed on")
        self._came("degraded" if self._entry is not None and self._entry.claim is None else "rebound", placement)

    def _came(self, how: str, placement: Placement) -> None:
        self.how = how
        if self._entry is not None:
            placement.goes(self.target)
        if self._entry is not None and self._affinity._logs(self._key):
            rank = "" if self.target.rank is None else f" rank {self.target.rank}"
            name, worker = shown(self._key), self.target.worker.name
            said = event("binding", session=name, affinity=how, worker=worker, rank=self.target.rank)
            log.info("session %s %s at %s%s", name, how, worker, rank, extra=said)

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
            if not entry.active:
                self._last_out(entry)

    def _last_out(self, entry: Entry) -> None:
        if entry.closing:
            self._affinity._closer.begin(entry)
        elif entry.trial:
            self._affinity._closer.drop(entry)

    @property
    def key(self) -> str:
        """The session's, its hash."""
        return self._key

    @property
    def own(self) -> bool:
        """The claim is this turn's alone: it has made it, and no other turn here has joined."""
        return self.how == "created" and self._entry is not None and self._entry.active == 1

    def answered(self, status: int) -> None:
        """The worker has begun to answer."""
        entry = self._entry
        if entry is None:
            return
        if status < 400:
            entry.served = True
        if (self._final or entry.trial) and ends(status):
            entry.trial = False
            entry.closing = entry.closing or self._final

    def settle(self) -> Entry:
        """What it is bound to, for a turn elsewhere: it stays, though none here is answered."""
        assert self._entry is not None
        self._entry.trial = False
        return self._entry

    def end(self) -> None:
        """End the session with its last turn here."""
        if self._entry is not None:
            self._entry.closing = True

    @property
    def worker_name(self) -> str:
        """Of the worker where the session is known to be; empty: it is not bound."""
        return "" if self._entry is None else self._entry.target.worker.name

    @property
    def seen(self) -> int:
        """As of the entry that it is bound to."""
        return 0 if self._entry is None else self._entry.seen

    def saw(self, size: int) -> None:
        """Its target has answered a request of so many bytes."""
        if self._entry is not None:
            self._entry.seen = size

    @property
    def ending(self) -> bool:
        """The session ends with its last turn here."""
        return self._entry is not None and self._entry.closing

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
        if ends(status):
            await self.left()
            await self.close()

    async def left(self) -> None:
        """The client has left. A final turn ends its session all the same."""
        if self._final and self._entry is not None:
            self._entry.closing = True  # closed when this turn is released
        elif self._final:
            await self._affinity.end(self._key)

    def release(self) -> None:
        """The turn is over. Idempotent. The last one out closes the claim in the background when that is due, or when
        no turn was answered since it was made; what a `bind` brings that is still on its way is not held any more."""
        self._over = True
        entry, self._entry = self._entry, None
        if entry is not None:
            affinity = self._affinity
            affinity._entries.leave(entry)
            if (entry.closing or entry.trial) and not entry.active:
                self._last_out(entry)
            elif affinity._clock() >= entry.renew_at:
                affinity._renewer.soon(entry)


class Affinity:
    """Binds sessions to targets. `start` inside the running loop; `aclose` before the loop ends.

    Many methods: it is what others see of this package, and hands on to who does it."""

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
        endings: EndingFiles | None = None,
        names: Naming | None = None,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`ttl`, `kept_ttl` (of what workers keep; 0: as `ttl`), `max_stale`, `close_limit` (the store's deadline too)
        in seconds; `capacity` in entries; `clock` must be the store's, `wall` says Unix seconds. A child session
        follows its parent unless that target has over `parent_slack` turns more than the least loaded one. `log_share`
        of the sessions (0 to 1; by their hash, so the same on every replica) have each decision logged. `endings`:
        where closes are left that are pending at the end. `names`, `peers`: what other replicas call workers, and what
        can be asked of them; left out: there are none."""
        self._store, self._fleet, self._metrics, self._clock = store, fleet, metrics, clock
        self._log_below = int(log_share * 0x10000)
        self._close_limit = close_limit
        kept_ttl = kept_ttl or ttl
        self._tasks = tasks = Tasks()
        self._entries = entries = Entries(
            store.stamp, ttl=ttl, kept_ttl=kept_ttl, max_stale=max_stale, capacity=capacity, clock=clock, wall=wall
        )
        self.census, self.page = entries.census, entries.page
        self._claims = claims = Claims(
            store,
            metrics,
            tasks,
            replica=replica,
            ttl=ttl,
            kept_ttl=kept_ttl,
            deadline=close_limit,
            clock=clock,
            wall=wall,
            meanwhile="refused" if refuse_on_outage else "placed by hash until it returns",
            returned=self._reconcile,
        )
        self._names = names = names or Naming(fleet)
        self._peers = peers = peers if peers is not None else Peers(replica, names, metrics)
        self._closer = closer = Closer(entries, claims, peers, metrics, tasks, limit=close_limit, files=endings)
        self._renewer = Renewer(entries, claims, tasks)
        self._placer = Placer(fleet, policy, entries, claims, names, metrics, parent_slack=parent_slack)
        self._resolver = Resolver(
            entries,
            claims,
            closer,
            fleet,
            names,
            peers,
            self._placer,
            metrics,
            refuse=refuse_on_outage,
            unsettled=self._claim_later,
            overdue=self._renewer.overdue,
        )
        self.desk = Desk(entries, claims, closer, names, bind=self._bind_for_peer, moved=self._resolver.told_of_move)
        """Answers the other replicas."""
        self._flights: SingleFlight[str, tuple[Entry, str]] = SingleFlight(outlives=False)

    # -- life

    def start(self) -> None:
        """Begin to watch the store, to keep the claims of long turns alive, and to close what was left to be closed."""
        self._tasks.spawn(watch(self._store, self._entries, self._metrics, self._rewound))
        self._tasks.spawn(self._renewer.keep_alive())
        self._tasks.spawn(self._closer.resume())

    async def aclose(self) -> None:
        """Finish pending closes within `close_limit`, leave the others to the next replica, then stop everything. The
        store is the caller's to close."""
        await self._closer.leave()
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

    def used(self, key: str) -> Target | None:
        """Where a session is that was served here by its claim, for who works there without being a turn of it; None
        when what is known here does not do. Its claim lives on as by a turn."""
        now = self._clock()
        entry = self._entries.used(key, now)
        if entry is None:
            return None
        if now >= entry.renew_at:
            self._renewer.soon(entry)
        return entry.target

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

    async def choose(self, placement: Placement, key: str = "") -> tuple[Target, str]:
        """Where the session `key` without a claim would be placed now, and why: hint, parent or policy. Only looks.
        Raises TurnError as `Binding.bind`."""
        if placement.refusal is not None:
            raise placement.refusal
        try:
            target, why, _ = await self._placer.choose(placement, key=key)
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
        except ClaimUnreadable:
            target = self._placer.by_hash(key) if entry is None else entry.target
            return View(key, None, target, view.active, "unreadable")
        except StoreError:
            if entry is None:
                raise TurnError("store_unavailable", "the claim store cannot be reached") from None
            return view
        if claim is not None:
            there = self._names.find(claim.value.worker, claim.value.rank, claim.value.replica)
            return View(key, claim, there, view.active, "store")
        return view if view.source == "degraded" else View(key, None, None, view.active, "none")

    async def end(self, key: str) -> str:
        """Close a session whatever it is: closed, pending (its turns here end first, or the store must return), gone
        or superseded. What cannot be read is closed as well, and at once: no turn here has a claim."""
        entry = self._entries.find(key)
        if entry is not None and entry.active and not entry.unreadable:
            entry.closing = True
            return "pending"
        claim: Claim | None = None
        try:
            # What stands is closed, not what was known: the caller means the session, and has seen nothing of ours.
            claim = await self._standing(key)
            outcome = "gone" if claim is None else (await self._claims.close(claim)).value
        except StoreError:
            self._end_at_last(key, claim)
            return "pending"
        if outcome != "superseded":
            self._closer.has_ended(key, self._claims.wall())
        if claim is not None:
            self._metrics.closes.inc(outcome)
            if not self._claims.shows_closes(key):
                await self._peers.tell("closed", key, claim.revision)
        current = self._entries.find(key)
        if current is not None and (current.unreadable or not current.active):
            self._entries.forget(key)
        return outcome

    def _end_at_last(self, key: str, claim: Claim | None) -> None:
        """What `end` was ordered to do, and the store has not answered; `claim`: what stood."""
        current = self._entries.find(key)
        if current is not None and current.active and not current.unreadable:
            current.closing = True
            return
        self._entries.forget(key)
        if claim is None:
            known = None if current is None else current.claim
            self._closer.end_whatever(key, "" if known is None else known.value.nonce)
        else:
            self._closer.end(key, claim)

    def knows(self, key: str) -> bool:
        """Whether this replica remembers a claim of it, proven or not."""
        return self._entries.find(key) is not None

    async def end_all(self, keys: Iterable[str]) -> None:
        """Close what stands of these, each as `end` does. What takes longer than `close_limit` goes on in the
        background."""
        tasks = [self._tasks.spawn(self._end(key)) for key in keys]
        if tasks:
            await asyncio.wait(tasks, timeout=self._close_limit)

    def end_later(self, keys: Iterable[str]) -> None:
        """As `end_all`, in the background."""
        for key in keys:
            self._tasks.spawn(self._end(key))

    async def _end(self, key: str) -> None:
        await self.end(key)

    async def _standing(self, key: str) -> Claim | None:
        try:
            return await self._claims.get(key)
        except ClaimUnreadable as error:
            return error.claim

    async def _bind_for_peer(self, ask: Ask, targets: tuple[Target, ...]) -> tuple[Entry, str]:
        """For one that cannot reach the store, within these targets if any. Raises TurnError."""
        refusal = TurnError("store_unavailable", "no claim stands") if ask.standing else None
        placement = Placement(targets, ask.parent or None, refusal, ask.kept, full_too=True)
        binding = self.session(ask.key, final=False)
        try:
            await binding.bind(placement)
            if binding.target.worker.name in ask.lost:
                await binding.rebind(frozenset(ask.lost), placement)
            return binding.settle(), binding.how
        finally:
            binding.release()

    # -- back

    def _rewound(self) -> None:
        self._entries.rewound()
        self._closer.rewound()
        text = "the claim store has lost what it held; sessions stay where they are served and are claimed again"
        log.warning(text, extra=event("store_rewound"))
        self._tasks.spawn(self._claim_again())

    async def _reconcile(self) -> None:
        """Claim what was placed without the store, at the worker where it is, and renew what it could not be asked."""
        await self._claim_again()
        if self.state is StoreState.UP:
            await at_once(self._claim_at_last, await self._renewer.catch_up())

    async def _claim_again(self) -> None:
        """Those first that have turns running."""
        alone = [entry for entry in self._entries if entry.claim is None]
        alone.sort(key=lambda entry: not entry.active)
        await at_once(self._claim_at_last, [entry.key for entry in alone])

    def _claim_later(self, key: str, seconds: float) -> None:
        async def claim() -> None:
            await asyncio.sleep(seconds)
            await self._claim_at_last(key)

        self._tasks.spawn(claim())

    async def _claim_at_last(self, key: str) -> None:
        entry = self._entries.find(key)
        if self.state is StoreState.UP and entry is not None and entry.claim is None:
            alone = entry.alone
            if entry.trial and not entry.active:
                self._entries.forget(key)  # the client left before the turn had it: nobody was served there
                return
            if alone is not None and alone.ended_at >= alone.served_at and not entry.active:
                # The claim that was not believed is gone, and so is the session, unless another turn comes: that one
                # finds what has taken its place.
                self._entries.forget(key)
                return
            if alone is not None and self._peers and await self._ended_elsewhere(entry, alone.served_at):
                self._entries.forget(key)
                return
            binding = self.session(key, final=False)
            with contextlib.suppress(TurnError):
                await binding.bind(WHERE_KEPT if entry.kept else ANYWHERE)
            binding.release()

    async def _ended_elsewhere(self, entry: Entry, served_at: float) -> bool:
        """Another replica, which may have had the store, has ended the session after its last turn here."""
        ended_at = await self._peers.ended_at(entry.key) or float("-inf")
        return ended_at >= served_at and not entry.active and self._entries.find(entry.key) is entry


def ends(status: int) -> bool:
    """Whether a final turn that is answered so ends its session."""
    return status < 500 and status not in _KEPT_STATUSES
