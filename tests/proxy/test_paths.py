"""Paths that are no usual turn: those that change workers, engines' own outside /v1, and what is below the models."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.support.http_model import Answer, Request
from tests.support.raw import Live, Peer, Worker, get, post, tells, to_each

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

TOKEN = b"x-coatcheck-admin-token: hush"
KEY = b"authorization: Bearer sk-client"


def says(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def named(*models: str) -> bytes:
    return says(200, json.dumps({"object": "list", "data": [{"id": name, "n": 1} for name in models]}).encode())


def serves(*models: str, other: bytes) -> Any:
    """Its list at /v1/models, and `other` to all else."""

    async def each(peer: Peer, request: Request) -> None:
        await peer.send(named(*models) if request.target == b"/v1/models" else other)

    return to_each(each)


@contextlib.asynccontextmanager
async def fleet(*scripts: Any, **settings: Any) -> AsyncIterator[tuple[Live, list[Worker]]]:
    async with contextlib.AsyncExitStack() as stack:
        live = stack.enter_context(Live(workers=len(scripts), **settings))
        yield (
            live,
            [
                await stack.enter_async_context(live.worker(script, number=number))
                for number, script in enumerate(scripts)
            ],
        )


async def asked(live: Live, request: bytes) -> Answer:
    """By this machine's own name, as an admin asks."""
    async with live.client() as client:
        await client.send(request.replace(b"host: r.example", b"host: localhost"))
        return await client.answer(request.partition(b" ")[0])


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"]


def said(request: Request, name: bytes) -> list[bytes]:
    return [value for key, value in request.headers if key == name]


def targets(workers: Sequence[Worker]) -> list[list[bytes]]:
    return [[request.target for request in worker.requests] for worker in workers]


# -- what changes workers


SPELLED = [
    b"/v1/load_lora_adapter",
    b"/v1//load_lora_adapter",
    b"//v1/load_lora_adapter",
    b"/v1%2Fload_lora_adapter",
    b"/v1/%6Coad_lora_adapter",
    b"/v1/%256Coad_lora_adapter",
    b"/v1/LOAD_LORA_ADAPTER",
    b"/v1/load_lora_adapter/",
    b"/v1/load_lora_adapter;x",
    b"/v1/x/..%2f..%2fsleep",
    b"/v1/internal/model/load",
    b"/v1/models/load",
    b"/sleep",
    b"/collective_rpc",
    b"/update_weights_from_disk",
    b"/start_profile",
    b"/flush_cache",
    b"/reset_prefix_cache",
]


async def test_nobody_but_an_admin_changes_a_worker() -> None:
    async with fleet(tells(b""), admin_token="hush", worker_api_key="sk-router") as (live, workers):
        for path in SPELLED:
            for request in (post(KEY, target=path), get(path, KEY), post(b"x-coatcheck-admin-token: x", target=path)):
                answer = await asked(live, request)
                assert code(answer) == (403, "forbidden"), path
                assert b"X-Coatcheck-Admin-Token" in answer.body
        assert workers[0].nothing_came()


async def test_an_admins_request_goes_to_all_workers_and_each_answer_comes_back() -> None:
    scripts = (tells(says(200, b'{"ok":1}')), tells(says(404, b"no", b"text/plain")))
    async with fleet(*scripts, absent=1, admin_token="hush", worker_api_key="sk-router") as (live, workers):
        request = post(TOKEN, KEY, b"x-request-id: me", body=b'{"level":1}', target=b"/sleep?level=1&x=%2F")
        answer = await asked(live, request)
        told = json.loads(answer.body)
        assert answer.status == 503  # the worst of them
        assert (b"x-request-id", b"me") in answer.headers
        absent, first, second = told["workers"]
        assert (absent["worker"], absent["status"], absent["error"]["code"]) == ("w0", 503, "worker_unreachable")
        assert first == {"worker": "w1", "status": 200, "body": {"ok": 1}, "cut": False}
        assert second == {"worker": "w2", "status": 404, "body": "no", "cut": False}
        for worker in workers:
            (got,) = worker.requests
            assert (got.method, got.target, got.body) == (b"POST", b"/sleep?level=1&x=%2F", b'{"level":1}')
            assert said(got, b"authorization") == [b"Bearer sk-router"]
            assert said(got, b"x-request-id") == [b"me"]
            assert not said(got, b"x-coatcheck-admin-token")


