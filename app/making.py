"""Parts of a router, each made from the settings that concern it. Commands that need one of them alone make it here."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable, Container

from app.config import Settings, Workers, state_folder
from app.fleet.discovery.records import RegistrySource, this_host
from app.fleet.discovery.source import Source
from app.fleet.discovery.urls import open_source
from app.fleet.health import Tolerance
from app.fleet.probes import Prober, Probing
from app.fleet.specs import WorkerSpec
from app.fleet.workers import Fleet, Tls, Worker, make_worker
from app.http.names import Names
from app.sessions.endings import EndingFiles
from app.turn.request import worker_key_line
from app.turn.shared import Limits
from app.values import mask
from backends import open_store
from backends.base import ClaimStore


async def open_claims(settings: Settings) -> ClaimStore:
    """The store that the settings name. Raises StoreConfigurationError."""
    several = settings.listen.processes > 1
    return await open_store(settings.store.claims, across_processes=several, deadline=settings.store.store_deadline)


async def open_claims_at(url: str, *, deadline: float) -> ClaimStore:
    """The store at a URL, for whoever registers there. Raises StoreConfigurationError."""
    return await open_store(url, across_processes=True, deadline=deadline)


async def open_sources(
    settings: Settings, claims: ClaimStore, known: Container[str] = ()
) -> tuple[list[str], list[Source]]:
    """The labels of the sources of workers that the settings name, and those of them that are not `known`, opened.
    Raises StoreConfigurationError."""
    urls = settings.workers.workers_from or ((settings.store.claims,) if settings.registers_only else ())
    labels: list[str] = []
    opened: list[Source] = []
    for url in urls:
        source = open_source(url)
        label = mask(url) if source is None else source.label
        labels.append(label)
        if label in known:
            continue
        if source is None and url == settings.store.claims:
            source = RegistrySource(claims.registry, label, host=this_host())
        elif source is None:
            store = await open_claims_at(url, deadline=settings.store.store_deadline)
            source = RegistrySource(store.registry, label, host=this_host(), close=store.aclose)
        opened.append(source)
    return labels, opened


def turn_limits(settings: Settings) -> Limits:
    limits = settings.limits
    return Limits(first_byte=limits.first_byte_timeout, idle=limits.idle_timeout, total=limits.turn_timeout)


def tolerance(settings: Workers) -> Tolerance:
    """What is asked of workers."""
    return Tolerance(
        probed=settings.probe_path != "off",
        failures=settings.suspect_after,
        good_probes=settings.good_probes,
        down_after=settings.down_after,
        slow_start=settings.slow_start,
    )


def worker_maker(settings: Callable[[], Settings], tls: Tls | None = None) -> Callable[[WorkerSpec, bool], Worker]:
    """Makes workers by the settings as they are at the time; told whether they come to a fleet that runs. `tls` is for
    https ones."""
    names, tolerated = Names(), tolerance(settings().workers)
    tls = tls or worker_tls(settings().workers)

    def make(spec: WorkerSpec, joins: bool) -> Worker:
        return make_worker(
            spec.url,
            name=spec.name,
            ranks=spec.ranks,
            phase=spec.phase,
            handover=spec.handover,
            bootstrap_port=spec.bootstrap_port,
            max_turns=settings().workers.max_turns,
            tls=tls,
            tls_name=spec.tls_name,
            connect_limit=settings().limits.connect_timeout,
            idle_limit=settings().workers.worker_keepalive,
            names=names,
            tolerance=tolerated,
            joins=joins,
        )

    return make


def make_prober(settings: Settings, fleet: Fleet) -> Prober:
    """Asks as the settings say. The caller starts and stops it."""
    return Prober(fleet, probing(settings))


def probing(settings: Settings) -> Probing:
    path = "" if settings.workers.probe_path == "off" else settings.workers.probe_path
    return Probing(
        path=path.encode(),
        interval=settings.workers.probe_interval,
        limit=settings.workers.probe_timeout,
        key_line=worker_key_line(settings.workers.key.encode()),
    )


def ending_files(settings: Settings) -> EndingFiles | None:
    """Where closes outlive this process; None: claims do not, or this user has no folder for it."""
    if settings.store.claims.lower().startswith("memory:"):
        return None
    try:
        return EndingFiles(state_folder() / "endings", settings.store.claims)
    except RuntimeError:
        return None


def worker_tls(settings: Workers) -> Tls:
    """For https workers. Made when the first of them is there: to read this system's authorities takes as long as all
    else that is done to make a router."""

    @functools.cache
    def made() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=settings.worker_ca)
        if not settings.worker_tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        return context

    return made
