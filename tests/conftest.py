"""For all tests. In CI a test that was skipped is one that did not pass: nothing may be missing there unseen."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def pytest_collection_finish() -> None:
    """What stands now stands until the end: thousands of tests and all that is imported. A full collection that walks
    through it takes longer than most tests, and a test that runs one pays for that."""
    gc.collect()
    gc.freeze()


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
