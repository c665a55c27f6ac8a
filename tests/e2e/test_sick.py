"""One of three workers is sick and alive: it takes connections, and serves nothing. Real processes, two replicas with
claims in files and two with claims in etcd, which see it at the same time. What counts is what its clients got, and
what the workers say that they served."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.e2e.conftest import new_session
from tests.support.etcd import EtcdServer
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

pytestmark = pytest.mark.timeout(300)  # a busy machine takes its time to start nine processes

NEW = 300
AT_ONCE = 30
MOST_FAILED = AT_ONCE // 3 + 4
"""Of the turns that come before any has failed as many go to the sick worker as to each of the others: a third of what
runs at once. Beyond that 1 or 2 more fail on a quiet machine, and 3 were seen on a busy one."""
FIRST_BYTE = 4.0
"""Seconds; who is well must answer within them on a busy machine, too."""
SLOW_START = 0.5
DOWN_AFTER = 1.0
TRIALS = tuple(DOWN_AFTER * (1 + 1.5 * more) for more in range(40))
"""Seconds after which a replica has given a suspected worker so many turns to try, at the earliest: they fail, too."""

SICK: dict[str, dict[str, Any]] = {
    "errors": {"mode": "status", "status": 500},
    "errors, its probes too": {"mode": "status", "status": 500, "probes": True},
    "503 to all": {"mode": "status", "status": 503, "probes": True},
    "closes": {"mode": "reset"},
    "silence": {"mode": "hang"},
    "silence, its probes too": {"mode": "hang", "probes": True},
}
KINDS = ["errors", "503 to all", "closes", "silence"]


@dataclass
class Fleet:
    """Three workers that serve a model of their own, and two replicas that serve others as well."""

    workers: list[Worker]
    replicas: list[Replica]
    model: str

    @property
    def sick(self) -> Worker:
        return self.workers[0]

    async def turn(self, session: str | None, number: int = 0, **how: Any) -> tuple[int, str | None]:
        """Its status, 0 where there is none, and its worker."""
        try:
            answer = await turn(self.replicas[number % 2].url, session=session, model=self.model, tokens=2, **how)
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

    async def rows(self, replica: Replica) -> list[dict[str, Any]]:
        answer = await ask(replica.url, target="/admin/workers", headers=[("host", "localhost")])
        return answer.json["workers"]  # type: ignore[no-any-return]

    async def states(self, replica: Replica) -> dict[str, str]:
        return {each["name"]: each["state"] for each in await self.rows(replica)}

    async def know_models(self) -> bool:
        """Of all workers: one that has not told its own may be given a turn of any."""
        rows = [row for replica in self.replicas for row in await self.rows(replica)]
        return all(row["models"] for row in rows)

    async def all_are(self, *states: str, worker: int = 0) -> bool:
        name = self.workers[worker].name
        return all([(await self.states(replica))[name] in states for replica in self.replicas])


Do = Callable[[Fleet], Awaitable[object]]


@dataclass
class Both:
    """The same workers as those see that have their claims in files, and those that have them in etcd."""

    fleets: list[Fleet]

    @property
    def sick(self) -> Worker:
        return self.fleets[0].sick

    async def do(self, what: Do) -> None:
        await asyncio.gather(*map(what, self.fleets))


@dataclass
class Running:
    groups: list[list[Worker]]
    """Each serves a model of its own."""
    pairs: list[list[Replica]]

    def both(self, number: int) -> Both:
        return Both([Fleet(self.groups[number], pair, f"m{number}") for pair in self.pairs])

    @property
    def replicas(self) -> list[Replica]:
        return [replica for pair in self.pairs for replica in pair]


@pytest.fixture(scope="module")
def running(module_processes: Processes) -> Iterator[Running]:
    mocks = [
        module_processes.start(
            "workers",
            "mocker",
            "--port",
            "0",
            "--count",
            "3",
            "--ttft-ms",
            "5",
            "--itl-ms",
            "1",
            "--model",
            f"m{number}",
        )
        for number in range(len(KINDS))
    ]
    groups = [
        [Worker(f"m{number}-w{place}", url, each) for place, url in enumerate(each.urls(3))]
        for number, each in enumerate(mocks)
    ]
    options = [
        *(f"--worker={each.url},name={each.name}" for group in groups for each in group),
        f"--first-byte-timeout={FIRST_BYTE}",
        f"--down-after={DOWN_AFTER}",
        "--probe-interval=0.5",
        "--probe-timeout=1",
        f"--slow-start={SLOW_START}",
        "--store-deadline=20",  # a busy machine is no outage of the store
    ]
    with EtcdServer() as etcd:
        stores = [f"file://{module_processes.folder}/claims", etcd.url()]
        replicas = module_processes.replicas_with(*([f"--claims={store}", *options] for store in stores for _ in "ab"))
        yield Running(groups, [replicas[:2], replicas[2:]])


async def _begin(running: Running, number: int) -> AsyncIterator[Both]:
    """All up; and at the end as well, with nothing left of the test."""
    both = running.both(number)

    async def all_up(fleet: Fleet) -> None:
        await wait_until(fleet.know_models, 60)
        for worker in range(3):
            await wait_until(partial(fleet.all_are, "up", worker=worker), 15)

    await both.do(all_up)
    yield both
    await clear_faults(both.sick)
    for replica in running.replicas:
        for gauge in ("coatcheck_in_flight", "coatcheck_turns_running"):
            await wait_until(partial(_is_zero, replica, gauge), 15)
        assert not total(await metrics(replica), "coatcheck_turns_total", 'outcome="failed"')
    await both.do(_recover)


@pytest.fixture
async def both(running: Running, request: pytest.FixtureRequest) -> AsyncIterator[Both]:
    """Of the kind of illness, `how`, that the test is given; else of the first one."""
    callspec = getattr(request.node, "callspec", None)
    how = callspec.params.get("how") if callspec is not None else None
    async for each in _begin(running, KINDS.index(how) if how in KINDS else 0):
        yield each


async def _is_zero(replica: Replica, gauge: str) -> bool:
    return total(await metrics(replica), gauge) == 0


async def _recover(fleet: Fleet) -> None:
    """It gets trial turns, and is up at both replicas."""

    async def tried() -> bool:
        await fleet.each([None] * 6)
        return await fleet.all_are("up")

    await wait_until(tried, 15)


@pytest.mark.parametrize("since", ["the start", "mid-run"])
@pytest.mark.parametrize("how", KINDS)
async def test_a_sick_worker_costs_few_turns_and_keeps_no_session(both: Both, how: str, since: str) -> None:
    """Its bound sessions move, the others' stay; new ones go by; when it is well again it gets its share."""
    bound: dict[str, dict[str | None, str | None]] = {}

    async def begin(fleet: Fleet) -> None:
        at = bound[fleet.replicas[0].url] = {}
        # One that was sick a moment ago may be given little at first.
        while since == "mid-run" and not {worker.name for worker in fleet.workers} <= set(at.values()):
            assert len(at) < 300
            answers = await fleet.each([new_session() for _ in range(AT_ONCE)])
            at |= {session: worker for session, (status, worker) in answers.items() if status == 200}

    async def suffer(fleet: Fleet) -> None:
        await _suffer(fleet, bound[fleet.replicas[0].url])

    if since == "the start":
        assert not [worker for worker in both.fleets[0].workers if await turns(worker)]
    await both.do(begin)
    await order_fault(both.sick, times=None, **SICK[how])
    await both.do(suffer)
    await clear_faults(both.sick)
    await both.do(_gets_its_share)


