"""The claims of one folder. Blocks, as `disk` does.

A claim on one host is a symbolic link in `claims/` that leads nowhere: its target is the record itself, in JSON. It is
made by one call of the kernel, which fails if the name is taken, and read by another: whole or not there at all, also
after a power failure, with no temporary file and nothing to sync. It expires at the later of the instant in the record
and its mtime, which a renewal sets.

A claim that several hosts share, or whose record is too long for that, is a file: written in `tmp/`, synced, and
`link`ed to its name. NFS asks its server when a file is opened, and answers from its cache what a link says. Its mtime
is the instant at which it expires.

*Create* never replaces. *Close, expire, renew*: only while holding the key's lock, after reading the claim again. Only
holders of the lock remove, so comparing and unlinking is one step, even if the process is frozen in between.

*What cannot be read* (garbage, a folder, somebody else's file) costs its own key alone: every call of it raises
ClaimUnreadable, and nobody but an operator removes it (`close` with the error's claim), save that it has expired: at
its mtime where somebody has set that to a later time than the file's last change, as a claim's maker does; else a day
after its last change. A claim of a later version is honoured as soon as its worker and rank can be read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from typing import Any, NamedTuple

import msgspec

from backends.base import LIFETIME, Claim, ClaimLost, ClaimUnreadable, ClaimValue, CloseOutcome, StoreUnavailable
from backends.file.disk import Disk, Opened
from backends.file.stamps import Stamps
from backends.file.threads import NotYet, Step

log = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-f]{40,64}")

_OWN_PREFIX = ".coatcheck-"
_MAX_LINK_BYTES = 1000  # XFS takes 1023, most others 4095
_MAX_CLAIM_BYTES = 1 << 16
_ATTEMPTS = 8
_MARK_NS = 1_000_000
_CLOCK_AHEAD_NS = 20_000_000  # by which the estimate of the time may be ahead
_UNREADABLE_NS = 86_400_000_000_000
_NEVER_NS = 1 << 62
_NAMED = 1024  # keys of unreadable claims that are remembered as told


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is written, in JSON."""

    key: str
    revision: int
    expires: int = 0
    """By the file system's clock; 0 in a file, whose mtime it is."""
    value: ClaimValue


