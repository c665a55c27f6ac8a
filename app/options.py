"""The flags of `coatcheck serve`, made of the settings, and the table of them in the documentation."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from app.config import SETTINGS, Setting
from app.sources import CONFIG_VARIABLE
from app.values import shown_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `app.checking.run` takes."""
    parser.usage = "coatcheck serve --worker URL [--worker URL ...] [options]"
    parser.epilog = (
        "A flag goes before its variable, a variable before the configuration file. Unknown keys and unknown "
        "COATCHECK_* variables are errors, but for those that Kubernetes makes of Services. STATE is $XDG_STATE_HOME, "
        "else ~/.local/state."
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
