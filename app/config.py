"""Every setting, once: its name, group, type, bounds, default and meaning are its field. Flags, variables, keys of the
configuration file, help and documentation are made from it; settings are frozen and checked whole, relations too.

In code they stand in groups (`settings.limits.turn_timeout`); a user writes a setting's own name, without its group.
Where their values come from is `app.sources`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import secrets
import socket
import ssl
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from annotated_types import BaseMetadata
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    SettingsConfigDict,
)

from app.fleet.discovery.urls import check_sources
from app.fleet.policies import POLICIES
from app.fleet.specs import lacking_phase, worker_specs
from app.http.origins import Origins
from app.http.tls import server_context
from app.listening import Place, read_peer_address, read_place, read_socket_path
from app.sessions.identity import BODY_FIELDS, DEFAULT_SOURCES, Identifier
from app.sessions.tenants import checked_key, read_key, read_keys, read_secret
from app.turn.fields import parse_aliases
from app.turn.paths import ENGINE_PATHS, NO_ENGINE_PATHS, Paths
from app.values import (
    NO_PEERS,
    Secret,
    Spoken,
    Texts,
    check_ca,
    check_peer_listen,
    check_pem,
    check_proxies,
    check_secret,
    check_secret_file,
    split_by,
    spoken,
    usable,
)

MIB = 1024 * 1024
VARIABLE_PREFIX = "COATCHECK_"


def _default_claims() -> str:
    """A folder of this user, so that replicas on one machine agree out of the box."""
    return (state_folder() / "claims").as_uri()


def state_folder() -> Path:
    """This user's, for what outlives a process (XDG base directories). Raises RuntimeError: there is no home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # the specification: a relative path is to be ignored
        state = Path.home() / ".local" / "state"
    return state / "coatcheck"


def _default_replica() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


class RelationError(ValueError):
    """Settings that are each right and do not fit together."""

    def __init__(self, first: str, second: str, message: str) -> None:
        super().__init__(f"{first} and {second}: {message}")
        self.names = (first, second)
        self.message = message


# --- the settings; what stands below each is its meaning in help and documentation ----------------------------------


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes the one for the other."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("truth", "a truth value")
        return value


def _either(secret: SecretStr, file: Path | None) -> str:
    return read_secret(file) if file is not None else secret.get_secret_value()