class _Head(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """As much of a record as a walk has to know."""

    key: str
    revision: int
    expires: int = 0


class _LaterValue(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    rank: int | None = None
    version: int
    replica: Any = ""
    generation: Any = 0
    nonce: Any = ""


class _Later(msgspec.Struct, frozen=True, kw_only=True):
    """As much of a later version's record as has to be understood to honour it."""

    key: Any = None
    revision: Any = None
    expires: Any = None
    value: _LaterValue


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)
_head_decoder = msgspec.json.Decoder(_Head)
_later_decoder = msgspec.json.Decoder(_Later)
_UNREADABLE = ClaimValue(worker="", nonce="")


class Found(NamedTuple):
    """What stands at a claim's name."""

    value: ClaimValue
    revision: int
    expires_ns: int
    """By the file system's clock."""
    mark: int
    why: str = ""
    """Why it cannot be read, if so; then `value` says nothing."""

    def is_same(self, claim: Claim) -> bool:
        return self.revision == claim.revision and self.value.nonce == claim.value.nonce

    def stands(self, now_ns: int) -> bool:
        return self.expires_ns > now_ns


class Claims:
    """Nobody else makes, changes or removes a claim."""

    def __init__(self, disk: Disk, stamps: Stamps) -> None:
        self._disk = disk
        self._stamps = stamps
        self._named: dict[str, object] = {}
        """Keys whose claims were logged as unreadable."""

    def create_or_get(self, step: Step[Any], key: str, proposal: ClaimValue, ttl: float) -> tuple[Found, bool]:
        """The claim that stands, and whether it is the proposal."""
        for _ in range(_ATTEMPTS):
            found = self._read(key)
            if found is not None and not found.stands(self._disk.clock.now_ns()):
                found = self._bury(key)
            if found is not None:
                self._must_be_readable(key, found)
                return found, found.value.nonce == proposal.nonce
            made = self._make(step, key, proposal, ttl)
            if made is not None:
                return made, True
        raise StoreUnavailable(f"claim {key} kept coming and going")

    def get(self, key: str) -> Found | None:
        found = self._read(key)
        if found is None or not found.stands(self._disk.clock.now_ns()):
            return None  # whoever creates next removes it
        self._must_be_readable(key, found)
        return found

    def renew(self, step: Step[Any], claim: Claim, ttl: float) -> Found:
        with self._disk.locked(claim.key) as lock:
            found = self._judge(claim.key, lock)
            if found is not None:
                self._must_be_readable(claim.key, found)
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
                    self._disk.remove(self._path(claim.key))
                step.applied = True
            self._named.pop(claim.key, None)
            return CloseOutcome.CLOSED

    def check(self) -> None:
        """One claim's way through the folder, under a name that nobody takes for a claim."""
        path = f"{self._disk.claims}/{_OWN_PREFIX}check-{secrets.token_hex(8)}"
        # As long as a claim: what is short may find room on a full disk.
        record = _encoder.encode(_Record(key="0" * 40, revision=1, value=ClaimValue(worker="check" * 16)))
        with self._disk.locked("check") as lock:
            self._disk.ask_time(lock)
            try:
                if self._disk.shared:
                    with self._disk.written(record) as (temp, _):
                        os.link(temp, path)
                else:
                    os.symlink(record, os.fsencode(path))
            except PermissionError as error:  # EPERM is how a file system says that it has none
                links = "hard" if self._disk.shared else "symbolic"
                why = f"{error.strerror} (has this file system {links} links?)"
                raise OSError(error.errno, why, path) from None
            try:
                if self._content(path)[1] != record:
                    raise StoreUnavailable("a claim does not read as it was written")
            finally:
                os.unlink(path)

    def tend(self, names: list[str]) -> list[tuple[str, int]]:
        """Removes what has expired. Returns what stands: keys with their marks."""
        standing = []
        now_ns = self._disk.clock.now_ns()
        for name in names:
            path = f"{self._disk.claims}/{name}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if KEY.fullmatch(name):
                if status.st_mtime_ns > max(status.st_ctime_ns, now_ns):
                    standing.append((name, _mark(status, 0)))
                    continue
                # As it was made, by far the most: what is read of it may even be a successor's, which is then told
                # once too often.
                try:
                    head = _head_decoder.decode(os.readlink(os.fsencode(path)))
                except (OSError, ValueError):
                    pass
                else:
                    if head.expires > now_ns and head.key == name:
                        standing.append((name, _mark(status, head.revision)))
                        continue
                # What is locked, or somebody else's, is left for the next walk.
                with contextlib.suppress(NotYet, OSError):
                    found = self._read(name)
                    if found is not None and not found.stands(now_ns):
                        found = self._bury(name)
                    if found is not None:
                        standing.append((name, found.mark))
            elif name.startswith(_OWN_PREFIX):
                self._disk.remove_stale(path)
        return standing

    def _make(self, step: Step[Any], key: str, proposal: ClaimValue, ttl: float) -> Found | None:
        """None: the name is taken, or what it was to be in is gone; to be read and tried again."""
        revision = secrets.randbits(62) + 1
        if not self._disk.shared:
            if self._disk.clock.is_old:
                self._disk.learn_time()
            expires_ns = _expiry(self._disk.clock.now_ns() - _CLOCK_AHEAD_NS, revision, ttl)
            record = _encoder.encode(_Record(key=key, revision=revision, expires=expires_ns, value=proposal))
            if len(record) <= _MAX_LINK_BYTES:
                return self._link(step, key, proposal, revision, expires_ns, record)
        record = _encoder.encode(_Record(key=key, revision=revision, value=proposal))
        with self._disk.written(record, lambda now_ns: _expiry(now_ns, revision, ttl)) as (temp, status):
            step.commit()
            try:
                os.link(temp, self._path(key))
            except FileExistsError:
                return None  # taken meanwhile, or our own success reported twice (NFS)
            except FileNotFoundError:
                self._disk.heal()  # the root went away under us
                return None
            return Found(proposal, revision, status.st_mtime_ns, _mark(status, revision))

    def _link(
        self, step: Step[Any], key: str, proposal: ClaimValue, revision: int, expires_ns: int, record: bytes
    ) -> Found | None:
        path = self._path(key)
        before_ns = time.monotonic_ns()
        step.commit()
        try:
            os.symlink(record, os.fsencode(path))
        except FileExistsError:
            return None
        except FileNotFoundError:
            self._disk.heal()
            return None
        step.applied = True
        try:
            status = os.lstat(path)
            self._disk.give(path)
        except FileNotFoundError:
            return Found(proposal, revision, expires_ns, 0)  # closed already
        self._disk.clock.learn(before_ns, status.st_mtime_ns)
        return Found(proposal, revision, expires_ns, _mark(status, revision))

    def _must_be_readable(self, key: str, found: Found) -> None:
        if not found.why:
            return
        error = ClaimUnreadable(key, found.revision, found.why)
        if len(self._named) >= _NAMED:
            self._named.clear()
        mine = object()
        if self._named.setdefault(key, mine) is mine:
            log.warning(
                "%s: %s; its session alone is served without a claim until it is closed", self._disk.root, error
            )
        raise error

    def _path(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a claim key: 40 to 64 lower-case hex digits")
        return f"{self._disk.claims}/{key}"

    def _read(self, key: str) -> Found | None:
        """What is there, expired or not."""
        path = self._path(key)
        try:
            status, raw, why = self._content(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise
        if not why:
            try:
                record = _decoder.decode(raw)
                if record.key == key:
                    expires_ns = max(record.expires, status.st_mtime_ns)
                    return Found(record.value, record.revision, expires_ns, _mark(status, record.revision))
                why = "it is another key's"
            except ValueError as error:
                if (later := _of_later_version(key, raw, status)) is not None:
                    return later
                why = str(error)
        return Found(_UNREADABLE, _identity(status), _unreadable_until(status), _mark(status, 0), why)

    def _content(self, path: str) -> tuple[os.stat_result, bytes, str]:
        """What stands at the path: its status, what it holds, and why that cannot be read, if so."""
        for _ in range(_ATTEMPTS):
            # On a share it is opened, whatever it may be: NFS answers all else from its cache.
            status = None if self._disk.shared else os.lstat(path)
            if status is None or stat.S_ISREG(status.st_mode):
                try:
                    # O_NONBLOCK: somebody's named pipe must not hold us up.
                    with Opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as fd:
                        status = os.fstat(fd)
                        if stat.S_ISREG(status.st_mode):
                            return status, os.read(fd, _MAX_CLAIM_BYTES), ""
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.EACCES, errno.ENXIO):
                        raise
                    status = os.lstat(path)  # raises where it is the folder that is not ours
                    if error.errno == errno.EACCES:
                        return status, b"", "this user may not read it"
            if not stat.S_ISLNK(status.st_mode):
                return status, b"", "it is no file"
            with contextlib.suppress(FileNotFoundError):
                try:
                    raw = os.readlink(os.fsencode(path))
                except OSError as error:
                    if error.errno != errno.EINVAL:  # a link no more
                        raise
                else:
                    now = os.lstat(path)
                    if (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns):
                        return now, raw, ""
            # Another has come in its place between the two.
        raise NotYet("what stands at the claim's name keeps changing")

    def _judge(self, key: str, lock: int) -> Found | None:
        """The claim that stands. Removes what does not. To be called with the key's lock."""
        found = self._read(key)
        if found is None or found.stands(self._disk.clock.now_ns()) or found.stands(self._disk.ask_time(lock)):
            return found
        if found.why:
            log.warning("%s: removing claim %s, which has expired unread: %s", self._disk.root, key, found.why)
        with self._stamps.bumped(key), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))
        return None

    def _bury(self, key: str) -> Found | None:
        with self._disk.locked(key) as lock:
            return self._judge(key, lock)


