"""Which targets have been sent which beginnings of prompts: what can be known of their caches without their help.

One table, from a block's hash to the caches that had it. It learns from turns that were free to choose where they go,
and is corrected by what answers tell of cached tokens. What is bounded is its memory: blocks stand in *generations*;
one that is used moves to the youngest, and when that is full the oldest is dropped as a whole.
"""

from __future__ import annotations

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
        self._generations: list[dict[int, tuple[Cache, ...]]] = [{}]
        """The youngest first. A block is in one of them, and what is before it in a prompt is in the same one or in a
        younger: it was used whenever that was. So whoever has a block has what is before it."""

    def __len__(self) -> int:
        """Blocks that are known."""
        return sum(map(len, self._generations))

    def prompt(self, path: bytes, model: str, said: Mapping[str, Piece]) -> Prompt | None:
        """As `Foresight.prompt`."""
        if path not in PROMPTED:
            return None
        salt = said.get(SALT, b"")
        seed = f"{model}\0{bytes(salt).decode('utf-8', 'replace')}" if salt else model
        return self.prompt_of(Text(seed, [said[name] for name in RENDERED if name in said]))

    def prompt_of(self, text: Chained) -> Prompt:
        return Prompt(self, self._metrics, text)

    def find(self, hashes: Sequence[int]) -> dict[Target, int]:
        """How many of a prompt's blocks each target had, of those that had any."""
        known: list[tuple[Cache, ...]] = []
        for generation in self._generations:
            if len(known) < len(hashes) and hashes[len(known)] in generation:
                known += takewhile(bool, map(generation.get, hashes[len(known) :]))  # type: ignore[arg-type]
        found: dict[Target, int] = {}
        end = len(known)
        while end:
            holders = known[end - 1]
            for cache in holders:
                if cache.target is not None:
                    found.setdefault(cache.target, end)
            # Those between two blocks that the same have: they have them too.
            end = known.index(holders)
        return found

    def note(self, hashes: Sequence[int], target: Target, known: int = 0) -> None:
        """A prompt goes to the target, which has all of its blocks from then on, and had so many of them before."""
        cache = target.cache
        youngest = self._generations[0]
        if not hashes or cache in youngest.get(hashes[-1], ()):
            return  # and so are all before it
        at = known if known and cache in youngest.get(hashes[known - 1], ()) else 0
        if len(youngest) >= self._most:
            youngest, at = {}, 0
            self._generations.insert(0, youngest)
            del self._generations[_GENERATIONS:]
        before: tuple[Cache, ...] = ()
        after: tuple[Cache, ...] = cache.alone
        for generation in self._generations:
            begin = at
            while at < len(hashes) and (holders := generation.get(hashes[at])) is not None:
                if holders is not before:
                    # Blocks that are used together have their holders in one tuple.
                    before, after = holders, _with(holders, cache)
                youngest[hashes[at]] = after
                at += 1
            if generation is not youngest:
                for block in hashes[begin:at]:
                    generation.pop(block, None)
        youngest.update(dict.fromkeys(hashes[at:], cache.alone))


def _with(holders: tuple[Cache, ...], cache: Cache) -> tuple[Cache, ...]:
    lasting = [each for each in holders if each.target is not None]
    if cache in lasting:
        return holders if len(lasting) == len(holders) else tuple(lasting)
    return (*lasting, cache) if lasting else cache.alone


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
        size = self._text.size
        self._found = found = self._table.find(self._text.hashes)
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
