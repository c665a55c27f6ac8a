"""What a simulated worker says.

Text is deterministic in the worker's seed, the prompt and the request's seed, so that two workers with the same seed
agree and a repeated request is answered alike. Tokens come from a ring that is made once; a turn only has a place
in it.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Sequence

_WORDS = (
    "act add age aim air ark art bay bed bee big bit box cap car cat cup day dew dry ear eel elm end fan far few fig "
    "fir fog fox fun gem hat hay hen hut ice ink ivy jam jar key kit lap law leg log low map mud net new nut oak oar "
    "oat old one our owl own pan pea pen pie pin pot ray red rib row rug rye sea sky sun tea ten tin toy two urn van "
    "way wax web win yak yes zoo"
)
"""Three letters: with its blank a word has the bytes of one token, so an answer is recounted alike in a prompt."""

_RING = 8191
"""Prime, so that answers longer than the ring do not repeat in step with anything."""


class Voice:
    """Answers of one worker. Holds no state that a turn changes."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        words = _WORDS.split()
        self._ring = [f" {rng.choice(words)}".encode() for _ in range(_RING)]

    def completion(self, prompt: bytes, seed: int, tokens: int) -> Completion:
        """The answer to `prompt`, `tokens` long."""
        return Completion(self._ring, zlib.crc32(prompt, seed & 0xFFFFFFFF) % _RING, tokens)

    def embedding(self, text: bytes, dimensions: int) -> list[float]:
        """A unit vector, the same for the same text on every worker whatever its seed, as of one model."""
        rng = random.Random(text)
        vector = [rng.gauss(0.0, 1.0) for _ in range(dimensions)]
        norm = math.sqrt(math.fsum(value * value for value in vector))
        return [value / norm for value in vector]


class Completion:
    """The tokens of one answer, as UTF-8 that needs no escape inside a JSON string."""

    def __init__(self, ring: Sequence[bytes], start: int, tokens: int) -> None:
        self._ring = ring
        self._start = start
        self.tokens = tokens

    def pieces(self, tokens: int | None = None) -> Iterator[bytes]:
        """The first `tokens` tokens, all by default."""
        ring, start = self._ring, self._start
        tokens = self.tokens if tokens is None else min(tokens, self.tokens)
        if tokens:
            yield ring[start].strip().capitalize()
        for place in range(start + 1, start + tokens):
            yield ring[place % _RING]

    def text(self, tokens: int | None = None) -> str:
        """The same, joined."""
        return b"".join(self.pieces(tokens)).decode()
