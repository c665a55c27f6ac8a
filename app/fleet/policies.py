"""Where a session goes first. A policy only looks, and what it looks at are the targets: whoever acts on what it picks
tells the fleet (`Fleet.note_placed`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from app.errors import TurnError
from app.fleet.workers import Target

Policy = Callable[[Sequence[Target]], Target]
"""Picks one of at least one candidate."""

WORKER_HINT = "X-Dynamo-Worker-Instance-ID"


def least_loaded(candidates: Sequence[Target]) -> Target:
    """The target with the fewest turns in flight and claims being made; equals take turns, so that sessions arriving
    one at a time spread as well."""
    return min(candidates, key=lambda target: (target.load, target.placed))


def round_robin(candidates: Sequence[Target]) -> Target:
    """One after the other."""
    return min(candidates, key=lambda target: target.placed)


def direct(candidates: Sequence[Target]) -> Target:
    """Nowhere but where the client or a claim says: something in front of the router places."""
    raise hint_required()


def hint_required() -> TurnError:
    """What becomes of a turn with neither a claim nor a hint under `direct`."""
    return TurnError("hint_required", f"this router places nothing by itself; name a worker in {WORKER_HINT}")


POLICIES: dict[str, Policy] = {"least-loaded": least_loaded, "round-robin": round_robin, "direct": direct}


def rendezvous(key: str, candidates: Sequence[Target]) -> Target:
    """The same target on every replica that has the same candidates, without asking anybody (highest random weight,
    Thaler and Ravishankar 1998): when one goes, only its sessions move, and they spread over all others."""

    def weight(target: Target) -> bytes:
        place = f"{key} {target.worker.name} {'' if target.rank is None else target.rank}"
        return hashlib.blake2b(place.encode(), digest_size=8, person=b"coatcheck-hrw1").digest()

    return max(candidates, key=weight)


def rank_by_hash(key: str, name: str) -> bytes:
    """Orders names for a key: replicas that choose among the same ones choose alike, and differently for each key."""
    return hashlib.blake2b(f"{key} {name}".encode(), digest_size=8, person=b"coatcheck-hrw1").digest()
