"""An admin releases a worker's sessions: their next turns place them anew, and those that run go on."""

from __future__ import annotations

from pathlib import Path

from tests.support.room import Rooms


async def test_released_sessions_are_placed_anew_and_running_turns_are_not_cut(quick_path: Path) -> None:
    async with Rooms("memory", quick_path, lambda name: "").open(workers=2, replicas=1) as room:
        sessions = [room.new() for _ in range(6)]
        before = {session: (await room.turn(session)).worker for session in sessions}
        there = [session for session in sessions if before[session] == "w0"]
        assert len(there) == 3
        running = await room.held(there[0])
        async with room.admin() as admin:
            assert (await admin.post("/admin/workers/w0/cordon")).status_code == 200
            said = (await admin.post("/admin/workers/w0/release")).json()
            assert (said["released"], said["pending"], said["left"]) == (2, 1, 1)
            assert (await admin.post("/admin/workers/w9/release")).status_code == 400
        room.release()
        await running.finish()
        assert running.status == 200
        await room.until_closed(there[0])
        for session in sessions:
            turn = await room.turn(session)
            assert (turn.worker, turn.how) == ("w1", "created" if session in there else "cached")
