"""Everything that touches the file system. Blocks, so it runs in the store's threads; safe in many at once::

    claims/<key>   one immutable file per claim (revision and value); its mtime is the instant at which it expires
    tmp/           files on their way to claims/
    locks/<xx>     a lock for all keys that begin with xx (not to be removed while a router runs)
    registry/      the records beside the claims, see `registry`; theirs are the locks r0 to rf
    stamps         65,536 counters, one for all keys with the same first four digits (not to be truncated: it is mapped)

*Create*: write a file in `tmp/`, `link` it to its name. The link is complete or absent, and fails if the name is taken.
*Close, expire, renew*: only while holding the key's lock, after reading the claim again. Creation never replaces and
only holders of the lock remove, so comparing and unlinking is one step, even if the process is frozen in between.
*Age* is judged by the file system's clock alone (read from the mtime that it gives to files), never by the host's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.base import LIFETIME, Claim, ClaimLost, ClaimValue, CloseOutcome, StoreUnavailable
from backends.file.threads import NotYet, Step

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long an unreadable claim file is left alone, in case somebody is still copying it there."""
STALE_S = 60.0
"""The age at which leftovers of dead processes (temporary files, probes) are removed."""
KEY = re.compile(r"[0-9a-f]{40,64}")

_OWN_PREFIX = ".coatcheck-"
_MAX_CLAIM_BYTES = 1 << 16
_CREATE_ATTEMPTS = 8
_MARK_NS = 1_000_000
_EXPIRY_MARGIN_S = 0.02  # file times come from a clock that ticks every few milliseconds
_COARSE_MTIME_NS = 2_000_000_000  # some file systems count in seconds or two
_STAMPS = 1 << 16
_STAMPS_BYTES = 8 * (_STAMPS + 1)  # the last one is there to prove that a write shows in the mapping


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
        return time.monotonic_ns() > self._learned[0] + 10_000_000_000

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

    def prepare(self) -> None:
        """Makes what is missing of the layout. The root of a shared folder is never made (see `store`)."""
        if not self.shared:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
        for folder in (self.claims, self.records, self._temps, self._locks):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, mode=0o700)
        # All locks now: on a full disk, claims can then still be closed.
        locks = {f"{number:02x}" for number in range(256)} | {f"r{number:x}" for number in range(16)}
        for name in locks.difference(os.listdir(self._locks)):
            os.close(os.open(f"{self._locks}/{name}", os.O_WRONLY | os.O_CREAT, 0o600))
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
                if not _is_at(path, fd):
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
        if self.clock.is_old:
            with contextlib.suppress(NotYet), self.locked("time") as lock:
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
            if os.lstat(path).st_ctime_ns + STALE_S * 1e9 < self.clock.now_ns():
                os.unlink(path)

    def _open(self, path: str, flags: int) -> int:
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self.heal()
            return os.open(path, flags, 0o600)


class _Page(NamedTuple):
    file: os.stat_result
    counters: memoryview


