"""The only wiring: settings in, application out. Two routers fit in one process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from app.admin import add_admin
from app.config import Settings, Workers
from app.control import add_control_plane
from app.fleet.capacity import Bounds, Capacity
from app.fleet.health import Tolerance
from app.fleet.models import ModelLists
from app.fleet.policies import POLICIES
from app.fleet.probes import Prober, Probing
from app.fleet.workers import Fleet, make_worker, worker_specs
from app.http.exchange import Proxy
from app.http.headers import Forwarding
from app.http.names import Names
from app.http.origins import Crossing, Origins
from app.listening import is_loopback
from app.management import Management
from app.metrics import SHOWN_STATES, Metrics
from app.sessions.affinity import Affinity
from app.sessions.identity import Identifier, KeyHasher
from app.sessions.tenants import Admins, Tenants, read_keys
from app.turn.models import Models, OneModel
from app.turn.paths import Kind, Paths
from app.turn.request import Reading, worker_key_line
from app.turn.routing import Routing, Rules
from app.turn.turn import Limits, Shared, Turns
from backends import open_store
from backends.base import ClaimStore

_LAG_EVERY = 0.1
"""Seconds between looks at the loop's lag."""


class ControlPlane(FastAPI):
    """What is common to all of it, wherever it listens."""

    def __init__(self, title: str, **settings: Any) -> None:
        super().__init__(title=title, docs_url=None, redoc_url=None, redirect_slashes=False, **settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            # Answered as GET is; the server, whose scope stays as it was, leaves the body out (RFC 9110 9.3.2).
            scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        for operations in described["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # the framework's own; ours is 400
        return described


class Router(ControlPlane):
    """The application. Its FastAPI half answers the control plane; requests for proxied paths are given to `turns` by
    the client's protocol (`app/http/client.py`) and never come here."""

    turns: Turns
    one_model: OneModel
    paths: Paths
    origins: Origins | None
    """None: nothing is said of who may use the router from a browser."""
    affinity: Affinity
    fleet: Fleet
    capacity: Capacity | None = None
    """None: no turns are limited."""
    metrics: Metrics
    admin_side: ControlPlane
    """What answers `/admin/...`: this application, or what is served at `admin-listen` in its place."""
    draining = False
    """Set before the port closes, so that `/ready` fails while turns are still taken."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.origins is not None and scope["type"] == "http":
            crossing = self.origins.asked(scope["path"], scope["headers"])
            if crossing is not None:
                send = _marking(send, crossing)
        await super().__call__(scope, receive, send)

    def proxy_of(self, path: str) -> Proxy | None:
        """What answers to `path` (without its percent-encoding); None: the control plane."""
        if path in self.paths.usual:
            return self.turns
        kind = self.paths.kind(path)
        if kind is Kind.TURN:
            return self.turns
        return self.one_model if kind is Kind.MODEL else None


def _marking(send: Send, crossing: Crossing) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": crossing.marked(message["headers"])}
        await send(message)

    return sending


def create_app(settings: Settings, *, store: ClaimStore | None = None) -> Router:
    """The router for `settings`. `store` overrides the one that `settings.store` names; the caller closes it."""
    tls = _worker_tls(settings.workers)
    fleet = make_fleet(settings, tls)
    metrics = Metrics()
    policy = POLICIES[settings.workers.policy]
    tenants = read_keys(settings.access.api_keys) if settings.access.api_keys is not None else Tenants({})
    admins, admins_of_turns = _admins(settings)
    hasher = KeyHasher(settings.store.secret.encode())
    reading = Reading(
        identifier=Identifier(settings.sessions.session_from),
        tenants=tenants,
        forwarding=Forwarding(settings.listen.trusted_proxies),
        worker_key=settings.workers.key.encode(),
        rank_header=settings.workers.rank_header.lower().encode(),
        has_ranks=any(target.rank is not None for worker in fleet for target in worker.targets),
        body_limit=settings.limits.max_body_bytes,
        judges_hints=settings.sessions.hints == "follow",
    )
    models = Models(ModelLists(fleet, tls), reading)
    metrics.workers = lambda: ((worker.name, worker.cells) for worker in fleet)

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
            bounds = Bounds(
                per_tenant=settings.limits.max_turns_per_tenant,
                queue=settings.limits.queue_limit,
                wait=settings.limits.queue_timeout,
            )
            if bounds.per_tenant or settings.workers.max_turns:
                app.capacity = Capacity(
                    fleet, policy, metrics, bounds, loop=asyncio.get_running_loop(), rng=random.Random()
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
                        admins=admins_of_turns,
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
                    capacity=app.capacity,
                    bounds=bounds,
                )
            )
            app.one_model = OneModel(models, app.turns)
            _register_gauges(app)
            app.affinity.start()
            prober = make_prober(settings, fleet)
            stack.callback(prober.stop)
            await prober.start()
            lag = asyncio.create_task(_measure_lag(metrics))
            stack.callback(lag.cancel)
            stack.push_async_callback(app.affinity.aclose)
            stack.callback(fleet.close)
            yield

    app = Router("coatcheck", lifespan=lifespan)
    app.fleet, app.metrics = fleet, metrics
    app.paths = Paths(settings.workers.engine_paths)
    origins = settings.access.allowed_origins
    app.origins = Origins(origins, lambda path: app.paths.is_admins(path)) if origins else None
    app.admin_side = ControlPlane("coatcheck admin") if settings.access.admin_listen is not None else app
    for each, who in {app: admins_of_turns, app.admin_side: admins}.items():
        add_control_plane(
            each,
            fleet=fleet,
            metrics=metrics,
            draining=lambda: app.draining,
            models=models,
            management=Management(
                fleet,
                tls,
                who,
                reading,
                admin_token=settings.access.token,
                seconds=settings.limits.first_byte_timeout,
            ),
        )
    add_admin(
        app.admin_side,
        fleet=fleet,
        affinity=lambda: app.affinity,
        hasher=hasher,
        admins=admins,
        replica=settings.store.replica,
    )
    return app


def _admins(settings: Settings) -> tuple[Admins, Admins]:
    """For the admin API, and for turns: those are never taken where `admin-listen` is."""
    token, place = settings.access.token, settings.access.admin_place
    if place is None:
        admins = Admins(token, local=is_loopback(settings.listen.host))
        return admins, admins
    return Admins(token, local=place.is_local, at_path=place.path is not None), Admins(token, local=False)


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


def tolerance(settings: Workers) -> Tolerance:
    """What is asked of workers."""
    return Tolerance(
        probed=settings.probe_path != "off",
        failures=settings.suspect_after,
        good_probes=settings.good_probes,
        down_after=settings.down_after,
        slow_start=settings.slow_start,
    )


def make_fleet(settings: Settings, tls: ssl.SSLContext | None = None) -> Fleet:
    """The workers that the settings name. `tls` is for https ones."""
    names, tolerated = Names(), tolerance(settings.workers)
    tls = tls or _worker_tls(settings.workers)
    return Fleet(
        make_worker(
            spec.url,
            name=spec.name,
            ranks=spec.ranks,
            max_turns=settings.workers.max_turns,
            tls=tls,
            connect_limit=settings.limits.connect_timeout,
            idle_limit=settings.workers.worker_keepalive,
            names=names,
            tolerance=tolerated,
        )
        for spec in worker_specs(settings.workers.worker)
    )


def make_prober(settings: Settings, fleet: Fleet) -> Prober:
    """Asks as the settings say. The caller starts and stops it."""
    path = "" if settings.workers.probe_path == "off" else settings.workers.probe_path
    return Prober(
        fleet,
        Probing(
            path=path.encode(),
            interval=settings.workers.probe_interval,
            limit=settings.workers.probe_timeout,
            key_line=worker_key_line(settings.workers.key.encode()),
        ),
    )


def _worker_tls(settings: Workers) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.worker_ca)
    if not settings.worker_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _sessions(app: Router) -> Iterator[tuple[str, float]]:
    counts = app.affinity.census()
    return ((worker.name, counts[worker.name]) for worker in app.fleet)


def _register_gauges(app: Router) -> None:
    affinity, metrics, turns = app.affinity, app.metrics, app.turns
    metrics.gauge("coatcheck_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    metrics.gauge("coatcheck_turns_running", "Turns running now.", lambda: turns.count)
    metrics.gauge(
        "coatcheck_queued_turns",
        "Turns that wait for a slot.",
        lambda: app.capacity.waiting if app.capacity is not None else 0,
    )
    metrics.gauge("coatcheck_claim_cache_entries", "Sessions known here, in use or idle.", lambda: affinity.size)
    metrics.gauge("coatcheck_session_turns_active", "Turns with a session.", lambda: affinity.active_turns)
    metrics.gauge("coatcheck_pending_closes", "Claims waiting to be closed.", lambda: affinity.pending_closes)
    metrics.gauge("coatcheck_store_up", "1 while claims can be made.", lambda: affinity.state.value == "up")
    metrics.gauge("coatcheck_store_watching", "1 while the watch is alive.", lambda: affinity.watching)
    metrics.table(
        "coatcheck_worker_state",
        "1 for the state that a worker is in.",
        ("worker", "state"),
        lambda: (((w.name, state), float(w.state == state)) for w in app.fleet for state in SHOWN_STATES),
    )
    metrics.gauges(
        "coatcheck_worker_sessions",
        "Sessions that this replica knows, by their worker.",
        "worker",
        lambda: _sessions(app),
    )
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
