"""Affinities over one store in one loop, and what tests do with them as turns do."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from app.fleet.policies import Policy
from app.fleet.workers import Fleet, Target, make_worker
from app.metrics import Metrics
from app.sessions.affinity import Affinity, Binding
from app.sessions.identity import KeyHasher
from app.sessions.placing import ANYWHERE, Placement
from backends.memory import MemoryStore
from tests.support.bench import in_order
from tests.support.fakes import ScriptedStore, settle

TTL = 1800.0
WALL = 1_700_000_000.0
"""Unix seconds when the loop's clock is 0."""
WORKERS = ("a", "b", "c")
hasher = KeyHasher()
KEY = hasher.key(b"", b"session")


def key_of(number: int) -> str:
    return hasher.key(b"", b"session %d" % number)


class Replica:
    """An affinity and what it was made of."""

    def __init__(
        self,
        store: MemoryStore | ScriptedStore,
        *,
        name: str = "r1",
        workers: Iterable[str] = WORKERS,
        policy: Policy | None = None,
        ttl: float = TTL,
        **settings: object,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.store = store
        self.fleet = Fleet(
            make_worker(f"http://{worker}:1", name=worker, connect_limit=1, idle_limit=1, clock=clock)
            for worker in workers
        )
        self.metrics = Metrics()
        self.affinity = Affinity(
            store,
            self.fleet,
            policy or in_order,
            self.metrics,
            replica=name,
            ttl=ttl,
            clock=clock,
            wall=lambda: WALL + clock(),
            **settings,  # type: ignore[arg-type]
        )

    def target(self, name: str) -> Target:
        found = self.fleet.find(name, None)
        assert found is not None
        return found

    async def turn(self, key: str = KEY, placement: Placement = ANYWHERE, *, final: bool = False) -> Binding:
        """Bind as a turn does."""
        binding = self.affinity.session(key, final=final)
        try:
            if not binding.bind_cached():
                await binding.bind(placement)
        except BaseException:
            binding.release()
            raise
        return binding

    async def visit(self, key: str = KEY, placement: Placement = ANYWHERE) -> tuple[str, str]:
        """A whole turn: the worker's name and the outcome."""
        turn = await self.turn(key, placement)
        turn.answered(200)
        turn.release()
        return turn.target.worker.name, turn.how

    def known(self, key: str = KEY) -> bool:
        """Whether a turn would be bound without I/O."""
        turn = self.affinity.session(key, final=False)
        bound = turn.bind_cached()
        turn.release()
        return bound

    def turns(self, key: str = KEY) -> int:
        """Of one session."""
        entry = self.affinity._entries.find(key)
        return 0 if entry is None else entry.active

    def resolving(self, key: str = KEY) -> asyncio.Task[object]:
        """The task that resolves a session now."""
        return self.affinity._flights._flights[key].task

    @property
    def reserved(self) -> list[int]:
        return [sum(target.reserved for target in worker.targets) for worker in self.fleet]

    def assert_quiet(self) -> None:
        assert self.affinity.active_turns == 0
        assert self.reserved == [0] * len(self.fleet)
        assert not self.affinity._entries.active
        assert not self.affinity._flights
        assert self.affinity.census() == Counter(entry.target.worker.name for entry in self.affinity._entries)


@contextlib.asynccontextmanager
async def running(store: MemoryStore | ScriptedStore, **settings: object) -> AsyncIterator[Replica]:
    replica = Replica(store, **settings)  # type: ignore[arg-type]
    replica.affinity.start()
    await settle()
    try:
        yield replica
        replica.assert_quiet()
    finally:
        await replica.affinity.aclose()


def memory() -> MemoryStore:
    return MemoryStore(clock=asyncio.get_running_loop().time)


def scripted(inner: MemoryStore | None = None, **settings: bool) -> ScriptedStore:
    return ScriptedStore(inner or memory(), **settings)


def first_of(name: str) -> Policy:
    """Always this worker where it may be chosen."""
    return lambda candidates: next((t for t in candidates if t.worker.name == name), candidates[0])
