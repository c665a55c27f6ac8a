"""Where new sessions go: what a choice costs, and how evenly it spreads. `make bench-placement` prints the tables that
`benchmarks/README.md` keeps.

The simulation has two replicas of the real fleet and policies, which tell each other what they have every two seconds,
and workers that serve a few turns at a time and queue the rest. Sessions arrive at random, have a handful of turns with
pauses between them, each at either replica, and lengths that are skewed: most are short, few are very long.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.fleet.candidates import Candidates
from app.fleet.policies import Policy, least, least_loaded, rendezvous
from app.fleet.workers import Fleet, Target, make_worker
from app.sessions.identity import KeyHasher
from benchmarks import caches
from benchmarks.children import REPO, end_on_sigterm
from benchmarks.head_to_head import head_to_head
from benchmarks.tables import Table, machine

RESULTS = REPO / "benchmarks" / "results"

TARGETS = (4, 16, 64, 512, 1000)
CHOICES = 20
SLOTS = 8
TURNS = 6.0
PAUSE_S = 3.0
SIGMA = 1.3
"""Of the turns' lengths, which are log-normal with a mean of one second."""
BEAT_S = 2.0
WARM_UP_S = 50.0

_hasher = KeyHasher()


def all_compared(candidates: Candidates[Target]) -> Target:
    """The least loaded of all, what a policy would do that knows no hash."""
    return least(list(candidates))


def hash_alone(candidates: Candidates[Target]) -> Target:
    return rendezvous(candidates.key, candidates)


RULES: dict[str, Policy] = {
    "least-loaded": least_loaded,
    "least loaded of all": all_compared,
    "hash alone": hash_alone,
}


def new_fleet(count: int, clock: Callable[[], float] = time.monotonic) -> Fleet:
    workers = (
        make_worker(f"http://127.0.0.1:{number + 1}", name=f"w{number}", connect_limit=1, idle_limit=1, clock=clock)
        for number in range(count)
    )
    return Fleet(workers, clock=clock)


# --- a: the cost -----------------------------------------------------------------------------------------------------


def cost(windows: int) -> Table:
    """This thread's CPU for one choice, the least of many short windows."""
    keys = [_hasher.key(b"", b"%d" % number) for number in range(windows * CHOICES)]
    rows = [[str(count), *(f"{seconds * 1e6:.1f} µs" for seconds in _costs(count, keys, windows))] for count in TARGETS]
    return Table(
        "What a choice costs",
        ("targets", "a session", "a turn without one", "by hash", "all compared", "after a change of the fleet"),
        rows,
        "Thread CPU time, `Fleet.candidates` included.",
    )


