"""A stream's last event, by which its client takes the answer for complete: the session is closed before it, and what
follows it decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.turn.shared import Limits
from tests.support.bench import FINAL, SESSION, Bench, bench
from tests.support.client import Call
from tests.support.raw import DONE, END, STREAM, Peer, Worker, chunk, until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

_FULL = b'{"type":"response.completed","response":{"output":[{"type":"message"}]}}'
LAST = {
    "chat": DONE,
    "bare": b"data:[DONE]\n\n",
    "chat, CRLF": b"data: [DONE]\r\n\r\n",
    "messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "messages, CRLF": b'event: message_stop\r\ndata: {"type": "message_stop"}\r\n\r\n',
    "messages, CR": b'event:message_stop\rdata:{"type":"message_stop"}\r\r',
    "messages, data alone": b'data: {"type": "message_stop"}\n\n',
    "responses": b"event: response.completed\ndata: " + _FULL + b"\n\n",
    "responses, data alone": b"data: " + _FULL + b"\n\n",
    "responses, type last": b'data: {"response":{"output":[{"type":"message"}]},"type":"response.completed"}\n\n',
    "incomplete": b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n',
    "failed": b'event: response.failed\ndata: {"type":"response.failed"}\n\n',
}
BEGUN = b'event: response.created\ndata: {"type":"response.created"}\n\n'


def in_pieces(wire: bytes, size: int) -> list[bytes]:
    return [wire[at : at + size] for at in range(0, len(wire), size)]


@pytest.mark.parametrize("size", [1, 7, 23, 1000])
@pytest.mark.parametrize("last", LAST)
async def test_a_final_turn_is_closed_before_its_last_event_is_seen(last: str, size: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(BEGUN))
        await until(lambda: client.body == BEGUN)
        await peer.send(*map(chunk, in_pieces(LAST[last], size)), pause=0.0005)
        await until(lambda: b.store.calls["close"])
        await peer.send(END)
        await peer.gone()

    async with bench(script) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL).start()
        await until(lambda: b.store.calls["close"])
        await asyncio.sleep(0.005)
        seen = client.body.removeprefix(BEGUN)
        assert LAST[last].startswith(seen)
        assert not any(
            mark in seen for mark in (b"[DONE]", b"event: message_stop", b'_stop"', b"\n\n", b"\r\n\r\n", b"\r\r")
        )
        assert await b.claim() is not None
        gate.set()
        await client.finish()
        assert (client.body, client.complete) == (BEGUN + LAST[last], True)
        assert await b.claim() is None


Ends = Callable[[Peer], Awaitable[None]]


async def leaves_at(wire: list[bytes], then: Ends, check: Callable[[Bench, Worker, Call], Awaitable[None]]) -> None:
    """Its client leaves when all of `wire` has come; `then` is what the worker does next."""
    left = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(STREAM, *wire, pause=0.002)
            await left.wait()
            await then(peer)

    worker = Worker(script)
    async with bench(worker) as b:
        client = b.request(SESSION).start()
        whole = b"".join(piece[piece.index(b"\r\n") + 2 : -2] for piece in wire)
        await until(lambda: client.body == whole)
        client.leave()
        assert client._state is not None
        await until(lambda: not client._state.connections)  # type: ignore[union-attr]
        left.set()
        await check(b, worker, client)


async def ends(peer: Peer) -> None:
    await peer.send(END)


LARGE = b'{"type":"response.completed","response":{"instructions":"' + b"a" * 200_000 + b'"}}'
WIRES: dict[str, list[bytes]] = {
    **{name: [chunk(BEGUN), chunk(wire)] for name, wire in LAST.items()},
    "in one piece": [chunk(BEGUN + LAST["messages"])],
    "line by line": [chunk(BEGUN), *(chunk(line + b"\n") for line in LAST["messages"].split(b"\n")[:-1])],
    "after many": [*[chunk(b"data: a\n\n")] * 40, chunk(DONE)],
    "with more behind it": [chunk(BEGUN), chunk(LAST["messages"]), chunk(b": end\n\n")],
    "large": [chunk(BEGUN), chunk(b"event: response.completed\ndata: " + LARGE + b"\n\n")],
    "large, in pieces": [
        *[chunk(b"data: a\n\n")] * 20,
        *map(chunk, in_pieces(b"event: response.completed\ndata: " + LARGE + b"\n\n", 3001)),
    ],
    "large, glued": [chunk(BEGUN * 50 + b"event: response.completed\ndata: " + LARGE[:30000]), chunk(b'"}}\n\n')],
}


@pytest.mark.parametrize("wire", WIRES)
async def test_a_client_that_leaves_at_the_last_event_has_its_answer(wire: str) -> None:
    """The worker's connection is kept: each turn of an SDK that closes there would cost one."""

    async def check(b: Bench, worker: Worker, client: Call) -> None:
        await until(lambda: not b.turns)
        assert b.outcomes() == {"completed": 1}
        assert b.worker().in_flight == 0
        again = b.request(SESSION).start()
        await until(lambda: len(worker.requests) == 2)
        assert worker.carriers == [0, 0]
        again.leave()
        await again.finish()

    await leaves_at(WIRES[wire], ends, check)


