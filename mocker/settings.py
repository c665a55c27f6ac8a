"""What one mock worker is told at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mocker.engine.profile import Profile
from mocker.faults import Fault

Phase = Literal["both", "prefill", "decode"]
HandoverKind = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Where a worker publishes what becomes of its blocks: rank n at the ports plus n, as vLLM does it."""

    port: int
    """0: any."""
    host: str = "127.0.0.1"
    replay_port: int | None = None
    """Where what was missed is asked for; None: nowhere. 0: any."""
    topic: str = ""
    old: bool = False
    """Events are arrays, as before vLLM 0.24."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """How a worker hands blocks over, and fetches them (`handover`, `rooms`)."""

    handover: HandoverKind = "vllm"
    """Whose way of it."""
    host: str = "127.0.0.1"
    port: int = 0
    """Of the side channel, which is SGLang's bootstrap server; 0: any."""
    lease_s: float = 30.0
    """Seconds that what nobody fetches stays staged, vLLM's default; in a room, that one waits for the other."""
    token_bytes: int = 131_072
    """Of the cache of one token: Llama 3.1 8B's."""
    gb_s: float = 25.0
    """10^9 bytes a second between workers."""
    recompute: bool = False
    """A prompt whose blocks cannot be fetched is computed anew; else its request fails (vLLM's default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockSettings:
    """Settings of one mock worker, checked as a whole. Raises ValueError with a message for the operator."""

    name: str = "mock"
    """Sent in every answer as `x-mock-worker`."""
    models: tuple[str, ...] = ("mock-model",)
    ttft_ms: float = 20.0
    """From the request's last byte to the first token."""
    itl_ms: float = 5.0
    """Between two tokens."""
    seed: int = 0
    """Workers with the same seed answer the same prompt with the same text."""
    dp_size: int = 1
    """How many data-parallel ranks the worker has: ranks 0 to dp_size - 1."""
    tokens: int = 16
    """Completion length when the request does not limit it."""
    history: int = 100_000
    """How many turns are remembered for `/mock/turns`; running ones are never dropped."""
    cache_sessions: int = 100_000
    """How many sessions the simulated KV cache holds."""
    api_key: str | None = None
    """When set, `/v1/*` wants it as a bearer token."""

    profile: Profile | None = None
    """What the worker simulates; None: `ttft_ms` and `itl_ms`, whatever else it does, and a cache for each session."""
    speed: float = 1.0
    """How much faster than in the world time passes in it."""
    startup_s: float | None = None
    """Seconds of its time in which it answers 503, since its model is being loaded; None: as the profile says."""
    kv_events: KvEvents | None = None
    phase: Phase = "both"
    """What it does of a turn. A worker for one phase has a KV connector, which can hand over and fetch."""
    transfer: KvTransfer = KvTransfer()
    """Of such a worker."""
    faults: tuple[Fault, ...] = ()
    """Ordered as soon as it is served."""

    @property
    def loading(self) -> float:
        """Seconds from a start until it is ready."""
        startup = self.startup_s
        if startup is None:
            startup = 0.0 if self.profile is None else self.profile.startup
        return startup / self.speed

    def __post_init__(self) -> None:
        if not self.name or not self.name.isascii() or not self.name.isprintable():
            raise ValueError("name must be printable ASCII and not empty")
        if not self.models or not all(self.models):
            raise ValueError("at least one model, and no empty names")
        if len(set(self.models)) != len(self.models):
            raise ValueError("a model is named twice")
        for label, milliseconds in (("ttft_ms", self.ttft_ms), ("itl_ms", self.itl_ms)):
            if not math.isfinite(milliseconds) or milliseconds < 0:
                raise ValueError(f"{label} must be a number of milliseconds, 0 or more")
        for label, number in (
            ("dp_size", self.dp_size),
            ("tokens", self.tokens),
            ("history", self.history),
            ("cache_sessions", self.cache_sessions),
        ):
            if number < 1:
                raise ValueError(f"{label} must be 1 or more")
        if not math.isfinite(self.speed) or self.speed <= 0:
            raise ValueError("speed must be more than 0")
        if self.startup_s is not None and (not math.isfinite(self.startup_s) or self.startup_s < 0):
            raise ValueError("startup_s must be a number of seconds, 0 or more")
        if self.kv_events is not None and self.profile is None:
            raise ValueError("KV events need a profile: without one there are no blocks")
        if self.phase != "both" and self.profile is not None:
            raise ValueError("a phase is played without an engine: leave the profile out")
        if min(self.transfer.lease_s, self.transfer.gb_s, self.transfer.token_bytes) <= 0:
            raise ValueError("lease_s, gb_s and token_bytes must be more than 0")
        if self.api_key == "":
            raise ValueError("api_key must not be empty")
