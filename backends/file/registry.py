"""Records beside the claims, in a folder::

    registry/<kind>/<hash of the name>   a line of JSON that says whose it is, and then the value as it was put

Promises what the claims do (see `store`), on one host and on several. Older versions neither look there nor remove it.

*Put*: write a file in `tmp/`, rename it over the old one: readers see one of the two, whole. *Remove, expire*: unlink.
Each holds the lock of the name, so a write that hangs in the kernel cannot land after a later one. *Age* is judged by
the file system's clock: the file's mtime is when the record ends, unless the line says that it is lasting.

What is no record at all (another name, a folder, a file cut short, somebody's notes) is ignored and left alone. A
record that cannot be *read*, for lack of permission or because the disk fails, fails the whole `list` and ends the
watch: the fleet must not shrink because a disk fails.

A watch looks at every record of its kind each second: there are few, and no kernel hears of another host's changes. It
hears of this process's own at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec

from backends.base import Reset, StoreError
from backends.fanout import FanOut
from backends.file.disk import Disk, Opened
from backends.file.threads import NotYet, Step, Threads
from backends.registry import (
    MAX_VALUE,
    Put,
    RegistryChange,
    RegistryEvent,
    Removed,
    by_name,
    check_kind,
    check_name,
    check_record,
)

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_STRETCH = 1.1  # between 1 and LIFETIME: our estimate of the file system's clock may err to both sides
_FILE = re.compile(r"[0-9a-f]{40}")
_MAX_BYTES = MAX_VALUE + 1024
_READ_ATTEMPTS = 4
_MARK_NS = 1_000_000


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a record's file, in JSON. Readers ignore fields they do not know."""

    kind: str
    name: str
    size: int
    """Of the value, in bytes."""
    lasting: bool
    version: int = 1


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Header)


class Record(NamedTuple):
    name: str
    value: bytes
    ends_ns: int | None
    """By the file system's clock; None: it is lasting."""

    def stands(self, now_ns: int) -> bool:
        return self.ends_ns is None or self.ends_ns > now_ns


Seen = dict[str, tuple[tuple[int, ...], Record | None]]
"""By file: its mark, and what it was found to be."""


class Records:
    """The files. Blocks: for the store's threads."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def put(self, step: Step[Any], kind: str, name: str, value: bytes, ttl: float | None) -> None:
        line = _encoder.encode(_Header(kind=kind, name=name, size=len(value), lasting=ttl is None))
        file = _file(name)

        def ends_ns(now_ns: int) -> int:
            return now_ns + int((ttl or 0.0) * _STRETCH * 1e9) + secrets.randbelow(_MARK_NS)

        with (
            self._disk.locked(_lock(file)),
            # What ends by itself is put again soon, and after a power failure a torn file is no record.
            self._disk.written(line + b"\n" + value, ends_ns, sync=ttl is None) as (temp, _),
        ):
            self._prepare(kind)
            step.commit()
            os.replace(temp, f"{self._disk.records}/{kind}/{file}")
            step.applied = True

    def remove(self, step: Step[Any], kind: str, name: str) -> None:
        file = _file(name)
        with self._disk.locked(_lock(file)):
            step.commit()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._disk.records}/{kind}/{file}")
            step.applied = True

    def list(self, kind: str, seen: Seen) -> dict[str, bytes]:
        """`seen`: what the last list found, and now what this one does; what has not changed is not read again."""
        self._disk.look()  # a share that is not mounted must not look like one without records
        now_ns = self._disk.clock.now_ns()
        files = self._files(kind)
        for gone in seen.keys() - files:
            del seen[gone]
        records = [self._look(kind, file, seen) for file in files]
        return {record.name: record.value for record in records if record is not None and record.stands(now_ns)}

    def sweep(self) -> None:
        """Removes what has expired, of every kind."""
        with contextlib.suppress(FileNotFoundError):
            for kind in os.listdir(self._disk.records):
                with contextlib.suppress(ValueError, NotADirectoryError):
                    check_kind(kind)
                    for file in self._files(kind):
                        self._sweep(kind, file)

    def _sweep(self, kind: str, file: str) -> None:
        # What is locked, or cannot be read, is left for the next time.
        with contextlib.suppress(NotYet, OSError):
            record = self._read(kind, file)
            if record is None or record.stands(self._disk.clock.now_ns()):
                return
            with self._disk.locked(_lock(file)) as lock:
                record = self._read(kind, file)
                if record is not None and not record.stands(self._disk.ask_time(lock)):
                    os.unlink(f"{self._disk.records}/{kind}/{file}")

    def _prepare(self, kind: str) -> None:
        for folder in (self._disk.records, f"{self._disk.records}/{kind}"):  # and never the root (see `Disk.heal`)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, mode=0o700)
                self._disk.give(folder)

    def _files(self, kind: str) -> set[str]:
        folder = f"{self._disk.records}/{kind}"
        try:
            # Twice: on btrfs and tmpfs a name that is renamed over may be passed over by one reading of a long folder.
            names = {*os.listdir(folder), *os.listdir(folder)}
        except FileNotFoundError:
            return set()
        return {name for name in names if _FILE.fullmatch(name)}

    def _look(self, kind: str, file: str, seen: Seen) -> Record | None:
        if self._disk.shared:  # NFS answers a stat from its cache
            return self._read(kind, file)
        try:
            status = os.stat(f"{self._disk.records}/{kind}/{file}", follow_symlinks=False)
        except FileNotFoundError:
            return None
        mark = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        known = seen.get(file)
        # An inode is soon used again and a clock's tick is long, but the last digits of the mtime are chance, where the
        # file system keeps them.
        if known is None or known[0] != mark or status.st_mtime_ns % _MARK_NS == 0:
            known = seen[file] = mark, self._read(kind, file)
        return known[1]

    def _read(self, kind: str, file: str) -> Record | None:
        """None: it is not there, or no record."""
        path = f"{self._disk.records}/{kind}/{file}"
        for attempt in range(_READ_ATTEMPTS):
            try:
                # O_NONBLOCK: somebody's named pipe must not hold us up.
                with Opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as fd:
                    status = os.fstat(fd)
                    if not stat.S_ISREG(status.st_mode):
                        return None
                    raw, size = b"", min(status.st_size, _MAX_BYTES)
                    while len(raw) < size and (more := os.read(fd, size - len(raw))):
                        raw += more
                    return _decode(kind, file, raw, status.st_mtime_ns)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                    return None
                if error.errno != errno.ESTALE or attempt == _READ_ATTEMPTS - 1:
                    raise
                # Replaced under us by another host: there is a newer one.
        raise AssertionError("unreachable")


def _decode(kind: str, file: str, raw: bytes, mtime_ns: int) -> Record | None:
    line, _, value = raw.partition(b"\n")
    try:
        header = _decoder.decode(line)
        check_name(header.kind, header.name)
    except ValueError:
        return None
    if (header.kind, _file(header.name), header.size) != (kind, file, len(value)):
        return None
    return Record(header.name, value, None if header.lasting else mtime_ns)


def _file(name: str) -> str:
    """A name may hold what no file name can, and be too long for one in hex."""
    return hashlib.blake2b(name.encode(), digest_size=20).hexdigest()


def _lock(file: str) -> str:
    """None of the claims': they never wait for us."""
    return f"r{file[0]}"


