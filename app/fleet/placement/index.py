"""Which blocks of tokens are in whose KV cache, exactly: as the workers tell it.

Blocks are known by hashes of our own, each over a block's tokens and the hash before it, because workers' hashes differ
with their seeds. A *shelf* is what one target has in one group of its cache; it also keeps what its worker calls each
block. The index says which shelves hold a block.

**Memory**, in bytes of a block on a shelf: about 45 (between 31 and 63) and 32 for its place in the index and its hash,
which other shelves share, and 20 for its two hashes on the shelf. The index is in tables of different sizes, so that
they do not all grow at once: that would take twice the memory, and stop the loop for as long as it takes. Who holds a
block is said by a number with a bit for each shelf, and not by a set of them: what has nothing but numbers in it is
none of the garbage collector's business, which else stops the loop for 80 ms to look through half a million blocks.

**Time.** Many blocks come and go at once, and are handled so: calls are the most of what a block costs. So `put` and
`take` find a name by themselves, and ask `_place` only where it may stand across two records: asked each time, it would
be 12 % of a `put` and 5 % of a `take`.

Hashes have 60 bits, which Python has in 32 bytes. Of a million blocks two are equal with a chance of 4 in ten million.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator

from xxhash import xxh3_64_intdigest

_BITS = (1 << 60) - 1
_SECRET = "a text, whose hash each process has for itself"
_TABLES = 16
_ROUTES = 255
_BUCKETS = 2047
"""Both as the bits of a number that say which."""
NAME = 8
"""Bytes of what a worker calls a block."""
_RECORD = 2 * NAME
_record = struct.Struct(f"={NAME}sQ").pack
_ours = struct.Struct("=Q").unpack_from
_low = struct.Struct("=H").unpack_from
_A_PIECE = 256
"""Blocks after which whoever sweeps may pause."""
_CHAINED = 64
"""Blocks of a prompt that are hashed before it is looked whether anybody has them."""


def token_bytes(tokens: Iterable[int]) -> bytes:
    """As they are hashed. Raises ValueError where one is no token."""
    try:
        return array("I", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"no tokens: {error}") from None


def root(block_size: int, adapter: str, salt: str) -> int:
    """What the first block of a chain follows on. Blocks of other sizes, adapters or salts are never equal."""
    return hash((_SECRET, block_size, adapter, salt)) & _BITS


def links(before: int, tokens: bytes, block_size: int) -> list[int]:
    """The hashes of the full blocks of `tokens` (`token_bytes`), which follow on `before`."""
    width = 4 * block_size
    blocks = _cuts(width, len(tokens) // width)(tokens)
    return [before := xxh3_64_intdigest(block, before) & _BITS for block in blocks]


@functools.lru_cache(1024)
def _cuts(width: int, count: int) -> Callable[[bytes | array[int]], tuple[bytes, ...]]:
    """Into so many pieces of so many bytes: all in one call."""
    return struct.Struct(f"{width}s" * count).unpack_from


def chained(before: int, tokens: bytes, block_size: int) -> Iterator[int]:
    """As `links`, for whoever may not want them all."""
    width = 4 * block_size * _CHAINED
    for at in range(0, len(tokens), width):
        found = links(before, tokens[at : at + width], block_size)
        yield from found
        before = found[-1] if found else before


class Shelf:
    """The blocks of one target, in one group of its cache, by what its worker calls them: names of eight bytes."""

    __slots__ = ("block_size", "buckets", "dead", "mask")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        """Tokens of a block."""
        self.mask = 0
        """Its bit in the index; 0: it is not there."""
        self.dead = False
        """What was on it is not known any more."""
        self.buckets = [bytearray() for _ in range(_BUCKETS + 1)]
        """Records of a block's name and our hash of it, by a part of the former."""

    def __len__(self) -> int:
        return sum(map(len, self.buckets)) // _RECORD

    def find(self, name: bytes) -> int | None:
        """Our hash of a block; None: it is not here."""
        bucket = self.buckets[_low(name)[0] & _BUCKETS]
        at = _place(bucket, name, bucket.find(name))
        return None if at < 0 else _ours(bucket, at + NAME)[0]

    def ours(self) -> Iterator[int]:
        """Our hashes of all."""
        for bucket in self.buckets:
            yield from _blocks(bucket)