async def _suffer(fleet: Fleet, bound: dict[str | None, str | None]) -> None:
    began = time.monotonic()
    answers = await fleet.each([new_session() for _ in range(NEW)])
    tried = 2 * sum(time.monotonic() - began >= at for at in TRIALS)
    failed = {session: status for session, (status, _) in answers.items() if status != 200}
    assert len(failed) <= MOST_FAILED + tried, (Counter(failed.values()), Counter(answers.values()))

    failures: Counter[str | None] = Counter()
    at: dict[str | None, str | None] = {}
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

    theirs = [*bound, *failed]  # whom somebody served is there
    await asyncio.gather(*(go_on(session, number) for number, session in enumerate(theirs)))
    assert max(failures.values(), default=0) <= 5
    assert fleet.sick.name not in at.values()
    assert fleet.sick.name not in {worker for status, worker in answers.values() if status == 200}
    moved = {session for session, worker in bound.items() if at[session] != worker}
    assert moved == {session for session, worker in bound.items() if worker == fleet.sick.name}
    assert not [session for session in failures if bound.get(session, fleet.sick.name) != fleet.sick.name]


async def _gets_its_share(fleet: Fleet) -> None:
    await _recover(fleet)
    await asyncio.sleep(SLOW_START)
    shares = Counter(worker for _, worker in (await fleet.each([new_session() for _ in range(60)])).values())
    assert shares[fleet.sick.name] >= 10, shares


@pytest.mark.parametrize("how", ["errors, its probes too", "503 to all", "silence, its probes too"])
async def test_found_sick_and_found_well_without_a_turn(both: Both, how: str) -> None:
    await order_fault(both.sick, times=None, **SICK[how])
    await both.do(lambda fleet: wait_until(lambda: fleet.all_are("starting", "suspect"), 15))
    await clear_faults(both.sick)
    await both.do(lambda fleet: wait_until(lambda: fleet.all_are("up"), 15))


