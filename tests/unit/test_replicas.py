"""What replicas say of themselves in the registry, and what each makes of the others' records."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Generator
from typing import Any, TypeVar

import msgspec
import pytest

from app.fleet.loads import SHARES
from app.fleet.naming import Naming
from app.fleet.workers import Fleet, Worker, make_worker
from app.metrics import Metrics
from app.record import Reading, Record, Roll, Workers, decode, hashes, unlike_workers
from app.replicas import BEAT, KIND, STANDS, Myself, Replicas
from app.sessions.peers import Peers
from app.traffic import Figures, Traffic
from backends.base import StoreUnavailable
from backends.memory import MemoryStore
from backends.registry import MAX_VALUE, Registry
from tests.support.fakes import in_virtual_time
from tests.support.replicas import Replica, memory

WALL = 1_700_000_000.0
SETTINGS = {"policy": b"least-loaded", "session-secret": b"hash of one", "session-ttl": b"1800"}
TWO_BEATS = 4.5

T = TypeVar("T")


class One:
    """One replica's record and view, over a registry that others share."""

    def __init__(
        self,
        store: MemoryStore,
        name: str,
        *,
        settings: dict[str, bytes] = SETTINGS,
        workers: dict[str, str] | None = None,
        registry: Registry | None = None,
        skew: float = 0.0,
        port: int = 7,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.metrics = Metrics()
        self.fleet = Fleet(
            make_worker(url, name=worker, connect_limit=1, idle_limit=1)
            for worker, url in (workers or {"w0": "http://10.0.0.1:1", "w1": "http://10.0.0.2:1"}).items()
        )
        self.names = Naming(self.fleet, "net")
        self.peers = Peers(name, self.names, self.metrics, clock=loop.time)
        self.replicas = Replicas(
            registry or store.registry,
            Myself(name, "1.0", "net", hashes(settings), "10.0.0.9", port, f"token of {name}"),
            fleet=self.fleet,
            affinity=Replica(store).affinity,
            peers=self.peers,
            names=self.names,
            metrics=self.metrics,
            running=lambda: 3,
            clock=loop.time,
            wall=lambda: WALL + loop.time() + skew,
        )

    @property
    def differing(self) -> set[str]:
        """As the metric says."""
        for family in self.metrics.families():
            if family.name == "coatcheck_replica_differs":
                return {setting for (setting,), (count,) in family.cells if count}
        raise AssertionError("no such metric")


@contextlib.asynccontextmanager
async def beating(*ones: One) -> AsyncIterator[None]:
    for one in ones:
        one.replicas.start()
    await asyncio.sleep(TWO_BEATS)
    try:
        yield
    finally:
        for one in ones:
            await one.replicas.aclose()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "coatcheck.replicas")
    return caplog


def levels(told: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in told.records if record.name == "coatcheck.replicas"]


