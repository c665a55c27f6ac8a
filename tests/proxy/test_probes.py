"""What workers are asked, and what becomes of what they say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from app.fleet.health import Probe, Tolerance
from app.fleet.probes import Prober, Probing
from app.fleet.workers import Fleet, make_worker
from app.http.names import Names
from tests.support.http_model import Request
from tests.support.raw import OK, Peer, Worker, answers, to_each, until

QUICK = Probing(interval=0.05, limit=0.3, key_line=b"authorization: Bearer k\r\n")


def saying(status: int, body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@contextlib.asynccontextmanager
async def probed(
    *urls: str, how: Probing = QUICK, names: Names | None = None, down_after: float = 0.3
) -> AsyncIterator[Fleet]:
    tolerance = Tolerance(probed=bool(how.path), down_after=down_after)
    fleet = Fleet(
        make_worker(url, name=f"w{n}", connect_limit=1, idle_limit=4, tolerance=tolerance, names=names)
        for n, url in enumerate(urls)
    )
    prober = Prober(fleet, how)
    await prober.start()
    try:
        yield fleet
    finally:
        prober.stop()
        fleet.close()


def state(fleet: Fleet, number: int = 0) -> str:
    return list(fleet)[number].state


async def test_asked_at_its_path_with_the_key_on_one_connection() -> None:
    seen: list[Request] = []

    async def answer(peer: Peer, request: Request) -> None:
        seen.append(request)
        await peer.send(OK)

    async with Worker(to_each(answer)) as worker, probed(f"http://127.0.0.1:{worker.port}/base") as fleet:
        assert state(fleet) == "up"  # known when `start` returns
        await until(lambda: len(seen) >= 3)
        assert {request.target for request in seen} == {b"/base/health"}
        assert {request.get(b"authorization") for request in seen} == {b"Bearer k"}
        assert len(worker.peers) == 1
        (only,) = fleet
        assert only.pool.open == 0  # the turns' connections are theirs


@pytest.mark.parametrize(
    ("status", "probe", "found"),
    [
        (200, Probe.GOOD, "up"),
        (204, Probe.GOOD, "up"),
        (401, Probe.REACHABLE, "up"),
        (403, Probe.REACHABLE, "up"),
        (404, Probe.REACHABLE, "up"),
        (429, Probe.REACHABLE, "up"),
        (500, Probe.BAD, "starting"),
        (502, Probe.BAD, "starting"),
        (503, Probe.NOT_YET, "starting"),
    ],
)
async def test_what_a_status_means(status: int, probe: Probe, found: str, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(peer: Peer, request: Request) -> None:
        await peer.send(saying(status))

    async with Worker(to_each(answer)) as worker, probed(f"http://127.0.0.1:{worker.port}") as fleet:
        (only,) = fleet
        await until(lambda: sum(only.cells.probes.values()) >= 4)
        assert (only.health.probe, only.state) == (probe, found)
        told = [record.getMessage() for record in caplog.records if "told once" in record.getMessage()]
        assert len(told) == (status in (401, 403, 404))


async def test_without_the_path_only_its_list_is_asked_for_and_it_does_not_flap() -> None:
    targets: list[bytes] = []

    async def answer(peer: Peer, request: Request) -> None:
        targets.append(request.target)
        await peer.send(saying(404) if request.target == b"/health" else saying(200, b"x" * 100_000))

    async with Worker(to_each(answer)) as worker, probed(f"http://127.0.0.1:{worker.port}") as fleet:
        (only,) = fleet
        await until(lambda: len(targets) >= 6)
        assert targets[:6] == [b"/health", *[b"/v1/models"] * 5]
        assert dict(only.cells.changes) == {("starting", "up"): 1}
        assert only.health.probe is Probe.REACHABLE


async def test_one_that_hangs_is_late_by_itself_and_delays_no_other() -> None:
    asked = 0

    async def hang(peer: Peer) -> None:
        nonlocal asked
        await peer.request()
        asked += 1
        await peer.gone()

    async def answer(peer: Peer, request: Request) -> None:
        await peer.send(OK)

    async with (
        Worker(hang) as silent,
        Worker(to_each(answer)) as well,
        probed(f"http://127.0.0.1:{silent.port}", f"http://127.0.0.1:{well.port}") as fleet,
    ):
        first, second = fleet
        assert (first.state, second.state) == ("starting", "up")
        await until(lambda: first.cells.probes["bad"] >= 2)
        assert second.cells.probes["good"] > 2 * first.cells.probes["bad"]
        assert asked <= first.cells.probes["bad"] + 1  # one at a time


async def test_lost_and_found_again() -> None:
    async def answer(peer: Peer, request: Request) -> None:
        await peer.send(OK)

    worker = Worker(to_each(answer))
    async with worker, probed(f"http://127.0.0.1:{worker.port}") as fleet:
        (only,) = fleet
        await worker.die()
        await until(lambda: only.state == "down")


async def test_a_slow_name_delays_nobody_else_and_is_no_illness() -> None:
    def look_up(host: str) -> list[object]:
        raise OSError("SERVFAIL")

    async def answer(peer: Peer, request: Request) -> None:
        await peer.send(OK)

    async with (
        Worker(to_each(answer)) as worker,
        probed(f"http://127.0.0.1:{worker.port}", "http://name.example:1", names=Names(look_up)) as fleet,  # type: ignore[arg-type]
    ):
        first, second = fleet
        await until(lambda: second.cells.probes["nameless"] >= 1)
        await until(lambda: first.state == "up")
        assert second.state == "starting"
        assert second.health.errors.per_minute() == 0


async def test_without_probes_a_lost_worker_is_found_again_by_connecting() -> None:
    async def answer(peer: Peer, request: Request) -> None:
        raise AssertionError("nothing is asked")

    off = Probing(path=b"")
    async with Worker(to_each(answer)) as worker, probed(f"http://127.0.0.1:{worker.port}", how=off) as fleet:
        (only,) = fleet
        only.health.unreachable("refused", refused=True)
        assert only.state == "down"
        await until(lambda: only.state == "up")


async def test_stopping_leaves_nothing_open() -> None:
    async def hang(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with Worker(hang) as worker:
        async with probed(f"http://127.0.0.1:{worker.port}"):
            await asyncio.sleep(0.01)
        assert len(worker.peers) == 1  # and `hang` ends, because its peer has gone


async def test_many_workers_are_asked_less_often_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that probing costs no more than so many probes a second; all are asked at first, and those that may change."""
    monkeypatch.setattr("app.fleet.probes._MOST_A_SECOND", 10)
    asked = 0

    async def answer(peer: Peer, request: Request) -> None:
        nonlocal asked
        asked += 1
        await peer.send(OK)

    async with Worker(to_each(answer)) as worker:
        began = time.monotonic()
        async with probed(*[f"http://127.0.0.1:{worker.port}"] * 8) as fleet:
            assert [each.state for each in fleet] == ["up"] * 8
            await until(lambda: asked >= 14)
            assert asked <= 8 + 10 * 1.25 * (time.monotonic() - began) + 1


