"""Every metric of the router, in a registry of its own (two routers fit in one process).

What is counted per turn is counted in plain cells of this module: one process, one event loop, so no locks, and an
increment costs a tenth of the library's. Gauges that mirror state are read when scraped. `families` is what there is
at a moment, as plain values, which other processes and threads can have; `app.exposition` makes the text of it.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

AFFINITY_OUTCOMES = ("created", "cached", "stored", "rebound", "degraded", "bypassed", "none")
TurnOutcome = Literal[
    "completed", "client_error", "worker_error", "aborted", "broken", "rejected", "unplaced", "failed", "explained"
]
TURN_OUTCOMES: tuple[TurnOutcome, ...] = get_args(TurnOutcome)
BodyUnread = Literal["compressed", "large", "malformed"]
BODIES_UNREAD: tuple[BodyUnread, ...] = get_args(BodyUnread)
CLOSE_OUTCOMES = ("closed", "gone", "superseded", "expired")
CONNECT_OUTCOMES = ("ok", "failed")
KV_GAPS = ("gap", "restart", "connection", "down", "malformed", "replay")
KEPT_OUTCOMES = ("kept", "alone", "unread", "followed", "past_session", "unknown", "gone")
NoId = Literal["template", "nothing"]
NO_IDS: tuple[NoId, ...] = get_args(NoId)
PEER_CALLS = ("where", "bind", "close", "closed", "ended", "moved", "health")
PEER_OUTCOMES = ("ok", "failed", "late")
PHASE_TURNS = ("two_phases", "little_new", "one_worker", "path", "body")
PHASE_PARTS = ("queue", "prefill", "handover", "first_token")
HANDOVER_FAILURES = ("missing", "malformed", "refused", "prefill")
RELEASE_OUTCOMES = ("ok", "failed")
PARENT_OUTCOMES = ("followed", "passed_over", "unknown")
RETRY_REASONS = ("worker_unreachable", "stale_connection", "worker_died", "worker_busy", "handover_lost")
SESSION_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "other",
)
REFUSED_FOR = ("tenant", "target", "fleet")
REFUSED_WHEN = ("queue_full", "timeout", "shutdown")
STATUS_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx", "none")
PROBE_RESULTS = ("good", "reachable", "misconfigured", "not_yet", "bad", "unreachable", "nameless")
WORKER_STATES = ("starting", "up", "suspect", "down")
SHOWN_STATES = (*WORKER_STATES, "draining", "cordoned", "leaving", "gone")
STORE_CALLS = ("get", "create", "close", "renew")
STORE_OUTCOMES = ("ok", "lost", "failed", "cancelled")
TOKENIZED = ("ok", "remembered", "given", "inexact", "failed")
WAYS_GIVEN = ("late_write", "lost_worker", "rewound")

USAGES_A_TICK = 10
_MAX_MODELS = 100
_MAX_MODEL_NAME = 256
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_OVERHEAD_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2.5)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STORE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

Labels = tuple[str, ...]
Values = Mapping[str, Labels]
"""A metric's labels, each with the values that it can have; none: whatever comes."""
Merge = Literal["sum", "max", "min"]
"""How a gauge of several processes is made one."""
_OF_ALL: dict[str, Merge] = {"process_start_time_seconds": "min", "process_max_fds": "min", "python_info": "max"}
"""Of the gauges that the library reads of the process, those that do not add up."""
_FORESEEN: tuple[tuple[TurnOutcome, str], ...] = (
    ("completed", "2xx"),
    ("client_error", "4xx"),
    ("worker_error", "5xx"),
    ("worker_error", "none"),
    ("broken", "2xx"),
    ("aborted", "2xx"),
    ("aborted", "none"),
)
"""Ends of a turn at a worker that are shown from the start: what increases from nothing has no rate."""


_AT_ONCE = 64
"""Observations that a histogram sorts into its buckets at a time."""


