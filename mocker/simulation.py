"""A fleet by events: arrivals, and the ends of steps that something follows from. Who places turns is handed in."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from mocker.engine.profile import Profile
from mocker.engine.scheduler import Job, QueueFull, Scheduler, TooLong
from mocker.traces import Session, Turn

_ALL = 1 << 60
_RETRY = 1.0
"""Seconds after which a turn that was refused comes again, as clients do."""
_TRIES = 5


class Placer(Protocol):
    """A router, as its turns see it. Targets are numbers of schedulers."""

    def place(self, session: Session, turn: Turn, now: float) -> int:
        """Where the turn goes, which begins there now."""

    def ended(self, session: Session, target: int, now: float, *, final: bool) -> None:
        """A turn that was placed has ended; `final`: it was the session's last."""


@dataclass(slots=True)
class Outcome:
    """What came of it. Times in seconds."""

    targets: int
    turns: int = 0
    sessions: int = 0
    refused: int = 0
    """Turns that did not find room in several tries, or would never have fitted into a cache."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    split: int = 0
    """Sessions whose turns were at several targets."""
    preemptions: int = 0
    seconds: float = 0.0
    """Simulated."""
    first_token: array[float] = field(default_factory=lambda: array("d"))
    """From each turn's coming to its first token."""
    between: array[float] = field(default_factory=lambda: array("d"))
    """Of each turn with several tokens, in the mean."""
    worked: list[int] = field(default_factory=list)
    """Tokens that each target has computed, prompts' and answers'."""

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Of the work, the most at one target by the mean."""
        return max(self.worked) * len(self.worked) / sum(self.worked) if any(self.worked) else 1.0


class _Running:
    """A session and where it is."""

    __slots__ = ("at", "open", "session", "target", "tries")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.at = 0
        """The next turn's place."""
        self.open = 0
        """Sub-agents that have not ended."""
        self.target = -1
        self.tries = 0


class Simulation:
    """One run. Steps of an engine that are alike are one event, however many they are."""

    def __init__(self, profile: Profile, targets: int, place: Callable[[Sequence[Scheduler]], Placer]) -> None:
        self.engines = [Scheduler(profile) for _ in range(targets)]
        self._placer = place(self.engines)
        self._versions = [0] * targets
        self._events: list[tuple[float, int, int, _Running | int]] = []
        """When, a number for order, the target whose steps end or -1, and their version or the session that goes on."""
        self._number = 0
        self._parents: dict[Session, _Running] = {}
        self._split: set[str] = set()
        self._where: dict[str, int] = {}
        """Where sessions were that may go on under the same name."""
        self.outcome = Outcome(targets, worked=[0] * targets)

    def run(self, sessions: Iterable[Session]) -> Outcome:
        """All of them, which come by their start. Returns when all have ended."""
        events, versions, outcome = self._events, self._versions, self.outcome
        coming: Iterator[Session] = iter(sessions)
        upcoming = next(coming, None)
        while True:
            if upcoming is not None and (not events or upcoming.start <= events[0][0]):
                self._turn(_Running(upcoming), upcoming.start)
                upcoming = next(coming, None)
                continue
            if not events:
                break
            now, _, target, what = heappop(events)
            if target < 0:
                assert isinstance(what, _Running)
                self._turn(what, now)
            elif what == versions[target]:
                outcome.seconds = max(outcome.seconds, now)
                self._steps_ended(target, now)
        for target, engine in enumerate(self.engines):
            outcome.preemptions += engine.counters.preemptions
            outcome.worked[target] = engine.counters.prompts - engine.counters.hits + engine.counters.generated
        outcome.split = len(self._split)
        return outcome

    def _turn(self, running: _Running, now: float) -> None:
        session = running.session
        turn = session.turns[running.at]
        target = self._placer.place(session, turn, now)
        before = running.target if session.ends else self._where.get(session.name, -1)
        if before not in (-1, target):
            self._split.add(session.name)
        running.target = target
        if not session.ends:
            self._where[session.name] = target
        engine = self.engines[target]
        job = Job(session.chain, turn.prompt, turn.answer, running)
        try:
            engine.add(job, now)
        except (QueueFull, TooLong) as error:
            running.tries += 1
            again = isinstance(error, QueueFull) and running.tries < _TRIES
            self._placer.ended(session, target, now, final=not again and self._is_last(running))
            if again:
                self._later(now + _RETRY, running)
            else:
                self.outcome.refused += 1
                self._go_on(running, turn, now)
            return
        plan = engine.plan
        if plan is None:
            self._begin(target, now)
            return
        steps = plan.steps
        engine.cut(now)
        if plan.steps != steps:
            self._announce(target, plan.end)

    def _begin(self, target: int, now: float) -> None:
        plan = self.engines[target].begin(now, _ALL)
        if plan is not None:
            self._announce(target, plan.end)

    def _announce(self, target: int, end: float) -> None:
        self._versions[target] = self._number
        heappush(self._events, (end, self._number, target, self._number))
        self._number += 1

    def _later(self, at: float, running: _Running) -> None:
        heappush(self._events, (at, self._number, -1, running))
        self._number += 1

    def _steps_ended(self, target: int, now: float) -> None:
        done = self.engines[target].end()
        for job in done.ended:
            running: _Running = job.owner
            self._count(job)
            turn = running.session.turns[running.at]
            self._placer.ended(running.session, target, now, final=self._is_last(running))
            self._go_on(running, turn, now)
        self._begin(target, now)

    @staticmethod
    def _is_last(running: _Running) -> bool:
        return running.session.ends and running.at + 1 == len(running.session.turns)

    def _count(self, job: Job) -> None:
        outcome = self.outcome
        assert job.first is not None
        assert job.ended is not None
        outcome.turns += 1
        outcome.prompt_tokens += job.prompt
        outcome.cached_tokens += job.cached or 0
        outcome.answer_tokens += job.answer
        outcome.first_token.append(job.first - job.arrived)
        if job.answer > 1:
            outcome.between.append((job.ended - job.first) / (job.answer - 1))

    def _go_on(self, running: _Running, turn: Turn, now: float) -> None:
        """With what follows on a turn."""
        session = running.session
        running.at += 1
        running.tries = 0
        for child in turn.children:
            running.open += 1
            self._parents[child] = running
            self._later(now, _Running(child))
        if running.at < len(session.turns):
            if not running.open:
                self._next(running, now)
            return
        self.outcome.sessions += 1
        parent = self._parents.pop(session, None)
        if parent is not None:
            parent.open -= 1
            if not parent.open and parent.at < len(parent.session.turns):
                self._next(parent, now)

    def _next(self, running: _Running, now: float) -> None:
        turn = running.session.turns[running.at]
        self._later(now + turn.after, running)
