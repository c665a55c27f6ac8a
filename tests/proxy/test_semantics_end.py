"""What a session is, sentence by sentence of `docs/sessions.md`: how it ends, and how it is looked at."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from app.main import Router
from tests.support.raw import until
from tests.support.room import EVERY, Room, Rooms, Sentences, Turn

says = Sentences()
AT = "x-dynamo-worker-instance-id"
NOBODY = {AT: "nobody"}
"""A hint that the router refuses."""
DRY = {"x-coatcheck-dry-run": "true"}


async def is_new(room: Room, session: str = "s") -> None:
    """At every replica it is a session that nobody knows."""
    assert await room.claim(session) is None
    key = room.key(session)
    if not room.truth.stamp(key):  # then its watch tells a replica of a close, and may take a moment
        await until(lambda: not any(map(partial(_believes, key=key), room.replicas)))
    assert (await room.turn(session, at=1)).how == "created"
    assert (await room.turn(session, at=0)).how == "stored"


def _believes(app: Router, key: str) -> bool:
    """Whether a replica goes by the claim that it knows, without reading it again."""
    return any(view.key == key and view.source == "memory" for view in app.affinity.page("", 1000))


# -- final turns


@says(
    "A final turn closes the claim before the client sees the end of the answer; then the id is a new session "
    "anywhere.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        for test in ("200", "hold"):
            for at in (0, 1):
                await room.turn("s", at=at)
            ends: list[object] = []

            room.release()
            final = room.start("s", final=True, test=test)

            async def look(_: bytes, final: Turn = final, ends: list[object] = ends) -> None:
                if b"[DONE]" in final.body or final.complete:
                    ends.append(await room.claim("s"))

            final.on_data = look
            await final.finish()
            assert final.status == 200
            assert ends
            assert not any(ends)
            await is_new(room)


@says("A final turn of an id that is not bound is a whole session in one turn.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        turn = await room.turn("s", final=True)
        assert (turn.status, turn.how) == (200, "created")
        await is_new(room)


@says("While other turns of the session run at the same replica, the last of them closes.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        held = await room.held("s")
        assert (await room.turn("s", final=True)).status == 200
        claim = await room.mark("s")
        assert claim is not None
        joined = await room.turn("s")
        assert joined.worker == held.worker
        assert await room.mark("s") == claim
        room.release()
        await held.finish()
        assert held.complete
        await is_new(room)


@says("Turns that run at another replica do not keep the claim, and end undisturbed.", over=EVERY)
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        held = await room.held("s", at=1)
        assert (await room.turn("s", final=True)).status == 200
        assert await room.claim("s") is None
        room.release()
        await held.finish()
        assert held.complete
        assert held.body.endswith(b"[DONE]\n\n")
        await is_new(room)


@says("Two final turns at once, anywhere, are both served, and the session ends once.", over=EVERY)
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        for _ in range(5):
            await room.turn("s")
            turns = [room.start("s", at=at, final=True) for at in (0, 1, 0, 1)]
            for turn in turns:
                await turn.finish()
                assert turn.status == 200
            await room.until_closed("s")
        await room.rest()
        await is_new(room)


@says("An answer that breaks after it has begun, and a client that leaves, end the session as well.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        await room.turn("s")
        broken = await room.turn("s", final=True, test="break")
        assert not broken.complete
        await room.until_closed("s")
        left = await room.held("s", final=True)
        left.leave()
        await left.finish()
        await room.until_closed("s")
        waiting = room.start("s", final=True, test="silent")
        await until(lambda: any(seen.get("x-test") == "silent" for w in room.workers for seen in w.turns))
        assert await room.claim("s") is not None
        waiting.leave()
        await waiting.finish()
        await room.until_closed("s")
        await room.turn("s")
        early = room.start("s", final=True)
        early.leave()  # before the session is looked for
        await early.finish()
        await room.until_closed("s")
        await is_new(room)


@says("A 4xx that would be the same again ends the session, be it the worker's or the router's.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(dp=2) as room:
        refused: list[tuple[int, dict[str, Any]]] = [
            *((status, {"test": str(status)}) for status in (400, 401, 403, 404, 413, 422)),
            (400, {"headers": NOBODY}),
            (400, {"headers": {"x-dynamo-dp-rank": "x"}}),
            (400, {"headers": {AT: "w9"}}),
            (413, {"headers": {"content-length": "999999999"}}),
        ]
        for status, how in refused:
            await room.turn("s")
            assert (await room.turn("s", **how)).status == status
            assert await room.claim("s") is not None
            assert (await room.turn("s", final=True, **how)).status == status
            assert await room.claim("s") is None, how
        await is_new(room)


@says(
    "After 408, 409, 425, 429, 5xx or no answer it stays, so that the client's next try finds its worker, and ends it."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        first = await room.turn("s")
        claim = await room.mark("s")
        for test in ("408", "409", "425", "429", "500", "502", "503", "504", "drop"):
            turn = await room.turn("s", final=True, test=test)
            assert (turn.worker, turn.status) == (first.worker, 502 if test == "drop" else int(test))
            assert await room.mark("s") == claim
        retried = await room.turn("s", at=1, final=True)
        assert (retried.worker, retried.status) == (first.worker, 200)
        await is_new(room)


@says("A claim that was made after the one that a final turn ends is never closed by it.", over=EVERY)
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        await room.turn("s")
        gate = room.stores[0].hold("close")
        final = room.start("s", final=True)
        await until(lambda: room.stores[0].calls["close"])
        successor = await room.claim_at("w1", "s")
        gate.set()
        await final.finish()
        assert final.status == 200
        await room.rest()
        assert await room.mark("s") == (successor.revision, successor.value.nonce)


@says(
    "While the store is away a final turn is answered all the same; the session ends when the store is back, also "
    "where the replica had not known it.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(store_deadline=0.3) as room:
        for name, at in (("s", 0), ("refused", 0), ("unknown", 1)):
            await room.turn(name, at=at)
        await asyncio.sleep(1.1)  # a claim says in which second it was made
        room.stores[0].go_away()
        assert (await room.turn("s", final=True)).status == 200
        assert (await room.turn("refused", final=True, headers=NOBODY)).status == 400
        ended = await room.turn("unknown", final=True)
        assert (ended.status, ended.how) == (200, "degraded")
        for name in ("s", "refused", "unknown"):
            assert await room.claim(name) is not None
        room.stores[0].return_()
        for name in ("s", "refused", "unknown"):
            await room.until_closed(name)


# -- the end by itself


@says(
    "A turn that runs keeps its session, however long; after the end of its last turn, at whichever replica, a session "
    "lives `session-ttl` seconds more and is then new everywhere.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    ttl, late = 4.0, 10.0
    async with rooms.open(session_ttl=ttl, store_deadline=0.9) as room:
        for at in (0, 1):
            await room.turn("s", at=at)
        held = await room.held("s")
        claim = await room.claim("s")
        assert claim is not None
        # Longer than any store lets it live by itself.
        until_then = time.monotonic() + 1.5 * ttl
        while time.monotonic() < until_then:
            now = await room.claim("s")
            assert now is not None
            assert now.revision == claim.revision
            await asyncio.sleep(0.15)
        room.release()
        await held.finish()
        ended = time.monotonic()
        while await room.stands("s"):
            assert time.monotonic() < ended + 1.25 * ttl + late
            await asyncio.sleep(0.1)
        assert time.monotonic() - ended >= 0.9 * ttl
        await is_new(room)


# -- looking


@says(
    "Looking a session up, listing sessions and asking by a dry run claim nothing, renew nothing and end nothing.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(session_ttl=16.0, store_deadline=8.0) as room:
        for at in (0, 1):
            await room.turn("s", at=at)
        await asyncio.sleep(4.1)  # a turn would renew now: a quarter of the TTL has gone by
        before, calls = await room.claim("s"), room.calls()
        for at in (0, 1):
            async with room.admin(at) as client:
                assert (await client.get("/admin/session", params={"session": "s"})).json()["source"] == "memory"
                assert (await client.get("/admin/session", params={"session": "x"})).status_code == 404
                assert (await client.get("/admin/sessions")).json()["total"] == 1
                assert (await client.get("/admin/workers")).status_code == 200
            for final in (False, True):
                for session in ("s", "x", None):
                    assert (await room.turn(session, at=at, final=final, headers=DRY)).status == 200
                refused = await room.turn("s", at=at, final=final, headers=DRY | {AT: "w9"})
                assert refused.refusal == (400, "unknown_worker")
        assert (room.calls() - calls).keys() <= {"get"}
        after = await room.claim("s")
        assert before is not None
        assert after is not None
        assert after.revision == before.revision
        if rooms.kind != "etcd":  # whose claims do not say when they end to whoever reads them
            assert after.expires_at == pytest.approx(before.expires_at, abs=0.05)
        assert await room.claim("x") is None
        assert room.served_count == 2


@says("A dry run (`X-Coatcheck-Dry-Run: true`) answers the target that the turn would get, and why.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3, dp=2, affinity="soft", overload=1) as room:

        async def predicted(session: str | None = None, **how: Any) -> tuple[str, str]:
            """What it says of the affinity and the reason; the turn itself must go there."""
            headers = how.pop("headers", {})
            said = [(await room.turn(session, headers=headers | DRY, **how)).json for _ in range(3)]
            assert said[0] == said[1] == said[2]
            turn = await room.turn(session, headers=headers, **how)
            assert (said[0]["worker"], said[0]["rank"]) == (turn.worker, int(turn.rank or -1))
            assert said[0]["affinity"] == turn.how
            return said[0]["affinity"], said[0]["because"]

        assert await predicted() == ("none", "policy")
        assert await predicted(headers={AT: "w1"}) == ("none", "hint")
        assert await predicted("s") == ("created", "policy")
        assert await predicted("s") == ("cached", "memory")
        assert await predicted("s", at=1) == ("stored", "store")
        assert await predicted("hinted", headers={AT: "w2"}) == ("created", "hint")
        assert await predicted("child", headers={"x-dynamo-parent-session-id": "hinted"}) == ("created", "parent")
        assert await predicted("orphan", headers={"x-dynamo-parent-session-id": "nobody"}) == ("created", "policy")
        await room.claim_at("gone", "moved")
        moved = (await room.turn("moved", headers=DRY)).json  # of equals, the turn itself may get another
        assert (moved["affinity"], moved["because"]) == ("rebound", "policy")
        assert (await room.turn("moved")).how == "rebound"
        held = await room.held("s")
        assert await predicted("s") == ("bypassed", "overload")
        room.release()
        await held.finish()
        alone = await room.turn("new", headers={"x-dynamo-dp-rank": "0"} | DRY)
        assert alone.refusal == (400, "invalid_hint")


@says(
    "A session is looked up by its id: its target, what stands in the claim, and where the replica knows it from.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    file, (alice,) = rooms.keys("alice")
    async with rooms.open(dp=2, api_keys=file) as room:
        held = await room.held("s", key=alice)
        child = {"x-claude-code-session-id": "run", "x-claude-code-agent-id": "a"}
        await room.turn(key=alice, headers=child)
        claim = await room.claim("s", tenant="alice")
        assert claim is not None
        for at, source, active in ((0, "memory", 1), (1, "store", 0)):
            async with room.admin(at) as client:
                query = {"session": "s", "tenant": "alice"}
                said = (await client.get("/admin/session", params=query)).json()
                assert said | {"expires_in_seconds": 0, "age_seconds": 0} == {
                    "session": claim.key,
                    "worker": held.worker,
                    "rank": int(held.rank or -1),
                    "known_worker": True,
                    "revision": claim.revision,
                    "generation": 0,
                    "created_by": "r0",
                    "age_seconds": 0,
                    "expires_in_seconds": 0,
                    "active_here": active,
                    "source": source,
                    "asked": f"r{at}",
                }
                assert 0 <= said["age_seconds"] < 60
                assert said["expires_in_seconds"] is None or 1000 < said["expires_in_seconds"] <= 1800
                by_hash = await client.get("/admin/session", params={"session": claim.key, "hashed": "true"})
                assert by_hash.json()["revision"] == claim.revision
                query = {"session": "run", "agent": "a", "tenant": "alice"}
                assert (await client.get("/admin/session", params=query)).status_code == 200
                for missing in ({"session": "s"}, {"session": "run", "tenant": "alice"}):
                    assert (await client.get("/admin/session", params=missing)).status_code == 404
                for bad in ({"session": ""}, {"session": "s", "hashed": "true"}, {}):
                    answer = await client.get("/admin/session", params=bad)
                    assert (answer.status_code, answer.json().keys()) == (400, {"error"})
        room.release()
        await held.finish()


@says("Lists are paged, counted by worker, and name sessions by their hash only.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        names = [f"conversation-{number}" for number in range(7)]
        for number, name in enumerate(names):
            await room.turn(name, headers={AT: f"w{number % 2}"})
        async with room.admin() as client:
            pages, after = [], ""
            while True:
                answer = await client.get("/admin/sessions", params={"limit": 3, "after": after})
                assert "conversation" not in answer.text
                said = answer.json()
                assert (said["total"], said["by_worker"]) == (7, {"w0": 4, "w1": 3})
                pages.append([each["session"] for each in said["sessions"]])
                if said["next"] is None:
                    break
                after = said["next"]
            assert [len(page) for page in pages] == [3, 3, 1]
            assert [key for page in pages for key in page] == sorted(room.key(name) for name in names)
            at_w1 = (await client.get("/admin/sessions", params={"worker": "w1"})).json()["sessions"]
            assert {each["session"] for each in at_w1} == {room.key(name) for name in names[1::2]}
            workers = (await client.get("/admin/workers")).json()["workers"]
            assert [(each["name"], each["sessions"]) for each in workers] == [("w0", 4), ("w1", 3)]
            for wrong in ({"limit": 0}, {"limit": 1001}, {"limit": "x"}):
                answer = await client.get("/admin/sessions", params=wrong)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@says("An admin closes a session at any replica; turns of it that run there end first.", over=EVERY)
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:

        async def closed(at: int, session: str = "s") -> str:
            async with room.admin(at) as client:
                answer = await client.delete("/admin/session", params={"session": session})
                assert answer.json()["session"] == room.key(session)
                return str(answer.json()["outcome"])

        assert await closed(0) == "gone"
        await room.turn("s")
        assert await closed(1) == "closed"
        await is_new(room)
        assert await closed(0) == "closed"
        await is_new(room)
        held = await room.held("s")
        assert await closed(0) == "pending"
        assert await room.claim("s") is not None
        room.release()
        await held.finish()
        await room.until_closed("s")
        await room.rest()
        await is_new(room)


@says(
    "The admin API is for whoever has `admin-token`; without one, for the router's own machine by its own name, not "
    "through a proxy or another site's page, and only while nobody else can connect to the router."
)
async def _(rooms: Rooms) -> None:
    calls = [("GET", "/admin/session?session=s"), ("DELETE", "/admin/session?session=s")]
    calls += [("GET", "/admin/sessions"), ("GET", "/admin/workers")]
    async with rooms.open(replicas=1) as room:
        await room.turn("s")
        for peer, headers, status in (
            ("192.0.2.1", {}, 403),
            ("127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, 403),
            ("127.0.0.1", {"forwarded": "for=127.0.0.1"}, 403),
            ("127.0.0.1", {"host": "evil.example"}, 403),
            ("127.0.0.1", {"origin": "http://evil.example"}, 403),
            ("::1", {}, 200),
            ("::ffff:127.0.0.1", {}, 200),
        ):
            async with room.admin(peer=peer) as client:
                for method, path in calls:
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code in ((status, 404) if status == 200 else (status,)), (peer, headers)
                    if status == 403:
                        assert answer.json()["error"]["code"] == "forbidden"
            assert (await room.claim("s") is None) == (status == 200)
    elsewheres: tuple[dict[str, Any], ...] = ({"host": "0.0.0.0"}, {"admin_listen": "0.0.0.0:9"})
    for elsewhere in elsewheres:
        async with rooms.open(replicas=1, **elsewhere) as room, room.admin() as client:
            for method, path in calls:
                assert (await client.request(method, path)).status_code in (403, 404)
    async with rooms.open(replicas=1, admin_token="hush") as room:
        await room.turn("s")
        for headers, status in (
            ({}, 403),
            ({"authorization": "Bearer hus"}, 403),
            ({"authorization": "Bearer hush"}, 200),
            ({"x-coatcheck-admin-token": "hush"}, 200),
        ):
            async with room.admin() as client:
                assert (await client.get("/admin/sessions", headers=headers)).status_code == status


@pytest.mark.asyncio(loop_factories=["uvloop"])
@says.shown
async def test_what_a_session_is(sentence: str, rooms: Rooms) -> None:
    await says[sentence](rooms)
