"""What the tests of claim stores share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pytest

from backends.base import Claim, ClaimStore, ClaimValue, Deleted, Event, Reset, StoreUnavailable
from backends.registry import Put, Registry, RegistryEvent


def a_key() -> str:
    return secrets.token_hex(20)


def a_value(worker: str = "w-1") -> ClaimValue:
    return ClaimValue(worker=worker)


async def make(store: ClaimStore, key: str, ttl: float = 600.0, worker: str = "w-1") -> Claim:
    """A claim that stands because we made it."""
    outcome = await store.create_or_get(key, a_value(worker), ttl)
    assert outcome.created
    return outcome.claim


async def eventually(condition: Callable[[], bool], within: float = 5.0) -> None:
    """Waits for what another thread, process or the kernel does."""
    give_up_at = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {within} s"
        await asyncio.sleep(0.005)


async def until_gone(store: ClaimStore, key: str, within: float) -> float:
    """The moment (monotonic) at which a claim was first seen to stand no more."""
    give_up_at = time.monotonic() + within
    while await store.get(key) is not None:
        assert time.monotonic() < give_up_at, f"the claim still stands after {within} s"
        await asyncio.sleep(0.02)
    return time.monotonic()


class Subscriber:
    """Iterates a subscription in a task of its own. Entered when the first Reset has come."""

    def __init__(self, store: ClaimStore) -> None:
        self.events: list[Event] = []
        self._store = store
        self._news = asyncio.Event()
        self._failed = False
        self.task: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self._listen())
        await self.until(lambda: bool(self.events), 10.0)
        assert self.events == [Reset()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        if kind is None and not self._failed and not self.task.cancelled():
            await self.task  # a subscription that failed unasked fails the test

    async def fails(self, within: float = 5.0) -> None:
        """Waits until it is told that its watch is not alive any more."""
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(asyncio.shield(self.task), within)
        self._failed = True

    async def _listen(self) -> None:
        try:
            async for event in self._store.subscribe():
                self.events.append(event)
                self._news.set()
        finally:
            self._news.set()

    @property
    def deleted(self) -> list[str]:
        return [event.key for event in self.events if isinstance(event, Deleted)]

    @property
    def resets(self) -> int:
        return sum(isinstance(event, Reset) for event in self.events)

    async def hears(self, *keys: str, within: float = 10.0) -> None:
        await self.until(lambda: set(keys) <= set(self.deleted), within)

    async def until(self, condition: Callable[[], bool], within: float = 10.0) -> None:
        give_up_at = time.monotonic() + within
        while not condition():
            if self.task.done():
                await self.task
                raise AssertionError("the subscription ended")
            self._news.clear()
            try:
                async with asyncio.timeout(give_up_at - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                raise AssertionError(f"not within {within} s; heard {self.events}") from None


class Watcher:
    """Watches a kind as the contract has it: lists at each Reset, and then applies what it is told.

    Entered when it has listed for the first time."""

    def __init__(self, registry: Registry, kind: str) -> None:
        self.events: list[RegistryEvent] = []
        self.known: dict[str, bytes] = {}
        self._registry = registry
        self._kind = kind
        self._news = asyncio.Event()
        self.task: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self._listen())
        await self.until(lambda: bool(self.events))
        assert self.events[0] == Reset()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self.task.done()
        self.task.cancel()
        await asyncio.wait([self.task])
        if kind is None and ended:
            assert isinstance(self.task.exception(), StoreUnavailable | None)

    async def _listen(self) -> None:
        async for event in self._registry.watch(self._kind):
            if isinstance(event, Reset):
                self.known = await self._registry.list(self._kind)
            elif isinstance(event, Put):
                self.known[event.name] = event.value
            else:
                self.known.pop(event.name, None)
            self.events.append(event)
            self._news.set()

    def of(self, name: str) -> list[RegistryEvent]:
        return [event for event in self.events if not isinstance(event, Reset) and event.name == name]

    async def knows(self, known: dict[str, bytes], within: float = 10.0) -> None:
        await self.until(lambda: self.known == known, within)

    async def fails(self, within: float) -> None:
        """Waits until it is told that its watch is not alive any more."""
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(asyncio.shield(self.task), within)

    async def until(self, condition: Callable[[], bool], within: float = 10.0) -> None:
        give_up_at = time.monotonic() + within
        while not condition():
            if self.task.done():
                await self.task
                raise AssertionError("the watch ended")
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            done, _ = await asyncio.wait(
                {self.task, news}, timeout=give_up_at - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            news.cancel()
            assert done, f"not within {within} s; heard {self.events}"
