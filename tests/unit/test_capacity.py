"""Slots and the queue before them, in virtual time: who gets a slot, who waits, and what becomes of who does not."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import pytest

from app.fleet.capacity import Bounds, Capacity, Choice, Full, Slot, Waiter
from app.fleet.loads import Place as TurnsPlace
from app.fleet.policies import least_loaded
from app.fleet.workers import Fleet, make_worker
from app.http.inplace import Driven, Wake
from app.metrics import Metrics

A, B = b"a", b"b"


class Timer:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualLoop:
    """What the capacity asks of a loop, with a clock that jumps to whatever is next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Timer, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., object], *args: Any) -> Timer:
        timer = Timer()
        heapq.heappush(self._due, (when, next(self._numbers), timer, lambda: call(*args)))
        return timer

    def call_later(self, delay: float, call: Callable[..., object], *args: Any) -> Timer:
        return self.call_at(self.now + delay, call, *args)

    def call_soon(self, call: Callable[..., object], *args: Any) -> Timer:
        return self.call_at(self.now, call, *args)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            when, _, timer, call = heapq.heappop(self._due)
            self.now = max(self.now, when)
            if not timer.cancelled:
                call()
        self.now = end


class Place:
    """A capacity over workers w0, w1 ..., each with a target of `limit` turns."""

    def __init__(self, workers: int = 2, limit: int = 1, *, ranks: int = 0, **bounds: Any) -> None:
        self.loop, self.metrics = VirtualLoop(), Metrics()
        self.fleet = Fleet(
            [
                make_worker(
                    f"http://127.0.0.1:{9000 + number}",
                    name=f"w{number}",
                    ranks=ranks,
                    max_turns=limit,
                    connect_limit=1,
                    idle_limit=1,
                    clock=self.loop.time,
                )
                for number in range(workers)
            ],
            clock=self.loop.time,
        )
        for worker in self.fleet:
            worker.health.connected()
            worker.health.served_well()
        self.targets = [target for worker in self.fleet for target in worker.targets]
        self.bounds = Bounds(**bounds)
        self.serving: dict[str, frozenset[str]] = {}
        self.capacity = Capacity(
            self.fleet,
            least_loaded,
            self.metrics,
            self.bounds,
            serving=self.serving.get,
            loop=cast(asyncio.AbstractEventLoop, self.loop),
            rng=random.Random(1),
        )

    def take(self, tenant: bytes = A, number: int = 0) -> Slot:
        slot = self.capacity.take(tenant, self.targets[number])
        assert slot is not None
        return slot

    def wait(self, tenant: bytes = A, number: int | None = None, **how: Any) -> Waiter:
        """`number`: of the target; None: any."""
        now = self.loop.time()
        values = {"began": now, "until": now + self.bounds.wait, **how}
        return self.capacity.wait(tenant, None if number is None else self.targets[number], **values)

    def serves(self, model: str, *numbers: int) -> Choice:
        """These workers serve the model, and no others; what a turn of it may choose from."""
        self.serving[model] = among = frozenset(f"w{number}" for number in numbers)
        return Choice(model=model, among=among)

    def check(self) -> None:
        """The counts agree with each other, and with the limits."""
        assert not any(target.limit and target.in_flight > target.limit for target in self.targets)
        assert self.capacity.running == sum(target.in_flight for target in self.targets)
        assert self.capacity.waiting == sum(tenant.waiting for tenant in self.capacity._queue)

    def at_rest(self) -> None:
        assert (self.capacity.running, self.capacity.waiting) == (0, 0)
        assert not self.capacity._queue
        assert not any((target.in_flight, target.queued, target.reserved) != (0, 0, 0) for target in self.targets)
        assert all((each.running, each.waiting) == (0, 0) for each in self.capacity._tenants.values())


def raising(fault: Exception) -> None:
    raise fault


def test_a_slot_is_taken_at_once_where_there_is_one_and_never_more_than_there_are() -> None:
    place = Place(limit=2)
    slots = [place.take(), place.take()]
    assert place.capacity.take(A, place.targets[0]) is None
    slots.append(place.take(number=1))
    for slot in slots:
        slot.give_back()
        slot.give_back()
    place.at_rest()


def test_a_bound_turn_waits_for_its_own_target_and_a_free_one_takes_what_comes_first() -> None:
    place = Place()
    first, second = place.take(number=0), place.take(number=1)
    bound, free = place.wait(number=0), place.wait()
    second.give_back()
    assert bound.queued
    assert free.slot is not None
    assert free.slot.target is place.targets[1]
    free.slot.give_back()
    assert bound.queued  # there is room, elsewhere
    first.give_back()
    assert bound.slot is not None
    assert bound.slot.target is place.targets[0]
    bound.slot.give_back()
    place.at_rest()


