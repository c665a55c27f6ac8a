"""A fleet by events: arrivals, and the ends of steps that something follows from. Who places turns is handed in."""

from __future__ import annotations

import math
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


class PromptPlacer(Placer, Protocol):
    """One of prompts."""

    def forget(self, session: Session) -> None:
        """The session has ended where it is decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Some more engines compute prompts for the others, as vLLM's workers do it."""

    engines: int
    place: Callable[[Sequence[Scheduler]], PromptPlacer]
    """Who places prompts, on these."""
    seconds_per_token: float
    """Of the way from engine to engine; each goes as if it were alone."""
    least_new: int
    """Tokens that a session's prompt has more than its last one, from which on it goes there; 0: every one does."""


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

    __slots__ = ("at", "came", "fetches", "open", "prefill", "session", "target", "tries")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.at = 0
        """The next turn's place."""
        self.open = 0
        """Sub-agents that have not ended."""
        self.target = -1
        self.tries = 0
        self.came = 0.0
        """When the turn did that it is at."""
        self.prefill = -1
        """Who computes its prompt, or has; -1: its target."""
        self.fetches = False
        """That is on its way."""


class Simulation:
    """One run. Steps of an engine that are alike are one event, however many they are."""

    def __init__(
        self,
        profile: Profile,
        targets: int,
        place: Callable[[Sequence[Scheduler]], Placer],
        split: Split | None = None,
    ) -> None:
        """`split`: of turns; None: each is served at its target whole."""
        self._decoding = targets
        targets += 0 if split is None else split.engines
        self.engines = [Scheduler(profile) for _ in range(targets)]
        self._placer = place(self.engines[: self._decoding])
        self._split_by = split
        self._prefills = None if split is None else split.place(self.engines[self._decoding :])
        self._versions = [0] * targets
        self._ends: list[tuple[float, int, int]] = []
        """When, a number for order, and the target whose steps end, if that is still its version."""
        self._turns: list[tuple[float, int, _Running]] = []
        """When, a number for order in both, and the session that goes on."""
        self._number = 0
        self._parents: dict[Session, _Running] = {}
        self._split: set[str] = set()
        self._where: dict[str, int] = {}
        """Where sessions were that may go on under the same name."""
        self.outcome = Outcome(targets, worked=[0] * targets)

    def run(self, sessions: Iterable[Session]) -> Outcome:
        """All of them, which come by their start. Returns when all have ended."""
        ends, turns, versions, outcome = self._ends, self._turns, self._versions, self.outcome
        coming: Iterator[Session] = iter(sessions)
        upcoming = next(coming, None)
        start = math.inf if upcoming is None else upcoming.start
        while True:
            if turns and (not ends or turns[0] < ends[0]):
                if upcoming is None or start > turns[0][0]:
                    now, _, running = heappop(turns)
                    self._turn(running, now)
                    continue
            elif ends and (upcoming is None or start > ends[0][0]):
                now, version, target = heappop(ends)
                if version == versions[target]:
                    outcome.seconds = now  # they come in their order
                    self._steps_ended(target, now)
                continue
            if upcoming is None:
                break
            self._turn(_Running(upcoming), start)
            upcoming = next(coming, None)
            start = math.inf if upcoming is None else upcoming.start
        for target, engine in enumerate(self.engines):
            outcome.preemptions += engine.counters.preemptions
            outcome.worked[target] = engine.counters.prompts - engine.counters.hits + engine.counters.generated
        outcome.split = len(self._split)
        return outcome

    def _turn(self, running: _Running, now: float) -> None:
        session = running.session
        turn = session.turns[running.at]
        if running.fetches:
            running.fetches = False
            self._enter(
                running, running.target, Job(session.chain, turn.prompt, turn.answer, running, fetched=True), now
            )
            return
        running.came, running.prefill = now, -1
        target = self._placer.place(session, turn, now)
        before = running.target if session.ends else self._where.get(session.name, -1)
        if before not in (-1, target):
            self._split.add(session.name)
        running.target = target
        if not session.ends:
            self._where[session.name] = target
        if self._prefills is not None and self._is_much(running):
            running.prefill = self._prefills.place(session, turn, now)
            self._enter(running, self._decoding + running.prefill, Job(session.chain, turn.prompt, 1, running), now)
            return
        self._enter(running, target, Job(session.chain, turn.prompt, turn.answer, running), now)

    def _is_much(self, running: _Running) -> bool:
        """Whether another one than its target is to compute the prompt."""
        assert self._split_by is not None
        turns, at, least = running.session.turns, running.at, self._split_by.least_new
        return not (least and at and 0 <= turns[at].prompt - turns[at - 1].prompt < least)

    def _enter(self, running: _Running, target: int, job: Job, now: float) -> None:
        """The turn's next engine."""
        session = running.session
        turn = session.turns[running.at]
        engine = self.engines[target]
        try:
            engine.add(job, now)
        except (QueueFull, TooLong) as error:
            running.tries += 1
            again = isinstance(error, QueueFull) and running.tries < _TRIES
            final = not again and self._is_last(running)
            if target >= self._decoding:
                self._leave_prefill(running, now)
            self._end(running, now, final=final)
            if again:
                self._later(now + _RETRY, running)
            else:
                self.outcome.refused += 1
                self._go_on(running, turn, now)
            return
        plan = engine.plan
        if plan is None:
            plan = engine.begin(now, _ALL)
            if plan is not None:
                self._announce(target, plan.end)
            return
        steps = plan.steps
        engine.cut(now)
        if plan.steps != steps:
            self._announce(target, plan.end)

    def _leave_prefill(self, running: _Running, now: float) -> None:
        assert self._prefills is not None
        self._prefills.ended(running.session, running.prefill, now, final=False)

    def _end(self, running: _Running, now: float, *, final: bool) -> None:
        self._placer.ended(running.session, running.target, now, final=final)
        if final and self._prefills is not None:
            self._prefills.forget(running.session)

    def _announce(self, target: int, end: float) -> None:
        self._versions[target] = number = self._number
        heappush(self._ends, (end, number, target))
        self._number = number + 1

    def _later(self, at: float, running: _Running) -> None:
        heappush(self._turns, (at, self._number, running))
        self._number += 1

    def _steps_ended(self, target: int, now: float) -> None:
        engine = self.engines[target]
        for job in engine.end().ended:
            running: _Running = job.owner
            if target >= self._decoding:
                self._count_prompt(job)
                self._fetch(job, running, now)
                continue
            self._count(job)
            turn = running.session.turns[running.at]
            self._end(running, now, final=self._is_last(running))
            self._go_on(running, turn, now)
        plan = engine.begin(now, _ALL)
        if plan is not None:
            # As `_announce`, without a call.
            self._versions[target] = number = self._number
            heappush(self._ends, (plan.end, number, target))
            self._number = number + 1

    def _fetch(self, job: Job, running: _Running, now: float) -> None:
        """The prompt is computed, and goes where it is decoded, but for what is there already."""
        assert self._split_by is not None
        self._leave_prefill(running, now)
        there = self.engines[running.target]
        blocks = min((job.prompt - 1) // there.profile.block_size, len(job.chain))
        found = there.cache.find(job.chain, blocks)[0] * there.profile.block_size
        running.fetches = True
        self._later(now + (job.prompt - found) * self._split_by.seconds_per_token, running)

    @staticmethod
    def _is_last(running: _Running) -> bool:
        return running.session.ends and running.at + 1 == len(running.session.turns)

    def _count(self, job: Job) -> None:
        outcome, first, ended, answer = self.outcome, job.first, job.ended, job.answer
        assert first is not None
        assert ended is not None
        running: _Running = job.owner
        if running.prefill < 0:  # else it was counted where it was computed
            self._count_prompt(job)
        outcome.turns += 1
        outcome.answer_tokens += answer
        outcome.first_token.append(first - running.came)
        if answer > 1:
            outcome.between.append((ended - first) / (answer - 1))

    def _count_prompt(self, job: Job) -> None:
        self.outcome.prompt_tokens += job.prompt
        self.outcome.cached_tokens += job.cached or 0

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
