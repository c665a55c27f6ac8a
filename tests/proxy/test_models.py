"""`/v1/models`, whatever a worker does."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from app.sessions.tenants import new_key
from tests.proxy.test_paths import asked, code, fleet, named, said, says
from tests.support.http_model import Request
from tests.support.raw import Live, Peer, get, tells, to_each, until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

WITHIN = 5.0
"""Seconds that a worker has here: a second and a half may be too little for the good one on a busy machine."""
BUSY = 10.0
"""That the machine may add."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


async def hangs(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def drips(peer: Peer) -> None:
    await peer.request()
    await peer.send(HEAD + b"content-length: 100000\r\n\r\n")
    while True:
        await peer.send(b" ")
        await asyncio.sleep(0.2)


async def drips_its_head(peer: Peer) -> None:
    await peer.request()
    for byte in HEAD * 100:
        await peer.send(bytes([byte]))
        await asyncio.sleep(0.2)


async def floods(peer: Peer) -> None:
    await peer.request()
    await peer.send(HEAD + b"connection: close\r\n\r\n")
    while True:
        await peer.send(b" " * (1 << 20))


async def is_too_long(peer: Peer) -> None:
    await peer.request()
    entries = b",".join([b'{"id":"m%d"}' % number for number in range(100_000)])
    await peer.send(says(200, b'{"data":[%b]}' % entries))


async def takes_no_requests(peer: Peer) -> None:
    await asyncio.sleep(60)


WRONG = {script.__name__: script for script in (hangs, drips, drips_its_head, floods, is_too_long, takes_no_requests)}


def listed(body: bytes) -> list[str]:
    return [entry["id"] for entry in json.loads(body)["data"]]


@pytest.mark.parametrize("wrong", WRONG)
async def test_one_worker_costs_no_more_than_is_promised(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fleet.models._WITHIN", WITHIN)
    async with fleet(WRONG[wrong], to_each(_good)) as (live, _):
        began = time.monotonic()
        answer = await asked(live, get(b"/v1/models"))
        assert (answer.status, listed(answer.body)) == (200, ["good"])
        assert time.monotonic() - began < WITHIN + BUSY
        began = time.monotonic()
        for _ in range(10):
            assert listed((await asked(live, get(b"/v1/models"))).body) == ["good"]
        assert time.monotonic() - began < BUSY, "a worker that was late is waited for again"


async def _good(peer: Peer, request: Request) -> None:
    await peer.send(named("good"))


async def test_no_list_stops_the_streams() -> None:
    lags: list[float] = []
    while not lags or (min(lags) >= 0.5 and len(lags) < 5):  # a busy machine stops them now and then, a list each time
        async with fleet(floods, is_too_long) as (live, _):
            before = await _lag(live)
            assert code(await asked(live, get(b"/v1/models"))) == (502, "worker_bad_response")
            lags.append(await _lag(live) - before)
    assert min(lags) < 0.5


async def _lag(live: Live) -> float:
    return (await live.samples())["coatcheck_loop_lag_seconds_sum"]


@pytest.mark.parametrize(
    ("scripts", "status", "body"),
    [
        ([says(403, b'{"error":"quota"}')], 403, b'{"error":"quota"}'),
        ([says(401, b"who?", b"text/plain")], 401, b"who?"),
        ([says(500, b"oops"), says(429, b"slow")], 429, b"slow"),
        ([says(500, b"oops")], 500, b"oops"),
        ([says(500, b"oops"), named()], 200, b'{"object":"list","data":[]}'),
    ],
)
async def test_what_workers_answer_is_told_as_it_was(scripts: list[bytes], status: int, body: bytes) -> None:
    async with fleet(*map(tells, scripts)) as (live, _):
        answer = await asked(live, get(b"/v1/models", b"x-request-id: me"))
        assert (answer.status, answer.body) == (status, body)
        assert (b"x-request-id", b"me") in answer.headers


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (tells(b"", stays=False), (502, "worker_bad_response")),
        (tells(says(200, b"[1]")), (502, "worker_bad_response")),
        (tells(says(200, b'{"data":[{"id":"\xff"}]}')), (502, "worker_bad_response")),
        (tells(b"HTTP/1.1 302 X\r\nlocation: http://evil/\r\ncontent-length: 0\r\n\r\n"), (502, "worker_bad_response")),
        (hangs, (504, "worker_timeout")),
    ],
)
async def test_why_there_is_no_list(script: Any, expected: tuple[int, str]) -> None:
    async with fleet(script) as (live, _):
        answer = await asked(live, get(b"/v1/models"))
        assert code(answer) == expected
        assert b"x-request-id" in dict(answer.headers)


async def test_nobody_is_there() -> None:
    with Live(workers=0, absent=2) as live:
        assert code(await asked(live, get(b"/v1/models"))) == (503, "worker_unreachable")


async def test_entries_pass_as_they_are() -> None:
    body = b'{"data":[{"id":"a","big":123456789012345678901234567890,"x":{"y":[1.50]}},{"no":1},7,{"id":5}]}'
    async with fleet(tells(says(200, body)), tells(named("a", "b"))) as (live, _):
        answer = await asked(live, get(b"/v1/models"))
        first, second = json.loads(answer.body)["data"]
        assert first == {"id": "a", "big": 123456789012345678901234567890, "x": {"y": [1.5]}}
        assert second["id"] == "b"


