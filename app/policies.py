"""Where a session goes first. A policy only looks; whoever asks reserves."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence

from app.workers import Target

Policy = Callable[[Sequence[Target]], Target]
"""Picks one of at least one candidate."""


def least_loaded() -> Policy:
    """The target with the fewest turns in flight and claims being made; equals take turns, so that sessions arriving
    one at a time spread as well."""
    turn = itertools.count()

    def pick(candidates: Sequence[Target]) -> Target:
        start = next(turn) % len(candidates)
        return min(itertools.chain(candidates[start:], candidates[:start]), key=lambda target: target.load)

    return pick


def round_robin() -> Policy:
    """One after the other."""
    turn = itertools.count()
    return lambda candidates: candidates[next(turn) % len(candidates)]


POLICIES: dict[str, Callable[[], Policy]] = {"least-loaded": least_loaded, "round-robin": round_robin}


def rendezvous(key: str, candidates: Sequence[Target]) -> Target:
    """The same target on every replica that has the same candidates, without asking anybody (highest random weight,
    Thaler and Ravishankar 1998): when one goes, only its sessions move, and they spread over all others."""

    def weight(target: Target) -> bytes:
        place = f"{key} {target.worker.name} {'' if target.rank is None else target.rank}"
        return hashlib.blake2b(place.encode(), digest_size=8, person=b"coatcheck-hrw1").digest()

    return max(candidates, key=weight)
