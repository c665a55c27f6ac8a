"""Replicas that hear of each other: what differs is said, and what one cannot ask the store it asks the others. Where a
turn ran is read from the workers' own records."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import new_session
from tests.support.etcd import EtcdServer
from tests.support.processes import Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.tcp import TcpProxy
from tests.support.wire import Wire, ask, turn

QUICK_STORE = ("--store-deadline=0.5",)


@pytest.fixture(scope="module")
def workers(module_processes: Processes) -> list[Worker]:
    return module_processes.workers(4, "--ttft-ms", "2", "--itl-ms", "1")


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


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


async def acquainted(*replicas: Replica) -> None:
    for replica in replicas:
        await wait_until(partial(_peers, replica, len(replicas) - 1), 10)


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
        await wait_until(partial(_differing, replica, settings), 15)
        log = replica.process.output()
        told = re.findall(rf"WARNING coatcheck.replicas replica {name} differs from this one in ([\w-]+)", log)
        assert sorted(told) == sorted(settings), "each is told once"
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
    await wait_until(lambda: _differing(one, set()), 10)
    assert "INFO coatcheck.replicas replica other, which differed in policy, is gone" in one.process.output()


async def _differing(replica: Replica, settings: set[str]) -> bool:
    samples = await metrics(replica)
    found = {
        name.partition('"')[2].partition('"')[0]
        for name, value in samples.items()
        if name.startswith("coatcheck_replica_differs") and value
    }
    return found == settings


async def test_two_replicas_of_one_name_say_so(processes: Processes, workers: list[Worker], tmp_path: Path) -> None:
    options = [f"--claims=file://{tmp_path}/claims", "--replica=same", *named(workers)]
    for replica in processes.replicas_with(options, options):
        await wait_until(partial(_differing, replica, {"replica"}), 10)


async def test_replicas_that_agree_differ_in_nothing(
    processes: Processes, workers: list[Worker], tmp_path: Path
) -> None:
    """A secret is the same however it is given, and workers in any order."""
    file = tmp_path / "secret"
    file.write_text("a-secret\n")
    common = [f"--claims=file://{tmp_path}/claims"]
    both = processes.replicas_with(
        [*common, "--session-secret= a-secret", *named(workers)],
        [*common, f"--session-secret-file={file}", *named(workers[::-1])],
    )
    await acquainted(*both)
    await asyncio.sleep(3.5)  # longer than workers may differ without a word
    for replica in both:
        assert await _differing(replica, set())
        assert "differs" not in replica.process.output()


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
    assert not [log for log in (a.process.output(), b.process.output()) if "rebound" in log]


# --- without the store -----------------------------------------------------------------------------------------------


async def test_a_session_that_one_knew_is_found_by_the_other_when_etcd_is_gone(
    processes: Processes, workers: list[Worker], etcd: EtcdServer
) -> None:
    a, b = pair(processes, workers, etcd.url(), options=QUICK_STORE)
    await acquainted(a, b)
    sessions = [new_session() for _ in range(20)]
    for session in sessions:
        assert (await turn(a.url, session=session)).affinity == "created"
    etcd.kill()
    for session in sessions:
        assert (await turn(b.url, session=session)).status == 200
    assert not await split(workers, sessions)
    # And what each placed by itself meanwhile, the other one finds.
    fresh = [new_session() for _ in range(20)]
    for number, session in enumerate(fresh):
        for replica in (a, b) if number % 2 else (b, a):
            assert (await turn(replica.url, session=session)).affinity == "degraded"
    assert not await split(workers, fresh)
    etcd.restart()
    await wait_until(lambda: _state(a, b, up=True), 15)
    for session in [*sessions, *fresh]:
        for replica in (a, b):
            assert (await turn(replica.url, session=session)).affinity in ("stored", "cached")
    assert not await split(workers, [*sessions, *fresh])


async def _state(*replicas: Replica, up: bool) -> bool:
    return all([total(await metrics(replica), "coatcheck_store_up") == up for replica in replicas])


@pytest.mark.parametrize("what", ["nothing arrives", "answers are lost"])
async def test_a_replica_that_is_cut_off_alone_asks_the_other(
    processes: Processes, workers: list[Worker], etcd: EtcdServer, what: str
) -> None:
    async with TcpProxy("127.0.0.1", etcd.client_port) as path:
        way = etcd.url().replace(str(etcd.client_port), str(path.port))
        alone, well = pair(processes, workers, way, etcd.url(), options=QUICK_STORE)
        await acquainted(alone, well)
        before = [new_session() for _ in range(20)]
        for session in before:
            await turn(well.url, session=session)
        path.black_hole, path.drop_replies = what == "nothing arrives", what != "nothing arrives"
        sessions = [new_session() for _ in range(20)]
        await asyncio.gather(*(turn(alone.url, session=session) for session in sessions[:10]))
        await asyncio.gather(*(turn(well.url, session=session) for session in sessions[10:]))
        await wait_until(lambda: _state(alone, up=False), 10)
        for number, session in enumerate([*before, *sessions]):
            for replica in (alone, well) if number % 2 else (well, alone):
                assert (await turn(replica.url, session=session)).status == 200
        assert not await split(workers, [*before, *sessions])
        # A final turn there ends the session for all.
        for session in before:
            assert (await turn(alone.url, session=session, final=True)).status == 200
            assert (await turn(well.url, session=session)).affinity == "created"


async def test_a_final_turn_in_an_outage_ends_the_session_for_all(
    processes: Processes, workers: list[Worker], etcd: EtcdServer
) -> None:
    """Whichever replica holds its claim: none claims it again, and the claim goes when the store is back."""
    a, b = pair(processes, workers, etcd.url(), options=QUICK_STORE)
    await acquainted(a, b)
    sessions = [new_session() for _ in range(20)]
    for session in sessions:
        await turn(a.url, session=session)
    etcd.kill()
    for session in sessions:
        assert (await turn(b.url, session=session, final=True)).status == 200
    etcd.restart()
    await wait_until(lambda: _state(a, b, up=True), 15)
    await wait_until(lambda: _no_claims(etcd), 10)


async def _no_claims(etcd: EtcdServer) -> bool:
    return not [line for line in etcd.ctl("get", "--prefix", "--keys-only", "coatcheck/").split() if "claims" in line]


# --- an id that is used again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["file", "etcd"])
async def test_an_id_may_be_used_again_at_the_other_replica_at_once(
    processes: Processes, workers: list[Worker], tmp_path: Path, store: str
) -> None:
    """Without stamps that all can see, the other one's cache knows of the close only by being told."""
    with contextlib.ExitStack() as stack:
        (tmp_path / "claims").mkdir()
        url = f"file://{tmp_path}/claims?hosts=many"
        if store == "etcd":
            url = stack.enter_context(EtcdServer()).url()
        a, b = pair(processes, workers, url)
        await acquainted(a, b)
        stale = 0
        async with await Wire.to(a.url) as here, await Wire.to(b.url) as there:
            for number in range(100):
                session = new_session()
                for wire in (here, there):  # both have it in their caches
                    wire.chat(session=session, tokens=1)
                    await wire.answer()
                here.chat(session=session, final=True, tokens=2, stream=bool(number % 2))
                await here.answer()
                there.chat(session=session, tokens=1)
                stale += (await there.answer()).affinity != "created"
        assert stale == 0
