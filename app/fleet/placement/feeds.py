"""Following the KV events of workers, over ZeroMQ: of each rank what it publishes, and replays of what was missed.

What is known of a rank is a part of what is true (`events`), as long as no removal was missed. So:

- Batches are numbered. A gap is filled by a replay that begins with the last batch that was read: only if that is the
  same batch still, it is the same engine that goes on. Else, and where there is no replay, all is forgotten.
- A number that was read already is of a process that began anew, unless the same batch was just replayed. Whenever the
  connection was lost there may be another process behind the next one: all is forgotten, and replayed from the start.
- A replay that is late is given up with its socket: what it would have said reaches nobody. While there is one, what
  is published waits in its socket, removals too.
- A rank is believed (`trusted`) from the end of its first replay on; without one, from its connection on.

Nothing here awaits. Sockets are read in the loop, a little in each of its rounds, and so are batches applied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from app.fleet.placement.events import Holdings, read
from app.fleet.placement.index import Index, Shelf
from app.fleet.workers import Cache, Fleet, Target, Worker
from app.logs import event
from app.metrics import Metrics

log = logging.getLogger("coatcheck.fleet")

# Sockets are of any type here: ZeroMQ is imported when the first is made, which takes a tenth of a router's start.

_A_ROUND = 0.001
"""Seconds of work in one round of the loop."""
_WAITING = 20_000
"""Batches that wait in a socket; more are lost, which is a gap."""
_REPLAY_WITHIN = 5.0
"""Seconds between two batches of a replay, before it is given up."""
_LOOK_EVERY = 0.5
_AGAIN_MS, _AGAIN_MOST_MS = 100, 2000
_SILENT_MS, _ALIVE_MS = 15_000, 5_000
_MALFORMED = (ValueError, TypeError, RecursionError)
"""What reading a batch raises that is none: other types than expected, or nested without end."""
_MOST_SOCKETS = 16_384
"""Three of each target, and one of each replay."""
"""When a connection is taken for lost that says nothing, and how often it is asked to."""


class Places(msgspec.Struct, frozen=True):
    """Where a worker's rank 0 publishes its events, and replays them (empty: nowhere); rank n at the port plus n."""

    events: str
    replay: str = ""

    def of(self, rank: int) -> Places:
        return Places(_at(self.events, rank), _at(self.replay, rank))


def _at(url: str, rank: int) -> str:
    if not rank or not url:
        return url
    before, _, port = url.rpartition(":")
    if int(port) + rank > 65_535:
        raise ValueError(f"there is no port {int(port) + rank} for rank {rank}")
    return f"{before}:{int(port) + rank}"


