"""Prefill and decode workers before two replicas, each a process of its own: what each turn was split into, and what is
left of it, is read at the workers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.conftest import PATIENCE, new_session
from tests.support.etcd import EtcdServer
from tests.support.processes import Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.wire import Cut, Wire, ask

SESSIONS = 150
"""On each kind of store."""
CLIENTS = 16
LIMIT = 60.0
TEXT = "word " * 300


@dataclass
class Fleet:
    prefill: list[Worker]
    decode: list[Worker]
    replicas: list[Replica]
    on_etcd: list[Replica] = field(default_factory=list)
    """Two more, once somebody has asked for them."""

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]


def named(prefill: list[Worker], decode: list[Worker]) -> list[str]:
    """As a replica is told of them: the prefill workers p0, p1 ..., the others d0, d1 ..."""
    options = [f"--worker={each.url},name=p{number},phase=prefill" for number, each in enumerate(prefill)]
    return options + [f"--worker={each.url},name=d{number},phase=decode" for number, each in enumerate(decode)]


async def rest(replica: Replica) -> None:
    async def rests() -> bool:
        samples = await metrics(replica)
        gauges = ("coatcheck_in_flight", "coatcheck_turns_running", "coatcheck_session_turns_active")
        return not any(total(samples, gauge) for gauge in gauges)

    await wait_until(rests, LIMIT)
    assert not total(await metrics(replica), "coatcheck_turns_total", 'outcome="failed"')


@pytest.fixture(scope="module")
def fleet(module_processes: Processes) -> Fleet:
    """Three workers of each phase, one of which each test of a loss loses for good."""
    quick = ("--ttft-ms", "20", "--itl-ms", "3", "--tokens", "4", "--kv-lease-s", "600")
    prefill = module_processes.workers(3, "--phase", "prefill", *quick, apart=True)
    decode = module_processes.workers(3, "--phase", "decode", *quick, apart=True)
    claims = f"--claims=file://{module_processes.folder}/claims"
    options = [claims, f"--store-deadline={PATIENCE}", "--prefill-from=0", *named(prefill, decode)]
    return Fleet(prefill, decode, module_processes.replicas_with(options, options))


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def on_etcd(fleet: Fleet, etcd: EtcdServer, module_processes: Processes) -> Iterator[list[Replica]]:
    """Two replicas before the same workers, with their claims in etcd."""
    options = [f"--claims={etcd.url()}", f"--store-deadline={PATIENCE}", "--prefill-from=0"]
    options += named(fleet.prefill, fleet.decode)
    fleet.on_etcd = module_processes.replicas_with(options, options)
    yield fleet.on_etcd
    for replica in fleet.on_etcd:
        replica.process.kill()


@pytest.fixture(params=["file", "etcd"])
def replicas(request: pytest.FixtureRequest, fleet: Fleet) -> list[Replica]:
    """With their claims in a store of each kind that replicas can share."""
    found: list[Replica] = fleet.replicas if request.param == "file" else request.getfixturevalue("on_etcd")
    return found


@pytest.fixture(autouse=True)
async def at_rest(fleet: Fleet) -> AsyncIterator[None]:
    yield
    for replica in [*fleet.replicas, *fleet.on_etcd]:
        await rest(replica)


async def states(workers: list[Worker]) -> list[dict[str, Any]]:
    return [(await ask(each.url, target="/mock/state")).json for each in workers if each.process.alive]


async def turn(replica: Replica, session: str, *, stream: bool = False) -> tuple[int, bytes]:
    """Raises Cut where the answer is not whole."""
    async with await Wire.to(replica.url) as wire:
        wire.chat(session=session, stream=stream, messages=[{"role": "user", "content": TEXT}])
        answer = await wire.answer()
        return answer.status, answer.body


async def test_first_turns_that_come_at_once_meet_in_both_phases(fleet: Fleet, replicas: list[Replica]) -> None:
    sessions = [new_session() for _ in range(SESSIONS)]
    many = asyncio.Semaphore(40)

    async def both(session: str) -> None:
        async with many:
            answers = await asyncio.gather(*(turn(replica, session) for replica in replicas))
            assert [status for status, _ in answers] == [200, 200]

    await asyncio.gather(*map(both, sessions))
    for workers, became in ((fleet.prefill, "staged"), (fleet.decode, "fetched")):
        places: defaultdict[str, set[int]] = defaultdict(set)
        count = 0
        for number, worker in enumerate(workers):
            for each in await turns(worker):
                if each["session"] in sessions:
                    assert each["handover"] == became
                    places[each["session"]].add(number)
                    count += 1
        assert count == 2 * SESSIONS
        assert {len(where) for where in places.values()} == {1}
        assert {number for where in places.values() for number in where} == {0, 1, 2}


@pytest.mark.parametrize("store", ["file", "etcd"])
async def test_a_frozen_worker_of_either_phase_fails_no_turn_and_keeps_its_sessions(
    fleet: Fleet, etcd: EtcdServer, module_processes: Processes, store: str
) -> None:
    claims = f"file://{module_processes.folder}/frozen" if store == "file" else etcd.url("frozen")
    options = [f"--claims={claims}", f"--store-deadline={PATIENCE}", "--prefill-from=0", "--first-byte-timeout=10"]
    options += ["--probe-interval=1", "--down-after=300", *named(fleet.prefill, fleet.decode)]
    replicas = module_processes.replicas_with(options, options)
    places = {new_session(): place for place in (("p0", "d1"), ("p1", "d0"), ("p1", "d2")) for _ in range(4)}

    async def where(session: str, at: int, *, stream: bool = False, hinted: bool = False) -> tuple[str | None, ...]:
        hints = [("x-dynamo-prefill-instance-id", places[session][0])]
        hints += [("x-dynamo-worker-instance-id", places[session][1])]
        async with await Wire.to(replicas[at].url) as wire:
            wire.chat(session=session, stream=stream, content=TEXT, headers=hints if hinted else ())
            answer = await wire.answer()
            assert answer.status == 200, answer.body
            assert b'"error"' not in answer.body
            return answer.get("x-coatcheck-prefill-worker"), answer.worker

    for session in places:
        assert await where(session, 0, hinted=True) == places[session]
    frozen = (fleet.prefill[0], fleet.decode[0])
    for worker in frozen:
        worker.process.freeze()
    try:
        found = await asyncio.gather(
            *(where(session, at, stream=number % 2 == 0) for number, session in enumerate(places) for at in (0, 1))
        )
    finally:
        for worker in frozen:
            worker.process.thaw()
    assert not {name for place in found for name in place} & {"p0", "d0"}

    async def back() -> bool:
        return [await where(session, 1) for session in places] == list(places.values())

    await wait_until(back, LIMIT)
    for replica in replicas:
        await rest(replica)
        replica.process.terminate()


async def test_on_etcd_workers_of_both_phases_are_drained_while_clients_leave(
    fleet: Fleet, on_etcd: list[Replica]
) -> None:
    sessions = [new_session() for _ in range(24)]
    failed: list[str] = []
    done = 0
    ends = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal done
        chance = random.Random(number)
        while not ends.is_set():
            async with await Wire.to(on_etcd[number % 2].url) as wire:
                wire.chat(session=chance.choice(sessions), stream=number % 4 < 2, content=TEXT)
                if number % 3 == 0:
                    await asyncio.sleep(chance.uniform(0.0, 0.12))  # and leaves
                else:
                    answer = await wire.answer()
                    if answer.status != 200 or b'"error"' in answer.body:
                        failed.append(f"{answer.status} {answer.body!r}")
            done += 1

    async def beyond(more: int) -> None:
        aim = done + more
        await wait_until(lambda: done > aim, LIMIT)

    async def mark(path: str) -> None:
        for name in ("p0", "d0"):
            said = await ask(on_etcd[0].url, "POST", f"/admin/workers/{name}/{path}")
            assert said.status == 200, said.body

    async def drained() -> bool:
        return not any(state["active"] for state in await states([fleet.prefill[0], fleet.decode[0]]))

    clients = [asyncio.create_task(client(number)) for number in range(12)]
    await beyond(60)
    await mark("drain?deadline=0.5")
    await beyond(150)
    await wait_until(drained, LIMIT)
    ends.set()
    await asyncio.gather(*clients)
    assert failed == []
    await mark("uncordon")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_worker_of_either_phase_is_killed_under_load(fleet: Fleet, replicas: list[Replica], phase: str) -> None:
    sessions = [new_session() for _ in range(40)]
    doomed = fleet.prefill[0] if phase == "prefill" else fleet.decode[0]
    failed: list[str] = []
    done = 0
    ends = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal done
        chance = random.Random(number)
        while not ends.is_set():
            session = chance.choice(sessions)
            async with await Wire.to(replicas[number % 2].url) as wire:
                wire.chat(session=session, stream=number % 4 < 2, messages=[{"role": "user", "content": TEXT}])
                status = (await wire.head()).status
                try:
                    body = await wire.body()
                except Cut:
                    continue  # it had begun to stream
                if status != 200:
                    failed.append(f"{session}: {status} {body!r}")
            done += 1

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    await wait_until(lambda: done > 60, LIMIT)
    doomed.process.kill()
    before = done
    await wait_until(lambda: done > before + 150, LIMIT)
    ends.set()
    await asyncio.gather(*clients)
    assert failed == []
    if phase == "prefill":
        fleet.prefill.remove(doomed)
    else:
        fleet.decode.remove(doomed)


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(fleet: Fleet, replicas: list[Replica]) -> None:
    before = sum(state["staged"] for state in await states(fleet.prefill))
    chance = random.Random(11)

    async def leaves(number: int) -> None:
        async with await Wire.to(replicas[number % 2].url) as wire:
            wire.chat(session=new_session(), stream=number % 2 == 0, messages=[{"role": "user", "content": TEXT}])
            await asyncio.sleep(chance.uniform(0.0, longest))

    async def some_released() -> bool:
        counts = [total(await metrics(replica), "coatcheck_handovers_released_total") for replica in replicas]
        return sum(counts) > 0

    longest, rounds, give_up_at = 0.12, 0, time.monotonic() + LIMIT
    while rounds < 15 or (not await some_released() and time.monotonic() < give_up_at):
        await asyncio.gather(*map(leaves, range(20)))
        rounds += 1
        longest = max(longest, 0.02 * rounds)  # a busy machine takes longer to come between the phases

    async def nothing_left() -> bool:
        found = await states(fleet.workers)
        return not any(state["active"] for state in found) and sum(state.get("staged", 0) for state in found) == before

    await wait_until(nothing_left, LIMIT)
    assert sum(state["expired"] for state in await states(fleet.prefill)) == 0
    assert await some_released()


async def test_workers_that_are_asked_at_once_meet_and_leave_nothing_behind(module_processes: Processes) -> None:
    """Registered, so that replicas know by their records how they hand over, and where they are met."""
    claims = f"file://{module_processes.folder}/met"
    options = ["app", "mock", "--port", "0", "--count", "2", "--register", claims, "--handover", "sglang"]
    options += ["--bootstrap-port", "0", "--kv-lease-s", "600", "--ttft-ms", "20", "--tokens", "4"]
    started = [module_processes.start(phase, *options, "--phase", phase) for phase in ("prefill", "decode")]
    workers = [Worker("", url, process) for process in started for url in process.urls(2)]
    serve = [f"--claims={claims}", f"--store-deadline={PATIENCE}"]
    replicas = module_processes.replicas_with(serve, serve)
    sessions = [new_session() for _ in range(20)]
    chance = random.Random(5)

    async def all_known() -> bool:
        return all(
            [len((await ask(each.url, target="/admin/workers")).json["workers"]) == len(workers) for each in replicas]
        )

    async def both(session: str) -> None:
        answers = await asyncio.gather(*(turn(replica, session, stream=True) for replica in replicas))
        assert [status for status, _ in answers] == [200, 200]

    async def leaves(number: int) -> None:
        async with await Wire.to(replicas[number % 2].url) as wire:
            wire.chat(session=new_session(), stream=number % 4 < 2, messages=[{"role": "user", "content": TEXT}])
            await asyncio.sleep(chance.uniform(0.0, 0.12))

    await wait_until(all_known, LIMIT)
    await asyncio.gather(*map(both, sessions), *map(leaves, range(40)))
    places: defaultdict[tuple[str, bool], set[int]] = defaultdict(set)
    for number, worker in enumerate(workers):
        for each in await turns(worker):
            if each["session"] in sessions:
                places[each["session"], number < 2].add(number)
                assert each["handover"] == ("staged" if number < 2 else "fetched")
    assert len(places) == 2 * len(sessions)
    assert {len(where) for where in places.values()} == {1}

    async def nothing_left() -> bool:
        found = await states(workers)
        running = [total(await metrics(replica), "coatcheck_in_flight") for replica in replicas]
        return not any(running) and not any(state["active"] or state["staged"] for state in found)

    await wait_until(nothing_left, LIMIT)
    assert [state["expired"] for state in await states(workers)] == [0] * len(workers)
