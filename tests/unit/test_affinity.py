"""Sessions on one replica and on several: every promise of app/sessions/affinity.py, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from app.errors import TurnError
from app.fleet.policies import rendezvous
from app.fleet.workers import Target, make_worker
from app.sessions.claims import StoreState
from app.sessions.placing import ANYWHERE, Placement
from backends.base import (
    LIFETIME,
    ClaimValue,
    Deleted,
    OutcomeUnknown,
    Reset,
    StoreUnavailable,
)
from backends.memory import MemoryStore
from tests.support.fakes import Undone, deleted, in_virtual_time, settle
from tests.support.replicas import (
    KEY,
    TTL,
    WORKERS,
    Replica,
    first_of,
    key_of,
    memory,
    running,
    scripted,
)
from tests.support.rows import rows

# -- resolving


@in_virtual_time
async def test_first_turn_creates_then_cached() -> None:
    async with running(memory()) as r:
        worker, how = await r.visit()
        assert how == "created"
        assert await r.visit() == (worker, "cached")


@in_virtual_time
async def test_hot_path_makes_no_store_call() -> None:
    store = scripted()
    async with running(store) as r:
        await r.visit()
        calls = store.calls.copy()
        for _ in range(1000):
            assert (await r.visit())[1] == "cached"
        assert store.calls == calls


@in_virtual_time
async def test_concurrent_first_turns_share_one_resolution() -> None:
    store = scripted()
    store.before["create"] = asyncio.Event()
    async with running(store) as r:
        turns = [asyncio.create_task(r.turn()) for _ in range(100)]
        await settle()
        assert sum(r.reserved) == 1
        store.before["create"].set()
        bound = await asyncio.gather(*turns)
        assert store.calls["create"] == 1
        assert {turn.target for turn in bound} == {bound[0].target}
        assert Counter(turn.how for turn in bound) == {"created": 1, "cached": 99}
        assert r.affinity.active_turns == 100
        assert sum(r.reserved) == 0
        for turn in bound:
            turn.release()


@in_virtual_time
async def test_waiters_leave_one_by_one_and_the_rest_are_served() -> None:
    store = scripted()
    store.before["create"] = asyncio.Event()
    async with running(store) as r:
        turns = [asyncio.create_task(r.turn()) for _ in range(5)]
        await settle()
        for gone in turns[:4]:
            gone.cancel()
            await settle()
            assert gone.cancelled()
        store.before["create"].set()
        served = await turns[4]
        assert store.calls["create"] == 1
        assert r.turns() == 1
        served.release()


@in_virtual_time
async def test_when_all_waiters_leave_the_resolution_ends_and_nothing_stays_reserved() -> None:
    store = scripted()
    store.before["create"] = asyncio.Event()
    async with running(store) as r:
        turns = [asyncio.create_task(r.turn()) for _ in range(5)]
        await settle()
        for turn in turns:
            turn.cancel()
        await settle()
        r.assert_quiet()
        assert len(asyncio.all_tasks()) - 1 == 3  # the affinity's two, and the scripted store's pump
        store.before.clear()
        assert (await r.visit())[1] == "created"


@in_virtual_time
async def test_newcomer_joins_a_resolution_that_is_being_cancelled() -> None:
    store = scripted()
    store.before["create"] = asyncio.Event()
    async with running(store) as r:
        first = asyncio.create_task(r.turn())
        await settle()
        first.cancel()
        await asyncio.sleep(0)  # it has left, its resolution has not ended yet
        second = asyncio.create_task(r.turn())
        await settle()
        store.before["create"].set()
        served = await second
        assert (served.how, r.turns()) == ("created", 1)
        served.release()


@in_virtual_time
async def test_failed_initialiser_hands_over() -> None:
    """The first turn's trouble is its own: a policy that fails once fails one turn."""
    calls = 0

    def flaky(candidates: Sequence[Target]) -> Target:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise TurnError("no_worker", "not this time")
        return candidates[0]

    store = scripted()
    async with running(store, policy=flaky) as r:
        turns = [asyncio.create_task(r.turn()) for _ in range(5)]
        results = await asyncio.gather(*turns, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        assert [error.code for error in failed if isinstance(error, TurnError)] == ["no_worker"]
        assert store.calls["create"] == 1
        for result in results:
            if not isinstance(result, BaseException):
                result.release()


@in_virtual_time
async def test_no_worker_fails_every_turn_and_leaves_nothing() -> None:
    async with running(memory(), workers=()) as r:
        results = await asyncio.gather(*(r.turn() for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, TurnError) and result.code == "no_worker" for result in results)


@in_virtual_time
async def test_loser_adopts_the_winner() -> None:
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    async with (
        running(one, name="r1", policy=first_of("a")) as r1,
        running(two, name="r2", policy=first_of("b")) as r2,
    ):
        (worker1, how1), (worker2, how2) = await asyncio.gather(r1.visit(), r2.visit())
        assert worker1 == worker2
        assert {how1, how2} == {"created", "stored"}


@in_virtual_time
async def test_many_replicas_many_sessions_never_split() -> None:
    inner = memory()
    rng = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        replicas = []
        for n in range(4):
            store = scripted(inner)
            store.jitter = lambda: rng.random() * 0.01
            replicas.append(await stack.enter_async_context(running(store, name=f"r{n}")))
        seen = await asyncio.gather(*(r.visit(key_of(s)) for s in range(100) for r in replicas for _ in range(2)))
        places: dict[int, set[str]] = {}
        for number, (worker, _) in enumerate(seen):
            places.setdefault(number // 8, set()).add(worker)
        assert all(len(workers) == 1 for workers in places.values())
        assert Counter(how for _, how in seen)["created"] == 100


@in_virtual_time
async def test_hint_is_used_only_when_there_is_no_claim() -> None:
    inner = memory()
    async with running(scripted(inner)) as r1, running(scripted(inner), name="r2") as r2:
        assert await r1.visit(placement=Placement((r1.target("c"),))) == ("c", "created")
        assert await r2.visit(placement=Placement((r2.target("a"),))) == ("c", "stored")
        assert await r1.visit(placement=Placement((r1.target("b"),))) == ("c", "cached")


@in_virtual_time
async def test_claims_being_made_count_as_load() -> None:
    store = scripted()
    store.before["create"] = asyncio.Event()
    async with running(store) as r:
        turns = [asyncio.create_task(r.turn(key_of(n))) for n in range(30)]
        await settle()
        assert r.reserved == [10, 10, 10]
        store.before["create"].set()
        for turn in await asyncio.gather(*turns):
            turn.release()


@in_virtual_time
async def test_rank_of_a_claim_is_kept_and_an_unknown_one_is_replaced() -> None:
    store = memory()
    async with running(store) as r:
        worker = r.target("a").worker
        worker.targets = (Target(worker, 0), Target(worker, 1))
        await store.create_or_get(key_of(0), ClaimValue(worker="a", rank=0), TTL)
        await store.create_or_get(key_of(1), ClaimValue(worker="a", rank=7), TTL)
        turn = await r.turn(key_of(0))
        assert (turn.target.rank, turn.how) == (0, "stored")
        turn.release()
        assert (await r.visit(key_of(1)))[1] == "rebound"


@in_virtual_time
async def test_claim_at_a_rank_that_is_gone_may_stay_at_its_only_worker() -> None:
    store = memory()
    async with running(store, workers=("a",)) as r:
        await store.create_or_get(KEY, ClaimValue(worker="a", rank=7), TTL)
        assert await r.visit() == ("a", "rebound")


# -- staying true


@in_virtual_time
async def test_entry_is_read_again_after_max_stale() -> None:
    store = scripted()
    async with running(store, max_stale=60.0) as r:
        await r.visit()
        await asyncio.sleep(59.0)
        assert (await r.visit())[1] == "cached"
        assert store.calls["get"] == 0
        await asyncio.sleep(1.5)
        assert (await r.visit())[1] == "stored"
        assert store.calls["get"] == 1


@in_virtual_time
async def test_missed_delete_does_not_outlive_max_stale() -> None:
    inner = memory()
    store = scripted(inner)
    store.deaf = True
    async with running(store, max_stale=60.0, policy=first_of("a")) as r:
        await r.visit()
        claim = await inner.get(KEY)
        assert claim is not None
        await inner.close(claim)
        await inner.create_or_get(KEY, ClaimValue(worker="b"), TTL)
        assert await r.visit() == ("a", "cached")  # nobody told
        for _ in range(100):  # a busy session must not keep itself fresh
            await asyncio.sleep(0.7)
            worker, _ = await r.visit()
        assert worker == "b"


@pytest.mark.parametrize("event", [Reset(), StoreUnavailable("lost")])
@in_virtual_time
async def test_reset_and_dead_watch_mean_read_before_use(event: Reset | StoreUnavailable) -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        for n in range(3):
            await r.visit(key_of(n))
        if isinstance(event, StoreUnavailable):
            store.watch_fault = event
        store.emit(event)
        await settle()
        assert r.affinity.watching is isinstance(event, Reset)
        for n in range(3):
            assert (await r.visit(key_of(n)))[1] == "stored"
        assert store.calls["get"] == 3
        again = [(await r.visit(key_of(n)))[1] for n in range(3)]
        # A reset is over when everything was read again; a dead watch is not.
        assert again == ["cached" if isinstance(event, Reset) else "stored"] * 3


@in_virtual_time
async def test_watch_is_begun_again() -> None:
    store = scripted()
    async with running(store) as r:
        store.watch_fault = StoreUnavailable("refused")
        store.drop_watch()
        await asyncio.sleep(10)
        assert not r.affinity.watching
        store.watch_fault = None
        await asyncio.sleep(2.1)
        assert r.affinity.watching


@in_virtual_time
async def test_fault_in_the_watch_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    """A store that breaks its contract must not leave entries proven."""
    store = scripted()
    async with running(store) as r:
        await r.visit()
        store.watch_fault = ZeroDivisionError()
        store.emit(ZeroDivisionError())
        await settle()
        assert not r.affinity.watching
        store.watch_fault = None
        await asyncio.sleep(3)
        assert r.affinity.watching
        assert (await r.visit())[1] == "stored"


@in_virtual_time
async def test_reset_while_a_claim_is_read_leaves_it_unproven() -> None:
    store = scripted()
    async with running(store) as r:
        store.after["create"] = asyncio.Event()
        turn = asyncio.create_task(r.visit())
        await settle()
        store.emit(Reset())
        await settle()
        store.after["create"].set()
        assert (await turn)[1] == "created"
        assert (await r.visit())[1] == "stored"


@in_virtual_time
async def test_delete_of_a_predecessor_is_ignored() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        await r.visit()
        claim = await inner.get(KEY)
        assert claim is not None
        store.emit(Deleted(KEY, before=claim.revision))
        await settle()
        assert (await r.visit())[1] == "cached"
        assert store.calls["get"] == 0


@pytest.mark.parametrize("ordered", [True, False])
@in_virtual_time
async def test_delete_of_an_idle_session_forgets_it(ordered: bool) -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        await r.visit()
        claim = await inner.get(KEY)
        assert claim is not None
        store.deaf = True
        await inner.close(claim)
        store.emit(deleted(claim) if ordered else Deleted(KEY))
        await settle()
        assert r.affinity.size == 0
        await inner.create_or_get(KEY, ClaimValue(worker="b"), TTL)
        assert await r.visit() == ("b", "stored")


@in_virtual_time
async def test_delete_of_an_active_session_makes_the_next_turn_read() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        turn = await r.turn()
        claim = await inner.get(KEY)
        assert claim is not None
        await inner.close(claim)
        await settle()
        await inner.create_or_get(KEY, ClaimValue(worker="b"), TTL)
        assert await r.visit() == ("b", "stored")
        assert r.affinity.active_turns == 0  # of what stands; the first turn's own was replaced
        turn.release()
        assert await r.visit() == ("b", "cached")


@pytest.mark.parametrize("ordered", [True, False])
@in_virtual_time
async def test_delete_during_a_resolution_leaves_its_answer_unproven(ordered: bool) -> None:
    """Read, then deleted, and the event overtakes the reply."""
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        store.after["create"] = asyncio.Event()
        turn = asyncio.create_task(r.turn())
        await settle()
        claim = await inner.get(KEY)
        assert claim is not None
        store.deaf = True
        await inner.close(claim)
        store.emit(deleted(claim) if ordered else Deleted(KEY))
        await settle()
        store.after["create"].set()
        served = await turn
        assert not r.known()
        served.release()
        assert (await r.visit())[1] == "created"


@in_virtual_time
async def test_delete_between_the_answer_and_its_waiters_is_not_lost() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        gate = store.after["create"] = asyncio.Event()
        turn = asyncio.create_task(r.turn())
        await settle()
        claim = await inner.get(KEY)
        assert claim is not None
        store.deaf = True
        await inner.close(claim)
        # Runs when the answer is there and no waiter has been woken yet.
        r.resolving().add_done_callback(lambda _: r.affinity._entries.deleted(deleted(claim)))
        gate.set()
        served = await turn
        assert not r.known()
        served.release()


@in_virtual_time
async def test_close_between_the_answer_and_its_waiters_waits_for_them() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        final = await r.turn(final=True)
        store.emit(Reset())
        await settle()
        gate = store.after["get"] = asyncio.Event()
        joining = asyncio.create_task(r.turn())
        await settle()

        def end_final(_: object) -> None:
            final.answered(200)
            final.release()

        r.resolving().add_done_callback(end_final)
        gate.set()
        joined = await joining
        assert r.turns() == 1
        assert store.calls["close"] == 0  # the last one out closes, and that is the joiner now
        joined.release()
        await settle()
        assert store.calls["close"] == 1
        assert await inner.get(KEY) is None


@in_virtual_time
async def test_final_turn_that_ends_while_another_reads_its_claim_leaves_the_close_to_it() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        final = await r.turn(final=True)
        store.emit(Reset())
        await settle()
        gate = store.before["get"] = asyncio.Event()
        joining = asyncio.create_task(r.turn())
        await settle()
        final.answered(200)
        final.release()
        await settle()
        assert store.calls["close"] == 0
        gate.set()
        (await joining).release()
        await settle()
        assert await inner.get(KEY) is None


@in_virtual_time
async def test_final_turn_that_ends_while_another_gives_up_is_closed_all_the_same() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        final = await r.turn(final=True)
        store.emit(Reset())
        await settle()
        store.before["get"] = asyncio.Event()
        joining = asyncio.create_task(r.turn())
        await settle()
        final.answered(200)
        final.release()
        joining.cancel()
        await settle()
        assert await inner.get(KEY) is None


@in_virtual_time
async def test_changed_stamp_means_read_again() -> None:
    inner = memory()
    store = scripted(inner, stamps=True)
    store.deaf = True
    async with running(store, policy=first_of("a")) as r:
        await r.visit()
        assert (await r.visit())[1] == "cached"
        claim = await inner.get(KEY)
        assert claim is not None
        await inner.close(claim)
        await inner.create_or_get(KEY, ClaimValue(worker="b"), TTL)
        assert await r.visit() == ("b", "stored")
        assert await r.visit() == ("b", "cached")


@in_virtual_time
async def test_stamp_that_changes_during_the_read_counts_as_changed() -> None:
    inner = memory()
    store = scripted(inner, stamps=True)
    store.deaf = True
    async with running(store, policy=first_of("a")) as r:
        store.after["create"] = asyncio.Event()
        turn = asyncio.create_task(r.visit())
        await settle()
        claim = await inner.get(KEY)
        assert claim is not None
        await inner.close(claim)
        store.after["create"].set()
        await turn
        assert (await r.visit())[1] == "created"


@in_virtual_time
async def test_claim_that_may_have_expired_is_read_before_use() -> None:
    store = scripted()
    store.broken["renew"] = OutcomeUnknown("never")
    async with running(store, ttl=10.0, max_stale=60.0) as r:
        await r.visit()
        store.deaf = True
        await asyncio.sleep(10.0 * LIFETIME + 0.1)
        assert not r.known()
        assert (await r.visit())[1] == "created"


# -- the bound of the cache


@in_virtual_time
async def test_cache_is_bounded_by_use_and_falls_back_to_reads() -> None:
    store = scripted()
    async with running(store, capacity=10) as r:
        places = {n: (await r.visit(key_of(n)))[0] for n in range(20)}
        assert r.affinity.size == 10
        assert (await r.visit(key_of(10)))[1] == "cached"  # now the youngest
        await r.visit(key_of(100))
        assert (await r.visit(key_of(10)))[1] == "cached"
        assert await r.visit(key_of(11)) == (places[11], "stored")
        for n in range(20):
            assert (await r.visit(key_of(n)))[0] == places[n]
        assert r.affinity.size == 10


@in_virtual_time
async def test_active_sessions_are_never_evicted() -> None:
    async with running(scripted(), capacity=5) as r:
        held = [await r.turn(key_of(n)) for n in range(10)]
        assert r.affinity.size == 10
        for n in range(20, 30):
            await r.visit(key_of(n))
        for n, turn in enumerate(held):
            assert r.known(key_of(n))
            assert r.turns(key_of(n)) == 1
            turn.answered(200)
            turn.release()
        assert r.affinity.size == 5


# -- a claim's life


@in_virtual_time
async def test_claim_lives_its_ttl_after_the_last_turn_and_is_renewed_sparingly() -> None:
    """Weeks of a session that is now busy, now quiet, sometimes with turns of hours."""
    inner = memory()
    store = scripted(inner)
    loop = asyncio.get_running_loop()
    rng = random.Random(7)
    async with running(store) as r:
        began = loop.time()
        placed = 0
        for _ in range(1500):
            turn = await r.turn()
            placed += turn.how == "created"
            await asyncio.sleep(rng.choice([0.1, 1, 10, 100, 10_000 * (rng.random() < 0.02)]))
            turn.answered(200)
            turn.release()
            await settle()
            claim = await inner.get(KEY)
            assert claim is not None
            assert claim.expires_at >= loop.time() + TTL - 0.001
            assert claim.expires_at <= loop.time() + LIFETIME * TTL
            await asyncio.sleep(rng.random() ** 2 * TTL * 0.999)
        lasted = loop.time() - began
        assert lasted > 10 * 86400
        assert placed == 1
        assert store.calls["renew"] <= 4 * lasted / TTL + 1


@in_virtual_time
async def test_busy_session_is_renewed_at_most_four_times_per_ttl() -> None:
    store = scripted()
    loop = asyncio.get_running_loop()
    async with running(store) as r:
        began = loop.time()
        while loop.time() < began + 10 * TTL:
            await r.visit()
            await asyncio.sleep(5)
        assert 35 <= store.calls["renew"] <= 40


@in_virtual_time
async def test_who_only_uses_a_session_is_no_turn_of_it_and_keeps_its_claim() -> None:
    """As a prompt does that is computed where its session's were."""
    inner = memory()
    store = scripted(inner)
    loop = asyncio.get_running_loop()
    async with running(store) as r:
        assert r.affinity.used(KEY) is None
        maker = await r.turn()
        assert r.affinity.used(KEY) is None, "no turn of it was answered: it goes if this one fails"
        maker.answered(200)
        assert r.affinity.used(KEY) is maker.target
        maker.release()
        began = loop.time()
        uses = 0
        while loop.time() < began + 5 * TTL:
            if r.affinity.used(KEY) is None:
                assert await r.visit() == (maker.target.worker.name, "stored")  # it was to be read again
            uses += 1
            assert r.turns() == 0
            await settle()
            claim = await inner.get(KEY)
            assert claim is not None
            assert claim.expires_at >= loop.time() + TTL - 5
            await asyncio.sleep(5)
        assert store.calls["renew"] <= 20
        assert store.calls["get"] + store.calls["create_or_get"] < uses / 4
        assert claim is not None
        await inner.close(claim)
        await settle()
        assert r.affinity.used(KEY) is None
        last = await r.turn(final=True)
        last.answered(200)
        assert r.affinity.used(KEY) is None, "it ends"
        last.release()


@in_virtual_time
async def test_long_turn_keeps_its_claim() -> None:
    inner = memory()
    store = scripted(inner)
    loop = asyncio.get_running_loop()
    async with running(store) as r:
        turn = await r.turn()
        first = await inner.get(KEY)
        assert first is not None
        began = loop.time()
        while loop.time() < began + 20 * TTL:
            await asyncio.sleep(100)
            claim = await inner.get(KEY)
            assert claim is not None
            assert claim.value.nonce == first.value.nonce
            assert claim.expires_at > loop.time() + 0.9 * TTL
        turn.release()
        await settle()
        assert store.calls["renew"] <= 4 * 20 + 2


@in_virtual_time
async def test_idle_session_expires() -> None:
    inner = memory()
    async with running(scripted(inner)) as r:
        await r.visit()
        await asyncio.sleep(LIFETIME * TTL + 1)
        assert await inner.get(KEY) is None
        assert r.affinity.size == 0


@in_virtual_time
async def test_lost_claim_makes_the_next_turn_read() -> None:
    inner = memory()
    store = scripted(inner)
    store.deaf = True
    async with running(store, max_stale=1e9, policy=first_of("a")) as r:
        await r.visit()
        claim = await inner.get(KEY)
        assert claim is not None
        await inner.close(claim)
        await inner.create_or_get(KEY, ClaimValue(worker="b"), TTL)
        await asyncio.sleep(TTL / 2)
        assert await r.visit() == ("a", "cached")  # this one renews, and is told
        await settle()
        assert await r.visit() == ("b", "stored")
        assert store.calls["renew"] == 1


@in_virtual_time
@pytest.mark.parametrize("at", ["the replica that made it", "another one"])
@pytest.mark.parametrize("in_time", [True, False])
async def test_no_turn_goes_by_a_claim_that_ends_beside_it(at: str, in_time: bool) -> None:
    """Else the session's next turn, a moment later, finds none and goes elsewhere."""
    inner = memory()
    stores = scripted(inner), scripted(inner)
    loop = asyncio.get_running_loop()
    async with running(stores[0], max_stale=1e9) as one, running(stores[1]) as other:
        await one.visit()
        first = await inner.get(KEY)
        assert first is not None
        left = 0.3
        await asyncio.sleep(first.expires_at - loop.time() - left)
        replica, store = (one, stores[0]) if at == "the replica that made it" else (other, stores[1])
        store.before["renew"] = asyncio.Event()
        turn = asyncio.create_task(replica.visit())
        await asyncio.sleep(0.1 if in_time else left + 0.1)
        store.before["renew"].set()
        worker, how = await turn
        assert how == ("stored" if in_time else "created")
        stands = await inner.get(KEY)
        assert stands is not None
        assert stands.expires_at >= loop.time() + TTL
        assert (stands.revision == first.revision) is in_time
        await asyncio.sleep(left)
        assert await replica.visit() == (worker, "cached")
        assert (await (other if replica is one else one).visit())[0] == worker


@in_virtual_time
async def test_failed_renewal_is_tried_again() -> None:
    inner = memory()
    store = scripted(inner)
    loop = asyncio.get_running_loop()
    async with running(store) as r:
        turn = await r.turn()
        store.broken["renew"] = Undone("late")
        await asyncio.sleep(TTL)
        store.broken.clear()
        await asyncio.sleep(60)
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.expires_at > loop.time() + TTL
        turn.release()


# -- the final turn


@in_virtual_time
async def test_final_close_is_awaited_and_the_next_turn_is_new() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        turn = await r.turn(final=True)
        turn.answered(200)
        await turn.close()
        assert await inner.get(KEY) is None
        turn.release()
        await settle()
        assert store.calls["close"] == 1
        assert (await r.visit())[1] == "created"
        assert +Counter(r.metrics.closes.cells) == {("closed",): 1}


@in_virtual_time
async def test_last_one_out_closes_and_joiners_join_meanwhile() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        final = await r.turn(final=True)
        other = await r.turn()
        final.answered(200)
        final.release()
        store.emit(Reset())  # whatever else is known, the turns that are here decide where
        await settle()
        joiner = await r.turn()
        assert (joiner.target, joiner.how, r.turns()) == (final.target, "cached", 2)
        other.release()
        await settle()
        assert await inner.get(KEY) is not None
        joiner.release()
        await settle()
        assert await inner.get(KEY) is None
        assert store.calls["close"] == 1


@in_virtual_time
async def test_close_is_bounded_then_tried_until_it_is_done() -> None:
    inner = memory()
    store = scripted(inner)
    loop = asyncio.get_running_loop()
    async with running(store, close_limit=2.0) as r:
        turn = await r.turn(final=True)
        turn.answered(200)
        store.broken["close"] = Undone("late")
        began = loop.time()
        await turn.close()
        assert loop.time() - began == pytest.approx(2.0)
        turn.release()
        assert r.affinity.pending_closes == 1
        await asyncio.sleep(60)
        assert await inner.get(KEY) is not None
        store.broken.clear()
        await asyncio.sleep(6)
        assert await inner.get(KEY) is None
        assert r.affinity.pending_closes == 0


@in_virtual_time
async def test_pending_close_is_given_up_when_the_claim_has_expired() -> None:
    store = scripted()
    async with running(store, ttl=60.0) as r:
        turn = await r.turn(final=True)
        turn.answered(200)
        store.broken["close"] = Undone("late")
        await turn.close()
        turn.release()
        await asyncio.sleep(LIFETIME * 60 + 10)
        assert r.affinity.pending_closes == 0
        assert +Counter(r.metrics.closes.cells) == {("expired",): 1}


@in_virtual_time
async def test_late_close_cannot_remove_a_successor() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        turn = await r.turn(final=True)
        old = await inner.get(KEY)
        assert old is not None
        gate = store.before["close"] = asyncio.Event()
        turn.answered(200)
        await turn.close()
        turn.release()
        await inner.close(old)  # somebody else did
        successor = (await inner.create_or_get(KEY, ClaimValue(worker="b"), TTL)).claim
        gate.set()
        await settle()
        assert await inner.get(KEY) == successor
        assert +Counter(r.metrics.closes.cells) == {("superseded",): 1}


@in_virtual_time
async def test_new_turn_waits_for_the_pending_close_and_gets_a_new_claim() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        turn = await r.turn(final=True)
        old = await inner.get(KEY)
        assert old is not None
        gate = store.before["close"] = asyncio.Event()
        turn.answered(200)
        turn.release()
        await settle()
        next_turn = asyncio.create_task(r.turn())
        await settle()
        assert store.calls["create"] == 1
        assert not next_turn.done()
        gate.set()
        turn = await next_turn
        assert turn.how == "created"
        standing = await inner.get(KEY)
        assert standing is not None
        assert standing.revision != old.revision
        turn.release()


@in_virtual_time
async def test_close_whose_reply_was_lost_is_done_once() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        turn = await r.turn(final=True)
        store.lost_replies["close"] = 1
        turn.answered(200)
        await turn.close()
        turn.release()
        assert await inner.get(KEY) is None
        assert +Counter(r.metrics.closes.cells) == {("gone",): 1}


@in_virtual_time
async def test_aclose_finishes_pending_closes_and_leaves_no_task() -> None:
    inner = memory()
    store = scripted(inner)
    r = Replica(store, close_limit=2.0)
    r.affinity.start()
    for n in range(10):
        turn = await r.turn(key_of(n), final=True)
        turn.answered(200)
        store.next_faults.setdefault("close", deque()).append(Undone("late"))
        turn.release()
    await r.affinity.aclose()
    assert [await inner.get(key_of(n)) for n in range(10)] == [None] * 10
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_aclose_ends_closes_that_hang_and_their_successors() -> None:
    store = scripted()
    r = Replica(store, close_limit=2.0)
    r.affinity.start()
    store.before["close"] = asyncio.Event()
    for _ in range(3):  # each waits for the one before
        turn = await r.turn(final=True)
        turn.answered(200)
        turn.release()
        await asyncio.sleep(3)
    await r.affinity.aclose()
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}


ENDS = (200, 204, 302, 400, 404, 422)
KEEPS = (408, 409, 425, 429, 500, 502, 503, 504)


@rows(
    ("status", "final", "who"),
    itertools.product([*ENDS, *KEEPS], [True, False], ["the worker", "we before it is bound", "we after it is bound"]),
)
@in_virtual_time
async def test_which_answers_end_a_session(status: int, final: bool, who: str) -> None:
    inner = memory()
    async with running(scripted(inner)) as r:
        await r.visit()
        turn = r.affinity.session(KEY, final=final)
        if who != "we before it is bound":
            assert turn.bind_cached()
        if who == "the worker":
            turn.answered(status)
            assert turn.holds_end is (final and status in ENDS)
            await turn.close()
        else:
            await turn.refused(status)
        assert (await inner.get(KEY) is None) is (final and status in ENDS)  # before the turn is over
        turn.release()
        await settle()
        assert (await inner.get(KEY) is None) is (final and status in ENDS)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("bound", [True, False])
@in_virtual_time
async def test_final_turn_whose_client_left_ends_its_session(final: bool, bound: bool) -> None:
    inner = memory()
    async with running(scripted(inner)) as r:
        await r.visit()
        turn = r.affinity.session(KEY, final=final)
        assert not bound or turn.bind_cached()
        await turn.left()
        turn.release()
        await settle()
        assert (await inner.get(KEY) is None) is final


@in_virtual_time
async def test_session_that_cannot_be_ended_ends_by_its_ttl() -> None:
    store = scripted()
    async with running(store) as r:
        store.go_away()
        turn = r.affinity.session(KEY, final=True)
        await turn.refused(404)  # raises nothing
        await turn.left()
        turn.release()


@in_virtual_time
async def test_end_is_not_held_while_another_turn_is_here() -> None:
    inner = memory()
    async with running(scripted(inner)) as r:
        final, other = await r.turn(final=True), await r.turn()
        final.answered(200)
        assert not final.holds_end
        await final.close()
        assert await inner.get(KEY) is not None
        final.release()
        assert other.holds_end  # it is the last one now
        await other.close()
        assert await inner.get(KEY) is None
        other.release()


@in_virtual_time
async def test_turn_is_given_back_once() -> None:
    async with running(scripted()) as r:
        one, two = await r.turn(), await r.turn()
        one.release()
        one.release()
        assert r.turns() == 1
        two.release()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps", range(8))
@in_virtual_time
async def test_turn_that_is_over_before_it_is_bound_holds_nothing(steps: int, known: bool) -> None:
    """Its task is cancelled, or not even that, at any step of its way to the answer."""
    store = scripted()
    async with running(store) as r:
        if known:
            await r.visit()
            store.emit(Reset())
            await settle()
        for cancelled in (True, False):
            turn = r.affinity.session(KEY, final=False)
            binding = asyncio.create_task(turn.bind(ANYWHERE))
            for _ in range(steps):
                await asyncio.sleep(0)
            turn.release()
            if cancelled:
                binding.cancel()
            await settle()
            assert binding.done()
            r.assert_quiet()


@pytest.mark.parametrize("steps", range(8))
@in_virtual_time
async def test_turn_that_is_over_before_it_is_moved_holds_nothing(steps: int) -> None:
    async with running(scripted(), policy=first_of("a")) as r:
        turn, other = await r.turn(final=True), await r.turn()
        turn.answered(200)
        moving = asyncio.create_task(turn.rebind(frozenset({"a"}), ANYWHERE))
        for _ in range(steps):
            await asyncio.sleep(0)
        turn.release()
        moving.cancel()
        await settle()
        other.release()
        await settle()
        r.assert_quiet()


# -- the store away


@in_virtual_time
async def test_ambiguous_create_is_recognised_as_our_own() -> None:
    inner = memory()
    store = scripted(inner)
    store.lost_replies["create"] = 2
    async with running(store) as r:
        worker, how = await r.visit()
        assert how == "created"
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.value.worker == worker
        assert r.affinity.state is StoreState.UP


@in_virtual_time
async def test_outage_places_new_sessions_alike_on_every_replica() -> None:
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    async with running(one) as r1, running(two, workers=("c", "b", "a")) as r2:
        one.go_away()
        two.go_away()
        places = []
        for n in range(50):
            worker, how = await r1.visit(key_of(n))
            assert (worker, how) == await r2.visit(key_of(n))
            assert how == "degraded"
            assert worker == rendezvous(key_of(n), r1.fleet.candidates()).worker.name
            places.append(worker)
        assert min(Counter(places).values()) > 5
        assert r1.affinity.state is StoreState.AWAY


@in_virtual_time
async def test_outage_moves_no_known_session() -> None:
    store = scripted()
    async with running(store) as r:
        places = [(await r.visit(key_of(n)))[0] for n in range(20)]
        store.go_away()
        await asyncio.sleep(300)  # far beyond max_stale
        for n in range(20):
            assert await r.visit(key_of(n)) == (places[n], "cached")
        assert r.metrics.unproven.cells[()] == 20


@in_virtual_time
async def test_unproven_entry_is_used_as_it_is_only_if_the_store_cannot_answer() -> None:
    inner = memory()
    store = scripted(inner)
    store.deaf = True
    async with running(store, policy=first_of("a")) as r:
        await r.visit()
        claim = await inner.get(KEY)
        assert claim is not None
        await inner.close(claim)
        await inner.create_or_get(KEY, ClaimValue(worker="b"), TTL)
        store.watch_fault = StoreUnavailable("refused")
        store.drop_watch()
        await settle()
        store.broken["all"] = StoreUnavailable
        assert await r.visit() == ("a", "cached")
        assert r.metrics.unproven.cells[()] == 1
        store.broken.clear()
        await asyncio.sleep(1)
        assert await r.visit() == ("b", "stored")
        assert r.metrics.unproven.cells[()] == 1


@in_virtual_time
async def test_refuse_mode_refuses_new_sessions_and_keeps_known_ones() -> None:
    store = scripted()
    async with running(store, refuse_on_outage=True) as r:
        worker, _ = await r.visit(key_of(1))
        store.go_away()
        await settle()
        for _ in range(3):
            with pytest.raises(TurnError) as caught:
                await r.visit(key_of(2))
            assert caught.value.code == "store_unavailable"
        assert await r.visit(key_of(1)) == (worker, "cached")
        store.return_()
        await asyncio.sleep(2)
        assert (await r.visit(key_of(2)))[1] == "created"


@in_virtual_time
async def test_degraded_sessions_are_claimed_where_they_are_when_the_store_returns() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        store.go_away()
        places = {n: (await r.visit(key_of(n)))[0] for n in range(100)}
        held = await r.turn(key_of(0))
        store.return_()
        await asyncio.sleep(3)
        assert r.affinity.state is StoreState.UP
        for n, worker in places.items():
            claim = await inner.get(key_of(n))
            assert claim is not None
            assert claim.value.worker == worker
        held.release()  # the running turn's session was claimed as well
        await r.visit(key_of(1))  # which reads it, unless the watch was back before the claims were made
        assert (await r.visit(key_of(1)))[1] == "cached"


@in_virtual_time
async def test_reconciliation_adopts_what_others_claimed_first() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        store.go_away()
        worker, _ = await r.visit()
        other = next(name for name in WORKERS if name != worker)
        await inner.create_or_get(KEY, ClaimValue(worker=other), TTL)
        held = await r.turn()
        store.return_()
        await asyncio.sleep(3)
        assert (await r.visit())[0] == other
        held.release()  # of the entry that was replaced
        assert r.affinity.size == 1


@in_virtual_time
async def test_pending_closes_are_retried_when_the_store_returns() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        turn = await r.turn(final=True)
        store.go_away()
        turn.answered(200)
        turn.release()
        await asyncio.sleep(100)
        assert await inner.get(KEY) is not None
        store.return_()
        await asyncio.sleep(2)
        assert await inner.get(KEY) is None


@in_virtual_time
async def test_renewals_that_an_outage_prevented_are_made_when_the_store_returns() -> None:
    """Otherwise an idle session's claim would end before its TTL, counted from a turn within the outage, was over."""
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        await r.visit()
        await asyncio.sleep(0.9 * TTL)
        store.go_away()
        assert (await r.visit())[1] == "cached"
        await asyncio.sleep(0.1 * TTL)
        store.return_()
        await asyncio.sleep(0.8 * TTL)
        assert await inner.get(KEY) is not None


@in_virtual_time
async def test_read_only_store_still_tells_where_sessions_are() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        await inner.create_or_get(key_of(1), ClaimValue(worker="c"), TTL)
        store.broken |= {"create": StoreUnavailable("full"), "check": StoreUnavailable("full")}
        assert (await r.visit(key_of(2)))[1] == "degraded"
        await asyncio.sleep(1)
        assert r.affinity.state is StoreState.READ_ONLY
        assert await r.visit(key_of(1)) == ("c", "stored")
        creates = store.calls["create"]
        assert (await r.visit(key_of(3)))[1] == "degraded"
        assert store.calls["create"] == creates
        store.go_away()
        await asyncio.sleep(2)
        assert r.affinity.state.value == "away"
        store.return_()
        await asyncio.sleep(3)
        for n in (2, 3):
            assert await inner.get(key_of(n)) is not None


@in_virtual_time
async def test_each_change_of_the_store_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="coatcheck.affinity")
    store = scripted()
    async with running(store) as r:
        for _ in range(3):
            store.go_away()
            await asyncio.gather(*(r.visit(key_of(n)) for n in range(50)))
            await asyncio.sleep(30)
            await asyncio.gather(*(r.visit(key_of(n)) for n in range(50)))
            store.return_()
            await asyncio.sleep(5)
        # Away, its watch lost, back: three lines for each outage, whatever the traffic.
        assert Counter(record.levelname for record in caplog.records) == {"ERROR": 3, "WARNING": 6}


