"""One of three workers is sick and alive: it takes connections, and serves nothing. Real processes, two replicas,
claims in files. What counts is what its clients got, and what the workers say that they served."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.e2e.conftest import new_session
from tests.support.processes import (
    Processes,
    Replica,
    Worker,
    clear_faults,
    metrics,
    order_fault,
    total,
    turns,
    wait_until,
)
from tests.support.wire import Cut, ask, turn

NEW = 300
AT_ONCE = 30
MOST_FAILED = AT_ONCE // 3
"""Each replica gives the sick worker three turns before that has answered any; more only when the others owe as many
answers, and then no more than each of these: a third of the turns that run there."""
FIRST_BYTE = 4.0
"""Seconds; who is well must answer within them on a busy machine, too."""
SLOW_START = 0.5
DOWN_AFTER = 1.0
TRIALS = (DOWN_AFTER, 3 * DOWN_AFTER, 7 * DOWN_AFTER, *(DOWN_AFTER * (13 + 6 * more) for more in range(10)))
"""Seconds after which a replica has given a suspected worker so many turns to try, at the earliest: they fail, too."""

SICK: dict[str, dict[str, Any]] = {
    "errors": {"mode": "status", "status": 500},
    "errors, its probes too": {"mode": "status", "status": 500, "probes": True},
    "503 to all": {"mode": "status", "status": 503, "probes": True},
    "closes": {"mode": "reset"},
    "silence": {"mode": "hang"},
    "silence, its probes too": {"mode": "hang", "probes": True},
}


@dataclass
class Fleet:
    workers: list[Worker]
    replicas: list[Replica]

    @property
    def sick(self) -> Worker:
        return self.workers[0]

    async def turn(self, session: str | None, number: int = 0, **how: Any) -> tuple[int, str | None]:
        """Its status, 0 where there is none, and its worker."""
        try:
            answer = await turn(self.replicas[number % 2].url, session=session, tokens=2, **how)
        except (Cut, OSError):
            return 0, None
        return answer.status, answer.worker

    async def each(self, sessions: Sequence[str | None]) -> dict[str | None, tuple[int, str | None]]:
        """A turn of each, some at once, half of the clients at each replica."""
        waiting = list(sessions)
        answers: dict[str | None, tuple[int, str | None]] = {}

        async def client(number: int) -> None:
            while waiting:
                session = waiting.pop(0)
                answers[session] = await self.turn(session, number)

        await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
        return answers

    async def states(self, replica: Replica) -> dict[str, str]:
        answer = await ask(replica.url, target="/admin/workers", headers=[("host", "localhost")])
        return {each["name"]: each["state"] for each in answer.json["workers"]}

    async def rests(self) -> None:
        """Returns when each replica has heard that the other has nothing to do: its second word from now on."""

        async def heard(replica: Replica, since: float) -> bool:
            told = (await ask(replica.url, target="/admin/replicas", headers=[("host", "localhost")])).json["replicas"]
            ago = [each["heard_seconds_ago"] for each in told if not each["this"]]
            return bool(ago) and None not in ago and time.monotonic() - max(ago) > since

        for _ in range(2):
            since = time.monotonic()
            for replica in self.replicas:
                await wait_until(partial(heard, replica, since), 30)

    async def all_are(self, *states: str, worker: int = 0) -> bool:
        name = self.workers[worker].name
        return all([(await self.states(replica))[name] in states for replica in self.replicas])


@pytest.fixture(scope="module")
def running(module_processes: Processes) -> Fleet:
    workers = module_processes.workers(3, "--ttft-ms", "5", "--itl-ms", "1")
    options = [
        f"--first-byte-timeout={FIRST_BYTE}",
        f"--down-after={DOWN_AFTER}",
        "--probe-interval=0.3",
        "--probe-timeout=1",
        f"--slow-start={SLOW_START}",
        "--store-deadline=20",  # a busy machine is no outage of the store
    ]
    return Fleet(workers, module_processes.replicas(2, workers, module_processes.folder / "claims", *options))


@pytest.fixture
async def fleet(running: Fleet) -> AsyncIterator[Fleet]:
    """All up; and at the end as well, with nothing left of the test."""
    for number in range(len(running.workers)):
        await wait_until(partial(running.all_are, "up", worker=number), 40)
    yield running
    await clear_faults(running.sick)
    for replica in running.replicas:
        for gauge in ("coatcheck_in_flight", "coatcheck_turns_running"):
            await wait_until(partial(_is_zero, replica, gauge), 10)
        assert not total(await metrics(replica), "coatcheck_turns_total", 'outcome="failed"')
    await _recover(running)


async def _is_zero(replica: Replica, gauge: str) -> bool:
    return total(await metrics(replica), gauge) == 0


async def _recover(fleet: Fleet) -> None:
    """It gets trial turns, and is up at both replicas."""

    async def tried() -> bool:
        await fleet.each([None] * 6)
        return await fleet.all_are("up")

    await wait_until(tried, 25)


@pytest.mark.parametrize(
    ("how", "since"),
    [("silence", "the start"), ("errors", "mid-run"), ("503 to all", "mid-run"), ("closes", "mid-run")],
)
async def test_a_sick_worker_costs_few_turns_and_keeps_no_session(fleet: Fleet, how: str, since: str) -> None:
    """Its bound sessions move, the others' stay; new ones go by; when it is well again it gets its share."""
    bound: dict[str | None, str | None] = {}
    if since == "mid-run":
        # One that was sick a moment ago may be given little at first.
        while not {worker.name for worker in fleet.workers} <= set(bound.values()) and len(bound) < 300:
            answers = await fleet.each([new_session() for _ in range(30)])
            bound |= {session: worker for session, (_, worker) in answers.items()}
        assert set(bound.values()) == {worker.name for worker in fleet.workers}
        await fleet.rests()  # whoever had less to do than the others, in a test before, would be given more
    else:
        assert not [await turns(worker) for worker in fleet.workers if await turns(worker)]
    await order_fault(fleet.sick, times=None, **SICK[how])

    began = time.monotonic()
    answers = await fleet.each([new_session() for _ in range(NEW)])
    tried = 2 * sum(time.monotonic() - began >= at for at in TRIALS)
    failed = [answer for answer in answers.values() if answer[0] != 200]
    assert len(failed) <= MOST_FAILED + tried, (Counter(failed), Counter(answers.values()))

    failures: Counter[str | None] = Counter()
    at: dict[str | None, str | None] = dict(bound)
    some = asyncio.Semaphore(AT_ONCE)

    async def go_on(session: str | None, number: int) -> None:
        while failures[session] <= 5:
            async with some:
                status, worker = await fleet.turn(session, number)
            if status == 200:
                at[session] = worker
                return
            failures[session] += 1
            await asyncio.sleep(DOWN_AFTER / 2)

    theirs = [*bound, *answers]
    await asyncio.gather(*(go_on(session, number) for number, session in enumerate(theirs)))
    assert max(failures.values(), default=0) <= 5
    assert fleet.sick.name not in at.values()
    moved = {session for session, worker in bound.items() if at[session] != worker}
    assert moved == {session for session, worker in bound.items() if worker == fleet.sick.name}
    assert not [session for session in failures if bound.get(session, fleet.sick.name) != fleet.sick.name]

    await clear_faults(fleet.sick)
    await _recover(fleet)
    await asyncio.sleep(SLOW_START)
    shares = Counter(worker for _, worker in (await fleet.each([new_session() for _ in range(90)])).values())
    assert shares[fleet.sick.name] >= 15, shares


