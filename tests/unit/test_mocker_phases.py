"""The hand-over between mock workers over real sockets, field by field as vLLM's NIXL connector does it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mocker.engine.profile import load
from mocker.settings import KvTransfer, MockSettings
from tests.support.mocks import CHAT, Worker, eventually

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LONG = [{"role": "user", "content": "word " * 200}]
PATIENCE = 20.0


@pytest.fixture(scope="module")
def prefill() -> Iterator[Worker]:
    running = Worker(name="p", phase="prefill", ttft_ms=1)
    yield running
    running.close()


@pytest.fixture(scope="module")
def decode() -> Iterator[Worker]:
    """Whole turns take it half a minute."""
    running = Worker(name="d", phase="decode", ttft_ms=30_000, itl_ms=0)
    yield running
    running.close()


def prefilled(worker: Worker, **request: Any) -> Any:
    body = {**CHAT, "messages": LONG, "max_tokens": 1, "kv_transfer_params": ASKED, **request}
    answer = worker.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "r"})
    assert answer.status_code == 200
    return answer.json()["kv_transfer_params"]


def goes_on(worker: Worker, params: Any, **request: Any) -> Any:
    body = {**CHAT, "messages": LONG, "kv_transfer_params": params, **request}
    return worker.http.post("/v1/chat/completions", json=body)


def last(worker: Worker) -> dict[str, Any]:
    turn: dict[str, Any] = worker.get("/mock/turns")["turns"][-1]
    return turn


def staged(worker: Worker) -> tuple[int, int]:
    state = worker.get("/mock/state")
    return state["staged"], state["staged_blocks"]


def test_what_is_staged_is_freed_by_whoever_fetches_it_and_once(prefill: Worker, decode: Worker) -> None:
    params = prefilled(prefill)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_request_id"].startswith("r-")
    blocks = len(params["remote_block_ids"][0])
    assert blocks > 1
    assert staged(prefill) == (1, blocks)
    answer = goes_on(decode, params)
    assert answer.json()["choices"][0]["message"]["content"]
    assert (last(decode)["handover"], last(decode)["blocks"]) == ("fetched", blocks)
    assert (last(prefill)["handover"], last(prefill)["blocks"]) == ("staged", blocks)
    eventually(lambda: staged(prefill) == (0, 0), PATIENCE)
    again = goes_on(decode, params)
    assert (again.status_code, last(decode)["handover"]) == (500, "failed")


def test_a_stream_says_behind_its_opening_that_the_blocks_are_gone(prefill: Worker, decode: Worker) -> None:
    params = prefilled(prefill)
    answer = goes_on(decode, {**params, "remote_block_ids": [[1]]}, stream=True)
    opening, error, *_ = (json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:2])
    assert answer.status_code == 200
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    assert error["error"]["code"] == "internal_error"
    assert staged(prefill)[0] == 1
    streamed = goes_on(decode, params, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    eventually(lambda: staged(prefill) == (0, 0), PATIENCE)


@pytest.mark.parametrize("lost", ["remote_host", "remote_engine_id", "remote_request_id"])
def test_who_is_told_too_little_computes_the_prompt_anew(prefill: Worker, lost: str) -> None:
    params = prefilled(prefill)
    quick = Worker(name="q", phase="decode", ttft_ms=0)
    try:
        assert goes_on(quick, {**params, lost: None}).status_code == 200
        assert last(quick)["handover"] == "anew"
        assert goes_on(quick, params).status_code == 200
        assert last(quick)["handover"] == "fetched"
    finally:
        quick.close()
    eventually(lambda: staged(prefill) == (0, 0), PATIENCE)


def test_who_may_computes_anew_what_cannot_be_fetched(prefill: Worker) -> None:
    params = prefilled(prefill)
    lenient = Worker(name="q", phase="decode", ttft_ms=0, transfer=KvTransfer(recompute=True))
    try:
        assert goes_on(lenient, {**params, "remote_engine_id": "another"}).status_code == 200
        assert last(lenient)["handover"] == "anew"
        assert goes_on(lenient, params).status_code == 200
    finally:
        lenient.close()
    eventually(lambda: staged(prefill) == (0, 0), PATIENCE)


def test_blocks_that_nobody_fetches_are_kept_for_their_lease_and_no_longer() -> None:
    brief = Worker(name="p", phase="prefill", ttft_ms=0, transfer=KvTransfer(lease_s=0.05))
    try:
        prefilled(brief)
        eventually(lambda: brief.get("/mock/state")["expired"] == 1, PATIENCE)
        assert staged(brief) == (0, 0)
    finally:
        brief.close()


def test_what_is_fetched_takes_as_long_as_its_bytes_and_goes_on_without_the_client(prefill: Worker) -> None:
    slow = Worker(name="q", phase="decode", ttft_ms=0, transfer=KvTransfer(gb_s=0.1))
    try:
        params = prefilled(prefill)
        seconds = params["remote_num_tokens"] * KvTransfer().token_bytes / 0.1e9
        assert seconds > 0.2
        with slow.connect("s", messages=LONG, kv_transfer_params=params, stream=True) as connection:
            connection.settimeout(PATIENCE)
            assert connection.recv(1)
            connection.shutdown(socket.SHUT_RDWR)
        eventually(lambda: last(slow)["outcome"] == "aborted", PATIENCE)
        assert staged(prefill)[0] == 1
        eventually(lambda: staged(prefill) == (0, 0), PATIENCE)
        assert prefill.get("/mock/state")["expired"] == 0
    finally:
        slow.close()


def test_who_leaves_before_the_prompt_is_computed_leaves_nothing() -> None:
    slow = Worker(name="p", phase="prefill", ttft_ms=30_000)
    try:
        with slow.connect("s", max_tokens=1, kv_transfer_params=ASKED):
            eventually(lambda: slow.get("/mock/state")["active"] == 1, PATIENCE)
        eventually(lambda: slow.get("/mock/state")["active"] == 0, PATIENCE)
        assert staged(slow) == (0, 0)
    finally:
        slow.close()


@pytest.mark.parametrize("how", ["missing", "malformed", "gone"])
def test_faults_of_the_hand_over(how: str) -> None:
    broken = Worker(name="p", phase="prefill", ttft_ms=0)
    try:
        broken.http.post("/mock/faults", json={"mode": "handover", "how": how}).raise_for_status()
        params = prefilled(broken)
        assert (params is None, "remote_engine_id" in (params or {})) == (how == "missing", how == "gone")
        assert staged(broken) == (0, 0)
    finally:
        broken.close()


def test_a_worker_without_a_connector_passes_over_what_is_said_of_blocks() -> None:
    plain = Worker(ttft_ms=0)
    try:
        body = {**CHAT, "kv_transfer_params": ASKED}
        answer = plain.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, "kv_transfer_params" in answer.json()) == (200, False)
        assert "staged" not in plain.get("/mock/state")
    finally:
        plain.close()


def test_who_waits_in_vain_for_the_other_worker_fails_and_the_room_was_stranded() -> None:
    brief = KvTransfer(handover="sglang", lease_s=0.1)
    prefill = Worker(name="p", phase="prefill", ttft_ms=0, transfer=brief)
    decode = Worker(name="d", phase="decode", ttft_ms=0, transfer=brief)
    try:
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
        for number, worker in enumerate((prefill, decode), 1):
            answer = worker.http.post("/v1/chat/completions", json={**CHAT, **place, "bootstrap_room": number})
            assert (answer.status_code, last(worker)["handover"]) == (500, "failed")
            assert worker.http.post("/v1/chat/completions", json={**CHAT, **place}).status_code == 400
        assert prefill.get("/mock/state")["expired"] == 2
        assert staged(prefill) == (0, 0)
    finally:
        prefill.close()
        decode.close()


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="leave the profile out"):
        MockSettings(phase="decode", profile=load("quick"))
    with pytest.raises(ValueError, match="lease_s"):
        MockSettings(transfer=KvTransfer(lease_s=0))
