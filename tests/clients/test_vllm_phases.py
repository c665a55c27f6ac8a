"""Two real vLLM on CPU, one that prefills and one that decodes, by vLLM's own hand-over (NIXL over TCP), where both are
installed. Not part of `make test`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.clients.vllm import ENVIRONMENT, MODEL, START_SECONDS, installed, make_model, standing_vllm
from tests.support.processes import Processes, Replica, metrics, total, wait_until
from tests.support.tcp import free_ports
from tests.support.wire import Wire, ask

pytestmark = pytest.mark.timeout(START_SECONDS + 600)

JSON = [("content-type", "application/json")]
TEXT = (
    "A conversation is a coat, the worker that has its cache is the hook, and the session id is the claim ticket. " * 12
)
TRANSFER = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}
SHARING = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Each engine would bind its threads to the same cores as the other one, and spin there."""
PATIENCE = 300.0
"""Seconds for an answer: before its first hand-over each engine makes ready what only requests need, and the two shake
hands."""
FETCHED = "vllm:external_prefix_cache_hits_total"
ANSWERS = [("/v1/chat/completions", False), ("/v1/chat/completions", True), ("/v1/messages", False)]
ANSWERS += [("/v1/messages", True), ("/v1/completions", False)]


@dataclass(frozen=True)
class Split:
    decode: str
    replica: Replica


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Who prefills, and who decodes."""
    if not installed() or not [*ENVIRONMENT.glob("lib/python*/site-packages/nixl")]:
        pytest.skip("vllm, or nixl beside it, is not installed: python -m tests.clients.install vllm")
    folder = tmp_path_factory.mktemp("phases")
    model = make_model(folder / "model")
    with contextlib.ExitStack() as stack:
        urls = []
        for role, side in zip(("kv_producer", "kv_consumer"), free_ports(2), strict=True):
            option = f"--kv-transfer-config={json.dumps({**TRANSFER, 'kv_role': role})}"
            settings = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
            settings |= {"UCX_TLS": "tcp,self,cma,posix,sysv", **SHARING}
            urls.append(stack.enter_context(standing_vllm(model, folder / f"{role}.log", option, settings=settings)))
        yield urls[0], urls[1]


@pytest.fixture(scope="module")
def split(engines: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    prefill, decode = engines
    with Processes(tmp_path_factory.mktemp("split")) as processes:
        workers = [f"--worker={prefill},name=p,phase=prefill", f"--worker={decode},name=d,phase=decode"]
        [replica] = processes.replicas_with(["--claims=memory://", "--prefill-from=0", *workers])
        yield Split(decode, replica)


def request(path: str, *, stream: bool) -> bytes:
    text = f"{secrets.token_hex(4)} {TEXT}"
    said = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"model": MODEL, "max_tokens": 8, "temperature": 0, "stream": stream, **said}).encode()


async def fetched(url: str) -> float:
    """Tokens whose blocks have come from the other one."""
    lines = (await ask(url, target="/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(FETCHED))


@pytest.mark.parametrize(("path", "stream"), ANSWERS)
async def test_each_prompt_is_computed_at_one_and_fetched_by_the_other(split: Split, path: str, stream: bool) -> None:
    before = await fetched(split.decode)
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
        url, body = split.replica.url + path, request(path, stream=stream)
        answer = await client.post(url, content=body, headers=dict(JSON))
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    headers = answer.headers
    assert (headers["x-coatcheck-prefill-worker"], headers["x-coatcheck-worker"]) == ("p", "d")
    assert await fetched(split.decode) > before + 256


async def test_clients_that_leave_leave_no_turn_behind(split: Split) -> None:
    path = "/v1/chat/completions"

    async def leaves(number: int) -> None:
        async with await Wire.to(split.replica.url) as wire:
            wire.request("POST", path, JSON, request(path, stream=True))
            await asyncio.sleep(0.05 * number)

    async def rests() -> bool:
        samples = await metrics(split.replica)
        return not total(samples, "coatcheck_in_flight") and not total(samples, "coatcheck_turns_running")

    await asyncio.gather(*map(leaves, range(20)))
    await wait_until(rests, 60)