@pytest.mark.parametrize("target", [b"/v1/models", b"/v1/models/m"])
async def test_the_clients_leaving_ends_the_work(target: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fleet.models._WITHIN", 60.0)  # which would end it as well
    async with fleet(hangs) as (live, (worker,)):
        client = await live.connect()
        await client.send(get(target))
        await until(lambda: worker.requests)
        began = time.monotonic()
        client.close()
        await until(lambda: worker.peers[0].ended)
        assert time.monotonic() - began < 10


async def test_with_which_key_workers_are_asked(tmp_path: Path) -> None:
    alice, line = new_key("alice")
    file = tmp_path / "keys"
    file.write_text(line)
    own = b"authorization: Bearer " + alice.encode()
    cases: list[tuple[dict[str, Any], list[bytes], list[bytes], list[bytes]]] = [
        ({}, [b"authorization: Bearer sk", b"x-api-key: k"], [b"Bearer sk"], [b"k"]),
        ({"worker_api_key": "sk-w"}, [b"authorization: Bearer sk", b"x-api-key: k"], [b"Bearer sk-w"], []),
        ({"api_keys": file}, [own, b"x-api-key: foreign"], [own.partition(b": ")[2]], []),
        ({"api_keys": file, "worker_api_key": "sk-w"}, [own, b"x-api-key: foreign"], [b"Bearer sk-w"], []),
    ]
    for settings, given, authorization, key in cases:
        async with fleet(to_each(_good), **settings) as (live, (worker,)):
            for target in (b"/v1/models", b"/v1/models/good"):
                assert (await asked(live, get(target, *given, b"cookie: c"))).status == 200
            for request in worker.requests:
                assert (said(request, b"authorization"), said(request, b"x-api-key")) == (authorization, key)
                assert not said(request, b"cookie")
            if "api_keys" in settings:
                for target in (b"/v1/models", b"/v1/models/good", b"/v1/models/x/ready"):
                    assert code(await asked(live, get(target))) == (401, "invalid_api_key")
                assert len(worker.requests) == 2


# -- from memory, and aliases

ASKED: dict[str, Any] = {"models_interval": 30}


def counts(worker: Any) -> int:
    return len(worker.requests)


async def test_lists_are_answered_from_memory_whatever_became_of_the_workers() -> None:
    entry = {"id": "org/m", "max_model_len": 4096, "parent": None}
    async with fleet(tells(says(200, json.dumps({"data": [entry]}).encode())), tells(named("b")), **ASKED) as (
        live,
        workers,
    ):
        await until(lambda: _remembers(live, workers, ["org/m", "b"]))
        before = [*map(counts, workers)]
        for worker in workers:
            await worker.die()
        assert json.loads((await asked(live, get(b"/v1/models"))).body)["data"][0] == entry
        for target in (b"/v1/models/org/m", b"/v1/models/org%2Fm", b"/v1/models/org%2fm"):
            answer = await asked(live, get(target))
            assert (answer.status, json.loads(answer.body)) == (200, entry)
        assert [*map(counts, workers)] == before


async def _remembers(live: Live, workers: list[Any], models: list[str]) -> bool:
    """Nobody is asked for the list."""
    before = [*map(counts, workers)]
    return await _knows(live, models) and [*map(counts, workers)] == before


async def _knows(live: Live, models: list[str], *key: bytes) -> bool:
    answer = await asked(live, get(b"/v1/models", *key))
    return answer.status == 200 and listed(answer.body) == models


async def test_a_worker_that_shows_its_list_to_clients_keys_only_is_asked_with_them() -> None:
    async def keyed(peer: Peer, request: Request) -> None:
        await peer.send(named("theirs") if said(request, b"authorization") else says(401, b"who?"))

    async with fleet(to_each(keyed), to_each(_good), **ASKED) as (live, (_, good)):
        await until(lambda: _remembers(live, [good], ["good"]))
        # That the other one wants a key may not have been heard yet.
        await until(lambda: _knows(live, ["good", "theirs"], b"authorization: Bearer sk"))
        assert await _knows(live, ["good"]), "what one client was shown is nobody else's"


async def _takes(peer: Peer, request: Request) -> None:
    await peer.send(named("qwen", "b") if request.target == b"/v1/models" else says(200, b"{}"))


@pytest.mark.parametrize("settings", [{}, ASKED], ids=["any", "asked"])
async def test_an_alias_is_replaced_in_requests_and_listed(settings: dict[str, Any]) -> None:
    async with fleet(to_each(_takes), model_alias=("small=qwen", "gone=away"), **settings) as (live, (worker,)):

        async def sent(body: bytes, *headers: bytes, kind: bytes = b"application/json") -> Any:
            lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: r.example", b"content-type: " + kind, *headers]
            if not headers:
                lines.append(b"content-length: %d" % len(body))
            assert (await asked(live, b"\r\n".join([*lines, b"", body]))).status == 200
            return worker.requests[-1]

        request = await sent(b'{"model": "small", "x": {"model": "small"}, "y": "\\u00e9 1.50"}')
        assert request.body == b'{"model": "qwen", "x": {"model": "small"}, "y": "\\u00e9 1.50"}'
        assert said(request, b"content-length") == [b"%d" % len(request.body)]
        chunked = b'10\r\n{"model":"small"\r\n1\r\n}\r\n0\r\n\r\n'
        assert (await sent(chunked, b"transfer-encoding: chunked")).body == b'{"model":"qwen"}'
        wide = '{"model":"small","x":NaN}'.encode("utf-16")
        assert (await sent(wide)).body.decode("utf-16") == '{"model": "qwen","x":NaN}'.replace(": ", ":")
        form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsmall\r\n--x--\r\n'
        assert (await sent(form, kind=b"multipart/form-data; boundary=x")).body == form
        untouched = b'{"model":"qwen","x":"small"}'
        assert (await sent(untouched)).body == untouched

        entries = json.loads((await asked(live, get(b"/v1/models"))).body)["data"]
        assert [(each["id"], each.get("root")) for each in entries] == [("qwen", None), ("b", None), ("small", "qwen")]
        assert json.loads((await asked(live, get(b"/v1/models/small"))).body)["root"] == "qwen"
