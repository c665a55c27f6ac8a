"""Sessions while a store answers late, seldom or not at all, and after it: the promises of app/sessions/claims.py,
resolver.py and upkeep.py, in virtual time. What counts is where turns were served."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from app.errors import TurnError
from app.fleet.policies import rendezvous
from app.sessions.affinity import Binding
from app.sessions.claims import StoreState
from app.sessions.endings import Ending, EndingFiles
from app.sessions.peers import Ask
from app.sessions.placing import ANYWHERE, Placement
from backends.base import Claim, ClaimValue, CloseOutcome, OutcomeUnknown, Reset, StoreUnavailable
from backends.memory import MemoryStore
from tests.support.fakes import ScriptedStore, in_virtual_time, settle, stall
from tests.support.replicas import KEY, TTL, WALL, Replica, first_of, key_of, memory, running, scripted

DEADLINE = 2.0


def now() -> float:
    return asyncio.get_running_loop().time()


def hash_of(r: Replica, key: str = KEY) -> str:
    return rendezvous(key, r.fleet.candidates()).worker.name


def key_hashed_to(r: Replica, worker: str, start: int = 0) -> str:
    return next(key for key in map(key_of, range(start, start + 1000)) if hash_of(r, key) == worker)


class Served:
    """Where the turns of each session were served, in their order."""

    def __init__(self) -> None:
        self.workers: dict[str, list[str]] = defaultdict(list)

    async def visit(self, r: Replica, key: str) -> None:
        worker, _ = await r.visit(key)
        self.workers[key].append(worker)

    async def visit_all(self, replicas: Sequence[Replica], keys: Sequence[str]) -> None:
        await asyncio.gather(*(self.visit(r, key) for r in replicas for key in keys))

    @property
    def moved(self) -> int:
        return sum(len(set(workers)) > 1 for workers in self.workers.values())


def cut_off(store: ScriptedStore) -> None:
    """Frozen, and after a while without a watch."""
    store.freeze()
    store.watch_fault = StoreUnavailable("nothing is heard")
    asyncio.get_running_loop().call_later(3.0, store.drop_watch)


def join(store: ScriptedStore) -> None:
    store.watch_fault = None
    store.thaw()


# -- away or not


@pytest.mark.parametrize("share", [0.01, 0.05])
@in_virtual_time
async def test_calls_that_hang_now_and_then_place_no_session_by_hash(share: float) -> None:
    rng = random.Random(11)
    store = scripted()
    store.hangs = lambda op: rng.random() < share
    store.jitter = lambda: 0.001
    took: list[float] = []
    async with running(store) as r:

        async def turn(key: str) -> None:
            await asyncio.sleep(rng.random() * 60)
            began = now()
            assert (await r.visit(key))[1] == "created"
            took.append(now() - began)

        await asyncio.gather(*(turn(key_of(n)) for n in range(800)))
        assert r.affinity.state is StoreState.UP
        assert sum(r.metrics.store_calls_alone.cells.values()) > 0
    assert max(took) <= 2 * DEADLINE
    assert sorted(took)[len(took) // 2] < 0.01


@in_virtual_time
async def test_a_store_that_hangs_costs_its_first_turns_one_deadline_and_later_ones_nothing() -> None:
    store = scripted()
    async with running(store) as r:
        store.freeze()
        began = now()
        took: list[float] = []

        async def turn(n: int, at: float) -> None:
            await asyncio.sleep(at)
            arrived = now()
            assert (await r.visit(key_of(n)))[1] == "degraded"
            took.append(now() - arrived)

        await asyncio.gather(*(turn(n, n / 10) for n in range(25)))
        assert now() - began <= 24 / 10 + 0.51
        assert max(took) <= DEADLINE
        assert took.count(0.0) == 5
        assert r.affinity.state is StoreState.AWAY
        store.thaw()


@in_virtual_time
async def test_a_store_that_refuses_is_away_at_once() -> None:
    store = scripted()
    async with running(store) as r:
        store.broken["all"] = StoreUnavailable("refused")
        began = now()
        assert (await r.visit())[1] == "degraded"
        assert now() - began < 0.2
        assert r.affinity.state is StoreState.AWAY
        assert store.calls["check"] >= 3


@in_virtual_time
async def test_one_call_that_fails_is_tried_again_and_others_go_on() -> None:
    store = scripted()
    async with running(store) as r:
        fault = OutcomeUnknown("lost")
        failing = {"create": 2}

        def fails(op: str) -> OutcomeUnknown | None:
            if failing.get(op, 0) > 0:
                failing[op] -= 1
                return fault
            return None

        store.chance = fails
        first, second = await asyncio.gather(r.visit(key_of(1)), r.visit(key_of(2)))
        assert (first[1], second[1]) == ("created", "created")
        assert r.affinity.state is StoreState.UP


@in_virtual_time
async def test_calls_begun_before_the_return_do_not_send_the_store_away_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = scripted()
    async with running(store) as r:
        cut_off(store)
        turns = [await r.turn(key_of(n)) for n in range(20)]
        assert r.affinity.state.value == "away"
        for turn in turns:  # closes that begin now and are late
            turn.end()
            turn.release()
        await asyncio.sleep(1.0)
        join(store)
        late = store.hold("close")
        await asyncio.sleep(1.5)
        assert r.affinity.state is StoreState.UP
        late.set()
        await asyncio.sleep(30)
    assert sum("is away" in record.message for record in caplog.records) == 1


@in_virtual_time
async def test_a_store_that_fails_one_kind_of_call_is_not_away_and_its_session_is_claimed_later() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        store.broken["create"] = OutcomeUnknown("done, but who knows")
        worker, how = await r.visit()
        assert how == "degraded"
        assert r.affinity.state is StoreState.UP
        store.broken.clear()
        await asyncio.sleep(3)
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.value.worker == worker == hash_of(r)


@in_virtual_time
async def test_a_slow_store_is_not_away() -> None:
    store = scripted()
    store.jitter = lambda: 0.9  # there, and back again
    async with running(store) as r:
        assert {how for _, how in await asyncio.gather(*(r.visit(key_of(n)) for n in range(20)))} == {"created"}
        turn = await r.turn(key_of(0), final=True)
        turn.answered(200)
        turn.release()
        await asyncio.sleep(5)
        assert r.affinity.pending_closes == 0
        assert +Counter(r.metrics.closes.cells) == {("closed",): 1}


@pytest.mark.parametrize(
    ("stalls", "seconds", "takes"),
    [
        pytest.param([0.01], 0.6, 0.02, id="as the answer comes"),
        pytest.param([0.01], 30.0, 0.02, id="for half a minute"),
        pytest.param([0.1, 0.4, 0.8], 0.3, 0.3, id="again and again"),
    ],
)
@in_virtual_time
async def test_that_our_own_loop_is_late_is_not_the_stores_lateness(
    stalls: list[float], seconds: float, takes: float
) -> None:
    store = scripted()
    async with running(store, policy=first_of("a")) as r:
        store.jitter = lambda: takes / 2
        for at in stalls:
            asyncio.get_running_loop().call_later(at, stall, seconds)
        assert await r.visit(key_hashed_to(r, "b")) == ("a", "created")
        assert (store.calls["create"], store.calls["close"], store.calls["check"]) == (1, 0, 0)
        assert r.affinity.state is StoreState.UP


@in_virtual_time
async def test_checks_that_fail_while_our_own_loop_is_late_do_not_count() -> None:
    store = scripted()
    async with running(store) as r:
        store.next_faults["create"] = deque([OutcomeUnknown("late")])
        store.next_faults["check"] = deque([OutcomeUnknown("late")] * 3)
        store.jitter = lambda: 0.03
        for number in range(3):
            asyncio.get_running_loop().call_later(0.05 + 1.05 * number, stall, 1.0)
        assert (await r.visit())[1] == "created"
        assert r.affinity.state is StoreState.UP


@in_virtual_time
async def test_that_our_own_loop_is_late_takes_no_try_from_a_call_that_is_tried_again() -> None:
    store = scripted()
    async with running(store) as r:
        store.next_faults["create"] = deque([OutcomeUnknown("lost")])
        store.hangs = lambda op: op == "create" and store.calls["create"] == 2
        asyncio.get_running_loop().call_later(0.1, stall, 3 * DEADLINE)
        assert (await r.visit(key_hashed_to(r, "a")))[1] == "created"
        assert r.affinity.state is StoreState.UP


@in_virtual_time
async def test_a_store_that_hangs_is_away_however_late_our_own_loop_is() -> None:
    store = scripted()
    async with running(store) as r:
        store.freeze()

        async def busy() -> None:
            while True:
                await asyncio.sleep(0.1)
                stall(0.3)

        working = asyncio.ensure_future(busy())
        began = now()
        assert (await r.visit())[1] == "degraded"
        assert now() - began <= 5 * DEADLINE
        working.cancel()
        store.thaw()


# -- late writes


@pytest.mark.parametrize(
    ("frozen", "maker_later", "other_later"),
    [(0, 0, 0), (1, 0, 0), (3, 0, 0), (10, 0, 0), (30, 0, 0), (10, 5, 0), (10, 0, 5), (30, 5, 0), (30, 0, 5)],
)
@in_virtual_time
async def test_creates_that_are_done_late_move_no_session(frozen: int, maker_later: int, other_later: int) -> None:
    """80 of them under way when the store stops; both replicas go on serving. In whatever order they find it back."""
    inner = memory()
    keys = [key_of(n) for n in range(80)]
    served = Served()
    one, two = scripted(inner), scripted(inner)
    async with running(one, name="r1") as r1, running(two, name="r2") as r2:
        cut_off(one)
        cut_off(two)
        loop = asyncio.get_running_loop()
        loop.call_later(frozen + maker_later, join, one)
        loop.call_later(frozen + other_later, join, two)
        await served.visit_all([r1], keys)
        for _ in range(16):
            await served.visit_all([r1, r2], keys)
            await asyncio.sleep(3.5)
        assert served.moved == 0
        for key in keys:
            claim = await inner.get(key)
            assert claim is not None
            assert claim.value.worker == served.workers[key][0]
        gave_way = [r.metrics.claims_given_way.cells["late_write",] for r in (r1, r2)]
        assert sum(gave_way) > 10 or frozen < 3
        assert 0 in gave_way  # nobody fights


def always_late(r: Replica) -> None:
    """Every claim that is made here comes so late that others may have gone without it."""
    r.affinity._claims.kept_waiting = lambda until: True  # type: ignore[method-assign]


@in_virtual_time
async def test_a_late_claim_that_gives_way_to_one_of_a_worker_unknown_here_is_not_gone_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = memory()
    async with running(scripted(inner), policy=first_of("a")) as r:
        key, close = key_hashed_to(r, "b"), inner.close
        always_late(r)

        async def first(claim: Claim) -> CloseOutcome:
            outcome = await close(claim)
            if claim.value.worker == "a":  # another replica is faster than we, once
                monkeypatch.setattr(inner, "close", close)
                await inner.create_or_get(key, ClaimValue(worker="z", replica="r2", generation=1), TTL)
            return outcome

        monkeypatch.setattr(inner, "close", first)
        worker, how = await r.visit(key)
        claim = await inner.get(key)
        assert claim is not None
        assert (claim.value.worker, how) == (worker, "rebound")


@in_virtual_time
async def test_a_late_claim_that_the_store_fails_to_close_moves_no_session() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        key = key_hashed_to(r, "b")
        always_late(r)
        store.broken["close"] = OutcomeUnknown("lost")
        assert await r.visit(key) == ("b", "degraded")
        store.broken.clear()
        for _ in range(8):  # longer than a claim is doubted
            await asyncio.sleep(3)
            assert (await r.visit(key))[0] == "b"
        claim = await inner.get(key)
        assert claim is not None
        assert claim.value.worker == "b"


@in_virtual_time
async def test_a_late_claim_whose_client_leaves_is_known_to_have_served_nobody() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        key = key_hashed_to(r, "b")
        always_late(r)
        store.before["close"] = asyncio.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(r.turn(key), 0.1)
        await settle()
        claim = await inner.get(key)
        assert claim is not None
        assert r.affinity._claims.gave_up(claim)
        del store.before["close"]


@in_virtual_time
async def test_a_stream_that_runs_is_where_its_session_is() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        key = key_hashed_to(r, "b")
        cut_off(store)
        stream = await r.turn(key)  # not answered yet
        assert stream.target.worker.name == "b"
        join(store)
        await asyncio.sleep(5)
        claim = await inner.get(key)
        assert claim is not None
        assert (claim.value.worker, claim.value.served, claim.value.generation) == ("b", True, 1)
        assert (await r.visit(key))[0] == "b"
        stream.answered(200)
        stream.release()
        assert (await r.visit(key))[0] == "b"


@in_virtual_time
async def test_a_late_write_that_nobody_takes_back_is_believed_after_a_while() -> None:
    """Its maker has died: the residue. Replicas agree again, and go on agreeing."""
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    async with running(two, name="r2") as r2:
        key = key_hashed_to(r2, "b")
        cut_off(two)
        await r2.visit(key)
        value = ClaimValue(worker="a", replica="r1", created_at=int(WALL + now()))
        await inner.create_or_get(key, value, TTL)
        join(two)
        await asyncio.sleep(5)
        assert await r2.visit(key) == ("b", "degraded")
        await asyncio.sleep(15)
        assert (await r2.visit(key))[0] == "a"
        async with running(one, name="r3") as r3:
            for _ in range(20):
                assert (await r3.visit(key))[0] == (await r2.visit(key))[0] == "a"
                await asyncio.sleep(5)


@in_virtual_time
async def test_a_claim_from_before_the_outage_is_believed_at_once() -> None:
    """It was served: a replica that had no claim to go by in the outage follows it, and does not take it away."""
    inner = memory()
    async with running(scripted(inner), name="r1", policy=first_of("a")) as r1:
        store = scripted(inner)
        async with running(store, name="r2") as r2:
            key = key_hashed_to(r2, "b")
            await r1.visit(key)
            await asyncio.sleep(60)
            cut_off(store)
            assert await r2.visit(key) == ("b", "degraded")
            join(store)
            await asyncio.sleep(5)
            assert (await r2.visit(key))[0] == (await r1.visit(key))[0] == "a"


@in_virtual_time
async def test_when_both_were_served_one_move_is_made_and_no_more() -> None:
    inner = memory()
    async with running(scripted(inner), name="r1", policy=first_of("a")) as r1:
        store = scripted(inner)
        async with running(store, name="r2") as r2:
            key = key_hashed_to(r2, "b")
            cut_off(store)  # for r2 alone
            served = Served()
            for _ in range(10):
                await served.visit_all([r1, r2], [key])
                await asyncio.sleep(1)
            join(store)
            for _ in range(60):
                await served.visit_all([r1, r2], [key])
                await asyncio.sleep(1)
            assert set(served.workers[key][-80:]) == {"a"}
            assert (await inner.get(key)) is not None


@in_virtual_time
async def test_a_session_that_ends_while_its_claim_is_doubted_elsewhere_is_not_claimed_again() -> None:
    inner = memory()
    async with running(scripted(inner), name="r1", policy=first_of("a")) as r1:
        store = scripted(inner)
        async with running(store, name="r2") as r2:
            key = key_hashed_to(r2, "b")
            cut_off(store)  # for r2 alone
            assert (await r1.visit(key))[0] == "a"
            assert (await r2.visit(key))[0] == "b"
            join(store)
            await asyncio.sleep(5)
            assert await r2.visit(key) == ("b", "degraded")  # r1 might take its claim back
            final = await r1.turn(key, final=True)
            final.answered(200)
            await final.close()
            final.release()
            await asyncio.sleep(20)
            assert await inner.get(key) is None


@in_virtual_time
async def test_a_claim_that_is_closed_while_it_is_looked_at_again_is_not_believed_for_long() -> None:
    inner = memory()
    async with running(scripted(inner), name="r1", policy=first_of("a")) as r1:
        store = scripted(inner)
        async with running(store, name="r2") as r2:
            key = key_hashed_to(r2, "b")
            cut_off(store)
            assert (await r2.visit(key_of(5000)))[1] == "degraded"
            assert (await r1.visit(key))[0] == "a"
            join(store)
            while r2.affinity.state is not StoreState.UP:
                await asyncio.sleep(0.01)
            turn = asyncio.create_task(r2.visit(key))
            await asyncio.sleep(0.05)  # it has read the claim, and looks again in a moment
            final = await r1.turn(key, final=True)
            final.answered(200)
            await final.close()
            final.release()
            assert await turn == ("a", "stored")
            assert (await r2.visit(key))[1] == "created"


@in_virtual_time
async def test_a_late_write_is_ours_once_turns_are_served_by_it() -> None:
    """Nothing contradicted it when it was found; then it is a claim like any other."""
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        cut_off(store)
        leaves = asyncio.create_task(r.turn())
        await asyncio.sleep(0.1)
        leaves.cancel()
        await settle()
        join(store)
        await asyncio.sleep(5)
        assert (await r.visit())[0] == "a"
        before = await inner.get(KEY)
        for _ in range(3):
            store.drop_watch()
            await asyncio.sleep(5)
            assert (await r.visit())[0] == "a"
        assert await inner.get(KEY) == before


@pytest.mark.parametrize("ends", ["unanswered", "before it had it"])
@in_virtual_time
async def test_a_first_turn_that_comes_to_nothing_leaves_another_replicas_claim_alone(ends: str) -> None:
    """It began without the store, where the claim says by chance, and found the claim when the store came back."""
    inner = memory()
    store = scripted(inner)
    async with running(scripted(inner), name="r1", policy=first_of("b")) as r1, running(store, name="r2") as r2:
        for number in range(12):
            key = key_hashed_to(r2, "b", 20 * number)
            await r1.visit(key)
            claim = await inner.get(key)
            cut_off(store)
            assert (await r2.visit(key_of(5000 + number)))[1] == "degraded"
            turn = None
            if ends == "unanswered":
                turn = await r2.turn(key)
                assert (turn.target.worker.name, turn.how) == ("b", "degraded")
            else:
                leaves = asyncio.create_task(r2.turn(key))
                for _ in range(number):
                    await asyncio.sleep(0)
                leaves.cancel()
                await asyncio.wait({leaves})
                if not leaves.cancelled():
                    leaves.result().release()
            join(store)
            await asyncio.sleep(5)
            if turn is not None:
                turn.release()
            await asyncio.sleep(5)
            assert await inner.get(key) == claim


# -- rebound in an outage


@pytest.mark.parametrize("knew", ["the maker", "another", "nobody"])
@in_virtual_time
async def test_a_session_that_was_moved_off_a_dead_worker_in_an_outage_stays_where_it_is_served(knew: str) -> None:
    inner = memory()
    stores = scripted(inner), scripted(inner)
    async with (
        running(stores[0], name="r1", policy=first_of("a")) as r1,
        running(stores[1], name="r2", policy=first_of("a")) as r2,
    ):
        r = {"the maker": r1, "another": r2, "nobody": r2}[knew]
        keys = [key_of(n) for n in range(15)]
        for key in keys:
            assert (await r1.visit(key))[0] == "a"
            if knew == "another":
                assert (await r2.visit(key))[0] == "a"
        await asyncio.sleep(60)
        for store in stores:
            cut_off(store)
        served = Served()
        for key in keys:
            turn = await r.turn(key)
            if turn.target.worker.name == "a":
                await turn.rebind(frozenset({"a"}), ANYWHERE)
            served.workers[key].append(turn.target.worker.name)
            turn.answered(200)
            turn.release()
        assert "a" not in {workers[0] for workers in served.workers.values()} or knew == "nobody"
        moved = [key for key in keys if served.workers[key][0] != "a"]
        if knew == "nobody":  # of the others the hash did not find the dead worker: they are not moved off it
            moved = [key for key in keys if hash_of(r2, key) == "a"]
            assert moved
        for store in stores:
            join(store)
        for _ in range(10):
            await asyncio.sleep(3)
            await served.visit_all([r], moved)
        assert all(len(set(served.workers[key])) == 1 for key in moved)
        for key in moved:
            claim = await inner.get(key)
            assert claim is not None
            assert claim.value.worker == served.workers[key][0]


@pytest.mark.parametrize("watch", ["silent", "alive"])
@in_virtual_time
async def test_a_session_that_is_used_in_an_outage_outlives_its_claim(watch: str) -> None:
    """And one that is not used has ended."""
    inner = memory()
    store = scripted(inner)
    used, unused = key_of(1), key_of(2)
    async with (
        running(store, ttl=10.0, policy=first_of("a")) as r1,
        running(scripted(inner), ttl=10.0, policy=first_of("b"), name="r2") as r2,
    ):
        for key in (used, unused):
            assert await r1.visit(key) == ("a", "created")
        if watch == "silent":
            cut_off(store)
        else:
            store.broken["all"] = StoreUnavailable
        for _ in range(10):
            await asyncio.sleep(3)
            assert (await r1.visit(used))[0] == "a"
        assert await inner.get(used) is None
        if watch == "silent":
            join(store)
        else:
            store.return_()
        await asyncio.sleep(5)
        claim = await inner.get(used)
        assert claim is not None
        assert (claim.value.worker, claim.value.served) == ("a", True)
        assert await r2.visit(used) == ("a", "stored")
        assert await r2.visit(unused) == ("b", "created")
        await asyncio.sleep(20)
        assert await inner.get(used) is None


# -- finals in an outage


@in_virtual_time
async def test_a_final_turn_ends_a_session_that_its_replica_did_not_know() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(scripted(inner), name="r1") as r1, running(store, name="r2") as r2:
        for n in range(30):
            await r1.visit(key_of(n))
        await asyncio.sleep(60)
        cut_off(store)
        for n in range(30):
            turn = await r2.turn(key_of(n), final=True)
            assert turn.how == "degraded"
            turn.answered(200)
            before = now()
            await turn.close()
            assert now() == before  # nobody waits for a store that is away
            turn.release()
        assert r2.affinity.pending_closes == 30
        join(store)
        await asyncio.sleep(5)
        assert [await inner.get(key_of(n)) for n in range(30)] == [None] * 30
        assert r2.affinity.pending_closes == 0


@pytest.mark.parametrize("how", ["left", "refused", "admin"])
@in_virtual_time
async def test_a_session_that_is_ended_without_being_bound_in_an_outage_ends(how: str) -> None:
    inner = memory()
    store = scripted(inner)
    async with running(scripted(inner), name="r1") as r1, running(store, name="r2") as r2:
        await r1.visit()
        await asyncio.sleep(60)
        store.go_away()
        turn = r2.affinity.session(KEY, final=True)
        if how == "admin":
            assert await r2.affinity.end(KEY) == "pending"
        elif how == "left":
            await turn.left()
        else:
            await turn.refused(404)
        turn.release()
        store.return_()
        await asyncio.sleep(10)
        assert await inner.get(KEY) is None


@pytest.mark.parametrize("known", ["unknown", "known", "under a turn that runs"])
@in_virtual_time
async def test_an_admins_end_of_what_cannot_be_read_is_done_after_an_outage(known: str) -> None:
    store = scripted()
    store.garbage[KEY] = 7
    async with running(store) as r:
        turn = None
        if known != "unknown":
            turn = await r.turn()
            turn.answered(200)
        if turn is not None and known == "known":
            turn.release()
        store.go_away()
        assert (await r.visit(key_of(1)))[1] == "degraded"
        assert await r.affinity.end(KEY) == "pending"
        store.return_()
        await asyncio.sleep(10)
        assert not store.garbage
        assert (await r.visit())[1] == "created"
        if turn is not None:
            turn.release()


@in_virtual_time
async def test_an_admins_end_in_an_outage_ends_what_stands_then_and_not_what_was_known() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(scripted(inner), name="r1") as r1, running(store, name="r2") as r2:
        await r1.visit()
        await r2.visit()
        store.deaf = True
        assert await r1.affinity.end(KEY) == "closed"
        await r1.visit()
        await asyncio.sleep(2)
        store.go_away()
        assert await r2.affinity.end(KEY) == "pending"
        store.return_()
        await asyncio.sleep(10)
        assert await inner.get(KEY) is None


@pytest.mark.parametrize("successor", [True, False])
@in_virtual_time
async def test_the_news_of_an_end_closes_no_other_claim_than_the_one_it_names(successor: bool) -> None:
    store = scripted()
    async with running(store) as r:
        await r.visit()
        claim = await store.get(KEY)
        assert claim is not None
        r.affinity.desk.ended(Ask("ended", KEY, claim.revision - successor))
        await asyncio.sleep(5)
        assert (await store.get(KEY) is not None) is successor


@pytest.mark.parametrize("successor", [True, False])
@pytest.mark.parametrize("knows", ["proven", "unproven", "nothing"])
@pytest.mark.parametrize("ask", ["ended", "close"])
@in_virtual_time
async def test_an_end_without_a_revision_closes_at_a_peer_what_was_claimed_before_it(
    ask: str, knows: str, successor: bool
) -> None:
    """It was served without its claim there; the claim here may be of a session that has begun since."""
    inner = memory()
    store = scripted(inner)
    async with running(scripted(inner), name="r1") as r1, running(store, name="r2") as r2:
        ending = Ending(KEY, WALL + now() + 1.0)
        await asyncio.sleep(2.0 if successor else 0.0)
        await (r1 if knows == "nothing" else r2).visit()
        if knows == "unproven":
            store.drop_watch()
        await asyncio.sleep(2.0)
        if ask == "close":
            said = await r2.affinity.desk.close(Ask("close", KEY, ending=ending))
            assert said is not None
            assert said.how == ("superseded" if successor else "closed")
        else:
            r2.affinity.desk.ended(Ask("ended", KEY, ending=ending))
        await asyncio.sleep(5)
        assert (await inner.get(KEY) is not None) is (successor or (ask, knows) == ("ended", "nothing"))


@pytest.mark.parametrize("used_since", [True, False])
@in_virtual_time
async def test_the_news_of_an_end_ends_no_session_without_a_claim_that_was_used_since(used_since: bool) -> None:
    store = scripted()
    async with running(store) as r:
        cut_off(store)
        moment = WALL + now()
        await r.visit()
        if not used_since:
            await asyncio.sleep(2)
            moment = WALL + now()
        r.affinity.desk.ended(Ask("ended", KEY, 7, ending=Ending(KEY, moment)))
        assert r.affinity.knows(KEY) is used_since
        await asyncio.sleep(2)
        join(store)
        await asyncio.sleep(20)
        assert (await store.get(KEY) is not None) is used_since


@in_virtual_time
async def test_a_final_turn_waits_for_the_close_that_another_replicas_word_has_begun() -> None:
    store = scripted()
    async with running(store) as r:
        turn = await r.turn(final=True)
        claim = await store.get(KEY)
        assert claim is not None
        go = store.hold("close")
        r.affinity.desk.ended(Ask("ended", KEY, claim.revision, ending=Ending(KEY, WALL + now())))
        turn.answered(200)
        assert turn.holds_end
        closing = asyncio.create_task(turn.close())
        await asyncio.sleep(0.3)
        assert not closing.done()
        go.set()
        await closing
        assert await store.get(KEY) is None
        turn.release()


@pytest.mark.parametrize("store_is", ["up", "away"])
@in_virtual_time
async def test_a_turn_that_is_moved_after_its_session_has_ended_elsewhere_begins_a_new_one(store_is: str) -> None:
    store = scripted()
    async with running(store) as r:
        turn = await r.turn()
        turn.answered(200)
        claim = await store.get(KEY)
        assert claim is not None
        if store_is == "away":
            cut_off(store)
            await r.visit(key_of(1))  # which finds it away
        r.affinity.desk.ended(Ask("ended", KEY, claim.revision, ending=Ending(KEY, WALL + now())))
        await asyncio.sleep(2)
        left = turn.target.worker.name
        await turn.rebind(frozenset({left}), ANYWHERE)
        moved = turn.target.worker.name
        turn.release()
        if store_is == "away":
            join(store)
        await asyncio.sleep(30)
        claim = await store.get(KEY)
        assert claim is not None
        assert claim.value.worker == moved != left


@pytest.mark.parametrize("later", [-4.0, 0.0, 4.0])
@in_virtual_time
async def test_an_end_wins_over_another_replicas_claiming_again(later: float) -> None:
    """Both served it in the outage; it ended at one. The other finds the store back before or after that one."""
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    async with running(one, name="r1") as r1, running(two, name="r2") as r2:
        cut_off(one)
        cut_off(two)
        keys = [key_of(n) for n in range(30)]
        for key in keys:
            await r1.visit(key)
            await r2.visit(key)
        await asyncio.sleep(3)
        for key in keys:
            turn = await r1.turn(key, final=True)
            turn.answered(200)
            turn.release()
        await asyncio.sleep(5)
        for store in [one, two] if later >= 0 else [two, one]:
            join(store)
            await asyncio.sleep(abs(later))
        await asyncio.sleep(25)
        assert [await inner.get(key) for key in keys] == [None] * len(keys)


@in_virtual_time
async def test_an_end_that_was_remembered_never_closes_a_successor() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(scripted(inner), name="r1") as r1, running(store, name="r2") as r2:
        cut_off(store)
        turn = await r2.turn(final=True)
        turn.answered(200)
        turn.release()
        own = await r2.turn(key_of(1), final=True)
        own.answered(200)
        own.release()
        await r2.visit(key_of(1))  # the id is used again, in the same second
        await asyncio.sleep(1)
        await r1.visit()  # and this one elsewhere
        successor = await inner.get(KEY)
        join(store)
        await asyncio.sleep(30)
        assert await inner.get(KEY) == successor is not None
        assert await inner.get(key_of(1)) is not None


class Folder(EndingFiles):
    """As the files are, without a thread to wait for."""

    def __init__(self) -> None:
        self.files: dict[Path, list[Ending]] = {}

    async def load(self) -> list[tuple[Path, list[Ending]]]:
        return list(self.files.items())

    async def save(self, endings: Sequence[Ending]) -> None:
        self.files[Path(f"{len(self.files)}.json")] = list(endings)

    async def remove(self, file: Path) -> None:
        self.files.pop(file, None)


@pytest.mark.parametrize("knew", [True, False])
@in_virtual_time
async def test_ends_that_are_pending_when_a_replica_ends_are_done_by_the_next(knew: bool) -> None:
    inner = memory()
    store, folder = scripted(inner), Folder()
    async with running(scripted(inner), name="r1") as r1:
        for n in range(20):
            await r1.visit(key_of(n))
        async with running(store, name="r2", endings=folder) as r2:
            for n in range(20 * knew):
                await r2.visit(key_of(n))
            await asyncio.sleep(60)
            store.go_away()
            for n in range(20):
                turn = await r2.turn(key_of(n), final=True)
                turn.answered(200)
                turn.release()
        [(_, left)] = folder.files.items()
        assert len(left) == 20
        assert None not in [await inner.get(key_of(n)) for n in range(20)]
        async with running(scripted(inner), name="r3", endings=folder):
            await asyncio.sleep(1)
            assert [await inner.get(key_of(n)) for n in range(20)] == [None] * 20
            assert not folder.files


class Hindered(Folder):
    """One whose file system is in no hurry: reading, and then removing, fails some times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.loads = self.removals = times

    async def load(self) -> list[tuple[Path, list[Ending]]]:
        self.loads -= 1
        if self.loads >= 0:
            raise TimeoutError
        return await super().load()

    async def remove(self, file: Path) -> None:
        self.removals -= 1
        if self.removals >= 0:
            raise OSError("it is busy")
        await super().remove(file)


