"""What only the memory store promises: an exact clock, a bound, and no help from outside."""

from __future__ import annotations

import asyncio

import pytest

from backends.base import LIFETIME, Claim, ClaimLost, CloseOutcome, Deleted, Reset
from backends.fanout import Mailbox
from backends.memory import MemoryStore
from backends.registry import Removed
from tests.support.stores import Subscriber, a_key, a_value, make


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_promises_no_more_than_it_can() -> None:
    assert not MemoryStore().across_processes


async def test_a_claim_expires_exactly_at_one_and_a_quarter_ttl(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    claim = await make(store, a_key(), ttl=100)
    assert claim.expires_at == 1000 + LIFETIME * 100
    clock.now = claim.expires_at - 0.001
    assert await store.get(claim.key) == claim
    clock.now = claim.expires_at
    assert await store.get(claim.key) is None
    with pytest.raises(ClaimLost):
        await store.renew(claim, 100)
    await store.aclose()


async def test_a_renewal_never_shortens(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    claim = await make(store, a_key(), ttl=1000)
    assert (await store.renew(claim, 10)).expires_at == claim.expires_at
    await store.aclose()


async def test_an_expiry_is_told_though_nobody_calls() -> None:
    store = MemoryStore()
    async with Subscriber(store) as subscriber:
        claim = await make(store, a_key(), ttl=3600)
        sooner = await make(store, a_key(), ttl=0.04)
        await subscriber.hears(sooner.key)
        assert claim.key not in subscriber.deleted
    await store.aclose()


async def test_at_capacity_the_soonest_to_expire_makes_room_and_is_told(clock: Clock) -> None:
    store = MemoryStore(clock=clock, capacity=3)
    long, short, middle = [await make(store, a_key(), ttl=ttl) for ttl in (300, 100, 200)]
    short = await store.renew(short, 400)
    async with Subscriber(store) as subscriber:
        before = store.stamp(middle.key)
        new = await make(store, a_key(), ttl=50)
        await subscriber.hears(middle.key)
        assert subscriber.deleted == [middle.key]
        assert store.stamp(middle.key) != before
    assert [await store.get(claim.key) for claim in (long, short, middle, new)] == [long, short, None, new]
    await store.aclose()


async def test_the_expired_make_room_first(clock: Clock) -> None:
    store = MemoryStore(clock=clock, capacity=2)
    expired, standing = await make(store, a_key(), ttl=10), await make(store, a_key(), ttl=100)
    clock.now += 20
    await make(store, a_key())
    assert await store.get(standing.key) is not None
    assert await store.get(expired.key) is None
    await store.aclose()


async def test_adopting_at_capacity_evicts_nobody(clock: Clock) -> None:
    store = MemoryStore(clock=clock, capacity=2)
    claims = [await make(store, a_key()) for _ in range(2)]
    await store.create_or_get(claims[1].key, a_value("w-2"), 600)
    assert [await store.get(claim.key) for claim in claims] == claims
    await store.aclose()


async def test_renewing_for_ever_takes_no_more_memory(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    claims = [await make(store, a_key()) for _ in range(10)]
    for _ in range(1000):
        clock.now += 1
        for claim in claims:
            await store.renew(claim, 600)
    assert len(store._expiries) < 200
    assert [await store.close(claim) for claim in claims] == 10 * [CloseOutcome.CLOSED]
    await store.aclose()


async def test_a_subscriber_that_does_not_listen_gets_one_reset_for_all_it_missed() -> None:
    store = MemoryStore(mailbox_size=4)
    events = store.subscribe()
    assert await anext(events) == Reset()
    claims = [await make(store, a_key()) for _ in range(11)]
    for claim in claims[:4]:
        await store.close(claim)
    assert [await anext(events) for _ in range(4)] == [_deleted(claim) for claim in claims[:4]]
    for claim in claims[4:]:
        await store.close(claim)
    # The fifth of seven did not fit: a Reset for all up to it, then the rest.
    assert [await anext(events) for _ in range(3)] == [Reset(), _deleted(claims[9]), _deleted(claims[10])]
    await events.aclose()  # type: ignore[attr-defined]
    await store.aclose()


def _deleted(claim: Claim) -> Deleted:
    return Deleted(claim.key, before=claim.revision + 1)


async def test_nothing_is_left_running_after_aclose() -> None:
    store = MemoryStore()
    await make(store, a_key(), ttl=0.01)
    alarm = store._alarm
    assert alarm is not None
    await store.aclose()
    assert alarm.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_kind_that_nobody_watches_and_a_record_that_has_ended_leave_nothing(clock: Clock) -> None:
    registry = MemoryStore(clock=clock).registry
    watch = registry.watch("workers")
    await anext(watch)
    await registry.put("workers", "a", b"1", 10)
    clock.now += 9.5
    assert await registry.list("workers") == {"a": b"1"}
    clock.now += 0.5
    assert await registry.list("workers") == {}
    assert await anext(watch) == Removed("a"), "the last word of a name that waited"
    await watch.aclose()  # type: ignore[attr-defined]
    assert not registry._watchers
    assert not registry._records


async def test_a_rewind_is_not_forgotten_for_another_reset() -> None:
    mailbox: Mailbox[Deleted] = Mailbox(2)
    for event in (Reset(rewound=True), Reset(), Deleted("aa"), Deleted("bb"), Deleted("cc")):
        mailbox.put(event)
    assert [await anext(mailbox) for _ in range(2)] == [Reset(rewound=True), Deleted("cc")]
    mailbox.put(Reset())
    assert await anext(mailbox) == Reset()
