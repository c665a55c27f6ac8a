"""How many turns a target, and a tenant, may have at once, and the queue of those that wait for a slot.

A slot is one attempt's: it counts at its target and for its tenant. A turn takes one at once where both have room; else
it waits. When a slot is given back, or a worker is there again, the waiting turns are looked at: the tenant that was
longest not given a slot first, and of one tenant the turns as they came. A turn of a session waits for its own target;
one that is free to choose takes whichever has room first. So a free slot and a turn that could have it are never there
together, and who comes later overtakes nobody.

The queue is bounded. When it is full, the tenant with the most turns in it loses its youngest: who floods it pays.

Nothing here awaits. A waiting turn is told by its wake, in a round of the loop of its own: slots are given back deep in
another turn's code.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right

import msgspec

from app.errors import TurnError
from app.fleet.health import State
from app.fleet.policies import Policy
from app.fleet.workers import Fleet, Target
from app.http.inplace import Wake
from app.metrics import Metrics

_LOOK_EVERY = 0.1
"""Seconds between looks at what nobody tells while turns wait: workers that come or go."""
_TO_NOTICE = 0.05
"""Seconds that a worker has to notice that a turn was broken off, before its slot is another's."""
_USUAL = 0.1
"""Share of the latest in how long slots are held."""
_LEAST_ESTIMATE, _MOST_ESTIMATE = 1.0, 20.0
_JITTER = (0.75, 1.5)
"""Those who are refused together should not come back together."""


class Bounds(msgspec.Struct, frozen=True):
    """`per_tenant`: turns at once (0: no limit; a target's is its own); `queue`: turns that may wait; `wait`: seconds
    that one may."""

    per_tenant: int = 0
    queue: int = 1000
    wait: float = 30.0


class Full(TurnError):
    """There is no slot: for now, or any more in the time that a turn may wait."""


class Slot:
    """A right to one attempt at `target`, from `Capacity.take` or a wait. Counted until it is given back."""

    __slots__ = ("_capacity", "_taken_at", "_tenant", "target")

    def __init__(self, capacity: Capacity, tenant: _Tenant, target: Target, now: float) -> None:
        self._capacity: Capacity | None = capacity
        self._tenant, self.target, self._taken_at = tenant, target, now

    def give_back(self, *, cut: bool = False) -> None:
        """`cut`: what the worker does for it was broken off, and the worker may not know yet. Idempotent."""
        capacity, self._capacity = self._capacity, None
        if capacity is not None:
            capacity._given_back(self._tenant, self.target, self._taken_at, cut)


class Waiter:
    """A turn in the queue. `wake` is set when it is not there any more: then it has a `slot`, or a `refusal`, or
    neither, when the worker that it waited for is lost, or it left."""

    __slots__ = ("began", "deadline", "entered", "lost", "queued", "refusal", "slot", "stays", "target", "tenant",
                 "wake")  # fmt: skip

    def __init__(
        self, tenant: _Tenant, target: Target | None, lost: frozenset[str], began: float, entered: float, stays: bool
    ) -> None:
        self.tenant, self.target, self.lost, self.began, self.entered = tenant, target, lost, began, entered
        self.stays = stays
        self.wake = Wake()
        self.queued = True
        self.slot: Slot | None = None
        self.refusal: Full | None = None
        self.deadline: asyncio.TimerHandle | None = None


