"""What counts for the load of workers and is no turn of this replica's: their failures, that they are new, what other
replicas have there, and that they owe answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import expm1
from typing import Generic, Protocol, TypeVar

from app.fleet.health import Health

_NEVER = float("inf")
_WEIGHED_EVERY = 0.1
WORD_STANDS = 6.0
"""Seconds that another replica's word of its load counts: three times as long as until the next one."""
SHARES = 64
"""Parts of a turn in which loads are told: sums of them are exact, so that what is taken back leaves nothing."""
_LONGER_AGO = 0.5
"""What the time before the last word counts for how long turns are, beside that since then."""

_FEWEST_OWED = 2
_SOON = 1.0
"""Seconds that what a worker was chosen for may take to get there: its claim is made first."""
_SILENT = 0.5
"""Seconds without an answer after which a worker that did answer before is in doubt: in a burst all owe for less."""


class Weighed(Protocol):
    """A worker."""

    health: Health
    burden: float
    newness: float


class Loaded(Protocol):
    """A target."""

    turns_elsewhere: float
    sessions_elsewhere: int


M_co = TypeVar("M_co", covariant=True)


class Given(Protocol):
    """What is counted of a worker (`metrics.WorkerCells`)."""

    @property
    def total(self) -> int:
        """Turns that have ended there."""
        ...


class Measured(Protocol):
    """A target."""

    in_flight: int
    reserved: int
    spent: float


class Giving(Protocol[M_co]):
    """A worker."""

    @property
    def cells(self) -> Given: ...

    @property
    def targets(self) -> tuple[M_co, ...]: ...


W = TypeVar("W", bound=Weighed)
T = TypeVar("T", bound=Loaded)
M = TypeVar("M", bound=Measured)


class Weights(Generic[W]):
    """Brings what is no load of workers and counts for it up to date: when something has begun to count, and then every
    `_WEIGHED_EVERY`."""

    def __init__(self) -> None:
        self.due = _NEVER
        self._weighed: set[W] = set()
        """Those for which something counts."""
        self._begun: set[W] = set()
        """Of them those for which something counts since they were weighed."""
        self._all_due = _NEVER

    def begun(self, worker: W) -> None:
        """Something has begun to count, or counts more."""
        if not self._weighed:
            self._all_due = 0.0
        self._weighed.add(worker)
        self._begun.add(worker)
        self.due = 0.0

    def weigh(self, now: float) -> None:
        some, self._begun = self._begun, set()
        if now >= self._all_due:
            some = set(self._weighed)
            self._all_due = now + _WEIGHED_EVERY
        for worker in some:
            burden = worker.health.burden
            worker.burden, worker.newness = burden.penalty(now), burden.newness(now)
            if not burden.any:
                self._weighed.discard(worker)
        self.due = self._all_due if self._weighed else _NEVER


class Lately(Generic[M]):
    """What a worker's targets have to do here, as others are told it who hear of it now and then: how many turns they
    had in the mean since the last word. One moment says little where turns are shorter than the time between two words:
    it may be the one in which a burst was over at one target and not yet at another. As far as turns are longer, those
    that are there now will be there until the next word, and count for what they are."""

    __slots__ = ("_at", "_count", "_ends", "_nothing", "_seconds", "_spent", "_words", "_worker")

    def __init__(self, worker: Giving[M], now: float) -> None:
        """`now`: when the last word was of what it has."""
        self._worker, self._at = worker, now
        self._nothing = self._spent = [0.0] * len(worker.targets)
        """What the turns of each target had spent there until the last word, in seconds (`Target.spent`)."""
        self._seconds = self._ends = 0.0
        """What turns have spent there in all, and how many have ended meanwhile, as of the last word at which somebody
        had been there: both decay from word to word."""
        self._count = self._words = 0
        """How many had ended then, and the words since."""

    def tell(self, now: float) -> Sequence[float]:
        """Of each target, in `SHARES` of a turn; since the last time."""
        targets, before = self._worker.targets, self._spent
        seconds, self._at = max(now - self._at, 1e-3), now
        self._words += 1
        spent = [target.spent + (target.in_flight + target.reserved) * now for target in targets]
        if spent == before:  # nobody was there, as at most of a large fleet
            return self._nothing
        self._spent = spent
        meanwhile = [max(0.0, until_now - then) for until_now, then in zip(spent, before, strict=True)]
        remains, count = _LONGER_AGO**self._words, self._worker.cells.total
        self._seconds = self._seconds * remains + sum(meanwhile)
        self._ends = self._ends * remains + count - self._count
        self._count, self._words = count, 0
        stays = _stays(self._seconds / (self._ends + 1), seconds)
        means = (
            stays * (target.in_flight + target.reserved) + (1 - stays) * share / seconds
            for target, share in zip(targets, meanwhile, strict=True)
        )
        return [round(mean * SHARES) / SHARES for mean in means]


