"""Two real vLLM on CPU that tell of their caches, behind replicas that place by that, where vLLM is installed. Not part
of `make test`.

Turns have no session here, so that each is placed, and what was foreseen of it is compared with what the engine
reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.vllm import MODEL, START_SECONDS, consecutive_ports, installed, kv_events, make_model, standing_vllm
from tests.support.processes import Processes, Replica, metrics, total, wait_until
from tests.support.tcp import free_ports
from tests.support.wire import ask

pytestmark = pytest.mark.timeout(START_SECONDS + 600)

CONVERSATIONS, TURNS = 40, 4
SHARED = "A conversation is a coat, the worker that has its cache is the hook, and the session id is the claim ticket. "
SHARED_TOKENS = 1000
JSON = [("content-type", "application/json")]
UNTOLD = 2
"""An engine's first answers have nothing cached, which is believed once it has told of some: one of each engine."""
POLICIES = ("round-robin", "least-loaded", "prefix", "kv")


class Engine:
    """One vLLM, which is started again where it was."""

    def __init__(self, name: str, model: Path, log: Path) -> None:
        self.name = name
        self._model, self._log = model, log
        [self._port] = free_ports(1)
        self._events = consecutive_ports(2)
        self._standing = contextlib.ExitStack()

    @property
    def said(self) -> str:
        """As a replica is told of it."""
        events, replay = self._events, self._events + 1
        places = f"kv-events=tcp://127.0.0.1:{events},kv-replay=tcp://127.0.0.1:{replay}"
        return f"--worker=http://127.0.0.1:{self._port},name={self.name},{places}"

    def start(self) -> None:
        events = kv_events(self._events, self._events + 1)
        self._standing.enter_context(standing_vllm(self._model, self._log, events, port=self._port))

    def stop(self) -> None:
        self._standing.close()


@dataclass(frozen=True)
class Fleet:
    engines: list[Engine]
    processes: Processes
    folder: Path

    def replicas(self, policy: str, count: int = 2) -> list[Replica]:
        claims = f"--claims=file://{self.folder}/{policy}-{secrets.token_hex(4)}"
        said = [claims, f"--policy={policy}", "--tokenize-timeout=60", *(engine.said for engine in self.engines)]
        return self.processes.replicas_with(*[said] * count)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if not installed():
        pytest.skip("vllm is not installed: python -m tests.clients.install vllm")
    folder = tmp_path_factory.mktemp("kv")
    model = make_model(folder / "model")
    with contextlib.ExitStack() as stack, Processes(folder) as processes:
        engines = [Engine(f"v{number}", model, folder / f"v{number}.log") for number in range(2)]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        yield Fleet(engines, processes, folder)


async def believed(replicas: Sequence[Replica], count: int) -> bool:
    return [(await metrics(each))["coatcheck_kv_workers"] for each in replicas] == [count] * len(replicas)


async def exact(replicas: Sequence[Replica]) -> tuple[float, float]:
    """How many turns had as much in the cache as was foreseen, and how many had not."""
    samples = [await metrics(each) for each in replicas]
    right = sum(total(each, "coatcheck_foresights_exact_total", 'outcome="yes"') for each in samples)
    return right, sum(total(each, "coatcheck_foresights_exact_total") for each in samples) - right


async def converse(replicas: Sequence[Replica], conversations: int = CONVERSATIONS) -> float:
    """Conversations that all begin alike, one turn after the other at each replica in its turn. What part of all
    prompts the engines had in their caches."""
    beginning = secrets.token_hex(8) + " " + SHARED * (SHARED_TOKENS * 4 // len(SHARED))
    histories: list[list[dict[str, str]]] = [[{"role": "system", "content": beginning}] for _ in range(conversations)]
    prompts = cached = 0
    for turn in range(TURNS):
        for number, history in enumerate(histories):
            history.append({"role": "user", "content": f"{number}: which hook is it, and whose? " * (1 + turn)})
            body: dict[str, Any] = {"model": MODEL, "messages": history, "max_tokens": 8, "temperature": 0}
            replica = replicas[(number + turn) % len(replicas)]
            answered = await ask(replica.url, "POST", "/v1/chat/completions", JSON, json.dumps(body).encode())
            assert answered.status == 200, answered.body
            answer = answered.json
            usage = answer["usage"]
            prompts += usage["prompt_tokens"]
            cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return cached / prompts


async def test_what_is_foreseen_is_what_the_engines_had_and_no_policy_finds_more(fleet: Fleet) -> None:
    shares: dict[str, float] = {}
    for policy in POLICIES:
        replicas = fleet.replicas(policy)
        await wait_until(functools.partial(believed, replicas, 2 if policy == "kv" else 0), 60)
        shares[policy] = await converse(replicas)
    right, wrong = await exact(replicas)
    print(f"cached share: {shares}; foreseen exactly: {right:.0f} of {right + wrong:.0f}")
    assert right + wrong >= CONVERSATIONS * TURNS - UNTOLD
    assert right >= 0.99 * (right + wrong)
    assert shares["kv"] >= max(shares.values()) - 0.005


async def test_it_is_so_after_a_restart_of_an_engine_and_at_a_replica_that_is_new(fleet: Fleet) -> None:
    replicas = fleet.replicas("kv")
    await wait_until(lambda: believed(replicas, 2), 60)
    await converse(replicas, 4)
    engine = fleet.engines[0]
    await asyncio.to_thread(engine.stop)
    await wait_until(lambda: believed(replicas, 1), 60)
    await asyncio.to_thread(engine.start)
    replicas += fleet.replicas("kv", 1)
    await wait_until(lambda: believed(replicas, 2), 60)
    before = await exact(replicas)
    await converse(replicas, 10)
    after = await exact(replicas)
    right, wrong = after[0] - before[0], after[1] - before[1]
    print(f"foreseen exactly: {right:.0f} of {right + wrong:.0f}")
    assert right + wrong >= 10 * TURNS - UNTOLD
    assert right >= 0.99 * (right + wrong)
