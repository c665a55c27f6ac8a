"""Workers are asked how they are, whether or not there are turns: a probe each now and then, on a connection of its own
that is kept, so that one costs little more than its bytes. At most one per worker at a time, each within a limit, and
none waits for another's worker or name.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.fleet.health import Cause, Probe, State
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
_LOOK_EVERY = 0.1
"""Seconds between looks at who is to be asked, who is late, has come or gone, and what time alone decides. What is due
goes out together: a process that is woken for each probe by itself pays more for waking than for probing."""
_FIRST_ROUND = 1.0
"""Seconds that a router waits at most, before it serves, for what the workers say at first."""
_MOST_A_SECOND = 50
"""Probes on average, of workers whose state does not hang on them: of more workers each is asked less often."""
_KEPT_FOR = 60.0
"""Seconds that a probe's connection is kept for the next one; servers may close it before that."""
_HURRIED = 0.25
"""Of the interval: the pause before the next probe of a worker whose state hangs on it."""
_JITTER = 0.2
_STEADY = frozenset({State.UP, State.DOWN})
"""Others become something else by themselves, unless they are asked in time."""
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
        self._busy: list[_Asked] = []
        """Those that are being asked. Each of the others stands in `_waiting` once."""
        self._waiting: list[tuple[float, int, _Asked]] = []
        """A heap, by when they are due."""
        self._number = 0
        self._as_of = -1
        """The fleet's changes, as of the last look."""
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, patience: float = _FIRST_ROUND) -> None:
        """Begin, and wait for the first answers, `patience` at most: what is there is known before it is needed."""
        self._look(asyncio.get_running_loop())
        if self._how.path and self._asked:
            firsts = [each.first for each in self._asked.values()]
            await asyncio.wait(firsts, timeout=patience)

    def follow(self, how: Probing) -> None:
        """Ask so from now on."""
        self._how = how
        for asked in self._asked.values():
            asked.follow(how)

    def stop(self) -> None:
        """Ends what is on its way, too."""
        if self._timer is not None:
            self._timer.cancel()
        for asked in self._asked.values():
            asked.stop()
        self._asked.clear()
        self._busy, self._waiting = [], []

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        if self._as_of != self._fleet.changes:
            self._as_of = self._fleet.changes
            self._follow_the_fleet(loop)
        hurried: set[_Asked] = set()
        for worker in self._fleet:
            if worker.health.watchful:
                worker.health.tick()
                if self._asked[worker].hurry(now):
                    hurried.add(self._asked[worker])
        asked = self._busy
        if hurried:
            self._waiting = [entry for entry in self._waiting if entry[2] not in hurried]
            heapq.heapify(self._waiting)
            asked += hurried.difference(asked)
        while self._waiting and self._waiting[0][0] <= now:
            asked.append(heapq.heappop(self._waiting)[2])
        self._busy = []
        for each in asked:
            due = each.look(now)
            if due is None:
                self._busy.append(each)
            else:
                self._wait(each, due)
        self._timer = loop.call_later(_LOOK_EVERY, self._look, loop)

    def _follow_the_fleet(self, loop: asyncio.AbstractEventLoop) -> None:
        here = set(self._fleet)
        for worker in [each for each in self._asked if each not in here]:
            self._asked.pop(worker).stop()
        self._busy = [each for each in self._busy if not each.stopped]
        self._waiting = [entry for entry in self._waiting if not entry[2].stopped]
        heapq.heapify(self._waiting)
        for worker in self._fleet:
            if worker not in self._asked:
                self._asked[worker] = asked = _Asked(worker, self._how, loop, self._rng.uniform)
                self._wait(asked, 0.0)
        for asked in self._asked.values():
            asked.apart = len(self._asked) / _MOST_A_SECOND

    def _wait(self, asked: _Asked, due: float) -> None:
        self._number += 1  # of two that are due together: who waited longer
        heapq.heappush(self._waiting, (due, self._number, asked))