class Feed:
    """One rank's. `read` does a piece of the work that there is, and says whether there is more.

    Long because whether it is believed depends on each step of its life."""

    def __init__(self, target: Target, places: Places, feeds: Feeds) -> None:
        """Raises OSError: nobody can connect to such a place. ZMQError: there are too many sockets."""
        self.target, self.places = target, places
        self.trusted = False
        self.holdings = Holdings(feeds.index)
        self._cache: Cache = target.cache
        """Of the target, when what is known was begun: another one means that the worker was down."""
        self._feeds, self._metrics = feeds, feeds.metrics
        self._expected: int | None = None
        """The next batch's number; None: whatever comes."""
        self._last = 0
        """The last one's hash."""
        self._replayed: tuple[int, array[int]] = (0, array("q"))
        """Of what was replayed, and may be published as well: the first number, and the hash of each batch."""
        self._pending: tuple[int, bytes] | None = None
        """Was read, and waits for the replay of what is before it."""
        self._piece: Iterator[None] | None = None
        """A batch that is being applied."""
        self._replay: Any = None
        self._from_start = True
        self._until = 0.0
        self._open()

    # -- sockets

    def _open(self) -> None:
        import zmq  # a tenth of a start's time, for whoever has events

        self._zmq = zmq
        self._events = self._feeds.socket(zmq.SUB)
        self._events.setsockopt(zmq.RCVHWM, _WAITING)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.setsockopt(zmq.RECONNECT_IVL, _AGAIN_MS)
        self._events.setsockopt(zmq.RECONNECT_IVL_MAX, _AGAIN_MOST_MS)
        self._events.setsockopt(zmq.HEARTBEAT_IVL, _ALIVE_MS)
        self._events.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        try:
            self._monitor = self._events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError:
            self._events.close(linger=0)
            raise
        self._watch(self._monitor)
        self._watch(self._events)
        try:
            self._events.connect(self.places.events)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error

    def _watch(self, socket: Any) -> None:
        self._feeds.loop.add_reader(socket.fileno(), self._feeds.ready, self)
        self._feeds.ready(self)

    def _unwatch(self, socket: Any) -> None:
        self._feeds.loop.remove_reader(socket.fileno())

    def close(self) -> None:
        self.trusted = False
        self._end_replay()
        self._unwatch(self._monitor)
        self._unwatch(self._events)
        self._events.disable_monitor()
        self._monitor.close(linger=0)
        self._events.close(linger=0)
        self._piece = None
        self._forget()
        self._feeds.ended(self)

    def _received(self, socket: Any) -> list[bytes] | None:
        try:
            frames: list[bytes] = socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return frames

    def _rest(self) -> None:
        """Nothing is to be read of what is published for now. Until ZeroMQ has been asked, what it was told of the
        connection keeps the descriptor readable, and the loop busy."""
        self._events.getsockopt(self._zmq.EVENTS)

    def follows_on(self) -> None:
        """What was known by other means of the target's cache was wrong; what was told here is as true as it was."""
        self._cache = self.target.cache

    # -- working

    def read(self) -> bool:
        if self._piece is not None:
            try:
                next(self._piece)
            except StopIteration:
                self._piece = None
            except _MALFORMED as error:
                self._piece = None
                self._reset("malformed", str(error))
            return True
        if self._hear_connection():
            return True
        if self._cache is not self.target.cache:
            self._cache = self.target.cache
            self._say("down", "its worker was down")
            self._begin_anew()
            return True
        if self._replay is not None:
            frames = self._received(self._replay)
            if frames is not None:
                self._replay_said(frames)
            else:
                self._rest()
            return frames is not None
        if self._pending is not None:
            number, payload = self._pending
            self._pending = None
            self._published(number, payload, asked=True)
            return True
        if not self.trusted:
            self._rest()
            return False
        frames = self._received(self._events)
        if frames is None:
            return False
        if len(frames) < 2 or len(frames[-2]) != 8:
            self._reset("malformed", "a message is no batch")
        else:
            self._published(int.from_bytes(frames[-2], "big"), frames[-1])
        return True

    def _hear_connection(self) -> bool:
        """What became of the connection, before what came over it."""
        frames = self._received(self._monitor)
        if frames is None:
            return False
        kind = int.from_bytes(frames[0][:2], "little")
        if kind == self._zmq.EVENT_DISCONNECTED:
            if self.trusted or self._replay is not None:
                self._lose("connection", "its connection was lost")
            self.trusted = False
        elif kind == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._begin_anew()
        return True

    def look(self, now: float) -> None:
        """At what nobody tells."""
        if self._replay is not None and now >= self._until:
            self._give_up_replay()

    # -- batches

    def _published(self, number: int, payload: bytes, *, asked: bool = False) -> None:
        """`asked`: what is missing before it was asked for already."""
        expected = self._expected
        if expected is None or number == expected:
            if expected is not None and len(self._replayed[1]):
                self._replayed = (0, array("q"))
            self._take(number, payload)
        elif number > expected:
            self._metrics.kv_gaps.inc("gap")
            if self.places.replay and not asked:
                self._pending = number, payload
                self._ask_replay(expected - 1)
            else:
                self._forget()
                self._take(number, payload)
        elif not self._was_replayed(number, payload):
            self._lose("restart", "its numbers begin anew")
            if self.places.replay:
                self._begin_anew()
            else:
                self._take(number, payload)

    def _was_replayed(self, number: int, payload: bytes) -> bool:
        first, hashes = self._replayed
        return 0 <= number - first < len(hashes) and hashes[number - first] == hash(payload)

    def _take(self, number: int, payload: bytes) -> None:
        self._expected, self._last = number + 1, hash(payload)
        self._metrics.kv_batches.inc()
        try:
            batch = read(payload)
            if batch.rank is not None and self.target.rank is not None and batch.rank != self.target.rank:
                raise ValueError(f"rank {batch.rank} publishes where rank {self.target.rank} should")
        except _MALFORMED as error:
            self._reset("malformed", str(error))
            return
        self._piece = self.holdings.apply(batch, self._feeds.dead)

    # -- replays

    def _begin_anew(self) -> None:
        """Nothing is known. Believed from the end of the replay on."""
        self._forget()
        self._expected = self._pending = None
        self._replayed = (0, array("q"))
        if self.places.replay:
            self._ask_replay(None)
        else:
            self.trusted = True

    def _ask_replay(self, last: int | None) -> None:
        """From the last batch that was read on; None: from the start. Nothing is believed until that has come."""
        self.trusted = False
        self._end_replay()
        self._from_start = last is None
        try:
            self._replay = replay = self._feeds.socket(self._zmq.DEALER)
            replay.setsockopt(self._zmq.RCVHWM, _WAITING)
            self._until = self._feeds.clock() + _REPLAY_WITHIN
            self._watch(replay)
            replay.connect(self.places.replay)
            replay.send_multipart((b"", (last or 0).to_bytes(8, "big")))
        except self._zmq.ZMQError:
            self._give_up_replay()

    def _replay_said(self, frames: list[bytes]) -> None:
        self._until = self._feeds.clock() + _REPLAY_WITHIN
        if len(frames) < 2 or len(frames[-2]) != 8:
            self._give_up_replay()
            return
        number, payload = int.from_bytes(frames[-2], "big", signed=True), frames[-1]
        if number < 0:
            self._end_replay()
            self._metrics.kv_replays.inc("ok")
            self.trusted = True
            self._feeds.ready(self)
            return
        expected = self._expected
        if not self._from_start and expected is not None:
            # The first must be the one that was read last: then the same engine goes on.
            same = number == expected - 1 and hash(payload) == self._last
            self._from_start = True
            if not same:
                self._metrics.kv_gaps.inc("restart")
                self._begin_anew()
            return
        if expected is not None and number != expected:
            self._metrics.kv_gaps.inc("replay")
            self._forget()
        first, hashes = self._replayed
        if not len(hashes) or number != first + len(hashes):
            first, hashes = number, array("q")
        hashes.append(hash(payload))
        self._replayed = first, hashes
        self._take(number, payload)

    def _give_up_replay(self) -> None:
        """What was missed is not known: nor is anything else, until it is told."""
        self._end_replay()
        self._metrics.kv_replays.inc("failed")
        self._forget()
        self._expected = None
        self.trusted = True
        self._feeds.ready(self)

    def _end_replay(self) -> None:
        replay, self._replay = self._replay, None
        if replay is not None:
            self._unwatch(replay)
            replay.close(linger=0)

    # -- forgetting

    def _say(self, reason: str, why: str) -> None:
        self._metrics.kv_gaps.inc(reason)
        name = self.target.worker.name
        said = event("kv_forgotten", worker=name, reason=reason)
        log.info("what worker %s has cached is not known any more: %s", name, why, extra=said)

    def _lose(self, reason: str, why: str) -> None:
        self._say(reason, why)
        self._end_replay()
        self._forget()
        self._expected = self._pending = None
        self._replayed = (0, array("q"))

    def _reset(self, reason: str, why: str) -> None:
        """Go on with what comes next."""
        self._say(reason, why)
        self._forget()

    def _forget(self) -> None:
        self._piece = None
        self._feeds.dead += self.holdings.forget()
        self._feeds.ready(self)