@in_virtual_time
async def test_fault_in_the_stores_check_does_not_end_the_waiting_for_it() -> None:
    store = scripted()
    async with running(store) as r:
        store.go_away()
        store.broken["check"] = ZeroDivisionError
        await r.visit()
        await asyncio.sleep(10)
        store.return_()
        await asyncio.sleep(3)
        assert r.affinity.state is StoreState.UP


# -- rebinding


@in_virtual_time
async def test_rebind_moves_the_session_once_and_everybody_with_it() -> None:
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    async with running(one, policy=first_of("a")) as r1, running(two, policy=first_of("b"), name="r2") as r2:
        turns = [await r.turn() for r in (r1, r2) for _ in range(5)]
        assert {turn.target.worker.name for turn in turns} == {"a"}
        await asyncio.gather(*(turn.rebind(frozenset({"a"}), ANYWHERE) for turn in turns))
        [worker] = {turn.target.worker.name for turn in turns}
        assert {turn.how for turn in turns} == {"rebound"}
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.value.worker == worker != "a"
        assert claim.value.generation == 1
        assert r1.turns() == r1.affinity.active_turns == 5
        assert r2.turns() == r2.affinity.active_turns == 5
        for turn in turns:
            turn.answered(200)
            turn.release()
        assert r1.turns() == r2.turns() == 0
        assert await r1.visit() == await r2.visit()


