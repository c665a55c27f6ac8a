"""Turns go to workers that serve their model: two replicas, claims of every kind, counted at the workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.raw import until
from tests.support.room import JSON, Room, Rooms, Turn, over_one

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])
THREE = (["a"], ["a", "b"], ["b"], ["c"], ["c"])
"""Three models over five workers, one of which serves two."""
WHERE = {"a": {"w0", "w1"}, "b": {"w1", "w2"}, "c": {"w3", "w4"}}
MESSAGES = "/v1/messages"


async def ask(room: Room, model: Any, session: str | None = None, *, headers: Any = (), **how: Any) -> Turn:
    return await room.turn(session, body=json.dumps({"model": model}).encode(), headers=JSON | dict(headers), **how)


def served(room: Room) -> dict[str, int]:
    return {name: len(turns) for name, turns in room.served.items()}


@over_one
async def test_turns_and_sessions_go_to_workers_that_serve_their_model(rooms: Rooms) -> None:
    async with rooms.open(workers=5, models=THREE) as room:
        for model, workers in WHERE.items():
            for number in range(8):
                turn = await ask(room, model, room.new() if number % 2 else None, at=number // 2 % 2)
                assert (turn.status, turn.worker in workers) == (200, True)
        assert {name for name, count in served(room).items() if count} == {"w0", "w1", "w2", "w3", "w4"}
        for none in (None, "", 7):  # it names none that could be read: the worker's to judge
            assert (await ask(room, none)).status == 200


async def test_a_session_that_uses_two_models_has_a_claim_for_each_and_its_final_ends_both(rooms: Rooms) -> None:
    async with rooms.open(workers=5, models=THREE) as room:
        first = await ask(room, "a", "s", headers={"x-dynamo-worker-instance-id": "w0"})
        own, other = room.key("s"), room.key("s", "", "model", "c")
        assert (first.worker, first.how) == ("w0", "created")
        beside = await ask(room, "c", "s", at=1)
        assert (beside.worker in WHERE["c"], beside.how) == (True, "created")
        assert [(await ask(room, "c", "s", at=at)).worker for at in (0, 1, 0)] == [beside.worker] * 3
        assert [(await ask(room, "a", "s", at=at)).worker for at in (1, 0)] == ["w0"] * 2
        claims = [await room.truth.get(key) for key in (own, other)]
        assert [claim and claim.value.worker for claim in claims] == ["w0", beside.worker]
        # At a replica that knows only the session's own claim, and by a turn of that one's model.
        await ask(room, "c", "t", at=1)
        for session, at in (("s", 0), ("t", 0)):
            await ask(room, "a", session, at=at, final=True)
            for key in (room.key(session), room.key(session, "", "model", "a"), room.key(session, "", "model", "c")):
                assert await room.truth.get(key) is None, "it is closed before the client sees the end"
        assert (await ask(room, "c", "s", at=1)).how in ("created", "rebound")


@over_one
async def test_a_final_by_the_other_model_ends_both_too(rooms: Rooms) -> None:
    async with rooms.open(workers=5, models=THREE) as room:
        await ask(room, "a", "s", headers={"x-dynamo-worker-instance-id": "w0"})
        held = room.start("s", test="hold", body=b'{"model":"c"}', headers=JSON)
        await until(lambda: held.body)
        await ask(room, "b", "s", at=1, headers={"x-dynamo-worker-instance-id": "w2"})
        keys = [room.key("s"), room.key("s", "", "model", "b"), room.key("s", "", "model", "c")]
        assert all([await room.truth.get(key) for key in keys])
        await ask(room, "c", "s", final=True)
        assert await room.truth.get(keys[2]) is not None, "a turn of it still runs here"
        room.release()
        await held.finish()
        async with asyncio.timeout(10):
            while any([await room.truth.get(key) for key in keys]):
                await asyncio.sleep(0.01)


@over_one
async def test_a_final_that_is_refused_for_good_ends_all(rooms: Rooms) -> None:
    async with rooms.open(workers=5, models=THREE) as room:
        await ask(room, "a", "s")
        await ask(room, "c", "s")
        assert (await ask(room, "never", "s", at=1, final=True)).refusal == (404, "model_not_found")
        assert await room.truth.get(room.key("s")) is None
        assert await room.truth.get(room.key("s", "", "model", "c")) is None


@over_one
async def test_what_nobody_serves_is_told_in_the_words_of_the_api(rooms: Rooms) -> None:
    async with rooms.open(workers=2, models=(["a"], ["b"])) as room:
        for at in (0, 1):
            turn = await ask(room, "never", at=at)
            error = turn.json["error"]
            assert (turn.status, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert (error["type"], error["message"]) == ("invalid_request_error", "The model `never` does not exist.")
            turn = await ask(room, "never", at=at, path=MESSAGES)
            assert (turn.status, turn.json["error"]["type"]) == (404, "not_found_error")
        looked = sum(len(worker.requests) for worker in room.workers)
        for _ in range(20):
            assert (await ask(room, "never")).status == 404
        again = sum(len(worker.requests) for worker in room.workers) - looked
        assert again <= len(room.workers), "a name that was looked for just now is looked for again"
        assert served(room) == {"w0": 0, "w1": 0}


@over_one
async def test_a_model_whose_only_worker_is_away_is_known(rooms: Rooms) -> None:
    async with rooms.open(workers=2, models=(["a"], ["b"])) as room:
        await room.worker("w1").die()
        for at in (0, 1):
            for _ in range(2):
                assert (await ask(room, "b", at=at)).refusal[0] == 503
            assert (await ask(room, "b", at=at, path=MESSAGES)).json["error"]["type"] == "overloaded_error"
            assert (await ask(room, "a", at=at)).worker == "w0"


@over_one
async def test_hints_to_a_worker_that_does_not_serve_the_model_are_refused(rooms: Rooms) -> None:
    async with rooms.open(workers=2, models=(["a"], ["b"])) as room:
        hint = {"x-dynamo-worker-instance-id": "w1"}
        for session in (None, "s"):
            assert (await ask(room, "a", session, headers=hint)).refusal == (400, "unknown_worker")
            assert (await ask(room, "b", session, headers=hint)).worker == "w1"


async def test_an_adapter_that_is_loaded_later_is_found_on_both_replicas(rooms: Rooms) -> None:
    async with rooms.open(workers=3, models=(["a"], ["a"], ["b"])) as room:
        await ask(room, "a", "s", headers={"x-dynamo-worker-instance-id": "w0"})
        room.worker("w1").models.append("lora")
        for at in (0, 1):
            turn = await ask(room, "lora", "s", at=at)
            assert (turn.status, turn.worker) == (200, "w1")
        room.worker("w1").models.remove("lora")
        room.worker("w2").models.append("lora")

        def found() -> bool:
            for app in room.replicas:
                app.catalog.look()  # again: one that is under way already may be of before
            return all(app.catalog.serving("lora") == frozenset({"w2"}) for app in room.replicas)

        await until(found)
        # Its claim beside the session's own moves to where the model is now.
        assert [(await ask(room, "lora", "s", at=at)).worker for at in (1, 0)] == ["w2", "w2"]
        assert (await ask(room, "a", "s", at=1)).worker == "w0"


@over_one
async def test_a_dry_run_knows_what_serves_the_model(rooms: Rooms) -> None:
    async with rooms.open(workers=2, models=(["a"], ["b"])) as room:
        dry = {"x-coatcheck-dry-run": "true"}
        await ask(room, "a", "s")
        assert (await ask(room, "b", "s", headers=dry)).json["worker"] == "w1"
        there = await ask(room, "b", "s")
        told = (await ask(room, "b", "s", headers=dry, at=1)).json
        assert (told["worker"], told["session"]) == (there.worker, room.key("s", "", "model", "b"))
        assert (await ask(room, "a", "s", headers=dry)).json["worker"] == "w0"
        assert (await ask(room, "never", headers=dry)).refusal == (404, "model_not_found")


@over_one
async def test_engines_that_take_any_name_get_it(rooms: Rooms) -> None:
    async with rooms.open(workers=2, models=(["a"], ["b"]), unknown_models="pass") as room:
        assert (await ask(room, "never")).status == 200
        assert (await ask(room, "b")).worker == "w1"


async def test_the_last_word_of_each_worker_is_known_to_whoever_starts_later(rooms: Rooms) -> None:
    async with rooms.open(workers=2, models=(["a"], ["b"])) as room:

        async def written() -> bool:
            return len(await room.truth.registry.list("models")) == 2

        await until(written)
        records = await room.truth.registry.list("models")
        assert {name: list(json.loads(value)["models"]) for name, value in records.items()} == {
            "w0": ["a"],
            "w1": ["b"],
        }
        for app in room.replicas:
            app.catalog.look()
        room.worker("w0").models = ["a", "new"]
        await until(lambda: all(app.catalog.serving("new") for app in room.replicas))
        assert (await room.truth.registry.list("models"))["w1"] == records["w1"], "written without a change"
