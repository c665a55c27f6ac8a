"""The mock's other APIs over real sockets: by the official clients where they have one, else byte by byte."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.late import anthropic, openai
from tests.support.mocks import CHAT, HELLO, Worker, eventually

MESSAGES = {"model": "mock-model", "max_tokens": 100, "messages": HELLO}
RESPONSES = {"model": "mock-model", "input": "hello"}
STREAMS: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "mock-model", "prompt": "hello"},
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/generate": {"text": "hello"},
    "/completion": {"prompt": "hello"},
}
"""The paths that stream, each with a request."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    running = Worker(models=("mock-model", "org/other"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Worker]:
    running = Worker(name="other")
    yield running
    running.close()


@pytest.fixture(scope="module")
def slow() -> Iterator[Worker]:
    running = Worker(ttft_ms=0, itl_ms=20)
    yield running
    running.close()


def openai_at(worker: Worker) -> Any:
    """Not typed, as the other clients here: its answers are unions of all that an API may say."""
    transport = openai.DefaultHttpxClient(trust_env=False, verify=False)
    return openai.OpenAI(base_url=f"{worker.url}/v1", api_key="any", max_retries=0, http_client=transport)


@pytest.fixture
def client(worker: Worker) -> Iterator[Any]:
    with openai_at(worker) as client:
        yield client


@pytest.fixture
def stranger(other: Worker) -> Iterator[Any]:
    """At another worker."""
    with openai_at(other) as client:
        yield client


@pytest.fixture
def claude(worker: Worker) -> Iterator[Any]:
    transport = anthropic.DefaultHttpxClient(trust_env=False, verify=False)
    with anthropic.Anthropic(base_url=worker.url, api_key="any", max_retries=0, http_client=transport) as client:
        yield client


def order(worker: Worker, **fault: Any) -> None:
    worker.http.post("/mock/faults", json=fault).raise_for_status()


def raw(connection: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def last_turn(worker: Worker) -> dict[str, Any]:
    turn: dict[str, Any] = worker.get("/mock/turns")["turns"][-1]
    return turn


# --- Messages --------------------------------------------------------------------------------------------------------


def test_a_message_has_text_a_reason_and_usage(claude: Any) -> None:
    limited = claude.messages.create(model="mock-model", max_tokens=5, messages=HELLO)
    assert len(limited.content[0].text.split()) == limited.usage.output_tokens == 5
    assert (limited.type, limited.role, limited.stop_reason) == ("message", "assistant", "max_tokens")
    ended = claude.messages.create(model="mock-model", max_tokens=10_000, messages=HELLO)
    assert (ended.stop_reason, ended.usage.output_tokens) == ("end_turn", 16)


def test_a_streamed_message_says_what_the_whole_one_says(claude: Any) -> None:
    whole = claude.messages.create(model="mock-model", max_tokens=100, messages=HELLO, system="Be short.")
    with claude.messages.stream(model="mock-model", max_tokens=100, messages=HELLO, system="Be short.") as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text
    assert (streamed.usage.output_tokens, streamed.stop_reason) == (16, "end_turn")
    assert streamed.usage.input_tokens == whole.usage.input_tokens


def test_the_events_of_a_message_are_named_and_in_their_order(worker: Worker) -> None:
    answer = worker.http.post("/v1/messages", json={**MESSAGES, "max_tokens": 2, "stream": True})
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    names = []
    for event in events:
        name, data = event.split("\n")
        names.append(name.removeprefix("event: "))
        assert json.loads(data.removeprefix("data: "))["type"] == names[-1]
    begin = ["message_start", "content_block_start", "ping"]
    end = ["content_block_stop", "message_delta", "message_stop"]
    assert names == [*begin, "content_block_delta", "content_block_delta", *end]


def test_tokens_of_a_message_are_counted_as_they_are_billed(claude: Any) -> None:
    tools: list[Any] = [{"name": "look", "input_schema": {"type": "object"}}]
    counted = claude.messages.count_tokens(model="mock-model", messages=HELLO, tools=tools).input_tokens
    used = claude.messages.create(model="mock-model", max_tokens=1, messages=HELLO, tools=tools).usage.input_tokens
    assert counted == used > claude.messages.count_tokens(model="mock-model", messages=HELLO).input_tokens


@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        ({**MESSAGES, "model": "gpt"}, 404, "not_found_error"),
        ({"model": "mock-model", "messages": HELLO}, 400, "invalid_request_error"),
        ({**MESSAGES, "messages": []}, 400, "invalid_request_error"),
    ],
)
def test_errors_of_messages_have_anthropics_shape(worker: Worker, request_: Any, status: int, kind: str) -> None:
    answer = worker.http.post("/v1/messages", json=request_)
    said = answer.json()
    assert (answer.status_code, said["type"], said["error"]["type"]) == (status, "error", kind)
    assert said["error"]["message"]
    assert said["request_id"]


