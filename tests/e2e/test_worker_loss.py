"""A worker is lost under load, in each of the ways in which one is: killed, gone, or behind a path that swallows
everything. Real processes; both replicas find out for themselves, and must agree on where each session goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import PATIENCE, new_session
from tests.support.processes import Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.wire import Cut, Wire, turn

SESSIONS = 120
CLIENTS = 24
CONNECT_LIMIT = 1.0


@dataclass
class Fleet:
    """Six workers and two replicas; each test loses one worker for good."""

    replicas: list[Replica]
    left: list[Worker]

    def doom(self) -> Worker:
        return self.left.pop(0)


@pytest.fixture(scope="module")
def fleet(module_processes: Processes) -> Fleet:
    workers = module_processes.workers(6, "--ttft-ms", "40", "--itl-ms", "5", apart=True)
    # One replica keeps its connections to workers and one does not: a dead worker shows itself in another way on each.
    named = [f"--worker={worker.url},name={worker.name}" for worker in workers]
    claims = f"--claims=file://{module_processes.folder}/claims"
    common = [claims, f"--store-deadline={PATIENCE}", f"--connect-timeout={CONNECT_LIMIT}", *named]
    return Fleet(module_processes.replicas_with(common, [*common, "--worker-keepalive=0"]), workers)


@pytest.fixture(autouse=True)
async def at_rest(fleet: Fleet) -> AsyncIterator[None]:
    yield
    for replica in fleet.replicas:
        for gauge in ("coatcheck_in_flight", "coatcheck_turns_running", "coatcheck_session_turns_active"):
            await wait_until(partial(_is_zero, replica, gauge), 30)
        assert not total(await metrics(replica), "coatcheck_turns_total", 'outcome="failed"')


async def _is_zero(replica: Replica, gauge: str) -> bool:
    return total(await metrics(replica), gauge) == 0


@dataclass
class Load:
    """Turns of `sessions`, one after the other, by many clients at both replicas, streamed and not."""

    fleet: Fleet
    sessions: Sequence[str]
    clients: int = CLIENTS
    failed: list[str] = field(default_factory=list)
    slowest: float = 0.0
    served: Counter[str] = field(default_factory=Counter)

    async def client(self, number: int, sessions: Iterator[str]) -> None:
        url = self.fleet.replicas[number % 2].url
        for session in sessions:
            started = time.monotonic()
            # A connection of its own: a stream that breaks ends it.
            async with await Wire.to(url) as wire:
                wire.chat(session=session, stream=number % 4 < 2, tokens=3)
                try:
                    head = await wire.head()
                except Cut as cut:
                    self.failed.append(f"no answer: {cut}")
                    continue
                self.slowest = max(self.slowest, time.monotonic() - started)
                self.served[session] += 1
                if head.status != 200:
                    self.failed.append(f"{head.status}: {(await wire.body())[:300]!r}")
                with contextlib.suppress(Cut):  # it had begun: what its worker had not said yet is lost with it
                    await wire.body()

    async def run(self, sessions: Iterator[str]) -> None:
        await asyncio.gather(*(self.client(number, sessions) for number in range(self.clients)))


async def bound_to(fleet: Fleet, worker: Worker) -> list[str]:
    sessions = [new_session() for _ in range(SESSIONS)]
    hint = [("x-dynamo-worker-instance-id", worker.name)]

    async def bind(part: Sequence[str], url: str) -> None:
        for session in part:
            answer = await turn(url, session=session, headers=hint, tokens=1)
            assert (answer.status, answer.worker) == (200, worker.name)

    await asyncio.gather(*(bind(sessions[n::CLIENTS], fleet.replicas[n % 2].url) for n in range(CLIENTS)))
    return sessions


async def check_where_they_went(fleet: Fleet, lost: Worker, sessions: Sequence[str]) -> None:
    """Both replicas say the same of every session, a survivor; the survivors' shares are alike."""

    async def ask(part: Sequence[str]) -> list[str | None]:
        places = []
        for session in part:
            answers = [await turn(replica.url, session=session, tokens=1) for replica in fleet.replicas]
            assert [answer.status for answer in answers] == [200, 200]
            assert answers[0].worker == answers[1].worker
            places.append(answers[0].worker)
        return places

    parts = await asyncio.gather(*(ask(sessions[n::CLIENTS]) for n in range(CLIENTS)))
    shares = Counter(itertools.chain.from_iterable(parts))
    assert shares.total() == SESSIONS
    assert shares.keys() == {worker.name for worker in fleet.left}
    # Not all to the same one: twice the mean is five times the deviation that chance alone would give.
    assert max(shares.values()) <= 2 * SESSIONS / len(fleet.left), shares


@pytest.mark.timeout(300)  # hundreds of turns, each on a connection of its own: a busy machine takes its time
async def test_killed_under_load_no_turn_that_had_not_begun_to_stream_fails(fleet: Fleet) -> None:
    doomed = fleet.doom()
    sessions = await bound_to(fleet, doomed)
    running = True

    def until_stopped() -> Iterator[str]:
        for session in itertools.cycle(sessions):
            if not running:
                return
            yield session

    load = Load(fleet, sessions)
    task = asyncio.create_task(load.run(until_stopped()))
    await wait_until(lambda: load.served.total() >= 100, 60)
    doomed.process.kill()
    at_the_kill = load.served.total()
    await wait_until(lambda: load.served.total() >= at_the_kill + 2 * SESSIONS, 90)
    running = False
    await task
    assert load.failed == []
    died = [total(await metrics(each), "coatcheck_attempts_retried_total", "worker_died") for each in fleet.replicas]
    assert sum(died), "no turn waited for an answer when the worker was killed: the test shows too little"
    await check_where_they_went(fleet, doomed, sessions)


async def test_refused_under_load_no_turn_fails(fleet: Fleet) -> None:
    doomed = fleet.doom()
    sessions = await bound_to(fleet, doomed)
    doomed.process.kill()
    load = Load(fleet, sessions)
    await load.run(iter(sessions * 2))
    assert load.failed == []
    assert set(load.served) == set(sessions)
    await check_where_they_went(fleet, doomed, sessions)
    # A turn is served once: what the survivors noted is what clients were answered, and the check's two each.
    noted = Counter([record["session"] for worker in fleet.left for record in await turns(worker)])
    assert {session: noted[session] for session in sessions} == dict.fromkeys(sessions, 4)


async def test_behind_a_black_hole_turns_wait_for_the_connect_limit_and_no_longer(fleet: Fleet) -> None:
    doomed = fleet.doom()
    sessions = await bound_to(fleet, doomed)
    doomed.process.kill()
    with black_hole(doomed):
        load = Load(fleet, sessions, clients=4 * CLIENTS)  # nearly all of them wait
        await load.run(iter(sessions * 2))
        assert load.failed == []
        assert set(load.served) == set(sessions)
        assert CONNECT_LIMIT <= load.slowest < 20.0  # the kernel would try for two minutes
        await check_where_they_went(fleet, doomed, sessions)


@contextlib.contextmanager
def black_hole(worker: Worker) -> Iterator[None]:
    """At the worker's address nothing is answered any more: a listener whose queue is full drops what comes."""
    parts = urlsplit(worker.url)
    address = (parts.hostname, parts.port)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(0)
        for _ in range(20):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.2)
            try:
                filler.connect(address)
            except TimeoutError:
                break
        else:
            raise AssertionError("the listener still answers")
        yield
