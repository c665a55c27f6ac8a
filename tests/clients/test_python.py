"""Python's client libraries. Not part of `make test`."""

from __future__ import annotations

import pytest

from tests.clients.fleet import CHAT, MESSAGES, RESPONSES, Fleet
from tests.clients.promises import Library, Promises, Seen, pairs, run_script

LIBRARIES = [
    Library("openai", "use_openai.py", (CHAT, RESPONSES)),
    Library("anthropic", "use_anthropic.py", (MESSAGES,)),
    Library("langchain", "use_langchain.py", (CHAT, RESPONSES, MESSAGES)),
    Library("litellm", "use_litellm.py", (CHAT, RESPONSES, MESSAGES), overloaded=500),
    Library("pydantic-ai", "use_pydantic_ai.py", (CHAT, RESPONSES, MESSAGES)),
    Library("llama-index", "use_llama_index.py", (CHAT,)),
]


@pytest.fixture(scope="module", params=pairs(LIBRARIES))
def seen(request: pytest.FixtureRequest, fleet: Fleet, spoken: dict[str, int]) -> Seen:
    library, family = request.param
    return run_script(library, family, fleet, spoken)


class TestPython(Promises):
    pass
