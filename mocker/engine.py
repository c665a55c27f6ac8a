"""The simulated engine: which tokens it says, and when.

Text is deterministic in the engine's seed, the prompt and the request's seed, so that two workers with the same seed
agree and a repeated request is answered alike. Tokens come from a ring that is made once; a turn only has a place
in it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.types import Message, Receive

_WORDS = (
    "act add age aim air ark art bay bed bee big bit box cap car cat cup day dew dry ear eel elm end fan far few fig "
    "fir fog fox fun gem hat hay hen hut ice ink ivy jam jar key kit lap law leg log low map mud net new nut oak oar "
    "oat old one our owl own pan pea pen pie pin pot ray red rib row rug rye sea sky sun tea ten tin toy two urn van "
    "way wax web win yak yes zoo"
)
"""Three letters: with its blank a word has the bytes of one token, so an answer is recounted alike in a prompt."""

_RING = 8191
"""Prime, so that answers longer than the ring do not repeat in step with anything."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When tokens come, in seconds."""

    ttft: float
    itl: float

    def slowed(self, ttft_ms: float | None, itl_ms: float | None) -> Pace:
        """The same but for what is given."""
        return Pace(
            self.ttft if ttft_ms is None else ttft_ms / 1000,
            self.itl if itl_ms is None else itl_ms / 1000,
        )

    def total(self, tokens: int) -> float:
        """From the start until the last of `tokens` tokens."""
        return self.ttft + max(0, tokens - 1) * self.itl


class Engine:
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


class Metronome:
    """Wakes thousands of streams token by token.

    Streams that are due within the same `TICK` share one timer, which takes a token's CPU from 49 to 45 µs (80 streams,
    100 tokens/s each, a third of it the kernel's). They are woken up to a tick late, which does not add up: each token
    has its own due time.
    """

    TICK = 0.001
    """Seconds. Event loops do not time finer than that anyway."""

    def __init__(self) -> None:
        self._due: dict[int, list[asyncio.Future[None]]] = {}

    def until(self, due: float) -> asyncio.Future[None]:
        """Await this to wait for the moment `due` of `time.monotonic`, or to let others go on if it has passed."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        now = time.monotonic()
        tick = math.ceil(max(due, now) / self.TICK)
        waiters = self._due.get(tick)
        if waiters is not None:
            waiters.append(waiter)
        else:
            self._due[tick] = [waiter]
            if due <= now:
                loop.call_soon(self._wake, tick)
            else:
                loop.call_later(tick * self.TICK - now, self._wake, tick)
        return waiter

    def _wake(self, tick: int) -> None:
        for waiter in self._due.pop(tick):
            if not waiter.done():
                waiter.set_result(None)


async def left_within(receive: Receive, seconds: float | None) -> bool:
    """Wait `seconds` (None: for ever). True as soon as the client leaves. The request's body must have been read."""
    try:
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
            return True
    except TimeoutError:
        return left_now(receive)


def left_now(receive: Receive) -> bool:
    """Whether the server knows now that the client has left. ASGI has no such question; this asks without waiting.

    An ASGI server drops what is sent after a disconnect without a word. So only what this returns right after a `send`,
    with no await between, tells whether that message reached the transport. The final message of a response is an
    exception: after it a server reports every client as gone, so ask before it.
    """
    step: Message | None = None
    coroutine = receive().__await__()
    try:
        next(coroutine)
    except StopIteration as stop:
        step = stop.value
    finally:
        coroutine.close()
    return step is not None and step["type"] == "http.disconnect"
