"""Following KV events over real sockets: what is believed when events are missed, come late, or begin anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
import zmq

from app.fleet.discovery.file import read_workers
from app.fleet.discovery.records import WorkerRecord, decode_record, encode_record
from app.fleet.placement.feeds import Feed, Feeds, _places
from app.fleet.placement.index import NAME, Index, Shelf, links, root, token_bytes
from app.fleet.specs import WorkerError, WorkerSpec, checked_place, worker_spec
from app.fleet.workers import Fleet, Target, make_worker
from app.metrics import Metrics
from tests.unit.test_kv import SIZE, Engine

ONE, TWO = list(range(100, 120)), list(range(200, 220))
PATIENCE = 30.0


class Publisher:
    """An engine's publisher that says exactly what it is told to. `replays`: also what was missed, of the batches that
    are `kept`."""

    def __init__(self, *, replays: bool = True) -> None:
        self.context = zmq.Context()
        self.kept: list[tuple[int, bytes]] = []
        self.number = 0
        self.asked: list[int] = []
        self.mute = False
        self.replays = replays
        self._loop = asyncio.get_running_loop()
        self.events = self.replay = ""
        self._bind()

    def _bind(self) -> None:
        self._publish = self.context.socket(zmq.XPUB)
        self._publish.bind(self.events or "tcp://127.0.0.1:*")
        self.events = _address(self._publish)
        self._router = self.context.socket(zmq.ROUTER)
        self._router.bind(self.replay or "tcp://127.0.0.1:*")
        self.replay = _address(self._router)
        self._loop.add_reader(self._router.fileno(), self.answer)

    def answer(self) -> None:
        while self._router.poll(0):
            client, _, first = self._router.recv_multipart(zmq.NOBLOCK)
            self.asked.append(int.from_bytes(first, "big"))
            if not self.mute:
                for number, payload in self.kept:
                    if number >= self.asked[-1]:
                        self._router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
                self._router.send_multipart((client, b"", b"", b"\xff" * 8, b""))

    def tell(self, *events: Any, lost: bool = False, payload: bytes = b"", rank: int = 0) -> None:
        """A batch; `lost`: to the subscriber, not to who asks for it."""
        batch = payload or msgspec.msgpack.encode([float(len(self.kept)), events, rank])
        self.kept.append((self.number, batch))
        if not lost:
            self._publish.send_multipart((b"kv", self.number.to_bytes(8, "big"), batch))
        self.number += 1

    async def subscribed(self) -> None:
        """Until then nobody is sent what is published."""
        async with asyncio.timeout(PATIENCE):
            while not self._publish.poll(0):
                await asyncio.sleep(0.01)
        self._publish.recv()

    def stop(self) -> None:
        self._loop.remove_reader(self._router.fileno())
        self._publish.close(linger=0)
        self._router.close(linger=0)

    async def restart(self, number: int = 0) -> None:
        """As another process at the same place, which is free a moment after it was left."""
        self.close()
        self.context = zmq.Context()
        self.kept, self.number = [], number
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(zmq.ZMQError):
                    self._bind()
                    return
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.stop()
        self.context.destroy(linger=0)


def _address(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


class Follower:
    """One router's feeds, of one worker."""

    def __init__(self, publisher: Publisher, *, replays: bool = True) -> None:
        self.clock = 1000.0
        self.metrics, self.index = Metrics(), Index()
        worker = make_worker("http://h:1", name="w", connect_limit=1, idle_limit=1)
        worker.spec = WorkerSpec(
            name="w", url="http://h:1", kv_events=publisher.events, kv_replay=publisher.replay if replays else ""
        )
        self.fleet = Fleet([worker])
        self.target: Target = worker.targets[0]
        self.feeds = Feeds(
            self.fleet, self.index, self.metrics, loop=asyncio.get_running_loop(), clock=lambda: self.clock
        )

    @property
    def feed(self) -> Feed:
        return self.feeds.by_target[self.target]

    def overlap(self, tokens: Sequence[int]) -> int | None:
        """None: nothing is believed."""
        feed = self.feeds.trusted(self.target)
        if feed is None:
            return None
        chain = links(root(SIZE, "", ""), token_bytes(tokens), SIZE)
        found = self.index.find(chain)
        return SIZE * min((found.get(shelf, 0) for shelf in feed.holdings.shelves.values()), default=0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.005)

    async def has(self, tokens: Sequence[int], overlap: int | None) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.overlap(tokens) != overlap:
                await asyncio.sleep(0.005)

    def gaps(self, reason: str) -> int:
        return self.metrics.kv_gaps.cells[reason,]

    def replays(self, outcome: str) -> int:
        return self.metrics.kv_replays.cells[outcome,]