def _each(names: bytes) -> Iterable[tuple[int, bytes]]:
    """Each name, and before it the bits of it that say in which bucket it is, with some more."""
    if len(names) == NAME:  # most events are of one block, or of very many
        return ((_low(names)[0], names),)
    return zip(array("H", names)[:: NAME // 2], _cuts(NAME, len(names) // NAME)(names))  # noqa: B905


def _records(names: bytes, blocks: list[int]) -> Iterable[tuple[int, bytes, bytes, int]]:
    """As `_each`; and a block's record, and our hash of it."""
    count = len(blocks)
    if count == 1:
        return ((_low(names)[0], names, _record(names, blocks[0]), blocks[0]),)
    records = array("Q", bytes(2 * len(names)))
    records[::2], records[1::2] = array("Q", names), array("Q", blocks)
    lows = array("H", names)[:: NAME // 2]
    return zip(lows, _cuts(NAME, count)(names), _cuts(_RECORD, count)(records), blocks)  # noqa: B905 (it costs)


def _blocks(bucket: bytearray) -> array[int]:
    return array("Q", bytes(bucket))[1::2]


def _place(bucket: bytearray, name: bytes, at: int) -> int:
    """Where the record of a name begins, which was found at `at`, be that in a record; -1: there is none."""
    while at >= 0 and at % _RECORD:
        at = bucket.find(name, at + 1)
    return at


class Index:
    """Which shelves hold a block."""

    def __init__(self) -> None:
        tables: list[dict[int, int]] = [{} for _ in range(_TABLES)]
        # Each is larger than the one before it, the last twice as large as the first.
        sizes = [2 ** (number / _TABLES) for number in range(_TABLES)]
        ends = [sum(sizes[: number + 1]) / sum(sizes) * (_ROUTES + 1) for number in range(_TABLES)]
        routes = range(_ROUTES + 1)
        self._tables = [next(t for t, end in zip(tables, ends, strict=True) if route < end) for route in routes]
        self._each = tables
        self._shelves: list[Shelf | None] = []
        """By the number of their bit; None: it is free."""

    def __len__(self) -> int:
        """Blocks."""
        return sum(map(len, self._each))

    def put(self, shelf: Shelf, names: bytes, blocks: list[int]) -> None:
        """They are on a shelf, each by its name. What was there under the same names is no more."""
        buckets, tables, alone = shelf.buckets, self._tables, shelf.mask or self._enlist(shelf)
        before = after = alone
        for low, name, record, block in _records(names, blocks):
            bucket = buckets[low & _BUCKETS]
            at = bucket.find(name)
            if at < 0 or (at := _place(bucket, name, at)) < 0:
                bucket += record
            else:
                (other,) = _ours(bucket, at + NAME)
                if other != block:
                    bucket[at : at + _RECORD] = record
                    self._take(shelf, (other,))
            table = tables[block & _ROUTES]
            holders = table.setdefault(block, alone)
            if holders is not alone:
                if holders is not before:
                    # Blocks that follow each other mostly have the same holders.
                    before, after = holders, holders | alone
                table[block] = after

    def take(self, shelf: Shelf, names: bytes) -> None:
        """They are not on the shelf any more."""
        buckets, tables, alone = shelf.buckets, self._tables, shelf.mask
        for low, name in _each(names):
            bucket = buckets[low & _BUCKETS]
            at = bucket.find(name)
            if at % _RECORD:
                at = _place(bucket, name, at)
            if at >= 0:
                (block,) = _ours(bucket, at + NAME)
                del bucket[at : at + _RECORD]
                table = tables[block & _ROUTES]
                if table.get(block) is alone:
                    del table[block]
                else:
                    self._take(shelf, (block,))

    def _take(self, shelf: Shelf, blocks: Iterable[int]) -> None:
        tables, alone = self._tables, shelf.mask
        before = after = 0
        for block in blocks:
            table = tables[block & _ROUTES]
            holders = table.get(block)
            if holders is alone:
                del table[block]
            elif holders is not None:
                if holders is not before:
                    before, after = holders, holders & ~alone
                if after:
                    table[block] = after
                else:
                    del table[block]

    def _enlist(self, shelf: Shelf) -> int:
        """It gets a bit, until it is swept."""
        if None in self._shelves:
            number = self._shelves.index(None)
            self._shelves[number] = shelf
        else:
            number = len(self._shelves)
            self._shelves.append(shelf)
        shelf.mask = 1 << number
        return shelf.mask

    def _held_by(self, holders: int) -> Iterator[Shelf]:
        """Those of them that are not dead."""
        while holders:
            shelf = self._shelves[holders.bit_length() - 1]
            if shelf is not None:
                holders ^= shelf.mask
                if not shelf.dead:
                    yield shelf

    def find(self, chain: Iterable[int]) -> dict[Shelf, int]:
        """How many of a chain's first blocks each shelf holds, of those that hold any. No more of it is asked for than
        somebody may have."""
        tables = self._tables
        found: dict[Shelf, int] = {}
        before = left = 0
        number = -1
        for number, block in enumerate(chain):
            holders = tables[block & _ROUTES].get(block, 0)
            if holders is before:
                continue
            if not number:
                left = holders
            elif ended := left & ~holders:
                found.update(dict.fromkeys(self._held_by(ended), number))
                left &= holders
            if not left:
                return found
            before = holders
        return found | dict.fromkeys(self._held_by(left), number + 1)

    def sweep(self, shelf: Shelf) -> Iterator[None]:
        """Forget a shelf that is dead, in pieces."""
        blocks = array("Q")
        for bucket in filter(None, shelf.buckets):
            blocks += _blocks(bucket)
            if len(blocks) >= _A_PIECE:
                self._take(shelf, blocks)
                del blocks[:]
                yield
        self._take(shelf, blocks)
        shelf.buckets = []
        if shelf.mask:
            self._shelves[shelf.mask.bit_length() - 1] = None
            shelf.mask = 0
