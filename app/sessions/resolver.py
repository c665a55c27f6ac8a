"""Decides where a session is: reads its claim, makes one, or replaces one. One at a time for each session.

**What was served is the truth.** Without the store a session is served where it is known to be, else by hash, which
is the same target on every replica. When the store answers again, what stands there may contradict that. A claim gives
way (it is closed by its revision, and one is made at the target that served) when nobody is served by it:

- it is a proposal of this replica's own that it had given up, and the store did late, unless another replica that can
  be asked has served by it;
- it names a worker that is not here, or that the session was moved off meanwhile: that one could not be reached;
- it stood before the store lost its memory, and so is of any age;
- it was made for a first turn that had to wait for it so long that another replica may have given the store up.

Another replica's proposal may be just as late, but only its maker can tell. So a claim that contradicts what was
served here, and was proposed since the store was last known to be well, is not believed for `_DOUBT` seconds: its
maker, as soon as it finds the store back, has it give way, and the claim that follows says that turns were served there
(`ClaimValue.served`), as does each that is made at reconciliation. One that says so does not give way, and neither does
one that still stands after the doubt: then both were served, one move cannot be avoided, and the claim wins. Each of
these steps uses up something that is not made again (a nonce that was given up, a doubt), so replicas cannot fight, and
their order does not matter.

What is left: a late claim is believed where its maker has died, or takes longer than the doubt to find the store back;
where a replica that has not served the session finds it first (when it was kept waiting by the store itself, it looks
again a moment later); and where clocks of replicas are further apart than
`_SLACK`.

**Other replicas are asked before anything is guessed** (`peers.py`): one may know where the session is, or may reach
the store that we do not.

**A first turn that comes to nothing leaves no claim.** An entry that a turn here has made is on trial (`Entry.trial`)
until a turn of it is answered; when its last turn here ends before that, its claim is closed. A turn at another replica
may have adopted that claim meanwhile: then its session is placed again at its next turn, which costs the cache of one
turn and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from app.errors import TurnError
from app.fleet.naming import Naming
from app.fleet.workers import Fleet, Target
from app.logs import Ration, event, shown
from app.metrics import Metrics
from app.sessions.claims import Claims, StoreState
from app.sessions.entries import UNPROVEN, Alone, Entries, Entry, Snapshot
from app.sessions.peers import Ask, Peers
from app.sessions.placing import Placement, Placer
from app.sessions.upkeep import Closer
from backends.base import Claim, ClaimUnreadable, StoreError

log = logging.getLogger("coatcheck.affinity")

_MOVES = 6
_MOVES_WINDOW = 30.0
"""A session is moved at most so often within so many seconds by one replica: two that see the fleet differently must
not fight over it."""
_MOVES_REMEMBERED = 10_000
_KEEP_TRIES = 3
_DOUBT = 15.0
"""Seconds in which another replica finds the store back that found it away with us."""
_MOMENTS = (0.1, 0.3)
"""Seconds that a first turn waits for a claim to be taken back by its maker, which the store kept waiting as well."""
_SLACK = 10.0
"""Seconds: the longest that a proposal is under way before it is given up, that a watch seems alive after the store has
stopped, and that clocks are apart."""


class Resolver:
    """Where a session is, and how it came there (`how`, of AFFINITY_OUTCOMES).

    Long because each way to a target may end in any other: the store may go or come within each."""

    def __init__(
        self,
        entries: Entries,
        claims: Claims,
        closer: Closer,
        fleet: Fleet,
        names: Naming,
        peers: Peers,
        placer: Placer,
        metrics: Metrics,
        *,
        refuse: bool,
        unsettled: Callable[[str, float], None],
        overdue: Callable[[Entry], None],
    ) -> None:
        """`unsettled` is told of a session that is served without a claim although the store is up, and in how many
        seconds that should be tried again; `overdue` of a turn that cannot renew its claim."""
        self._entries, self._claims, self._closer = entries, claims, closer
        self._fleet, self._names, self._peers, self._placer, self._metrics = fleet, names, peers, placer, metrics
        self._refuse, self._unsettled, self._overdue = refuse, unsettled, overdue
        self._moves: OrderedDict[str, tuple[float, ...]] = OrderedDict()
        """When sessions were moved lately, the longest unmoved first."""
        self._news = Ration(log, "sessions that moved, or whose claim gave way")

    async def resolve(self, key: str, placement: Placement) -> tuple[Entry, str]:
        """The session's entry, and how it came to it. Raises TurnError."""
        claims = self._claims
        known = self._entries.find(key)
        if claims.state is StoreState.UP:
            await self._closer.wait(key)
        if claims.state is StoreState.AWAY:
            return await self._without_store(key, known, placement)
        until = claims.patience()
        snapshot = self._entries.snapshot(key)
        try:
            if (
                placement.refusal is not None
                or claims.state is StoreState.READ_ONLY
                or (known is not None and known.claim is not None)
            ):
                claim = await claims.get(key, until)
                if claim is not None:
                    claim = await claims.prolonged(claim, until, kept=placement.kept)
                if claim is not None:
                    return await self._adopt(claim, "stored", placement, snapshot, known, until)
                if known is not None and known.claim is not None:
                    known = self._without_claim(known, placement)
                if claims.state is StoreState.READ_ONLY:
                    return await self._without_store(key, known, placement)
            if known is None and not placement.kept and claims.back_within(_DOUBT):
                known = await self._served_elsewhere(key)  # by one that has not found the store back yet
            if known is not None and known.target.worker.known:
                target, alone = known.target, known.alone
            elif placement.refusal is not None:
                raise placement.refusal
            else:
                target, alone = await self._placer.place(key, placement), None
            with placement.reserve(target):
                outcome = await claims.create(
                    key,
                    target,
                    0,
                    kept=placement.kept,
                    served=alone is not None,
                    created_at=max(alone.served_at if alone is not None else 0.0, self._closer.successor_of(key)),
                    until=until,
                )
            if not outcome.created:
                placement.goes(self._meant(outcome.claim))
                claim, snapshot = await self._settled(outcome.claim, snapshot, known, until)
                if known is None and self._claims.gave_up(claim):
                    known = await self._served_elsewhere(key)
                stands = await claims.prolonged(claim, until, kept=placement.kept)
                if stands is None:
                    return await self.resolve(key, placement)
                claim = stands
                return await self._adopt(claim, "stored", placement, snapshot, known, until)
            if known is None and (gave_way := await self._kept_waiting(outcome.claim, placement, until)) is not None:
                return gave_way
            entry = self._note(outcome.claim, target, snapshot, kept=placement.kept)
            if known is None:
                entry.trial = not placement.kept
            return entry, "created"
        except ClaimUnreadable:
            return await self._beside(key, known, placement)
        except StoreError:
            return await self._without_store(key, known, placement)

    async def keep(self, key: str, target: Target) -> tuple[Entry, str]:
        """Have what `target` has just made claimed there: a claim that says another target is of something that is no
        more. Known here in any case, and claimed when the store is back. `how`: created or degraded."""
        claims, entries = self._claims, self._entries
        known = entries.find(key)
        if known is None or known.target is not target:
            known = Entry(key, target)
            known.kept, known.alone = True, self._alone()
            entries.install(known)
        if claims.state is StoreState.UP:
            until = claims.patience()
            with contextlib.suppress(StoreError):
                for generation in range(_KEEP_TRIES):
                    snapshot = entries.snapshot(key)
                    claim = (await claims.create(key, target, generation, kept=True, until=until)).claim
                    if self._meant(claim) is target:
                        return self._note(claim, target, snapshot, kept=True), "created"
                    await claims.close(claim, until)
        return known, "degraded"

    async def move(
        self,
        key: str,
        claim: Claim | None,
        lost: frozenset[str],
        placement: Placement,
        known: Entry | None = None,
    ) -> tuple[Entry, str]:
        """Close the observed claim and make one away from the lost workers; whoever is first decides where. `known`:
        the session as it was until now."""
        entry, how = await self._move_off(key, claim, lost, placement, known)
        left = known.target.worker.name if known is not None else claim.value.worker if claim is not None else ""
        worker = entry.target.worker.name
        if worker != left and self._news.allows():
            name = shown(key)
            said = event("session_moved", session=name, from_=left, to=worker, affinity=how)
            log.info("session %s moves from %s to %s (%s)", name, left, worker, how, extra=said)
        return entry, how

    async def _move_off(
        self,
        key: str,
        claim: Claim | None,
        lost: frozenset[str],
        placement: Placement,
        known: Entry | None,
    ) -> tuple[Entry, str]:
        hinted = tuple(target for target in placement.candidates if target.worker.name not in lost)
        elsewhere = msgspec.structs.replace(placement, candidates=hinted, parent=None, refusal=None, kept=False)
        if self._claims.state is not StoreState.UP or (known is not None and known.unreadable):
            return await self._without_store(key, None, elsewhere, lost, known)
        # One turn that finds several workers lost, one after the other, is one move.
        if len(lost) <= 1 and not self._may_move(key):
            raise TurnError(
                "no_worker", f"the session was moved {_MOVES} times within {_MOVES_WINDOW:g} s; it is left for a while"
            )
        until = self._claims.patience()
        snapshot = self._entries.snapshot(key)
        try:
            # Before the claim is closed: where nothing can be chosen, it stays.
            target = await self._placer.place(key, elsewhere, lost)
            with elsewhere.reserve(target):
                if claim is not None:
                    await self._claims.close(claim, until)
                generation = 0 if claim is None else claim.value.generation + 1
                outcome = await self._claims.create(key, target, generation, until=until)
            there = self._meant(outcome.claim)
            if there is not None:
                entry = self._note(outcome.claim, there, snapshot)
                _hand_over(known, entry)
                return entry, "rebound"
        except StoreError:
            pass
        # Or another replica's fleet differs; do not fight it.
        return await self._without_store(key, None, elsewhere, lost, known)

    # -- a claim that stands

    async def _adopt(
        self, claim: Claim, how: str, placement: Placement, snapshot: Snapshot, known: Entry | None, until: float
    ) -> tuple[Entry, str]:
        target = self._meant(claim)
        if target is None and self._fleet.worker(claim.value.worker) is None:
            await self._fleet.learn(claim.value.worker)  # another replica may have heard of it first
            target = self._meant(claim)
        if known is not None and known.target.worker.known and target is not known.target:
            why = await self._gives_way(claim, known)
            if why and self._claims.state is StoreState.UP:
                replaced = await self._replace(claim, why, known, placement, until)
                if isinstance(replaced, Entry):
                    return replaced, "created"
                claim, snapshot = replaced
                target = self._meant(claim)
            elif why or (self._is_doubted(claim, known) and not await self._peers.served_by(claim)):
                return known, "degraded"
        name = claim.value.worker
        if target is not None:
            # Another replica's, which may serve by it: it stays, whatever becomes of the first turn here.
            joins = known is not None and known.claim is None and not self._claims.gave_up(claim)
            entry = self._note(claim, target, snapshot, kept=placement.kept)
            entry.trial = entry.trial and not joins
            return entry, how
        if placement.kept:
            raise TurnError("gone", "the worker that kept it is gone")
        # The worker may be here without that rank: then it is not lost.
        lost = frozenset({name}) if self._fleet.worker(name) is None else frozenset[str]()
        return await self.move(claim.key, claim, lost, placement, known)

    async def _kept_waiting(self, claim: Claim, placement: Placement, until: float) -> tuple[Entry, str] | None:
        """Our claim was made, but so late that another replica may have gone by hash meanwhile. Nobody is served by it
        yet: it gives way to where one of them says that it serves the session, or, if they cannot all be asked, to what
        the hash says. None: it stays."""
        if placement.kept or not self._claims.kept_waiting(until):
            return None
        try:
            target, sure = await self._peers.serving(claim.key)
            if target is None:
                if sure:
                    return None
                target = self._placer.by_hash(claim.key, placement)
            if self._meant(claim) is target:
                return None
            replaced = await self._replace(claim, "late_write", Entry(claim.key, target), placement, until)
            if isinstance(replaced, Entry):
                replaced.trial = True
                return replaced, "created"
            stands, snapshot = replaced
            return await self._adopt(stands, "stored", placement, snapshot, None, until)
        except BaseException:  # cancelled, too: it may stand, and nobody is served by it
            self._claims.give_up(claim)
            raise

    async def _settled(
        self, claim: Claim, snapshot: Snapshot, known: Entry | None, until: float
    ) -> tuple[Claim, Snapshot]:
        """What stands a moment later, where a claim has been found that its maker may be about to take back."""
        if known is not None or claim.value.served or not self._claims.was_late(until):
            return claim, snapshot
        for pause in _MOMENTS:
            await asyncio.sleep(pause)
            later = self._entries.snapshot(claim.key)
            stands = await self._claims.get(claim.key, until)
            if stands is None:
                # Closed since it was read. This turn may go by it, the next one not: what was heard of the end went to
                # another snapshot than the one of that read.
                return claim, Snapshot(UNPROVEN, 0)
            claim, snapshot = stands, later
            if claim.value.served:
                break
        return claim, snapshot

    async def _served_elsewhere(self, key: str) -> Entry | None:
        """Where another replica serves the session without a claim."""
        target, _ = await self._peers.serving(key)
        if target is None:
            return None
        entry = Entry(key, target)
        entry.alone = self._alone()
        return entry

    async def _gives_way(self, claim: Claim, known: Entry) -> str:
        """Why a claim that contradicts where the session was served here gives way (of WAYS_GIVEN); empty: it does
        not."""
        if self._claims.gave_up(claim) and not await self._peers.have_served(claim):
            return "late_write"
        alone = known.alone
        if alone is not None and self._fleet.worker(claim.value.worker) is None and self._meant(claim) is None:
            return "lost_worker"
        if alone is None or claim.value.served:
            return ""
        if claim.value.worker in alone.lost:
            return "lost_worker"
        if alone.rewound and claim.value.created_at < alone.since:
            return "rewound"
        return ""

    def _is_doubted(self, claim: Claim, known: Entry) -> bool:
        """Whether the claim may be a late write of another replica, which is to say so."""
        alone = known.alone
        if alone is None or known.unreadable or claim.value.served or claim.value.created_at < alone.since - _SLACK:
            return False
        now = self._claims.clock()
        if not alone.doubted_until:
            alone.doubted_until = now + _DOUBT
            self._unsettled(known.key, _DOUBT + 0.1)
        alone.served_at = self._claims.wall()
        return now < alone.doubted_until

    async def _replace(
        self, claim: Claim, why: str, known: Entry, placement: Placement, until: float
    ) -> Entry | tuple[Claim, Snapshot]:
        """A claim where the session was served, in the place of one that gives way; or the one that stands after all,
        which does not."""
        key, target = known.key, known.target
        served_at = known.alone.served_at if known.alone is not None else 0.0
        for _ in range(_KEEP_TRIES):
            snapshot = self._entries.snapshot(key)
            with placement.reserve(target):
                await self._claims.close(claim, until)
                outcome = await self._claims.create(
                    key,
                    target,
                    claim.value.generation + 1,
                    kept=placement.kept,
                    served=True,
                    created_at=served_at,
                    until=until,
                )
            claim = outcome.claim
            if outcome.created:
                self._metrics.claims_given_way.inc(why)
                name, worker = shown(key), target.worker.name
                if self._news.allows():
                    said = event("claim_gave_way", session=name, worker=worker, reason=why)
                    log.info("session %s stays at %s: a claim gave way (%s)", name, worker, why, extra=said)
                known.claim = None  # it was of what gave way, or of what was before that
                return self._note(claim, target, snapshot, kept=placement.kept)
            if not await self._gives_way(claim, known):
                break
        return claim, snapshot

    def _meant(self, claim: Claim) -> Target | None:
        return self._names.find(claim.value.worker, claim.value.rank, claim.value.replica)

    def _note(self, claim: Claim, target: Target, snapshot: Snapshot, *, kept: bool = False) -> Entry:
        self._claims.adopt(claim)
        return self._entries.note(claim, target, snapshot, kept=kept)

    # -- no claim

    def _without_claim(self, known: Entry, placement: Placement) -> Entry | None:
        """The session had a claim that does not stand any more: it has ended, or could not be renewed. While no watch
        stands, the store may as well have lost its memory. Then the session, old or new, is served where it was."""
        if not placement.candidates and self._entries.outlived(known):
            return known
        if self._entries.watching or known.kept or known.closing or placement.candidates:
            if self._entries.find(known.key) is known:
                self._entries.forget(known.key)
            return None
        known.claim, known.alone = None, self._alone()
        return known

    async def _without_store(
        self,
        key: str,
        known: Entry | None,
        placement: Placement,
        lost: frozenset[str] = frozenset(),
        before: Entry | None = None,
    ) -> tuple[Entry, str]:
        """`before`: the session as it was, until it had to be moved off the `lost` workers."""
        told = await self._by_peers(key, known, placement, lost, before)
        if told is not None:
            return told
        if known is not None and known.target.worker.known:
            if self._entries.find(key) is None:
                self._entries.install(known)
            if known.claim is None:
                if known.alone is None:
                    known.alone = self._alone()
                known.alone.served_at = self._claims.wall()
                return known, "degraded"
            self._metrics.unproven.inc()
            self._overdue(known)
            return known, "cached"
        if self._refuse or placement.refusal is not None:
            raise TurnError("store_unavailable", "the claim store cannot be reached; the session cannot be placed")
        return await self._alone_at(key, self._placer.by_hash(key, placement, lost), lost, before), "degraded"

    async def _by_peers(
        self, key: str, known: Entry | None, placement: Placement, lost: frozenset[str], before: Entry | None
    ) -> tuple[Entry, str] | None:
        """Where another replica says that the session is. They are asked where it is not known here, and always while
        one of them is thought to reach the store. None: nobody knows better."""
        if not self._peers or (known is not None and not self._peers.any_up):
            return None
        at = placement.candidates
        if not at and known is not None and known.target.worker.known:
            at = (known.target,)  # what was served is the truth, also where its claim has expired meanwhile
        elif not at and placement.parent is None:
            # Should the answer come too late, the claim that the peer has made is where we have gone without it.
            with contextlib.suppress(TurnError):
                at = (self._placer.by_hash(key, placement, lost),)
        elif not at and (placement.among is not None or placement.prefill):
            at = tuple(self._placer.candidates(lost, placement, trials=False, with_full=True))
        found = await self._peers.find(
            Ask(
                "bind",
                key,
                at=tuple(map(self._names.spot, at)),
                parent=placement.parent or "",
                lost=tuple(sorted(lost)),
                standing=placement.refusal is not None,
                kept=placement.kept,
            )
        )
        if found is None:
            return None
        told, target = found
        claim = told.claim(key)
        if claim is None:
            if (known is not None and known.target is target) or self._refuse:
                return None
            return await self._alone_at(key, target, lost, before), "degraded"
        if known is not None and known.alone is not None and self._claims.gave_up(claim) and not told.served:
            return None  # our own late write: nobody has been served by it
        self._claims.adopt(claim)
        entry = self._entries.hearsay(claim, target, kept=placement.kept)
        _hand_over(before, entry)
        entry.trial = entry.trial or (told.how == "created" and before is None and not placement.kept)
        if told.how or told.proven:
            return entry, told.how or "stored"
        self._metrics.unproven.inc()  # the peer could not ask the store either, and the claim may be closed
        return entry, "cached"

    async def _beside(self, key: str, known: Entry | None, placement: Placement) -> tuple[Entry, str]:
        """What stands at the key is no claim that can be read, and is left alone. Each turn goes where the hash says,
        as at every other replica, and not where the session is known here: the others cannot know that."""
        if placement.refusal is not None:
            raise TurnError("store_unavailable", "what the claim store says of it cannot be read")
        kept_here = known is not None and known.kept and known.target.worker.known
        guess = self._placer.by_hash(key, placement)
        if known is None or not (kept_here or known.target is guess):
            known = await self._alone_at(key, guess, frozenset(), known)
        known.unreadable = True
        known.unprove()
        return known, "degraded"

    async def _alone_at(self, key: str, target: Target, lost: frozenset[str], before: Entry | None) -> Entry:
        """A new entry, of a session that is served without a claim."""
        entry = Entry(key, target)
        entry.trial, entry.alone = True, self._alone()
        if before is not None:
            if before.alone is not None:
                entry.alone.lost = before.alone.lost
            entry.unreadable = before.unreadable
            _hand_over(before, entry)
        entry.alone.lost |= lost
        self._entries.install(entry)
        if self._claims.state is StoreState.UP:
            self._unsettled(key, 1.0)
        if lost:
            await self._peers.tell("moved", key, None, target, lost)
        return entry

    def told_of_move(self, key: str, target: Target, lost: frozenset[str]) -> None:
        """Another replica has moved the session off the lost workers, and could not tell the store."""
        known = self._entries.find(key)
        if known is not None and known.target is target:
            return
        entry = Entry(key, target)
        entry.alone = self._alone()
        entry.alone.lost = lost
        if known is not None and known.alone is not None:
            entry.alone.lost |= known.alone.lost
        self._entries.install(entry)

    def _alone(self) -> Alone:
        return self._entries.alone(self._claims.answered_at)

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


def _hand_over(old: Entry | None, new: Entry) -> None:
    """A session that was moved before any turn of it was answered is on trial where it is now."""
    new.trial = old is not None and old.trial
    if old is not None and old is not new:
        old.trial = False