@in_virtual_time
async def test_what_was_left_is_looked_for_until_it_can_be_read_and_removed() -> None:
    inner, folder = memory(), Hindered(4)
    async with running(scripted(inner), name="r1") as r1:
        await r1.visit()
        await asyncio.sleep(5)
        await folder.save([Ending(KEY, WALL + now())])
    async with running(scripted(inner), endings=folder):
        await asyncio.sleep(1)
        assert await inner.get(KEY) is not None
        await asyncio.sleep(20)
        assert await inner.get(KEY) is None
        assert folder.removals == -1
        assert not folder.files


@in_virtual_time
async def test_what_was_left_is_not_looked_for_when_its_claims_have_ended() -> None:
    folder = Hindered(1_000_000)
    async with running(scripted(), endings=folder):
        await asyncio.sleep(10 * TTL)
        tries = folder.loads
        await asyncio.sleep(10 * TTL)
        assert folder.loads == tries


@in_virtual_time
async def test_ends_that_cannot_be_left_are_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    store = scripted()
    async with running(store) as r:
        await r.visit()
        store.go_away()
        turn = await r.turn(final=True)
        turn.answered(200)
        turn.release()
    assert [record.levelname for record in caplog.records if "end by their TTL" in record.message] == ["ERROR"]


async def test_ending_files_are_of_one_store_private_and_whole(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "endings"
    files = EndingFiles(folder, "etcd://user:secret@host:2379/claims")
    assert await files.load() == []
    await files.save([Ending("ab" * 20, 17.5, "nonce"), Ending("cd" * 20, 18.0)])
    await files.save([Ending("ef" * 20, 19.0)])
    assert await EndingFiles(folder, "etcd://host:2379/other").load() == []
    same = EndingFiles(folder, "etcd://other:word@host:2379/claims")
    found = await same.load()
    assert sorted(len(endings) for _, endings in found) == [1, 2]
    for file, _ in found:
        assert file.stat().st_mode & 0o77 == 0
        assert "secret" not in file.name
    found[0][0].write_bytes(b"[{")
    assert [] in [endings for _, endings in await files.load()]
    for file, _ in found:
        await files.remove(file)
        await files.remove(file)
    assert list(folder.iterdir()) == []


# -- a store that lost its memory


@pytest.mark.parametrize("restored", [False, True])
@in_virtual_time
async def test_a_store_that_lost_its_memory_moves_no_known_session(
    restored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    inner = memory()
    keys = [key_of(n) for n in range(60)]
    served = Served()
    async with running(scripted(inner), name="r1") as r1, running(scripted(inner), name="r2") as r2:
        await served.visit_all([r1], keys)
        await served.visit_all([r2], keys)
        streams = [await r1.turn(key) for key in keys[:10]]
        await asyncio.sleep(60)
        lose_memory(inner, r1, restored)
        for r in (r1, r2):
            assert isinstance(r.store, ScriptedStore)
            r.store.emit(Reset(rewound=True))
        await settle()
        await served.visit_all([r2], keys[:20])
        await asyncio.sleep(10)
        for key in keys:
            claim = await inner.get(key)
            assert claim is not None
            assert claim.value.worker == served.workers[key][0]
        await served.visit_all([r1, r2], keys)
        for stream in streams:
            stream.release()
        assert served.moved == 0
    assert sum("lost what it held" in record.message for record in caplog.records) == 2


def lose_memory(inner: MemoryStore, r: Replica, restored: bool) -> None:
    """As by a new disk, or by a backup from when every session was somewhere else."""
    workers = [worker.name for worker in r.fleet]
    for key, claim in list(inner._claims.items()):
        del inner._claims[key]
        if restored:
            other = workers[(workers.index(claim.value.worker) + 1) % len(workers)]
            value = ClaimValue(worker=other, replica="r0", created_at=claim.value.created_at - 3600)
            inner._claims[key] = msgspec.structs.replace(claim, value=value, revision=claim.revision - 1)


@in_virtual_time
async def test_a_session_found_without_its_claim_before_the_watch_says_why_stays() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        await r.visit()
        r.affinity._placer._policy = first_of("b")
        store.watch_fault = StoreUnavailable("the connection was lost")
        store.drop_watch()
        await settle()
        lose_memory(inner, r, restored=False)
        assert (await r.visit())[0] == "a"


@in_virtual_time
async def test_closes_that_are_pending_when_the_store_loses_its_memory_close_no_other_claim() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        turn = await r.turn(final=True)
        old = await inner.get(KEY)
        assert old is not None
        store.broken["close"] = StoreUnavailable("not now")
        turn.answered(200)
        turn.release()
        await settle()
        lose_memory(inner, r, restored=False)
        await asyncio.sleep(2)
        value = ClaimValue(worker="b", replica="r9", created_at=int(WALL + now()))
        inner._claims[KEY] = msgspec.structs.replace(old, value=value)  # of the same revision
        store.emit(Reset(rewound=True))
        store.broken.clear()
        await asyncio.sleep(10)
        assert r.affinity.pending_closes == 0
        claim = await inner.get(KEY)
        assert claim is not None
        assert claim.value == value


# -- one bad record


@in_virtual_time
async def test_a_record_that_cannot_be_read_costs_its_own_session_alone(caplog: pytest.LogCaptureFixture) -> None:
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    one.garbage = two.garbage = {KEY: 7}
    async with running(one, policy=first_of("a")) as r1, running(two, policy=first_of("b"), name="r2") as r2:
        for _ in range(5):
            for r in (r1, r2):
                assert await r.visit() == (hash_of(r), "degraded")
            await asyncio.sleep(3)
        for r in (r1, r2):
            assert r.affinity.state is StoreState.UP
            assert r.metrics.claims_unreadable.cells[()] >= 5
            assert sum(r.metrics.store_calls_alone.cells.values()) == 0
        assert (await r1.visit(key_of(1)))[1] == "created"
        assert (await r2.visit(key_of(1)))[1] == "stored"
        view = await r2.affinity.look_up(KEY)
        assert (view.source, view.target) == ("unreadable", r2.target(hash_of(r2)))
        final = await r1.turn(final=True)
        final.answered(200)
        began = now()
        await final.close()
        final.release()
        moved = await r1.turn()
        await moved.rebind(frozenset({hash_of(r1)}), ANYWHERE)
        assert moved.target.worker.name != hash_of(r1)
        moved.release()
        assert now() - began < 0.1
        await asyncio.sleep(30)
        assert one.garbage == {KEY: 7}  # nothing of this touches it
        assert one.calls["close"] == two.calls["close"] == 0
        assert await r2.affinity.end(KEY) == "closed"  # an operator's word does
        assert not one.garbage
        assert (await r2.visit())[1] == "created"
    assert Counter(record.levelname for record in caplog.records) == {"ERROR": 2}


@in_virtual_time
async def test_a_known_session_whose_record_is_spoilt_goes_where_every_replica_takes_it() -> None:
    inner = memory()
    one, two = scripted(inner), scripted(inner)
    async with (
        running(one, policy=first_of("a"), max_stale=5.0) as r1,
        running(two, policy=first_of("a"), max_stale=5.0, name="r2") as r2,
    ):
        key = key_hashed_to(r1, "b")
        assert (await r1.visit(key))[0] == "a"
        one.garbage[key] = two.garbage[key] = 7
        await asyncio.sleep(6)
        for r in (r1, r2, r1):
            assert await r.visit(key) == ("b", "degraded")
        await asyncio.sleep(TTL)
        final = await r1.turn(key, final=True)
        final.answered(200)
        await final.close()
        final.release()
        assert one.garbage
        assert r1.affinity.state is StoreState.UP


@in_virtual_time
async def test_an_admin_ends_what_cannot_be_read_under_a_turn_that_runs() -> None:
    store = scripted()
    store.garbage[KEY] = 7
    async with running(store, policy=first_of("a")) as r:
        turn = await r.turn()
        assert await r.affinity.end(KEY) == "closed"
        assert not store.garbage
        assert (await r.visit())[1] == "created"
        turn.release()
        await asyncio.sleep(1)
        assert (await r.visit())[1] == "cached"


@in_virtual_time
async def test_what_is_kept_and_cannot_be_read_is_not_called_unknown() -> None:
    store = scripted()
    store.garbage[KEY] = 7
    async with running(store) as r:
        with pytest.raises(TurnError) as caught:
            await r.visit(KEY, Placement(refusal=TurnError("not_found", "no such thing"), kept=True))
        assert caught.value.code == "store_unavailable"


# -- a first turn that comes to nothing


@pytest.mark.parametrize("status", [0, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("final", [True, False])
@in_virtual_time
async def test_a_first_turn_that_fails_leaves_no_claim(status: int, final: bool) -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        turn = await r.turn(final=final)
        assert await inner.get(KEY) is not None
        if status:
            turn.answered(status)
        turn.release()
        await settle()
        assert await inner.get(KEY) is None
        known = r.affinity.desk.where(Ask("where", KEY))
        assert known is not None
        assert not known.ended_at, "a replica that serves it would forget it"
        r.affinity._placer._policy = first_of("b")
        assert await r.visit() == ("b", "created")


@pytest.mark.parametrize("outcome", list(CloseOutcome))
@in_virtual_time
async def test_a_session_whose_successor_stands_has_not_ended(
    outcome: CloseOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = memory()
    async with running(scripted(inner)) as r:
        await r.visit()

        async def closes(claim: Claim) -> CloseOutcome:
            return outcome

        monkeypatch.setattr(inner, "close", closes)
        assert await r.affinity.end(KEY) == outcome.value
        known = r.affinity.desk.where(Ask("where", KEY))
        assert known is not None
        assert bool(known.ended_at) is (outcome is not CloseOutcome.SUPERSEDED)


@pytest.mark.parametrize("status", [500, 503])
@in_virtual_time
async def test_a_failing_turn_keeps_an_older_claim(status: int) -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        await r.visit()
        claim = await inner.get(KEY)
        for final in (True, False):
            turn = await r.turn(final=final)
            turn.answered(status)
            turn.release()
            await settle()
        store.drop_watch()
        await settle()
        turn = await r.turn()  # read again
        turn.answered(status)
        turn.release()
        await settle()
        moved = await r.turn()
        await moved.rebind(frozenset({moved.target.worker.name}), ANYWHERE)
        moved.answered(status)
        moved.release()
        await settle()
        assert claim is not None
        now_stands = await inner.get(KEY)
        assert now_stands is not None
        assert now_stands.value.generation == 1


@pytest.mark.parametrize("joins", ["answered", "fails", "after the first"])
@in_virtual_time
async def test_another_turn_that_has_joined_decides_what_becomes_of_the_claim(joins: str) -> None:
    inner = memory()
    async with running(scripted(inner)) as r:
        first = await r.turn()
        other = await r.turn()
        if joins == "answered":
            other.answered(200)
            other.release()
        first.answered(503)
        first.release()
        await settle()
        assert await inner.get(KEY) is not None
        if joins == "after the first":
            other.answered(200)
        other.release()
        await settle()
        assert (await inner.get(KEY) is None) is (joins == "fails")


@in_virtual_time
async def test_a_first_turn_that_is_moved_and_fails_leaves_no_claim() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r:
        turn = await r.turn()
        await turn.rebind(frozenset({"a"}), ANYWHERE)
        await settle()
        assert await inner.get(KEY) is not None
        assert store.calls["close"] == 1
        turn.answered(500)
        turn.release()
        await settle()
        assert await inner.get(KEY) is None


@in_virtual_time
async def test_a_first_turn_that_fails_in_an_outage_is_not_claimed_afterwards() -> None:
    inner = memory()
    store = scripted(inner)
    async with running(store) as r:
        store.go_away()
        turn = await r.turn()
        turn.answered(500)
        turn.release()
        assert r.affinity.size == 0
        store.return_()
        await asyncio.sleep(5)
        assert await inner.get(KEY) is None


# -- a delete that is heard


@pytest.mark.parametrize("what", ["bind", "rebind"])
@in_virtual_time
async def test_a_claim_older_than_the_newest_close_heard_is_not_believed(what: str) -> None:
    """The close is heard after the claim was read or made, and before that is noted."""
    inner = memory()
    store = scripted(inner)
    async with running(store, policy=first_of("a")) as r, running(scripted(inner), name="r2") as r2:
        old = await r.turn() if what == "rebind" else None
        gate = store.after["create"] = asyncio.Event()
        turning = asyncio.create_task(r.turn() if old is None else moved(old))
        await settle()
        assert await r2.affinity.end(KEY) == "closed"
        await r2.visit()
        await settle()  # the delete is heard here
        gate.set()
        turn = await turning
        assert not r.known()
        assert (await r.visit())[0] == (await r2.visit())[0]
        turn.answered(200)
        turn.release()


async def moved(turn: Binding) -> Binding:
    await turn.rebind(frozenset({turn.target.worker.name}), ANYWHERE)
    return turn