@contextlib.asynccontextmanager
async def following(publisher: Publisher, *, replays: bool = True) -> AsyncIterator[Follower]:
    follower = Follower(publisher, replays=replays)
    try:
        await follower.until(lambda: follower.target in follower.feeds.by_target)
        yield follower
    finally:
        follower.feeds.close()


@contextlib.asynccontextmanager
async def knowing(publisher: Publisher, *, replays: bool = True) -> AsyncIterator[tuple[Follower, Engine]]:
    """Following an engine that has ONE."""
    engine = Engine(Index())
    async with following(publisher, replays=replays) as follower:
        await follower.has(ONE, 0)
        publisher.tell(engine.stored(ONE))
        await follower.has(ONE, 20)
        yield follower, engine


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


async def test_who_begins_asks_for_what_was_said_before_it_trusts_itself(publisher: Publisher) -> None:
    engine = Engine(Index())
    publisher.tell(engine.stored(ONE))
    publisher.tell(engine.removed(ONE[:20]))
    publisher.mute = True
    async with following(publisher) as follower:
        await follower.until(lambda: publisher.asked == [0])
        assert follower.overlap(ONE) is None
        publisher.mute = False
        follower.feed._ask_replay(None)
        await follower.has(ONE, 16)
        publisher.tell(engine.stored(ONE, 4))
        await follower.has(ONE, 20)
        publisher.tell({"type": "AllBlocksCleared"})
        await follower.has(ONE, 0)
        assert follower.gaps("gap") == follower.gaps("restart") == 0


async def test_without_replays_it_knows_what_it_has_heard(publisher: Publisher) -> None:
    engine = Engine(Index())
    publisher.tell(engine.stored(ONE[:8]))
    async with following(publisher, replays=False) as follower:
        await follower.has(ONE, 0)
        publisher.tell(engine.stored(ONE, 2))
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        assert follower.overlap(ONE) == 0


async def test_a_gap_is_filled_by_a_replay_with_what_was_removed_meanwhile(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, engine):
        publisher.tell(engine.removed(ONE[:4]), lost=True)
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        assert follower.overlap(ONE) == 0
        assert publisher.asked == [0, 0]  # the last that was read comes first
        publisher.tell(engine.removed(TWO[:8]))
        await follower.has(TWO, 4)
        assert (follower.gaps("gap"), follower.replays("ok")) == (1, 2)


async def test_nothing_is_believed_while_something_is_missing(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, engine):
        publisher.mute = True
        publisher.tell(engine.removed(ONE[:4]), lost=True)
        publisher.tell(engine.stored(TWO))
        await follower.has(ONE, None)
        publisher.tell(engine.removed(TWO[:4]))  # waits meanwhile
        follower.clock += 60
        await follower.until(lambda: follower.replays("failed") == 1)
        await follower.has(TWO, 0)
        assert follower.overlap(ONE) == 0
        publisher.tell(engine.stored(ONE))
        await follower.has(ONE, 20)


async def test_a_gap_without_replays_is_the_end_of_all_that_was_known(publisher: Publisher) -> None:
    async with knowing(publisher, replays=False) as (follower, engine):
        publisher.tell(lost=True)
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        assert follower.overlap(ONE) == 0
        assert follower.gaps("gap") == 1


async def test_what_is_kept_no_more_is_not_known(publisher: Publisher) -> None:
    """The publisher keeps the last batches only: those that are missed came before."""
    async with knowing(publisher) as (follower, engine):
        publisher.tell(engine.removed(ONE[:4]), lost=True)
        publisher.kept.clear()
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        assert follower.overlap(ONE) == 0


@pytest.mark.parametrize("number", [0, 1, 2, 50])
async def test_another_process_at_its_place_has_nothing_of_it(publisher: Publisher, number: int) -> None:
    """Whatever number it is at: lower, the one that is expected, or higher."""
    engine = Engine(Index())
    async with following(publisher) as follower:
        await follower.has(ONE, 0)
        publisher.tell(engine.stored(ONE))
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        await publisher.restart(number)
        publisher.tell(engine.stored(TWO[:8]))
        await follower.has(TWO, 8)
        assert follower.overlap(ONE) == 0
        await publisher.subscribed()
        publisher.tell(engine.stored(ONE[:12]))
        await follower.has(ONE, 12)


