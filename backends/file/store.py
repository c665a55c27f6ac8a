"""Claims as files in a shared folder.

Promises, on one host: every process agrees, claims outlive every router process, and a read that starts after a write
has returned sees it (linearizable). A close is seen at once by every process on the host through a shared page of
stamps.

With `shared=True` (`file:///dir?hosts=many`) the folder may be a network file system used by several hosts, and
processes on different hosts agree. Reads are then *not* linearizable: NFS caches names and attributes. It then has no
stamps, because mapped pages are not coherent between hosts; and it never makes the root anew, because a missing folder
is more likely an unmounted share. It lists the folder for its events, because no kernel hears of another host's
changes. It relies on the server for hard links that fail on an existing name and for `flock`:
NFSv4 has both, mount it with `lookupcache=positive`. A host that loses contact loses its locks after the server's lease
time: a remover frozen for that long, between its comparison and its unlink, could then remove a successor.

Not promised anywhere: surviving a power failure without loss. A claim's content is synced before it gets its name
(`sync`), so a claim is never torn, but the folder is not synced, so the youngest claims may be missing afterwards.

How it works::

    claims/<key>   one immutable file per claim (revision and value); its mtime is the instant at which it expires
    tmp/           files on their way to claims/
    locks/<xx>     a lock for all keys that begin with xx (not to be removed while a router runs)
    stamps         65,536 counters, one for all keys with the same first four digits (not to be truncated: it is mapped)

*Create*: write a file in `tmp/`, `link` it to its name. The link is complete or absent, and fails if the name is taken.
*Close, expire, renew*: only while holding the key's lock, after reading the claim again. Creation never replaces and
only holders of the lock remove, so comparing and unlinking is one step, even if the process is frozen in between.
*Age* is judged by the file system's clock alone (read from the mtime that it gives to files), never by the host's.
*Events* come from the kernel (through watchfiles); each process also walks the folder, a few hundred names at a time,
to remove what has expired and to find what the kernel did not report. Where the kernel reports nothing, the walk is all
there is: the folder is then listed when its mtime has changed, at most a fifth of the time.

The known names of a process with subscribers take about 300 bytes per claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import queue
import random
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import watchfiles

from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimOutcome,
    ClaimValue,
    CloseOutcome,
    Deleted,
    Event,
    OutcomeUnknown,
    Reset,
    StoreConfigurationError,
    StoreError,
    StoreUnavailable,
)
from backends.fanout import MAILBOX_SIZE, FanOut

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 8
STAMP_SLOTS = 1 << 16
GRACE_S = 1.0
"""How long an unreadable claim file is left alone, in case somebody is still copying it there."""
STALE_S = 60.0
"""The age at which leftovers of dead processes (temporary files, probes) are removed."""
PROVEN_EVERY_S = 5.0
"""How often the watch has to show that it is alive; also how long it may be dead unnoticed."""

_KEY = re.compile(r"[0-9a-f]{40,64}")
_OWN_PREFIX = ".coatcheck-"
_MAX_CLAIM_BYTES = 1 << 16
_CREATE_ATTEMPTS = 8
_SLICE = 256
_MARK_NS = 1_000_000
_EXPIRY_MARGIN_S = 0.02  # file times come from a clock that ticks every few milliseconds
_COARSE_MTIME_NS = 2_000_000_000  # some file systems count in seconds or two
# What the kernel refuses before it does anything. After any other error a write may have been applied.
_REFUSED = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EISDIR,
    errno.EMFILE,
    errno.EMLINK,
    errno.ENFILE,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EROFS,
}
# What no waiting heals: the operator has to change something.
_MISCONFIGURED = {
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


class FileStore:
    """Made by `open`; belongs to one event loop. See the module's docstring for what it promises."""

    across_processes = True

    def __init__(self, disk: _Disk, *, deadline: float, poll: bool, mailbox_size: int) -> None:
        self._disk = disk
        self._deadline = deadline
        self._poll = poll
        self._loop = asyncio.get_running_loop()
        self._threads = _Threads(THREADS)
        self._fanout = FanOut(mailbox_size)
        self._page: _StampPage | None = None
        self._shortest_ttl = 4 * 30.0
        self._walking = asyncio.Lock()
        self._watch: _Watch | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: set[_Listener] = set()
        self._warned: set[str] = set()
        self._closed = False

    @classmethod
    async def open(
        cls,
        root: Path,
        *,
        deadline: float = 2.0,
        shared: bool = False,
        sync: bool = True,
        poll: bool = False,
        mailbox_size: int = MAILBOX_SIZE,
    ) -> FileStore:
        """Makes the folder where needed and tries to make a claim in it. A disk that is full or silent is not an
        error here: it may heal, and until then every call reports it.

        `deadline` in seconds for every call; `shared`: used by several hosts; `sync`: survive a power failure whole;
        `poll`: do not rely on the kernel's events. Raises StoreConfigurationError."""
        if not root.is_absolute():
            raise StoreConfigurationError(f"the claims folder {str(root)!r} is relative: give an absolute path")
        store = cls(
            _Disk(root, shared=shared, sync=sync), deadline=deadline, poll=poll or shared, mailbox_size=mailbox_size
        )
        try:
            await store._run(lambda _: store._disk.prepare())
            await store.check()
            await store._map_stamps()
        except StoreError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _MISCONFIGURED:
                await store.aclose()
                hint = "mount the share and make that folder" if shared else "name a folder that this user can write to"
                raise StoreConfigurationError(f"cannot keep claims in {str(root)!r}: {error}; {hint}") from error
            log.warning("%s: no claims for now: %s", root, error)
        store._start(store._tend())
        return store

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        self._shortest_ttl = min(self._shortest_ttl, ttl)
        found, created = await self._run(lambda step: self._disk.create_or_get(step, key, proposal, ttl))
        return ClaimOutcome(self._answer(key, found), created)

    async def get(self, key: str) -> Claim | None:
        found = await self._run(lambda _: self._disk.get(key))
        return None if found is None else self._answer(key, found)

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        self._shortest_ttl = min(self._shortest_ttl, ttl)
        found = await self._run(lambda step: self._disk.renew(step, claim, ttl))
        return self._answer(claim.key, found)

    async def close(self, claim: Claim) -> CloseOutcome:
        return await self._run(lambda step: self._disk.close(step, claim))

    async def subscribe(self) -> AsyncIterator[Event]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        mailbox = self._fanout.join()
        try:
            if self._watch is None:
                self._watch = _Watch()
                self._watch.task = self._start(self._follow(self._watch))
            elif self._watch.stands:
                mailbox.put(Reset())
            async for event in mailbox:
                yield event
        finally:
            # Nothing is awaited here: the last one out only tells the watch to stop.
            self._fanout.leave(mailbox)
            if not self._fanout and self._watch is not None:
                self._watch.task.cancel()
                self._watch = None

    def stamp(self, key: str) -> int:
        return 0 if self._page is None else self._page.counters[int(key[:4], 16)]

    async def check(self) -> None:
        await self._run(self._disk.check)

    async def aclose(self) -> None:
        self._closed = True
        self._fanout.end()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.end()
        give_up_at = self._loop.time() + self._deadline
        while self._alive() and self._loop.time() < give_up_at:  # noqa: ASYNC110 (a thread's end sets no event)
            await asyncio.sleep(0.001)
        if self._page is not None:
            self._page.close()
            self._page = None

    def _answer(self, key: str, found: _Found) -> Claim:
        if self._watch is not None:
            self._watch.noted(key, found.mark)
        return Claim(
            key=key, value=found.value, revision=found.revision, expires_at=self._disk.surely_until(found.expires_ns)
        )

    # Blocking work

    async def _run(self, work: Callable[[_Step[T]], T]) -> T:
        """Does `work` in a thread, again while it answers `_NotYet`, and within the deadline.

        This is the one place that turns what went wrong into what is known."""
        give_up_at = self._loop.time() + self._deadline
        pause = 0.001
        while True:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            step = _Step(work, self._loop)
            timer = self._loop.call_at(give_up_at, step.give_up)
            try:
                self._threads.submit(step)
                return await step.future
            except _NotYet as obstacle:
                if self._loop.time() + pause >= give_up_at:
                    raise StoreUnavailable(f"{obstacle} for {self._deadline} s") from None
            except OSError as error:
                raise step.verdict(error) from error
            finally:
                timer.cancel()
                step.abandon()
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 0.02)

    def _alive(self) -> bool:
        self._listeners = {listener for listener in self._listeners if listener.alive}
        return bool(self._listeners) or self._threads.alive

    def _start(self, coroutine: Any) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s: %s", self._disk.root, message)

    # Upkeep: the stamp page, the expired, the leftovers

    async def _tend(self) -> None:
        walked_at = self._loop.time()
        spread = random.uniform(0.75, 1.25)
        while True:
            every = min(max(self._shortest_ttl / 4, 0.1), 30.0) * spread
            await asyncio.sleep(min(every, 1.0))
            try:
                await self._map_stamps()
                if self._loop.time() >= walked_at + every:
                    walked_at = self._loop.time()
                    await self._walk(self._watch)
            except StoreError as error:
                # Every call tells its caller the same; here it is enough to try again.
                log.debug("%s: upkeep: %s", self._disk.root, error)
            except Exception:  # a fault of ours, for the log; without upkeep the folder would grow without bound
                log.exception("%s: upkeep failed", self._disk.root)

    async def _map_stamps(self) -> None:
        mapped = self._page.identity if self._page is not None else None
        page = await self._run(lambda _: self._disk.map_stamps(mapped))
        if page is not None:
            if self._page is not None:
                self._page.close()
            self._page = page

    async def _walk(self, watch: _Watch | None) -> None:
        """Looks at every claim once: removes the expired, and tells `watch` what stands."""
        async with self._walking:
            if watch is not None:
                watch.turn()
            names = await self._run(lambda _: self._disk.names())
            for start in range(0, len(names), _SLICE):
                batch = names[start : start + _SLICE]
                standing = await self._run(lambda _, batch=batch: self._disk.tend(batch))  # type: ignore[misc]
                if watch is not None:
                    self._publish(watch.saw(standing))
                await asyncio.sleep(0.002)  # the threads of the walk must not crowd out the turns
            if watch is not None:
                for keys in watch.missed():
                    self._publish(keys)
                    await asyncio.sleep(0)
            await self._run(lambda _: self._disk.remove_stale_temps())

    # Events

    async def _follow(self, watch: _Watch) -> None:
        """Keeps one watch for all subscribers, until the last has left or it cannot be shown to be alive."""
        try:
            while True:
                folder = await self._run(lambda _: self._disk.look())
                watch.forget()
                if not self._poll:
                    with self._listener(watch) as listener:
                        if await self._proven(watch, listener):
                            self._stand(watch)
                            await self._listen(watch, listener, folder.identity)
                            continue
                    self._warn_once("the kernel reports no file events here: listing the folder instead")
                await self._walk(watch)
                self._stand(watch)
                await self._list_changes(watch, folder)
        except StoreError as error:
            self._give_up(watch, str(error))
        except Exception as error:  # whatever it is: subscribers are told, the watch never falls silent
            log.exception("%s: the watch failed", self._disk.root)
            self._give_up(watch, repr(error))

    def _stand(self, watch: _Watch) -> None:
        watch.stands = True
        self._fanout.publish(Reset())

    def _give_up(self, watch: _Watch, error: str) -> None:
        if self._watch is watch:
            self._watch = None
            self._fanout.end(error)

    async def _listen(self, watch: _Watch, listener: _Listener, identity: _Identity) -> None:
        """Returns when the folder has been replaced."""
        proven_at = self._loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await watch.disturbed.wait()
            watch.disturbed.clear()
            if (await self._run(lambda _: self._disk.look())).identity != identity:
                return
            if self._loop.time() >= proven_at + PROVEN_EVERY_S or not listener.alive:
                if not await self._proven(watch, listener):
                    raise StoreUnavailable("the file system has stopped reporting events")
                proven_at = self._loop.time()

    async def _list_changes(self, watch: _Watch, folder: _Folder) -> None:
        """Returns when the folder has been replaced."""
        listed_mtime_ns = -1
        listed_at = self._loop.time()
        pause = 0.25
        while True:
            await asyncio.sleep(pause)
            now = await self._run(lambda _: self._disk.look())
            if now.identity != folder.identity:
                return
            if now.mtime_ns != listed_mtime_ns or self._loop.time() >= listed_at + PROVEN_EVERY_S:
                began_at = self._loop.time()
                await self._walk(watch)
                listed_at = self._loop.time()
                pause = max(0.25, 4 * (listed_at - began_at))
                # A change in the same tick of a coarse clock as the one seen would leave the mtime as it is.
                listed_mtime_ns = now.mtime_ns if now.settled else -1

    async def _proven(self, watch: _Watch, listener: _Listener) -> bool:
        """Makes events until one arrives; False after a second of silence."""
        give_up_at = self._loop.time() + 1.0
        watch.life.clear()
        while listener.alive and self._loop.time() < give_up_at:
            try:
                await self._run(lambda _: self._disk.stir())
            except StoreUnavailable:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await watch.life.wait()
                    return True
        return False

    def _listener(self, watch: _Watch) -> _Listener:
        def heard(changes: set[tuple[watchfiles.Change, str]]) -> None:
            self._publish(watch.heard(changes, self._disk.claims))

        listener = _Listener(self._disk.claims, self._loop, heard, watch.lost)
        self._listeners.add(listener)
        return listener

    def _publish(self, gone: Iterable[str]) -> None:
        for key in gone:
            self._fanout.publish(Deleted(key))


