"""Turns in two phases, at mock workers that hand over as vLLM does: what each worker was asked, and what became of the
blocks."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from app.fleet.health import Probe
from app.fleet.specs import worker_specs
from app.turn import phases
from tests.support.client import Call
from tests.support.phased import LONG, Phased, phased, places, said
from tests.support.raw import until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

PREFILL = "x-dynamo-prefill-instance-id"
FINAL = [("x-dynamo-session-final", "true")]


def error(call: Call) -> tuple[int, str]:
    assert call.json["error"].keys() == {"message", "type", "param", "code"}
    return call.status, call.json["error"]["code"]


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


async def explained(room: Phased, session: str | None, *headers: tuple[str, str]) -> Any:
    return (await room.turn(session, headers=[("x-coatcheck-dry-run", "1"), *headers])).json


async def test_a_turn_is_prefilled_at_one_worker_and_decoded_at_another() -> None:
    async with phased() as room:
        turn = await room.turn("s", stream=True, max_tokens=5, min_tokens=2, stream_options={"include_usage": True})
        assert turn.status == 200
        prefill, decode = places(turn)
        assert prefill in ("p0", "p1")
        assert decode in ("d0", "d1")
        assert said(turn, "x-coatcheck-affinity") == "created"
        assert turn.body.endswith(b"data: [DONE]\n\n")
        assert b'"usage":{' in turn.body
        served = await room.served()
        assert (served[prefill], served[decode]) == (["staged"], ["fetched"])
        (first,), (second,) = await room.mocks[prefill].turns(), await room.mocks[decode].turns()
        assert (first["stream"], first["completion_tokens"], second["stream"]) == (False, 1, True)
        assert second["completion_tokens"] == 5
        assert first["request_id"] == second["request_id"] == said(turn, "x-request-id")
        await until(lambda: room.free())
        again = await room.turn("s", at=1)
        assert places(again) == (prefill, decode)
        assert said(again, "x-coatcheck-affinity") == "stored"
        assert (await room.claimed("s"), await room.claimed("s", "", "prefill", "")) == (decode, prefill)
        parts = room.replicas[0].metrics.phase_seconds
        assert sum(parts.counts()) == len(parts.labels["part"]) == 4


async def test_whatever_cannot_be_split_goes_whole_to_a_decode_worker() -> None:
    async with phased(prefill=1, decode=1, both=0, replicas=1) as room:
        for request in ({"n": 2}, {"kv_transfer_params": {"do_remote_prefill": False}}, {"prompt_logprobs": 2}):
            assert places(await room.turn(**request)) == (None, "d0")
        assert places(await room.turn(path="/v1/completions", prompt=[LONG, LONG])) == (None, "d0")
        assert places(await room.turn(path="/v1/embeddings", input="x")) == (None, "d0")
        assert places(await room.turn(path="/v1/completions", prompt=LONG)) == ("p0", "d0")
        assert room.counted("phase_turns") == {("body",): 4, ("path",): 1, ("two_phases",): 1}


async def test_a_worker_without_a_phase_takes_whole_turns_beside_those_with_one() -> None:
    async with phased(prefill=1, decode=0, both=1, replicas=1) as room:
        assert places(await room.turn("s")) == (None, "b0")
        assert room.counted("phase_turns") == {("one_worker",): 1}


async def test_little_that_is_new_where_the_session_is_goes_there_whole() -> None:
    async with phased(replicas=2, prefill_from=1000) as room:
        first = await room.turn("s", messages=messages(LONG))
        assert None not in places(first)
        second = await room.turn("s", messages=messages(LONG, "and now?"))
        assert places(second) == (None, places(first)[1])
        elsewhere = await room.turn("s", at=1, messages=messages(LONG, "and now?"))
        assert places(elsewhere) == places(first)  # what is new is not known there
        assert places(await room.turn("s", messages=messages(LONG, LONG, "more"))) == places(first)
        assert places(await room.turn("s", messages=messages("short"))) == places(first)  # another conversation
        assert places(await room.turn("t", text="short"))[0] is not None  # no session's worker has any of it
        assert room.counted("phase_turns")["little_new",] == 1


async def test_each_phase_has_its_hints_and_a_claim_goes_before_them() -> None:
    async with phased(replicas=1) as room:
        for name in ("p0", "p1"):
            turn = await room.turn(f"s-{name}", headers=[(PREFILL, name), ("x-dynamo-worker-instance-id", "d1")])
            assert places(turn) == (name, "d1")
        nvext = {"prefill_worker_id": "p1", "decode_worker_id": "d0"}
        assert places(await room.turn(nvext=nvext)) == ("p1", "d0")
        assert places(await room.turn("s-p0", headers=[(PREFILL, "p1")])) == ("p0", "d1")
        assert room.replicas[0].metrics.hints_overridden.cells[()] == 1
        assert error(await room.turn(headers=[(PREFILL, "d0")])) == (400, "unknown_worker")
        assert error(await room.turn(headers=[("x-dynamo-worker-instance-id", "p0")])) == (400, "unknown_worker")
        assert error(await room.turn("new", headers=[("x-dynamo-prefill-dp-rank", "0")])) == (400, "invalid_hint")
        assert not room.counted("hints_ignored")


async def test_ranks_of_both_phases_are_targets() -> None:
    async with phased(prefill=1, decode=1, replicas=1, dp=2) as room:
        headers = [(PREFILL, "p0"), ("x-dynamo-prefill-dp-rank", "1")]
        headers += [("x-dynamo-worker-instance-id", "d0"), ("x-dynamo-dp-rank", "0")]
        turn = await room.turn("s", headers=headers)
        assert (said(turn, "x-coatcheck-prefill-rank"), said(turn, "x-coatcheck-rank")) == ("1", "0")
        assert [each["rank"] for name in ("p0", "d0") for each in await room.mocks[name].turns()] == [1, 0]


async def test_the_final_ends_both_claims_before_its_end_is_seen() -> None:
    async with phased() as room:
        await room.turn("s")
        last = await room.turn("s", at=1, headers=FINAL)
        assert None not in places(last)
        assert (await room.claimed("s"), await room.claimed("s", "", "prefill", "")) == (None, None)


async def test_the_final_at_a_replica_that_knows_nothing_is_prefilled_where_the_session_was() -> None:
    async with phased() as room:
        for number in range(6):
            first = await room.turn(f"s{number}")
            last = await room.turn(f"s{number}", at=1, headers=FINAL)
            assert places(last) == places(first)
            only = await room.turn(f"once{number}", headers=FINAL)
            assert None not in places(only)
            assert await room.claimed(f"once{number}", "", "prefill", "") is None


async def test_a_child_is_prefilled_and_decoded_where_its_parent_is() -> None:
    async with phased(prefill=3, decode=3, replicas=1) as room:
        parent = await room.turn("s")
        for number in range(4):
            child = await room.turn(f"c{number}", headers=[("x-dynamo-parent-session-id", "s")])
            assert places(child) == places(parent)


async def test_a_cordoned_prefill_worker_keeps_its_sessions_and_gets_no_new_ones() -> None:
    async with phased() as room:
        first = await room.turn("s")
        prefill = places(first)[0]
        assert prefill is not None
        for app in room.replicas:
            worker = app.fleet.worker(prefill)
            assert worker is not None
            worker.mark = "cordoned"
        assert places(await room.turn("s", at=1)) == places(first)
        others = {places(await room.turn(f"t{number}"))[0] for number in range(4)}
        assert others == {"p0", "p1"} - {prefill}


async def test_a_model_that_not_all_prefill_has_a_claim_of_its_own_that_the_final_ends_too() -> None:
    served = {"p0": ("m",), "p1": ("m", "n"), "d0": ("m", "n")}
    async with phased(decode=1, replicas=1, models=served) as room:
        turn = await room.turn("s", model="m", headers=[(PREFILL, "p0")])
        assert places(turn) == ("p0", "d0")
        for _ in range(2):
            assert places(await room.turn("s", model="n")) == ("p1", "d0")
        assert places(await room.turn("s", model="m")) == ("p0", "d0")
        assert error(await room.turn(model="n", headers=[(PREFILL, "p0")])) == (400, "unknown_worker")
        claims = [("s",), ("s", "", "prefill", ""), ("s", "", "prefill", "n")]
        assert [await room.claimed(*claim) for claim in claims] == ["d0", "p0", "p1"]
        assert (await room.turn("s", model="m", headers=FINAL)).status == 200
        assert [await room.claimed(*claim) for claim in claims] == [None, None, None]


async def test_phases_begin_when_the_first_worker_comes_that_has_one_and_end_with_the_last() -> None:
    async with phased(prefill=1, decode=1, both=1, replicas=1, worker_grace=0) as room:
        app = room.replicas[0]
        every = list(app.settings.workers.worker)
        whole = [text for text in every if "phase=both" in text]

        at = [("x-dynamo-worker-instance-id", "d0")]
        await app.discovery.follow(worker_specs(whole), [], [])
        assert error(await room.turn(headers=at)) == (400, "unknown_worker")
        before = room.counted("phase_turns")
        assert places(await room.turn()) == (None, "b0")
        assert room.counted("phase_turns") == before
        await app.discovery.follow(worker_specs(every), [], [])
        assert places(await room.turn(headers=at)) == ("p0", "d0")


async def test_a_dry_run_says_both() -> None:
    async with phased(replicas=1) as room:
        before = await explained(room, "s")
        turn = await room.turn("s")
        after = await explained(room, "s")
        assert (after["prefill"]["worker"], after["worker"]) == places(turn)
        assert (before["prefill"]["because"], after["prefill"]["because"]) == ("policy", "memory")
        assert (before["prefill"]["affinity"], after["prefill"]["affinity"]) == ("created", "cached")
        assert (await explained(room, None, (PREFILL, "p1")))["prefill"]["because"] == "hint"


@pytest.mark.parametrize(("how", "kind"), [("missing", "missing"), ("malformed", "malformed")])
async def test_a_hand_over_that_is_none_is_an_error_and_no_whole_run(how: str, kind: str) -> None:
    async with phased(prefill=1, replicas=1) as room:
        await room.mocks["p0"].fault(mode="handover", how=how)
        assert error(await room.turn("s", stream=True)) == (502, "bad_handover")
        assert room.counted("handover_failures") == {(kind,): 1}
        assert [len(turns) for turns in (await room.served()).values()] == [1, 0, 0]
        assert await room.claimed("s") is None


@pytest.mark.parametrize("stream", [True, False])
async def test_blocks_that_are_gone_are_computed_anew_once(stream: bool) -> None:
    async with phased(prefill=1, decode=1, replicas=1) as room:
        await room.mocks["p0"].fault(mode="handover", how="gone")
        turn = await room.turn("s", stream=stream)
        assert (turn.status, b"error" in turn.body) == (200, False)
        assert await room.served() == {"p0": ["staged", "staged"], "d0": ["failed", "fetched"]}
        assert room.counted("retries") == {("handover_lost",): 1}
        await room.mocks["p0"].fault(mode="handover", how="gone", times=2)
        failed = await room.turn("s", stream=stream)
        assert failed.status == (200 if stream else 500)
        assert b'"error"' in failed.body
        assert (await room.served())["d0"][2:] == ["failed", "failed"]
        assert room.counted("handover_failures") == {("refused",): 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_are_split_as_well_and_computed_anew_when_blocks_are_gone(stream: bool) -> None:
    async with phased(prefill=1, decode=1, replicas=1) as room:
        request: dict[str, Any] = {"path": "/v1/messages", "stream": stream, "max_tokens": 4}
        assert places(await room.turn(**request)) == ("p0", "d0")
        await room.mocks["p0"].fault(mode="handover", how="gone")
        again = await room.turn(**request)
        assert (again.status, b"error" in again.body) == (200, False)
        assert await room.served() == {"p0": ["staged"] * 3, "d0": ["fetched", "failed", "fetched"]}
        first, *_ = await room.mocks["p0"].turns()
        assert (first["path"], first["stream"], first["completion_tokens"]) == ("/v1/messages", False, 1)
        await until(lambda: room.free())


async def test_what_a_prefill_worker_refuses_is_told_as_it_says_it() -> None:
    async with phased(prefill=1, replicas=1) as room:
        await room.mocks["p0"].fault(mode="status", status=400)
        turn = await room.turn("s")
        assert (turn.status, turn.json["error"]["code"]) == (400, "injected_fault")
        assert places(turn)[0] == "p0"
        assert room.replicas[0].metrics.turns.cells["other", "client_error"] == 1
        assert [len(turns) for turns in (await room.served()).values()] == [1, 0, 0]
        assert await room.claimed("s") is None


async def test_a_prompt_that_is_refused_when_it_is_computed_anew_ends_the_turn() -> None:
    async with phased(prefill=1, decode=2, replicas=1) as room:
        await room.mocks["p0"].fault(mode="slow", end_ms=0)
        await room.mocks["p0"].fault(mode="status", status=400)
        for name in ("d0", "d1"):
            await room.mocks[name].fault(mode="status", status=503)
        turn = await room.turn()
        assert (turn.status, turn.json["error"]["code"]) == (400, "injected_fault")
        assert room.replicas[0].metrics.turns.cells["other", "client_error"] == 1


async def test_what_a_decode_worker_refuses_leaves_nothing_staged() -> None:
    async with phased(prefill=1, decode=1, replicas=1) as room:
        await room.mocks["d0"].fault(mode="status", status=400)
        assert (await room.turn("s")).status == 400
        await until(lambda: room.counted("handovers_released") == {("ok",): 1})
        await until(lambda: room.free())


async def test_turns_of_a_tenant_at_its_limit_do_not_wait_for_themselves() -> None:
    async with phased(prefill=1, decode=1, replicas=1, max_turns_per_tenant=1, queue_timeout=10) as room:
        turns = [room.start(f"s{number}") for number in range(4)]
        for turn in turns:
            await turn.finish()
        assert [turn.status for turn in turns] == [200] * 4


async def test_a_first_turn_passes_over_a_prefill_worker_that_is_busy() -> None:
    async with phased(replicas=1) as room:
        for name in ("p0", "p1"):
            await room.mocks[name].fault(mode="status", status=503)
        assert (await room.turn("s")).status == 503
        await room.mocks["p0"].fault(mode="status", status=503)
        turns = [await room.turn(), await room.turn()]
        assert [turn.status for turn in turns] == [200, 200]
        assert places(turns[0])[0] == places(turns[1])[0] == "p1"


async def test_a_prefill_worker_that_is_lost_is_left_by_the_turn_that_finds_out() -> None:
    async with phased() as room:
        first = await room.turn("s")
        prefill, decode = places(first)
        assert prefill is not None
        await room.mocks[prefill].stop()
        other = {"p0": "p1", "p1": "p0"}[prefill]
        assert places(await room.turn("s")) == (other, decode)
        assert places(await room.turn("s", at=1)) == (other, decode)
        assert await room.claimed("s", "", "prefill", "") == other
        del room.mocks[prefill]


async def test_a_decode_worker_that_is_lost_gets_its_successor_the_hand_over_that_nobody_has_read() -> None:
    async with phased(prefill=1) as room:
        first = await room.turn("s")
        decode = places(first)[1]
        assert decode is not None
        await room.mocks[decode].stop()
        other = {"d0": "d1", "d1": "d0"}[decode]
        del room.mocks[decode]
        moved = await room.turn("s")
        assert places(moved) == ("p0", other)
        assert said(moved, "x-coatcheck-affinity") == "rebound"
        assert await room.served() == {"p0": ["staged", "staged"], other: ["fetched"]}
        await until(lambda: room.free())


async def test_without_a_prefill_worker_a_turn_is_refused() -> None:
    async with phased(prefill=1, replicas=1) as room:
        await room.mocks["p0"].stop()
        del room.mocks["p0"]
        assert error(await room.turn()) == (503, "worker_unreachable")
        assert [len(turns) for turns in (await room.served()).values()] == [0, 0]


async def test_where_clients_place_all_turns_a_lost_prefill_worker_has_no_successor() -> None:
    at_both = [(PREFILL, "p0"), ("x-dynamo-worker-instance-id", "d0")]
    async with phased(decode=1, replicas=1, policy="direct") as room:
        assert places(await room.turn("s", headers=at_both)) == ("p0", "d0")
        assert error(await room.turn(headers=at_both[1:])) == (400, "hint_required")
        await room.mocks.pop("p0").stop()
        assert error(await room.turn("s", headers=at_both)) == (503, "worker_unreachable")
        assert error(await room.turn("s")) == (400, "hint_required")
        assert (await room.served())["p1"] == []


async def test_while_the_store_is_away_the_hash_says_where_both_are() -> None:
    async with phased(prefill=3, decode=3) as room:
        for store in room.stores:
            store.go_away()
        for session in ("a", "b", "c", "d"):
            turns = [await room.turn(session, at=at) for at in (0, 1)]
            assert places(turns[0]) == places(turns[1])
            assert None not in places(turns[0])
            assert said(turns[0], "x-coatcheck-affinity") == "degraded"
        for store in room.stores:
            store.return_()


async def test_a_client_that_leaves_during_prefill_leaves_nothing_staged() -> None:
    async with phased(prefill=1, decode=1, replicas=1, mock={"ttft_ms": 300}) as room:
        turn = room.start("s", stream=True)
        await until(lambda: room.active("p0"))
        turn.leave()
        await turn.finish()
        await until(lambda: room.served_as({"p0": ["staged"], "d0": ["fetched"]}))
        await until(lambda: room.free())
        assert room.counted("handovers_released") == {("ok",): 1}
        assert await room.claimed("s") is None


async def test_a_client_that_leaves_while_its_blocks_are_fetched_leaves_nothing_staged() -> None:
    async with phased(prefill=1, decode=1, replicas=1) as room:
        slow = room.mocks["d0"]
        await slow.fault(mode="freeze", seconds=2)
        turn = room.start("s", stream=True)
        await until(lambda: room.staged())
        turn.leave()  # before or after the request for d0 has left: what was staged is fetched
        await turn.finish()
        await until(lambda: room.free())
        assert (await room.served())["d0"] == ["fetched"]


async def test_a_prefill_that_takes_long_is_cut_for_a_client_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_FREED_WITHIN", 0.05)
    async with phased(prefill=1, decode=1, replicas=1, mock={"ttft_ms": 60_000}) as room:
        turn = room.start("s", stream=True)
        await until(lambda: room.active("p0"))
        turn.leave()
        await turn.finish()
        await until(lambda: room.idle("p0"))
        assert await room.served() == {"p0": [None], "d0": []}
        assert not room.counted("handovers_released")


async def test_a_prefill_worker_that_is_silent_is_given_up_in_time() -> None:
    async with phased(prefill=1, decode=1, replicas=1, first_byte_timeout=0.2) as room:
        await room.mocks["p0"].fault(mode="hang")
        assert error(await room.turn()) == (504, "worker_timeout")
        await until(lambda: room.idle("p0"))


async def test_the_access_log_tells_of_both_workers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coatcheck.access")
    async with phased(prefill=1, decode=1, replicas=1, access_log="all") as room:
        await room.turn("s")
        (record,) = [each for each in caplog.records if each.name == "coatcheck.access"]
        said = vars(record)["fields"]
        assert (said["prefill_worker"], said["worker"], said["prefill_affinity"]) == ("p0", "d0", "created")
        assert said["prefill_ms"] > 0


async def test_who_waits_for_a_decode_slot_and_leaves_leaves_nothing_staged() -> None:
    async with phased(prefill=1, decode=1, replicas=1, max_turns=1, mock={"tokens": 400}) as room:
        running = room.start(stream=True)
        await until(lambda: room.active("d0"))
        waiting = room.start(stream=True)
        await until(lambda: room.staged())
        waiting.leave()
        await waiting.finish()
        await until(lambda: room.counted("handovers_released") == {("ok",): 1})
        await until(lambda: room.free())
        running.leave()
        await running.finish()


async def test_prefill_and_decode_have_slots_of_their_own() -> None:
    async with phased(prefill=1, decode=1, replicas=1, max_turns=1, prefill_from=10**6, mock={"tokens": 20}) as room:
        await room.turn("s")
        await room.mocks["p0"].fault(mode="hang")
        stuck = room.start("t")
        await until(lambda: room.active("p0"))
        behind = room.start("u")
        turn = await room.turn("s")  # little is new, so that it needs no prefill
        assert (turn.status, places(turn)) == (200, (None, "d0"))
        for each in (stuck, behind):
            each.leave()
        await room.mocks.pop("p0").stop()  # else it would be waited for a while
        await asyncio.gather(stuck.finish(), behind.finish())


async def test_every_other_byte_of_a_request_is_as_the_client_sent_it() -> None:
    body = '{ "messages" : [{"role":"user","content":"gr\\u00fc\\u00df dich"}],\n "x":[1.50], "model":"mock-model" }\n'
    async with phased(prefill=1, decode=1, replicas=1) as room:
        seen: list[bytes] = []
        room.tap("d0", seen)
        turn = await Call(
            room.entrances[0], [(b"content-type", b"application/json")], host="localhost", body=body.encode()
        ).finish()
        assert turn.status == 200
        (sent,) = seen
        begin, comma, rest = sent.decode().partition(',"kv_transfer_params":')
        assert comma
        params, _ = json.JSONDecoder().raw_decode(rest)
        assert params["do_remote_prefill"] is True
        assert (begin + rest[json.JSONDecoder().raw_decode(rest)[1] :]) == body


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_worker_that_is_silent_to_its_probes_too_is_passed_over_once_and_keeps_its_sessions(phase: str) -> None:
    async with phased(replicas=1, first_byte_timeout=2) as room:
        first = await room.turn("s")
        silent = places(first)[phase == "decode"]
        assert silent is not None
        await room.mocks[silent].fault(mode="hang", times=2)
        assert error(await room.turn("s")) == (504, "worker_timeout")  # it may be at work on it
        worker = room.replicas[0].fleet.worker(silent)
        assert worker is not None
        worker.health.probed(Probe.BAD, "late")
        passed = await room.turn("s", stream=True)
        assert (passed.status, b"error" in passed.body) == (200, False)
        assert places(passed)[phase == "decode"] not in (silent, None)
        worker.health.probed(Probe.GOOD, "well")
        assert places(await room.turn("s")) == places(first)
