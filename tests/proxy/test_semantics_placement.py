"""What a session is, sentence by sentence of `docs/sessions.md`: where its turns go."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter, deque
from itertools import pairwise
from typing import Any

import pytest

from backends.base import OutcomeUnknown, StoreUnavailable
from tests.support.raw import until
from tests.support.room import EVERY, JSON, Room, Rooms, Sentences, Turn

says = Sentences()
AT = "x-dynamo-worker-instance-id"
RANK = "x-dynamo-dp-rank"
SENT_RANK = "x-data-parallel-rank"


async def all_of(*turns: Turn) -> list[Turn]:
    return [await turn.finish() for turn in turns]


def overridden(room: Room) -> int:
    return sum(app.metrics.hints_overridden.cells[()] for app in room.replicas)


# -- claims, hints, policy


@says(
    "The first turn claims a worker for the session; of turns that arrive at once, at any replicas, one claims.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3) as room:
        sessions = [room.new() for _ in range(20)]
        turns = await all_of(*(room.start(name, at=at) for name in sessions for at in (0, 1, 0, 1)))
        for number in range(20):
            assert len({turn.worker for turn in turns[4 * number : 4 * number + 4]}) == 1
        assert Counter(turn.how for turn in turns)["created"] == 20
        for name in sessions:
            places = [w for w, seen in room.served.items() if any(t["x-dynamo-session-id"] == name for t in seen)]
            assert len(places) == 1


@says("A claim goes before a hint, and what it overrides is counted.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        assert (await room.turn("s", headers={AT: "w1"})).how == "created"
        assert overridden(room) == 0
        for at, how in ((0, "cached"), (1, "stored"), (1, "cached")):
            turn = await room.turn("s", at=at, headers={AT: "w0"})
            assert (turn.worker, turn.how) == ("w1", how)
        assert overridden(room) == 3
        await room.turn("s", headers={AT: "w1"})
        assert overridden(room) == 3
        assert room.served["w0"] == []


@says("With `hint-conflict = reject` a hint that the claim contradicts is answered 400, and the turn does not run.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(hint_conflict="reject") as room:
        assert (await room.turn("s", headers={AT: "w1"})).status == 200
        for at in (0, 1):
            assert (await room.turn("s", at=at, headers={AT: "w0"})).refusal == (400, "hint_conflict")
            assert (await room.turn("s", at=at, headers={RANK: "0"})).refusal == (400, "hint_conflict")
            assert (await room.turn("s", at=at, headers={AT: "w1"})).worker == "w1"
        assert room.served_count == 3
        assert overridden(room) == 0


@says("A hint goes before the policy: the headers', else the body's `nvext`; with and without a session.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3, dp=2) as room:

        async def goes(nvext: dict[str, object] | None = None, **headers: str) -> tuple[str | None, str | None]:
            body = json.dumps({"nvext": nvext} if nvext else {}).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()} | JSON
            places = set()
            for session in (None, room.new()):
                turn = await room.turn(session, headers=named, body=body)
                places.add((turn.worker, turn.rank))
            assert len(places) == 1
            return places.pop()

        at, rank = AT.replace("-", "_"), RANK.replace("-", "_")
        for _ in range(2):
            headers: dict[str, Any] = {at: "w2", rank: "1"}
            assert await goes(**headers) == ("w2", "1")
            assert await goes({"backend_instance_id": "w1", "dp_rank": 0}) == ("w1", "0")
            assert await goes({"decode_worker_id": "w0", "dp_rank": 1}) == ("w0", "1")
            assert await goes({"backend_instance_id": "w1", "decode_worker_id": "w0", "dp_rank": 1}) == ("w1", "1")
            assert await goes({"backend_instance_id": "w1", "dp_rank": 1}, **{at: "w2", rank: "0"}) == ("w2", "0")
        places = [await room.turn(room.new(), headers={AT: "w1"}) for _ in range(4)]
        assert Counter((turn.worker, turn.rank) for turn in places) == {("w1", "0"): 2, ("w1", "1"): 2}


@says("A hint for a worker or rank that is not there is answered 400, which names what is there to admins only.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(dp=2) as room:
        for session in (None, "s"):
            for hint in ({AT: "w9"}, {AT: "w0", RANK: "2"}):
                turn = await room.turn(session, headers=hint)
                assert turn.refusal == (400, "unknown_worker")
                assert "w0, w1" in turn.json["error"]["message"]
                stranger = await room.turn(session, headers=hint, peer="192.0.2.1")
                assert stranger.refusal == (400, "unknown_worker")
                assert "w1" not in stranger.json["error"]["message"]
                proxied = await room.turn(session, headers=hint | {"x-forwarded-for": "127.0.0.1"})
                assert "w1" not in proxied.json["error"]["message"]
                renamed = await room.turn(session, headers=hint, host="evil.example")
                assert "w1" not in renamed.json["error"]["message"]
        assert await room.claim("s") is None
    async with rooms.open(admin_token="hush") as room:
        hint = {AT: "w9"}
        assert "w1" not in (await room.turn(headers=hint)).json["error"]["message"]
        shown = await room.turn(headers=hint | {"x-coatcheck-admin-token": "hush"}, peer="192.0.2.1")
        assert "w0, w1" in shown.json["error"]["message"]


@says("A rank alone is a hint for a session that has a claim; without a claim or a session it is answered 400.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(dp=2) as room:
        for at in (0, 1):
            assert (await room.turn(at=at, headers={RANK: "1"})).refusal == (400, "invalid_hint")
            assert (await room.turn("s", at=at, headers={RANK: "1"})).refusal == (400, "invalid_hint")
        assert await room.claim("s") is None
        assert room.served_count == 0
        await room.turn("s", headers={AT: "w1", RANK: "1"})
        for at in (1, 0):
            turn = await room.turn("s", at=at, headers={RANK: "1"})
            assert (turn.worker, turn.rank) == ("w1", "1")
        assert overridden(room) == 0
        assert (await room.turn("s", headers={RANK: "0"})).rank == "1"
        assert overridden(room) == 1
        for bad in ("-1", "1.0", "one", "1234567"):
            assert (await room.turn("s", headers={RANK: bad})).refusal == (400, "invalid_hint")


@says(
    "Hints for a prefill stage where no worker has a phase, and hints in the body of a type that no hint has, are "
    "accepted, counted and have no effect."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(replicas=1) as room:
        ignored = room.replicas[0].metrics.hints_ignored.cells
        assert (await room.turn("s", headers={"x-dynamo-prefill-instance-id": "w9"})).status == 200
        assert (await room.turn("s", headers={"x-dynamo-prefill-dp-rank": "7"})).status == 200
        for nvext in (b'{"prefill_worker_id": 9}', b'{"prefill_dp_rank": 9}'):
            assert (await room.turn("s", headers=JSON, body=b'{"nvext": %b}' % nvext)).status == 200
        assert ignored["prefill",] == 4
        for nvext in (b'{"dp_rank": "1"}', b"[]", b'{"backend_instance_id": {}}'):
            assert (await room.turn("s", headers=JSON, body=b'{"nvext": %b}' % nvext)).status == 200
        assert ignored["malformed",] == 3


@says("With `hints = pass` hints are passed on unjudged and have no effect: they are for a router behind this one.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(hints="pass", workers=1) as room:
        hints = {AT: "7587890123456789012", RANK: "any", "x-dynamo-prefill-instance-id": "9"}
        for session in (None, "s"):
            assert (await room.turn(session, headers=hints)).status == 200
            assert hints.items() <= room.workers[0].turns[-1].items()
            assert (await room.turn(session, headers=JSON, body=b'{"nvext": {"dp_rank": 9}}')).status == 200


@says("With `policy = direct` a turn that has neither a claim nor a hint is answered 400.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(policy="direct", workers=3) as room:
        for session in (None, "s"):
            assert (await room.turn(session)).refusal == (400, "hint_required")
        assert await room.claim("s") is None
        assert (await room.turn(headers={AT: "w1"})).worker == "w1"
        assert (await room.turn("s", headers={AT: "w1"})).worker == "w1"
        assert (await room.turn("s", at=1)).worker == "w1"
        # The worker is lost: whoever places must say where to now, and may at once.
        await room.worker("w1").die()
        claim = await room.mark("s")
        assert (await room.turn("s")).refusal == (503, "worker_unreachable")
        assert await room.mark("s") == claim
        moved = await room.turn("s", headers={AT: "w2"})
        assert (moved.worker, moved.how) == ("w2", "rebound")


# -- ranks


@says("Each rank of a worker (`--worker URL,dp=4`) is a target of its own, rank 0 too, with a load of its own.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(dp=4, replicas=1) as room:
        turns = [await room.turn(room.new()) for _ in range(16)]
        assert set(Counter((turn.worker, turn.rank) for turn in turns).values()) == {2}
        assert {turn.rank for turn in turns} == {"0", "1", "2", "3"}
    async with rooms.open(workers=1, dp=3, replicas=1) as room:
        held = [await room.held(room.new()) for _ in range(2)]
        assert len({turn.rank for turn in held}) == 2
        (free,) = {"0", "1", "2"} - {turn.rank for turn in held}
        for session in (room.new(), None, None, None):
            assert (await room.turn(session)).rank == free
        room.release()
        await all_of(*held)


@says("A claim names the rank, and every replica keeps to it.", over=EVERY)
async def _(rooms: Rooms) -> None:
    async with rooms.open(dp=4) as room:
        for name in (room.new() for _ in range(8)):
            first = await room.turn(name)
            for at in (1, 0, 1):
                turn = await room.turn(name, at=at)
                assert (turn.worker, turn.rank) == (first.worker, first.rank)
            claim = await room.claim(name)
            assert claim is not None
            assert (claim.value.worker, str(claim.value.rank)) == (first.worker, first.rank)


@says("The worker is told the rank in `X-data-parallel-rank`, with and without a session, whatever the client sent.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(dp=2) as room:
        for session in (None, "s", "s", "t", "u"):
            turn = await room.turn(session, headers={SENT_RANK: "99"})
            assert room.served[str(turn.worker)][-1][SENT_RANK] == turn.rank
        sent = {seen[SENT_RANK] for turns in room.served.values() for seen in turns}
        assert sent == {"0", "1"}
    async with rooms.open(dp=2, workers=1, replicas=1, rank_header="X-Rank") as room:
        turn = await room.turn("s")
        assert room.workers[0].turns[0]["x-rank"] == turn.rank
        assert SENT_RANK not in room.workers[0].turns[0]
    async with rooms.open(workers=1, replicas=1) as room:  # without ranks it means nothing to us
        turn = await room.turn("s", headers={SENT_RANK: "99"})
        assert turn.rank is None
        assert room.workers[0].turns[0][SENT_RANK] == "99"


# -- parents

FAMILIES = [
    ({"x-dynamo-session-id": "{0}"}, {"x-dynamo-session-id": "{1}", "x-dynamo-parent-session-id": "{0}"}),
    (
        {"x-claude-code-session-id": "{0}"},
        {"x-claude-code-session-id": "{0}", "x-claude-code-agent-id": "{1}"},
    ),
    (
        {"x-claude-code-session-id": "{0}", "x-claude-code-agent-id": "{0}"},
        {
            "x-claude-code-session-id": "{0}",
            "x-claude-code-agent-id": "{1}",
            "x-claude-code-parent-agent-id": "{0}",
        },
    ),
    ({"thread-id": "{0}"}, {"thread-id": "{1}", "x-codex-parent-thread-id": "{0}"}),
    ({"session-id": "{0}"}, {"session-id": "{1}", "x-codex-parent-thread-id": "{0}"}),
    ({"x-session-id": "{0}"}, {"x-session-id": "{1}", "x-parent-session-id": "{0}"}),
]


def filled(headers: dict[str, str], *ids: str) -> dict[str, str]:
    return {name: value.format(*ids) for name, value in headers.items()}


@says("The first turn of a child session goes to its parent's target: ten sub-agents that start at once land with it.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3, dp=2) as room:
        for parent, child in FAMILIES:
            old = room.new()
            home = await room.turn(headers=filled(parent, old))
            one_side = child is FAMILIES[0][1]
            children = await all_of(
                *(
                    room.start(headers=filled(child, old, room.new()), at=0 if one_side else number % 2)
                    for number in range(10)
                )
            )
            assert {turn.how for turn in children} == {"created"}
            assert {(turn.worker, turn.rank) for turn in children} == {(home.worker, home.rank)}


@says("It goes elsewhere when that worker is lost or has over `parent-slack` turns more than the least loaded target.")
async def _(rooms: Rooms) -> None:
    child = {"x-dynamo-parent-session-id": "p"}
    async with rooms.open(workers=3, parent_slack=1) as room:
        home = await room.turn("p", headers={AT: "w1"})
        held = [await room.held(name, headers={AT: "w1"}) for name in ("a", "b")]
        assert (await room.turn("busy", headers=child)).worker != home.worker
        room.release()
        await all_of(*held)
        assert (await room.turn("later", headers=child)).worker == home.worker
        assert (await room.turn("busy", at=1, headers=child)).worker != home.worker  # it is claimed there
        parents = room.replicas[0].metrics.parents.cells
        assert (parents["passed_over",], parents["followed",]) == (1, 1)
        await room.worker("w1").die()
        lost = await all_of(*(room.start(room.new(), headers=child, at=n % 2) for n in range(8)))
        assert {turn.status for turn in lost} == {200}
        assert {turn.worker for turn in lost} == {"w0", "w2"}


@says("A parent that is not bound, or is another tenant's, is no help: the policy places the child.")
async def _(rooms: Rooms) -> None:
    file, (alice, bob) = rooms.keys("alice", "bob")
    async with rooms.open(replicas=1, api_keys=file) as room:
        await room.turn("p", key=alice, headers={AT: "w1"})
        turns = [await room.turn(room.new(), key=bob, headers={"x-dynamo-parent-session-id": "p"}) for _ in range(6)]
        assert Counter(turn.worker for turn in turns) == {"w0": 3, "w1": 3}
        assert room.replicas[0].metrics.parents.cells["unknown",] == 6


# -- a worker is lost


@says(
    "When its worker cannot be connected to, the same turn goes on at another one, and every replica follows.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3) as room:
        for at in (0, 1):
            await room.turn("s", at=at, headers={AT: "w1"})
        before = await room.claim("s")
        assert before is not None
        await room.worker("w1").die()
        moved = await room.turn("s")
        assert (moved.status, moved.how) == (200, "rebound")
        assert moved.worker != "w1"
        turns = await all_of(*(room.start("s", at=at) for at in (1, 0, 1)))
        assert {(turn.status, turn.worker) for turn in turns} == {(200, moved.worker)}
        after = await room.claim("s")
        assert after is not None
        assert (after.value.worker, after.value.generation) == (moved.worker, before.value.generation + 1)
        assert after.revision != before.revision


@says("The sessions of a lost worker spread over all that are left.", over=("file",))
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=5) as room:
        sessions = [room.new() for _ in range(120)]
        await all_of(*(room.start(name, at=n % 2, headers={AT: "w2"}) for n, name in enumerate(sessions)))
        assert len(room.served["w2"]) == 120
        await room.worker("w2").die()
        # At both replicas at once: they must agree on each, too.
        for batch in range(0, 120, 40):
            turns = await all_of(*(room.start(name, at=at) for name in sessions[batch : batch + 40] for at in (0, 1)))
            assert {turn.status for turn in turns} == {200}
            assert all(a.worker == b.worker for a, b in list(pairwise(turns))[::2])
        claims = [await room.claim(name) for name in sessions]
        shares = Counter(claim.value.worker for claim in claims if claim is not None)
        assert shares.total() == 120
        assert shares.keys() == {"w0", "w1", "w3", "w4"}
        assert max(shares.values()) <= 2 * 120 / 4


@says("A worker that is slow or answers 5xx is not lost: the session stays.")
async def _(rooms: Rooms) -> None:
    async with rooms.open() as room:
        first = await room.turn("s")
        held = await room.held("s")
        for test in ("500", "503", "429", "drop", "break"):
            assert (await room.turn("s", test=test)).worker == first.worker
        room.release()
        await held.finish()
        for at in (0, 1):
            assert (await room.turn("s", at=at)).worker == first.worker


@says(
    "A turn whose worker is gone before a byte of the answer came goes on at another one, once; one whose worker only "
    "broke the connection is answered 502."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3) as room:
        await room.turn("s", headers={AT: "w1"})
        for name in ("s", None):
            turn = await room.turn(name, headers={AT: "w1"}, test="drop")
            assert turn.refusal == (502, "worker_reset")
        assert (len(room.served["w1"]), room.served_count) == (3, 3)
        moved = await room.turn("s", test="crash:w1")
        assert (moved.status, moved.how) == (200, "rebound")
        claim = await room.claim("s")
        assert claim is not None
        assert claim.value.worker == moved.worker
        assert (len(room.served["w1"]), room.served_count) == (4, 5)
    async with rooms.open(workers=3) as room:
        assert (await room.turn("t", test="crash:w0,w1,w2")).refusal == (502, "workers_died")
        assert room.served_count == 2
        assert (await room.turn("t")).status == 200


@says("A replica moves a session at most 6 times in 30 s, so that two that see the workers differently do not fight.")
async def _(rooms: Rooms) -> None:
    # Each move takes two seconds or more here, and a busy machine more than 30 for all of them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.sessions.resolver._MOVES_WINDOW", 600.0)
        await _moves_six_times(rooms)


async def _moves_six_times(rooms: Rooms) -> None:
    async with rooms.open(max_stale=0.001) as room:
        for number in range(6):
            await room.claim_at(f"elsewhere-{number}", "s")
            turn = await room.turn("s")
            assert (turn.status, turn.how) == (200, "rebound")
        await room.claim_at("elsewhere-6", "s")
        assert (await room.turn("s")).refusal == (503, "no_worker")
        claim = await room.claim("s")
        assert claim is not None
        assert claim.value.worker == "elsewhere-6"
        assert (await room.turn("other")).status == 200
        assert (await room.turn("s", at=1)).how == "rebound"


# -- when its first turn fails


@says(
    "A first turn that is answered 408, 409, 425, 429 or 5xx, or not at all, leaves no claim: the next try may go "
    "elsewhere.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3) as room:
        for test in ("408", "409", "425", "429", "500", "503", "drop"):
            for final in (False, True):
                turn = await room.turn("s", final=final, test=test, headers={AT: "w1"})
                assert (turn.worker, turn.how) == ("w1", "created")
                await room.until_closed("s")
        silent = room.start("s", test="silent", headers={AT: "w1"})
        await until(lambda: any(seen.get("x-test") == "silent" for seen in room.worker("w1").turns))
        silent.leave()
        await silent.finish()
        await room.until_closed("s")
        again = await room.turn("s", headers={AT: "w2"})
        assert (again.worker, again.how) == ("w2", "created")


@says(
    "If another turn of the session has been answered by then, the claim stays; if one is still running here, that one "
    "decides."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3) as room:
        for other, stands in (("200", True), ("500", False)):
            first = room.start("s", test="silent", headers={AT: "w1"})
            await until(lambda: any(seen.get("x-test") == "silent" for seen in room.worker("w1").turns))
            assert (await room.turn("s", test=other)).worker == "w1"
            first.leave()
            await first.finish()
            await room.rest()
            assert (await room.claim("s") is not None) is stands
            await room.turn("s", final=True)
            room.worker("w1").turns.clear()
        first = room.start("s", test="silent", headers={AT: "w1"})
        await until(lambda: any(seen.get("x-test") == "silent" for seen in room.worker("w1").turns))
        running = await room.held("s")
        first.leave()
        await first.finish()
        assert await room.claim("s") is not None
        room.release()
        await running.finish()
        await room.rest()
        assert await room.claim("s") is not None


# -- when the store does not answer


@says(
    "One call that fails or hangs moves nobody: it is tried again, and the store is away only when its checks fail too."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(store_deadline=1.2) as room:
        store = room.stores[0]
        store.deadline = 1.2
        calls = itertools.count()
        store.hangs = lambda op: op != "check" and next(calls) % 3 == 0
        turns = [await room.turn(room.new()) for _ in range(6)]
        assert {turn.how for turn in turns} == {"created"}
        store.hangs = None
        store.next_faults["create"] = deque([StoreUnavailable("no"), OutcomeUnknown("who knows")])
        assert (await room.turn("s")).how == "created"
        store.go_away()
        assert (await room.turn("t")).how == "degraded"
        store.return_()


@says("While the store is away, known sessions go on, and others go where a hash says, the same at every replica.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3, store_deadline=0.3) as room:
        known = {name: (await room.turn(name)).worker for name in ("a", "b", "c")}
        for store in room.stores:
            store.go_away()
        for name, worker in known.items():
            assert (await room.turn(name)).worker == worker
        for _ in range(10):
            name = room.new()
            one, two = [await room.turn(name, at=at) for at in (0, 1)]
            assert (one.worker, one.how) == (two.worker, two.how) == (one.worker, "degraded")
        for store in room.stores:
            store.return_()


@says(
    "A session that was served while the store was away stays there when it is back, also where the store has done "
    "late what a replica had given up, and where its worker had died meanwhile.",
    over=EVERY,
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3, store_deadline=0.3) as room:
        names = [room.new() for _ in range(12)]
        bound = {name: (await room.turn(name, headers={AT: "w1"})).worker for name in ("x", "y")}
        for store in room.stores:
            store.deadline = 0.3
            store.freeze()
        first = [room.start(name) for name in names]
        for turn in first:
            await turn.finish()
        served = {name: {(await room.turn(name, at=at)).worker for at in (0, 1)} for name in names}
        assert {len(workers) for workers in served.values()} == {1}
        await room.worker("w1").die()
        for name in bound:
            served[name] = {(await room.turn(name)).worker}
            assert served[name] != {"w1"}
        for store in room.stores:
            store.thaw()
        await until(lambda: all(app.affinity.state.value == "up" for app in room.replicas))
        for at in (0, 1, 0):
            for name, workers in served.items():
                if workers != {"w1"}:
                    assert {(await room.turn(name, at=at)).worker} == workers
            await asyncio.sleep(0.5)
        await room.rest()


@says(
    "A record that cannot be read costs its own session alone, which goes where the hash says until an admin closes it."
)
async def _(rooms: Rooms) -> None:
    async with rooms.open(workers=3) as room:
        for store in room.stores:
            store.garbage = room.stores[0].garbage
        room.stores[0].garbage[room.key("s")] = 7
        places = {(await room.turn("s", at=at, final=final)).worker for at in (0, 1) for final in (False, True)}
        assert len(places) == 1
        assert (await room.turn("t")).how == "created"
        assert (await room.turn("t", at=1)).how == "stored"
        async with room.admin() as client:
            assert (await client.get("/admin/session", params={"session": "s"})).json()["source"] == "unreadable"
            assert (await client.delete("/admin/session", params={"session": "s"})).json()["outcome"] == "closed"
        assert (await room.turn("s")).how == "created"


# -- soft affinity


@says("With `affinity = soft` a turn passes over its worker while that has `overload` turns; the claim stays.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(affinity="soft", overload=2) as room:
        held = [await room.held("s", headers={AT: "w1"}), await room.held("s")]
        claim = await room.mark("s")
        passed = await room.turn("s")
        assert (passed.worker, passed.how) == ("w0", "bypassed")
        assert (await room.turn("s", at=1)).worker == "w1"  # the other replica's count is its own
        more = [await room.held(headers={AT: "w0"}) for _ in range(2)]
        assert (await room.turn("s")).worker == "w1"  # nowhere is better
        room.release()
        await all_of(*held, *more)
        back = await room.turn("s")
        assert (back.worker, back.how) == ("w1", "cached")
        assert await room.mark("s") == claim
    async with rooms.open(overload=1, replicas=1) as room:
        held = [await room.held("s")]
        turn = await room.turn("s")
        assert (turn.worker, turn.how) == (held[0].worker, "cached")
        room.release()
        await all_of(*held)


@says("If the worker that it was taken to cannot be connected to, it goes to its own.")
async def _(rooms: Rooms) -> None:
    async with rooms.open(affinity="soft", overload=1, replicas=1) as room:
        held = await room.held("s", headers={AT: "w1"})
        await room.worker("w0").die()
        turn = await room.turn("s")
        assert (turn.status, turn.worker) == (200, "w1")
        claim = await room.claim("s")
        assert claim is not None
        assert claim.value.worker == "w1"
        room.release()
        await until(lambda: held.complete)
        await asyncio.sleep(0)


@pytest.mark.asyncio(loop_factories=["uvloop"])
@says.shown
async def test_what_a_session_is(sentence: str, rooms: Rooms) -> None:
    await says[sentence](rooms)
