"""The stamps of one folder: 65,536 counters, one for all keys with the same first four digits.

They are read in the event loop, where a page fault on a file system that hangs would hang everything and SIGTERM with
it. So no page of the folder is mapped: the counters are a file in this machine's memory (`/dev/shm`), and the folder's
record `stamps` says which: a random name, the memory it is in, and the boot of the kernel that knows both. Whoever
removes a claim reads that record each time and bumps the stamp there; every process looks at it again once a second.

Processes that do not have that memory in common (containers with a `/dev/shm` each, another user's, none at all) find
that out from the record when they come, and say in it that there are no stamps: then nobody here has any, with a
warning, and all rely on events. A reboot, or the record's removal by hand, begins anew.

A page is kept while a process holds its lock, and removed by the last one that leaves, or by whoever makes the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from backends.file.disk import Disk, Opened, is_at
from backends.file.threads import NotYet

log = logging.getLogger(__name__)

MEMORY = "/dev/shm"
"""The one place that all processes of a machine have in common and that no disk or network is behind."""

_PREFIX = "coatcheck-stamps-"
_STAMPS = 1 << 16
_BYTES = 8 * _STAMPS
_MAX_RECORD_BYTES = 4096


class _Record(msgspec.Struct, frozen=True):
    """What the folder says of its stamps."""

    boot: str
    memory: int
    """The device number of the memory's file system."""
    page: str
    """Empty: the folder's processes have no memory in common."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)


class _Held:
    """An open descriptor that holds a lock. Closed with the last that uses it: another thread may be at it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _Page(NamedTuple):
    """Mapped counters. Let go and never closed, as its lock."""

    name: str
    held: _Held
    counters: memoryview

    @property
    def stands(self) -> bool:
        """Its file still has its name."""
        return os.fstat(self.held.fd).st_nlink > 0