@in_virtual_time
async def test_rebind_excludes_every_lost_worker() -> None:
    inner = memory()
    async with running(scripted(inner), policy=first_of("a")) as r:
        turn = await r.turn()
        await turn.rebind(frozenset({"a"}), ANYWHERE)
        second = turn.target.worker.name
        await turn.rebind(frozenset({"a", second}), ANYWHERE)
        assert (turn.target.worker.name, turn.how) == (({"b", "c"} - {second}).pop(), "rebound")
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.value.generation == 2
        with pytest.raises(TurnError) as caught:
            await turn.rebind(frozenset(WORKERS), ANYWHERE)
        assert caught.value.code == "no_worker"
        assert r.turns() == 1  # still the turn's
        turn.release()


@in_virtual_time
async def test_a_session_is_moved_six_times_in_thirty_seconds_and_not_once_more() -> None:
    async with running(memory()) as r:
        turn = await r.turn()

        async def move() -> None:
            left = turn.target.worker.name
            await turn.rebind(frozenset({left}), ANYWHERE)
            assert turn.target.worker.name != left

        began = asyncio.get_running_loop().time()
        for _ in range(6):
            await move()
            await asyncio.sleep(4)
        await asyncio.sleep(began + 29.9 - asyncio.get_running_loop().time())
        stays = turn.target
        with pytest.raises(TurnError, match="6 times within 30 s"):
            await move()
        assert turn.target is stays
        await asyncio.sleep(0.2)
        await move()  # the first one is long enough ago
        with pytest.raises(TurnError, match="6 times within 30 s"):
            await move()
        turn.release()


