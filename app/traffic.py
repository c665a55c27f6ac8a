"""What turns came to: sums that add up over replicas, and figures of the last minute.

Nothing is counted here: the cells of `metrics` are read every few seconds, beside the turns. Sums only grow while a
replica lives, so whoever hears them late, or misses some, loses nothing but detail in time.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from app.fleet.workers import Fleet, Worker
from app.metrics import AFFINITY_OUTCOMES, TURN_OUTCOMES, Metrics, WorkerCells

FAILED = frozenset({"worker_error", "broken", "unplaced", "failed"})
"""Outcomes of turns that are the fleet's or the router's fault; what clients did wrong, or left, is not."""
_LOOKED_EVERY = 5
"""Ticks between two looks at one worker that are kept."""
_LOOKS = 7
"""That are kept of each worker: a bit over a minute, of ticks of two seconds."""
_ALL_AT_ONCE = 200
"""Workers whose figures are made anew in every tick; of a larger fleet a fifth each time."""
_MINUTE = 60.0
_TTFT_BUCKETS = 17
"""Of `coatcheck_ttft_seconds`, and of each worker's."""
_HOWS, _OUTCOMES = len(AFFINITY_OUTCOMES), len(TURN_OUTCOMES)
_TTFT = _HOWS + _OUTCOMES
_TOKENS = _TTFT + _TTFT_BUCKETS
_WIDTH = _TOKENS + 2
_MOST = 2**53
"""That a sum can say. Workers name tokens as they like; a thousand replicas' sums still have room in 64 bits."""


