"""Every setting, once: its name, type, bounds, default and meaning. Flags, `COATCHECK_*` variables and the
configuration file are all made from these fields; settings are frozen and checked whole, relations too."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from app.policies import POLICIES
from app.workers import WorkerError, normal_url, worker_name

MIB = 1024 * 1024


def default_claims() -> str:
    """A folder of this user, so that replicas on one machine agree out of the box (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return f"file://{Path(state) / 'coatcheck' / 'claims'}"


def _default_replica() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


class WorkerSpec:
    """One `--worker URL[,name=NAME]`. Raises ValueError with the remedy."""

    __slots__ = ("name", "url")

    def __init__(self, text: str) -> None:
        url, *options = text.split(",")
        self.url = normal_url(url)
        self.name = worker_name(self.url)
        for option in options:
            key, equals, value = option.partition("=")
            if key.strip() != "name" or not equals:
                raise WorkerError(f"worker {text!r} has the unknown option {option!r}; write URL or URL,name=NAME")
            value = value.strip()
            if not value or len(value) > 64 or not all(0x21 <= ord(c) <= 0x7E for c in value):
                raise WorkerError(f"worker {text!r}: a name is 1 to 64 visible ASCII characters without spaces")
            self.name = value


class Settings(BaseSettings):
    """The settings of one replica."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="COATCHECK_", env_ignore_empty=True, validate_default=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    processes: int = Field(1, ge=1, le=256, description="Router processes that share the port; each is a replica.")
    claims: str = Field(
        default_factory=default_claims,
        description="Where claims live: memory://, file:///dir or etcd://host:2379[,host:2379]/prefix.",
    )
    worker: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="A worker, as URL[,name=NAME]; repeatable (in a variable: separated by spaces)."
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
        default_factory=_default_replica, max_length=128, description="This replica's name in claims; unique."
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
    worker_ca: Path | None = Field(None, description="CA certificates (PEM) for https workers; default: the system's.")
    worker_tls_verify: bool = Field(True, description="Verify the certificates of https workers.")
    max_body_bytes: int = Field(64 * MIB, ge=1024, description="Largest request body, in bytes.")
    keepalive_timeout: int = Field(75, ge=1, le=3600, description="Seconds an idle client connection is kept.")
    drain_delay: float = Field(
        0.0, ge=0, le=600, description="Seconds that /ready fails before the port closes, on a first SIGTERM or SIGINT."
    )
    drain_timeout: int = Field(30, ge=0, le=86_400, description="Seconds that running turns get at shutdown.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")

    @field_validator("worker", mode="before")
    @classmethod
    def _split_workers(cls, value: Any) -> Any:
        return tuple(value.split()) if isinstance(value, str) else value

    @field_validator("worker")
    @classmethod
    def _check_workers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names: dict[str, str] = {}
        for text in value:
            spec = WorkerSpec(text)
            if spec.name in names:
                raise ValueError(
                    f"two workers are called {spec.name!r}: {names[spec.name]} and {text}; "
                    "remove one or give it another name (URL,name=NAME)"
                )
            names[spec.name] = text
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
        if value is not None and not value.is_file():
            raise ValueError("no such file; name a PEM file with CA certificates")
        return value

    @model_validator(mode="after")
    def _check_relations(self) -> Settings:
        if self.processes > 1 and self.claims.startswith("memory:"):
            raise ValueError(
                f"processes={self.processes} cannot share claims={self.claims!r}; use file:///dir or etcd://..."
            )
        if self.processes > 1 and self.port == 0:
            raise ValueError(f"processes={self.processes} need a fixed port, not port=0")
        if self.store_deadline >= self.session_ttl:
            raise ValueError(
                f"store_deadline={self.store_deadline:g} must be below session_ttl={self.session_ttl:g}; "
                "a claim would expire while it is being made"
            )
        if self.turn_timeout and self.turn_timeout <= self.connect_timeout:
            raise ValueError(
                f"turn_timeout={self.turn_timeout:g} must be above connect_timeout={self.connect_timeout:g} (or 0)"
            )
        if self.worker_ca is not None and not self.worker_tls_verify:
            raise ValueError("worker_ca has no meaning with worker_tls_verify=false; remove one of them")
        return self

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
