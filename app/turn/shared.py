"""What turns share, apart from the set of those that run."""

from __future__ import annotations

import msgspec

from app.fleet.capacity import Bounds, Capacity
from app.fleet.workers import Fleet
from app.metrics import Metrics
from app.turn.access import AccessLog
from app.turn.prefills import Phases
from app.turn.request import Reading
from app.turn.routing import Routing
from app.turn.tracing import Tracing


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one turn, in seconds (0: none)."""

    first_byte: float = 600.0
    idle: float = 300.0
    total: float = 0.0


class Shared(msgspec.Struct, frozen=True):
    """What all turns of a router share."""

    fleet: Fleet
    reading: Reading
    routing: Routing
    metrics: Metrics
    limits: Limits
    capacity: Capacity | None = None
    """None: as many turns as come, anywhere."""
    bounds: Bounds = Bounds()
    """Of waiting for a slot."""
    tracing: Tracing | None = None
    """None: there are no spans."""
    access: AccessLog | None = None
    """None: the log has no line of any turn."""
    own_lines: bytes = b""
    """Headers of every answer, as `Exchange.start` takes them: which replica this is."""
    phases: Phases | None = None
    """None: every worker takes whole turns."""
