"""The `coatcheck` command. Flags of `serve` are made from the fields of `Settings`; nothing is declared twice."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import mocker.cli
from app import remote, up
from app.config import (
    CONFIG_VARIABLE,
    SPOKEN_DEFAULTS,
    EffectiveSettings,
    Settings,
    SettingsError,
    expected,
    flag_name,
    mask,
    read_settings,
    shown_value,
    variable_name,
)
from app.main import open_claims
from app.serve import configure_logging, serve, version
from app.sessions.tenants import new_key
from backends.base import StoreConfigurationError, StoreError

GROUPS: dict[str, tuple[str, ...]] = {
    "listening": ("host", "port", "processes", "keepalive_timeout", "trusted_proxies"),
    "workers": (
        "worker",
        "policy",
        "rank_header",
        "worker_api_key",
        "worker_api_key_file",
        "worker_ca",
        "worker_tls_verify",
        "worker_keepalive",
    ),
    "who may": ("api_keys", "admin_token"),
    "sessions": (
        "session_from",
        "affinity",
        "overload",
        "parent_slack",
        "hint_conflict",
        "log_bindings",
    ),
    "claims": (
        "claims",
        "session_ttl",
        "session_secret",
        "on_store_outage",
        "store_deadline",
        "max_stale",
        "claim_cache",
        "replica",
    ),
    "limits of a turn": (
        "connect_timeout",
        "first_byte_timeout",
        "idle_timeout",
        "turn_timeout",
        "max_body_bytes",
        "max_header_bytes",
        "client_head_timeout",
        "client_body_timeout",
    ),
    "shutdown and log": ("drain_delay", "drain_timeout", "log_level"),
}
"""Every setting, in the order in which help and documentation show them."""

NO_WORKER = (
    f"no worker is given: add --worker http://host:port (or {variable_name('worker')}, or `worker` in the file); "
    "for a first try, `coatcheck up` brings simulated ones"
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; answers the exit code: 0 done, 1 could not go on, 2 wrongly asked."""
    parser, commands = _parsers()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands.get(args.command or "", parser)
        command.error(_unknown_arguments(command, unknown))
    if args.command is None:
        parser.print_help()
        return 2
    try:
        if args.command == "serve":
            return _serve(args)
        if args.command == "mock":
            return mocker.cli.run(args)
        if args.command == "sessions":
            return remote.run_sessions(args)
        if args.command == "workers":
            return remote.run_workers(args)
        if args.command == "key":
            return _key(args)
        return up.run(args)
    except KeyboardInterrupt:
        return 130


def _serve(args: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(args).items() if name in Settings.model_fields}
    try:
        effective = read_settings(flags, args.config)
    except SettingsError as error:
        return _fail(2, *error.problems)
    if not effective.settings.worker:
        return _fail(2, NO_WORKER)
    configure_logging(effective.settings.log_level)
    try:
        trouble = asyncio.run(_try_store(effective.settings))
    except StoreConfigurationError as error:
        return _fail(
            2, f"{effective.origins['claims'].with_value(mask(effective.settings.claims))}: {mask(str(error))}"
        )
    if trouble is not None:
        print(
            f"coatcheck: warning: the claim store cannot be reached ({mask(str(trouble))}); until it can, new sessions "
            f"are {'placed by hash' if effective.settings.on_store_outage == 'degrade' else 'refused'}",
            file=sys.stderr,
        )
    if args.check:
        print(_overview(effective))
        return 0
    return serve(effective.settings)


def _key(args: argparse.Namespace) -> int:
    try:
        key, line = new_key(args.tenant)
    except ValueError as error:
        return _fail(2, str(error))
    print(f"the key, for the client (it is not kept): {key}", file=sys.stderr)
    print(line)
    return 0


async def _try_store(settings: Settings) -> StoreError | None:
    """Open the store, close it again, and answer what keeps it from working now, if anything does.
    Raises StoreConfigurationError for what will not pass by itself."""
    try:
        store = await open_claims(settings)
        try:
            await store.check()
        finally:
            await store.aclose()
    except StoreConfigurationError:
        raise
    except StoreError as error:
        return error
    return None


