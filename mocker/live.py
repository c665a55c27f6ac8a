"""The engine by the clock: what it says reaches the turns, and what becomes of its blocks whoever listens.

Each rank has a task while it has something to compute. Time in the engine is the clock's, `speed` times as fast. A step
that ends late does not delay the next, so that the engine computes as much on a busy machine as on an idle one.
"""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Callable, Iterable
from typing import Protocol

from mocker.cache import TOKEN_BYTES
from mocker.engine.blocks import Listener, chain_of
from mocker.engine.profile import Profile
from mocker.engine.scheduler import Job, Scheduler
from mocker.settings import MockSettings
from mocker.waiting import Metronome

_MOST_BEHIND = 1.0
"""Seconds. Steps that should have ended longer ago than that are not made up for."""


class Sequence:
    """One answer that a rank computes. `reached` waits for its tokens."""

    def __init__(
        self, rank: Rank, text: bytes, prompt: int, answer: int, *, model: str, adapter: int | None, salt: str
    ) -> None:
        """`text`: of prompt and answer; `prompt`, `answer`: tokens of each. `adapter`: the model's number, if one.
        Sequences share blocks only where model and salt are the same, as in vLLM."""
        self.text = text
        self.model = model
        self.adapter = adapter
        self.salt = salt
        width = TOKEN_BYTES * rank.scheduler.profile.block_size
        self.job = Job(chain_of(f"{model}\0{salt}", text, width), prompt, answer, owner=self)
        self._scheduler = rank.scheduler
        self._waiter: asyncio.Future[None] | None = None

    @property
    def said(self) -> int:
        return self._scheduler.said(self.job)

    @property
    def begun(self) -> bool:
        """Its prompt is computed."""
        return self.job.first is not None

    async def reached(self, place: int) -> None:
        """Wait until the token at `place`, from 0, is said."""
        while self.said <= place:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def abort(self) -> None:
        """Nobody wants it any more. Nothing if it has ended."""
        self._scheduler.abort(self.job)

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Publisher(Listener, Protocol):
    """Is told of blocks, and when a step is over that they belong to."""

    def flush(self) -> None: ...

    def restarted(self) -> None:
        """The engine has been started anew: nothing of before is known to it."""

    def close(self) -> None: ...


class Rank:
    """One rank of a worker."""

    def __init__(
        self,
        profile: Profile,
        metronome: Metronome,
        clock: Callable[[], float],
        *,
        speed: float = 1.0,
        publisher: Publisher | None = None,
    ) -> None:
        self._metronome = metronome
        self._clock = clock
        self._speed = speed
        self._publisher = publisher
        self._task: asyncio.Task[None] | None = None
        self.scheduler = Scheduler(profile, publisher)

    def compute(self, sequences: Iterable[Sequence]) -> None:
        """All of them, or none: raises QueueFull, and TooLong."""
        added: list[Sequence] = []
        try:
            for sequence in sequences:
                self.scheduler.add(sequence.job, self._now())
                added.append(sequence)
        except Exception:
            for each in added:
                each.abort()
            raise
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def clear(self) -> bool:
        """Forget what is cached; as in vLLM, those who listen are told with the next step. False: something runs, and
        nothing was done."""
        if self.scheduler.load or self.scheduler.plan is not None:
            return False
        self.scheduler.cache.clear()
        return True

    def restart(self) -> None:
        """As when the process has crashed: what runs is lost, and so is the cache."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.scheduler = Scheduler(self.scheduler.profile, self._publisher)
        if self._publisher is not None:
            self._publisher.restarted()

    def _now(self) -> float:
        return self._clock() * self._speed

    def _flush(self) -> None:
        if self._publisher is not None:
            self._publisher.flush()

    async def _run(self) -> None:
        scheduler, speed, now = self.scheduler, self._speed, self._now()
        while (plan := scheduler.begin(now)) is not None:
            await self._metronome.until(plan.end / speed)
            generating = scheduler.generating()
            done = scheduler.end()
            # Whoever reads an answer finds that its blocks have been told of.
            self._flush()
            for job in generating:
                job.owner.wake()
            for job in done.first:
                job.owner.wake()
            now = max(plan.end, self._now() - _MOST_BEHIND * speed)
        self._task = None


def ranks_of(
    settings: MockSettings,
    metronome: Metronome,
    clock: Callable[[], float],
    publishers: typing.Sequence[Publisher],
) -> list[Rank]:
    """Those of a worker; none where it has no engine. `publishers`: one for each, or none."""
    if settings.profile is None:
        return []
    speed = settings.speed
    return [
        Rank(settings.profile, metronome, clock, speed=speed, publisher=publishers[rank] if publishers else None)
        for rank in range(settings.dp_size)
    ]
