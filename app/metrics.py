"""Every metric of the router, in a registry of its own (two routers fit in one process).

Children are looked up once; per-turn work is an increment. Gauges that mirror state are read when scraped.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

AFFINITY_OUTCOMES = ("created", "cached", "stored", "rebound", "degraded", "none")
TURN_OUTCOMES = ("completed", "client_error", "worker_error", "aborted", "broken", "rejected", "unplaced", "failed")

_MAX_MODELS = 100
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STORE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The router's metrics; `render` is the text that Prometheus scrapes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._turns = Counter("coatcheck_turns", "Turns by model and outcome.", ["model", "outcome"], registry=registry)
        self._turn_children: dict[tuple[str, str], Callable[[], None]] = {}
        self._models: set[str] = set()
        affinity = Counter("coatcheck_affinity", "How turns came to their target.", ["outcome"], registry=registry)
        self.affinity: dict[str, Callable[[], None]] = {o: affinity.labels(o).inc for o in AFFINITY_OUTCOMES}
        self.ttft = Histogram(
            "coatcheck_ttft_seconds",
            "From the request's arrival to the first body byte from the worker.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.turn_seconds = Histogram(
            "coatcheck_turn_seconds", "From the request's arrival to its end.", buckets=_SECONDS, registry=registry
        )
        self.retries = Counter(
            "coatcheck_attempts_retried", "Attempts repeated, by reason.", ["reason"], registry=registry
        )
        self.connects = Counter(
            "coatcheck_worker_connects", "New connections to workers.", ["worker", "outcome"], registry=registry
        )
        self.store_seconds = Histogram(
            "coatcheck_store_seconds",
            "Claim store calls.",
            ["op", "outcome"],
            buckets=_STORE_SECONDS,
            registry=registry,
        )
        self.unproven = Counter(
            "coatcheck_unproven_claims_used",
            "Cached claims used although the store could not confirm them.",
            registry=registry,
        )
        self.closes = Counter(
            "coatcheck_closes", "Claims closed by final turns, by outcome.", ["outcome"], registry=registry
        )
        self.hints_overridden = Counter(
            "coatcheck_hints_overridden", "Placement hints that an existing claim overrode.", registry=registry
        )
        self.resets = Counter(
            "coatcheck_watch_resets", "Times the watch of the store lost continuity.", registry=registry
        )

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge without labels, read when scraped."""
        Gauge(name, help_text, registry=self.registry).set_function(read)

    def labelled_gauge(self, name: str, help_text: str, label: str) -> Gauge:
        return Gauge(name, help_text, [label], registry=self.registry)

    def turn(self, model: str | None, outcome: str) -> None:
        """Count one turn. Models are the client's words: only so many that worked get a series of their own."""
        name = model or ""
        if name not in self._models:
            if outcome == "completed" and len(self._models) < _MAX_MODELS:
                self._models.add(name)
            else:
                name = "other"
        count = self._turn_children.get((name, outcome))
        if count is None:
            count = self._turn_children[name, outcome] = self._turns.labels(name, outcome).inc
        count()

    def render(self) -> bytes:
        return generate_latest(self.registry)