def test_errors_below_messages_have_anthropics_shape_too(worker: Worker) -> None:
    for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)):
        answer = worker.http.request(method, path)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")


def test_ordered_errors_have_the_shape_of_the_path(worker: Worker, claude: Any) -> None:
    order(worker, mode="status", status=429, headers={"retry-after": "3"})
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        claude.messages.create(model="mock-model", max_tokens=5, messages=HELLO)
    order(worker, mode="fail", after_tokens=3)
    seen = []
    with (
        pytest.raises(anthropic.APIStatusError, match="This fault was ordered"),
        claude.messages.stream(model="mock-model", max_tokens=100, messages=HELLO) as stream,
    ):
        seen.extend(stream.text_stream)
    assert len(seen) == 3


# --- Responses -------------------------------------------------------------------------------------------------------


def test_a_response_has_text_and_usage(client: Any) -> None:
    ended = client.responses.create(model="mock-model", input="hello", instructions="Be short.")
    assert len(ended.output_text.split()) == ended.usage.output_tokens == 16
    assert ended.status == "completed"
    limited = client.responses.create(model="mock-model", input="hello", max_output_tokens=4)
    assert (limited.status, limited.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert limited.usage.output_tokens == 4


@pytest.mark.parametrize(("limit", "last"), [(None, "response.completed"), (3, "response.incomplete")])
def test_a_streamed_response_numbers_its_events(client: Any, limit: int | None, last: str) -> None:
    extra: dict[str, Any] = {} if limit is None else {"max_output_tokens": limit}
    whole = client.responses.create(model="mock-model", input="hello", **extra)
    events = list(client.responses.create(model="mock-model", input="hello", stream=True, **extra))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert len(deltas) == (limit or 16)
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        last,
    ]


def test_the_sdk_assembles_a_streamed_response(client: Any) -> None:
    with client.responses.stream(model="mock-model", input="hello") as stream:
        assert len(stream.get_final_response().output_text.split()) == 16


def test_a_failed_response_says_so_at_its_end(worker: Worker, client: Any) -> None:
    order(worker, mode="fail", after_tokens=2)
    events = list(client.responses.create(model="mock-model", input="hello", stream=True))
    assert events[-1].type == "response.failed"
    assert sum(event.type == "response.output_text.delta" for event in events) == 2
    assert client.responses.retrieve(events[-1].response.id).status == "failed"
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    assert last_turn(worker)["outcome"] == "aborted"


