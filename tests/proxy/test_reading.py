"""What the router reads of requests is no more than it needs: bodies reach the worker as they were sent, whatever it
thinks of them, and a session is found in them wherever a worker's own reader would find its field.
"""

from __future__ import annotations

import gzip
import json
import logging

import pytest

from app.sessions.identity import Identifier
from app.turn.request import Reading
from tests.support.bench import JSON, SESSION, Bench, bench
from tests.support.raw import OK, Peer, Worker, answers, until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

MIB = 1 << 20
HASH = "f" * 64
NIL = b"00000000-0000-0000-0000-000000000000"
RUN = "01234567-89ab-cdef-0123-456789abcdef"


def kind(text: bytes) -> tuple[bytes, bytes]:
    return (b"content-type", text)


def of_user() -> Reading:
    return Reading(identifier=Identifier(("dynamo", "body:user", "body:metadata.session_id")))


def counted(b: Bench, name: str) -> dict[str, int]:
    return {labels[0]: number for labels, number in getattr(b.metrics, name).cells.items() if number}


# -- bodies

BODIES = {
    "byte-order mark": b'\xef\xbb\xbf{"model": "m", "user": "u"}',
    "UTF-16": '{"model": "m", "user": "u"}'.encode("utf-16"),
    "NaN": b'{"model": "m", "top_p": NaN, "x": -Infinity, "user": "u"}',
    "half a surrogate pair": b'{"model": "m", "messages": [{"content": "cut emoji \\ud83d"}], "user": "u"}',
    "deep nesting": b'{"model": "m", "x": ' + b"[" * 3000 + b"]" * 3000 + b', "user": "u"}',
    "nvext is a list": b'{"model": "m", "nvext": [], "user": "u"}',
    "a rank is text": b'{"model": "m", "nvext": {"dp_rank": "1"}, "user": "u"}',
    "metadata is a list": b'{"model": "m", "metadata": [1], "user": "u"}',
    "stream is text": b'{"model": "m", "stream": "yes", "user": "u"}',
    "large": b'{"model": "m", "x": "' + b"A" * 5 * MIB + b'", "y": NaN, "user": "u"}',
    "of two the last": b'{"model": "x", "model": "m", "y": NaN, "user": "v", "user": "u"}',
}


@pytest.mark.parametrize("declared", [kind(b"application/json"), kind(b'Application/JSON; charset="utf-8"'), None])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_what_a_workers_reader_takes_is_taken(body: bytes, declared: tuple[bytes, bytes] | None) -> None:
    worker = Worker(answers(OK))
    async with bench(worker, reading=of_user()) as b:
        client = await b.get(*([declared] if declared else []), body=body)
        assert (client.status, client.headers[b"x-coatcheck-affinity"]) == (200, b"created")
        assert worker.requests[0].body == body
        assert await b.claim(b"u") is not None
        assert b.metrics.turns.cells["m", "completed"] == 1


@pytest.mark.parametrize(
    "body",
    [b"{", b"not json", b"[]", b"null", b'"text"', b'{"model": 5}', b'{"model":"\xff"}', b'{"x":' + b"[" * 90_000],
    ids=["cut", "words", "a list", "null", "a text", "model is a number", "not UTF-8", "nested without end"],
)
async def test_what_is_wrong_with_a_body_is_for_the_worker_to_say(body: bytes) -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 6\r\n\r\nworker"
    worker = Worker(answers(refusal))
    async with bench(worker, reading=of_user()) as b:
        for headers in ([JSON], [JSON, SESSION]):
            client = await b.get(*headers, body=body)
            assert (client.status, client.body) == (400, b"worker")
        assert [request.body for request in worker.requests] == [body, body]
        assert b.outcomes() == {"client_error": 2}
        assert counted(b, "bodies_unread") == ({} if body.startswith(b'{"model"') else {"malformed": 1})


async def test_a_body_that_is_too_much_to_look_through_goes_to_a_worker() -> None:
    body = b'{"x": [' + b"1," * MIB + b'NaN], "user": "u"}'
    worker = Worker(answers(OK))
    async with bench(worker, reading=of_user()) as b:
        assert (await b.get(JSON, body=body)).status == 200
        assert worker.requests[0].body == body
        assert counted(b, "bodies_unread") == {"large": 1}


UPLOADS = [
    b"multipart/form-data; boundary=json",
    b'multipart/form-data; boundary=x; name="a.json"',
    b"text/plain; profile=json",
    b"application/x-ndjson",
    b"application/jsonl",
    b"application/json-seq",
    b"application/json5",
    b"application/jsonlines+x",
    b"video/mp4;codecs=application/json",
]


@pytest.mark.parametrize("declared", UPLOADS)
async def test_only_the_media_type_says_that_a_body_is_json(declared: bytes) -> None:
    """Anything else is streamed, and not held in memory: its beginning is at the worker before its end is sent."""
    began = []

    async def script(peer: Peer) -> None:
        await peer.head()
        began.append(await peer.until(b"beginning"))
        await peer.send(OK)
        await peer.gone()

    async with bench(script, reading=Reading(body_limit=MIB)) as b:
        client = b.request(kind(declared), body=[b"beginning"], ends=False).start()
        await until(lambda: began)
        client.leave()
        await client.finish()


