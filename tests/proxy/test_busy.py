"""A worker that answers 503 has not taken the turn; a turn that is free to goes to another one, once. And what
a worker's answers make of it, and of its sessions."""

from __future__ import annotations

import asyncio

import pytest

from app.fleet.health import Tolerance
from app.http.worker import NameUnknown
from tests.support.bench import SESSION, bench
from tests.support.http_model import Request
from tests.support.raw import OK, Peer, Worker, to_each

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

BUSY = b"HTTP/1.1 503 No\r\ncontent-length: 4\r\nretry-after: 7\r\n\r\nbusy"
SICK = b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"


def saying(*answers: bytes) -> Worker:
    """The last one again and again."""
    left = list(answers)

    async def answer(peer: Peer, request: Request) -> None:
        await peer.send(left.pop(0) if len(left) > 1 else left[0])

    return Worker(to_each(answer))


async def test_a_turn_without_a_session_goes_on_elsewhere() -> None:
    async with bench(saying(BUSY), saying(OK)) as b:
        got = await b.get()
        assert (got.status, got.headers[b"x-coatcheck-worker"]) == (200, b"w1")
        assert b.metrics.retries.cells["worker_busy",] == 1
        assert b.worker().state == "up"  # load, no illness
        assert b.worker().burden > 3.0


async def test_a_first_turn_goes_on_elsewhere_with_its_session() -> None:
    async with bench(saying(BUSY), saying(OK)) as b:
        assert (await b.get(SESSION)).status == 200
        assert (await b.claim()).value.worker == "w1"
        assert (await b.get(SESSION)).headers[b"x-coatcheck-worker"] == b"w1"


async def test_once_and_then_the_answer_stands_as_it_was() -> None:
    async with bench(saying(BUSY), saying(BUSY), saying(OK)) as b:
        got = await b.get()
        assert (got.status, bytes(got.body), got.headers[b"retry-after"]) == (503, b"busy", b"7")


async def test_a_bound_turn_stays() -> None:
    async with bench(saying(OK, BUSY), saying(OK)) as b:
        assert (await b.get(SESSION)).status == 200
        assert (await b.get(SESSION)).status == 503
        assert (await b.claim()).value.worker == "w0"


async def test_a_turn_that_names_its_worker_stays() -> None:
    async with bench(saying(BUSY), saying(OK)) as b:
        assert (await b.get((b"x-dynamo-worker-instance-id", b"w0"))).status == 503


async def test_alone_it_says_what_it_says() -> None:
    async with bench(saying(BUSY)) as b:
        assert (await b.get(SESSION)).status == 503


async def test_the_sessions_of_a_worker_that_is_down_move_in_their_next_turn() -> None:
    async with bench(saying(OK, SICK), saying(OK)) as b:
        assert (await b.get(SESSION)).headers[b"x-coatcheck-worker"] == b"w0"
        for _ in range(3):
            assert (await b.get(SESSION)).status == 500
        assert b.worker().state == "suspect"
        assert (await b.get(SESSION)).status == 500  # stays
        b.worker().health.unreachable("refused", refused=True)
        got = await b.get(SESSION)
        assert (got.status, got.headers[b"x-coatcheck-worker"]) == (200, b"w1")
        assert got.headers[b"x-coatcheck-affinity"] == b"rebound"
        assert (b.worker(0).cells.moved_from, b.worker(1).cells.moved_to) == (1, 1)


async def test_a_worker_that_is_down_is_tried_with_a_new_session_and_found_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.fleet.health._TRIAL_WAIT", 0.0)
    async with bench(saying(OK, SICK, SICK, SICK, SICK, OK), saying(OK)) as b:
        health = b.worker().health
        health.tolerance = Tolerance(down_after=0.02)
        for _ in range(4):
            assert (await b.get(SESSION)).headers[b"x-coatcheck-worker"] == b"w0"
        assert b.worker().state == "suspect"
        await asyncio.sleep(0.02)
        assert (await b.get(SESSION)).status == 500
        await asyncio.sleep(0.02)
        health.tick()
        assert b.worker().state == "down"
        got = await b.get((b"x-dynamo-session-id", b"new"))
        assert (got.status, got.headers[b"x-coatcheck-worker"]) == (200, b"w0")
        assert b.worker().state == "up"


async def test_with_nowhere_to_go_they_stay() -> None:
    async with bench(saying(OK)) as b:
        await b.get(SESSION)
        b.worker().health.unreachable("refused", refused=True)
        got = await b.get(SESSION)
        assert (got.status, got.headers[b"x-coatcheck-affinity"]) == (200, b"cached")


async def test_a_name_that_is_not_answered_moves_no_session() -> None:
    async with bench(saying(OK), saying(OK)) as b:
        await b.get(SESSION)
        pool = b.worker().pool

        async def unknown() -> None:
            raise NameUnknown("the name w.example cannot be looked up")

        pool.connect, pool.take = unknown, lambda: None  # type: ignore[assignment,method-assign]
        got = await b.get(SESSION)
        assert (got.status, got.json["error"]["code"]) == (503, "worker_unreachable")
        assert (await b.claim()).value.worker == "w0"
        for _ in range(4):
            assert (await b.get()).status == 200  # whoever is free goes on
        assert b.worker().state == "up"
