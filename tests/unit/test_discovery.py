"""Where workers come from, and what becomes of the fleet when they come and go: in virtual time, with sources that say
what a test has them say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from app.errors import TurnError
from app.fleet.discovery.discovery import Discovery
from app.fleet.discovery.marks import MARKS, OperatorMark
from app.fleet.discovery.operators import Operators
from app.fleet.discovery.records import WORKERS, RegistrySource, WorkerRecord, check_reachable, encode_record, this_host
from app.fleet.discovery.source import Said, Source, Trouble, View
from app.fleet.health import Tolerance
from app.fleet.specs import WorkerError, WorkerSpec, worker_spec
from app.fleet.workers import Fleet, Worker, make_worker
from backends.base import StoreUnavailable
from backends.memory import MemoryStore
from backends.registry import Registry, RegistryEvent
from tests.support.fakes import in_virtual_time, settle
from tests.support.rows import rows

GRACE = 30.0


class Saying:
    """A source that says what it is told to, one thing after the other."""

    def __init__(self, label: str = "source", *first: str) -> None:
        self.label = label
        self.looked = 0
        self.closed = False
        self._said: asyncio.Queue[Said] = asyncio.Queue()
        if first:
            self.names(*first)

    def names(self, *workers: str, emptied: bool = False, **more: Any) -> None:
        """As --worker has them."""
        specs = tuple(msgspec.structs.replace(worker_spec(each), **more) for each in workers)
        self._said.put_nowait(View(specs, emptied=emptied))

    def fails(self, why: str) -> None:
        self._said.put_nowait(Trouble(why))

    async def says(self) -> AsyncIterator[Said]:
        while True:
            yield await self._said.get()

    def look(self) -> None:
        self.looked += 1

    async def aclose(self) -> None:
        self.closed = True


class Breaking:
    """A registry whose watch can be broken, and stays so until it is mended."""

    def __init__(self, inner: Registry) -> None:
        self.put, self.remove, self.list, self._watch = inner.put, inner.remove, inner.list, inner.watch
        self._broken = asyncio.Event()

    def break_(self) -> None:
        self._broken.set()

    def mend(self) -> None:
        self._broken.clear()

    async def watch(self, kind: str) -> AsyncIterator[RegistryEvent]:
        broken = asyncio.ensure_future(self._broken.wait())
        events = aiter(self._watch(kind))
        try:
            while True:
                event: asyncio.Future[Any] = asyncio.ensure_future(anext(events))
                either: set[asyncio.Future[Any]] = {event, broken}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    event.cancel()
                    raise StoreUnavailable("the watch is broken")
                yield event.result()
        finally:
            broken.cancel()


class Setting:
    """A fleet and its discovery, both with the loop's clock."""

    def __init__(self, *named: str) -> None:
        loop = asyncio.get_running_loop()
        self.fleet = Fleet((), clock=loop.time)
        self.gone: list[str] = []
        self.wall_offset = 1_000_000.0
        self.discovery = Discovery(
            self.fleet,
            make,
            [worker_spec(each) for each in named],
            grace=GRACE,
            gone=self.gone.append,
            clock=loop.time,
            wall=self.wall,
        )
        self.operators = Operators(self.fleet, self.discovery, wall=self.wall)

    def wall(self) -> float:
        return asyncio.get_running_loop().time() + self.wall_offset

    @property
    def names(self) -> list[str]:
        return sorted(worker.name for worker in self.fleet)

    @property
    def candidates(self) -> list[str]:
        return sorted(target.worker.name for target in self.fleet.candidates())

    def worker(self, name: str) -> Worker:
        worker = self.fleet.worker(name)
        assert worker is not None
        return worker


def make(spec: WorkerSpec, joins: bool) -> Worker:
    return make_worker(
        spec.url,
        name=spec.name,
        ranks=spec.ranks,
        connect_limit=1,
        idle_limit=1,
        joins=joins,
        tolerance=Tolerance(probed=False),
        clock=asyncio.get_running_loop().time,
    )