class _Asked:
    """One worker, asked again and again: by `_driven` now, else from `_due` on."""

    def __init__(
        self,
        worker: Worker,
        how: Probing,
        loop: asyncio.AbstractEventLoop,
        uniform: Callable[[float, float], float],
    ) -> None:
        self._worker, self._how, self._loop, self._uniform = worker, how, loop, uniform
        self._pool = worker.pool.beside(how.limit, idle_limit=_KEPT_FOR)
        self.apart = 0.0
        """Seconds between probes that tell nothing new, at least."""
        self.stopped = False
        self.first: asyncio.Future[None] = loop.create_future()
        """Done when it has been asked once."""
        self._path = how.path
        self._meanings: dict[tuple[bytes, int], tuple[Probe, str]] = {}
        """Of statuses that have come, by path: mostly the next one is the same."""
        self._driven: Driven | None = None
        self._connection: WorkerConnection | None = None
        """The one that an answer is awaited on, until `_late_at`."""
        self._late_at = 0.0
        self._due = 0.0
        self._away = 0

    def look(self, now: float) -> float | None:
        """To be called now and then while it is asked, and when that is due. Returns when it is due; None: it is being
        asked."""
        if self._driven is None and now >= self._due:
            if self._how.path:
                self._run(self._probe())
            else:
                self._look_for_the_lost(now)
        elif self._connection is not None and now >= self._late_at:
            self._connection.fail(AttemptTimeout(f"no answer to a probe within {self._how.limit:g} s"))
        return self._due if self._driven is None else None

    def hurry(self, now: float) -> bool:
        """It is to be asked now, and not when it was due: it was suspected meanwhile, and nobody has asked since."""
        if (
            self._driven is not None
            or not self._how.path
            or self._worker.health.state in _STEADY
            or self._due - now <= self._how.interval * (1 + _JITTER)
        ):
            return False
        self._due = now
        return True

    def _look_for_the_lost(self, now: float) -> None:
        """Of a worker that is not probed only whether it can be connected to again when it was lost: with `/ready`
        failing no turn would come to find out."""
        if self._worker.health.cause is not Cause.CONNECTS:
            self._away = 0
            self._due = now + _AWAY_PAUSES[0]
        else:
            self._away = min(self._away + 1, len(_AWAY_PAUSES) - 1)
            self._run(self._try_to_connect())

    def follow(self, how: Probing) -> None:
        """From the next one on; whether it is asked at all stays as it was."""
        self._how = how

    def stop(self) -> None:
        self.stopped = True
        if self._driven is not None:
            self._driven.close()  # its `finally` gives the connection back
        self._pool.close()
        self.first.cancel()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._driven = Driven(self._ended, self._failed)
        self._driven.start(work)

    def _ended(self, _: object) -> None:
        self._driven = None
        if not self.first.done():
            self.first.set_result(None)
        pause = _AWAY_PAUSES[self._away]
        if self._how.path:
            health, pause = self._worker.health, self._how.interval
            if health.undecided:
                pause *= _HURRIED
            elif health.state in _STEADY:
                pause = max(pause, self.apart)
        self._due = self._loop.time() + pause * self._uniform(1 - _JITTER, 1 + _JITTER)

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
            self._path = self._how.path  # it may come back as another engine
            self._count(Probe.UNREACHABLE, f"no connection: {failure}")
        except LocalLimit:
            pass  # says nothing of the worker
        except AttemptFailed as failure:
            self._count(Probe.BAD, str(failure))
        else:
            asked = (self._path, status)
            meaning = self._meanings.get(asked)
            if meaning is None:
                meaning = self._meanings[asked] = self._judged(status)
            if status in _NO_SUCH_PATH:
                self._path = _LISTS
            self._count(*meaning, setup=status in _REFUSALS)
        if health.watchful:
            health.tick()

    def _count(self, probe: Probe, what: str, *, setup: bool = False) -> None:
        self._worker.cells.probes["misconfigured" if setup else probe.value] += 1
        self._worker.health.probed(probe, what)

    def _judged(self, status: int) -> tuple[Probe, str]:
        """Once for each path and status; what operators should know of it is said in the log."""
        path = self._path.decode()
        what = f"status {status} of {path}"
        if status == 503:
            return Probe.NOT_YET, what
        if status in _REFUSALS:
            self._tell(f"refuses the router's key at {path} ({status}): set worker-api-key, or another probe-path")
        elif status in _NO_SUCH_PATH:
            if self._path is not _LISTS:
                self._tell(f"has no {path} ({status}): it can only be seen that it is there; set another probe-path")
        elif status >= 500:
            return Probe.BAD, what
        elif status < 400 and self._path is not _LISTS:
            return Probe.GOOD, what
        return Probe.REACHABLE, what

    def _tell(self, what: str) -> None:
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
        self._connection, self._late_at = connection, self._loop.time() + self._how.limit
        try:
            head = b"GET %b%b%b%b\r\n" % (worker.base_path, self._path, worker.host_line, self._how.key_line)
            await connection.send(head, b"", expected=Expected.ANSWER)
            response = connection.response
            status = response.status
            if not response.complete:
                rest = _Rest()
                connection.relay(rest)
                await rest.over
            return status
        finally:
            self._connection = None
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
