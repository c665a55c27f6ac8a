"""The fleet: workers, the targets inside them, and what this replica knows of their state."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal
from urllib.parse import urlsplit

from app.fleet.candidates import Candidates, Lineup, Prompt, points_of
from app.fleet.health import Cause, Change, Health, State, Tolerance, Word
from app.fleet.loads import Others, Owed, Weights
from app.fleet.specs import BOOTSTRAP_PORT, HANDOVERS, Handover, Phase, WorkerError, WorkerSpec, normal_url, worker_name
from app.http.headers import Origin
from app.http.names import Names
from app.http.worker import Pool
from app.logs import event
from app.metrics import WorkerCells

log = logging.getLogger("coatcheck.fleet")

_LINEUPS = 256
"""At once; there is one for each set of workers that serve a model, and for each worker that turns have found lost."""
_RESTING_AT_ONCE = 16
_FOR_A_TRIAL = 10
"""Placements for each one that is a trial, so that it costs little: clients may pay for it with a failed turn."""
_LEARNT_WITHIN = 2.0
"""Seconds in which a worker that another replica knows is waited for."""
_STRANGE_FOR = 30.0
"""Seconds in which a name that was waited for in vain is not waited for again."""
_STRANGERS = 10_000

Mark = Literal["none", "cordoned", "draining"]
"""What operators decided of a worker, or it said itself: no new sessions; draining: it will go."""
Tls = Callable[[], ssl.SSLContext]
"""Gives what https workers are spoken to with."""


class Worker:
    """One inference server, and its targets: itself, or its data-parallel ranks."""

    __slots__ = ("_leaving", "_mark", "authority", "base_path", "bootstrap_port", "burden", "cells", "changed",
                 "handover", "health", "host_line", "known", "name", "newness", "origin", "owed", "phase", "pool",
                 "spec", "targets", "url")  # fmt: skip

    def __init__(
        self,
        name: str,
        url: str,
        pool: Pool,
        *,
        ranks: int = 0,
        max_turns: int = 0,
        phase: Phase = "both",
        handover: Handover = HANDOVERS[0],
        bootstrap_port: int = BOOTSTRAP_PORT,
        tolerance: Tolerance | None = None,
        joins: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ranks`: how many data-parallel ranks it has; 0 when ranks mean nothing to it. `max_turns`: that each of its
        targets may have at once; 0: any number. `joins`: as for Health."""
        parts = urlsplit(url)
        self.name = name
        self.url = url
        self.authority = parts.netloc.encode("ascii" if url.isascii() else "idna")
        self.host_line = b" HTTP/1.1\r\nhost: %b\r\n" % self.authority
        """Ends the request line of what is sent to it."""
        self.base_path = parts.path.rstrip("/").encode()
        self.origin = Origin(parts.scheme.encode(), self.authority, self.base_path)
        self.pool = pool
        self.phase, self.handover, self.bootstrap_port = phase, handover, bootstrap_port
        self.targets = tuple(Target(self, rank, max_turns) for rank in range(ranks)) or (Target(self, None, max_turns),)
        self.changed: Callable[[], None] = lambda: None
        """Told when it is known, marked or named otherwise."""
        self.known = True
        """Until it has left the fleet; its running turns go on."""
        self._leaving = False
        self._mark: Mark = "none"
        self.spec: WorkerSpec | None = None
        """As whoever named it describes it."""
        self.health = Health(tolerance or Tolerance(), joins=joins, clock=clock)
        self.burden = 0.0
        """What counts for load and is none, in turns in flight, as of the last `Fleet.candidates`."""
        self.newness = 0.0
        """The part of its share that it is not given yet, from 1 down to 0; as of then."""
        self.owed = Owed(self.health, self._under_way)
        self.cells = WorkerCells()

    def dismiss(self) -> None:
        """It has left the fleet."""
        if self.known:
            self.known = False
            for target in self.targets:
                target.forget()
            self.changed()

    @property
    def leaving(self) -> bool:
        """Nobody names it any more; it is gone when that lasts."""
        return self._leaving

    @leaving.setter
    def leaving(self, leaving: bool) -> None:
        if leaving != self._leaving:
            self._leaving = leaving
            self.changed()

    @property
    def mark(self) -> Mark:
        return self._mark

    @mark.setter
    def mark(self, mark: Mark) -> None:
        if mark != self._mark:
            self._mark = mark
            self.changed()

    @property
    def available(self) -> bool:
        """May be given a new session."""
        sound = self.health.state in (State.UP, State.SUSPECT)
        return self.known and self.mark == "none" and not self.leaving and sound

    @property
    def takes_turns(self) -> bool:
        """May be given a turn; else only the prompts of turns that go on elsewhere."""
        return self.phase != "prefill"

    @property
    def state(self) -> str:
        """In one word: gone, what was decided, or how it is. Whoever is down is down whatever was decided."""
        if not self.known:
            return "gone"
        decided = "leaving" if self.leaving and self.mark == "none" else self.mark
        return decided if decided != "none" and self.health.state is not State.DOWN else self.health.state.value

    @property
    def in_flight(self) -> int:
        return sum(target.in_flight for target in self.targets)

    def _under_way(self) -> int:
        return sum(target.in_flight + target.reserved + target.queued for target in self.targets)

    @property
    def limit(self) -> int:
        """Turns that it may have at once, at all of its targets; 0: any number."""
        return sum(target.limit for target in self.targets)

    @property
    def queued(self) -> int:
        return sum(target.queued for target in self.targets)