def _of_later_version(key: str, raw: bytes, status: os.stat_result) -> Found | None:
    """A claim that was written by a version to come, as far as it can be read."""
    try:
        record = _later_decoder.decode(raw)
    except ValueError:
        return None
    known = record.value
    if known.version <= 1 or not known.worker or record.key not in (None, key):
        return None
    value = ClaimValue(
        worker=known.worker,
        rank=known.rank,
        replica=known.replica if isinstance(known.replica, str) else "",
        generation=known.generation if isinstance(known.generation, int) else 0,
        nonce=known.nonce if isinstance(known.nonce, str) else "",
        version=known.version,
    )
    expires_ns = status.st_mtime_ns
    if isinstance(record.expires, int):
        expires_ns = max(expires_ns, record.expires)
    elif expires_ns <= status.st_ctime_ns:  # it says elsewhere when it expires
        expires_ns += _UNREADABLE_NS
    revision = record.revision if isinstance(record.revision, int) else _digest(str(status.st_ino).encode() + raw)
    return Found(value, revision, expires_ns, _mark(status, revision))


def _expiry(now_ns: int, revision: int, ttl: float) -> int:
    """LIFETIME x ttl from now, less up to 2 ms so that its last six digits can be the revision's (see `_mark`)."""
    at_ns = now_ns + int(LIFETIME * ttl * 1e9) - _MARK_NS
    return at_ns - at_ns % _MARK_NS + revision % _MARK_NS


def _unreadable_until(status: os.stat_result) -> int:
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        return _NEVER_NS
    if status.st_mtime_ns > status.st_ctime_ns:
        return status.st_mtime_ns
    return status.st_ctime_ns + _UNREADABLE_NS


def _mark(status: os.stat_result, revision: int) -> int:
    """Differs between the claims of a key and is the same for one claim, renewed or not: the inode (which may be used
    again) and the last six digits of its revision, which are those of its mtime too where that is an expiry."""
    digits = status.st_mtime_ns if status.st_mtime_ns > status.st_ctime_ns else revision
    return status.st_ino * _MARK_NS + digits % _MARK_NS


def _identity(status: os.stat_result) -> int:
    """Stands for the revision of what has none that can be read: another as soon as anything about it changes."""
    return _digest(
        f"{status.st_ino} {status.st_mode} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode()
    )


def _digest(what: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "big") >> 1 | 1
