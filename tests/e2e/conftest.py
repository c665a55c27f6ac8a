"""Processes that tests share, and their logs when a test fails."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import in_memory
from tests.support.processes import Processes, Replica, Worker, clear_faults, metrics, total

MAX_BODY_BYTES = 1_000_000
SHOWN_BYTES = 4000
PATIENCE = 20
"""Seconds for a call to the store, where no outage is tested: one on a machine without time would be taken for one."""

_running = pytest.StashKey[list[Processes]]()
_log_sizes = pytest.StashKey[dict[Path, int]]()


@dataclass(frozen=True)
class Standing:
    """Workers and two replicas that outlive a test. Tests use sessions of their own and leave no fault behind."""

    workers: list[Worker]
    replicas: list[Replica]

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]

    def worker(self, name: str | None) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)


@pytest.fixture
def tmp_path(quick_path: Path) -> Path:
    """In memory too: a disk that stands still for two seconds is an outage of the claims in it."""
    folder = quick_path / "tmp"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def standing_processes(request: pytest.FixtureRequest) -> Iterator[Standing]:
    with in_memory() as folder, Processes(folder) as processes:
        _show_logs_of(request, processes)
        workers = processes.workers(4, "--ttft-ms", "2", "--itl-ms", "1")
        options = [f"--max-body-bytes={MAX_BODY_BYTES}", "--worker-keepalive=1", f"--store-deadline={PATIENCE}"]
        replicas = processes.replicas(2, workers, folder / "claims", *options)
        yield Standing(workers, replicas)
        for replica in replicas:
            samples = asyncio.run(metrics(replica))
            assert not total(samples, "coatcheck_turns_total", 'outcome="failed"'), "turns ended by a fault of ours"


@pytest.fixture
async def standing(standing_processes: Standing) -> AsyncIterator[Standing]:
    yield standing_processes
    for worker in standing_processes.workers:
        await clear_faults(worker)


@pytest.fixture
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    """For a test that kills what it started."""
    with Processes(tmp_path) as processes:
        _show_logs_of(request, processes)
        yield processes


@pytest.fixture(scope="module")
def module_processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with in_memory() as folder, Processes(folder) as processes:
        _show_logs_of(request, processes)
        yield processes


@pytest.fixture
def session() -> str:
    """An id that no other test uses."""
    return new_session()


def new_session() -> str:
    return secrets.token_hex(8)


# --- logs ------------------------------------------------------------------------------------------------------------


def _show_logs_of(request: pytest.FixtureRequest, processes: Processes) -> None:
    request.config.stash.setdefault(_running, []).append(processes)


def pytest_runtest_setup(item: pytest.Item) -> None:
    logs = [process.log for processes in item.config.stash.get(_running, []) for process in processes.all]
    item.stash[_log_sizes] = {log: log.stat().st_size for log in logs if log.exists()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        sizes = item.stash.get(_log_sizes, {})
        for processes in item.config.stash.get(_running, []):
            for process in processes.all:
                if text := process.output(sizes.get(process.log, 0)).strip():
                    report.sections.append((f"{process.label} {process.pid}", text[-SHOWN_BYTES:]))
    return report