@contextlib.asynccontextmanager
async def listening(
    *sources: Source, named: tuple[str, ...] = (), registry: Registry | None = None
) -> AsyncIterator[Setting]:
    setting = Setting(*named)
    await setting.discovery.start(registry, sources)
    await settle()
    yield setting
    await setting.discovery.aclose()


A, B, C, D = (f"http://{each}:1,name={each}" for each in "abcd")


# -- coming and going


@in_virtual_time
async def test_workers_come_and_those_that_are_named_no_more_are_gone_after_the_grace() -> None:
    source = Saying("s", A, B)
    async with listening(source) as s:
        assert s.names == ["a", "b"]
        staying, leaving = s.worker("a"), s.worker("b")
        source.names(A, C)
        await settle()
        assert s.names == ["a", "b", "c"]
        assert leaving.leaving
        assert s.candidates == ["a", "c"]
        assert s.fleet.find("b", None) is not None  # its own sessions stay with it
        await asyncio.sleep(GRACE - 1)
        assert s.names == ["a", "b", "c"]
        await asyncio.sleep(2)
        assert s.names == ["a", "c"]
        assert s.gone == ["b"]
        assert not leaving.known
        assert s.worker("a") is staying
        assert staying.known


@in_virtual_time
async def test_one_that_is_named_again_within_the_grace_is_the_same() -> None:
    source = Saying("s", A, B)
    async with listening(source) as s:
        worker = s.worker("b")
        source.names(A)
        await asyncio.sleep(GRACE - 1)
        assert worker.leaving
        source.names(A, B)
        await asyncio.sleep(2 * GRACE)
        assert s.worker("b") is worker
        assert worker.known
        assert s.candidates == ["a", "b"]
        source.names(A)
        await asyncio.sleep(GRACE - 1)
        assert s.worker("b") is worker  # each time it has all of the grace
        assert s.gone == []


@pytest.mark.parametrize(
    ("before", "after", "colder"),
    [
        ({}, {"url": "http://elsewhere:1"}, True),
        ({"incarnation": "1"}, {"incarnation": "2"}, True),
        ({}, {"ranks": 2}, True),
        ({}, {"incarnation": "1"}, False),
        ({"incarnation": "1"}, {}, False),
        ({}, {"models": ("m",), "labels": {"zone": "x"}}, False),
    ],
)
def test_under_its_name_elsewhere_or_with_another_incarnation_it_is_another_one(
    before: dict[str, Any], after: dict[str, Any], colder: bool
) -> None:
    @in_virtual_time
    async def check() -> None:
        source = Saying("s")
        source.names(A, **before)
        async with listening(source) as s:
            old = s.worker("a")
            source.names(A, **after)
            await settle()
            new = s.worker("a")
            assert (new is not old) == colder
            assert old.known == (not colder)
            assert not new.leaving
            assert new.spec is not None
            assert new.spec.models == after.get("models", ())
            assert new.spec.incarnation == (after.get("incarnation") or before.get("incarnation", ""))
            assert s.gone == []

    check()


