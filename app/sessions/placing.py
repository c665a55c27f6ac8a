"""Where a session goes that has no claim: the client's hint, its parent, the policy, or the hash on which replicas
agree that can ask nobody."""

from __future__ import annotations

from contextlib import AbstractContextManager

import msgspec

from app.errors import TurnError
from app.fleet.candidates import Candidates
from app.fleet.capacity import Full
from app.fleet.loads import Place
from app.fleet.naming import Naming
from app.fleet.placement.foresight import Foreseen
from app.fleet.policies import Policy, least, rendezvous
from app.fleet.workers import Fleet, Target
from app.metrics import Metrics
from app.sessions.claims import Claims
from app.sessions.entries import Entries
from backends.base import ClaimUnreadable


class Placement(msgspec.Struct, frozen=True):
    """Where a turn would have its session, should no claim stand."""

    candidates: tuple[Target, ...] = ()
    """What the client's hint names; empty: no hint."""
    parent: str | None = None
    """The key of the session whose prefix this one shares."""
    refusal: TurnError | None = None
    """Only a claim that stands will do, else this is raised."""
    kept: bool = False
    """It is no session but something that a worker keeps, which nobody can move."""
    among: frozenset[str] | None = None
    """The names of the workers that will do; None: all."""
    slot: Target | None = None
    """Where the turn holds a slot already: there it goes, if it is free to choose."""
    full_too: bool = False
    """Also where nobody has room: it waits for its slot there."""
    prefill: bool = False
    """Where its prompts are computed for another worker, not where it is served."""
    prompt: Foreseen | None = None
    """The turn's, for a policy that places by that."""
    place: Place | None = None
    """The turn's, which its own code ends; None: it is served elsewhere, or there is none."""

    def reserve(self, target: Target) -> AbstractContextManager[None]:
        """While a claim is made for it at the target."""
        return (self.place or _nobodys()).claiming(target)

    def goes(self, target: Target | None) -> None:
        """The turn is to go there; None: that is not known yet."""
        if self.place is not None and target is not None:
            self.place.at(target)


def _nobodys() -> Place:
    place = Place()
    place.end()
    return place


ANYWHERE = Placement()
WHERE_KEPT = Placement(kept=True)


class Placer:
    """Chooses, and tells the fleet what it has chosen (`place`)."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        entries: Entries,
        claims: Claims,
        names: Naming,
        metrics: Metrics,
        *,
        parent_slack: int,
    ) -> None:
        """`parent_slack`: how many turns more than the least loaded target a parent's may have."""
        self._fleet, self._policy, self._entries, self._claims = fleet, policy, entries, claims
        self._names, self._metrics, self._parent_slack = names, metrics, parent_slack

    async def choose(
        self, placement: Placement, lost: frozenset[str] = frozenset(), key: str = ""
    ) -> tuple[Target, str, str]:
        """The target of a session that has no claim, and why: the client's hint, else its parent, else the policy. Last
        what became of following the parent, if there is one: followed, unknown or passed_over. Only looks. `key`: the
        session's. While the store is suspected to be away, that is proposed which the session gets without it: there it
        goes, whatever slot it has, and though it must wait ("hash")."""
        if placement.candidates:
            return least(placement.candidates), "hint", ""
        if key and self._claims.suspected:
            return self.by_hash(key, placement, lost), "hash", ""
        slot = placement.slot
        if slot is not None and slot.worker.known and slot.worker.name not in lost:
            return slot, "policy", ""
        parent = ""
        if placement.parent is not None:
            near = await self._near(placement.parent)
            candidates = self.candidates(lost, placement, trials=False)  # as they are now
            if (
                near is not None
                and near in candidates
                and near.load - least(candidates.compared()).load <= self._parent_slack
            ):
                return near, "parent", "followed"
            parent = "unknown" if near is None else "passed_over"
        if placement.prompt is not None and placement.prompt.waits:
            await placement.prompt.read()
        return self._policy(self.candidates(lost, placement, key=key)), "policy", parent

    async def place(self, key: str, placement: Placement, lost: frozenset[str] = frozenset()) -> Target:
        target, why, parent = await self.choose(placement, lost, key)
        if target.full and why in ("parent", "policy") and target is not placement.slot and not placement.full_too:
            raise Full("fleet_full", "every worker has as many turns as it may have")
        if parent:
            self._metrics.parents.inc(parent)
        self._fleet.note_placed(target)
        return target

    async def _near(self, parent: str) -> Target | None:
        entry = self._entries.find(parent)
        if entry is not None:
            return entry.target
        try:
            claim = await self._claims.get(parent)
        except ClaimUnreadable:
            return None
        return None if claim is None else self._names.find(claim.value.worker, claim.value.rank, claim.value.replica)

    def by_hash(self, key: str, placement: Placement = ANYWHERE, lost: frozenset[str] = frozenset()) -> Target:
        """Where a session is served of which nobody knows: the same on every replica that sees the same workers. Of
        what the client's hint names, if there is one. What is full here may have room elsewhere: without the
        store, replicas agree only on what all see alike."""
        if placement.candidates:
            return rendezvous(key, Candidates.of(placement.candidates))
        return rendezvous(key, self.candidates(lost, placement, trials=False, with_full=True))

    def candidates(
        self,
        lost: frozenset[str],
        placement: Placement,
        *,
        trials: bool = True,
        with_full: bool = False,
        key: str = "",
    ) -> Candidates[Target]:
        candidates = self._fleet.candidates(
            lost,
            placement.among,
            trials=trials,
            with_full=with_full,
            key=key,
            prompt=placement.prompt,
            prefill=placement.prefill,
        )
        if not candidates:
            what = "the prompt of the turn" if placement.prefill else "the turn"
            raise TurnError("no_worker", f"no worker can take {what}")
        return candidates
