"""Things that behave as no real one can be made to: a clock without waiting, and a claim store that fails on cue.

Real stores and real time come in `tests/stores` and `tests/e2e`. Here a test says *when* a reply is lost or a watch
dies, and days pass at once; that is what these exist for. They speak the store's contract, and replace no code of ours.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from backends.base import (
    Claim,
    ClaimOutcome,
    ClaimStore,
    ClaimUnreadable,
    ClaimValue,
    CloseOutcome,
    Deleted,
    Event,
    OutcomeUnknown,
    Reset,
    StoreUnavailable,
)
from backends.registry import Registry

T = TypeVar("T")


LONGEST = 60.0
"""Seconds of the machine's own time that a VirtualTimeLoop runs at most."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing is ready, so that timeouts of minutes cost nothing and a
    test's order of events never depends on the machine. Has no sockets of its own to wait for: a test that would
    wait for ever raises instead, and so does one that only its timers keep going: an alarm from outside, which comes
    while one of many tasks runs, would end that task alone."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.give_up_at = time.monotonic() + LONGEST
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert time.monotonic() < self._loop.give_up_at, f"still running after {LONGEST} s"
        if timeout is None:
            raise AssertionError("everything waits and no timer is set: this would hang for ever")
        if timeout > 0:
            self._loop.now += timeout
        return []


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test in a VirtualTimeLoop. What the loop would have logged fails the test."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        faults: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: faults.append(context))
            runner.run(test(*args, **kwargs))
        assert not faults, faults

    return run