class _Tenant:
    """Whose turns run or wait. `lines`: those that wait, by the target that they want (None: any), as they came; none
    is empty. `served`: the number of the last slot that it was given out of the queue."""

    __slots__ = ("lines", "running", "served", "waiting")

    def __init__(self) -> None:
        self.running = self.waiting = self.served = 0
        self.lines: dict[Target | None, list[Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        line = self.lines.setdefault(waiter.target, [])
        line.insert(bisect_right(line, waiter.began, key=_began), waiter)
        self.waiting += 1

    def remove(self, waiter: Waiter) -> None:
        line = self.lines[waiter.target]
        line.remove(waiter)
        if not line:
            del self.lines[waiter.target]
        self.waiting -= 1

    @property
    def youngest(self) -> Waiter:
        return max((line[-1] for line in self.lines.values()), key=_began)


class Capacity:
    """The slots of one replica. Made only where something is limited."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        metrics: Metrics,
        bounds: Bounds,
        *,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        self._fleet, self._policy, self._metrics, self._bounds = fleet, policy, metrics, bounds
        self._loop, self._rng = loop, rng
        self._tenants: dict[bytes, _Tenant] = {}
        """All that ever had a turn: their names are the operator's, so those are few."""
        self._queue: dict[_Tenant, None] = {}
        """Those that have turns which wait."""
        self.running = self.waiting = 0
        """Slots that are taken, and turns in the queue, of all tenants."""
        self._given = 0
        """Slots that were given out of the queue, ever."""
        self._usual = 1.0
        """Seconds that a slot is held."""
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    # -- a turn's side

    def allows(self, tenant: bytes) -> bool:
        """The tenant may have one more turn."""
        known = self._tenants.get(tenant)
        return known is None or self._has_room(known)

    def take(self, tenant: bytes, target: Target) -> Slot | None:
        """A slot at `target` now; None where there is none: then `wait`."""
        if target.limit and target.in_flight >= target.limit:
            return None
        known = self._tenant(tenant)
        return self._slot(known, target) if self._has_room(known) else None

    def wait(
        self,
        tenant: bytes,
        target: Target | None,
        *,
        lost: frozenset[str] = frozenset(),
        began: float,
        until: float,
        stays: bool = False,
    ) -> Waiter:
        """Be in the queue for a slot at `target`, or, where that is None, at any that is not of a worker in `lost`.
        `began`: when the turn did, which is its place among its tenant's; `until`: when it is refused, in the loop's
        time. `stays`: also when the target's worker is lost. Raises Full."""
        known = self._tenant(tenant)
        waiter = Waiter(known, target, lost, began, self._loop.time(), stays)
        if self._closed:
            raise self._refusal(waiter, "shutdown")
        known.add(waiter)
        self._queue[known] = None
        self.waiting += 1
        if target is not None:
            target.queued += 1
        if self.waiting > self._bounds.queue:
            most = max(self._queue, key=lambda each: (each.waiting, each is known))
            self._refuse(most.youngest, "queue_full")
            if waiter.refusal is not None:
                raise waiter.refusal
        waiter.deadline = self._loop.call_at(until, self._refuse, waiter, "timeout")
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_EVERY, self._look)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """It does not wait any more; what it was given goes on to the next. Idempotent."""
        if waiter.queued:
            self._let_out(waiter)
        elif waiter.slot is not None:
            waiter.slot.give_back()

    def close(self) -> None:
        """Refuse all that wait, and whoever would from now on: the router is being stopped."""
        self._closed = True
        for tenant in list(self._queue):
            for waiter in [each for line in tenant.lines.values() for each in line]:
                self._refuse(waiter, "shutdown")

    # -- slots

    def _vacate(self, target: Target) -> None:
        target.in_flight -= 1
        self.running -= 1
        if self.waiting:
            self._fill(target)

    def _tenant(self, name: bytes) -> _Tenant:
        return self._tenants.get(name) or self._tenants.setdefault(name, _Tenant())

    def _has_room(self, tenant: _Tenant) -> bool:
        return not self._bounds.per_tenant or tenant.running < self._bounds.per_tenant

    def _slot(self, tenant: _Tenant, target: Target) -> Slot:
        tenant.running += 1
        target.in_flight += 1
        self.running += 1
        return Slot(self, tenant, target, self._loop.time())

    def _given_back(self, tenant: _Tenant, target: Target, taken_at: float, cut: bool) -> None:
        tenant.running -= 1
        self._usual += _USUAL * (self._loop.time() - taken_at - self._usual)
        if cut:
            self._loop.call_later(_TO_NOTICE, self._vacate, target)
        else:
            self._vacate(target)
        if self._bounds.per_tenant and tenant.waiting and self._has_room(tenant):
            self._fill_any(tenant)

    # -- the queue

    def _fill(self, target: Target, *, to_all: bool | None = None) -> None:
        """Give the room at `target` to those that may have it. `to_all`: whether turns that are free to choose may
        come there; None: if its worker is up."""
        if to_all is None:
            worker = target.worker
            to_all = worker.available and worker.health.state is State.UP
        while not target.limit or target.in_flight < target.limit:
            free = to_all and not target.full
            best: Waiter | None = None
            for tenant in self._queue:
                if (best is None or tenant.served < best.tenant.served) and self._has_room(tenant):
                    best = _first(tenant, target, free) or best
            if best is None:
                return
            self._grant(best, target)

    def _fill_any(self, tenant: _Tenant) -> None:
        """Give the tenant's turns what room there is, anywhere."""
        while tenant.waiting and self._has_room(tenant):
            found: tuple[Waiter, Target] | None = None
            for wanted, line in tenant.lines.items():
                first = line[0]
                if found is not None and found[0].began <= first.began:
                    continue
                target = self._anywhere(first.lost) if wanted is None else wanted
                if target is not None and (not target.limit or target.in_flight < target.limit):
                    found = first, target
            if found is None:
                return
            self._grant(*found)

    def _anywhere(self, lost: frozenset[str]) -> Target | None:
        candidates = [target for target in self._fleet.candidates(lost) if not target.full]
        return self._policy(candidates) if candidates else None

    def _grant(self, waiter: Waiter, target: Target) -> None:
        self._given += 1
        waiter.tenant.served = self._given
        if waiter.target is None:
            self._fleet.note_placed(target)
        waiter.slot = self._slot(waiter.tenant, target)
        self._let_out(waiter)
        self._metrics.queue_seconds.observe(self._loop.time() - waiter.entered)

    def _refuse(self, waiter: Waiter, why: str) -> None:
        waiter.refusal = self._refusal(waiter, why)
        self._let_out(waiter)

    def _let_out(self, waiter: Waiter) -> None:
        waiter.queued = False
        tenant = waiter.tenant
        tenant.remove(waiter)
        if not tenant.waiting:
            del self._queue[tenant]
        self.waiting -= 1
        if waiter.target is not None:
            waiter.target.queued -= 1
        if waiter.deadline is not None:
            waiter.deadline.cancel()
        if not self.waiting and self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._loop.call_soon(waiter.wake.set)

    def _look(self) -> None:
        """At what nobody tells: workers that are lost, or there again, and claims that were not made after all."""
        self._looking = self._loop.call_later(_LOOK_EVERY, self._look)
        wanted = {target for tenant in self._queue for target in tenant.lines}
        for target in wanted:
            if target is not None and _is_lost(target) and self._fleet.has_other(frozenset({target.worker.name})):
                for tenant in list(self._queue):
                    for waiter in [each for each in tenant.lines.get(target, ()) if not each.stays]:
                        self._let_out(waiter)
        for target in self._fleet.candidates() if None in wanted else ():
            self._fill(target, to_all=True)
        for target in wanted:
            if target is not None:
                self._fill(target, to_all=False)

    # -- what the client is told

    def _refusal(self, waiter: Waiter, why: str) -> Full:
        tenant, target = waiter.tenant, waiter.target
        if not self._has_room(tenant):
            code = "tenant_limit"
            limit = "tenant"
            says = f"this API key's tenant has {tenant.running} turns running, which is its limit here"
            ahead, slots = tenant.waiting, self._bounds.per_tenant
        elif target is not None:
            code = "worker_full"
            limit = "target"
            says = "the worker of this turn has as many turns as it may have"
            ahead, slots = target.queued, target.limit
        else:
            code = "fleet_full"
            limit = "fleet"
            says = "every worker has as many turns as it may have"
            ahead, slots = self.waiting, self.running
        says += {
            "timeout": f"; it waited {self._loop.time() - waiter.entered:.1f} s",
            "queue_full": ", and the queue is full",
            "shutdown": ", and this router is being stopped",
        }[why]
        self._metrics.refused.inc(limit, why)
        seconds = self._usual * (ahead + 1) / max(1, slots)
        seconds = min(max(seconds, _LEAST_ESTIMATE), _MOST_ESTIMATE) * self._rng.uniform(*_JITTER)
        return Full(code, says, retry_after=max(1, round(seconds)))


def _began(waiter: Waiter) -> float:
    return waiter.began


def _first(tenant: _Tenant, target: Target, free: bool) -> Waiter | None:
    """The first of the tenant's turns that may go to `target`; `free`: also those that may go anywhere."""
    bound = tenant.lines.get(target)
    best = bound[0] if bound else None
    if free:
        name = target.worker.name
        other = next((each for each in tenant.lines.get(None, ()) if name not in each.lost), None)
        if other is not None and (best is None or other.began < best.began):
            best = other
    return best


def _is_lost(target: Target) -> bool:
    return target.worker.health.evicting or not target.worker.known
