"""One fleet for all libraries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.clients.fleet import CHAT, MESSAGES, MODEL, PATHS, RESPONSES, Fleet, standing_fleet
from tests.support.processes import metrics, total
from tests.support.wire import ask

_REQUESTS = {
    CHAT: {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello."}]},
    MESSAGES: {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello."}]},
    RESPONSES: {"model": MODEL, "max_output_tokens": 1, "input": "Hello."},
}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with standing_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
        for replica in fleet.replicas:
            samples = asyncio.run(metrics(replica))
            assert not total(samples, "coatcheck_inflight"), "a slot was not given back"


@pytest.fixture(scope="session")
def spoken(fleet: Fleet) -> dict[str, int]:
    """What a worker answers to each API, as its status."""
    headers = [("content-type", "application/json")]
    return {
        family: asyncio.run(ask(fleet.workers[0].url, "POST", PATHS[family], headers, json.dumps(body).encode())).status
        for family, body in _REQUESTS.items()
    }