class Stamps:
    """The shared counters, mapped for reading. Written with `pwrite` only: on a full disk that is an error, where a
    store into a mapped page is SIGBUS. The file is never truncated, for the same reason."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._path = f"{disk.root}/stamps"
        self._page: _Page | None = None
        """Never closed, only let go: another thread may be reading it."""
        self._usable = not disk.shared

    def read(self, key: str) -> int:
        """For the event loop: makes no I/O. 0: there are no stamps."""
        page = self._page
        return 0 if page is None else page.counters[int(key[:4], 16)]

    def map(self) -> None:
        """Maps the file that is in the folder now, unless it is mapped already."""
        if not self._usable:
            return
        with Opened(self._file()) as fd:
            status = os.fstat(fd)
            if self._page is not None and os.path.samestat(self._page.file, status):
                return
            # Mapped through a descriptor for reading: one for writing would forbid to remount the disk read-only.
            with Opened(os.open(self._path, os.O_RDONLY)) as reading:
                if status.st_size != _STAMPS_BYTES or not os.path.samestat(os.fstat(reading), status):
                    raise NotYet("the stamp file was replaced")
                counters = memoryview(mmap.mmap(reading, _STAMPS_BYTES, prot=mmap.PROT_READ)).cast("Q")
            os.pwrite(fd, secrets.token_bytes(8), 8 * _STAMPS)
            # Another process may write its own at the same time: asked of the file again.
            if any(counters[_STAMPS:].tobytes() == os.pread(fd, 8, 8 * _STAMPS) for _ in range(3)):
                self._page = _Page(status, counters)
            else:
                log.warning("%s: mapped files do not show writes here: working without stamps", self._disk.root)
                self._usable, self._page = False, None

    def unmap(self) -> None:
        self._page = None

    @contextlib.contextmanager
    def bumped(self, key: str) -> Iterator[None]:
        """Bumps the key's stamp after the body, to be called with the key's lock. Not possible: the body is not run."""
        if self._disk.shared:
            yield
            return
        # Also where this process has no use for stamps: another may have.
        with Opened(self._file()) as fd:
            yield
            offset = 8 * int(key[:4], 16)
            counter = int.from_bytes(os.pread(fd, 8, offset), sys.byteorder)
            os.pwrite(fd, ((counter + 1) % (1 << 64)).to_bytes(8, sys.byteorder), offset)

    def _file(self) -> int:
        """Opened by path each time, so that it is the one that readers will map. Made where there is none."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_size == _STAMPS_BYTES:
                return os.open(self._path, os.O_RDWR)
        # The lock of the whole file: two that find it broken must not remove each other's new one.
        with self._disk.locked("stamps"):
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_size != _STAMPS_BYTES:
                    os.unlink(self._path)
            # From a random number on, so that no stamp of an earlier file can match.
            content = secrets.token_bytes(8) * (_STAMPS + 1)
            with self._disk.written(content) as (temp, _), contextlib.suppress(FileExistsError):
                os.link(temp, self._path)
            return os.open(self._path, os.O_RDWR)


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a claim file, in JSON."""

    key: str
    revision: int
    value: ClaimValue


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)
_UNREADABLE = ClaimValue(worker="", nonce="")


class Found(NamedTuple):
    """A claim as its file has it. One that cannot be read expires after a grace."""

    value: ClaimValue
    revision: int
    expires_ns: int
    """By the file system's clock."""
    mark: int

    def is_same(self, claim: Claim) -> bool:
        return self.revision == claim.revision and self.value.nonce == claim.value.nonce

    def stands(self, now_ns: int) -> bool:
        if self.expires_ns > now_ns and self.value is _UNREADABLE:
            raise NotYet("the claim's file is unreadable")
        return self.expires_ns > now_ns


