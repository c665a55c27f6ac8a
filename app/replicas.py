"""What each replica says of itself, and what it makes of what the others say.

Every `BEAT` seconds a replica puts its record into the registry under `replicas/`, where it stands for `STANDS` and is
removed at exit: who it is, where its peers reach it and with which token, what must agree as one hash for each setting,
its workers with the turns and sessions there, its clock, and how it finds the claim store. Whoever can read the store
is a replica: the token keeps out everybody else, and there is no secret in a record but that.

The others' records tell what differs (`Difference`): each is told once when it begins and once when it is over, at both
ends, and shown meanwhile. While the registry is away the last view stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import msgspec

from app.fleet.loads import SHARES
from app.fleet.naming import Naming, Place
from app.fleet.workers import Fleet, Target
from app.logs import event
from app.metrics import Metrics
from app.record import CLOCK, NAME, WORKERS, Difference, Reading, Record, Roll, unlike_settings, unlike_workers
from app.sessions.affinity import Affinity
from app.sessions.peers import Peer, Peers
from app.traffic import Figures, Traffic
from backends.base import StoreError
from backends.registry import Put, Registry, Removed

log = logging.getLogger("coatcheck.replicas")

KIND = "replicas"
BEAT = 2.0
STANDS = 6.0
_MOST_TENANTS = 20
_CLOCKS_APART = 5.0
"""Seconds."""
_CLOCK_LOOKS = 3
"""Records in a row that must say so: one that was late on its way says nothing of a clock."""
_WORKERS_PATIENCE = 3.0
"""Seconds that replicas may know different workers: a change does not reach all at once."""
_AT_ONCE = 100
"""Workers whose loads are heard in one piece: half a millisecond."""

T = TypeVar("T")


class Seen:
    """One other replica, as its records say."""

    __slots__ = ("_skews", "differs", "heard", "places", "reading", "record", "told", "unlike", "unlike_since")

    def __init__(self, record: Record, reading: Reading) -> None:
        """`reading`: by which it was read."""
        self.record, self.reading = record, reading
        self.heard = 0.0
        """When its last record came, by our clock; 0.0: it stood when we began to look."""
        self.differs: dict[str, Difference] = {}
        self.told: set[str] = set()
        self.places: dict[str, Place] = {}
        """Of its workers, as they were compared with ours."""
        self.unlike: Difference | None = None
        """In the workers; made anew only when they change, here or there: there may be many."""
        self.unlike_since: float | None = None
        """Since when its workers are not ours."""
        self._skews: deque[float] = deque(maxlen=_CLOCK_LOOKS)

    def heard_at(self, now: float, wall: float) -> None:
        self.heard = now
        self._skews.append(self.record.at - wall)

    @property
    def skew(self) -> float:
        """Seconds that its clock is ahead of ours (negative: behind), at the least; 0.0: not known to be off."""
        if len(self._skews) < _CLOCK_LOOKS:
            return 0.0
        return min(self._skews, key=abs)


class Myself(msgspec.Struct, frozen=True):
    """What does not change of a replica while it runs."""

    replica: str
    version: str
    network: str
    agrees: dict[str, str]
    host: str = ""
    port: int = 0
    """Where its peers reach it; 0: nowhere."""
    token: str = ""
    incarnation: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))


class Replicas:
    """Puts this replica's record and follows the others'. `start` inside the running loop.

    Long because what others say is shown, counted and told in one place."""

    def __init__(
        self,
        registry: Registry,
        myself: Myself,
        *,
        fleet: Fleet,
        affinity: Affinity,
        peers: Peers,
        names: Naming,
        metrics: Metrics,
        running: Callable[[], int],
        waiting: Callable[[], int] = int,
        traffic: Traffic | None = None,
        tenants: Callable[[], Mapping[str, tuple[int, int]]] = dict,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`running`: turns now; `waiting`: of these, in the queue; `traffic`: what they came to; `tenants`: of each,
        turns that are not in the queue, and that are; `clock` monotonic, `wall` in Unix seconds."""
        self._registry, self._me, self._fleet, self._affinity = registry, myself, fleet, affinity
        self._peers, self._names, self._running, self._waiting = peers, names, running, waiting
        self._traffic, self._tenants = traffic or Traffic(metrics, fleet, clock=clock), tenants
        self._clock, self._wall = clock, wall
        self._started = wall()
        self._beat = 0
        self._seen: dict[str, Seen] = {}
        """The others, by the names of their records. It stays as it is while the registry is away."""
        self._alive = True
        """The registry answers."""
        self._tasks: list[asyncio.Task[None]] = []
        self._roll = Roll(fleet, self._traffic, clock)
        self._edition = 0
        """Of the roll, as the others' workers were compared with it."""
        self._comparing = asyncio.Lock()
        """Held while others' workers are compared with ours, in pieces: who comes later compares what is newer."""
        self._record = self._make_record()
        metrics.gauge(
            "coatcheck_replicas", "Replicas with a record, this one too.", lambda: len(self._seen) + 1, merge="max"
        )
        metrics.gauge(
            "coatcheck_peers", "Other replicas that can be asked directly.", lambda: len(self._peers), merge="max"
        )
        metrics.gauges(
            "coatcheck_replica_differs",
            "Other replicas that differ in what must agree, by setting.",
            "setting",
            self._count_differences,
            merge="max",
        )

    # -- life

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._put()), asyncio.create_task(self._follow())]

    async def aclose(self) -> None:
        """Take the record away, as far as the registry answers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._registry.remove(KIND, self._name)

    @property
    def _name(self) -> str:
        # Each life has a record of its own: two replicas of one name do not write over each other.
        return self._me.incarnation

    # -- our own record

    async def _put(self) -> None:
        while True:
            begun = self._clock()
            try:
                await self._registry.put(KIND, self._name, await self._renewed(), STANDS)
                self._alive = True
            except StoreError as error:
                if self._alive:
                    log.warning("this replica cannot say how it is: %s", error)
                self._alive = False
            except Exception:
                # A fault of the store's code must not end the record unseen: the others would forget this replica.
                log.exception("the replica's record failed; it is put again")
            self._judge()
            await asyncio.sleep(max(0.1, BEAT - (self._clock() - begun)))

    async def _renewed(self) -> bytes:
        await _in_pieces(self._roll.write())
        if self._edition != self._roll.edition:
            self._edition = self._roll.edition
            await self._compare(list(self._seen.values()))
        self._record = self._make_record()
        return self._roll.within(self._record)

    def _make_record(self) -> Record:
        """All of it but the workers."""
        self._beat += 1
        tenants = sorted(self._tenants().items(), key=lambda each: (-sum(each[1]), each[0]))
        me = self._me
        return Record(
            replica=me.replica,
            incarnation=me.incarnation,
            version=me.version,
            host=me.host,
            port=me.port,
            token=me.token,
            network=me.network,
            agrees=me.agrees,
            left_out=self._roll.left_out,
            store=self._affinity.state.value,
            sessions=self._affinity.size,
            turns=self._running(),
            at=self._wall(),
            beat=self._beat,
            started=self._started,
            sums=self._traffic.sums(),
            tenants=dict(tenants[:_MOST_TENANTS]),
            waiting=self._waiting(),
            lag_ms=self._traffic.lag_ms,
            store_ms=self._traffic.store_ms,
        )

    # -- the others'

    async def _follow(self) -> None:
        delay = 0.1
        while True:
            try:
                async for event in self._registry.watch(KIND):
                    delay = 0.1
                    if isinstance(event, Put):
                        await self._heard(event.name, event.value, fresh=True)
                    elif isinstance(event, Removed):
                        await self._gone(event.name)
                    else:
                        await self._list()
                    self._tell_peers()
            except StoreError as error:
                log.debug("the registry's watch is lost: %s", error)
            except Exception:
                # As above: what others say would be missed for ever.
                log.exception("the registry's watch failed; it is begun again")
            await asyncio.sleep(delay)
            delay = min(2 * delay, BEAT)

    async def _list(self) -> None:
        records = await self._registry.list(KIND)
        for name in self._seen.keys() - records.keys():
            await self._gone(name)
        for name, value in records.items():
            await self._heard(name, value, fresh=False)

    async def _heard(self, name: str, value: bytes, *, fresh: bool) -> None:
        """`fresh`: it was put just now. In pieces, since there may be many workers in it."""
        if name == self._name:
            return
        now, wall = self._clock(), self._wall()
        seen = self._seen.get(name)
        reading = Reading() if seen is None else seen.reading
        try:
            record = await _in_pieces(reading.read(value))
        except msgspec.DecodeError as error:
            log.debug("a replica's record cannot be read: %s", error)
            return
        if seen is None:
            seen = self._seen[name] = Seen(record, reading)
        seen.record = record
        if fresh:
            seen.heard_at(now, wall)
        if seen.places is not reading.places:
            seen.places = reading.places
            await self._compare([seen])
        self._fleet.heard(name, await _in_pieces(self._loads(record)))
        self._judge_one(seen)

    def _loads(self, record: Record) -> Generator[None, None, dict[Target, tuple[float, int]]]:
        """What another replica has, at our targets."""
        loads: dict[Target, tuple[float, int]] = {}
        for at, (name, said) in enumerate(record.workers.items(), 1):
            if at % _AT_ONCE == 0:
                yield
            if said.ranks == 0 and len(said.lately) == len(said.sessions) == 1:  # as most have it
                target = self._names.find(name, None, record.replica)
                if target is not None:
                    loads[target] = said.lately[0] / SHARES, said.sessions[0]
                continue
            # One of an older version says only what it had at one moment.
            turns = [shares / SHARES for shares in said.lately] or said.turns
            for number, load in enumerate(zip(turns, said.sessions, strict=False)):
                target = self._names.find(name, number if said.ranks else None, record.replica)
                if target is not None:
                    loads[target] = load
        return loads

    async def _gone(self, name: str) -> None:
        seen = self._seen.pop(name, None)
        if seen is not None:
            self._fleet.heard(name, {})
            await self._compare([])
            for setting in sorted(seen.told):
                other = seen.record.replica
                said = event("replica_gone", other=other, setting=setting)
                log.info("replica %s, which differed in %s, is gone", other, setting, extra=said)

    def _tell_peers(self) -> None:
        reachable = [
            Peer(record.replica, record.incarnation, record.host, record.port, record.token, record.store)
            for record in (seen.record for seen in self._seen.values())
            # A loopback is its own machine's alone.
            if record.port and (record.network == self._me.network or not _is_loopback(record.host))
        ]
        self._peers.update(reachable if self._me.port else ())

    # -- what differs

    async def _compare(self, changed: list[Seen]) -> None:
        """The workers of these, which have changed, or ours, with ours; and learn all others' names for them."""
        async with self._comparing:
            for seen in changed:
                seen.unlike = await _in_pieces(unlike_workers(self._roll, self._me.network, seen.record))
            said = {seen.record.replica: (seen.record.network, seen.places) for seen in self._seen.values()}
            await _in_pieces(self._names.learn(said))

    def _judge(self) -> None:
        for seen in self._seen.values():
            self._judge_one(seen)

    def _judge_one(self, seen: Seen) -> None:
        now, record = self._clock(), seen.record
        found = {each.setting: each for each in unlike_settings(self._record, record)}
        if seen.unlike is None:
            seen.unlike_since = None
        else:
            seen.unlike_since = now if seen.unlike_since is None else seen.unlike_since
            if now - seen.unlike_since >= _WORKERS_PATIENCE or WORKERS in seen.told:
                found[WORKERS] = seen.unlike
        if abs(seen.skew) > _CLOCKS_APART:
            ahead = "ahead of" if seen.skew > 0 else "behind"
            found[CLOCK] = Difference(CLOCK, f"its clock is {abs(seen.skew):.0f} s {ahead} ours")
        # A record that nobody puts again is of a replica that was killed, and perhaps started again.
        if record.replica == self._me.replica and seen.heard:
            found[NAME] = Difference(NAME, "two replicas have this name; each needs one of its own")
        for setting in sorted(found.keys() - seen.told):
            how = f": {found[setting].how}" if found[setting].how else ""
            said = event("replica_differs", other=record.replica, setting=setting, reason=found[setting].how or None)
            log.warning("replica %s differs from this one in %s%s", record.replica, setting, how, extra=said)
        for setting in sorted(seen.told - found.keys()):
            said = event("replica_agrees", other=record.replica, setting=setting)
            log.info("replica %s agrees with this one in %s again", record.replica, setting, extra=said)
        seen.differs, seen.told = found, set(found)

    def _count_differences(self) -> list[tuple[str, float]]:
        settings = [*self._me.agrees, WORKERS, CLOCK, NAME]
        return [(setting, sum(setting in seen.differs for seen in self._seen.values())) for setting in settings]

    def agree_on(self, agrees: dict[str, str]) -> None:
        """The settings that must agree have changed."""
        self._me = msgspec.structs.replace(self._me, agrees=agrees)

    # -- for people, and for who places

    def others(self) -> list[Record]:
        """The others' records, as they came last."""
        return [seen.record for seen in self._seen.values()]

    def figures_elsewhere(self) -> dict[str, Figures]:
        """By the name here of a worker what the others say of its last minute."""
        found: dict[str, Figures] = {}
        for record in self.others():
            names = list(record.workers)
            for place, figures in record.figures:
                if place >= len(names):
                    continue
                rank = 0 if record.workers[names[place]].ranks else None
                target = self._names.find(names[place], rank, record.replica)
                if target is not None:
                    name = target.worker.name
                    found[name] = figures if name not in found else found[name].plus(figures)
        return found

    def view(self) -> list[dict[str, Any]]:
        """All replicas, this one first; nothing of it is secret."""
        shown = [(self._record, None), *((seen.record, seen) for seen in self._seen.values())]
        return [self._shown(record, seen) for record, seen in shown]

    def differing(self) -> list[str]:
        """One line for each thing in which another replica differs."""
        return [
            f"replica {seen.record.replica} differs in {each.setting}" + (f": {each.how}" if each.how else "")
            for seen in self._seen.values()
            for each in seen.differs.values()
        ]

    def _shown(self, record: Record, seen: Seen | None) -> dict[str, Any]:
        return {
            "replica": record.replica,
            "incarnation": record.incarnation,
            "this": seen is None,
            "version": record.version,
            "peer_address": f"{record.host}:{record.port}" if record.port else None,
            "store": record.store,
            "workers": len(record.workers) + record.left_out if seen is not None else len(self._fleet),
            "turns": record.turns,
            "sessions": record.sessions,
            "waiting": record.waiting,
            "lag_ms": record.lag_ms,
            "store_ms": record.store_ms,
            "started": round(record.started),
            "up_seconds": max(0, int(record.at - record.started)),
            "heard_seconds_ago": round(self._clock() - seen.heard, 1) if seen is not None and seen.heard else None,
            "differs": [] if seen is None else [{"setting": d.setting, "how": d.how} for d in seen.differs.values()],
        }


async def _in_pieces(pieces: Generator[None, None, T]) -> T:
    """What comes of it in the end. After each piece others may work."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
