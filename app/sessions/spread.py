"""A session that is at several workers, because none of them serves all the models that it uses.

It keeps one claim, by which it goes wherever it can. A model that the claim's worker does not serve gets a claim of its
own beside it, whose key is the session's with the model; and the final ends all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from app.fleet.workers import Target
from app.sessions.affinity import Affinity, Binding, ends
from app.sessions.placing import Placement


class Spread:
    """A turn's hold on such a session, with what `Binding` promises: of the claim that the turn goes by, which is the
    session's own or one beside it. The end waits for the close of all claims that end with it."""

    def __init__(
        self,
        affinity: Affinity,
        own: Hold,
        others: Callable[[], Iterable[str]] = tuple,
        beside: Binding | None = None,
    ) -> None:
        """`own`: the session's own claim. `beside`: the one that the turn goes by; None: its own. `others` says the
        keys of claims that end with the session; it is asked once, when that ends."""
        self._affinity, self._own, self._others = affinity, own, others
        self._by = own if beside is None else beside
        self._all = (own,) if beside is None else (own, beside)
        self._ended = False
        """The others are closed, or are being closed."""

    # -- the claim that the turn goes by

    @property
    def target(self) -> Target:
        return self._by.target

    @property
    def how(self) -> str:
        return self._by.how

    @property
    def key(self) -> str:
        """The session's own, its hash."""
        return self._own.key

    @property
    def own(self) -> bool:
        return self._by.own

    @property
    def seen(self) -> int:
        return self._by.seen

    def saw(self, size: int) -> None:
        self._by.saw(size)

    def bind_cached(self) -> bool:
        return self._by.bind_cached()

    async def bind(self, placement: Placement) -> None:
        await self._by.bind(placement)

    async def rebind(self, lost: frozenset[str], placement: Placement) -> None:
        await self._by.rebind(lost, placement)

    # -- all of them

    def answered(self, status: int) -> None:
        for each in self._all:
            each.answered(status)

    @property
    def ending(self) -> bool:
        return self._own.ending

    @property
    def holds_end(self) -> bool:
        return (self._own.ending and not self._ended) or any(each.holds_end for each in self._all)

    async def close(self) -> None:
        closes = [each.close() for each in self._all]
        if self._own.ending:
            closes.append(self._affinity.end_all(self._ending_others()))
        await asyncio.gather(*closes)

    async def refused(self, status: int) -> None:
        await asyncio.gather(*(each.refused(status) for each in self._all))
        if ends(status):
            await self._affinity.end_all(self._ending_others())

    async def left(self) -> None:
        await asyncio.gather(*(each.left() for each in self._all))
        await self._affinity.end_all(self._ending_others())

    def release(self) -> None:
        if self._own.ending:
            self._affinity.end_later(self._ending_others())
        for each in self._all:
            each.release()

    def _ending_others(self) -> list[str]:
        if self._ended:
            return []
        self._ended = True
        return list(self._others())


Hold = Binding | Spread
"""A turn's hold on its session."""
