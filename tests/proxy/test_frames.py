"""What a piece of a stream costs is what is called for it: four frames from the read callback to the system call."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import pytest

from tests.support.bench import SESSION, bench
from tests.support.raw import STREAM, Peer, chunk, until

FRAMES = ["write", "write_chunk", "on_chunk", "data_received"]


async def written_for(pieces: Sequence[bytes], monkeypatch: pytest.MonkeyPatch) -> dict[bytes, list[str]]:
    """What was written to a client whose worker sends these chunks one after the other, with the calls that led to it,
    the last one first."""
    written: dict[bytes, list[str]] = {}
    send = os.write

    def noting(fd: int, data: bytes) -> int:
        frame, names = sys._getframe(1), []
        while frame is not None and "/app/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        written[bytes(data)] = names
        return send(fd, data)

    monkeypatch.setattr(os, "write", noting)  # each connection takes it when it is made
    go = [asyncio.Event() for _ in pieces]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM)
        for piece, may in zip(pieces, go, strict=True):
            await may.wait()
            await peer.send(piece)
        await peer.send(b"0\r\n\r\n")

    async with bench(script) as b:
        call = b.request(SESSION).start()
        for number, may in enumerate(go):
            may.set()
            await until(lambda number=number: len(call.events) > number)  # type: ignore[misc]
        await call.finish()
    return written


async def test_a_chunk_passes_four_frames_and_no_round_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [chunk(b"data: %d\n\n" % number) for number in range(5)]
    written = await written_for(pieces, monkeypatch)
    # The first goes with the head, through the parser, and the last perhaps with the end; the others as they came.
    for piece in pieces[1:-1]:
        assert written[piece] == FRAMES


async def test_so_do_chunks_of_any_size_in_either_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        b"data: %b\n\n" % (b"x" * (size - 8)) for size in (9, 10, 15, 16, 17, 171, 255, 256, 257, 4095, 4096, 4097)
    ]
    pieces = [spelling % (len(text), text) for text in texts for spelling in (b"%x\r\n%b\r\n", b"%X\r\n%b\r\n")]
    written = await written_for(pieces, monkeypatch)
    for piece in pieces[1:-1]:
        assert written[piece] == FRAMES


async def test_what_only_begins_like_a_chunk_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that it does not have, or with more behind it: the parser finds out what it is."""
    event = b"data: 0123456789\n\n"
    odd = [b"0012\r\n%b\r\n" % event, chunk(event) + chunk(event), b"12;a=b\r\n%b\r\n" % event]
    written = await written_for([chunk(b"data: 0\n\n"), *odd, chunk(b"data: 9\n\n")], monkeypatch)
    assert all(piece not in written for piece in odd)
    assert any(chunk(event + event) in data for data in written)