async def test_what_is_no_illness_changes_nothing(both: Both) -> None:
    """Twenty bad prompts, a burst of 429s, one 500 and a slow probe."""

    async def told(fleet: Fleet) -> list[float]:
        return [total(await metrics(replica), "coatcheck_worker_state_changes_total") for replica in fleet.replicas]

    async def to_the_first(times: int, **fault: Any) -> None:
        for fleet in both.fleets:
            await order_fault(both.sick, times=times, mode="status", **fault)
            for number in range(times):
                status, _ = await fleet.turn(None, number, headers=[("x-dynamo-worker-instance-id", both.sick.name)])
                assert status == fault["status"]

    before = [await told(fleet) for fleet in both.fleets]
    await to_the_first(20, status=400)
    await to_the_first(40, status=429)
    await to_the_first(1, status=500)
    await order_fault(both.sick, mode="slow", ttft_ms=600, probes=True)
    await asyncio.sleep(0.5)
    await clear_faults(both.sick)
    assert [await told(fleet) for fleet in both.fleets] == before


async def test_when_all_fail_all_are_used_and_each_says_what_it_says(both: Both) -> None:
    workers = both.fleets[0].workers
    for worker in workers:
        await order_fault(worker, times=None, mode="status", status=500)

    async def all_fail(fleet: Fleet) -> None:
        answers = await fleet.each([new_session() for _ in range(60)])
        assert {status for status, _ in answers.values()} == {500}
        for replica in fleet.replicas:
            states = await fleet.states(replica)
            assert sum(states[worker.name] == "up" for worker in workers) >= 2, states
            assert (await ask(replica.url, target="/ready")).status == 200

    await both.do(all_fail)
    for worker in workers:
        await clear_faults(worker)

    async def all_well(fleet: Fleet) -> None:
        for number in range(len(workers)):
            await wait_until(lambda number=number: _well(fleet, number), 15)  # type: ignore[misc]

    await both.do(all_well)


async def _well(fleet: Fleet, number: int) -> bool:
    await fleet.each([None] * 6)
    return await fleet.all_are("up", worker=number)


async def test_serve_check_probe_asks_each_worker_once(running: Running, processes: Processes) -> None:
    process = processes.start(
        "check",
        "app",
        "serve",
        "--check",
        "--probe",
        f"--claims=file://{processes.folder}/claims",
        f"--worker={running.groups[0][1].url},name=there",
        "--worker=http://127.0.0.1:9,name=away",
    )
    assert process.wait(20) == 1
    said = process.output()
    assert "worker there: good" in said
    assert "worker away: unreachable" in said


async def test_what_workers_did_is_told_by_name(both: Both) -> None:
    fleet, _ = both.fleets
    named = fleet.workers[1].name
    await fleet.turn(None, headers=[("x-dynamo-worker-instance-id", named)])
    samples = await metrics(fleet.replicas[0])
    worker = f'worker="{named}"'
    assert total(samples, "coatcheck_worker_turns_total", worker, 'outcome="completed"', 'status="2xx"')
    assert total(samples, "coatcheck_worker_ttft_seconds_count", worker)
    assert total(samples, "coatcheck_worker_probes_total", worker, 'result="good"')
    assert total(samples, "coatcheck_worker_state", worker, 'state="up"') == 1
    row = (await ask(fleet.replicas[0].url, target="/admin/workers", headers=[("host", "localhost")])).json
    told = next(each for each in row["workers"] if each["name"] == named)
    assert told["turns"] >= 1
    assert told["reason"]
    assert json.dumps(told)
    assert await turns(fleet.workers[1])


async def test_ready_says_what_is_there_and_does_not_flap(running: Running) -> None:
    """The last one here: nothing is left of the workers."""
    both, (replica, *_) = running.both(0), running.replicas
    begin = len(replica.process.output())
    for number in range(len(running.groups)):
        await running.both(number).do(lambda fleet: wait_until(lambda: fleet.all_are("up"), 15))

    async def ready() -> int:
        return (await ask(replica.url, target="/ready")).status

    async def not_ready() -> bool:
        return await ready() == 503

    await order_fault(both.sick, times=None, **SICK["503 to all"])
    await both.do(lambda fleet: wait_until(lambda: fleet.all_are("starting"), 15))
    assert await ready() == 200
    for sick, *_ in running.groups:
        sick.process.kill()
    await wait_until(not_ready, 15)
    seen = set()
    for _ in range(60):
        seen.add(await ready())
        await asyncio.sleep(0.02)
    assert seen == {503}
    lines = [line for line in replica.process.output(begin).splitlines() if " -> down" in line]
    assert len(lines) == sum(map(len, running.groups)), lines