def _costs(count: int, keys: Sequence[str], windows: int) -> Iterator[float]:
    fleet = new_fleet(count)
    targets = [target for worker in fleet for target in worker.targets]

    def choose(policy: Policy, key: str) -> None:
        fleet.note_placed(policy(fleet.candidates(key=key)))

    def change(number: int) -> None:
        targets[number % count].worker.mark = "none"  # after which all are gone through again
        fleet.candidates().walk("0")

    few = max(1, windows * 4 // count)
    yield _least_window(lambda number: choose(least_loaded, keys[number]), windows)
    yield _least_window(lambda _: choose(least_loaded, ""), windows)
    yield _least_window(lambda number: rendezvous(keys[number], fleet.candidates()), windows)
    yield _least_window(lambda number: choose(all_compared, keys[number]), few)
    yield _least_window(change, few)


def _least_window(work: Callable[[int], object], windows: int) -> float:
    best = math.inf
    work(0)
    for window in range(windows):
        start = time.thread_time()
        for number in range(window * CHOICES, (window + 1) * CHOICES):
            work(number)
        best = min(best, (time.thread_time() - start) / CHOICES)
    return best


# --- b: how it spreads -----------------------------------------------------------------------------------------------


@dataclass
class Session:
    key: str
    number: int
    """Of its worker."""
    chance: random.Random
    """Its own, so that each rule meets the same sessions."""
    left: int
    known: set[int] = field(default_factory=set)
    """At which replicas."""


@dataclass
class Worker:
    busy: int = 0
    queue: deque[tuple[float, int, Session]] = field(default_factory=deque)
    sessions: int = 0

    @property
    def turns(self) -> int:
        return self.busy + len(self.queue)


@dataclass
class Outcome:
    waits: list[float] = field(default_factory=list)
    uneven_sessions: list[float] = field(default_factory=list)
    uneven_turns: list[float] = field(default_factory=list)
    by_hash: int = 0
    placed: int = 0


class Simulation:
    """Events by time; `run` goes through them."""

    def __init__(self, policy: Policy, count: int, load: float, seed: int) -> None:
        """`load`: part of all slots that are busy in the mean."""
        self._seed, self._random = seed, random.Random(seed)
        self._now = 0.0
        self._policy = policy
        self._fleets = [new_fleet(count, lambda: self._now) for _ in range(2)]
        self._targets = [[target for worker in fleet for target in worker.targets] for fleet in self._fleets]
        self._workers = [Worker() for _ in range(count)]
        self._rate = load * count * SLOTS / TURNS
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.outcome = Outcome()

    def run(self, seconds: float) -> Outcome:
        self._later(0.0, self._arrive)
        self._later(BEAT_S, self._tell)
        self._later(WARM_UP_S, self._look)
        while self._now < seconds:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), event))

    def _arrive(self) -> None:
        self._later(self._random.expovariate(self._rate), self._arrive)
        self.outcome.placed += 1
        chance = random.Random(f"{self._seed} {self.outcome.placed}")
        key, replica = _hasher.key(b"", b"%d" % self.outcome.placed), chance.randrange(2)
        fleet = self._fleets[replica]
        target = self._policy(fleet.candidates(key=key))
        fleet.note_placed(target)
        self.outcome.by_hash += target is rendezvous(key, fleet.candidates())
        number = self._targets[replica].index(target)
        self._workers[number].sessions += 1
        self._turn(replica, Session(key, number, chance, 1 + int(chance.expovariate(1 / (TURNS - 0.5)))))

    def _turn(self, replica: int, session: Session) -> None:
        target, worker = self._targets[replica][session.number], self._workers[session.number]
        if replica not in session.known:
            session.known.add(replica)
            target.sessions += 1
        target.in_flight += 1
        worker.queue.append((self._now, replica, session))
        self._serve(worker)

    def _serve(self, worker: Worker) -> None:
        while worker.queue and worker.busy < SLOTS:
            since, replica, session = worker.queue.popleft()
            worker.busy += 1
            if self._now > WARM_UP_S:
                self.outcome.waits.append(self._now - since)
            seconds = session.chance.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
            self._later(seconds, lambda replica=replica, session=session: self._end(replica, session))  # type: ignore[misc]

    def _end(self, replica: int, session: Session) -> None:
        worker = self._workers[session.number]
        worker.busy -= 1
        self._targets[replica][session.number].in_flight -= 1
        session.left -= 1
        if session.left:
            pause = session.chance.expovariate(1 / PAUSE_S)
            self._later(pause, lambda: self._turn(session.chance.randrange(2), session))
        else:
            worker.sessions -= 1
            for known in session.known:
                self._targets[known][session.number].sessions -= 1
        self._serve(worker)

    def _tell(self) -> None:
        _tell_each_other(self._fleets, self._targets)
        self._later(BEAT_S, self._tell)

    def _look(self) -> None:
        self.outcome.uneven_sessions.append(_unevenness([worker.sessions for worker in self._workers]))
        self.outcome.uneven_turns.append(_unevenness([worker.turns for worker in self._workers]))
        self._later(1.0, self._look)


def _unevenness(counts: Sequence[int]) -> float:
    """Greatest by mean."""
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0


