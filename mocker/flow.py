"""When the tokens of one turn come, by which the turn is served: at a set pace, or as an engine computes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from starlette.types import Receive

from mocker import live
from mocker.records import Turn
from mocker.waiting import Metronome, Pace, left_before, left_within


class Flow(Protocol):
    """Of one turn, from its admission until `close`."""

    @property
    def begun(self) -> bool:
        """The prompt is computed."""

    def token(self, place: int) -> Awaitable[None]:
        """Wait for the token at `place`, from 0."""

    async def whole(self, receive: Receive, tokens: int) -> bool:
        """Wait for `tokens` tokens of each choice. True as soon as the client leaves."""

    def close(self) -> None:
        """Nobody waits for more."""


class Paced:
    """Each token at its time, whatever else the worker does."""

    def __init__(self, metronome: Metronome, clock: Callable[[], float], pace: Pace) -> None:
        self._until = metronome.until
        self._metronome = metronome
        self._clock = clock
        self._started = clock()
        self._pace = pace
        self._first, self._itl = self._started + pace.ttft, pace.itl

    @property
    def begun(self) -> bool:
        return self._clock() >= self._first

    def token(self, place: int) -> Awaitable[None]:
        return self._until(self._first + place * self._itl)

    async def whole(self, receive: Receive, tokens: int) -> bool:
        if await left_within(receive, self._started + self._pace.total(tokens) - self._clock()):
            return True
        if self._metronome.held:
            return await left_before(receive, self._until(0))
        return False

    def close(self) -> None:
        pass


class Computed:
    """As the engine says them, one sequence for each choice."""

    def __init__(self, rank: live.Rank, sequences: Sequence[live.Sequence], turn: Turn) -> None:
        """Raises QueueFull, and TooLong."""
        self._sequences = sequences
        self._turn = turn
        rank.compute(sequences)

    @property
    def begun(self) -> bool:
        return any(each.begun for each in self._sequences)

    async def token(self, place: int) -> None:
        for each in self._sequences:
            await each.reached(place)
        if not place:
            # Only now it is known what was found. All choices have one prompt, and the first has it computed.
            self._turn.cached_tokens = self._sequences[0].job.cached or 0

    async def whole(self, receive: Receive, tokens: int) -> bool:
        return await left_before(receive, self._all(tokens))

    async def _all(self, tokens: int) -> None:
        await self.token(0)
        await self.token(tokens - 1)

    def close(self) -> None:
        for each in self._sequences:
            each.abort()