@pytest.mark.parametrize("how", ["errors, its probes too", "503 to all", "silence, its probes too"])
async def test_found_sick_and_found_well_without_a_turn(fleet: Fleet, how: str) -> None:
    await order_fault(fleet.sick, times=None, **SICK[how])
    await wait_until(lambda: fleet.all_are("starting", "suspect"), 15)
    await clear_faults(fleet.sick)
    await wait_until(lambda: fleet.all_are("up"), 40)


async def test_what_is_no_illness_changes_nothing(fleet: Fleet) -> None:
    """Twenty bad prompts, a burst of 429s, one 500 and a slow probe."""

    async def to_the_first(times: int, **fault: Any) -> None:
        await order_fault(fleet.sick, times=times, mode="status", **fault)
        for number in range(times):
            status, _ = await fleet.turn(None, number, headers=[("x-dynamo-worker-instance-id", fleet.sick.name)])
            assert status == fault["status"]

    before = [total(await metrics(replica), "coatcheck_worker_state_changes_total") for replica in fleet.replicas]
    await to_the_first(20, status=400)
    await to_the_first(40, status=429)
    await to_the_first(1, status=500)
    await order_fault(fleet.sick, mode="slow", ttft_ms=600, probes=True)
    await asyncio.sleep(0.5)
    await clear_faults(fleet.sick)
    after = [total(await metrics(replica), "coatcheck_worker_state_changes_total") for replica in fleet.replicas]
    assert after == before


