"""Where a session goes first. A policy only looks; whoever asks reserves. What it remembers is its own: a copy of it
answers as it would, and takes no turn from it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from app.errors import TurnError
from app.fleet.workers import Target


class Policy(Protocol):
    """Picks one of at least one candidate."""

    places: bool

    def __call__(self, candidates: Sequence[Target]) -> Target: ...


def least_loaded() -> Policy:
    """The target with the fewest turns in flight and claims being made; equals take turns, so that sessions arriving
    one at a time spread as well."""
    return _LeastLoaded()


def round_robin() -> Policy:
    """One after the other."""
    return _RoundRobin()


def direct() -> Policy:
    """Nowhere but where the client or a claim says: something in front of the router places."""
    return _Direct()


class _LeastLoaded:
    places = True

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, candidates: Sequence[Target]) -> Target:
        start = self._turn % len(candidates)
        self._turn += 1
        return min(itertools.chain(candidates[start:], candidates[:start]), key=lambda target: target.load)


class _RoundRobin:
    places = True

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, candidates: Sequence[Target]) -> Target:
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)]


class _Direct:
    places = False

    def __call__(self, candidates: Sequence[Target]) -> Target:
        raise hint_required()


def hint_required() -> TurnError:
    return TurnError("hint_required", f"this router places nothing by itself; send {WORKER_HINT}")


WORKER_HINT = "X-Dynamo-Worker-Instance-ID"

POLICIES: dict[str, Callable[[], Policy]] = {"least-loaded": least_loaded, "round-robin": round_robin, "direct": direct}


def rendezvous(key: str, candidates: Sequence[Target]) -> Target:
    """The same target on every replica that has the same candidates, without asking anybody (highest random weight,
    Thaler and Ravishankar 1998): when one goes, only its sessions move, and they spread over all others."""

    def weight(target: Target) -> bytes:
        place = f"{key} {target.worker.name} {'' if target.rank is None else target.rank}"
        return hashlib.blake2b(place.encode(), digest_size=8, person=b"coatcheck-hrw1").digest()

    return max(candidates, key=weight)
