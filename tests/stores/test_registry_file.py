"""What can happen to the records in a shared folder, and to the processes that share it.

The contract itself is checked by `test_registry`; each test here has a reason in the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import backends.file.registry
from backends.base import OutcomeUnknown, Reset, StoreUnavailable
from backends.file import FileStore
from backends.file.disk import Disk
from backends.registry import MAX_VALUE, Put, Removed
from tests.stores.test_file import Frozen
from tests.support.claimant import Claimant
from tests.support.stores import Watcher, a_key, eventually, make

Open = Callable[..., Awaitable[FileStore]]


@pytest.fixture
async def store(open_file: Open) -> FileStore:
    return await open_file()


@pytest.fixture
async def other(open_file: Open, store: FileStore) -> FileStore:
    return await open_file()


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch, open_file: Open) -> Iterator[Frozen]:
    frozen = Frozen(monkeypatch)
    yield frozen
    frozen.thaw()


async def put(store: FileStore, root: Path, name: str, ttl: float | None = None) -> Path:
    """The record's file."""
    folder = root / "registry" / "workers"
    before = set(folder.iterdir()) if folder.exists() else set()
    await store.registry.put("workers", name, name.encode(), ttl)
    (path,) = set(folder.iterdir()) - before
    return path


class TestForeignFiles:
    async def test_what_is_no_record_is_ignored_and_left_alone(
        self, store: FileStore, other: FileStore, root: Path
    ) -> None:
        await put(store, root, "whole")
        made = ["empty", "torn-head", "torn-value", "longer", "of-another-name", "no-json", "a-link", "a-pipe", "huge"]
        spoilt = [(what, await put(store, root, what, ttl=0.01)) for what in made]
        for what, path in spoilt:
            whole = path.read_bytes()
            path.unlink()
            match what:
                case "empty":
                    path.touch()
                case "torn-head":
                    path.write_bytes(whole[:20])
                case "torn-value":
                    path.write_bytes(whole[:-3])
                case "longer":
                    path.write_bytes(whole + b"!")
                case "of-another-name":
                    path.write_bytes(whole.replace(what.encode(), b"on-another-name"))
                case "no-json":
                    path.write_bytes(b"\xff\x00\n" * 50)
                case "a-link":
                    path.symlink_to(root / "registry" / "workers" / "nowhere")
                case "a-pipe":
                    os.mkfifo(path)
                case "huge":
                    path.write_bytes(whole + bytes(4 * MAX_VALUE))
        folder = root / "registry" / "workers"
        for name in ("README", ".hidden", "A" * 40, "ab", "f" * 41):
            (folder / name).write_text("mine")
        (folder / ("d" * 40)).mkdir()
        (root / "registry" / "Notes").write_text("mine")
        (root / "registry" / "Folder").mkdir()
        before = sorted(path for path in root.rglob("registry/**/*"))
        await store.registry.sweep()
        assert await other.registry.list("workers") == {"whole": b"whole"}
        async with Watcher(other.registry, "workers") as watcher:
            assert watcher.known == {"whole": b"whole"}
        assert sorted(path for path in root.rglob("registry/**/*")) == before
        # Whoever puts the record again has it.
        await store.registry.put("workers", "torn-value", b"again", None)
        assert await other.registry.list("workers") == {"whole": b"whole", "torn-value": b"again"}

    async def test_a_field_or_version_from_the_future_is_ignored(self, store: FileStore, root: Path) -> None:
        path = await put(store, root, "a")
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2,"colour":"red"'))
        assert await store.registry.list("workers") == {"a": b"a"}

    async def test_the_claims_neither_see_the_records_nor_sweep_them(self, store: FileStore, root: Path) -> None:
        """As older versions do, which know no registry: they list, watch and sweep `claims/` and `tmp/`."""
        path = await put(store, root, "a")
        passed = await put(store, root, "b", ttl=0.01)
        claim = await make(store, a_key())
        os.utime(path, (0, 0))
        await store._watch.walk()
        assert store._disk.names() == [claim.key]
        assert path.exists()
        assert passed.exists()
        assert os.listdir(root / "tmp") == []


