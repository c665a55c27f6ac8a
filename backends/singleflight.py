"""Work that several callers want at the same time is done once, and each of them gets what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class Abandoned(Exception):
    """The work was cancelled while a caller waited for it, or the `SingleFlight` is closed and begins nothing new."""


class SingleFlight(Generic[K, T]):
    """Each key has at most one piece of work under way; callers that come meanwhile join it. Belongs to one event loop.

    The work runs in a task of its own: a caller may be cancelled, which concerns no other. When `outlives`, it goes on
    when nobody waits for it; else it is cancelled when the last one leaves. An exception that nobody waits for is
    dropped.
    """

    def __init__(self, *, outlives: bool) -> None:
        self._outlives = outlives
        self._flights: dict[K, _Flight[T]] = {}
        """By key, until the work has ended: one that was cancelled is still in the way of the next."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: K, work: Work[T], *, timeout: float | None = None) -> T:
        """What the work for `key` returns or raises, whoever began it. Raises TimeoutError after `timeout` seconds,
        which ends the wait and not the work of others, and Abandoned."""
        until = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            with self.join(key, work) as seat:
                if not await seat.ended(until):
                    raise TimeoutError
                if seat.first or not seat.cancelled:
                    return seat.result()
            # We joined what its callers had just given up.

    def start(self, key: K, work: Work[T]) -> None:
        """Begin the work unless it is under way; nobody waits for it. Closed, it begins nothing."""
        if not self._closed and key not in self._flights:
            self._begin(key, work)

    @contextlib.contextmanager
    def join(self, key: K, work: Work[T]) -> Iterator[Seat[T]]:
        """A seat at the work for `key`, for who does more than wait for it: what the caller does in the block comes
        before the work counts as left. `work` is called at once when this caller is the first, and its coroutine
        begins in the loop's next turn. Raises Abandoned when closed."""
        flight = self._flights.get(key)
        first = flight is None
        if flight is None:
            flight = self._begin(key, work)
        flight.seats += 1
        try:
            yield Seat(flight.task, first)
        finally:
            flight.seats -= 1
            if not (flight.seats or self._outlives or flight.task.done() or flight.task.cancelling()):
                flight.task.cancel()

    async def aclose(self) -> None:
        """Cancel what is under way, and begin nothing more."""
        self._closed = True
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, key: K, work: Work[T]) -> _Flight[T]:
        if self._closed:
            raise Abandoned
        flight = self._flights[key] = _Flight(asyncio.get_running_loop().create_task(work()))

        def ended(task: asyncio.Task[T]) -> None:
            del self._flights[key]
            if not task.cancelled():
                task.exception()  # seen, should nobody be there to see it

        flight.task.add_done_callback(ended)
        return flight


class _Flight(Generic[T]):
    __slots__ = ("seats", "task")

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.seats = 0


class Seat(Generic[T]):
    """One caller's place at a piece of work."""

    __slots__ = ("_task", "first")

    def __init__(self, task: asyncio.Task[T], first: bool) -> None:
        self._task = task
        self.first = first
        """The work is this caller's own; who came later has joined it."""

    async def ended(self, until: float | None = None) -> bool:
        """Wait for the end of the work, good or bad, or for the loop's time `until`: then False."""
        # As `asyncio.wait` of one task, which costs half a task more. No `shield`: it reports what nobody waits for.
        # One that has ended is waited for as well: until its callbacks have run, it is still what others would join.
        task = self._task
        loop = asyncio.get_running_loop()
        news: asyncio.Future[None] = loop.create_future()

        def tell(_: object) -> None:
            if not news.done():
                news.set_result(None)

        task.add_done_callback(tell)
        timer = None if until is None else loop.call_at(until, tell, None)
        try:
            await news
        finally:
            if timer is not None:
                timer.cancel()
            if not task.done():
                task.remove_done_callback(tell)
        return task.done()

    @property
    def cancelled(self) -> bool:
        return self._task.cancelled()

    @property
    def handed_over(self) -> bool:
        """The work was another caller's and came to nothing: whoever asks next does it as its own."""
        return not self.first and (self.cancelled or self._task.exception() is not None)

    def result(self) -> T:
        """What the ended work returned. Raises what it raised; Abandoned when it was cancelled."""
        if self._task.cancelled():
            raise Abandoned
        return self._task.result()
