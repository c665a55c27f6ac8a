"""Affinity over real processes. Where a turn ran is read from the workers' own records, never from the router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Standing, new_session
from tests.support.processes import (
    Processes,
    Replica,
    Worker,
    metrics,
    order_fault,
    total,
    turns,
    wait_until,
)
from tests.support.wire import Answer, Wire, turn

DONE = b"data: [DONE]"
QUIET = ("coatcheck_in_flight", "coatcheck_turns_running", "coatcheck_session_turns_active", "coatcheck_pending_closes")


async def served(workers: Sequence[Worker], sessions: Sequence[str]) -> dict[str, list[str]]:
    """The workers of each session's turns, by the records of those workers that are alive."""
    where: dict[str, list[str]] = {session: [] for session in sessions}
    for worker in workers:
        if worker.process.alive:
            for record in await turns(worker):
                if record["session"] in where:
                    where[record["session"]].append(worker.name)
    return where


async def quiet(standing: Standing) -> bool:
    samples = [await metrics(replica) for replica in standing.replicas]
    return not any(total(each, name) for each in samples for name in QUIET)


# --- one session, one worker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", ["none", "mixed"])
async def test_first_turns_that_arrive_at_once_at_two_replicas_meet_at_one_worker(
    standing: Standing, streams: str
) -> None:
    sessions = [new_session() for _ in range(100)]
    for start in range(0, len(sessions), 50):
        await asyncio.gather(
            *(
                _two_first_turns(standing.urls, session, number, mixed=streams == "mixed")
                for number, session in enumerate(sessions[start : start + 50])
            )
        )
    where = await served(standing.workers, sessions)
    assert {len(workers) for workers in where.values()} == {2}
    split = [session for session, workers in where.items() if len(set(workers)) > 1]
    assert not split, f"{len(split)} of {len(sessions)} sessions are split"
    spread = Counter(workers[0] for workers in where.values())
    assert spread.keys() == {worker.name for worker in standing.workers}


async def _two_first_turns(urls: Sequence[str], session: str, number: int, *, mixed: bool) -> None:
    """Both requests leave within one step of this process: nothing is closer together."""
    first, second = urls if number % 2 else reversed(urls)
    async with await Wire.to(first) as one, await Wire.to(second) as other:
        one.chat(session=session, content=f"One says {number}.", stream=mixed and number % 3 == 0)
        other.chat(session=session, content=f"Quite another thing, {number}.", stream=mixed and number % 4 < 2)
        assert [answer.status for answer in await asyncio.gather(one.answer(), other.answer())] == [200, 200]


async def test_many_first_turns_at_both_replicas_meet_at_one_worker(standing: Standing, session: str) -> None:
    answers = await asyncio.gather(
        *(turn(url, session=session, content=str(number)) for number in range(20) for url in standing.urls)
    )
    assert Counter(answer.affinity for answer in answers)["created"] == 1
    assert len(set((await served(standing.workers, [session]))[session])) == 1


