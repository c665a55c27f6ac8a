"""Every setting, once: its name, type, bounds, default and meaning. Flags, `COATCHECK_*` variables and the
configuration file are all made from these fields; settings are frozen and checked whole, relations too.

`read_settings` puts the three sources together (flag > variable > file > default) and says what is wrong with them in
the words in which the user wrote it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import socket
import ssl
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import annotated_types
import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.fleet.policies import POLICIES
from app.fleet.workers import WorkerError, normal_url, worker_name
from app.http.headers import Forwarding
from app.sessions.identity import BODY_FIELDS, DEFAULT_SOURCES, Identifier
from app.sessions.tenants import read_keys

MIB = 1024 * 1024
VARIABLE_PREFIX = "COATCHECK_"
CONFIG_VARIABLE = "COATCHECK_CONFIG"
"""Names the configuration file where no flag does."""

SPOKEN_DEFAULTS = {
    "claims": "file://STATE/coatcheck/claims",
    "replica": "made of host name, process id and chance",
    "worker_ca": "the system's",
}
"""Defaults that are made at start, in words. STATE: `$XDG_STATE_HOME`, else `~/.local/state`."""


def default_claims() -> str:
    """A folder of this user, so that replicas on one machine agree out of the box (XDG base directories)."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # the specification: a relative path is to be ignored
        state = Path.home() / ".local" / "state"
    return (state / "coatcheck" / "claims").as_uri()


def _default_replica() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


class WorkerSpec:
    """One `--worker URL[,name=NAME][,dp=N]`. Raises ValueError with the remedy."""

    __slots__ = ("name", "ranks", "url")

    def __init__(self, text: str) -> None:
        url, *options = text.split(",")
        self.url = normal_url(url)
        self.name = worker_name(self.url)
        self.ranks = 0
        for option in options:
            key, equals, value = (part.strip() for part in option.partition("="))
            if key == "name" and equals:
                if not value or len(value) > 64 or not all(0x21 <= ord(c) <= 0x7E for c in value):
                    raise WorkerError(f"worker {text!r}: a name is 1 to 64 visible ASCII characters without spaces")
                self.name = value
            elif key == "dp" and equals:
                if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 1024:
                    raise WorkerError(f"worker {text!r}: dp is its number of data-parallel ranks, 1 to 1024")
                self.ranks = int(value)
            else:
                raise WorkerError(
                    f"worker {text!r} has the unknown option {option!r}; write URL[,name=NAME][,dp=RANKS]"
                )


class RelationError(ValueError):
    """Settings that are each right and do not fit together."""

    def __init__(self, fields: tuple[str, ...], message: str) -> None:
        super().__init__(f"{' and '.join(fields)}: {message}")
        self.fields = fields
        self.message = message


