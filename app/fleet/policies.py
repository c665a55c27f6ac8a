"""Where a session goes first. A policy only looks, and what it looks at are the targets: whoever acts on what it picks
tells the fleet (`Fleet.note_placed`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor

from app.errors import TurnError
from app.fleet.candidates import Candidates
from app.fleet.workers import Target

Policy = Callable[[Candidates[Target]], Target]
"""Picks one of at least one candidate."""

WORKER_HINT = "X-Dynamo-Worker-Instance-ID"
_MORE_LOAD = 0.25
_MORE_SESSIONS = 0.1
"""How far above the mean a session's first target by hash may be, in load and in sessions, before it is passed over."""
_CACHED_FOR_LOAD = 0.1
"""What part of a prompt must be cached at a target that has once more to do than is usual, to be sent there."""
_AT_MOST = 0.75
"""How much more than usual, in turns or in sessions, a target may have that is given more because of its cache."""
_FEW = 2
"""More than usual is chance, and does not count."""
_NEARLY = 0.1
"""The part of the targets that may lack what nearly all have."""
_OWING_TURNS, _OWING_TIMES = 4, 4.0
"""What a worker that owes much, and is in doubt (`Owed`), has more of load in placement: so many turns, and so many
times as much. It is given some when others are that loaded: its prompts may just be long."""


def least_loaded(candidates: Candidates[Target]) -> Target:
    """A turn without a session goes where the load is least; equals take turns, so that what comes one at a time
    spreads as well.

    A session goes to the first target of its walk that has room: less load and fewer sessions than a bound a little
    above what is usual (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018); where none
    has, to the least loaded. So load and sessions are spread, and yet what is claimed is mostly what a replica would
    guess that cannot ask the store (`rendezvous`). What others have told of their load may be old: they do not all run
    to the one target that seemed to be free, for each session has a walk of its own. A worker that owes answers is
    passed over as long as others do not, or have much more to do."""
    if candidates.trial:
        return least(candidates.trial)
    if not candidates.key:
        some = candidates.compared()
        load, _ = _usual(some)
        doubts = _doubts(some)
        return min(some, key=lambda each: (_weight(each, load, doubts), each.placed))
    walk, compared = _walk(candidates, candidates.few())
    return _first_with_room(walk, compared, *_usual(compared))


def _walk(
    candidates: Candidates[Target], few: Sequence[Target], key: str = ""
) -> tuple[Iterable[Target], Sequence[Target]]:
    """The walk of a key (left out: the session's), and those to compare with its targets: all, where they are few, or
    of many the walk's alone, which are as good as any."""
    if few:
        return candidates.along(key), few
    walk = candidates.walk(key)
    return walk, walk


def _first_with_room(walk: Iterable[Target], compared: Sequence[Target], load: float, sessions: float) -> Target:
    """The first of a walk that is below the bounds, else the least loaded. `load`, `sessions`: the usual."""
    load_after, sessions_after = load + 1 / len(compared), sessions + 1 / len(compared)
    enough = ceil((1 + _MORE_LOAD) * load_after) + 1  # turns come and go: one more is chance
    many = max(ceil(sessions_after), floor((1 + _MORE_SESSIONS) * sessions_after))  # few fall evenly
    for target in walk:
        worker = target.worker
        share = 1 - worker.newness
        if target.load < share * enough and target.settled < share * many and not worker.owed.much:
            return target
    return _least(compared, load, sessions)


def least(targets: Sequence[Target]) -> Target:
    """The least loaded of a few; of equals the one with the fewest sessions, then the one that was longer not given
    anything."""
    return _least(targets, *_usual(targets))


def _least(targets: Sequence[Target], load: float, sessions: float) -> Target:
    doubts = _doubts(targets)

    def weight(target: Target) -> tuple[float, float, int]:
        return _weight(target, load, doubts), target.settled + target.worker.newness * sessions, target.placed

    return min(targets, key=weight)


def _doubts(targets: Sequence[Target]) -> bool:
    """Whether owing answers speaks against a worker: not where all owe as much. Then all are busy, and whoever answered
    a moment ago is no better than the others."""
    return not all(target.worker.owed.much for target in targets)


def _weight(target: Target, load: float, doubts: bool = True) -> float:
    """Its load as placement sees it. `load`: the usual."""
    worker = target.worker
    weight = target.load + worker.newness * load  # what it has not been given yet counts as if it had
    return (weight + _OWING_TURNS) * _OWING_TIMES if doubts and worker.owed.doubtful else weight