def test_a_stored_response_is_known_to_its_maker_only(client: Any, stranger: Any) -> None:
    first = client.responses.create(model="mock-model", input="hello")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    (item,) = client.responses.input_items.list(first.id).data
    assert item.content[0].text == "hello"
    follow_up: dict[str, Any] = {"model": "mock-model", "input": "more", "previous_response_id": first.id}
    second = client.responses.create(**follow_up)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    with pytest.raises(openai.NotFoundError) as missing:
        stranger.responses.create(**follow_up)
    assert (missing.value.code, missing.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_that_is_not_stored_is_gone(client: Any) -> None:
    answer = client.responses.create(model="mock-model", input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_background_response_goes_on_by_itself(worker: Worker, client: Any) -> None:
    queued = client.responses.create(model="mock-model", input="hello", background=True)
    assert (queued.status, queued.output) == ("queued", [])
    eventually(lambda: client.responses.retrieve(queued.id).status == "completed")
    assert len(client.responses.retrieve(queued.id).output_text.split()) == 16
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    assert (last_turn(worker)["path"], last_turn(worker)["outcome"]) == ("/v1/responses", "completed")


def test_a_background_stream_is_taken_up_again_where_it_was_left(slow: Worker) -> None:
    with openai_at(slow) as client:
        numbers = []
        with client.responses.create(model="mock-model", input="hello", background=True, stream=True) as stream:
            for event in stream:
                numbers.append(event.sequence_number)
                if event.type == "response.created":
                    own = event.response.id
                if len(numbers) == 8:
                    break
        assert client.responses.retrieve(own).status == "in_progress"
        rest = list(client.responses.retrieve(own, stream=True, starting_after=numbers[-1]))
    assert [*numbers, *(event.sequence_number for event in rest)] == list(range(8 + len(rest)))
    assert rest[-1].type == "response.completed"


def test_a_background_response_can_be_cancelled(slow: Worker) -> None:
    with openai_at(slow) as client:
        made = client.responses.create(model="mock-model", input="hello", background=True, max_output_tokens=5000)
        assert slow.get("/mock/state")["active"] == 1
        assert client.responses.cancel(made.id).status == "cancelled"
        eventually(lambda: slow.get("/mock/state")["active"] == 0)
        assert client.responses.retrieve(made.id).status == "cancelled"
    assert last_turn(slow)["outcome"] == "aborted"


def test_a_response_that_its_client_left_is_cancelled(slow: Worker) -> None:
    with slow.connect("leaver", "/v1/responses", input="x", stream=True, max_output_tokens=5000) as connection:
        seen = b""
        while seen.count(b"response.output_text.delta") < 2:
            seen += connection.recv(65536)
    own = json.loads(seen.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
    eventually(lambda: slow.get(f"/v1/responses/{own}")["status"] == "cancelled")


# --- choices ---------------------------------------------------------------------------------------------------------


def test_choices_differ_and_stream_as_they_are_said(client: Any) -> None:
    whole = client.chat.completions.create(model="mock-model", messages=HELLO, n=3, max_tokens=4)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 12
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(model="mock-model", messages=HELLO, n=3, max_tokens=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    alone = client.chat.completions.create(model="mock-model", messages=HELLO, max_tokens=4)
    assert alone.choices[0].message.content == texts[0]


# --- what only its maker knows ---------------------------------------------------------------------------------------


def test_a_file_is_known_to_its_maker_only(client: Any, stranger: Any) -> None:
    content = b"\x00\r\n--x\r\n\xff" * 100
    file = client.files.create(file=("a.json", content), purpose="user_data")
    assert (file.filename, file.bytes, file.purpose) == ("a.json", len(content), "user_data")
    assert client.files.content(file.id).read() == content
    assert file.id in [each.id for each in client.files.list()]
    with pytest.raises(openai.NotFoundError):
        stranger.files.retrieve(file.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_a_batch_is_worked_off_by_the_worker_that_has_its_file(client: Any, stranger: Any) -> None:
    lines = [
        {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        {"custom_id": "two", "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "model": "gpt"}},
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("batch.jsonl", content), purpose="batch")
    asked: Any = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError):
        stranger.batches.create(**asked)
    batch = client.batches.create(**asked)
    assert batch.status == "in_progress"
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert (done.request_counts.total, done.request_counts.failed) == (2, 1)
    output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in output] == [("one", 200), ("two", 404)]
    assert output[0]["response"]["body"]["choices"][0]["message"]["content"]
    with pytest.raises(openai.NotFoundError):
        stranger.batches.retrieve(batch.id)


def test_a_batch_can_be_cancelled_before_its_end() -> None:
    late = Worker(ttft_ms=30_000)
    try:
        with openai_at(late) as client:
            file = client.files.create(file=("batch.jsonl", b""), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            assert client.batches.cancel(batch.id).status == client.batches.retrieve(batch.id).status == "cancelled"
    finally:
        late.close()


def test_a_conversation_grows_by_its_responses_at_its_maker(client: Any, stranger: Any) -> None:
    made = client.conversations.create(items=[{"role": "user", "content": "I am Ann."}], metadata={"a": "b"})
    answer = client.responses.create(model="mock-model", input="hello", conversation=made.id)
    again = client.responses.create(model="mock-model", input="more", conversation=made.id)
    assert again.usage.input_tokens > answer.usage.total_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0
    items = client.conversations.items.list(made.id).data
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert client.conversations.items.retrieve(items[0].id, conversation_id=made.id).content[0].text == "I am Ann."
    with pytest.raises(openai.NotFoundError):
        stranger.conversations.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        stranger.responses.create(model="mock-model", input="hello", conversation=made.id)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(made.id)


# --- engine paths and management -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "request_", "field"),
    [
        ("/detokenize", {"tokens": [1, 2]}, "prompt"),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}, "results"),
        ("/v2/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}, "results"),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, "data"),
        ("/pooling", {"input": ["a", "b"]}, "data"),
        ("/classify", {"input": "a"}, "data"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3}}, "text"),
        ("/completion", {"prompt": "a", "n_predict": 3}, "content"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "content"),
        ("/invocations", CHAT, "choices"),
        ("/invocations", {"model": "mock-model", "input": "x"}, "data"),
    ],
)
def test_engine_paths_answer_and_are_turns(worker: Worker, path: str, request_: Any, field: str) -> None:
    answer = worker.http.post(path, json=request_, headers={"session_id": "engines", "authorization": "Bearer k"})
    assert answer.status_code == 200
    assert answer.json()[field]
    turn = last_turn(worker)
    assert (turn["method"], turn["path"], turn["session"]) == ("POST", path, "engines")
    assert (turn["named_by"], turn["authorization"]) == ("session_id", "Bearer k")


def test_tokens_become_the_text_again(worker: Worker) -> None:
    tokens = worker.http.post("/tokenize", json={"prompt": "where is my coat"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 4
    assert worker.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "where is my coat"}
    rendered = worker.http.post("/tokenize", json={"messages": HELLO}).json()["count"]
    assert rendered == worker.http.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]


def test_management_is_recorded_with_its_credentials(worker: Worker) -> None:
    headers = {"authorization": "Bearer admin", "x-api-key": "k", "x-request-id": "r-9"}
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "fine", "lora_path": "x"}),
        ("/sleep?level=1", None),
        ("/wake_up", None),
        ("/collective_rpc", {"method": "x"}),
        ("/v1/internal/weights/reload", None),
    ):
        assert worker.http.post(path, json=body, headers=headers).status_code == 200
        call = worker.get("/mock/calls")["calls"][-1]
        assert (call["method"], call["path"], call["status"]) == ("POST", path.partition("?")[0], 200)
        assert (call["authorization"], call["api_key"], call["request_id"]) == ("Bearer admin", "k", "r-9")
    assert worker.http.post("/v1/chat/completions", json={**CHAT, "model": "fine"}).status_code == 200
    assert worker.http.get("/v1/models/fine/ready").json() == {"name": "fine", "ready": True}
    assert worker.http.post("/v1/unload_lora_adapter", json={"lora_name": "fine"}).status_code == 200
    assert worker.http.get("/v1/models/fine/ready").status_code == 404
    assert worker.http.get("/v1/models/org/other/ready").json() == {"name": "org/other", "ready": True}
    worker.http.get("/nowhere")
    assert [call["status"] for call in worker.get("/mock/calls?path=/nowhere")["calls"]] == [404]
    assert worker.get("/mock/calls?path=/v1/models")["calls"] == []


