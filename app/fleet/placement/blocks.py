"""A prompt as a chain of hashes, without a tokenizer: two prompts whose chains are equal at one place begin alike up to
there.

What is hashed is the prompt as the client has written it, in the order in which engines render it: tools, system
prompt, messages. So prompts that are spelled otherwise (other blanks in their JSON, other escapes) share nothing; those
of one application are spelled alike. Blocks have 256 bytes at first, and then a quarter of what is before them at most:
that is exact enough for a share of the prompt, and each block costs time, however long it is.

Hashes are XXH3, whose seed is the hash before, and at first one that each process has for itself: nobody outside can
know which prompts collide. Python's own of bytes would cost 0.3 µs a kB, this one costs a tenth of that. What replicas
must agree on (`name`) is hashed in a way that they do. Short blocks are copied out of the text, all in one call: to
look at each where it stands takes three times as long as that. Long ones would take longer to copy.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

LEAST = 256
"""Bytes of the first blocks."""
_OCTAVE = 4
"""Blocks of one size, before they are twice as large."""
_OCTAVES = 16
_SIZES = [LEAST << octave for octave in range(_OCTAVES) for _ in range(_OCTAVE * (1 + (octave == 0)))]
ENDS = tuple(accumulate(_SIZES))
"""Where blocks end, in bytes from the beginning. What is beyond the last, at 64 MiB, counts for nothing."""
_COPIED = _OCTAVE * 6
"""Blocks that are copied to be hashed: those of the first 32 KiB."""
_copies = [struct.Struct("".join(f"{size}s" for size in _SIZES[:count])).unpack_from for count in range(_COPIED + 1)]
"""Of a text: as many of its first blocks."""
_SPANS = tuple(slice(*span) for span in pairwise((0, *ENDS)))
_NAMED = 4 * LEAST
"""Bytes by which what follows is named."""
_BITS = (1 << 60) - 1
"""Of a hash: Python has numbers up to this in 32 bytes."""


Piece = bytes | msgspec.Raw


class Chained(Protocol):
    """A prompt, as a chain."""

    @property
    def size(self) -> int:
        """In bytes."""
        ...

    @property
    def hashes(self) -> Sequence[int]:
        """Of its full blocks."""
        ...

    def name(self, blocks: int) -> str:
        """For what follows on so many blocks: the same on every replica, for prompts that go on alike for a while."""
        ...


class Text:
    """The text of a prompt. Nothing is read of it until somebody asks."""

    __slots__ = ("_hashes", "_parts", "_seed", "_text")

    def __init__(self, seed: str, parts: Sequence[Piece]) -> None:
        """`seed`: whatever else must be equal for two prompts to share what is cached. `parts`: in their order."""
        self._seed, self._parts = seed, parts
        self._text: memoryview | None = None
        self._hashes: list[int] | None = None

    @property
    def text(self) -> memoryview:
        if self._text is None:
            parts = self._parts
            self._text = memoryview(parts[0] if len(parts) == 1 else b"".join(map(memoryview, parts)))
        return self._text

    @property
    def size(self) -> int:
        return len(self.text)

    @property
    def hashes(self) -> Sequence[int]:
        if self._hashes is None:
            text, before = self.text, hash(self._seed) & _BITS
            count = bisect_right(ENDS, len(text))
            blocks = _copies[min(count, _COPIED)](text)
            self._hashes = [before := xxh3_64_intdigest(block, before) & _BITS for block in blocks]
            if count > _COPIED:
                long = map(text.__getitem__, _SPANS[_COPIED:count])
                self._hashes += [before := xxh3_64_intdigest(block, before) & _BITS for block in long]
        return self._hashes

    def name(self, blocks: int) -> str:
        begin = ENDS[blocks - 1] if blocks else 0
        seed = xxh3_64_intdigest(self._seed.encode("utf-8", "surrogatepass"))
        return xxh3_64_hexdigest(self.text[begin : begin + _NAMED], seed)


def full_blocks(size: int) -> int:
    """How many blocks a text of so many bytes fills."""
    return bisect_right(ENDS, size)
