"""Work for a simulated fleet: public traces, and made-up agents.

All that counts of a prompt is how long it is and with which others it begins alike. So a session is a chain of block
hashes (see `mocker.engine.blocks`) and turns that are beginnings of it, each with the tokens that are answered next.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import overload

import msgspec

MOONCAKE_BLOCK = 512
"""Tokens for each of a trace's hash ids."""


class Chain(Sequence[int]):
    """Blocks that others have too, and then a session's own, which are numbered."""

    __slots__ = ("_base", "_common", "_length", "_shared")

    def __init__(self, common: tuple[int, ...], own: int, length: int) -> None:
        """`own`: the number of the first own block, if it stood at the chain's beginning."""
        self._common = common
        self._shared = len(common)
        self._base = own
        self._length = length

    @property
    def shared(self) -> int:
        """How many of the first blocks others have too."""
        return self._shared

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(self._length))]
        if at < self._shared:
            return self._common[at]
        if at >= self._length:
            raise IndexError(at)
        return self._base + at


@dataclass(slots=True)
class Turn:
    prompt: int
    """Tokens, of all that was said before as well."""
    answer: int
    after: float
    """Seconds from the end of the session's turn before; of the first from the session's start."""
    children: list[Session] = field(default_factory=list)
    """Sub-agents that begin when it ends; the session's next turn waits for their ends."""


@dataclass(slots=True, eq=False)
class Session:
    name: str
    """Empty: its turns have no session, as far as a router can tell."""
    model: int
    """Its number."""
    start: float
    chain: Chain
    turns: list[Turn]
    parent: Session | None = None
    """Whose sub-agent it is."""
    ends: bool = True
    """Its last turn says that it is the last; False: others of the same name may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Agents that talk in turns to one of a few models. Sizes are means; what is drawn is within a half of them."""

    sessions: int
    rate: float
    """Sessions that begin in a second."""
    models: int = 1
    prompts: int = 20
    """System prompts of each model, one of which each session has; the first are the most frequent."""
    prompt_tokens: int = 6000
    turns: float = 4.0
    turn_tokens: int = 400
    """Of what the user, or a tool, says next."""
    answer_tokens: int = 150
    gap: float = 10.0
    """Seconds between an answer and the next turn; a tenth of them are six times as long."""
    children: float = 0.1
    """The share of turns after which a sub-agent works."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.sessions, self.models, self.prompts, self.prompt_tokens, self.turn_tokens, self.answer_tokens) < 1:
            raise ValueError("sessions, models, prompts and tokens must be 1 or more")
        if self.rate <= 0 or self.turns < 1 or self.gap < 0 or not 0 <= self.children <= 1:
            raise ValueError("rate must be more than 0, turns 1 or more, gap 0 or more, children 0 to 1")


def agents(wanted: Agents, block_size: int) -> Iterator[Session]:
    """By their start. The same seed gives the same sessions."""
    return _Maker(wanted, block_size).sessions()


class _Maker:
    def __init__(self, wanted: Agents, block_size: int) -> None:
        self._wanted = wanted
        self._size = block_size
        self._rng = random.Random(wanted.seed)
        self._own = 1 << 40
        self._names = 0
        self._prompts = [
            [self._prompt(model, number) for number in range(wanted.prompts)] for model in range(wanted.models)
        ]

    def sessions(self) -> Iterator[Session]:
        rng, wanted, now = self._rng, self._wanted, 0.0
        models, prompts = range(wanted.models), range(wanted.prompts)
        often_models, often_prompts = _first_most_often(models), _first_most_often(prompts)
        for _ in range(wanted.sessions):
            now += rng.expovariate(wanted.rate)
            (model,) = rng.choices(models, cum_weights=often_models)
            (prompt,) = rng.choices(prompts, cum_weights=often_prompts)
            yield self._session(model, prompt, now, None)

    def _prompt(self, model: int, number: int) -> tuple[int, tuple[int, ...]]:
        """Tokens, and the blocks that are full of them."""
        tokens = self._about(self._wanted.prompt_tokens)
        base = (model * self._wanted.prompts + number) << 20
        return tokens, tuple(range(base, base + tokens // self._size))

    def _about(self, mean: float) -> int:
        return round((0.5 + self._rng.random()) * mean) or 1

    def _session(self, model: int, number: int, start: float, parent: Session | None) -> Session:
        rng, wanted = self._rng, self._wanted
        tokens, common = self._prompts[model][number]
        turns = []
        count, random = 1, rng.random
        while wanted.turns > 1 and random() < 1 - 1 / wanted.turns and count < 8 * wanted.turns:
            count += 1
        turn_tokens, answer_tokens, pauses = wanted.turn_tokens, wanted.answer_tokens, wanted.gap
        for place in range(count):
            # As `_about`, without a call.
            tokens += round((0.5 + random()) * turn_tokens) or 1
            answer = round((0.5 + random()) * answer_tokens) or 1
            gap = rng.expovariate(1 / pauses) * (6 if random() < 0.1 else 1) if pauses else 0.0
            turns.append(Turn(tokens, answer, gap if place else 0.0))
            tokens += answer
        blocks = tokens // self._size
        self._names += 1
        session = Session(f"s{self._names}", model, start, Chain(common, self._own, blocks), turns, parent)
        self._own += blocks
        if parent is None:
            for turn in turns[:-1]:
                if rng.random() < wanted.children:
                    # Of the same application: its prompt is one of the model's.
                    turn.children.append(self._session(model, rng.randrange(wanted.prompts), start, session))
        return session


def _first_most_often(numbers: range) -> list[float]:
    """As weights that are summed up."""
    return list(accumulate(1 / (1 + number) for number in numbers))


class _Record(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    session_id: str | int | None = None


def mooncake(path: Path, block_size: int) -> Iterator[Session]:
    """A trace in Mooncake's format (https://github.com/kvcache-ai/Mooncake, FAST '25): a JSON object a line, with
    `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, one for each 512 tokens
    of the prompt, equal where prompts are equal up to there. `session_id`, which newer traces have, names the session
    of a turn, which comes when it says. Raises ValueError."""
    if MOONCAKE_BLOCK % block_size:
        raise ValueError(f"blocks of {block_size} tokens do not fit into a trace's blocks of {MOONCAKE_BLOCK}")
    parts = MOONCAKE_BLOCK // block_size
    decode = msgspec.json.Decoder(_Record).decode
    own = 1 << 60
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            prompt, answer = max(1, record.input_length), max(1, record.output_length)
            common = tuple(each * parts + part for each in record.hash_ids for part in range(parts))
            common = common[: prompt // block_size]
            blocks = (prompt + answer) // block_size
            name = "" if record.session_id is None else str(record.session_id)
            turns = [Turn(prompt, answer, 0.0)]
            yield Session(name, 0, record.timestamp / 1000, Chain(common, own, blocks), turns, ends=not name)
            own += blocks


def azure(path: Path, block_size: int) -> Iterator[Session]:
    """A trace in the format of Azure's LLM inference traces (https://github.com/Azure/AzurePublicDataset): CSV with
    `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`. It does not say what prompts have in common: nothing. Raises
    ValueError."""
    own, first = 1 << 40, None
    with path.open(newline="", encoding="utf-8-sig") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                # Seven digits of a second are one more than Python reads.
                at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
                prompt, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: {error!r} in {row}") from error
            first = at if first is None else first
            prompt, answer = max(1, prompt), max(1, answer)
            blocks = (prompt + answer) // block_size
            yield Session("", 0, at - first, Chain((), own, blocks), [Turn(prompt, answer, 0.0)])
            own += blocks
