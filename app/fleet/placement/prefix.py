"""Which targets have been sent which beginnings of prompts: what can be known of their caches without their help.

One table, from a block's hash to the caches that had it. It learns from turns that were free to choose where they go,
and is corrected by what answers tell of cached tokens. What is bounded is its memory: blocks stand in *generations*;
one that is used moves to the youngest, and when that is full the oldest is dropped as a whole. Which caches had a block
is said by a number with a bit for each, as in `index`: so the garbage collector need not look through the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile

from app.fleet.placement.blocks import ENDS, LEAST, Chained, Piece, Text, full_blocks
from app.fleet.placement.foresight import PROMPTED, RENDERED, SALT
from app.fleet.workers import Cache, Target
from app.metrics import Metrics

BYTES_A_BLOCK = 120
"""That the table needs, at most; `tests/unit/test_placement.py` measures it."""
_GENERATIONS = 8
_MUCH = 0.25
"""Of a prompt: what may be missing of what was foreseen before the target is taken to have lost its cache."""


class Prefixes:
    """The table of one replica."""

    def __init__(self, metrics: Metrics, *, memory: int) -> None:
        """`memory` in bytes."""
        self._metrics = metrics
        self._most = max(1, memory // BYTES_A_BLOCK // _GENERATIONS)
        """Blocks of a generation."""
        self._caches: list[Cache | None] = []
        """By the number of their bit; None: it is free."""
        self._bits: dict[Cache, int] = {}
        """Of those that were not lost when that was looked at."""
        self._lasting = 0
        """All of these bits."""
        self._begun = 0
        """Generations, so far."""
        self._leaving: deque[tuple[int, int]] = deque()
        """With which generation no block has a bit any more whose cache is lost, and the bit's number."""
        self._generations: list[dict[int, int]] = [{}]
        """The youngest first. A block is in one of them, and what is before it in a prompt is in the same one or in a
        younger: it was used whenever that was. So whoever has a block has what is before it."""
        self._unknown: Sequence[int] | None = None
        """A prompt that nobody had any of when it was looked for; and nothing was noted since."""

    def __len__(self) -> int:
        """Blocks that are known."""
        return sum(map(len, self._generations))

    def prompt(self, path: bytes, model: str, said: Mapping[str, Piece]) -> Prompt | None:
        """As `Foresight.prompt`."""
        if path not in PROMPTED:
            return None
        salt = said.get(SALT, b"")
        seed = f"{model}\0{bytes(salt).decode('utf-8', 'replace')}" if salt else model
        parts = []
        for name in RENDERED:
            if name in said:
                parts.append(said[name])  # noqa: PERF401 (of one, a comprehension's own call is the most)
        return Prompt(self, self._metrics, Text(seed, parts))

    def prompt_of(self, text: Chained) -> Prompt:
        return Prompt(self, self._metrics, text)

    def find(self, hashes: Sequence[int]) -> dict[Target, int]:
        """How many of a prompt's blocks each target had, of those that had any."""
        known: list[int] = []
        found: dict[Target, int] = {}
        if not hashes:
            return found
        after = hashes[0]
        for generation in self._generations:
            if after in generation:
                known += takewhile(bool, map(generation.get, hashes[len(known) :]))  # type: ignore[arg-type]
                if len(known) == len(hashes):
                    break
                after = hashes[len(known)]
        self._unknown = None if known else hashes
        end, seen = len(known), 0
        while end:
            holders = known[end - 1]
            new = holders & ~seen
            seen |= holders
            while new:
                number = new.bit_length() - 1
                new ^= 1 << number
                cache = self._caches[number]
                if cache is not None and cache.target is not None:
                    found[cache.target] = end
            # Those between two blocks that the same have: they have them too.
            end = known.index(holders)
        return found

    def note(self, hashes: Sequence[int], target: Target, known: int = 0) -> None:
        """A prompt goes to the target, which has all of its blocks from then on, and had so many of them before."""
        if not hashes:
            return
        alone = self._bits.get(target.cache) or self._enlist(target.cache)
        youngest = self._generations[0]
        unknown, self._unknown = self._unknown is hashes, None
        if not unknown and youngest.get(hashes[-1], 0) & alone:
            return  # and so are all before it
        at = known if known and youngest.get(hashes[known - 1], 0) & alone else 0
        if len(youngest) >= self._most:
            youngest, at = {}, 0
            self._generations.insert(0, youngest)
            del self._generations[_GENERATIONS:]
            self._begun += 1
            self._leave_lost()
        before, after, lasting = 0, alone, self._lasting
        for generation in () if unknown else self._generations:
            begin = at
            while at < len(hashes) and (holders := generation.get(hashes[at])) is not None:
                if holders is not before:
                    # Blocks that are used together have their holders in one number.
                    before, after = holders, (holders & lasting) | alone
                    if after == alone:
                        after = alone  # one object for all
                youngest[hashes[at]] = after
                at += 1
            if generation is not youngest:
                for block in hashes[begin:at]:
                    generation.pop(block, None)
        for block in hashes[at:]:
            youngest[block] = alone

    def _enlist(self, cache: Cache) -> int:
        """It gets a bit, until no block can have it any more."""
        self._leave_lost()
        if None in self._caches:
            number = self._caches.index(None)
            self._caches[number] = cache
        else:
            number = len(self._caches)
            self._caches.append(cache)
        self._bits[cache] = bit = 1 << number
        self._lasting |= bit
        return bit

    def _leave_lost(self) -> None:
        """From now on no block gets the bits of caches that are lost. Others get these when no block has them."""
        for cache in [each for each in self._bits if each.target is None]:
            bit = self._bits.pop(cache)
            self._lasting ^= bit
            self._leaving.append((self._begun + _GENERATIONS, bit.bit_length() - 1))
        while self._leaving and self._leaving[0][0] <= self._begun:
            self._caches[self._leaving.popleft()[1]] = None