def test_faults_hit_calls_too(worker: Worker) -> None:
    order(worker, mode="status", status=429)
    assert worker.http.get("/v1/files").status_code == 429
    assert worker.get("/mock/calls")["calls"][-1]["fault"] == "status"
    assert worker.http.get("/v1/files").status_code == 200


# --- which session it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers", "fields", "named_by", "session"),
    [
        ("/v1/chat/completions", {"session_id": "a"}, {}, "session_id", "a"),
        ("/v1/chat/completions", {"X-Session-Affinity": "b"}, {"prompt_cache_key": "z"}, "x-session-affinity", "b"),
        (
            "/v1/messages",
            {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "d"},
            {},
            "x-claude-code-session-id",
            "c/d",
        ),
        ("/v1/chat/completions", {}, {"prompt_cache_key": "e f"}, "prompt_cache_key", "e f"),
        ("/v1/responses", {}, {"prompt_cache_key": "g"}, "prompt_cache_key", "g"),
        ("/v1/messages", {}, {"metadata": {"user_id": "user_1_account__session_h-i"}}, "metadata.user_id", "h-i"),
        ("/v1/messages", {}, {"metadata": {"user_id": '{"session_id":"j"}'}}, "metadata.user_id", "j"),
        ("/v1/messages", {}, {"metadata": {"user_id": "k"}}, "metadata.user_id", "k"),
        ("/v1/chat/completions", {}, {"metadata": {"session_id": "l"}}, "metadata.session_id", "l"),
    ],
)
def test_the_cache_is_counted_by_whatever_names_the_session(
    worker: Worker, path: str, headers: dict[str, str], fields: dict[str, Any], named_by: str, session: str
) -> None:
    for _ in range(2):
        worker.http.post(path, json={**STREAMS[path], **fields}, headers=headers).raise_for_status()
    first, second = worker.get("/mock/turns")["turns"][-2:]
    assert [(turn["named_by"], turn["session"]) for turn in (first, second)] == [(named_by, session)] * 2
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, second["prompt_tokens"] - 1)


