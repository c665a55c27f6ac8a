"""Decides whether a history of turns under faults was a legal one.

A history is three logs, all in unix seconds of one machine: what each client sent and saw (`Sent`), what each worker
served (`Served`, the only truth about where a turn ran), and what the nemesis did (`Fault`). It is checked as one
checks a register for linearizability (Wing and Gong 1993; Lowe's just-in-time search): the register of a session holds
the worker that its claim names, and there must be an order of all its turns, each at one instant inside its own window,
in which the worker changes only where something had released the claim.

**A turn's instant** lies between the moment when what it relied on was true and the moment its worker began to serve
it. It relied on the store as it was

- at its own start, when it was `created`, `stored` or `rebound`: the router has then asked the store since. Turns that
  look together on one replica share one look, so a `stored` turn may count from the start of the first of an unbroken
  row of such looks there;
- at its start less `Rules.news` when it was `cached` (or the client never saw the head): deletions take that long to
  reach a replica. Where closes leave stamps (files) this holds only for claims that the nemesis took away itself;
- at the start of a fault under which the replica may not hear of a close: the store's outage; the replica's own
  freezing; a frozen member of the store, but only for `Rules.silence` (a watch that is silent for longer has to be
  given up); a claim file that was replaced by hand, but only for `Rules.max_stale`;
- at the start of the first of an unbroken row of turns of its session on its replica, at its worker, if a final turn is
  among them: a pending close lets further turns join.

Each is as short as the design promises and no shorter, so a replica that goes on to rely on what was is caught.

**What releases a claim**, when, of which worker; once, unless said otherwise:

- *final*: a final turn, of the worker that served it (of any, if it was placed without the store), from the end at the
  worker to the end as the client saw it. Later only if the answer was cut off, or did not wait for the close: because
  other turns of the session still ran on that replica, the close took longer than the deadline, or the store was away.
  Then also while the replica was frozen or the store away, but never after the replica was killed. A final turn that
  was answered 5xx releases nothing;
- *expiry*: from one TTL after the last turn that surely renewed the claim. One does unless its replica was killed or
  frozen, or its store was away, meanwhile; or unless it began so late that the claim may have ended under its hands. A
  `created` claim lives one TTL whatever happens to its replica;
- *first turn failed*: a turn that was `created` or `rebound` and answered 408, 409, 425, 429, 5xx or not at all, of the
  worker it ran at, from its end to the end of the last turn beside it on that replica, held up as finals are;
- *worker lost*: as often as there are sessions, from the kill (or from when it fell ill, see `ILL`) until every replica
  says that it is up again (who lacks it, having been cut off when its removal was taken back, does not say so);
- *by hand*: the nemesis removed or garbled the claim, or had an admin end the session. Each order of an admin ends what
  stands when it comes, once: by its answer, or, if that was `pending` or did not come, when the turns that run there
  have ended, held up as finals are. If it *replaced* the claim, the register has the new value from then on;
- *store wiped* (or restored from a copy): every claim, from then until every replica has had its say (`DOUBT`).

Claims do not end with the replica that made them, with the store's members, or with time alone, so none of these is
here. Turns that the router calls `degraded` were placed without the store: they are left out of the register, but each
must lie in an outage that the nemesis made, or in the time after it in which a late claim is not believed (`DOUBT`, if
its replica had served the session in the outage, or before the store was wiped, or goes where another one serves it
that is in an outage still), or while its claim was garbled. In an outage a replica also goes on with what it knew,
however old, where it could not ask (`cached`); such a turn is left out too, if there is no order with it, and counted.

**Moved without cause** (`check_moves`). The register says nothing of turns without the store; this does. What was
served is the truth: a turn that was served at another worker than the last one that had been served before it was sent
needs a cause, if one of the two was `degraded`. A cause is, between what the earlier of the two relied on and the
beginning of the later one's service,

- a release as above, of the worker that it left: a final, an admin's end, a failed first turn, an illness (`ILL`), a
  change by hand. (Time alone is one only if the session had no turn for a TTL: a turn without the store keeps it, too);
- such a release of the worker that it came to, before the session was at the other one, where the later turn may rely
  on what was before that (it is `cached` or `degraded`).

Being slow (`worker-frozen`) is no cause, nor is an outage. What else is allowed is the residue that the documents of
the router admit, and only for a session that an outage has touched (of a replica that served it):

- *not known there*: the replica had not served the session since its last close, or had been killed since: it could
  know of the place from the store and its peers alone. It goes by what the store has done late, or, if no peer that
  could be asked had served it either, where a hash says. (A peer has 100 ms to answer, which nobody can see from here:
  up to `LATE_PEERS` in a run may have been late);
- *both served*: another replica's last turn of the session was at that worker, which it could not tell: one of the two
  places has to give way. (If its worker falls ill thereafter, the session goes on from there to a third.) The turn
  before must lie in the outage or within `DOUBT` after it: from then on all agree;
- *a late claim, whose maker has died*: a replica that had to do without the store was killed before it could take back
  what the store has done late;
- *expired in the outage*: no turn could renew the claim for a TTL, so that the store has ended the session.

So a replica that serves a session never takes it to a worker where nobody has served it. All that is excused is counted
in `Verdict.moves`.

A `created` turn needs a release even if it came to the same worker again. What was excused by what is counted in
`Verdict.changes`, so that a rule that excuses too much is seen.

Where operators have cordoned a worker, no new session is placed (`check_marks`); its sessions stay: that is no cause.

The other rules: no claim outlives its TTL (`check_idle`); a final turn has closed when the client has seen its end
(`check_finals`); no turn is lost, run twice, or said to be where it was not (`check_turns`). That nothing is left at
the end is for the run to check: it needs the processes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

ANY = "*"
"""Any worker."""
EDGE = 0.25
"""Seconds by which clocks of two processes may be apart: a time is taken a moment after what it is the time of, and a
busy machine makes that moment long."""
MOMENT = 0.02
"""Seconds that a replica may take to put away a turn whose end its client has seen."""
EARLY = 0.3
"""Seconds that a renewal may be older than the end of the turn that made it."""
RECOVERY = 3.0
"""Seconds after an outage until every replica has noticed its end and claimed what it had placed meanwhile."""
ELECTION = 4.0
"""Seconds after the loss of a leader until every replica works with the next one."""
ELECTED = 1.0
"""Seconds after a quorum is back until it has a leader: etcd's election timeout."""
RETURN = 1.5
"""Seconds after an outage until every replica has noticed its end."""
CLOSE_BACKOFF = RETURN + 1.0
"""Seconds after an outage until a close that failed in it has been tried again: as soon as its end is noticed."""
GRACE = 1.0
"""Seconds that a replica takes to do what an admin has told it."""
DOUBT = 20.0
"""Seconds after an outage until late claims are told from true ones: 15, and then the session's next turn."""
MEETING = 5.0
"""Seconds after its start until a replica can ask the others, and is asked, if the store is well."""
THOUGH_KNOWN = "not known there, though a peer knew"
LATE_PEERS = 3
"""So many answers of peers may have been late in a run, on a machine that was not seen to be slow."""
LEFT_OUT = 2.0
"""Seconds after a replica was late until the others ask it again."""
ILL = ("worker-killed", "worker-sick", "worker-hung", "worker-removed")
"""Faults for which a worker's sessions may move, until every replica has found it well again."""
OBEYED = 2.0
"""Seconds until every replica obeys an operator's word."""
RETRYABLE = (408, 409, 425, 429)
LEFT = "left at [DONE]"
"""The note of a turn whose client did not wait for the end of the body: its worker may call it aborted."""
SEARCH_LIMIT = 50_000
"""States to look at in one session."""