@pytest.mark.usefixtures("quick_looks")
class TestTheDisk:
    async def test_a_record_that_cannot_be_read_fails_the_list_and_ends_the_watch(
        self, store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await put(store, root, "a")
        bad = await put(store, root, "b")
        real = os.open
        async with Watcher(store.registry, "workers") as watcher:
            for code in (errno.EIO, errno.EACCES):

                def failing(path: Any, *args: Any, code: int = code, **kwargs: Any) -> int:
                    if os.fspath(path) == str(bad):
                        raise OSError(code, os.strerror(code))
                    return real(path, *args, **kwargs)

                monkeypatch.setattr(os, "open", failing)
                os.utime(bad)  # what has not changed is not read again
                with pytest.raises(StoreUnavailable):
                    await store.registry.list("workers")
            await watcher.fails(within=10.0)
            assert watcher.known == {"a": b"a", "b": b"b"}, "never a part for the whole"
        assert await store.registry.list("marks") == {}
        await store.registry.sweep()
        monkeypatch.undo()
        async with Watcher(store.registry, "workers") as watcher:
            assert watcher.known == {"a": b"a", "b": b"b"}

    async def test_an_error_of_the_decisive_call_says_what_is_known(
        self, store: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await store.registry.put("workers", "a", b"1", None)

        def refusal(code: int) -> Callable[..., None]:
            def refuse(*args: object, **kwargs: object) -> None:
                raise OSError(code, os.strerror(code))

            return refuse

        for name, code, expected in (
            ("write", errno.ENOSPC, StoreUnavailable),
            ("write", errno.EIO, StoreUnavailable),
            ("replace", errno.ENOSPC, StoreUnavailable),
            ("replace", errno.EIO, OutcomeUnknown),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(os, name, refusal(code))
                with pytest.raises(expected):
                    await store.registry.put("workers", "a", b"2", 600)
        assert await store.registry.list("workers") == {"a": b"1"}
        assert os.listdir(Path(store._disk.root) / "tmp") == []

    async def test_not_answering(self, open_file: Open, frozen: Frozen) -> None:
        store = await open_file(deadline=1.0)
        await store.registry.put("workers", "a", b"1", 600)
        async with Watcher(store.registry, "workers") as watcher:
            frozen.freeze("open")
            began = time.monotonic()
            calls = (
                store.registry.put("workers", "a", b"2", 600),
                store.registry.remove("workers", "a"),
                *(store.registry.list("workers") for _ in range(60)),
            )
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {StoreUnavailable}
            assert time.monotonic() - began < 10, "one after the other they take twice as long"
            await watcher.fails(within=10.0)
        frozen.thaw()
        await store.check()
        assert await store.registry.list("workers") == {"a": b"1"}, "what was given up was not done afterwards"

    async def test_a_put_that_hangs_in_the_kernel_does_not_land_after_a_later_one(
        self, open_file: Open, frozen: Frozen
    ) -> None:
        store, other = await open_file(deadline=1.0), await open_file(deadline=0.3)
        await store.registry.put("workers", "a", b"0", None)
        frozen.freeze("replace")
        hangs = asyncio.create_task(store.registry.put("workers", "a", b"1", None))
        await frozen.reached()
        with pytest.raises(StoreUnavailable):
            await other.registry.remove("workers", "a")
        with pytest.raises(OutcomeUnknown):
            await hangs
        frozen.thaw()
        await eventually(lambda: b"1" in next((Path(store._disk.records) / "workers").iterdir()).read_bytes()[-1:])
        await other.registry.put("workers", "a", b"2", None)
        assert await store.registry.list("workers") == {"a": b"2"}

    async def test_a_share_that_is_gone_is_no_empty_registry(self, quick_path: Path, open_file: Open) -> None:
        share = quick_path / "share"
        share.mkdir()
        store = await open_file(share, shared=True)
        await store.registry.put("workers", "a", b"1", None)
        async with Watcher(store.registry, "workers") as watcher:
            share.rename(quick_path / "unmounted")
            share.mkdir()  # the empty mount point
            for call in (
                store.registry.list("workers"),
                store.registry.put("workers", "a", b"2", None),
                store.registry.remove("workers", "a"),
            ):
                with pytest.raises(StoreUnavailable):
                    await call
            await watcher.fails(within=10.0)
            assert watcher.known == {"a": b"1"}
            assert os.listdir(share) == []
            share.rmdir()
            (quick_path / "unmounted").rename(share)
        assert await store.registry.list("workers") == {"a": b"1"}

    async def test_a_folder_that_is_removed_is_made_anew(self, store: FileStore, other: FileStore, root: Path) -> None:
        await store.registry.put("workers", "a", b"1", None)
        async with Watcher(store.registry, "workers") as watcher:
            shutil.rmtree(root)
            await watcher.knows({})
            await other.registry.put("workers", "b", b"2", None)
            await watcher.knows({"b": b"2"})
            assert watcher.events == [Reset(), Removed("a"), Put("b", b"2")]

    async def test_a_folder_of_an_older_version_gets_its_registry(self, store: FileStore, root: Path) -> None:
        shutil.rmtree(root / "registry")
        assert await store.registry.list("workers") == {}
        await store.registry.remove("workers", "a")
        await store.registry.put("workers", "a", b"1", None)
        assert await store.registry.list("workers") == {"a": b"1"}
        assert (root / "registry").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("quick_looks")
class TestLooking:
    async def test_what_has_not_changed_is_not_read_again(
        self, store: FileStore, other: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(20):
            await put(store, root, f"w-{number}", ttl=600)
        read: list[str] = []
        real = backends.file.registry.Records._read

        def reading(self: Any, kind: str, file: str) -> Any:
            read.append(file)
            return real(self, kind, file)

        async with Watcher(other.registry, "workers") as watcher:
            monkeypatch.setattr(backends.file.registry.Records, "_read", reading)
            await store.registry.put("workers", "w-3", b"new", 600)
            await watcher.until(lambda: watcher.known["w-3"] == b"new")
            assert read == [backends.file.registry._file("w-3")]

    @pytest.mark.parametrize("ttl", [None, 600.0])
    async def test_quick_changes_of_one_size_leave_nobody_behind(
        self, store: FileStore, other: FileStore, ttl: float | None
    ) -> None:
        """Within a tick of the file system's clock, a third file may get the inode of the first."""
        async with Watcher(other.registry, "workers") as watcher:
            for number in range(300):
                await store.registry.put("workers", "a", b"%03d" % number, ttl)
            await watcher.knows({"a": b"299"}, 2.0)

    async def test_where_times_are_coarse_everything_is_read(
        self, store: FileStore, other: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file system that counts in seconds, and gives the next file the inode of the last."""
        path = await put(store, root, "a")
        real = os.stat
        status = SimpleNamespace(st_ino=7, st_mtime_ns=5 * 10**9, st_ctime_ns=5 * 10**9, st_size=path.stat().st_size)

        def stat(path_: Any, *args: Any, **kwargs: Any) -> Any:
            return status if os.fspath(path_) == str(path) else real(path_, *args, **kwargs)

        monkeypatch.setattr(os, "stat", stat)
        async with Watcher(other.registry, "workers") as watcher:
            await store.registry.put("workers", "a", b"b", None)
            await watcher.knows({"a": b"b"}, 2.0)


class TestProcesses:
    async def test_a_frozen_holder_stops_writes_of_its_names_and_no_claim(self, open_file: Open, root: Path) -> None:
        store = await open_file(deadline=1.0)
        path = await put(store, root, "a")
        async with Claimant(f"file://{root}") as peer:
            await peer.do("hold lock", key=f"r{path.name[0]}")
            peer.stop()
            for call in (store.registry.put("workers", "a", b"2", None), store.registry.remove("workers", "a")):
                with pytest.raises(StoreUnavailable):
                    await call
            assert await store.registry.list("workers") == {"a": b"a"}
            elsewhere = [name for name in "bcdefgh" if backends.file.registry._file(name)[0] != path.name[0]]
            for name in elsewhere:
                await store.registry.put("workers", name, b"1", None)
            for start in "0123456789abcdef":
                await store.close(await make(store, start + a_key()[1:]))
            await peer.kill()
        await store.registry.put("workers", "a", b"2", None)
        assert (await store.registry.list("workers"))["a"] == b"2"

    async def test_a_process_killed_at_any_moment_leaves_whole_records_and_no_lock(
        self, store: FileStore, root: Path
    ) -> None:
        values = [str(number) * 5000 for number in range(10)]
        for number in range(3):
            async with Claimant(f"file://{root}") as peer:
                await peer.do("put record", record="a", values=values[:1], ttl=None)
                peer.tell("put record", record="a", values=values * 100, ttl=None)
                await asyncio.sleep(0.02 + 0.013 * number)
                await peer.kill()
            assert (await store.registry.list("workers"))["a"].decode() in values
        await store.registry.put("workers", "a", b"mine", None)
        assert await store.registry.list("workers") == {"a": b"mine"}


class TestTime:
    async def test_what_has_ended_is_swept_and_the_rest_left(self, open_file: Open, root: Path) -> None:
        store = await open_file()
        ended = [await put(store, root, f"e-{number}", ttl=0.1) for number in range(5)]
        lasting, standing = await put(store, root, "lasting"), await put(store, root, "standing", ttl=600)
        os.utime(lasting, (0, 0))
        # The walk comes round by itself, as it does for claims of a short TTL.
        await make(store, a_key(), ttl=0.4)
        await eventually(lambda: not any(path.exists() for path in ended))
        assert lasting.exists()
        assert standing.exists()

    async def test_a_sweep_that_a_put_overtakes_removes_nothing(
        self, store: FileStore, other: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = await put(store, root, "a", ttl=0.05)
        await asyncio.sleep(0.1)
        locked = Disk.locked
        loop = asyncio.get_running_loop()

        @contextlib.contextmanager
        def put_first(disk: Disk, key: str) -> Iterator[int]:
            # The sweeper has seen that the record has ended, and has no lock yet.
            monkeypatch.setattr(Disk, "locked", locked)
            asyncio.run_coroutine_threadsafe(other.registry.put("workers", "a", b"2", 600), loop).result(5)
            with locked(disk, key) as lock:
                yield lock

        monkeypatch.setattr(Disk, "locked", put_first)
        await store.registry.sweep()
        assert Disk.locked is locked, "it came to that"
        assert path.exists()
        assert await store.registry.list("workers") == {"a": b"2"}


async def test_one_look_serves_all_who_watch_a_kind_and_ends_with_the_last(store: FileStore) -> None:
    tasks = len(asyncio.all_tasks())
    async with Watcher(store.registry, "workers"), Watcher(store.registry, "workers"):
        assert len(asyncio.all_tasks()) == tasks + 3
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)