class Family(msgspec.Struct, array_like=True):
    """A metric as it is at a moment."""

    name: str
    """Of a counter without its `_total`."""
    kind: str
    """counter, gauge or histogram."""
    text: str
    labels: Labels
    cells: list[tuple[Labels, list[float]]]
    """By label values: one number; of a histogram how many fell into each bucket, the last without an upper bound, and
    then their sum."""
    bounds: tuple[float, ...] = ()
    merge: Merge = "sum"


class Counter:
    """Cells by label values: `counter.cells[labels] += 1`."""

    def __init__(self, name: str, text: str, labels: Values | None = None) -> None:
        """Where the values of all labels are known, each cell is shown as 0 before it is counted."""
        self.name, self.text, self.labels = name, text, labels or {}
        self.cells: defaultdict[Labels, int] = defaultdict(int)
        for cell in itertools.product(*self.labels.values()):
            self.cells[cell] = 0

    def inc(self, *labels: str) -> None:
        self.cells[labels] += 1

    def family(self) -> Family:
        cells: list[tuple[Labels, list[float]]] = [(cell, [count]) for cell, count in self.cells.items()]
        return Family(self.name, "counter", self.text, tuple(self.labels), cells)


class Histogram:
    """A distribution; `bounds` in the unit that the name ends with."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Values | None = None) -> None:
        self.name, self.text, self.bounds, self.labels = name, text, bounds, labels or {}
        self._cells: dict[Labels, list[float]] = {}
        """By label values: how many fell into each bucket, the last without an upper bound, and then their sum."""
        if not self.labels:
            self._own = self._cell(())
            """The cell of one without labels."""
        self._fresh: list[float] = []
        """Observed by one without labels, and not in its cell yet."""
        self._rows: list[tuple[float, ...]] = []
        """Observed by `observe_each`, and not in their cells yet."""

    def _cell(self, labels: Labels) -> list[float]:
        cell = self._cells[labels] = [*[0] * (len(self.bounds) + 1), 0.0]
        return cell

    def observe(self, value: float) -> None:
        """Of one without labels."""
        fresh = self._fresh
        fresh.append(value)
        if len(fresh) >= _AT_ONCE:
            self._sort_in()

    def _sort_in(self) -> None:
        """What was observed goes into its buckets: for many at once that costs a small part of finding each one's."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self._sort(fresh, self._own)
        if self._rows:
            rows, self._rows = self._rows, []
            (names,) = self.labels.values()
            for name, column in zip(names, zip(*rows, strict=True), strict=True):
                self._sort(list(column), self._cells.get((name,)) or self._cell((name,)))

    def _sort(self, fresh: list[float], cell: list[float]) -> None:
        fresh.sort()
        before = 0
        for at, bound in enumerate(self.bounds):
            upto = bisect_right(fresh, bound, before)
            cell[at] += upto - before
            before = upto
        cell[-2] += len(fresh) - before
        cell[-1] += sum(fresh)

    def observe_of(self, labels: Labels, value: float) -> None:
        cell = self._cells.get(labels) or self._cell(labels)
        cell[bisect_left(self.bounds, value)] += 1
        cell[-1] += value

    def observe_each(self, values: tuple[float, ...]) -> None:
        """Of one with a label whose values are known: something under each of them, in their order."""
        rows = self._rows
        rows.append(values)
        if len(rows) >= _AT_ONCE:
            self._sort_in()

    def counts(self, of: Callable[[Labels], bool] = lambda labels: True) -> list[int]:
        """How many were observed in each bucket, of the cells whose labels are meant."""
        self._sort_in()
        cells = [cell[:-1] for labels, cell in self._cells.items() if of(labels)]
        if len(cells) == 1:
            return list(map(int, cells[0]))
        return [int(sum(each)) for each in zip(*cells, strict=True)] or [0] * (len(self.bounds) + 1)

    def forget(self) -> None:
        self._cells.clear()
        self._rows.clear()

    def adopt(self, labels: Labels, other: Histogram) -> None:
        """Show what `other`, which has the same bounds and no labels, has observed under `labels`."""
        other._sort_in()
        self._cells[labels] = other._own

    def family(self) -> Family:
        self._sort_in()
        cells = [(labels, list(cell)) for labels, cell in self._cells.items()]
        return Family(self.name, "histogram", self.text, tuple(self.labels), cells, tuple(map(float, self.bounds)))


