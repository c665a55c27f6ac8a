"""The mock worker over real sockets, as clients and the router see it."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from mocker import cli
from mocker.cache import BRANCHES, PrefixCache, common_prefix, count_tokens
from mocker.settings import MockSettings
from tests.support.late import openai
from tests.support.mocks import CHAT, HELLO, Worker, eventually


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    running = Worker(models=("mock-model", "org/other"), dp_size=2)
    yield running
    running.close()


@pytest.fixture(scope="module")
def slow() -> Iterator[Worker]:
    """No token for 30 s unless a fault says otherwise."""
    running = Worker(ttft_ms=30_000)
    yield running
    running.close()


@pytest.fixture
def client(worker: Worker) -> Iterator[openai.OpenAI]:
    transport = openai.DefaultHttpxClient(trust_env=False, verify=False)
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="any", max_retries=0, http_client=transport) as client:
        yield client


@pytest.fixture
async def async_client(worker: Worker) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"{worker.url}/v1", api_key="any", max_retries=0, http_client=transport
    ) as client:
        yield client


# --- answers, by the official client ---------------------------------------------------------------------------------


def test_chat_answers_with_text_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="mock-model", messages=HELLO, max_tokens=5)
    assert len((answer.choices[0].message.content or "").split()) == 5
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_without_a_limit_an_answer_has_the_default_length_and_stops_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="mock-model", messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="mock-model", messages=HELLO, max_completion_tokens=7)
    chunks = list(client.chat.completions.create(model="mock-model", messages=HELLO, max_tokens=7, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


async def test_streams_of_the_async_client_can_end_with_the_usage(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(
        model="mock-model", messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])


async def test_legacy_completions_stream_or_not(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.completions.create(model="mock-model", prompt="hello", max_tokens=4)
    stream = await async_client.completions.create(model="mock-model", prompt="hello", max_tokens=4, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4


def test_events_are_data_lines_with_bare_newlines_and_end_with_done(worker: Worker) -> None:
    answer = worker.http.post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 2})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert "\r" not in answer.text
    assert len(events) == 4  # role, two tokens, finish
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


def test_embeddings_come_as_floats_or_base64(client: openai.OpenAI, worker: Worker) -> None:
    decoded = client.embeddings.create(model="mock-model", input=["one", "two"], dimensions=8)
    floats = client.embeddings.create(model="mock-model", input="one", dimensions=8, encoding_format="float")
    assert decoded.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-6)
    assert decoded.data[0].embedding != pytest.approx(decoded.data[1].embedding)
    assert sum(value * value for value in floats.data[0].embedding) == pytest.approx(1)
    assert decoded.usage.prompt_tokens == 2
    raw = worker.http.post(
        "/v1/embeddings", json={"model": "mock-model", "input": [[1, 2], [3]], "encoding_format": "base64"}
    ).json()
    assert len(struct.unpack("<16f", base64.b64decode(raw["data"][1]["embedding"]))) == 16
    assert raw["usage"]["prompt_tokens"] == 3


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mock-model", "org/other"]
    assert client.models.retrieve("org/other").id == "org/other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_every_answer_names_the_worker(worker: Worker) -> None:
    answers = [
        worker.http.get("/health"),
        worker.http.get("/nowhere"),
        worker.http.post("/v1/chat/completions", json=CHAT),
        worker.http.post("/v1/chat/completions", json={**CHAT, "stream": True}),
        worker.http.post("/v1/chat/completions", content="{"),
    ]
    assert [answer.headers["x-mock-worker"] for answer in answers] == ["unit"] * 5


def test_text_depends_on_the_seed_and_the_prompt_only(worker: Worker) -> None:
    def text(of: Worker, **request: Any) -> str:
        answer = of.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 12, **request}).json()
        content: str = answer["choices"][0]["message"]["content"]
        return content

    twin, other = Worker(name="twin"), Worker(seed=1)
    try:
        assert text(worker) == text(worker) == text(twin)
        assert text(other) != text(worker)
        assert text(worker, seed=7) == text(twin, seed=7) != text(worker)
        assert text(worker, messages=[{"role": "user", "content": "hullo"}]) != text(worker)
    finally:
        twin.close()
        other.close()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/v1/chat/completions", {**CHAT, "model": "gpt"}, 404, "model_not_found", "model"),
        ("POST", "/v1/embeddings", {"model": "gpt", "input": "x"}, 404, "model_not_found", "model"),
        ("POST", "/v1/chat/completions", "{", 400, None, None),
        ("POST", "/v1/chat/completions", b"\xff", 400, None, None),
        ("POST", "/v1/chat/completions", {"model": "mock-model"}, 400, None, "messages"),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": []}, 400, None, "messages"),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": [{"content": "x"}]}, 400, None, None),
        ("POST", "/v1/chat/completions", {**CHAT, "n": 0}, 400, None, "n"),
        ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400, None, "max_tokens"),
        ("POST", "/v1/completions", {"model": "mock-model"}, 400, None, "prompt"),
        ("POST", "/v1/completions", {"model": "mock-model", "prompt": ["a", "b"]}, 400, None, "prompt"),
        ("POST", "/v1/embeddings", {"model": "mock-model", "input": []}, 400, None, "input"),
        ("POST", "/v1/embeddings", {"model": "mock-model", "input": [1, "x"]}, 400, None, "input"),
        ("POST", "/mock/faults", {"mode": "explode"}, 400, None, None),
        ("POST", "/mock/faults", {"mode": "hang", "tims": 2}, 400, None, None),
        ("GET", "/v1/chat/completions", "", 405, None, None),
        ("PUT", "/health", "", 405, None, None),
        ("POST", "/v1/responses", {}, 400, None, "model"),
        ("POST", "/v1/nothing", {}, 404, None, None),
    ],
)
def test_errors_have_openais_shape(
    worker: Worker, method: str, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    answer = worker.http.request(method, path, content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_client_shows_the_message(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `gpt` does not exist"):
        client.chat.completions.create(model="gpt", messages=HELLO)


@pytest.mark.parametrize("rank", ["2", "-1", "x", "1.0", "²", "9" * 5000])
def test_a_rank_that_the_worker_has_not_got_is_refused(worker: Worker, rank: str) -> None:
    headers = {b"x-data-parallel-rank": rank.encode()}
    assert worker.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 400


def test_an_api_key_is_wanted_when_set() -> None:
    guarded = Worker(api_key="secret")
    try:
        right, wrong = {"authorization": "Bearer secret"}, {"authorization": "Bearer guess"}
        for method, path, body in (("GET", "/v1/models", None), ("POST", "/v1/chat/completions", CHAT)):
            assert guarded.http.request(method, path, json=body, headers=right).status_code == 200
            refused = guarded.http.request(method, path, json=body, headers=wrong)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert guarded.http.request(method, path, json=body).status_code == 401
        assert guarded.http.get("/health").status_code == 200
    finally:
        guarded.close()


# --- the simulated KV cache ------------------------------------------------------------------------------------------


def cached(worker: Worker, messages: Sequence[Mapping[str, object]], **headers: str) -> tuple[int, int, str]:
    """Cached tokens, prompt tokens, answer."""
    names = {"session": "x-dynamo-session-id", "rank": "x-data-parallel-rank"}
    answer = worker.http.post(
        "/v1/chat/completions",
        json={**CHAT, "messages": messages},
        headers={names[key]: value for key, value in headers.items()},
    ).json()
    usage = answer["usage"]
    content = answer["choices"][0]["message"]["content"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"], content


def test_cached_tokens_grow_with_the_conversation(worker: Worker) -> None:
    first, prompt, content = cached(worker, HELLO, session="grow")
    assert first == 0
    grown = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
    second, longer, _ = cached(worker, grown, session="grow")
    assert prompt + 15 <= second < longer
    again, _, _ = cached(worker, grown, session="grow")
    assert again == longer - 1
    assert [turn["cached_tokens"] for turn in worker.turns("grow")] == [0, second, again]


def test_nothing_is_cached_without_a_session_or_on_another_session_or_rank(worker: Worker) -> None:
    cached(worker, HELLO, session="mine", rank="0")
    assert cached(worker, HELLO, session="mine", rank="0")[0] > 0
    assert cached(worker, HELLO, session="mine", rank="1")[0] == 0
    assert cached(worker, HELLO, session="theirs", rank="0")[0] == 0
    assert cached(worker, HELLO)[0] == cached(worker, HELLO)[0] == 0
    assert [turn["rank"] for turn in worker.turns("mine")] == [0, 0, 1]


def test_content_parts_are_as_good_as_a_string(worker: Worker) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    _, tokens, content = cached(worker, HELLO, session="parts")
    hits, same_tokens, same_content = cached(worker, [{"role": "user", "content": parts}], session="parts")
    assert (hits, same_tokens, same_content) == (tokens - 1, tokens, content)


def test_a_one_word_legacy_prompt_is_cached_too(worker: Worker) -> None:
    for expected in (False, True):
        answer = worker.http.post(
            "/v1/completions",
            json={"model": "mock-model", "prompt": "hi", "stream": False},
            headers={"x-dynamo-session-id": "legacy"},
        ).json()
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is expected


def test_the_cache_forgets_the_least_recently_used_session_and_the_oldest_branch() -> None:
    cache = PrefixCache(2)
    for session in ("a", "b", "a", "c"):
        cache.remember(session, "m", None, b"12345678")
    assert [cache.cached_tokens(session, "m", None, b"123456789") for session in "abc"] == [2, 0, 2]
    for branch in range(BRANCHES):
        cache.remember("a", "m", None, b"%d..." % branch * 2)
    assert cache.cached_tokens("a", "m", None, b"12345678") == 0
    assert cache.cached_tokens("a", "m", None, b"1...1...1") == 2
    assert len(cache) == 2


def test_common_prefix_is_exact_at_every_length() -> None:
    text = bytes(range(40))
    for length in range(40):
        assert common_prefix(text, text[:length] + b"\xff" * 5) == length
    assert (count_tokens(b""), count_tokens(b"1"), count_tokens(b"1234"), count_tokens(b"12345")) == (0, 1, 1, 2)


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_turn_is_recorded_when_its_answer_has_been_read(worker: Worker) -> None:
    headers = {"x-dynamo-session-id": "rec", "x-data-parallel-rank": "1", "x-request-id": "r-1"}
    before = time.time()
    worker.http.post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 3}, headers=headers)
    (turn,) = worker.turns("rec")
    assert before <= turn.pop("start") < turn.pop("end") <= time.time()
    assert turn.pop("prompt_tokens") > 5
    assert turn == {
        "session": "rec",
        "named_by": "x-dynamo-session-id",
        "rank": 1,
        "model": "mock-model",
        "stream": True,
        "outcome": "completed",
        "cached_tokens": 0,
        "completion_tokens": 3,
        "request_id": "r-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "authorization": None,
        "api_key": None,
        "fault": None,
        "handover": None,
        "blocks": 0,
        "room": None,
    }


def test_a_refused_request_is_no_turn(worker: Worker) -> None:
    worker.http.post("/v1/chat/completions", json={"model": "mock-model"}, headers={"x-dynamo-session-id": "bad"})
    assert worker.turns("bad") == []


def test_history_is_bounded_and_running_turns_stay() -> None:
    short = Worker(history=3, ttft_ms=0, itl_ms=0)
    try:
        short.http.post("/mock/faults", json={"mode": "hang"})
        with short.connect("held"):
            eventually(lambda: short.get("/mock/state")["active"] == 1)
            for session in "abcd":
                short.http.post("/v1/chat/completions", json=CHAT, headers={"x-dynamo-session-id": session})
            assert [turn["session"] for turn in short.get("/mock/turns")["turns"]] == ["c", "d", "held"]
            assert short.http.delete("/mock/turns").json() == {"cleared": 2}
            (held,) = short.get("/mock/turns")["turns"]
            assert (held["session"], held["outcome"], held["end"]) == ("held", "running", None)
            assert short.get("/mock/state") == {"name": "unit", "active": 1, "sessions": 4, "served": 4}
        eventually(lambda: short.get("/mock/state")["active"] == 0)
    finally:
        short.close()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_is_recorded_as_aborted(slow: Worker, stream: bool) -> None:
    session = f"early-{stream}"
    with slow.connect(session, stream=stream):
        eventually(lambda: slow.get("/mock/state")["active"] == 1)
    eventually(lambda: slow.get("/mock/state")["active"] == 0)
    (turn,) = slow.turns(session)
    assert (turn["outcome"], turn["completion_tokens"]) == ("aborted", 0)
    assert turn["end"] is not None


def test_leaving_in_mid_stream_is_recorded_as_aborted_and_what_was_said_stays_cached(slow: Worker) -> None:
    slow.http.post("/mock/faults", json={"mode": "slow", "ttft_ms": 0, "itl_ms": 20})
    with slow.connect("mid", stream=True, max_tokens=100_000) as connection:
        seen = b""
        while seen.count(b"data:") < 4:
            seen += connection.recv(65536)
    eventually(lambda: slow.get("/mock/state")["active"] == 0)
    (turn,) = slow.turns("mid")
    assert turn["outcome"] == "aborted"
    assert turn["completion_tokens"] >= 3
    assert slow.get("/mock/state")["sessions"] >= 1


def test_leaving_at_any_moment_leaves_no_turn_behind(worker: Worker) -> None:
    for step in range(40):
        with worker.connect("hasty", stream=step % 2 == 0, max_tokens=4):
            time.sleep(step * 0.0003)
    # The last ones may begin only now, on a busy machine also after a look at which none ran.
    eventually(lambda: {turn["outcome"] for turn in worker.turns("hasty")} <= {"completed", "aborted"})
    eventually(lambda: worker.get("/mock/state")["active"] == 0)


def test_a_reader_that_stalls_and_leaves_has_not_got_the_whole_answer(slow: Worker) -> None:
    slow.http.post("/mock/faults", json={"mode": "slow", "ttft_ms": 0, "itl_ms": 0})
    with slow.connect("stall", stream=True, max_tokens=60_000):
        time.sleep(0.3)
        assert slow.get("/mock/state")["active"] == 1
    eventually(lambda: slow.get("/mock/state")["active"] == 0)
    (turn,) = slow.turns("stall")
    assert turn["outcome"] == "aborted"


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_status_fault_hits_as_many_turns_as_ordered(worker: Worker) -> None:
    order = {"mode": "status", "status": 429, "times": 2, "headers": {"Retry-After": "7"}}
    assert worker.http.post("/mock/faults", json=order).json()["faults"][0]["times"] == 2
    headers = {"x-dynamo-session-id": "faulty"}
    answers = [worker.http.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [429, 429, 200]
    assert answers[0].headers["retry-after"] == "7"
    assert answers[0].json()["error"]["code"] == "injected_fault"
    recorded = [(turn["outcome"], turn["fault"]) for turn in worker.turns("faulty")]
    assert recorded == [("aborted", "status"), ("aborted", "status"), ("completed", None)]


def test_faults_can_be_withdrawn(worker: Worker) -> None:
    worker.http.post("/mock/faults", json={"mode": "status", "times": None})
    assert worker.http.post("/v1/chat/completions", json=CHAT).status_code == 503
    assert worker.http.post("/v1/chat/completions", json=CHAT).status_code == 503
    assert worker.http.delete("/mock/faults").json() == worker.get("/mock/faults") == {"faults": []}
    assert worker.http.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("itl_ms", [0, 5])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_reset_breaks_the_stream_after_the_ordered_tokens(worker: Worker, tokens: int, itl_ms: int) -> None:
    session = f"reset-{tokens}-{itl_ms}"
    worker.http.post("/mock/faults", json={"mode": "reset", "after_tokens": tokens})
    pieces: list[bytes] = []
    with worker.connect(session, stream=True) as connection, pytest.raises(ConnectionResetError):
        pieces.extend(iter(lambda: connection.recv(65536), b""))
    seen = b"".join(pieces)
    assert seen.startswith(b"HTTP/1.1 200 ")
    assert not seen.endswith(b"0\r\n\r\n")
    assert seen.count(b"data:") == (tokens + 1 if tokens else 0)  # and the role
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    (turn,) = worker.turns(session)
    assert (turn["outcome"], turn["fault"], turn["completion_tokens"]) == ("aborted", "reset", tokens)


def test_a_reset_is_an_error_to_the_official_client(client: openai.OpenAI, worker: Worker) -> None:
    worker.http.post("/mock/faults", json={"mode": "reset", "after_tokens": 2})
    stream = client.chat.completions.create(model="mock-model", messages=HELLO, stream=True)
    with pytest.raises(Exception) as caught:
        list(stream)
    assert "ReadError" in type(caught.value).__name__ or isinstance(caught.value, openai.APIConnectionError)


def test_a_reset_breaks_an_answer_that_does_not_stream_before_its_head(worker: Worker) -> None:
    worker.http.post("/mock/faults", json={"mode": "reset", "after_tokens": 3})
    with worker.connect("reset-whole") as connection, pytest.raises(ConnectionResetError):
        connection.recv(65536)


def test_a_hanging_turn_ends_when_the_client_leaves(worker: Worker) -> None:
    worker.http.post("/mock/faults", json={"mode": "hang"})
    with worker.connect("hang", stream=True) as connection:
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    (turn,) = worker.turns("hang")
    assert (turn["outcome"], turn["fault"]) == ("aborted", "hang")


# --- pace ------------------------------------------------------------------------------------------------------------


def test_tokens_come_at_the_pace_that_was_set(slow: Worker) -> None:
    for stream in (True, False):
        slow.http.post("/mock/faults", json={"mode": "slow", "ttft_ms": 100, "itl_ms": 10})
        request = {**CHAT, "stream": stream, "max_tokens": 21}
        started = time.monotonic()
        with slow.http.stream("POST", "/v1/chat/completions", json=request) as answer:
            arrivals = [time.monotonic() - started for _ in answer.iter_raw()]
        assert 0.295 <= arrivals[-1] < 10
        if stream:
            assert 0.095 <= arrivals[0] < 10
            assert len(arrivals) > 10  # not in one piece


async def test_many_streams_keep_their_pace_together() -> None:
    crowd = Worker(itl_ms=10)
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(
            base_url=crowd.url, trust_env=False, verify=False, limits=limits, timeout=10
        ) as http:
            body = {**CHAT, "stream": True, "max_tokens": 50}
            answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(50)))
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        turns = crowd.get("/mock/turns")["turns"]
        assert len(turns) == 50
        assert all(0.45 <= turn["end"] - turn["start"] < 10 for turn in turns)
    finally:
        crowd.close()


# --- the command line ------------------------------------------------------------------------------------------------


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mocker", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_every_server_with_turns_open(number: int) -> None:
    with start("--count", "2", "--model", "one", "--model", "two", "--itl-ms", "1000", "--ttft-ms", "1") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        connections = []
        for line in lines:
            name, _, _, _, _, url = line.split()
            assert line == f"{name} serves one, two at {url}\n"
            host, port = url.removeprefix("http://").split(":")
            assert name == f"mock-{port}"
            for stream in (True, False):
                body = json.dumps({**CHAT, "model": "two", "stream": stream}).encode()
                connection = socket.create_connection((host, int(port)), timeout=5)
                connection.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                )
                if stream:
                    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
                connections.append(connection)
        process.send_signal(number)
        signalled = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - signalled < 10  # a turn takes 16
        assert (process.returncode, errors) == (0, "")
        for connection in connections:
            connection.close()


def test_a_port_in_use_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--count", "0"], "argument --count: must be a whole number, 1 to 1000, not '0'"),
        (["--port", "70000"], "argument --port: must be a whole number, 0 to 65535, not '70000'"),
        (["--ttft-ms", "-1"], "argument --ttft-ms: must be a number of milliseconds, 0 or more, not '-1'"),
        (["--itl-ms", "nan"], "argument --itl-ms: must be a number of milliseconds, 0 or more, not 'nan'"),
        (["--tokens", "many"], "argument --tokens: must be a whole number, 1 to 1000000, not 'many'"),
        (["--model", ""], "argument --model: must not be empty"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
    ],
)
def test_bad_options_are_explained(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(options)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_options_that_do_not_fit_together_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--port", "65535", "--count", "2"]) == 2
    assert "the last port would be above 65535" in capsys.readouterr().err
    assert cli.main(["--port", "0", "--model", "a", "--model", "a"]) == 2
    assert "a model is named twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"name": "é"}, {"models": ()}, {"ttft_ms": -1}, {"dp_size": 0}, {"history": 0}, {"api_key": ""}],
)
def test_settings_are_checked_as_a_whole(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        MockSettings(**wrong)