def stall(seconds: float) -> None:
    """Keep a VirtualTimeLoop from running anything for so long, as work in a callback does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.now += seconds


async def settle() -> None:
    """Let everything run that can run now; no time passes in a VirtualTimeLoop."""
    for _ in range(30):
        await asyncio.sleep(0)


Fault = Exception | type[Exception]


class Undone(OutcomeUnknown):
    """An unknown outcome that was in truth "not done"; a plain OutcomeUnknown was done."""


class ScriptedStore:
    """A claim store in front of a real one, whose calls and events a test decides. Two of them over one store are two
    replicas' ways to it.

    Like etcd it gives no stamps, unless `stamps`, so that only events and re-reads can tell of a delete.
    """

    def __init__(self, inner: ClaimStore, *, stamps: bool = False) -> None:
        self._inner = inner
        self._stamps = stamps
        self.calls: Counter[str] = Counter()
        """By operation, those that failed too."""
        self.broken: dict[str, Fault] = {}
        """Operations that fail until they are taken out; `all` for all."""
        self.next_faults: dict[str, deque[Fault | None]] = {}
        """What the next calls of an operation meet: an exception before it is done, or None for nothing."""
        self.lost_replies: Counter[str] = Counter()
        """How many of the next calls of an operation are done and answered with OutcomeUnknown."""
        self.before: dict[str, asyncio.Event] = {}
        """Operations that wait for this before they are done."""
        self.after: dict[str, asyncio.Event] = {}
        """Operations that wait for this after they are done, before they answer."""
        self.jitter: Callable[[], float] | None = None
        """Seconds that each call takes."""
        self.chance: Callable[[str], Fault | None] | None = None
        """Asked once per call and after it was done: a fault by chance."""
        self.hangs: Callable[[str], bool] | None = None
        """Asked once per call: one that hangs is never done, and given up after `deadline` seconds."""
        self.deadline = 2.0
        self.garbage: dict[str, int] = {}
        """Keys at which stands what is no claim, with its revision."""
        self._thawed: asyncio.Event | None = None
        """None: not frozen."""
        self._deliveries: set[asyncio.Task[Any]] = set()
        self.deaf = False
        """Deletes are not reported."""
        self.watch_fault: Fault | None = None
        """What `subscribe` raises."""
        self._mailboxes: set[asyncio.Queue[Event | Exception]] = set()

    @property
    def across_processes(self) -> bool:
        return self._inner.across_processes

    # -- the contract

    @property
    def registry(self) -> Registry:
        return self._inner.registry

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        return await self._call(
            "create", lambda: self._readable(key, lambda: self._inner.create_or_get(key, proposal, ttl))
        )

    async def get(self, key: str) -> Claim | None:
        return await self._call("get", lambda: self._readable(key, lambda: self._inner.get(key)))

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        return await self._call("renew", lambda: self._inner.renew(claim, ttl))

    async def close(self, claim: Claim) -> CloseOutcome:
        return await self._call("close", lambda: self._close(claim))

    async def check(self) -> None:
        await self._call("check", self._inner.check)

    async def subscribe(self) -> AsyncIterator[Event]:
        if self.watch_fault is not None:
            raise self.watch_fault
        mailbox: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._mailboxes.add(mailbox)
        pump = asyncio.create_task(self._pump(mailbox))
        try:
            while True:
                event = await mailbox.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._mailboxes.discard(mailbox)
            pump.cancel()

    def stamp(self, key: str) -> int:
        return self._inner.stamp(key) if self._stamps else 0

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _readable(self, key: str, call: Callable[[], Awaitable[T]]) -> T:
        if key in self.garbage:
            raise ClaimUnreadable(key, self.garbage[key], "garbage")
        return await call()

    async def _close(self, claim: Claim) -> CloseOutcome:
        if claim.key not in self.garbage:
            return await self._inner.close(claim)
        if self.garbage[claim.key] != claim.revision:
            return CloseOutcome.SUPERSEDED
        del self.garbage[claim.key]
        return CloseOutcome.CLOSED

    # -- the script

    def freeze(self) -> None:
        """No call is answered any more, and whoever calls gives up after `deadline`. What was asked is done by `thaw`
        all the same, in its order, as by a server that was stopped and goes on."""
        self._thawed = asyncio.Event()

    def thaw(self) -> None:
        assert self._thawed is not None
        self._thawed.set()
        self._thawed = None

    def hold(self, op: str) -> asyncio.Event:
        """Have every call of an operation wait, before it is done, for the event that is answered."""
        return self.before.setdefault(op, asyncio.Event())

    def go_away(self) -> None:
        """No call is answered any more, and the watch dies."""
        self.broken["all"] = StoreUnavailable
        self.watch_fault = StoreUnavailable("the watch was refused")
        self.drop_watch()

    def return_(self) -> None:
        self.broken.clear()
        self.watch_fault = None

    def drop_watch(self) -> None:
        self.emit(StoreUnavailable("the watch was lost"))

    def emit(self, event: Event | Exception) -> None:
        for mailbox in self._mailboxes:
            mailbox.put_nowait(event)

    async def _pump(self, mailbox: asyncio.Queue[Event | Exception]) -> None:
        async for event in self._inner.subscribe():
            if isinstance(event, Reset) or not self.deaf:
                mailbox.put_nowait(event)

    async def _call(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls[op] += 1
        if self.jitter is not None:
            await asyncio.sleep(self.jitter())
        if self.hangs is not None and self.hangs(op):
            await asyncio.sleep(self.deadline)
            raise StoreUnavailable("no answer") if op in ("get", "check") else OutcomeUnknown("no answer")
        if self._thawed is not None:
            delivery = asyncio.create_task(self._deliver(self._thawed, call))
            self._deliveries.add(delivery)
            delivery.add_done_callback(self._delivered)
            await asyncio.wait({delivery}, timeout=self.deadline)
            if not delivery.done():
                raise OutcomeUnknown("no answer")
            return delivery.result()
        if op in self.before:
            await self.before[op].wait()
        faults = self.next_faults.get(op)
        fault = faults.popleft() if faults else self.broken.get(op, self.broken.get("all"))
        if fault is None and self.chance is not None:
            fault = self.chance(op)
        done = fault is None or fault is OutcomeUnknown or type(fault) is OutcomeUnknown
        if fault is not None and not done:
            raise fault
        answer = await call()
        if op in self.after:
            await self.after[op].wait()
        if self.jitter is not None:
            await asyncio.sleep(self.jitter())
        if fault is not None:
            raise fault
        if self.lost_replies[op] > 0:
            self.lost_replies[op] -= 1
            raise OutcomeUnknown("the reply was lost")
        return answer

    def _delivered(self, delivery: asyncio.Task[Any]) -> None:
        self._deliveries.discard(delivery)
        if not delivery.cancelled():
            delivery.exception()  # nobody waits any more to hear that a late one has failed

    @staticmethod
    async def _deliver(thawed: asyncio.Event, call: Callable[[], Awaitable[T]]) -> T:
        await thawed.wait()
        return await call()


def deleted(claim: Claim) -> Deleted:
    """As a store with ordered revisions says that this claim is gone."""
    return Deleted(claim.key, before=claim.revision + 1)