def test_what_names_no_session_is_not_judged(worker: Worker) -> None:
    odd = {**CHAT, "prompt_cache_key": 5, "metadata": [1]}
    assert worker.http.post("/v1/chat/completions", json=odd).status_code == 200
    assert last_turn(worker)["session"] is None


def test_the_cache_is_told_in_each_apis_words(worker: Worker, claude: Any) -> None:
    for cached in (False, True):
        usage = claude.messages.create(
            model="mock-model", max_tokens=1, messages=HELLO, extra_headers={"session-id": "words"}
        ).usage
        assert (usage.cache_read_input_tokens > 0) is cached
        assert usage.input_tokens + usage.cache_read_input_tokens == last_turn(worker)["prompt_tokens"]


# --- faults of streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("then", ["close", "reset", "end"])
@pytest.mark.parametrize("events", [0, 3])
def test_a_cut_comes_after_the_ordered_event_in_mid_line(worker: Worker, path: str, then: str, events: int) -> None:
    order(worker, mode="cut", after_events=events, then=then)
    pieces: list[bytes] = []
    with worker.connect("cut", path, **STREAMS[path], stream=True) as connection:
        try:
            while not pieces or not pieces[-1].endswith(b"0\r\n\r\n"):
                pieces.append(connection.recv(65536))
                if not pieces[-1]:
                    break
        except ConnectionResetError:
            assert then == "reset"
    seen = b"".join(pieces)
    assert seen.endswith(b"0\r\n\r\n") is (then == "end")
    said = seen.removesuffix(b"0\r\n\r\n").removesuffix(b"\r\n")
    assert said.count(b"\n\n") == events
    assert said.rpartition(b"\n")[2].startswith(b"data: {")
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    assert (last_turn(worker)["outcome"], last_turn(worker)["fault"]) == ("aborted", "cut")


def test_a_cut_can_come_between_events_and_at_the_latest_at_the_end(worker: Worker) -> None:
    order(worker, mode="cut", after_events=2, middle=False)
    with worker.connect("between", "/v1/messages", **MESSAGES, stream=True) as connection:
        seen = raw(connection)
    assert seen.removesuffix(b"\r\n").endswith(b"\n\n")
    assert seen.count(b"\n\n") == 2
    order(worker, mode="cut", after_events=1000)
    with worker.connect("late", "/v1/messages", **MESSAGES, stream=True) as connection:
        seen = raw(connection)
    assert b"message_stop" in seen
    assert not seen.endswith(b"0\r\n\r\n")


def test_a_body_that_does_not_stream_is_cut_short(worker: Worker) -> None:
    order(worker, mode="cut")
    with worker.connect("half", "/v1/responses", **RESPONSES) as connection:
        head, _, body = raw(connection).partition(b"\r\n\r\n")
    (length,) = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
    assert 0 < len(body) < int(length.split(b":")[1])


@pytest.mark.parametrize("path", STREAMS)
def test_the_end_of_a_stream_can_come_later_than_its_last_event(worker: Worker, path: str) -> None:
    order(worker, mode="slow", end_ms=150)
    began = time.monotonic()
    with worker.connect("linger", path, **STREAMS[path], stream=True) as connection:
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += connection.recv(65536)
    assert time.monotonic() - began >= 0.15
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    assert last_turn(worker)["outcome"] == "completed"


def test_a_client_that_leaves_before_the_end_has_not_got_the_whole_stream(worker: Worker) -> None:
    order(worker, mode="slow", end_ms=5000)
    with worker.connect("hasty-end", "/v1/messages", **MESSAGES, stream=True) as connection:
        seen = b""
        while b"message_stop" not in seen:
            seen += connection.recv(65536)
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    assert last_turn(worker)["outcome"] == "aborted"


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("tokens", [0, 2, 1000])
def test_an_ordered_failure_is_said_in_the_stream(worker: Worker, path: str, tokens: int) -> None:
    order(worker, mode="fail", after_tokens=tokens)
    answer = worker.http.post(path, json={**STREAMS[path], "stream": True})
    assert answer.status_code == 200
    assert "This fault was ordered." in answer.text
    eventually(lambda: worker.get("/mock/state")["active"] == 0)
    turn = last_turn(worker)
    assert (turn["outcome"], turn["completion_tokens"]) == ("aborted", min(tokens, 16))
    order(worker, mode="fail")
    assert worker.http.post(path, json=STREAMS[path]).status_code == 500
