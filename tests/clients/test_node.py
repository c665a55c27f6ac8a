"""Node's client libraries. Not part of `make test`."""

from __future__ import annotations

import pytest

from tests.clients.fleet import CHAT, MESSAGES, RESPONSES, Fleet
from tests.clients.promises import Library, Promises, Seen, pairs, run_script

LIBRARIES = [
    Library("openai-node", "use_openai.mjs", (CHAT, RESPONSES)),
    Library("anthropic-node", "use_anthropic.mjs", (MESSAGES,)),
    Library("ai-sdk", "use_ai.mjs", (CHAT, RESPONSES, MESSAGES)),
    Library("ai-sdk", "use_ai_compatible.mjs", (CHAT,)),
    Library("langchain-js", "use_langchain.mjs", (CHAT, RESPONSES, MESSAGES)),
]


@pytest.fixture(scope="module", params=pairs(LIBRARIES))
def seen(request: pytest.FixtureRequest, fleet: Fleet, spoken: dict[str, int]) -> Seen:
    library, family = request.param
    return run_script(library, family, fleet, spoken)


class TestNode(Promises):
    pass
