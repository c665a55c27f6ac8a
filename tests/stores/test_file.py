"""What can happen to a shared folder, and to the processes that share it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import watchfiles

import backends.file.disk
import backends.file.watch
from backends.base import Claim, ClaimLost, ClaimValue, CloseOutcome, OutcomeUnknown, Reset, StoreUnavailable
from backends.fanout import FanOut
from backends.file import FileStore
from tests.stores.test_model import Later
from tests.support.claimant import Claimant
from tests.support.stores import Subscriber, a_key, a_value, eventually, make

CLOSED, GONE = CloseOutcome.CLOSED, CloseOutcome.GONE
Open = Callable[..., Awaitable[FileStore]]


@pytest.fixture
def root(quick_path: Path) -> Path:
    return quick_path / "root"


@pytest.fixture
async def open_file(root: Path) -> AsyncIterator[Open]:
    opened: list[FileStore] = []

    async def open_file(at: Path = root, **options: Any) -> FileStore:
        opened.append(await FileStore.open(at, **options))
        return opened[-1]

    yield open_file
    for store in opened:
        await store.aclose()


@pytest.fixture
async def store(open_file: Open) -> FileStore:
    return await open_file()


@pytest.fixture
async def other(open_file: Open, store: FileStore) -> FileStore:
    return await open_file()


def temps(root: Path) -> list[str]:
    return os.listdir(root / "tmp")


class TestForeignFiles:
    @pytest.fixture(autouse=True)
    def short_grace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends.file.disk, "GRACE_S", 0.5)

    @pytest.fixture(params=["empty", "torn", "of another key", "huge", "no json", "a symlink", "a pipe"])
    async def spoilt(self, request: pytest.FixtureRequest, store: FileStore, root: Path) -> Path:
        claim = await make(store, a_key())
        path = root / "claims" / claim.key
        whole = path.read_bytes()
        path.unlink()
        match request.param:
            case "empty":
                path.touch()
            case "torn":
                path.write_bytes(whole[: len(whole) // 2])
            case "of another key":
                path.write_bytes(whole.replace(claim.key.encode(), a_key().encode()))
            case "huge":
                path.write_bytes(whole[:-1] + b" " * 200_000 + b"}")
            case "no json":
                path.write_bytes(b"\xff\x00" * 50)
            case "a symlink":
                path.symlink_to("/etc/passwd")
            case "a pipe":
                os.mkfifo(path)
        return path

    async def test_an_unreadable_claim_is_neither_adopted_nor_absent(
        self, spoilt: Path, root: Path, open_file: Open
    ) -> None:
        hasty = await open_file(deadline=0.1)
        before = spoilt.lstat()
        for call in (hasty.create_or_get(spoilt.name, a_value(), 600), hasty.get(spoilt.name)):
            with pytest.raises(StoreUnavailable):
                await call
        assert os.path.samestat(before, spoilt.lstat())
        assert not temps(root)

    async def test_when_it_stays_unreadable_it_makes_way(
        self, spoilt: Path, store: FileStore, other: FileStore
    ) -> None:
        claim = await make(store, spoilt.name)
        assert await other.get(spoilt.name) is not None
        assert await other.close(claim) is CLOSED

    @pytest.mark.parametrize("spoilt", ["torn"], indirect=True)
    async def test_closing_an_unreadable_claim_frees_its_key(
        self, spoilt: Path, store: FileStore, other: FileStore
    ) -> None:
        never = Claim(key=spoilt.name, value=a_value(), revision=1, expires_at=0.0)
        assert await store.close(never) is GONE
        assert await other.get(spoilt.name) is None

    async def test_foreign_names_are_left_alone(self, store: FileStore, other: FileStore, root: Path) -> None:
        names = ["README", ".hidden", "A" * 40, "ab", "f" * 65, "0" * 39, "g" * 40]
        for name in names:
            (root / "claims" / name).write_text("mine")
            os.utime(root / "claims" / name, (0, 0))
        folder = root / "claims" / ("d" * 40)
        folder.mkdir()
        os.utime(folder, (0, 0))
        async with Subscriber(other) as subscriber:
            expiring = await make(store, a_key(), ttl=0.2)  # so the walk comes round
            await subscriber.hears(expiring.key)
            assert subscriber.deleted == [expiring.key]
        for name in names:
            assert (root / "claims" / name).read_text() == "mine"
        assert folder.is_dir()
        with pytest.raises(StoreUnavailable):
            await store.create_or_get(folder.name, a_value(), 600)

    @pytest.mark.parametrize("key", ["../../etc/passwd", "", "A" * 40, "ab/" + "c" * 40, "f" * 40 + "\n"])
    async def test_no_key_leads_out_of_the_folder(self, store: FileStore, key: str) -> None:
        with pytest.raises(ValueError):
            await store.create_or_get(key, a_value(), 600)

    async def test_a_field_or_version_from_the_future_is_ignored(self, store: FileStore, root: Path) -> None:
        claim = await make(store, a_key())
        path = root / "claims" / claim.key
        status = path.stat()
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2,"colour":"red"'))
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
        read = await store.get(claim.key)
        assert read is not None
        assert (read.value.worker, read.value.version, read.revision) == ("w-1", 2, claim.revision)
        assert await store.close(claim) is CLOSED


class TestTheRoot:
    async def test_renamed_away_and_made_anew(self, store: FileStore, other: FileStore, root: Path) -> None:
        old = await make(store, a_key())
        async with Subscriber(store) as subscriber:
            root.rename(root.with_name("away"))
            assert await store.get(old.key) is None
            new = await make(other, a_key())
            await subscriber.until(lambda: subscriber.resets == 2)
            assert (root / "claims" / new.key).exists()
            await other.close(new)
            await subscriber.hears(new.key)

    async def test_removed(self, store: FileStore, other: FileStore, root: Path) -> None:
        old = await make(store, a_key())
        async with Subscriber(store) as subscriber:
            shutil.rmtree(root)
            # Nothing is asked of the store: it finds out by itself.
            await subscriber.until(lambda: subscriber.resets == 2)
            assert await other.close(old) is GONE
            new = await make(other, old.key)
            await store.close(new)
            await subscriber.until(lambda: subscriber.events[-1] != Reset())
            assert new.key in subscriber.deleted
        assert root.stat().st_mode & 0o777 == 0o700

    async def test_removed_in_the_middle_of_a_creation(
        self, store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = os.link

        def remove_first(*args: Any, **kwargs: Any) -> None:
            monkeypatch.setattr(os, "link", link)
            shutil.rmtree(root)
            link(*args, **kwargs)

        monkeypatch.setattr(os, "link", remove_first)
        claim = await make(store, a_key())
        assert await store.get(claim.key) is not None

    async def test_a_share_that_is_gone_is_never_made_anew(self, quick_path: Path, open_file: Open) -> None:
        share = quick_path / "share"
        share.mkdir()
        store = await open_file(share, shared=True)
        claim = await make(store, a_key())
        async with Subscriber(store) as subscriber:
            share.rename(quick_path / "unmounted")
            share.mkdir()  # the empty mount point
            for call in (
                store.create_or_get(a_key(), a_value(), 600),
                store.close(claim),
                store.check(),
            ):
                with pytest.raises(StoreUnavailable):
                    await call
            await subscriber.fails()
            assert os.listdir(share) == []
            share.rmdir()
            (quick_path / "unmounted").rename(share)
        async with Subscriber(store) as subscriber:
            assert await store.get(claim.key) is not None
            assert await store.close(claim) is CLOSED
            await subscriber.hears(claim.key)

    async def test_a_symlink_that_is_pointed_elsewhere(self, quick_path: Path, open_file: Open) -> None:
        for name in ("one", "two"):
            (quick_path / name).mkdir()
        link = quick_path / "link"
        link.symlink_to("one")
        store = await open_file(link)
        claim = await make(store, a_key())
        async with Subscriber(store) as subscriber:
            await store.close(claim)
            await subscriber.hears(claim.key)
            link.unlink()
            link.symlink_to("two")
            await subscriber.until(lambda: subscriber.resets == 2)
            claim = await make(store, a_key())
            assert (quick_path / "two" / "claims" / claim.key).exists()
            await store.close(claim)
            await subscriber.hears(claim.key)


@pytest.fixture
def small_disk(quick_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own; where mounting is not allowed, just a folder."""
    folder = quick_path / "disk"
    folder.mkdir()
    mounted = _mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder))
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def _mount(*args: str) -> bool:
    return subprocess.run(["mount", *args], capture_output=True, check=False).returncode == 0


