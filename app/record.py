"""A replica's record: what there is in it, how it is written again and again with all of the fleet's workers, and in
what two do not agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from operator import attrgetter

import msgspec

from app.fleet.loads import SHARES, Lately
from app.fleet.naming import Place, address_of, place_of
from app.fleet.workers import Fleet, Target, Worker
from app.traffic import Figures, Sums, Traffic
from backends.registry import MAX_VALUE

_WORKERS_BYTES = MAX_VALUE - 8192
"""Of a record; what does not fit is left out, and said to be."""
_FIGURES_BYTES = MAX_VALUE - 6144
"""Of a record with its workers' figures, which fill what room those leave: the busiest come first."""
_AT_ONCE = 50
"""Workers that are written, read or compared in one piece: half a millisecond at most."""
_SHOWN = 3
"""Workers that one line names."""
WORKERS, CLOCK, NAME = "worker", "clock", "replica"
"""What may differ besides the settings that are hashed."""


class Workers(msgspec.Struct, frozen=True, array_like=True):
    """One worker as a replica has it; the numbers by target, in the order of the ranks."""

    url: str
    ranks: int = 0
    turns: tuple[int, ...] = ()
    """At this moment."""
    sessions: tuple[int, ...] = ()
    lately: tuple[int, ...] = ()
    """What the turns count for to whoever places by it until the next record, in `SHARES` of one."""


