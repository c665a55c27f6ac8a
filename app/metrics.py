"""Every metric of the router, in a registry of its own (two routers fit in one process).

What is counted per turn is counted in plain cells of this module: one process, one event loop, so no locks, and an
increment costs a tenth of the library's. Gauges that mirror state are read when scraped. The library writes the text.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

AFFINITY_OUTCOMES = ("created", "cached", "stored", "rebound", "degraded", "bypassed", "none")
TurnOutcome = Literal[
    "completed", "client_error", "worker_error", "aborted", "broken", "rejected", "unplaced", "failed", "explained"
]
TURN_OUTCOMES: tuple[TurnOutcome, ...] = get_args(TurnOutcome)
BodyUnread = Literal["compressed", "large", "malformed"]
BODIES_UNREAD: tuple[BodyUnread, ...] = get_args(BodyUnread)
CLOSE_OUTCOMES = ("closed", "gone", "superseded", "expired")
CONNECT_OUTCOMES = ("ok", "failed")
KEPT_OUTCOMES = ("kept", "alone", "unread", "followed", "past_session", "unknown", "gone")
NoId = Literal["template", "nothing"]
NO_IDS: tuple[NoId, ...] = get_args(NoId)
PEER_CALLS = ("where", "bind", "close", "closed", "ended", "moved")
PEER_OUTCOMES = ("ok", "failed", "late")
PARENT_OUTCOMES = ("followed", "passed_over", "unknown")
RETRY_REASONS = ("worker_unreachable", "stale_connection", "worker_died", "worker_busy")
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
WAYS_GIVEN = ("late_write", "lost_worker", "rewound")

_MAX_MODELS = 100
_MAX_MODEL_NAME = 256
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STORE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

Labels = tuple[str, ...]
Values = Mapping[str, Labels]
"""A metric's labels, each with the values that it can have; none: whatever comes."""


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

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name, self.text, labels=tuple(self.labels))
        for cell, count in self.cells.items():
            family.add_metric(cell, count)
        return family


class Histogram:
    """A distribution; `bounds` in the unit that the name ends with."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Values | None = None) -> None:
        self.name, self.text, self.bounds, self.labels = name, text, bounds, labels or {}
        self._cells: dict[Labels, tuple[list[int], list[float]]] = {}
        if not self.labels:
            self._cell(())

    def _cell(self, labels: Labels) -> tuple[list[int], list[float]]:
        cell = self._cells[labels] = ([0] * (len(self.bounds) + 1), [0.0])
        return cell

    def observe(self, value: float, labels: Labels = ()) -> None:
        counts, total = self._cells.get(labels) or self._cell(labels)
        counts[bisect_left(self.bounds, value)] += 1
        total[0] += value

    def counts(self, of: Callable[[Labels], bool] = lambda labels: True) -> list[int]:
        """How many were observed in each bucket, of the cells whose labels are meant."""
        cells = [counts for labels, (counts, _) in self._cells.items() if of(labels)]
        return [sum(each) for each in zip(*cells, strict=True)] or [0] * (len(self.bounds) + 1)

    def forget(self) -> None:
        self._cells.clear()

    def adopt(self, labels: Labels, other: Histogram) -> None:
        """Show what `other`, which has the same bounds and no labels, has observed under `labels`."""
        self._cells[labels] = other._cells[()]

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=tuple(self.labels))
        for cell, (counts, total) in self._cells.items():
            buckets, seen = [], 0
            for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), counts, strict=True):
                seen += count
                buckets.append((bound, seen))
            family.add_metric(cell, buckets, total[0])
        return family


class WorkerCells:
    """What is counted of one worker, in cells that it keeps itself: nothing is looked up by its name per turn."""

    __slots__ = ("changes", "moved_from", "moved_to", "probes", "ttft", "turns")

    def __init__(self) -> None:
        self.turns: defaultdict[tuple[TurnOutcome, int], int] = defaultdict(int)
        """By outcome and the worker's status, 0 where it gave none."""
        self.ttft = Histogram("", "", _SECONDS)
        self.probes: defaultdict[str, int] = defaultdict(int)
        self.changes: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.moved_from = self.moved_to = 0

    @property
    def total(self) -> int:
        """Turns that it was given."""
        return sum(self.turns.values())


class Metrics(Collector):
    """The router's metrics; `render` is the text that Prometheus scrapes."""

    def __init__(self) -> None:
        self.turns = Counter("coatcheck_turns", "Turns by model and outcome.", {"model": (), "outcome": TURN_OUTCOMES})
        self.affinity = Counter("coatcheck_affinity", "How turns came to their target.", {"outcome": AFFINITY_OUTCOMES})
        self.ttft = Histogram(
            "coatcheck_ttft_seconds", "From a request's arrival to the first body byte from the worker.", _SECONDS
        )
        self.turn_seconds = Histogram("coatcheck_turn_seconds", "From a request's arrival to its end.", _SECONDS)
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
        self._gauges: list[tuple[str, str, Labels, Callable[[], Iterable[tuple[Labels, float]]]]] = []
        self.workers: Callable[[], Iterable[tuple[str, WorkerCells]]] = tuple
        """Those that there are now, by name: read when scraped."""
        self._models: set[str] = set()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(self)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when scraped."""
        self._gauges.append((name, text, (), lambda: [((), read())]))

    def gauges(self, name: str, text: str, label: str, read: Callable[[], Iterable[tuple[str, float]]]) -> None:
        """A gauge for each value of a label, read when scraped."""
        self._gauges.append((name, text, (label,), lambda: [((value,), number) for value, number in read()]))

    def table(self, name: str, text: str, labels: Labels, read: Callable[[], Iterable[tuple[Labels, float]]]) -> None:
        """A gauge for each of several labels' values, read when scraped."""
        self._gauges.append((name, text, labels, read))

    def turn(self, model: str | None, outcome: TurnOutcome) -> None:
        """Count one turn. Models are the client's words: only so many that worked get a series of their own."""
        name = model or ""
        if name not in self._models:
            if outcome == "completed" and len(self._models) < _MAX_MODELS and len(name) <= _MAX_MODEL_NAME:
                self._models.add(name)
            else:
                name = "other"
        self.turns.cells[name, outcome] += 1

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

    def collect(self) -> Iterable[Metric]:
        self._read_workers()
        for metric in vars(self).values():
            if isinstance(metric, Counter | Histogram):
                yield metric.family()
        for name, text, labels, read in self._gauges:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for values, number in read():
                gauge.add_metric(values, number)
            yield gauge

    def _read_workers(self) -> None:
        for metric in (self.worker_turns, self.worker_probes, self.worker_changes, self.worker_moves):
            metric.cells.clear()
        self.worker_ttft.forget()
        for name, cells in self.workers():
            for (outcome, status), count in cells.turns.items():
                self.worker_turns.cells[name, outcome, f"{status // 100}xx" if status else "none"] += count
            self.worker_ttft.adopt((name,), cells.ttft)
            for result, count in cells.probes.items():
                self.worker_probes.cells[name, result] = count
            for (before, after), count in cells.changes.items():
                self.worker_changes.cells[name, before, after] = count
            self.worker_moves.cells[name, "from"] = cells.moved_from
            self.worker_moves.cells[name, "to"] = cells.moved_to

    def describe(self) -> Iterable[Metric]:
        return []  # the registry need not ask `collect` for names when this is registered

    def render(self) -> bytes:
        return generate_latest(self.registry)