@in_virtual_time
async def test_who_agrees_says_nothing(told: pytest.LogCaptureFixture) -> None:
    store = memory()
    a, b = One(store, "a"), One(store, "b")
    async with beating(a, b):
        await asyncio.sleep(60)
        assert a.differing == b.differing == set()
        assert not levels(told)
        assert {each["replica"] for each in a.replicas.view()} == {"a", "b"}
        assert len(a.peers) == len(b.peers) == 1
    assert not await store.registry.list(KIND), "the records go with the replicas"


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_is_named_once_at_both(setting: str, told: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def run() -> None:
        store = memory()
        a, b = One(store, "a"), One(store, "b", settings={**SETTINGS, setting: b"other"})
        async with beating(a, b):
            await asyncio.sleep(60)
            assert a.differing == b.differing == {setting}
            assert levels(told) == ["WARNING"] * 2
            assert all("other" not in record.getMessage() for record in told.records)
            assert len(a.replicas.differing()) == 1
            await b.replicas.aclose()
            await asyncio.sleep(1)
            assert a.differing == set()
            assert levels(told) == ["WARNING"] * 2 + ["INFO"]

    run()


@in_virtual_time
async def test_workers_may_differ_for_a_moment(told: pytest.LogCaptureFixture) -> None:
    """A change does not reach all at once."""
    store = memory()
    a, b = One(store, "a"), One(store, "b", workers={"w0": "http://10.0.0.1:1", "other": "http://10.0.0.2:1"})
    a.replicas.start()
    b.replicas.start()
    await asyncio.sleep(1)
    assert a.differing == set()
    async with beating():
        assert a.differing == b.differing == {"worker"}
        [how] = a.replicas.differing()
        assert "other" in how
        assert "w1" in how
    for one in (a, b):
        await one.replicas.aclose()


@in_virtual_time
async def test_two_lives_of_one_name_are_seen_while_both_beat() -> None:
    store = memory()
    a, again = One(store, "same"), One(store, "same")
    async with beating(a, again):
        assert a.differing == again.differing == {"replica"}
        assert len(a.peers) == 1
        await again.replicas.aclose()
        await asyncio.sleep(1)
        assert a.differing == set()


@in_virtual_time
async def test_the_record_of_a_life_that_was_killed_is_no_second_one() -> None:
    store = memory()
    killed = Record("same", "an-earlier-life", "1.0", agrees=hashes(SETTINGS), at=WALL)
    await store.registry.put(KIND, "an-earlier-life", msgspec.json.encode(killed), STANDS)
    after = One(store, "same")
    async with beating(after):
        assert "replica" not in after.differing


@pytest.mark.parametrize("skew", [-30.0, 30.0])
def test_clocks_apart_are_named(skew: float) -> None:
    @in_virtual_time
    async def run() -> None:
        store = memory()
        a, b = One(store, "a"), One(store, "b", skew=skew)
        async with beating(a, b):
            await asyncio.sleep(10)
            assert a.differing == b.differing == {"clock"}

    run()


class LateRegistry:
    """Records arrive, but their news are late."""

    def __init__(self, inner: Registry, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds
        self.put, self.remove, self.list = inner.put, inner.remove, inner.list
        self.away = False

    async def watch(self, kind: str) -> AsyncIterator[Any]:
        async for event in self._inner.watch(kind):
            if self.away:
                raise StoreUnavailable("gone")
            yield event
            if self._seconds:
                await asyncio.sleep(self._seconds)
                self._seconds = 0.0


@in_virtual_time
async def test_one_late_record_says_nothing_of_a_clock() -> None:
    store = memory()
    late = LateRegistry(store.registry, 20.0)
    a, b = One(store, "a", registry=late), One(store, "b")
    async with beating(a, b):
        await asyncio.sleep(60)
        assert a.differing == set()


@in_virtual_time
async def test_a_registry_that_is_silent_keeps_the_last_view() -> None:
    store = memory()
    late = LateRegistry(store.registry, 0.0)
    a, b = One(store, "a", registry=late), One(store, "b")
    async with beating(a, b):
        late.away = True
        late.list = _fails
        await asyncio.sleep(60)
        assert len(a.replicas.others()) == 1
        assert len(a.peers) == 1


async def _fails(kind: str) -> dict[str, bytes]:
    raise StoreUnavailable("gone")


@in_virtual_time
async def test_a_peer_whose_record_has_expired_is_asked_for_a_while() -> None:
    """It may be cut off from the store alone."""
    store = memory()
    a, b = One(store, "a"), One(store, "b")
    async with beating(a, b):
        for task in b.replicas._tasks:
            task.cancel()
        await asyncio.sleep(15)
        assert not a.replicas.others()
        assert len(a.peers) == 1
        await asyncio.sleep(60)
        assert len(a.peers) == 0


@in_virtual_time
async def test_a_record_is_bounded_however_many_workers_there_are() -> None:
    store = memory()
    many = {f"worker-{number}": f"http://worker-{number}.some.where.example:8000" for number in range(2000)}
    a, b = One(store, "a", workers=many), One(store, "b", workers=many)
    async with beating(a, b):
        [value, _] = (await store.registry.list(KIND)).values()
        record = msgspec.json.decode(value, type=Record)
        assert len(value) <= MAX_VALUE
        assert len(record.workers) + record.left_out == 2000
        assert record.left_out
        assert a.differing == set()


def whole(pieces: Generator[None, None, T]) -> T:
    """What comes of them."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Written:
    """What a replica's record has of its workers, written again two seconds later each time."""

    def __init__(self, *workers: Worker) -> None:
        self.now, self.fleet = 1000.0, Fleet(workers)
        self.traffic = Traffic(Metrics(), self.fleet, clock=lambda: self.now)
        self.roll = Roll(self.fleet, self.traffic, lambda: self.now)
        self.value = b""

    def again(self) -> Record:
        self.now += BEAT
        self.traffic.tick()
        for _ in self.roll.write():
            pass
        self.value = self.roll.within(Record("a", "a1", "1.0"))
        return decode(self.value)


def test_a_record_that_is_written_again_says_what_has_changed() -> None:
    """Only that is written anew: each that changes alone, and what stands behind whoever comes or goes."""
    one, two = (make_worker(f"http://10.0.0.{at}:1", ranks=at, connect_limit=1, idle_limit=1) for at in (1, 2))
    written = Written(one)
    first = written.again()
    assert first.workers == {one.name: Workers(one.url, 1, (0,), (0,), (0,))}
    assert written.again() == first
    one.targets[0].sessions = 3
    assert written.again().workers[one.name].sessions == (3,)
    one.targets[0].in_flight, one.targets[0].spent = 2, -2 * written.now
    assert [(said.turns, said.lately) for said in written.again().workers.values()] == [((2,), (2 * SHARES,))]
    written.fleet.put(two)
    two.targets[1].reserved, two.targets[1].spent = 1, -written.now
    said = written.again().workers
    assert (list(said), said[two.name].turns, said[one.name].turns) == (sorted((one.name, two.name)), (0, 1), (2,))
    two.cells.turns["completed", 200] += 5
    [(place, figures)] = written.again().figures
    assert (sorted((one.name, two.name))[place], figures.turns > 0) == (two.name, True)
    written.fleet.remove(one.name)
    record = written.again()
    assert (list(record.workers), [place for place, _ in record.figures]) == ([two.name], [0])


def test_between_two_pieces_the_record_is_as_it_was_written_last() -> None:
    """Whoever looks then compares all workers, or misses all that differs for a moment."""
    written = Written(*(make_worker(f"http://10.0.0.{at}:1", connect_limit=1, idle_limit=1) for at in range(60)))
    other = Record("b", "b1", "1.0")
    written.again()
    for change in (written.fleet.put, lambda worker: written.fleet.remove(worker.name)):
        change(make_worker("http://10.0.0.60:1", connect_limit=1, idle_limit=1))
        pieces = written.roll.write()
        next(pieces)
        assert written.roll.left_out == 0
        assert whole(unlike_workers(written.roll, "", other)) is not None
        for _ in pieces:
            pass


def test_where_figures_have_no_room_those_of_the_busiest_are_told() -> None:
    workers = [
        make_worker(f"http://10.0.{at // 250}.{at % 250}:8000", name=f"w{at:04}", connect_limit=1, idle_limit=1)
        for at in range(1300)
    ]
    written = Written(*workers)
    written.again()
    for at, each in enumerate(workers):
        each.cells.turns["completed", 200] += at + 1
    for _ in range(5):  # of a large fleet a fifth each time
        record = written.again()
    assert len(written.value) <= MAX_VALUE
    assert 0 < len(record.figures) < len(record.workers) <= 1300
    busiest = sorted(
        (written.traffic.figures(each) for each in workers[: len(record.workers)]), reverse=True, key=_turns
    )
    assert [figures for _, figures in record.figures] == busiest[: len(record.figures)]


def _turns(figures: Figures) -> tuple[float, int]:
    return figures.turns, figures.errors


@in_virtual_time
async def test_what_others_have_is_their_mean_since_their_last_word() -> None:
    store, loop = memory(), asyncio.get_running_loop()
    a, b = One(store, "a"), One(store, "b")
    mine, theirs = (next(iter(one.fleet)).targets[0] for one in (a, b))
    async with beating(a, b):
        theirs.in_flight, theirs.spent = 1, theirs.spent - loop.time()
        await asyncio.sleep(20)
        assert mine.load == 1
        assert [each["turns"] for each in a.replicas.view()] == [3, 3]
        for _ in range(80):  # half of the time, ten at once
            theirs.in_flight, theirs.spent = 10, theirs.spent - 9 * loop.time()
            await asyncio.sleep(0.125)
            theirs.in_flight, theirs.spent = 1, theirs.spent + 9 * loop.time()
            theirs.worker.cells.turns["completed", 200] += 9
            await asyncio.sleep(0.125)
        assert mine.load == pytest.approx(5.5, abs=0.6)
        theirs.in_flight, theirs.spent = 0, theirs.spent + loop.time()
        await asyncio.sleep(TWO_BEATS)
        assert mine.load == mine.turns_elsewhere == 0


@in_virtual_time
async def test_a_replica_of_a_version_that_knows_no_means_is_believed_its_word() -> None:
    store = memory()
    older = {
        "replica": "b",
        "incarnation": "b1",
        "version": "0.9",
        "workers": {"w0": ["http://10.0.0.1:1", 0, [4], [7]]},
    }
    await store.registry.put(KIND, "b1", msgspec.json.encode(older), 60)
    a = One(store, "a")
    async with beating(a):
        target = next(iter(a.fleet)).targets[0]
        assert (target.load, target.settled) == (4, 7)


@in_virtual_time
async def test_what_is_no_record_is_passed_over() -> None:
    store = memory()
    a, b = One(store, "a"), One(store, "b")
    await store.registry.put(KIND, "rubbish", b"{not json", 600)
    await store.registry.put(KIND, "another", b'{"replica": 3}', 600)
    async with beating(a, b):
        assert {each["replica"] for each in a.replicas.view()} == {"a", "b"}


@in_virtual_time
async def test_who_listens_nowhere_has_no_peers_and_is_none() -> None:
    store = memory()
    a, b = One(store, "a", port=0), One(store, "b")
    async with beating(a, b):
        assert len(a.peers) == len(b.peers) == 0
        assert len(a.replicas.others()) == 1


def test_a_record_that_is_read_again_is_what_a_whole_one_is() -> None:
    """A worker is read only when it has changed: one that changes, comes, goes or moves, and what cannot be read."""
    one, two = Workers("http://a:1", 0, (1,), (2,), (3,)), Workers("http://b:1", 2, (0, 0), (1, 1), (0, 0))
    reading = Reading()
    places = reading.places
    for workers, is_moved in (
        ({"one": one}, True),
        ({"one": one}, False),
        ({"one": msgspec.structs.replace(one, sessions=(9,))}, False),
        ({"one": one, "two": two}, True),
        ({"two": two, "one": one}, False),
        ({"two": two, "three": one}, True),
        ({"two": msgspec.structs.replace(two, url="http://c:1"), "three": one}, True),
        ({}, True),
    ):
        said = Record("b", "b1", "1.0", workers=workers, beat=7, tenants={"t": (1, 0)})
        assert whole(reading.read(msgspec.json.encode(said))) == said
        assert (reading.places is not places) == is_moved
        places = reading.places
        assert {name: (place.url, place.ranks) for name, place in places.items()} == {
            name: (each.url, each.ranks) for name, each in workers.items()
        }
    with pytest.raises(msgspec.DecodeError):
        whole(reading.read(b'{"replica":"b","incarnation":"b1","version":"1","workers":{"one":[1]}}'))
    assert reading.places is places


@in_virtual_time
async def test_between_two_pieces_of_what_others_say_other_tasks_run() -> None:
    """However many workers there are, and whether they agree or not, nothing waits for more than a hundred of them."""
    store, many = memory(), 1000
    here = One(store, "here", workers={f"w{at}": f"http://10.0.{at // 250}.{at % 250}:1" for at in range(many)})
    targets = [target for each in here.fleet for target in each.targets]

    def record(beat: int, url: str) -> bytes:
        workers = {f"w{at}": Workers(url.format(at), 0, (1,), (beat,), (SHARES,)) for at in range(many)}
        agrees = hashes(SETTINGS)
        said = Record("there", "there", "1.0", "10.0.0.8", 7, network="net", agrees=agrees, workers=workers, beat=beat)
        return msgspec.json.encode(said)

    async with beating(here):
        for beat, url in ((1, "http://10.1.0.1:{}"), (2, "http://10.1.0.1:{}"), (3, "http://10.1.0.2:{}")):
            await store.registry.put(KIND, "there", record(beat, url), STANDS)
            rounds = 0
            while sum(target.sessions_elsewhere for target in targets) != beat * many:
                await asyncio.sleep(0)
                rounds += 1
            assert rounds >= many / 50 + many / 100, "it was read, and its loads were heard"
