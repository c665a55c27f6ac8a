"""Frees what a prefill worker has staged for a turn that does not go on: its blocks would stay for half a minute or
more.

Only the message that they were staged for frees them: a request to a decode worker that names them. So that one is sent
all the same, for one token, and never where another one with the same hand-over may have been read: blocks that are
freed are soon another prompt's, and who fetches them then keeps them as this prompt's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from app.fleet.workers import Fleet, Target, Worker
from app.http.calling import call
from app.http.worker import AttemptFailed, ConnectFailed
from app.metrics import Metrics

log = logging.getLogger("coatcheck.turn")

_AT_ONCE = 32
_MOST = 1_000
"""That wait."""
_WITHIN = 20.0
"""Seconds that one may take."""
_ANSWER = 64 << 20
_TARGETS = 3
_AT_THE_END = 2.0


def fetches(worker: Worker) -> bool:
    """Whether it fetches what is staged, and so frees it."""
    return worker.phase == "decode" and worker.handover == "vllm"


class Releases:
    """Of one router. `aclose` before the loop ends."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet, self._metrics = fleet, metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def __len__(self) -> int:
        """That are under way."""
        return len(self._tasks)

    def begin(self, request: Callable[[Target], bytes], at: Target | None, among: frozenset[str] | None) -> None:
        """`request` makes what is sent to a decode worker: `at` that one, or another one of `among` (None: of all)."""
        if len(self._tasks) >= _MOST:
            self._metrics.handovers_released.inc("failed")
            return
        task = asyncio.get_running_loop().create_task(self._release(request, at, among))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(
        self, request: Callable[[Target], bytes], at: Target | None, among: frozenset[str] | None
    ) -> None:
        outcome = "failed"
        try:
            async with self._slots:
                for target in self._targets(at, among):
                    try:
                        status, _ = await call(target.worker.pool, request(target), seconds=_WITHIN, most=_ANSWER)
                    except ConnectFailed:  # it has read nothing
                        continue
                    except AttemptFailed:
                        break
                    outcome = "ok" if status < 400 else "failed"
                    break
        finally:
            self._metrics.handovers_released.inc(outcome)

    def _targets(self, at: Target | None, among: frozenset[str] | None) -> list[Target]:
        found = [at] if at is not None and at.worker.known else []
        others = self._fleet.candidates(among=among, trials=False, with_full=True)
        found += (each for each in others.compared() if fetches(each.worker) and each is not at)
        return found[:_TARGETS]

    async def aclose(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_AT_THE_END)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        for task in left:
            with contextlib.suppress(asyncio.CancelledError):
                await task
