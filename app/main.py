"""The only wiring: settings in, application out. Two routers fit in one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from app import version
from app.admin import Administration, add_admin
from app.config import MIB, Settings
from app.control import add_control_plane
from app.events import EventLog
from app.exposition import text
from app.fleet.capacity import Bounds, Capacity
from app.fleet.catalog import Catalog
from app.fleet.discovery.discovery import Discovery
from app.fleet.discovery.operators import Operators
from app.fleet.models import ModelLists
from app.fleet.naming import Naming
from app.fleet.placement.kv import Caches
from app.fleet.placement.prefix import Prefixes
from app.fleet.placement.tokens import Tokenizer
from app.fleet.policies import POLICIES, by_cache
from app.fleet.probes import Prober
from app.fleet.specs import worker_specs
from app.fleet.workers import Fleet
from app.gathering import Member
from app.gauges import register_gauges
from app.http.exchange import Proxy
from app.http.headers import Forwarding
from app.http.origins import Crossing, Origins
from app.listening import Place, network_name
from app.making import (
    ending_files,
    make_prober,
    open_claims,
    open_sources,
    probing,
    turn_limits,
    worker_maker,
    worker_tls,
)
from app.management import Management
from app.metrics import USAGES_A_TICK, Metrics
from app.overview import Overview
from app.page.routes import Page, add_page
from app.record import hashes
from app.replicas import Myself, Replicas
from app.sessions.affinity import Affinity
from app.sessions.door import Door
from app.sessions.identity import Identifier, KeyHasher, parse_source
from app.sessions.peers import Peers
from app.sessions.tenants import Admins, Tenants, read_keys
from app.traffic import Traffic
from app.turn.access import AccessLog
from app.turn.fields import Prompts, parse_aliases
from app.turn.models import Models, OneModel
from app.turn.paths import Kind, Paths
from app.turn.phases import PhasedTurn
from app.turn.prefills import Phases, Prefills
from app.turn.releases import Releases
from app.turn.request import Reading, worker_key_line
from app.turn.routing import Routing, Rules
from app.turn.shared import Shared
from app.turn.tracing import Tracing, open_tracing
from app.turn.turn import Turns
from backends.base import ClaimStore

_VISIBLE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
"""What of a replica's name stands in a header as it is."""
_LAG_EVERY = 0.1
"""Seconds between looks at the loop's lag."""


_PROMPTS: dict[str, Prompts] = {"prefix": "yes", "kv": "exactly"}
"""What policies want to know of requests' prompts; others: nothing."""


class Keys(msgspec.Struct, frozen=True):
    """What the settings' files of keys say."""

    tenants: Tenants
    worker_key: bytes

    @classmethod
    def read(cls, settings: Settings) -> Keys:
        """Raises ValueError, OSError."""
        file = settings.access.api_keys
        return cls(read_keys(file) if file is not None else Tenants({}), settings.workers.key.encode())