class Cache:
    """What a target has in its KV cache: another one after each time that it has lost it."""

    __slots__ = ("target",)

    def __init__(self, target: Target) -> None:
        self.target: Target | None = target
        """None: it has lost it, or is gone."""


class Target:
    """Where a turn can go: a worker and, where it has data-parallel ranks, one of them.

    `in_flight` counts attempts that hold a slot, `reserved` turns that are placed here and have not begun one,
    `claiming` claims being made for it (`Place`), `queued` turns that wait for a slot here, `sessions` those that this
    replica remembers to be there; `turns_elsewhere` and `sessions_elsewhere` are the other replicas' (`Fleet.heard`).
    `limit`: how many may be in flight at once, 0: any number.

    `spent`: seconds that turns were in flight or reserved here. Whoever counts one up takes the loop's time from it,
    and whoever counts it down adds that: with `now` for each that is there it is what all have spent until now.
    """

    __slots__ = ("cache", "claiming", "in_flight", "limit", "lines", "placed", "points", "queued", "rank", "reserved",
                 "sessions", "sessions_elsewhere", "spent", "turns_elsewhere", "worker")  # fmt: skip

    def __init__(self, worker: Worker, rank: int | None, limit: int = 0) -> None:
        self.worker = worker
        self.rank = rank
        self.limit = limit
        self.in_flight = 0
        self.reserved = self.claiming = 0
        self.spent = 0.0
        self.queued = 0
        self.sessions = 0
        self.turns_elsewhere = 0.0
        self.sessions_elsewhere = 0
        self.points = points_of(worker.name, rank)
        """By which a hash finds it."""
        self.cache = Cache(self)
        self.placed = 0
        """Of two targets, the one that was longer not given anything has the lower number (`Fleet.note_placed`)."""
        self.lines = b"\r\nx-coatcheck-worker: %b" % worker.name.encode()
        """Say to the client where its turn went, as `Exchange.start` takes them."""
        if rank is not None:
            self.lines += b"\r\nx-coatcheck-rank: %d" % rank

    @property
    def load(self) -> float:
        """In turns in flight: the fleet's, those to come, and what counts for some (`Worker.burden`)."""
        return self.in_flight + self.reserved + self.queued + self.turns_elsewhere + self.worker.burden

    @property
    def settled(self) -> int:
        """In sessions: the fleet's, and those to come."""
        return self.sessions + self.claiming + self.sessions_elsewhere

    @property
    def full(self) -> bool:
        """Has no room for what could go elsewhere: what is placed here will want a slot."""
        return 0 < self.limit <= self.in_flight + self.reserved

    def forget(self) -> None:
        """Its cache is lost: nothing that was known of it is true."""
        self.cache.target = None
        self.cache = Cache(self)


