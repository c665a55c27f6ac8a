"""Everything that touches the file system. Blocks, so it runs in the store's threads; safe in many at once::

    claims/<key>   one claim (`claims` has what it looks like)
    tmp/           files on their way to their names, and folders on their way out
    locks/<xx>     a lock for all keys that begin with xx (not to be removed while a router runs)
    registry/      the records beside the claims, see `registry`; theirs are the locks r0 to rf
    stamps         which page of this machine's memory the folder's stamps are on (`stamps`)

*Age* is judged by the file system's clock alone (read from the mtime that it gives to files), never by the host's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from backends.file.threads import NotYet

STALE_S = 60.0
"""The age at which leftovers of dead processes (temporary files, probes) are removed."""

_EXPIRY_MARGIN_S = 0.02  # file times come from a clock that ticks every few milliseconds
_COARSE_MTIME_NS = 2_000_000_000  # some file systems count in seconds or two
_LEARN_EVERY_NS = 5_000_000_000
_OLD_NS = 10_000_000_000


class Clock:
    """The file system's clock, seen through this process's monotonic clock. Nanoseconds since 1970.

    Between two looks it is an estimate, behind the truth by a tick at most, and seldom ahead of it by more than 20 ms:
    what is decided for good (an expiry, a removal) uses the time that `learn` answers."""

    def __init__(self) -> None:
        self._learned = (0, 0)
        """When, by the monotonic clock, and how far the other is ahead of that. One object: many threads learn."""

    def learn(self, before_ns: int, given_ns: int) -> int:
        """`given_ns`: an mtime that the file system gave, later than `before_ns` of the monotonic clock."""
        after_ns = time.monotonic_ns()
        if after_ns - before_ns < 20_000_000 or self.is_old:
            self._learned = (after_ns, given_ns - before_ns)
        return given_ns

    @property
    def is_old(self) -> bool:
        """Nothing may be decided by the estimate."""
        return time.monotonic_ns() > self._learned[0] + _OLD_NS

    @property
    def is_due(self) -> bool:
        """It is to be learned again before it is old."""
        return time.monotonic_ns() > self._learned[0] + _LEARN_EVERY_NS

    def now_ns(self) -> int:
        return time.monotonic_ns() + self._learned[1]

    def surely_until(self, expires_ns: int) -> float:
        """By the monotonic clock, in seconds."""
        return (expires_ns - self._learned[1]) / 1e9 - _EXPIRY_MARGIN_S


class Disk:
    """The folder with its layout, temporary files, locks and clock.

    Works by path, not by folder handle: when the root is replaced, the next call is already in the new one."""

    def __init__(self, root: Path, *, shared: bool, sync: bool) -> None:
        self.root = str(root)
        self.claims = f"{self.root}/claims"
        self.records = f"{self.root}/registry"
        self.shared = shared
        self.clock = Clock()
        self._sync = sync
        self._temps = f"{self.root}/tmp"
        self._locks = f"{self.root}/locks"
        self._prepared = False
        self.owner: tuple[int, int] | None = None
        """Whose (user and group) all that is made here has to be, where we are root in somebody else's folder: else
        that one's own replica could neither lock nor renew it."""

    def prepare(self) -> None:
        """Makes what is missing of the layout. The root of a shared folder is never made (see `store`)."""
        if not self.shared:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
        root = os.stat(self.root)
        self.owner = (root.st_uid, root.st_gid) if os.geteuid() == 0 != root.st_uid else None
        for folder in (self.claims, self.records, self._temps, self._locks):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, mode=0o700)
                self.give(folder)
        # All locks now: on a full disk, claims can then still be closed.
        locks = {f"{number:02x}" for number in range(256)} | {f"r{number:x}" for number in range(16)}
        for name in locks.difference(os.listdir(self._locks)):
            os.close(self._made(f"{self._locks}/{name}", os.O_WRONLY | os.O_CREAT))
        self._prepared = True

    def heal(self) -> None:
        """What was there is missing: somebody has removed or replaced the root."""
        if self.shared and self._prepared:
            raise FileNotFoundError(errno.ENOENT, "the folder is gone; is the share mounted?", self.root)
        self.prepare()

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[int]:
        """Holds the lock of the key. Raises NotYet when another thread or process does. Freed when we die."""
        path = f"{self._locks}/{key[:2]}"
        with Opened(self._open(path, os.O_RDWR | os.O_CREAT)) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotYet(f"the lock {key[:2]} is held by another process") from None
            try:
                if not is_at(path, fd):
                    raise NotYet(f"the lock {key[:2]} was replaced")
                yield fd
            finally:
                # Unlocked, not only closed: a child that was forked meanwhile may have a copy of the descriptor.
                fcntl.flock(fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def written(
        self, content: bytes, expires_ns: Callable[[int], int] = int, *, sync: bool = True
    ) -> Iterator[tuple[str, os.stat_result]]:
        """A complete temporary file, until the end of the context. `expires_ns`: from the time now to its expiry;
        `sync`: where the store syncs at all."""
        temp = f"{self._temps}/{secrets.token_hex(12)}"
        before_ns = time.monotonic_ns()
        fd = self._open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with Opened(fd):
                now_ns = self.clock.learn(before_ns, os.fstat(fd).st_mtime_ns)
                written = 0
                while written < len(content):
                    written += os.write(fd, content[written:])
                os.utime(fd, ns=(expires_ns(now_ns),) * 2)
                if self._sync and sync:
                    os.fsync(fd)
                status = os.fstat(fd)
            yield temp, status
        finally:
            with contextlib.suppress(OSError):  # what stays is removed when it is stale
                os.unlink(temp)

    def ask_time(self, lock: int) -> int:
        before_ns = time.monotonic_ns()
        os.utime(lock)
        return self.clock.learn(before_ns, os.fstat(lock).st_mtime_ns)

    def keep_time(self) -> None:
        if self.clock.is_due:
            with contextlib.suppress(NotYet):
                self.learn_time()

    def learn_time(self) -> None:
        with self.locked("time") as lock:
            self.ask_time(lock)

    def look(self) -> os.stat_result:
        """The claims folder. Opened, not just asked: NFS answers a plain stat from its cache."""
        with Opened(self._open(self.claims, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            return os.fstat(fd)

    def is_settled(self, looked: os.stat_result) -> bool:
        """Its mtime is so old that any further change will show in it."""
        return looked.st_mtime_ns + _COARSE_MTIME_NS < self.clock.now_ns()

    def names(self) -> list[str]:
        with Opened(self._open(self.claims, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            return os.listdir(fd)

    def stir(self) -> None:
        """Makes an event in the watched folder that changes nothing, not even its mtime, and needs no space."""
        os.chmod(self.claims, stat.S_IMODE(os.stat(self.claims).st_mode))

    def remove_stale_temps(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the root went away meanwhile
            for name in os.listdir(self._temps):
                self.remove_stale(f"{self._temps}/{name}")

    def remove_stale(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if status.st_ctime_ns + STALE_S * 1e9 < self.clock.now_ns():
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)

    def remove(self, path: str) -> None:
        """Whatever it is. A folder's name is free at once; what is in it goes then."""
        try:
            os.unlink(path)
        except (IsADirectoryError, PermissionError):  # which of them is the system's to choose
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise
            aside = f"{self._temps}/{secrets.token_hex(12)}"
            os.rename(path, aside)
            shutil.rmtree(aside, ignore_errors=True)

    def give(self, path: str) -> None:
        """What was just made, to whom the folder belongs."""
        if self.owner is not None:
            os.chown(path, *self.owner, follow_symlinks=False)

    def _open(self, path: str, flags: int) -> int:
        try:
            return self._made(path, flags)
        except FileNotFoundError:
            self.heal()
            return self._made(path, flags)

    def _made(self, path: str, flags: int) -> int:
        fd = os.open(path, flags, 0o600)
        if self.owner is not None and flags & os.O_CREAT:
            os.fchown(fd, *self.owner)
        return fd


def is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


class Opened:
    """A descriptor, closed at the end of the context. A generator would cost a read a tenth more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)