# --- what is known ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Sent:
    """One turn as its client saw it."""

    id: str
    session: str
    replica: str
    start: float
    head: float | None = None
    """When the response's head came."""
    end: float = math.inf
    """When the answer was complete (for a stream: at `[DONE]`), or the client knew that it would not be, or left."""
    final: bool = False
    stream: bool = False
    status: int | None = None
    affinity: str | None = None
    worker: str | None = None
    """As the response says."""
    outcome: str = "completed"
    """completed | aborted (the client left on purpose) | refused (no connection) | cut (no clean end) | error (a status
    of 400 or more) | broken (an error event in the stream) | incomplete (a clean end of too little) | timeout"""
    note: str = ""


@dataclass(kw_only=True, slots=True)
class Served:
    """One turn as a worker recorded it."""

    id: str
    session: str
    worker: str
    start: float
    end: float
    outcome: str = "completed"
    """completed | aborted | running (the worker was killed at `end`)"""


@dataclass(kw_only=True, slots=True)
class Fault:
    """What the nemesis did, from before it did so until after everything was well again."""

    kind: str
    """replica-killed | replica-frozen | worker-killed | worker-frozen (for less than probes tell) | worker-hung (for
    longer) | worker-sick | worker-removed (or drained, from the deadline on) | source-broken (of workers) |
    worker-cordoned | worker-marked (it is taken back) | member-killed | member-frozen | quorum-lost | store-wiped |
    store-cut | calls-hang | compacted | disk-full | claim-removed | claim-garbled (until it was ended) |
    claim-replaced | claim-ended | machine-slow (not its doing)"""
    target: str = ""
    """Of a claim: the session. Of links to the store (cut, or with single calls that hang): the replica. Of a slow
    machine: the replica that was slow, or nobody: all."""
    start: float
    end: float = math.inf
    leader: bool = False
    """The member led the cluster."""
    worker: str = ""
    """Whom the claim names that was put in place of another."""
    replica: str = ""
    """To whom an admin gave the order to end the session. Each order is a fault."""
    outcome: str = ""
    """What the order was answered: closed, pending, gone or superseded; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the deployment promises, in seconds."""

    store: str
    """file | etcd"""
    ttl: float
    max_stale: float = 60.0
    deadline: float = 2.0

    @property
    def lifetime(self) -> float:
        """After which an idle claim is surely gone."""
        if self.store == "file":
            return 1.25 * self.ttl + 0.3
        return math.ceil(1.25 * self.ttl) + 2.0  # whole seconds, swept twice a second, revoked through the log

    @property
    def news(self) -> float:
        """How long it takes a living watch to tell of a deletion. More than it should take on an idle machine."""
        return 1.5

    @property
    def stamps(self) -> bool:
        """Closes are seen at once."""
        return self.store == "file"

    @property
    def silence(self) -> float:
        return 5.0

    @property
    def walk(self) -> float:
        """Until a file store has looked at every claim."""
        return min(max(self.ttl / 4, 0.1), 30.0) * 1.25 + 1.0


@dataclass(kw_only=True)
class History:
    rules: Rules
    sent: list[Sent]
    served: list[Served]
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Violation:
    rule: str
    session: str
    at: float
    text: str


@dataclass(kw_only=True)
class Verdict:
    violations: list[Violation] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    """Changes of worker, by what excused them."""
    renewals: Counter[str] = field(default_factory=Counter)
    """The same for `created` turns that came to the same worker again."""
    moves: Counter[str] = field(default_factory=Counter)
    """Turns of sessions that an outage has touched, at another worker than the one before, by what excused them."""
    lost: Counter[str] = field(default_factory=Counter)
    """Turns without a complete answer, by what excused them."""
    facts: Counter[str] = field(default_factory=Counter)


def check(history: History) -> Verdict:
    """Everything that can be said of the history."""
    verdict = Verdict()
    faults = _Faults(history.rules, history.faults, history.sent)
    sent: dict[str, list[Sent]] = defaultdict(list)
    for turn in history.sent:
        sent[turn.session].append(turn)
    served: dict[str, list[Served]] = defaultdict(list)
    for record in history.served:
        served[record.id].append(record)
    known = {turn.id for turn in history.sent}
    for record in history.served:
        if record.id not in known:
            _violate(verdict, "invented turn", record.session, record.start, f"{record.worker} served {record.id}")
    for name, turns in sent.items():
        session = _Session(name, turns, served, faults)
        check_turns(session, verdict)
        check_marks(session, verdict)
        if check_place(session, verdict):
            check_moves(session, verdict)
        check_idle(session, verdict)
        check_finals(session, verdict)
    if (unasked := verdict.moves[THOUGH_KNOWN]) > LATE_PEERS:
        _violate(verdict, "peers not asked", "", 0.0, f"{unasked} sessions were placed by hash where a peer knew them")
    verdict.violations.sort(key=lambda violation: violation.at)
    return verdict


# --- rule 1: one session, one worker ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Release:
    reason: str
    worker: str
    lo: float
    hi: float
    uses: float = 1


@dataclass(slots=True, eq=False)
class _Op:
    """A turn that is bound, or the nemesis' writing of a claim."""

    lo: float
    hi: float
    worker: str
    created: bool
    what: Sent | Fault
    doubtful: bool = False
    """It may have relied on what its replica had known long before an outage."""


@dataclass(slots=True, eq=False)
class _State:
    first: int
    """All ops before this one are placed."""
    placed: frozenset[int]
    """And these."""
    worker: str | None
    now: float
    used: frozenset[tuple[int, int]]
    parent: _State | None
    op: _Op | None
    release: _Release | None
    left_out: bool = False
    """The op, as one that says nothing of the claim."""