@pytest.mark.parametrize(
    "declared", [b"application/json", b"application/vnd.api+json; charset=utf-8", b"APPLICATION/JSON"]
)
async def test_json_is_read_whole_before_it_goes_on(declared: bytes) -> None:
    async with bench(answers(OK), reading=of_user()) as b:
        client = await b.get(kind(declared), body=[b'{"user": ', b'"u"}'])
        assert client.headers[b"x-coatcheck-affinity"] == b"created"


async def test_json_lines_are_passed_on() -> None:
    body = b'{"user": "u"}\n{"user": "v"}\n'
    worker = Worker(answers(OK))
    async with bench(worker, reading=of_user()) as b:
        for declared in (b"application/x-ndjson", b"application/json"):
            assert (await b.get(kind(declared), body=body)).status == 200
        assert [request.body for request in worker.requests] == [body, body]


# -- hints in it


@pytest.mark.parametrize("nvext", [b"[]", b'{"dp_rank": "1"}', b'{"backend_instance_id": ["w0"]}', b'"w0"'])
async def test_hints_of_another_type_are_ignored_and_counted(nvext: bytes) -> None:
    async with bench(answers(OK)) as b:
        for headers in ([JSON], [JSON, SESSION]):
            assert (await b.get(*headers, body=b'{"nvext": %b}' % nvext)).status == 200
        assert counted(b, "hints_ignored") == {"malformed": 2}


@pytest.mark.parametrize("session", [(), (SESSION,)])
async def test_hints_that_are_for_a_router_behind_us_are_passed_on_unjudged(
    session: tuple[tuple[bytes, bytes]],
) -> None:
    hints = [
        (b"x-dynamo-worker-instance-id", b"7587890123456789012"),
        (b"x-dynamo-dp-rank", b"many"),
        (b"x-dynamo-prefill-instance-id", b"9"),
    ]
    body = b'{"nvext": {"backend_instance_id": 7, "dp_rank": "x"}}'
    worker = Worker(answers(OK))
    async with bench(worker, reading=Reading(judges_hints=False)) as b:
        assert (await b.get(JSON, *hints, *session, body=body)).status == 200
        assert worker.requests[0].body == body
        for name, value in hints:
            assert b"\r\n%b: %b\r\n" % (name, value) in worker.heads[0]
        assert counted(b, "hints_ignored") == {}
    async with bench(answers(OK), answers(OK), reading=Reading(judges_hints=False)) as b:
        dry = await b.get(*hints, *session, (b"x-coatcheck-dry-run", b"true"))
        assert dry.json["because"] == "policy"


# -- ids in it


@pytest.mark.parametrize(
    "user", ["Zoë Müller", "two words", "x" * 300, "\ud83d", "日本" * 200, "null and void", "tab\there"]
)
async def test_an_id_from_the_body_is_free_text(user: str) -> None:
    async with bench(answers(OK), reading=of_user()) as b:
        bodies = [json.dumps({"user": user}).encode(), b'{"user": %b, "x": NaN}' % json.dumps(user).encode()]
        if "\ud83d" not in user:
            bodies.append(json.dumps({"user": f" {user}\n"}, ensure_ascii=False).encode("utf-16"))
        hows = [(await b.get(JSON, body=body)).headers[b"x-coatcheck-affinity"] for body in bodies]
        assert hows == [b"created"] + [b"cached"] * (len(bodies) - 1)
        other = await b.get(JSON, body=json.dumps({"user": user + "y"}).encode())
        assert other.headers[b"x-coatcheck-affinity"] == b"created"


async def test_a_compressed_body_whose_id_cannot_be_read_is_counted() -> None:
    body = gzip.compress(b'{"user": "u"}')
    worker = Worker(answers(OK))
    async with bench(worker, reading=of_user()) as b:
        coded = (b"content-encoding", b"gzip")
        for headers in ([JSON, coded], [coded], [JSON, coded, SESSION], [kind(b"audio/wav"), coded]):
            assert (await b.get(*headers, body=body)).status == 200
        assert (await b.get(JSON, (b"content-encoding", b"identity"), body=b'{"user": "u"}')).status == 200
        assert await b.claim(b"u") is not None
        assert counted(b, "bodies_unread") == {"compressed": 2}
        assert worker.requests[0].body == body
    async with bench(answers(OK), reading=Reading(identifier=Identifier(("dynamo",)))) as b:
        await b.get(JSON, coded, body=body)
        assert counted(b, "bodies_unread") == {}  # nothing was looked for in it


CLAUDE_CODES = {
    "words": f"user_{HASH}_account_{RUN}_session_abc",
    "words without an account": f"user_{HASH}_account__session_abc",
    "JSON": json.dumps({"device_id": HASH, "account_uuid": "", "session_id": "abc"}),
}


