"""The client's side of every wait: what a turn waits for ends when its client leaves, and what came too late is given
back. A turn is driven in place and is no task, so what needs one (timeouts, the store, connecting) gets it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from app.errors import ClientDisconnected
from app.http.inplace import Wake

T = TypeVar("T")


def nothing(_: object) -> None:
    """Needs no undoing."""


class Presence(msgspec.Struct, eq=False):
    """Whether the client of one turn is still there."""

    loop: asyncio.AbstractEventLoop
    gone: bool = False
    _pending: asyncio.Task[Any] | None = None
    """The task that is waited for and that the client's leaving cancels; None: nothing, or nothing that may be."""
    _give_up: Callable[[], object] | None = None
    """Called when the client leaves, so that a wait in place ends."""

    def left(self) -> None:
        """The client has left. The turn may go on in place."""
        self.gone = True
        if self._pending is not None:
            self._pending.cancel()
        if self._give_up is not None:
            self._give_up()

    def raise_if_gone(self) -> None:
        """Raises ClientDisconnected when it has left."""
        if self.gone:
            raise ClientDisconnected

    async def unless_gone(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object] = nothing) -> T:
        """The result of `work`, which runs in a task. `undo` gives back one that came too late. Raises
        ClientDisconnected as soon as the client leaves."""
        if self.gone:
            work.close()
            raise ClientDisconnected
        self._pending = task = self.loop.create_task(work)
        try:
            await _ended(task, undo)
        finally:
            self._pending = None
        if self.gone:
            _give_back(task, undo)
            raise ClientDisconnected
        return task.result()

    async def unless_gone_before(self, wake: Wake, give_up: Callable[[], object]) -> None:
        """Wait in place for `wake`, without a task. `give_up` is called as soon as the client leaves, and must have the
        wake set soon, not at once. Raises ClientDisconnected."""
        self.raise_if_gone()
        self._give_up = give_up
        try:
            await wake
        finally:
            self._give_up = None
        self.raise_if_gone()

    async def in_any_case(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object] = nothing) -> T:
        """The result of `work`, which runs in a task, whether the client leaves or not."""
        task = self.loop.create_task(work)
        await _ended(task, undo)
        return task.result()


async def _ended(task: asyncio.Task[T], undo: Callable[[T], object]) -> None:
    done = Wake()
    task.add_done_callback(lambda _: done.set())
    try:
        await done
    except asyncio.CancelledError:  # we are being cancelled ourselves
        if task.done():
            _give_back(task, undo)
        else:
            task.cancel()
            task.add_done_callback(lambda late: _give_back(late, undo))
        raise


def _give_back(task: asyncio.Task[T], undo: Callable[[T], object]) -> None:
    if not task.cancelled() and task.exception() is None:
        undo(task.result())