def check_place(session: _Session, verdict: Verdict) -> bool:
    """See the module's docstring. False: it is split."""
    for turn in session.turns:
        if turn.affinity == "degraded":
            verdict.facts["degraded turns"] += 1
            if not session.may_do_without(turn):
                _violate(verdict, "degraded", session.name, turn.start, f"{turn.id} was placed without a healthy store")
    releases = session.releases()
    blocked: _State | None = None
    for news in (0.0, session.faults.rules.news):
        ops = session.ops(news)
        end, blocked = _search(ops, releases)
        if end is not None:
            _account(end, verdict, late=news > 0)
            return True
    assert blocked is not None
    tried = [op for op in ops[blocked.first :] if ops.index(op) not in blocked.placed]
    op = min(tried, key=lambda op: op.hi)
    name = op.what.id if isinstance(op.what, Sent) else op.what.kind
    how = "created there" if op.created and op.worker == blocked.worker else f"at {op.worker}"
    text = f"{name} is {how}, and nothing had released it from {blocked.worker}"
    _violate(verdict, "split session", session.name, op.hi, text)
    return False


def check_moves(session: _Session, verdict: Verdict) -> None:
    """*Moved without cause*, as the module's docstring says."""
    releases = session.releases()
    turns = {turn.id: turn for turn in session.turns}
    served = [(turns[record.id], record) for records in session.records.values() for record in records]
    served.sort(key=lambda each: each[1].start)
    closes = [(each.lo, each.hi) for each in releases if each.reason not in ("worker lost", "expiry")]
    closes += [(each.start, each.start) for each in session.turns if session.idle(each)]
    closes += [(each[1].start, each[1].start) for each in served if session.had_lapsed(*each)]
    for number, (turn, record) in enumerate(served):
        before = [each for each in served[:number] if each[1].start < turn.start]
        if not before or before[-1][1].worker == record.worker:
            continue
        last, last_record = before[-1]
        if "degraded" not in (turn.affinity, last.affinity):
            continue  # the register has judged it
        low = min(session.relied_on(last, last_record), relied_on := session.relied_on(turn, record))
        cause = _cause(session, releases, last_record, turn, record, low, relied_on)
        if cause:
            verdict.moves[cause] += 1
            continue
        closed = [close for close in closes if close[0] <= turn.start]
        began, ended = (max((close[end] for close in closed), default=0.0) for end in (0, 1))
        places = {each[0].replica: each for each in before if each[1].start >= began}
        known = turn.replica in places and places[turn.replica][0].start >= ended
        touched = [
            outage
            for replica in {turn.replica, last.replica, *places}
            for outage in session.faults.outages(replica)
            if outage.begin <= record.start and outage.end + DOUBT + RECOVERY >= last.start
        ]
        if residue := _residue(session, releases, turn, record, places, known, ended, touched) if touched else "":
            verdict.moves[residue] += 1
            continue
        text = f"{turn.id} is {turn.affinity} at {record.worker}; {last.id} was at {last_record.worker}, which was well"
        _violate(verdict, "moved without cause", session.name, record.start, text)


def _residue(
    session: _Session,
    releases: Sequence[_Release],
    turn: Sent,
    came: Served,
    places: dict[str, tuple[Sent, Served]],
    known: bool,
    closed: float,
    outages: Sequence[_Outage],
) -> str:
    """What of a move around an outage cannot be helped; empty: it can. `places`: each replica's last turn since the
    session's last close began; `known`: the turn's own replica has had one since that close had surely ended, which was
    at `closed`; `outages`: those that the session has had."""
    faults = session.faults
    if not known or faults.overlap("replica-killed", turn.replica, places[turn.replica][0].start, came.start):
        began = min(outage.begin for outage in outages)
        if turn.affinity == "degraded" and session.peers_that_knew(turn, came, places, closed, began):
            return THOUGH_KNOWN
        return f"not known there, nor at a peer: {turn.affinity}"
    for _, there in places.values():
        if there.worker == came.worker:
            return "both served"
    for _, there in places.values():
        if any(
            release.worker == there.worker and release.lo <= came.start and release.hi >= there.start
            for release in releases
            if release.reason == "worker lost"
        ):
            return "both served, and then one was lost"
    if any(
        other.affinity == "degraded"
        and faults.overlap("replica-killed", other.replica, other.start, other.start + DOUBT)
        for other in session.turns
        if other.start < turn.start
    ):
        return "a late claim, whose maker has died"
    if came.start >= session.held_until(turn.start) + faults.rules.ttl - EARLY:
        return "expired in the outage"
    return ""


def _cause(
    session: _Session,
    releases: Sequence[_Release],
    left: Served,
    turn: Sent,
    came: Served,
    low: float,
    relied_on: float,
) -> str:
    """Why the turn may be elsewhere than the one before; empty: nothing that is known of."""
    old_news = turn.affinity in ("cached", "degraded", None) and relied_on <= left.start
    for release in releases:
        if release.reason == "expiry" or release.lo > came.start or release.hi < low:
            continue
        # From where it came to it was released before it was at the other one; this replica had not heard of it.
        if release.worker in (ANY, left.worker) or (
            release.worker == came.worker and old_news and release.lo <= left.start
        ):
            return release.reason
    if session.idle(turn):
        return "expiry"
    if any(
        fault.kind == "claim-replaced" and fault.start <= came.start and fault.end >= low for fault in session.by_hand
    ):
        return "claim replaced by hand"
    return ""


def _search(ops: Sequence[_Op], releases: Sequence[_Release]) -> tuple[_State | None, _State | None]:
    """The end of a legal order; else None and where the search came furthest. A session that is not decided within
    `SEARCH_LIMIT` counts as one without an order: legal ones take a few hundred states."""
    start = _State(0, frozenset(), None, -math.inf, frozenset(), None, None, None)
    stack = [start]
    furthest, reach = start, (-1, 0)
    best: dict[tuple[int, frozenset[int], str | None, frozenset[tuple[int, int]]], float] = {}
    for _ in range(SEARCH_LIMIT):
        if not stack:
            return None, furthest
        state = stack.pop()
        if state.first == len(ops):
            return state, None
        if (state.first, len(state.placed)) > reach:
            furthest, reach = state, (state.first, len(state.placed))
        for following in reversed(list(_steps(state, ops, releases))):
            key = (following.first, following.placed, following.worker, following.used)
            if best.get(key, math.inf) > following.now:
                best[key] = following.now
                stack.append(following)
    return None, furthest


