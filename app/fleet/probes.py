"""Workers are asked how they are, whether or not there are turns: a probe each now and then, on a connection of its own
that is kept, so that one costs little more than its bytes. At most one per worker at a time, each within a limit, and
none waits for another's worker or name.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.fleet.health import Cause, Probe
from app.fleet.workers import Fleet, Worker
from app.http.inplace import Driven, Wake
from app.http.response import Expected
from app.http.worker import (
    AttemptFailed,
    AttemptTimeout,
    ConnectFailed,
    ConnectionBroken,
    LocalLimit,
    NameUnknown,
    StaleConnection,
    WorkerConnection,
)

log = logging.getLogger("coatcheck.fleet")

_LISTS = b"/v1/models"
"""What is asked of a worker that has no probe path: a static list, which says only that somebody answers."""
_ANSWER_BYTES = 1 << 16
"""What is read of an answer, so that its connection can be kept."""
_LOOK_EVERY = 0.5
"""Seconds between looks at who has come, who has gone, and what time alone decides."""
_FIRST_ROUND = 1.0
"""Seconds that a router waits at most, before it serves, for what the workers say at first."""
_HURRIED = 0.25
"""Of the interval: the pause before the next probe of a worker whose state hangs on it."""
_JITTER = 0.2
_REFUSALS = frozenset({401, 403})
_NO_SUCH_PATH = frozenset({404, 405, 501})
_AWAY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between looks whether a worker that is not probed can be connected to again."""


class Probing(msgspec.Struct, frozen=True):
    """How workers are asked. Times in seconds."""

    path: bytes = b"/health"
    """Empty: not at all."""
    interval: float = 2.0
    limit: float = 2.0
    key_line: bytes = b""
    """A header line that goes with it."""


class Prober:
    """Asks all workers of a fleet, those too that come later. `start` inside the running loop."""

    def __init__(self, fleet: Fleet, how: Probing, *, rng: random.Random | None = None) -> None:
        self._fleet, self._how, self._rng = fleet, how, rng or random.Random()
        self._asked: dict[Worker, _Asked] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, patience: float = _FIRST_ROUND) -> None:
        """Begin, and wait for the first answers, `patience` at most: what is there is known before it is needed."""
        self._look(asyncio.get_running_loop())
        if self._how.path and self._asked:
            firsts = [each.first for each in self._asked.values()]
            await asyncio.wait(firsts, timeout=patience)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for asked in self._asked.values():
            asked.stop()
        self._asked.clear()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        for worker in self._fleet:
            if worker not in self._asked:
                self._asked[worker] = _Asked(worker, self._how, loop, self._rng.uniform)
            if worker.health.watchful:
                worker.health.tick()
        if len(self._asked) > len(self._fleet):
            here = set(self._fleet)
            for worker in [each for each in self._asked if each not in here]:
                self._asked.pop(worker).stop()
        for asked in self._asked.values():
            asked.look(loop.time())
        self._timer = loop.call_later(_LOOK_EVERY, self._look, loop)