def test_a_tenants_turns_are_served_as_they_came_whatever_they_wait_for() -> None:
    place = Place(workers=1)
    slot: Slot | None = place.take()
    waiters = []
    for number in range(6):
        place.loop.run(0.01)
        waiters.append(place.wait(number=0 if number % 2 else None))
    for waiter in waiters:
        assert slot is not None
        slot.give_back()
        slot = waiter.slot
        assert slot is not None
        assert sum(each.slot is not None for each in waiters) == waiters.index(waiter) + 1
    assert slot is not None
    slot.give_back()
    place.at_rest()


def test_a_turn_that_is_tried_again_keeps_its_place() -> None:
    place = Place(workers=1)
    slot = place.take()
    place.loop.run(1)
    later = place.wait()
    retried = place.wait(began=0.5)
    slot.give_back()
    assert retried.slot is not None
    assert later.queued


def test_tenants_take_turns_however_many_wait_of_each() -> None:
    place = Place(workers=1)
    slot = place.take(A)
    many = [place.wait(A) for _ in range(10)]
    few = [place.wait(B) for _ in range(3)]
    order = []
    for _ in range(13):
        slot.give_back()
        waiter = next(each for each in (*many, *few) if each.slot is not None)
        (few if waiter in few else many).remove(waiter)
        assert waiter.slot is not None
        slot = waiter.slot
        order.append(slot._tenant is place.capacity._tenants[A])
    assert order == [True, False] * 3 + [True] * 7
    slot.give_back()
    place.at_rest()


def test_many_small_tenants_do_not_starve_a_large_one() -> None:
    """Each of them has one turn at a time, is gone between them, and comes back."""
    place = Place(workers=1)
    slot = place.take(A)
    large = [place.wait(A) for _ in range(20)]
    small = {name: place.wait(name) for name in (b"x", b"y", b"z")}
    served: defaultdict[bytes, int] = defaultdict(int)
    for _ in range(40):
        slot.give_back()
        name = next((name for name, waiter in small.items() if waiter.slot is not None), A)
        waiter = small[name] if name != A else next(each for each in large if each.slot is not None)
        served[name] += 1
        assert waiter.slot is not None
        slot = waiter.slot
        if name == A:
            large.remove(waiter)
        else:
            small[name] = place.wait(name)
    assert set(served.values()) == {10}


