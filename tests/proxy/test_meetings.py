"""Turns in two phases at mock workers that meet as SGLang's do: both are asked at once. What each was asked, and came
to, is read there."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from mocker.settings import KvTransfer
from tests.support.client import Call
from tests.support.phased import Phased, phased, places, said
from tests.support.raw import until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

PATIENCE = 60.0
"""Seconds that one worker waits for the other: longer than any test."""
AT_P0 = [("x-dynamo-prefill-instance-id", "p0")]


def met(*, mock: dict[str, Any] | None = None, **how: Any) -> AbstractAsyncContextManager[Phased]:
    transfer = KvTransfer(handover="sglang", lease_s=PATIENCE)
    return phased(mock={"transfer": transfer, **(mock or {})}, **{"replicas": 1, **how})


@pytest.fixture
async def pair() -> AsyncIterator[Phased]:
    """One worker of each phase."""
    async with met(prefill=1, decode=1) as room:
        yield room
        assert await room.stranded() == 0


def error(call: Call) -> tuple[int, str]:
    assert call.json["error"].keys() == {"message", "type", "param", "code"}
    return call.status, call.json["error"]["code"]


async def rooms(room: Phased, name: str) -> list[int]:
    return [turn["room"] for turn in await room.mocks[name].turns()]


async def test_both_workers_get_the_request_and_meet_in_a_room_of_its_own(pair: Phased) -> None:
    seen: dict[str, list[bytes]] = {"p0": [], "d0": []}
    for name, bodies in seen.items():
        pair.tap(name, bodies)
    body = '{ "model":"mock-model", "stream" : true,"x":[1.50], "stream_options":{"include_usage":true},\n'
    body += '"messages" : [{"role":"user","content":"gr\\u00fc\\u00df dich"}], "max_tokens":5, "min_tokens":2 }\n'
    headers = [(b"content-type", b"application/json"), (b"x-dynamo-session-id", b"s")]
    turns = [
        await Call(pair.entrances[0], headers, host="localhost", body=body.encode()).finish(),
        await pair.turn("s", n=2, stream=False),
    ]
    assert [(turn.status, places(turn)) for turn in turns] == [(200, ("p0", "d0"))] * 2
    assert turns[0].body.endswith(b"data: [DONE]\n\n")
    assert await pair.served() == {"p0": ["staged"] * 2, "d0": ["fetched"] * 2}
    assert await rooms(pair, "p0") == await rooms(pair, "d0")
    assert len(set(await rooms(pair, "p0"))) == 2
    prompt, rest = seen["p0"][0].decode(), seen["d0"][0].decode()
    begin, added, end = rest.partition(',"bootstrap_host":')
    assert begin + "}\n" == body
    assert prompt.endswith(added + end.rstrip("\n"))
    sent = json.loads(prompt)
    assert sent["bootstrap_host"] == "127.0.0.1"
    assert 0 < sent["bootstrap_room"] < 1 << 63
    assert (sent["max_tokens"], sent["min_tokens"], sent["x"]) == (5, 2, [1.5])
    assert sent.keys() & {"stream", "stream_options"} == set()
    (first, _), (second, _) = [await pair.mocks[name].turns() for name in ("p0", "d0")]
    assert first["request_id"] == second["request_id"] == said(turns[0], "x-request-id")
    parts = pair.replicas[0].metrics.phase_seconds
    assert sum(parts.counts()) == 2 * len(parts.labels["part"])


async def test_no_client_says_where_workers_meet(pair: Phased) -> None:
    seen: list[bytes] = []
    pair.tap("d0", seen)
    elsewhere: dict[str, Any] = {
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 1,
        "bootstrap_room": 7,
        "disagg_prefill_dp_rank": 3,
    }
    turn = await pair.turn("s", **elsewhere)
    assert (turn.status, places(turn)) == (200, ("p0", "d0"))
    assert await rooms(pair, "p0") == await rooms(pair, "d0") != [7]
    assert b"10.0.0.1" not in seen[0]
    assert b"disagg_prefill_dp_rank" not in seen[0]
    whole = await pair.turn(path="/v1/messages", max_tokens=3, **elsewhere)
    unread = Call(
        pair.entrances[0],
        [(b"content-type", b"application/json")],
        path="/v1/completions",
        host="localhost",
        body='{"prompt":"x","bootstrap\\u005froom":7}'.encode("utf-16"),
    )
    assert "bootstrap_host" in whole.json["error"]["message"]
    assert (whole.status, error(await unread.finish())) == (400, (400, "invalid_request"))
    assert unread.json["error"]["param"] == "bootstrap_room"
    assert len(seen) == 1


async def test_little_that_is_new_is_split_as_well_for_who_decodes_takes_no_whole_turn() -> None:
    async with met(prefill=2, decode=2, replicas=2, prefill_from=10**6) as room:
        turns = [await room.turn("s", at=number % 2) for number in range(3)]
        assert {places(turn) for turn in turns} == {places(turns[0])}
        assert None not in places(turns[0])
        assert (await room.turn(path="/v1/messages", max_tokens=3)).status == 400  # no field for it there


async def test_the_rank_that_prefills_is_told_both() -> None:
    async with met(prefill=1, decode=1, dp=2) as room:
        seen: list[bytes] = []
        room.tap("d0", seen)
        ranks = [("x-dynamo-prefill-dp-rank", "1"), ("x-dynamo-worker-instance-id", "d0"), ("x-dynamo-dp-rank", "0")]
        turn = await room.turn("s", headers=AT_P0 + ranks)
        assert (said(turn, "x-coatcheck-prefill-rank"), said(turn, "x-coatcheck-rank")) == ("1", "0")
        assert [each["rank"] for name in ("p0", "d0") for each in await room.mocks[name].turns()] == [1, 0]
        assert json.loads(seen[0])["disagg_prefill_dp_rank"] == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "fault", [{"mode": "status", "status": 500}, {"mode": "reset"}, {"mode": "handover"}], ids=lambda each: each["mode"]
)
async def test_a_prefill_that_fails_starts_over_once_in_another_room(fault: dict[str, Any], stream: bool) -> None:
    async with met(prefill=2, decode=1) as room:
        await room.turn("s", headers=AT_P0)
        await room.mocks["p0"].fault(**fault)
        turn = await room.turn("s", stream=stream)
        assert (turn.status, b"error" in turn.body, places(turn)) == (200, False, ("p1", "d0"))
        assert room.counted("retries") == {("handover_lost",): 1}
        assert (await room.served())["p1"] == ["staged"]
        await until(lambda: room.idle("d0"))
        assert (await room.served())["d0"][-1] == "fetched"
        assert places(await room.turn("s")) == ("p0", "d0")  # it has only failed
        assert await room.stranded() == 0


async def test_a_prefill_that_fails_again_is_told(pair: Phased) -> None:
    await pair.mocks["p0"].fault(mode="status", status=500, times=2)
    assert error(await pair.turn("s", stream=True)) == (500, "injected_fault")
    assert len(set(await rooms(pair, "p0"))) == 2
    assert pair.counted("handover_failures") == {("prefill",): 2}
    assert (await pair.turn("s")).status == 200


async def test_what_a_prefill_worker_refuses_is_told_as_it_says_it(pair: Phased) -> None:
    await pair.mocks["p0"].fault(mode="status", status=400)
    turn = await pair.turn("s", stream=True)
    assert error(turn) == (400, "injected_fault")
    assert places(turn)[0] == "p0"
    assert not pair.counted("retries")
    await until(lambda: pair.idle("d0"))


async def test_a_prefill_worker_that_is_lost_is_left_by_the_turn_that_finds_out() -> None:
    async with met(replicas=2) as room:
        prefill, decode = places(await room.turn("s"))
        assert prefill is not None
        await room.mocks.pop(prefill).stop()
        other = {"p0": "p1", "p1": "p0"}[prefill]
        assert places(await room.turn("s")) == (other, decode)
        assert places(await room.turn("s", at=1)) == (other, decode)
        assert await room.claimed("s", "", "prefill", "") == other
        lost = room.replicas[0].fleet.worker(prefill)
        assert lost is not None
        assert lost.health.errors.per_minute() == 1


async def test_a_decode_worker_that_is_lost_has_its_successor_come_to_the_same_room() -> None:
    async with met(prefill=1) as room:
        decode = places(await room.turn("s"))[1]
        assert decode is not None
        await room.mocks.pop(decode).stop()
        other = {"d0": "d1", "d1": "d0"}[decode]
        moved = await room.turn("s")
        assert places(moved) == ("p0", other)
        assert (await room.served())["p0"] == ["staged", "staged"]
        assert (await rooms(room, "p0"))[1:] == await rooms(room, other)


async def test_a_prefill_worker_that_is_silent_is_given_up_in_time_and_another_one_computes() -> None:
    async with met(prefill=2, decode=1, first_byte_timeout=2) as room:
        await room.turn("s", headers=AT_P0)
        await room.mocks["p0"].fault(mode="hang")
        turn = await room.turn("s", stream=True)
        assert (turn.status, places(turn)) == (200, ("p1", "d0"))
        for name in ("p0", "d0"):
            await until(lambda name=name: room.idle(name))  # type: ignore[misc]


async def test_a_decode_worker_that_dies_leaves_its_prefill_worker_blameless() -> None:
    async with met(prefill=2, decode=2) as room:
        await room.turn("s", headers=[*AT_P0, ("x-dynamo-worker-instance-id", "d0")])
        await room.mocks["d0"].fault(mode="reset")
        await room.mocks["d0"].fault(mode="refuse", seconds=PATIENCE)
        turn = await room.turn("s", stream=True)  # of which it sends the head
        assert (turn.status, places(turn)) == (200, ("p0", "d1"))


async def test_where_no_other_one_prefills_it_is_asked_once_more() -> None:
    async with met(prefill=1, decode=1, first_byte_timeout=0.2) as room:
        await room.mocks["p0"].fault(mode="hang", times=2)
        assert error(await room.turn("s")) == (504, "worker_timeout")
        assert len(await rooms(room, "p0")) == 2


@pytest.mark.parametrize("dying", ["pp", "pd", "dp"])
async def test_no_third_worker_gets_what_two_have_died_of(dying: str) -> None:
    async with met(prefill=3, decode=3) as room:
        for mock in room.mocks.values():
            await mock.fault(mode="hang", times=9)
        turn = room.start("s")
        for phase in dying:
            await until(lambda: room.active_one("p"))
            await until(lambda: room.active_one("d"))
            name = await room.active_one(phase)
            assert name is not None
            await room.mocks.pop(name).stop()
        async with asyncio.timeout(PATIENCE / 2):  # a third one would hang as well
            await turn.finish()
        assert error(turn) == (502, "workers_died")
        assert said(turn, "x-should-retry") == "false"


@pytest.mark.parametrize(
    ("prefill", "hung", "first_byte_timeout", "status", "blamed"),
    [(2, "p0", 2, 200, ["p0"]), (2, "d0", 0.2, 504, ["d0"]), (1, "p0", 0.2, 504, ["d0", "p0"])],
)
async def test_whose_fault_it_was_that_two_have_not_met_the_next_two_show(
    prefill: int, hung: str, first_byte_timeout: float, status: int, blamed: list[str]
) -> None:
    async with met(prefill=prefill, decode=1, first_byte_timeout=first_byte_timeout) as room:
        if status == 200:
            await room.turn("s", headers=AT_P0)
        await room.mocks[hung].fault(mode="hang", times=2)
        assert (await room.turn("s")).status == status
        fleet = room.replicas[0].fleet
        assert sorted(each.name for each in fleet if each.health.errors.per_minute()) == blamed


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cuts_both(stream: bool) -> None:
    async with met(prefill=1, decode=1, max_turns=1, mock={"ttft_ms": 60_000}) as room:
        turn = room.start("s", stream=stream)
        await until(lambda: room.active("p0"))
        await until(lambda: room.active("d0"))
        turn.leave()
        await turn.finish()
        for name in ("p0", "d0"):
            await until(lambda name=name: room.idle(name))  # type: ignore[misc]
        assert (await room.mocks["p0"].state())["staged"] == 0
        assert await room.claimed("s", "", "prefill", "") is None
        assert await room.stranded() == 0


async def test_turns_at_every_limit_come_one_after_the_other() -> None:
    limits = {"max_turns": 1, "max_turns_per_tenant": 2, "queue_timeout": 10}
    async with met(prefill=1, decode=2, mock={"tokens": 2}, **limits) as room:
        turns = [room.start(f"s{number}", stream=number % 2 == 0) for number in range(8)]
        for turn in turns:
            await turn.finish()
        assert [turn.status for turn in turns] == [200] * 8
        assert (await room.served())["p0"] == ["staged"] * 8


async def test_whoever_loses_its_decode_worker_waits_for_another_one_without_a_slot_to_prefill() -> None:
    async with met(prefill=1, decode=2, max_turns=1, queue_timeout=PATIENCE) as room:
        for session, decode in (("a", "d0"), ("b", "d1")):
            await room.turn(session, headers=[("x-dynamo-worker-instance-id", decode)])
        await room.mocks.pop("d0").stop()
        turns = [room.start("a"), room.start("b")]
        async with asyncio.timeout(PATIENCE / 2):  # each would wait for what the other one holds
            for turn in turns:
                await turn.finish()
        assert [(turn.status, places(turn)) for turn in turns] == [(200, ("p0", "d1"))] * 2


async def test_who_hands_over_otherwise_is_not_asked() -> None:
    async with met(prefill=1, decode=1) as room, phased(prefill=1, decode=1, replicas=0) as others:
        for mock in others.mocks.values():
            mock.spec = mock.spec.replace("name=", "name=vllm-")
        workers = [mock.spec for each in (room, others) for mock in each.mocks.values()]
        async with phased(prefill=0, decode=0, more=tuple(workers), replicas=1) as both:
            for decode, prefill in (("d0", "p0"), ("vllm-d0", "vllm-p0"), ("d0", "p0")):
                at = [("x-dynamo-worker-instance-id", decode)]
                assert places(await both.turn(headers=at)) == (prefill, decode)
            wrong = [("x-dynamo-worker-instance-id", "d0"), ("x-dynamo-prefill-instance-id", "vllm-p0")]
            assert (await both.turn(headers=wrong)).status == 400


async def test_nothing_is_released_at_a_worker_that_hands_over_otherwise() -> None:
    async with met(prefill=1, decode=1) as room, phased(prefill=1, decode=1, replicas=0) as others:
        for mock in others.mocks.values():
            mock.spec = mock.spec.replace("name=", "name=vllm-")
        workers = [mock.spec for each in (room, others) for mock in each.mocks.values()]
        async with phased(prefill=0, decode=0, more=tuple(workers), replicas=1) as both:
            first = await both.turn("s", headers=[("x-dynamo-worker-instance-id", "vllm-d0")])
            assert places(first) == ("vllm-p0", "vllm-d0")
            seen: list[bytes] = []
            room.tap("d0", seen)
            await others.mocks.pop("d0").stop()
            assert places(await both.turn("s")) == ("p0", "d0")
            await both.rest()
            assert [b"kv_transfer_params" in body for body in seen] == [False]
            assert both.counted("handovers_released") == {("failed",): 1}  # there is nobody left to fetch it


@pytest.mark.parametrize("kind", ["plain", "vllm", "sglang"])
async def test_a_turn_that_has_ended_is_in_no_circle(kind: str) -> None:
    how: dict[str, Any] = {"prefill": 1, "decode": 1, "replicas": 1}
    fleet = met(**how) if kind == "sglang" else phased(**how)
    async with fleet as room:
        whole: dict[str, Any] = {"n": 2} if kind == "plain" else {}
        turns = room.replicas[0].turns
        gc.collect()
        gc.disable()
        try:
            call = room.start("s", stream=True, max_tokens=3, **whole)
            await until(lambda: turns.count)
            refs = list(map(weakref.ref, turns._running))
            await call.finish()
            assert (call.status, places(call)) == (200, (None if kind == "plain" else "p0", "d0"))
            del call
            await until(lambda: all(ref() is None for ref in refs), what="only the collector would free it")
        finally:
            gc.enable()
