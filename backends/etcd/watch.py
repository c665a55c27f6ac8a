"""What happens to keys, told to any number of subscribers. A watch that is not shown to be alive raises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Self, TypeVar

from aetcd import rpc

from backends.base import Deleted, Reset, StoreUnavailable
from backends.etcd.cluster import Cluster
from backends.fanout import MAILBOX_SIZE, Mailbox

E = TypeVar("E")

_log = logging.getLogger("coatcheck.store")


class Watches(Generic[E]):
    """Of the keys from `first` to before `end`. Each subscriber has a watch of its own.

    `told`: what an event of etcd's means to them; None: nothing. `filters`: as etcd's WatchCreateRequest has them;
    `previous`: events carry what stood before."""

    def __init__(
        self,
        cluster: Cluster,
        first: bytes,
        end: bytes,
        told: Callable[[Any], E | None],
        *,
        filters: Sequence[int] = (),
        previous: bool = False,
    ) -> None:
        self._cluster = cluster
        self._first, self._end = first, end
        self._told = told
        self._filters = filters
        self._previous = previous
        self._watches: set[asyncio.Task[None]] = set()

    def begin(self, mailbox: Mailbox[E]) -> asyncio.Task[None]:
        """Fill the mailbox until the task is cancelled, the watch ends, or all are closed."""
        task = asyncio.get_running_loop().create_task(self._fill(mailbox))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        return task

    async def aclose(self) -> None:
        watches = tuple(self._watches)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _fill(self, mailbox: Mailbox[E]) -> None:
        try:
            while not self._cluster.closed:
                await self._watch(mailbox)
            raise StoreUnavailable("etcd: it is closed")
        except StoreUnavailable as error:
            mailbox.end(error)
        except Exception as error:
            # Whatever it was, the subscriber must not take a dead watch for a quiet one.
            _log.exception("the watch failed")
            mailbox.end(StoreUnavailable(f"etcd: the watch failed: {error!r}"))
        finally:
            mailbox.end()

    async def _watch(self, mailbox: Mailbox[E]) -> None:
        """One watch until it ends. Returns when a new one may follow at once (compaction); else StoreUnavailable."""
        async with self._cluster.open_watch(
            self._first, self._end, filters=self._filters, previous=self._previous
        ) as watch:
            mailbox.put(Reset())
            while (events := await watch.read()) is not None:
                for event in events:
                    told = self._told(event)
                    if told is not None:
                        mailbox.put(told)


def deletions(cluster: Cluster, prefix: bytes, first: bytes, end: bytes) -> Watches[Deleted]:
    """Of claims, told without the `prefix` that their keys begin with."""
    skip = len(prefix)

    def told(event: Any) -> Deleted | None:
        if event.type != rpc.Event.DELETE:
            return None
        return Deleted(event.kv.key[skip:].decode("ascii", "replace"), event.kv.mod_revision)

    return Watches(cluster, first, end, told, filters=[rpc.WatchCreateRequest.NOPUT])


class Subscription(Generic[E]):
    """What a subscriber iterates. Its watch begins with the first `anext` and ends with the object at the latest.

    `subject` as a `Mailbox` has it."""

    def __init__(self, watches: Watches[E], subject: Callable[[E], Hashable] = id) -> None:
        self._begin_watch = watches.begin
        self._mailbox: Mailbox[E] = Mailbox(MAILBOX_SIZE, subject)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E | Reset:
        if self._task is None and not self._closed:
            # The task must not know this object, so that dropping it is noticed.
            self._task = self._begin_watch(self._mailbox)
        try:
            return await anext(self._mailbox)
        finally:
            # A cancelled reader's traceback keeps this frame for a while; it must not keep the watch, too.
            del self

    async def aclose(self) -> None:
        self._closed = True
        self._mailbox.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def __del__(self) -> None:
        if self._task is not None and not self._task.done() and not self._task.get_loop().is_closed():
            self._task.cancel()
