"""Limits of turns, between real processes: one replica with `max-turns` before two workers, and two tenants. What
counts is what the workers say that they had at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from app.sessions.tenants import new_key
from tests.e2e.conftest import new_session
from tests.support.late import openai
from tests.support.processes import Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.wire import Cut, ask, turn

MAX_TURNS = 2
FLOOD = 50
SLOTS = 4
QUEUE = 60


@dataclass
class Fleet:
    workers: list[Worker]
    replica: Replica
    keys: dict[str, str]

    async def turn(self, tenant: str, session: str | None = None, *, name: str = "any", **how: Any) -> int:
        headers = [("authorization", f"Bearer {self.keys[tenant]}"), ("x-request-id", name)]
        return (await turn(self.replica.url, session=session, headers=headers, **how)).status

    async def records(self) -> list[dict[str, Any]]:
        return [record for worker in self.workers for record in await turns(worker)]

    def client(self, tenant: str, **options: Any) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(trust_env=False, verify=False)
        return openai.OpenAI(api_key=self.keys[tenant], base_url=f"{self.replica.url}/v1", http_client=http, **options)


def started(processes: Processes, *options: str) -> Fleet:
    made = {tenant: new_key(tenant) for tenant in ("flood", "small")}
    file = processes.folder / "keys"
    file.write_text("".join(f"{line}\n" for _, line in made.values()))
    workers = processes.workers(2, "--ttft-ms", "10", "--itl-ms", "5")
    limits = [f"--max-turns={MAX_TURNS}", f"--queue-limit={QUEUE}", f"--api-keys={file}", *options]
    (replica,) = processes.replicas(1, workers, processes.folder / "claims", *limits)
    return Fleet(workers, replica, {tenant: key for tenant, (key, _) in made.items()})


@pytest.fixture(scope="module")
def running(module_processes: Processes) -> Fleet:
    return started(module_processes, "--max-turns-per-tenant=3")


@pytest.fixture
async def fleet(running: Fleet) -> AsyncIterator[Fleet]:
    """With everything given back at the end."""
    yield running
    for gauge in ("coatcheck_in_flight", "coatcheck_turns_running", "coatcheck_queued_turns"):
        await wait_until(lambda gauge=gauge: _is_zero(running.replica, gauge), 30)  # type: ignore[misc]
    samples = await metrics(running.replica)
    assert not total(samples, "coatcheck_turns_total", 'outcome="failed"')


async def _is_zero(replica: Replica, gauge: str) -> bool:
    return total(await metrics(replica), gauge) == 0


async def _most_at_once(worker: Worker) -> int:
    changes: list[tuple[float, int]] = []
    for record in await turns(worker):
        changes += [(record["start"], 1), (record["end"] or time.time(), -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


async def test_beside_a_flood_a_tenant_waits_for_its_share_only(processes: Processes) -> None:
    """In turns that the workers begin from its asking to its own beginning. With half of the slots it sees 12 to 16 of
    them, and the flood 96; first come, first served, both would see 54. How much longer than alone, to the turn:
    unit/test_capacity.py."""
    fleet = started(processes)
    asked: dict[str, dict[str, float]] = {"flood": {}, "small": {}}
    over = False

    async def ask_as(tenant: str) -> None:
        name = f"{tenant}-{len(asked[tenant])}"
        asked[tenant][name] = time.time()
        assert await fleet.turn(tenant, name=name, tokens=4) == 200

    async def floods() -> None:
        while not over:
            await ask_as("flood")

    async def asks() -> None:
        for _ in range(6):
            await ask_as("small")

    flooding = [asyncio.create_task(floods()) for _ in range(FLOOD)]
    await wait_until(lambda: _queued(fleet, FLOOD - SLOTS), 30)
    beside_from = time.time()
    await asyncio.gather(*(asks() for _ in range(2 * SLOTS)))
    beside_until = time.time()
    over = True
    await asyncio.gather(*flooding)
    starts = {record["request_id"]: record["start"] for record in await fleet.records()}

    def served_meanwhile(tenant: str) -> list[int]:
        """By the workers' own clocks: that this process is late to hear of an answer is nobody's waiting."""
        spans = [(began, starts[name]) for name, began in asked[tenant].items() if beside_from <= began <= beside_until]
        return sorted(sum(began <= start < own for start in starts.values()) for began, own in spans)

    small, flood = served_meanwhile("small"), served_meanwhile("flood")
    assert 1.5 * small[len(small) * 95 // 100] <= flood[len(flood) // 2], (small, flood)
    for worker in fleet.workers:  # exact, because nobody has left
        assert await _most_at_once(worker) <= MAX_TURNS


async def _queued(fleet: Fleet, least: int) -> bool:
    return total(await metrics(fleet.replica), "coatcheck_queued_turns") >= least


async def test_clients_that_leave_at_any_time_leave_nothing_behind(fleet: Fleet) -> None:
    rng = random.Random(7)

    async def client() -> None:
        session = new_session() if rng.random() < 0.5 else None
        leaves = rng.uniform(0.0, 0.3) if rng.random() < 0.5 else 10.0
        try:
            async with asyncio.timeout(leaves):
                await fleet.turn(rng.choice(["flood", "small"]), session, tokens=3, stream=rng.random() < 0.5)
        except (TimeoutError, Cut, OSError):
            pass

    for _ in range(6):
        await asyncio.gather(*(client() for _ in range(50)))


def test_the_official_client_sees_its_own_limit_and_a_full_fleet_apart(fleet: Fleet) -> None:
    asyncio.run(_official(fleet))


async def _official(fleet: Fleet) -> None:
    def ask_with(tenant: str, **options: Any) -> Any:
        with fleet.client(tenant, **options) as client:
            return client.chat.completions.create(
                model="mock-model", messages=[{"role": "user", "content": "hello"}], max_tokens=2
            )

    async def hold(tenant: str, count: int) -> list[asyncio.Task[int]]:
        # Longer than the test: with the first that ends there is room for one who must find none.
        return [asyncio.create_task(fleet.turn(tenant, tokens=100_000)) for _ in range(count)]

    held = await hold("flood", 3 + QUEUE)
    await wait_until(lambda: _queued(fleet, QUEUE), 30)
    with pytest.raises(openai.RateLimitError) as limited:
        await asyncio.to_thread(ask_with, "flood", max_retries=0)
    assert limited.value.code == "tenant_limit"
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 30
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await wait_until(lambda: _is_zero(fleet.replica, "coatcheck_in_flight"), 30)

    held = [*await hold("flood", 2), *await hold("small", 2)]
    await wait_until(lambda: _in_flight(fleet, SLOTS), 30)
    shown = await ask(fleet.replica.url, target="/admin/workers", headers=[("host", "localhost")])
    assert [(each["in_flight"], each["max_turns"]) for each in shown.json["workers"]] == [(2, 2)] * 2
    # Shares of the queue are even as well: one who has less of it than another would be let in.
    held += [*await hold("flood", QUEUE // 2), *await hold("small", QUEUE // 2)]
    await wait_until(lambda: _queued(fleet, QUEUE), 30)
    with pytest.raises(openai.InternalServerError) as full:
        await asyncio.to_thread(ask_with, "flood", max_retries=0)
    assert full.value.status_code == 503
    assert full.value.code == "fleet_full"
    assert 1 <= int(full.value.response.headers["retry-after"]) <= 30
    began, before = time.monotonic(), await _refused(fleet)
    retrying = asyncio.create_task(asyncio.to_thread(ask_with, "flood", max_retries=5))
    await wait_until(lambda: _more_are_refused(fleet, before), 30)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert (await retrying).choices[0].message.content
    assert time.monotonic() - began >= 1.0  # as it was told, and no sooner


async def _refused(fleet: Fleet) -> float:
    return total(await metrics(fleet.replica), "coatcheck_turns_refused_total")


async def _more_are_refused(fleet: Fleet, than: float) -> bool:
    return await _refused(fleet) > than


async def _in_flight(fleet: Fleet, count: int) -> bool:
    return total(await metrics(fleet.replica), "coatcheck_in_flight") == count


async def test_turns_that_wait_when_the_router_is_stopped_are_told(processes: Processes) -> None:
    fleet = started(processes, "--drain-timeout=1")
    held = [asyncio.create_task(fleet.turn("flood", tokens=2000)) for _ in range(SLOTS)]
    await wait_until(lambda: _in_flight(fleet, SLOTS), 30)
    waits = [asyncio.create_task(_said(fleet)) for _ in range(5)]
    await wait_until(lambda: _queued(fleet, 5), 30)
    fleet.replica.process.terminate()
    for status, body in await asyncio.gather(*waits):
        assert (status, body["error"]["code"]) == (503, "fleet_full")
        assert "stopped" in body["error"]["message"]
    await asyncio.gather(*held, return_exceptions=True)


async def _said(fleet: Fleet) -> tuple[int, Any]:
    key = [("authorization", f"Bearer {fleet.keys['small']}")]
    answer = await turn(fleet.replica.url, headers=key, tokens=2)
    return answer.status, json.loads(answer.body)
