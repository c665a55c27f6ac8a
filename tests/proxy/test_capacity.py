"""Turns that wait for a slot. What counts is what the workers had at once, and what the clients were told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.fleet.capacity import Bounds
from app.sessions.tenants import Tenants, new_key
from app.turn.request import Reading
from app.turn.shared import Limits
from tests.support.bench import SESSION, Bench, bench
from tests.support.client import Call
from tests.support.http_model import Request
from tests.support.raw import OK, Live, Peer, Worker, post, to_each, until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

BUSY = b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
UPGRADE = ((b"connection", b"upgrade"), (b"upgrade", b"websocket"))
HINT = b"x-dynamo-worker-instance-id"
KEYS = {b"a": b"key-a", b"b": b"key-b"}


class Holding(Worker):
    """Answers each turn when it is let (`go`); knows how many it has at once, by target."""

    def __init__(self, *answers: bytes) -> None:
        """`answers`: the last one again and again."""
        super().__init__(to_each(self._serve))
        self._answers = list(answers) or [OK]
        self.now: Counter[bytes] = Counter()
        self.most = 0
        self.served: list[bytes] = []
        """The `x-n` of the turns that came, in their order."""
        self._free = False
        self._let: asyncio.Queue[None] = asyncio.Queue()

    async def _serve(self, peer: Peer, request: Request) -> None:
        rank = request.get(b"x-data-parallel-rank") or b""
        self.now[rank] += 1
        self.most = max(self.most, self.now[rank])
        self.served.append(request.get(b"x-n") or b"")
        try:
            if not self._free:
                await _either(self._let.get(), peer.gone())
        finally:
            self.now[rank] -= 1
        await peer.send(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])

    def go(self, turns: int = 1) -> None:
        for _ in range(turns):
            self._let.put_nowait(None)

    def go_on(self) -> None:
        """Every turn from now on is answered at once."""
        self._free = True
        self.go(sum(self.now.values()))

    @property
    def running(self) -> int:
        return sum(self.now.values())


async def _either(*works: Any) -> None:
    """Raises ConnectionError when the second was the first to end."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ConnectionError
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def waiting(b: Bench) -> int:
    assert b.capacity is not None
    return b.capacity.waiting


def turn(b: Bench, number: int = 0, *headers: tuple[bytes, bytes], **how: Any) -> Call:
    return b.request((b"x-n", b"%d" % number), *headers, **how).start()


def asking(model: str) -> bytes:
    return b'{"model":"%b"}' % model.encode()


def keys() -> Reading:
    return Reading(tenants=Tenants({hashlib.sha256(key).hexdigest(): name for name, key in KEYS.items()}))


def of(tenant: bytes) -> tuple[bytes, bytes]:
    return (b"authorization", b"Bearer " + KEYS[tenant])


async def test_without_limits_there_is_nothing_of_it() -> None:
    async with bench(Holding()) as b:
        running = turn(b)
        await until(lambda: b.turns)
        (only,) = b.running._running
        assert only._slots is None
        assert b.capacity is None
        running.leave()
        await running.finish()