class Settings(BaseSettings):
    """The settings of one replica."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=VARIABLE_PREFIX,
        env_ignore_empty=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    processes: int = Field(1, ge=1, le=256, description="Router processes that share the port; each is a replica.")
    claims: str = Field(
        default_factory=default_claims,
        description="Where claims live: memory://, file:///dir or etcd://host:2379[,host:2379]/prefix.",
    )
    worker: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="A worker, as URL[,name=NAME][,dp=RANKS]; repeatable (in a variable: separated by spaces)."
    )
    policy: str = Field("least-loaded", description=f"Where new sessions go: {', '.join(POLICIES)}.")
    session_ttl: float = Field(
        1800.0, ge=1, le=31_536_000, description="Seconds that a claim outlives the end of its session's last turn."
    )
    max_stale: float = Field(
        60.0, gt=0, le=3600, description="Seconds after which a cached claim is read again before it is used."
    )
    claim_cache: int = Field(100_000, ge=1, description="Claims kept in memory; others are read when needed.")
    on_store_outage: Literal["degrade", "refuse"] = Field(
        "degrade",
        description="New sessions while the claim store is away: placed by hash (degrade) or answered 503 (refuse).",
    )
    store_deadline: float = Field(2.0, gt=0, le=60, description="Seconds that one claim store call may take.")
    session_secret: SecretStr = Field(
        SecretStr(""),
        description="Keys the hash of session ids in the store; the same on every replica, at most 64 bytes.",
    )
    replica: str = Field(
        default_factory=_default_replica,
        min_length=1,
        max_length=100,
        description="This replica's name in claims; unique. Each of several processes adds a number.",
    )
    session_from: Annotated[tuple[str, ...], NoDecode] = Field(
        DEFAULT_SOURCES,
        description="Where a session's id is looked for, in this order: HEADER[+AGENT_HEADER][/PARENT_HEADER] or "
        f"body:FIELD ({', '.join(BODY_FIELDS)}); repeatable (in a variable: separated by spaces).",
    )
    rank_header: str = Field(
        "X-data-parallel-rank",
        description="Header that tells a worker with ranks which of them is meant.",
    )
    affinity: Literal["hard", "soft"] = Field(
        "hard", description="Whether a session may pass over its worker for one turn when that is overloaded (soft)."
    )
    overload: int = Field(
        0, ge=0, description="Turns in flight at a target from which on it counts as overloaded; 0: never."
    )
    parent_slack: int = Field(
        16,
        ge=0,
        description="A child session follows its parent unless that target has more turns than this above the least.",
    )
    hint_conflict: Literal["override", "reject"] = Field(
        "override",
        description="A hint that a claim contradicts: the claim overrides it, or the turn is rejected (400).",
    )
    api_keys: Path | None = Field(
        None, description="File of API keys, one `TENANT sha256:HEX` a line; without it everybody may, as one tenant."
    )
    worker_api_key: SecretStr = Field(
        SecretStr(""), description="Key sent to the workers in place of the client's, which then stays here."
    )
    worker_api_key_file: Path | None = Field(None, description="File that holds the worker API key.")
    admin_token: SecretStr = Field(
        SecretStr(""), description="Bearer token of the admin API; without it only this machine may use that API."
    )
    log_bindings: float = Field(
        0.0, ge=0, le=1, description="Share of the sessions of which each binding decision is logged."
    )
    connect_timeout: float = Field(5.0, gt=0, le=300, description="Seconds to connect to a worker.")
    first_byte_timeout: float = Field(
        600.0, ge=0, description="Seconds until a worker begins to answer, prefill included; 0: no limit."
    )
    idle_timeout: float = Field(300.0, ge=0, description="Seconds a worker may pause within an answer; 0: no limit.")
    turn_timeout: float = Field(0.0, ge=0, description="Seconds for a whole turn; 0: no limit.")
    worker_keepalive: float = Field(
        4.0, ge=0, le=3600, description="Seconds an idle connection to a worker is kept; below the worker's own limit."
    )
    worker_ca: Path | None = Field(None, description="CA certificates (PEM) for https workers.")
    worker_tls_verify: bool = Field(True, description="Verify the certificates of https workers.")
    max_body_bytes: int = Field(64 * MIB, ge=1024, description="Largest request body, in bytes.")
    max_header_bytes: int = Field(
        65_536, ge=1024, le=1_048_576, description="Largest head of a request: its target and headers, in bytes."
    )
    client_head_timeout: float = Field(
        30.0, ge=0, le=3600, description="Seconds from a request's first byte to the end of its head; 0: no limit."
    )
    client_body_timeout: float = Field(
        60.0, ge=0, le=3600, description="Seconds a client may pause within a request body; 0: no limit."
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Proxies in front whose X-Forwarded-* headers are passed on to workers, as addresses or networks; "
        "*: everybody; repeatable (in a variable: separated by spaces).",
    )
    keepalive_timeout: int = Field(75, ge=1, le=3600, description="Seconds an idle client connection is kept.")
    drain_delay: float = Field(
        0.0, ge=0, le=600, description="Seconds that /ready fails before the port closes, on a first SIGTERM or SIGINT."
    )
    drain_timeout: int = Field(30, ge=0, le=86_400, description="Seconds that running turns get at shutdown.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")

    @field_validator("worker", "session_from", "trusted_proxies", mode="before")
    @classmethod
    def _split_workers(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(value.split())
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(url for item in value for url in item.split())
        return value

    @field_validator("worker")
    @classmethod
    def _check_workers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names: dict[str, str] = {}
        urls: dict[str, str] = {}
        for text in value:
            spec = WorkerSpec(text)
            if spec.url in urls:
                raise ValueError(f"{urls[spec.url]} and {text} are the same worker; remove one")
            if spec.name in names:
                raise ValueError(
                    f"two workers are called {spec.name!r}: {names[spec.name]} and {text}; "
                    "remove one or give it another name (URL,name=NAME)"
                )
            names[spec.name] = urls[spec.url] = text
        return value

    @field_validator("session_from")
    @classmethod
    def _check_sources(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        Identifier(value)
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        value = tuple(part for text in value for part in text.split(",") if part)
        for text in value:
            try:
                Forwarding((text,))
            except ValueError:
                raise ValueError(f"{text!r} is neither an address nor a network; write one like 10.0.0.0/8") from None
        return value

    @field_validator("rank_header")
    @classmethod
    def _check_header(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*.^_`|~-]+", value):
            raise ValueError("not the name of a header; write one like X-data-parallel-rank")
        return value

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                read_keys(value)
            except OSError as error:
                raise ValueError(f"the file cannot be read ({error.strerror}); name a file of API keys") from None
        return value

    @field_validator("worker_api_key_file")
    @classmethod
    def _check_key_file(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                _checked_key(value.read_text().strip())
            except OSError as error:
                raise ValueError(f"the file cannot be read ({error.strerror}); name a file with one key") from None
        return value

    @field_validator("worker_api_key")
    @classmethod
    def _check_key(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            _checked_key(value.get_secret_value())
        return value

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"no such policy; choose one of {', '.join(POLICIES)}")
        return value

    @field_validator("claims")
    @classmethod
    def _check_claims(cls, value: str) -> str:
        if urlsplit(value).scheme not in ("memory", "file", "etcd"):
            raise ValueError("unknown kind of claim store; write memory://, file:///dir or etcd://host:2379/prefix")
        return value

    @field_validator("session_secret")
    @classmethod
    def _check_secret(cls, value: SecretStr) -> SecretStr:
        if len(value.get_secret_value().encode()) > 64:
            raise ValueError("longer than 64 bytes; choose a shorter secret")
        return value

    @field_validator("worker_ca")
    @classmethod
    def _check_ca(cls, value: Path | None) -> Path | None:
        remedy = "name a PEM file with CA certificates"
        if value is not None:
            try:
                ssl.create_default_context(cafile=value)
            except ssl.SSLError:
                raise ValueError(f"the file has no certificates in it; {remedy}") from None
            except OSError as error:
                raise ValueError(f"the file cannot be read ({error.strerror}); {remedy}") from None
        return value

    @model_validator(mode="after")
    def _check_relations(self) -> Settings:
        if self.processes > 1 and self.claims.startswith("memory:"):
            raise RelationError(
                ("processes", "claims"),
                "several processes cannot share memory; use file:///dir or etcd://host:2379/...",
            )
        if self.store_deadline >= self.session_ttl:
            raise RelationError(
                ("store_deadline", "session_ttl"),
                "a claim would expire while it is being made; the deadline must be below the TTL",
            )
        if self.turn_timeout and self.turn_timeout <= self.connect_timeout:
            raise RelationError(
                ("turn_timeout", "connect_timeout"),
                "a turn would end before its connection may fail; make the turn's limit the larger one, or 0",
            )
        if self.affinity == "soft" and not self.overload:
            raise RelationError(
                ("affinity", "overload"),
                "soft affinity needs to know when a target is overloaded; set a number of turns",
            )
        if self.worker_api_key.get_secret_value() and self.worker_api_key_file is not None:
            raise RelationError(("worker_api_key", "worker_api_key_file"), "the key is given twice; remove one")
        if self.worker_ca is not None and not self.worker_tls_verify:
            raise RelationError(
                ("worker_ca", "worker_tls_verify"), "certificates that are not verified need no CA; remove one of them"
            )
        return self

    @property
    def worker_key(self) -> str:
        """The key for the workers, wherever it was given; empty: the client's is passed on."""
        if self.worker_api_key_file is not None:
            return self.worker_api_key_file.read_text().strip()
        return self.worker_api_key.get_secret_value()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


