"""What a real vLLM has said of its blocks, recorded by `python -m tests.clients.record_events`: `recorded()`.

The tokens are those of a made-up model. Frames are as they came over ZeroMQ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).parents[1] / "unit" / "files" / "vllm_kv_events.json"

Frames = tuple[bytes, bytes, bytes]
"""Topic, sequence number (8 bytes, big endian), payload in msgpack."""


@dataclass(frozen=True)
class Step:
    """Something was done, and this was said of it."""

    what: str
    rank: int
    prompt: list[int]
    """The tokens of the prompt; none if it was no prompt."""
    cached: int
    """Of them, by the engine's own `cached_tokens`."""
    frames: list[Frames]


@dataclass(frozen=True)
class Run:
    """One engine, from its start."""

    name: str
    options: list[str]
    settings: dict[str, str]
    block_size: int
    steps: list[Step]
    replayed_from: int
    replayed: list[Frames]
    """What was answered to who asked for all from number `replayed_from` on at rank 0, the end mark included."""


@dataclass(frozen=True)
class Recording:
    engine: str
    runs: list[Run]

    def run(self, name: str) -> Run:
        [found] = [run for run in self.runs if run.name == name]
        return found


def recorded() -> Recording:
    return msgspec.json.decode(FILE.read_bytes(), type=Recording)


def write(recording: Recording) -> None:
    """One line for each step, so that a new recording can be read beside the old one."""
    encoded: dict[str, Any] = msgspec.to_builtins(recording)
    lines = []
    for run in encoded["runs"]:
        steps = ",\n".join(f"   {json.dumps(step)}" for step in run.pop("steps"))
        lines.append(f'  {json.dumps(run)[:-1]}, "steps": [\n{steps}\n  ]}}')
    runs = ",\n".join(lines)
    FILE.write_text(f'{{"engine": {json.dumps(recording.engine)}, "runs": [\n{runs}\n]}}\n')


def number(frames: Sequence[bytes]) -> int:
    return int.from_bytes(frames[1], "big", signed=True)


def events(frames: Sequence[bytes]) -> list[Any]:
    """What a batch tells, without its time and rank."""
    _, found, _ = msgspec.msgpack.decode(frames[2])
    return found  # type: ignore[no-any-return]


def shape(value: Any) -> Any:
    """What kind of value it is: names of a map, types of single values, and of what is in a list each kind once."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        kinds: list[Any] = []
        for each in value:
            if (kind := shape(each)) not in kinds:
                kinds.append(kind)
        return kinds
    return None if value is None else type(value).__name__