class FileRegistry:
    """See `backends.registry` for the contract."""

    def __init__(self, disk: Disk, threads: Threads) -> None:
        self._records = Records(disk)
        self._threads = threads
        self._followers: dict[str, _Follower] = {}
        """By kind, for those that somebody watches."""

    async def put(self, kind: str, name: str, value: bytes, ttl: float | None) -> None:
        check_record(kind, name, value, ttl)
        await self._threads.run(lambda step: self._records.put(step, kind, name, value, ttl))
        self._nudge(kind)

    async def remove(self, kind: str, name: str) -> None:
        check_name(kind, name)
        await self._threads.run(lambda step: self._records.remove(step, kind, name))
        self._nudge(kind)

    async def list(self, kind: str) -> dict[str, bytes]:
        return await self.look(kind, {})

    async def look(self, kind: str, seen: Seen) -> dict[str, bytes]:
        """As `list`, for who looks again and again with the same `seen`, which is to be his alone."""
        check_kind(kind)
        return await self._threads.run(lambda _: self._records.list(kind, seen))

    def watch(self, kind: str) -> AsyncIterator[RegistryEvent]:
        check_kind(kind)
        return self._watch(kind)

    async def sweep(self) -> None:
        """Removes what has expired; to be called now and then. Raises StoreUnavailable."""
        await self._threads.run(lambda _: self._records.sweep())

    async def aclose(self) -> None:
        followers = tuple(self._followers.values())
        for follower in followers:
            follower.watchers.end()
            follower.stop()
        if followers:
            await asyncio.wait({follower.task for follower in followers})

    async def _watch(self, kind: str) -> AsyncIterator[RegistryEvent]:
        follower = self._followers.get(kind)
        if follower is None:
            follower = self._followers[kind] = _Follower(self, kind)
        mailbox = follower.watchers.join()
        try:
            if follower.stands:
                mailbox.put(Reset())
            async for event in mailbox:
                yield event
        finally:
            # Nothing is awaited here: the last one out only tells the follower to stop.
            follower.watchers.leave(mailbox)
            if not follower.watchers:
                follower.stop()
                self.forget(follower)

    def forget(self, follower: _Follower) -> None:
        if self._followers.get(follower.kind) is follower:
            del self._followers[follower.kind]

    def _nudge(self, kind: str) -> None:
        if kind in self._followers:
            self._followers[kind].nudged.set()


class _Follower:
    """Looks at one kind for all who watch it, from the first one's coming to the last one's leaving, or until it cannot
    be looked at."""

    def __init__(self, registry: FileRegistry, kind: str) -> None:
        self.kind = kind
        self.watchers: FanOut[RegistryChange] = FanOut(subject=by_name)
        self.stands = False
        """It has looked once, and said Reset."""
        self.nudged = asyncio.Event()
        """Set when there is something new."""
        self._registry = registry
        self.task = asyncio.create_task(self._follow())

    def stop(self) -> None:
        self.task.cancel()

    async def _follow(self) -> None:
        try:
            seen: Seen = {}
            known = await self._registry.look(self.kind, seen)
            self.stands = True
            self.watchers.publish(Reset())
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self.nudged.wait()
                self.nudged.clear()
                found = await self._registry.look(self.kind, seen)
                for name in known.keys() - found.keys():
                    self.watchers.publish(Removed(name))
                for name, value in found.items():
                    if known.get(name) != value:
                        self.watchers.publish(Put(name, value))
                known = found
        except Exception as error:  # whatever it is: who watches is told, the watch never falls silent
            if not isinstance(error, StoreError):
                log.exception("the watch of %s failed", self.kind)
            self._registry.forget(self)
            self.watchers.end(str(error))
