"""What is simulated: a model on some hardware, from a file. `mocker/profiles/` has a few, each with its sources.

A step of an engine reads all weights, and the keys and values that it looks back on, from memory, and computes two
operations per weight and prompt token; so its times follow from published figures of hardware and model, and from two
shares that real engines reach of them. A file may say the times themselves instead.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

FOLDER = Path(__file__).parents[1] / "profiles"
"""Of those that come along."""

TOKEN_BYTES = 131_072.0
"""Of the cache of one token, where the model is not told: Llama 3.1 8B's."""

_Positive = Annotated[float, Meta(gt=0)]
_NotNegative = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Times:
    """What a step takes, in seconds."""

    step: float
    """Whatever is in it."""
    sequence: float = 0.0
    """More for each sequence."""
    context: float = 0.0
    """For each token that sequences which generate look back on."""
    prefill: float = 0.0
    """For each token of prompts that is computed."""
    prefill_context: float = 0.0
    """For each token that such a token looks back on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One rank of a worker, checked as a whole. Raises ValueError."""

    name: str = "custom"
    times: Times
    block_size: int = 16
    """Tokens of a block."""
    blocks: int
    max_tokens: int = 8192
    """That one step computes at most: vLLM's max-num-batched-tokens."""
    max_running: int = 256
    """Sequences that are computed at once: vLLM's max-num-seqs."""
    max_queued: int = 0
    """Sequences that run or wait at most: vLLM's max-num-queued-reqs; 0: any number."""
    startup: float = 0.0
    """Seconds from a start until it answers."""
    token_bytes: float = TOKEN_BYTES
    """Of the cache of one token, which go from one worker to another."""

    def __post_init__(self) -> None:
        for name in ("block_size", "blocks", "max_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        if self.max_queued < 0 or self.startup < 0:
            raise ValueError("max_queued and startup must be 0 or more")
        if self.max_tokens <= self.max_running:
            raise ValueError("max_tokens must be more than max_running: each running sequence computes one in a step")
        if self.times.step <= 0:
            raise ValueError("a step must take some time")


class _Hardware(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    gpus: _Count = 1
    memory_gb: _Positive
    """Of each, in 10^9 bytes, as the next two."""
    bandwidth_gb_s: _Positive
    tflops: _Positive


class _Model(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    parameters: _Positive
    """Billions."""
    layers: _Count
    heads: _Count
    kv_heads: _Count
    head_dim: _Count
    bytes: _Positive = 2.0
    """Of a weight, and of a number of the cache."""


class _Shares(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    bandwidth: Annotated[float, Meta(gt=0, le=1)] = 0.75
    compute: Annotated[float, Meta(gt=0, le=1)] = 0.5
    memory: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """vLLM's gpu-memory-utilization."""
    overhead_gb: _NotNegative = 3.0
    """Per GPU for what is neither weights nor cache: activations, graphs."""
    step_ms: _NotNegative = 1.0
    """Of each step for scheduling, sampling and, with several GPUs, their talk."""
    sequence_us: _NotNegative = 10.0


class _Times(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    step_ms: _Positive
    sequence_us: _NotNegative = 0.0
    context_ns: _NotNegative = 0.0
    prefill_us: _NotNegative = 0.0
    prefill_context_ns: _NotNegative = 0.0


class _Engine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    block_size: _Count = 16
    blocks: _Count | None = None
    max_tokens: _Count = 8192
    max_running: _Count = 256
    max_queued: Annotated[int, Meta(ge=0)] = 0
    startup_s: _NotNegative = 0.0


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    about: str
    sources: list[str] = []
    hardware: _Hardware | None = None
    model: _Model | None = None
    shares: _Shares = msgspec.field(default_factory=_Shares)
    times: _Times | None = None
    engine: _Engine = msgspec.field(default_factory=_Engine)


def names() -> list[str]:
    """Of the profiles that come along."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Profile:
    """A profile that comes along, or one from a file, named by a path that ends in .toml. Raises ValueError, with a
    message for the operator."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise ValueError(
            f"there is no profile {name!r}; there are flat, {', '.join(names())}, or a path of a .toml file"
        )
    try:
        said = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
        return _profile(path.stem, said)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
        raise ValueError(f"profile {name}: {error}") from error


def resized(profile: Profile, *, blocks: int | None, block_size: int | None) -> Profile:
    """The same with other blocks, where they are given. Of another size there are as many as hold the same tokens."""
    if block_size is not None:
        tokens = profile.blocks * profile.block_size
        profile = replace(profile, block_size=block_size, blocks=max(1, tokens // block_size))
    return profile if blocks is None else replace(profile, blocks=blocks)


def _profile(name: str, said: _File) -> Profile:
    engine = said.engine
    times, blocks = _said_times(said.times), engine.blocks
    if said.hardware is not None and said.model is not None:
        times = times or _times(said.hardware, said.model, said.shares)
        blocks = blocks or _blocks(said.hardware, said.model, said.shares, engine.block_size)
    if times is None or blocks is None:
        raise ValueError("say [hardware] and [model], or [times] and the engine's blocks")
    return Profile(
        name=name,
        times=times,
        block_size=engine.block_size,
        blocks=blocks,
        max_tokens=engine.max_tokens,
        max_running=engine.max_running,
        max_queued=engine.max_queued,
        startup=engine.startup_s,
        token_bytes=TOKEN_BYTES if said.model is None else _kv_bytes(said.model),
    )


def _said_times(said: _Times | None) -> Times | None:
    if said is None:
        return None
    return Times(
        step=said.step_ms / 1e3,
        sequence=said.sequence_us / 1e6,
        context=said.context_ns / 1e9,
        prefill=said.prefill_us / 1e6,
        prefill_context=said.prefill_context_ns / 1e9,
    )


def _times(hardware: _Hardware, model: _Model, shares: _Shares) -> Times:
    bandwidth = hardware.gpus * hardware.bandwidth_gb_s * 1e9 * shares.bandwidth
    compute = hardware.gpus * hardware.tflops * 1e12 * shares.compute
    return Times(
        step=model.parameters * 1e9 * model.bytes / bandwidth + shares.step_ms / 1e3,
        sequence=shares.sequence_us / 1e6,
        context=_kv_bytes(model) / bandwidth,
        prefill=2 * model.parameters * 1e9 / compute,
        # Scores and their sum: two operations each, per head, dimension and layer.
        prefill_context=4 * model.layers * model.heads * model.head_dim / compute,
    )


def _blocks(hardware: _Hardware, model: _Model, shares: _Shares, block_size: int) -> int:
    room = hardware.gpus * (hardware.memory_gb * shares.memory - shares.overhead_gb) - model.parameters * model.bytes
    blocks = int(room * 1e9 / (_kv_bytes(model) * block_size))
    if blocks < 1:
        raise ValueError(f"the model leaves no memory for a cache: {room:.1f} GB")
    return blocks


def _kv_bytes(model: _Model) -> float:
    """Keys and values of one token."""
    return 2 * model.layers * model.kv_heads * model.head_dim * model.bytes
