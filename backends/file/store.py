"""Claims as files in a shared folder.

Promises, on one host: every process agrees, claims outlive every router process, and a read that starts after a write
has returned sees it (linearizable). A close is seen at once by every process on the host through stamps in its memory;
where not all of them have that memory in common (`stamps`), within 100 ms through events.

A file system that hangs costs the calls of it, each its deadline: nothing of it is touched in the event loop, no page
of it is mapped, and the threads that hang keep no process from ending. What cannot be read at a claim's name costs that
key alone.

With `shared=True` (`file:///dir?hosts=many`) the folder may be a network file system used by several hosts, and
processes on different hosts agree. Reads are then *not* linearizable: NFS caches names and attributes. It then has no
stamps, because hosts have no memory in common: until another host has listed the folder, a closed claim may be taken
there for one that stands. And it never makes the root anew, because a missing folder is more likely an unmounted share.
It lists the folder for its events, because no kernel hears of another host's
changes. It relies on the server for hard links that fail on an existing name and for `flock`:
NFSv4 has both, mount it with `lookupcache=positive`. A host that loses contact loses its locks after the server's lease
time: a remover frozen for that long, between its comparison and its unlink, could then remove a successor.

Not promised anywhere: surviving a power failure without loss. A claim is never torn: a link is whole or absent, and a
file's content is synced before it gets its name (`sync`). But the folder is not synced, so the youngest claims may be
missing afterwards.

How it works: `disk` has the layout, `claims` and `stamps` what is in it, `threads` does that within the deadline,
`watch` has the events, `registry` the records beside the claims.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from backends.base import (
    Claim,
    ClaimOutcome,
    ClaimValue,
    CloseOutcome,
    Event,
    StoreConfigurationError,
    StoreError,
)
from backends.file.claims import Claims, Found
from backends.file.disk import Disk
from backends.file.registry import FileRegistry
from backends.file.stamps import Stamps
from backends.file.threads import MISCONFIGURED, Threads
from backends.file.watch import Watch

log = logging.getLogger(__name__)


class FileStore:
    """Made by `open`; belongs to one event loop. See the module's docstring for what it promises."""

    across_processes = True

    def __init__(self, root: Path, *, deadline: float, shared: bool, sync: bool, poll: bool) -> None:
        self._disk = Disk(root, shared=shared, sync=sync)
        self._stamps = Stamps(self._disk)
        self.stamp = self._stamps.read
        self._claims = Claims(self._disk, self._stamps)
        self._threads = Threads(deadline)
        self._watch = Watch(self._disk, self._claims, self._stamps, self._threads, poll=poll or shared)
        self._registry = FileRegistry(self._disk, self._threads)
        self._shortest_ttl = 4 * 30.0
        self._spread = random.uniform(0.75, 1.25)
        self._upkeep = {
            asyncio.create_task(self._repeat(self._keep, lambda: min(self._walk_every, 1.0))),
            asyncio.create_task(self._repeat(self._watch.walk, lambda: self._walk_every)),
            asyncio.create_task(self._repeat(self._registry.sweep, lambda: self._walk_every)),
        }

    @classmethod
    async def open(
        cls, root: Path, *, deadline: float = 2.0, shared: bool = False, sync: bool = True, poll: bool = False
    ) -> FileStore:
        """Makes the folder where needed and tries to make a claim in it. A disk that is full or silent is not an
        error here: it may heal, and until then every call reports it.

        `deadline` in seconds for every call; `shared`: used by several hosts; `sync`: survive a power failure whole;
        `poll`: do not rely on the kernel's events. Raises StoreConfigurationError."""
        if not root.is_absolute():
            raise StoreConfigurationError(f"the claims folder {str(root)!r} is relative: give an absolute path")
        store = cls(root, deadline=deadline, shared=shared, sync=sync, poll=poll)
        try:
            await store._threads.run(lambda _: store._disk.prepare())
            await store.check()
            await store._threads.run(lambda _: store._stamps.agree())
        except StoreError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in MISCONFIGURED:
                await store.aclose()
                hint = "mount the share and make that folder" if shared else "name a folder that this user can write to"
                raise StoreConfigurationError(f"cannot keep claims in {str(root)!r}: {error}; {hint}") from error
            log.warning("%s: no claims until this passes: %s", root, error)
        return store

    @property
    def registry(self) -> FileRegistry:
        return self._registry

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        self._shortest_ttl = min(self._shortest_ttl, ttl)
        found, created = await self._threads.run(lambda step: self._claims.create_or_get(step, key, proposal, ttl))
        return ClaimOutcome(self._answer(key, found), created)

    async def get(self, key: str) -> Claim | None:
        found = await self._threads.run(lambda _: self._claims.get(key))
        return None if found is None else self._answer(key, found)

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        self._shortest_ttl = min(self._shortest_ttl, ttl)
        return self._answer(claim.key, await self._threads.run(lambda step: self._claims.renew(step, claim, ttl)))

    async def close(self, claim: Claim) -> CloseOutcome:
        return await self._threads.run(lambda step: self._claims.close(step, claim))

    def subscribe(self) -> AsyncIterator[Event]:
        return self._watch.subscribe()

    async def check(self) -> None:
        await self._threads.run(lambda _: self._claims.check())

    async def aclose(self) -> None:
        await self._registry.aclose()
        self._threads.end()
        await self._watch.aclose()
        for task in self._upkeep:
            task.cancel()
        await asyncio.wait(self._upkeep)
        await self._threads.joined()
        self._stamps.leave()

    def _answer(self, key: str, found: Found) -> Claim:
        self._watch.note(key, found.mark)
        expires_at = self._disk.clock.surely_until(found.expires_ns)
        return Claim(key=key, value=found.value, revision=found.revision, expires_at=expires_at)

    @property
    def _walk_every(self) -> float:
        return min(max(self._shortest_ttl / 4, 0.1), 30.0) * self._spread

    async def _keep(self) -> None:
        def keep(_: object) -> None:
            self._disk.keep_time()
            self._stamps.agree()

        await self._threads.run(keep)

    async def _repeat(self, work: Callable[[], Awaitable[None]], every: Callable[[], float]) -> None:
        """Upkeep: `work`, with so many seconds between, or ten times as long as it takes. Endless."""
        loop = asyncio.get_running_loop()
        took = 0.0
        while True:
            rest_from = loop.time()
            while (left := rest_from + max(every(), 10 * took) - loop.time()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(min(left, every(), 1.0))  # a shorter TTL may come meanwhile
            began_at = loop.time()
            try:
                await work()
            except StoreError as error:
                # Every call tells its caller the same; here it is enough to try again.
                log.debug("%s: upkeep: %s", self._disk.root, error)
            except Exception:  # a fault of ours, for the log; without upkeep the folder would grow without bound
                log.exception("%s: upkeep failed", self._disk.root)
                took = 0.0
            else:
                took = loop.time() - began_at