def _checked_key(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("a key is visible ASCII characters without spaces")
    return key


# --- the sources -----------------------------------------------------------------------------------------------------


class SettingsError(ValueError):
    """The settings cannot be used. `problems`: one line each, with secrets masked."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Origin(NamedTuple):
    """Where a value comes from: the kind of source, and the setting's name there as the user wrote it."""

    kind: Literal["flag", "variable", "file", "default"]
    name: str
    file: str = ""

    def __str__(self) -> str:
        if self.kind == "default":
            return "default"
        return f"{self.kind} {self.name}" if self.kind != "file" else f"{self.name} in {self.file}"

    def with_value(self, value: str) -> str:
        """The setting as the user would have to write it."""
        if self.kind == "flag":
            return f"{self.name} {value}"
        if self.kind == "variable":
            return f"{self.name}={value}"
        if self.kind == "file":
            return f"{self.name} = {value} in {self.file}"
        return f"{self.name} {value} (the default)"


class EffectiveSettings(NamedTuple):
    settings: Settings
    origins: dict[str, Origin]
    """One for each field."""


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    return VARIABLE_PREFIX + field.upper()


def read_settings(flags: Mapping[str, Any], file: Path | None = None) -> EffectiveSettings:
    """The settings from `flags` (field name → value as given), the process's environment, and `file`.

    Without `file`, COATCHECK_CONFIG may name one. Raises SettingsError.
    """
    values: dict[str, Any] = {}
    origins = {name: Origin("default", flag_name(name)) for name in Settings.model_fields}
    problems: list[str] = []
    if file is None and os.environ.get(CONFIG_VARIABLE):
        file = Path(os.environ[CONFIG_VARIABLE])
    if file is not None:
        known: dict[str, Any] = {}
        for key, value in _read_file(file).items():
            name = str(key).replace("-", "_")
            if name not in Settings.model_fields:
                problems.append(f"{file}: there is no setting {key!r}{_did_you_mean(name, Settings.model_fields)}")
            elif name in known:
                problems.append(f"{file}: {name!r} is given twice, as {origins[name].name!r} and {key!r}; remove one")
            else:
                known[name] = value
                origins[name] = Origin("file", str(key), str(file))
                # A truth value is a number to the checks below.
                if isinstance(value, bool) and Settings.model_fields[name].annotation is not bool:
                    shown = origins[name].with_value(_spoken(value))
                    problems.append(f"{shown}: must be {expected(Settings.model_fields[name])}")
        values |= known
    problems += _unknown_variables()
    for source, name_of, kind in (
        (EnvSettingsSource(Settings)(), variable_name, "variable"),
        (flags, flag_name, "flag"),
    ):
        for name, value in source.items():
            values[name] = value
            origins[name] = Origin(kind, name_of(name))  # type: ignore[arg-type]
    if problems:
        raise SettingsError([mask(problem) for problem in problems])
    try:
        return EffectiveSettings(Settings(**values), origins)
    except ValidationError as error:
        raise SettingsError([mask(line) for line in _explain(error, values, origins)]) from None
    except RuntimeError as error:  # Path.home()
        raise SettingsError([f"--claims: there is no home folder to keep claims in ({error}); name a store"]) from None


def dump_settings(settings: Settings) -> str:
    """JSON that `Settings.model_validate_json` reads back, with secrets in clear."""
    dumped = settings.model_dump(mode="json")
    for name in dumped:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            dumped[name] = value.get_secret_value()
    return json.dumps(dumped)


def shown_value(value: Any) -> str:
    """A value for people, without what is secret in it."""
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else "(none)"
    return mask(_spoken(value))


def mask(text: str) -> str:
    """`text` without the users and passwords of the URLs in it."""
    return re.sub(r"(?<=://)\S*@", "********@", text)


def expected(field: FieldInfo) -> str:
    """What a setting may be, in words: "a whole number from 0 to 65535"."""
    choices = get_args(field.annotation)
    if field.annotation is bool:
        return "true or false"
    if choices and all(isinstance(choice, str) for choice in choices):
        return "one of " + ", ".join(choices)
    if field.annotation is int or field.annotation is float:
        noun = "a whole number" if field.annotation is int else "a number"
        return noun + _spoken_bounds(field.metadata)
    if field.annotation == tuple[str, ...]:
        return "a list of texts"
    if field.annotation == Path | None:
        return "the path of a file"
    longest = [item.max_length for item in field.metadata if isinstance(item, annotated_types.MaxLen)]
    shortest = [item.min_length for item in field.metadata if isinstance(item, annotated_types.MinLen)]
    if longest:
        return f"text of 1 to {longest[0]} characters"
    return "text, and not empty" if shortest else "text, in quotes"


def _spoken_bounds(metadata: Iterable[Any]) -> str:
    low = high = ""
    inclusive = True
    for bound in metadata:
        if isinstance(bound, annotated_types.Ge):
            low = _spoken(bound.ge)
        elif isinstance(bound, annotated_types.Gt):
            low, inclusive = _spoken(bound.gt), False
        elif isinstance(bound, annotated_types.Le):
            high = _spoken(bound.le)
    if not inclusive:
        return f" above {low}" + (f" and at most {high}" if high else "")
    return f" from {low} to {high}" if high else f", {low} or more"


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(_spoken, value)) or "(none)"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "(none)" if value is None else str(value)


