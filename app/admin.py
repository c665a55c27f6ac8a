"""The admin API: look sessions and workers up, close sessions, decide about workers. For this machine, or whoever has
the admin token.

Looking up never creates or renews a claim. Lists name sessions by their hash only; whoever knows an id can ask for it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.routing import BaseRoute

from app.errors import TurnError, documented
from app.fleet.catalog import Catalog
from app.fleet.discovery.discovery import Discovery
from app.fleet.discovery.marks import OperatorMark, State
from app.fleet.discovery.operators import Operators
from app.fleet.specs import WorkerError, worker_spec
from app.fleet.workers import Fleet
from app.replicas import Replicas
from app.sessions.affinity import Affinity
from app.sessions.entries import View
from app.sessions.identity import KeyHasher, free_id
from app.sessions.tenants import Admins

log = logging.getLogger("coatcheck.admin")

_KEY_LENGTH = 40
_DIGITS_LEAST = 6
_RELEASED_AT_ONCE = 1000
_CLOSED_AT_ONCE = 16
"""Calls of the store."""

Session = Annotated[str, Query(description="The session's id; with `hashed` its hash, or the first digits of it.")]
Agent = Annotated[str, Query(description="A child agent's id within the session.")]
Tenant = Annotated[str, Query(description="The tenant; empty on a router without API keys.")]
_OF_A_SESSION = ("invalid_request", "invalid_session_id", "store_unavailable")
_OF_A_MARK = ("invalid_request", "store_unavailable")
_STATES: dict[str, State] = {"cordon": "cordoned", "uncordon": "none", "drain": "draining", "remove": "removed"}
_LONGEST = 30 * 86_400.0
_BY_LENGTH = 100
By = Annotated[str, Query(description="Who says so, for people.")]
Hashed = Annotated[bool, Query(description="`session` is the hash that lists show.")]


@dataclass(frozen=True)
class Administration:
    """What the admin API tells of and acts on. `affinity` and `replicas` are asked for when a request comes: they exist
    from the start-up on."""

    fleet: Fleet
    discovery: Discovery
    catalog: Catalog
    operators: Operators
    affinity: Callable[[], Affinity]
    hasher: KeyHasher
    admins: Admins
    replica: str
    replicas: Callable[[], Replicas]
    ttl: float

    def key_of(self, session: str, agent: str, tenant: str, hashed: bool) -> str:
        if hashed:
            if not _DIGITS_LEAST <= len(session) <= _KEY_LENGTH or set(session) - set("0123456789abcdef"):
                why = f"a session's hash is {_KEY_LENGTH} hex digits, or the first {_DIGITS_LEAST} of them or more"
                raise TurnError("invalid_session_id", why, param="session")
            return session if len(session) == _KEY_LENGTH else self._the_one(session)
        parts = [free_id(part) for part in (session, agent) if part.strip()]
        if not parts:
            raise TurnError("invalid_session_id", "a session id is not empty", param="session")
        return self.hasher.key(tenant.encode(), *parts)

    def _the_one(self, digits: str) -> str:
        """Of the sessions that this replica holds. The store cannot be searched for it."""
        found = [view.key for view in self.affinity().page(digits, 2) if view.key.startswith(digits)]
        if len(found) == 1:
            return found[0]
        why = "more than one session has" if found else "no session that this replica holds has"
        remedy = "give more digits" if found else f"ask another replica, or give all {_KEY_LENGTH} digits"
        raise TurnError("not_found", f"{why} a hash that begins with {digits}; {remedy}", param="session")


def add_admin(app: FastAPI, administration: Administration) -> None:
    """Register `/admin/...` on `app`."""
    app.state.administration = administration
    app.routes.extend(_routes())  # `include_router` makes them once more, in the loop


def _administration(request: Request) -> Administration:
    """Of the app that was asked."""
    it: Administration = request.app.state.administration
    return it


It = Annotated[Administration, Depends(_administration)]


@functools.cache
def _routes() -> list[BaseRoute]:
    """Of every app in this process: making them takes as long as most of what else a start does."""

    def only_admins(request: Request, it: It) -> None:
        host = request.client.host if request.client is not None else None
        asks = it.admins.refusal if request.method in ("GET", "HEAD") else it.admins.refusal_to_act
        refusal = asks(host, request.headers.raw)
        if refusal is not None:
            raise TurnError("forbidden", refusal)

    routes = APIRouter(prefix="/admin", dependencies=[Depends(only_admins)], responses=documented("forbidden"))

    @routes.get("/session", summary="One session, by its id", responses=documented("not_found", *_OF_A_SESSION))
    async def show(
        it: It, session: Session, agent: Agent = "", tenant: Tenant = "", hashed: Hashed = False
    ) -> dict[str, Any]:
        view = await it.affinity().look_up(it.key_of(session, agent, tenant, hashed))
        if view.source == "none":
            raise TurnError("not_found", "no such session is bound", param="session")
        return _spoken(view, it.replica, it.ttl)

    @routes.delete("/session", summary="Close one session, by its id", responses=documented(*_OF_A_SESSION))
    async def close(
        it: It, session: Session, agent: Agent = "", tenant: Tenant = "", hashed: Hashed = False
    ) -> dict[str, str]:
        key = it.key_of(session, agent, tenant, hashed)
        return {"session": key, "outcome": await it.affinity().end(key)}

    @routes.get("/sessions", summary="The sessions that this replica holds", responses=documented("invalid_request"))
    async def sessions(
        it: It,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: Annotated[str, Query(description="The last hash of the page before.")] = "",
        worker: Annotated[str, Query(description="Only those at this worker.")] = "",
    ) -> dict[str, Any]:
        """In the order of their hashes. Another replica may hold others; all of them stand in the claim store."""
        page = it.affinity().page(after, limit + 1, worker)
        counts = it.affinity().census()
        return {
            "replica": it.replica,
            "sessions": [_spoken(view, it.replica, it.ttl) for view in page[:limit]],
            "next": page[limit - 1].key if len(page) > limit else None,
            "total": counts.total(),
            "by_worker": {entry.name: counts[entry.name] for entry in it.fleet},
        }

    @routes.get("/workers", summary="The workers that this replica uses")
    async def workers(it: It) -> dict[str, Any]:
        counts, now = it.affinity().census(), time.monotonic()
        return {
            "replica": it.replica,
            "workers": [
                {
                    "name": worker.name,
                    "url": worker.url,
                    "phase": worker.phase,
                    "handover": worker.handover if worker.phase != "both" else None,
                    "state": worker.state,
                    "since_seconds": round(now - worker.health.since, 1),
                    "reason": worker.health.why,
                    "available": worker.available,
                    "in_flight": worker.in_flight,
                    "max_turns": worker.limit or None,
                    "queued": worker.queued,
                    "ranks": [
                        {"rank": target.rank, "in_flight": target.in_flight, "queued": target.queued}
                        for target in worker.targets
                        if target.rank is not None
                    ],
                    "models": it.catalog.models_of(worker.name),
                    "sessions": counts[worker.name],
                    "connections": worker.pool.open,
                    "burden": round(worker.burden, 1),
                    "turns": worker.cells.total,
                    "errors_per_minute": worker.health.errors.per_minute(),
                    "last_error": worker.health.errors.last or None,
                    "last_error_seconds": _ago(now, worker.health.errors.last_at),
                    "probe": None if worker.health.probe is None else worker.health.probe.value,
                    "mark": worker.mark,
                    "gone_in_seconds": it.discovery.seconds_left(worker),
                    "source": it.discovery.source_of(worker.name),
                    "incarnation": worker.spec.incarnation if worker.spec is not None else "",
                    "labels": worker.spec.labels if worker.spec is not None else {},
                    **_word(it.discovery.mark_of(worker.name)),
                }
                for worker in it.fleet
            ],
            "differences": it.replicas().differing(),
            "absent": [
                {"name": each.name, "url": each.url, "mark": each.mark.state, **_word(each.mark)}
                for each in it.operators.absent()
            ],
            "sources": [
                {"source": label, "workers": count, "trouble": trouble or None}
                for label, count, trouble in it.discovery.overview()
            ],
            "marks_trouble": (it.discovery.marks.trouble if it.discovery.marks is not None else "") or None,
        }

    @routes.get("/replicas", summary="The replicas of this store, and in what they differ from this one")
    async def all_replicas(it: It) -> dict[str, Any]:
        return {"replica": it.replica, "replicas": it.replicas().view()}

    @routes.post("/workers", summary="Name a worker, for all replicas", responses=documented(*_OF_A_MARK))
    async def add(
        it: It,
        request: Request,
        worker: Annotated[str, Query(description="URL[,name=NAME][,dp=RANKS][,phase=PHASE][,handover=ENGINE]")],
        by: By = "",
    ) -> dict[str, Any]:
        try:
            spec = worker_spec(worker)
        except WorkerError as error:
            raise TurnError("invalid_request", str(error), param="worker") from None
        return _marked(spec.name, await it.operators.add(spec, by=_who(by, request)))

    @routes.post(
        "/workers/{name:path}/release",
        summary="Close the sessions that this replica knows at a worker",
        responses=documented("unknown_worker", "not_found"),
    )
    async def release(it: It, name: str) -> dict[str, Any]:
        """At most 1000, by their hashes; `left` says how many there are still. Their next turns place them anew, so a
        worker that should not get them back is cordoned first. A session with turns here ends with the last of them."""
        if it.fleet.worker(name) is None:
            raise TurnError("unknown_worker", f"nobody here knows a worker called {name}", param="name")
        keys = [view.key for view in it.affinity().page("", _RELEASED_AT_ONCE, name)]
        waiting = iter(keys)

        async def end() -> list[str]:
            return [await it.affinity().end(key) for key in waiting]

        outcomes = Counter(itertools.chain(*await asyncio.gather(*(end() for _ in range(_CLOSED_AT_ONCE)))))
        log.warning("worker %s: %d of its sessions were released", name, outcomes.total())
        return {
            "worker": name,
            "released": outcomes.total() - outcomes["pending"],
            "pending": outcomes["pending"],
            "left": it.affinity().census()[name],
        }

    @routes.post(
        "/workers/{name:path}/{word}",
        summary="An operator's word on a worker, for all replicas: cordon, uncordon, drain, remove",
        responses=documented("unknown_worker", "not_found", *_OF_A_MARK),
    )
    async def mark(
        it: It,
        request: Request,
        name: str,
        word: Literal["cordon", "uncordon", "drain", "remove"],
        deadline: Annotated[float, Query(ge=0, le=_LONGEST, description="Of drain: seconds; 0: sessions stay.")] = 0.0,
        by: By = "",
    ) -> dict[str, Any]:
        said = await it.operators.mark(name, _STATES[word], by=_who(by, request), deadline=deadline)
        return _marked(name, said)

    return routes.routes


def _who(by: str, request: Request) -> str:
    """Whoever gives an order, as they call themselves."""
    shown = "".join(c for c in by if c.isprintable())[:_BY_LENGTH].strip()
    return shown or (request.client.host if request.client is not None else "") or "an admin"


def _marked(name: str, mark: OperatorMark) -> dict[str, Any]:
    return {"worker": name, "mark": mark.state, **_word(mark)}


def _word(mark: OperatorMark | None) -> dict[str, Any]:
    """Who said so, and when."""
    if mark is None:
        return {"by": None, "at": None, "deadline": None}
    return {"by": mark.by, "at": mark.at, "deadline": mark.deadline or None}


def _ago(now: float, at: float) -> float | None:
    return round(now - at, 1) if at else None


def _stands(expires_at: float, now: float, ttl: float) -> float | None:
    """Seconds that the claim stands at least, should nobody use it. Stores keep some longer than is promised."""
    return round(max(0.0, min(expires_at - now, ttl)), 1) if expires_at else None


def _spoken(view: View, replica: str, ttl: float) -> dict[str, Any]:
    claim, target = view.claim, view.target
    now = time.monotonic()
    created_at = claim.value.created_at if claim is not None else 0
    return {
        "session": view.key,
        "worker": claim.value.worker if claim is not None else target.worker.name if target is not None else None,
        "rank": claim.value.rank if claim is not None else target.rank if target is not None else None,
        "known_worker": target is not None,
        "revision": claim.revision if claim is not None else None,
        "generation": claim.value.generation if claim is not None else None,
        "created_by": claim.value.replica if claim is not None else None,
        "age_seconds": max(0, int(time.time()) - created_at) if created_at else None,
        "expires_in_seconds": _stands(0.0 if claim is None else claim.expires_at, now, ttl),
        "active_here": view.active,
        "source": view.source,
        "asked": replica,
    }