@pytest.mark.parametrize("user", CLAUDE_CODES.values(), ids=CLAUDE_CODES.keys())
async def test_claude_codes_user_id_names_its_session(user: str) -> None:
    """The same that its header names."""
    async with bench(answers(OK)) as b:
        client = await b.get(JSON, body=json.dumps({"metadata": {"user_id": user}}).encode())
        assert client.headers[b"x-coatcheck-affinity"] == b"created"
        client = await b.get((b"x-claude-code-session-id", b"abc"))
        assert client.headers[b"x-coatcheck-affinity"] == b"cached"


@pytest.mark.parametrize(
    "user", ["alice", "user_1", "{}", '{"session_id": 5}', '{"session_id": null}', "{", 5, None, ""]
)
async def test_another_user_id_is_no_session_unless_it_is_asked_for(user: object) -> None:
    body = json.dumps({"metadata": {"user_id": user}}).encode()
    async with bench(answers(OK)) as b:
        assert (await b.get(JSON, body=body)).headers[b"x-coatcheck-affinity"] == b"none"
    async with bench(answers(OK), reading=Reading(identifier=Identifier(("body:metadata.user_id",)))) as b:
        how = (await b.get(JSON, body=body)).headers[b"x-coatcheck-affinity"]
        assert how == (b"none" if user in ("{}", 5, None, "") else b"created")


# -- ids that are none, and what is not read

NO_IDS = {
    "template": [
        b"{{CONVERSATION_ID}}",
        b"{{ a b }}",
        b"chat-${X}",
        b"${X:-a b}",
        b"$(uuidgen)",
        b"<session-id>",
        b"{id}",
        b"$ID",
    ],
    "nothing": [b"null", b"NULL", b"undefined", b"None", b"nil", b"NaN", b"[object Object]", b'""', b"0" * 32, NIL],
}


@pytest.mark.parametrize(("why", "value"), [(why, value) for why, values in NO_IDS.items() for value in values])
async def test_ids_that_are_none(why: str, value: bytes) -> None:
    async with bench(answers(OK), reading=of_user()) as b:
        body = json.dumps({"user": value.decode()}).encode()
        clients = [
            await b.get((SESSION[0], value)),
            await b.get(JSON, body=body),
            await b.get((SESSION[0], value), SESSION),
            await b.get(SESSION, (b"x-dynamo-parent-session-id", value)),
        ]
        assert [client.status for client in clients] == [200] * 4
        assert [client.headers[b"x-coatcheck-affinity"] for client in clients] == [
            b"none",
            b"none",
            b"created",
            b"cached",
        ]
        assert counted(b, "ids_ignored") == {why: 4}
        assert counted(b, "unnamed") == {"/v1/chat/completions": 2}


@pytest.mark.parametrize(
    "value", [b"nullable", b"none-1", b"<a@b.example>", b"$a1b2c3", b"{01234567-89ab}", b"%41", b"0"]
)
async def test_ids_that_only_look_like_none(value: bytes) -> None:
    async with bench(answers(OK)) as b:
        assert (await b.get((SESSION[0], value))).headers[b"x-coatcheck-affinity"] == b"created"
        assert counted(b, "ids_ignored") == {}


@pytest.mark.parametrize(
    "header",
    [
        *("session_id", "session-id", "thread_id", "thread-id", "conversation_id", "conversation-id"),
        *("x-session-affinity", "x-session-id", "x-claude-code-session-id", "x-dynamo-session-id"),
    ],
)
async def test_the_headers_that_agents_send_are_read_in_every_spelling(header: str) -> None:
    worker = Worker(answers(OK))
    async with bench(worker) as b:
        assert (await b.get((header.encode(), b"s1"))).headers[b"x-coatcheck-affinity"] == b"created"
        assert (await b.get(SESSION)).headers[b"x-coatcheck-affinity"] == b"cached"
        assert b"\r\n%b: s1\r\n" % header.encode() in worker.heads[0]


async def test_a_header_that_is_known_and_not_read_is_named_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    reading = Reading(identifier=Identifier(("header:X-Mine",)))
    async with bench(answers(OK), reading=reading) as b:
        with caplog.at_level(logging.WARNING, "coatcheck.turn"):
            for _ in range(3):
                await b.get(SESSION)
            await b.get(SESSION, (b"x-mine", b"m"))  # it has a session
            await b.get((b"x-openwebui-chat-id", b"c"))
        assert counted(b, "headers_unread") == {"x-dynamo-session-id": 3, "x-openwebui-chat-id": 1}
        assert len(caplog.records) == 2


async def test_turns_without_a_session_are_counted_by_path() -> None:
    async with bench(answers(OK)) as b:
        for path in ("/v1/completions", "/v1/messages", "/v1/messages", "/v1/responses/resp_1", "/v1/responses/resp_2"):
            await b.get(path=path)
        await b.get(SESSION)
        await b.get((b"x-coatcheck-dry-run", b"true"))
        assert counted(b, "unnamed") == {"/v1/completions": 1, "/v1/messages": 2, "other": 2}
