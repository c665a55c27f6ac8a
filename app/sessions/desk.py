"""What this replica answers its peers (`door.Desk`), from what it remembers, claims and closes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from app.fleet.health import Word
from app.fleet.naming import Naming
from app.fleet.workers import Target
from app.sessions.claims import Claims, StoreState
from app.sessions.endings import Ending
from app.sessions.entries import Entries, Entry
from app.sessions.peers import Ask, Known
from app.sessions.upkeep import Closer
from backends.base import Claim, ClaimValue, CloseOutcome, Deleted, StoreError

_WORDS = {word.value for word in Word}

Bind = Callable[[Ask, tuple[Target, ...]], Awaitable[tuple[Entry, str]]]
"""Binds a session for a peer, within these targets if any. Raises TurnError."""
Moved = Callable[[str, Target, frozenset[str]], None]
"""Notes where a session is now, and which workers it was moved off."""


class Desk:
    """One replica's."""

    def __init__(
        self, entries: Entries, claims: Claims, closer: Closer, names: Naming, *, bind: Bind, moved: Moved
    ) -> None:
        self._entries, self._claims, self._closer, self._names = entries, claims, closer, names
        self._bind, self._moved = bind, moved

    @property
    def state(self) -> str:
        return self._claims.state.value

    def where(self, ask: Ask) -> Known | None:
        entry = self._entries.find(ask.key)
        ended_at = self._closer.ended_at(ask.key)
        if entry is None:
            return Known(ended=self._closer.is_closing(ask.key), ended_at=ended_at)
        claim = entry.claim
        return Known(
            self._names.spot(entry.target),
            None if claim is None else claim.value,
            0 if claim is None else claim.revision,
            self._claims.state is StoreState.UP and self._entries.proven(entry, self._claims.clock()),
            entry.active,
            entry.served,
            ended_at=ended_at,
        )

    def closed(self, ask: Ask) -> None:
        """As the store's watch will say."""
        entry = self._entries.find(ask.key)
        if entry is not None and entry.claim is None and not entry.active:
            self._entries.forget(ask.key)
        self._entries.deleted(Deleted(ask.key))

    def ended(self, ask: Ask) -> None:
        """A final turn was elsewhere, and the store could not be told. Turns that run here end undisturbed; where one
        of them has to move, that is a new session's."""
        entry = self._entries.find(ask.key)
        if entry is None:
            return
        ending = self._ending(ask)
        if entry.claim is None:
            over = entry.alone is None or entry.alone.served_at <= ending.moment
        elif ask.revision is None:
            over = ending.covers(entry.claim)
        else:
            over = entry.claim.revision == ask.revision
        if over:
            self._closer.begin(entry, heard=ending)
        else:
            entry.unprove()  # one of the two is the other's successor

    def moved(self, ask: Ask) -> None:
        """It goes on elsewhere, and the store could not be told."""
        target = self._names.at(ask.at[0]) if ask.at else None
        if target is not None and self._claims.state is not StoreState.UP:
            self._moved(ask.key, target, frozenset(ask.lost))

    def health(self, ask: Ask) -> None:
        """A worker has failed turns elsewhere, or serves them again: the one at its address, for what is called the
        same may be another one. What a later version says is passed over."""
        worker = self._names.there(ask.at[0]) if ask.at else None
        if worker is not None and ask.said in _WORDS:
            worker.health.heard(Word(ask.said))

    async def bind(self, ask: Ask) -> Known | None:
        targets = tuple(target for spot in ask.at if (target := self._names.at(spot)) is not None)
        entry, how = await self._bind(ask, targets)
        if entry.claim is None or self._claims.state is not StoreState.UP:
            return None  # no better than what the peer can do by itself
        return Known(
            self._names.spot(entry.target),
            entry.claim.value,
            entry.claim.revision,
            True,
            entry.active,
            entry.served,
            how=how,
        )

    async def close(self, ask: Ask) -> Known | None:
        """Close the claim in the store for a peer that cannot, and no successor's."""
        try:
            claim = await self._claims.get(ask.key) if ask.revision is None else _claim(ask.key, ask.revision)
            if claim is None:
                outcome = CloseOutcome.GONE
            elif ask.revision is None and not self._ending(ask).covers(claim):
                return Known(how=CloseOutcome.SUPERSEDED.value)
            else:
                outcome = await self._claims.close(claim)
        except StoreError:
            return None
        self.closed(ask)
        return Known(how=outcome.value)

    def _ending(self, ask: Ask) -> Ending:
        return ask.ending or Ending(ask.key, self._claims.wall())


def _claim(key: str, revision: int) -> Claim:
    """As far as a close needs it."""
    return Claim(key=key, value=ClaimValue(worker="", nonce=""), revision=revision, expires_at=0.0)