class _Asked:
    """One worker, asked again and again. At most one of `_driven` and `_pause` is set."""

    def __init__(
        self,
        worker: Worker,
        how: Probing,
        loop: asyncio.AbstractEventLoop,
        uniform: Callable[[float, float], float],
    ) -> None:
        self._worker, self._how, self._loop, self._uniform = worker, how, loop, uniform
        self._pool = worker.pool.beside(how.limit)
        self.first: asyncio.Future[None] = loop.create_future()
        """Done when it has been asked once."""
        self._path = how.path
        self._told: set[str] = set()
        """What has been said of it in the log: once is enough."""
        self._driven: Driven | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._away = 0
        self._look_at = 0.0
        if how.path:
            self._begin()

    def look(self, now: float) -> None:
        """Of a worker that is not probed only whether it can be connected to again when it was lost: with `/ready`
        failing no turn would come to find out."""
        if self._how.path or self._driven is not None:
            return
        if self._worker.health.cause is not Cause.CONNECTS:
            self._away, self._look_at = 0, now + _AWAY_PAUSES[0]
        elif now >= self._look_at:
            self._away = min(self._away + 1, len(_AWAY_PAUSES) - 1)
            self._look_at = now + _AWAY_PAUSES[self._away]
            self._run(self._try_to_connect())

    def stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._driven is not None:
            self._driven.close()  # its `finally` gives the connection back
        self._pool.close()
        self.first.cancel()

    # -- one after the other

    def _begin(self) -> None:
        self._pause = None
        self._run(self._probe())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._driven = Driven(self._ended, self._failed)
        self._driven.start(work)

    def _ended(self, _: object) -> None:
        self._driven = None
        if not self.first.done():
            self.first.set_result(None)
        if self._how.path:
            pause = self._how.interval * (_HURRIED if self._worker.health.undecided else 1.0)
            self._pause = self._loop.call_later(pause * self._uniform(1 - _JITTER, 1 + _JITTER), self._begin)

    def _failed(self, fault: Exception) -> None:
        # A fault of ours: the operator reads of it, and the worker is asked on.
        log.error("worker %s could not be probed", self._worker.name, exc_info=fault)
        self._ended(None)

    # -- one probe

    async def _probe(self) -> None:
        health = self._worker.health
        try:
            status = await self._status()
        except NameUnknown as failure:
            self._count(Probe.NAMELESS, str(failure))
        except ConnectFailed as failure:
            self._path = self._how.path  # who comes back may be another engine
            self._count(Probe.UNREACHABLE, f"no connection: {failure}")
        except LocalLimit:
            pass  # says nothing of the worker
        except AttemptFailed as failure:
            self._count(Probe.BAD, str(failure))
        else:
            self._count(*self._judged(status), setup=status in _REFUSALS)
        if health.watchful:
            health.tick()

    def _count(self, probe: Probe, what: str, *, setup: bool = False) -> None:
        self._worker.cells.probes["misconfigured" if setup else probe.value] += 1
        self._worker.health.probed(probe, what)

    def _judged(self, status: int) -> tuple[Probe, str]:
        path = self._path.decode()
        what = f"status {status} of {path}"
        if status == 503:
            return Probe.NOT_YET, what
        if status in _REFUSALS:
            self._tell(f"refuses the router's key at {path} ({status}): set worker-api-key, or another probe-path")
        elif status in _NO_SUCH_PATH:
            if self._path is not _LISTS:
                self._tell(
                    f"has no {path} ({status}); it is asked for {_LISTS.decode()}, which says only that it is there"
                )
                self._path = _LISTS
        elif status >= 500:
            return Probe.BAD, what
        elif status < 400 and self._path is not _LISTS:
            return Probe.GOOD, what
        return Probe.REACHABLE, what

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("worker %s %s (told once)", self._worker.name, what)

    async def _status(self) -> int:
        """What the worker answers. Raises AttemptFailed."""
        connection = self._pool.take()
        if connection is not None:
            try:
                return await self._exchange(connection)
            except StaleConnection:
                pass
            except ConnectionBroken:  # perhaps it was stale: asking twice does no harm
                pass
        return await self._exchange(await self._connect())

    async def _exchange(self, connection: WorkerConnection) -> int:
        worker = self._worker
        late = f"no answer to a probe within {self._how.limit:g} s"
        timer = self._loop.call_later(self._how.limit, lambda: connection.fail(AttemptTimeout(late)))
        try:
            head = b"GET %b%b%b%b\r\n" % (worker.base_path, self._path, worker.host_line, self._how.key_line)
            await connection.send(head, b"", expected=Expected.ANSWER)
            status = connection.response.status
            rest = _Rest()
            connection.relay(rest)
            await rest.over
            return status
        finally:
            timer.cancel()
            connection.release()

    async def _connect(self) -> WorkerConnection:
        """In a task, which needs one; most probes need no connection. Raises AttemptFailed."""
        task = self._loop.create_task(self._pool.connect())
        made = Wake()
        task.add_done_callback(lambda _: made.set())
        try:
            await made
        except BaseException:  # we are being stopped
            task.cancel()
            task.add_done_callback(_close_late)
            raise
        return task.result()

    async def _try_to_connect(self) -> None:
        try:
            (await self._connect()).close()
        except AttemptFailed:
            return
        self._worker.health.connected()


def _close_late(task: asyncio.Task[WorkerConnection]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


class _Rest:
    """Takes an answer's body, as far as it is worth while: a longer one costs its connection."""

    def __init__(self) -> None:
        self.over = Wake()
        self._size = 0

    def on_data(self, data: bytes, end: bool) -> None:
        self._size += len(data)
        if end or self._size > _ANSWER_BYTES:
            self.over.set()

    def on_chunk(self, frame: bytes, start: int) -> None:
        self.on_data(frame, False)

    def on_failure(self, failure: AttemptFailed) -> None:
        self.over.set()  # what was asked for has been said