class Claims:
    """The claim files. Nobody else makes, changes or removes one."""

    def __init__(self, disk: Disk, stamps: Stamps) -> None:
        self._disk = disk
        self._stamps = stamps

    def create_or_get(self, step: Step[Any], key: str, proposal: ClaimValue, ttl: float) -> tuple[Found, bool]:
        """The claim that stands, and whether it is the proposal."""
        for _ in range(_CREATE_ATTEMPTS):
            found = self._read(key)
            if found is not None and not found.stands(self._disk.clock.now_ns()):
                found = self._bury(key)
            if found is not None:
                return found, found.value.nonce == proposal.nonce
            revision = secrets.randbits(62) + 1
            record = _encoder.encode(_Record(key=key, revision=revision, value=proposal))
            with self._disk.written(record, lambda now_ns: _expiry(now_ns, revision, ttl)) as (temp, status):  # noqa: B023
                step.commit()
                try:
                    os.link(temp, self._path(key))
                    return Found(proposal, revision, status.st_mtime_ns, _mark(status)), True
                except FileExistsError:
                    pass  # taken meanwhile, or our own success reported twice (NFS): read it
                except FileNotFoundError:
                    self._disk.heal()  # the root went away under us
        raise StoreUnavailable(f"claim {key} kept coming and going")

    def get(self, key: str) -> Found | None:
        """What nobody can read is not there: whoever creates next removes it."""
        found = self._read(key)
        return found if found is not None and found.stands(self._disk.clock.now_ns()) else None

    def renew(self, step: Step[Any], claim: Claim, ttl: float) -> Found:
        with self._disk.locked(claim.key) as lock:
            found = self._judge(claim.key, lock)
            if found is None or not found.is_same(claim):
                raise ClaimLost(f"claim {claim.key} does not stand any more")
            expires_ns = max(found.expires_ns, _expiry(self._disk.ask_time(lock), found.revision, ttl))
            step.commit()
            try:
                os.utime(self._path(claim.key), ns=(expires_ns, expires_ns), follow_symlinks=False)
            except FileNotFoundError:
                raise ClaimLost(f"claim {claim.key} was removed by hand") from None
            return found._replace(expires_ns=expires_ns)

    def close(self, step: Step[Any], claim: Claim) -> CloseOutcome:
        with self._disk.locked(claim.key) as lock:
            found = self._judge(claim.key, lock)
            if found is not None and not found.is_same(claim):
                return CloseOutcome.SUPERSEDED
            with self._stamps.bumped(claim.key):
                if found is None:  # its remover may have been killed before it bumped the stamp
                    return CloseOutcome.GONE
                step.commit()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(claim.key))
                step.applied = True
            return CloseOutcome.CLOSED

    def check(self) -> None:
        """One claim's way through the folder, under a name that nobody takes for a claim."""
        name = f"{self._disk.claims}/{_OWN_PREFIX}check-{secrets.token_hex(8)}"
        record = _encoder.encode(_Record(key="", revision=1, value=ClaimValue(worker="check")))
        with self._disk.locked("check"), self._disk.written(record) as (temp, _):
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

    def tend(self, names: list[str]) -> list[tuple[str, int]]:
        """Removes what has expired. Returns what stands: keys with their marks."""
        standing = []
        for name in names:
            path = f"{self._disk.claims}/{name}"
            try:
                status = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if KEY.fullmatch(name):
                if status.st_mtime_ns > self._disk.clock.now_ns():
                    standing.append((name, _mark(status)))
                    continue
                # What is locked, or a folder, or somebody else's, is left for the next walk.
                with contextlib.suppress(NotYet, OSError):
                    self._bury(name)
            elif name.startswith(_OWN_PREFIX):
                self._disk.remove_stale(path)
        return standing

    def _path(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a claim key: 40 to 64 lower-case hex digits")
        return f"{self._disk.claims}/{key}"

    def _read(self, key: str) -> Found | None:
        """What is there, expired or not."""
        path = self._path(key)
        try:
            # O_NONBLOCK: somebody's named pipe must not hold us up.
            with Opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as fd:
                status = os.fstat(fd)
                raw = os.read(fd, _MAX_CLAIM_BYTES)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            if error.errno != errno.ELOOP:
                raise
            status, raw = os.lstat(path), b""
        try:
            record = _decoder.decode(raw)
            if record.key == key and stat.S_ISREG(status.st_mode):
                return Found(record.value, record.revision, status.st_mtime_ns, _mark(status))
        except ValueError:
            pass
        return Found(_UNREADABLE, 0, status.st_ctime_ns + int(GRACE_S * 1e9), _mark(status))

    def _judge(self, key: str, lock: int) -> Found | None:
        """The claim that stands. Removes what does not. To be called with the key's lock."""
        found = self._read(key)
        if found is None or found.stands(self._disk.clock.now_ns()) or found.stands(self._disk.ask_time(lock)):
            return found
        if found.value is _UNREADABLE:
            log.warning("%s: removing claim %s: its file is unreadable", self._disk.root, key)
        with self._stamps.bumped(key), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))
        return None

    def _bury(self, key: str) -> Found | None:
        with self._disk.locked(key) as lock:
            return self._judge(key, lock)


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


class Opened:
    """A descriptor, closed at the end of the context. A generator would cost a read a tenth more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)