@pytest.mark.parametrize("at_once", [1, 2, 4, 8])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_beside_a_flood_a_tenant_waits_at_most_twice_as_long(slots: int, at_once: int) -> None:
    """From its request to the end of its turn, 95 of 100, in units of a turn's length; the flood is 50 at once."""

    def waits(flood: int) -> float:
        place = Place(workers=slots)
        took: list[float] = []
        clients: list[Driven] = []
        rng = random.Random(slots * 100 + at_once)

        async def client(tenant: bytes) -> None:
            while True:
                asked = place.loop.time()
                target = min(place.targets, key=lambda each: each.in_flight)
                slot = place.capacity.take(tenant, target)
                if slot is None:
                    waiter = place.wait(tenant, until=1e9)
                    await waiter.wake
                    slot = waiter.slot
                assert slot is not None
                over = Wake()
                place.loop.call_later(rng.uniform(0.9, 1.1), over.set)
                await over
                slot.give_back()
                place.check()
                if tenant == B:
                    took.append(place.loop.time() - asked)

        def start(tenant: bytes) -> None:
            clients.append(Driven(took.append, raising))
            clients[-1].start(client(tenant))

        for _ in range(flood):
            start(A)
        for number in range(at_once):
            place.loop.call_later(3.3 + number / 7, start, B)
        place.loop.run(150)
        for each in clients:
            each.close()
        took.sort()
        return took[len(took) * 95 // 100]

    alone, beside = waits(0), waits(50)
    assert beside <= 2.0 * alone, (alone, beside)


def test_a_tenants_limit_holds_and_others_pass_by() -> None:
    place = Place(limit=0, per_tenant=1)
    slot = place.take(A)
    assert not place.capacity.allows(A)
    assert place.capacity.take(A, place.targets[1]) is None
    waiter, bound = place.wait(A), place.wait(A, 1)
    place.take(B).give_back()
    assert waiter.queued
    slot.give_back()
    assert waiter.slot is not None
    assert bound.queued
    waiter.slot.give_back()
    assert bound.slot is not None
    bound.slot.give_back()
    place.at_rest()


def test_a_tenant_at_its_limit_leaves_the_slot_to_the_next() -> None:
    place = Place(workers=2, per_tenant=1)
    one, other = place.take(A, 0), place.take(B, 1)
    a, b = place.wait(A, 1), place.wait(B, 1)
    other.give_back()
    assert b.slot is not None
    assert a.queued
    b.slot.give_back()
    assert a.queued  # its own limit
    one.give_back()
    assert a.slot is not None
    a.slot.give_back()
    place.at_rest()


def test_what_is_refused_says_whose_limit_it_is() -> None:
    place = Place(workers=1, per_tenant=2, queue=0)
    slots = [place.take(A)]
    for number, code, status in ((0, "worker_full", "target"), (None, "fleet_full", "fleet")):
        with pytest.raises(Full) as refused:
            place.wait(A, number)
        assert refused.value.code == code
        assert place.metrics.refused.cells[status, "queue_full"] == 1
    place = Place(workers=1, limit=5, per_tenant=1, queue=0)
    slots.append(place.take(A))
    with pytest.raises(Full) as refused:
        place.wait(A, 0)
    assert refused.value.code == "tenant_limit"
    assert place.metrics.refused.cells["tenant", "queue_full"] == 1
    for slot in slots:
        slot.give_back()
    place.at_rest()


def test_the_queue_is_bounded_and_who_floods_it_pays() -> None:
    place = Place(workers=1, queue=4)
    slot = place.take(A)
    flood = []
    for number in range(4):
        place.loop.run(0.01 * (number + 1))
        flood.append(place.wait(A))
    with pytest.raises(Full):
        place.wait(A)
    b = [place.wait(B), place.wait(B)]
    assert [waiter.queued for waiter in flood] == [True, True, False, False]
    assert flood[3].refusal is not None
    assert flood[3].refusal.code == "fleet_full"
    with pytest.raises(Full):
        place.wait(B)  # no more than the other
    assert place.capacity.waiting == 4
    for waiter in (*flood[:2], *b):
        place.capacity.leave(waiter)
    slot.give_back()
    place.at_rest()


def test_who_waits_too_long_is_refused() -> None:
    place = Place(workers=1, wait=5.0)
    slot = place.take()
    early, late = place.wait(), place.wait(until=9.0)
    place.loop.run(4.9)
    assert early.queued
    place.loop.run(0.2)
    assert early.refusal is not None
    assert early.wake.is_set
    assert late.queued
    place.loop.run(5)
    assert not late.queued
    assert place.metrics.refused.cells["fleet", "timeout"] == 2
    slot.give_back()
    place.at_rest()


def test_who_leaves_is_out_at_once_and_what_it_was_given_goes_on() -> None:
    place = Place(workers=1)
    slot = place.take()
    gone, granted, last = place.wait(), place.wait(), place.wait()
    place.capacity.leave(gone)
    assert place.capacity.waiting == 2
    slot.give_back()
    assert gone.slot is None
    assert granted.slot is not None
    place.capacity.leave(granted)  # before it knows
    place.capacity.leave(granted)
    assert last.slot is not None
    last.slot.give_back()
    place.at_rest()


def test_those_whose_worker_is_lost_are_told_once() -> None:
    place = Place()
    place.take(number=0)
    place.take(number=1)
    moves, stays = place.wait(number=0), place.wait(number=0, stays=True)
    place.targets[0].worker.health.unreachable("refused", refused=True)
    place.loop.run(0.2)
    assert not moves.queued
    assert (moves.slot, moves.refusal) == (None, None)
    assert moves.wake.is_set
    assert stays.queued


def test_a_turn_that_has_no_room_does_not_hold_up_those_of_other_models() -> None:
    """Also of one tenant, which is at its limit: when it has room again, its oldest turn that can run does."""
    place = Place(per_tenant=2)
    first, second = place.take(number=0), place.take(number=1)
    stuck, can = place.wait(choice=place.serves("a", 0)), place.wait(choice=place.serves("b", 1))
    later = place.wait(B, choice=place.serves("b", 1))
    second.give_back()
    place.loop.run(0)
    assert can.slot is not None
    assert can.slot.target is place.targets[1]
    assert stuck.queued
    can.slot.give_back()
    place.loop.run(0)
    assert (
        later.slot is not None
    )  # the slot is of the second worker, and what is left of the first tenant is not for it
    later.slot.give_back()
    place.loop.run(1.0)
    assert stuck.queued
    first.give_back()
    place.loop.run(0)
    assert stuck.slot is not None
    assert stuck.slot.target is place.targets[0]
    stuck.slot.give_back()
    place.at_rest()


def test_limits_come_and_go_with_the_workers_that_have_them() -> None:
    place = Place(workers=1, limit=0)
    (worker,) = place.fleet
    limited = Place(workers=1, limit=1)
    (other,) = limited.fleet
    other.name = "limited"
    place.fleet.put(other)
    other.targets[0].in_flight = 1
    assert place.fleet.candidates().compared() == worker.targets
    place.fleet.put(make_worker(worker.url, name="limited", connect_limit=1, idle_limit=1))
    assert not place.fleet._limited
    place.fleet.put(other)
    place.fleet.remove("limited")
    place.fleet.remove("limited")
    assert not place.fleet._limited


def test_with_nowhere_to_go_they_wait_on() -> None:
    place = Place(workers=1)
    place.take()
    waiter = place.wait(number=0)
    place.targets[0].worker.health.unreachable("refused", refused=True)
    place.loop.run(1)
    assert waiter.queued


def test_a_worker_that_comes_is_used_without_a_slot_given_back() -> None:
    place = Place()
    place.targets[1].worker.mark = "cordoned"
    place.take(number=0)
    waiter = place.wait()
    place.loop.run(1)
    assert waiter.queued
    place.targets[1].worker.mark = "none"
    place.loop.run(0.2)
    assert waiter.slot is not None
    assert waiter.slot.target is place.targets[1]


def test_a_slot_of_a_cordoned_worker_goes_only_to_its_own() -> None:
    place = Place(workers=2)
    slots = [place.take(number=0), place.take(number=1)]
    place.targets[0].worker.mark = "cordoned"
    free, bound = place.wait(), place.wait(number=0)
    slots[0].give_back()
    assert free.queued
    assert bound.slot is not None


def test_claims_being_made_keep_their_room() -> None:
    place = Place(workers=1)
    coming = TurnsPlace()
    with coming.claiming(place.targets[0]):
        assert place.targets[0].full
        waiter = place.wait()
        place.loop.run(1)
        assert waiter.queued
    coming.end()
    place.loop.run(0.2)
    assert waiter.slot is not None


def test_at_the_end_all_that_wait_are_told() -> None:
    place = Place(workers=1)
    slot = place.take()
    waiters = [place.wait(), place.wait(number=0)]
    place.capacity.close()
    assert [each.refusal.code for each in waiters if each.refusal] == ["fleet_full", "worker_full"]
    with pytest.raises(Full, match="stopped"):
        place.wait()
    slot.give_back()
    place.at_rest()


def test_when_to_come_again_is_an_estimate_with_bounds() -> None:
    said: dict[float, list[int]] = {}
    for held in (0.01, 2.0, 500.0):
        place = Place(workers=1, queue=3)
        for _ in range(100):
            slot = place.take()
            place.loop.run(held)
            slot.give_back()
        place.take()
        for _ in range(3):
            place.wait()
        said[held] = []
        for _ in range(50):
            with pytest.raises(Full) as refused:
                place.wait()
            assert refused.value.retry_after is not None
            said[held].append(refused.value.retry_after)
    assert max(said[0.01]) <= 2
    assert min(said[0.01]) == 1
    assert 6 <= min(said[2.0]) < max(said[2.0]) <= 15  # five turns of two seconds
    assert max(said[500.0]) <= 30
    assert len(set(said[500.0])) > 5


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_no_limit_is_passed_nobody_is_forgotten_and_all_is_given_back(seed: int) -> None:
    rng = random.Random(seed)
    per_tenant = rng.choice([0, 0, 1, 3])
    limit = rng.choice([0, 1, 2, 3] if per_tenant else [1, 2, 3])
    ranks, queue = rng.choice([0, 0, 2]), rng.choice([2, 10, 1000])
    place = Place(rng.randint(1, 4), limit, ranks=ranks, per_tenant=per_tenant, queue=queue, wait=50.0)
    held: list[Slot] = []
    waiting: list[Waiter] = []

    def look() -> None:
        place.check()
        for waiter in list(waiting):
            if not waiter.queued:
                waiting.remove(waiter)
                if waiter.slot is not None:
                    held.append(waiter.slot)
        if per_tenant:
            assert all(each.running <= per_tenant for each in place.capacity._tenants.values())
        for waiter in waiting:
            if not per_tenant or waiter.tenant.running < per_tenant:
                can = place.targets if waiter.target is None else [waiter.target]
                assert all(target.limit and target.in_flight >= target.limit for target in can)

    for _ in range(400):
        what = rng.random()
        tenant = rng.choice([A, B, b"c"])
        number = rng.choice([None, *range(len(place.targets))])
        if what < 0.5:
            target = place.targets[number or 0] if number is not None else least_loaded(place.fleet.candidates())
            slot = place.capacity.take(tenant, target)
            if slot is not None:
                held.append(slot)
            else:
                try:
                    waiting.append(place.wait(tenant, number, began=place.loop.time() - rng.choice([0.0, 0.0, 3.0])))
                except Full:
                    assert place.capacity.waiting == place.bounds.queue
        elif what < 0.8 and held:
            held.pop(rng.randrange(len(held))).give_back()
        elif what < 0.9 and waiting:
            place.capacity.leave(waiting.pop(rng.randrange(len(waiting))))
        else:
            place.loop.run(rng.uniform(0, 0.3))
        look()
    while held:
        held.pop(rng.randrange(len(held))).give_back()
        look()
    assert not waiting
    place.at_rest()
