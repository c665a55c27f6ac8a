"""Both event loops, since the proxy lives in their callbacks; and a fault that nobody hears of fails its test."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.support.etcd import EtcdServer
from tests.support.room import Rooms


class Loop(uvloop.Loop):
    def close(self) -> None:
        """uvloop warns of each thing that was left open before it closes it: where that warning is an error, it closes
        nothing, and then waits for ever until all is closed."""
        with warnings.catch_warnings(record=True) as left:
            warnings.simplefilter("always")
            super().close()
        assert not left, [str(each.message) for each in left]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": Loop}


@pytest.fixture(autouse=True)
async def no_silent_fault(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Exceptions in callbacks reach only the loop's handler; ours reach the log. Tests that expect some clear it."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    yield
    assert not [fault for fault in faults if not _is_grpcs_own(fault)]
    loud = ("coatcheck.proxy", "coatcheck.server", "asyncio", "uvicorn")
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith(loud)]
    assert not errors, [record.getMessage() for record in errors]


def _is_grpcs_own(fault: dict[str, Any]) -> bool:
    """gRPC has one wake-up socket for all loops of a process, and complains when another loop has emptied it."""
    return isinstance(fault.get("exception"), BlockingIOError) and "PollerCompletionQueue" in fault["message"]


@pytest.fixture(autouse=True)
def no_certificates_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them is most of what a replica's start takes, and no worker here has one that they vouch for."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.setenv("SSL_CERT_DIR", os.devnull)


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture(params=["memory", "file", "etcd"])
def rooms(request: pytest.FixtureRequest, quick_path: Path) -> Rooms:
    """Claims of every kind."""
    if request.param == "etcd":
        server: EtcdServer = request.getfixturevalue("etcd")
        return Rooms("etcd", quick_path, lambda name: server.url(f"semantics/{name}"))
    return Rooms(request.param, quick_path, lambda name: f"file://{quick_path}/{name}")