class Listen(_Group, title="listening"):
    host: Annotated[str, Spoken("ADDRESS")] = Field("127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    uds: Annotated[str | None, Spoken("PATH"), usable(read_socket_path)] = None
    """Unix socket to listen on in place of host and port, like /run/coatcheck/http: for a proxy on this machine, of our
    user or group."""
    tls_cert: Annotated[Path | None, usable(check_pem, "name a PEM file with certificates")] = None
    """Certificates (PEM) by which clients are served over TLS, our own first; read again when the file changes."""
    tls_key: Annotated[
        Path | None,
        Spoken(default="in tls-cert's file"),
        usable(check_pem, "name a PEM file with the private key"),
    ] = None
    """Private key (PEM) of tls-cert."""
    processes: int = Field(1, ge=1, le=256)
    """Router processes that share the port; each is a replica."""
    peer_listen: Annotated[str | None, Spoken("ADDRESS", default="a free port of host"), usable(check_peer_listen)] = (
        None
    )
    """Where the other replicas of the same store reach this one, as HOST:PORT, each of several processes at the next
    free port from PORT on; off: nowhere."""
    peer_address: Annotated[str | None, Spoken("ADDRESS", default="where it listens"), usable(read_peer_address)] = None
    """What the other replicas are told to connect to, as HOST or HOST:PORT, where that is not what peer-listen says."""
    keepalive_timeout: int = Field(75, ge=1, le=3600)
    """Seconds an idle client connection is kept."""
    trusted_proxies: Annotated[tuple[str, ...], NoDecode, split_by(r"[\s,]+"), usable(check_proxies)] = ()
    """Proxies in front whose X-Forwarded-* headers are passed on to workers, as addresses or networks; unix: who comes
    by the unix socket; *: everybody; repeatable (in a variable: separated by spaces)."""

    @property
    def place(self) -> Place:
        """Where clients come in."""
        return Place(self.host, self.port) if self.uds is None else Place(path=read_socket_path(self.uds))

    def tls(self) -> ssl.SSLContext | None:
        """Made of the files as they are now; None: clients are served without. Raises OSError, ValueError."""
        return None if self.tls_cert is None else server_context(self.tls_cert, self.tls_key)


class Workers(_Group, title="workers"):
    worker: Annotated[Texts, Spoken("URL"), usable(worker_specs)] = ()
    """A worker, as
    URL[,name=NAME][,dp=RANKS][,phase=PHASE][,handover=ENGINE][,bootstrap-port=PORT][,kv-events=URL][,kv-replay=URL]
    (phase: prefill, decode, or both, which is the default; handover, of a worker with a phase: vllm, which is the
    default, or sglang; KV events at tcp://HOST:PORT); repeatable (in a variable: separated by spaces)."""
    workers_from: Annotated[Texts, Spoken("URL"), usable(check_sources)] = ()
    """Where other workers are found: file:///path.toml, dns://name:port, dns+srv://name, or the claims URL where they
    register; without any, and without a worker: at claims; repeatable (in a variable: separated by spaces)."""
    worker_grace: float = Field(30.0, ge=0, le=86_400)
    """Seconds after which a worker that is named no more is gone."""
    policy: Annotated[str, Spoken(wrong=f"no such policy; choose one of {', '.join(POLICIES)}")] = Field(
        "least-loaded",
        pattern=f"^({'|'.join(POLICIES)})$",
        description=f"Where new sessions go: {', '.join(POLICIES)}.",
    )
    prefix_memory: int = Field(64, ge=1, le=65_536)
    """MiB in which policies prefix and kv remember which prompts went where."""
    tokenize_timeout: float = Field(0.5, gt=0, le=60)
    """Seconds that policy kv waits for a worker to make a prompt tokens; then it is placed as by prefix."""
    rank_header: Annotated[str, Spoken(wrong="not the name of a header; write one like X-data-parallel-rank")] = Field(
        "X-data-parallel-rank", pattern=r"^[A-Za-z0-9!#$%&'*.^_`|~-]+$"
    )
    """Header that tells a worker with ranks which of them is meant."""
    worker_api_key: Annotated[Secret, usable(checked_key)] = SecretStr("")
    """Key sent to the workers in place of the client's, which then stays here."""
    worker_api_key_file: Annotated[Path | None, usable(read_key, "name a file with one key")] = None
    """File that holds the worker API key."""
    engine_paths: Annotated[Texts, Spoken("PATH"), usable(Paths)] = Field(
        ENGINE_PATHS,
        description=f"Paths outside /v1 that workers answer, like those below it; {NO_ENGINE_PATHS}: no path; "
        "repeatable (in a variable: separated by spaces).",
    )
    model_alias: Annotated[Texts, Spoken("ALIAS=MODEL"), usable(parse_aliases)] = ()
    """What clients may call a model, like small=qwen3-8b: the name is replaced in their requests; repeatable (in a
    variable: separated by spaces)."""
    models_interval: float = Field(30.0, ge=0, le=86_400)
    """Seconds between questions to a worker which models it serves; 0: none is asked, and any may be sent any model."""
    unknown_models: Literal["refuse", "pass"] = "refuse"
    """A model that no worker lists: refused here (404), or passed to any worker, for engines that take any name."""
    worker_ca: Annotated[
        Path | None, Spoken(default="the system's"), usable(check_ca, "name a PEM file with CA certificates")
    ] = None
    """CA certificates (PEM) for https workers."""
    worker_tls_verify: bool = True
    """Verify the certificates of https workers."""
    worker_keepalive: float = Field(4.0, ge=0, le=3600)
    """Seconds an idle connection to a worker is kept; below the worker's own limit."""

    max_turns: int = Field(0, ge=0)
    """Turns that a worker, or each of its ranks, has at once of this replica; 0: no limit. More wait."""
    probe_path: Annotated[str, Spoken("PATH", wrong="not a path; write one like /health, or off")] = Field(
        "/health", pattern=r"^(off|/[\x21-\x7e]*)$"
    )
    """Path at which workers are asked how they are; off: they are not, and only their turns tell."""
    probe_interval: float = Field(2.0, ge=0.1, le=3600)
    """Seconds between two probes of a worker, a fifth more or less."""
    probe_timeout: float = Field(2.0, gt=0, le=300)
    """Seconds that a worker has to answer a probe."""
    good_probes: int = Field(2, ge=1, le=100)
    """Good probes in a row until a worker that was suspected or down is up again."""
    suspect_after: int = Field(3, ge=1, le=1000)
    """Turns, or probes, failed in a row until a worker is suspected: it gets no new sessions."""
    down_after: float = Field(5.0, gt=0, le=3600)
    """Seconds that a worker may be suspected without one good sign until it is down: its sessions move."""
    slow_start: float = Field(10.0, ge=0, le=3600)
    """Seconds in which the share of a worker grows that is new, or was down; 0: it has all of it at once."""

    @property
    def key(self) -> str:
        """The key for the workers, wherever it was given; empty: the client's is passed on."""
        return _either(self.worker_api_key, self.worker_api_key_file)


class Access(_Group, title="who may"):
    api_keys: Annotated[Path | None, usable(read_keys, "name a file of API keys")] = None
    """File of API keys, one `TENANT sha256:HEX` a line; without it everybody may, as one tenant."""
    allowed_origins: Annotated[tuple[str, ...], NoDecode, split_by(r"[\s,]+"), Spoken("ORIGIN"), usable(Origins)] = ()
    """Sites whose pages may use the router from a browser, like https://chat.example.com; *: all; repeatable (in a
    variable: separated by spaces)."""
    admin_token: Annotated[Secret, usable(checked_key)] = SecretStr("")
    """Bearer token of the admin API; without it only this machine may use that API, and only while nobody else can
    connect to where it is served."""
    admin_token_file: Annotated[Path | None, usable(read_key, "name a file with one token")] = None
    """File that holds the admin token."""
    admin_listen: Annotated[str | None, Spoken("ADDRESS"), usable(read_place)] = None
    """Where the admin API is served in place of the public port, as HOST:PORT or unix:/path."""

    @property
    def token(self) -> str:
        """The admin token, wherever it was given; empty: there is none."""
        return _either(self.admin_token, self.admin_token_file)

    @property
    def admin_place(self) -> Place | None:
        """None: the admin API is served on the public port."""
        return read_place(self.admin_listen) if self.admin_listen is not None else None


class Sessions(_Group, title="sessions"):
    session_from: Annotated[Texts, usable(Identifier)] = Field(
        DEFAULT_SOURCES,
        description=f"Where a session's id is looked for, in this order: {', '.join(DEFAULT_SOURCES)}, "
        f"header:NAME[+AGENT_HEADER][/PARENT_HEADER] or body:FIELD ({', '.join(BODY_FIELDS)}); "
        "repeatable (in a variable: separated by spaces).",
    )
    affinity: Literal["hard", "soft"] = "hard"
    """Whether a session may pass over its worker for one turn when that is overloaded (soft)."""
    overload: int = Field(0, ge=0)
    """Turns in flight at a target from which on it counts as overloaded; 0: never."""
    parent_slack: int = Field(16, ge=0)
    """A child session follows its parent unless that target has more turns than this above the least."""
    prefill_from: int = Field(8192, ge=0)
    """Bytes of a known session's request that are new where it is, from which on a worker with phase=prefill computes
    its prompt; less goes whole to its worker with phase=decode; 0: no turn does."""
    hints: Literal["follow", "pass"] = "follow"
    """Placement hints of clients: followed here, or passed on unjudged (pass) to workers that are routers."""
    hint_conflict: Literal["override", "reject"] = "override"
    """A hint that a claim contradicts: the claim overrides it, or the turn is rejected (400)."""
    log_bindings: float = Field(0.0, ge=0, le=1)
    """Share of the sessions of which each binding decision is logged."""


class Store(_Group, title="claims"):
    claims: Annotated[
        str,
        Spoken(
            value="URL",
            default="file://STATE/coatcheck/claims",
            wrong="unknown kind of claim store; write memory://, file:///dir or etcd://host:2379/prefix",
        ),
    ] = Field(default_factory=_default_claims, pattern="^(?i:memory|file|etcd):")
    """Where claims live: memory://, file:///dir or etcd://host:2379[,host:2379]/prefix."""
    session_ttl: float = Field(1800.0, ge=1, le=31_536_000)
    """Seconds that a claim outlives the end of its session's last turn."""
    kept_ttl: float = Field(0.0, ge=0, le=31_536_000)
    """Seconds after the last use in which a stored response, file, batch or conversation is found by its id; 0: as
    session-ttl."""
    session_secret: Annotated[Secret, usable(check_secret)] = SecretStr("")
    """Keys the hash of session ids in the store; the same on every replica, at most 64 bytes."""
    session_secret_file: Annotated[Path | None, usable(check_secret_file, "name a file with the secret")] = None
    """File that holds the session secret."""
    on_store_outage: Literal["degrade", "refuse"] = "degrade"
    """New sessions while the claim store is away: placed by hash (degrade) or answered 503 (refuse)."""
    store_deadline: float = Field(2.0, gt=0, le=60)
    """Seconds that one claim store call may take."""
    max_stale: float = Field(60.0, gt=0, le=3600)
    """Seconds after which a cached claim is read again before it is used."""
    claim_cache: int = Field(100_000, ge=1)
    """Claims kept in memory; others are read when needed."""
    replica: Annotated[str, Spoken(default="made of host name, process id and chance")] = Field(
        default_factory=_default_replica, min_length=1, max_length=100
    )
    """This replica's name in claims; unique. Each of several processes adds a number."""

    @property
    def places(self) -> list[tuple[str, int]]:
        """Host and port of each of the store's endpoints; none: it has no network of its own."""
        parts = urlsplit(self.claims)
        hosts = parts.netloc.rpartition("@")[2].split(",") if parts.scheme == "etcd" else []
        found = (re.fullmatch(r"\[?(.*?)\]?(?::(\d+))?", host) for host in hosts)
        return [(each[1], int(each[2] or 2379)) for each in found if each is not None]

    @property
    def secret(self) -> str:
        """The session secret, wherever it was given; empty: there is none."""
        return _either(self.session_secret, self.session_secret_file)


class Limits(_Group, title="limits of a turn"):
    connect_timeout: float = Field(5.0, gt=0, le=300)
    """Seconds to connect to a worker."""
    first_byte_timeout: float = Field(600.0, ge=0)
    """Seconds until a worker begins to answer, prefill included; 0: no limit."""
    idle_timeout: float = Field(300.0, ge=0)
    """Seconds a worker may pause within an answer; 0: no limit."""
    turn_timeout: float = Field(0.0, ge=0)
    """Seconds for a whole turn; 0: no limit."""
    max_turns_per_tenant: int = Field(0, ge=0)
    """Turns that a tenant has at once at this replica; 0: no limit. More wait."""
    queue_limit: int = Field(1000, ge=0, le=1_000_000)
    """Turns that may wait at this replica because of max-turns or max-turns-per-tenant; 0: none, they are refused."""
    queue_timeout: float = Field(30.0, gt=0, le=3600)
    """Seconds that a turn may wait so, in all, before it is refused: 429 at its tenant's limit, else 503."""
    max_body_bytes: int = Field(64 * MIB, ge=1024)
    """Largest request body, in bytes."""
    max_header_bytes: int = Field(65_536, ge=1024, le=1_048_576)
    """Largest head of a request: its target and headers, in bytes."""
    client_head_timeout: float = Field(30.0, ge=0, le=3600)
    """Seconds from a request's first byte to the end of its head; 0: no limit."""
    client_body_timeout: float = Field(60.0, ge=0, le=3600)
    """Seconds a client may pause within a request body; 0: no limit."""
    client_read_timeout: float = Field(300.0, ge=0, le=86_400)
    """Seconds a client may take nothing of its answer; 0: no limit."""


class Process(_Group, title="shutdown and log"):
    drain_delay: float = Field(0.0, ge=0, le=600)
    """Seconds that /ready fails before the port closes, on a first SIGTERM or SIGINT."""
    drain_timeout: int = Field(30, ge=0, le=86_400)
    """Seconds that running turns get at shutdown."""
    otel_endpoint: Annotated[str | None, Spoken("URL", wrong="not a URL; write one like http://collector:4318")] = (
        Field(None, pattern=r"^https?://[^/\s]+")
    )
    """Where traces go, by OTLP over HTTP, like http://collector:4318; without it, where OpenTelemetry's own variables
    say, if they do; needs coatcheck[otel]."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level logged."""
    log_format: Literal["text", "json"] = "text"
    """How a line of the log is written."""
    access_log: Literal["off", "errors", "all"] = "errors"
    """Turns of which the log has a line: none, those that failed, or all."""


class Settings(_Group):
    """The settings of one replica, in the order in which help and documentation show them."""

    listen: Listen
    workers: Workers
    access: Access
    sessions: Sessions
    store: Store
    limits: Limits
    process: Process

    @property
    def peer_place(self) -> Place | None:
        """Where to listen for peers; port 0: a free one. None: nowhere, or there can be none."""
        chosen = self.listen.peer_listen
        if chosen == NO_PEERS or self.store.claims.lower().startswith("memory:"):
            return None
        return read_place(chosen) if chosen is not None else Place(self.listen.host, 0)

    @property
    def admin_is_local(self) -> bool:
        """Whether only this machine can connect to where the admin API is served, and for itself: at a public unix
        socket a proxy does, for anybody."""
        place = self.access.admin_place
        return place.is_local if place is not None else self.listen.uds is None and self.listen.place.is_local

    @classmethod
    def flat(cls, **values: Any) -> Self:
        """From settings by their own names; the others have their defaults. Raises ValidationError."""
        groups: dict[str, dict[str, Any]] = {group: {} for group in cls.model_fields}
        for name, value in values.items():
            groups[SETTINGS[name].group][name] = value
        return cls.model_validate(groups)

    @property
    def registers_only(self) -> bool:
        """No worker is given, and no place to find some: they are those that register at the claims."""
        return not self.workers.worker and not self.workers.workers_from

    def dump(self) -> str:
        """JSON that `load` reads, with secrets in clear: a file that is changed later must not divide processes."""
        values = {name: setting.value(self) for name, setting in SETTINGS.items()}
        for name in SECRETS:
            values[name], values[f"{name}_file"] = _either(values[name], values[f"{name}_file"]), None
        return json.dumps(values, default=lambda v: v.get_secret_value() if isinstance(v, SecretStr) else str(v))

    @classmethod
    def load(cls, dumped: str) -> Self:
        return cls.flat(**json.loads(dumped))

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        workers, sessions, store, limits = self.workers, self.sessions, self.store, self.limits
        self._check_tls()
        if self.listen.processes > 1 and store.claims.startswith("memory:"):
            why = "several processes cannot share memory; use file:///dir or etcd://host:2379/..."
            raise RelationError("processes", "claims", why)
        if not workers.workers_from and (lacking := lacking_phase(worker_specs(workers.worker))):
            raise RelationError("worker", "workers_from", f"there are {lacking}")
        if store.store_deadline >= store.session_ttl:
            why = "a claim would expire while it is being made; the deadline must be below the TTL"
            raise RelationError("store_deadline", "session_ttl", why)
        if 0 < store.kept_ttl <= store.store_deadline:
            why = "a claim would expire while it is being made; the deadline must be below the TTL, or that 0"
            raise RelationError("store_deadline", "kept_ttl", why)
        if 0 < limits.turn_timeout <= limits.connect_timeout:
            why = "a turn would end before its connection may fail; make the turn's limit the larger one, or 0"
            raise RelationError("turn_timeout", "connect_timeout", why)
        if sessions.affinity == "soft" and not sessions.overload:
            why = "soft affinity needs to know when a target is overloaded; set a number of turns"
            raise RelationError("affinity", "overload", why)
        for name in SECRETS:
            file = f"{name}_file"
            if SETTINGS[name].value(self).get_secret_value() and SETTINGS[file].value(self) is not None:
                raise RelationError(name, file, "the secret is given twice; remove one")
        if sessions.hints == "pass" and sessions.hint_conflict == "reject":
            raise RelationError("hints", "hint_conflict", "hints that are not judged conflict with nothing; choose one")
        if sessions.hints == "pass" and workers.policy == "direct":
            raise RelationError(
                "hints", "policy", "direct places by hints alone; follow them, or choose another policy"
            )
        if workers.worker_ca is not None and not workers.worker_tls_verify:
            why = "certificates that are not verified need no CA; remove one of them"
            raise RelationError("worker_ca", "worker_tls_verify", why)
        return self

    def _check_tls(self) -> None:
        listen = self.listen
        if listen.tls_key is not None and listen.tls_cert is None:
            raise RelationError("tls_key", "tls_cert", "a key without certificates; name those as well")
        if listen.tls_cert is not None and listen.uds is not None:
            raise RelationError("uds", "tls_cert", "no TLS is spoken at a unix socket; remove one of them")
        try:
            listen.tls()
        except ssl.SSLError as error:
            why = "they do not fit together" if error.reason == "KEY_VALUES_MISMATCH" else "there is no such pair"
            said = f"{why} ({error.reason or error}); name certificates, the server's own first, and its key"
            raise RelationError("tls_cert", "tls_key", said) from None
        except (OSError, ValueError) as error:
            raise RelationError("tls_cert", "tls_key", str(error)) from None


class Flat(Listen, Workers, Access, Sessions, Store, Limits, Process, BaseSettings):
    """What pydantic-settings' sources look at: every setting by its own name. Nobody makes one."""

    model_config = SettingsConfigDict(env_prefix=VARIABLE_PREFIX, env_ignore_empty=True, case_sensitive=True)


class Setting:
    """One setting in words, from its field. `group`: the field of Settings that it is in; `title`: that group's."""

    def __init__(self, name: str, group: str, title: str, field: FieldInfo) -> None:
        self.name, self.group, self.title, self.field = name, group, title, field
        self.key = name.replace("_", "-")
        self.flag = f"--{self.key}"
        self.variable = VARIABLE_PREFIX + name.upper()
        self.spoken = next((each for each in field.metadata if isinstance(each, Spoken)), Spoken())
        self.expected = _expected(field)

    @property
    def meaning(self) -> str:
        return " ".join((self.field.description or _texts()[self.name]).split())

    def value(self, settings: Settings) -> Any:
        return getattr(getattr(settings, self.group), self.name)


@functools.cache
def _texts() -> dict[str, str]:
    """What stands below the fields. Pydantic's `use_attribute_docstrings` would look for it in every process."""
    classes = [node for node in ast.parse(Path(__file__).read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: str(text.value.value)
        for each in classes
        for field, text in itertools.pairwise(each.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _expected(field: FieldInfo) -> str:
    """What a setting may be: "a whole number from 0 to 65535"."""
    kind, choices = field.annotation, get_args(field.annotation)
    constraints: list[Any] = [each for each in field.metadata if isinstance(each, BaseMetadata)]
    bounds: dict[str, str] = {name: spoken(getattr(each, name)) for each in constraints for name in each.__slots__}
    if choices and all(isinstance(choice, str) for choice in choices):
        return "one of " + ", ".join(choices)
    if kind is int or kind is float:
        noun = "a whole number" if kind is int else "a number"
        if "gt" in bounds:
            return f"{noun} above {bounds['gt']} and at most {bounds['le']}"
        return noun + (f" from {bounds['ge']} to {bounds['le']}" if "le" in bounds else f", {bounds['ge']} or more")
    if "max_length" in bounds:
        return f"text of 1 to {bounds['max_length']} characters"
    if "min_length" in bounds:
        return "text, and not empty"
    others: dict[Any, str] = {
        bool: "true or false",
        tuple[str, ...]: "a list of texts",
        Path | None: "the path of a file",
    }
    return others.get(kind, "text, in quotes")


SETTINGS = {
    name: Setting(name, group, str(model.annotation.model_config["title"]), field)
    for group, model in Settings.model_fields.items()
    if model.annotation is not None
    for name, field in model.annotation.model_fields.items()
}
"""Every setting, by its own name, in the order in which help and documentation show them."""
CHANGEABLE = frozenset(
    {
        *("worker", "workers_from", "worker_api_key", "worker_api_key_file", "api_keys", "model_alias"),
        *(
            "connect_timeout",
            "first_byte_timeout",
            "idle_timeout",
            "turn_timeout",
            "max_body_bytes",
            "max_header_bytes",
        ),
        *("client_head_timeout", "client_body_timeout", "client_read_timeout", "keepalive_timeout"),
    }
)
"""The settings that a running router takes up again."""
SECRETS = tuple(name for name, setting in SETTINGS.items() if setting.field.annotation is SecretStr)
"""Each of them can be given as `NAME_file` too."""