def _stays(lasts: float, seconds: float) -> float:
    """The part of so many seconds to come that a turn will be there in the mean which is there now, when turns last so
    long in the mean, however long they have lasted."""
    return -expm1(-seconds / lasts) * lasts / seconds if lasts > 0.0 else 0.0


class Others(Generic[T]):
    """What other replicas say of their load, added up at the targets."""

    def __init__(self) -> None:
        self.stale_at = _NEVER
        """When the oldest word does not count any more."""
        self._said: dict[str, tuple[float, Mapping[T, tuple[float, int]]]] = {}
        """By replica, the longest silent first."""

    def heard(self, replica: str, loads: Mapping[T, tuple[float, int]], now: float) -> None:
        _, before = self._said.pop(replica, (0.0, {}))
        for target, (turns, sessions) in before.items():
            target.turns_elsewhere -= turns
            target.sessions_elsewhere -= sessions
        for target, (turns, sessions) in loads.items():
            target.turns_elsewhere += turns
            target.sessions_elsewhere += sessions
        if loads:
            self._said[replica] = now, dict(loads)
        oldest = next(iter(self._said.values()), None)
        self.stale_at = _NEVER if oldest is None else oldest[0] + WORD_STANDS

    def drop(self, now: float) -> None:
        for replica in [replica for replica, (at, _) in self._said.items() if now - at >= WORD_STANDS]:
            self.heard(replica, {}, now)


class Awaiting(Protocol):
    """A target."""

    reserved: int
    claiming: int
    spent: float


class Place:
    """What a turn is of load between its being placed and its attempt, which counts by itself: once, where it is to go,
    however that changes; until its `end`, which must come. What is `held` already, a slot there, counts by itself."""

    __slots__ = ("_clock", "_coming", "_held", "_making", "_target")

    def __init__(self, held: Awaiting | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the one by which attempts are counted."""
        self._held, self._clock = held, clock
        self._target: Awaiting | None = None
        """Where it counts."""
        self._coming = True
        self._making = False

    def at(self, target: Awaiting) -> None:
        """It is to go there."""
        if self._coming:
            self._count(target)

    @contextlib.contextmanager
    def claiming(self, target: Awaiting) -> Iterator[None]:
        """While a claim is made for it there, which is a session to come. It counts all that while: others may wait for
        that claim when it has left."""
        self._making = True
        self._count(target)
        target.claiming += 1
        try:
            yield
        finally:
            target.claiming -= 1
            self._making = False
            if not self._coming:
                self._count(None)

    def end(self) -> None:
        """Its attempt begins now, or it goes nowhere. Idempotent."""
        self._coming = False
        if not self._making:
            self._count(None)

    def _count(self, target: Awaiting | None) -> None:
        if target is self._held:
            target = None
        before, self._target = self._target, target
        if before is target:
            return
        now = self._clock()
        if before is not None:
            before.reserved -= 1
            before.spent += now
        if target is not None:
            target.reserved += 1
            target.spent -= now


class Owed:
    """What a worker was chosen for since it last answered a turn well. Until it answers, nobody can know whether it
    serves: one that fell silent has failed nothing yet, and what fails at once comes back when as much again is on its
    way. So who owes as much as would make it suspect is given more only where the others have much more to do: what a
    sick worker costs before anybody knows is a few turns, however many come at once. Once it has failed one, here or at
    another replica, and served none well since, a single one is as much.

    Costs turns of bound sessions nothing: that it has answered is seen by the count of its good answers."""

    __slots__ = ("_at", "_count", "_good", "_health", "_most", "_since", "_under_way")

    def __init__(self, health: Health, under_way: Callable[[], int]) -> None:
        """`under_way`: turns that are there, or on their way."""
        self._health, self._under_way = health, under_way
        self._most = max(_FEWEST_OWED, health.tolerance.failures)
        self._count = 0.0
        self._good = 0
        """What it had answered well when that was counted: more of it, and it owes nothing."""
        self._since, self._at = 0.0, 0.0
        """When it was chosen first, of what is counted, and last."""

    def chosen(self) -> None:
        """It is given one more that could have gone elsewhere."""
        health = self._health
        self._at = health.clock()
        if health.good != self._good:
            self._good, self._count = health.good, 0.0
        if not self._count:
            self._since = self._at
        self._count += 1

    @property
    def much(self) -> bool:
        return self._count >= 1 and self._good == self._health.good and self._is_still_much()

    @property
    def doubtful(self) -> bool:
        """Owes much, and more speaks against it than a burst that has only begun: it never answered, has failed since
        it did, or is silent."""
        if not self.much:
            return False
        now = self._health.clock()
        return not self._good or now - self._since >= _SILENT or self._health.failing(now)

    def _is_still_much(self) -> bool:
        now = self._health.clock()
        if now - self._at >= _SOON:
            # What came to nothing otherwise is not owed: its client left, or another replica's claim stood.
            self._count = min(self._count, self._under_way() + self._health.failed_lately(now))
        return self._count >= self._most or (self._count >= 1 and self._health.failing(now))
