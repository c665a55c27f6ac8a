"""What only etcd can do to a registry: it freezes, executes late, loses leases, compacts, fills up, and pages.

The contract itself is checked by `test_registry`; each test here has a reason in etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aetcd import rpc

import backends.etcd.registry
from backends.base import OutcomeUnknown, Reset, StoreError, StoreUnavailable
from backends.etcd.store import EtcdStore
from backends.registry import MAX_VALUE, Put, Removed
from tests.support.etcd import ETCD_BINARIES, EtcdServer
from tests.support.scripted_etcd import ScriptedEtcd
from tests.support.stores import Watcher, a_key, eventually, make

INTERVAL = 0.3
"""Between signs of life of a watch; it is given up after 2.5 of them."""
Open = Callable[..., Awaitable[EtcdStore]]


@pytest.fixture
def server(binary: Path) -> Iterator[EtcdServer]:
    """For tests that are rough with it."""
    with EtcdServer(binary) as server:
        yield server


@pytest.fixture
async def open_store() -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as stack:

        async def open_(url: str, **options: float) -> EtcdStore:
            store = await EtcdStore.open(url, **({"deadline": 1.0} | options))
            stack.push_async_callback(store.aclose)
            return store

        yield open_


@pytest.fixture
def prefix() -> str:
    return f"t{secrets.token_hex(6)}"


class Sent:
    """The transactions that a store has sent, to be sent once more: as a copy that was late arrives."""

    def __init__(self, store: EtcdStore) -> None:
        self._txn = store.cluster.endpoints[0].txn
        self.requests: list[Any] = []
        store.cluster.endpoints[0].txn = self._record

    def _record(self, request: Any, **options: Any) -> Any:
        copy = rpc.TxnRequest()
        copy.CopyFrom(request)
        self.requests.append(copy)
        return self._txn(request, **options)

    async def again(self) -> None:
        for request in tuple(self.requests):
            await self._txn(request)


# --- what a call costs


async def test_an_owner_alone_with_its_name_pays_one_call_a_put(
    shared: EtcdServer, open_store: Open, prefix: str
) -> None:
    store, peer = await open_store(shared.url(prefix)), await open_store(shared.url(prefix))

    async def cost(call: Awaitable[None]) -> tuple[int, int]:
        before = shared.calls("Txn"), shared.calls("LeaseGrant")
        await call
        return shared.calls("Txn") - before[0], shared.calls("LeaseGrant") - before[1]

    assert await cost(store.registry.put("workers", "a", b"1", 600)) == (1, 1)
    assert await cost(store.registry.put("workers", "a", b"2", 600)) == (1, 0)
    assert await cost(store.registry.put("workers", "b", b"1", 600)) == (1, 0), "records of one TTL share leases"
    assert await cost(store.registry.put("workers", "c", b"1", None)) == (1, 0)
    assert await cost(peer.registry.put("workers", "c", b"2", None)) == (2, 0), "it learns who was there"
    assert await cost(peer.registry.put("workers", "c", b"3", None)) == (1, 0)
    await store.create_or_get(a_key(), (await make(peer, a_key())).value, 600)
    assert await cost(peer.registry.remove("workers", "c")) == (1, 0)
    assert await cost(store.registry.put("workers", "b", b"2", 600)) == (1, 0), "whatever others have removed"


async def test_a_refreshed_record_needs_few_leases(shared: EtcdServer, open_store: Open, prefix: str) -> None:
    store = await open_store(shared.url(prefix))
    before = shared.calls("LeaseGrant")
    began = time.monotonic()
    while time.monotonic() < began + 3.0:
        await store.registry.put("replicas", "a", b"1", 4.0)
        await asyncio.sleep(0.1)
    most = time.monotonic() - began + 1.5
    assert shared.calls("LeaseGrant") - before <= most, "one per quarter TTL, and the one made ahead"


# --- late copies


async def test_a_late_copy_of_a_put_undoes_nothing(shared: EtcdServer, open_store: Open, prefix: str) -> None:
    store, peer = await open_store(shared.url(prefix)), await open_store(shared.url(prefix))
    await store.registry.put("marks", "standing", b"0", None)
    sent = Sent(store)
    for name in ("standing", "new", "removed", "made-and-removed"):
        await store.registry.put("marks", name, b"old", None)
    await peer.registry.put("marks", "standing", b"later", None)
    await peer.registry.put("marks", "new", b"later", None)
    for name in ("removed", "made-and-removed"):
        await peer.registry.remove("marks", name)
    await sent.again()
    assert await peer.registry.list("marks") == {"standing": b"later", "new": b"later"}


async def test_a_put_that_never_arrived_does_not_arrive_after_its_removal(
    shared: EtcdServer, open_store: Open, prefix: str
) -> None:
    """Cordon, no answer, uncordon; and then the cordon arrives. There was no key before, and there is none after."""
    store, peer = await open_store(shared.url(prefix)), await open_store(shared.url(prefix))
    sent = Sent(store)
    real, lost = store.cluster.endpoints[0].txn, rpc.TxnRequest()

    def lose(request: Any, **options: Any) -> Any:
        lost.CopyFrom(request)
        store.cluster.endpoints[0].txn = real
        raise StoreUnavailable("lost")

    store.cluster.endpoints[0].txn = lose
    with pytest.raises(StoreUnavailable):
        await store.registry.put("marks", "w-1", b"cordon", None)
    sent.requests.append(lost)
    for remover in (peer, store):
        await remover.registry.remove("marks", "w-1")
        await sent.again()
        assert await peer.registry.list("marks") == {}


async def test_a_late_copy_of_a_removal_spares_what_was_put_since(
    shared: EtcdServer, open_store: Open, prefix: str
) -> None:
    store, peer = await open_store(shared.url(prefix)), await open_store(shared.url(prefix))
    await store.registry.put("marks", "a", b"1", None)
    sent = Sent(store)
    await store.registry.remove("marks", "a")
    await store.registry.remove("marks", "never")
    await peer.registry.put("marks", "a", b"2", None)
    await peer.registry.put("marks", "never", b"3", None)
    await sent.again()
    assert await store.registry.list("marks") == {"a": b"2", "never": b"3"}


# --- an etcd that is away


@pytest.mark.parametrize("blow", ["pause", "kill"])
async def test_an_etcd_that_dies_is_told_to_all_and_a_repeated_call_is_safe(
    server: EtcdServer, open_store: Open, blow: str
) -> None:
    store = await open_store(server.url(), progress_interval=INTERVAL)
    await store.registry.put("replicas", "a", b"1", 600)
    await store.registry.put("replicas", "gone", b"1", 600)
    async with Watcher(store.registry, "replicas") as watcher:
        getattr(server, blow)()
        began = time.monotonic()
        answers = await asyncio.gather(
            store.registry.put("replicas", "a", b"2", 600),
            store.registry.put("replicas", "b", b"3", 3600),  # needs a lease first, so nothing was sent
            store.registry.remove("replicas", "gone"),
            store.registry.list("replicas"),
            return_exceptions=True,
        )
        assert time.monotonic() - began < 10
        kinds = [type(answer) for answer in answers]
        if blow == "pause":
            assert kinds == [OutcomeUnknown, StoreUnavailable, OutcomeUnknown, StoreUnavailable]
        else:
            assert {*kinds} <= {OutcomeUnknown, StoreUnavailable}
            assert kinds[1] is kinds[3] is StoreUnavailable
        await watcher.fails(within=10.0)
        with pytest.raises(StoreUnavailable):
            await anext(store.registry.watch("replicas"))
    if blow == "kill":
        server.restart()
    else:
        server.resume()

    async def again() -> bool:
        try:
            await store.registry.put("replicas", "a", b"2", 600)
            await store.registry.put("replicas", "b", b"3", 3600)
            await store.registry.remove("replicas", "gone")
        except StoreError:
            return False
        return True

    give_up = time.monotonic() + 15
    while not await again():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)
    async with Watcher(store.registry, "replicas") as watcher:
        assert watcher.known == {"a": b"2", "b": b"3"}


async def test_a_lost_lease_is_made_again_at_the_next_put(shared: EtcdServer, open_store: Open, prefix: str) -> None:
    store, peer = await open_store(shared.url(prefix)), await open_store(shared.url(prefix))
    await store.registry.put("replicas", "a", b"1", 60)
    async with Watcher(peer.registry, "replicas") as watcher:
        shared.ctl("lease", "revoke", f"{next(iter(store._leases.expiries)):x}")
        await watcher.knows({})
        await store.registry.put("replicas", "a", b"1", 60)
        await watcher.knows({"a": b"1"})
        assert watcher.of("a") == [Removed("a"), Put("a", b"1")]


async def test_history_compacted_under_a_slow_watch_is_a_reset(open_store: Open) -> None:
    async def script(number: int, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        await anext(requests)
        yield rpc.WatchResponse(created=True)
        if number == 0:
            yield rpc.WatchResponse(canceled=True, compact_revision=7)
        async for _ in requests:
            yield rpc.WatchResponse(watch_id=-1)

    async with ScriptedEtcd(script) as etcd:
        watch = (await open_store(etcd.url())).registry.watch("workers")
        assert [await anext(watch), await anext(watch)] == [Reset(), Reset()]
        assert etcd.metadata[0]["hasleader"] == "true"
        await watch.aclose()


async def test_a_full_etcd_takes_nothing_new_and_is_still_read(binary: Path, open_store: Open) -> None:
    with EtcdServer(binary, "--quota-backend-bytes=1000000") as server:
        store = await open_store(server.url())
        await store.registry.put("marks", "a", b"1", None)
        await store.registry.put("marks", "b", b"1", None)
        full = False
        for number in range(60):
            try:
                await store.registry.put("fillers", f"f-{number}", bytes(MAX_VALUE), None)
            except StoreUnavailable as error:  # of a busy machine it may also be that nobody has answered in time
                if full := "full" in str(error):
                    break
        assert full
        with pytest.raises(StoreUnavailable, match="full"):
            await store.registry.put("marks", "a", b"2", None)
        assert await store.registry.list("marks") == {"a": b"1", "b": b"1"}
        try:
            await store.registry.remove("marks", "a")
        except StoreUnavailable:  # 3.5.1 refuses even that
            assert binary == ETCD_BINARIES["etcd-3.5"]
        else:
            assert await store.registry.list("marks") == {"b": b"1"}


# --- keys and pages


async def test_records_lie_where_no_reader_of_claims_looks(shared: EtcdServer, open_store: Open, prefix: str) -> None:
    store = await open_store(shared.url(prefix))
    claims = {(await make(store, a_key())).key for _ in range(3)}
    for name in ("a", "f" * 40, "z"):
        await store.registry.put("workers", name, b"1", 600)
    await store.registry.remove("workers", "z")
    everything = shared.ctl("get", "--prefix", f"{prefix}/", "--keys-only").split()
    claims_range = shared.ctl("get", f"{prefix}/0", f"{prefix}/g", "--keys-only").split()
    assert set(claims_range) == {f"{prefix}/{key}" for key in claims}
    assert {key for key in everything if key not in claims_range} == {
        f"{prefix}/~records/workers/61",
        f"{prefix}/~records/workers/{'66' * 40}",
        f"{prefix}/~removals/workers",
    }


async def test_foreign_keys_are_no_records(shared: EtcdServer, open_store: Open, prefix: str) -> None:
    store = await open_store(shared.url(prefix))
    async with Watcher(store.registry, "workers") as watcher:
        for key in ("README", "6", "6G", "", "61 ", "FF", "ff", "0a", "61" * 129, "61/61"):
            shared.ctl("put", f"{prefix}/~records/workers/{key}", "mine")
        shared.ctl("del", f"{prefix}/~records/workers/README")
        await store.registry.put("workers", "a", b"1", None)
        await watcher.knows({"a": b"1"})
        assert watcher.events == [Reset(), Put("a", b"1")]
    assert await store.registry.list("workers") == {"a": b"1"}


async def test_more_than_one_message_can_carry(shared: EtcdServer, open_store: Open, prefix: str) -> None:
    """The longest records that there may be: 5 MiB of them, listed in pages and told in bursts."""
    store = await open_store(shared.url(prefix), deadline=5.0)
    records = {f"w-{number}": secrets.token_bytes(MAX_VALUE) for number in range(80)}
    async with Watcher(store.registry, "workers") as watcher:
        for repeat in range(2):  # the second time with what stood before
            changed = {name: value[repeat:] for name, value in records.items()}
            await asyncio.gather(*(store.registry.put("workers", name, value, 600) for name, value in changed.items()))
            await watcher.knows(changed)
        assert not [event for event in watcher.events[1:] if isinstance(event, Reset)]
    assert await store.registry.list("workers") == changed


async def test_the_pages_of_a_list_are_of_one_moment(
    shared: EtcdServer, open_store: Open, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed or compacted between two pages makes no part of the whole."""
    monkeypatch.setattr(backends.etcd.registry, "PAGE", 3)
    store, peer = await open_store(shared.url(prefix)), await open_store(shared.url(prefix))
    records = {f"w-{number}": b"1" for number in range(8)}
    for name in records:
        await peer.registry.put("workers", name, b"1", None)
    real = store.cluster.endpoints[0].range
    pages = 0

    async def meddle(request: Any, **options: Any) -> Any:
        nonlocal pages
        answer = await real(request, **options)
        pages += 1
        if pages == 1:
            await peer.registry.remove("workers", "w-7")
        elif pages == 2:
            await peer.registry.put("workers", "w-8", b"1", None)
            revision = (await peer.cluster.call("range", request, peer.cluster.until())).header.revision
            await asyncio.to_thread(shared.ctl, "compact", str(revision))
        return answer

    store.cluster.endpoints[0].range = meddle
    listed = await store.registry.list("workers")
    del records["w-7"]
    assert listed == records | {"w-8": b"1"}
    assert pages == 2 + 3, "begun anew after the compaction"


async def test_watches_go_with_those_who_iterate_them(server: EtcdServer, open_store: Open) -> None:
    def watches() -> float:
        return server.metric("etcd_debugging_mvcc_watch_stream_total")

    store = await open_store(server.url())
    async with contextlib.AsyncExitStack() as stack:
        for kind in ("workers", "replicas", "marks", "marks"):
            await stack.enter_async_context(Watcher(store.registry, kind))
        assert watches() == 4
    await eventually(lambda: watches() == 0)