class _Watch:
    """What one process knows of the claims that stand. Its methods answer the keys that are gone.

    `_known` maps a key to its mark (0: not looked at yet) shifted left by one, plus the side of the walk that last saw
    it. What is on the other side when a walk has ended was not there any more. What our own process was answered is
    noted as well: it must not go unreported because it came and went between two walks."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None]
        self.stands = False
        self.life = asyncio.Event()
        self.disturbed = asyncio.Event()
        self._known: dict[str, int] = {}
        self._side = 0

    def forget(self) -> None:
        self._known = {}

    def lost(self) -> None:
        self.disturbed.set()

    def heard(self, changes: set[tuple[watchfiles.Change, str]], folder: str) -> list[str]:
        gone = []
        self.life.set()
        for change, path in changes:
            name = path.rpartition("/")[2]
            if path == folder and change is not watchfiles.Change.modified:
                self.disturbed.set()
            elif change is watchfiles.Change.deleted and _KEY.fullmatch(name):
                # It may stand again: the batch is unordered. Our reader looks, and the next walk.
                self._known.pop(name, None)
                gone.append(name)
        for change, path in changes:
            name = path.rpartition("/")[2]
            if change is watchfiles.Change.added and _KEY.fullmatch(name):
                self._known.setdefault(name, self._side)
        return gone

    def noted(self, key: str, mark: int) -> None:
        self._known[key] = mark << 1 | self._side

    def turn(self) -> None:
        """A walk begins. What is created from here on is on its side, whether it is listed or not."""
        self._side ^= 1

    def saw(self, standing: list[tuple[str, int]]) -> list[str]:
        """`standing`: keys with their marks."""
        gone = []
        for key, mark in standing:
            known_mark = self._known.get(key, 0) >> 1
            if known_mark not in (0, mark):
                gone.append(key)
            self._known[key] = mark << 1 | self._side
        return gone

    def missed(self) -> Iterator[list[str]]:
        """A walk has ended. In slices, because there may be many."""
        keys = list(self._known)
        for start in range(0, len(keys), _SLICE):
            gone = [
                key for key in keys[start : start + _SLICE] if key in self._known and self._known[key] & 1 != self._side
            ]
            for key in gone:
                del self._known[key]
            yield gone


class _Listener:
    """A thread that hears the kernel's events of one folder. A context: leaving it stops the thread."""

    def __init__(
        self,
        folder: str,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[set[tuple[watchfiles.Change, str]]], None],
        lost: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._loop = loop
        self._heard = heard
        self._lost = lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="coatcheck-watch", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()

    def _listen(self) -> None:
        # Not `awatch`: that one opens its watch, which may block for long, in the thread of the event loop.
        try:
            changes = watchfiles.watch(
                self._folder,
                watch_filter=None,
                debounce=50,
                step=10,
                rust_timeout=1000,
                stop_event=self._stop,
                raise_interrupt=False,
                force_polling=False,
                recursive=False,
            )
            for batch in changes:
                if self._stop.is_set():
                    return
                self._tell(self._heard, batch)
        except (OSError, RuntimeError) as error:
            # No such folder, no inotify instance left, or watchfiles' own: `alive` turns False, the follower looks.
            log.debug("%s: the listener ended: %s", self._folder, error)
        finally:
            self._tell(self._lost)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *args)