@in_virtual_time
async def test_rebind_that_is_cancelled_leaves_the_old_hold() -> None:
    store = scripted()
    async with running(store, policy=first_of("a")) as r:
        turn = await r.turn()
        for op in ("close", "create"):
            store.before[op] = asyncio.Event()
            moving = asyncio.create_task(turn.rebind(frozenset({"a"}), ANYWHERE))
            await settle()
            moving.cancel()
            await settle()
            assert moving.cancelled()
            assert r.turns() == 1
            store.before.clear()
        assert sum(r.reserved) == 0
        turn.release()
        assert (await r.visit())[1] in ("created", "stored")


@in_virtual_time
async def test_rebind_keeps_the_pending_close() -> None:
    inner = memory()
    async with running(scripted(inner), policy=first_of("a")) as r:
        final = await r.turn(final=True)
        other = await r.turn()
        final.answered(200)
        final.release()
        await other.rebind(frozenset({"a"}), ANYWHERE)
        assert other.holds_end
        other.release()
        await settle()
        assert await inner.get(KEY) is None


@in_virtual_time
async def test_rebind_without_a_store_is_degraded_and_alike_on_every_replica() -> None:
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    async with running(one, policy=first_of("a")) as r1, running(two, name="r2") as r2:
        turn1, turn2 = await r1.turn(), await r2.turn()
        one.go_away()
        two.go_away()
        await turn1.rebind(frozenset({"a"}), ANYWHERE)
        await turn2.rebind(frozenset({"a"}), ANYWHERE)
        assert turn1.how == "degraded"
        assert turn1.target.worker.name == turn2.target.worker.name != "a"
        turn1.release()
        turn2.release()


