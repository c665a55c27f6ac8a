"""What can happen to a shared folder, and to the processes that share it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import watchfiles

import backends.file.claims
import backends.file.disk
import backends.file.stamps
import backends.file.watch
from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimUnreadable,
    ClaimValue,
    CloseOutcome,
    OutcomeUnknown,
    Reset,
    StoreUnavailable,
)
from backends.fanout import FanOut
from backends.file import FileStore
from tests.stores.test_model import Later
from tests.support.claimant import Claimant
from tests.support.stores import Subscriber, a_key, a_value, eventually, make

CLOSED, GONE = CloseOutcome.CLOSED, CloseOutcome.GONE
Open = Callable[..., Awaitable[FileStore]]


@pytest.fixture
async def store(open_file: Open) -> FileStore:
    return await open_file()


@pytest.fixture
async def other(open_file: Open, store: FileStore) -> FileStore:
    return await open_file()


def temps(root: Path) -> list[str]:
    return os.listdir(root / "tmp")


def place(root: Path, key: str) -> Path:
    return root / "claims" / key


async def unreadable(store: FileStore, key: str) -> Claim:
    with pytest.raises(ClaimUnreadable) as caught:
        await store.get(key)
    return caught.value.claim


class TestForeignFiles:
    @pytest.fixture(params=["of another key", "a symlink", "a pipe", "a folder", "a full folder"])
    async def spoilt(self, request: pytest.FixtureRequest, store: FileStore, root: Path) -> Path:
        path = place(root, a_key())
        match request.param:
            case "of another key":
                path.symlink_to(os.readlink(place(root, (await make(store, a_key())).key)))
            case "a symlink":
                path.symlink_to("/etc/passwd")
            case "a pipe":
                os.mkfifo(path)
            case "a folder":
                path.mkdir()
            case "a full folder":
                (path / "deep").mkdir(parents=True)
                (path / "deep" / "file").write_text("mine")
        return path

    async def test_what_is_no_claim_is_left_alone_until_an_operator_closes_it(
        self, spoilt: Path, store: FileStore, other: FileStore, root: Path
    ) -> None:
        before = spoilt.lstat()
        for call in (store.create_or_get(spoilt.name, a_value(), 600), other.get(spoilt.name)):
            with pytest.raises(ClaimUnreadable):
                await call
        await store._watch.walk()
        assert os.path.samestat(before, spoilt.lstat())
        claim = await unreadable(other, spoilt.name)
        assert await store.close(claim) is CLOSED
        assert not os.path.lexists(spoilt)
        assert not temps(root)
        await make(other, spoilt.name)

    async def test_a_claim_that_this_user_may_not_read_costs_only_itself(
        self, store: FileStore, root: Path, quick_path: Path
    ) -> None:
        """As of a replica run as root that has written a file beside a user's."""
        spoilt, claim = place(root, a_key()), await make(store, a_key())
        spoilt.write_text("secret")
        spoilt.chmod(0)
        os.utime(spoilt, (time.time() + 600,) * 2)
        async with Claimant(f"file://{root}") as other:
            if os.geteuid() == 0:
                quick_path.chmod(0o755)
                for path in (root, *root.rglob("*")):
                    if path != spoilt:
                        os.chown(path, 65534, 65534, follow_symlinks=False)
                await other.do("identity")
            refused = {"error": "ClaimUnreadable"}
            assert await other.do("create", keys=[spoilt.name], worker="w", ttl=600) == refused
            assert await other.close(claim) == "closed"
            assert (await other.create(a_key(), "w-2", 600)).value.worker == "w-2"
        assert spoilt.stat().st_size == 6

    async def test_what_root_makes_in_the_folder_of_a_user_is_that_users(
        self, store: FileStore, root: Path, quick_path: Path, open_file: Open
    ) -> None:
        if os.geteuid() != 0:
            return  # nobody else can give anything away
        quick_path.chmod(0o755)
        for path in (root, *root.rglob("*")):
            os.chown(path, 65534, 65534, follow_symlinks=False)
        (root / "locks" / "ab").unlink()
        by_root = await open_file()
        claim = await make(by_root, "ab" + a_key()[2:])
        async with Claimant(f"file://{root}") as other:
            await other.do("identity")
            assert await other.do("stamp", key=claim.key) == by_root.stamp(claim.key) != 0
            assert await other.close(claim) == "closed"

    async def test_what_cannot_be_read_is_swept_when_it_has_expired_and_never_before(
        self, store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by_hand, expiring, folder = (place(root, a_key()) for _ in range(3))
        for path in (by_hand, expiring):
            path.write_text("garbage")
        os.utime(by_hand, (1, 1))  # says nothing: whoever wrote it may not know what an mtime means here
        folder.mkdir()
        os.utime(expiring, (time.time() + 0.2,) * 2)
        await asyncio.sleep(0.25)
        await store._watch.walk()
        assert [path.exists() for path in (by_hand, expiring, folder)] == [True, False, True]
        with pytest.raises(ClaimUnreadable):
            await store.create_or_get(by_hand.name, a_value(), 600)
        monkeypatch.setattr(backends.file.claims, "_UNREADABLE_NS", 0)
        await asyncio.sleep(0.02)
        await store._watch.walk()
        assert [path.exists() for path in (by_hand, folder)] == [False, True]

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

    @pytest.mark.parametrize("key", ["../../etc/passwd", "", "A" * 40, "ab/" + "c" * 40, "f" * 40 + "\n"])
    async def test_no_key_leads_out_of_the_folder(self, store: FileStore, key: str) -> None:
        with pytest.raises(ValueError):
            await store.create_or_get(key, a_value(), 600)

    async def test_a_field_or_version_from_the_future_is_ignored(self, store: FileStore, root: Path) -> None:
        claim = await make(store, a_key())
        path = place(root, claim.key)
        record = os.readlink(path).replace('"version":1', '"version":2,"colour":"red"')
        path.unlink()
        path.symlink_to(record)
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
            assert os.path.lexists(place(root, new.key))
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
        symlink = os.symlink

        def remove_first(*args: Any, **kwargs: Any) -> None:
            monkeypatch.setattr(os, "symlink", symlink)
            shutil.rmtree(root)
            symlink(*args, **kwargs)

        monkeypatch.setattr(os, "symlink", remove_first)
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
            assert os.path.lexists(place(quick_path / "two", claim.key))
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
                    _refuse(full, errno.ENOSPC, "write", "symlink")
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
                _refuse(full, errno.ENOSPC, "write", "symlink")
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
                _refuse(read_only, errno.EROFS, "link", "symlink", "unlink", "utime", "write")
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
        store = await open_file(deadline=1.0)
        claim, value = await make(store, a_key()), a_value()
        frozen.freeze("open", "lstat")
        began = time.monotonic()
        calls = [store.get(claim.key) for _ in range(60)]
        creating = store.create_or_get(a_key(), value, 600)
        answers = await asyncio.gather(*calls, creating, store.close(claim), store.check(), return_exceptions=True)
        assert time.monotonic() - began < 10, "one after the other they take twice as long"
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        frozen.thaw()
        await store.check()
        assert await store.close(claim) is CLOSED, "what was given up was not done afterwards"

    async def test_a_creation_that_was_given_up_is_not_done_later(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=1.0)
        key = a_key()
        frozen.freeze("lstat")
        with pytest.raises(StoreUnavailable):
            await store.create_or_get(key, a_value(), 600)
        frozen.thaw()
        await store.check()
        assert await store.get(key) is None
        await eventually(lambda: not temps(Path(store._disk.root)))

    async def test_a_creation_of_unknown_outcome_is_recognised_when_sent_again(
        self, open_file: Open, frozen: Frozen
    ) -> None:
        store = await open_file(deadline=1.0)
        key, value = a_key(), a_value()
        frozen.freeze("symlink")
        with pytest.raises(OutcomeUnknown):
            await store.create_or_get(key, value, 600)
        frozen.thaw()
        assert (await store.create_or_get(key, value, 600)).created

    async def test_a_close_of_unknown_outcome_is_gone_when_sent_again(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=1.0)
        claim = await make(store, a_key())
        before = store.stamp(claim.key)
        frozen.freeze("unlink")
        with pytest.raises(OutcomeUnknown):
            await store.close(claim)
        frozen.thaw()
        assert await store.close(claim) is GONE
        assert store.stamp(claim.key) != before

    async def test_a_hung_file_system_stops_neither_the_loop_nor_the_stamps(
        self, open_file: Open, frozen: Frozen
    ) -> None:
        store = await open_file(deadline=1.0)
        claim = await make(store, a_key())
        async with Subscriber(store):
            frozen.freeze("open", "lstat", "stat", "read", "readlink", "listdir", "symlink", "fstat")
            calls = [asyncio.create_task(store.get(claim.key)) for _ in range(20)]
            await frozen.reached()
            began = time.monotonic()
            for _ in range(100):
                assert store.stamp(claim.key) != 0
                await asyncio.sleep(0.005)
            assert time.monotonic() - began < 20, "each waits for the deadline"
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(answer, StoreUnavailable)
            frozen.thaw()

    def test_a_process_whose_store_hangs_ends_all_the_same(self, root: Path) -> None:
        code = """
import asyncio, os, sys, threading
from pathlib import Path
from backends.base import StoreUnavailable
from backends.file import FileStore

def hang(*_, **__):
    threading.Event().wait()

async def main():
    store = await FileStore.open(Path(sys.argv[1]), deadline=1.0)
    os.lstat = os.open = os.listdir = hang
    calls = [store.get("ab" * 20) for _ in range(9)]
    assert {type(error) for error in await asyncio.gather(*calls, return_exceptions=True)} == {StoreUnavailable}
    await store.aclose()

asyncio.run(main())
"""
        subprocess.run([sys.executable, "-c", code, str(root)], check=True, timeout=15, cwd=Path(__file__).parents[2])

    async def test_aclose_does_not_wait_for_ever(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=1.0)
        frozen.freeze("lstat")
        with pytest.raises(StoreUnavailable):
            await store.get(a_key())
        async with asyncio.timeout(10):
            await store.aclose()

    @pytest.mark.parametrize(
        ("code", "known"),
        [(errno.EIO, OutcomeUnknown), (errno.ETIMEDOUT, OutcomeUnknown), (errno.EDQUOT, StoreUnavailable)],
    )
    async def test_an_error_of_the_decisive_call_says_what_is_known(
        self, store: FileStore, root: Path, code: int, known: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as failing:
            _refuse(failing, code, "symlink")
            with pytest.raises(known):
                await store.create_or_get(a_key(), a_value(), 600)
        assert not temps(root)

    @pytest.mark.parametrize("name", ["link", "symlink"])
    async def test_a_link_that_reports_its_own_success_as_taken(
        self, name: str, quick_path: Path, open_file: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS: the answer was lost, the client asked again."""
        real = getattr(os, name)

        def twice(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            real(*args, **kwargs)

        store = await open_file(quick_path, shared=name == "link")
        monkeypatch.setattr(os, name, twice)
        outcome = await store.create_or_get(a_key(), a_value(), 600)
        assert outcome.created
        assert await store.close(outcome.claim) is CLOSED

    async def test_where_the_stamp_cannot_be_changed_nothing_is_closed(
        self, store: FileStore, other: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = await make(store, a_key())
        before = other.stamp(claim.key)
        with monkeypatch.context() as failing:
            _refuse(failing, errno.EIO, "read")
            with pytest.raises(StoreUnavailable):
                await store.close(claim)
            assert await other.get(claim.key) is not None
        assert await store.close(claim) is CLOSED
        assert other.stamp(claim.key) != before

    async def test_errors_leak_no_descriptors(self, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
        claim = await make(store, a_key())
        before = len(os.listdir("/proc/self/fd"))
        for name in ("symlink", "readlink", "lstat", "unlink", "utime", "read", "fstat", "stat", "open"):
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

    def freeze(self, *names: str) -> None:
        for name in names:
            self._monkeypatch.setattr(os, name, self._hanging(getattr(os, name)))

    def _hanging(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("coatcheck-file"):
                self._reached.set()
                self._thawed.wait(30)
            return real(*args, **kwargs)

        return hang

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
        store = await open_file(deadline=1.0)
        claim = await make(store, "ab" + a_key()[2:])
        async with Claimant(f"file://{root}") as other:
            await other.do("hold lock", key=claim.key)
            other.stop()
            for call in (store.close(claim), store.renew(claim, 600)):
                began = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    await call
                assert time.monotonic() - began < 10
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
        store, other = await open_file(deadline=5.0), await open_file(deadline=1.0)
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
        claim = await make(store, a_key(), ttl=2.0)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        monkeypatch.setattr(time, "time_ns", lambda: int((real() - 3600) * 1e9))
        assert await other.get(claim.key) is not None
        with pytest.raises(AssertionError):
            await make(other, claim.key)
        await asyncio.sleep(2.6)
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

    async def test_a_claim_that_was_copied_back_expires_when_it_would_have(self, store: FileStore, root: Path) -> None:
        """From a backup, with its times or without."""
        kept, fading = await make(store, a_key()), await make(store, a_key(), ttl=2.0)
        for claim, times in ((kept, (1, 1)), (fading, None)):
            path = place(root, claim.key)
            record = os.readlink(path)
            path.unlink()
            path.symlink_to(record)
            if times is not None:
                os.utime(path, times, follow_symlinks=False)
        assert (await store.get(kept.key) or fading).revision == kept.revision
        assert await store.get(fading.key) is not None
        await asyncio.sleep(2.6)
        assert await store.get(fading.key) is None
        await make(store, fading.key)

    async def test_a_claim_that_is_too_long_for_a_link_is_a_file(
        self, store: FileStore, other: FileStore, root: Path
    ) -> None:
        long, short = await make(store, a_key(), worker="w" * 2000), await make(store, a_key())
        assert [place(root, claim.key).is_symlink() for claim in (long, short)] == [False, True]
        read = await other.get(long.key)
        assert read is not None
        assert (read.value, read.revision) == (long.value, long.revision)
        await other.renew(long, 700)
        assert await other.close(long) is CLOSED

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


def pages(record: Path) -> list[Path]:
    """The files in memory that the folder's record names."""
    return [Path(backends.file.stamps.MEMORY) / json.loads(record.read_bytes())["page"]]


def _raising(error: Exception) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> None:
        raise error

    return call


class TestStamps:
    @pytest.mark.parametrize("how", ["the record removed", "the record spoilt", "the page removed", "a reboot"])
    async def test_stamps_that_are_lost_are_found_and_repeat_nothing(
        self, how: str, store: FileStore, other: FileStore, root: Path
    ) -> None:
        key, record = a_key(), root / "stamps"
        before = store.stamp(key)
        assert before == other.stamp(key) != 0
        match how:
            case "the record removed":
                record.unlink()
            case "the record spoilt":
                record.write_bytes(b"short")
            case "the page removed":
                pages(record)[0].unlink()
            case "a reboot":
                for each in (store, other):
                    each._stamps.leave()
                    each._stamps._had_one = False
                said = json.loads(record.read_bytes())
                record.write_text(json.dumps(said | {"boot": "an earlier one"}))
        await eventually(lambda: 0 != store.stamp(key) == other.stamp(key) != before)
        before = store.stamp(key)
        assert await other.close(await make(other, key)) is CLOSED
        assert store.stamp(key) != before

    @pytest.mark.parametrize("apart", ["another memory", "another user's", "another machine's", "none", "full"])
    async def test_where_not_all_have_the_same_memory_nobody_has_stamps_and_events_do(
        self,
        apart: str,
        store: FileStore,
        root: Path,
        open_file: Open,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """As of containers with a /dev/shm each: a close there would not be seen here, silently."""
        claim = await make(store, a_key())
        assert store.stamp(claim.key) != 0
        memory = backends.file.stamps._memory()
        assert memory is not None
        async with Subscriber(store) as subscriber:
            with monkeypatch.context() as elsewhere:
                match apart:
                    case "another memory":
                        elsewhere.setattr(backends.file.stamps, "_memory", lambda: memory._replace(device=1))
                    case "another machine's":
                        elsewhere.setattr(backends.file.stamps, "_boot", lambda: "another")
                    case "none":
                        elsewhere.setattr(backends.file.stamps, "_memory", lambda: None)
                    case "another user's" | "full":
                        code = errno.ENOSPC if apart == "full" else errno.EACCES
                        if apart == "full":
                            pages(root / "stamps")[0].unlink()
                        refused = OSError(code, os.strerror(code))
                        elsewhere.setattr(backends.file.stamps, "_opened", _raising(refused))
                other = await open_file()
                await other.check()
            await eventually(lambda: store.stamp(claim.key) == 0 == other.stamp(claim.key))
            assert [record.levelname for record in caplog.records].count("WARNING") >= 1
            await subscriber.until(lambda: subscriber.resets == 2)  # it listens more quickly now
            assert await other.close(claim) is CLOSED
            await subscriber.hears(claim.key)

    async def test_the_last_to_leave_removes_the_page_and_a_killed_process_leaves_none_for_long(
        self, root: Path, quick_path: Path, open_file: Open
    ) -> None:
        one, two = await open_file(), await open_file()
        (page,) = pages(root / "stamps")
        await one.aclose()
        assert page.exists()
        await two.aclose()
        assert not page.exists()
        async with Claimant(f"file://{root}") as killed:
            (page,) = pages(root / "stamps")
            await killed.kill()
        assert page.exists()
        shutil.rmtree(root)
        await open_file(quick_path / "elsewhere")
        assert not page.exists()

    async def test_nothing_of_the_folder_is_mapped(self, store: FileStore, root: Path) -> None:
        """A page fault on a file system that hangs would stop the loop, and SIGTERM with it."""
        await store.close(await make(store, a_key()))
        mapped = Path("/proc/self/maps").read_text()
        assert str(root) not in mapped
        assert pages(root / "stamps")[0].name in mapped

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
        self.steps_ms: list[int] = []
        """How long each listener waits between two looks."""
        self.watch = watchfiles.watch

    def __call__(self, *args: Any, stop_event: threading.Event, **options: Any) -> Iterator[Any]:
        if self.fail:
            raise self.fail
        self.steps_ms.append(options["step"])
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

    async def test_where_stamps_tell_of_a_close_events_are_looked_for_seldom(
        self, kernel: Kernel, store: FileStore
    ) -> None:
        """Else an idle replica is woken a hundred times a second."""
        async with Subscriber(store):
            assert store.stamp(a_key()) != 0
            assert kernel.steps_ms == [100]

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
    lstat, listdir, where = os.lstat, os.listdir, set()

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
            watched.setattr(os, "lstat", seen(lstat))
            watched.setattr(os, "listdir", seen(listdir))
            await store._watch.walk()
        assert where == {False}
        assert sum(slices) == 1000
        assert max(slices) <= 256
        assert subscriber.deleted == []


async def test_of_many_claims_each_walk_looks_at_some_and_misses_none_that_went(
    open_file: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends.file.watch, "WALKED_WHOLE", 50)
    store = await open_file()
    claims = [await make(store, a_key()) for _ in range(200)]
    expired = await make(store, a_key(), ttl=0.1)
    looked_at: list[int] = []
    tend = store._claims.tend

    def counted(names: list[str]) -> list[tuple[str, int]]:
        looked_at.append(len(names))
        return tend(names)

    monkeypatch.setattr(store._claims, "tend", counted)
    async with Subscriber(store) as subscriber:
        gone, again = claims[0], claims[1]
        place(root, gone.key).unlink()
        await asyncio.sleep(0.15)
        for _ in range(5):
            looked_at.clear()
            await store._watch.walk()
            assert sum(looked_at) < 150
        await subscriber.hears(gone.key, expired.key)
        assert not os.path.lexists(place(root, expired.key))
        assert again.key not in subscriber.deleted


def test_the_value_on_disk_is_readable_json(quick_path: Path) -> None:
    async def written() -> bytes:
        store = await FileStore.open(quick_path)
        claim = (await store.create_or_get("ab" * 20, ClaimValue(worker="w-1", rank=0, nonce="n"), 600)).claim
        await store.aclose()
        raw = os.readlink(quick_path / "claims" / claim.key).encode()
        record = json.loads(raw)
        assert abs(record["expires"] / 1e9 - time.time() - LIFETIME * 600) < 5
        return raw.replace(str(claim.revision).encode(), b"1").replace(str(record["expires"]).encode(), b"2")

    assert asyncio.run(written()) == (
        b'{"key":"' + b"ab" * 20 + b'","revision":1,"expires":2,"value":'
        b'{"worker":"w-1","rank":0,"replica":"","generation":0,"nonce":"n","created_at":0,"served":false,'
        b'"version":1}}'
    )
