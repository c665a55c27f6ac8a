"""Pages of other sites: the CORS protocol, where the operator allows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.test_paths import asked, code, fleet, named, says
from tests.support.http_model import Answer
from tests.support.raw import Live, get, post, tells, to_each

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

PAGE = "https://chat.example.com"
ORIGIN = b"origin: https://chat.example.com"
OTHER = b"origin: https://evil.example"
ASKS = (
    b"access-control-request-method: POST",
    b"access-control-request-headers: authorization,content-type,x-dynamo-session-id",
)
OWN_WORD = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\naccess-control-allow-origin: *\r\naccess-control-allow-credentials: true"
    b"\r\nvary: accept\r\n\r\n{}"
)


def options(target: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"OPTIONS %b HTTP/1.1" % target, b"host: r.example", *lines, b"", b""])


def cors(answer: Answer) -> dict[bytes, bytes]:
    pairs = [pair for pair in answer.headers if pair[0].startswith(b"access-control-")]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def vary(answer: Answer) -> list[bytes]:
    return [value for name, value in answer.headers if name == b"vary"]


def readable(answer: Answer) -> bool:
    """By a page of PAGE, with all that is ours."""
    said = cors(answer)
    exposed = {name.strip().lower() for name in said.get(b"access-control-expose-headers", b"").split(b",")}
    ours = {name for name, _ in answer.headers if name.startswith(b"x-coatcheck-") or name == b"x-request-id"}
    assert b"Origin" in vary(answer)
    return said.get(b"access-control-allow-origin") == PAGE.encode() and ours <= exposed


@pytest.mark.parametrize("allowed", [(PAGE,), ("*",), ("https://a.example", "HTTPS://Chat.Example.Com:443/")])
async def test_preflights_are_answered_before_any_key(allowed: tuple[str, ...], tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice sha256:" + "0" * 64)
    async with fleet(tells(b""), allowed_origins=allowed, api_keys=keys) as (live, (worker,)):
        for target in (b"/v1/chat/completions", b"/v1/models", b"/v1/models/m", b"/tokenize", b"/nowhere"):
            answer = await asked(live, options(target, ORIGIN, *ASKS))
            assert (answer.status, answer.body) == (204, b"")
            said = cors(answer)
            assert said[b"access-control-allow-origin"] == PAGE.encode()
            assert b"POST" in said[b"access-control-allow-methods"]
            assert said[b"access-control-allow-headers"] == b"authorization,content-type,x-dynamo-session-id"
            assert b"access-control-allow-credentials" not in said
            assert b"Origin" in vary(answer)
        refused = await asked(live, post(ORIGIN))
        assert code(refused) == (401, "invalid_api_key")
        assert readable(refused)
        assert worker.nothing_came()


async def test_a_preflight_leaves_the_connection_for_the_request() -> None:
    async with (
        fleet(tells(OWN_WORD), allowed_origins=(PAGE,)) as (live, _),
        live.client() as client,
    ):
        await client.send(options(b"/v1/x", ORIGIN, *ASKS))
        assert (await client.answer(b"OPTIONS")).status == 204
        await client.send(post(ORIGIN))
        assert (await client.answer()).status == 200


async def test_our_word_replaces_the_workers() -> None:
    async with fleet(to_each(lambda peer, _: peer.send(OWN_WORD)), allowed_origins=(PAGE,)) as (live, _):
        answer = await asked(live, post(ORIGIN))
        assert readable(answer)
        assert b"accept" in vary(answer)
        assert b"access-control-allow-credentials" not in cors(answer)
        assert cors(await asked(live, post(OTHER))) == {}
        assert cors(await asked(live, post()))[b"access-control-allow-origin"] == b"*", "no browser asks"


async def test_whatever_answers_can_be_read() -> None:
    async with fleet(to_each(lambda peer, _: peer.send(named("m"))), allowed_origins=(PAGE,)) as (live, _):
        for request, status in (
            (get(b"/v1/models", ORIGIN), 200),
            (get(b"/v1/models/m", ORIGIN), 200),
            (get(b"/health", ORIGIN), 200),
            (get(b"/nowhere", ORIGIN), 404),
            (post(ORIGIN, target=b"/v1/models"), 405),
            (post(ORIGIN, b"x-dynamo-session-id: a b"), 400),
            (get(b"/v1/x/../y", ORIGIN), 400),
            (post(ORIGIN, b"transfer-encoding: gzip"), 400),
            (post(ORIGIN, b"x-long: " + b"x" * 70_000), 431),
        ):
            answer = await asked(live, request)
            assert answer.status == status
            assert readable(answer), request[:60]
            assert cors(await asked(live, request.replace(ORIGIN, OTHER))) == {}


async def test_pages_reach_nothing_of_the_admins() -> None:
    async with fleet(to_each(lambda peer, _: peer.send(says(200, b"{}"))), allowed_origins=("*",)) as (live, _):
        for target in (b"/admin/sessions", b"/sleep", b"/v1/load_lora_adapter"):
            assert cors(await asked(live, get(target, ORIGIN))) == {}
            assert cors(await asked(live, options(target, ORIGIN, *ASKS))) == {}


async def test_other_origins_are_told_which_setting_it_is() -> None:
    async with fleet(tells(b""), allowed_origins=(PAGE,)) as (live, (worker,)):
        for origin in (OTHER, b"origin: null", ORIGIN + b".evil", b"origin: http://chat.example.com"):
            answer = await asked(live, options(b"/v1/x", origin, *ASKS))
            assert (code(answer), cors(answer)) == ((403, "forbidden"), {})
            assert b"allowed-origins" in answer.body
        assert worker.nothing_came()


async def test_a_page_may_ask_a_router_of_its_own_network() -> None:
    with Live(workers=0, absent=1, allowed_origins=("*",)) as live:
        asks = (ORIGIN, *ASKS, b"access-control-request-private-network: true")
        assert cors(await asked(live, options(b"/v1/x", *asks)))[b"access-control-allow-private-network"] == b"true"
        odd = (ORIGIN, ASKS[0], b"access-control-request-headers: a b\x0bc")
        answer = await asked(live, options(b"/v1/x", *odd))
        assert answer.status == 400 or b"access-control-allow-headers" not in cors(answer)


async def test_without_the_setting_nothing_changes() -> None:
    async with fleet(to_each(lambda peer, _: peer.send(OWN_WORD))) as (live, (worker,)):
        for request in (post(ORIGIN), options(b"/v1/x", ORIGIN, *ASKS)):
            answer = await asked(live, request)
            assert cors(answer)[b"access-control-allow-origin"] == b"*"
            assert vary(answer) == [b"accept"]
        assert [request.method for request in worker.requests] == [b"POST", b"OPTIONS"]
        assert cors(await asked(live, get(b"/v1/models", ORIGIN))) == {}
        assert json.loads((await asked(live, options(b"/v1/models", ORIGIN, *ASKS))).body)["error"]
