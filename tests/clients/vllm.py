"""vLLM on CPU with a model that `tiny_model.py` makes, once `python -m tests.clients.install vllm` has installed it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.clients.install import ENVIRONMENTS, HERE
from tests.support.tcp import free_ports

ENVIRONMENT = ENVIRONMENTS / "vllm"
START_SECONDS = 900
"""A minute on two idle cores."""
MODEL = "mock-model"
MAX_TOKENS = 2048
OPTIONS = [
    "--load-format=dummy",
    "--dtype=float32",
    f"--max-model-len={MAX_TOKENS}",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--enable-prompt-tokens-details",
]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def installed() -> bool:
    return (ENVIRONMENT / ".ready").exists()


def version() -> str:
    """Of what is installed."""
    [metadata] = ENVIRONMENT.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    return metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")


def make_model(folder: Path) -> Path:
    """`folder`, with the model in it, and below `adapter` an adapter for it."""
    python = str(ENVIRONMENT / "bin" / "python")
    subprocess.run([python, str(HERE / "tiny_model.py"), str(folder)], check=True, timeout=START_SECONDS)
    return folder


def consecutive_ports(count: int) -> int:
    """The first of so many free ones that follow each other: each rank has the next."""
    while True:
        [first] = free_ports(1)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def kv_events(port: int, replay_port: int, topic: str = "") -> str:
    """The option that has it publish what becomes of its blocks, at these ports and, for further ranks, those after."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": topic,
    }
    return f"--kv-events-config={json.dumps(config)}"


@contextlib.contextmanager
def standing_vllm(
    model: Path, log: Path, *options: str, port: int = 0, settings: Mapping[str, str] = {}
) -> Iterator[str]:
    """Its address, as long as the block runs. `port`: 0: a free one. `settings`: more of the environment's
    variables."""
    if not port:
        [port] = free_ports(1)
    command = [str(ENVIRONMENT / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL, *OPTIONS, *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **SETTINGS, **settings},
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
