"""Replicas that hear of each other: what differs is said, and what one cannot ask the store it asks the others. Where a
turn ran is read from the workers' own records."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import new_session
from tests.support.etcd import EtcdServer
from tests.support.processes import Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.tcp import TcpProxy
from tests.support.wire import Wire, ask, turn

QUICK_STORE = ("--store-deadline=3",)
ASKED_AGAIN = 3.0
"""Seconds after which a replica asks one again that did not answer in time; with some to spare."""
ENOUGH = 8
"""Sessions that have shown something; on a busy machine many show nothing (`heard`)."""


@pytest.fixture(scope="module")
def workers(module_processes: Processes) -> list[Worker]:
    return module_processes.workers(4, "--ttft-ms", "2", "--itl-ms", "1")


def named(workers: Sequence[Worker]) -> list[str]:
    return [f"--worker={worker.url},name={worker.name}" for worker in workers]


def pair(processes: Processes, workers: Sequence[Worker], *claims: str, options: Sequence[str] = ()) -> list[Replica]:
    """Replicas a and b, each with its own way to the claims."""
    both = claims * 2 if len(claims) == 1 else claims
    return processes.replicas_with(
        *(
            [f"--claims={url}", f"--replica={name}", *named(workers), *options]
            for name, url in zip("ab", both, strict=True)
        )
    )


UNHEARD = ("late", "failed")


async def acquainted(*replicas: Replica) -> None:
    for replica in replicas:
        await wait_until(partial(_peers, replica, len(replicas) - 1), 30)


async def _peers(replica: Replica, count: int) -> bool:
    return total(await metrics(replica), "coatcheck_peers") == count


async def split(workers: Sequence[Worker], sessions: Sequence[str]) -> list[str]:
    """Sessions that more than one worker has served."""
    where: dict[str, set[str]] = {session: set() for session in sessions}
    for worker in workers:
        for record in await turns(worker):
            if record["session"] in where:
                where[record["session"]].add(worker.name)
    assert all(where.values())
    return [session for session in sessions if len(where[session]) > 1]


async def heard(work: Awaitable[object], *replicas: Replica) -> bool:
    """Does the work; whether these replicas had all that they wanted of the other one in time meanwhile.

    They wait a tenth of a second for that, however busy the machine is. Without it each does what it does alone: where
    that happened, nothing was shown."""
    before = await _unheard(replicas)
    await work
    if await _unheard(replicas) == before:
        return True
    await asyncio.sleep(ASKED_AGAIN)
    return False


async def _unheard(replicas: Sequence[Replica]) -> float:
    samples = [await metrics(replica) for replica in replicas]
    return sum(total(each, "coatcheck_peer_calls_total", f'outcome="{how}"') for each in samples for how in UNHEARD)


# --- what differs ----------------------------------------------------------------------------------------------------


async def test_what_differs_is_said_at_both_until_it_is_mended(
    processes: Processes, workers: list[Worker], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"acme sha256:{'0' * 64}\n")
    common = [f"--claims=file://{tmp_path}/claims"]
    drifted = ["--session-secret=a-secret", "--session-from=header:x-chat", f"--api-keys={keys}"]
    drifted += ["--policy=round-robin", "--parent-slack=3", "--session-ttl=99", "--kept-ttl=77"]
    one, other = processes.replicas_with(
        [*common, "--replica=one", *named(workers)],
        [*common, "--replica=other", *drifted, *named(workers[:3]), f"--worker={workers[3].url},name=w9"],
    )
    settings = {"session-secret", "session-from", "api-keys", "policy", "parent-slack", "session-ttl", "kept-ttl"}
    settings.add("worker")
    for replica, name in ((one, "other"), (other, "one")):
        await wait_until(partial(_differing, replica, settings), 30)
        log = replica.process.output()
        assert len(re.findall(rf"WARNING coatcheck.replicas replica {name} ", log)) == len(settings), "each once"
        assert "a-secret" not in log
        said = (await ask(replica.url, target="/admin/replicas")).json["replicas"]
        [seen] = [each for each in said if not each["this"]]
        assert seen["replica"] == name
        assert {each["setting"] for each in seen["differs"]} == settings
        lines = (await ask(replica.url, target="/admin/workers")).json["differences"]
        assert len(lines) == len(settings)
        [about_workers] = [line for line in lines if "worker" in line]
        assert "w9" in about_workers
        assert "w3" in about_workers
    other.process.terminate()
    assert other.process.wait(20) == 0
    await wait_until(lambda: _differing(one, set()), 30)
    assert len(re.findall("INFO coatcheck.replicas replica other", one.process.output())) == len(settings)


async def _differing(replica: Replica, settings: set[str]) -> bool:
    samples = await metrics(replica)
    found = {
        name.partition('"')[2].partition('"')[0]
        for name, value in samples.items()
        if name.startswith("coatcheck_replica_differs") and value
    }
    return found == settings


async def test_a_worker_of_two_names_keeps_its_sessions(
    processes: Processes, workers: list[Worker], tmp_path: Path
) -> None:
    """By its number here and by its host's name there; and names that are swapped."""
    common = [f"--claims=file://{tmp_path}/claims", "--replica"]
    swapped = [workers[1], workers[0], *workers[2:]]
    here = [*named(workers[:2]), *(f"--worker={worker.url}" for worker in workers[2:])]
    there = [f"--worker={worker.url},name={name.name}" for worker, name in zip(swapped[:2], workers, strict=False)]
    there += [f"--worker={worker.url.replace('127.0.0.1', 'localhost')}" for worker in workers[2:]]
    a, b = processes.replicas_with([*common, "a", *here], [*common, "b", *there])
    await acquainted(a, b)
    sessions = [new_session() for _ in range(40)]
    for number, session in enumerate(sessions):
        for url in (a.url, b.url, a.url) if number % 2 else (b.url, a.url, b.url):
            assert (await turn(url, session=session)).affinity in ("created", "stored", "cached")
    assert not await split(workers, sessions)
    assert not any([total(await metrics(each), "coatcheck_affinity_total", "rebound") for each in (a, b)])