@pytest.mark.parametrize("said", ["empty", "trouble"])
def test_an_empty_answer_and_no_answer_change_nothing(said: str, caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def check() -> None:
        source = Saying("s", A, B)
        async with listening(source) as s:
            for _ in range(3):
                if said == "empty":
                    source.names()
                else:
                    source.fails("line 3 is broken")
                await asyncio.sleep(GRACE)
            assert s.candidates == ["a", "b"]
            (each,) = s.discovery.sources
            assert each.trouble == ("it names no worker" if said == "empty" else "line 3 is broken")
            source.names(A, B)
            await settle()
            assert each.trouble == ""

    with caplog.at_level(logging.WARNING):
        check()
    assert len(caplog.records) == 2  # the trouble once, and its end


@in_virtual_time
async def test_when_each_was_seen_to_go_none_is_left() -> None:
    source = Saying("s", A)
    async with listening(source) as s:
        source.names(emptied=True)
        await settle()
        assert s.candidates == ["a"]  # trying beats refusing
        await asyncio.sleep(GRACE + 1)
        assert s.names == []


@in_virtual_time
async def test_two_sources_that_name_one_worker_are_one() -> None:
    first, second = Saying("1", A), Saying("2", A, "http://a:1,name=alias", "http://elsewhere:1,name=b", B)
    async with listening(first, second, named=(B,)) as s:
        assert s.names == ["a", "b"]
        assert s.worker("b").url == "http://b:1"
        worker = s.worker("a")
        first.names(C)
        await settle()
        assert s.worker("a") is worker
        assert not worker.leaving


@in_virtual_time
async def test_a_source_that_hangs_does_not_keep_a_replica_from_starting() -> None:
    async with listening(Saying("silent"), Saying("s", A)) as s:
        assert 4 < asyncio.get_running_loop().time() - 1000.0 < 6
        assert s.names == ["a"]


# -- a worker that another replica has heard of first


@in_virtual_time
async def test_a_name_that_a_claim_says_is_waited_for_and_looked_for() -> None:
    source = Saying("s", A)
    async with listening(source) as s:
        waiting = [asyncio.create_task(s.fleet.learn("b")) for _ in range(3)]
        await settle()
        assert source.looked >= 1
        source.names(A, B)
        assert await asyncio.gather(*waiting) == [True] * 3
        began = asyncio.get_running_loop().time()
        assert await s.fleet.learn("nobody") is False
        assert 1 < asyncio.get_running_loop().time() - began < 3
        began = asyncio.get_running_loop().time()
        assert await s.fleet.learn("nobody") is False  # not again so soon
        source.names(A)
        await asyncio.sleep(GRACE + 1)
        began = asyncio.get_running_loop().time()
        assert await s.fleet.learn("b") is False  # it is known to be gone
        assert asyncio.get_running_loop().time() == began


@in_virtual_time
async def test_who_has_been_cut_off_asks_again_for_a_worker_that_is_known_to_be_gone() -> None:
    """Its removal may have been taken back meanwhile."""
    loop = asyncio.get_running_loop()
    store = MemoryStore(clock=loop.time)
    registry = Breaking(store.registry)
    async with listening(named=(A, B), registry=registry) as s:
        await s.operators.mark("b", "removed", by="me")
        await settle()
        assert s.names == ["a"]
        assert await s.fleet.learn("b") is False
        assert loop.time() == 1000.0
        registry.break_()
        await asyncio.sleep(60)
        began = loop.time()
        assert await s.fleet.learn("b") is False
        assert began < loop.time() < began + 3
        again = loop.time()
        assert await s.fleet.learn("b") is False  # nor is it waited for again so soon
        assert loop.time() == again
        await asyncio.sleep(60)
        await store.registry.remove(MARKS, "b")
        registry.mend()
        began = loop.time()
        assert await s.fleet.learn("b") is True
        assert loop.time() < began + 0.1  # it is read at once, and not when its turn comes
    await store.aclose()


@in_virtual_time
async def test_a_fleet_without_sources_waits_for_nobody() -> None:
    s = Setting(A)
    assert await s.fleet.learn("b") is False
    assert asyncio.get_running_loop().time() == 1000.0


# -- operators


@in_virtual_time
async def test_marks_are_obeyed_by_all_replicas_and_outlive_them() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    async with listening(named=(A, B), registry=store.registry) as s1:
        async with listening(named=(A, B), registry=store.registry) as s2:
            await s1.operators.mark("a", "cordoned", by="me")
            assert s1.candidates == ["b"]
            await settle()
            assert s2.candidates == ["b"]
            assert s2.fleet.find("a", None) is not None
            mark = s2.discovery.mark_of("a")
            assert mark is not None
            assert (mark.by, mark.state) == ("me", "cordoned")
        async with listening(named=(A, B), registry=store.registry) as s3:
            assert s3.candidates == ["b"]
            await s3.operators.mark("a", "none", by="you")
            await settle()
            assert s1.candidates == s3.candidates == ["a", "b"]
            assert await store.registry.list(MARKS) == {}
    await store.aclose()


@in_virtual_time
async def test_a_drain_with_a_deadline_ends_there_and_one_without_does_not() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    async with listening(named=(A, B, C), registry=store.registry) as s:
        await s.operators.mark("a", "draining", by="me", deadline=60)
        await s.operators.mark("b", "draining", by="me")
        await asyncio.sleep(59)
        assert (s.names, s.candidates) == (["a", "b", "c"], ["c"])
        await asyncio.sleep(2)
        assert s.names == ["b", "c"]
        assert [each.name for each in s.operators.absent()] == ["a"]
        await s.operators.mark("a", "none", by="me")
        assert s.candidates == ["a", "c"]
    await store.aclose()


@in_virtual_time
async def test_operators_add_and_remove_at_once() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    async with (
        listening(named=(A,), registry=store.registry) as s1,
        listening(named=(A,), registry=store.registry) as s2,
    ):
        await s1.operators.add(worker_spec(B), by="me")
        await settle()
        assert s1.candidates == s2.candidates == ["a", "b"]
        assert s2.discovery.source_of("b") == "operator"
        await s2.operators.mark("b", "cordoned", by="me")
        await settle()
        assert s1.candidates == ["a"]
        await s2.operators.mark("b", "removed", by="me")
        await s2.operators.mark("a", "removed", by="me")
        await settle()
        assert s1.names == s2.names == []
        assert sorted(s1.gone) == ["a", "b"]
        await s1.operators.mark("a", "none", by="me")
        await s1.operators.add(worker_spec(B), by="me")
        await settle()
        assert s1.candidates == s2.candidates == ["a", "b"]
        with pytest.raises(TurnError, match="nobody here knows"):
            await s1.operators.mark("nobody", "cordoned", by="me")
    await store.aclose()


@in_virtual_time
async def test_a_mark_that_cannot_be_read_costs_only_itself() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    await store.registry.put(MARKS, "a", b"{broken", None)
    await store.registry.put(MARKS, "c", b'{"state":"added","by":"x","at":0,"url":"ftp://x"}', None)
    later = b'{"state":"cordoned","by":"a later version","at":1,"version":2,"because":"new"}'
    await store.registry.put(MARKS, "b", later, None)
    async with listening(named=(A, B, C), registry=store.registry) as s:
        assert s.candidates == ["a", "c"]
    await store.aclose()


def test_an_operators_word_that_is_not_told_is_not_done_silently() -> None:
    @in_virtual_time
    async def check() -> None:
        store = MemoryStore(clock=asyncio.get_running_loop().time)
        async with listening(named=(A, B), registry=store.registry) as s:
            await store.aclose()
            with pytest.raises(TurnError, match="registry cannot be reached"):
                await s.operators.mark("a", "cordoned", by="me")
            assert s.candidates == ["a", "b"]

    check()


def test_what_ends_a_workers_use() -> None:
    assert OperatorMark(state="removed", by="x", at=0).ends(1)
    assert OperatorMark(state="draining", by="x", at=0, deadline=5).ends(5)
    assert not OperatorMark(state="draining", by="x", at=0, deadline=5).ends(4)
    assert not OperatorMark(state="draining", by="x", at=0).ends(1e12)
    assert not OperatorMark(state="cordoned", by="x", at=0).ends(1e12)


# -- the registry


async def put(registry: Registry, name: str, ttl: float | None = None, **record: Any) -> None:
    await registry.put(WORKERS, name, encode_record(WorkerRecord(**record)), ttl)


@in_virtual_time
async def test_registered_workers_come_drain_and_go() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    registry = store.registry
    await put(registry, "a", url="http://10.0.0.1:1", ranks=2, models=("m",), labels={"zone": "x"}, incarnation="1")
    await put(registry, "b", url="http://10.0.0.2:1")
    async with listening(RegistrySource(registry, "r", host="here")) as s:
        assert s.names == ["a", "b"]
        spec = s.worker("a").spec
        assert spec is not None
        assert (spec.ranks, spec.models, spec.labels) == (2, ("m",), {"zone": "x"})
        until = asyncio.get_running_loop().time() + s.wall_offset + 10
        await put(registry, "b", url="http://10.0.0.2:1", draining=True, until=until)
        await settle()
        assert {target.worker.name for target in s.fleet.candidates()} == {"a"}
        assert s.fleet.find("b", None) is not None
        await asyncio.sleep(11)
        assert s.names == ["a"]  # its sessions move now; its running turns go on
        await put(registry, "b", url="http://10.0.0.2:1")
        await settle()
        assert s.names == ["a", "b"]
        await put(registry, "b", url="http://10.0.0.2:1", draining=True, until=until + 1000)
        await settle()
        await registry.remove(WORKERS, "b")
        await settle()
        assert s.names == ["a"]  # it has said good-bye: no grace
    await store.aclose()


@in_virtual_time
async def test_a_record_that_expires_is_gone_after_the_grace_also_when_it_was_the_last() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    await put(store.registry, "a", ttl=10, url="http://10.0.0.1:1")
    async with listening(RegistrySource(store.registry, "r", host="")) as s:
        await asyncio.sleep(15)
        assert s.worker("a").leaving
        await put(store.registry, "a", ttl=10, url="http://10.0.0.1:1")
        await asyncio.sleep(1)
        assert not s.worker("a").leaving
        await asyncio.sleep(15 + GRACE)
        assert s.names == []
    await store.aclose()


@in_virtual_time
async def test_a_registry_that_is_away_leaves_the_last_view() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    await put(store.registry, "a", url="http://10.0.0.1:1")
    async with listening(RegistrySource(store.registry, "r", host=""), registry=store.registry) as s:
        await store.aclose()
        await asyncio.sleep(10 * GRACE)
        assert s.candidates == ["a"]
        (each,) = s.discovery.sources
        assert each.trouble
        assert s.discovery.marks is not None
        assert s.discovery.marks.trouble


@in_virtual_time
async def test_a_record_that_cannot_be_used_costs_only_itself() -> None:
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    registry = store.registry
    await put(registry, "good", url="http://10.0.0.1:1")
    await put(registry, "own", url="http://127.0.0.1:1", host="here")
    await put(registry, "foreign", url="http://127.0.0.1:2", host="elsewhere")
    await put(registry, "unsaid", url="http://localhost:3")
    await put(registry, "nowhere", url="http://0.0.0.0:1", host="here")
    await put(registry, "odd", url="ftp://x")
    await put(registry, "n" * 65, url="http://10.0.0.2:1")
    await registry.put(WORKERS, "broken", b"{", None)
    await registry.put(WORKERS, "later", b'{"url":"http://10.0.0.3:1","version":9,"new":{}}', None)
    async with listening(RegistrySource(registry, "r", host="here")) as s:
        assert s.names == ["good", "later", "own"]
        (each,) = s.discovery.sources
        assert len(each.view.refused) == 6
    await store.aclose()


@rows(
    ("url", "here", "elsewhere"),
    [
        ("http://10.0.0.1:1", True, True),
        ("http://gpu-1:1", True, True),
        ("http://127.0.0.1:1", True, False),
        ("http://127.9.9.9:1", True, False),
        ("http://[::1]:1", True, False),
        ("http://[::ffff:127.0.0.1]:1", True, False),
        ("http://localhost:1", True, False),
        ("http://a.localhost:1", True, False),
        ("http://0.0.0.0:1", False, False),
        ("http://[::]:1", False, False),
    ],
)
def test_which_addresses_lead_to_a_worker(url: str, here: bool, elsewhere: bool) -> None:
    for from_here, leads in ((True, here), (False, elsewhere)):
        if leads:
            check_reachable(url, from_here=from_here)
        else:
            with pytest.raises(WorkerError, match="register its address"):
                check_reachable(url, from_here=from_here)


def test_this_host_is_known_again() -> None:
    assert this_host() == this_host() != ""