def _steps(state: _State, ops: Sequence[_Op], releases: Sequence[_Release]) -> Iterator[_State]:
    """What may come next, the likeliest first."""
    soonest = math.inf
    candidates: list[int] = []
    for index in range(state.first, len(ops)):
        if ops[index].lo > soonest:
            break
        if index not in state.placed:
            candidates.append(index)
            soonest = min(soonest, ops[index].hi)
    candidates = [index for index in candidates if ops[index].lo <= soonest]
    candidates.sort(key=lambda index: (ops[index].worker != state.worker or ops[index].created, ops[index].hi))
    for index in candidates:
        op = ops[index]
        first, placed = _without(state, index)
        free = state.worker is None or isinstance(op.what, Fault) or (op.worker == state.worker and not op.created)
        if free:
            if (now := max(state.now, op.lo)) <= op.hi:
                yield _State(first, placed, op.worker, now, state.used, state, op, None)
            continue
        usable = []
        for number, release in enumerate(releases):
            if release.worker in (ANY, state.worker):
                at = max(state.now, release.lo)
                if at <= min(release.hi, op.hi):
                    use = next((n for n in itertools.count() if (number, n) not in state.used), 0)
                    if use < release.uses:
                        rank = (release.reason == "expiry", release.hi)  # so that expiry excuses what nothing else does
                        usable.append((rank, number, use, max(at, op.lo)))
        for _, number, use, now in sorted(usable):
            used = state.used if math.isinf(releases[number].uses) else state.used | {(number, use)}
            yield _State(first, placed, op.worker, now, used, state, op, releases[number])
    for index in candidates:
        if ops[index].doubtful:
            first, placed = _without(state, index)
            yield _State(first, placed, state.worker, state.now, state.used, state, ops[index], None, left_out=True)


def _without(state: _State, index: int) -> tuple[int, frozenset[int]]:
    """What is placed when this op is, too."""
    first, placed = state.first, state.placed | {index}
    while first in placed:
        placed -= {first}
        first += 1
    return first, placed


def _account(end: _State, verdict: Verdict, *, late: bool) -> None:
    state: _State = end
    while state.parent is not None:
        if state.left_out:
            verdict.facts["turns at a place that was known before an outage"] += 1
        elif state.release is not None:
            moved = state.parent.worker != state.worker
            (verdict.changes if moved else verdict.renewals)[state.release.reason] += 1
        elif isinstance(state.op and state.op.what, Fault) and state.parent.worker != state.worker:
            verdict.changes["claim replaced by hand"] += 1
        state = state.parent
    verdict.facts["sessions in order" + (" but for late news" if late else "")] += 1


