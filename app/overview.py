"""The fleet as its operators look at it: one snapshot, every two seconds, for the page and for `coatcheck top`.

Made of what this replica knows and of what the others' records say, and only while somebody looks, but for the history.
Numbers of turns are the fleet's. Whoever has proven to be an admin sees all of it; others see what `/metrics` tells
anybody: names of workers, their states and numbers, and no address, reason, model, tenant, session or event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from app.events import EventLog
from app.fleet.catalog import Catalog
from app.fleet.discovery.discovery import Discovery
from app.fleet.discovery.operators import Operators
from app.fleet.workers import Fleet, Worker
from app.logs import event
from app.metrics import AFFINITY_OUTCOMES, Metrics
from app.replicas import Replicas
from app.sessions.affinity import Affinity
from app.traffic import SLOT, SLOTS, Figures, History, Part, Traffic, quantile

log = logging.getLogger("coatcheck.overview")

EVERY = 2.0
PAGE = 50
"""Workers that are shown at once."""
_RATE = 10.0
"""Seconds of which the rate of turns is said; all else is of a minute."""
_EVENTS = 100
_MODELS = 8
"""Of a worker; how many more there are is said."""
_BY_STATE = {
    state: order
    for order, state in enumerate(
        ("down", "suspect", "leaving", "starting", "draining", "cordoned", "up", "gone"),
    )
}

Order = Literal["state", "name", "turns", "load", "sessions", "errors", "ttft", "cached"]
Json = dict[str, Any]


class Look(msgspec.Struct, frozen=True):
    """What somebody wants to see. `whole`: they are an admin; `find`: a part of workers' names, models or states."""

    whole: bool
    order: Order = "state"
    page: int = 0
    find: str = ""


