"""What one process knows of the claims that stand, and how it hears of those that go.

Events come from the kernel (through watchfiles); each process also walks the folder, a few hundred names at a time, to
remove what has expired and to find what the kernel did not report. Where the kernel reports nothing, the walk is all
there is: the folder is then listed when its mtime has changed, at most a fifth of the time.

The known names of a process with subscribers take about 300 bytes per claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import watchfiles
from watchfiles import Change

from backends.base import Deleted, Event, Reset, StoreError, StoreUnavailable
from backends.fanout import FanOut
from backends.file.claims import KEY, Claims
from backends.file.disk import Disk
from backends.file.stamps import Stamps
from backends.file.threads import Threads, tell

log = logging.getLogger(__name__)

PROVEN_EVERY_S = 5.0
"""How often the watch has to show that it is alive; also how long it may be dead unnoticed."""
STEP_MS, QUICK_STEP_MS = 100, 10
"""How often the listener's thread looks for events. Where a close changes stamps, nothing waits for its event."""
WALKED_WHOLE = 4096
"""Of more claims than these, a walk beside the kernel's events looks at so many, others each time, and at all names."""
_SLICE = 128
_NAMES_SLICE = 256


class Watch:
    """Tells subscribers what goes: one follower for all of them, from the first one's coming to the last one's leaving,
    or until it cannot be shown to be alive."""

    def __init__(self, disk: Disk, claims: Claims, stamps: Stamps, threads: Threads, *, poll: bool) -> None:
        self._disk = disk
        self._claims = claims
        self._stamps = stamps
        self._threads = threads
        self._poll = poll
        self._fanout: FanOut[Deleted] = FanOut()
        self._walking = asyncio.Lock()
        self._walks = 0
        self._warned = False
        # While somebody subscribes: the task that follows, whether it has said Reset, and what it knows.
        self._follower: asyncio.Task[None] | None = None
        self._stands = False
        self._known: Known | None = None

    async def subscribe(self) -> AsyncIterator[Event]:
        mailbox = self._fanout.join()
        try:
            if self._follower is None:
                self._follower = asyncio.create_task(self._follow())
            elif self._stands:
                mailbox.put(Reset())
            async for event in mailbox:
                yield event
        finally:
            # Nothing is awaited here: the last one out only tells the follower to stop.
            self._fanout.leave(mailbox)
            if not self._fanout and self._follower is not None:
                self._follower.cancel()
                self._forget()

    def note(self, key: str, mark: int) -> None:
        """This process was answered that claim."""
        if self._known is not None:
            self._known.note(key, mark)

    async def walk(self, *, whole: bool = False) -> None:
        """Looks whether every claim has still a name, and at claims: all of them, where they are few or `whole`.
        Removes the expired, and reports what is not there any more."""
        async with self._walking:
            known = self._known or Known()  # nobody listens: it is told to nobody
            known.turn()
            self._walks += 1
            looked_at, named = await self._threads.run(lambda _: self._divided(whole))
            for start in range(0, len(named), _NAMES_SLICE):
                known.named(named[start : start + _NAMES_SLICE])
                await asyncio.sleep(0)
            for start in range(0, len(looked_at), _SLICE):
                batch = looked_at[start : start + _SLICE]
                standing = await self._threads.run(lambda _, batch=batch: self._claims.tend(batch))  # type: ignore[misc]
                self._publish(known.saw(standing))
                await asyncio.sleep(0.002)  # the threads of the walk must not crowd out the turns
            for keys in known.missed():
                self._publish(keys)
                await asyncio.sleep(0)
            await self._threads.run(lambda _: self._disk.remove_stale_temps())

    def _divided(self, whole: bool) -> tuple[list[str], list[str]]:
        """The names to look at in this walk, and the other claims'."""
        names = self._disk.names()
        parts = 1 if whole else len(names) // WALKED_WHOLE + 1
        if parts == 1:
            return names, []
        looked_at: list[str] = []
        named: list[str] = []
        for number, name in enumerate(names):
            if number % 512 == 0:
                time.sleep(0)  # the loop may go on
            if (hash(name) + self._walks) % parts == 0:
                looked_at.append(name)
            elif KEY.fullmatch(name):
                named.append(name)
        return looked_at, named

    async def aclose(self) -> None:
        self._fanout.end()
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower})

    async def _follow(self) -> None:
        try:
            while True:
                folder = await self._threads.run(lambda _: self._disk.look())
                self._known = known = Known()
                if not self._poll:
                    hear = functools.partial(self._hear, known)
                    quick = not self._stamps.shared
                    listening = Listener(self._disk.claims, self._threads, hear, quick=quick)
                    with contextlib.closing(listening) as listener:
                        if await self._proven(listener):
                            self._stand()
                            await self._listen(listener, folder)
                            continue
                    if not self._warned:
                        self._warned = True
                        log.warning(
                            "%s: the kernel reports no file events here: listing the folder instead", self._disk.root
                        )
                await self.walk(whole=True)
                self._stand()
                await self._list_changes(folder)
        except Exception as error:  # whatever it is: subscribers are told, the watch never falls silent
            if not isinstance(error, StoreError):
                log.exception("%s: the watch failed", self._disk.root)
            self._forget()
            self._fanout.end(str(error))

    def _stand(self) -> None:
        self._stands = True
        self._fanout.publish(Reset())

    def _forget(self) -> None:
        self._follower, self._stands, self._known = None, False, None

    async def _listen(self, listener: Listener, folder: os.stat_result) -> None:
        """Returns when the folder has been replaced, or is to be listened to in another way."""
        proven_at = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await listener.disturbed.wait()
            listener.disturbed.clear()
            if not os.path.samestat(folder, await self._threads.run(lambda _: self._disk.look())):
                return
            if listener.quick is self._stamps.shared:
                return
            if time.monotonic() >= proven_at + PROVEN_EVERY_S or not listener.alive:
                if not await self._proven(listener):
                    raise StoreUnavailable("the file system has stopped reporting events")
                proven_at = time.monotonic()

    async def _proven(self, listener: Listener) -> bool:
        """Makes events until one arrives; False when several were made and none did, a second on a machine that has
        time. Seconds alone are no evidence: on one that has none, they may be over before the listener ran at all."""
        listener.life.clear()
        wait = 0.05 if listener.quick else 0.25
        for _ in range(round(1.0 / wait)):
            if not listener.alive:
                break
            try:
                await self._threads.run(lambda _: self._disk.stir())
            except StoreUnavailable:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await listener.life.wait()
                    return True
        return False

    async def _list_changes(self, folder: os.stat_result) -> None:
        """Returns when the folder has been replaced."""
        listed_mtime_ns = -1
        listed_at = time.monotonic()
        pause = 0.25
        while True:
            await asyncio.sleep(pause)
            now = await self._threads.run(lambda _: self._disk.look())
            if not os.path.samestat(folder, now):
                return
            if now.st_mtime_ns != listed_mtime_ns or time.monotonic() >= listed_at + PROVEN_EVERY_S:
                # A change in the same tick of a coarse clock as the one seen would leave the mtime as it is.
                listed_mtime_ns = now.st_mtime_ns if self._disk.is_settled(now) else -1
                began_at = time.monotonic()
                await self.walk(whole=True)  # the only one who tells
                listed_at = time.monotonic()
                pause = max(0.25, 4 * (listed_at - began_at))

    def _hear(self, known: Known, gone: list[str], made: list[str]) -> None:
        known.hear(gone, made)
        self._publish(gone)

    def _publish(self, gone: Iterable[str]) -> None:
        for key in gone:
            self._fanout.publish(Deleted(key))