STREAMS_ON = {
    "nothing": [chunk(BEGUN)],
    "an event": [chunk(b"data: a\n\n")],
    "in a text": [
        chunk(b'data: {"text":"\\ndata: [DONE]\\nevent: message_stop\\n{\\"type\\":\\"message_stop\\"}"}\n\n')
    ],
    "within another": [chunk(b'data: {"type":"response.created","tools":[{"type":"message_stop"}]}\n\n')],
    "not all of it": [chunk(BEGUN), chunk(b"event: response.completed\n"), chunk(b'data: {"type":"response.comple')],
    "not all of a large one": [
        *[chunk(b"data: a\n\n")] * 20,
        *map(chunk, in_pieces(BEGUN + b"event: response.completed\ndata: " + LARGE, 3001)),
    ],
}


@pytest.mark.parametrize("wire", STREAMS_ON)
async def test_a_client_that_leaves_before_has_not(wire: str) -> None:
    async def check(b: Bench, worker: Worker, client: Call) -> None:
        await until(lambda: not b.turns)
        assert b.outcomes() == {"aborted": 1}
        await until(lambda: worker.peers[0].ended or b.worker().pool.open == 0)

    async def goes_on(peer: Peer) -> None:
        await peer.gone()

    await leaves_at(STREAMS_ON[wire], goes_on, check)


async def test_a_worker_that_does_not_end_is_waited_for_a_moment_only() -> None:
    async def check(b: Bench, worker: Worker, client: Call) -> None:
        assert b.turns == 1
        await until(lambda: not b.turns, 4)
        assert b.outcomes() == {"completed": 1}
        assert b.worker().available
        await until(lambda: b.worker().pool.open == 0)

    async def drips(peer: Peer) -> None:
        while True:
            await peer.send(chunk(b": still here\n\n"))
            await asyncio.sleep(0.05)

    await leaves_at([chunk(BEGUN), chunk(DONE)], drips, check)


@pytest.mark.parametrize("how", ["silent", "closed", "reset", "idle"])
async def test_what_does_not_follow_the_last_event_is_no_failure(how: str) -> None:
    """No error event, which nobody would read, and the body is ended: by its API it is complete."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(BEGUN), chunk(LAST["messages"]))
        if how in ("silent", "idle"):
            await peer.gone()
        await until(lambda: client.body.endswith(LAST["messages"]))
        if how == "reset":
            peer.reset()

    async with bench(script, limits=Limits(idle=0.5) if how == "idle" else Limits()) as b:
        client = b.request(SESSION, path="/v1/messages").start()
        async with asyncio.timeout(20):
            await client.finish()
        assert (client.body, client.complete) == (BEGUN + LAST["messages"], True)
        assert b.outcomes() == {"completed": 1}
        assert b.worker().available


async def test_a_stream_that_is_compressed_or_has_a_length_is_not_looked_into() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n" + DONE)

    async with bench(script) as b:
        client = await b.get()
        assert (client.body, client.complete) == (DONE, False)
        assert b.outcomes() == {"broken": 1}