async def test_the_second_turn_finds_its_cache_through_the_other_replica(standing: Standing) -> None:
    for there, back in (standing.urls, reversed(standing.urls)):
        session = new_session()
        messages = [{"role": "user", "content": "Tell me of the sea, at some length if you please."}]
        first = await turn(there, session=session, messages=messages, tokens=8)
        messages.append({"role": "assistant", "content": first.json["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "And of its ships."})
        second = await turn(back, session=session, messages=messages)
        assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 15
        assert (first.affinity, second.affinity) == ("created", "stored")


async def test_turns_without_a_session_are_not_bound(standing: Standing) -> None:
    async def all_have_some() -> bool:
        answers = [await turn(url) for url in standing.urls * 4]
        assert {answer.affinity for answer in answers} == {"none"}
        return len({answer.worker for answer in answers}) == len(standing.workers)

    await wait_until(all_have_some, 30)  # a worker that another test has stopped is tried first


# --- hints -----------------------------------------------------------------------------------------------------------


async def test_a_hint_decides_where_a_session_begins(standing: Standing) -> None:
    """Thrice in a row at the same worker, which no policy would do."""
    for worker in standing.workers:
        for number in range(3):
            session = new_session()
            hint = [("x-dynamo-worker-instance-id", worker.name)]
            assert (await turn(standing.urls[number % 2], session=session, headers=hint)).affinity == "created"
            await turn(standing.urls[(number + 1) % 2], session=session)
            assert (await served(standing.workers, [session]))[session] == [worker.name] * 2


async def test_a_claim_overrides_a_hint(standing: Standing) -> None:
    for worker in standing.workers:
        session = new_session()
        await turn(standing.urls[0], session=session, headers=[("x-dynamo-worker-instance-id", worker.name)])
        for other in standing.workers:
            for url in standing.urls:
                answer = await turn(url, session=session, headers=[("x-dynamo-worker-instance-id", other.name)])
                assert answer.status == 200
        assert (await served(standing.workers, [session]))[session] == [worker.name] * 9


async def test_a_hint_that_names_no_worker_is_refused_and_binds_nothing(standing: Standing, session: str) -> None:
    answer = await turn(standing.urls[0], session=session, headers=[("x-dynamo-worker-instance-id", "nobody")])
    assert (answer.status, answer.json["error"]["code"]) == (400, "unknown_worker")
    assert (await turn(standing.urls[1], session=session)).affinity == "created"


# --- finals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["there", "back", "same"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_close_is_seen_everywhere_as_soon_as_the_client_saw_the_end(
    standing: Standing, stream: bool, direction: str
) -> None:
    """Both replicas have the session in their caches. The next request leaves in the moment in which the last byte
    came, or, in a stream, the event that clients take for the end."""
    here, other = standing.urls if direction != "back" else reversed(standing.urls)
    after = here if direction == "same" else other
    outcomes: Counter[str | None] = Counter()
    for number in range(20):
        session = new_session()
        for url in (here, other):
            assert (await turn(url, session=session, tokens=1)).status == 200
        async with await Wire.to(here) as last, await Wire.to(after) as new:
            last.chat(session=session, final=True, stream=stream, tokens=3)
            if stream and number % 2:
                await last.until_body(DONE)
            else:
                await last.answer()
            new.chat(session=session, tokens=1)
            outcomes[(await new.answer()).affinity] += 1
    assert outcomes == {"created": 20}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_first_turn_may_be_the_final_one(standing: Standing, session: str, stream: bool) -> None:
    for url in standing.urls * 3:
        answer = await turn(url, session=session, final=True, stream=stream)
        assert (answer.status, answer.affinity) == (200, "created")


async def test_a_close_waits_for_the_session_s_last_turn_here(standing: Standing, session: str) -> None:
    here, other = standing.urls
    worker = standing.worker((await turn(here, session=session)).worker)
    async with await Wire.to(here) as longest:
        longest.chat(session=session, stream=True, tokens=1200)
        await longest.until_body(b"data: ")
        assert (await turn(here, session=session, final=True)).affinity in ("cached", "stored")
        for url in (here, other):
            assert (await turn(url, session=session)).affinity in ("cached", "stored")
        await longest.until(DONE)
        assert (await turn(other, session=session)).affinity == "created"
    records = [record for record in await turns(worker, session) if record["completion_tokens"] != 1]
    ended_last = max(records[:5], key=lambda record: record["end"])
    assert ended_last["completion_tokens"] == 1200, "the test was too slow to see anything"


async def test_two_finals_at_once_on_one_replica(standing: Standing) -> None:
    for _ in range(20):
        session = new_session()
        here, other = standing.urls
        first = await turn(other, session=session)
        both = await asyncio.gather(*(turn(here, session=session, final=True) for _ in range(2)))
        assert [answer.status for answer in both] == [200, 200]
        assert {answer.worker for answer in both} == {first.worker}
        assert (await turn(other, session=session)).affinity == "created"


async def test_two_finals_at_once_on_two_replicas(standing: Standing) -> None:
    for number in range(20):
        session = new_session()
        await turn(standing.urls[0], session=session)
        both = await asyncio.gather(*(turn(url, session=session, final=True) for url in standing.urls))
        assert [answer.status for answer in both] == [200, 200]
        assert (await turn(standing.urls[number % 2], session=session)).affinity == "created"


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
async def test_a_final_turn_that_the_client_will_retry_keeps_the_claim(
    standing: Standing, session: str, status: int
) -> None:
    here, other = standing.urls
    worker = standing.worker((await turn(here, session=session)).worker)
    await order_fault(worker, mode="status", status=status)
    assert (await turn(here, session=session, final=True)).status == status
    again = await turn(other, session=session, final=True)
    assert (again.status, again.affinity, again.worker) == (200, "stored", worker.name)
    assert (await turn(here, session=session)).affinity == "created"


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_final_turn_that_will_never_succeed_closes(standing: Standing, session: str, status: int) -> None:
    here, other = standing.urls
    worker = standing.worker((await turn(here, session=session)).worker)
    await order_fault(worker, mode="status", status=status)
    assert (await turn(here, session=session, final=True)).status == status
    assert (await turn(other, session=session)).affinity == "created"


async def test_a_final_turn_whose_stream_breaks_closes(standing: Standing, session: str) -> None:
    here, other = standing.urls
    worker = standing.worker((await turn(here, session=session)).worker)
    await order_fault(worker, mode="reset", after_tokens=2)
    async with await Wire.to(here) as wire:
        wire.chat(session=session, final=True, stream=True, tokens=9)
        await wire.until_body(b'"worker_stream_broken"')
        assert (await turn(other, session=session)).affinity == "created"


@pytest.mark.parametrize("moment", ["before the head", "before the first token", "in the stream"])
async def test_a_client_that_leaves_its_final_turn_has_closed(standing: Standing, session: str, moment: str) -> None:
    here, other = standing.urls
    worker = standing.worker((await turn(here, session=session)).worker)
    await turn(other, session=session)
    if moment != "in the stream":
        await order_fault(worker, mode="slow", ttft_ms=60_000)
    async with await Wire.to(here) as wire:
        wire.chat(session=session, final=True, stream=moment != "before the head", tokens=10_000)
        if moment == "in the stream":
            await wire.until_body(b"data: ")
        await wait_until(lambda: _outcomes(worker, session, "running"), 30)
        wire.leave()
    await wait_until(lambda: quiet(standing), 30)
    assert len(await _outcomes(worker, session, "aborted")) == 1
    assert (await turn(other, session=session)).affinity == "created"


async def _outcomes(worker: Worker, session: str, outcome: str) -> list[dict[str, Any]]:
    return [record for record in await turns(worker, session) if record["outcome"] == outcome]


# --- losses ----------------------------------------------------------------------------------------------------------


async def test_the_sessions_of_a_killed_replica_go_on_where_they_were(
    standing: Standing, processes: Processes, tmp_path: Path
) -> None:
    doomed, survivor = processes.replicas(2, standing.workers, tmp_path / "claims")
    sessions = [new_session() for _ in range(40)]
    first = await asyncio.gather(
        *(turn((doomed, survivor)[n % 4 == 0].url, session=s, tokens=4) for n, s in enumerate(sessions))
    )
    async with await Wire.to(doomed.url) as wire:
        wire.chat(session=sessions[0], stream=True, tokens=10_000)
        await wire.until_body(b"data: ")
        doomed.process.kill()
    second = await asyncio.gather(*(turn(survivor.url, session=session, tokens=4) for session in sessions))
    assert {answer.status for answer in second} == {200}
    assert [answer.worker for answer in second] == [answer.worker for answer in first]
    assert all(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in second)
    where = await served(standing.workers, sessions)
    assert all(len(set(workers)) == 1 and len(workers) >= 2 for workers in where.values())


async def test_the_sessions_of_a_killed_worker_move_together_within_the_turn(
    processes: Processes, tmp_path: Path
) -> None:
    workers = processes.workers(3, "--ttft-ms", "2", "--itl-ms", "1", apart=True)
    replicas = processes.replicas(2, workers, tmp_path / "claims")
    sessions = [new_session() for _ in range(36)]
    at: dict[str, Any] = {}
    for session in sessions:
        for replica in replicas:  # both have it in their caches
            at[session] = (await turn(replica.url, session=session)).worker
    doomed = workers[1]
    lost = [session for session in sessions if at[session] == doomed.name]
    assert len(lost) >= 8
    async with await Wire.to(replicas[0].url) as wire:
        wire.chat(stream=True, tokens=10_000, headers=[("x-dynamo-worker-instance-id", doomed.name)])
        await wire.until_body(b"data: ")
        doomed.process.kill()
        await wire.until(b'"worker_stream_broken"')

    # Every session at both replicas at once, with turns that have no session among them.
    pairs = await asyncio.gather(
        *(asyncio.gather(*(turn(r.url, session=session) for r in replicas)) for session in sessions),
        *(asyncio.gather(*(turn(r.url) for r in replicas)) for _ in range(15)),
    )
    assert {answer.status for pair in pairs for answer in pair} == {200}
    moved: dict[str, list[Answer]] = {}
    for session, pair in zip(sessions, pairs, strict=False):
        assert len({answer.worker for answer in pair}) == 1
        if session in lost:
            moved[session] = pair
            assert "rebound" in {answer.affinity for answer in pair}
        else:
            assert pair[0].worker == at[session]
    where = await served(workers, sessions)
    for session in sessions:
        assert len(where[session]) == (2 if session in lost else 4)
        assert len(set(where[session])) == 1
    assert len({moved[session][0].worker for session in lost}) == 2, "all sessions of the lost worker went to one place"
    # And there they stay.
    for session in lost:
        again = [await turn(replica.url, session=session) for replica in replicas]
        assert {answer.worker for answer in again} == {moved[session][0].worker}
        assert not {answer.affinity for answer in again} & {"created", "rebound", "degraded"}


async def test_a_worker_that_is_slow_keeps_its_sessions(processes: Processes, tmp_path: Path) -> None:
    """Frozen is as slow as can be: it accepts connections and answers nothing."""
    workers = processes.workers(2, "--ttft-ms", "2", "--itl-ms", "1", apart=True)
    replicas = processes.replicas(2, workers, tmp_path / "claims")
    session = new_session()
    name = (await turn(replicas[0].url, session=session)).worker
    [frozen] = [worker for worker in workers if worker.name == name]
    frozen.process.freeze()
    waiting = [asyncio.create_task(turn(replica.url, session=session)) for replica in replicas for _ in range(3)]
    for replica in replicas:
        await wait_until(partial(_holds, replica, frozen, 3), 30)
    done, _ = await asyncio.wait(waiting, timeout=0.5)
    assert not done
    frozen.process.thaw()
    assert {(answer.status, answer.worker) for answer in await asyncio.gather(*waiting)} == {(200, frozen.name)}
    assert (await served(workers, [session]))[session] == [frozen.name] * 7


async def _holds(replica: Replica, worker: Worker, count: int) -> bool:
    samples = await metrics(replica)
    return total(samples, "coatcheck_in_flight", f'worker="{worker.name}"') == count
