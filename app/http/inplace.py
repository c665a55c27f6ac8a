"""Work done in place, by whoever brings what it waits for, without a task and without another round of the event loop:
coroutines that are driven (`Driven`), and writing to a socket at once (`direct_write`). A round costs as much as a
turn's own work for one answer, most of it in system calls.
"""

from __future__ import annotations

import abc
import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any

_ACKED_AT = 120
"""Where Linux's `struct tcp_info` has `tcpi_bytes_acked`, since 4.1."""

Write = Callable[[bytes], None]


class Wake:
    """Something that happens once and that one driven coroutine awaits. `set` runs that coroutine until it waits again
    or ends, and only then returns: it must be the last thing that its caller does."""

    __slots__ = ("_failure", "_is_set", "_waiter")

    _waiter: InPlace | None

    def __init__(self) -> None:
        self._is_set = False
        self._failure: Exception | None = None
        self._waiter = None

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Idempotent."""
        self._is_set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter._step()

    def reset(self) -> None:
        """It may happen once more. Nobody awaits it."""
        self._is_set = False
        self._failure = None

    def fail(self, failure: Exception) -> None:
        """Happened, and raises `failure` where it is awaited."""
        if not self._is_set:
            self._failure = failure
            self.set()

    def __await__(self) -> Generator[Wake, None, None]:
        if not self._is_set:
            yield self
        if self._failure is not None:
            raise self._failure


class InPlace(abc.ABC):
    """Whoever has a coroutine run step by step. It may await wakes and nothing else: no future (its callback can set a
    wake), and nothing that asks for the current task, as `asyncio.timeout` does. Such things belong into a task of
    their own."""

    __slots__ = ("_coroutine", "_wake")

    def __init__(self) -> None:
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        """While it runs: it holds what it works for, and that would be garbage for the collector."""
        self._wake: Wake | None = None
        """What it waits for, or has waited for last."""

    @abc.abstractmethod
    def _returned(self, result: Any) -> None:
        """It has ended; None also when it was cancelled."""

    @abc.abstractmethod
    def _failed(self, fault: Exception) -> None:
        """It has raised this."""

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it up to where it waits for the first time."""
        self._coroutine = coroutine
        self._step()

    def cancel(self) -> None:
        """Raise CancelledError where it waits. Nothing when it has ended."""
        self._forget()
        self._step(asyncio.CancelledError())

    def close(self) -> None:
        """Stop it where it waits, with only its `finally` run. Idempotent."""
        self._forget()
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            coroutine.close()

    def _forget(self) -> None:
        if self._wake is not None:
            self._wake._waiter = None

    def _step(self, error: BaseException | None = None) -> None:
        coroutine = self._coroutine
        if coroutine is None:
            return
        try:
            wake = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            self._coroutine = None
            self._returned(stop.value)
        except asyncio.CancelledError:
            self._coroutine = None
            self._returned(None)
        except Exception as fault:  # as a task keeps it: whoever drives this is told
            self._coroutine = None
            self._failed(fault)
        else:
            if type(wake) is not Wake:
                self._step(TypeError(f"{wake!r} cannot be awaited in place, only a Wake"))
                return
            self._wake = wake
            wake._waiter = self


class Driven(InPlace):
    """A coroutine alone. `returned` gets what it returns, or None when it was cancelled, `failed` what it raises."""

    __slots__ = ("_raised", "_then")

    def __init__(self, returned: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self._then, self._raised = returned, failed

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it up to where it waits for the first time."""
        self._run(coroutine)

    def _returned(self, result: Any) -> None:
        self._then(result)

    def _failed(self, fault: Exception) -> None:
        self._raised(fault)


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


def taken_by_peer(transport: asyncio.Transport) -> int:
    """How many bytes the other side's kernel has taken so far, which it does while there is a reader; -1 where the
    system does not say. What our kernel takes of us says little: it keeps megabytes."""
    raw = transport.get_extra_info("socket")
    if raw is None or sys.platform != "linux":
        return -1
    try:
        known = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
    except OSError:  # no TCP
        return -1
    return int.from_bytes(known[_ACKED_AT:], sys.byteorder) if len(known) == _ACKED_AT + 8 else -1