class Prompt:
    """One request's prompt, as it is placed (`Foreseen`)."""

    __slots__ = ("_foreseen", "_found", "_metrics", "_table", "_text", "_where")

    def __init__(self, table: Prefixes, metrics: Metrics, text: Chained) -> None:
        self._table, self._metrics, self._text = table, metrics, text
        self._found: dict[Target, int] | None = None
        """Blocks that each target has, as was seen last."""
        self._foreseen = 0.0
        """What part of it was taken to be in the cache of where it goes."""
        self._where: Target | None = None

    @property
    def counts(self) -> bool:
        """It is long enough to be in a cache, as far as a policy cares."""
        return self._text.size >= LEAST

    @property
    def waits(self) -> bool:
        return False

    def shares(self) -> Mapping[Target, float]:
        self._found = found = self._table.find(self._text.hashes)
        if not found:
            return {}
        size = self._text.size
        return {target: ENDS[blocks - 1] / size for target, blocks in found.items()}

    def name(self, beyond: float) -> str:
        text = self._text
        if not text.hashes:
            return ""
        return text.name(full_blocks(round(beyond * text.size)) if beyond else 0)

    async def read(self) -> None:
        pass

    def placed(self, target: Target) -> None:
        hashes = self._text.hashes
        if hashes:
            found = self._table.find(hashes) if self._found is None else self._found
            known = found.get(target, 0)
            self._foreseen = ENDS[known - 1] / self._text.size if known else 0.0
            self._where = target
            self._table.note(hashes, target, known)

    def settle(self, target: Target, usage: tuple[int, int] | None) -> None:
        if usage is None or target is not self._where:
            return
        tokens, cached = usage
        if not tokens or not (cached or target.worker.cells.cached_tokens):
            return  # a worker that never tells of cached tokens may have some
        self._metrics.foreseen_tokens.cells[()] += round(self._foreseen * tokens)
        self._metrics.found_tokens.cells[()] += cached
        if self._foreseen - cached / tokens > max(_MUCH, self._foreseen / 2):
            # What a target has lost, it has mostly lost all of: it was restarted, or other prompts have pushed it out.
            self._metrics.foresights_wrong.inc()
            target.forget()
            self._table.note(self._text.hashes, target)
