"""Work done in place, by whoever brings what it waits for, without a task and without another round of the event loop:
coroutines that are driven (`Driven`), and writing to a socket at once (`direct_write`). A round costs as much as a
turn's own work for one answer, most of it in system calls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from typing import Any

Write = Callable[[bytes], None]


class Wake:
    """Something that happens once and that one driven coroutine awaits. `set` runs that coroutine until it waits again
    or ends, and only then returns: it must be the last thing that its caller does."""

    __slots__ = ("_failure", "_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._failure: Exception | None = None
        self._waiter: Driven | None = None

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Idempotent."""
        self._is_set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter._step()

    def fail(self, failure: Exception) -> None:
        """Happened, and raises `failure` where it is awaited."""
        if not self._is_set:
            self._failure = failure
            self.set()

    def __await__(self) -> Generator[Any, None, None]:
        if not self._is_set:
            yield self
        if self._failure is not None:
            raise self._failure


class Driven:
    """A coroutine run step by step. `returned` gets what it returns, or None when it was cancelled, `failed` what it
    raises. It may await wakes, futures and tasks; it is no task itself, so what asks for the current one (as
    `asyncio.timeout` does) belongs into a task that it awaits."""

    __slots__ = ("_coroutine", "_failed", "_returned", "_waits_for")

    def __init__(self, returned: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        self._returned, self._failed = returned, failed
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._waits_for: Any = None

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it up to where it waits for the first time."""
        self._coroutine = coroutine
        self._step()

    def cancel(self) -> None:
        """Raise CancelledError where it waits. Nothing when it has ended."""
        if self._coroutine is not None:
            self._forget()
            self._step(asyncio.CancelledError())

    def close(self) -> None:
        """Stop it where it waits, with only its `finally` run. Idempotent."""
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            self._forget()
            coroutine.close()

    def _forget(self) -> None:
        waits_for, self._waits_for = self._waits_for, None
        if type(waits_for) is Wake:
            waits_for._waiter = None
        elif waits_for is not None:
            waits_for.remove_done_callback(self._resume)

    def _resume(self, _: Any) -> None:
        self._waits_for = None
        self._step()

    def _step(self, error: BaseException | None = None) -> None:
        coroutine = self._coroutine
        if coroutine is None:
            return
        try:
            waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            self._coroutine = None
            self._returned(stop.value)
        except asyncio.CancelledError:
            self._coroutine = None
            self._returned(None)
        except Exception as fault:
            self._coroutine = None
            self._failed(fault)
        else:
            self._waits_for = waits_for
            if type(waits_for) is Wake:
                waits_for._waiter = self
            elif waits_for is None:  # a bare yield, as of asyncio.sleep(0)
                asyncio.get_running_loop().call_soon(self._resume, None)
            else:
                waits_for._asyncio_future_blocking = False  # as a Task does with a future it is given
                waits_for.add_done_callback(self._resume)


def direct_write(transport: asyncio.Transport) -> Write:
    """A function that does what `transport.write` does: sends what the kernel takes now, and leaves the rest, and every
    error, to the transport. Only for who has the transport: the file descriptor is used while it is not closing."""
    raw = transport.get_extra_info("socket")
    if raw is None or transport.get_extra_info("sslcontext") is not None:
        return transport.write
    fd = raw.fileno()
    waiting, closing, queue, send = transport.get_write_buffer_size, transport.is_closing, transport.write, os.write

    def write(data: bytes) -> None:
        if closing():
            return  # its number may be another socket's by now
        if waiting():
            queue(data)
            return
        try:
            sent = send(fd, data)
        except OSError:  # it takes nothing now, or the other side is gone
            queue(data)
            return
        if sent < len(data):
            queue(memoryview(data)[sent:])

    return write