@in_virtual_time
async def test_claim_at_an_unknown_worker_is_replaced() -> None:
    inner = memory()
    async with running(scripted(inner)) as r:
        await inner.create_or_get(KEY, ClaimValue(worker="gone", generation=3), TTL)
        worker, how = await r.visit()
        assert how == "rebound"
        claim = await inner.get(KEY)
        assert claim is not None
        assert (claim.value.worker, claim.value.generation) == (worker, 4)
        assert await r.visit() == (worker, "cached")


@in_virtual_time
async def test_replacing_a_claim_adopts_whoever_was_first() -> None:
    """Two replicas find the same claim of a worker that is gone."""
    inner = memory()
    await inner.create_or_get(KEY, ClaimValue(worker="gone"), TTL)
    rng = random.Random(3)
    async with (
        running(scripted(inner), policy=first_of("a")) as r1,
        running(scripted(inner), policy=first_of("b")) as r2,
    ):
        for r in (r1, r2):
            r.store.jitter = lambda: rng.random()  # type: ignore[union-attr]
        (worker1, _), (worker2, _) = await asyncio.gather(r1.visit(), r2.visit())
        assert worker1 == worker2
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.value.generation == 1


@in_virtual_time
async def test_worker_that_left_the_fleet_is_not_used_from_the_cache() -> None:
    async with running(scripted(), policy=first_of("a")) as r:
        await r.visit()
        r.target("a").worker.dismiss()
        assert not r.known()


