"""A mock worker in a thread of this process, and what its tests ask of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import uvloop

from mocker import cli
from mocker.server import create_mock
from mocker.settings import MockSettings

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
CHAT = {"model": "mock-model", "messages": HELLO}


class Worker:
    """A mock worker on a free port, served by a thread of this process."""

    def __init__(self, **settings: Any) -> None:
        self._listener = cli.listen("127.0.0.1", 0)
        self.host, self.port = self._listener.getsockname()[:2]
        self.url = f"http://{self.host}:{self.port}"
        self._app = create_mock(MockSettings(**{"name": "unit", "ttft_ms": 5, "itl_ms": 1, **settings}))
        self.bootstrap_port = self._app.bootstrap_port
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        self.http = httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=10)

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            ready.set()
            await cli.serve([(self._app, self._listener)], self._stop)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    def close(self) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._app.close()

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def turns(self, session: str) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = self.get(f"/mock/turns?session={session}")["turns"]
        return turns

    def connect(self, session: str, path: str = "/v1/chat/completions", **request: Any) -> socket.socket:
        """Send a turn; the answer is left to the caller."""
        body = json.dumps({**CHAT, **request}).encode()
        connection = socket.create_connection((self.host, self.port), timeout=5)
        connection.sendall(
            b"POST %s HTTP/1.1\r\nhost: x\r\nx-dynamo-session-id: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (path.encode(), session.encode(), len(body), body)
        )
        return connection


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)