@pytest.mark.parametrize("replays", [True, False])
async def test_numbers_that_begin_anew_on_the_same_connection_are_another_engines(
    publisher: Publisher, replays: bool
) -> None:
    engine = Engine(Index())
    async with following(publisher, replays=replays) as follower:
        await follower.has(ONE, 0)
        publisher.tell(engine.stored(ONE))
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        publisher.kept, publisher.number = [], 0
        publisher.tell(engine.stored(TWO[:8]))
        await follower.has(TWO, 8)
        assert follower.overlap(ONE) == 0
        assert follower.gaps("restart") == 1


async def test_a_gap_that_hides_another_engine(publisher: Publisher) -> None:
    """Its numbers are higher than those that were read, and go on as if nothing had been."""
    async with knowing(publisher) as (follower, engine):
        publisher.kept, publisher.number = [], 0
        publisher.tell(engine.stored(TWO), lost=True)
        publisher.tell(engine.removed(TWO[:20]), lost=True)
        publisher.tell(engine.stored(TWO, 4))
        await follower.has(TWO, 20)
        assert follower.overlap(ONE) == 0
        assert follower.gaps("restart") == 1


async def test_a_replay_that_comes_late_changes_nothing(publisher: Publisher) -> None:
    engine = Engine(Index())
    publisher.tell(engine.stored(ONE))
    publisher._loop.remove_reader(publisher._router.fileno())  # it is busy
    async with following(publisher) as follower:
        await follower.until(lambda: follower.feed._replay is not None)
        follower.clock += 60
        await follower.until(lambda: follower.replays("failed") == 1)
        publisher.tell(engine.removed(ONE[:20]))
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        publisher.answer()
        publisher.tell(engine.removed(TWO[:20]))
        await follower.has(TWO, 16)
        assert follower.overlap(ONE) == 0


async def test_a_batch_that_is_not_understood_ends_what_was_known(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, engine):
        publisher.tell({"type": "BlocksMoved"})
        await follower.has(ONE, 0)
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)
        publisher.tell(payload=b"\xc1")
        await follower.has(TWO, 0)
        assert follower.gaps("malformed") == 2


async def test_a_worker_that_was_down_is_asked_anew(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, _):
        follower.target.worker.health.unreachable("refused", refused=True)
        assert follower.overlap(ONE) is None
        await follower.has(ONE, 20)  # it was only the network
        assert follower.gaps("down") == 1


async def test_who_is_gone_is_not_followed_and_leaves_nothing(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, _):
        follower.fleet.remove("w")
        follower.feeds.follow()
        await follower.until(lambda: not follower.feeds.by_target)
        await follower.until(lambda: len(follower.index) == 0)


async def test_the_loop_goes_round_while_a_long_batch_is_applied(publisher: Publisher) -> None:
    """By a clock that stands at the end of each round's time, a piece of work is done in each."""
    engine = Engine(Index())
    async with following(publisher) as follower:
        await follower.has(ONE, 0)
        rounds = 0
        real = follower.feeds.clock

        def ticking() -> float:
            follower.clock += 0.001
            return real()

        follower.feeds.clock = ticking
        blocks = 64 * 100
        publisher.tell(engine.stored(range(SIZE * blocks)))
        async with asyncio.timeout(PATIENCE):
            while len(follower.index) < blocks:
                await asyncio.sleep(0)
                rounds += 1
        assert rounds >= 50


