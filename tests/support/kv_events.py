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
import zmq

FILE = Path(__file__).parents[1] / "unit" / "files" / "vllm_kv_events.json"

Chain = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]

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
    adapter: str = ""
    salt: str = ""


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


class Blocks:
    """What a reader of all events of one rank knows: which blocks there are. Slow, and obvious."""

    def __init__(self) -> None:
        self.expected = 0
        """The next batch's number."""
        self.size = 0
        self.chains: dict[int | bytes, Chain] = {}
        """By the engine's hash: tokens and extra keys of each block up to this one."""
        self.kinds: list[str] = []
        self.stored: list[dict[str, Any]] = []

    def read(self, frames: Frames, rank: int) -> None:
        """The next batch. Raises AssertionError and KeyError for what cannot be."""
        assert len(frames[1]) == 8
        assert number(frames) == self.expected
        self.expected += 1
        at, events, told = msgspec.msgpack.decode(frames[2])
        assert isinstance(at, float)
        assert told == rank
        for event in events:
            self.kinds.append(event["type"])
            match event:
                case {"type": "BlockStored", "medium": "GPU", "group_idx": 0}:
                    self._store(event)
                case {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}:
                    for each in hashes:
                        del self.chains[each]
                case {"type": "AllBlocksCleared"}:
                    self.chains.clear()
                case _:
                    raise AssertionError(event)

    def _store(self, event: dict[str, Any]) -> None:
        self.stored.append(event)
        self.size = event["block_size"]
        tokens, hashes, keys = event["token_ids"], event["block_hashes"], event["extra_keys"]
        assert len(tokens) == len(hashes) * self.size
        assert len(keys) == len(hashes)
        parent = event["parent_block_hash"]
        chain = () if parent is None else self.chains[parent]
        for at, each in enumerate(hashes):
            chain = (*chain, (tuple(tokens[at * self.size : (at + 1) * self.size]), tuple(keys[at] or ())))
            assert self.chains.setdefault(each, chain) == chain  # it may be told again

    def overlap(self, prompt: Sequence[int], adapter: str = "", salt: str = "") -> int:
        """How many tokens of the prompt are cached. The last one of a prompt is always computed."""
        known = set(self.chains.values())
        chain: Chain = ()
        for at in range(0, len(prompt) - 1, self.size or len(prompt)):
            keys = tuple(key for key in (adapter, salt if at == 0 else "") if key)
            chain = (*chain, (tuple(prompt[at : at + self.size]), keys))
            if at + self.size >= len(prompt) or chain not in known:
                return at
        return (len(prompt) - 1) // self.size * self.size if self.size else 0


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


def asked(context: zmq.Context[Any], endpoint: str, first: int, limit: float) -> list[Frames]:
    """All from number `first` on that is kept there, and the end mark. `limit`: seconds without an answer."""
    found: list[Frames] = []
    with context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(endpoint)
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        while not found or number(found[-1]) != -1:
            assert asking.poll(int(limit * 1000)), "the replay has no end"
            empty, topic, at, payload = asking.recv_multipart()
            assert empty == b""
            found.append((topic, at, payload))
    return found


def number(frames: Sequence[bytes]) -> int:
    return int.from_bytes(frames[1], "big", signed=True)


def events(frames: Sequence[bytes]) -> list[Any]:
    """What a batch tells, without its time and rank."""
    _, found, _ = msgspec.msgpack.decode(frames[2])
    return found  # type: ignore[no-any-return]


def form(told: Sequence[dict[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """Of each type of event the names that it can have, with the types of their values, and of what is in those that
    are lists; a name that not each has can also be `absent`."""
    found: dict[str, dict[str, set[str]]] = {}
    for event in told:
        kinds = found.setdefault(event["type"], {name: set() for name in event})
        for name in event.keys() - kinds.keys():
            kinds[name] = {"absent"}
        for name, types in kinds.items():
            types.update(_types(event[name]) if name in event else ["absent"])
    return found


def _types(value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"list of {each}" for one in value for each in _types(one)]
    return [type(value).__name__]
