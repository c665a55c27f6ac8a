"""Where clients come in, with real processes and clients that people use: over TLS, whose certificate is renewed while
turns run, and at a unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import httpx2
import pytest

from tests.e2e.conftest import new_session
from tests.e2e.test_openai import MODEL, SAY_HELLO
from tests.support.late import openai
from tests.support.processes import Process, Processes, turns, wait_until
from tests.support.tls import Contexts, TlsClient, contexts

LIMIT = 30.0
CURL = shutil.which("curl")


def coatcheck(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments], capture_output=True, text=True, timeout=60, env=environment
    )


def curl(*arguments: str) -> str:
    assert CURL is not None
    done = subprocess.run(
        [CURL, "-sS", "--noproxy", "*", "-m", "30", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def certificate(process: Process, url: str, made: Contexts) -> bytes | None:
    """What a new client is shown, if it believes it."""
    raw = socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=10)
    assert process.alive
    client = TlsClient(raw, made.client)
    try:
        await client.shake_hands()
    except ConnectionError:
        return None
    finally:
        client.close()
    return client.certificate


def client_of(url: str, made: Contexts) -> openai.AsyncOpenAI:
    trusting = openai.DefaultAsyncHttpxClient(trust_env=False, verify=made.client)
    return openai.AsyncOpenAI(api_key="any", base_url=f"{url}/v1", http_client=trusting, max_retries=0)


async def test_the_certificate_is_renewed_while_a_stream_runs_and_a_broken_one_is_not_taken(
    processes: Processes, tmp_path: Path
) -> None:
    first, second = (contexts(tmp_path, name) for name in ("first", "second"))
    live = tmp_path / "live"
    live.mkdir()
    cert, key = live / "tls.crt", live / "tls.key"

    def install(made: Contexts) -> None:
        """By renaming, as certbot and Kubernetes do."""
        for source, target in ((made.ca, cert), (made.key, key)):
            shutil.copy(source, live / "new")
            (live / "new").rename(target)

    install(first)
    (worker,) = processes.workers(1, "--ttft-ms=5", "--itl-ms=20")
    process = processes.start(
        "router", "app", "serve", "--port=0", "--claims=memory://", f"--worker={worker.url}", "--admin-token=hush",
        f"--tls-cert={cert}", f"--tls-key={key}",
    )  # fmt: skip
    (url,) = process.urls(1)
    assert url.startswith("https://")

    async def is_ready() -> bool:
        assert process.alive, process.output()
        async with httpx.AsyncClient(trust_env=False, verify=first.client) as client:
            return (await client.get(f"{url}/ready")).status_code == 200

    await wait_until(is_ready, LIMIT)
    assert json.loads(curl("--cacert", str(first.ca), f"{url}/health"))

    session = new_session()
    async with client_of(url, first) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=SAY_HELLO,
            stream=True,
            max_tokens=100_000,
            extra_headers={"x-dynamo-session-id": session},
        )
        chunks = aiter(stream)
        await anext(chunks)

        (live / "new").write_text("half of a certific")
        (live / "new").rename(cert)
        await wait_until(lambda: "the settings stay as they were: " in process.output(), LIMIT)
        assert await certificate(process, url, first) is not None

        install(second)

        async def is_shown() -> bool:
            return await certificate(process, url, second) is not None

        await wait_until(is_shown, LIMIT)
        assert await certificate(process, url, first) is None
        (record,) = await turns(worker, session)
        assert record["end"] is None, "the stream was over too early to say anything"
        for _ in range(3):
            await anext(chunks)
        await stream.close()
    async with client_of(url, second) as client:
        await client.chat.completions.create(model=MODEL, messages=SAY_HELLO, max_tokens=1)

    # On SIGHUP too, at once; and the commands of an operator speak it.
    install(first)
    os.kill(process.pid, signal.SIGHUP)

    async def is_first() -> bool:
        return await certificate(process, url, first) is not None

    await wait_until(is_first, LIMIT)
    done = coatcheck("workers", "--json", "--url", url, "--token", "hush", "--ca", str(first.ca))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["workers"]) == 1
    assert coatcheck("workers", "--url", url, "--token", "hush", "--ca", str(second.ca)).returncode == 1


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a unix socket; short, as those must be."""
    with tempfile.TemporaryDirectory(prefix="ck") as folder:
        yield Path(folder) / "http"


async def test_clients_come_in_at_a_unix_socket(processes: Processes, path: Path) -> None:
    """Nobody is an admin there: a proxy speaks for anybody."""
    (worker,) = processes.workers(1)
    process = processes.start(
        "router", "app", "serve", f"--uds={path}", "--claims=memory://", f"--worker={worker.url}",
    )  # fmt: skip
    await wait_until(lambda: f" at unix:{path}," in process.output() or not process.alive, LIMIT)
    assert process.alive, process.output()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    await wait_until(lambda: "nobody may use the admin API" in process.output(), LIMIT)
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    async with openai.AsyncOpenAI(
        api_key="any", base_url="http://router/v1", http_client=openai.DefaultAsyncHttpxClient(transport=transport)
    ) as client:
        session = new_session()
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=SAY_HELLO,
            stream=True,
            max_tokens=5,
            extra_headers={
                "x-dynamo-session-id": session,
                "x-forwarded-for": "192.0.2.9",
                "x-forwarded-proto": "https",
            },
        )
        assert len([chunk async for chunk in stream if chunk.choices]) >= 5
        assert len(await turns(worker, session)) == 1
    assert curl("--unix-socket", str(path), "-o", os.devnull, "-w", "%{http_code}", "http://localhost/ready") == "200"
    said = curl("--unix-socket", str(path), "-w", "%{http_code}", "http://localhost/admin/workers")
    assert said.endswith("403")
    process.terminate()
    assert await asyncio.to_thread(process.wait, 15) == 0
    assert not path.exists()