def _usual(targets: Sequence[Target]) -> tuple[float, float]:
    """The mean load and sessions of those that are not new; of all, when all are."""
    load, sessions, count = 0.0, 0, 0
    for target in targets:
        if not target.worker.newness:
            load += target.load
            sessions += target.settled
            count += 1
    if not count:
        return sum(each.load for each in targets) / len(targets), sum(each.settled for each in targets) / len(targets)
    return load / count, sessions / count


def by_cache(candidates: Candidates[Target]) -> Target:
    """Where most of the prompt is cached, with an eye on the load.

    A target's score is the part of the prompt that it has, less what it has to do above what is usual, in turns and in
    sessions. What nearly all have counts for nothing: by that no target is better than another. Where nobody has more
    than that, prompts that go on alike meet at the first target with room of a walk of their own, by hash, so that
    replicas that have learnt nothing choose alike. The same target stands in for those that have it and are busy: a
    prompt that many want spreads, one turn at a time, and the others stay where they are."""
    prompt = candidates.prompt
    if prompt is None or candidates.trial:
        return least_loaded(candidates)
    shares = prompt.shares()
    if shares:
        shares = {target: share for target, share in shares.items() if target in candidates and not target.full}
    few = candidates.few()
    usual = _usual(few) if few else None
    common = 0.0
    if shares:
        ahead = _ahead(shares) if usual else None
        if usual and ahead and not any(_above(ahead, candidates, usual)):
            return ahead  # nobody's score is as high: no hash is needed
        common = _common(shares, len(candidates))
    name = prompt.name(common)
    if not name:
        return least_loaded(candidates)
    walk, compared = _walk(candidates, few, name)
    usual = usual or _usual(compared)
    other = _first_with_room(walk, compared, *usual)
    if not shares:
        return other
    best, most = other, shares.get(other, 0.0) - _CACHED_FOR_LOAD * sum(_above(other, candidates, usual))
    for target, share in shares.items():
        turns, settled = _above(target, candidates, usual)
        score = share - _CACHED_FOR_LOAD * (turns + settled)
        if score > most and share > common and turns <= _AT_MOST and settled <= _AT_MOST:
            best, most = target, score
    return best


def _ahead(shares: Mapping[Target, float]) -> Target | None:
    """Who has more of a prompt than all others; None: nobody."""
    most = max(shares.values(), default=0.0)
    having = [target for target, share in shares.items() if share == most]
    return having[0] if len(having) == 1 else None


def _above(target: Target, candidates: Candidates[Target], usual: tuple[float, float]) -> tuple[float, float]:
    """How much more than usual it has, in turns and in sessions."""
    load, sessions = usual
    turns = max(0.0, _weight(target, load) - load - _FEW) / (load + 1)
    if not candidates.key:
        return turns, 0.0
    settled = target.settled + target.worker.newness * sessions
    return turns, max(0.0, settled - sessions - _FEW) / (sessions + 1)


def _common(shares: Mapping[Target, float], count: int) -> float:
    """What part of a prompt nearly all of so many targets have."""
    lacking = int(count * _NEARLY)
    return sorted(shares.values())[lacking - count] if len(shares) >= count - lacking else 0.0


def round_robin(candidates: Candidates[Target]) -> Target:
    """One after the other."""
    if candidates.trial:
        return least(candidates.trial)
    return min(candidates.in_turn(), key=lambda target: target.placed)


def direct(candidates: Candidates[Target]) -> Target:
    """Nowhere but where the client or a claim says: something in front of the router places."""
    raise hint_required()


def hint_required() -> TurnError:
    """What becomes of a turn with neither a claim nor a hint under `direct`."""
    return TurnError("hint_required", f"this router places nothing by itself; name a worker in {WORKER_HINT}")


POLICIES: dict[str, Policy] = {
    "least-loaded": least_loaded,
    "prefix": by_cache,
    "kv": by_cache,
    "round-robin": round_robin,
    "direct": direct,
}


def rendezvous(key: str, candidates: Candidates[Target]) -> Target:
    """Where replicas meet that can ask nobody: the same target on all that have the same candidates, by hash alone."""
    return candidates.walk(key)[0]


def rank_by_hash(key: str, name: str) -> bytes:
    """Orders names for a key: replicas that choose among the same ones choose alike, and differently for each key."""
    return hashlib.blake2b(f"{key} {name}".encode(), digest_size=8, person=b"coatcheck-hrw1").digest()