@in_virtual_time
async def test_worker_that_came_back_under_its_name_has_its_sessions() -> None:
    """Another object, at another address perhaps: what is cached leads there, and not to the one that left."""
    async with running(scripted(), policy=first_of("a")) as r:
        await r.visit()
        old = r.target("a").worker
        moved = make_worker("http://elsewhere:1", name="a", connect_limit=1, idle_limit=1)
        r.fleet.put(moved)
        assert not old.known
        for how in ("stored", "cached"):
            binding = r.affinity.session(KEY, final=False)
            if not binding.bind_cached():
                await binding.bind(ANYWHERE)
            assert (binding.target.worker, binding.how) == (moved, how)
            binding.release()


@in_virtual_time
async def test_worker_that_another_replica_heard_of_first_is_waited_for_and_keeps_its_session() -> None:
    inner = MemoryStore(clock=asyncio.get_running_loop().time)
    async with running(scripted(inner), policy=first_of("d"), workers="abcd") as r1, running(scripted(inner)) as r2:
        assert (await r1.visit())[0] == "d"
        looked = 0

        def look() -> None:
            nonlocal looked
            looked += 1
            asyncio.get_running_loop().call_later(
                1.0, r2.fleet.put, make_worker("http://d:1", name="d", connect_limit=1, idle_limit=1)
            )

        r2.fleet.look = look
        assert await r2.visit() == ("d", "stored")
        assert looked == 1
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.value.generation == 0


