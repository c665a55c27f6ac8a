"""What is cached, exactly: prompts as the workers' own tokens, and blocks as the workers tell of them.

Of a worker that tells nothing, or is not believed at the moment, and of a prompt whose tokens cannot be had, is known
what `prefix` knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice

import msgspec

from app.fleet.placement import prefix
from app.fleet.placement.blocks import Piece
from app.fleet.placement.feeds import Feeds
from app.fleet.placement.foresight import SALT
from app.fleet.placement.index import Index, Shelf, chained, root
from app.fleet.placement.prefix import Prefixes
from app.fleet.placement.tokens import Tokenizer
from app.fleet.workers import Fleet, Target, Worker
from app.metrics import Metrics

Adapter = Callable[[Worker, str], str | None]
"""Of a model at a worker: the adapter that it is; empty: it is the worker's own model; None: that is not known."""


class Caches:
    """`Foresight` by KV events. `start` inside the running loop; `close` before it ends."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        prefixes: Prefixes,
        tokenizer: Tokenizer,
        *,
        adapter: Adapter,
        serving: Callable[[str], frozenset[str] | None] = lambda model: None,
    ) -> None:
        self._fleet, self.metrics = fleet, metrics
        self.prefixes, self.tokenizer, self.adapter, self._serving = prefixes, tokenizer, adapter, serving
        self.index = Index()
        self.feeds: Feeds | None = None

    def __len__(self) -> int:
        return len(self.index) + len(self.prefixes)

    def start(self) -> None:
        self.feeds = Feeds(self._fleet, self.index, self.metrics, loop=asyncio.get_running_loop())

    def close(self) -> None:
        if self.feeds is not None:
            self.feeds.close()
            self.feeds = None

    @property
    def believed(self) -> int:
        """Targets of which it is known what they have."""
        feeds = self.feeds
        return 0 if feeds is None else sum(feeds.trusted(target) is not None for target in feeds.by_target)

    def prompt(self, path: bytes, model: str, said: Mapping[str, Piece]) -> Prompt | None:
        """As `Foresight.prompt`."""
        guessed = self.prefixes.prompt(path, model, said)
        return None if guessed is None else Prompt(self, guessed, path, model, said)

    def asked(self, model: str) -> Worker | None:
        """Whom to ask for the tokens of a prompt: the least busy of those that serve the model and tell what they
        have."""
        feeds = self.feeds
        if feeds is None:
            return None
        among = self._serving(model) if model else None
        able = [
            target
            for target, feed in feeds.by_target.items()
            if feed.trusted and target.worker.available and (among is None or target.worker.name in among)
        ]
        return min(able, key=lambda target: target.load).worker if able else None

    def held(self, tokens: bytes, model: str, salt: str) -> dict[Target, int]:
        """How many of a prompt's tokens each target has in its cache, of those that are believed: all of them."""
        feeds = self.feeds
        found: dict[Target, int] = {}
        if feeds is None:
            return found
        count = len(tokens) // 4
        by_chain: dict[tuple[int, str], dict[Shelf, int]] = {}
        for target in feeds.by_target:
            feed = feeds.trusted(target)
            adapter = None if feed is None else self.adapter(target.worker, model)
            if feed is None or adapter is None:
                continue
            least = count
            for shelf in feed.holdings.shelves.values():
                size = shelf.block_size
                chain = size, adapter
                if chain not in by_chain:
                    # The last token of a prompt is computed in any case.
                    blocks = islice(chained(root(size, adapter, salt), tokens, size), (count - 1) // size)
                    by_chain[chain] = self.index.find(blocks)
                least = min(least, by_chain[chain].get(shelf, 0) * size)
            found[target] = least if feed.holdings.shelves else 0
        return found


class Prompt:
    """One request's prompt (`Foreseen`)."""

    __slots__ = ("_caches", "_exact", "_guessed", "_held", "_model", "_path", "_read", "_said", "_tokens", "_where")

    def __init__(
        self, caches: Caches, guessed: prefix.Prompt, path: bytes, model: str, said: Mapping[str, Piece]
    ) -> None:
        self._caches, self._guessed, self._path, self._model, self._said = caches, guessed, path, model, said
        self._tokens: bytes | None = None
        self._held: dict[Target, int] | None = None
        """Tokens that each target has, as was seen last."""
        self._read = False
        self._where: Target | None = None
        self._exact: int | None = None
        """Tokens that are cached where it goes; None: that is not known."""

    @property
    def waits(self) -> bool:
        return not self._read and self._guessed.counts

    async def read(self) -> None:
        self._read = True
        worker = self._caches.asked(self._model)
        if worker is not None:
            self._tokens = await self._caches.tokenizer.tokens(self._path, self._model, self._said, worker)

    def _look(self) -> dict[Target, int]:
        if self._tokens is None:
            return {}
        salt = self._said.get(SALT, b"")
        return self._caches.held(self._tokens, self._model, _text(bytes(salt)))

    def shares(self) -> Mapping[Target, float]:
        self._held = held = self._look()
        if not held:
            return self._guessed.shares()
        count = len(self._tokens or b"") // 4
        shares = {target: share for target, share in self._guessed.shares().items() if target not in held}
        return shares | {target: tokens / count for target, tokens in held.items() if tokens}

    def name(self, beyond: float) -> str:
        return self._guessed.name(beyond)

    def placed(self, target: Target) -> None:
        self._guessed.placed(target)
        held = self._look() if self._held is None else self._held
        self._where, self._exact = target, held.get(target)

    def settle(self, target: Target, usage: tuple[int, int] | None) -> None:
        if self._exact is None or target is not self._where:
            feed = None if self._caches.feeds is None else self._caches.feeds.trusted(target)
            self._guessed.settle(target, usage)
            if feed is not None:
                feed.follows_on()
            return
        if usage is None or not (usage[1] or target.worker.cells.cached_tokens):
            return
        metrics = self._caches.metrics
        metrics.foreseen_tokens.cells[()] += self._exact
        metrics.found_tokens.cells[()] += usage[1]
        metrics.foresights_exact.inc("yes" if self._exact == usage[1] else "more" if usage[1] > self._exact else "less")


def _text(said: bytes) -> str:
    """A text of JSON. What is none is a salt of its own that no block has."""
    try:
        return msgspec.json.decode(said, type=str) if said else ""
    except msgspec.DecodeError:
        return "\0"