class ControlPlane(FastAPI):
    """What is common to all of it, wherever it listens."""

    def __init__(self, title: str, **settings: Any) -> None:
        super().__init__(title=title, docs_url=None, redoc_url=None, redirect_slashes=False, **settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            # Answered as GET is; the server, whose scope stays as it was, leaves the body out (RFC 9110 9.3.2).
            scope = {**scope, "method": "GET", "coatcheck.head": True}
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
    phases: Phases
    one_model: OneModel
    paths: Paths
    origins: Origins | None
    """None: nothing is said of who may use the router from a browser."""
    affinity: Affinity
    replicas: Replicas
    door: Door
    """Where other replicas come in, on a listener of its own."""
    settings: Settings
    """As they are now: some may change while the router runs."""
    reading: Reading
    keys: Keys
    hasher: KeyHasher
    claims: ClaimStore | None = None
    """From the start-up on."""
    discovery: Discovery
    prober: Prober
    fleet: Fleet
    capacity: Capacity | None = None
    """None: no turns are limited."""
    catalog: Catalog
    tracing: Tracing | None = None
    """None: nobody wants spans."""
    metrics: Metrics
    overview: Overview
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

    def read_anew(self) -> None:
        """Read the requests that come from now on by the settings and for the fleet as they are now."""
        settings = self.settings
        self.reading = Reading(
            identifier=Identifier(settings.sessions.session_from),
            tenants=self.keys.tenants,
            forwarding=Forwarding(settings.listen.trusted_proxies),
            worker_key=self.keys.worker_key,
            rank_header=settings.workers.rank_header.lower().encode(),
            has_ranks=self.has_ranks(),
            body_limit=settings.limits.max_body_bytes,
            judges_hints=settings.sessions.hints == "follow",
            aliases=parse_aliases(settings.workers.model_alias),
            traced=self.tracing is not None,
            prompts=_PROMPTS.get(settings.workers.policy, "no"),
        )
        if self.claims is not None:
            shared = msgspec.structs.replace(self.turns.shared, reading=self.reading, limits=turn_limits(settings))
            self.turns.share(shared)

    def has_ranks(self) -> bool:
        return any(target.rank is not None for worker in self.fleet for target in worker.targets)

    async def follow(self, settings: Settings) -> None:
        """Go by these settings from now on, which differ only in what can change while turns run
        (`EffectiveSettings.change`). Turns that run keep what they began with. Raises ValueError or OSError where a
        file or a store that they name cannot be used; then nothing has changed."""
        keys = Keys.read(settings)
        assert self.claims is not None
        labels, new = await open_sources(settings, self.claims, [each.source.label for each in self.discovery.sources])
        self.settings, self.keys = settings, keys
        self.read_anew()
        self.replicas.agree_on(hashes(_what_must_agree(settings, self.hasher, keys.tenants)))
        for worker in self.fleet:
            worker.pool.connect_limit = settings.limits.connect_timeout
        self.prober.follow(probing(settings))
        await self.discovery.follow(worker_specs(settings.workers.worker), new, labels)


def _marking(send: Send, crossing: Crossing) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": crossing.marked(message["headers"])}
        await send(message)

    return sending


def create_app(
    settings: Settings,
    *,
    store: ClaimStore | None = None,
    peer_place: Place | None = None,
    siblings: socket.socket | None = None,
) -> Router:
    """The router for `settings`. `store` overrides the one that `settings.store` names; the caller closes it.
    `peer_place`: where the other replicas are told to find it; None: it has no peers. `siblings`: leads to the parent
    of several processes, of which this is one (`gathering`); it is closed with the router."""
    tls = worker_tls(settings.workers)
    fleet = Fleet(())
    metrics = Metrics()
    metrics.workers = lambda: ((worker.name, worker.cells) for worker in fleet)
    traffic, events = Traffic(metrics, fleet), EventLog()
    policy = POLICIES[settings.workers.policy]
    admins, admins_of_turns = _admins(settings)
    hasher = KeyHasher(settings.store.secret.encode())
    keys = Keys.read(settings)
    network = network_name()
    names = Naming(fleet, network)
    peers = Peers(settings.store.replica, names, metrics)
    fleet.tell = peers.say
    door = Door(secrets.token_urlsafe(24), lambda: app.affinity.desk)
    place = peer_place or Place()
    myself = Myself(
        replica=settings.store.replica,
        version=version(),
        network=network,
        agrees=hashes(_what_must_agree(settings, hasher, keys.tenants)),
        host=place.host,
        port=place.port,
        token=door.token,
    )

    member = None if siblings is None else Member(siblings, metrics.families)

    async def scrape(open_metrics: bool) -> bytes:
        if member is not None:
            return await member.scrape(open_metrics)
        # In a thread: of a thousand workers it takes as long as a thousand turns.
        return await asyncio.to_thread(text, metrics.families(), open_metrics)

    lists = ModelLists(fleet, tls)
    catalog = Catalog(
        fleet,
        lists,
        lambda: [(b"authorization", b"Bearer " + app.reading.worker_key)] if app.reading.worker_key else [],
        interval=settings.workers.models_interval,
        strict=settings.workers.unknown_models == "refuse",
    )

    prefixes = Prefixes(metrics, memory=settings.workers.prefix_memory * MIB) if policy is by_cache else None
    caches = None
    if prefixes is not None and settings.workers.policy == "kv":
        tokenizer = Tokenizer(
            metrics,
            lambda: worker_key_line(app.reading.worker_key),
            seconds=settings.workers.tokenize_timeout,
        )
        caches = Caches(fleet, metrics, prefixes, tokenizer, adapter=catalog.adapter, serving=catalog.serving)
    foresight = prefixes if caches is None else caches

    fleet.choices_with = catalog.choices_with

    def fleet_changed() -> None:
        catalog.fleet_changed()
        if app.claims is None:
            return
        if app.reading.has_ranks != app.has_ranks():
            app.read_anew()
        shared = app.turns.shared
        if (shared.phases is None) == (fleet.phased > 0):
            phases = app.phases if fleet.phased else None
            app.turns.share(msgspec.structs.replace(shared, phases=phases))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert isinstance(app, Router)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(events.listening())
            app.tracing = tracing = open_tracing(
                settings.process.otel_endpoint, os.environ, replica=settings.store.replica, version=version()
            )
            if tracing is not None:
                stack.push_async_callback(tracing.aclose)
                app.read_anew()
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
                endings=ending_files(settings),
                names=names,
                peers=peers,
            )
            access = None
            if settings.process.access_log != "off":
                access = AccessLog(every=settings.process.access_log == "all")
                stack.callback(access.close)
            bounds = Bounds(
                per_tenant=settings.limits.max_turns_per_tenant,
                queue=settings.limits.queue_limit,
                wait=settings.limits.queue_timeout,
            )
            if bounds.per_tenant or settings.workers.max_turns:
                app.capacity = Capacity(
                    fleet,
                    policy,
                    metrics,
                    bounds,
                    serving=catalog.serving,
                    loop=asyncio.get_running_loop(),
                    rng=random.Random(),
                )
            rejects = settings.sessions.hint_conflict == "reject"
            routing = Routing(
                fleet=fleet,
                policy=policy,
                affinity=app.affinity,
                hasher=hasher,
                metrics=metrics,
                catalog=catalog,
                admins=admins_of_turns,
                foresight=foresight,
                rules=Rules(
                    soft_overload=settings.sessions.overload if settings.sessions.affinity == "soft" else 0,
                    reject_conflicts=rejects,
                ),
            )
            prefills = Prefills(
                fleet=fleet,
                policy=policy,
                affinity=app.affinity,
                routing=routing,
                least_new=settings.sessions.prefill_from,
                reject_conflicts=rejects,
            )
            rooms = random.Random()
            app.phases = Phases(prefills, Releases(fleet, metrics), lambda: rooms.getrandbits(63) or 1)
            app.turns = Turns(
                Shared(
                    fleet=fleet,
                    reading=app.reading,
                    routing=routing,
                    metrics=metrics,
                    limits=turn_limits(settings),
                    capacity=app.capacity,
                    bounds=bounds,
                    tracing=tracing,
                    access=access,
                    own_lines=b"\r\nx-coatcheck-replica: %b" % quote(settings.store.replica, safe=_VISIBLE).encode(),
                    phases=app.phases if fleet.phased else None,
                ),
                PhasedTurn,
            )
            app.replicas = Replicas(
                claims.registry,
                myself,
                fleet=fleet,
                affinity=app.affinity,
                peers=peers,
                names=names,
                metrics=metrics,
                running=lambda: app.turns.count,
                waiting=lambda: app.capacity.waiting if app.capacity is not None else 0,
                traffic=traffic,
                tenants=lambda: _busy_tenants(app),
                clock=asyncio.get_running_loop().time,  # as turns are counted
            )
            app.one_model = OneModel(models, app.turns)
            register_gauges(
                metrics,
                fleet=fleet,
                affinity=app.affinity,
                turns=app.turns,
                capacity=app.capacity,
                catalog=catalog,
                discovery=app.discovery,
                foresight=foresight,
                version=version(),
            )
            app.claims = claims  # and the turns are there
            _, sources = await open_sources(settings, claims)
            if caches is not None:
                caches.start()
                stack.callback(caches.close)
            await app.discovery.start(claims.registry, sources)
            stack.push_async_callback(app.discovery.aclose)
            app.affinity.start()
            app.prober = prober = make_prober(settings, fleet)
            stack.callback(prober.stop)
            stack.push_async_callback(catalog.aclose)
            await asyncio.gather(prober.start(), catalog.start(claims.registry))
            lag = asyncio.create_task(_tick(metrics))
            stack.callback(lag.cancel)
            if member is not None:
                gathered = asyncio.create_task(member.run())
                stack.callback(gathered.cancel)
            stack.callback(peers.close)
            stack.push_async_callback(app.affinity.aclose)
            stack.push_async_callback(app.phases.releases.aclose)
            app.replicas.start()
            stack.push_async_callback(app.replicas.aclose)
            looking = asyncio.create_task(app.overview.run())
            stack.callback(looking.cancel)
            stack.callback(fleet.close)
            yield

    app = Router("coatcheck", lifespan=lifespan)
    app.settings, app.fleet, app.metrics, app.door = settings, fleet, metrics, door
    app.keys, app.hasher = keys, hasher
    app.catalog = catalog
    app.discovery = Discovery(
        fleet,
        worker_maker(lambda: app.settings, tls),
        worker_specs(settings.workers.worker),
        grace=settings.workers.worker_grace,
        changed=fleet_changed,
        gone=metrics.forget_worker,
    )
    app.read_anew()
    models = Models(lists, catalog, lambda: app.reading)
    app.paths = Paths(settings.workers.engine_paths)
    origins = settings.access.allowed_origins
    app.origins = Origins(origins, lambda path: app.paths.is_admins(path)) if origins else None
    app.admin_side = ControlPlane("coatcheck admin") if settings.access.admin_listen is not None else app
    for each, who in {app: admins_of_turns, app.admin_side: admins}.items():
        add_control_plane(
            each,
            fleet=fleet,
            scrape=scrape,
            draining=lambda: app.draining,
            models=models,
            changed=catalog.look,
            management=Management(
                fleet,
                tls,
                who,
                lambda: app.reading,
                admin_token=settings.access.token,
                seconds=settings.limits.first_byte_timeout,
            ),
        )
    operators = Operators(fleet, app.discovery)
    app.overview = Overview(
        replica=settings.store.replica,
        version=myself.version,
        fleet=fleet,
        metrics=metrics,
        traffic=traffic,
        catalog=catalog,
        discovery=app.discovery,
        operators=operators,
        affinity=lambda: app.affinity,
        replicas=lambda: app.replicas,
        tenants=lambda: _busy_tenants(app),
        draining=lambda: app.draining,
        events=events,
        keyed=bool(settings.access.token),
        tenant_limit=settings.limits.max_turns_per_tenant,
    )
    add_page(app.admin_side, Page(admins, app.overview))
    administration = Administration(
        fleet=fleet,
        discovery=app.discovery,
        catalog=catalog,
        operators=operators,
        affinity=lambda: app.affinity,
        hasher=hasher,
        admins=admins,
        replica=settings.store.replica,
        replicas=lambda: app.replicas,
        ttl=max(settings.store.session_ttl, settings.store.kept_ttl),
    )
    add_admin(app.admin_side, administration)
    return app


