"""A prompt that is computed while its decode worker waits for it (`Meeting`), as SGLang has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.http.calling import Whole
from app.http.headers import Header
from app.http.inplace import Driven, Wake
from app.http.worker import AttemptFailed, AttemptTimeout, WorkerConnection
from app.sessions.affinity import Binding
from app.turn.retry import Attempt, blame, judge
from app.turn.tracing import BesideSpan

log = logging.getLogger("coatcheck.turn")

_MOST_ANSWER = 4 << 20
"""Bytes of a prefill worker's answer: block numbers of a million tokens, and one token."""


class _Passed(Whole):
    """Waits for an answer's end, and keeps nothing of it."""

    def on_data(self, data: bytes, end: bool) -> None:
        if end:
            self.complete.set()


async def whole(connection: WorkerConnection, *, kept: bool = True) -> bytes:
    """The body of the answer whose head has come; nothing, if it is not to be `kept`. Raises AttemptFailed."""
    response = connection.response
    if response.complete:
        pieces, response.pieces = response.pieces, []
        return b"".join(pieces)
    answer = Whole(_MOST_ANSWER) if kept else _Passed(0)
    connection.relay(answer)
    await answer.complete
    return answer.body


class Meeting:
    """The prefill worker's side of it, beside the turn's own attempt. It holds the worker's slot and connection, and
    the session's hold there, until the worker has answered or failed, or it is `cut`, and then gives them back."""

    __slots__ = ("_binding", "_driven", "_ended", "_limit", "_loop", "_span", "attempt", "began", "body",
                 "ended_at", "failure", "headers", "status")  # fmt: skip

    def __init__(
        self,
        attempt: Attempt,
        binding: Binding | None,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Meeting], None],
        span: BesideSpan | None = None,
    ) -> None:
        """`ended` is told when it has ended by itself."""
        self.attempt, self._binding, self._loop, self._ended, self._span = attempt, binding, loop, ended, span
        self.began, self.ended_at = loop.time(), 0.0
        self.status = 0
        self.headers: list[Header] = []
        self.body = b""
        self.failure: AttemptFailed | None = None
        self._driven: Driven | None = Driven(self._returned, self._broken)
        self._limit: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> bool:
        return self._driven is not None

    @property
    def failed(self) -> bool:
        """It has, or has answered with an error."""
        return self.failure is not None or self.status >= 400

    def begin(self, head: Wake) -> None:
        """`head`: of the answer to what was sent."""
        if self._driven is not None:
            self._driven.start(self._run(head))

    def part(self, seconds: float) -> None:
        """The turn has its answer. The prefill worker has so long for the rest of its own."""
        if self.under_way:
            self._limit = self._loop.call_later(seconds, self.cut)

    def cut(self) -> None:
        """The prompt is not wanted any more. Idempotent."""
        driven, self._driven = self._driven, None
        if driven is not None:
            driven.close()

    async def _run(self, head: Wake) -> None:
        connection, health = self.attempt.connection, self.attempt.target.worker.health
        assert connection is not None
        try:
            await head
            response = connection.response
            body = await whole(connection, kept=response.status >= 400)  # else nobody reads it, however long it is
            self.body, self.status, self.headers = body, response.status, response.headers
            judge(health, self.status)
        except AttemptFailed as error:
            self.failure = error
            if not isinstance(error, AttemptTimeout):  # the decode worker has said nothing either: the next will show
                blame(health, error)
        finally:
            self.ended_at = self._loop.time()
            if self._limit is not None:
                self._limit.cancel()
            self.attempt.end()
            if self._binding is not None:
                if self.status:
                    self._binding.answered(self.status)
                self._binding.release()
            if self._span is not None:
                self._span.end(self.status, self.failure)

    def _returned(self, _: object) -> None:
        self._driven = None
        self._ended(self)

    def _broken(self, fault: Exception) -> None:  # a fault of ours: the decode worker waits as long as it may
        log.error("a prefill worker's answer could not be read", exc_info=fault)
        self._driven = None