class _Session:
    """One session's turns and what follows from them and the faults."""

    def __init__(self, name: str, turns: list[Sent], served: dict[str, list[Served]], faults: _Faults) -> None:
        self.name = name
        self.turns = sorted(turns, key=lambda turn: turn.start)
        self.records = {turn.id: sorted(served.get(turn.id, ()), key=lambda record: record.start) for turn in turns}
        self.faults = faults
        self.by_hand = [fault for fault in faults.all if fault.kind.startswith("claim-") and fault.target == name]
        self._ends = {turn.id: self._end(turn) for turn in turns}

    def _end(self, turn: Sent) -> float:
        """When the router was done with it, at the latest."""
        end = max([turn.end, *(record.end for record in self.records[turn.id])])
        if turn.outcome != "completed":
            end += 0.5  # until the router has noticed
        for fault in self.faults.of("replica-frozen", turn.replica):
            if fault.start - EDGE <= end <= fault.end + EDGE:
                end = fault.end + 1.0
        return end

    def place(self, turn: Sent) -> str | None:
        """The worker that served it last."""
        records = self.records[turn.id]
        return records[-1].worker if records else None

    def ops(self, news: float) -> list[_Op]:
        ops = []
        for turn in self.turns:
            if turn.affinity == "degraded":
                continue
            for record in self.records[turn.id]:
                lo = self.relied_on(turn, record, news)
                created = turn.affinity == "created" and record.worker == turn.worker
                could_not_ask = turn.affinity in ("cached", None) and self.faults.known_away(turn, record)
                doubtful = news > 0 and could_not_ask
                ops.append(_Op(lo, max(record.start, lo), record.worker, created, turn, doubtful))
        replaced = [fault for fault in self.by_hand if fault.kind == "claim-replaced"]
        ops += [_Op(fault.start, fault.end, fault.worker, False, fault) for fault in replaced]
        return sorted(ops, key=lambda op: op.lo)

    def relied_on(self, turn: Sent, record: Served, news: float = math.inf) -> float:
        """Since when what the turn went by may have been so; `news`: how late its replica may hear of a close."""
        news = min(news, self.faults.rules.news)
        rules = self.faults.rules
        lo = turn.start
        if turn.affinity in ("created", "rebound"):
            return lo
        lo = self._shared_look(turn, record)
        if turn.affinity == "stored":
            return lo
        # `cached`, or not known
        start = turn.start
        if not rules.stamps:
            lo = min(lo, start - news)
        for fault in self.by_hand:
            if fault.kind == "claim-ended":
                continue  # through a replica, which tells of it as of every close
            late = rules.max_stale + 0.5 if fault.kind == "claim-replaced" else rules.news
            if fault.start <= start <= fault.end + late:
                lo = min(lo, fault.start - EDGE)
        if news:
            for begin, end in self.faults.deaf(turn.replica):
                if begin <= start <= end + rules.news:
                    lo = min(lo, begin - rules.news)
            row = [other for other in self.row(turn, record) if other is not turn]
            if any(other.final for other in row):
                lo = min(lo, *(other.start for other in row))
        return lo

    def _shared_look(self, turn: Sent, record: Served) -> float:
        """The start of the first of an unbroken row of turns that were being bound on its replica."""
        lo = turn.start
        spans = []
        for other in self.turns:
            if other is not turn and other.replica == turn.replica and other.start < record.start:
                records = self.records[other.id]
                bound = records[0].start if records else other.head or other.end
                spans.append((other.start, bound))
        for start, bound in sorted(spans, reverse=True, key=lambda span: span[0]):
            if start < lo <= bound:
                lo = start
        return lo

    def row(self, turn: Sent, record: Served | None = None) -> list[Sent]:
        """Turns at its worker and replica that overlap with it, directly or through others, and began before."""
        until = record.start if record else turn.end
        left = [
            other
            for other in self.turns
            if other is not turn
            and other.replica == turn.replica
            and other.start < until
            and (record is None or self.place(other) in (record.worker, None))
        ]
        row, lo = [turn], turn.start
        while joined := [other for other in left if self._ends[other.id] >= lo - MOMENT]:
            row += joined
            lo = min(lo, *(other.start for other in joined))
            left = [other for other in left if other not in joined]
        return row

    def may_do_without(self, turn: Sent) -> bool:
        """Whether a turn may be placed without the store."""
        start, end = self.row_start(turn), turn.head or turn.end
        if self.faults.away(turn.replica, start, end):
            return True
        if any(
            fault.kind == "claim-garbled" and fault.start <= end and fault.end + GRACE >= start
            for fault in self.by_hand
        ):
            return True
        own = [
            other
            for other in self.turns
            if other.affinity == "degraded"
            and other.replica == turn.replica
            and turn.start - DOUBT - RECOVERY <= other.start < turn.start
        ]
        return any(self.faults.away(each.replica, each.start, each.head or each.end) for each in own) or any(
            self._may_doubt(each) for each in (*own, turn)
        )

    def _may_doubt(self, turn: Sent) -> bool:
        """Whether its replica may go by something else than a claim that was made since its last outage: by where it
        served the session last, if the store has lost its memory since, or by the word of another replica that is in an
        outage still and serves the session without a claim. (Until one says that it serves by the claim: that one may
        be frozen.)"""
        at, end, faults = self.place(turn), turn.head or turn.end, self.faults
        before = [other for other in self.turns if other.start < turn.start]
        last = next((other for other in reversed(before) if other.replica == turn.replica and self.place(other)), None)
        wiped = any(
            last.start <= fault.end and fault.start <= end and turn.start <= fault.end + DOUBT + RECOVERY
            for fault in faults.of("store-wiped")
            if last is not None and self.place(last) == at
        )
        return wiped or (
            faults.away(turn.replica, turn.start, end, DOUBT)
            and any(
                other.affinity == "degraded"
                and other.replica != turn.replica
                and self.place(other) == at
                and faults.away(other.replica, other.start, other.head or other.end)
                and faults.away(other.replica, turn.start, end)
                for other in before
            )
        )

    def row_start(self, turn: Sent) -> float:
        return min(other.start for other in self.row(turn))

    def releases(self) -> list[_Release]:
        found = [release for turn in self.turns if turn.final for release in self._of_final(turn)]
        found += [release for turn in self.turns for release in self._of_failed(turn)]
        for fault in self.faults.all:
            if fault.kind == "store-wiped":
                found.append(_Release("store wiped", ANY, fault.start, fault.end + DOUBT, math.inf))
            if fault.kind in ILL:
                end = fault.end + 1.0
                for frozen in self.faults.of("replica-frozen"):
                    if frozen.start < end and frozen.end > fault.start:
                        end = max(end, frozen.end + 1.0)
                found.append(_Release("worker lost", fault.target, fault.start, end, math.inf))
        for fault in self.by_hand:
            if fault.kind == "claim-removed":
                found.append(_Release("claim removed by hand", ANY, fault.start, fault.end))
            elif fault.kind == "claim-garbled":
                found.append(_Release("claim garbled by hand", ANY, fault.start, self._ended_by(fault)))
            elif fault.kind == "claim-ended":
                hi = fault.end
                if fault.outcome in ("pending", ""):
                    hi, _ = self._held_up(fault.replica, fault.start, self._ended_by(fault), "")
                found.append(_Release("ended by an admin", ANY, fault.start, hi))
        found += self._expiries(found)
        return found

    def _ended_by(self, fault: Fault) -> float:
        """Until when an admin's word may take: turns that run end first."""
        until = fault.end
        for turn in self.turns:
            if fault.replica in ("", turn.replica) and turn.start <= until:
                until = max(until, self._ends[turn.id])  # each joins those that run there
        return until + GRACE + self.faults.rules.deadline

    def _of_failed(self, turn: Sent) -> Iterator[_Release]:
        """Of a session's first turn that came to nothing."""
        answered = turn.status is not None and turn.status < 500 and turn.status not in RETRYABLE
        if turn.outcome in ("completed", "refused") or answered or turn.affinity not in ("created", "rebound", None):
            return
        lo = min([turn.end, *(record.end for record in self.records[turn.id])]) - EDGE
        beside = [self._ends[other.id] for other in self.row_after(turn)]
        hi = max([self._ends[turn.id], *beside]) + self.faults.rules.deadline + 1.0
        hi, _ = self._held_up(turn.replica, lo, hi, "")
        for worker in {record.worker for record in self.records[turn.id]}:
            yield _Release("first turn failed", worker, lo, hi)

    def row_after(self, turn: Sent) -> list[Sent]:
        """Turns on its replica that overlap with it, directly or through others."""
        row: list[Sent] = [turn]
        until = self._ends[turn.id]
        for other in self.turns:
            if other is not turn and other.replica == turn.replica and turn.start - MOMENT <= other.start <= until:
                row.append(other)
                until = max(until, self._ends[other.id])
        return row

    def _of_final(self, turn: Sent) -> Iterator[_Release]:
        if turn.outcome == "refused" or (turn.status is not None and turn.status >= 500):
            return
        ends = [(record.worker, record.end) for record in self.records[turn.id]] or [(ANY, turn.start)]
        for worker, ended in ends:
            if turn.affinity == "degraded":
                worker = ANY
            lo = min(ended, turn.end) - EDGE
            hi = turn.end + 0.05
            reason = "final" if turn.outcome == "completed" else f"final, {turn.outcome}"
            surely = (
                turn.outcome == "completed"
                and turn.end < ended + self.faults.rules.deadline - EDGE
                and not self.faults.away(turn.replica, turn.start, turn.end)
            )
            if not surely:
                hi = max(ended, turn.end) + self.faults.rules.deadline + 1.0
            moved_to: set[str] = set()
            for other in self.turns:
                until = self._ends[other.id]
                beside = other is not turn and other.replica == turn.replica and until >= turn.start - MOMENT
                if beside and other.affinity == "rebound" and other.start <= self._ends[turn.id]:
                    moved_to |= {record.worker for record in self.records[other.id]}
                if beside and until >= ended - EDGE and other.start < hi < until + 0.5:
                    hi, reason, surely = until + 0.5, "final, close pending", False
            if not surely:  # the answer did not wait for the close
                hi, reason = self._held_up(turn.replica, lo, hi, reason)
            yield _Release(reason, worker, lo, hi)
            for there in moved_to - {worker}:  # the pending close goes with the session
                yield _Release("final, close pending", there, lo, hi)

    def _held_up(self, replica: str, lo: float, hi: float, reason: str) -> tuple[float, str]:
        """Until when a close may last that should be done by `hi`."""
        for fault in self.faults.of("replica-frozen", replica):
            if fault.start <= hi and fault.end >= lo and fault.end + 1.0 > hi:
                hi, reason = fault.end + 1.0, "final, replica frozen"
        for outage in self.faults.outages(replica):
            if outage.begin <= hi and outage.end + RETURN >= lo and outage.end + CLOSE_BACKOFF > hi:
                hi, reason = outage.end + CLOSE_BACKOFF, "final, store away"
        for fault in self.faults.of("replica-killed", replica):
            if fault.start >= lo:
                hi = min(hi, fault.start + EDGE + 0.5)
        return hi, reason

    def _expiries(self, others: Sequence[_Release]) -> list[_Release]:
        """When claims may have come to their ends by themselves."""
        first: dict[str, float] = {}
        spans: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
        for turn in self.turns:
            for record in self.records[turn.id]:
                worker = record.worker
                first[worker] = min(first.get(worker, math.inf), record.start)
                held = self._surely_held(turn, record)
                if held is not None:
                    begin, end = held
                    cuts = [r.lo for r in others if r.worker in (worker, ANY) and begin < r.lo < end]
                    spans[worker].append((begin, min([end, *cuts]), turn.affinity == "created"))
        for fault in self.by_hand:
            if fault.kind == "claim-replaced":  # the new one lives as long as the old one would have
                earlier = [end for each in spans.values() for begin, end, _ in each if begin < fault.start]
                until = min(fault.start, max(earlier, default=fault.start - self.faults.rules.ttl))
                first[fault.worker] = min(first.get(fault.worker, math.inf), fault.start)
                spans[fault.worker].append((fault.start, until, True))
        return [release for worker in first for release in self._expiries_at(worker, first[worker], spans[worker])]

    def _expiries_at(self, worker: str, first: float, spans: list[tuple[float, float, bool]]) -> Iterator[_Release]:
        """`first`: when the worker served the session first; `spans`: from when to when its claim was surely held, and
        whether it was made then."""
        rules = self.faults.rules
        last = max(record.start for records in self.records.values() for record in records)
        held_until = -math.inf  # of what no turn surely held, nothing is known
        for begin, end, created in sorted(spans):
            ends = max(first, held_until + rules.ttl - EARLY)
            if begin > ends:
                if begin <= held_until + rules.lifetime and not created:
                    continue  # the claim may have ended under its hands
                uses = max(1, math.floor((begin - max(first, held_until)) / rules.ttl))
                yield _Release("expiry", worker, ends, begin, uses)
            held_until = max(held_until, end)
        uses = max(1, math.floor((last - max(first, held_until)) / rules.ttl))
        yield _Release("expiry", worker, max(first, held_until + rules.ttl - EARLY), math.inf, uses)

    def _surely_held(self, turn: Sent, record: Served) -> tuple[float, float] | None:
        """From when to when the turn kept a claim alive, by renewing it."""
        if turn.affinity == "degraded":
            return None
        end = min(turn.end, record.end)
        if turn.head is None or self.faults.no_renewal(turn.replica, turn.start, end + 1.0):
            return (record.start, turn.start) if turn.affinity == "created" else None
        return record.start, end

    def held_until(self, moment: float) -> float:
        """Until when a turn that was sent before then has surely kept the claim."""
        pairs = [(turn, record) for turn in self.turns for record in self.records[turn.id] if turn.start < moment]
        return max((held[1] for pair in pairs if (held := self._surely_held(*pair)) is not None), default=math.inf)

    def peers_that_knew(
        self, turn: Sent, came: Served, places: dict[str, tuple[Sent, Served]], closed: float, outage: float
    ) -> list[str]:
        """Replicas that had served the session, since its last close was over at `closed`, before the turn came to its
        own, and could be asked by it: both have found each other before the outage began."""
        faults = self.faults
        alone = faults.overlap("replica-killed", turn.replica, outage - MEETING, came.start)
        if alone or faults.replica_disturbed(turn.replica, turn.start - LEFT_OUT, came.start):
            return []
        if faults.overlap("machine-slow", None, turn.start - LEFT_OUT, came.start):
            return []
        return [
            replica
            for replica, (there, _) in places.items()
            if replica != turn.replica
            and there.start >= closed
            and self._ends[there.id] < turn.start
            and not faults.overlap("replica-killed", replica, min(outage, there.start) - MEETING, came.start)
            and not faults.overlap("replica-frozen", replica, turn.start - LEFT_OUT, came.start)
        ]

    def idle(self, turn: Sent) -> bool:
        """Whether no turn was served in the TTL before."""
        ends = [self._ends[each.id] for each in self.turns if each.start < turn.start and self.records[each.id]]
        return bool(ends) and turn.start >= max(ends) + self.faults.rules.ttl - EARLY

    def had_lapsed(self, turn: Sent, record: Served) -> bool:
        """Whether it was created after no turn had been served for a TTL: it was held up on its way for so long."""
        ends = [
            self._ends[each.id] for each in self.turns for other in self.records[each.id] if other.start < record.start
        ]
        return turn.affinity == "created" and bool(ends) and record.start >= max(ends) + self.faults.rules.ttl - EARLY

    def ended(self, turn: Sent) -> float:
        return self._ends[turn.id]


