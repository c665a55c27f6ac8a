"""Which blocks of tokens are in whose KV cache, exactly: as the workers tell it.

Blocks are known by hashes of our own, each over a block's tokens and the hash before it, because workers' hashes differ
with their seeds. A *shelf* is what one target has in one group of its cache; it also keeps what its worker calls each
block. The index says which shelves hold a block.

**Memory**, in bytes of a block on a shelf: about 45 (between 31 and 63) and 32 for its place in the index and its hash,
which other shelves share, and 20 for its two hashes on the shelf. The index is in tables of different sizes, so that
they do not all grow at once: that would take twice the memory, and stop the loop for as long as it takes.

Hashes have 60 bits, which Python has in 32 bytes. Of a million blocks two are equal with a chance of 4 in ten million.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

_BITS = (1 << 60) - 1
_TABLES = 16
_ROUTES = 256
_BUCKETS = 2048
_KEY = 8
_RECORD = 2 * _KEY
_number = struct.Struct("<Q")
_pack: Callable[[int], bytes] = _number.pack
_unpack: Callable[[bytearray, int], tuple[int]] = _number.unpack_from
_MOST_SETS = 20_000
_A_PIECE = 256
"""Blocks after which whoever sweeps may pause."""


def token_bytes(tokens: Iterable[int]) -> bytes:
    """As they are hashed. Raises ValueError where one is no token."""
    try:
        return array("I", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"no tokens: {error}") from None


def root(block_size: int, adapter: str, salt: str) -> int:
    """What the first block of a chain follows on. Blocks of other sizes, adapters or salts are never equal."""
    return hash((block_size, adapter, salt)) & _BITS


def links(before: int, tokens: bytes, block_size: int) -> list[int]:
    """The hashes of the full blocks of `tokens` (`token_bytes`), which follow on `before`."""
    width = 4 * block_size
    found = []
    for at in range(0, len(tokens) - width + 1, width):
        before = hash((before, tokens[at : at + width])) & _BITS
        found.append(before)
    return found


class Shelf:
    """The blocks of one target, in one group of its cache, by what its worker calls them."""

    __slots__ = ("_buckets", "_count", "alone", "block_size", "dead")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        """Tokens of a block."""
        self.alone: tuple[Shelf, ...] = (self,)
        self.dead = False
        """What was on it is not known any more."""
        self._buckets = [bytearray() for _ in range(_BUCKETS)]
        """Records of a worker's hash and ours, by a part of the former."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, theirs: int) -> int | None:
        """Our hash of a block; None: it is not here."""
        bucket = self._buckets[theirs % _BUCKETS]
        key = _pack(theirs)
        at = bucket.find(key)
        if at % _RECORD:
            at = _record(bucket, key, at)
        return None if at < 0 else _unpack(bucket, at + _KEY)[0]

    def put(self, theirs: int, ours: int) -> int | None:
        """A block is here. Returns what was here under the same name, and is no more."""
        bucket = self._buckets[theirs % _BUCKETS]
        key = _pack(theirs)
        at = bucket.find(key)
        if at % _RECORD:
            at = _record(bucket, key, at)
        if at < 0:
            bucket += key
            bucket += _pack(ours)
            self._count += 1
            return None
        (before,) = _unpack(bucket, at + _KEY)
        bucket[at + _KEY : at + _RECORD] = _pack(ours)
        return before if before != ours else None

    def take(self, theirs: int) -> int | None:
        """It is not here any more. Returns our hash of it; None: it was not."""
        bucket = self._buckets[theirs % _BUCKETS]
        key = _pack(theirs)
        at = bucket.find(key)
        if at % _RECORD:
            at = _record(bucket, key, at)
        if at < 0:
            return None
        (ours,) = _unpack(bucket, at + _KEY)
        bucket[at : at + _RECORD] = bucket[-_RECORD:]
        del bucket[-_RECORD:]
        self._count -= 1
        return ours

    def clear(self) -> None:
        self._buckets, self._count = [], 0

    def ours(self) -> Iterator[int]:
        """Our hashes of all."""
        for bucket in self._buckets:
            for at in range(_KEY, len(bucket), _RECORD):
                yield _unpack(bucket, at)[0]


def _record(bucket: bytearray, key: bytes, at: int) -> int:
    """Where the record of a key begins, which was found at a place that is none; -1: there is none."""
    while at % _RECORD and at >= 0:
        at = bucket.find(key, at + 1)
    return at


class Index:
    """Which shelves hold a block."""

    def __init__(self) -> None:
        tables: list[dict[int, tuple[Shelf, ...]]] = [{} for _ in range(_TABLES)]
        # Each is larger than the one before it, the last twice as large as the first.
        sizes = [2 ** (number / _TABLES) for number in range(_TABLES)]
        ends = [sum(sizes[: number + 1]) / sum(sizes) * _ROUTES for number in range(_TABLES)]
        self._tables = [next(t for t, end in zip(tables, ends, strict=True) if route < end) for route in range(_ROUTES)]
        self._each = tables
        self._sets: dict[tuple[Shelf, ...], tuple[Shelf, ...]] = {}
        """Blocks that the same shelves hold have these in one tuple."""

    def __len__(self) -> int:
        """Blocks."""
        return sum(map(len, self._each))

    def put(self, block: int, shelf: Shelf) -> None:
        table = self._tables[block % _ROUTES]
        holders = table.get(block)
        if holders is None:
            table[block] = shelf.alone
        elif shelf not in holders:
            table[block] = self._shared((*(each for each in holders if not each.dead), shelf))

    def take(self, block: int, shelf: Shelf) -> None:
        table = self._tables[block % _ROUTES]
        holders = table.get(block)
        if holders is shelf.alone:
            del table[block]
        elif holders is not None and shelf in holders:
            left = tuple(each for each in holders if each is not shelf and not each.dead)
            if left:
                table[block] = self._shared(left)
            else:
                del table[block]

    def _shared(self, holders: tuple[Shelf, ...]) -> tuple[Shelf, ...]:
        if len(holders) == 1:
            return holders[0].alone
        if len(self._sets) >= _MOST_SETS:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)

    def find(self, chain: Sequence[int]) -> dict[Shelf, int]:
        """How many of a chain's first blocks each shelf holds, of those that hold any."""
        tables = self._tables
        found: dict[Shelf, int] = {}
        before: tuple[Shelf, ...] = ()
        left: set[Shelf] = set()
        number = 0
        for number, block in enumerate(chain):
            holders = tables[block % _ROUTES].get(block)
            if holders is before:
                continue
            if not number:
                left = {each for each in holders or () if not each.dead}
            else:
                ended = left.difference(holders or ())
                found.update(dict.fromkeys(ended, number))
                left -= ended
            if not left:
                return found
            before = holders or ()
        return found | dict.fromkeys(left, number + 1)

    def sweep(self, shelf: Shelf) -> Iterator[None]:
        """Forget a shelf that is dead, in pieces."""
        for number, block in enumerate(shelf.ours(), 1):
            self.take(block, shelf)
            if not number % _A_PIECE:
                yield
        shelf.clear()
        self._sets.clear()  # its tuples keep shelves that are dead