class WorkerCells:
    """What is counted of one worker, in cells that it keeps itself: nothing is looked up by its name per turn."""

    __slots__ = ("cached_tokens", "changes", "gaps", "moved_from", "moved_to", "probes", "prompt_tokens", "ttft",
                 "turns", "usage_unread")  # fmt: skip

    def __init__(self) -> None:
        self.turns: defaultdict[tuple[TurnOutcome, int], int] = defaultdict(int)
        """By outcome and the worker's status, 0 where it gave none."""
        self.ttft = Histogram("", "", _SECONDS)
        """Of completed turns, as are the following three."""
        self.gaps = Histogram("", "", _GAP_SECONDS)
        """The mean time between the pieces of a stream."""
        self.prompt_tokens = self.cached_tokens = 0
        """Sums of what answers tell of their usage."""
        self.usage_unread = 0
        """Completed turns since one was asked for its usage: the next that is counts for them too."""
        self.probes: defaultdict[str, int] = defaultdict(int)
        self.changes: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.moved_from = self.moved_to = 0

    @property
    def total(self) -> int:
        """Turns that it was given."""
        return sum(self.turns.values())

    def read_usage(self, said: tuple[int, int] | None) -> None:
        """What an answer tells of its usage: tokens of its prompt, and of those the cached ones; None: nothing."""
        turns, self.usage_unread = self.usage_unread, 0
        if said is not None:
            self.prompt_tokens += turns * said[0]
            self.cached_tokens += turns * said[1]