class Feeds:
    """Those of a fleet. `follow` whenever that may have changed, in the loop that they are read in."""

    def __init__(
        self,
        fleet: Fleet,
        index: Index,
        metrics: Metrics,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index, self.metrics, self.loop, self.clock = index, metrics, loop, clock
        self.dead: list[Shelf] = []
        """Shelves that the index is to be swept of."""
        self._fleet = fleet
        self.by_target: dict[Target, Feed] = {}
        self._changing: dict[Target, Places | None] = {}
        """Those that are not followed as they should be; None: not at all."""
        self._context: Any = None
        self._refused: dict[Target, Places] = {}
        """Where ZeroMQ would not connect to; said once."""
        self._short = False
        """There were too many sockets to follow all; said once, until all are followed."""
        self._ready: dict[Feed, None] = {}
        """Those that may have something to read, in turn."""
        self._sweeping: Iterator[None] | None = None
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._looks()

    def trusted(self, target: Target) -> Feed | None:
        """Its feed, if what that says may be believed."""
        feed = self.by_target.get(target)
        return feed if feed is not None and feed.trusted and feed._cache is target.cache else None

    def follow(self) -> None:
        """Follow those workers that there are now, soon: one after the other, for a fleet may come and go at once, and
        a hundred ranks take tens of milliseconds."""
        wanted = {target: places for worker in self._fleet for target, places in _places(worker)}
        self._changing = {
            target: wanted.get(target)
            for target in self.by_target.keys() | wanted.keys()
            if wanted.get(target) != self._followed(target)
        }
        for target in self._refused.keys() - wanted.keys():
            del self._refused[target]
        if self._changing:
            self._work_later()
        else:
            self._short = False

    def _followed(self, target: Target) -> Places | None:
        """Where, be it in vain."""
        feed = self.by_target.get(target)
        return self._refused.get(target) if feed is None else feed.places

    def _change(self) -> None:
        """Leave one that is not as it is wanted, and follow it where it is."""
        target, places = self._changing.popitem()
        feed = self.by_target.pop(target, None)
        if feed is not None:
            feed.close()
        if places is None:
            return
        import zmq  # see Feed

        try:
            self.by_target[target] = Feed(target, places, self)
        except OSError as error:
            self._refused[target] = places
            name = target.worker.name
            said = event("kv_refused", worker=name, reason=str(error))
            log.warning("KV events of worker %s cannot be followed: %s", name, error, extra=said)
        except zmq.ZMQError as error:  # there may be one when others are left: the next `follow` tries
            if not self._short:
                self._short = True
                name = target.worker.name
                said = event("kv_refused", worker=name, reason=str(error))
                log.warning("KV events of worker %s cannot be followed for now: %s", name, error, extra=said)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for feed in self.by_target.values():
            feed.close()
        self.by_target.clear()
        self._changing.clear()
        self._ready.clear()
        self.dead.clear()
        self._sweeping = None
        if self._context is not None:
            self._context.destroy(linger=0)

    def socket(self, kind: int) -> Any:
        import zmq  # see Feed

        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        made: Any = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, 1)
        return made

    def ready(self, feed: Feed) -> None:
        """It may have something to read."""
        self._ready[feed] = None
        self._work_later()

    def ended(self, feed: Feed) -> None:
        """It is closed."""
        self._ready.pop(feed, None)

    def _looks(self) -> None:
        self._timer = self.loop.call_later(_LOOK_EVERY, self._looks)
        self.follow()
        now = self.clock()
        for feed in self.by_target.values():
            feed.look(now)
            self.ready(feed)  # ZeroMQ tells only of changes

    def _work_later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._work)

    def _work(self) -> None:
        """A little: whoever waits for the loop waits for no more than that."""
        self._scheduled = False
        until = self.clock() + _A_ROUND
        while self._ready or self._sweeping is not None or self.dead or self._changing:
            if self._changing:
                self._change()
            feed = next(iter(self._ready), None)
            if feed is not None:
                del self._ready[feed]
                if feed.read():
                    self._ready[feed] = None  # behind the others
            self._sweep()
            if self.clock() >= until:
                self._work_later()
                return

    def _sweep(self) -> None:
        if self._sweeping is None and self.dead:
            self._sweeping = self.index.sweep(self.dead.pop())
        if self._sweeping is not None and next(self._sweeping, self) is self:
            self._sweeping = None


def _places(worker: Worker) -> Iterator[tuple[Target, Places]]:
    spec = worker.spec
    if spec is not None and spec.kv_events and worker.known:
        places = Places(spec.kv_events, spec.kv_replay)
        for target in worker.targets:
            with contextlib.suppress(ValueError):
                yield target, places.of(target.rank or 0)
