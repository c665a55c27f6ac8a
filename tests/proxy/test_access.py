"""The access log: what a turn that failed leaves in it, and that one that did not leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.logs import shown
from app.turn.access import AccessLog
from app.turn.shared import Limits
from tests.support.bench import SESSION, Bench, bench
from tests.support.logs import Noted, noted
from tests.support.raw import OK, STREAM, Peer, answers, chunk, until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

BUSY = b"HTTP/1.1 500 X\r\ncontent-length: 3\r\n\r\nbad"


@pytest.fixture
def lines() -> Iterator[Noted]:
    with noted("coatcheck.access") as handler:
        yield handler


def fields(lines: Noted) -> dict[str, Any]:
    """Of the one turn that was told, without its times."""
    (told,) = lines.of("turn")
    said = dict(told)
    assert said.pop("ms") >= said.pop("first_byte_ms", 0) >= 0
    return said


def session(b: Bench) -> str:
    return shown(b.hasher.key(b"", SESSION[1]))


async def test_a_good_turn_leaves_no_line(lines: Noted) -> None:
    async with bench(answers(OK), access=AccessLog(every=False)) as b:
        assert (await b.get(SESSION)).status == 200
        assert not lines.records


async def test_where_all_are_wanted_a_good_one_leaves_one(lines: Noted) -> None:
    async with bench(answers(OK), access=AccessLog(every=True)) as b:
        await b.get(SESSION, (b"x-request-id", b"id-1"))
        assert fields(lines) == {
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "outcome": "completed",
            "request": "id-1",
            "session": session(b),
            "worker": "w0",
            "affinity": "created",
            "attempts": 1,
        }


async def test_a_workers_error_is_told_with_its_worker(lines: Noted) -> None:
    async with bench(answers(BUSY), access=AccessLog(every=False)) as b:
        await b.get(SESSION, (b"x-request-id", b"id-1"))
        said = fields(lines)
        assert (said["status"], said["outcome"], said["worker"]) == (500, "worker_error", "w0")
        assert (said["request"], said["session"]) == ("id-1", session(b))
        assert lines.records[0].levelname == "WARNING"


async def test_no_id_of_a_session_and_no_query_is_in_a_line(lines: Noted) -> None:
    secret = (b"x-dynamo-session-id", b"of-a-customer")
    async with bench(answers(BUSY), access=AccessLog(every=False)) as b:
        await b.get(secret, path="/v1/chat/completions?key=hush")
        assert fields(lines)["path"] == "/v1/chat/completions"
        assert "of-a-customer" not in repr(vars(lines.records[0])) + lines.records[0].getMessage()
        assert "hush" not in repr(vars(lines.records[0])) + lines.records[0].getMessage()


async def test_a_refusal_is_told_with_its_reason(lines: Noted) -> None:
    async with bench(answers(OK), access=AccessLog(every=False)) as b:
        await b.get((SESSION[0], b"a b"))
        said = fields(lines)
        assert (said["status"], said["outcome"], said["attempts"]) == (400, "rejected", 0)
        assert said["why"].startswith("invalid_session_id: ")
        assert lines.records[0].levelname == "INFO"  # a client's doing


async def test_a_worker_that_does_not_begin_is_told(lines: Noted) -> None:
    async def silent(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with bench(silent, access=AccessLog(every=False), limits=Limits(first_byte=0.2)) as b:
        await b.get()
        said = fields(lines)
        assert (said["status"], said["outcome"], said["worker"]) == (504, "worker_error", "w0")
        assert said["why"].startswith("worker_timeout: ")


async def test_a_stream_that_breaks_off_is_told(lines: Noted) -> None:
    async def breaks(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        peer.reset()

    async with bench(breaks, access=AccessLog(every=False)) as b:
        await b.get()
        said = fields(lines)
        assert (said["status"], said["outcome"]) == (200, "broken")
        assert said["why"]


async def test_a_client_that_leaves_is_told(lines: Noted) -> None:
    async def hangs(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with bench(hangs, access=AccessLog(every=False)) as b:
        call = b.request(SESSION).start()
        await until(lambda: b.worker().in_flight)
        call.leave()
        await until(lambda: lines.records)
        said = fields(lines)
        assert (said["status"], said["outcome"], said["why"]) == (499, "aborted", "the client left")


async def test_of_a_storm_of_failures_each_is_told_or_counted(lines: Noted) -> None:
    async with bench(answers(BUSY), access=AccessLog(every=False)) as b:
        for _ in range(60):
            await b.get()
        await until(lambda: len(lines.of("turn")) + sum(each["count"] for each in lines.of("left_out")) == 60)