async def test_a_round_does_no_more_however_much_waits(publisher: Publisher) -> None:
    """By a clock on which each piece of work takes a quarter of a round's time: whatever batches are made of, a round
    has so many pieces, each of as many blocks as there may be in one."""
    engine = Engine(Index())
    most = 2 * 64 * 4
    async with following(publisher) as follower:
        await follower.has(ONE, 0)
        handled: list[int] = []
        work, take, put = follower.feeds._work, follower.index.take, follower.index.put
        real = follower.feeds.clock

        def ticking() -> float:
            follower.clock += 0.000_25
            return real()

        def counted() -> None:
            handled.append(0)
            work()

        def taken(shelf: Shelf, names: bytes) -> None:
            handled[-1] += len(names) // NAME
            take(shelf, names)

        def stored(shelf: Shelf, names: bytes, blocks: list[int]) -> None:
            handled[-1] += len(blocks)
            put(shelf, names, blocks)

        follower.feeds._work, follower.feeds.clock = counted, ticking  # type: ignore[method-assign]
        follower.index.take, follower.index.put = taken, stored  # type: ignore[method-assign]
        blocks = 0
        for number, size in enumerate([300, *[50] * 10, *[1] * 100]):
            tokens = range(number * 20_000, number * 20_000 + SIZE * size)
            told = engine.stored(tokens)
            publisher.tell(told)
            publisher.tell(*({"type": "BlockRemoved", "block_hashes": [name]} for name in told["block_hashes"]))
            blocks += 2 * size
        await follower.until(lambda: sum(handled) == blocks)
        assert max(handled) <= most
        assert len(follower.index) == 0


async def test_a_fleet_that_comes_and_goes_at_once_is_followed_one_by_one() -> None:
    """By a clock that stands at the end of each round's time, as above."""
    now, ranks, rounds = 1000.0, 12, 0

    def ticking() -> float:
        nonlocal now
        now += 0.001
        return now

    worker = make_worker("http://h:1", name="w", ranks=ranks, connect_limit=1, idle_limit=1)
    worker.spec = WorkerSpec(name="w", url="http://h:1", kv_events="tcp://127.0.0.1:1")
    fleet = Fleet([worker])
    feeds = Feeds(fleet, Index(), Metrics(), loop=asyncio.get_running_loop(), clock=ticking)
    try:
        async with asyncio.timeout(PATIENCE):
            for count in (ranks, 0):
                assert len(feeds.by_target) == ranks - count
                while len(feeds.by_target) != count:
                    before = len(feeds.by_target)
                    await asyncio.sleep(0)
                    rounds += 1
                    assert abs(len(feeds.by_target) - before) <= 1
                fleet.remove("w")
                feeds.follow()
        assert rounds >= 2 * ranks
    finally:
        feeds.close()


def test_where_ranks_publish() -> None:
    spec = worker_spec("http://a:1,dp=2,kv-events=tcp://a:5557,kv-replay=tcp://a:6557")
    worker = make_worker(spec.url, ranks=2, connect_limit=1, idle_limit=1)
    worker.spec = spec
    assert [(places.events, places.replay) for _, places in _places(worker)] == [
        ("tcp://a:5557", "tcp://a:6557"),
        ("tcp://a:5558", "tcp://a:6558"),
    ]
    for wrong in ("a:5557", "tcp://a", "http://a:1", "tcp://a:1/x", "tcp://a:x"):
        with pytest.raises(WorkerError, match="tcp://host:port"):
            worker_spec(f"http://a:1,kv-events={wrong}")


def test_where_workers_publish_may_stand_in_a_file_and_in_a_record() -> None:
    text = """[[worker]]
    url = "http://10.0.0.1:1"
    kv-events = "tcp://10.0.0.1:5557"
    kv-replay = "tcp://10.0.0.1:5558"
    """
    (spec,) = read_workers(text)
    record = WorkerRecord(url=spec.url, kv_events=spec.kv_events, kv_replay=spec.kv_replay)
    same = decode_record(encode_record(record)).spec("w", "")
    assert (same.kv_events, same.kv_replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    with pytest.raises(ValueError, match=r"line 1: .*tcp://host:port"):
        read_workers(text.replace("tcp://10.0.0.1:5557", "10.0.0.1:5557"))
    with pytest.raises(WorkerError, match="tcp://host:port"):
        WorkerRecord(url=spec.url, kv_replay="x").spec("w", "")


async def test_a_worker_that_is_away_costs_the_loop_nothing(publisher: Publisher) -> None:
    """A descriptor of ZeroMQ stays readable until it is asked what there is."""
    async with following(publisher) as follower:
        await follower.has(ONE, 0)
        publisher._publish.close(linger=0)
        await follower.until(lambda: follower.overlap(ONE) is None)
        worked = 0
        work = follower.feeds._work

        def counted() -> None:
            nonlocal worked
            worked += 1
            work()

        follower.feeds._work = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.3)
        assert worked < 100  # by thousands, else