class Stamps:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._path = f"{disk.root}/stamps"
        self._said: bytes | None = None
        """The record that was agreed to."""
        self._page: _Page | None = None
        self._had_one = False

    @property
    def shared(self) -> bool:
        """Every close on this machine changes the stamps that are read here."""
        return self._page is not None

    def read(self, key: str) -> int:
        """For the event loop: touches memory only. 0: there are no stamps."""
        page = self._page
        return 0 if page is None else page.counters[int(key[:4], 16)]

    def agree(self) -> None:
        """Have the stamps that the folder's record names, or make it name some. Raises OSError or NotYet."""
        if self._disk.shared:
            return
        page = self._page
        if self._said is not None and self._said == self._record() and (page is None or page.stands):
            return
        with self._disk.locked("stamps"):
            said = self._record()
            record = _decoded(said)
            memory = _memory()
            self._take(self._wanted(said, record, memory), memory)

    def leave(self) -> None:
        """Nothing here is read or bumped any more."""
        self._let_go()
        self._said = None

    @contextlib.contextmanager
    def bumped(self, key: str) -> Iterator[None]:
        """Bumps the key's stamp after the body, to be called with the key's lock. Not possible: the body is not run."""
        self.agree()
        page = self._page
        yield
        if page is not None:
            slot = int(key[:4], 16)
            page.counters[slot] = (page.counters[slot] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    def _wanted(self, said: bytes | None, record: _Record | None, memory: _Memory | None) -> bytes:
        """Which record is to stand. To be called with the lock."""
        boot = _boot()
        if record is not None and record.boot != boot and not self._had_one:
            record = None  # an earlier boot's; whoever wrote it is no more
        if record is None:
            return self._new(memory)
        assert said is not None
        if not record.page:
            return said
        if memory is None or (record.boot, record.memory) != (boot, memory.device):
            return self._none("some of its processes have another /dev/shm")
        try:
            whole = os.stat(f"{memory.folder}/{record.page}").st_size == _BYTES
        except FileNotFoundError:
            whole = False  # removed, as some systems do when a user has logged out
        return said if whole else self._new(memory)

    def _new(self, memory: _Memory | None) -> bytes:
        """Makes a page that nothing has been read from, and the record of it."""
        if memory is None:
            return self._none(f"this machine has no {MEMORY}")
        _sweep(memory.folder)
        name = _PREFIX + secrets.token_hex(16)
        path = f"{memory.folder}/{name}"
        try:
            with Opened(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)) as fd:
                if self._disk.owner is not None:
                    os.fchown(fd, *self._disk.owner)
                # All of it now: a page that is first needed when memory is full would be a SIGBUS. From a random number
                # on, so that no stamp of an earlier page can match.
                content = secrets.token_bytes(8) * _STAMPS
                while content:
                    content = content[os.write(fd, content) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return self._none(f"{MEMORY} takes none: {error.strerror}")
        try:
            return self._say(_Record(_boot(), memory.device, name))
        except BaseException:
            os.unlink(path)
            raise

    def _none(self, why: str) -> bytes:
        log.warning(
            "%s: no stamps: %s; a closed session may be taken for open elsewhere until the event arrives",
            self._disk.root,
            why,
        )
        return self._say(_Record(_boot(), 0, ""))

    def _say(self, record: _Record) -> bytes:
        content = _encoder.encode(record)
        with self._disk.written(content) as (temp, _):
            os.rename(temp, self._path)
        return content

    def _take(self, said: bytes, memory: _Memory | None) -> None:
        """Have what the record says. To be called with the lock."""
        record = _decoded(said)
        assert record is not None
        page = self._page
        if page is not None and not record.page:
            log.warning("%s: no stamps any more: not all of its processes have this %s", self._disk.root, MEMORY)
        if page is None or page.name != record.page or not page.stands:
            self._let_go()
            if record.page:
                assert memory is not None
                try:
                    self._page = _opened(memory.folder, record.page)
                except FileNotFoundError:
                    raise NotYet("the stamps were removed") from None
                except OSError as error:
                    said = self._none(f"they are another user's: {error.strerror}")
                else:
                    self._had_one = True
        self._said = said

    def _let_go(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            _remove_unused(f"{MEMORY}/{page.name}", page.held.fd)

    def _record(self) -> bytes | None:
        try:
            with Opened(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as fd:
                return os.read(fd, _MAX_RECORD_BYTES)
        except FileNotFoundError:
            return None


class _Memory(NamedTuple):
    folder: str
    device: int


def _memory() -> _Memory | None:
    """Where the machine's processes share memory, if that is what it is: in a container without one, the name may be
    a plain folder on a disk."""
    try:
        device = os.stat(MEMORY).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            if mount.split()[2] == number and system.split()[0] == "tmpfs":
                return _Memory(MEMORY, device)
    except OSError:
        pass
    return None


def _boot() -> str:
    """Empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _decoded(said: bytes | None) -> _Record | None:
    """None: there is none, or it is none that can be read."""
    if said is None:
        return None
    try:
        record = _decoder.decode(said)
    except ValueError:
        return None
    return record if not record.page or (record.page.startswith(_PREFIX) and "/" not in record.page) else None


def _opened(folder: str, name: str) -> _Page:
    path = f"{folder}/{name}"
    held = _Held(os.open(path, os.O_RDWR | os.O_NOFOLLOW))
    try:
        fcntl.flock(held.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise NotYet("the stamps are being removed") from None
    if not is_at(path, held.fd):
        raise FileNotFoundError(errno.ENOENT, "removed meanwhile", path)
    return _Page(name, held, memoryview(mmap.mmap(held.fd, _BYTES)).cast("Q"))


def _remove_unused(path: str, fd: int) -> None:
    """Unless another process holds it. Whoever opens it just now finds that out by `is_at`."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(path, fd):
            os.unlink(path)


def _sweep(folder: str) -> None:
    """Pages whose processes were killed: nobody holds them, so nobody has read from them."""
    for name in os.listdir(folder):
        if name.startswith(_PREFIX):
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError), Opened(os.open(path, os.O_RDWR | os.O_NOFOLLOW)) as fd:
                _remove_unused(path, fd)