class _Rest(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of a record but its workers."""

    replica: str
    incarnation: str
    version: str
    host: str = ""
    port: int = 0
    """Where its peers reach it; 0: nowhere."""
    token: str = ""
    network: str = ""
    """Names the network that its loopback is of."""
    agrees: dict[str, str] = {}
    """For each setting that must agree a hash of what it is."""
    left_out: int = 0
    """Workers that did not fit in."""
    store: str = "up"
    """How it finds the claim store: up, read-only or away."""
    sessions: int = 0
    turns: int = 0
    """Running now."""
    at: float = 0.0
    """Its clock, in Unix seconds, when it was put."""
    beat: int = 0
    started: float = 0.0
    # For people only:
    sums: Sums = Sums()
    figures: tuple[tuple[int, Figures], ...] = ()
    """Of the busiest workers, each by its place among `workers`."""
    tenants: dict[str, tuple[int, int]] = {}
    """Turns that are not in the queue, and that are, of the busiest tenants."""
    waiting: int = 0
    """Of the turns, those in the queue."""
    lag_ms: float | None = None
    store_ms: float | None = None


class Record(_Rest, frozen=True, omit_defaults=True):
    """What stands in the registry, as JSON. Readers ignore fields that they do not know."""

    workers: dict[str, Workers] = {}


class _Unread(_Rest, frozen=True):
    workers: dict[str, msgspec.Raw] = {}


_encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Record).decode
"""Raises ValueError (msgspec's are)."""
_decode_unread = msgspec.json.Decoder(_Unread).decode
_decode_workers = msgspec.json.Decoder(Workers).decode
_REST = _Rest.__struct_fields__


class Difference(msgspec.Struct, frozen=True):
    """What differs between this replica and another, and how."""

    setting: str
    how: str
    """For people, without anything secret; may be empty."""


def hashes(settings: Mapping[str, bytes]) -> dict[str, str]:
    """What must agree, in canonical bytes by setting, as hashes."""
    return {
        name: hashlib.blake2b(value, digest_size=8, person=b"coatcheck-agree").hexdigest()
        for name, value in settings.items()
    }


def unlike_settings(mine: Record, other: Record) -> Iterator[Difference]:
    """What does not agree in the settings of two replicas."""
    for setting in sorted(mine.agrees.keys() & other.agrees.keys()):
        if mine.agrees[setting] != other.agrees[setting]:
            yield Difference(setting, "")


def unlike_workers(mine: Roll, network: str, other: Record) -> Generator[None, None, Difference | None]:
    """In what this replica's workers, whose loopback `network` names, and another's do not agree. Where some are left
    out they are not compared. In pieces, as `Reading.read`."""
    if mine.left_out or other.left_out:
        return None
    here, unlike = mine.places, list[str]()
    yield
    for at, name in enumerate(sorted(here.keys() | other.workers.keys())):
        if at % _AT_ONCE == 0:
            yield
        how = _unlike(name, here.get(name), network, other)
        if how is not None:
            unlike.append(how)
    more = f" and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
    return Difference(WORKERS, "; ".join(unlike[:_SHOWN]) + more) if unlike else None


def _unlike(name: str, here: Place | None, network: str, other: Record) -> str | None:
    there = other.workers.get(name)
    if here is None:
        return f"{name} ({other.workers[name].url}) is only there"
    if there is None:
        return f"{name} ({here.url}) is only here"
    if address_of(here.url, network) != address_of(there.url, other.network):
        return f"{name} is {here.url} here and {there.url} there"
    if here.ranks != there.ranks:
        return f"{name} has {here.ranks or 'no'} ranks here and {there.ranks or 'no'} there"
    return None


class Reading:
    """Another replica's record as it is read again and again: each of its workers only when it has changed."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[msgspec.Raw, Workers]] = {}
        self.places: dict[str, Place] = {}
        """Where it says that its workers are; the same object until that has changed."""

    def read(self, value: bytes) -> Generator[None, None, Record]:
        """In pieces, after each of which others may work; what was read before stands until the last one. Raises
        ValueError."""
        unread = _decode_unread(value)
        read: dict[str, tuple[msgspec.Raw, Workers]] = {}
        is_moved = len(unread.workers) != len(self._read)
        for at, (name, raw) in enumerate(unread.workers.items(), 1):
            before = self._read.get(name)
            if before is not None and before[0] == raw:
                read[name] = before
            else:
                said = _decode_workers(raw)
                read[name] = raw, said
                is_moved |= before is None or (before[1].url, before[1].ranks) != (said.url, said.ranks)
            if at % _AT_ONCE == 0:
                yield
        places = self.places
        if is_moved:
            places = {name: Place(said.url, said.ranks) for name, (_, said) in read.items()}
            yield
        self._read, self.places = read, places
        workers = {name: said for name, (_, said) in read.items()}
        return Record(**{field: getattr(unread, field) for field in _REST}, workers=workers)


class Roll:
    """This replica's workers as its record has them, by their names: each is written anew only when it has changed."""

    def __init__(self, fleet: Fleet, traffic: Traffic, clock: Callable[[], float]) -> None:
        """`clock`: the one by which attempts are counted."""
        self._fleet, self._traffic, self._clock = fleet, traffic, clock
        self._written_at = clock()
        self._lines: list[_Line] = []
        self._told: list[_Line] = []
        """Those that fit in, from the first on."""
        self.left_out = 0
        """Workers that did not, of those that were written last."""
        self._changes = -1
        """How often the fleet had changed when the lines were those of its workers."""
        self.edition = 0
        """Another one when it has other workers than before."""

    @property
    def places(self) -> dict[str, Place]:
        """Of the workers that were written last."""
        return {line.worker.name: line.place for line in self._told}

    def write(self) -> Generator[None, None, None]:
        """Bring it up to date, which takes as long as some turns do: in pieces, after each of which others may work."""
        before = self._changes, self.left_out
        if self._changes != self._fleet.changes:
            self._line_up()
        lines, written_at = self._lines, self._clock()
        for begin in range(0, len(lines), _AT_ONCE):
            now = self._clock()
            for at in range(begin, min(begin + _AT_ONCE, len(lines))):
                lines[at].write(at, now, self._traffic)
            yield
        self._written_at = written_at
        room = _WORKERS_BYTES
        for fitting, line in enumerate(lines):
            room -= len(line.text) + 1
            if room < 0:
                self._told = lines[:fitting]
                break
        else:
            self._told = lines
        self.left_out = len(lines) - len(self._told)
        self.edition += before != (self._changes, self.left_out)

    def _line_up(self) -> None:
        self._changes = self._fleet.changes
        known = {line.worker: line for line in self._lines}
        workers = sorted(self._fleet, key=attrgetter("name"))
        self._lines = [known.get(worker) or _Line(worker, self._written_at) for worker in workers]

    def within(self, record: Record) -> bytes:
        """The whole record, of which `record` is the rest."""
        rest, workers = _encode(record)[:-1], b",".join([line.text for line in self._told])
        room = _FIGURES_BYTES - len(workers)
        return b'%b,"workers":{%b},"figures":[%b]}' % (rest, workers, b",".join(self._figures(room)))

    def _figures(self, room: int) -> list[bytes]:
        busy = [line for line in self._told if line.figures_text]
        if sum([len(line.figures_text) + 1 for line in busy]) <= room:
            return [line.figures_text for line in busy]
        busy.sort(key=attrgetter("figures.turns", "figures.errors"), reverse=True)
        texts = []
        for line in busy:
            room -= len(line.figures_text) + 1
            if room < 0:
                break
            texts.append(line.figures_text)
        return texts


class _Line:
    """One worker in a record."""

    __slots__ = ("_at", "_begin", "_lately", "_numbers", "figures", "figures_text", "place", "text", "worker")

    def __init__(self, worker: Worker, since: float) -> None:
        """`since`: when the record was written last."""
        self.worker = worker
        self.place = place_of(worker)
        self.text = b""
        """Its name and what the replica says of it (`Workers`); `_begin` of that does not change, `_numbers` do."""
        self._begin = b"%b:[%b,%d," % (_encode(worker.name), _encode(self.place.url), self.place.ranks)
        self._numbers: list[tuple[int, int, float]] = []
        self._lately = Lately[Target](worker, since)
        self.figures: Figures | None = None
        self.figures_text = b""
        """Behind its place among the workers, which was `_at`; empty: there are none."""
        self._at = 0

    def write(self, at: int, now: float, traffic: Traffic) -> None:
        """`at`: its place among them."""
        numbers = [
            (target.in_flight + target.reserved, target.sessions, mean)
            for target, mean in zip(self.worker.targets, self._lately.tell(now), strict=True)
        ]
        if numbers != self._numbers:
            self._numbers = numbers
            turns, sessions, means = zip(*numbers, strict=True)
            self.text = self._begin + _encode((turns, sessions, [round(mean * SHARES) for mean in means]))[1:]
        figures = traffic.figures(self.worker)
        if figures is not self.figures or at != self._at:
            self.figures, self._at = figures, at
            self.figures_text = _encode((at, figures)) if figures else b""
