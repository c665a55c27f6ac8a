"""A claims URL means one thing or is refused, at once, with the value and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backends import open_store
from backends.base import StoreConfigurationError
from backends.file import FileStore
from backends.memory import MemoryStore


async def test_memory() -> None:
    store = await open_store("memory://", capacity=7)
    assert isinstance(store, MemoryStore)
    assert store._capacity == 7
    await store.aclose()


@pytest.mark.parametrize("prefix", ["file://", "file://localhost"])
async def test_a_file_store_makes_its_folder_for_this_user_alone(prefix: str, tmp_path: Path) -> None:
    store = await open_store(f"{prefix}{tmp_path}/new/my%20claims", across_processes=True)
    await store.check()
    await store.aclose()
    root = tmp_path / "new" / "my claims"
    assert root.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in root.rglob("*")} == {0}


async def test_a_folder_for_many_hosts_has_to_be_there(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/share?hosts=many"
    with pytest.raises(StoreConfigurationError, match="mount the share"):
        await open_store(url)
    (tmp_path / "share").mkdir()
    store = await open_store(url, across_processes=True)
    await store.aclose()


async def test_the_deadline_and_the_options_reach_the_store(tmp_path: Path) -> None:
    store = await open_store(f"file://{tmp_path}/c?sync=no&hosts=one", deadline=3.0)
    assert isinstance(store, FileStore)
    assert store._threads._deadline == 3.0
    assert store._disk._sync is False
    await store.aclose()


async def test_an_etcd_that_is_away_is_no_configuration_error() -> None:
    store = await open_store("etcd://127.0.0.1:1/coatcheck", across_processes=True)
    await store.aclose()


@pytest.mark.parametrize(
    ("url", "named", "remedy"),
    [
        ("redis://localhost/0", "redis", "memory://"),
        ("", "", "memory://"),
        ("/var/lib/coatcheck", "/var/lib/coatcheck", "file:///folder"),
        ("file://var/lib/coatcheck", "var/lib/coatcheck", "file:///var"),
        ("file:var/lib", "var/lib", "file:///var"),
        ("file:///", "file:///", "name a folder"),
        ("file://server/share", "server", "three slashes"),
        ("file:///tmp/x?host=many", "'host'", "hosts"),
        ("file:///tmp/x?hosts=two", "'two'", "one or many"),
        ("file:///tmp/x?hosts=one&hosts=many", "'hosts'", "once"),
        ("file:///tmp/x#y", "#", "%23"),
        ("file:///tmp/me@home?hosts=two", "file:///tmp/me@home", "one or many"),
        ("file:///dev/null/claims", "/dev/null/claims", "name a folder"),
        ("memory://host", "host", "memory://"),
        ("memory:///path", "/path", "memory://"),
        ("memory://?ttl=3", "'ttl'", "none"),
        ("etcd://", "etcd", "host"),
        ("etcd://h/p?tsl=true", "'tsl'", "known: tls"),
        ("etcd://h/p?tls=yes", "'yes'", "true or false"),
        ("etcd://h/p?tls=true&tls=true", "'tls'", "once"),
        ("etcd://h/p?tls=true&ca=", "'ca'", "give it a value"),
        ("file://[", "", "file:///folder"),
    ],
)
async def test_a_url_that_means_nothing_is_refused_with_the_remedy(url: str, named: str, remedy: str) -> None:
    with pytest.raises(StoreConfigurationError) as caught:
        await open_store(url)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@localhost/0?password=hunter2",
        "file://user:hunter2@host/dir",
        "memory://user:hunter2@host",
        "etcd://user:hunter2@localhost:2379/prefix?nonsense=1",
        # A password that is not percent-encoded ends the host's part early.
        "etcd://user:hunter2/more@localhost:2379/prefix",
        "etcd://user:x/hunter2@localhost:2379/prefix?nonsense=1",
        "etcd://user:x?hunter2@localhost:2379/prefix",
        "etcd://user:x/y?hunter2@localhost:2379/prefix",
        "etcd://user:x/y?hunter2=1@localhost:2379/prefix",
        "etcd://user:x/y?tls=hunter2@localhost:2379/prefix",
        "file://user:x/hunter2@host",
        "memory://user:x?hunter2@host",
        "memory://user:x#hunter2@host",
        "redis:user:hunter2@host",
    ],
)
async def test_no_message_tells_a_password(url: str) -> None:
    with pytest.raises(StoreConfigurationError) as caught:
        await open_store(url)
    assert "hunter2" not in str(caught.value)


async def test_a_store_that_several_processes_cannot_share_is_refused_to_them() -> None:
    with pytest.raises(StoreConfigurationError, match=r"across processes.*file:///folder"):
        await open_store("memory://", across_processes=True)


def test_only_the_store_that_is_asked_for_is_imported() -> None:
    code = """
import asyncio, sys
from backends import open_store
store = asyncio.run(open_store("memory://"))
assert not {"grpc", "watchfiles", "aetcd"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=Path(__file__).parents[2])
