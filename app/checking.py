"""`coatcheck serve` until it serves: its settings are read, and what they name is tried."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from app import Trouble
from app.config import SETTINGS, Settings
from app.fleet.discovery.discovery import Discovery
from app.fleet.health import Probe
from app.fleet.specs import worker_specs
from app.fleet.workers import Fleet
from app.making import make_prober, open_claims, open_sources, worker_maker
from app.reloading import Rereading
from app.serve import configure_logging, serve
from app.sources import Origin, config_file, read_settings, service_links
from app.turn.tracing import is_installed as tracing_is_installed
from app.values import mask, shown_value
from backends.base import StoreConfigurationError, StoreError

log = logging.getLogger("coatcheck")

_NO_WORKER = (
    f"no worker is given: add --worker http://host:port (or {SETTINGS['worker'].variable}, or `worker` in the file), "
    "or claims where workers can register; for a first try, `coatcheck up` brings simulated ones"
)


def run(args: argparse.Namespace) -> int:
    """Serve, or only check. Returns the exit code. Raises Trouble."""
    flags = {k: v for k, v in vars(args).items() if k in SETTINGS}
    settings, origins = read_settings(flags, args.config)
    if settings.registers_only and settings.store.claims.startswith("memory:"):
        raise Trouble(_NO_WORKER, code=2)
    if settings.process.otel_endpoint is not None and not tracing_is_installed():
        given = origins["otel_endpoint"].with_value(settings.process.otel_endpoint)
        raise Trouble(f"{given}: this needs more packages: install coatcheck[otel]", code=2)
    configure_logging(settings)
    if links := service_links():
        log.info("not for us, and ignored: %s (Kubernetes makes them of Services)", ", ".join(links))
    away = False
    try:
        asyncio.run(_try_store(settings))
    except StoreConfigurationError as error:
        claims = origins["claims"].with_value(mask(settings.store.claims))
        raise Trouble(f"{claims}: {mask(str(error))}", code=2) from None
    except StoreError as error:
        away = True
        print(
            f"coatcheck: warning: the claim store cannot be reached ({mask(str(error))}); until it can, new sessions "
            f"are {'placed by hash' if settings.store.on_store_outage == 'degrade' else 'refused'}",
            file=sys.stderr,
        )
    if args.check:
        print(_overview(settings, origins))
        well = not args.probe or asyncio.run(_probe(settings))
        return 0 if well and not away else 1
    if args.probe:
        raise Trouble("--probe goes with --check", code=2)
    return serve(Rereading(settings, lambda: read_settings(flags, args.config), config_file(args.config)))


async def _probe(settings: Settings) -> bool:
    """Ask every worker once, and print what it says. Returns whether all are well."""
    fleet = Fleet(())
    named = worker_specs(settings.workers.worker)
    discovery = Discovery(fleet, worker_maker(lambda: settings), named, grace=settings.workers.worker_grace)
    prober = make_prober(settings, fleet)
    store = await open_claims(settings)
    try:
        await discovery.start(store.registry, (await open_sources(settings, store))[1])
        await prober.start(patience=2 * settings.workers.probe_timeout)
    finally:
        prober.stop()
        await discovery.aclose()
        await store.aclose()
    for worker in fleet:
        probe = worker.health.probe
        print(f"worker {worker.name}: {'nothing within the limit' if probe is None else probe.value}: {worker.url}")
    return all(worker.health.probe in (Probe.GOOD, Probe.REACHABLE) for worker in fleet)


async def _try_store(settings: Settings) -> None:
    """Open the stores and close them again. Raises StoreError; a StoreConfigurationError will not pass by itself."""
    store = await open_claims(settings)
    try:
        for source in (await open_sources(settings, store))[1]:
            await source.aclose()
        await store.check()
    finally:
        await store.aclose()


def _overview(settings: Settings, origins: dict[str, Origin]) -> str:
    rows = [
        (setting.key, shown_value(setting.value(settings)), str(origins[setting.name])) for setting in SETTINGS.values()
    ]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:{name_width}}  {value:{value_width}}  {origin}".rstrip() for name, value, origin in rows]
    return "\n".join([*lines, "the settings are valid"])
