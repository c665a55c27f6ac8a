"""The official client, over real sockets: what it does at a worker it does through either replica."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import MAX_BODY_BYTES, Standing, new_session
from tests.support.late import openai
from tests.support.processes import Processes, Replica, Worker, order_fault, turns
from tests.support.wire import Wire, ask, chat_request, turn

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

MODEL = "mock-model"
SAY_HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(params=[0, 1], ids=["first", "second"])
def replica(request: pytest.FixtureRequest, standing: Standing) -> Replica:
    number: int = request.param
    return standing.replicas[number]


@pytest.fixture
def client(replica: Replica) -> Iterator[openai.OpenAI]:
    with sync_client(replica.url) as client:
        yield client


@pytest.fixture
async def aclient(replica: Replica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        api_key="any",
        base_url=f"{replica.url}/v1",
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False),
    ) as client:
        yield client


def sync_client(url: str, **options: object) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="any",
        base_url=f"{url}/v1",
        http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
        **options,  # type: ignore[arg-type]
    )


async def served(standing: Standing, session: str) -> list[str]:
    """The workers of a session's turns, by the workers' own records."""
    return [worker.name for worker in standing.workers for _ in await turns(worker, session)]


# --- what works ------------------------------------------------------------------------------------------------------


async def test_a_chat_is_answered(aclient: openai.AsyncOpenAI) -> None:
    answer = await aclient.chat.completions.create(model=MODEL, messages=SAY_HELLO, max_tokens=7)
    assert len((answer.choices[0].message.content or "").split()) == 7
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7


def test_a_chat_is_answered_to_the_synchronous_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SAY_HELLO, max_tokens=7)
    assert len((answer.choices[0].message.content or "").split()) == 7


async def test_a_streamed_chat_says_the_same_as_a_whole_one(aclient: openai.AsyncOpenAI) -> None:
    whole = await aclient.chat.completions.create(model=MODEL, messages=SAY_HELLO, max_tokens=9)
    stream = await aclient.chat.completions.create(model=MODEL, messages=SAY_HELLO, max_tokens=9, stream=True)
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) == 9
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_streamed_chat_reaches_the_synchronous_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=SAY_HELLO, max_tokens=9)
    stream = client.chat.completions.create(model=MODEL, messages=SAY_HELLO, max_tokens=9, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content


async def test_a_stream_tells_its_usage_when_it_is_asked_to(aclient: openai.AsyncOpenAI) -> None:
    stream = await aclient.chat.completions.create(
        model=MODEL, messages=SAY_HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert not last.choices
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert last.usage.total_tokens == last.usage.prompt_tokens + 5
    assert all(chunk.usage is None for chunk in chunks)


async def test_legacy_completions(aclient: openai.AsyncOpenAI) -> None:
    whole = await aclient.completions.create(model=MODEL, prompt="Once upon", max_tokens=5)
    stream = await aclient.completions.create(model=MODEL, prompt="Once upon", max_tokens=5, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
    assert len(whole.choices[0].text.split()) == 5


async def test_embeddings(aclient: openai.AsyncOpenAI) -> None:
    """The client asks for base64 by itself: bytes that travel unread must still decode to unit vectors."""
    answer = await aclient.embeddings.create(model=MODEL, input=["one", "two"], dimensions=24)
    assert [len(item.embedding) for item in answer.data] == [24, 24]
    assert all(math.isclose(math.hypot(*item.embedding), 1, rel_tol=1e-5) for item in answer.data)
    assert answer.data[0].embedding != answer.data[1].embedding


async def test_models_are_listed_and_found(aclient: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await aclient.models.list()).data] == [MODEL]
    assert (await aclient.models.retrieve(MODEL)).owned_by == "mocker"
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await aclient.models.retrieve("no-such-model")


async def test_a_session_is_named_in_each_call_s_headers(standing: Standing, session: str) -> None:
    for url in standing.urls * 2:
        with sync_client(url) as client:
            client.chat.completions.create(
                model=MODEL, messages=SAY_HELLO, extra_headers={"X-Dynamo-Session-ID": session}
            )
    where = await served(standing, session)
    assert len(where) == 4
    assert len(set(where)) == 1


async def test_a_session_is_named_in_the_client_s_headers(standing: Standing, session: str) -> None:
    for url in standing.urls * 2:
        with sync_client(url, default_headers={"X-Dynamo-Session-ID": session}) as client:
            list(client.chat.completions.create(model=MODEL, messages=SAY_HELLO, stream=True, max_tokens=2))
    where = await served(standing, session)
    assert len(where) == 4
    assert len(set(where)) == 1


async def test_the_answer_says_where_it_came_from_and_the_worker_agrees(
    standing: Standing, client: openai.OpenAI, session: str
) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=SAY_HELLO,
        extra_headers={"X-Dynamo-Session-ID": session, "X-Request-ID": "my-own-id"},
    )
    assert answer.headers["x-coatcheck-affinity"] == "created"
    assert answer.headers["x-request-id"] == "my-own-id"
    [record] = await turns(standing.worker(answer.headers["x-coatcheck-worker"]), session)
    assert record["request_id"] == "my-own-id"


# --- what does not ---------------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_not_found(aclient: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `gpt-0` does not exist") as caught:
        await aclient.chat.completions.create(model="gpt-0", messages=SAY_HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_a_bad_session_id_is_refused(aclient: openai.AsyncOpenAI) -> None:
    for bad in ("two words", "x" * 257):
        with pytest.raises(openai.BadRequestError) as caught:
            await aclient.chat.completions.create(
                model=MODEL, messages=SAY_HELLO, extra_headers={"X-Dynamo-Session-ID": bad}
            )
        assert caught.value.code == "invalid_session_id"
        assert caught.value.param == "x-dynamo-session-id"


@pytest.mark.parametrize("values", [["one", "two"], ["caf\u00e9"]], ids=["two", "latin-1"])
async def test_session_ids_that_no_client_library_sends_are_refused(replica: Replica, values: list[str]) -> None:
    answer = await turn(replica.url, headers=[("x-dynamo-session-id", value) for value in values])
    assert answer.status == 400
    assert answer.json["error"]["code"] == "invalid_session_id"


async def test_a_body_that_is_not_json_is_refused_by_the_worker(replica: Replica) -> None:
    answer = await ask(
        replica.url, "POST", "/v1/chat/completions", [("content-type", "application/json")], b'{"model": '
    )
    assert answer.status == 400
    assert answer.worker
    assert answer.json["error"]["type"] == "invalid_request_error"


async def test_a_body_above_the_limit_is_refused(aclient: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await aclient.embeddings.create(model=MODEL, input="x" * MAX_BODY_BYTES)
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


async def test_a_chunked_body_above_the_limit_is_refused(replica: Replica) -> None:
    """Nothing declares its length beforehand."""
    async with await Wire.to(replica.url) as wire:
        wire.request("POST", "/v1/chat/completions", [("transfer-encoding", "chunked")])
        for _ in range(MAX_BODY_BYTES // 50_000 + 1):
            wire.write(b"c350\r\n%b\r\n" % (b" " * 50_000))
        assert (await wire.head()).status == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
    ],
)
async def test_wrong_paths_and_methods_are_answered_in_openai_s_shape(
    replica: Replica, method: str, path: str, status: int
) -> None:
    answer = await ask(replica.url, method, path, body=b"" if method == "POST" else None)
    assert answer.status == status
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert (answer.get("allow") is not None) == (status == 405)


# --- the client's own retries ----------------------------------------------------------------------------------------


async def worker_of(standing: Standing, client: openai.OpenAI, session: str) -> Worker:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=SAY_HELLO, extra_headers={"X-Dynamo-Session-ID": session}
    )
    return standing.worker(answer.headers["x-coatcheck-worker"])


async def test_the_client_s_retry_finds_its_session_s_worker(
    standing: Standing, client: openai.OpenAI, session: str
) -> None:
    worker = await worker_of(standing, client, session)
    await order_fault(worker, mode="status", status=503, times=2, headers={"retry-after-ms": "1"})
    client.chat.completions.create(
        model=MODEL, messages=SAY_HELLO, extra_headers={"X-Dynamo-Session-ID": session, "X-Dynamo-Session-Final": "1"}
    )
    assert [record["fault"] for record in await turns(worker, session)] == [None, "status", "status", None]
    assert set(await served(standing, session)) == {worker.name}


async def test_a_worker_s_word_that_retrying_is_useless_reaches_the_client(
    standing: Standing, client: openai.OpenAI, session: str
) -> None:
    worker = await worker_of(standing, client, session)
    await order_fault(worker, mode="status", status=503, times=9, headers={"x-should-retry": "false"})
    with pytest.raises(openai.InternalServerError, match="This fault was ordered"):
        client.chat.completions.create(model=MODEL, messages=SAY_HELLO, extra_headers={"X-Dynamo-Session-ID": session})
    assert len(await turns(worker, session)) == 2


async def test_the_client_tries_again_when_no_worker_could_be_reached(processes: Processes, standing: Standing) -> None:
    """The router's 503 asks for it, so a fleet that restarts costs its clients a second and no error."""
    [worker] = processes.workers(1)
    [replica] = processes.replicas(1, [worker], processes.folder / "claims")
    worker.process.kill()
    headers, body = chat_request(session=new_session())
    answer = await ask(replica.url, "POST", "/v1/chat/completions", headers, body)
    assert answer.status == 503
    assert answer.json["error"]["code"] == "worker_unreachable"
    assert answer.get("x-should-retry") == "true"
    assert answer.get("retry-after") == "1"
    port = worker.url.rpartition(":")[2]
    again = processes.start("worker", "mocker", "--port", port)
    with sync_client(replica.url, max_retries=10) as client:
        client.chat.completions.create(model=MODEL, messages=SAY_HELLO)
    assert len(await turns(Worker("w0", worker.url, again))) == 1
