"""What every client library is owed: what it saw is compared with what the workers recorded."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clients import install
from tests.clients.fleet import (
    CHAT,
    MESSAGES,
    MODEL,
    PATHS,
    REFUSAL,
    TOOL,
    TOOL_ANSWER,
    TOOL_ARGUMENTS,
    Fleet,
)
from tests.support.processes import Worker, turns
from tests.support.wire import ask, turn

TOKENS = 20
"""As in the scripts."""
SCRIPT_SECONDS = 400
CASES = [
    "abort",
    "plain",
    "streamed",
    "session",
    "final",
    "final_streamed",
    "tools",
    "refused",
    "refused_streamed",
    "lost",
    "cut",
]
"""In the order in which the scripts run them: an abort is to be seen long before a process ends."""

_QUIET = {
    "NO_PROXY": "*",
    "DO_NOT_TRACK": "1",
    "AI_SDK_LOG_WARNINGS": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
}
"""Nothing but the fleet is to be asked."""


@dataclass(frozen=True)
class Library:
    name: str
    """Of its environment."""
    script: str
    families: tuple[str, ...]
    overloaded: int = 503
    """The status that it tells of, of its own accord, where the Messages API says `overloaded_error`."""

    def command(self) -> list[str]:
        """How its script is started. Raises FileNotFoundError if the library is not installed."""
        return install.command(self.name, self.script)


@dataclass
class Seen:
    """What a library's script told of one API."""

    library: Library
    family: str
    cases: dict[str, dict[str, Any]]
    sessions: dict[str, str]

    def result(self, case: str) -> dict[str, Any]:
        """What came of a case that must succeed."""
        assert "error" not in self.cases[case], self.cases[case]["error"]
        return self.cases[case]

    def error(self, case: str) -> dict[str, Any]:
        """What came of a case that must fail, in the library's own words."""
        assert "error" in self.cases[case], f"taken for a success: {self.cases[case]}"
        return self.cases[case]["error"]  # type: ignore[no-any-return]


def pairs(libraries: Sequence[Library]) -> list[Any]:
    """The parameters of the fixture `seen`."""
    return [
        pytest.param((library, family), id=f"{library.script.removeprefix('use_')}-{family}")
        for library in libraries
        for family in library.families
    ]


def run_script(library: Library, family: str, fleet: Fleet, spoken: dict[str, int]) -> Seen:
    """Run all cases of one API, in a process of its own that is gone when this returns."""
    if spoken[family] == 404:
        pytest.skip(f"the mock workers do not speak {PATHS[family]}")
    try:
        command = library.command()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    run = secrets.token_hex(4)
    sessions = {case: f"{family}-{case}-{run}" for case in CASES}
    orders = {
        "sessions": {family: sessions},
        "urls": [replica.url for replica in fleet.replicas],
        "odd": fleet.odd.url,
        "lost": fleet.lost.url,
        "model": MODEL,
    }
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = subprocess.Popen(
        [*command, json.dumps(orders)],
        env=environment | _QUIET,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SCRIPT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, err.decode(errors="replace")[-4000:]
    sys.stderr.write(err.decode(errors="replace")[-4000:])
    return Seen(library, family, json.loads(out)[family], sessions)


async def served(fleet: Fleet, session: str) -> list[tuple[Worker, dict[str, Any]]]:
    """A session's turns at the mock workers, by their own records."""
    return [(worker, record) for worker in fleet.workers for record in await turns(worker, session)]


class Promises:
    """The tests; a subclass has the libraries as the fixture `seen`."""

    async def test_a_whole_answer(self, seen: Seen, fleet: Fleet) -> None:
        assert len(seen.result("plain")["text"].split()) == TOKENS
        [(_, record)] = await served(fleet, seen.sessions["plain"])
        assert record["outcome"] == "completed"
        assert record["path"] == PATHS[seen.family]

    async def test_a_streamed_answer_comes_in_pieces_and_is_the_same(self, seen: Seen, fleet: Fleet) -> None:
        pieces = seen.result("streamed")["pieces"]
        assert "".join(pieces) == seen.result("plain")["text"]
        assert len(pieces) > 1
        [(_, record)] = await served(fleet, seen.sessions["streamed"])
        assert record["stream"]
        assert record["outcome"] == "completed"

    async def test_a_session_is_on_one_worker_through_both_replicas(self, seen: Seen, fleet: Fleet) -> None:
        seen.result("session")
        records = await served(fleet, seen.sessions["session"])
        assert [record["outcome"] for _, record in records] == ["completed"] * 4
        assert len({worker.name for worker, _ in records}) == 1

    @pytest.mark.parametrize("case", ["final", "final_streamed"])
    async def test_a_final_turn_ends_its_session_everywhere(self, seen: Seen, fleet: Fleet, case: str) -> None:
        seen.result(case)
        session = seen.sessions[case]
        records = await served(fleet, session)
        assert len(records) == 2
        assert len({worker.name for worker, _ in records}) == 1
        assert (await turn(fleet.replicas[0].url, session=session)).affinity == "created"

    async def test_a_tool_is_called_and_its_result_is_taken(self, seen: Seen) -> None:
        result = seen.result("tools")
        assert (result["name"], result["arguments"], result["text"]) == (TOOL, TOOL_ARGUMENTS, TOOL_ANSWER)

    @pytest.mark.parametrize("case", ["refused", "refused_streamed"])
    async def test_a_worker_s_refusal_is_the_library_s_own_error(self, seen: Seen, case: str) -> None:
        error = seen.error(case)
        assert REFUSAL in error["message"], error
        assert error["status"] in (400, None), error
        assert not error["type"].startswith("builtins."), error

    async def test_a_lost_worker_is_the_library_s_own_error_with_our_message(self, seen: Seen, fleet: Fleet) -> None:
        error = seen.error("lost")
        said = (await ask(fleet.lost.url, "POST", PATHS[CHAT], [("content-type", "application/json")], b"{}")).json
        assert said["error"]["message"] in error["message"], error
        assert error["status"] in (seen.library.overloaded if seen.family == MESSAGES else 503, None), error
        assert not error["type"].startswith("builtins."), error

    async def test_a_stream_that_breaks_is_an_error(self, seen: Seen) -> None:
        seen.error("cut")

    async def test_a_stream_that_breaks_says_why_in_our_words(self, seen: Seen) -> None:
        assert "before the response was complete" in seen.error("cut")["message"], seen.error("cut")

    async def test_a_stream_that_is_left_ends_at_the_worker(self, seen: Seen, fleet: Fleet) -> None:
        seen.result("abort")
        [(_, aborted)] = await served(fleet, seen.sessions["abort"])
        later = await served(fleet, seen.sessions["final_streamed"])
        assert aborted["outcome"] == "aborted"
        assert aborted["end"] < max(record["end"] for _, record in later), "only when the process ended"
