"""What is logged, while it is: pytest's own list of records is another one in each phase of a test."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any


class Noted(logging.Handler):
    """Keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The fields of the events of one kind."""
        return [vars(each)["fields"] for each in self.records if getattr(each, "event", None) == kind]


@contextlib.contextmanager
def noted(name: str) -> Iterator[Noted]:
    """All that the logger of that name, and those below it, have to say at level INFO or above."""
    log, handler = logging.getLogger(name), Noted()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