class Overview:
    """Makes the snapshots. `run` is a task of the router's own. Long because each part of the page is a method."""

    def __init__(
        self,
        *,
        replica: str,
        version: str,
        fleet: Fleet,
        metrics: Metrics,
        traffic: Traffic,
        catalog: Catalog,
        discovery: Discovery,
        operators: Operators,
        affinity: Callable[[], Affinity],
        replicas: Callable[[], Replicas],
        tenants: Callable[[], Mapping[str, tuple[int, int]]],
        draining: Callable[[], bool],
        events: EventLog,
        keyed: bool,
        tenant_limit: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`tenants`: the turns of each that run and that wait; `keyed`: the admin API has a token; `clock` must be the
        workers', `wall` says Unix seconds."""
        self._replica, self._version = replica, version
        self._fleet, self._metrics, self._traffic = fleet, metrics, traffic
        self._catalog, self._discovery, self._operators, self._events = catalog, discovery, operators, events
        self._affinity, self._replicas, self._tenants, self._draining = affinity, replicas, tenants, draining
        self._keyed, self._tenant_limit = keyed, tenant_limit
        self._clock, self._wall = clock, wall
        self._began = clock()
        self._history = History()
        self._beats = 0
        self._ticked = asyncio.Event()
        """Replaced at each tick, so that nobody misses one."""
        self._made: dict[Look, Json] = {}
        """Since the last tick."""
        self._figures: dict[str, Figures] | None = None
        self.looking = 0
        """How many look."""

    # -- time

    async def run(self) -> None:
        while True:
            try:
                self.tick()
            except Exception:  # a fault of ours: the operator sees it in the log, and the next tick may do
                log.exception("the overview could not be made", extra=event("fault"))
            await asyncio.sleep(EVERY)

    def tick(self) -> None:
        self._beats += 1
        self._traffic.tick()
        said = {record.incarnation: (record.beat, record.sums) for record in self._replicas().others()}
        self._history.hear(self._wall(), {**said, "": (self._beats, self._traffic.sums())})
        self._made.clear()
        self._figures = None
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    async def follow(self, look: Look) -> AsyncIterator[tuple[str, Json]]:
        """`snapshot` and all of it, and then again and again `change` and what is to be merged into it
        (`changed`)."""
        self.looking += 1
        try:
            ticked, before = self._ticked, self.snapshot(look)
            yield "snapshot", before
            while True:
                await ticked.wait()
                ticked, now = self._ticked, self.snapshot(look)
                yield "change", changed(before, now)
                before = now
        finally:
            self.looking -= 1

    # -- what is shown

    def snapshot(self, look: Look) -> Json:
        made = self._made.get(look)
        if made is None:
            made = self._made[look] = self._make(look)
        return made

    def _make(self, look: Look) -> Json:
        wall = self._wall()
        replicas = self._replicas().view()
        shown: Json = {
            "at": round(wall, 1),
            "every": EVERY,
            "replica": self._replica,
            "version": self._version,
            "access": {"whole": look.whole, "token": self._keyed},
            "fleet": self._shown_fleet(wall, replicas),
            "chart": {str(slot): _bar(self._metrics, part) for slot, part in self._history.slots.items()},
            "slot": {"seconds": SLOT, "count": SLOTS, "series": [*AFFINITY_OUTCOMES, "failed", "ttft_p50", "ttft_p95"]},
            "replicas": {each["incarnation"]: _shown_replica(each, wall, whole=look.whole) for each in replicas},
            "workers": self._shown_workers(look, wall),
        }
        if look.whole:
            shown["tenants"] = self._shown_tenants()
            shown["events"] = {str(each.number): msgspec.to_builtins(each) for each in self._events.last(_EVENTS)}
            shown["absent"] = {
                each.name: {"url": each.url, "mark": each.mark.state, "by": each.mark.by, "at": each.mark.at}
                for each in self._operators.absent()
            }
            shown["troubles"] = [*self._replicas().differing(), *self._sources()]
        return shown

    def _sources(self) -> Iterable[str]:
        for label, _, trouble in self._discovery.overview():
            if trouble:
                yield f"workers from {label}: {trouble}; the last view stands"
        marks = self._discovery.marks
        if marks is not None and marks.trouble:
            yield f"operators' marks: {marks.trouble}; the last ones stand"

    def _shown_fleet(self, wall: float, replicas: list[Json]) -> Json:
        age = max(self._clock() - self._began, EVERY)
        minute, lately = self._history.last(60.0, wall), self._history.last(_RATE, wall)
        how = minute.how
        prompt, cached = minute.tokens
        known = sum(how[name] for name in ("cached", "stored", "rebound", "bypassed", "degraded"))
        states = Counter(worker.state for worker in self._fleet)
        sessions = [each["sessions"] for each in replicas]
        return {
            "turns_per_second": round(lately.turns / min(_RATE, age), 1),
            "turns": minute.turns,
            "failed": minute.failed,
            "failed_percent": _percent(minute.failed, minute.turns),
            "ttft_p50_ms": _ms(quantile(self._metrics.ttft.bounds, minute.ttft, 0.5)),
            "ttft_p95_ms": _ms(quantile(self._metrics.ttft.bounds, minute.ttft, 0.95)),
            "kept_percent": _percent(how["cached"] + how["stored"], known),
            "cached_percent": _percent(cached, prompt),
            "running": sum(each["turns"] - each["waiting"] for each in replicas),
            "waiting": sum(each["waiting"] for each in replicas),
            # Each replica counts those that it knows: the truth lies between.
            "sessions_least": max(sessions),
            "sessions_most": sum(sessions),
            "workers": len(self._fleet),
            "available": sum(worker.available for worker in self._fleet),
            "states": dict(sorted(states.items(), key=lambda each: _BY_STATE.get(each[0], 9))),
            "replicas": len(replicas),
            "agree": not any(each["differs"] for each in replicas),
            "store": self._affinity().state.value,
            "store_ms": self._traffic.store_ms,
            "draining": self._draining(),
        }

    # -- workers

    def _shown_workers(self, look: Look, wall: float) -> Json:
        wanted = [worker for worker in self._fleet if self._is_found(worker, look)]
        if self._figures is None:
            elsewhere = self._replicas().figures_elsewhere()
            self._figures = {worker.name: self._traffic.figures(worker) for worker in self._fleet}
            for name in elsewhere.keys() & self._figures.keys():
                self._figures[name] = self._figures[name].plus(elsewhere[name])
        figures = self._figures
        wanted.sort(key=lambda worker: self._place(worker, figures[worker.name], look.order))
        last = max(0, (len(wanted) - 1) // PAGE)
        page = min(look.page, last)
        shown = wanted[page * PAGE : (page + 1) * PAGE]
        most = max((_sessions(worker) for worker in self._fleet), default=0)
        return {
            "page": page,
            "pages": last + 1,
            "found": len(wanted),
            "most_sessions": most,
            "order": [worker.name for worker in shown],
            "rows": {worker.name: self._row(worker, figures[worker.name], look, wall) for worker in shown},
        }

    def _is_found(self, worker: Worker, look: Look) -> bool:
        word = look.find.lower()
        if not word or word in worker.name.lower() or word == worker.state:
            return True
        models = self._catalog.models_of(worker.name) or ()
        return look.whole and (word in worker.url.lower() or any(word in model.lower() for model in models))

    def _place(self, worker: Worker, figures: Figures, order: Order) -> tuple[float, str]:
        match order:
            case "state":
                by: float = _BY_STATE.get(worker.state, 9)
            case "name":
                by = 0
            case "turns":
                by = -figures.turns
            case "load":
                by = -_in_flight(worker)
            case "sessions":
                by = -_sessions(worker)
            case "errors":
                by = -figures.errors
            case "ttft":
                by = -(quantile(self._metrics.ttft.bounds, figures.buckets(), 0.95) or 0.0)
            case "cached":
                by = -(figures.cached / figures.prompt if figures.prompt else -1.0)
        return by, worker.name

    def _row(self, worker: Worker, figures: Figures, look: Look, wall: float) -> Json:
        health, now = worker.health, self._clock()
        mark = self._discovery.mark_of(worker.name)
        decided = mark.at if mark is not None and worker.state == worker.mark else 0.0
        row: Json = {
            "state": worker.state,
            "since": round(max(decided, wall - (now - health.since))),
            "turns_per_minute": round(figures.turns, 1),
            "in_flight": _in_flight(worker),
            "queued": worker.queued,
            "limit": worker.limit,
            "ranks": len(worker.targets) if worker.targets[0].rank is not None else 0,
            "phase": worker.phase,
            "sessions": _sessions(worker),
            "sessions_here": sum(target.sessions for target in worker.targets),
            "errors_per_minute": figures.errors,
            "ttft_p95_ms": _ms(quantile(self._metrics.ttft.bounds, figures.buckets(), 0.95)),
            "cached_percent": _percent(figures.cached, figures.prompt),
            "moved_in": figures.moved_to,
            "moved_out": figures.moved_from,
        }
        if look.whole:
            models = self._catalog.models_of(worker.name) or ()
            row |= {
                "url": worker.url,
                "models": list(models[:_MODELS]),
                "more_models": max(0, len(models) - _MODELS),
                "why": health.why,
                "mark": worker.mark,
                "by": mark.by if mark is not None and mark.state != "none" else "",
                "deadline": round(mark.deadline) if mark is not None and mark.deadline else 0,
                "error": health.errors.last,
                "error_at": round(wall - (now - health.errors.last_at)) if health.errors.last_at else 0,
                "source": self._discovery.source_of(worker.name),
            }
        return row

    # -- tenants

    def _shown_tenants(self) -> Json:
        sums: dict[str, list[int]] = {}
        for said in (self._tenants(), *(record.tenants for record in self._replicas().others())):
            for name, (running, waiting) in said.items():
                total = sums.setdefault(name, [0, 0])
                total[0] += running
                total[1] += waiting
        return {
            name: {"running": running, "waiting": waiting, "limit": self._tenant_limit}
            for name, (running, waiting) in sorted(sums.items(), key=lambda each: -sum(each[1]))[:PAGE]
        }


def _sessions(worker: Worker) -> int:
    count = 0
    for target in worker.targets:
        count += target.sessions + target.sessions_elsewhere
    return count


def _in_flight(worker: Worker) -> int:
    count = 0.0
    for target in worker.targets:
        count += target.in_flight + target.turns_elsewhere
    return round(count)


def _bar(metrics: Metrics, part: Part) -> list[float | None]:
    median, tail = (quantile(metrics.ttft.bounds, part.ttft, share) for share in (0.5, 0.95))
    return [*part.how.values(), part.failed, _ms(median), _ms(tail)]


def _shown_replica(each: Json, wall: float, *, whole: bool) -> Json:
    row = {
        name: each[name]
        for name in ("replica", "this", "version", "store", "workers", "turns", "waiting", "sessions", "lag_ms")
    }
    row["store_ms"] = each["store_ms"]
    row["since"] = each["started"]
    heard = each["heard_seconds_ago"]
    row["silent_seconds"] = round(heard) if heard is not None and heard > 3 * EVERY else 0
    row["differs"] = [difference["setting"] for difference in each["differs"]]
    if whole:
        row["address"] = each["peer_address"]
        row["how"] = [difference["how"] for difference in each["differs"]]
    return row


def _percent(part: float, whole: float) -> float | None:
    return round(100 * part / whole, 1) if whole else None


def _ms(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return round(1000 * seconds, 1) if seconds < 0.1 else round(1000 * seconds)


def changed(before: Json, now: Json) -> Json:
    """What is to be merged into `before` to make it `now`, as RFC 7396 has it: objects go deeper, null takes away. An
    object's own None is so the same as that it is not there."""
    changes: Json = {}
    for name, value in now.items():
        was = before.get(name)
        if isinstance(value, dict) and isinstance(was, dict):
            inner = changed(was, value)
            if inner:
                changes[name] = inner
        elif value != was:
            changes[name] = value
    for name in before.keys() - now.keys():
        changes[name] = None
    return changes


def merge(into: Json, changes: Json) -> None:
    """The other side of `changed`."""
    for name, value in changes.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = value
