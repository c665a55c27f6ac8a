"""Every way in which a turn fails before its answer begins, and what the client is told."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from app.http.client import ClientLimits
from app.turn.request import Reading
from app.turn.shared import Limits
from backends.base import StoreUnavailable
from backends.memory import MemoryStore
from tests.support.bench import SESSION, bench
from tests.support.client import Call
from tests.support.fakes import ScriptedStore
from tests.support.raw import OK, STREAM, Peer, Worker, answers, chunk, tells, until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

Header = tuple[bytes, bytes]


def told(client: Call) -> tuple[int, str, str | None, bytes | None, bytes | None]:
    """Status, code, param, x-should-retry and retry-after of an answer that must be OpenAI-shaped."""
    headers = client.headers
    assert client.complete
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"%d" % len(client.body)
    assert headers[b"x-request-id"]
    assert headers[b"x-coatcheck-affinity"]
    error = client.json
    assert error.keys() == {"error"}
    assert error["error"].keys() == {"message", "type", "param", "code"}
    assert error["error"]["message"]
    expected_type = "invalid_request_error" if client.status < 500 else "server_error"
    assert error["error"]["type"] == expected_type
    return (
        client.status,
        error["error"]["code"],
        error["error"]["param"],
        headers.get(b"x-should-retry"),
        headers.get(b"retry-after"),
    )


BAD_REQUESTS: list[tuple[str, list[Header], bytes, tuple[int, str, str | None]]] = [
    (
        "session with a space",
        [(b"x-dynamo-session-id", b"a b")],
        b"{}",
        (400, "invalid_session_id", "x-dynamo-session-id"),
    ),
    ("session too long", [(b"session-id", b"a" * 257)], b"{}", (400, "invalid_session_id", "session-id")),
    (
        "two sessions",
        [(b"x-dynamo-session-id", b"a"), (b"x-dynamo-session-id", b"b")],
        b"{}",
        (400, "invalid_session_id", "x-dynamo-session-id"),
    ),
    ("rank alone", [(b"x-dynamo-dp-rank", b"0")], b"{}", (400, "invalid_hint", "X-Dynamo-DP-Rank")),
    (
        "rank is text",
        [(b"x-dynamo-worker-instance-id", b"w0"), (b"x-dynamo-dp-rank", b"-1")],
        b"{}",
        (400, "invalid_hint", "X-Dynamo-DP-Rank"),
    ),
    (
        "two workers",
        [(b"x-dynamo-worker-instance-id", b"w0"), (b"x-dynamo-worker-instance-id", b"w1")],
        b"{}",
        (400, "invalid_hint", "x-dynamo-worker-instance-id"),
    ),
    (
        "worker unknown",
        [(b"x-dynamo-worker-instance-id", b"w9")],
        b"{}",
        (400, "unknown_worker", "X-Dynamo-Worker-Instance-ID"),
    ),
    (
        "rank unknown",
        [(b"x-dynamo-worker-instance-id", b"w0"), (b"x-dynamo-dp-rank", b"3")],
        b"{}",
        (400, "unknown_worker", "X-Dynamo-Worker-Instance-ID"),
    ),
    ("too large", [], b"x" * 1025, (413, "request_too_large", None)),
    ("declared too large", [(b"content-length", b"99999999")], b"", (413, "request_too_large", None)),
]


@pytest.mark.parametrize(
    ("headers", "body", "answer"), [case[1:] for case in BAD_REQUESTS], ids=[c[0] for c in BAD_REQUESTS]
)
async def test_bad_request(headers: list[Header], body: bytes, answer: tuple[int, str, str | None]) -> None:
    reading = Reading(body_limit=1024)
    worker = Worker(answers(OK))
    async with bench(worker, reading=reading) as b:
        client = await b.get(*headers, body=body)
        assert told(client) == (*answer, None, None)
        assert b.outcomes() == {"rejected": 1}
        assert not worker.requests


async def test_body_too_large_in_pieces() -> None:
    async with bench(answers(OK), reading=Reading(body_limit=1024)) as b:
        client = await b.get(body=[b"x" * 600, b"x" * 600, b"x" * 600])
        assert told(client)[:2] == (413, "request_too_large")


async def test_body_too_large_is_refused_before_it_has_ended() -> None:
    async with bench(answers(OK), reading=Reading(body_limit=1024)) as b:
        client = await b.get(body=[b"x" * 600, b"x" * 600], ends=False)
        assert told(client)[:2] == (413, "request_too_large")


@pytest.mark.parametrize("declared", [True, False])
async def test_body_of_just_the_cap_is_taken(declared: bool) -> None:
    headers = [(b"content-length", b"1024")] if declared else []
    worker = Worker(answers(OK))
    async with bench(worker, reading=Reading(body_limit=1024)) as b:
        client = await b.get(*headers, body=[b"x" * 512, b"y" * 512])
        assert client.status == 200
        assert worker.requests[0].body == b"x" * 512 + b"y" * 512


@pytest.mark.parametrize("session", [[SESSION], []])
async def test_no_worker(session: list[Header]) -> None:
    async with bench() as b:
        assert told(await b.get(*session)) == (503, "no_worker", None, b"true", b"1")
        assert b.outcomes() == {"unplaced": 1}


async def test_store_unavailable() -> None:
    store = ScriptedStore(MemoryStore())
    store.broken["all"] = StoreUnavailable("away")
    async with bench(answers(OK), store=store, refuse_on_outage=True) as b:
        assert told(await b.get(SESSION)) == (503, "store_unavailable", None, b"true", b"1")
        assert (await b.get()).status == 200  # without a session nobody needs the store


@contextlib.contextmanager
def no_file_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    holes = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                holes.append(os.dup(0))
        yield
    finally:
        for hole in holes:
            os.close(hole)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_overloaded_is_not_the_workers_fault() -> None:
    async with bench(answers(OK)) as b:
        client = await b.request(SESSION).connect()
        with no_file_descriptor_left():
            await client.finish()
        assert told(client) == (503, "overloaded", None, b"true", b"1")
        assert b.worker().available
        assert (await b.get(SESSION)).headers[b"x-coatcheck-affinity"] == b"created"


@pytest.fixture
def refused() -> Iterator[str]:
    """A URL that refuses connections: the port is bound, so that nobody else gets it, and nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("session", [[SESSION], []])