# --- rules 2 and 4: what has to be placed anew ------------------------------------------------------------------------


def check_idle(session: _Session, verdict: Verdict) -> None:
    """No claim outlives its TTL: after an idle time of more than a claim's longest life the next turn is `created`. Of
    several that came before the first one's head, one is. Not judged when the store had an outage meanwhile, after
    which claims are made for what was placed without it, or a new leader, which starts leases afresh."""
    rules, faults = session.faults.rules, session.faults
    idle_since = -math.inf
    for number, turn in enumerate(session.turns):
        if _placed_nowhere(turn):
            continue
        if number and turn.start > idle_since + rules.lifetime and idle_since > -math.inf:
            together = _together(session, turn)
            if together is None or faults.store_disturbed(idle_since, turn.head or turn.end):
                verdict.facts["idle times not judged"] += 1
            elif "created" in together:
                verdict.facts["idle times, then created"] += 1
            else:
                idle = turn.start - idle_since
                text = f"{turn.id} is {turn.affinity} after {idle:.2f} s without a turn"
                _violate(verdict, "claim outlived its TTL", session.name, turn.start, text)
        idle_since = max(idle_since, session.ended(turn))


def check_finals(session: _Session, verdict: Verdict) -> None:
    """After a final turn whose end the client has seen, the next turn is `created`. Judged when the store was well, no
    other turn of the session was still running on that replica, no other close was pending on the next one's, and
    nothing else may have closed the claim that the final turn was bound to. Where closes leave no stamps, only on the
    same replica or after `Rules.news`."""
    rules, faults = session.faults.rules, session.faults
    for number, final in enumerate(session.turns):
        if not final.final or final.outcome != "completed" or final.status != 200 or final.affinity == "degraded":
            continue
        others = [turn for turn in session.turns if turn is not final]
        after = (turn for turn in session.turns[number + 1 :] if turn.start >= final.end)
        following = next((turn for turn in after if not _placed_nowhere(turn)), None)
        if following is None:
            continue
        until = following.head or following.end
        beside = [turn for turn in others if turn.start < final.end and session.ended(turn) >= final.start - MOMENT]
        running = any(turn.replica == final.replica for turn in beside)
        joins = any(turn.final and turn is not final for turn in session.row(following) if turn is not following)
        looking = any(
            turn.replica == following.replica
            and max([turn.start, *(record.start for record in session.records[turn.id])]) >= final.end - EDGE
            for turn in beside
        )
        fenced_off = any(turn.affinity not in ("cached", "stored") for turn in beside) or any(
            fault.start < until and fault.end + rules.walk > final.start for fault in session.by_hand
        )
        ill = (
            faults.store_disturbed(final.start, until, RETURN)
            or faults.replica_disturbed(final.replica, final.start, until)
            or faults.overlap("worker-killed", final.worker, final.start - 1.0, until)
            or any(faults.away(each.replica, final.start, until, RETURN) for each in (final, following))
        )
        together = _together(session, following)
        late = not rules.stamps and following.replica != final.replica and following.start < final.end + rules.news
        if running or joins or looking or fenced_off or ill or together is None:
            verdict.facts["finals not judged"] += 1
        elif "created" in together:
            verdict.facts["finals, then created"] += 1
        elif late:
            verdict.facts["finals whose news came late"] += 1
        else:
            later = following.start - final.end
            text = f"{following.id} is {following.affinity} {later:.3f} s after the end of {final.id}"
            _violate(verdict, "final did not close", session.name, following.start, text)


