"""The stores under test. Each test that asks for `make_store` runs once per row of `KINDS`."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import backends.file.registry
from backends import open_store
from backends.base import ClaimStore
from backends.file import FileStore
from backends.memory import MemoryStore
from tests.support.etcd import ETCD_BINARIES, EtcdServer


@dataclass(frozen=True)
class Kind:
    name: str
    ttl: float = 0.4
    """The shortest TTL in seconds that the store keeps to."""
    late: float = 6.0
    """By how many seconds an expiry may be late, and be told late, on a busy machine."""
    stamps: bool = True
    etcd: Path | None = None

    def __str__(self) -> str:
        return self.name


KINDS = [
    Kind("memory"),
    Kind("file"),
    Kind("file-listing"),
    Kind("file-many-hosts", stamps=False),
    *(Kind(name, ttl=1.6, late=10.0, stamps=False, etcd=binary) for name, binary in sorted(ETCD_BINARIES.items())),
]


ACROSS = ("file", "file-many-hosts", "etcd-3.5")
across_processes = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.name in ACROSS], ids=str, indirect=True
)
"""To any etcd another process is what another connection is, and processes are dear: one series shows it."""


CAN_PLANT = ("file", "file-listing", "file-many-hosts")
can_plant = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in CAN_PLANT], ids=str, indirect=True)
"""Stores where others can write: those whose `plant` and `planted` are below. A store is added in all three."""


class MakeStore:
    """`await make_store()` answers one more instance over the same claims (of a memory store: the same object)."""

    def __init__(self, kind: Kind, url: str) -> None:
        self.kind = kind
        self.url = url
        """For other processes; empty where none can reach the claims."""
        self._opened: list[ClaimStore] = []

    async def __call__(self) -> ClaimStore:
        if self.kind.name == "memory":
            store: ClaimStore = self._opened[0] if self._opened else MemoryStore()
        elif self.kind.name == "file-listing":
            folder = Path(self.url.removeprefix("file://").removesuffix("?sync=no"))
            # A disk that others sync stands still for seconds now and then; what is late is other tests' affair.
            store = await FileStore.open(folder, deadline=20.0, sync=False, poll=True)
        else:
            store = await open_store(self.url)
        self._opened.append(store)
        return store

    async def plant(self, key: str, raw: bytes) -> None:
        """Somebody writes this where the claim of the key would be."""
        path = self._path(key)
        path.write_bytes(raw)
        os.utime(path, (time.time() + 600,) * 2)

    async def plant_value(self, key: str, value: dict[str, Any]) -> None:
        """Some version of ours writes a claim of this value."""
        await self.plant(key, json.dumps({"key": key, "revision": 7, "value": value}).encode())

    async def planted(self, key: str) -> bytes | None:
        """What stands there now."""
        path = self._path(key)
        return path.read_bytes() if path.exists() else None

    def _path(self, key: str) -> Path:
        return Path(self.url.removeprefix("file://").partition("?")[0]) / "claims" / key

    async def many(self, count: int) -> list[ClaimStore]:
        return [await self() for _ in range(count)]

    async def aclose(self) -> None:
        for store in self._opened:
            await store.aclose()


@pytest.fixture(scope="session")
def etcd_servers() -> Iterator[Callable[[Path], EtcdServer]]:
    servers: dict[Path, EtcdServer] = {}
    with contextlib.ExitStack() as stack:

        def serve(binary: Path) -> EtcdServer:
            if binary not in servers:
                servers[binary] = stack.enter_context(EtcdServer(binary))
            return servers[binary]

        yield serve


@pytest.fixture(params=sorted(ETCD_BINARIES))
def binary(request: pytest.FixtureRequest) -> Path:
    """Of each series that there is here."""
    return ETCD_BINARIES[request.param]


@pytest.fixture(scope="module", params=sorted(ETCD_BINARIES))
def shared(request: pytest.FixtureRequest, etcd_servers: Callable[[Path], EtcdServer]) -> EtcdServer:
    """For tests that leave the server as it is; each uses its own prefix."""
    return etcd_servers(ETCD_BINARIES[request.param])


@pytest.fixture
def root(quick_path: Path) -> Path:
    return quick_path / "root"


@pytest.fixture
async def open_file(root: Path) -> AsyncIterator[Callable[..., Awaitable[FileStore]]]:
    """Opens what `root` has, or another folder; all are closed afterwards."""
    opened: list[FileStore] = []

    async def open_file(at: Path = root, **options: Any) -> FileStore:
        opened.append(await FileStore.open(at, **options))
        return opened[-1]

    yield open_file
    for store in opened:
        await store.aclose()


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """Removed at the very end: for seconds after files were removed, ext4 looks at each of them before it makes another
    one, and a store makes hundreds."""
    with tempfile.TemporaryDirectory(prefix="coatcheck-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def disk_path(disk: Path) -> Path:
    """Not in memory, as the other folders of tests are."""
    return Path(tempfile.mkdtemp(dir=disk))


@pytest.fixture
async def make_store(
    kind: Kind, disk_path: Path, quick_path: Path, etcd_servers: Callable[[Path], EtcdServer]
) -> AsyncIterator[MakeStore]:
    if kind.etcd is not None:
        url = etcd_servers(kind.etcd).url(f"conformance/{secrets.token_hex(6)}")
    elif kind.name == "memory":
        url = ""
    elif kind.name == "file-many-hosts":
        url = f"file://{quick_path}?hosts=many"
    elif kind.name == "file-listing":
        # On the disk: there, a new file often gets the inode of the one just removed.
        url = f"file://{disk_path}/claims?sync=no"
    else:
        url = f"file://{quick_path}/claims"
    make_store = MakeStore(kind, url)
    yield make_store
    await make_store.aclose()


@pytest.fixture
async def store(make_store: MakeStore) -> ClaimStore:
    return await make_store()


@pytest.fixture
async def other(make_store: MakeStore, store: ClaimStore) -> ClaimStore:
    """A second instance over the same claims."""
    return await make_store()


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at every second; what that means for others is one test's affair."""
    monkeypatch.setattr(backends.file.registry, "LOOK_EVERY_S", 0.05)