def spread(seconds: float, seeds: int) -> Table:
    rows = []
    for count, load, (name, policy) in itertools.product((4, 32), (0.1, 0.5, 0.9), RULES.items()):
        # The same turns in all for each size of fleet.
        outcomes = [Simulation(policy, count, load, seed).run(WARM_UP_S + seconds * 4 / count) for seed in range(seeds)]
        waits = sorted(itertools.chain.from_iterable(outcome.waits for outcome in outcomes))
        placed = sum(outcome.placed for outcome in outcomes)
        rows.append(
            [
                str(count),
                f"{load:.0%}",
                name,
                f"{_mean(itertools.chain.from_iterable(outcome.uneven_sessions for outcome in outcomes)):.2f}",
                f"{_mean(itertools.chain.from_iterable(outcome.uneven_turns for outcome in outcomes)):.2f}",
                f"{waits[int(0.95 * len(waits))]:.2f} s",
                f"{sum(outcome.by_hash for outcome in outcomes) / placed:.0%}",
            ]
        )
    columns = ("workers", "load", "rule", "sessions", "turns in flight", "wait, p95", "where the hash says")
    return Table("How sessions spread", columns, rows, "Sessions and turns: greatest by mean, at each second.")


def _mean(values: itertools.chain[float]) -> float:
    counted = list(values)
    return sum(counted) / len(counted)


# --- c: first turns at two replicas ----------------------------------------------------------------------------------


def evenness() -> Table:
    """A thousand first turns at two replicas, before four workers."""
    rows = [
        [how, "long" if long else "short", f"{_unevenness(_thousand(replicas, long)):.3f}"]
        for how, replicas in (("alternately", (0, 1)), ("all at one", (0,)))
        for long in (False, True)
    ]
    return Table(
        "A thousand first turns at two replicas, four workers", ("they come", "turns", "greatest by mean"), rows
    )


def _thousand(replicas: Sequence[int], long: bool) -> list[int]:
    now = 0.0
    fleets = [new_fleet(4, lambda: now) for _ in range(2)]
    targets = [[target for worker in fleet for target in worker.targets] for fleet in fleets]
    for number in range(1000):
        if not number % 100:
            now += BEAT_S
            _tell_each_other(fleets, targets)
        fleet = fleets[replicas[number % len(replicas)]]
        target = least_loaded(fleet.candidates(key=_hasher.key(b"", b"%d" % number)))
        fleet.note_placed(target)
        target.sessions += 1
        target.in_flight += long
    return [sum(target.sessions for target in same) for same in zip(*targets, strict=True)]


def _tell_each_other(fleets: Sequence[Fleet], targets: Sequence[Sequence[Target]]) -> None:
    for one, other in ((0, 1), (1, 0)):
        pairs = zip(targets[one], targets[other], strict=True)
        fleets[other].heard("the other", {there: (here.in_flight, here.sessions) for here, there in pairs})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of everything")
    parser.add_argument("--head-to-head", action="store_true", help="that alone, of all that are there")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="head to head alone, of these")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each, head to head (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the agents (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="of the chart (%(default)s)")
    args = parser.parse_args(argv)
    end_on_sigterm()
    print(f"{machine()}\n", flush=True)
    if not args.only and not args.head_to_head:
        _without_processes(args.quick)
    seconds = args.seconds * (0.2 if args.quick else 1.0)
    chart = args.out / ("placement-quick.svg" if args.quick or args.only else "placement.svg")
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        found = head_to_head(seconds, args.seed, chart, args.only)
    except ValueError as error:
        parser.error(str(error))
    for table in found:
        print(table.markdown(), flush=True)
    return 0


def _without_processes(quick: bool) -> None:
    part = 0.05 if quick else 1.0
    print(cost(int(1000 * part)).markdown(), flush=True)
    print(caches.free_turns(new_fleet, int(400 * part)).markdown(), flush=True)
    print(caches.index(int(100_000 * part)).markdown(), flush=True)
    print(caches.rate(5.0 if quick else 20.0).markdown(), flush=True)
    print(evenness().markdown(), flush=True)
    print(spread(400 * part, 1 if quick else 4).markdown(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