class Sums(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one replica has counted since it began."""

    how: dict[str, int] = {}
    """Turns by how they came to their target."""
    outcomes: dict[str, int] = {}
    """Turns by what became of them."""
    ttft: list[int] = []
    """Turns by the bucket of their TTFT."""
    tokens: tuple[int, int] = (0, 0)
    """Of prompts, and of these what workers had in their caches; 0, 0: no worker says."""


class Part(msgspec.Struct, frozen=True):
    """Sums of a stretch of time, of one replica or of several: a row of numbers that can be added."""

    row: array[int]

    @classmethod
    def none(cls) -> Part:
        return cls(array("q", bytes(8 * _WIDTH)))

    @classmethod
    def of(cls, sums: Sums) -> Part:
        """What is not known here of a replica of another version is left out."""
        ttft = sums.ttft if len(sums.ttft) == _TTFT_BUCKETS else [0] * _TTFT_BUCKETS
        hows = (sums.how.get(name, 0) for name in AFFINITY_OUTCOMES)
        row = (*hows, *(sums.outcomes.get(name, 0) for name in TURN_OUTCOMES), *ttft, *sums.tokens)
        return cls(array("q", [max(0, min(number, _MOST)) for number in row]))

    def since(self, before: Part) -> Part:
        return Part(array("q", [max(0, now - then) for now, then in zip(self.row, before.row, strict=True)]))

    def add(self, other: Part) -> None:
        row = self.row
        for at, number in enumerate(other.row):
            if number:
                row[at] += number

    @property
    def how(self) -> dict[str, int]:
        return dict(zip(AFFINITY_OUTCOMES, self.row, strict=False))

    @property
    def turns(self) -> int:
        """That have ended; questions where one would go are none."""
        return sum(self.row[_HOWS:_TTFT]) - self.row[_HOWS + TURN_OUTCOMES.index("explained")]

    @property
    def failed(self) -> int:
        return sum(self.row[_HOWS + at] for at, outcome in enumerate(TURN_OUTCOMES) if outcome in FAILED)

    @property
    def ttft(self) -> Sequence[int]:
        return self.row[_TTFT:_TOKENS]

    @property
    def tokens(self) -> tuple[int, int]:
        return self.row[_TOKENS], self.row[_TOKENS + 1]


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """One worker's last minute, at one replica or several; what moved counts from the replica's beginning on."""

    turns: float = 0.0
    errors: int = 0
    prompt: float = 0.0
    cached: float = 0.0
    moved_from: int = 0
    moved_to: int = 0
    ttft: tuple[int, ...] = ()
    """Flat pairs of a bucket and how many fell into it."""

    def __bool__(self) -> bool:
        return bool(self.turns or self.errors or self.moved_from or self.moved_to)

    def plus(self, other: Figures) -> Figures:
        return Figures(
            self.turns + other.turns,
            self.errors + other.errors,
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.moved_from + other.moved_from,
            self.moved_to + other.moved_to,
            self.ttft + other.ttft,
        )

    def buckets(self) -> list[int]:
        counts = [0] * _TTFT_BUCKETS
        for bucket, count in zip(self.ttft[::2], self.ttft[1::2], strict=False):
            if 0 <= bucket < _TTFT_BUCKETS:
                counts[bucket] += count
        return counts


_NONE = Figures()


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of what was observed lies, as well as buckets tell; in the last, open one its lower
    bound. None: nothing was observed."""
    total = sum(counts)
    if not total:
        return None
    rank, seen = share * total, 0
    for number, count in enumerate(counts):
        if count and seen + count >= rank:
            if number >= len(bounds):
                break
            below = bounds[number - 1] if number else 0.0
            return below + (bounds[number] - below) * (rank - seen) / count
        seen += count
    return float(bounds[-1])


def tokens_of(cells: WorkerCells) -> tuple[int, int]:
    """Tokens of prompts that a worker has told, and of these what it had in its cache."""
    return cells.prompt_tokens, cells.cached_tokens


class _Look(msgspec.Struct, frozen=True):
    """What one worker's cells said at a moment."""

    at: float
    turns: int
    tokens: tuple[int, int]
    ttft: tuple[int, ...]


class _Looks:
    """The last ones at one worker."""

    __slots__ = ("cells", "figures", "kept", "tokens")

    def __init__(self, cells: WorkerCells, now: float) -> None:
        self.cells = cells
        self.tokens = tokens_of(cells)
        """That have been added to the replica's."""
        first = _Look(now, cells.total, self.tokens, tuple(cells.ttft.counts()))
        self.kept = deque([first], maxlen=_LOOKS)
        self.figures = _NONE
        """As they were made last: the same object until they are others."""

    def again(self, now: float, errors: int, *, kept: bool) -> None:
        """Make the figures anew. `kept`: this look is one of those that later ones are compared with."""
        cells, first, last = self.cells, self.kept[0], self.kept[-1]
        if cells.total == last.turns:  # as with most of a large fleet; nothing is copied
            look = _Look(now, last.turns, last.tokens, last.ttft)
        else:
            look = _Look(now, cells.total, tokens_of(cells), tuple(cells.ttft.counts()))
        scale = _MINUTE / max(now - first.at, 1.0)
        turns, prompt, cached = look.turns - first.turns, 0.0, 0.0
        ttft: list[int] = []
        if turns:
            prompt = round((look.tokens[0] - first.tokens[0]) * scale)
            cached = round((look.tokens[1] - first.tokens[1]) * scale)
            if look.ttft != first.ttft:
                for bucket, there in enumerate(look.ttft):
                    if there > first.ttft[bucket]:
                        ttft += (bucket, there - first.ttft[bucket])
        made = Figures(round(turns * scale, 1), errors, prompt, cached, cells.moved_from, cells.moved_to, tuple(ttft))
        if made != self.figures:
            self.figures = made
        if kept:
            self.kept.append(look)


class Traffic:
    """Reads what one replica counts. `tick` is called every two seconds."""

    def __init__(self, metrics: Metrics, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._fleet, self._clock = metrics, fleet, clock
        self._ticks = 0
        self._looks: dict[str, _Looks] = {}
        self._each: list[tuple[Worker, _Looks]] = []
        """Of the fleet as it was when it had changed so many times."""
        self._changes = -1
        self._prompt = self._cached = 0
        """Tokens, of workers that are gone as well."""
        self._lag, self._store = _Recent(metrics.loop_lag.bounds), _Recent(metrics.store_seconds.bounds)

    def tick(self) -> None:
        now = self._clock()
        self._ticks += 1
        if self._fleet.changes != self._changes:
            self._meet(now)
        due = self._each[self._ticks % _LOOKED_EVERY :: _LOOKED_EVERY]
        if len(self._each) <= _ALL_AT_ONCE:
            for worker, looks in self._each:
                looks.again(now, worker.health.errors.per_minute(), kept=False)
        for worker, looks in due:
            looks.again(now, worker.health.errors.per_minute(), kept=True)
            tokens = looks.kept[-1].tokens
            if tokens != looks.tokens:
                self._prompt += tokens[0] - looks.tokens[0]
                self._cached += tokens[1] - looks.tokens[1]
                looks.tokens = tokens
        self._lag.note(now, self._metrics.loop_lag.counts())
        self._store.note(now, self._metrics.store_seconds.counts(lambda labels: labels[-1] == "ok"))

    def _meet(self, now: float) -> None:
        """Workers have come or gone."""
        before, self._looks = self._looks, {}
        for worker in self._fleet:
            looks = before.get(worker.name)
            if looks is None or looks.cells is not worker.cells:
                looks = _Looks(worker.cells, now)
            self._looks[worker.name] = looks
        self._each = [(worker, self._looks[worker.name]) for worker in self._fleet]
        self._changes = self._fleet.changes

    def sums(self) -> Sums:
        outcomes: dict[str, int] = {}
        for (_, outcome), count in self._metrics.turns.cells.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        return Sums(
            {how: count for (how,), count in self._metrics.affinity.cells.items() if count},
            outcomes,
            self._metrics.ttft.counts(),
            (self._prompt, self._cached),
        )

    def figures(self, worker: Worker) -> Figures:
        """Of its last minute here, as of one of the last ticks: the same object until they are others."""
        looks = self._looks.get(worker.name)
        return looks.figures if looks is not None and looks.cells is worker.cells else _NONE

    @property
    def lag_ms(self) -> float | None:
        """How late the event loop was in the last minute, at worst but for one in a hundred times."""
        return _ms(self._lag.quantile(0.99))

    @property
    def store_ms(self) -> float | None:
        """What calls of the claim store took in the last minute, nineteen in twenty; None: there were none."""
        return _ms(self._store.quantile(0.95))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


class _Recent:
    """A histogram's last minute."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._kept: deque[tuple[float, list[int]]] = deque()

    def note(self, now: float, counts: list[int]) -> None:
        self._kept.append((now, counts))
        while len(self._kept) > 1 and self._kept[1][0] <= now - _MINUTE:
            self._kept.popleft()

    def quantile(self, share: float) -> float | None:
        if not self._kept:
            return None
        first, last = self._kept[0][1], self._kept[-1][1]
        return quantile(self._bounds, [now - then for now, then in zip(last, first, strict=True)], share)


SLOT = 10
"""Seconds that a bar of the chart stands for."""
SLOTS = 90
"""A quarter of an hour."""


class History:
    """What all replicas' turns came to, over time: the last minute closely, the last quarter of an hour in slots."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Part]] = {}
        """By replica: the beat and the sums that were heard last."""
        self._recent: deque[tuple[float, Part]] = deque()
        self.slots: dict[int, Part] = {}
        """By the number of the slot since 1970."""

    def hear(self, wall: float, said: Mapping[str, tuple[int, Sums]]) -> None:
        """What each replica says now, by its name, with the number of its word. Who is heard for the first time has
        done before whatever it counted."""
        added = Part.none()
        for name, (beat, sums) in said.items():
            known = self._known.get(name)
            if known is not None and known[0] == beat:
                continue
            part = Part.of(sums)
            if known is not None:
                added.add(part.since(known[1]))
            self._known[name] = beat, part
        for name in self._known.keys() - said.keys():
            del self._known[name]
        self._recent.append((wall, added))
        while self._recent and not wall - _MINUTE < self._recent[0][0] <= wall:  # also when a clock was set back
            self._recent.popleft()
        slot = int(wall // SLOT)
        self.slots.setdefault(slot, Part.none()).add(added)
        for old in [each for each in self.slots if not slot - SLOTS < each <= slot]:
            del self.slots[old]

    def last(self, seconds: float, wall: float) -> Part:
        """At most a minute."""
        total = Part.none()
        start = bisect_right(self._recent, wall - seconds, key=lambda each: each[0])
        for at, (_, part) in enumerate(self._recent):
            if at >= start:
                total.add(part)
        return total