def _read_file(file: Path) -> dict[Any, Any]:
    remedy = "name a TOML or YAML file (.toml, .yaml, .yml)"
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise SettingsError([f"--config {file}: its suffix does not tell how it is written; {remedy}"])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError([f"--config {file}: cannot be read ({reason}); {remedy}"]) from None
    try:
        content = tomllib.loads(text) if file.suffix == ".toml" else _load_yaml(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise SettingsError([f"{file}: {' '.join(str(error).split())}; correct the file"]) from None
    if not isinstance(content, dict):
        raise SettingsError([f"{file}: has no settings at its top level; write lines like `port: 8000`"])
    return content


def _load_yaml(text: str) -> Any:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return {}
    if isinstance(root, yaml.MappingNode):
        # YAML forbids this and the library takes the last one.
        twice = [key for key, times in Counter(str(key.value) for key, _ in root.value).items() if times > 1]
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} is given twice")
    return yaml.safe_load(text)


def _unknown_variables() -> list[str]:
    known = {CONFIG_VARIABLE, *map(variable_name, Settings.model_fields)}
    return [
        f"there is no variable {name}{_did_you_mean(name, known)}"
        for name in sorted(os.environ)
        if name.startswith(VARIABLE_PREFIX) and name not in known
    ]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*known], 1, 0.5)
    return f"; did you mean {close[0]}?" if close else "; remove it"


def _explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[str]:
    """One line for each problem: the setting as it was written, its value, what is wrong, the remedy."""
    lines = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, RelationError):
            subject = " with ".join(_written(name, values, origins) for name in cause.fields)
            lines.append(f"{subject}: {cause.message}")
        else:
            name = str(problem["loc"][0])
            wrong = str(cause) if cause is not None else f"must be {expected(Settings.model_fields[name])}"
            lines.append(f"{_written(name, values, origins)}: {wrong}")
    return list(dict.fromkeys(lines))


def _written(name: str, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> str:
    field = Settings.model_fields[name]
    value = values[name] if name in values else field.get_default(call_default_factory=True)
    if origins[name].kind == "flag" and isinstance(value, bool):
        return flag_name(name) if value else f"--no-{name.replace('_', '-')}"
    return origins[name].with_value("********" if field.annotation is SecretStr else _spoken(value) or "''")
