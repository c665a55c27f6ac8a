"""The log's lines, as people and machines read them, and that a storm of them is short."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

import pytest
from sse_starlette.sse import SendTimeoutError

from app.logs import JsonFormatter, Ration, TextFormatter, event, set_up, shown
from tests.support.logs import Noted


def record(message: str, *args: object, level: int = logging.WARNING, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("coatcheck.x", level, "file.py", 1, message, args, more.pop("exc_info", None))
    vars(made).update(more)
    return made


def test_a_line_of_json_has_the_time_with_its_zone_and_the_fields_of_its_event() -> None:
    said = event("worker_state", worker="w0", from_="up", to="down", reason=None, message="no")
    line = json.loads(JsonFormatter("r1").format(record("worker %s", "w0", **said)))
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "warning",
        "logger": "coatcheck.x",
        "message": "worker w0",
        "event": "worker_state",
        "worker": "w0",
        "from": "up",
        "to": "down",
        "replica": "r1",
    }


def test_a_remark_is_no_event() -> None:
    assert json.loads(JsonFormatter().format(record("a"))).keys() == {"time", "level", "logger", "message"}


def test_a_line_of_text_names_what_its_message_does_not() -> None:
    said = event("turn", request="id-1", tenant="acme", session="0123456789ab", worker="w0", ms=3.5)
    line = TextFormatter("r1").format(record("a turn at w0 failed", **said))
    stamp, rest = line.split(" ", 1)
    assert datetime.fromisoformat(stamp).tzinfo is not None
    assert rest == (
        "WARNING coatcheck.x a turn at w0 failed | request=id-1 tenant=acme session=0123456789ab replica=r1"
    )


@pytest.mark.parametrize("words", ["a\nb", "a\r\n2026 CRITICAL forged", "a\x1b[31m", "a\u2028b"])
def test_a_clients_words_cannot_make_lines_of_their_own(words: str) -> None:
    for formatter in (TextFormatter("r1"), JsonFormatter("r1")):
        line = formatter.format(record("%s", words, **event("turn", path=words)))
        assert len(line.splitlines()) == 1
        assert not re.search(r"[\x00-\x1f]", line)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_fault_is_told_with_its_traceback(formatter: logging.Formatter) -> None:
    try:
        raise ZeroDivisionError("here")
    except ZeroDivisionError as fault:
        line = formatter.format(record("a fault", exc_info=(type(fault), fault, fault.__traceback__)))
    assert "ZeroDivisionError: here" in line


def test_a_session_is_shown_by_the_first_digits_of_its_hash() -> None:
    assert shown("0123456789abcdef") == "0123456789ab"


class Clock:
    """The loop, as far as a ration asks it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.due.append((when, call))

    def go_to(self, now: float) -> None:
        self.now = now
        due, self.due = self.due, []
        for when, call in due:
            assert when <= now
            call()


def test_of_a_storm_a_few_lines_are_written_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    ration = Ration(logging.getLogger("coatcheck.x"), "things", most=3, loop=lambda: cast(Any, clock))
    assert [ration.allows() for _ in range(1000)].count(True) == 3
    assert not caplog.records
    clock.go_to(1.0)
    (told,) = caplog.records
    assert vars(told)["fields"] == {"what": "things", "count": 997}
    assert [ration.allows() for _ in range(5)].count(True) == 3
    clock.go_to(2.0)
    assert vars(caplog.records[-1])["fields"]["count"] == 2
    clock.now = 9.0
    assert ration.allows()
    assert not clock.due, "nothing was left out: nothing is to be told"


@pytest.mark.parametrize(("level", "seen"), [("warning", ["WARNING"]), ("info", ["INFO", "WARNING"])])
def test_events_are_made_whatever_is_logged(
    level: str, seen: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's page lists them also where the log is quiet."""
    root, ours = logging.getLogger(), logging.getLogger("coatcheck")
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    before = root.level, ours.level
    handler = Noted()
    try:
        set_up(level)
        ours.addHandler(handler)
        logging.getLogger("coatcheck.x").info("a", extra=event("serving"))
        logging.getLogger("coatcheck.x").warning("b", extra=event("store_back"))
        logging.getLogger("elsewhere").debug("c")
        logging.getLogger("sse_starlette.sse").info("d")
        for error in (SendTimeoutError(), asyncio.CancelledError()):
            logging.getLogger("uvicorn.error").error("e", exc_info=error)
    finally:
        ours.removeHandler(handler)
        root.setLevel(before[0])
        ours.setLevel(before[1])
        logging.captureWarnings(False)
    assert [each.levelname for each in handler.records] == ["INFO", "WARNING"]
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == seen