_Identity = tuple[int, int]
"""Device and inode."""


class _Folder(NamedTuple):
    identity: _Identity
    mtime_ns: int
    settled: bool
    """Its mtime is so old that any further change will show in it."""


class _StampPage:
    """The shared counters, mapped for reading. Written with `pwrite` only: on a full disk that is an error, where a
    store into a mapped page is SIGBUS. The file is never truncated, for the same reason."""

    SIZE = 8 * (STAMP_SLOTS + 1)
    """The last counter is there to prove that a write shows in the mapping."""

    def __init__(self, fd: int, identity: _Identity) -> None:
        self.identity = identity
        self._map = mmap.mmap(fd, self.SIZE, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._map)
        self.counters = self._bytes.cast("Q")

    def shows_writes(self, fd: int) -> bool:
        os.pwrite(fd, secrets.token_bytes(8), self.SIZE - 8)
        # Another process may write its own at the same time: asked of the file again.
        return any(self._bytes[self.SIZE - 8 :].tobytes() == os.pread(fd, 8, self.SIZE - 8) for _ in range(3))

    def close(self) -> None:
        self.counters.release()
        self._bytes.release()
        self._map.close()


class _Found(NamedTuple):
    value: ClaimValue
    revision: int
    expires_ns: int
    """By the file system's clock."""
    mark: int

    def is_same(self, claim: Claim) -> bool:
        return self.revision == claim.revision and self.value.nonce == claim.value.nonce


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a claim file, in JSON."""

    key: str
    revision: int
    value: ClaimValue


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)


class _NotYet(Exception):
    """Cannot be done at this moment, and nothing was done: worth trying again soon."""


class _Unreadable(Exception):
    def __init__(self, changed_ns: int) -> None:
        self._changed_ns = changed_ns

    def is_corrupt(self, now_ns: int) -> bool:
        """Both by the file system's clock."""
        return self._changed_ns + GRACE_S * 1e9 < now_ns


