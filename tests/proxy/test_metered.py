"""What turns leave in the metrics: of completed ones alone, and from the workers' own words."""

from __future__ import annotations

import pytest

from tests.support.bench import SESSION, bench
from tests.support.raw import DONE, END, STREAM, Peer, answers, chunk

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

USAGE = b'{"usage":{"prompt_tokens":12,"total_tokens":20,"prompt_tokens_details":{"cached_tokens":10}}}'
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(USAGE)
FAILS = b"HTTP/1.1 500 X\r\ncontent-length: 3\r\n\r\nbad"


async def test_a_failure_is_no_fast_first_token() -> None:
    async with bench(answers(FAILS)) as b:
        await b.get(SESSION)
        cells = b.worker().cells
        assert cells.turns == {("worker_error", 500): 1}
        for histogram in (cells.ttft, b.metrics.ttft):
            assert sum(histogram.family().cells[0][1]) == 0


async def test_a_completed_turn_has_a_first_token() -> None:
    async with bench(answers(JSON + USAGE)) as b:
        await b.get(SESSION)
        for histogram in (b.worker().cells.ttft, b.metrics.ttft):
            assert sum(histogram.family().cells[0][1][:-1]) == 1


async def test_tokens_are_summed_as_answers_tell_them() -> None:
    async with bench(answers(JSON + USAGE)) as b:
        for _ in range(3):
            await b.get(SESSION)
        assert (b.worker().cells.prompt_tokens, b.worker().cells.cached_tokens) == (36, 30)


async def test_of_an_answer_in_pieces_it_is_what_its_end_tells() -> None:
    async def in_pieces(peer: Peer) -> None:
        await peer.request()
        for at in range(0, len(USAGE), 7):
            await peer.send((JSON if not at else b"") + USAGE[at : at + 7])

    async with bench(in_pieces) as b:
        assert (await b.get()).body == USAGE
        assert (b.worker().cells.prompt_tokens, b.worker().cells.cached_tokens) == (12, 10)


async def test_of_a_stream_it_is_what_the_last_chunks_tell() -> None:
    async def stream(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        for piece in (b'data: {"a": 1}\n\n', b"data: " + USAGE + b"\n\n", DONE):
            await peer.send(chunk(piece))
        await peer.send(END)

    async with bench(stream) as b:
        assert (await b.get(SESSION)).complete
        cells = b.worker().cells
        assert (cells.prompt_tokens, cells.cached_tokens) == (12, 10)


async def test_of_every_sixteenth_turn_the_routers_part_is_measured() -> None:
    async with bench(answers(JSON + USAGE)) as b:
        for _ in range(33):
            await b.get(SESSION)
        assert sum(b.metrics.overhead.family().cells[0][1][:-1]) == 2


async def test_above_what_is_read_those_that_are_read_speak_for_all() -> None:
    async with bench(answers(JSON + USAGE)) as b:
        cells = b.worker().cells
        b.metrics.usages_left = 0
        for _ in range(2):
            await b.get(SESSION)
        assert cells.prompt_tokens == 0
        b.metrics.usages_left = 1
        for _ in range(2):
            await b.get(SESSION)
        assert (cells.prompt_tokens, cells.cached_tokens, cells.usage_unread) == (36, 30, 1)
