"""For all tests. In CI a test that was skipped is one that did not pass: nothing may be missing there unseen."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.order import dealt

# Tests of the etcd store run gRPC in this process, tests beside them start processes: gRPC's own handling of a fork
# ends the child now and then before it has become the program that was meant.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# All that tests and what they start write lies in memory where the machine has that: a disk that others sync stands
# still for seconds now and then, longer than a claim is waited for.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir():
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

_skipped: dict[str, None] = {}
"""In order. The processes of a parallel run tell the one that reports, each what it has skipped."""


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """One that is gone with the test."""
    with tempfile.TemporaryDirectory(prefix="coatcheck-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def pytest_sessionstart(session: pytest.Session) -> None:
    """What is collected stands until the end, so that nothing of it is garbage: until then nobody looks for any."""
    gc.disable()
    _import_a_share(session)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    try:
        return (yield)
    finally:
        gc.enable()


def _import_a_share(session: pytest.Session) -> None:
    """Of the processes of a parallel run each compiles its share of the tests first, and finds the others' done: after
    a checkout nothing is compiled yet, and each would compile everything, which takes as long as many tests."""
    number, count = (os.environ.get(f"PYTEST_XDIST_{name}", "") for name in ("WORKER", "WORKER_COUNT"))
    tests = Path(__file__).parent
    if not number.startswith("gw") or not count or [Path(each).name for each in session.config.args] != [tests.name]:
        return
    files = sorted(tests.glob("*/test_*.py"), key=lambda file: (-file.stat().st_size, file))
    for file in files[int(number[2:]) % int(count) :: int(count)]:
        if file.parent.name not in ("browser", "clients"):
            # What cannot be imported is told of by whoever collects it.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(f"{tests.name}.{file.parent.name}.{file.stem}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if parts > 1:
        items[:] = [items[number] for number in dealt([item.nodeid.partition("::")[0] for item in items], parts)]


def pytest_collection_finish() -> None:
    """What stands now stands until the end: thousands of tests and all that is imported. A full collection that walks
    through it takes longer than most tests, and a test that runs one pays for that. Of new objects it looks at as many
    at once as in a router (`app.serve`)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


class TooLong(SystemExit):
    """A test's time is over. Event loops let go of this and of KeyboardInterrupt only: whatever else is raised while
    they run is the trouble of the task or the callback that was just running, and uvloop keeps even what comes while
    all is waiting. pytest takes it for a failure like any other."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> Iterator[None]:
    done = yield
    if settings.method == "signal":
        _alarm_after(settings.timeout)
    return done


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """A failure calls off the alarm, and faulthandler's: for whoever then debugs. But the way out may hang."""
    if isinstance(node, pytest.Item):
        assert sys.__stderr__ is not None
        _alarm_after(60)
        faulthandler.dump_traceback_later(200, exit=True, file=sys.__stderr__)


def _alarm_after(seconds: float) -> None:
    """And then again and again, until pytest-timeout calls it off."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"not done after {seconds:g} s\n{_what_waits()}")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 20)


def _what_waits() -> str:
    """Where each task of the loop that is running stands, a line each, from the outside in."""
    with contextlib.suppress(RuntimeError):
        return "\n".join(map(_where, asyncio.all_tasks(asyncio.get_running_loop())))
    return "no loop runs"


def _where(task: asyncio.Task[Any]) -> str:
    places: list[str] = []
    inner: Any = task.get_coro()
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname} {Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        inner = inner.cr_await
    return f"{task.get_name()}: {' > '.join(places)} > {inner!r}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[report.nodeid] = None


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped[report.nodeid] = None


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    if _skipped and os.environ.get("CI") == "true" and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped and os.environ.get("CI") == "true":
        terminalreporter.write_line(f"in CI, skipped tests are failures: {', '.join(_skipped)}", red=True)