class Known:
    """The keys of the claims that stand, each with its mark (0: not looked at yet), in two generations.

    A walk begins a new one, and whatever is seen to stand moves into it: what is left in the old one when the walk has
    ended was not there any more. What our own process was answered is noted as well: it must not go unreported because
    it came and went between two walks."""

    def __init__(self) -> None:
        self._new: dict[str, int] = {}
        self._old: dict[str, int] = {}

    def note(self, key: str, mark: int) -> None:
        self._old.pop(key, None)
        self._new[key] = mark

    def hear(self, gone: list[str], made: list[str]) -> None:
        """One batch of the kernel's. A key may be in both, in an unknown order: our reader looks, and the next walk."""
        for key in gone:
            self._old.pop(key, None)
            self._new.pop(key, None)
        for key in made:
            if key not in self._old:
                self._new.setdefault(key, 0)

    def turn(self) -> None:
        """A walk begins. What is created from here on is in the new generation, whether it is listed or not."""
        # A walk that failed has left an old one.
        self._old, self._new = ({**self._old, **self._new} if self._old else self._new), {}

    def named(self, keys: list[str]) -> None:
        """They have their names still; nobody has looked at them."""
        for key in keys:
            self._new[key] = self._old.pop(key, 0) or self._new.get(key, 0)

    def saw(self, standing: list[tuple[str, int]]) -> list[str]:
        """`standing`: keys with their marks. Returns those whose known claim has given way to another."""
        gone = []
        for key, mark in standing:
            known = self._old.pop(key, 0) or self._new.get(key, 0)
            if known not in (0, mark):
                gone.append(key)
            self._new[key] = mark
        return gone

    def missed(self) -> Iterator[list[str]]:
        """A walk has ended: the keys that are gone. In slices, because there may be many."""
        while self._old:
            yield [self._old.popitem()[0] for _ in range(min(_SLICE, len(self._old)))]
        self._old = {}  # an emptied dict keeps its size


