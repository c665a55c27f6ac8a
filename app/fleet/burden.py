"""What a worker has that counts for load in placement and is no turn in flight."""

from __future__ import annotations

from collections.abc import Callable

FAILURE_LOAD = 4.0
"""What a failed turn counts for in placement at first, in turns in flight."""
_HEARD_LOAD = 2 * FAILURE_LOAD
_LOAD_HALF_LIFE = 5.0
_FORGOTTEN = 0.05


class Burden:
    """What counts for a worker's load and is none: its failures, for whoever fails fast has the fewest in flight, and
    that it is new, for whoever has just come has none."""

    def __init__(self, slow_start: float) -> None:
        self._slow_start = slow_start
        self.begun: Callable[[], None] = lambda: None
        """Told when something has begun to count, or counts more."""
        self._penalty, self._penalty_at = 0.0, 0.0
        self._risen_at: float | None = None

    @property
    def any(self) -> bool:
        """There is, or lately was, some."""
        return self._penalty > 0.0 or self._risen_at is not None

    def failed(self, now: float) -> None:
        self._penalty = self._decayed(now) + FAILURE_LOAD
        self._penalty_at = now
        self.begun()

    def heard(self, now: float) -> None:
        """Another replica's turn failed there. That counts as one of ours, but for `_HEARD_LOAD` at most: enough to be
        passed over while others have room."""
        penalty = self._decayed(now)
        self._penalty = max(penalty, min(penalty + FAILURE_LOAD, _HEARD_LOAD))
        self._penalty_at = now
        self.begun()

    def rise(self, now: float) -> None:
        """Its share grows from now on."""
        self._risen_at = now if self._slow_start else None
        self.begun()

    def forgive(self) -> None:
        """What it failed is past: it has shown that it serves."""
        self._penalty = 0.0

    def penalty(self, now: float) -> float:
        """For its failures, in turns in flight. 0: nothing, until it fails again."""
        penalty = self._decayed(now)
        if penalty < _FORGOTTEN:
            self._penalty = penalty = 0.0
        return penalty

    def newness(self, now: float) -> float:
        """What is missing of its share, from 1 down to 0. 0: nothing, until it rises again."""
        if self._risen_at is not None:
            share = (now - self._risen_at) / self._slow_start
            if share < 1.0:
                return 1.0 - share
            self._risen_at = None
        return 0.0

    def _decayed(self, now: float) -> float:
        return self._penalty * 0.5 ** ((now - self._penalty_at) / _LOAD_HALF_LIFE) if self._penalty else 0.0
