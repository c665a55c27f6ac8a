"""Somebody who asks the time all the while: was it the machine that was slow?

A store call that misses its deadline is an outage to a replica, whatever the reason. On a machine that is busy with
other things that happens without the nemesis. So the store and every replica are asked something trivial a few times a
second, by somebody who has no part in the routing; a long wait for that is noted as a fault, `machine-slow`. It excuses
what an outage excuses, and the table of a run says how much of that there was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

from tests.e2e.history.checker import Fault
from tests.e2e.history.deployment import Deployment, Node
from tests.support.wire import Cut, ask

EVERY_S = 0.25


class Witness:
    """`async with Witness(deployment, faults)`."""

    def __init__(self, deployment: Deployment, faults: list[Fault]) -> None:
        self._deployment, self._faults = deployment, faults
        # Of several members each attempt gets a quarter of the deadline.
        self._limit_s = deployment.rules.deadline / (2 if deployment.cluster is None else 4)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._start(self._watch_loop())
        self._start(self._watch_store())
        for replica in self._deployment.replicas:
            self._start(self._watch_replica(replica))

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _watch_loop(self) -> None:
        """Our own event loop, which the clients share: a late one sees everything late."""
        while True:
            await self._time(asyncio.sleep(EVERY_S), EVERY_S + self._limit_s)

    async def _watch_replica(self, replica: Node) -> None:
        """The event loop of a replica; also slow while the nemesis has frozen it, which adds nothing to that."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self._time(ask(replica.url, target="/health"), self._limit_s, replica.name)

    async def _watch_store(self) -> None:
        cluster = self._deployment.cluster
        while True:
            await asyncio.sleep(EVERY_S)
            if cluster is None:
                await self._time(asyncio.to_thread(self._touch), self._limit_s)
            else:
                # One that the nemesis has stopped is no matter: the others answer.
                asking = [asyncio.ensure_future(asyncio.to_thread(member.healthy)) for member in cluster.members]
                await self._time(asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED), self._limit_s)

    def _touch(self) -> None:
        probe = self._deployment.claims / "witness"
        with probe.open("wb") as file:
            os.fsync(file.fileno())
        probe.unlink()

    async def _time(self, work: Awaitable[object], limit_s: float, target: str = "") -> None:
        start = time.time()
        with contextlib.suppress(OSError, Cut, TimeoutError):
            await work
        end = time.time()
        if end - start > limit_s:
            self._faults.append(Fault(kind="machine-slow", target=target, start=start, end=end))