async def test_who_comes_too_many_waits_in_order() -> None:
    worker = Holding()
    async with bench(worker, max_turns=2) as b:
        calls = []
        for number in range(6):
            calls.append(turn(b, number))
            await until(lambda number=number: worker.running + waiting(b) == number + 1)  # type: ignore[misc]
        assert (worker.running, waiting(b), b.fleet.candidates()[0].in_flight) == (2, 4, 2)
        for _ in range(6):
            worker.go()
        assert [(await call.finish()).status for call in calls] == [200] * 6
        assert worker.served == [b"%d" % number for number in range(6)]
        assert worker.most == 2
        assert sum(b.metrics.queue_seconds.family().cells[0][1][:-1]) == 4


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("keyed", [False, True])
async def test_whoever_looks_is_told_who_runs_and_who_waits(keyed: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_turns": 1}
    key, line = new_key("alice")
    if keyed:
        settings["api_keys"] = tmp_path / "keys"
        settings["api_keys"].write_text(line)
    with Live(**settings) as live:
        async with live.worker(to_each(_never)), contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                client = await stack.enter_async_context(live.client())
                await client.send(post(b"authorization: Bearer " + key.encode()))

            async def is_so() -> bool:
                samples = await live.samples()
                return sum(number for name, number in samples.items() if "queued_turns" in name) == 2

            async def is_told() -> bool:
                await asyncio.sleep(0.2)  # a record is made anew every two seconds
                async with live.client() as looking:
                    await looking.send(b"GET /admin/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    await looking.until(b"data: ")
                    shown = json.loads(await looking.until(b"\n"))
                if keyed:
                    (tenant,) = shown["tenants"].values() or ({},)
                    if tenant != {"running": 1, "waiting": 2, "limit": 0}:
                        return False
                return (shown["fleet"]["running"], shown["fleet"]["waiting"]) == (1, 2)

            await until(is_so)
            await until(is_told)


async def _never(peer: Peer, request: Request) -> None:
    await peer.gone()


async def test_with_a_slot_free_a_turn_runs_in_place() -> None:
    """No task and no timer for it: as without limits."""
    worker = Holding()

    def ours() -> set[asyncio.Task[Any]]:
        return {task for task in asyncio.all_tasks() if "/app/" in repr(task.get_coro())}

    async with bench(worker, max_turns=2) as b:
        warm = turn(b)
        await until(lambda: worker.running)
        worker.go()
        await warm.finish()  # its connection is kept
        before = ours()
        call = turn(b)
        await until(lambda: worker.running)
        assert ours() == before
        assert b.capacity is not None
        assert b.capacity._looking is None
        worker.go()
        await call.finish()


async def test_a_turn_that_is_free_takes_what_is_free_first_and_a_bound_one_waits_for_its_own() -> None:
    one, two = Holding(), Holding()
    async with bench(one, two, max_turns=1) as b:
        first = turn(b, 0, SESSION)
        await until(lambda: one.running)
        other = turn(b, 1)
        await until(lambda: two.running)
        bound = turn(b, 2, SESSION)
        await until(lambda: waiting(b) == 1)
        free, fresh = turn(b, 3), turn(b, 4, (SESSION[0], b"s2"))
        await until(lambda: waiting(b) == 3)
        assert b.fleet.candidates()[0].queued == 1
        two.go(3)
        assert (await other.finish()).status == 200
        assert (await free.finish()).headers[b"x-coatcheck-worker"] == b"w1"
        got = await fresh.finish()
        assert (got.headers[b"x-coatcheck-worker"], got.headers[b"x-coatcheck-affinity"]) == (b"w1", b"created")
        assert (await b.claim(b"s2")).value.worker == "w1"
        assert waiting(b) == 1
        one.go(2)
        await first.finish()
        assert (await bound.finish()).headers[b"x-coatcheck-affinity"] == b"cached"
        assert (one.most, two.most) == (1, 1)


async def test_first_turns_of_many_sessions_at_once() -> None:
    workers = [Holding(), Holding()]
    async with bench(*workers, max_turns=2) as b:
        calls = [turn(b, number, (SESSION[0], b"s%d" % (number // 2))) for number in range(40)]
        await until(lambda: b.turns == 40 and sum(worker.running for worker in workers) == 4)
        for worker in workers:
            worker.go_on()
        assert {(await call.finish()).status for call in calls} == {200}
        for session in range(20):  # both turns of each, at one worker
            assert len({call.headers[b"x-coatcheck-worker"] for call in calls[2 * session : 2 * session + 2]}) == 1
        assert max(worker.most for worker in workers) <= 2


async def test_who_leaves_is_out_at_once_and_reaches_no_worker() -> None:
    worker = Holding()
    async with bench(worker, max_turns=1) as b:
        running = turn(b, 0, SESSION)
        await until(lambda: worker.running)
        leavers = [turn(b, 1), turn(b, 2, SESSION), turn(b, 3, (SESSION[0], b"s2"))]
        last = turn(b, 4)
        await until(lambda: waiting(b) == 4)
        for call in leavers:
            call.leave()
        await until(lambda: waiting(b) == 1)
        await until(lambda: b.turns == 2)
        worker.go(2)
        assert (await running.finish()).status == (await last.finish()).status == 200
        assert worker.served == [b"0", b"4"]
        assert b.outcomes()["aborted"] == 3
        assert await b.claim(b"s2") is None
        for call in leavers:
            await call.finish()


async def test_what_the_client_is_told_at_its_tenants_limit_and_when_all_is_full() -> None:
    worker = Holding()
    async with bench(worker, max_turns=2, bounds=Bounds(per_tenant=1, queue=1, wait=60.0), reading=keys()) as b:
        calls = [turn(b, 0, of(b"a"))]
        await until(lambda: worker.running == 1)
        calls.append(turn(b, 1, of(b"a")))
        await until(lambda: waiting(b) == 1)
        mine = await b.get(of(b"a"))
        assert (mine.status, mine.json["error"]["type"]) == (429, "rate_limit_error")
        assert mine.json["error"]["code"] == "tenant_limit"
        anthropic = await b.get(of(b"a"), path="/v1/messages")
        assert (anthropic.status, anthropic.json["error"]["type"]) == (429, "rate_limit_error")
        for call in (mine, anthropic):
            assert 1 <= int(call.headers[b"retry-after"]) <= 30
            assert call.headers[b"x-should-retry"] == b"true"
        worker.go_on()
        for call in calls:
            await call.finish()
        assert b.outcomes()["rejected"] == 2

    worker = Holding()
    async with bench(worker, max_turns=1, bounds=Bounds(queue=0)) as b:
        running = turn(b, 0, SESSION)
        await until(lambda: worker.running)
        free, bound = await b.get(), await b.get(SESSION)
        fresh, anthropic = await b.get((SESSION[0], b"s2")), await b.get(path="/v1/messages")
        told = [(call.status, call.json["error"]["code"]) for call in (free, bound, fresh)]
        assert told == [(503, "fleet_full"), (503, "worker_full"), (503, "fleet_full")]
        assert (anthropic.status, anthropic.json["error"]["type"]) == (503, "overloaded_error")
        for call in (free, bound, fresh, anthropic):
            assert 1 <= int(call.headers[b"retry-after"]) <= 30
            assert call.headers[b"x-should-retry"] == b"true"
        assert b.outcomes()["unplaced"] == 4
        assert b.worker().cells.total == 0  # it was given none of them
        assert await b.claim(b"s2") is None
        worker.go()
        await running.finish()
        assert b.worker().state == "up"


async def test_waiting_is_bounded_by_its_own_time_and_a_workers_first_byte_comes_after_it() -> None:
    worker = Holding()
    async with bench(worker, max_turns=1, limits=Limits(first_byte=2.0)) as b:
        hung = turn(b, 0)
        await until(lambda: worker.running)
        late = turn(b, 1)
        await until(lambda: waiting(b) == 1)
        assert (await hung.finish()).status == 504
        await until(lambda: worker.served[-1] == b"1")
        await asyncio.sleep(0.3)  # with what it has waited that is too long
        worker.go()
        assert (await late.finish()).status == 200

    worker = Holding()
    async with bench(worker, max_turns=1, bounds=Bounds(wait=0.2)) as b:
        running = turn(b, 0)
        await until(lambda: worker.running)
        for session in ([], [SESSION]):
            refused = await b.get(*session)
            assert (refused.status, refused.json["error"]["code"]) == (503, "fleet_full")
            assert "; it waited " in refused.json["error"]["message"]
        worker.go()
        await running.finish()
        assert worker.served == [b"0"]


async def test_a_websocket_holds_its_slot() -> None:
    worker = Holding(SWITCHED, OK)
    async with bench(worker, max_turns=1) as b:
        client, _ = await b.entrance.connect()
        lines = [b"GET /v1/realtime HTTP/1.1", b"host: r", *(b"%b: %b" % pair for pair in UPGRADE), b"", b""]
        await client.send(b"\r\n".join(lines))
        await until(lambda: worker.running)
        worker.go_on()
        assert (await client.answer(b"GET")).status == 101
        call = turn(b, 1)
        await until(lambda: waiting(b) == 1)
        assert b.worker().in_flight == 1
        client.close()
        assert (await call.finish()).status == 200


async def test_a_turn_that_is_tried_again_gives_its_slot_back_first() -> None:
    """Both answer 503 once, so that each turn wants the other's slot."""
    one, two = Holding(BUSY, OK), Holding(BUSY, OK)
    async with bench(one, two, max_turns=1, bounds=Bounds(wait=5.0)) as b:
        calls = [turn(b, 0), turn(b, 1)]
        await until(lambda: one.running and two.running)
        one.go_on()
        two.go_on()
        statuses = sorted([(await call.finish()).status for call in calls])
        assert statuses in ([200, 503], [503, 503])  # with the other full, the answer stands
        assert (one.most, two.most) == (1, 1)


async def test_turns_that_wait_for_a_worker_that_goes_down_move_on() -> None:
    one, two = Holding(), Holding()
    async with bench(one, two, max_turns=1) as b:
        first = turn(b, 0, SESSION)
        await until(lambda: one.running)
        bound = turn(b, 1, SESSION)
        await until(lambda: waiting(b) == 1)
        b.worker(0).health.unreachable("refused", refused=True)  # and the turn that it has hangs
        two.go_on()
        got = await bound.finish()
        assert (got.status, got.headers[b"x-coatcheck-worker"]) == (200, b"w1")
        assert got.headers[b"x-coatcheck-affinity"] == b"rebound"
        first.leave()
        await first.finish()


@pytest.mark.parametrize("session", [(), (SESSION,)])
async def test_a_turn_that_waits_takes_no_slot_where_its_model_is_not_served(session: Any) -> None:
    """Not one that is there, not one that is given back, and not of a worker that comes without it; but of one that
    comes to serve it."""
    one, two = Holding(), Holding()
    async with bench(one, two, max_turns=1, models=["a", "b"]) as b:
        calls = [turn(b, 0, body=asking("a"))]
        await until(lambda: one.running)
        calls.append(turn(b, 1, *session, body=asking("a")))
        await until(lambda: waiting(b) == 1)
        calls += [turn(b, 2, body=asking("b")), turn(b, 3, body=asking("b"))]
        await until(lambda: two.running and waiting(b) == 2)
        two.go()
        await until(lambda: two.served == [b"2", b"3"])  # though the other has waited longer
        two.go()
        await until(lambda: not two.running)
        await asyncio.sleep(0.25)  # a look at what nobody tells, or two
        assert (waiting(b), two.served) == (1, [b"2", b"3"])
        b.serves(1, "a", "b")
        await until(lambda: two.served == [b"2", b"3", b"1"])
        one.go_on()
        two.go_on()
        assert [(await call.finish()).status for call in calls] == [200] * 4
        assert one.served == [b"0"]


async def test_the_session_of_a_lost_worker_waits_on_where_no_other_serves_its_model() -> None:
    one, two = Holding(), Holding()
    async with bench(one, two, max_turns=1, models=["a", "b"]) as b:
        calls = [turn(b, 0, SESSION, body=asking("a"))]
        await until(lambda: one.running)
        calls.append(turn(b, 1, SESSION, body=asking("a")))
        await until(lambda: waiting(b) == 1)
        b.worker(0).health.unreachable("refused", refused=True)
        await asyncio.sleep(0.25)  # a look or two
        assert (waiting(b), two.served) == (1, [])
        one.go_on()
        assert [(await call.finish()).status for call in calls] == [200] * 2


async def test_a_session_waits_for_the_claim_beside_its_own_among_those_that_serve_the_model() -> None:
    one, two = Holding(), Holding()
    async with bench(one, two, max_turns=1, models=["a", "b"]) as b:
        one.go()
        await turn(b, 0, SESSION, body=asking("a")).finish()
        calls = [turn(b, 1, body=asking("b"))]
        await until(lambda: two.running)
        calls.append(turn(b, 2, SESSION, body=asking("b")))
        await until(lambda: waiting(b) == 1)
        assert not one.running
        two.go_on()
        assert [(await call.finish()).status for call in calls] == [200] * 2
        assert (one.served, two.served) == ([b"0"], [b"1", b"2"])


async def test_a_worker_that_dies_under_a_full_queue() -> None:
    one, two = Holding(), Holding()
    async with bench(one, two, max_turns=1) as b:
        calls = [turn(b, 0, SESSION)]
        await until(lambda: one.running)
        calls.append(turn(b, 1))
        await until(lambda: two.running)
        calls += [turn(b, 2, SESSION), turn(b, 3, SESSION), turn(b, 4, (SESSION[0], b"s2")), turn(b, 5)]
        await until(lambda: waiting(b) == 4)
        await one.die()
        for peer in one.peers:
            peer.close()
        two.go_on()
        assert [(await call.finish()).status for call in calls] == [200] * 6
        assert two.most == 1


async def test_at_shutdown_those_that_wait_are_told() -> None:
    worker = Holding()
    async with bench(worker, max_turns=1) as b:
        running = turn(b, 0)
        await until(lambda: worker.running)
        calls = [turn(b, 1), turn(b, 2, SESSION)]
        await until(lambda: waiting(b) == 2)
        assert b.capacity is not None
        b.capacity.close()
        for call in calls:
            await call.finish()
            assert (call.status, call.json["error"]["code"]) == (503, "fleet_full")
        worker.go()
        assert (await running.finish()).status == 200


async def test_a_turn_that_is_cut_while_it_waits_leaves_nothing() -> None:
    """As when the router's time to drain is over."""
    worker = Holding()
    async with bench(worker, max_turns=1) as b:
        running = turn(b, 0)
        await until(lambda: worker.running)
        cut = turn(b, 1)
        await until(lambda: waiting(b) == 1)
        (waits,) = [each for each in b.running._running if each._attempt is None]
        waits.cancel()
        await until(lambda: waiting(b) == 0)
        worker.go()
        await running.finish()
        with contextlib.suppress(ConnectionError):
            await cut.finish()


async def test_the_dry_run_of_a_session_says_where_it_would_go_also_when_all_is_full() -> None:
    worker = Holding()
    async with bench(worker, max_turns=1, bounds=Bounds(queue=0)) as b:
        running = turn(b, 0)
        await until(lambda: worker.running)
        for headers in ([], [SESSION]):
            got = await b.get((b"x-coatcheck-dry-run", b"1"), *headers)
            assert (got.status, got.json["worker"]) == (200, "w0")
        worker.go()
        await running.finish()


@pytest.mark.parametrize("ranks", [0, 2])
async def test_no_target_ever_has_more_than_it_may_whatever_clients_and_workers_do(ranks: int) -> None:
    """300 turns, with sessions and without, two tenants; many leave at any time; a worker is busy now and then."""
    rng = random.Random(ranks)
    workers = [Holding(*([OK, BUSY, OK, OK] * 40)), Holding()]
    reading = Reading(tenants=keys().tenants, has_ranks=bool(ranks))
    async with bench(*workers, max_turns=2, ranks=ranks, bounds=Bounds(per_tenant=6, wait=30.0), reading=reading) as b:

        async def client(number: int) -> None:
            headers = [of(rng.choice([b"a", b"b"]))]
            if rng.random() < 0.6:
                headers.append((SESSION[0], b"s%d" % rng.randrange(20)))
            call = turn(b, number, *headers)
            if rng.random() < 0.4:
                await asyncio.sleep(rng.uniform(0, 0.15))
                call.leave()
            await call.finish()
            assert call.status in (0, 200, 503)

        clients = [asyncio.create_task(client(number)) for number in range(300)]
        while not all(each.done() for each in clients):
            for worker in workers:
                worker.go(rng.randrange(3))
            await asyncio.sleep(0.002)
        await asyncio.gather(*clients)
        for worker in workers:
            worker.go_on()
        assert 1 <= max(worker.most for worker in workers) <= 2
        await b.rest()
