"""Both event loops, since the proxy lives in their callbacks; and a fault that nobody hears of fails its test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
async def no_silent_fault(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Exceptions in callbacks reach only the loop's handler; ours reach the log. Tests that expect some clear it."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    yield
    assert not faults
    loud = ("coatcheck.proxy", "coatcheck.server", "asyncio", "uvicorn")
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith(loud)]
    assert not errors, [record.getMessage() for record in errors]
