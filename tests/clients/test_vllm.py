"""One real vLLM on CPU, where it is installed: `python -m tests.clients.install vllm`. Not part of `make test`.

`tiny_model.py` makes the model. Two replicas stand before two workers, which are one vLLM and a mock: that a session
keeps its worker is seen at the mock's records, and that this is worth something in vLLM's own count of cached tokens.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.clients.install import ENVIRONMENTS, HERE
from tests.support.processes import Processes, Worker, turns
from tests.support.wire import ask

ENVIRONMENT = ENVIRONMENTS / "vllm"
START_SECONDS = 400
SESSIONS, TURNS = 10, 3
MODEL = "mock-model"
BLOCK_TOKENS = 128
"""vLLM's on CPU; only whole blocks are found again."""
OPTIONS = [
    "--load-format=dummy",
    "--dtype=float32",
    "--max-model-len=2048",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--enable-prompt-tokens-details",
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip("vllm is not installed: python -m tests.clients.install vllm")
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    python = str(ENVIRONMENT / "bin" / "python")
    subprocess.run([python, str(HERE / "tiny_model.py"), str(model)], check=True, timeout=120)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(ENVIRONMENT / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL, *OPTIONS]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it has children
        )
    try:
        _wait_for(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        text = log.read_text(errors="replace")[-4000:]
        assert process.poll() is None, f"vLLM has ended:\n{text}"
        assert time.monotonic() < give_up_at, f"vLLM does not come up:\n{text}"
        time.sleep(0.5)


async def hits(url: str) -> float:
    """Tokens that vLLM found in its prefix cache since its start."""
    text = (await ask(url, target="/metrics")).body.decode()
    return sum(float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.M))


async def test_sessions_stay_on_their_worker_and_find_their_cache(vllm: str, tmp_path: Path) -> None:
    before = await hits(vllm)
    with Processes(tmp_path) as processes:
        [mock] = processes.workers(1, "--tokens", "8")
        worker = Worker("vllm", vllm, mock.process)  # no process of ours, and nobody asks for it
        replicas = processes.replicas(2, [worker, mock], tmp_path / "claims")
        clients = [OpenAI(base_url=f"{replica.url}/v1", api_key="any", timeout=120) for replica in replicas]
        where: dict[str, list[str]] = {}
        cached: dict[str, list[int]] = {}
        for number in range(SESSIONS):
            session = secrets.token_hex(8)
            history = [{"role": "user", "content": f"{session} " + "a ticket names a hook " * 40}]
            for turn in range(TURNS):
                raw = clients[(number + turn) % 2].chat.completions.with_raw_response.create(
                    model=MODEL,
                    messages=history,  # type: ignore[arg-type]
                    max_tokens=8,
                    extra_headers={"X-Dynamo-Session-ID": session},
                )
                answer = raw.parse()
                where.setdefault(session, []).append(raw.headers["x-coatcheck-worker"])
                details = answer.usage.prompt_tokens_details if answer.usage else None
                cached.setdefault(session, []).append((details and details.cached_tokens) or 0)
                history += [
                    {"role": "assistant", "content": answer.choices[0].message.content or ""},
                    {"role": "user", "content": "and then " * 10},
                ]
        assert all(len(set(workers)) == 1 for workers in where.values()), where
        assert {workers[0] for workers in where.values()} == {"vllm", mock.name}, "both were to be used"
        for session, workers in where.items():
            assert len(await turns(mock, session)) == (TURNS if workers[0] == mock.name else 0)
        real = {session: counts for session, counts in cached.items() if where[session][0] == "vllm"}
        assert all(later >= BLOCK_TOKENS for counts in real.values() for later in counts[1:]), real
        assert await hits(vllm) - before >= sum(sum(counts[1:]) for counts in real.values())
        print(f"{len(real)} of {SESSIONS} sessions on vLLM, tokens from its cache by turn: {list(real.values())}")
