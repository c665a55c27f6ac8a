"""`coatcheck serve` until it serves: its flags, made of the settings, and the check of what they name."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

from app import Trouble
from app.config import SETTINGS, Setting, Settings, mask, shown_value
from app.fleet.discovery.discovery import Discovery
from app.fleet.health import Probe
from app.fleet.workers import Fleet, worker_specs
from app.main import make_prober, open_claims, open_sources, worker_maker
from app.reloading import Rereading
from app.serve import configure_logging, serve
from app.sources import CONFIG_VARIABLE, Origin, config_file, read_settings
from backends.base import StoreConfigurationError, StoreError

_NO_WORKER = (
    f"no worker is given: add --worker http://host:port (or {SETTINGS['worker'].variable}, or `worker` in the file), "
    "or claims where workers can register; for a first try, `coatcheck up` brings simulated ones"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    parser.set_defaults(run=run)
    parser.usage = "coatcheck serve --worker URL [--worker URL ...] [options]"
    parser.epilog = (
        "A flag goes before its variable, a variable before the configuration file. Unknown keys and unknown "
        "COATCHECK_* variables are errors. STATE is $XDG_STATE_HOME, else ~/.local/state."
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML or YAML, by its suffix; keys are the flags without dashes in front. [{CONFIG_VARIABLE}]",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the settings, open the claim store and close it again, print what would be used, and end; with "
        "exit code 1 where the store cannot be reached",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="with --check: ask every worker once how it is, and fail if one is not well",
    )
    for title, settings in itertools.groupby(SETTINGS.values(), lambda setting: setting.title):
        group = parser.add_argument_group(title)
        for setting in settings:
            text = f"{setting.meaning} Default: {_default(setting).strip('`')}. [{setting.variable}]".replace("%", "%%")
            # Values stay text here: Settings checks flags, variables and files alike.
            how: dict[str, Any] = {"metavar": _metavar(setting)}
            if setting.field.annotation is bool:
                how = {"action": argparse.BooleanOptionalAction}
            elif setting.field.annotation == tuple[str, ...]:
                how["action"] = "append"
            group.add_argument(setting.flag, dest=setting.name, default=argparse.SUPPRESS, help=text, **how)


def run(args: argparse.Namespace) -> int:
    """Serve, or only check. Returns the exit code. Raises Trouble."""
    flags = {k: v for k, v in vars(args).items() if k in SETTINGS}
    settings, origins = read_settings(flags, args.config)
    if settings.registers_only and settings.store.claims.startswith("memory:"):
        raise Trouble(_NO_WORKER, code=2)
    configure_logging(settings)
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


def options_table() -> str:
    """The settings as the documentation's table."""
    lines = ["| Setting | Default | Meaning |", "|---|---|---|"]
    for setting in SETTINGS.values():
        meaning = setting.meaning
        if setting.field.annotation in (int, float) or setting.name == "log_level":
            meaning += f" {setting.expected[0].upper()}{setting.expected[1:]}."
        lines.append(f"| `{setting.key}` | {_default(setting)} | {meaning} |")
    return "\n".join(lines)


def _metavar(setting: Setting) -> str:
    if setting.field.annotation in (int, float):
        return "SECONDS" if setting.meaning.startswith("Seconds") else "N"
    if setting.field.annotation == Path | None:
        return "FILE"
    return setting.spoken.value or setting.name.rpartition("_")[2].upper()


def _default(setting: Setting) -> str:
    """In backquotes when it is a literal value."""
    default = setting.spoken.default or shown_value(setting.field.default)
    if default == "(none)":
        return "none"
    return default if setting.spoken.default and "://" not in default else f"`{default}`"
