"""The deletions of claims, told to any number of subscribers. A watch that is not shown to be alive raises."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from aetcd import rpc

from backends.base import Deleted, Event, Reset, StoreUnavailable
from backends.etcd.cluster import Cluster
from backends.fanout import MAILBOX_SIZE, Mailbox

_log = logging.getLogger("coatcheck.store")


class Deletions:
    """Of the keys from `first` to before `end`, told without the `prefix` that they begin with. Each subscriber has a
    watch of its own."""

    def __init__(self, cluster: Cluster, prefix: bytes, first: bytes, end: bytes) -> None:
        self._cluster = cluster
        self._prefix = prefix
        self._first, self._end = first, end
        self._watches: set[asyncio.Task[None]] = set()

    def begin(self, mailbox: Mailbox[Deleted]) -> asyncio.Task[None]:
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

    async def _fill(self, mailbox: Mailbox[Deleted]) -> None:
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

    async def _watch(self, mailbox: Mailbox[Deleted]) -> None:
        """One watch until it ends. Returns when a new one may follow at once (compaction); else StoreUnavailable."""
        skip = len(self._prefix)
        async with self._cluster.open_watch(self._first, self._end, filters=[rpc.WatchCreateRequest.NOPUT]) as watch:
            mailbox.put(Reset())
            while (events := await watch.read()) is not None:
                for event in events:
                    if event.type == rpc.Event.DELETE:
                        kv = event.kv
                        mailbox.put(Deleted(kv.key[skip:].decode("ascii", "replace"), kv.mod_revision))


class Subscription:
    """What `subscribe` hands out. Its watch begins with the first `anext` and ends with the object at the latest."""

    def __init__(self, deletions: Deletions) -> None:
        self._deletions = deletions
        self._mailbox: Mailbox[Deleted] = Mailbox(MAILBOX_SIZE)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._task is None and not self._closed:
            # The task must not know this object, so that dropping it is noticed.
            self._task = self._deletions.begin(self._mailbox)
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