async def test_worker_unreachable(refused: str, session: list[Header]) -> None:
    async with bench(refused) as b:
        assert told(await b.get(*session)) == (503, "worker_unreachable", None, b"true", b"1")
        assert not b.worker().available
        assert b.outcomes() == {"unplaced": 1}


async def test_worker_that_never_finishes_connecting() -> None:
    """A TLS handshake that is not answered, as the one wait of a connect that can be had at will."""
    async with Worker(Peer.gone) as worker:
        url = f"https://127.0.0.1:{worker.port}"
        async with bench(url, connect_limit=0.05, tls=ssl.create_default_context()) as b:
            assert told(await b.get())[:2] == (503, "worker_unreachable")


BAD_ANSWERS: list[tuple[str, bytes, tuple[int, str, bytes | None]]] = [
    ("nothing", b"", (502, "worker_reset", None)),
    ("half a head", b"HTTP/1.1 200 OK\r\ncontent-le", (502, "worker_reset", None)),
    ("an interim response only", b"HTTP/1.1 100 Continue\r\n\r\n", (502, "worker_reset", None)),
    ("not http", b"SSH-2.0-OpenSSH_9.2\r\n", (502, "worker_bad_response", b"false")),
    ("bad header", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", (502, "worker_bad_response", b"false")),
    (
        "length twice",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        (502, "worker_bad_response", b"false"),
    ),
    (
        "length and chunks",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        (502, "worker_bad_response", b"false"),
    ),
    (
        "switched protocols",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        (502, "worker_bad_response", b"false"),
    ),
    ("status 600", b"HTTP/1.1 600 What\r\ncontent-length: 0\r\n\r\n", (502, "worker_bad_response", b"false")),
    (
        "endless head",
        b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"a" * 1000 + b"\r\n" + b"x-b: b\r\n" * 50_000,
        (502, "worker_bad_response", b"false"),
    ),
]


@pytest.mark.parametrize(("response", "answer"), [case[1:] for case in BAD_ANSWERS], ids=[c[0] for c in BAD_ANSWERS])
async def test_bad_answer(response: bytes, answer: tuple[int, str, bytes | None]) -> None:
    worker = Worker(tells(response, stays=False))
    async with bench(worker) as b:
        client = await b.get(SESSION)
        status, code, param, should_retry, retry_after = told(client)
        assert (status, code, should_retry) == answer
        assert (param, retry_after) == (None, None)
        assert client.headers[b"x-coatcheck-worker"] == b"w0"
        assert b.outcomes() == {"worker_error": 1}
        assert len(worker.requests) == 1  # it may have run: not tried again
        await until(lambda: not b.affinity.pending_closes)
        assert await b.claim() is None  # it was a first turn


async def test_worker_reset_by_force() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with bench(script) as b:
        assert told(await b.get())[:2] == (502, "worker_reset")


@pytest.mark.parametrize("limits", [Limits(first_byte=0.05), Limits(total=0.05)])
@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 2"])
async def test_worker_timeout(limits: Limits, before: bytes) -> None:
    async with bench(tells(before), limits=limits) as b:
        assert told(await b.get(SESSION)) == (504, "worker_timeout", None, b"false", None)
        assert b.worker().available  # slow is not lost


async def test_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> Any:
        raise ZeroDivisionError

    async with bench(answers(OK), policy=broken) as b:
        assert told(await b.get(SESSION))[:2] == (500, "internal_error")
        assert told(await b.get())[:2] == (500, "internal_error")
        assert b.outcomes() == {"failed": 2}
    caplog.clear()


# -- after the head: inside the stream, or a cut


def last_event(client: Call) -> dict[str, Any]:
    assert client.body.endswith(b"\n\n")
    event = client.events[-1]
    assert event.startswith(b"data: ")
    error = json.loads(event[6:])
    assert error["error"].keys() == {"message", "type", "param", "code"}
    return error["error"]  # type: ignore[no-any-return]


async def test_broken_stream_says_so_and_does_not_end() -> None:
    async with bench(tells(STREAM + b"8\r\ndata: a\n\r\n", stays=False)) as b:
        client = await b.get(SESSION)
        assert client.status == 200
        assert not client.complete
        assert client.body == b"data: a\n"  # the event is cut: ours would be glued to it, or follow half a JSON
        assert b.outcomes() == {"broken": 1}


@pytest.mark.parametrize(
    ("pieces", "between"),
    [
        ([], True),
        ([b"data: a\n\n"], True),
        ([b"data: a\r\n\r\n"], True),
        ([b"data: a\r\r"], True),
        ([b"data: a\n", b"\n"], True),
        ([b"data: a\r\n\r", b"\n"], True),
        ([b"data", b": a", b"\r", b"\n", b"\r", b"\n"], True),
        ([b"data: " + b"a" * 3000 + b"\n", b"\n"], True),
        ([b": ping\n\n"], True),
        ([b"data: a\n\n", b"id: 7\n"], False),
        ([b"data: a\n\nid: 7\n"], False),
        ([b"data: a\n\n", b"event: m\n"], False),
        ([b"data: a\n\n", b"data: {"], False),
        ([b"data: a\n\n", b"da"], False),
        ([b"data: a\n\n", b"data: b\n"], False),
        ([b"data: a\r\n\r\n", b"data: b\r\n"], False),
        ([b"data: a\n\n" + b"data: " + b"a" * 3000], False),
    ],
)
async def test_an_error_event_is_said_only_between_two_events(pieces: list[bytes], between: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM, *map(chunk, pieces))
        await until(lambda: client.status and client.body == b"".join(pieces))

    async with bench(script) as b:
        client = b.request().start()
        await client.finish()
        assert not client.complete
        added = client.body.removeprefix(b"".join(pieces))
        assert added.startswith(b'data: {"error":') if between else added == b""
        assert b.outcomes() == {"broken": 1}


@pytest.mark.parametrize("limits", [Limits(idle=0.3), Limits(total=1.5)])
async def test_stalled_stream(limits: Limits) -> None:
    async with bench(tells(STREAM + b"9\r\ndata: a\n\n\r\n"), limits=limits) as b:
        client = await b.get()
        assert last_event(client)["code"] == "worker_stalled"
        assert not client.complete


def anthropic_error(data: bytes) -> dict[str, Any]:
    told = json.loads(data)
    assert list(told) == ["type", "error", "request_id"]
    assert told["type"] == "error"
    assert list(told["error"]) == ["type", "message"]
    return told  # type: ignore[no-any-return]


@pytest.mark.parametrize(("stays", "kind"), [(False, "api_error"), (True, "timeout_error")])
async def test_broken_messages_stream_says_so_in_anthropics_words(stays: bool, kind: str) -> None:
    begun = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    async with bench(tells(STREAM + chunk(begun), stays=stays), limits=Limits(idle=0.3) if stays else Limits()) as b:
        client = await b.get((b"x-request-id", b"r7"), path="/v1/messages")
        name, _, data = client.body.removeprefix(begun).partition(b"\n")
        assert (name, data[:6], data[-2:]) == (b"event: error", b"data: ", b"\n\n")
        told = anthropic_error(data[6:])
        assert (told["error"]["type"], told["request_id"]) == (kind, "r7")
        assert not client.complete


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/%6Dessages", "/v1/messages?b=1"])
async def test_errors_of_a_turn_at_messages_are_anthropics(path: str) -> None:
    path, _, query = path.partition("?")
    async with bench("http://127.0.0.1:1") as b:
        request = (b"x-request-id", b"r7")
        bad = await b.get(request, (SESSION[0], b"a b"), path=path, query=query.encode())
        assert bad.status == 400
        told = anthropic_error(bad.body)
        assert (told["error"]["type"], told["request_id"]) == ("invalid_request_error", "r7")
        assert (bad.headers[b"request-id"], bad.headers[b"x-request-id"]) == (b"r7", b"r7")
        lost = await b.get(request, path=path, query=query.encode())
        assert (lost.status, lost.headers[b"retry-after"]) == (503, b"1")
        assert anthropic_error(lost.body)["error"]["type"] == "overloaded_error"
        other = await b.get((SESSION[0], b"a b"), path="/v1/messagesome")
        assert set(other.json["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"POST /v1/messages HTTP/1.1\r\n\r\n", 400, "invalid_request_error"),
        (b"POST /v1/messages?x HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_request_error"),
        (b"POST http://r/v1/messages HTTP/1.1\r\n\r\n", 400, "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70000 + b"\r\n\r\n", 431, "request_too_large"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\n", 408, "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{", 408, "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 200000000\r\n\r\n", 413, "request_too_large"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ntransfer-encoding: x\r\n\r\n", 400, "invalid_request_error"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\nrubbish\r\n\r\n", 400, ""),
        (b"POST /v1/chat HTTP/1.1\r\n\r\n", 400, ""),
    ],
)
async def test_what_is_no_request_to_messages_is_refused_in_its_shape(sent: bytes, status: int, kind: str) -> None:
    """`kind`: none where the path is not known, or another one."""
    limits = ClientLimits(head_wait=0.1, body_wait=0.1) if status == 408 else ClientLimits()
    async with bench(answers(OK), client_limits=limits) as b:
        client, _ = await b.entrance.connect()
        with contextlib.closing(client):
            await client.send(sent)
            answer = await client.answer()
            if answer.status == 200:
                answer = await client.answer()
            assert answer.status == status
            if kind:
                assert anthropic_error(answer.body)["error"]["type"] == kind
            else:
                assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "head",
    [
        b"content-type: application/json\r\ncontent-length: 100\r\n",
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n",
        b"content-type: text/event-stream\r\ncontent-length: 100\r\n",
        b"content-type: text/event-stream\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
    ],
)
async def test_what_is_no_plain_event_stream_is_only_cut(head: bytes) -> None:
    async with bench(tells(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + b"5\r\n", stays=False)) as b:
        client = await b.get()
        assert not client.complete
        assert client.body in (b"", b"5\r\n")
        assert b.outcomes() == {"broken": 1}


async def test_garbage_inside_the_body_breaks_the_stream() -> None:
    async with bench(tells(STREAM + b"9\r\ndata: a\n\n\r\nnot a chunk\r\n")) as b:
        client = await b.get()
        assert last_event(client)["code"] == "worker_stream_broken"
        assert not client.complete


async def test_close_delimited_answer_that_is_reset_is_broken() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", b"{}")
        await until(lambda: client.body)
        peer.reset()

    async with bench(script) as b:
        client = b.request().start()
        await client.finish()
        assert not client.complete
