"""The targets that may serve a request, and the few of them that a policy looks at: as many in a fleet of a thousand as
in a fleet of sixteen.

**By hash.** Each target has `_POINTS` places on a circle, a key has `_PROBES`, and what comes first after a probe is
the target it finds; the nearer, the sooner on the key's *walk* (multi-probe consistent hashing, Appleton and O'Reilly
2015). So the walk is the same on every replica that has the same candidates. When a target goes, only its keys go
elsewhere, each to the next on its own walk, which spreads them over all others; one that comes takes its share from
all. Rendezvous hashing does that as well, and hashes once for each target.

**By load.** Up to `_ALL` targets are compared all. Of more the walk's are for a session, and for a turn without one a
window that moves on with each placement, so that none is left out for long: the least loaded of eight is hardly worse
than the least loaded of all (Mitzenmacher 2001, "The power of two choices in randomized load balancing"), and needs
nothing kept in order while turns come and go.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

_POINTS = 8
_PROBES = 8
_ALL = 16
_NUMBER = 20
"""Bits of a place on the circle, the lowest, that stand for the number of the target that is there."""
_CIRCLE = 1 << 60
"""More would not fit into what Python adds fast."""
_PLACE = _CIRCLE - (1 << _NUMBER)
_TARGET = (1 << _NUMBER) - 1
_read_points = struct.Struct(f"<{_POINTS}Q").unpack
_read_probes = struct.Struct(f"<{_PROBES}Q").unpack
_probe = hashlib.blake2b(digest_size=8 * _PROBES, person=b"coatcheck-probe1")
"""Before the key; a copy costs less than a new one."""


class Placed(Protocol):
    """What a hash can find."""

    @property
    def points(self) -> tuple[int, ...]: ...

    @property
    def full(self) -> bool: ...


T = TypeVar("T", bound=Placed)


class Prompt(Protocol[T]):
    """A request's prompt, for policies that place it by what is cached."""

    def shares(self) -> Mapping[T, float]:
        """What part of it, up to 1, each target has in its cache, as far as is known; of those that have any."""
        ...

    def name(self, beyond: float) -> str:
        """For what follows on that part of it: the same for prompts that go on alike for a while, and on all replicas.
        Empty: it is too short to be in a cache."""
        ...


def points_of(worker: str, rank: int | None) -> tuple[int, ...]:
    """The places of a target. They are the same in every version: replicas of two run side by side in an update."""
    place = f"{worker} {'' if rank is None else rank}".encode()
    digest = hashlib.blake2b(place, digest_size=8 * _POINTS, person=b"coatcheck-point1").digest()
    return tuple(point & _PLACE for point in _read_points(digest))


class Lineup(Generic[T]):
    """The targets of one choice, as long as neither the fleet nor a worker's state changes. Immutable."""

    __slots__ = ("_members", "_places", "targets")

    def __init__(self, targets: tuple[T, ...]) -> None:
        self.targets = targets
        self._members = frozenset(targets)
        self._places: list[int] = []
        """The points of all, in their order, each with its target's number; made when a hash is asked for."""

    def __contains__(self, target: object) -> bool:
        return target in self._members

    def walk(self, key: str) -> Iterator[T]:
        """The first few targets by hash: at least one. What is behind the first, which is mostly enough, costs nothing
        until somebody asks for it."""
        places, targets = self._places, self.targets
        if not places:
            places += sorted(point | number for number, target in enumerate(targets) for point in target.points)
            places.append(places[0] + _CIRCLE)  # after the last comes the first
        probe = _probe.copy()
        probe.update(key.encode())
        # The distance stands above the number of the target.
        found = [places[bisect_left(places, at := word & _PLACE)] - at for word in _read_probes(probe.digest())]
        first = min(found) & _TARGET
        yield targets[first]
        found.sort()
        for number in {place & _TARGET: None for place in found}:
            if number != first:
                yield targets[number]


class Candidates(Collection[T]):
    """The targets that may serve one request. A policy picks one of at least one."""

    __slots__ = ("_lineup", "_placements", "_room", "key", "prompt", "trial")

    def __init__(
        self,
        lineup: Lineup[T],
        *,
        key: str = "",
        placements: int = 0,
        trial: tuple[T, ...] = (),
        room: bool = False,
        prompt: Prompt[T] | None = None,
    ) -> None:
        """`key`: of the session that is placed; empty: the turn has none. `placements`: how many there have been.
        `trial`: the targets of a worker that is to be tried. `room`: some have limits; those that are full are passed
        over as long as others are not. `prompt`: None where the policy does not ask for it, or there is none."""
        self.prompt = prompt
        self._lineup, self.key, self._placements, self._room = lineup, key, placements, room
        self.trial = tuple(target for target in trial if not target.full) if room else trial

    @classmethod
    def of(cls, targets: Collection[T]) -> Candidates[T]:
        """Just these."""
        return cls(Lineup(tuple(targets)))

    def __iter__(self) -> Iterator[T]:
        yield from self._lineup.targets
        yield from self.trial

    def __len__(self) -> int:
        return len(self._lineup.targets) + len(self.trial)

    def __bool__(self) -> bool:
        return bool(self._lineup.targets or self.trial)

    def __contains__(self, target: object) -> bool:
        return target in self._lineup or target in self.trial

    def __getitem__(self, number: int) -> T:
        return (self._lineup.targets + self.trial)[number]

    @property
    def any_room(self) -> bool:
        return any(not target.full for target in self)

    def walk(self, key: str = "") -> list[T]:
        """The first few by hash of `key` (left out: the session's), without one that is to be tried."""
        walk = list(self._lineup.walk(key or self.key))
        return list(self._with_room(walk)) if self._room else walk

    def along(self, key: str = "") -> Iterator[T]:
        """The same, each looked for when it is asked for."""
        return iter(self.walk(key)) if self._room else self._lineup.walk(key or self.key)

    def in_turn(self) -> tuple[T, ...]:
        """Those whose turn it is: all, or the `_ALL` that come next, one by one."""
        return self._window(self._placements, _ALL)

    def compared(self) -> tuple[T, ...]:
        """Those to compare by load: all, or `_ALL` of them."""
        return self._window(self._placements * _ALL, _ALL)

    def few(self) -> Sequence[T]:
        """All, where they are so few that all are compared whatever the walk; of more none."""
        targets = self._lineup.targets
        if len(targets) > _ALL:
            return ()
        return self._with_room(targets) if self._room else targets

    def _window(self, begin: int, size: int) -> tuple[T, ...]:
        targets = self._lineup.targets
        if len(targets) > _ALL:
            begin %= len(targets)
            end = begin + size
            targets = targets[begin:end] if end <= len(targets) else targets[begin:] + targets[: end - len(targets)]
        return self._with_room(targets) if self._room else targets

    def _with_room(self, targets: Sequence[T]) -> tuple[T, ...]:
        """Those of some that are not full; else of all; else, when all are full, these."""
        return (
            tuple(target for target in targets if not target.full)
            or tuple(target for target in self._lineup.targets if not target.full)
            or tuple(targets)
        )
