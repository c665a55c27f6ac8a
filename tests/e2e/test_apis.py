"""The official clients of three APIs at real replicas and mock workers: where their streams end, and what they are told
when something is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import MAX_BODY_BYTES, Standing
from tests.support.late import anthropic, openai
from tests.support.processes import Replica, metrics, order_fault, total, turns, wait_until
from tests.support.wire import ask, chat_request

MODEL = "mock-model"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
Headers = dict[str, str]
Streams = Callable[[Headers], Iterator[Any]]


@pytest.fixture
def replica(standing: Standing) -> Replica:
    return standing.replicas[0]


@pytest.fixture
def openais(replica: Replica) -> Iterator[openai.OpenAI]:
    http_client = openai.DefaultHttpxClient(trust_env=False, verify=False)
    with openai.OpenAI(api_key="any", base_url=f"{replica.url}/v1", http_client=http_client, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropics(replica: Replica) -> Iterator[anthropic.Anthropic]:
    http_client = anthropic.DefaultHttpxClient(trust_env=False, verify=False)
    with anthropic.Anthropic(api_key="any", base_url=replica.url, http_client=http_client, max_retries=0) as client:
        yield client


@pytest.fixture(params=["chat", "messages", "responses"])
def streams(request: pytest.FixtureRequest, openais: openai.OpenAI, anthropics: anthropic.Anthropic) -> Streams:
    """One streamed turn of each API, as its own client gives it."""
    api: str = request.param

    def stream(headers: Headers) -> Iterator[Any]:
        match api:
            case "chat":
                yield from openais.chat.completions.create(
                    model=MODEL, messages=HELLO, stream=True, max_tokens=4, extra_headers=headers
                )
            case "messages":
                yield from anthropics.messages.create(
                    model=MODEL, messages=HELLO, stream=True, max_tokens=4, extra_headers=headers
                )
            case _:
                yield from openais.responses.create(
                    model=MODEL, input="Say hello.", stream=True, max_output_tokens=4, extra_headers=headers
                )

    return stream


def at(worker: str) -> Headers:
    return {"X-Dynamo-Worker-Instance-ID": worker}


async def test_the_claim_is_closed_when_the_client_sees_the_last_event(
    standing: Standing, streams: Streams, session: str
) -> None:
    """Long before the body ends, which no client waits for."""

    async def revision() -> Any:
        headers, body = chat_request(session=session)
        answer = await ask(
            standing.replicas[1].url, "POST", "/v1/chat/completions", [*headers, ("x-coatcheck-dry-run", "1")], body
        )
        return answer.json["revision"]

    mine = standing.workers[0]
    await order_fault(mine, mode="slow", end_ms=400)
    last, seen = None, []
    for event in streams(at(mine.name) | {"X-Dynamo-Session-ID": session, "X-Dynamo-Session-Final": "true"}):
        last = getattr(event, "type", None) or event.choices[0].finish_reason
        if last in ("message_stop", "response.completed", "response.incomplete"):
            seen.append(await revision())
    if last == "length":  # of the chat's [DONE] the client says nothing, but that it was there
        seen.append(await revision())
    assert seen == [None]
    assert len(await turns(mine, session)) == 1


async def test_turns_whose_end_comes_late_are_complete_and_keep_their_connection(
    standing: Standing, replica: Replica, streams: Streams
) -> None:
    mine = standing.workers[1]

    async def at_rest() -> bool:  # a client may have its answer before the turn has ended
        return not total(await metrics(replica), "coatcheck_turns_running")

    list(streams(at(mine.name)))
    await wait_until(at_rest, 30)
    before = await metrics(replica)
    await order_fault(mine, mode="slow", times=10, end_ms=5)
    for _ in range(10):
        list(streams(at(mine.name)))
    await wait_until(at_rest, 30)

    async def grown(name: str, *labels: str) -> float:
        return total(await metrics(replica), name, *labels) - total(before, name, *labels)

    assert await grown("coatcheck_turns_total", 'outcome="completed"') == 10
    assert await grown("coatcheck_turns_total", 'outcome="aborted"') == 0
    assert await grown("coatcheck_worker_connects_total", f'worker="{mine.name}"') <= 1


async def test_a_stream_that_breaks_between_events_raises_the_client_s_own_error(
    standing: Standing, streams: Streams
) -> None:
    mine = standing.workers[2]
    await order_fault(mine, mode="cut", after_events=3, middle=False)
    with pytest.raises((openai.APIError, anthropic.APIError), match="closed the connection") as caught:
        list(streams(at(mine.name)))
    if isinstance(caught.value, anthropic.APIStatusError):
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "api_error")
        assert body["request_id"]


async def test_a_stream_that_breaks_within_an_event_is_a_broken_connection(
    standing: Standing, streams: Streams
) -> None:
    """And no half JSON with an error glued to it."""
    mine = standing.workers[3]
    await order_fault(mine, mode="cut", after_events=3, middle=True)
    # The clients stand on different versions of httpx.
    with pytest.raises(Exception, match=r"peer closed connection|Connection error"):
        list(streams(at(mine.name)))


def test_errors_at_messages_are_the_client_s_own(anthropics: anthropic.Anthropic) -> None:
    def refused(text: str, **headers: str) -> anthropic.APIStatusError:
        with pytest.raises(anthropic.APIStatusError) as caught:
            anthropics.messages.create(
                model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=4, extra_headers=headers
            )
        error = caught.value
        assert isinstance(error.body, dict)
        assert error.body["type"] == "error"
        assert error.body["error"]["message"] in str(error)
        return error

    bad = refused("hello", **{"X-Dynamo-Session-ID": "a b", "X-Request-ID": "r7"})
    assert isinstance(bad, anthropic.BadRequestError)
    assert (bad.request_id, json.loads(bad.response.text)["request_id"]) == ("r7", "r7")
    assert bad.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    large = refused("a" * MAX_BODY_BYTES)
    assert (large.status_code, large.body["error"]["type"]) == (413, "request_too_large")  # type: ignore[index]
    unknown = refused("hello", **at("w-nobody"))
    assert (unknown.status_code, unknown.body["error"]["type"]) == (400, "invalid_request_error")  # type: ignore[index]
