"""What is measured of a router by looking when somebody asks: each gauge and what it reads."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator

from app.fleet.capacity import Capacity
from app.fleet.catalog import Catalog
from app.fleet.discovery.discovery import Discovery
from app.fleet.placement.kv import Caches
from app.fleet.placement.prefix import Prefixes
from app.fleet.workers import Fleet
from app.metrics import SHOWN_STATES, Metrics
from app.sessions.affinity import Affinity
from app.turn.turn import Turns


def register_gauges(
    metrics: Metrics,
    *,
    fleet: Fleet,
    affinity: Affinity,
    turns: Turns,
    capacity: Capacity | None,
    catalog: Catalog,
    discovery: Discovery,
    foresight: Prefixes | Caches | None,
    version: str,
) -> None:
    """To be called once. `capacity`: None where no turns are limited; `foresight`: None where the policy does not ask
    for prompts."""

    def sessions() -> Iterator[tuple[str, float]]:
        counts = affinity.census()
        return ((worker.name, counts[worker.name]) for worker in fleet)

    build = (version, platform.python_version())
    metrics.table(
        "coatcheck_build_info", "1, of this version.", ("version", "python"), lambda: [(build, 1.0)], merge="max"
    )
    metrics.gauge("coatcheck_processes", "Processes of this router whose figures these are.", lambda: 1)
    metrics.gauge("coatcheck_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    metrics.gauge("coatcheck_turns_running", "Turns running now.", lambda: turns.count)
    metrics.gauge(
        "coatcheck_queued_turns",
        "Turns that wait for a slot.",
        lambda: capacity.waiting if capacity is not None else 0,
    )
    metrics.gauge(
        "coatcheck_placement_blocks",
        "Blocks of prompts of which it is known who has them cached; with policies that do not ask: 0.",
        lambda: 0 if foresight is None else len(foresight),
    )
    metrics.gauge(
        "coatcheck_kv_workers",
        "Targets whose KV events are followed, and believed at the moment.",
        lambda: foresight.believed if isinstance(foresight, Caches) else 0,
        merge="min",
    )
    metrics.gauge("coatcheck_claim_cache_entries", "Sessions known here, in use or idle.", lambda: affinity.size)
    metrics.gauge("coatcheck_session_turns_active", "Turns with a session.", lambda: affinity.active_turns)
    metrics.gauge("coatcheck_pending_closes", "Claims waiting to be closed.", lambda: affinity.pending_closes)
    metrics.gauge(
        "coatcheck_store_up", "1 while claims can be made.", lambda: affinity.state.value == "up", merge="min"
    )
    metrics.gauge("coatcheck_store_watching", "1 while the watch is alive.", lambda: affinity.watching, merge="min")
    metrics.table(
        "coatcheck_worker_state",
        "1 for the state that a worker is in.",
        ("worker", "state"),
        lambda: (((w.name, state), float(w.state == state)) for w in fleet for state in SHOWN_STATES),
        merge="max",
    )
    metrics.gauges(
        "coatcheck_worker_models",
        "Models that a worker lists; 0: none, or its list is not known.",
        "worker",
        lambda: ((w.name, len(catalog.models_of(w.name) or ())) for w in fleet),
        merge="max",
    )
    metrics.gauges(
        "coatcheck_worker_sessions",
        "Sessions that this replica knows, by their worker.",
        "worker",
        sessions,
    )
    metrics.gauges(
        "coatcheck_in_flight",
        "Attempts that hold a slot.",
        "worker",
        lambda: ((w.name, w.in_flight) for w in fleet),
    )
    metrics.gauges(
        "coatcheck_in_flight_rank",
        "Attempts that hold a slot, at each target that is a rank.",
        "target",
        lambda: ((f"{w.name}/{t.rank}", t.in_flight) for w in fleet for t in w.targets if t.rank is not None),
    )
    metrics.gauges(
        "coatcheck_worker_source_up",
        "1 while a source of workers answers.",
        "source",
        lambda: ((label, not trouble) for label, _, trouble in discovery.overview()),
        merge="min",
    )
    metrics.gauges(
        "coatcheck_worker_source_workers",
        "Workers that a source names.",
        "source",
        lambda: ((label, count) for label, count, _ in discovery.overview()),
        merge="max",
    )
    metrics.gauges(
        "coatcheck_worker_connections",
        "Open connections to workers, idle ones too.",
        "worker",
        lambda: ((w.name, w.pool.open) for w in fleet),
    )
