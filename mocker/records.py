"""What the worker served: one record per turn, the gauges that follow from them, and one per call beside the turns."""

from __future__ import annotations

import time
from collections import deque
from typing import Literal, Self

import msgspec

Outcome = Literal["running", "completed", "aborted"]
Handed = Literal["staged", "fetched", "anew", "failed"]


class Turn(msgspec.Struct, kw_only=True):
    """One turn as `/mock/turns` shows it. Times are unix seconds."""

    session: str | None
    named_by: str | None
    """The header or the body's field that named the session."""
    rank: int | None
    model: str
    stream: bool
    start: float
    end: float | None = None
    """None while it runs."""
    outcome: Outcome = "running"
    """`completed` only if the whole answer was handed to the transport; every other end is `aborted`."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0
    """Handed to the transport so far."""
    request_id: str | None
    method: str
    path: str
    authorization: str | None
    """The header as it came; so is `api_key`, from `X-Api-Key`."""
    api_key: str | None
    fault: str | None = None
    """The mode of the injected fault, if there was one."""
    handover: Handed | None = None
    """What became of a prompt's blocks that go from one worker to another: `staged` here; or `fetched` from there,
    computed `anew`, or `failed` to come."""
    blocks: int = 0
    """So many, that were staged or fetched."""
    room: int | None = None
    """Where two workers have met for it, or were to."""


class Call(msgspec.Struct, kw_only=True):
    """A request beside the turns as `/mock/calls` shows it: for what is kept here, management, unknown paths."""

    start: float
    method: str
    path: str
    query: str
    session: str | None
    named_by: str | None
    authorization: str | None
    api_key: str | None
    request_id: str | None
    status: int | None = None
    """None as long as there is no answer."""
    fault: str | None = None


class TurnLog:
    """The running turns and a bounded history of the finished ones.

    The history gives way to the running turns: together they are at most `bound`, unless more than that run at once.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._running: dict[int, Turn] = {}
        self._finished: deque[Turn] = deque()
        self.served = 0
        """How many turns were completed since the start."""

    @property
    def active(self) -> int:
        """How many turns run now."""
        return len(self._running)

    def record(self, turn: Turn) -> Recording:
        """`turn` runs from now on, until the recording is left. Enter it at once."""
        self._running[id(turn)] = turn
        self._trim()
        return Recording(self, turn)

    def finish(self, turn: Turn, outcome: Outcome) -> None:
        """`turn` has ended. Only the first call counts."""
        if self._running.pop(id(turn), None) is None:
            return
        turn.end = time.time()
        turn.outcome = outcome
        self.served += outcome == "completed"
        self._finished.append(turn)
        self._trim()

    def turns(self, session: str | None = None) -> list[Turn]:
        """The turns known, of one session if given: the finished ones by their end, then the running ones."""
        known = [*self._finished, *self._running.values()]
        return known if session is None else [turn for turn in known if turn.session == session]

    def clear(self) -> int:
        """Forget the finished turns; returns how many those were."""
        cleared = len(self._finished)
        self._finished.clear()
        return cleared

    def _trim(self) -> None:
        while self._finished and len(self._finished) + len(self._running) > self._bound:
            self._finished.popleft()


class Recording:
    """Holds a turn's place among the running ones. What was not completed when it is left was aborted."""

    def __init__(self, log: TurnLog, turn: Turn) -> None:
        self._log = log
        self.detached = False
        """It goes on when this is left."""
        self.turn = turn

    def detach(self) -> None:
        """The turn goes on when this is left. Who calls this must `complete` or `abort` it."""
        self.detached = True

    def complete(self) -> None:
        """The whole answer has been handed to the transport."""
        self._log.finish(self.turn, "completed")

    def abort(self) -> None:
        """It has ended. Nothing if it was completed before."""
        self._log.finish(self.turn, "aborted")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.detached:
            self.abort()
