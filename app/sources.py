"""Where the values of settings come from: flag > variable > file > default, and what is wrong with them in the words in
which the user wrote it.

The variables and the file are read by pydantic-settings' own sources. The flags are not: its CLI source joins what is
given repeatedly with commas, which a worker's description has as well, and its help tells neither group nor default nor
variable.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import ipaddress
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource, YamlConfigSettingsSource

from app import Trouble
from app.config import CHANGEABLE, SETTINGS, VARIABLE_PREFIX, Flat, RelationError, Settings
from app.fleet.discovery.file import told_with_line
from app.values import mask, spoken

CONFIG_VARIABLE = "COATCHECK_CONFIG"
"""Names the configuration file where no flag does."""


class SettingsError(Trouble):
    """The settings cannot be used: a line for each reason, with secrets masked."""

    def __init__(self, problems: Iterable[str]) -> None:
        super().__init__(*map(mask, problems), code=2)


class Origin(NamedTuple):
    """Where a value comes from: the kind of source, and the setting's name there as the user wrote it."""

    kind: Literal["flag", "variable", "file", "default"]
    name: str
    file: str = ""
    line: int = 0
    """Of the file; 0: not known."""

    def __str__(self) -> str:
        if self.kind == "default":
            return "default"
        return f"{self.kind} {self.name}" if self.kind != "file" else f"{self.name} in {self.file}"

    @property
    def place(self) -> str:
        """Where in its file; for behind a message."""
        return f" (line {self.line})" if self.line else ""

    def with_value(self, value: str) -> str:
        """The setting as the user would have to write it."""
        if self.kind == "variable":
            return f"{self.name}={value}"
        if self.kind == "file":
            return f"{self.name} = {value} in {self.file}"
        return f"{self.name} {value}" + (" (the default)" if self.kind == "default" else "")


class EffectiveSettings(NamedTuple):
    settings: Settings
    origins: dict[str, Origin]
    """One for each setting."""

    def change(self, running: Settings) -> tuple[Settings, list[str], list[str]]:
        """What the settings of a `running` router become when its sources say these. Then which of them change, and
        which would and cannot, by their keys."""
        values: dict[str, Any] = {}
        changed: list[str] = []
        fixed: list[str] = []
        for name, setting in SETTINGS.items():
            value, new = setting.value(running), setting.value(self.settings)
            made_anew = setting.field.default_factory is not None and self.origins[name].kind == "default"
            if value != new and not made_anew:
                (changed if name in CHANGEABLE else fixed).append(setting.key)
            values[name] = new if name in CHANGEABLE else value
        return Settings.flat(**values), changed, fixed


def config_file(given: Path | None) -> Path | None:
    """The configuration file: what a flag names, else what the variable does."""
    named = os.environ.get(CONFIG_VARIABLE)
    return given if given is not None or not named else Path(named)


def read_settings(flags: Mapping[str, Any], file: Path | None = None) -> EffectiveSettings:
    """The settings from `flags` (setting → value as given), the process's environment, and `file`.

    Without `file`, COATCHECK_CONFIG may name one. Raises SettingsError.
    """
    values: dict[str, Any] = {}
    origins = {setting.name: Origin("default", setting.flag) for setting in SETTINGS.values()}
    problems: list[str] = []
    named_by = Origin("flag", "--config")
    if file is None and os.environ.get(CONFIG_VARIABLE):
        file, named_by = Path(os.environ[CONFIG_VARIABLE]), Origin("variable", CONFIG_VARIABLE)
    for key, value in _read_file(file, named_by).items() if file is not None else ():
        name = str(key).replace("-", "_")
        origin = Origin("file", str(key), str(file), _line_of(file, str(key)))
        if name not in SETTINGS:
            known = [setting.key for setting in SETTINGS.values()]
            problems.append(f"{file}{origin.place}: there is no setting {key!r}{_did_you_mean(str(key), known)}")
        elif name in values:
            twice = f"as {origins[name].name!r} and {key!r}; remove one"
            problems.append(f"{file}{origin.place}: {name!r} is given twice, {twice}")
        else:
            values[name], origins[name] = value, origin
    variables = [CONFIG_VARIABLE, *(setting.variable for setting in SETTINGS.values())]
    foreign = service_links()
    problems += [
        f"there is no variable {name}{_did_you_mean(name, variables)}"
        for name in sorted(os.environ)
        if name.startswith(VARIABLE_PREFIX) and name not in variables and name not in foreign
    ]
    if problems:
        raise SettingsError(problems)
    for name, value in EnvSettingsSource(Flat, case_sensitive=False)().items():
        if SETTINGS[name].variable not in foreign:
            values[name], origins[name] = value, Origin("variable", SETTINGS[name].variable)
    for name, value in flags.items():
        values[name], origins[name] = value, Origin("flag", SETTINGS[name].flag)
    try:
        return EffectiveSettings(Settings.flat(**values), origins)
    except ValidationError as error:
        raise SettingsError(_explain(error, values, origins)) from None
    except RuntimeError as error:  # Path.home()
        raise SettingsError([f"--claims: there is no home folder to keep claims in ({error}); name a store"]) from None


