"""The access log: one line for each turn that failed, or for every turn."""

from __future__ import annotations

import logging

import msgspec

from app.logs import Ration, event
from app.metrics import TurnOutcome

log = logging.getLogger("coatcheck.access")

_GRAVE = frozenset({"worker_error", "broken", "unplaced", "failed"})
"""Outcomes that no client has brought about."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the line says of a turn."""

    method: str
    path: str
    """Without its query, which may hold what is private."""
    status: int
    """What the client was answered; 499: it left before there was an answer."""
    outcome: TurnOutcome
    why: str = ""
    request: str = ""
    tenant: str = ""
    session: str = ""
    """As admins see it."""
    worker: str = ""
    rank: int | None = None
    affinity: str = ""
    prefill_worker: str = ""
    """Where its prompt was computed, if that was another worker; how it came there, and how long that took."""
    prefill_affinity: str = ""
    prefill_ms: float | None = None
    attempts: int = 0
    first_byte_ms: float | None = None
    """From its arrival to the first byte of the worker's body."""
    ms: float = 0.0
    """In all."""


class AccessLog:
    """Turns that did not fail are told only where all are: they cost one comparison. Failures are rationed, for they
    come in storms."""

    def __init__(self, *, every: bool) -> None:
        """`every`: turns that did not fail as well, and then without a ration."""
        self.every = every
        self._ration = Ration(log, "turns that failed")

    def wants(self, outcome: TurnOutcome) -> bool:
        """Whether such a turn has a line. One that is wanted is told."""
        return self.every or (outcome not in ("completed", "explained") and self._ration.allows())

    def told(self, turn: Told) -> None:
        level = logging.WARNING if turn.outcome in _GRAVE else logging.INFO
        fields = {name: value for name in turn.__struct_fields__ if (value := getattr(turn, name)) not in ("", None)}
        text = "%s %s %d %s in %.0f ms%s"
        why = f": {turn.why}" if turn.why else ""
        said = (turn.method, turn.path, turn.status, turn.outcome, turn.ms, why)
        log.log(level, text, *said, extra=event("turn", **fields))

    def close(self) -> None:
        self._ration.tell()