def _what_must_agree(settings: Settings, hasher: KeyHasher, tenants: Tenants) -> dict[str, bytes]:
    """By setting, in one spelling: replicas that differ in one of these do not find each other's sessions, or place and
    keep them differently."""
    sources = [source for text in settings.sessions.session_from for source in parse_source(text)]
    return {
        # A key of no session: no more than any claim's tells who reads the store.
        "session-secret": hasher.key(b"\xff", b"\xff").encode(),
        "session-from": repr(sources).encode(),
        "api-keys": tenants.canonical(),
        "policy": settings.workers.policy.encode(),
        "parent-slack": b"%d" % settings.sessions.parent_slack,
        "session-ttl": repr(settings.store.session_ttl).encode(),
        "kept-ttl": repr(settings.store.kept_ttl).encode(),
    }


def _admins(settings: Settings) -> tuple[Admins, Admins]:
    """For the admin API, and for turns: those are never taken where `admin-listen` is."""
    token, place = settings.access.token, settings.access.admin_place
    if place is None:
        admins = Admins(token, local=settings.admin_is_local)
        return admins, admins
    return Admins(token, local=settings.admin_is_local, at_path=place.path is not None), Admins(token, local=False)


async def _tick(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_EVERY
        await asyncio.sleep(_LAG_EVERY)
        metrics.loop_lag.observe(max(0.0, loop.time() - due))
        metrics.usages_left = USAGES_A_TICK


def _busy_tenants(app: Router) -> dict[str, tuple[int, int]]:
    """Turns that have what they need and that wait, by tenant: of those that have keys, all the others are one, without
    a name."""
    there = app.turns.tenants() if app.keys.tenants else {}
    waiting = app.capacity.waiting_by_tenant() if app.capacity is not None and app.keys.tenants else {}
    names = there.keys() | waiting.keys()
    return {name.decode() or "–": (there[name] - waiting.get(name, 0), waiting.get(name, 0)) for name in names}
