"""What a session is, sentence by sentence of `docs/sessions.md`: whose it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.config import Settings
from tests.support.room import EVERY, JSON, Room, Rooms, Sentences

says = Sentences()


SOURCES = (
    *("x-dynamo-session-id", "x-claude-code-session-id"),
    *("thread-id", "thread_id", "session-id", "session_id", "conversation-id", "conversation_id"),
    *("x-session-id", "x-session-affinity"),
)


def of_user_id(user: str) -> bytes:
    return json.dumps({"metadata": {"user_id": user}}).encode()


@says("The first header in the order of `session-from` that has a value names the session; an empty one is absent.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        for first, source in enumerate(SOURCES):
            ids = {name: room.new() for name in SOURCES[first:]}
            empty = dict.fromkeys(SOURCES[:first], " ")
            assert (await room.turn(headers=empty | ids)).how == "created"
            assert (await room.turn(headers={source: ids[source]}, at=1)).how == "stored"
            assert [name for name, value in ids.items() if await room.claim(value)] == [source]
    async with rooms.open(session_from=("x-chat", "thread-id")) as room:
        await room.turn("a", headers={"thread-id": "b", "X-Chat": "c"})
        assert [await room.claim(name) is not None for name in "abc"] == [False, False, True]


@says("Whichever header says it, the same id is the same session.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        turns = [await room.turn(headers={name: "same"}, at=number % 2) for number, name in enumerate(SOURCES)]
        assert len({turn.worker for turn in turns}) == 1
        assert [turn.how for turn in turns].count("created") == 1


@says("A child agent of Claude Code has a session of its own, although it says the session id of its parent.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        run = {"x-claude-code-session-id": "run"}
        assert (await room.turn(headers=run)).how == "created"
        assert (await room.turn(headers=run | {"x-claude-code-agent-id": "a"})).how == "created"
        assert (await room.turn(headers=run | {"x-claude-code-agent-id": "b"}, at=1)).how == "created"
        assert (await room.turn(headers=run | {"x-claude-code-agent-id": "a"}, at=1)).how == "stored"
        await room.turn(headers=run | {"x-claude-code-agent-id": "a"}, final=True)
        standing = [await room.claim(*parts) is not None for parts in (("run",), ("run", "a"), ("run", "b"))]
        assert standing == [True, False, True]


@says("Fields of the body name a session only where `session-from` lists them, and only if no header does.")
async def _(rooms: Rooms) -> None:
    fields: dict[str, Any] = {"prompt_cache_key": "k", "user": "u", "metadata": {"session_id": "m"}}
    async with rooms.open() as room:
        turn = await room.turn(headers=JSON, body=json.dumps(fields).encode())
        assert (turn.how, room.calls()["create"]) == ("none", 0)
    order = ("body:metadata.session_id", "x-dynamo-session-id", "body:user", "body:prompt_cache_key")
    async with rooms.open(session_from=order) as room:

        async def named(session: str | None = None, **body: object) -> str | None:
            turn = await room.turn(session, headers=JSON, body=json.dumps(body).encode())
            assert turn.status == 200
            found = [name for name in ("h", "k", "u", "m") if await room.claim(name)]
            for name in found:
                claim = await room.claim(name)
                assert claim is not None
                await room.truth.close(claim)
            assert len(found) <= 1
            return found[0] if found else None

        assert await named("h", **fields) == "h"
        assert await named(**fields) == "m"
        assert await named(user="u", prompt_cache_key="k") == "u"
        assert await named(user=" ", prompt_cache_key="k", metadata=None) == "k"
        assert await named(user=7, metadata=["m"]) is None
        assert await named() is None


@says("The session in a `metadata.user_id` of Claude Code is the one that its header names, and needs no setting.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        words = "user_0a1b_account_2c3d_session_run"
        assert (await room.turn(headers=JSON, body=of_user_id(words))).how == "created"
        assert (await room.turn(headers=JSON, body=of_user_id(json.dumps({"session_id": "run"})), at=1)).how == "stored"
        assert (await room.turn(headers={"x-claude-code-session-id": "run"}, at=1)).how == "cached"
        assert (await room.turn(headers=JSON, body=of_user_id("alice"))).how == "none"


@says("A request id never names a session.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        for name in ("x-request-id", "request-id", "traceparent", "x-correlation-id"):
            assert (await room.turn(headers={name: "id"})).how == "none"
            assert await room.claim("id") is None
            with pytest.raises(ValidationError, match="cannot name a session"):
                Settings.flat(session_from=(name.title(),))


@says("A request that names no session is placed by itself, and nothing is claimed.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        turns = [await room.turn(final=final) for final in (False, True, False, True)]
        assert [turn.how for turn in turns] == ["none"] * 4
        assert {turn.worker for turn in turns} == {"w0", "w1"}
        assert not {"create", "get", "close"} & room.calls().keys()


@says(
    "A header's id is 1 to 256 visible ASCII characters; any other, or two that differ, are answered 400, and nothing "
    "runs."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        assert (await room.turn("~" * 256)).how == "created"
        assert (await room.turn("  padded ")).how == "created"
        assert await room.claim("padded")
        before = room.served_count
        for bad in ("a" * 257, "a b", "caf\xe9", "tab\tid"):
            assert (await room.turn(bad)).refusal == (400, "invalid_session_id")
        assert (await room.turn("\x7f")).refusal == (400, "invalid_request")  # no header of HTTP has it in it
        assert (await room.turn("one", again=[("x-dynamo-session-id", "two")])).refusal == (400, "invalid_session_id")
        assert (await room.turn("one", again=[("x-dynamo-session-id", " one")])).status == 200
        assert room.served_count == before + 1


@says("A field's id is any text, however long.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(session_from=("body:user",)) as room:
        for text in ("Zoë Müller", "two words", "x" * 100_000, "日本\n語"):
            body = json.dumps({"user": text}).encode()
            first = await room.turn(headers=JSON, body=body)
            again = await room.turn(headers=JSON, body=body, at=1)
            assert (first.how, again.how, again.worker) == ("created", "stored", first.worker)
        async with room.admin() as client:
            for text in ("Zoë Müller", "x" * 1000):
                await room.turn(headers=JSON, body=json.dumps({"user": text}).encode())
                assert (await client.get("/admin/session", params={"session": text})).status_code == 200


@says(
    "Unfilled templates (`{{ID}}`, `${ID}`, `$(uuidgen)`), `null`, `undefined`, `none` and the nil UUID are no ids: as "
    "if absent, and counted."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(replicas=1) as room:
        none = ("{{ID}}", "${ID}", "$(uuidgen)", "null", "undefined", "None", "00000000-0000-0000-0000-000000000000")
        for value in none:
            assert (await room.turn(value, final=True)).how == "none"
            assert await room.claim(value) is None
            assert (await room.turn(value, headers={"x-session-id": "s"})).status == 200
        assert await room.claim("s") is not None
        assert dict(room.replicas[0].metrics.ids_ignored.cells) == {("template",): 6, ("nothing",): 8}


@says(
    "A body is found to name a session wherever a worker could read it: with a byte-order mark, in UTF-16, with `NaN`, "
    "half a surrogate pair or deep nesting; of two equal fields the last one counts."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(session_from=("body:user",)) as room:
        bodies = [
            b'{"user": "u"}',
            b'\xef\xbb\xbf{"user": "u"}',
            '{"user": "u"}'.encode("utf-16"),
            b'{"x": NaN, "user": "u"}',
            b'{"x": "\\ud83d", "user": "u"}',
            b'{"x": ' + b"[" * 2000 + b"]" * 2000 + b', "user": "u"}',
            b'{"user": "v", "user": "u"}',
            b'{"user": "v", "x": NaN, "us\\u0065r": "u"}',
        ]
        turns = [await room.turn(headers=JSON, body=body, at=at % 2) for at, body in enumerate(bodies)]
        assert [turn.how for turn in turns] == ["created", "stored"] + ["cached"] * (len(bodies) - 2)


@says(
    "`X-Dynamo-Session-Final` is yes as `1`, `true`, `yes` or `on` in any case; every other value is no, and counted "
    "unless it is a plain no."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(replicas=1) as room:
        unclear = room.replicas[0].metrics.final_unclear.cells
        words = {"1": 1, "TRUE": 1, "Yes": 1, " on ": 1, "0": 0, "False": 0, "no": 0, "OFF": 0, "": 0}
        for word, final in words.items():
            await room.turn("s", headers={"x-dynamo-session-final": word})
            assert (await room.claim("s") is None) == bool(final), word
        assert unclear[()] == 0
        for number, word in enumerate(("2", "final", "y", "true, false"), 1):
            await room.turn("s", headers={"x-dynamo-session-final": word})
            assert await room.claim("s") is not None, word
            assert unclear[()] == number
        await room.turn("s", final=True, again=[("x-dynamo-session-final", "no")])
        assert await room.claim("s") is not None
        assert unclear[()] == 5


# -- tenants


@says("Without API keys all clients are one tenant, whatever they send as a key.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        first = await room.turn("s", key="one")
        second = await room.turn("s", key="two", at=1)
        assert (second.worker, second.how) == (first.worker, "stored")


@says("With API keys (`api-keys`) the same id of two tenants is two sessions, which never meet.", over=EVERY)
async def _(rooms: Rooms) -> None:
    file, (alice, bob, also_alice) = rooms.keys("alice", "bob", "alice")
    async with rooms.open(api_keys=file) as room:
        first = await room.turn("s", key=alice)
        assert (await room.turn("s", key=bob, at=1)).how == "created"
        assert (await room.turn("s", headers={"x-api-key": also_alice}, at=1)).how == "stored"
        places = {first.worker}
        for _ in range(3):
            places.add((await room.turn("s", key=alice, at=1)).worker)
        assert places == {first.worker}
        ours, theirs = await room.claim("s", tenant="alice"), await room.claim("s", tenant="bob")
        assert ours is not None
        assert theirs is not None
        assert ours.value.nonce != theirs.value.nonce
        assert await room.claim("s") is None


@says("A final turn of a stranger is served as theirs and changes nothing for the owner.")
async def _(rooms: Rooms) -> None:
    file, (alice, bob) = rooms.keys("alice", "bob")
    async with rooms.open(api_keys=file) as room:
        first = await room.turn("s", key=alice)
        before = await room.mark("s", tenant="alice")
        for at in (0, 1):
            assert (await room.turn("s", key=bob, at=at, final=True)).status == 200
            assert (await room.turn("s", key="ck-guess", at=at, final=True)).status == 401
            assert (await room.turn("s", at=at, final=True)).status == 401
        assert await room.mark("s", tenant="alice") == before
        again = await room.turn("s", key=alice)
        assert (again.worker, again.how) == (first.worker, "cached")
        assert await room.claim("s", tenant="bob") is None


@says("A request without a valid key is answered 401, always alike, and reaches no session and no worker.")
async def _(rooms: Rooms) -> None:
    file, (alice,) = rooms.keys("alice")
    async with rooms.open(api_keys=file) as room:
        wrong = [alice + "x", alice[:-1], "ck-" + "A" * 43, alice.upper()]
        refusals = [await room.turn("s", key=key) for key in wrong]
        refusals += [await room.turn("s", headers={"x-api-key": key}) for key in wrong]
        refusals.append(await room.turn("s", headers={"authorization": f"Basic {alice}"}))
        for turn in refusals:
            assert turn.refusal == (401, "invalid_api_key")
            assert turn.json["error"]["type"] == "authentication_error"
            assert turn.said("www-authenticate") == "Bearer"
        assert len({turn.body for turn in refusals[:-1]}) == 1
        assert room.served_count == 0
        assert not {"create", "get", "close"} & room.calls().keys()
        async with room.admin() as client:
            answer = await client.get("/v1/models")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@says("The client's key goes on to the worker; with a key for the workers (`worker-api-key`) that one goes instead.")
async def _(rooms: Rooms) -> None:
    file, (alice,) = rooms.keys("alice")

    async def arrives(room: Room, **how: object) -> dict[str, str]:
        assert (await room.turn("s", **how)).status == 200
        (turn,) = room.workers[0].turns
        room.workers[0].turns.clear()
        return {name: turn[name] for name in ("authorization", "x-api-key") if name in turn}

    async with rooms.open(workers=1, replicas=1, api_keys=file) as room:
        assert await arrives(room, key=alice) == {"authorization": f"Bearer {alice}"}
        assert await arrives(room, headers={"x-api-key": alice}) == {"x-api-key": alice}
    keyed: tuple[dict[str, Any], ...] = ({"api_keys": file}, {})
    for keys in keyed:
        async with rooms.open(workers=1, replicas=1, worker_api_key="sk-worker", **keys) as room:
            assert await arrives(room, key=alice) == {"authorization": "Bearer sk-worker"}
            assert await arrives(room, headers={"x-api-key": alice}) == {"authorization": "Bearer sk-worker"}
    own = file.with_suffix(".worker")
    own.write_text("sk-file\n")
    async with rooms.open(workers=1, replicas=1, worker_api_key_file=own) as room:
        assert await arrives(room) == {"authorization": "Bearer sk-file"}


CREDENTIALS = {"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "sec-websocket-protocol"}


async def _arrives(room: Room, *pairs: tuple[str, str], **how: Any) -> dict[str, str]:
    turn = await room.turn("s", again=list(pairs), **how)
    assert (turn.status, room.served_count) == (200, 1)
    (seen,) = room.workers[0].turns
    room.workers[0].turns.clear()
    return {name: seen[name] for name in seen if name in CREDENTIALS}


@says("One valid key is enough, whatever stands beside it; what is no valid key here reaches no worker.")
async def _(rooms: Rooms) -> None:
    file, (alice,) = rooms.keys("alice")
    own, foreign = ("authorization", f"Bearer {alice}"), ("authorization", "Bearer sk-other")
    others = [("api-key", "k"), ("x-goog-api-key", "k"), ("cookie", "sso=1")]
    given = [
        ([foreign, ("x-api-key", alice)], {"x-api-key": alice}),
        ([("x-api-key", "sk-ant"), own], {"authorization": f"Bearer {alice}"}),
        ([foreign, own], {"authorization": f"Bearer {alice}"}),
        ([own, foreign], {"authorization": f"Bearer {alice}"}),
        ([("authorization", "Basic eDp5"), own, *others], {"authorization": f"Bearer {alice}"}),
    ]
    async with rooms.open(workers=1, replicas=1, api_keys=file) as room:
        for pairs, expected in given:
            assert await _arrives(room, *pairs) == expected
        assert await room.claim("s", tenant="alice") is not None
    async with rooms.open(workers=1, replicas=1, api_keys=file, worker_api_key="sk-worker") as room:
        for pairs, _ in given:
            assert await _arrives(room, *pairs) == {"authorization": "Bearer sk-worker"}


@says("Valid keys of two tenants in one request are refused like none.")
async def _(rooms: Rooms) -> None:
    file, (alice, bob) = rooms.keys("alice", "bob")
    async with rooms.open(workers=1, replicas=1, api_keys=file) as room:
        for second in (("x-api-key", bob), ("authorization", f"Bearer {bob}")):
            turn = await room.turn("s", key=alice, again=[second])
            assert turn.refusal == (401, "invalid_api_key")
            assert "2 tenants" in turn.json["error"]["message"]
        assert room.served_count == 0


@says("A page's WebSocket may say its key as the protocol `openai-insecure-api-key.KEY`; its worker gets a header.")
async def _(rooms: Rooms) -> None:
    file, (alice,) = rooms.keys("alice")
    page: dict[str, Any] = {"method": "GET", "path": "/v1/realtime", "body": b""}
    offer = [("connection", "upgrade"), ("upgrade", "websocket")]
    said = ("sec-websocket-protocol", f"realtime, openai-insecure-api-key.{alice}, openai-beta.realtime-v1")
    clean = {"sec-websocket-protocol": "realtime, openai-beta.realtime-v1"}
    async with rooms.open(workers=1, replicas=1, api_keys=file) as room:
        assert await _arrives(room, *offer, said, **page) == {"authorization": f"Bearer {alice}"} | clean
        wrong = ("sec-websocket-protocol", f"realtime, openai-insecure-api-key.{alice}x")
        assert (await room.turn("s", again=[*offer, wrong], **page)).refusal == (401, "invalid_api_key")
    settings: tuple[dict[str, Any], ...] = ({"api_keys": file}, {})
    for each in settings:
        async with rooms.open(workers=1, replicas=1, worker_api_key="sk-worker", **each) as room:
            assert await _arrives(room, *offer, said, **page) == {"authorization": "Bearer sk-worker"} | clean
    async with rooms.open(workers=1, replicas=1) as room:
        assert await _arrives(room, *offer, said, **page) == {said[0]: said[1]}


@pytest.mark.asyncio(loop_factories=["uvloop"])
@says.shown
async def test_what_a_session_is(sentence: str, rooms: Rooms) -> None:
    await says[sentence](rooms)
