"""How many turns a target, and a tenant, may have at once, and the queue of those that wait for a slot.

A slot is one attempt's: it counts at its target and for its tenant. One that a turn takes *beside* its own counts at
its target alone, or a tenant's turn would wait for itself. A turn takes one at once where both have room; else it
waits. When a slot is given back, or a worker is there again, the waiting turns are looked at: the tenant that was
longest not given a slot first, and of one tenant the turns as they came. A turn of a session waits for its own target;
one that is free to choose takes whichever has room first of those that serve its model, as they are at that moment:
workers come, and their lists change, while it waits. So a free slot and a turn that could have it are never there
together, and who comes later overtakes nobody.

The queue is bounded. When it is full, the tenant with the most turns in it loses its youngest: who floods it pays.

Nothing here awaits. A waiting turn is told by its wake, in a round of the loop of its own: slots are given back deep in
another turn's code.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from app.errors import TurnError
from app.fleet.candidates import Candidates
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


K = TypeVar("K")


class Choice(NamedTuple):
    """What a turn may choose from. Turns with the same choice wait in one line."""

    lost: frozenset[str] = frozenset()
    """Names of workers that it has found lost."""
    model: str | None = None
    among: frozenset[str] | None = None
    """The names of the workers that serve its model, as far as was known when it came; None: all."""


ANYTHING = Choice()


class Full(TurnError):
    """There is no slot: not at once, or not within the time that a turn may wait."""


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

    __slots__ = ("began", "choice", "deadline", "entered", "queued", "refusal", "slot", "stays", "target", "tenant",
                 "wake")  # fmt: skip

    def __init__(
        self, tenant: _Tenant, target: Target | None, choice: Choice, began: float, entered: float, stays: bool
    ) -> None:
        self.tenant, self.target, self.choice, self.began, self.entered = tenant, target, choice, began, entered
        self.stays = stays
        self.wake = Wake()
        self.queued = True
        self.slot: Slot | None = None
        self.refusal: Full | None = None
        self.deadline: asyncio.TimerHandle | None = None


class _Tenant:
    """Whose turns run or wait. Those that wait stand in lines, as they came, none of which is empty: `bound` by the
    target that they want, `free` by what they may choose from. `served`: the number of the last slot that it was given
    out of the queue. Its slots beside others are another one's, which is not `limited`."""

    __slots__ = ("bound", "free", "limited", "running", "served", "waiting")

    def __init__(self, limited: bool) -> None:
        self.limited = limited
        self.running = self.waiting = self.served = 0
        self.bound: dict[Target, list[Waiter]] = {}
        self.free: dict[Choice, list[Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        if waiter.target is None:
            line = self.free.setdefault(waiter.choice, [])
        else:
            line = self.bound.setdefault(waiter.target, [])
        line.insert(bisect_right(line, waiter.began, key=_began), waiter)
        self.waiting += 1

    def remove(self, waiter: Waiter) -> None:
        if waiter.target is None:
            _remove(self.free, waiter.choice, waiter)
        else:
            _remove(self.bound, waiter.target, waiter)
        self.waiting -= 1

    @property
    def lines(self) -> list[list[Waiter]]:
        return [*self.bound.values(), *self.free.values()]

    @property
    def youngest(self) -> Waiter:
        return max((line[-1] for line in self.lines), key=_began)


class Capacity:
    """The slots of one replica. Made only where something is limited.

    Long because who is served next is one rule over tenants, models and targets."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        metrics: Metrics,
        bounds: Bounds,
        *,
        serving: Callable[[str], frozenset[str] | None] = lambda model: None,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        """`serving`: as `Catalog.serving`."""
        self._fleet, self._policy, self._metrics, self._bounds = fleet, policy, metrics, bounds
        self._serving = serving
        self._loop, self._rng = loop, rng
        self._tenants: dict[bytes, _Tenant] = {}
        """All that ever had a turn: their names are the operator's, so those are few."""
        self._beside: dict[bytes, _Tenant] = {}
        """Their slots beside others."""
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

    def take(self, tenant: bytes, target: Target, *, beside: bool = False) -> Slot | None:
        """A slot at `target` now, perhaps `beside` the turn's own; None where there is none: then `wait`."""
        if not _has_room(target):
            return None
        known = self._tenant(tenant, beside)
        return self._slot(known, target) if self._has_room(known) else None

    def wait(
        self,
        tenant: bytes,
        target: Target | None,
        *,
        choice: Choice = ANYTHING,
        began: float,
        until: float,
        stays: bool = False,
        beside: bool = False,
    ) -> Waiter:
        """Be in the queue for a slot at `target`, or, where that is None, at any of the `choice`. `began`: when the
        turn did, which is its place among its tenant's; `until`: when it is refused, in the loop's time. `stays`: also
        when the target's worker is lost. `beside`: as for `take`. Raises Full."""
        known = self._tenant(tenant, beside)
        waiter = Waiter(known, target, choice, began, self._loop.time(), stays)
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

    def waiting_by_tenant(self) -> dict[bytes, int]:
        counts: Counter[bytes] = Counter()
        for tenants in (self._tenants, self._beside):
            counts.update({name: tenant.waiting for name, tenant in tenants.items() if tenant.waiting})
        return counts

    def close(self) -> None:
        """Refuse all that wait, and whoever would from now on: the router is being stopped."""
        self._closed = True
        for tenant in list(self._queue):
            for waiter in [each for line in tenant.lines for each in line]:
                self._refuse(waiter, "shutdown")

    # -- slots

    def _vacate(self, target: Target) -> None:
        target.in_flight -= 1
        target.spent += self._loop.time()
        self.running -= 1
        if self.waiting:
            self._fill(target)

    def _tenant(self, name: bytes, beside: bool) -> _Tenant:
        tenants = self._beside if beside else self._tenants
        return tenants.get(name) or tenants.setdefault(name, _Tenant(not beside))

    def _has_room(self, tenant: _Tenant) -> bool:
        return not (self._bounds.per_tenant and tenant.limited) or tenant.running < self._bounds.per_tenant

    def _slot(self, tenant: _Tenant, target: Target) -> Slot:
        now = self._loop.time()
        tenant.running += 1
        target.in_flight += 1
        target.spent -= now
        self.running += 1
        return Slot(self, tenant, target, now)

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

    def _fill(self, target: Target) -> None:
        """Give the room at `target` to those that may have it."""
        worker = target.worker
        if not worker.available or worker.health.state is not State.UP:  # who may choose it depends on the others
            self._fill_all()
            return
        serves: dict[Choice, bool] = {}
        for tenant in self._queue:
            for choice in tenant.free:
                if choice not in serves:
                    serves[choice] = worker.takes_turns and self._may(choice, worker.name)
        while _has_room(target):
            best: Waiter | None = None
            for tenant in self._queue:
                if (best is None or tenant.served < best.tenant.served) and self._has_room(tenant):
                    best = _first(tenant, target, serves) or best
            if best is None:
                return
            self._grant(best, target)

    def _fill_all(self) -> None:
        """Give out what room there is, anywhere."""
        granted = True
        while granted:
            looked: dict[Choice, bool] = {}
            tenants = sorted(self._queue, key=_served)
            granted = any(self._fill_one(tenant, looked) for tenant in tenants if self._has_room(tenant))

    def _fill_any(self, tenant: _Tenant) -> None:
        """Give the tenant's turns what room there is, anywhere."""
        while tenant.waiting and self._has_room(tenant) and self._fill_one(tenant, {}):
            pass

    def _fill_one(self, tenant: _Tenant, looked: dict[Choice, bool]) -> bool:
        """Give the first of the tenant's turns for which there is room its slot. Returns whether there was one.
        `looked`: what has room; all that is known of it already, and what is found out."""
        first: Waiter | None = None
        for wanted, line in tenant.bound.items():
            if _has_room(wanted) and (first is None or line[0].began < first.began):
                first = line[0]
        for choice, line in tenant.free.items():
            if first is None or line[0].began < first.began:
                if choice not in looked:
                    looked[choice] = self._offer(choice).any_room
                if looked[choice]:
                    first = line[0]
        if first is None:
            return False
        # Offered again: the fleet must know what was chosen from last (`Fleet.note_placed`).
        target = first.target or self._policy(self._offer(first.choice))
        if not _has_room(target):  # whatever a policy picks, a limit is one
            return False
        self._grant(first, target)
        return True

    def _among(self, choice: Choice) -> frozenset[str] | None:
        """The names of the workers that serve its model now; None: all."""
        serving = None if choice.model is None else self._serving(choice.model)
        return choice.among if serving is not None and not serving else serving

    def _may(self, choice: Choice, worker: str) -> bool:
        among = self._among(choice)
        return worker not in choice.lost and (among is None or worker in among)

    def _offer(self, choice: Choice) -> Candidates[Target]:
        return self._fleet.candidates(choice.lost, self._among(choice))

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
        for tenant in list(self._queue):
            lost = [target for target in tenant.bound if _is_lost(target)]
            for waiter in [each for target in lost for each in tenant.bound[target] if not each.stays]:
                assert waiter.target is not None
                name = waiter.target.worker.name
                if self._fleet.has_other(frozenset({name}), self._among(waiter.choice)):
                    self._let_out(waiter)
        self._fill_all()

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
            whose = "" if self._among(waiter.choice) is None else " that serves this turn's model"
            says = f"every worker{whose} has as many turns as it may have"
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


def _served(tenant: _Tenant) -> int:
    return tenant.served


def _has_room(target: Target) -> bool:
    return not target.limit or target.in_flight < target.limit


def _remove(lines: dict[K, list[Waiter]], key: K, waiter: Waiter) -> None:
    lines[key].remove(waiter)
    if not lines[key]:
        del lines[key]


def _first(tenant: _Tenant, target: Target, serves: dict[Choice, bool]) -> Waiter | None:
    """The first of the tenant's turns that may go to `target`, which `serves` these choices or does not."""
    bound = tenant.bound.get(target)
    best = bound[0] if bound else None
    if not target.full:
        for choice, line in tenant.free.items():
            if serves[choice] and (best is None or line[0].began < best.began):
                best = line[0]
    return best


def _is_lost(target: Target) -> bool:
    return target.worker.health.evicting or not target.worker.known