def service_links() -> list[str]:
    """The variables that Kubernetes sets in each pod beside a Service whose name begins as ours do, and that are no
    settings: COATCHECK_PORT=tcp://10.0.0.1:8000, COATCHECK_SERVICE_HOST=10.0.0.1 and their like. By name and value
    together: what was meant for us and is wrong is not among them."""
    return [name for name, value in sorted(os.environ.items()) if _is_service_link(name, value)]


def _is_service_link(name: str, value: str) -> bool:
    return any(
        re.fullmatch(f"{VARIABLE_PREFIX}(?:\\w+_)?{ending}", name, re.ASCII) is not None and is_meant(value)
        for ending, is_meant in _LINKED.items()
    )


def _is_service_place(value: str) -> bool:
    place = re.fullmatch(rf"{_PROTOCOL}://(.+):\d+", value)
    return place is not None and _is_cluster_address(place[1].removeprefix("[").removesuffix("]"))


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdecimal()


def _is_cluster_address(text: str) -> bool:
    """Whether a Service can have it: nobody's own, and not every address that there is."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(text)
        return not (address.is_unspecified or address.is_loopback)
    return False


_PROTOCOL = "(?:tcp|udp|sctp)"
_LINKED: dict[str, Callable[[str], bool]] = {
    "SERVICE_HOST": _is_cluster_address,
    r"SERVICE_PORT(?:_\w+)?": _is_number,
    "PORT": _is_service_place,
    r"PORT_\d+_(?:TCP|UDP|SCTP)": _is_service_place,
    r"PORT_\d+_(?:TCP|UDP|SCTP)_PROTO": lambda value: re.fullmatch(_PROTOCOL, value) is not None,
    r"PORT_\d+_(?:TCP|UDP|SCTP)_PORT": _is_number,
    r"PORT_\d+_(?:TCP|UDP|SCTP)_ADDR": _is_cluster_address,
}
"""How such a variable ends, behind the Service's name, and what its value is then."""


def _read_file(file: Path, named_by: Origin) -> dict[Any, Any]:
    """What a file says. What pydantic-settings passes over is looked at before it reads: a file that is not there, the
    first of two equal keys in YAML, and a YAML file without any keys."""
    named, remedy = named_by.with_value(str(file)), "name a TOML or YAML file (.toml, .yaml, .yml)"
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise SettingsError([f"{named}: its suffix does not tell how it is written; {remedy}"])
    try:
        if not file.is_file():
            raise OSError(errno.ENOENT, "No such file")
        if file.suffix == ".toml":
            return TomlConfigSettingsSource(Flat, file)()
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise SettingsError([f"{file}: has no settings at its top level; write lines like `port: 8000`"])
        keys = Counter(str(key.value) for key, _ in root.value) if root is not None else {}
        twice = [key for key, times in keys.items() if times > 1]
        if twice:
            raise SettingsError([f"{file}: {', '.join(twice)} is given twice; correct the file"])
        return YamlConfigSettingsSource(Flat, file)()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError([f"{named}: cannot be read ({reason}); {remedy}"]) from None
    except tomllib.TOMLDecodeError as error:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            said = told_with_line(error, file.read_text(encoding="utf-8"))
            raise SettingsError([f"{file}: {said}; correct the file"]) from None
        raise SettingsError([f"{file}: {error}; correct the file"]) from None
    except yaml.YAMLError as error:
        raise SettingsError([f"{file}: {' '.join(str(error).split())}; correct the file"]) from None


def _line_of(file: Path | None, key: str) -> int:
    """The line of a file that gives `key` its value; 0: not found. What parses these files does not tell."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None else []
        gives = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*[=:]""").match
        return next((number for number, line in enumerate(lines, 1) if gives(line)), 0)
    return 0


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else "; remove it"


def _explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[str]:
    """One line for each problem: the setting as it was written, its value, what is wrong, the remedy."""

    def written(name: str) -> str:
        setting, origin = SETTINGS[name], origins[name]
        value = values[name] if name in values else setting.field.get_default(call_default_factory=True)
        if origin.kind == "flag" and isinstance(value, bool):
            return setting.flag if value else f"--no-{setting.key}"
        return origin.with_value("********" if setting.field.annotation is SecretStr else spoken(value) or "''")

    lines = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, RelationError):
            places = "".join(origins[name].place for name in cause.names)
            lines.append(f"{' with '.join(map(written, cause.names))}: {cause.message}{places}")
        else:
            name = str(problem["loc"][1])
            wrong = cause or SETTINGS[name].spoken.wrong or f"must be {SETTINGS[name].expected}"
            lines.append(f"{written(name)}: {wrong}{origins[name].place}")
    return list(dict.fromkeys(lines))