async def test_when_all_fail_all_are_used_and_each_says_what_it_says(fleet: Fleet) -> None:
    for worker in fleet.workers:
        await order_fault(worker, times=None, mode="status", status=500)
    answers = await fleet.each([new_session() for _ in range(60)])
    assert {status for status, _ in answers.values()} == {500}
    for replica in fleet.replicas:
        states = Counter((await fleet.states(replica)).values())
        assert states["up"] >= 2, states
        assert (await ask(replica.url, target="/ready")).status == 200
    for worker in fleet.workers:
        await clear_faults(worker)
    for number in range(3):
        await wait_until(lambda number=number: _well(fleet, number), 25)  # type: ignore[misc]


async def _well(fleet: Fleet, number: int) -> bool:
    await fleet.each([None] * 6)
    return await fleet.all_are("up", worker=number)


async def test_serve_check_probe_asks_each_worker_once(running: Fleet, processes: Processes) -> None:
    process = processes.start(
        "check",
        "app",
        "serve",
        "--check",
        "--probe",
        f"--claims=file://{processes.folder}/claims",
        f"--worker={running.workers[1].url},name=there",
        "--worker=http://127.0.0.1:9,name=away",
    )
    assert process.wait(20) == 1
    said = process.output()
    assert "worker there: good" in said
    assert "worker away: unreachable" in said


async def test_what_workers_did_is_told_by_name(fleet: Fleet) -> None:
    await fleet.turn(None, headers=[("x-dynamo-worker-instance-id", "w1")])
    samples = await metrics(fleet.replicas[0])
    assert total(samples, "coatcheck_worker_turns_total", 'worker="w1"', 'outcome="completed"', 'status="2xx"')
    assert total(samples, "coatcheck_worker_ttft_seconds_count", 'worker="w1"')
    assert total(samples, "coatcheck_worker_probes_total", 'worker="w1"', 'result="good"')
    assert total(samples, "coatcheck_worker_state", 'worker="w1"', 'state="up"') == 1
    row = (await ask(fleet.replicas[0].url, target="/admin/workers", headers=[("host", "localhost")])).json
    told = next(each for each in row["workers"] if each["name"] == "w1")
    assert told["turns"] >= 1
    assert told["reason"]
    assert json.dumps(told)
    assert await turns(fleet.workers[1])


async def test_ready_says_what_is_there_and_does_not_flap(running: Fleet) -> None:
    """The last one here: nothing is left of the workers."""
    replica, _ = running.replicas
    begin = len(replica.process.output())
    for number in range(len(running.workers)):
        await wait_until(partial(running.all_are, "up", worker=number), 40)

    async def ready() -> int:
        return (await ask(replica.url, target="/ready")).status

    async def not_ready() -> bool:
        return await ready() == 503

    await order_fault(running.sick, times=None, **SICK["503 to all"])
    await wait_until(lambda: running.all_are("starting"), 15)
    assert await ready() == 200
    running.sick.process.kill()
    await wait_until(not_ready, 15)
    seen = set()
    for _ in range(60):
        seen.add(await ready())
        await asyncio.sleep(0.02)
    assert seen == {503}
    lines = [line for line in replica.process.output(begin).splitlines() if " -> down" in line]
    assert len(lines) == len(running.workers), lines