class Fleet:
    """The workers this replica may use, by name. They come and go while turns run."""

    def __init__(self, workers: Iterable[Worker], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` must be the workers'. Raises WorkerError when two workers have one name."""
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._awaited: dict[str, asyncio.Event] = {}
        """Names that are waited for."""
        self._strangers: dict[str, float] = {}
        """Names that are not waited for, each until when; the oldest first."""
        self.changes = 0
        """How often a worker has come or gone."""
        self._limited = 0
        """How many of them have limits."""
        self.prefilling = self.phased = 0
        """How many of them only prefill, and have a phase at all."""
        self._handovers: Counter[Handover] = Counter()
        """How many of them prefill by each."""
        self.look: Callable[[], None] | None = None
        """Has the sources of workers, and the operators, asked at once; None: the fleet is what it is."""
        self.deaf: Callable[[], bool] = lambda: False
        """Whether some of them cannot be asked, so that who is known to be gone may have come back."""
        self.tell: Callable[[Worker, Word], None] = lambda worker, word: None
        """Has the other replicas hear it."""
        self.choices_with: Callable[[str], Iterable[frozenset[str] | None]] = lambda name: (None,)
        """Of a worker: for its models, the names of the workers that serve each (None: all)."""
        self._lineups: dict[
            tuple[frozenset[str] | None, frozenset[str], bool], tuple[Lineup[Target], tuple[Worker, ...]]
        ] = {}
        """Who may be chosen from, and the others, who may be due to be tried; by who is asked for, who is excluded, and
        whether it is to prefill.
        Made when asked for, and good until something changes."""
        self._weights = Weights[Worker]()
        self._others = Others[Target]()
        for worker in workers:
            other = self._workers.get(worker.name)
            if other is not None:
                raise WorkerError(
                    f"two workers are called {worker.name!r}: {other.url} and {worker.url}; "
                    "give one another name (--worker URL,name=...)"
                )
            self._welcome(worker)
        self._placements = 0
        self._tried_at = -_FOR_A_TRIAL
        """How many of them there had been when a worker was last tried."""
        self._trial: Worker | None = None
        """The one among the last candidates that was there to be tried."""

    def _look_after(self, worker: Worker) -> None:
        """Of each worker that comes: what its turns alone may do to it has bounds, and what becomes of it is told."""
        worker.health.may_suspect = functools.partial(self._may_suspect, worker.name)

        def changed(change: Change) -> None:
            self._lineups.clear()
            worker.cells.changes[change.before.value, change.after.value] += 1
            if change.after is State.DOWN:
                for target in worker.targets:
                    target.forget()
            # That a worker is there when the router starts is no news.
            level = logging.INFO if change.first and change.after is State.UP else logging.WARNING
            before, after = change.before.value, change.after.value
            said = event("worker_state", worker=worker.name, from_=before, to=after, reason=change.why)
            log.log(level, "worker %s: %s -> %s: %s", worker.name, before, after, change.why, extra=said)

        def told(word: Word) -> None:
            if self._workers.get(worker.name) is worker:  # else its last turns would speak for who has its place
                self.tell(worker, word)

        worker.health.changed, worker.health.told = changed, told
        worker.health.burden.begun = functools.partial(self._weights.begun, worker)
        worker.changed = self._lineups.clear
        if worker.health.burden.any:
            self._weights.begun(worker)
        self._lineups.clear()

    def _may_suspect(self, name: str) -> bool:
        """Whether turns alone may take out this worker: never more than half of those that serve a model, in its
        phase. When all fail, it is what all stand on, or the requests. A model that it alone serves does not matter:
        its turns go on to be tried there."""
        some = False
        worker = self._workers.get(name)
        takes_turns = worker is None or worker.takes_turns
        for among in self.choices_with(name):
            known = [
                each
                for each in self._workers.values()
                if each.known and each.takes_turns == takes_turns and (among is None or each.name in among)
            ]
            if len(known) > 1:
                some = True
                if 2 * (1 + sum(each.health.cause is Cause.TURNS for each in known)) > len(known):
                    return False
        return some

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def prefilling_by(self, handover: Handover) -> frozenset[str] | None:
        """The names of those that prefill and hand over so; None: all that prefill do."""
        if self._handovers[handover] == self.prefilling:
            return None
        return frozenset(
            each.name for each in self._workers.values() if not each.takes_turns and each.handover == handover
        )

    def find(self, name: str, rank: int | None) -> Target | None:
        """The target that a claim names, or None when it is not in this fleet."""
        worker = self._workers.get(name)
        if worker is None:
            return None
        for target in worker.targets:
            if target.rank == rank:
                return target
        return None

    def put(self, worker: Worker) -> None:
        """It is of the fleet from now on, in place of one of the same name."""
        self._dismiss(self._workers.get(worker.name))
        self._welcome(worker)
        self._strangers.pop(worker.name, None)
        if worker.name in self._awaited:
            self._awaited.pop(worker.name).set()

    def remove(self, name: str) -> None:
        """It is gone: its running turns go on, its sessions move with their next turn."""
        self._dismiss(self._workers.pop(name, None))
        self._note_strange(name, math.inf)

    def _welcome(self, worker: Worker) -> None:
        self._workers[worker.name] = worker
        self.changes += 1
        self._limited += worker.limit > 0
        self.prefilling += not worker.takes_turns
        self.phased += worker.phase != "both"
        if not worker.takes_turns:
            self._handovers[worker.handover] += 1
        self._look_after(worker)

    def _dismiss(self, worker: Worker | None) -> None:
        if worker is not None:
            self.changes += 1
            self._limited -= worker.limit > 0
            self.prefilling -= not worker.takes_turns
            self.phased -= worker.phase != "both"
            if not worker.takes_turns:
                self._handovers[worker.handover] -= 1
            worker.dismiss()
            worker.pool.close()

    async def learn(self, name: str) -> bool:
        """Wait a moment for a worker that a claim names and nobody here has heard of: another replica may know it
        first. Returns whether it is here now. One that is known to be gone is not waited for, unless that may be old
        news: a replica that was cut off, and finds the store back, must not take the sessions of a worker that was
        taken back meanwhile for those of a lost one."""
        until = self._strangers.get(name, 0.0)
        if self.look is None or (self._clock() < until and not (math.isinf(until) and self.deaf())):
            return name in self._workers
        came = self._awaited.setdefault(name, asyncio.Event())
        self.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEARNT_WITHIN):
                await came.wait()
        if name not in self._workers:
            self._awaited.pop(name, None)
            self._note_strange(name, self._clock() + _STRANGE_FOR)
        return name in self._workers

    def _note_strange(self, name: str, until: float) -> None:
        self._strangers.pop(name, None)
        self._strangers[name] = until
        if len(self._strangers) > _STRANGERS:
            del self._strangers[next(iter(self._strangers))]

    def candidates(
        self,
        excluded: frozenset[str] = frozenset(),
        among: frozenset[str] | None = None,
        *,
        trials: bool = True,
        with_full: bool = False,
        key: str = "",
        prompt: Prompt[Target] | None = None,
        prefill: bool = False,
    ) -> Candidates[Target]:
        """The targets that may serve a new session (`key`: its), or a turn without one, of the workers named in `among`
        (None: of all), or (`prefill`) that may prefill for it: those of workers that are up; of suspected ones too when
        most are; and one that is due to be tried (`trials`). When nobody is up or suspected, all that are not cordoned
        or gone: trying beats refusing. Those that are full are passed over as long as others have room, unless asked
        for `with_full`.

        What it costs does not depend on how many there are: they are gone through once after each change."""
        lineup, resting = self._lineups.get((among, excluded, prefill)) or self._line_up(among, excluded, prefill)
        now = self._clock()
        if now >= self._weights.due:
            self._weights.weigh(now)
        if now >= self._others.stale_at:
            self._others.drop(now)
        self._trial = None
        if trials and resting:
            self._trial = self._due(resting, now)
        trial = () if self._trial is None else self._trial.targets
        room = bool(self._limited) and not with_full
        return Candidates(lineup, key=key, placements=self._placements, trial=trial, room=room, prompt=prompt)

    def _line_up(
        self, among: frozenset[str] | None, excluded: frozenset[str], prefill: bool
    ) -> tuple[Lineup[Target], tuple[Worker, ...]]:
        up: list[Worker] = []
        suspected: list[Worker] = []
        others: list[Worker] = []
        for worker in self._workers.values():
            if worker.takes_turns == prefill or (among is not None and worker.name not in among):
                continue
            if worker.known and worker.mark == "none" and worker.name not in excluded:
                state = worker.health.state
                sound = up if state is State.UP else suspected if state is State.SUSPECT else others
                (others if worker.leaving else sound).append(worker)
        chosen, resting = up, suspected + others
        if len(suspected) > len(up):
            chosen, resting = up + suspected, []
        elif not up:
            chosen, resting = others, []
        made = Lineup(tuple(target for worker in chosen for target in worker.targets)), tuple(resting)
        if len(self._lineups) >= _LINEUPS:
            self._lineups.clear()
        self._lineups[among, excluded, prefill] = made
        return made

    def _due(self, resting: tuple[Worker, ...], now: float) -> Worker | None:
        """One that is due to be tried, of some, which are others each time."""
        if len(resting) > _RESTING_AT_ONCE:
            begin = self._placements * _RESTING_AT_ONCE % len(resting)
            resting = resting[begin : begin + _RESTING_AT_ONCE]
        cheap = self._placements - self._tried_at >= _FOR_A_TRIAL
        return next((each for each in resting if each.health.trial_due(now, cheap=cheap)), None)

    def has_other(self, lost: frozenset[str], among: frozenset[str] | None = None, *, prefill: bool = False) -> bool:
        """Whether there is a worker beside those in `lost`, and `among` these, that is known to be there. `prefill`:
        one that prefills."""
        return any(
            worker.available
            for worker in self._workers.values()
            if worker.takes_turns != prefill and worker.name not in lost and (among is None or worker.name in among)
        )

    def heard(self, replica: str, loads: Mapping[Target, tuple[float, int]]) -> None:
        """What another replica has at each target, in turns in flight (`Lately`) and in sessions, in place of what it
        said before. It counts until the replica says otherwise, or nothing for a while; with no `loads`, or when it is
        gone, it counts nothing."""
        self._others.heard(replica, loads, self._clock())

    def note_placed(self, target: Target) -> None:
        """It is given something that could have gone elsewhere; equals take turns by that."""
        self._placements += 1
        target.placed = self._placements
        target.worker.owed.chosen()
        if target.worker is self._trial:
            self._trial = None
            self._tried_at = self._placements
            target.worker.health.trial_begun()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.pool.close()


def make_worker(
    url: str,
    *,
    name: str | None = None,
    ranks: int = 0,
    tls: Tls | None = None,
    tls_name: str = "",
    connect_limit: float,
    idle_limit: float,
    names: Names | None = None,
    tolerance: Tolerance | None = None,
    joins: bool = False,
    max_turns: int = 0,
    phase: Phase = "both",
    handover: Handover = HANDOVERS[0],
    bootstrap_port: int = BOOTSTRAP_PORT,
    clock: Callable[[], float] = time.monotonic,
) -> Worker:
    """A worker from its URL. `tls` is used for https URLs, `tls_name` for its certificate where that is not of the
    URL's host; limits in seconds; `names`: the fleet's; `joins`: it comes to a fleet that runs already; `max_turns`,
    `phase`, `handover`, `bootstrap_port`: as for Worker. Raises WorkerError."""
    url = normal_url(url)
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    pool = Pool(
        parts.hostname,
        parts.port,
        tls=tls() if tls is not None and parts.scheme == "https" else None,
        server_name=tls_name or None,
        connect_limit=connect_limit,
        idle_limit=idle_limit,
        names=names,
    )
    return Worker(
        name or worker_name(url),
        url,
        pool,
        ranks=ranks,
        max_turns=max_turns,
        phase=phase,
        handover=handover,
        bootstrap_port=bootstrap_port,
        tolerance=tolerance,
        joins=joins,
        clock=clock,
    )
