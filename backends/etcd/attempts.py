"""The attempts of one call: it is asked again while earlier attempts have no answer yet, and the first answer counts.

An attempt that is late is not given up for the next one: an etcd that is slow would then answer nobody.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Generic, TypeVar

E = TypeVar("E")
M = TypeVar("M")


class Attempt(Generic[E, M]):
    """One request on its way."""

    __slots__ = ("began", "call", "endpoint", "mark", "metadata")

    def __init__(self, call: Any, endpoint: E, metadata: tuple[tuple[str, str], ...], mark: M, began: float) -> None:
        self.call = call
        """gRPC's; await it when it has ended."""
        self.endpoint = endpoint
        self.metadata = metadata
        self.mark = mark
        """What was known of etcd's history when it began."""
        self.began = began
        """Seconds of `time.monotonic`."""


class Attempts(Generic[E, M]):
    """Belongs to one call. `cancel` it in the end: what is still under way is wanted by nobody."""

    __slots__ = ("_ended", "_news", "under_way")

    def __init__(self) -> None:
        self.under_way: list[Attempt[E, M]] = []
        """Without an answer so far, the latest last."""
        self._ended: list[Attempt[E, M]] = []
        self._news: asyncio.Future[None] | None = None

    def watch(self, attempt: Attempt[E, M]) -> None:
        """Let `next_end` know of one that is under way."""
        attempt.call.add_done_callback(functools.partial(self._end, attempt))

    def forget(self, attempt: Attempt[E, M]) -> None:
        """It has ended."""
        if attempt in self.under_way:
            self.under_way.remove(attempt)

    async def next_end(self, seconds: float) -> Attempt[E, M] | None:
        """The next one that ends, which is under way no more; None: none did within so many seconds."""
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._news = news = loop.create_future()
            timer = loop.call_later(seconds, _wake, news)
            try:
                await news
            finally:
                timer.cancel()
                self._news = None
        if not self._ended:
            return None
        attempt = self._ended.pop(0)
        self.forget(attempt)
        return attempt

    def cancel(self) -> None:
        for attempt in self.under_way:
            attempt.call.cancel()

    def _end(self, attempt: Attempt[E, M], _: object) -> None:
        self._ended.append(attempt)
        if self._news is not None:
            _wake(self._news)


def _wake(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
