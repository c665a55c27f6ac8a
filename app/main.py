"""The only wiring: settings in, application out. Two routers fit in one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI

from app.admin import add_admin
from app.config import Settings, WorkerSpec
from app.control import add_control_plane
from app.fleet.policies import POLICIES
from app.fleet.workers import Fleet, make_worker
from app.http.headers import Forwarding
from app.metrics import Metrics
from app.sessions.affinity import Affinity
from app.sessions.identity import Identifier, KeyHasher
from app.sessions.tenants import Admins, Tenants, read_keys
from app.turn.turn import Limits, Proxy, Rules
from backends import ClaimStore, Guarantee, open_store

SETTINGS_VARIABLE = "COATCHECK_EFFECTIVE_SETTINGS"
"""How the processes of one `serve --processes N` get the settings that were read and checked once."""


_LAG_EVERY = 0.1
"""Seconds between looks at the loop's lag."""


class Router(FastAPI):
    """The application. Its FastAPI half answers the control plane; requests for proxied paths are given to `proxy` by
    the client's protocol (`app/http/client.py`) and never come here."""

    proxy: Proxy
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
    """The router for `settings`. `store` overrides the one that `settings.claims` names; the caller closes it."""
    tls = _worker_tls(settings)
    fleet = Fleet(
        make_worker(
            spec.url,
            name=spec.name,
            ranks=spec.ranks,
            tls=tls,
            connect_limit=settings.connect_timeout,
            idle_limit=settings.worker_keepalive,
        )
        for spec in map(WorkerSpec, settings.worker)
    )
    metrics = Metrics()
    policy = POLICIES[settings.policy]()
    tenants = read_keys(settings.api_keys) if settings.api_keys is not None else Tenants({})
    admins = Admins(settings.admin_token.get_secret_value())
    hasher = KeyHasher(settings.session_secret.get_secret_value().encode())

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
                replica=settings.replica,
                ttl=settings.session_ttl,
                max_stale=settings.max_stale,
                capacity=settings.claim_cache,
                refuse_on_outage=settings.on_store_outage == "refuse",
                close_limit=settings.store_deadline,
                parent_slack=settings.parent_slack,
                log_share=settings.log_bindings,
            )
            app.proxy = Proxy(
                fleet=fleet,
                policy=policy,
                affinity=app.affinity,
                hasher=hasher,
                metrics=metrics,
                limits=Limits(
                    body_bytes=settings.max_body_bytes,
                    first_byte=settings.first_byte_timeout,
                    idle=settings.idle_timeout,
                    total=settings.turn_timeout,
                ),
                identifier=Identifier(settings.session_from),
                tenants=tenants,
                admins=admins,
                forwarding=Forwarding(settings.trusted_proxies),
                rules=Rules(
                    soft_overload=settings.overload if settings.affinity == "soft" else 0,
                    reject_conflicts=settings.hint_conflict == "reject",
                    hints_only=settings.policy == "direct",
                    worker_key=settings.worker_key.encode(),
                    rank_header=settings.rank_header.lower().encode(),
                ),
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
        worker_key=settings.worker_key,
    )
    add_admin(app, fleet=fleet, affinity=lambda: app.affinity, hasher=hasher, admins=admins, replica=settings.replica)
    return app


async def _measure_lag(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_EVERY
        await asyncio.sleep(_LAG_EVERY)
        metrics.loop_lag.observe(max(0.0, loop.time() - due))


async def open_claims(settings: Settings) -> ClaimStore:
    """The store that the settings name. Raises StoreConfigurationError."""
    need = Guarantee.ACROSS_PROCESSES if settings.processes > 1 else Guarantee.NONE
    return await open_store(settings.claims, need=need, deadline=settings.store_deadline)


def app_from_environment() -> Router:
    """For the processes of `serve --processes N`."""
    return create_app(Settings.model_validate_json(os.environ[SETTINGS_VARIABLE]))


def _worker_tls(settings: Settings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(settings.worker_ca) if settings.worker_ca else None)
    if not settings.worker_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _register_gauges(app: Router) -> None:
    affinity, metrics, proxy = app.affinity, app.metrics, app.proxy
    metrics.gauge("coatcheck_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    metrics.gauge("coatcheck_turns_running", "Turns running now.", lambda: proxy.turns)
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