async def test_an_admins_request_goes_to_the_worker_that_it_names() -> None:
    async with fleet(tells(b""), tells(says(200, b""))) as (live, workers):
        answer = await asked(live, post(b"x-dynamo-worker-instance-id: w1", target=b"/v1/load_lora_adapter"))
        assert (answer.status, json.loads(answer.body)["workers"]) == (
            200,
            [{"worker": "w1", "status": 200, "body": "", "cut": False}],
        )
        assert targets(workers) == [[], [b"/v1/load_lora_adapter"]]
        unknown = await asked(live, post(b"x-dynamo-worker-instance-id: w9", target=b"/sleep"))
        assert code(unknown) == (400, "unknown_worker")
        odd = await asked(live, post(target=b"/v1//load_lora_adapter"))
        assert code(odd) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("settings", "given", "arrives"),
    [
        ({}, [KEY], [b"Bearer sk-client"]),
        ({"admin_token": "hush"}, [b"authorization: Bearer hush"], []),
        ({"admin_token": "hush"}, [TOKEN, KEY], [b"Bearer sk-client"]),
        ({"admin_token": "hush"}, [TOKEN, b"authorization: Bearer hush"], []),
    ],
)
async def test_the_admin_token_reaches_no_worker(
    settings: dict[str, Any], given: list[bytes], arrives: list[bytes]
) -> None:
    async with fleet(tells(says(200, b"")), **settings) as (live, (worker,)):
        assert (await asked(live, post(*given, target=b"/sleep"))).status == 200
        assert said(worker.requests[0], b"authorization") == arrives
        assert b"hush" not in worker.heads[0]


async def test_an_admins_answer_is_bounded_in_time_and_size() -> None:
    async def flood(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"x" * (64 << 20))

    async def drip(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while True:
            await peer.send(b"x")
            await asyncio.sleep(0.1)

    async with fleet(flood, drip, first_byte_timeout=3.0) as (live, _):
        answer = await asked(live, post(target=b"/sleep"))
        first, second = json.loads(answer.body)["workers"]
        assert (first["cut"], len(first["body"])) == (True, 1 << 20)
        assert (answer.status, second["status"], second["error"]["code"]) == (504, 504, "worker_timeout")


# -- engines' own paths


async def test_engine_paths_are_turns_like_any_other() -> None:
    async with fleet(serves(other=says(200, b"{}")), serves(other=says(200, b"{}"))) as (live, workers):
        answers = [
            await asked(live, post(b"x-dynamo-session-id: s", b"content-type: application/json", target=path))
            for path in (b"/tokenize", b"/v2/rerank", b"/generate", b"/infill")
        ]
        assert len({dict(answer.headers)[b"x-coatcheck-worker"] for answer in answers}) == 1
        assert [dict(answer.headers)[b"x-coatcheck-affinity"] for answer in answers] == [b"created", *[b"cached"] * 3]
        assert sorted(targets(workers)) == [[], [b"/tokenize", b"/v2/rerank", b"/generate", b"/infill"]]


async def test_other_paths_name_the_setting_and_the_setting_decides() -> None:
    async with fleet(serves(other=says(200, b"{}")), engine_paths=("/mine",)) as (live, (worker,)):
        assert (await asked(live, post(target=b"/mine"))).status == 200
        for path in (b"/tokenize", b"/else"):
            answer = await asked(live, post(target=path))
            assert code(answer) == (404, "not_found")
            assert b"engine-paths" in answer.body
        assert targets([worker]) == [[b"/mine"]]


# -- below the models


async def test_what_is_no_models_name_goes_to_a_worker() -> None:
    ready = says(200, b'{"ready":true}')
    async with fleet(serves("org/m", "caf\u00e9", other=ready)) as (live, (worker,)):
        for path, name in ((b"org/m", "org/m"), (b"org%2Fm", "org/m"), (b"caf%C3%A9", "caf\u00e9")):
            known = await asked(live, get(b"/v1/models/" + path, b"x-request-id: me"))
            assert json.loads(known.body) == {"id": name, "n": 1}
            assert (b"x-request-id", b"me") in known.headers
        assert {request.target for request in worker.requests} == {b"/v1/models"}
        for request in (
            get(b"/v1/models/org/m/ready?a=1"),
            post(target=b"/v1/models/org/m/ready"),
            get(b"/v1/models/unknown", b"x-dynamo-session-id: s"),
        ):
            answer = await asked(live, request)
            assert (answer.status, answer.body) == (200, b'{"ready":true}')
            assert dict(answer.headers)[b"x-coatcheck-worker"] == b"w0"
        elsewhere = [request.target for request in worker.requests if request.target != b"/v1/models"]
        assert elsewhere == [b"/v1/models/org/m/ready?a=1", b"/v1/models/org/m/ready", b"/v1/models/unknown"]


async def test_one_connection_asks_for_models_and_for_turns() -> None:
    async with (
        fleet(serves("m", other=says(200, b"turn"))) as (live, _),
        live.client() as client,
    ):
        await client.send(get(b"/v1/models/m") + get(b"/v1/models/x") + post() + get(b"/v1/models/m"))
        bodies = [(await client.answer(method)).body for method in (b"GET", b"GET", b"POST", b"GET")]
        assert bodies == [b'{"id": "m", "n": 1}', b"turn", b"turn", b'{"id": "m", "n": 1}']
