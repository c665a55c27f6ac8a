"""Blocking work in threads, within a deadline, and what is known of it when it failed or is late."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from backends.base import OutcomeUnknown, StoreError, StoreUnavailable

T = TypeVar("T")

THREADS = 8
MISCONFIGURED = {
    errno.EACCES,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOLCK,
    errno.ENOTDIR,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EROFS,
}
"""What no waiting heals: the operator has to change something."""
# What the kernel refuses before it does anything. After any other error a write may have been applied.
_REFUSED = MISCONFIGURED | {errno.EDQUOT, errno.EMFILE, errno.EMLINK, errno.ENFILE, errno.ENOSPC}


class NotYet(Exception):
    """Cannot be done at this moment, and nothing was done: worth trying again soon."""


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Calls it in the event loop, from a thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(callback, *args)


class Step(Generic[T]):
    """One piece of blocking work. Knows how far its write has come, so that it can say what is known of it."""

    def __init__(self, work: Callable[[Step[T]], T], loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[T] = loop.create_future()
        self.applied = False
        self._work = work
        self._loop = loop
        self._begun = False
        self._abandoned = False
        self._deciding = threading.Lock()

    # In the thread

    def commit(self) -> None:
        """To be called before the first change that others can see. Does not return if the caller has given up."""
        with self._deciding:
            if self._abandoned:
                raise NotYet("given up")
            self._begun = True

    def run(self) -> None:
        if self._abandoned:
            return
        try:
            result = self._work(self)
        except BaseException as error:  # raised to whoever awaits the future
            tell(self._loop, self._settle, self.future.set_exception, error)
        else:
            tell(self._loop, self._settle, self.future.set_result, result)

    # In the event loop

    def _settle(self, settle: Callable[[Any], None], what: object) -> None:
        if not self.future.done():
            settle(what)

    def abandon(self) -> None:
        with self._deciding:
            self._abandoned = True

    def give_up(self) -> None:
        self.abandon()
        self._settle(self.future.set_exception, TimeoutError(errno.ETIMEDOUT, "no answer within the deadline"))

    def verdict(self, error: OSError) -> StoreError:
        what = error.strerror or str(error)
        if self.applied or (self._begun and error.errno not in _REFUSED):
            return OutcomeUnknown(what)
        return StoreUnavailable(what)


class Threads:
    """The threads of one store. Not a ThreadPoolExecutor: one hung thread of that blocks the exit of the process, and
    a hop through it costs half as much again."""

    def __init__(self, deadline: float) -> None:
        self._ended = False
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Step[Any] | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        for n in range(THREADS):
            self.start(self._serve, f"coatcheck-file-{n}")

    async def run(self, work: Callable[[Step[T]], T]) -> T:
        """Does `work` in a thread, again while it answers `NotYet`, and within the deadline.

        This is the one place that turns what went wrong into what is known."""
        give_up_at = self._loop.time() + self._deadline
        pause = 0.001
        while True:
            if self._ended:
                raise StoreUnavailable("the store is closed")
            step = Step(work, self._loop)
            timer = self._loop.call_at(give_up_at, step.give_up)
            try:
                self._queue.put(step)
                return await step.future
            except NotYet as obstacle:
                if self._loop.time() + pause >= give_up_at:
                    raise StoreUnavailable(f"{obstacle} for {self._deadline} s") from None
            except OSError as error:
                raise step.verdict(error) from error
            finally:
                timer.cancel()
                step.abandon()
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 0.02)

    def start(self, target: Callable[[], None], name: str) -> threading.Thread:
        """One more thread, which ends by itself; `joined` waits for it as well."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._started = [each for each in self._started if each.is_alive()] + [thread]
        return thread

    def end(self) -> None:
        """After what was submitted."""
        self._ended = True
        for _ in range(THREADS):
            self._queue.put(None)

    async def joined(self) -> None:
        """Within the deadline. A thread that hangs is left behind: it is a daemon."""
        give_up_at = self._loop.time() + self._deadline
        while any(each.is_alive() for each in self._started) and self._loop.time() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # a thread's end sets no event

    def _serve(self) -> None:
        while (step := self._queue.get()) is not None:
            step.run()
            del step  # an idle thread keeps nothing alive
