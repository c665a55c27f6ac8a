"""The only wiring: settings in, application out. Two routers fit in one process."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI

from app.admin import add_admin
from app.config import Settings, Workers
from app.control import add_control_plane
from app.fleet.policies import POLICIES
from app.fleet.workers import Fleet, make_worker, worker_specs
from app.http.headers import Forwarding
from app.metrics import Metrics
from app.sessions.affinity import Affinity
from app.sessions.identity import Identifier, KeyHasher
from app.sessions.tenants import Admins, Tenants, read_keys
from app.turn.request import Reading
from app.turn.routing import Routing, Rules
from app.turn.turn import Limits, Shared, Turns
from backends import open_store
from backends.base import ClaimStore

_LAG_EVERY = 0.1
"""Seconds between looks at the loop's lag."""


class Router(FastAPI):
    """The application. Its FastAPI half answers the control plane; requests for proxied paths are given to `turns` by
    the client's protocol (`app/http/client.py`) and never come here."""

    turns: Turns
    affinity: Affinity
    fleet: Fleet
    metrics: Metrics
    draining = False
    """Set before the port closes, so that `/ready` fails while turns are still taken."""

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        for operations in described["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # the framework's own; ours is 400
        return described


def is_proxied(path: str) -> bool:
    """Everything below /v1/ but the model list, which is merged from all workers."""
    return path.startswith("/v1/") and not (path == "/v1/models" or path.startswith("/v1/models/"))


def create_app(settings: Settings, *, store: ClaimStore | None = None) -> Router:
    """The router for `settings`. `store` overrides the one that `settings.store` names; the caller closes it."""
    tls = _worker_tls(settings.workers)
    fleet = Fleet(
        make_worker(
            spec.url,
            name=spec.name,
            ranks=spec.ranks,
            tls=tls,
            connect_limit=settings.limits.connect_timeout,
            idle_limit=settings.workers.worker_keepalive,
        )
        for spec in worker_specs(settings.workers.worker)
    )
    metrics = Metrics()
    policy = POLICIES[settings.workers.policy]
    tenants = read_keys(settings.access.api_keys) if settings.access.api_keys is not None else Tenants({})
    admins = Admins(settings.access.admin_token.get_secret_value())
    hasher = KeyHasher(settings.store.session_secret.get_secret_value().encode())
    reading = Reading(
        identifier=Identifier(settings.sessions.session_from),
        tenants=tenants,
        forwarding=Forwarding(settings.listen.trusted_proxies),
        worker_key=settings.workers.key.encode(),
        rank_header=settings.workers.rank_header.lower().encode(),
        has_ranks=any(target.rank is not None for worker in fleet for target in worker.targets),
        body_limit=settings.limits.max_body_bytes,
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert isinstance(app, Router)
        async with contextlib.AsyncExitStack() as stack:
            claims = store
            if claims is None:
                claims = await open_claims(settings)
                stack.push_async_callback(claims.aclose)
            app.affinity = Affinity(
                claims,
                fleet,
                policy,
                metrics,
                replica=settings.store.replica,
                ttl=settings.store.session_ttl,
                kept_ttl=settings.store.kept_ttl,
                max_stale=settings.store.max_stale,
                capacity=settings.store.claim_cache,
                refuse_on_outage=settings.store.on_store_outage == "refuse",
                close_limit=settings.store.store_deadline,
                parent_slack=settings.sessions.parent_slack,
                log_share=settings.sessions.log_bindings,
            )
            app.turns = Turns(
                Shared(
                    fleet=fleet,
                    reading=reading,
                    routing=Routing(
                        fleet=fleet,
                        policy=policy,
                        affinity=app.affinity,
                        hasher=hasher,
                        metrics=metrics,
                        admins=admins,
                        rules=Rules(
                            soft_overload=settings.sessions.overload if settings.sessions.affinity == "soft" else 0,
                            reject_conflicts=settings.sessions.hint_conflict == "reject",
                        ),
                    ),
                    metrics=metrics,
                    limits=Limits(
                        first_byte=settings.limits.first_byte_timeout,
                        idle=settings.limits.idle_timeout,
                        total=settings.limits.turn_timeout,
                    ),
                )
            )
            _register_gauges(app)
            app.affinity.start()
            lag = asyncio.create_task(_measure_lag(metrics))
            stack.callback(lag.cancel)
            stack.push_async_callback(app.affinity.aclose)
            stack.callback(fleet.close)
            yield

    app = Router(title="coatcheck", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.fleet, app.metrics = fleet, metrics
    add_control_plane(
        app,
        fleet=fleet,
        metrics=metrics,
        draining=lambda: app.draining,
        tls=tls,
        tenants=tenants,
        worker_key=settings.workers.key,
    )
    add_admin(
        app, fleet=fleet, affinity=lambda: app.affinity, hasher=hasher, admins=admins, replica=settings.store.replica
    )
    return app


async def _measure_lag(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_EVERY
        await asyncio.sleep(_LAG_EVERY)
        metrics.loop_lag.observe(max(0.0, loop.time() - due))


async def open_claims(settings: Settings) -> ClaimStore:
    """The store that the settings name. Raises StoreConfigurationError."""
    several = settings.listen.processes > 1
    return await open_store(settings.store.claims, across_processes=several, deadline=settings.store.store_deadline)


def _worker_tls(settings: Workers) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.worker_ca)
    if not settings.worker_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _register_gauges(app: Router) -> None:
    affinity, metrics, turns = app.affinity, app.metrics, app.turns
    metrics.gauge("coatcheck_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    metrics.gauge("coatcheck_turns_running", "Turns running now.", lambda: turns.count)
    metrics.gauge("coatcheck_claim_cache_entries", "Sessions known here, in use or idle.", lambda: affinity.size)
    metrics.gauge("coatcheck_session_turns_active", "Turns with a session.", lambda: affinity.active_turns)
    metrics.gauge("coatcheck_pending_closes", "Claims waiting to be closed.", lambda: affinity.pending_closes)
    metrics.gauge("coatcheck_store_up", "1 while claims can be made.", lambda: affinity.state.value == "up")
    metrics.gauge("coatcheck_store_watching", "1 while the watch is alive.", lambda: affinity.watching)
    metrics.gauges(
        "coatcheck_in_flight",
        "Attempts that hold a slot.",
        "worker",
        lambda: ((w.name, w.in_flight) for w in app.fleet),
    )
    metrics.gauges(
        "coatcheck_in_flight_rank",
        "Attempts that hold a slot, at each target that is a rank.",
        "target",
        lambda: ((f"{w.name}/{t.rank}", t.in_flight) for w in app.fleet for t in w.targets if t.rank is not None),
    )
    metrics.gauges(
        "coatcheck_worker_connections",
        "Open connections to workers, idle ones too.",
        "worker",
        lambda: ((w.name, w.pool.open) for w in app.fleet),
    )
