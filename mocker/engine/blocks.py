"""The KV cache of one rank: blocks of tokens that all sequences share, and a pool that they are taken from.

A sequence names its full blocks by a *chain* of hashes, each over the block's tokens and the hash before it: two chains
that are equal at one place are equal up to there. What is cached is always whole beginnings of chains, so it is kept as
a tree of *runs*: blocks that are used together stand in one, and to find, use and leave a prompt costs as much as it
has runs, however many blocks those have. What happens is what would happen block by block, as vLLM does it:

- a block has as many users as there are running sequences that hold it; without any it is *idle* and stays cached;
- a new block comes from those that are free, else from the idle ones, the longest unused first, and of what was left
  at one moment the end of the chain first;
- of equal blocks one is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

Chain = Sequence[int]
"""The hashes of a sequence's full blocks. What stands in it never changes; it may grow."""


class Listener(Protocol):
    """Is told what becomes of cached blocks."""

    def stored(self, owner: Any, start: int, end: int) -> None:
        """The blocks from number `start` to before `end` of the owner's chain are cached now."""

    def removed(self, hashes: list[int]) -> None:
        """These are no more."""

    def cleared(self) -> None:
        """None is cached any more."""


class Run:
    """Blocks `start` to before `end` of a chain, that follow on the parent's."""

    __slots__ = ("chain", "children", "end", "parent", "start", "users")

    def __init__(self, chain: Chain, start: int, end: int, parent: Run | None) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[int, Run] = {}
        """By the hash of their first block."""
        self.users = 0
        """Sequences that hold it, or a run below it."""