def _placed_nowhere(turn: Sent) -> bool:
    """It says nothing of its session: it was refused before anybody asked where that is (`check_turns` judges that)."""
    return turn.outcome == "refused" or (turn.outcome == "error" and turn.affinity == "none")


def _together(session: _Session, turn: Sent) -> set[str] | None:
    """How this turn and those sent from its start until its head came to their workers; None: not known."""
    until = turn.head or turn.end
    found = {
        other.affinity for other in session.turns if turn.start <= other.start <= until and other.outcome != "refused"
    }
    if "rebound" in found and any(session.faults.overlap(kind, None, turn.start, until) for kind in ILL):
        found.add("created")  # at a worker that was not there, and then at another one
    return None if None in found or "degraded" in found else {how for how in found if how}


def check_marks(session: _Session, verdict: Verdict) -> None:
    """No new session is placed at a worker that is cordoned, once every replica has had the time to hear of it."""
    first = min(session.turns, key=lambda turn: turn.start)
    faults = session.faults
    if first.affinity != "created" or first.head is None or first.worker is None:
        return
    for mark in faults.of("worker-cordoned", first.worker):
        if not mark.start + OBEYED <= first.start <= first.head <= mark.end:
            continue
        since = mark.start - RECOVERY
        if not faults.replica_disturbed(first.replica, since, first.head) and not faults.store_disturbed(
            since, first.head
        ):
            text = f"{first.id} was placed at {first.worker} by {first.replica}, {first.start - mark.start:.1f} s after"
            _violate(verdict, "placed at a cordoned worker", session.name, first.start, text)
        return
    verdict.facts["new sessions while a worker was cordoned"] += any(
        mark.start + OBEYED <= first.start <= mark.end for mark in faults.of("worker-cordoned")
    )


# --- rule 3: no turn is lost ------------------------------------------------------------------------------------------


def check_turns(session: _Session, verdict: Verdict) -> None:
    """Every turn gets one complete answer, of the worker that the answer names, which has run it once. Excused: those
    on a replica that was killed meanwhile; 502, a broken stream or a cut one when their worker was; what a sick worker
    has answered, after which a turn may have run at one other; 503 of a replica that starts while its source of workers
    is broken; and what takes longer than a client waits, on a machine
    that was slow."""
    faults = session.faults
    for turn in session.turns:
        records = session.records[turn.id]
        workers = {record.worker for record in records} | ({turn.worker} if turn.worker else set())
        dead = {worker for worker in workers if faults.overlap("worker-killed", worker, turn.start, turn.end)}
        any_dead = faults.overlap("worker-killed", None, turn.start, turn.end)
        any_sick = faults.overlap("worker-sick", None, turn.start, turn.end)
        sick = any(faults.overlap("worker-sick", worker, turn.start, turn.end) for worker in workers)
        if turn.outcome == "completed":
            # Whoever leaves at the last event cuts the turn at the worker that said it, and at no other.
            cut = turn.worker if turn.note == LEFT else None
            good = {("completed", each) for each in workers} | {("aborted", cut)}
            done = [record.worker for record in records if (record.outcome, record.worker) in good]
            if done != [turn.worker] and not (dead and len(done) < 2):
                text = f"{turn.id} was answered by {turn.worker}; completed at {done or 'no worker'}"
                _violate(verdict, "misreported turn", session.name, turn.start, text)
        elif turn.outcome != "aborted":
            excuse = None
            if faults.overlap("replica-killed", turn.replica, turn.start, turn.end) and turn.outcome in (
                "refused",
                "cut",
            ):
                excuse = "replica killed"
            elif (dead or (not workers and any_dead)) and (
                turn.outcome in ("cut", "broken") or (turn.outcome == "error" and turn.status == 502)
            ):
                excuse = "worker killed"
            elif turn.outcome == "timeout" and (
                faults.overlap("machine-slow", turn.replica, turn.start, turn.end)
                or faults.overlap("machine-slow", "", turn.start, turn.end)
            ):
                excuse = "machine slow"
            elif (
                turn.status == 503
                and faults.overlap("replica-killed", turn.replica, turn.start, turn.end)
                and faults.overlap("source-broken", None, turn.start - RECOVERY, turn.end)
            ):
                excuse = "replica started without a source"  # it is not ready, and knows no worker
            elif turn.status == 502 and any(
                faults.overlap("worker-hung", worker, turn.start, turn.end) for worker in workers
            ):
                excuse = "worker hung"  # what it has not read when it goes on may be too late for it
            elif (sick or (not workers and any_sick)) and (
                turn.outcome in ("cut", "broken") or (turn.outcome == "error" and (turn.status or 0) >= 500)
            ):
                excuse = "worker sick"
            if excuse is None:
                text = f"{turn.id} at {turn.replica}: {turn.outcome} {turn.status or ''} {turn.note}"
                _violate(verdict, "lost turn", session.name, turn.start, text)
            else:
                verdict.lost[f"{turn.outcome}: {excuse}"] += 1
        if len(records) > 1 and not any_dead and not (sick and len(records) == 2):
            text = f"{turn.id} ran at {', '.join(record.worker for record in records)}"
            _violate(verdict, "turn run twice", session.name, turn.start, text)


# --- faults -----------------------------------------------------------------------------------------------------------