class _Clock:
    """The file system's clock, seen through this process's monotonic clock. Nanoseconds since 1970.

    Between two looks it is an estimate, behind the truth by a tick at most, and seldom ahead of it by more than 20 ms:
    what is decided for good (an expiry, a removal) uses the time that `learn` answers."""

    def __init__(self) -> None:
        self._learned = (0, 0)
        """When, by the monotonic clock, and how far the other is ahead of that. One object: many threads learn."""

    def learn(self, before_ns: int, given_ns: int) -> int:
        """`given_ns`: an mtime that the file system gave, later than `before_ns` of the monotonic clock."""
        after_ns = time.monotonic_ns()
        if after_ns - before_ns < 20_000_000 or self.age_s > 10:
            self._learned = (after_ns, given_ns - before_ns)
        return given_ns

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self._learned[0]) / 1e9

    def now_ns(self) -> int:
        return time.monotonic_ns() + self._learned[1]

    def monotonic_s(self, at_ns: int) -> float:
        return (at_ns - self._learned[1]) / 1e9


class _Disk:
    """Everything that touches the file system. Blocks, so it runs in the store's threads; safe in many at once.

    Works by path, not by folder handle: when the root is replaced, the next call is already in the new one."""

    def __init__(self, root: Path, *, shared: bool, sync: bool) -> None:
        self.root = str(root)
        self.claims = f"{self.root}/claims"
        self.shared = shared
        self._sync = sync
        self._temps = f"{self.root}/tmp"
        self._locks = f"{self.root}/locks"
        self._stamps = f"{self.root}/stamps"
        self._stamped = not shared
        self._clock = _Clock()
        self._prepared = False

    # Claims

    def create_or_get(self, step: _Step[Any], key: str, proposal: ClaimValue, ttl: float) -> tuple[_Found, bool]:
        """The claim that stands, and whether it is the proposal."""
        for _ in range(_CREATE_ATTEMPTS):
            try:
                found = self._read(key)
                if found is not None and found.expires_ns <= self._clock.now_ns():
                    found = self._bury(key)
            except _Unreadable:
                found = self._bury(key)
            if found is not None:
                return found, found.value.nonce == proposal.nonce
            made = self._make(step, key, proposal, ttl)
            if made is not None:
                return made, True
            # The name was taken meanwhile, or it is our own success reported twice (NFS): read it.
        raise StoreUnavailable(f"claim {key} kept coming and going")

    def get(self, key: str) -> _Found | None:
        try:
            found = self._read(key)
        except _Unreadable as unreadable:
            if unreadable.is_corrupt(self._clock.now_ns()):
                return None  # whoever creates next removes it
            raise _NotYet(f"claim {key} is unreadable") from None
        if found is None or found.expires_ns <= self._clock.now_ns():
            return None
        return found

    def renew(self, step: _Step[Any], claim: Claim, ttl: float) -> _Found:
        with self._locked(claim.key) as lock:
            found = self._judge(claim.key, lock)
            if found is None or not found.is_same(claim):
                raise ClaimLost(f"claim {claim.key} does not stand any more")
            expires_ns = max(found.expires_ns, _expiry(self._ask_time(lock), found.revision, ttl))
            step.commit()
            try:
                os.utime(self._path(claim.key), ns=(expires_ns, expires_ns), follow_symlinks=False)
            except FileNotFoundError:
                raise ClaimLost(f"claim {claim.key} was removed by hand") from None
            return found._replace(expires_ns=expires_ns)

    def close(self, step: _Step[Any], claim: Claim) -> CloseOutcome:
        with self._locked(claim.key) as lock:
            found = self._judge(claim.key, lock)
            if found is None:
                # Its remover may have been killed before it bumped the stamp.
                with self._bump(claim.key):
                    return CloseOutcome.GONE
            if not found.is_same(claim):
                return CloseOutcome.SUPERSEDED
            with self._bump(claim.key):
                step.commit()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(claim.key))
                step.applied = True
            return CloseOutcome.CLOSED

    def check(self, step: _Step[Any]) -> None:
        """One claim's way through the folder, under a name that nobody takes for a claim."""
        name = f"{self.claims}/{_OWN_PREFIX}check-{secrets.token_hex(8)}"
        record = _encoder.encode(_Record(key="", revision=1, value=ClaimValue(worker="check")))
        with self._locked("check"), self._written(record) as (temp, _):
            step.commit()
            try:
                os.link(temp, name)
            except PermissionError as error:  # EPERM is how a file system says that it has none
                raise OSError(error.errno, f"{error.strerror} (has this file system hard links?)", name) from None
            try:
                with open(name, "rb") as file:
                    if file.read() != record:
                        raise StoreUnavailable("a file does not read as it was written")
            finally:
                os.unlink(name)

    # Upkeep

    def surely_until(self, expires_ns: int) -> float:
        """By the monotonic clock."""
        return self._clock.monotonic_s(expires_ns) - _EXPIRY_MARGIN_S

    def prepare(self) -> None:
        """Makes what is missing of the layout. The root of a shared folder is never made, see above."""
        if not self.shared:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
        for folder in (self.claims, self._temps, self._locks):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, mode=0o700)
        # All locks now: on a full disk, claims can then still be closed.
        present = set(os.listdir(self._locks))
        for name in (f"{number:02x}" for number in range(256)):
            if name not in present:
                os.close(os.open(f"{self._locks}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._prepared = True

    def look(self) -> _Folder:
        # Opened, not just asked: NFS answers a plain stat from its cache.
        try:
            fd = os.open(self.claims, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._heal()
            fd = os.open(self.claims, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        settled = status.st_mtime_ns + _COARSE_MTIME_NS < self._clock.now_ns()
        return _Folder((status.st_dev, status.st_ino), status.st_mtime_ns, settled)

    def names(self) -> list[str]:
        try:
            return os.listdir(self.claims)
        except FileNotFoundError:
            self._heal()
            return []

    def tend(self, names: list[str]) -> list[tuple[str, int]]:
        """Removes what has expired. Answers what stands: keys with their marks."""
        standing = []
        for name in names:
            path = f"{self.claims}/{name}"
            try:
                status = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if _KEY.fullmatch(name):
                if status.st_mtime_ns > self._clock.now_ns():
                    standing.append((name, _mark(status)))
                    continue
                # What is locked, or a folder, or somebody else's, is left for the next walk.
                with contextlib.suppress(_NotYet, OSError):
                    self._bury(name)
            elif name.startswith(_OWN_PREFIX) and self._is_stale(status):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        return standing

    def remove_stale_temps(self) -> None:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._temps) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if self._is_stale(entry.stat(follow_symlinks=False)):
                        os.unlink(entry.path)

    def stir(self) -> None:
        """Makes an event in the watched folder that changes nothing, not even its mtime, and needs no space."""
        os.chmod(self.claims, stat.S_IMODE(os.stat(self.claims).st_mode))

    def map_stamps(self, mapped: _Identity | None) -> _StampPage | None:
        """A new page when the one that is mapped is not the one in the folder any more, else None."""
        if self._clock.age_s > 10:
            with contextlib.suppress(_NotYet), self._locked("time") as lock:
                self._ask_time(lock)
        if not self._stamped:
            return None
        with self._stamp_file() as fd:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == mapped:
                return None
            # Mapped through a descriptor for reading: one for writing would forbid to remount the disk read-only.
            reading = os.open(self._stamps, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not os.path.samestat(os.fstat(reading), status):
                    raise _NotYet("the stamp file was replaced")
                page = _StampPage(reading, (status.st_dev, status.st_ino))
            finally:
                os.close(reading)
            if not page.shows_writes(fd):
                log.warning("%s: mapped files do not show writes here: working without stamps", self.root)
                self._stamped = False
                page.close()
                return None
            return page

    # Below: the pieces

    def _path(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a claim key: 40 to 64 lower-case hex digits")
        return f"{self.claims}/{key}"

    def _read(self, key: str) -> _Found | None:
        """What is there, expired or not. Raises _Unreadable."""
        path = self._path(key)
        try:
            # O_NONBLOCK: somebody's named pipe must not hold us up.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:
                return None
            if error.errno == errno.ELOOP:
                raise _Unreadable(os.lstat(path).st_ctime_ns) from None
            raise
        try:
            status = os.fstat(fd)
            raw = os.read(fd, _MAX_CLAIM_BYTES)
        except OSError as error:
            if error.errno == errno.ESTALE:
                return None
            raise
        finally:
            os.close(fd)
        try:
            record = _decoder.decode(raw)
        except ValueError:
            raise _Unreadable(status.st_ctime_ns) from None
        if record.key != key or not stat.S_ISREG(status.st_mode):
            raise _Unreadable(status.st_ctime_ns)
        return _Found(record.value, record.revision, status.st_mtime_ns, _mark(status))

    def _make(self, step: _Step[Any], key: str, value: ClaimValue, ttl: float) -> _Found | None:
        """None when the name was taken."""
        revision = secrets.randbits(62) + 1
        record = _encoder.encode(_Record(key=key, revision=revision, value=value))
        with self._written(record, lambda now_ns: _expiry(now_ns, revision, ttl)) as (temp, status):
            step.commit()
            try:
                os.link(temp, self._path(key))
            except FileExistsError:
                return None
            except FileNotFoundError:
                self._heal()  # the root went away under us
                return None
            return _Found(value, revision, status.st_mtime_ns, _mark(status))

    @contextlib.contextmanager
    def _written(
        self, content: bytes, expires_ns: Callable[[int], int] | None = None, *, sync: bool = True
    ) -> Iterator[tuple[str, os.stat_result]]:
        """A complete temporary file, until the end of the context. `expires_ns`: from the time now to its expiry."""
        temp = f"{self._temps}/{secrets.token_hex(12)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        before_ns = time.monotonic_ns()
        try:
            fd = os.open(temp, flags, 0o600)
        except FileNotFoundError:
            self._heal()
            before_ns = time.monotonic_ns()
            fd = os.open(temp, flags, 0o600)
        try:
            try:
                now_ns = self._clock.learn(before_ns, os.fstat(fd).st_mtime_ns)
                written = 0
                while written < len(content):
                    written += os.write(fd, content[written:])
                if expires_ns is not None:
                    at_ns = expires_ns(now_ns)
                    os.utime(fd, ns=(at_ns, at_ns))
                if sync and self._sync:
                    os.fsync(fd)
                status = os.fstat(fd)
            finally:
                os.close(fd)
            yield temp, status
        finally:
            with contextlib.suppress(OSError):  # what stays is removed when it is stale
                os.unlink(temp)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[int]:
        """Holds the lock of the key. Raises _NotYet when another thread or process does. Freed when we die."""
        path = f"{self._locks}/{key[:2]}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._heal()
            fd = os.open(path, flags, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _NotYet(f"the lock {key[:2]} is held by another process") from None
            try:
                if not _is_at(path, fd):
                    raise _NotYet(f"the lock {key[:2]} was replaced")
                yield fd
            finally:
                # Unlocked, not only closed: a child that was forked meanwhile may have a copy of the descriptor.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _judge(self, key: str, lock: int) -> _Found | None:
        """The claim that stands. Removes what does not. To be called with the key's lock."""
        try:
            found = self._read(key)
        except _Unreadable as unreadable:
            if not unreadable.is_corrupt(self._ask_time(lock)):
                raise _NotYet(f"claim {key} is unreadable") from None
            log.warning("%s: removing claim %s: its file is unreadable", self.root, key)
        else:
            if found is None or found.expires_ns > self._clock.now_ns():
                return found
            if found.expires_ns > self._ask_time(lock):
                return found
        with self._bump(key), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))
        return None

    def _bury(self, key: str) -> _Found | None:
        with self._locked(key) as lock:
            return self._judge(key, lock)

    def _ask_time(self, lock: int) -> int:
        before_ns = time.monotonic_ns()
        os.utime(lock)
        return self._clock.learn(before_ns, os.fstat(lock).st_mtime_ns)

    def _is_stale(self, status: os.stat_result) -> bool:
        return status.st_ctime_ns + STALE_S * 1e9 < self._clock.now_ns()

    def _heal(self) -> None:
        if self.shared and self._prepared:
            raise FileNotFoundError(errno.ENOENT, "the folder is gone; is the share mounted?", self.root)
        self.prepare()

    @contextlib.contextmanager
    def _bump(self, key: str) -> Iterator[None]:
        """Bumps the key's stamp after the body, to be called with the key's lock. Not possible: the body is not run."""
        if self.shared:
            yield
            return
        # Also where this process has no use for stamps: another may have.
        with self._stamp_file() as fd:
            yield
            _add_one(fd, 8 * int(key[:4], 16))

    @contextlib.contextmanager
    def _stamp_file(self) -> Iterator[int]:
        """The stamp file's descriptor; opened by path each time, so that it is the one that readers will map."""
        try:
            fd = os.open(self._stamps, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = self._make_stamp_file()
        try:
            if os.fstat(fd).st_size != _StampPage.SIZE:
                os.close(fd)
                fd = -1
                fd = self._make_stamp_file()
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)

    def _make_stamp_file(self) -> int:
        """Starts from a random number, so that no stamp of an earlier file can match."""
        content = secrets.token_bytes(8) * (STAMP_SLOTS + 1)
        # The lock of the whole file: two that find it broken must not remove each other's new one.
        with self._locked("stamps"):
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._stamps).st_size != _StampPage.SIZE:
                    os.unlink(self._stamps)
            with self._written(content, sync=False) as (temp, _), contextlib.suppress(FileExistsError):
                os.link(temp, self._stamps)
            return os.open(self._stamps, os.O_RDWR | os.O_CLOEXEC)


def _expiry(now_ns: int, revision: int, ttl: float) -> int:
    """LIFETIME x ttl from now, less up to 2 ms so that its last six digits can be the revision's (see `_mark`)."""
    at_ns = now_ns + int(LIFETIME * ttl * 1e9) - _MARK_NS
    return at_ns - at_ns % _MARK_NS + revision % _MARK_NS


def _mark(status: os.stat_result) -> int:
    """Differs between the claims of a key and is the same for one claim, renewed or not. Found without reading the
    file: the inode (which may be used again) and those digits of the expiry that are the revision's (see `_expiry`)."""
    return status.st_ino * _MARK_NS + status.st_mtime_ns % _MARK_NS


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _add_one(fd: int, offset: int) -> None:
    counter = int.from_bytes(os.pread(fd, 8, offset), sys.byteorder)
    os.pwrite(fd, ((counter + 1) % (1 << 64)).to_bytes(8, sys.byteorder), offset)


class _Step(Generic[T]):
    """One piece of blocking work. Knows how far its write has come, so that it can say what is known of it."""

    def __init__(self, work: Callable[[_Step[T]], T], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.future: asyncio.Future[T] = loop.create_future()
        self.applied = False
        self._loop = loop
        self._begun = False
        self._abandoned = False
        self._deciding = threading.Lock()

    # In the thread

    def commit(self) -> None:
        """To be called before the first change that others can see. Does not return if the caller has given up."""
        with self._deciding:
            if self._abandoned:
                raise _NotYet("given up")
            self._begun = True

    def run(self) -> None:
        if self._abandoned:
            return
        try:
            result = self.work(self)
        except BaseException as error:  # raised to whoever awaits the future
            self._tell(self._fail, error)
        else:
            self._tell(self._finish, result)

    def _tell(self, callback: Callable[[Any], None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, argument)

    # In the event loop

    def _finish(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def abandon(self) -> None:
        with self._deciding:
            self._abandoned = True

    def give_up(self) -> None:
        self.abandon()
        self._fail(TimeoutError(errno.ETIMEDOUT, "no answer within the deadline"))

    def verdict(self, error: OSError) -> StoreError:
        what = error.strerror or str(error)
        if self.applied or (self._begun and error.errno not in _REFUSED):
            return OutcomeUnknown(what)
        return StoreUnavailable(what)


class _Threads:
    """Threads for blocking work. Not a ThreadPoolExecutor: one hung thread of that blocks the exit of the process, and
    a hop through it costs half as much again."""

    def __init__(self, count: int) -> None:
        self._queue: queue.SimpleQueue[_Step[Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"coatcheck-file-{n}", daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, step: _Step[Any]) -> None:
        self._queue.put(step)

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """After what was submitted. A thread that hangs is left behind: it is a daemon."""
        for _ in self._threads:
            self._queue.put(None)

    def _serve(self) -> None:
        while (step := self._queue.get()) is not None:
            step.run()
            del step  # an idle thread keeps nothing alive
