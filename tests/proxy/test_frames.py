"""What a piece of a stream costs is what is called for it: four frames from the read callback to the system call."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.support.bench import SESSION, bench
from tests.support.raw import STREAM, Peer, chunk, until


async def test_a_chunk_passes_four_frames_and_no_round_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
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
    pieces = [chunk(b"data: %d\n\n" % number) for number in range(5)]
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
    # The first goes with the head, through the parser, and the last perhaps with the end; the others as they came.
    for piece in pieces[1:-1]:
        assert written[piece] == ["write", "write_chunk", "on_chunk", "data_received"]
