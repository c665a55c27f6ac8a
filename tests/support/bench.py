"""A router in the test's own loop with its workers, claims and counters, checked to be at rest after.

Wired by hand as app/main.py does, but without the control plane, which takes a hundred times as long to make as the
rest: hundreds of tests have one each. Only `Bench.__init__` knows what it is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import uvicorn

from app.fleet.candidates import Candidates
from app.fleet.capacity import Bounds, Capacity
from app.fleet.catalog import Catalog
from app.fleet.models import ModelLists
from app.fleet.placement.foresight import Foresight
from app.fleet.policies import Policy
from app.fleet.specs import WorkerSpec
from app.fleet.workers import Fleet, Target, Worker, make_worker
from app.http.client import ClientLimits, client_protocol
from app.metrics import Metrics
from app.sessions.affinity import Affinity
from app.sessions.identity import KeyHasher
from app.turn.access import AccessLog
from app.turn.request import Reading
from app.turn.routing import Routing
from app.turn.shared import Limits, Shared
from app.turn.turn import Turns
from backends.memory import MemoryStore
from tests.support import raw
from tests.support.client import Call, Entrance
from tests.support.fakes import ScriptedStore
from tests.support.raw import Script, until

SESSION = (b"x-dynamo-session-id", b"s1")
FINAL = (b"x-dynamo-session-final", b"true")
JSON = (b"content-type", b"application/json")


def in_order(candidates: Candidates[Target]) -> Target:
    """The policy of tests that are not about policies: the least loaded with room, and of equals one after the other in
    the workers' order, where least-loaded has a session go by its hash."""
    return min(candidates.trial or candidates.compared(), key=lambda target: (target.load, target.placed))


class Bench:
    """What a test of the proxy needs at hand."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        store: ScriptedStore | None = None,
        policy: Policy | None = None,
        limits: Limits | None = None,
        reading: Reading | None = None,
        client_limits: ClientLimits | None = None,
        connect_limit: float = 5.0,
        idle_limit: float = 60.0,
        max_turns: int = 0,
        ranks: int = 0,
        bounds: Bounds | None = None,
        models: Sequence[str] = (),
        tls: Any = None,
        access: AccessLog | None = None,
        foresight: Callable[[Metrics], Foresight] | None = None,
        **affinity: Any,
    ) -> None:
        """`models`: the one that each worker serves; none: all serve any."""
        self.store = store or ScriptedStore(MemoryStore())
        self.metrics = Metrics()
        self.fleet = Fleet(
            make_worker(
                url,
                name=f"w{number}",
                connect_limit=connect_limit,
                idle_limit=idle_limit,
                max_turns=max_turns,
                ranks=ranks,
                tls=lambda: tls,
            )
            for number, url in enumerate(urls)
        )
        policy = policy or in_order
        self.affinity = Affinity(
            self.store, self.fleet, policy, self.metrics, replica="r1", ttl=1800.0, **({"close_limit": 5.0} | affinity)
        )
        self.hasher = KeyHasher()
        self.catalog = Catalog(
            self.fleet, ModelLists(self.fleet, ssl.create_default_context), list, interval=60 if models else 0
        )
        for number, model in enumerate(models):
            self.serves(number, model)
        routing = Routing(
            fleet=self.fleet,
            policy=policy,
            affinity=self.affinity,
            hasher=self.hasher,
            metrics=self.metrics,
            catalog=self.catalog,
            foresight=None if foresight is None else foresight(self.metrics),
        )
        self.capacity: Capacity | None = None
        if max_turns or bounds is not None:
            loop, rng = asyncio.get_running_loop(), random.Random(1)
            self.capacity = Capacity(
                self.fleet,
                policy,
                self.metrics,
                bounds or Bounds(),
                serving=self.catalog.serving,
                loop=loop,
                rng=rng,
            )
        shared = Shared(
            fleet=self.fleet,
            reading=reading or Reading(),
            routing=routing,
            metrics=self.metrics,
            limits=limits or Limits(),
            capacity=self.capacity,
            bounds=bounds or Bounds(),
            access=access,
        )
        self.running = Turns(shared)
        self.config = uvicorn.Config(
            _own,
            http=client_protocol(lambda path: self.running if path.startswith("/v1/") else None, limits=client_limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
        )
        self.entrance = Entrance(self.config)

    @property
    def turns(self) -> int:
        """Running now."""
        return self.running.count

    def worker(self, number: int = 0) -> Worker:
        return list(self.fleet)[number]

    def serves(self, number: int, *models: str) -> None:
        """The worker serves these from now on."""
        worker = self.worker(number)
        worker.spec = WorkerSpec(name=worker.name, url=worker.url, models=models)
        self.catalog.fleet_changed()

    def request(self, *headers: tuple[bytes, bytes], **settings: Any) -> Call:
        return Call(self.entrance, headers, **settings)

    async def get(self, *headers: tuple[bytes, bytes], **settings: Any) -> Call:
        return await self.request(*headers, **settings).finish()

    async def claim(self, session: bytes = SESSION[1]) -> Any:
        return await self.store.get(self.hasher.key(b"", session))

    def outcomes(self) -> dict[str, int]:
        """Turns by outcome."""
        counted: dict[str, int] = {}
        for (_, outcome), number in self.metrics.turns.cells.items():
            if number:
                counted[outcome] = counted.get(outcome, 0) + number
        return counted

    async def rest(self) -> None:
        await at_rest(lambda: self.turns, self.affinity, self.fleet)
        if self.capacity is not None:
            assert (self.capacity.running, self.capacity.waiting) == (0, 0)

    async def close(self) -> None:
        await self.affinity.aclose()
        self.fleet.close()
        await self.entrance.close()
        await all_closed(self.fleet)


async def at_rest(turns: Callable[[], int], affinity: Affinity, fleet: Fleet) -> None:
    """Wait until no turn runs; then every counter must be 0."""
    await until(lambda: not turns())
    targets = [target for each in fleet for target in each.targets]
    await until(lambda: not any(target.in_flight or target.reserved or target.queued for target in targets))
    assert affinity.active_turns == 0


async def all_closed(fleet: Fleet) -> None:
    """Wait until no connection of a closed fleet is open: a turn that has kept its own has leaked it."""
    await until(lambda: all(worker.pool.open == 0 for worker in fleet))


async def _own(scope: Any, receive: Any, send: Any) -> None:
    """What stands for the control plane: it says what it was sent."""
    answer, more = b"own", True
    while more:
        message = await receive()
        answer += message.get("body", b"")
        more = message.get("more_body", False)
    length = b"%d" % len(answer)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": answer})


@contextlib.asynccontextmanager
async def bench(*scripts: Script | raw.Worker | str, **settings: Any) -> AsyncIterator[Bench]:
    """A proxy in front of one worker for each script; one that runs already is given by its URL."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for script in scripts:
            if not isinstance(script, str):
                worker = script if isinstance(script, raw.Worker) else raw.Worker(script)
                script = (await stack.enter_async_context(worker)).url
            urls.append(script)
        made = Bench(urls, **settings)
        made.affinity.start()
        try:
            yield made
            await made.rest()
        finally:
            await made.close()
