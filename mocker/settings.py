"""What one mock worker is told at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
        if self.api_key == "":
            raise ValueError("api_key must not be empty")