async def test_of_many_workers_one_that_is_suspected_is_asked_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be down for want of a good sign that nobody asked for."""
    monkeypatch.setattr("app.fleet.probes._MOST_A_SECOND", 0.001)  # the next one in a quarter of an hour
    status = 200

    async def answer(peer: Peer, request: Request) -> None:
        await peer.send(saying(status))

    async with (
        Worker(to_each(answer)) as worker,
        probed(f"http://127.0.0.1:{worker.port}", down_after=600.0) as fleet,
    ):
        (only,) = fleet
        assert (only.state, only.cells.probes["good"]) == ("up", 1)
        status = 500
        only.health.unreachable("no answer")
        await until(lambda: only.cells.probes["bad"] >= 3)  # again and again, not only at first
        assert only.state == "suspect"
        status = 200
        await until(lambda: only.state == "up")


async def test_workers_that_come_and_go_are_asked_and_forgotten() -> None:
    kept = 0

    async def script(peer: Peer) -> None:
        nonlocal kept
        kept += 1
        try:
            await answers(OK)(peer)
        finally:
            kept -= 1

    async with Worker(script) as worker, probed(f"http://127.0.0.1:{worker.port}") as fleet:
        for number in range(3):
            tolerance = Tolerance(probed=True)
            url = f"http://127.0.0.1:{worker.port}"
            fleet.put(make_worker(url, name="x", connect_limit=1, idle_limit=4, tolerance=tolerance))
            await until(lambda: state(fleet, 1) == "up")
            if number % 2:
                fleet.remove("x")
        await until(lambda: kept == len(fleet))