def _refuse(monkeypatch: pytest.MonkeyPatch, code: int, *names: str) -> None:
    """What a kernel does, where the test may not make it do so."""

    def refused(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    for name in names:
        monkeypatch.setattr(os, name, refused)


class TestTheDisk:
    async def test_full(self, small_disk: Path, open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        root = small_disk / "root"
        store = await open_file(root)
        claims = [await make(store, a_key()) for _ in range(3)]
        async with Subscriber(store) as subscriber:
            with monkeypatch.context() as full:
                if small_disk.is_mount():
                    _fill(small_disk / "ballast")
                else:
                    _refuse(full, errno.ENOSPC, "write")
                with pytest.raises(StoreUnavailable):
                    await store.create_or_get(a_key(), a_value(), 600)
                with pytest.raises(StoreUnavailable):
                    await store.check()
                assert not temps(root)
                # What stands is read, renewed, and closed: that is what makes room.
                assert await store.get(claims[0].key) is not None
                await store.renew(claims[0], 700)
                before = store.stamp(claims[0].key)
                assert await store.close(claims[0]) is CLOSED
                assert store.stamp(claims[0].key) != before
                await subscriber.hears(claims[0].key)
            (small_disk / "ballast").unlink(missing_ok=True)
            await make(store, a_key())
            assert subscriber.resets == 1

    async def test_full_when_the_store_is_opened(
        self, small_disk: Path, open_file: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as full:
            if small_disk.is_mount():
                _fill(small_disk / "ballast")
            else:
                _refuse(full, errno.ENOSPC, "write")
            store = await open_file(small_disk / "root")
            with pytest.raises(StoreUnavailable):
                await store.check()
        (small_disk / "ballast").unlink(missing_ok=True)
        await store.check()
        claim = await make(store, a_key())
        await eventually(lambda: store.stamp(claim.key) != 0)

    async def test_read_only(self, small_disk: Path, open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        store = await open_file(small_disk / "root")
        claim = await make(store, a_key())
        with monkeypatch.context() as read_only:
            if small_disk.is_mount():
                assert _mount("-o", "remount,ro", str(small_disk))
            else:
                _refuse(read_only, errno.EROFS, "link", "unlink", "utime", "write")
            for call in (
                store.create_or_get(a_key(), a_value(), 600),
                store.renew(claim, 600),
                store.close(claim),
                store.check(),
            ):
                with pytest.raises(StoreUnavailable):
                    await call
            assert await store.get(claim.key) is not None
            assert not (await store.create_or_get(claim.key, a_value("w-2"), 600)).created
            async with Subscriber(store) as subscriber:  # whose watch can be shown to live by listing alone
                assert subscriber.resets == 1
        if small_disk.is_mount():
            assert _mount("-o", "remount,rw", str(small_disk))
        assert await store.close(claim) is CLOSED
        await make(store, claim.key)

    async def test_not_ours_any_more(self, store: FileStore, root: Path) -> None:
        """Permissions do not bind root, so another user tries."""
        claim = await make(store, a_key())
        async with Claimant(f"file://{root}") as other:
            if os.geteuid() == 0:
                await other.do("identity")
            else:
                root.chmod(0)
            assert await other.do("create", keys=[a_key()], worker="w", ttl=600) == {"error": "StoreUnavailable"}
            assert await other.close(claim) == "{'error': 'StoreUnavailable'}"
            root.chmod(0o700)
        assert await store.close(claim) is CLOSED

    async def test_not_answering(self, open_file: Open, frozen: Frozen) -> None:
        """Every call ends within its deadline, though every thread hangs; what it says afterwards is true."""
        store = await open_file(deadline=0.3)
        claim, value = await make(store, a_key()), a_value()
        frozen.freeze("open")
        began = time.monotonic()
        calls = [store.get(claim.key) for _ in range(20)]
        creating = store.create_or_get(a_key(), value, 600)
        answers = await asyncio.gather(*calls, creating, store.close(claim), store.check(), return_exceptions=True)
        assert time.monotonic() - began < 2
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        frozen.thaw()
        await store.check()
        assert await store.close(claim) is CLOSED, "what was given up was not done afterwards"

    async def test_a_creation_that_was_given_up_is_not_done_later(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=0.3)
        key = a_key()
        frozen.freeze("write")
        with pytest.raises(StoreUnavailable):
            await store.create_or_get(key, a_value(), 600)
        frozen.thaw()
        await store.check()
        assert await store.get(key) is None
        await eventually(lambda: not temps(Path(store._disk.root)))

    async def test_a_creation_of_unknown_outcome_is_recognised_when_sent_again(
        self, open_file: Open, frozen: Frozen
    ) -> None:
        store = await open_file(deadline=0.3)
        key, value = a_key(), a_value()
        frozen.freeze("link")
        with pytest.raises(OutcomeUnknown):
            await store.create_or_get(key, value, 600)
        frozen.thaw()
        assert (await store.create_or_get(key, value, 600)).created

    async def test_a_close_of_unknown_outcome_is_gone_when_sent_again(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=0.3)
        claim = await make(store, a_key())
        before = store.stamp(claim.key)
        frozen.freeze("unlink")
        with pytest.raises(OutcomeUnknown):
            await store.close(claim)
        frozen.thaw()
        assert await store.close(claim) is GONE
        assert store.stamp(claim.key) != before

    async def test_aclose_does_not_wait_for_ever(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=0.3)
        frozen.freeze("open")
        with pytest.raises(StoreUnavailable):
            await store.get(a_key())
        async with asyncio.timeout(2):
            await store.aclose()

    @pytest.mark.parametrize(
        ("code", "known"),
        [(errno.EIO, OutcomeUnknown), (errno.ETIMEDOUT, OutcomeUnknown), (errno.EDQUOT, StoreUnavailable)],
    )
    async def test_an_error_of_the_decisive_call_says_what_is_known(
        self, store: FileStore, root: Path, code: int, known: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as failing:
            _refuse(failing, code, "link")
            with pytest.raises(known):
                await store.create_or_get(a_key(), a_value(), 600)
        assert not temps(root)

    async def test_a_link_that_reports_its_own_success_as_taken(
        self, store: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS: the answer was lost, the client asked again."""
        link = os.link

        def link_twice(*args: Any, **kwargs: Any) -> None:
            link(*args, **kwargs)
            link(*args, **kwargs)

        monkeypatch.setattr(os, "link", link_twice)
        outcome = await store.create_or_get(a_key(), a_value(), 600)
        assert outcome.created
        assert await store.close(outcome.claim) is CLOSED

    async def test_a_stamp_that_cannot_be_written_leaves_the_outcome_unknown_until_the_next_close(
        self, store: FileStore, other: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = await make(store, a_key())
        before = other.stamp(claim.key)
        with monkeypatch.context() as failing:
            _refuse(failing, errno.ENOSPC, "pwrite")
            with pytest.raises(OutcomeUnknown):
                await store.close(claim)
        assert await store.close(claim) is GONE
        assert other.stamp(claim.key) != before

    async def test_errors_leak_no_descriptors(self, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
        claim = await make(store, a_key())
        before = len(os.listdir("/proc/self/fd"))
        for name in ("write", "link", "unlink", "utime", "fsync", "read", "pwrite", "pread", "fstat", "stat"):
            with monkeypatch.context() as failing:
                _refuse(failing, errno.EIO, name)
                calls = (
                    store.create_or_get(a_key(), a_value(), 600),
                    store.get(claim.key),
                    store.renew(claim, 600),
                    store.close(claim),
                    store.check(),
                )
                for answer in await asyncio.gather(*calls, return_exceptions=True):
                    assert not isinstance(answer, Exception) or isinstance(
                        answer, StoreUnavailable | OutcomeUnknown | ClaimLost
                    )
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


class Frozen:
    """A file system that hangs in one kind of call, in claim stores' threads only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._thawed = threading.Event()
        self._reached = threading.Event()

    async def reached(self) -> None:
        """Waits until a thread hangs."""
        await eventually(self._reached.is_set)

    def freeze(self, name: str) -> None:
        real = getattr(os, name)

        def hang(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("coatcheck-file"):
                self._reached.set()
                self._thawed.wait(30)
            return real(*args, **kwargs)

        self._monkeypatch.setattr(os, name, hang)

    def thaw(self) -> None:
        self._thawed.set()


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch, open_file: Open) -> Iterator[Frozen]:
    frozen = Frozen(monkeypatch)
    yield frozen
    frozen.thaw()


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


class TestLocks:
    async def test_a_frozen_holder_stops_removals_of_its_shard_and_nothing_else(
        self, open_file: Open, root: Path
    ) -> None:
        store = await open_file(deadline=0.3)
        claim = await make(store, "ab" + a_key()[2:])
        async with Claimant(f"file://{root}") as other:
            await other.do("hold lock", key=claim.key)
            other.stop()
            for call in (store.close(claim), store.renew(claim, 600)):
                began = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    await call
                assert time.monotonic() - began < 1.5
            assert await store.get(claim.key) is not None
            waiting = [asyncio.create_task(store.close(claim)) for _ in range(30)]
            # Those that wait for the lock keep nobody else waiting.
            elsewhere = await make(store, "cd" + a_key()[2:])
            await make(store, "ab" + a_key()[2:])
            assert await store.close(elsewhere) is CLOSED
            for answer in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(answer, StoreUnavailable)
            await other.kill()
            assert await store.close(claim) is CLOSED

    async def test_a_remover_frozen_between_comparing_and_removing_cannot_hit_a_successor(
        self, open_file: Open, frozen: Frozen
    ) -> None:
        store, other = await open_file(deadline=5.0), await open_file(deadline=0.3)
        claim = await make(store, a_key())
        frozen.freeze("unlink")
        closing = asyncio.create_task(store.close(claim))
        await frozen.reached()
        # Until the frozen one moves, the claim stands, for everyone.
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await other.close(claim)
            assert (await other.get(claim.key) or claim).revision == claim.revision
        frozen.thaw()
        assert await closing is CLOSED
        successor = await make(other, claim.key)
        assert await store.get(claim.key) is not None
        assert await store.close(successor) is CLOSED

    async def test_a_lock_file_replaced_while_it_is_being_locked_is_not_taken_for_the_lock(
        self, store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = await make(store, a_key())
        lock = root / "locks" / claim.key[:2]
        flock = fcntl.flock
        locked: list[bool] = []

        def remove_first(fd: int, operation: int) -> None:
            if operation & fcntl.LOCK_EX:
                if not locked:
                    lock.unlink()
                locked.append(lock.exists())
            flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", remove_first)
        assert await store.close(claim) is CLOSED
        assert locked == [False, True]

    async def test_a_process_killed_at_any_moment_leaves_whole_claims_and_no_lock(
        self, store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = [a_key() for _ in range(4)]
        for moment in range(5):
            async with Claimant(f"file://{root}?sync=no") as other:
                other.tell("churn", keys=keys, worker="w", rounds=1_000_000)
                await asyncio.sleep(0.02 + moment / 200)
                await other.kill()
            for key in keys:
                outcome = await store.create_or_get(key, a_value(), 600)
                assert await store.close(outcome.claim) is CLOSED
        monkeypatch.setattr(backends.file.disk, "STALE_S", 0.0)
        await asyncio.sleep(0.02)
        await store._watch.walk()
        assert temps(root) == []


class TestTime:
    async def test_the_clock_of_the_host_does_not_matter(
        self, store: FileStore, other: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = await make(store, a_key(), ttl=0.4)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        monkeypatch.setattr(time, "time_ns", lambda: int((real() - 3600) * 1e9))
        assert await other.get(claim.key) is not None
        with pytest.raises(AssertionError):
            await make(other, claim.key)
        await asyncio.sleep(0.55)
        await make(other, claim.key, ttl=600)

    @pytest.mark.parametrize("wrong_by_s", [-5000, 5000])
    async def test_a_wrong_idea_of_the_time_removes_nothing(
        self, store: FileStore, other: FileStore, wrong_by_s: int
    ) -> None:
        """As after the file server's clock was set: the time is asked again, under the lock, before a removal."""
        claims = [await make(other, a_key()) for _ in range(3)]

        def mistake() -> None:
            learned_ns, ahead_ns = store._disk.clock._learned
            store._disk.clock._learned = (learned_ns, ahead_ns + wrong_by_s * 10**9)

        mistake()
        await store._watch.walk()
        mistake()
        assert not (await store.create_or_get(claims[0].key, a_value("w-2"), 600)).created
        mistake()
        await store.renew(claims[1], 700)
        mistake()
        assert await store.close(claims[2]) is CLOSED
        assert [await other.get(claim.key) is not None for claim in claims] == [True, True, False]

    async def test_a_sweep_that_a_renewal_overtakes_removes_nothing(
        self, store: FileStore, other: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = await make(store, a_key(), ttl=100)
        for each, late_by in ((store, 130), (other, 120)):
            each._disk.clock = Later()
            await each.check()
            each._disk.clock.by_s = late_by
        bury = store._claims._bury
        renewed = threading.Event()
        loop = asyncio.get_running_loop()

        def renew_first(key: str) -> None:
            # The sweeper has seen that the claim has expired, and has no lock yet.
            asyncio.run_coroutine_threadsafe(other.renew(claim, 100), loop).result(5)
            renewed.set()
            bury(key)

        monkeypatch.setattr(store._claims, "_bury", renew_first)
        await store._watch.walk()
        assert renewed.is_set()
        assert await other.get(claim.key) is not None

    async def test_the_expired_are_swept_without_subscribers(self, store: FileStore, root: Path) -> None:
        claims = [await make(store, a_key(), ttl=0.2) for _ in range(20)]
        standing = await make(store, a_key())
        await eventually(lambda: os.listdir(root / "claims") == [standing.key])
        assert claims

    async def test_a_renewal_never_shortens(self, store: FileStore) -> None:
        claim = await make(store, a_key(), ttl=1000)
        assert (await store.renew(claim, 10)).expires_at >= claim.expires_at - 0.1

    async def test_a_claim_renewed_by_hand_into_the_past_expires(self, store: FileStore, root: Path) -> None:
        claim = await make(store, a_key())
        os.utime(root / "claims" / claim.key, (1, 1))
        assert await store.get(claim.key) is None
        await make(store, claim.key)

    async def test_leftovers_of_the_dead_are_removed_and_the_living_left_alone(
        self, store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = [root / "tmp" / "dead", root / "claims" / ".coatcheck-check-dead"]
        for path in left:
            path.write_text("x")
        await store._watch.walk()
        assert all(path.exists() for path in left)
        monkeypatch.setattr(backends.file.disk, "STALE_S", 0.0)
        await asyncio.sleep(0.02)
        await store._watch.walk()
        assert not any(path.exists() for path in left)


class TestStamps:
    async def test_a_stamp_file_that_is_replaced_is_found_and_repeats_nothing(
        self, store: FileStore, other: FileStore, root: Path
    ) -> None:
        key = a_key()
        before = store.stamp(key)
        (root / "stamps").unlink()
        await eventually(lambda: store.stamp(key) == other.stamp(key) != before)
        before = store.stamp(key)
        assert await other.close(await make(other, key)) is CLOSED
        assert store.stamp(key) != before

    async def test_a_stamp_file_of_the_wrong_size_is_replaced(self, open_file: Open, root: Path) -> None:
        root.mkdir()
        (root / "stamps").write_bytes(b"short")
        store, other = await open_file(), await open_file()
        claim = await make(store, a_key())
        before = other.stamp(claim.key)
        await store.close(claim)
        assert other.stamp(claim.key) != before

    async def test_an_expiry_found_by_whoever_changes_the_stamp(self, store: FileStore, other: FileStore) -> None:
        claim = await make(store, a_key(), ttl=0.2)
        before = other.stamp(claim.key)
        await eventually(lambda: other.stamp(claim.key) != before)

    async def test_the_stamp_changes_only_after_the_claim_is_gone(
        self, store: FileStore, other: FileStore, frozen: Frozen
    ) -> None:
        """Else a reader could take the new stamp and then read the old claim."""
        claim = await make(store, a_key())
        before = other.stamp(claim.key)
        frozen.freeze("unlink")
        closing = asyncio.create_task(store.close(claim))
        await frozen.reached()
        assert other.stamp(claim.key) == before
        frozen.thaw()
        await closing
        assert other.stamp(claim.key) != before


class Kernel:
    """Stands for watchfiles: passes the real events on, unless told otherwise."""

    def __init__(self) -> None:
        self.silent = False
        self.drop = False
        self.fail: OSError | None = None
        self.watch = watchfiles.watch

    def __call__(self, *args: Any, stop_event: threading.Event, **options: Any) -> Iterator[Any]:
        if self.fail:
            raise self.fail
        options |= {"rust_timeout": 20, "yield_on_timeout": True}
        for changes in self.watch(*args, stop_event=stop_event, **options):
            if self.fail:
                raise self.fail
            if self.drop:
                changes = {change for change in changes if change[0] is watchfiles.Change.modified}
            if changes and not self.silent:
                yield changes


class TestTheWatch:
    @pytest.fixture
    def kernel(self, monkeypatch: pytest.MonkeyPatch) -> Kernel:
        kernel = Kernel()
        monkeypatch.setattr(watchfiles, "watch", kernel)
        monkeypatch.setattr(backends.file.watch, "PROVEN_EVERY_S", 0.2)
        return kernel

    @pytest.mark.parametrize("fail", [None, OSError(errno.EMFILE, "no inotify instance left")])
    async def test_where_the_kernel_reports_nothing_the_folder_is_listed(
        self,
        kernel: Kernel,
        fail: OSError | None,
        store: FileStore,
        other: FileStore,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        kernel.silent, kernel.fail = True, fail
        claim = await make(other, a_key())
        for _ in range(2):
            async with Subscriber(store) as subscriber:
                await other.close(claim)
                await subscriber.hears(claim.key)
                claim = await make(store, a_key())
                await other.close(claim)
                await make(other, claim.key)
                await subscriber.hears(claim.key)
                claim = await make(other, a_key())
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1

    async def test_a_watch_that_goes_silent_raises(self, kernel: Kernel, store: FileStore) -> None:
        async with Subscriber(store) as one, Subscriber(store) as two:
            kernel.silent = True
            for subscriber in (one, two):
                await subscriber.fails()
            kernel.silent = False
            async with Subscriber(store) as again:
                claim = await make(store, a_key())
                await store.close(claim)
                await again.hears(claim.key)

    async def test_a_watch_that_dies_raises_at_once(self, kernel: Kernel, store: FileStore) -> None:
        async with Subscriber(store) as subscriber:
            kernel.fail = OSError(errno.EIO, "the watch died")
            await subscriber.fails()

    async def test_what_the_kernel_forgot_to_report_is_found_by_the_walk(
        self, kernel: Kernel, store: FileStore, other: FileStore
    ) -> None:
        unread, read, remade = [await make(other, a_key()) for _ in range(3)]
        async with Subscriber(store) as subscriber:
            await make(store, a_key(), ttl=0.4)  # so the walk comes round soon
            await store.get(read.key)
            await store.get(remade.key)
            walked = store._disk.remove_stale_temps
            walks = 0

            def count() -> None:
                nonlocal walks
                walks += 1
                walked()

            store._disk.remove_stale_temps = count  # type: ignore[method-assign]
            await eventually(lambda: walks >= 2)
            kernel.drop = True
            for claim in (unread, read, remade):
                await other.close(claim)
            await make(other, remade.key)
            await subscriber.hears(unread.key, read.key, remade.key)
            assert subscriber.resets == 1

    async def test_a_walk_that_failed_hides_nothing_from_the_next(
        self, kernel: Kernel, store: FileStore, other: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = await make(store, a_key())
        async with Subscriber(store) as subscriber:
            await store.get(claim.key)
            kernel.drop = True
            await other.close(claim)
            with monkeypatch.context() as failing:
                _refuse(failing, errno.EIO, "listdir")
                with pytest.raises(StoreUnavailable):
                    await store._watch.walk()
            await store._watch.walk()
            await subscriber.hears(claim.key)

    async def test_a_claim_removed_by_hand_is_reported(self, store: FileStore, root: Path) -> None:
        claim = await make(store, a_key())
        async with Subscriber(store) as subscriber:
            (root / "claims" / claim.key).unlink()
            await subscriber.hears(claim.key)

    async def test_a_subscriber_that_does_not_listen_gets_a_reset(
        self, open_file: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backends.file.watch, "FanOut", lambda: FanOut(4))
        store = await open_file()
        events = store.subscribe()
        assert await anext(events) == Reset()
        claims = [await make(store, a_key()) for _ in range(9)]
        for claim in claims:
            await store.close(claim)
        (mailbox,) = store._watch._fanout._mailboxes
        await eventually(lambda: Reset() in mailbox._events.values())
        assert await anext(events) == Reset()
        await events.aclose()  # type: ignore[attr-defined]

    async def test_one_watch_serves_all_subscribers_and_goes_with_the_last(self, store: FileStore) -> None:
        def watches() -> int:
            return sum(thread.name == "coatcheck-watch" for thread in threading.enumerate())

        async with Subscriber(store), Subscriber(store), Subscriber(store):
            assert watches() == 1
        await eventually(lambda: watches() == 0)

    async def test_a_store_that_is_away_is_told_to_the_subscriber(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=0.2)
        frozen.freeze("open")
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(anext(aiter(store.subscribe())), 3)


async def test_many_claims_are_walked_a_slice_at_a_time_and_in_the_threads(
    open_file: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop serves turns meanwhile."""
    store = await open_file(sync=False)
    await asyncio.gather(*(make(store, a_key()) for _ in range(1000)))
    slices: list[int] = []
    stat, listdir, where = os.stat, os.listdir, set()

    def seen(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where.add(threading.current_thread() is threading.main_thread())
            return real(*args, **kwargs)

        return call

    async with Subscriber(store) as subscriber:
        known = store._watch._known
        assert known is not None
        saw = known.saw

        def saw_slice(standing: list[tuple[str, int]]) -> list[str]:
            slices.append(len(standing))
            return saw(standing)

        monkeypatch.setattr(known, "saw", saw_slice)
        with monkeypatch.context() as watched:
            watched.setattr(os, "stat", seen(stat))
            watched.setattr(os, "listdir", seen(listdir))
            await store._watch.walk()
        assert where == {False}
        assert sum(slices) == 1000
        assert max(slices) <= 256
        assert subscriber.deleted == []


def test_the_value_on_disk_is_readable_json(quick_path: Path) -> None:
    async def written() -> bytes:
        store = await FileStore.open(quick_path)
        claim = (await store.create_or_get("ab" * 20, ClaimValue(worker="w-1", rank=0, nonce="n"), 600)).claim
        await store.aclose()
        return (quick_path / "claims" / claim.key).read_bytes().replace(str(claim.revision).encode(), b"1")

    assert asyncio.run(written()) == (
        b'{"key":"' + b"ab" * 20 + b'","revision":1,"value":'
        b'{"worker":"w-1","rank":0,"replica":"","generation":0,"nonce":"n","created_at":0,"version":1}}'
    )