async def test_a_place_that_nobody_can_connect_to_is_said_once_and_hinders_nobody(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(publisher) as follower:
        odd = make_worker("http://h:2", name="odd", connect_limit=1, idle_limit=1)
        odd.spec = WorkerSpec(name="odd", url="http://h:2", kv_events="tcp://*:1")  # what no door lets in
        raised: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        follower.feeds._fleet = Fleet([odd, *follower.fleet])
        await follower.has(ONE, 0)
        for _ in range(3):
            follower.feeds.follow()
            await follower.until(lambda: not follower.feeds._changing)
        assert len(follower.feeds.by_target) == 1
    assert not raised
    assert [record.message.split(":")[0] for record in caplog.records if "cannot be followed" in record.message] == [
        "KV events of worker odd cannot be followed"
    ]


@pytest.mark.parametrize("sockets", [3, 4, 5])
async def test_who_has_no_sockets_left_follows_the_others_when_there_are_some(
    sockets: int, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three are for one rank."""
    monkeypatch.setattr("app.fleet.placement.feeds._MOST_SOCKETS", sockets)
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with following(publisher, replays=False) as follower:
        await follower.until(lambda: follower.feed.trusted)
        await publisher.subscribed()
        more = make_worker("http://h:2", name="more", ranks=3, connect_limit=1, idle_limit=1)
        more.spec = WorkerSpec(name="more", url="http://h:2", kv_events="tcp://127.0.0.1:1")
        follower.fleet.put(more)
        for _ in range(3):
            follower.feeds.follow()
            await follower.until(lambda: not follower.feeds._changing)
        assert list(follower.feeds.by_target) == [follower.target]
        publisher.tell(Engine(Index()).stored(TWO))
        await follower.has(TWO, 20)
        follower.fleet.remove("w")
        await follower.until(lambda: any(target.worker is more for target in follower.feeds.by_target))
    assert not raised
    assert [record.message.split(":")[0] for record in caplog.records if "cannot be followed" in record.message] == [
        "KV events of worker more cannot be followed for now"
    ]


async def test_who_has_no_socket_for_a_replay_goes_on_with_what_comes(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.placement.feeds._MOST_SOCKETS", 3)
    engine = Engine(Index())
    publisher.tell(engine.stored(ONE))
    async with following(publisher) as follower:
        await follower.until(lambda: follower.replays("failed") == 1)
        await publisher.subscribed()
        publisher.tell(engine.stored(TWO))
        await follower.has(TWO, 20)


async def test_what_was_guessed_wrong_takes_nothing_from_what_was_told(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, _):
        follower.target.forget()
        follower.feed.follows_on()
        follower.feeds.ready(follower.feed)
        await asyncio.sleep(0)
        assert follower.overlap(ONE) == 20
        assert follower.gaps("down") == 0


async def test_what_a_worker_had_is_kept_by_nobody_when_it_is_forgotten(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, _):
        shelf = next(iter(follower.feed.holdings.shelves.values()))
        other = type(shelf)(SIZE)
        blocks = list(shelf.ours())
        follower.index.put(other, b"".join(number.to_bytes(8) for number in range(len(blocks))), blocks)
        follower.target.forget()
        follower.feeds.ready(follower.feed)
        await follower.until(lambda: shelf.dead and not len(shelf))
        assert shelf not in follower.index._shelves


async def test_what_is_nested_without_end_is_no_batch(publisher: Publisher) -> None:
    async with knowing(publisher) as (follower, _):
        publisher.tell(payload=b"\x91" * 5000)
        await follower.has(ONE, 0)
        assert follower.gaps("malformed") == 1


@pytest.mark.parametrize(
    "text",
    [
        "tcp://*:5557", "tcp://u:p@h:1", "tcp://h:1#x", "tcp:// h:1", "tcp://h:5\n", "tcp://a_b!c:1", "tcp://[::1",
        "tcp://h:0", "tcp://h:65536", "tcp://h", "http://h:1",
    ],
)  # fmt: skip
def test_only_what_can_be_connected_to_is_a_place(text: str) -> None:
    with pytest.raises(WorkerError, match="write it as tcp://host:port"):
        checked_place(text)


@pytest.mark.parametrize("text", ["tcp://h:1", "tcp://10.0.0.5:5557", "tcp://[::1]:5557", "tcp://a-b.c_d:65535"])
def test_a_place_is_taken_as_it_is_written(text: str) -> None:
    assert checked_place(text) == text
