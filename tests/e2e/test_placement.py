"""Where two replicas place sessions together, counted at the workers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import new_session
from tests.support.processes import Processes, Replica, Worker, turns, wait_until
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
    counts = await fleet.first_turns(200, *fleet.replicas)
    assert unevenness(counts) <= 1.1, counts
    counts += await fleet.first_turns(100, fleet.replicas[0])
    assert unevenness(counts) <= 1.1, counts


async def test_sessions_of_the_other_replica_count(fleet: Fleet) -> None:
    """One has brought many sessions to one worker: as soon as that is said, new ones at the other go past it."""
    here, other = fleet.replicas

    async def others() -> int:
        said = (await ask(here.url, target="/admin/replicas")).json["replicas"]
        return next(int(each["sessions"]) for each in said if not each["this"])

    before = await others()
    await fleet.first_turns(40, other, hint="w0")

    async def known() -> bool:
        return await others() >= before + 40

    await wait_until(known, 30)

    async def passed_over() -> bool:
        # Few at once: a worker that owes several answers is passed over for one that has more sessions.
        return (await fleet.first_turns(20, here, at_once=2))["w0"] == 0

    await wait_until(passed_over, 30)  # what was said is forgotten for a while where the other one is late


PROMPTS, TIMES = 10, 8


async def cached_share(workers: list[Worker], replicas: list[Replica], system: str) -> float:
    """What the workers find in their caches of the prompts of `PROMPTS` applications, each of which asks `TIMES` times,
    at these replicas by turns."""
    room = asyncio.Semaphore(4)

    async def one(number: int, again: int) -> None:
        messages = [
            {"role": "system", "content": f"{system} {number} " * 400},
            {"role": "user", "content": f"question {again}"},
        ]
        body = json.dumps({"model": "mock-model", "messages": messages, "max_tokens": 2}).encode()
        async with room:
            headers = (("content-type", "application/json"), ("x-dynamo-session-id", new_session()))
            replica = replicas[(number + again) % len(replicas)]
            assert (await ask(replica.url, "POST", "/v1/chat/completions", headers=headers, body=body)).status == 200

    before = [len(await turns(worker)) for worker in workers]
    for again in range(TIMES):
        await asyncio.gather(*(one(number, again) for number in range(PROMPTS)))
    served = [turn for worker, known in zip(workers, before, strict=True) for turn in (await turns(worker))[known:]]
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
    assert shares["prefix"] > 0.75, shares
    assert shares["prefix"] > shares["least-loaded"] + 0.15, shares
