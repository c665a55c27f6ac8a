"""Clients that leave: the worker stops, nothing stays counted, nothing stays open, and a final has closed."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.e2e.conftest import Standing, new_session
from tests.support.processes import Replica, Worker, metrics, order_fault, total, turns, wait_until
from tests.support.wire import Wire, ask, turn

COUNTERS = (
    "coatcheck_in_flight",
    "coatcheck_turns_running",
    "coatcheck_session_turns_active",
    "coatcheck_pending_closes",
)


async def counted(replica: Replica) -> dict[str, float]:
    """What is not back at 0."""
    samples = await metrics(replica)
    return {name: value for name in COUNTERS if (value := total(samples, name))}


async def settled(standing: Standing, limit: float = 30) -> None:
    """Every counter of every replica is at 0, and the workers run nothing."""
    for replica in standing.replicas:
        await wait_until(partial(_is_empty, replica), limit)
    for worker in standing.workers:
        await wait_until(partial(_is_idle, worker), limit)


async def _is_empty(replica: Replica) -> bool:
    return not await counted(replica)


async def _is_idle(worker: Worker) -> bool:
    return not (await ask(worker.url, target="/mock/state")).json["active"]


async def outcomes(worker: Worker, session: str) -> list[str]:
    return [record["outcome"] for record in await turns(worker, session)]


@pytest.mark.parametrize("way", ["leaves", "crashes"])
@pytest.mark.parametrize("moment", ["before the head", "before the first token", "in the stream"])
async def test_the_worker_stops_when_the_client_leaves(standing: Standing, session: str, moment: str, way: str) -> None:
    for replica in standing.replicas:
        worker = standing.worker((await turn(replica.url, session=session)).worker)
        before = len(await turns(worker, session))
        if moment != "in the stream":
            await order_fault(worker, mode="slow", ttft_ms=60_000)
        async with await Wire.to(replica.url) as wire:
            wire.chat(session=session, stream=moment != "before the head", tokens=100_000)
            if moment != "before the head":
                assert (await wire.head()).status == 200
            if moment == "in the stream":
                await wire.until(b'"content":" ')
            await wait_until(partial(_runs, worker, session), 30)
            assert (await counted(replica)).keys() >= {"coatcheck_in_flight", "coatcheck_session_turns_active"}
            wire.leave() if way == "leaves" else wire.reset()
            await wait_until(partial(_stopped, worker, session), 30)
        assert (await outcomes(worker, session))[before:] == ["aborted"]
        await settled(standing)


async def _runs(worker: Worker, session: str) -> bool:
    return "running" in await outcomes(worker, session)


async def _stopped(worker: Worker, session: str) -> bool:
    return "running" not in await outcomes(worker, session)


async def test_a_client_that_leaves_while_it_uploads_is_forgotten(standing: Standing, session: str) -> None:
    [replica, _] = standing.replicas
    async with await Wire.to(replica.url) as wire:
        wire.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: any\r\nx-dynamo-session-id: %b\r\n"
            b'content-length: 1000\r\n\r\n{"model"' % session.encode()
        )
        await wait_until(lambda: _running(replica, 1), 30)
        wire.leave()
        await wait_until(lambda: _running(replica, 0), 30)
    assert not [record for worker in standing.workers for record in await turns(worker, session)]


async def _running(replica: Replica, count: int) -> bool:
    return total(await metrics(replica), "coatcheck_turns_running") == count


async def test_a_pipelined_request_waits_for_the_turn_before_it(standing: Standing, session: str) -> None:
    """More bytes of the client are no sign of its leaving."""
    async with await Wire.to(standing.urls[0]) as wire:
        wire.chat(session=session, stream=True, tokens=20)
        await wire.head()
        wire.chat(session=session, tokens=3)
        assert (await wire.body()).endswith(b"data: [DONE]\n\n")
        assert (await wire.answer()).json["usage"]["completion_tokens"] == 3


@dataclass
class Plan:
    """One client of the storm."""

    url: str
    session: str | None
    known: bool
    """The session has a claim before."""
    final: bool
    stream: bool
    tokens: int
    pieces: int | None
    """Leave after so many pieces of the answer; None: after `seconds`."""
    seconds: float
    crash: bool


def _plan(rng: random.Random, urls: list[str]) -> Plan:
    session = new_session() if rng.random() < 0.75 else None
    return Plan(
        url=rng.choice(urls),
        session=session,
        known=session is not None and rng.random() < 0.4,
        final=session is not None and rng.random() < 0.4,
        stream=rng.random() < 0.7,
        tokens=rng.choice((1, 5, 30, 100)),
        pieces=rng.choice((0, 1, 3, 10, None, None)),
        seconds=rng.choice((0.0, rng.uniform(0, 0.003), rng.uniform(0, 0.03), rng.uniform(0, 0.15))),
        crash=rng.random() < 0.5,
    )


async def _live_and_leave(plan: Plan, others: asyncio.Semaphore) -> None:
    async with others:
        if plan.known:
            assert (await turn(plan.url, session=plan.session, tokens=1)).status == 200
        async with await Wire.to(plan.url) as wire:
            wire.chat(session=plan.session, final=plan.final, stream=plan.stream, tokens=plan.tokens)
            if plan.pieces is None:
                await asyncio.sleep(plan.seconds)  # the client's own patience, not the test's
            else:
                await wire.head()
                for _ in range(plan.pieces):
                    if not await wire.read():
                        break
            wire.reset() if plan.crash else wire.leave()


async def test_clients_that_leave_at_random_leave_nothing_behind(standing: Standing) -> None:
    seed = int(os.environ.get("STORM_SEED", random.randrange(1 << 32)))
    print(f"STORM_SEED={seed}")
    rng = random.Random(seed)
    plans = [_plan(rng, standing.urls) for _ in range(120)]
    others = asyncio.Semaphore(30)
    await asyncio.gather(*(_live_and_leave(plan, others) for plan in plans))

    await settled(standing)
    await _no_connection_is_left(standing)
    for replica in standing.replicas:
        assert not total(await metrics(replica), "coatcheck_turns_total", 'outcome="failed"')
    records: dict[str, list[dict[str, Any]]] = {}
    for worker in standing.workers:
        for record in await turns(worker):
            records.setdefault(record["session"], []).append(record)
    assert any(record["outcome"] == "aborted" for each in records.values() for record in each)
    # A final that has reached its worker has closed, whatever became of its client. One whose client was gone
    # before the router had read it may never have been seen; then the session goes on where it was.
    for number, plan in enumerate(plan for plan in plans if plan.session is not None):
        assert plan.session is not None
        answer = await turn(standing.urls[number % 2], session=plan.session, tokens=1)
        assert answer.status == 200
        reached = len(records.get(plan.session, ())) == 1 + plan.known
        if plan.final and (reached or not plan.known):
            assert answer.affinity == "created", plan
        elif plan.known:
            assert answer.affinity in ("cached", "stored") or (plan.final and answer.affinity == "created"), plan
    await settled(standing)


async def test_clients_that_leave_while_a_connection_is_made_leave_none_behind(standing: Standing) -> None:
    """Every turn needs a connection of its own, because every turn before it was given up."""
    for worker in standing.workers:
        await order_fault(worker, mode="slow", times=None, ttft_ms=60_000)
    rng = random.Random(1)

    async def live_and_leave(url: str) -> None:
        async with await Wire.to(url) as wire:
            wire.chat()
            await asyncio.sleep(rng.uniform(0, 0.005))
            wire.leave()

    for _ in range(15):
        await asyncio.gather(*(live_and_leave(url) for url in standing.urls for _ in range(15)))
    await settled(standing)
    await _no_connection_is_left(standing)


async def _no_connection_is_left(standing: Standing) -> None:
    """With a client or a worker: each that is there now goes, but for one to each worker that is kept for probes.
    Others, of lists, come meanwhile."""
    workers = [_port(worker.url) for worker in standing.workers]
    for replica in standing.replicas:
        still_there = partial(replica.process.connections, _port(replica.url), *workers)
        now = still_there()
        await wait_until(partial(_all_went, now, still_there, len(workers)), 20)


def _all_went(before: set[str], still_there: Callable[[], set[str]], but: int) -> bool:
    return len(before & still_there()) <= but


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_the_end_may_come_together_with_the_client_s_leaving(standing: Standing) -> None:
    """Clients that close the moment in which they have the last byte: served, not aborted, and the pool is whole."""
    [replica, _] = standing.replicas
    before = total(await metrics(replica), "coatcheck_turns_total", 'outcome="aborted"')
    for number in range(50):
        async with await Wire.to(replica.url) as wire:
            wire.chat(stream=number % 2 == 0, tokens=1)
            await wire.answer()
            wire.reset()
    await settled(standing)
    assert total(await metrics(replica), "coatcheck_turns_total", 'outcome="aborted"') == before


async def test_a_client_that_closes_only_its_sending_half_has_left(standing: Standing, session: str) -> None:
    """The server in front treats the end of the request stream as the client's leaving; so must its worker."""
    worker = standing.worker((await turn(standing.urls[0], session=session)).worker)
    async with await Wire.to(standing.urls[0]) as wire:
        wire.chat(session=session, stream=True, tokens=100_000)
        await wire.until_body(b"data: ")
        wire.finish_sending()
        await wire.until_cut()
    await wait_until(lambda: _stopped(worker, session), 30)
    await settled(standing)
