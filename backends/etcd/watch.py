"""What happens to keys, told to any number of subscribers. A watch that is not shown to be alive raises.

What our own watch has been told, other replicas' watches have been told as well, or are being told: etcd serves all of
a member's watches when it applies a write. So a close that waits for that (`Deletions.expect`), and `SETTLE_S` more, is
known nearly everywhere when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from aetcd import rpc

from backends.base import Deleted, Reset, StoreUnavailable
from backends.etcd.cluster import Cluster
from backends.fanout import MAILBOX_SIZE, Mailbox

E = TypeVar("E")

SETTLE_S = 0.003
"""What another replica's process may need longer than ours to read what both have been told."""
UNTOLD_S = 5.0
"""How long a rewind may take to be told before it is no reason any more to answer nothing."""

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
            mailbox.put(self._begun())
            try:
                while (events := await watch.read()) is not None:
                    for event in events:
                        told = self._told(event)
                        if told is not None:
                            mailbox.put(told)
            finally:
                self._ended()

    def _begun(self) -> Reset:
        """A watch stands: what its subscriber is told of that."""
        return Reset()

    def _ended(self) -> None:
        """It stands no more."""

    def rewind_told(self) -> None:
        """A subscriber has been given the Reset that says that the store was wiped or restored."""


class Deletions(Watches[Deleted]):
    """Of claims, told without the `prefix` that their keys begin with."""

    def __init__(self, cluster: Cluster, prefix: bytes, first: bytes, end: bytes) -> None:
        super().__init__(cluster, first, end, self._hear, filters=[rpc.WatchCreateRequest.NOPUT])
        self._skip = len(prefix)
        self._standing = 0
        """Watches that are told of deletions now."""
        self._behind = False
        """They were waited for in vain, and have not said anything since."""
        self._expected: dict[str, set[Expected]] = {}
        """By key: who waits for its deletion."""
        self._subscribed = False
        self._announced = self._known = 0
        """Rewinds of etcd that a subscriber will be told of, and that one has been."""

    @property
    def untold(self) -> bool:
        """etcd was wiped or restored, and the subscriber does not know yet: what it is told of claims would mislead."""
        history = self._cluster.history
        return history.rewinds != self._known and self._subscribed and time.monotonic() - history.rewound_at < UNTOLD_S

    @contextlib.contextmanager
    def expect(self, key: str, revision: int) -> Iterator[Expected]:
        """The deletion of the claim with this revision. Enter it before the claim is deleted."""
        expected = Expected(revision)
        self._expected.setdefault(key, set()).add(expected)
        try:
            yield expected
        finally:
            waiting = self._expected[key]
            waiting.discard(expected)
            if not waiting:
                del self._expected[key]

    async def wait(self, expected: Expected, seconds: float) -> None:
        """Until a watch has told it and a little more, but no longer than this, and not at all where none can."""
        if self._standing and not self._behind:
            if await expected.heard(seconds):
                await asyncio.sleep(SETTLE_S)
            else:
                self._behind = True

    def begin(self, mailbox: Mailbox[Deleted]) -> asyncio.Task[None]:
        self._subscribed = True
        return super().begin(mailbox)

    def rewind_told(self) -> None:
        self._known = self._announced

    def _begun(self) -> Reset:
        self._standing += 1
        self._announced = self._cluster.history.rewinds
        return Reset(rewound=self._announced != self._known)

    def _ended(self) -> None:
        self._standing -= 1

    def _hear(self, event: Any) -> Deleted | None:
        self._behind = False
        if event.type != rpc.Event.DELETE:
            return None
        kv = event.kv
        key = kv.key[self._skip :].decode("ascii", "replace")
        for expected in self._expected.get(key, ()):
            expected.deleted(kv.mod_revision)
        return Deleted(key, kv.mod_revision)


class Expected:
    """The deletion of one claim, which somebody waits for."""

    def __init__(self, revision: int) -> None:
        self._revision = revision
        self._heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deleted(self, before: int) -> None:
        """Claims of the key with a lower revision are gone."""
        if before > self._revision and not self._heard.done():
            self._heard.set_result(None)

    async def heard(self, seconds: float) -> bool:
        if not self._heard.done():
            await asyncio.wait({self._heard}, timeout=seconds)
        return self._heard.done()


class Subscription(Generic[E]):
    """What a subscriber iterates. Its watch begins with the first `anext` and ends with the object at the latest.

    `subject` as a `Mailbox` has it."""

    def __init__(self, watches: Watches[E], subject: Callable[[E], Hashable] = id) -> None:
        self._begin_watch, self._rewind_told = watches.begin, watches.rewind_told
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
            event = await anext(self._mailbox)
            if isinstance(event, Reset) and event.rewound:
                self._rewind_told()
            return event
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
