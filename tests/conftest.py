"""For all tests. In CI a test that was skipped is one that did not pass: nothing may be missing there unseen."""

from __future__ import annotations

import gc
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
    with tempfile.TemporaryDirectory(prefix="coatcheck-") as folder:
        yield Path(folder)


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