class Listener:
    """Hears the kernel's events of one folder in a thread, until it is closed.

    `heard` is called in the event loop, with the keys of each batch: those that are gone, and those that were made."""

    def __init__(
        self, folder: str, threads: Threads, heard: Callable[[list[str], list[str]], None], *, quick: bool
    ) -> None:
        self.life = asyncio.Event()
        """Set by any event."""
        self.disturbed = asyncio.Event()
        """Set when something happened to the folder itself, or the thread has ended."""
        self.quick = quick
        self._folder = folder
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threads.start(self._listen, "coatcheck-watch")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._stop.set()

    def _listen(self) -> None:
        # Not `awatch`: that one opens its watch, which may block for long, in the thread of the event loop.
        try:
            batches = watchfiles.watch(
                self._folder,
                watch_filter=None,
                debounce=50,
                step=QUICK_STEP_MS if self.quick else STEP_MS,
                rust_timeout=1000,
                stop_event=self._stop,
                raise_interrupt=False,
                force_polling=False,
                recursive=False,
            )
            for changes in batches:
                if self._stop.is_set():
                    return
                self._sort(changes)
        except (OSError, RuntimeError) as error:
            # No such folder, no inotify instance left, or watchfiles' own: `alive` turns False, the follower looks.
            log.debug("%s: the listener ended: %s", self._folder, error)
        finally:
            tell(self._loop, self.disturbed.set)

    def _sort(self, changes: set[tuple[Change, str]]) -> None:
        """In the thread, and told a slice at a time: there may be as many as there are claims."""
        tell(self._loop, self.life.set)
        gone: list[str] = []
        made: list[str] = []
        for change, path in changes:
            name = path.rpartition("/")[2]
            if path == self._folder and change is not Change.modified:
                tell(self._loop, self.disturbed.set)
            elif change is not Change.modified and KEY.fullmatch(name):
                (gone if change is Change.deleted else made).append(name)
        for start in range(0, max(len(gone), len(made)), _SLICE):
            tell(self._loop, self._heard, gone[start : start + _SLICE], made[start : start + _SLICE])
            if start:
                time.sleep(0.001)  # between two slices the loop serves turns