@in_virtual_time
async def test_worker_that_nobody_has_heard_of_is_lost_in_the_end() -> None:
    inner = MemoryStore(clock=asyncio.get_running_loop().time)
    async with running(scripted(inner), policy=first_of("d"), workers="abcd") as r1, running(scripted(inner)) as r2:
        await r1.visit()
        r2.fleet.look = lambda: None
        began = asyncio.get_running_loop().time()
        worker, how = await r2.visit()
        assert how == "rebound"
        assert worker in WORKERS
        assert 1 < asyncio.get_running_loop().time() - began < 3


# -- anything, in any order


class _Faults:
    """One call in ten fails, in each of the ways there are."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, op: str) -> Exception | None:
        if self._rng.random() > 0.1:
            return None
        kinds: list[Exception] = [StoreUnavailable("no"), StoreUnavailable("no")]
        if op in ("create", "close", "renew"):
            kinds += [OutcomeUnknown("done"), Undone("not done")]
        return self._rng.choice(kinds)


@pytest.mark.parametrize("seed", range(6))
@in_virtual_time
async def test_every_counter_returns_to_zero_after_anything(seed: int) -> None:
    """Hundreds of turns on three replicas: finals, cancels, lost workers, faults of the store and its watch."""
    rng = random.Random(seed)
    inner = MemoryStore(clock=asyncio.get_running_loop().time, mailbox_size=8)
    stores = [scripted(inner, stamps=bool(seed % 2)) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        replicas = []
        for n, store in enumerate(stores):
            store.jitter = lambda: rng.choice([0, 0, rng.random() * 0.05, rng.random() * 2])
            store.chance = _Faults(rng)
            replicas.append(
                await stack.enter_async_context(running(store, name=f"r{n}", capacity=5, ttl=60.0, max_stale=5.0))
            )

        async def turn(r: Replica, key: str) -> None:
            await asyncio.sleep(rng.random() * 60)
            bound = await r.turn(key, final=rng.random() < 0.3)
            try:
                if rng.random() < 0.2:
                    lost = frozenset({bound.target.worker.name})
                    with contextlib.suppress(TurnError):
                        await bound.rebind(lost, ANYWHERE)
                        assert bound.target.worker.name not in lost
                await asyncio.sleep(rng.random() ** 4 * 100)
                bound.answered(200)
                if rng.random() < 0.7:
                    await bound.close()
            finally:
                bound.release()

        async def trouble() -> None:
            while True:
                await asyncio.sleep(rng.random() * 10)
                store = rng.choice(stores)
                whatever: list[Callable[[], object]] = [store.drop_watch, store.go_away, store.return_]
                whatever.append(functools.partial(store.emit, Reset()))
                rng.choice(whatever)()

        troubling = asyncio.create_task(trouble())
        turns = [asyncio.create_task(turn(rng.choice(replicas), key_of(rng.randrange(12)))) for _ in range(400)]
        for task in turns:
            if rng.random() < 0.3:
                asyncio.get_running_loop().call_later(rng.random() * 100, task.cancel)
        results = await asyncio.gather(*turns, return_exceptions=True)
        troubling.cancel()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                assert isinstance(result, TurnError), repr(result)
        for store in stores:
            store.return_()
            store.chance = store.jitter = None
        await asyncio.sleep(200)
        for r in replicas:
            r.assert_quiet()
            assert r.affinity.pending_closes == 0
            assert r.affinity.size <= 5
            assert r.affinity.state is StoreState.UP
        # And the replicas agree again, on every session.
        for n in range(12):
            assert len({(await r.visit(key_of(n)))[0] for r in replicas}) == 1
