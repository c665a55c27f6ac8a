"""The log: how its lines look, what a line about something that has happened carries, and how many there may be.

What has happened, as opposed to what somebody remarks, is an *event*: its record has a kind and fields, so that a
machine can read it and the operator's page can list it:

    log.warning("worker %s: %s -> %s", name, before, after, extra=event("worker_state", worker=name, from_=before))

The record then has `event` ("worker_state") and `fields` ({"worker": ..., "from": ...}). A session is named in either
by the first digits of its hash (`shown`), as admins see it, and never by its id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]
Field = str | int | float
SHOWN_DIGITS = 12
"""Of a session's hash: no two of a hundred thousand sessions are likely to have them in common."""
_CONTEXT = ("request", "tenant", "session", "worker")
"""Fields that a line of text names behind its message, where that does not say them."""
_OWN = frozenset({"time", "level", "logger", "message", "event", "replica", "exception"})
"""Keys of a line of JSON that no field of an event has."""
_unprintable = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def event(kind: str, /, **fields: Field | None) -> dict[str, Any]:
    """What a record about this event has besides its message, for `extra`. A field that is None is left out; `from_`
    stands for `from`."""
    return {"event": kind, "fields": {name.rstrip("_"): value for name, value in fields.items() if value is not None}}


def shown(key: str) -> str:
    """A session's hash as lines and admins' lists show it."""
    return key[:SHOWN_DIGITS]


def set_up(level: str, form: Format = "text", replica: str = "") -> None:
    """Everything to stderr, uvicorn's own lines too; other libraries' small talk left out. Once for each process.

    Events are made whatever the level, so that others than the log may follow them; of lines, `level` is the least
    severe. `replica`: said in each line; empty: this is none."""
    least = logging.getLevelName(level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(least)
    handler.setFormatter(JsonFormatter(replica) if form == "json" else TextFormatter(replica))
    logging.basicConfig(level=least, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("coatcheck").setLevel(min(least, logging.INFO))
    for name in ("httpx", "httpcore", "watchfiles", "asyncio", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not for what uvicorn calls an error and we do on purpose."""
    # A turn was still running when its time at shutdown was over; uvicorn has said how many those were.
    # Somebody who looked at the page took nothing, and the stream was cut. By name, which imports nothing.
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, asyncio.CancelledError) or type(error).__name__ == "SendTimeoutError")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123+01:00 WARNING coatcheck.fleet worker w0: up -> down: refused | replica=r1`"""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        # One line each, whoever chose the words: a path or a worker's answer could bring lines of its own.
        message = _unprintable.sub(lambda found: repr(found[0])[1:-1], record.getMessage())
        said = getattr(record, "fields", {})
        context = [(name, said[name]) for name in _CONTEXT if name in said and str(said[name]) not in message]
        if self._replica:
            context.append(("replica", self._replica))
        line = f"{_stamp(record).isoformat(timespec='milliseconds')} {record.levelname} {record.name} {message}"
        if context:
            line += " | " + " ".join(f"{name}={value}" for name, value in context)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: `time` (RFC 3339), `level`, `logger`, `message`, `replica`; of an event its kind (`event`) and
    its fields; `exception`, a traceback, where there is one."""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        kind = getattr(record, "event", None)
        if kind is not None:
            line["event"] = kind
            line |= {name: value for name, value in getattr(record, "fields", {}).items() if name not in _OWN}
        if self._replica:
            line["replica"] = self._replica
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _stamp(record: logging.LogRecord) -> datetime:
    """When it was made, with this machine's time zone."""
    return datetime.fromtimestamp(record.created, UTC).astimezone()


class Ration:
    """So many lines of one sort in a second: a storm of them must cost little, and drown nothing. Of those beyond that
    one line says how many they were, at the end of the second. To be used within the running loop."""

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        *,
        most: int = 20,
        seconds: float = 1.0,
        loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.get_running_loop,
    ) -> None:
        """`what`: of which, in the plural."""
        self._log, self._what, self._most, self._seconds, self._loop = log, what, most, seconds, loop
        self._until = 0.0
        self._let_through = self._left_out = 0

    def allows(self) -> bool:
        """Whether one more may be written now."""
        loop = self._loop()
        now = loop.time()
        if now >= self._until and not self._left_out:
            self._until, self._let_through = now + self._seconds, 0
        if self._let_through < self._most and not self._left_out:
            self._let_through += 1
            return True
        if not self._left_out:
            loop.call_at(self._until, self.tell)
        self._left_out += 1
        return False

    def tell(self) -> None:
        """Say how many were left out, if any were."""
        count, self._left_out = self._left_out, 0
        if count:
            text = "%d more %s, which are not listed"
            self._log.warning(text, count, self._what, extra=event("left_out", what=self._what, count=count))