# --- without the store -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnEtcd:
    """Replicas a and b over an etcd that tests may stop, and start again before they end."""

    etcd: EtcdServer
    a: Replica
    b: Replica


@pytest.fixture(scope="module")
def on_etcd(module_processes: Processes, workers: list[Worker]) -> Iterator[OnEtcd]:
    with EtcdServer() as etcd:
        yield OnEtcd(etcd, *pair(module_processes, workers, etcd.url(), options=QUICK_STORE))


async def test_a_session_that_one_knew_is_found_by_the_other_when_etcd_is_gone(
    workers: list[Worker], on_etcd: OnEtcd
) -> None:
    a, b = on_etcd.a, on_etcd.b
    await acquainted(a, b)
    known = [new_session() for _ in range(20)]
    for session in known:
        assert (await turn(a.url, session=session)).affinity == "created"
    on_etcd.etcd.kill()
    try:
        sessions = [session for session in known if await heard(_served(session, b), b)]
        assert not await split(workers, sessions)
        # And what each placed by itself meanwhile, the other one finds.
        fresh = []
        for number in range(20):
            session = new_session()
            if await heard(_served(session, *((a, b) if number % 2 else (b, a)), how="degraded"), a, b):
                fresh.append(session)
        assert not await split(workers, fresh)
        # A final turn at one ends what the other one knows, and nobody claims it again.
        half = [*sessions[: len(sessions) // 2], *fresh[: len(fresh) // 2]]
        ended = [s for n, s in enumerate(half) if await heard(_served(s, (a, b)[n % 2], final=True), a, b)]
        going_on = [session for session in (*sessions, *fresh) if session not in half]
        assert min(map(len, (sessions, fresh, ended, going_on))) > 2, "the machine has no time for anything"
        for replica in (a, b):
            entries = total(await metrics(replica), "coatcheck_claim_cache_entries")
            assert entries <= len(known) + 20 - len(ended)
    finally:
        on_etcd.etcd.restart()
    await wait_until(partial(_state, a, b, up=True), 30)
    for session in going_on:
        for replica in (a, b):
            assert (await turn(replica.url, session=session)).affinity in ("stored", "cached")
    assert not await split(workers, going_on)
    for number, session in enumerate(ended):
        assert (await turn((b, a)[number % 2].url, session=session)).affinity == "created"


async def _served(session: str, *replicas: Replica, final: bool = False, how: str | None = None) -> None:
    for replica in replicas:
        answer = await turn(replica.url, session=session, final=final)
        assert answer.status == 200
        assert how in (None, answer.affinity)


async def _state(*replicas: Replica, up: bool) -> bool:
    return all([total(await metrics(replica), "coatcheck_store_up") == up for replica in replicas])


async def test_a_replica_that_is_cut_off_alone_asks_the_other(
    processes: Processes, workers: list[Worker], on_etcd: OnEtcd
) -> None:
    """Its calls do not arrive; or they do, and their answers are lost."""
    async with TcpProxy("127.0.0.1", on_etcd.etcd.client_port) as path:
        url = on_etcd.etcd.url("alone")
        way = url.replace(str(on_etcd.etcd.client_port), str(path.port))
        alone, well = pair(processes, workers, way, url, options=QUICK_STORE)
        await acquainted(alone, well)
        for lost in ("black_hole", "drop_replies"):
            before = [new_session() for _ in range(20)]
            for session in before:
                await turn(well.url, session=session)
            setattr(path, lost, True)
            sessions = [new_session() for _ in range(20)]
            await asyncio.gather(*(turn(alone.url, session=session) for session in sessions[::2]))
            await asyncio.gather(*(turn(well.url, session=session) for session in sessions[1::2]))
            await wait_until(partial(_state, alone, up=False), 30)
            asked: list[str] = []
            for those in (before, sessions):
                for number, session in enumerate(those):
                    ways = (alone, well) if number // 2 % 2 else (well, alone)
                    if await heard(_served(session, *ways), alone, well):
                        asked.append(session)
                    if len(set(those) & set(asked)) == ENOUGH:
                        break
            assert not await split(workers, asked), lost
            # A final turn there ends the session for all.
            ended = [each for each in before if each in asked and await heard(_served(each, alone, final=True), alone)]
            for session in ended:
                assert (await turn(well.url, session=session)).affinity == "created"
            assert len(ended) > 2, "the machine has no time for anything"
            setattr(path, lost, False)
            path.sever()
            await wait_until(partial(_state, alone, up=True), 30)


# --- an id that is used again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["file", "etcd"])
async def test_an_id_may_be_used_again_at_the_other_replica_at_once(
    request: pytest.FixtureRequest, processes: Processes, workers: list[Worker], tmp_path: Path, store: str
) -> None:
    """Without stamps that all can see, the other one's cache knows of the close only by being told."""
    if store == "etcd":
        both: OnEtcd = request.getfixturevalue("on_etcd")
        a, b = both.a, both.b
    else:
        (tmp_path / "claims").mkdir()
        a, b = pair(processes, workers, f"file://{tmp_path}/claims?hosts=many")
    await acquainted(a, b)
    hows: Counter[str | None] = Counter()
    async with await Wire.to(a.url) as here, await Wire.to(b.url) as there:
        for number in range(60):
            session = new_session()
            for wire in (here, there):  # both have it in their caches
                wire.chat(session=session, tokens=1)
                await wire.answer()

            async def end(session: str = session, number: int = number) -> None:
                here.chat(session=session, final=True, tokens=2, stream=bool(number % 2))
                await here.answer()

            told = await heard(end(), a)
            there.chat(session=session, tokens=1)
            how = (await there.answer()).affinity
            if told:
                hows[how] += 1
            if hows.total() == 2 * ENOUGH:
                break
    assert hows.keys() == {"created"}, hows
    assert hows.total() > 5, "the machine has no time for anything"