class Metrics:
    """The router's metrics. Long because each is written out once, with its help and its labels."""

    def __init__(self) -> None:
        self.turns_cut = 0
        """That ran when the time to drain was over."""
        self.usages_left = sys.maxsize
        """Answers that may still be asked for their usage, which costs as much as a tenth of a turn's other work: a
        router that ticks allows `USAGES_A_TICK`, and at a higher rate those that are asked speak for all."""
        self.turns = Counter("coatcheck_turns", "Turns by model and outcome.", {"model": (), "outcome": TURN_OUTCOMES})
        self.affinity = Counter("coatcheck_affinity", "How turns came to their target.", {"outcome": AFFINITY_OUTCOMES})
        self.ttft = Histogram(
            "coatcheck_ttft_seconds",
            "From a request's arrival to the first body byte from the worker, of completed turns.",
            _SECONDS,
        )
        self.turn_seconds = Histogram("coatcheck_turn_seconds", "From a request's arrival to its end.", _SECONDS)
        self.overhead = Histogram(
            "coatcheck_overhead_seconds",
            "From a request's last byte to its being sent to a worker, of every 16th turn that waited for no slot.",
            _OVERHEAD_SECONDS,
        )
        self.retries = Counter(
            "coatcheck_attempts_retried", "Attempts made again, by reason.", {"reason": RETRY_REASONS}
        )
        self.connects = Counter(
            "coatcheck_worker_connects", "Connections to workers.", {"worker": (), "outcome": CONNECT_OUTCOMES}
        )
        self.store_seconds = Histogram(
            "coatcheck_store_seconds",
            "Claim store calls.",
            _STORE_SECONDS,
            {"op": STORE_CALLS, "outcome": STORE_OUTCOMES},
        )
        self.unproven = Counter(
            "coatcheck_unproven_claims_used", "Cached claims used although the store could not confirm them."
        )
        self.store_calls_alone = Counter(
            "coatcheck_store_calls_alone",
            "Claim store calls that failed or were late although the store was well, and were tried again.",
            {"op": STORE_CALLS},
        )
        self.claims_unreadable = Counter(
            "coatcheck_claims_unreadable", "Times that what stands at a session's key was no claim that can be read."
        )
        self.claims_given_way = Counter(
            "coatcheck_claims_given_way",
            "Claims that were replaced because turns had been served elsewhere, by what they were.",
            {"reason": WAYS_GIVEN},
        )
        self.closes = Counter(
            "coatcheck_closes", "Claims closed by final turns or by hand, by outcome.", {"outcome": CLOSE_OUTCOMES}
        )
        self.hints_overridden = Counter(
            "coatcheck_hints_overridden", "Placement hints that an existing claim overrode."
        )
        self.hints_ignored = Counter(
            "coatcheck_hints_ignored",
            "Turns with hints that have no effect here, by kind.",
            {"kind": ("prefill", "malformed")},
        )
        self.unnamed = Counter(
            "coatcheck_turns_without_session", "Turns that name no session, by path.", {"path": SESSION_PATHS}
        )
        self.headers_unread = Counter(
            "coatcheck_session_headers_unread",
            "Turns without a session although a header was there that names one for others, by header.",
            {"header": ()},
        )
        self.bodies_unread = Counter(
            "coatcheck_session_bodies_unread",
            "Turns without a session whose body might name one and was not read, by reason.",
            {"reason": BODIES_UNREAD},
        )
        self.ids_ignored = Counter(
            "coatcheck_session_ids_ignored", "Session ids that are none, by reason.", {"reason": NO_IDS}
        )
        self.final_unclear = Counter(
            "coatcheck_final_headers_unclear", "Final headers that say neither yes nor no; they count as no."
        )
        self.parents = Counter(
            "coatcheck_parent_placements",
            "First turns of child sessions, by whether they followed.",
            {"outcome": PARENT_OUTCOMES},
        )
        self.peer_calls = Counter(
            "coatcheck_peer_calls",
            "Questions and news to other replicas, by what, and how that went.",
            {"call": PEER_CALLS, "outcome": PEER_OUTCOMES},
        )
        self.peer_found = Counter(
            "coatcheck_peer_found",
            "Sessions that another replica found while the store was away here: known there, or bound by it.",
            {"by": ("where", "bind")},
        )
        self.kept = Counter(
            "coatcheck_kept_ids",
            "Ids of what workers keep: noted from answers, and followed by requests.",
            {"outcome": KEPT_OUTCOMES},
        )
        self.foreseen_tokens = Counter(
            "coatcheck_foreseen_tokens",
            "Tokens of prompts that were taken to be cached where their turns went, of those whose answers tell.",
        )
        self.found_tokens = Counter("coatcheck_found_tokens", "Tokens of the same prompts that were cached there.")
        self.foresights_wrong = Counter(
            "coatcheck_foresights_wrong", "Answers by which a target has lost what it was taken to have cached."
        )
        self.foresights_exact = Counter(
            "coatcheck_foresights_exact",
            "Answers of workers whose KV events are followed, by whether as many tokens were cached as was foreseen.",
            {"outcome": ("yes", "more", "less")},
        )
        self.kv_batches = Counter("coatcheck_kv_batches", "Batches of KV events that were read.")
        self.kv_gaps = Counter(
            "coatcheck_kv_gaps",
            "Times that KV events were missed, or may have been, by what told so.",
            {"reason": KV_GAPS},
        )
        self.kv_replays = Counter(
            "coatcheck_kv_replays", "Replays of KV events that were asked for.", {"outcome": ("ok", "failed")}
        )
        self.tokenized = Counter(
            "coatcheck_tokenized",
            "Prompts that were to be made tokens for the policy kv, by what came of it.",
            {"outcome": TOKENIZED},
        )
        self.phase_turns = Counter(
            "coatcheck_phase_turns",
            "Turns in a fleet with phases, by how they went: in two phases, or why whole to one worker.",
            {"how": PHASE_TURNS},
        )
        self.phase_seconds = Histogram(
            "coatcheck_phase_seconds",
            "What the time to the first token of turns in two phases is made of, of completed ones.",
            _SECONDS,
            {"part": PHASE_PARTS},
        )
        self.handover_failures = Counter(
            "coatcheck_handover_failures",
            "Hand-overs that a prefill worker did not give, or a decode worker could not use, by kind.",
            {"kind": HANDOVER_FAILURES},
        )
        self.handovers_released = Counter(
            "coatcheck_handovers_released",
            "Hand-overs of turns that did not go on, sent to a decode worker so that what was staged is freed.",
            {"outcome": RELEASE_OUTCOMES},
        )
        self.queue_seconds = Histogram(
            "coatcheck_queue_seconds", "How long turns waited for a slot, of those that waited and got one.", _SECONDS
        )
        self.refused = Counter(
            "coatcheck_turns_refused",
            "Turns that got no slot, by whose limit and why they did not wait on.",
            {"limit": REFUSED_FOR, "why": REFUSED_WHEN},
        )
        self.loop_lag = Histogram(
            "coatcheck_loop_lag_seconds", "How late the event loop is, ten times a second.", _LAG_SECONDS
        )
        # Of workers, who count by themselves.
        self.worker_turns = Counter(
            "coatcheck_worker_turns",
            "Turns that a worker was given, by outcome and the class of its status.",
            {"worker": (), "outcome": (), "status": STATUS_CLASSES},
        )
        self.worker_ttft = Histogram(
            "coatcheck_worker_ttft_seconds",
            "From a request's arrival to the first body byte from the worker, of completed turns.",
            _SECONDS,
            {"worker": ()},
        )
        self.worker_gaps = Histogram(
            "coatcheck_worker_inter_token_seconds",
            "The mean time between the pieces of a streamed answer, of completed turns.",
            _GAP_SECONDS,
            {"worker": ()},
        )
        self.worker_prompt_tokens = Counter(
            "coatcheck_worker_prompt_tokens",
            "Tokens of prompts, of completed turns whose answers tell their usage.",
            {"worker": ()},
        )
        self.worker_cached_tokens = Counter(
            "coatcheck_worker_cached_tokens", "Of these, tokens that the worker's cache had.", {"worker": ()}
        )
        self.worker_probes = Counter(
            "coatcheck_worker_probes", "Probes of workers, by result.", {"worker": (), "result": PROBE_RESULTS}
        )
        self.worker_changes = Counter(
            "coatcheck_worker_state_changes",
            "Changes of a worker's state.",
            {"worker": (), "before": WORKER_STATES, "after": WORKER_STATES},
        )
        self.worker_moves = Counter(
            "coatcheck_worker_moves",
            "Turns that left a lost worker with their session, and that came to another one so.",
            {"worker": (), "direction": ("from", "to")},
        )
        self.resets = Counter("coatcheck_watch_resets", "Times the store's watch began anew or lost continuity.")
        self._gauges: list[tuple[str, str, Labels, Callable[[], Iterable[tuple[Labels, float]]], Merge]] = []
        self.workers: Callable[[], Iterable[tuple[str, WorkerCells]]] = tuple
        """Those that there are now, by name: read when scraped."""
        self._models: set[str] = set()
        self._foresee_turns("other")
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)

    def gauge(self, name: str, text: str, read: Callable[[], float], merge: Merge = "sum") -> None:
        """A gauge that is read when scraped. `merge`: what one of several processes is."""
        self._gauges.append((name, text, (), lambda: [((), read())], merge))

    def gauges(
        self,
        name: str,
        text: str,
        label: str,
        read: Callable[[], Iterable[tuple[str, float]]],
        merge: Merge = "sum",
    ) -> None:
        """A gauge for each value of a label, read when scraped."""
        self._gauges.append((name, text, (label,), lambda: [((value,), number) for value, number in read()], merge))

    def table(
        self,
        name: str,
        text: str,
        labels: Labels,
        read: Callable[[], Iterable[tuple[Labels, float]]],
        merge: Merge = "sum",
    ) -> None:
        """A gauge for each of several labels' values, read when scraped."""
        self._gauges.append((name, text, labels, read, merge))

    def ended(
        self,
        model: str | None,
        outcome: TurnOutcome,
        seconds: float,
        cells: WorkerCells | None = None,
        status: int = 0,
        ttft: float | None = None,
    ) -> None:
        """Count one turn, and for the worker that it was given (its `cells`, and its `status`). `ttft`: None where the
        turn was not completed, or had nothing in its body."""
        if model in self._models:
            self.turns.cells[model, outcome] += 1
        else:
            self.turn(model or "", outcome)
        self.turn_seconds.observe(seconds)
        if cells is not None:
            cells.turns[outcome, status] += 1
            if ttft is not None:
                self.ttft.observe(ttft)
                cells.ttft.observe(ttft)

    def turn(self, model: str, outcome: TurnOutcome) -> None:
        """Count one turn. Models are the client's words: only so many that worked get a series of their own."""
        if model not in self._models:
            if outcome == "completed" and len(self._models) < _MAX_MODELS and len(model) <= _MAX_MODEL_NAME:
                self._models.add(model)
                self._foresee_turns(model)
            else:
                model = "other"
        self.turns.cells[model, outcome] += 1

    def _foresee_turns(self, model: str) -> None:
        """Show each end that a turn for it can have, so that the first one is an increase like any other."""
        for outcome in TURN_OUTCOMES:
            self.turns.cells[model, outcome] = 0

    def turn_without_session(self, path: bytes) -> None:
        """Count one turn. Only paths that many clients ask for get a series of their own."""
        name = path.decode("latin-1")
        self.unnamed.cells[name if (name,) in self.unnamed.cells else "other",] += 1

    def forget_worker(self, name: str) -> None:
        """Nothing is told any more of a worker that is gone: names come and go with pods, and never end."""
        for metric in vars(self).values():
            if isinstance(metric, Counter) and "worker" in metric.labels:
                at = list(metric.labels).index("worker")
                for cell in [cell for cell in metric.cells if cell[at] == name]:
                    del metric.cells[cell]

    def families(self) -> list[Family]:
        """All of them, as they are now."""
        self._read_workers()
        found = [metric.family() for metric in vars(self).values() if isinstance(metric, Counter | Histogram)]
        for name, text, labels, read, merge in self._gauges:
            values = [(cell, [float(value)]) for cell, value in read()]
            found.append(Family(name, "gauge", text, labels, values, merge=merge))
        for each in self._process.collect():
            cells = [(tuple(sample.labels.values()), [sample.value]) for sample in each.samples]
            labels = tuple(each.samples[0].labels) if each.samples else ()
            merge = _OF_ALL.get(each.name, "sum")
            found.append(Family(each.name, each.type, each.documentation, labels, cells, merge=merge))
        return found

    def _read_workers(self) -> None:
        counted = (self.worker_turns, self.worker_probes, self.worker_changes, self.worker_moves)
        for metric in (*counted, self.worker_prompt_tokens, self.worker_cached_tokens):
            metric.cells.clear()
        self.worker_ttft.forget()
        self.worker_gaps.forget()
        names: set[str] = set()
        for name, cells in self.workers():
            for outcome in CONNECT_OUTCOMES:
                self.connects.cells[name, outcome] += 0
            for outcome, kind in _FORESEEN:
                self.worker_turns.cells[name, outcome, kind] = 0
            for (outcome, status), count in cells.turns.items():
                self.worker_turns.cells[name, outcome, f"{status // 100}xx" if status else "none"] += count
            self.worker_ttft.adopt((name,), cells.ttft)
            self.worker_gaps.adopt((name,), cells.gaps)
            self.worker_prompt_tokens.cells[name,] = cells.prompt_tokens
            self.worker_cached_tokens.cells[name,] = cells.cached_tokens
            for result in PROBE_RESULTS:
                self.worker_probes.cells[name, result] = cells.probes.get(result, 0)
            for before, after in itertools.permutations(WORKER_STATES, 2):
                self.worker_changes.cells[name, before, after] = cells.changes.get((before, after), 0)
            self.worker_moves.cells[name, "from"] = cells.moved_from
            self.worker_moves.cells[name, "to"] = cells.moved_to
            for went in CONNECT_OUTCOMES:
                self.connects.cells[name, went] += 0
            names.add(name)
        if names:  # a turn that runs on at a worker that is gone may have connected to it once more
            for cell in [cell for cell in self.connects.cells if cell[0] not in names]:
                del self.connects.cells[cell]
