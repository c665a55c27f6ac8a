"""What a source of workers is: it says, again and again, which workers there are, or why it cannot.

A source never decides that a worker is gone: it gives its whole view, and who is not in it any more is gone only when
that lasts (`Discovery`). One that says nothing, fails, or names nobody leaves the last view as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from app.fleet.specs import WorkerSpec

T = TypeVar("T")

LOOK_WITHIN = 5.0
"""Seconds that a file system or a name server has for one answer."""


class View(msgspec.Struct, frozen=True):
    """All workers that a source names, each name once."""

    workers: tuple[WorkerSpec, ...]
    refused: tuple[str, ...] = ()
    """What else it says and cannot be used, each with why."""
    emptied: bool = False
    """Each of its workers was seen to go: that none is left is no mistake."""


class Trouble(msgspec.Struct, frozen=True):
    """It cannot say: why."""

    why: str


Said = View | Trouble


class Source(Protocol):
    @property
    def label(self) -> str:
        """For people, without secrets; of two sources never the same."""
        ...

    def says(self) -> AsyncIterator[Said]:
        """Its view whenever that changes, and its troubles. Does not end, and raises nothing."""
        ...

    def look(self) -> None:
        """Ask again at once, where it is only asked now and then."""
        ...

    async def aclose(self) -> None: ...


class Pace:
    """The pauses of a source that is asked now and then."""

    def __init__(self, every: float) -> None:
        """`every` in seconds."""
        self._every = every
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """End the pause."""
        self._hurry.set()

    async def pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._every):
                await self._hurry.wait()
        self._hurry.clear()


class Aside:
    """Blocking work in a thread of its own, one piece at a time: what hangs there delays nobody else, and keeps no
    process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False

    async def run(self, work: Callable[[], T], within: float = LOOK_WITHIN) -> T:
        """Its result. Raises what it raises, and TimeoutError when that takes longer than `within` seconds, or while
        an earlier piece hangs."""
        if self._busy:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._busy = True

        def settle(settler: Callable[[Any], None], what: object) -> None:
            self._busy = False
            if not future.done():
                settler(what)

        def body() -> None:
            try:
                outcome: tuple[Callable[[Any], None], object] = (future.set_result, work())
            except BaseException as error:  # raised to whoever awaits the future
                outcome = (future.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, *outcome)

        threading.Thread(target=body, name=self._name, daemon=True).start()
        async with asyncio.timeout(within):
            return await future


async def asked_again(pace: Pace, look: Callable[[], Awaitable[Said | None]]) -> AsyncIterator[Said]:
    """What `look` brings, with pauses; None: nothing new."""
    while True:
        said = await look()
        if said is not None:
            yield said
        await pace.pause()
