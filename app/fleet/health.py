"""How one worker is, by evidence: what its connections, its answers to turns and its answers to probes say.

A state machine without I/O and with a clock that is passed in. Evidence goes in by a method for each kind; out comes
the state, and each change of it once. What counts as illness, and for how much:

- A connection that is refused: nobody listens, the worker is down. One that is not made otherwise (no answer, no route)
  is down when that happens twice in a row, or goes on for `down_after`.
- Turns: a 5xx other than 503, no byte within the limit, a connection closed without an answer, what is not HTTP, and an
  answer that breaks off. `failures` of them in a row, or half of at least `_WINDOW_TURNS` in `_WINDOW` seconds, make it
  suspect; without one good turn for `down_after`, and with failures all the while, it is down. 4xx count for nothing,
  429 and 503 for load. A turn's failure is no more than suspicion of the worker: the request may be why, or what all
  workers stand on. So only as many are taken out by it as the fleet allows (`may_suspect`).
- Probes: one that is answered badly, or late, counts for nothing; `failures` in a row make it suspect, and after
  `down_after` more it is down. 503 is "not yet": it is starting.

A good sign is of the kind of what went wrong: a worker that answers turns with errors answers probes as it always did.
So who is suspected by turns must serve some well (`trial_due`) beside good probes; who is suspected by probes, or was
not reached, is up again by probes alone, which takes no traffic.

What another replica says of it (`heard`) is no evidence: it may be the way from there. It only saves turns: a failure
there is load here as well; when it is suspected there, a turn that fails here soon is enough; while both suspect
it, a trial there puts off the next one here (`trials`).
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable

import msgspec

from app.fleet.burden import FAILURE_LOAD, Burden
from app.fleet.trials import Trials

_WINDOW = 10.0
_WINDOW_TURNS = 20
_TIMES_IN_A_ROW = 2
"""Of probes that say "not yet", and of connections that were not made, before they count: one may be chance."""
_MOMENT = 1.0
"""Seconds: failures closer together than that are of one event."""
_TRIAL_WAIT = 5.0
"""Seconds until a worker that is suspected by its turns is given one to try; `down_after`, where that is less."""
_NAMELESS = 30.0
"""Seconds without an address after which a worker counts as unreachable: the name server has had its time."""
_MINUTE = 60.0
_REMEMBERED = 10_000
_ONE_EVENT = 0.1
"""Seconds: turns that find a worker away closer together than that have found out about one event."""


class State(enum.Enum):
    """How a worker is. What operators decided (cordon, drain) stands beside it, in `Worker.mark`."""

    STARTING = "starting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class Cause(enum.Enum):
    """What made a worker suspect or down."""

    TURNS = "turns"
    PROBES = "probes"
    CONNECTS = "connects"


class Probe(enum.Enum):
    """What came of a probe."""

    GOOD = "good"
    REACHABLE = "reachable"
    """It answers, and does not say how it is: it has no such path, wants another key, or is busy."""
    NOT_YET = "not_yet"
    BAD = "bad"
    """An error, or nothing within the limit."""
    UNREACHABLE = "unreachable"
    NAMELESS = "nameless"
    """Its name could not be looked up, now or ever."""


class Word(enum.Enum):
    """What replicas tell each other of a worker at once, since each would else pay turns to find it out."""

    FAILED = "failed"
    """It has failed a turn, and is not suspected for that yet; ten times a second at most."""
    SICK = "sick"
    """It is suspected for its turns."""
    TRIED = "tried"
    """Being suspected, it is given a turn to see."""
    WELL = "well"
    """That has gone well."""


class Tolerance(msgspec.Struct, frozen=True):
    """What operators decide; times in seconds."""

    probed: bool = False
    """Probes come. Without them a worker is up until its turns say otherwise."""
    failures: int = 3
    """In a row, that make a worker suspect."""
    good_probes: int = 2
    """In a row, that a worker needs which was suspected, or down."""
    down_after: float = 5.0
    slow_start: float = 10.0
    """In which the share of a worker that was starting or down grows; 0: at once."""


class Change(msgspec.Struct, frozen=True):
    """One change of state. `why` says it with the evidence."""

    before: State
    after: State
    why: str
    first: bool
    """Nothing was known of it before."""


class Health:
    """One worker's. `good` counts the turns that it answered well, and is raised by whoever sees one, who then calls
    `served_well` if `watchful`: all that a healthy worker's turn costs.

    Invariant: `cause` is None exactly in STARTING and UP. `watchful` is False exactly in UP.

    Long because each kind of evidence is weighed against what the others have made of the worker."""

    def __init__(
        self,
        tolerance: Tolerance,
        *,
        joins: bool = False,
        clock: Callable[[], float] = time.monotonic,
        may_suspect: Callable[[], bool] = lambda: True,
        changed: Callable[[Change], None] = lambda _: None,
    ) -> None:
        """`joins`: it comes to a fleet that runs already, so that it is given its share slowly. `may_suspect`: asked
        before turns alone take it out. `changed` is told of each change of state, after it."""
        self.tolerance, self.clock, self.may_suspect, self.changed = tolerance, clock, may_suspect, changed
        now = clock()
        self.state = State.STARTING if tolerance.probed else State.UP
        self.since = now
        self.why = "not asked yet" if tolerance.probed else "nothing is known against it"
        self.cause: Cause | None = None
        self.watchful = tolerance.probed
        self.told: Callable[[Word], None] = lambda _: None
        """Told what other replicas had better know at once."""
        self.evicting = False
        """Sessions that are bound to it move with their next turn."""
        self.good = 0
        self.probe: Probe | None = None
        """What came of the last one."""
        self.errors = Errors(clock)
        self.burden = Burden(tolerance.slow_start)
        self._new = True
        self._cold = joins
        """What it had in its caches is gone, or it never had anything."""
        if joins and not tolerance.probed:
            self.burden.rise(now)
        self._failures = _Failures(tolerance.failures, now)
        self._trials = Trials(min(_TRIAL_WAIT, tolerance.down_after), now)
        self._good_at = now
        """The last good sign, of the kind of what went wrong."""
        self._good_probes = self._bad_probes = self._not_yet = self._missed = 0
        """In a row; `_missed`: connections."""
        self._said_at = now - _ONE_EVENT
        """When others were told last that it has failed a turn."""
        self._good_before = 0
        """`good` at the last bad probe."""
        self._missed_at = now
        self._nameless_since: float | None = None

    # -- what turns say

    def served_well(self) -> None:
        """A turn was answered below 400."""
        now = self.clock()
        self._bad_probes = 0
        self._good_at = now
        if self.cause is Cause.TURNS:
            if self._trials.out:
                self.told(Word.WELL)
            self._trials.served(now)
            self._rise_if_tried()
        elif self.state is State.STARTING:
            if not self._not_yet:
                self._rise("a turn was answered")
        elif self.cause is Cause.CONNECTS and (self.state is State.SUSPECT or not self.tolerance.probed):
            self._rise("a turn was answered")

    def failed(self, what: str) -> None:
        """A turn failed in a way that is the worker's: `what` it did."""
        now = self.clock()
        self.errors.note(what, now)
        self.burden.failed(now)
        why = self._failures.note(what, self.good, now)
        if self.cause is not Cause.TURNS and now - self._said_at >= _ONE_EVENT:
            self._said_at = now
            self.told(Word.FAILED)
        if self.cause is Cause.TURNS:
            self._trials.failed(now)
            self.tick()
        elif why and self.state in (State.UP, State.SUSPECT):
            self._suspect(why, now)

    def heard(self, word: Word) -> None:
        """Another replica says this of it."""
        now = self.clock()
        if self.cause is Cause.TURNS:
            if word is Word.TRIED:
                self._trials.others_begun(now)
            elif word is Word.WELL:
                self._trials.others_served(now)
        elif self.state is State.UP:
            if word is Word.WELL:
                self._failures.reassure()
            elif word is not Word.TRIED:
                self.burden.heard(now)
                if why := self._failures.heard(word is Word.SICK, self.good, now):
                    self._suspect(why, now)

    def busy(self, what: str) -> None:
        """A turn was answered 429 or 503: no illness, but no place for the next one either."""
        now = self.clock()
        self.errors.note(what, now, counts=False)
        self.burden.failed(now)

    def connected(self) -> None:
        """A turn has made a connection."""
        self._missed = 0
        self._nameless_since = None
        if self.cause is Cause.CONNECTS and (self.state is State.SUSPECT or not self.tolerance.probed):
            self._rise("it can be connected to")

    def unreachable(self, what: str, *, refused: bool = False) -> None:
        """A connection could not be made. `refused`: by the host, nobody listens there."""
        now = self.clock()
        self.errors.note(what, now, counts=False)
        self.burden.failed(now)
        if not self._missed or now - self._missed_at >= _ONE_EVENT:
            self._missed += 1
        self._missed_at = now
        self._good_probes = 0
        lost = refused or self._missed >= _TIMES_IN_A_ROW
        if self.state is State.DOWN:
            if lost:  # whatever it was, another process will answer
                self.cause, self._cold = Cause.CONNECTS, True
        elif lost:
            self._enter(State.DOWN, what, Cause.CONNECTS)
        elif self.state is State.UP:
            self._enter(State.SUSPECT, what, Cause.CONNECTS)

    def nameless(self, what: str) -> None:
        """Its name could not be looked up and never was: the name server's trouble, as long as that may last."""
        now = self.clock()
        self.errors.note(what, now, counts=False)
        if self._nameless_since is None:
            self._nameless_since = now
        elif now - self._nameless_since >= _NAMELESS and self.state is not State.DOWN:
            self._enter(State.DOWN, f"{what}, for {_NAMELESS:g} s", Cause.CONNECTS)

    # -- what probes say

    def probed(self, probe: Probe, what: str) -> None:
        """A probe has ended; `what` it was told."""
        self.probe = probe
        if probe is Probe.GOOD or probe is Probe.REACHABLE:
            self._well(what)
            return
        self._good_probes = 0
        if probe is Probe.NAMELESS:
            self.nameless(what)
        elif probe is Probe.NOT_YET:
            self._not_ready(what)
        elif probe is Probe.BAD:
            self._not_yet = self._missed = 0
            # A turn that went well meanwhile says more than a late probe.
            self._bad_probes = self._bad_probes + 1 if self.good == self._good_before else 1
            self._good_before = self.good
            if self.state is State.UP and self._bad_probes >= self.tolerance.failures:
                why = f"{self._bad_probes} probes failed in a row, the last one: {what}"
                self._enter(State.SUSPECT, why, Cause.PROBES)
            elif self.state is State.STARTING:
                self.why = what
        elif self._missed:
            self.unreachable(what, refused=True)
        else:  # once may be chance, and no turn has failed
            self._missed, self._missed_at = 1, self.clock()
        self.tick()

    def _well(self, what: str) -> None:
        self._good_probes += 1
        self._bad_probes = self._not_yet = self._missed = 0
        self._nameless_since = None
        if self.cause is Cause.TURNS:
            self._rise_if_tried()
        elif self.state is State.STARTING:
            self._rise(f"a probe was answered: {what}")
        elif self.cause is not None:
            self._good_at = self.clock()
            if self._good_probes >= self.tolerance.good_probes:
                self._rise(f"{self._good_probes} probes were answered: {what}")

    def _not_ready(self, what: str) -> None:
        self._bad_probes = self._missed = 0
        self._not_yet += 1
        if self.state is State.STARTING:
            self._cold = True
            self.why = what
        elif self.state is State.DOWN or self._not_yet >= _TIMES_IN_A_ROW:
            self._enter(State.STARTING, what, None)

    @property
    def undecided(self) -> bool:
        """The next probe may change its state, so that it had better come soon."""
        if self.state is State.UP:
            return bool(self._missed or self._not_yet or self._bad_probes)
        return 0 < self._good_probes < self.tolerance.good_probes

    # -- what time says

    def tick(self) -> None:
        """To be called now and then while `watchful`."""
        now = self.clock()
        if now - max(self.since, self._good_at) < self.tolerance.down_after:
            return
        if self.state is State.STARTING:
            # Whoever is bound to it had better go elsewhere: what it knew is gone, or it does not come up.
            if self._not_yet or self._bad_probes:
                self.evicting = True
        elif self.state is State.SUSPECT:
            if self.cause is Cause.TURNS:
                sick = self._failures.at >= self.since + min(_MOMENT, self.tolerance.down_after / 2)
            else:
                sick = not self._good_probes
            if sick:
                why = f"no good sign for {now - max(self.since, self._good_at):.1f} s; {self.errors.last or self.why}"
                self._enter(State.DOWN, why, self.cause)

    # -- what placement wants to know

    def failed_lately(self, now: float) -> float:
        """Turns that it failed in a row, without a good one since; the longer ago, the fewer."""
        return min(self._failures.row(self.good), self.burden.penalty(now) / FAILURE_LOAD)

    def failing(self, now: float) -> bool:
        """It has failed a turn lately, here or at another replica, and none has gone well here since."""
        return self._failures.any(self.good, now)

    def trial_due(self, now: float, *, cheap: bool) -> bool:
        """It is suspected for its turns, and may be given one to see. `cheap`: others are given many beside it."""
        return self.cause is Cause.TURNS and self._trials.due(now, cheap=cheap) and self._probes_agree

    @property
    def on_trial(self) -> bool:
        """It has been given one, and has not answered it."""
        return self._trials.out

    def trial_begun(self) -> None:
        """It is given one; the next when that has gone well, or after a while."""
        self._trials.begun(self.clock())
        self.told(Word.TRIED)

    # -- helpers

    def _suspect(self, why: str, now: float) -> None:
        """For its turns, if it may be."""
        if self.may_suspect():
            self._trials.begin(now, afresh=self.state is State.UP)
            if self.state is State.UP:
                self._enter(State.SUSPECT, why, Cause.TURNS)
            else:
                self.cause, self.why = Cause.TURNS, why
            self.told(Word.SICK)

    @property
    def _probes_agree(self) -> bool:
        return not self.tolerance.probed or self._good_probes >= self.tolerance.good_probes

    def _rise_if_tried(self) -> None:
        if self._trials.passed and self._probes_agree:
            self._rise(f"{self._trials.good} trial turn{'s' * (self._trials.good > 1)} went well")

    def _rise(self, why: str) -> None:
        now = self.clock()
        self.burden.forgive()
        if self._cold or self.state is State.DOWN:
            self.burden.rise(now)
        self._cold = False
        self._failures.forget(now)
        if self.cause is Cause.TURNS:
            self._trials.rose(now)
        self._enter(State.UP, why, None)

    def _enter(self, state: State, why: str, cause: Cause | None) -> None:
        before, self.state, self.why, self.cause = self.state, state, why, cause
        self.since = self.clock()
        self.watchful = state is not State.UP
        if state is State.DOWN:
            self.evicting = True
        elif state is State.UP:
            self.evicting = False
        if state is State.STARTING or cause is Cause.CONNECTS:
            self._cold = self._cold or state is not State.SUSPECT
        first, self._new = self._new, False
        self.changed(Change(before, state, why, first))


