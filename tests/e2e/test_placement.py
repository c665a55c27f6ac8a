"""Where two replicas place sessions together, counted at the workers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import new_session
from tests.support.processes import Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.tcp import free_ports
from tests.support.wire import ask, turn

AT_ONCE = 16


@dataclass
class Fleet:
    workers: list[Worker]
    replicas: list[Replica]

    async def first_turns(self, count: int, *replicas: Replica, hint: str = "", at_once: int = AT_ONCE) -> Counter[str]:
        """Of as many new sessions, so many at once, at these replicas by turns. Returns how many each worker served."""
        before = await self.served()
        room = asyncio.Semaphore(at_once)
        headers = (("x-dynamo-worker-instance-id", hint),) if hint else ()

        async def first(replica: Replica) -> None:
            async with room:
                assert (await turn(replica.url, session=new_session(), headers=headers)).status == 200

        await asyncio.gather(*(first(replicas[number % len(replicas)]) for number in range(count)))
        now = await self.served()
        assert now.total() - before.total() == count
        return Counter({name: now[name] - before[name] for name in now})

    async def served(self) -> Counter[str]:
        return Counter({worker.name: len(await turns(worker)) for worker in self.workers})


@pytest.fixture(scope="module")
def fleet(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    workers = module_processes.workers(4, "--ttft-ms", "20", "--itl-ms", "0")
    return Fleet(workers, module_processes.replicas(2, workers, tmp_path_factory.mktemp("claims")))


def unevenness(counts: Counter[str]) -> float:
    return max(counts.values()) * len(counts) / counts.total()


async def test_first_turns_at_two_replicas_fall_evenly_on_the_workers(fleet: Fleet) -> None:
    """Nearly: what each has done lately the other hears late where the machine has no time."""
    counts = await fleet.first_turns(160, *fleet.replicas)
    assert unevenness(counts) <= 1.25, counts
    counts += await fleet.first_turns(80, fleet.replicas[0])
    assert unevenness(counts) <= 1.25, counts


async def test_sessions_of_the_other_replica_count(fleet: Fleet) -> None:
    """One has brought many sessions to one worker: as soon as that is said, new ones at the other go past it."""
    here, other = fleet.replicas

    async def others() -> int:
        """None that it has not heard of."""
        said = (await ask(here.url, target="/admin/replicas")).json["replicas"]
        return sum(int(each["sessions"]) for each in said if not each["this"])

    before = await others()
    await fleet.first_turns(40, other, hint="w0")

    async def known() -> bool:
        return await others() >= before + 40

    await wait_until(known, 30)

    async def passed_over() -> bool:
        # Few at once: a worker that owes several answers is passed over for one that has more sessions.
        if (await fleet.first_turns(20, here, at_once=2))["w0"] == 0:
            return True
        # What was said is forgotten for a while where the other one is late; meanwhile the others have caught up.
        await fleet.first_turns(40, other, hint="w0")
        return False

    await wait_until(passed_over, 60)


PROMPTS, TIMES = 10, 8


def prompt_of(system: str, number: int, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": f"{system} {number} " * 400}, {"role": "user", "content": question}]


async def cached_share(workers: list[Worker], replicas: list[Replica], system: str) -> float:
    """What the workers find in their caches of the prompts of `PROMPTS` applications, each of which asks `TIMES` times,
    at these replicas by turns."""
    room = asyncio.Semaphore(4)

    async def one(number: int, again: int) -> None:
        messages = prompt_of(system, number, f"question {again}")
        body = json.dumps({"model": "mock-model", "messages": messages, "max_tokens": 2}).encode()
        async with room:
            headers = (("content-type", "application/json"), ("x-dynamo-session-id", new_session()))
            replica = replicas[(number + again) % len(replicas)]
            assert (await ask(replica.url, "POST", "/v1/chat/completions", headers=headers, body=body)).status == 200

    async def chats() -> list[list[dict[str, Any]]]:
        told = [await turns(worker) for worker in workers]
        return [[each for each in those if each["path"] == "/v1/chat/completions"] for those in told]

    before = await chats()
    for again in range(TIMES):
        await asyncio.gather(*(one(number, again) for number in range(PROMPTS)))
    served = [turn for now, known in zip(await chats(), before, strict=True) for turn in now[len(known) :]]
    assert len(served) == PROMPTS * TIMES
    cached, asked = (sum(int(turn[kind]) for turn in served) for kind in ("cached_tokens", "prompt_tokens"))
    return cached / asked


async def test_what_has_a_cached_beginning_goes_there_at_every_replica(
    module_processes: Processes, tmp_path: Path
) -> None:
    """First turns of sessions: by load each prompt is computed at every worker, by prefix at one."""
    workers = module_processes.workers(4, "--profile", "quick", "--speed", "20")
    shares = {
        policy: await cached_share(
            workers,
            module_processes.replicas(2, workers, tmp_path / policy, "--policy", policy),
            policy,
        )
        for policy in ("least-loaded", "prefix")
    }
    # At best 0.875; where each of the four computes each, which chance brings about, less than 0.55.
    assert shares["prefix"] > 0.65, shares
    assert shares["prefix"] > shares["least-loaded"] + 0.1, shares


async def test_what_workers_tell_of_their_caches_is_what_they_find_in_them(
    module_processes: Processes, tmp_path: Path
) -> None:
    """By their KV events; also at a replica that comes later, which has them replayed before it trusts itself."""
    ports = free_ports(9)
    workers, told = [], []
    for number in range(3):
        port, events, replay = ports[3 * number : 3 * number + 3]
        options = ("--kv-events-port", str(events), "--kv-replay-port", str(replay), "--profile", "quick")
        process = module_processes.start("worker", "mocker", "--port", str(port), "--speed", "20", *options)
        workers.append(Worker(f"w{number}", process.urls(1)[0], process))
        places = f"kv-events=tcp://127.0.0.1:{events},kv-replay=tcp://127.0.0.1:{replay}"
        told.append(f"--worker={workers[-1].url},name=w{number},{places}")
    settings = [f"--claims=file://{tmp_path}/kv", "--policy", "kv", "--tokenize-timeout", "20", *told]
    replicas = module_processes.replicas_with(settings, settings)

    async def following(*those: Replica) -> bool:
        return [(await metrics(each))["coatcheck_kv_workers"] for each in those] == [3.0] * len(those)

    await wait_until(lambda: following(*replicas), 30)
    assert await cached_share(workers, replicas, "kv") > 0.65
    counted = [await metrics(replica) for replica in replicas]
    exact = sum(total(each, "coatcheck_foresights_exact_total", 'outcome="yes"') for each in counted)
    settled = sum(total(each, "coatcheck_foresights_exact_total") for each in counted)
    assert settled >= 0.2 * PROMPTS * TIMES  # only answers that are read in a tenth of a second are
    assert exact >= 0.6 * settled  # others run at the same time, and are cached meanwhile
    assert not sum(total(each, "coatcheck_kv_gaps_total") for each in counted)
    (late,) = module_processes.replicas_with(settings)
    await wait_until(lambda: following(late), 30)
    body = json.dumps({"model": "mock-model", "messages": prompt_of("kv", 3, "something else")}).encode()
    headers = (("content-type", "application/json"), ("x-coatcheck-dry-run", "true"))
    said = (await ask(late.url, "POST", "/v1/chat/completions", headers, body)).json
    assert said["placement"]["cached_share"] == said["placement"]["best_share"] > 0.9