class BlockCache:
    """The blocks of one rank. Each is free, *held* by one sequence, or cached: `blocks == free + held + cached`."""

    def __init__(self, blocks: int, listener: Listener | None = None) -> None:
        self.blocks = blocks
        self.free = blocks
        self.held = 0
        """Of running sequences alone: not full, or not cached yet."""
        self.idle = 0
        """Cached, and without users."""
        self._listener = listener
        self._root = Run((), 0, 0, None)
        self._idle: OrderedDict[Run, None] = OrderedDict()
        """Runs without users, the next to go first. What is below a run stands before it."""

    @property
    def cached(self) -> int:
        return self.blocks - self.free - self.held

    @property
    def used(self) -> int:
        """By running sequences: what vLLM calls the usage of its cache."""
        return self.blocks - self.free - self.idle

    @property
    def room(self) -> int:
        """How many blocks could be taken now."""
        return self.free + self.idle

    @property
    def root(self) -> Run:
        """The beginning of all chains: what a sequence holds that holds no cached blocks."""
        return self._root

    def find(self, chain: Chain, most: int) -> tuple[int, int]:
        """How many of the first `most` blocks are cached, and how many of those are idle. Changes nothing."""
        _, end, idle = self.look(chain, most)
        return end, idle

    def look(self, chain: Chain, most: int) -> tuple[Run, int, int]:
        """As `find`, and before that where the cached beginning ends: for `hold_found`, as long as nothing changes."""
        run, end = self._descend(chain, most)
        idle, below = 0, end
        above: Run | None = run
        while above is not None and not above.users and above is not self._root:
            idle += below - above.start
            below, above = above.start, above.parent
        return run, end, idle

    def hold(self, chain: Chain, most: int) -> Run:
        """Use the longest cached beginning, of `most` blocks at most; ends where the returned run ends. `leave` it."""
        return self.hold_found(*self._descend(chain, most))

    def hold_found(self, run: Run, end: int) -> Run:
        """The same for what has been looked up."""
        if end < run.end:
            run = self._split(run, end)
        each: Run | None = run
        while each is not None:
            if not each.users and each is not self._root:
                del self._idle[each]
                self.idle -= each.end - each.start
            each.users += 1
            each = each.parent
        return run

    def leave(self, run: Run) -> None:
        """Use what `hold` or `publish` returned no more; it stays cached until its blocks are wanted."""
        each: Run | None = run
        while each is not None:
            each.users -= 1
            if not each.users and each is not self._root:
                self._idle[each] = None
                self.idle += each.end - each.start
            each = each.parent

    def take(self, count: int) -> None:
        """Blocks for one sequence alone. The caller knows that there is `room`."""
        lacking = count - self.free
        if lacking > 0:
            self._evict(lacking)
        self.free -= count
        self.held += count

    def give(self, count: int) -> None:
        """Blocks that were taken and not published are free again."""
        self.free += count
        self.held -= count

    def publish(self, run: Run, owner: Any, chain: Chain, end: int) -> Run:
        """The owner, who uses `run`, has filled its own blocks up to before number `end`: they are cached from now on,
        and used by it. Returns the run to `leave` in place of the given one. Of those that others have cached
        meanwhile its own are free again."""
        while run.end < end:
            start = run.end
            child = run.children.get(chain[start]) if run.children else None
            if child is None:
                if run.users == 1 and not run.children and run is not self._root:
                    run.chain, run.end = chain, end
                else:
                    child = Run(chain, start, end, run)
                    child.users = 1
                    run.children[chain[start]] = child
                    run = child
                self.held -= end - start
                if self._listener is not None:
                    self._listener.stored(owner, start, end)
                return run
            same = self._same(child, chain, min(child.end, end))
            if same < child.end:
                child = self._split(child, same)
            if not child.users:
                del self._idle[child]
                self.idle -= same - start
            child.users += 1
            self.give(same - start)
            run = child
        return run

    def clear(self) -> None:
        """Nothing is cached any more. Raises RuntimeError while blocks are used, as vLLM refuses it then."""
        if self.used:
            raise RuntimeError("blocks are in use")
        self._root.children.clear()
        self._idle.clear()
        self.idle = 0
        self.free = self.blocks
        if self._listener is not None:
            self._listener.cleared()

    def _descend(self, chain: Chain, most: int) -> tuple[Run, int]:
        """The run where the longest cached beginning ends, and at which block."""
        run, end = self._root, 0
        while end < most and run.children:
            child = run.children.get(chain[end])
            if child is None:
                break
            run, last = child, child.end if child.end < most else most
            end = last if child.chain is chain else self._same(child, chain, last)
            if end < child.end:
                break
        return run, end

    @staticmethod
    def _same(run: Run, chain: Chain, last: int) -> int:
        """Up to where a run, of which the first block is the chain's, is equal to it, `last` at most."""
        other = run.chain
        if other[last - 1] == chain[last - 1]:
            return last
        low, high = run.start + 1, last - 1
        while low < high:
            middle = (low + high + 1) // 2
            if other[middle - 1] == chain[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, run: Run, at: int) -> Run:
        """A run becomes two; returns the upper one. Where it is idle so is the lower one, in its place, and the upper
        one is about to be used."""
        parent = run.parent
        assert parent is not None
        upper = Run(run.chain, run.start, at, parent)
        upper.users = run.users
        parent.children[run.chain[run.start]] = upper
        upper.children[run.chain[at]] = run
        run.start, run.parent = at, upper
        if not upper.users:
            self._idle[upper] = None
        return upper

    def _evict(self, count: int) -> None:
        removed: list[int] = []
        while count:
            run = next(iter(self._idle))
            end = run.end
            start = max(run.start, end - count)
            count -= end - start
            self.idle -= end - start
            self.free += end - start
            if self._listener is not None:
                removed += (run.chain[at] for at in range(end - 1, start - 1, -1))
            if start > run.start:
                run.end = start
            else:
                del self._idle[run]
                assert run.parent is not None
                del run.parent.children[run.chain[start]]
        if self._listener is not None and removed:
            self._listener.removed(removed)


def chain_of(model: str, tokens: bytes, width: int, *, before: list[int] | None = None) -> list[int]:
    """The chain of the full blocks of `width` bytes in `tokens`, for a model: no two models share blocks. `before`: a
    chain of a beginning of the same tokens, which is not hashed again."""
    chain = [] if before is None else list(before)
    last = chain[-1].to_bytes(8, "little") if chain else blake2b(model.encode(), digest_size=8).digest()
    for at in range(len(chain) * width, len(tokens) - width + 1, width):
        last = blake2b(last + tokens[at : at + width], digest_size=8).digest()
        chain.append(int.from_bytes(last, "little"))
    return chain