class Errors:
    """What a worker did wrong lately, for people."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last, self.last_at = "", 0.0
        self._at: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, what: str, now: float, *, counts: bool = True) -> None:
        self.last, self.last_at = what, now
        if counts:
            self._at.append(now)

    def count(self) -> None:
        """A turn that could not be brought there; why has been noted."""
        self._at.append(self._clock())

    def per_minute(self) -> int:
        """Turns that it failed within the last minute."""
        start = self._clock() - _MINUTE
        while self._at and self._at[0] < start:
            self._at.popleft()
        return len(self._at)


class _Failures:
    """Whether failed turns are enough to suspect their worker. `at`: when the last one was."""

    def __init__(self, enough: int, now: float) -> None:
        self._enough = enough
        self.at = now
        self._row = 0
        self._good = 0
        """What had gone well at the last failure: more of it ends the row."""
        self._heard, self._heard_at = -1, now
        """What had gone well when another replica said last that a turn has failed there, and when; -1: none has."""
        self._found_sick = False
        """One has said that it is sick."""
        self._window_at, self._window_bad, self._window_good = now - _WINDOW, 0, 0

    def note(self, what: str, good: int, now: float) -> str:
        """One more, when `good` turns had gone well. Returns why that is enough; empty: it is not."""
        self.at = now
        self._row = 1 if good != self._good else self._row + 1
        self._good = good
        if now - self._window_at >= _WINDOW:
            self._window_at, self._window_bad, self._window_good = now, 0, good
        self._window_bad += 1
        if self._row >= self._enough:
            return f"{self._row} turns failed in a row, the last one with {what}"
        if self._found_sick and self._is_news(good, now):
            return f"a turn failed with {what}, and another replica has found it sick"
        turns = self._window_bad + good - self._window_good
        if turns >= _WINDOW_TURNS and 2 * self._window_bad >= turns:
            return f"{self._window_bad} of {turns} turns failed within {_WINDOW:g} s, the last one with {what}"
        return ""

    def row(self, good: int) -> int:
        """In a row up to now, when `good` turns have gone well."""
        return self._row if good == self._good else 0

    def any(self, good: int, now: float) -> bool:
        """Here or there, lately, and none has gone well since."""
        return self._is_news(good, now) or (self.row(good) > 0 and now - self.at < _WINDOW)

    def heard(self, sick: bool, good: int, now: float) -> str:
        """Another replica says that a turn has failed there, or (`sick`) that it is suspected for that: then one more
        here is enough for a while, unless one goes well before, here or there; so is one that has just failed. Returns
        why that is enough; empty: it is not."""
        self._found_sick = sick or (self._found_sick and self._is_news(good, now))
        self._heard, self._heard_at = good, now
        if sick and self.row(good) and now - self.at < _WINDOW:
            return "a turn has failed, and another replica has found it sick"
        return ""

    def reassure(self) -> None:
        """There one has gone well."""
        self._heard, self._found_sick = -1, False

    def forget(self, now: float) -> None:
        self._row = 0
        self.reassure()
        self._window_at = now - _WINDOW

    def _is_news(self, good: int, now: float) -> bool:
        return self._heard == good and now - self._heard_at < _WINDOW