def _overview(effective: EffectiveSettings) -> str:
    rows = [
        (name.replace("_", "-"), shown_value(getattr(effective.settings, name)), str(effective.origins[name]))
        for names in GROUPS.values()
        for name in names
    ]
    name_width = max(len(row[0]) for row in rows)
    value_width = max(len(row[1]) for row in rows)
    lines = [f"{name:{name_width}}  {value:{value_width}}  {origin}".rstrip() for name, value, origin in rows]
    return "\n".join([*lines, "the settings are valid"])


def options_table() -> str:
    """The settings as the README's table."""
    lines = ["| Setting | Default | Meaning |", "|---|---|---|"]
    for names in GROUPS.values():
        for name in names:
            field = Settings.model_fields[name]
            meaning = field.description or ""
            if field.annotation in (int, float) or name == "log_level":
                meaning += f" {_sentence(expected(field))}"
            lines.append(f"| `{name.replace('_', '-')}` | {_spoken_default(name)} | {meaning} |")
    return "\n".join(lines)


# --- the parsers -----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """One clear line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n(try `{self.prog} --help`)\n")


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="coatcheck",
        description="An OpenAI-compatible router for LLM workers. A session stays on the worker that has its cache, "
        "whichever replica of the router its turns reach.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coatcheck {version()}")
    # One that is missing prints the help, which says more than an error would.
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, summary in (
        ("serve", "run the router"),
        ("mock", "run simulated workers"),
        ("up", "run simulated workers and replicas of the router on this machine, ready to be tried"),
        ("sessions", "list, show and close sessions of a running router"),
        ("workers", "list the workers of a running router"),
        ("key", "make an API key of a tenant, and its line for the file of keys"),
    ):
        commands[name] = subparsers.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )
    _add_serve_arguments(commands["serve"])
    mocker.cli.add_arguments(commands["mock"])
    up.add_arguments(commands["up"])
    remote.add_sessions_arguments(commands["sessions"])
    remote.add_workers_arguments(commands["workers"])
    commands["key"].add_argument("tenant", metavar="TENANT", help="letters, digits, dots, dashes and underscores")
    return parser, commands


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="check the settings, open the claim store and close it again, print what would be used, and end",
    )
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_flag(group, name)


def _add_flag(group: argparse._ArgumentGroup, name: str) -> None:
    field = Settings.model_fields[name]
    help_text = f"{field.description} Default: {_spoken_default(name).strip('`')}. [{variable_name(name)}]"
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text.replace("%", "%%")}
    # Values stay text here: Settings checks flags, variables and files alike.
    if field.annotation is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = _metavar(name)
    if field.annotation == tuple[str, ...]:
        options["action"] = "append"
    group.add_argument(flag_name(name), **options)


def _metavar(name: str) -> str:
    field = Settings.model_fields[name]
    if field.annotation is int or field.annotation is float:
        return "SECONDS" if (field.description or "").startswith("Seconds") else "N"
    if field.annotation == Path | None:
        return "FILE"
    return {"worker": "URL", "claims": "URL", "host": "ADDRESS"}.get(name, name.rpartition("_")[2].upper())


def _spoken_default(name: str) -> str:
    """In backquotes when it is a literal value."""
    if name in SPOKEN_DEFAULTS:
        spoken = SPOKEN_DEFAULTS[name]
        return f"`{spoken}`" if "://" in spoken else spoken
    default = shown_value(Settings.model_fields[name].default)
    return "none" if default == "(none)" else f"`{default}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    known = [option for action in parser._actions for option in action.option_strings]
    first = unknown[0].partition("=")[0]
    close = difflib.get_close_matches(first, known, 1, 0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    kind = "option" if first.startswith("-") else "argument"
    return f"there is no {kind} {first}{hint}"


def _fail(code: int, *problems: str) -> int:
    for problem in problems:
        print(f"coatcheck: {problem}", file=sys.stderr)
    return code
