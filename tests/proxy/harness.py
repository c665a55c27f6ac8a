"""A proxy with its workers, claims and counters, wired by hand as app/main.py does, and checked to be at rest after."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from app.fleet.policies import Policy, least_loaded
from app.fleet.workers import Fleet, Worker, make_worker
from app.http.asgi import AsgiClient as ServerSide
from app.metrics import Metrics
from app.sessions.affinity import Affinity
from app.sessions.identity import KeyHasher
from app.turn.request import Reading
from app.turn.routing import Routing
from app.turn.turn import Limits, Shared, Turns
from backends.base import ClaimStore
from backends.memory import MemoryStore
from tests.support.fakes import AsgiClient, ByteWorker, Script, until

SESSION = (b"x-dynamo-session-id", b"s1")
FINAL = (b"x-dynamo-session-final", b"true")
JSON = (b"content-type", b"application/json")

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Proxy(Turns):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await ServerSide(scope, receive, send).run(self.open)

    @property
    def turns(self) -> int:
        return len(self)


class Bench:
    """What a test of the proxy needs at hand."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        store: ClaimStore | None = None,
        policy: Policy | None = None,
        limits: Limits | None = None,
        reading: Any = None,
        connect_limit: float = 5.0,
        idle_limit: float = 60.0,
        tls: Any = None,
        **affinity: Any,
    ) -> None:
        self.store = store or MemoryStore()
        self.metrics = Metrics()
        self.fleet = Fleet(
            make_worker(url, name=f"w{number}", connect_limit=connect_limit, idle_limit=idle_limit, tls=tls)
            for number, url in enumerate(urls)
        )
        policy = policy or least_loaded
        self.affinity = Affinity(
            self.store, self.fleet, policy, self.metrics, replica="r1", ttl=1800.0, **({"close_limit": 5.0} | affinity)
        )
        self.hasher = KeyHasher()
        routing = Routing(
            fleet=self.fleet, policy=policy, affinity=self.affinity, hasher=self.hasher, metrics=self.metrics
        )
        self.proxy = Proxy(
            Shared(reading=reading or Reading(), routing=routing, metrics=self.metrics, limits=limits or Limits())
        )

    def worker(self, number: int = 0) -> Worker:
        return list(self.fleet)[number]

    def request(self, *headers: tuple[bytes, bytes], **settings: Any) -> AsgiClient:
        return AsgiClient(self.proxy, headers=list(headers), **settings)

    async def get(self, *headers: tuple[bytes, bytes], **settings: Any) -> AsgiClient:
        return await self.request(*headers, **settings).finish()

    async def claim(self, session: bytes = SESSION[1]) -> Any:
        return await self.store.get(self.hasher.key(b"", session))

    def outcomes(self) -> dict[str, int]:
        """Turns by outcome."""
        counted: dict[str, int] = {}
        for (_, outcome), number in self.metrics.turns.cells.items():
            counted[outcome] = counted.get(outcome, 0) + number
        return counted

    async def rest(self) -> None:
        """Every counter is 0, and no connection is open that is not idle."""
        await until(lambda: not self.proxy.turns and not self.affinity._flights)
        await until(lambda: all(worker.pool.open == worker.pool.idle for worker in self.fleet))
        for worker in self.fleet:
            assert all((target.in_flight, target.reserved) == (0, 0) for target in worker.targets)
        assert self.affinity.active_turns == 0
        assert not self.affinity._entries.active


@contextlib.asynccontextmanager
async def bench(*scripts: Script | ByteWorker | str, **settings: Any) -> AsyncIterator[Bench]:
    """A proxy in front of one worker for each script; a ByteWorker or a URL is taken as it is."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for script in scripts:
            if isinstance(script, str):
                urls.append(script)
                continue
            worker = script if isinstance(script, ByteWorker) else ByteWorker(script)
            if not worker.port:
                await stack.enter_async_context(worker)
            urls.append(f"http://127.0.0.1:{worker.port}")
        made = Bench(urls, **settings)
        made.affinity.start()
        try:
            yield made
            await made.rest()
        finally:
            await made.affinity.aclose()
            made.fleet.close()
            await until(lambda: all(worker.pool.open == 0 for worker in made.fleet))
