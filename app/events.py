"""What happened lately, for people: the last of what the router has logged, with its reasons.

A record that is an event says so by two attributes: `event`, its kind in a word, and `fields`, what it is about. Others
are of the kind that their logger's name ends with. What single turns cause comes by the thousand where something is
wrong: it has a list of its own, so that it cannot push out the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

ROOT = "coatcheck"
"""The logger that all of ours are below."""
KEPT = 500
_SMALL_TALK = 100
"""Of the records that are neither events nor warnings, or of a kind of which there are many."""
_MANY = frozenset({"turn", "binding", "session_moved", "claim_gave_way", "fault", "left_out"})
"""Kinds of events that single turns cause."""
_LONGEST = 600
"""Characters of a message."""
_FIELDS = 16


class Event(msgspec.Struct, frozen=True):
    """`number` counts up while the process lives; `at` in Unix seconds; `level` is info, warning or error."""

    number: int
    at: float
    level: str
    kind: str
    message: str
    fields: dict[str, str | int | float]


def _level(number: int) -> str:
    return "error" if number >= logging.ERROR else "warning" if number >= logging.WARNING else "info"


class EventLog(logging.Handler):
    """Keeps the last of them. Two routers in one process hear each other's."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._numbers = itertools.count(1)
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._others: deque[Event] = deque(maxlen=_SMALL_TALK)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = self._read(record)
        except Exception:  # as every handler does: what cannot be written is told on stderr, and nothing fails
            self.handleError(record)
            return
        stands_out = (hasattr(record, "event") or record.levelno >= logging.WARNING) and event.kind not in _MANY
        (self._events if stands_out else self._others).append(event)

    def _read(self, record: logging.LogRecord) -> Event:
        kind = getattr(record, "event", None)
        said: Any = getattr(record, "fields", None)
        fields = itertools.islice(said.items(), _FIELDS) if isinstance(said, dict) else ()
        return Event(
            next(self._numbers),
            round(record.created, 1),
            _level(record.levelno),
            kind if isinstance(kind, str) else record.name.removeprefix(f"{ROOT}.").rpartition(".")[2],
            record.getMessage()[:_LONGEST],
            {str(name): value if isinstance(value, int | float) else str(value)[:_LONGEST] for name, value in fields},
        )

    def last(self, count: int = KEPT) -> list[Event]:
        """The latest ones, the oldest of them first."""
        return sorted((*self._events, *self._others), key=lambda event: event.number)[-count:]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger(ROOT)
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