class _Faults:
    """The nemesis' log, and what each fault means for a replica."""

    def __init__(self, rules: Rules, faults: Sequence[Fault], sent: Sequence[Sent]) -> None:
        self.rules = rules
        self.all = sorted(faults, key=lambda fault: fault.start)
        self._outages: dict[str, list[_Outage]] = {}
        self._deaf: dict[str, list[tuple[float, float]]] = {}
        self._degraded: dict[str, list[float]] = defaultdict(list)
        for turn in sorted(sent, key=lambda turn: turn.start):
            if turn.affinity == "degraded" and turn.head is not None:
                self._degraded[turn.replica].append(turn.head)

    def of(self, kind: str, target: str | None = None) -> list[Fault]:
        return [fault for fault in self.all if fault.kind == kind and target in (None, fault.target)]

    def overlap(self, kind: str, target: str | None, start: float, end: float) -> bool:
        return any(fault.start <= end and fault.end >= start for fault in self.of(kind, target))

    def replica_disturbed(self, replica: str, start: float, end: float) -> bool:
        return self.overlap("replica-killed", replica, start, end) or self.overlap(
            "replica-frozen", replica, start, end
        )

    def store_disturbed(self, start: float, end: float, after: float = RECOVERY) -> bool:
        """Something happened to the store itself, until `after` seconds ago."""
        return any(
            fault.start <= end and fault.end + after >= start
            for fault in self.all
            if fault.kind in ("disk-full", "quorum-lost", "machine-slow", "store-wiped", "store-cut", "calls-hang")
            or fault.kind.startswith("member-")
        )

    def outages(self, replica: str) -> list[_Outage]:
        """When the store may have been away for this replica.

        A full disk; a cluster that was stopped or cannot be reached, without a quorum and then without a leader, or
        whose leader was lost (an election takes longer than a call may), or any member while the machine was slow
        (there is no time then to try another one); its own freezing, in which the deadlines of its calls passed, or
        slowness by which they may have; and, on files, the freezing of another one that may have held a lock, from the
        deadline on."""
        if replica not in self._outages:
            found = []
            for fault in self.all:
                if (
                    fault.kind in ("disk-full", "quorum-lost", "store-wiped")
                    or (fault.kind in ("replica-frozen", "store-cut") and fault.target == replica)
                    or (fault.kind == "machine-slow" and fault.target in ("", replica))
                ):
                    found.append(_Outage(fault.start, fault.end + ELECTED * (fault.kind == "quorum-lost")))
                elif fault.kind.startswith("member-"):
                    if self.overlap("machine-slow", None, fault.start, fault.end):
                        found.append(_Outage(fault.start, fault.end))
                    elif fault.leader:
                        found.append(_Outage(fault.start, min(fault.end, fault.start + ELECTION)))
                elif fault.kind == "replica-frozen" and self.rules.store == "file":
                    found.append(_Outage(fault.start + self.rules.deadline - EDGE, fault.end, one_lock=True))
            self._outages[replica] = found
        return self._outages[replica]

    def away(self, replica: str, start: float, end: float, after: float = RECOVERY) -> bool:
        return any(each.begin <= end and each.end + after >= start for each in self.outages(replica))

    def known_away(self, turn: Sent, record: Served) -> bool:
        """Whether the store was away for this turn, not only perhaps: nobody could reach it, or the turn has waited for
        as long as a call may take, or others were degraded on its replica at that time."""
        if not self.away(turn.replica, turn.start, record.start):
            return False
        nobody = any(
            fault.start <= record.start and fault.end + RETURN >= turn.start
            for fault in self.all
            if fault.kind in ("disk-full", "quorum-lost", "store-wiped")
            or (fault.kind == "store-cut" and fault.target == turn.replica)
        )
        waited = record.start - turn.start >= self.rules.deadline - EDGE
        others = any(turn.start - 1.0 <= at <= record.start + 1.0 for at in self._degraded[turn.replica])
        return nobody or waited or others

    def no_renewal(self, replica: str, start: float, end: float) -> bool:
        """Whether a turn may not have renewed its claim. A lock that is held keeps back one claim of many, for so short
        a time that it is not thought of here."""
        return self.replica_disturbed(replica, start, end) or any(
            each.begin <= end and each.end + RETURN >= start for each in self.outages(replica) if not each.one_lock
        )

    def deaf(self, replica: str) -> list[tuple[float, float]]:
        """When this replica may not have heard of a close."""
        if replica not in self._deaf:
            found = [(each.begin, each.end + RETURN) for each in self.outages(replica)]
            frozen = self.of("member-frozen")
            found += [(fault.start, min(fault.end, fault.start + self.rules.silence)) for fault in frozen]
            found += [(fault.start, fault.end) for fault in self.of("calls-hang", replica)]
            self._deaf[replica] = found
        return self._deaf[replica]


@dataclass(frozen=True, slots=True)
class _Outage:
    begin: float
    end: float
    one_lock: bool = False
    """Only claims that share a lock with one that is being written were out of reach."""


def _violate(verdict: Verdict, rule: str, session: str, at: float, text: str) -> None:
    verdict.violations.append(Violation(rule=rule, session=session, at=at, text=text))


# --- telling ----------------------------------------------------------------------------------------------------------


def timeline(history: History, violation: Violation, *, before: float = 8.0, after: float = 2.0) -> str:
    """What the client, the workers and the nemesis saw around a violation; seconds before and after it."""
    low, high = violation.at - before, violation.at + after
    lines: list[tuple[float, str]] = []
    for turn in history.sent:
        if turn.session == violation.session and turn.start <= high and turn.end >= low:
            kind = "final" if turn.final else "turn"
            kind += " (stream)" if turn.stream else ""
            lines.append((turn.start, f"client   sends {kind} {turn.id} to {turn.replica}"))
            if turn.head is not None:
                lines.append((turn.head, f"client   {turn.id}: {turn.status} {turn.affinity} at {turn.worker}"))
            lines.append((turn.end, f"client   {turn.id}: {turn.outcome} {turn.note}"))
    for record in history.served:
        if record.session == violation.session and record.start <= high and record.end >= low:
            lines.append((record.start, f"{record.worker:8} begins {record.id}"))
            lines.append((record.end, f"{record.worker:8} {record.id}: {record.outcome}"))
    for fault in history.faults:
        if fault.kind.startswith("claim-") and fault.target != violation.session:
            continue
        if fault.start <= high and fault.end >= low:
            what = f"{fault.kind} {fault.target}{' (leader)' * fault.leader} {fault.worker}"
            lines.append((fault.start, f"nemesis  {what}"))
            lines.append((fault.end, f"nemesis  {what}: over"))
    shown = [f"  {at - violation.at:+8.3f}  {text}" for at, text in sorted(_finite(lines))]
    return "\n".join([f"{violation.rule}: session {violation.session}: {violation.text}", *shown])


def _finite(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    return (line for line in lines if math.isfinite(line[0]))
