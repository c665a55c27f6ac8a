"""The client's side on real sockets: uvicorn with our protocol and response writer, and the bytes a client sees."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from app.fleet.placement.prefix import Prefixes
from app.fleet.policies import by_cache
from app.http.client import ClientLimits
from app.turn.request import Reading
from tests.support import raw
from tests.support.bench import FINAL, SESSION, Bench, bench
from tests.support.raw import DONE, END, OK, STREAM, Peer, Script, Worker, answers, chunk, echoes, still, until

POST = b"POST /v1/x HTTP/1.1\r\nhost: r\r\n"


def post(*headers: bytes, body: bytes = b"{}", version: bytes = b"1.1") -> bytes:
    lines = [POST.replace(b"1.1", version), *(line + b"\r\n" for line in headers)]
    return b"".join([*lines, b"content-length: %d\r\n\r\n" % len(body), body])


class Socket:
    """A client's socket: what is read is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def grow(self) -> None:
        """From now on read as fast as others do."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)

    async def ask(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Until the other side closes."""
        return await asyncio.wait_for(self.reader.read(), 10)

    async def head(self) -> tuple[bytes, dict[bytes, bytes]]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        first, *lines = raw[:-4].split(b"\r\n")
        pairs = [tuple(line.split(b": ", 1)) for line in lines]
        assert len(dict(pairs)) == len(pairs)  # type: ignore[arg-type]
        return first, dict(pairs)  # type: ignore[arg-type]

    async def exactly(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), 10)

    async def chunked(self) -> bytes:
        body = b""
        while True:
            size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 10), 16)
            body += (await self.exactly(size + 2))[:-2]
            if not size:
                return body

    async def answer(self) -> tuple[bytes, bytes]:
        """Status line and body of one answer that is not ended by closing."""
        first, headers = await self.head()
        if headers.get(b"transfer-encoding") == b"chunked":
            return first, await self.chunked()
        return first, await self.exactly(int(headers[b"content-length"]))

    async def closed(self) -> bool:
        return await self.rest() == b""


class Router:
    """A bench behind uvicorn."""

    def __init__(self, b: Bench, server: uvicorn.Server, port: int) -> None:
        self.bench, self.server, self.port = b, server, port
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, receive_buffer: int = 0) -> Socket:
        raw = socket.socket()
        raw.setblocking(False)
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=2048 if receive_buffer else 1 << 16)
        self.writers.append(writer)
        return Socket(reader, writer)


@contextlib.asynccontextmanager
async def serving(
    *scripts: Script | Worker, grace: int = 5, client_limits: ClientLimits | None = None, **settings: Any
) -> AsyncIterator[Router]:
    async with bench(*scripts, client_limits=client_limits, **settings) as b:
        listener = socket.create_server(("127.0.0.1", 0))
        b.config.timeout_graceful_shutdown = grace
        server = uvicorn.Server(b.config)
        # Not serve(): that takes the process's signal handlers.
        running = asyncio.create_task(server._serve([listener]))
        await until(lambda: server.started)
        router = Router(b, server, listener.getsockname()[1])
        try:
            yield router
        finally:
            for writer in router.writers:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            server.should_exit = True
            await running
            listener.close()


# -- how an answer is written


async def test_answer_of_known_length_is_one_write() -> None:
    async with serving(answers(OK)) as r:
        client = await r.connect()
        await client.ask(post())
        await client.answer()
        [protocol] = r.server.server_state.connections
        writes: list[bytes] = []
        inner = protocol.write  # type: ignore[union-attr]

        def write(data: bytes) -> None:
            writes.append(data)
            inner(data)

        protocol.write = write  # type: ignore[union-attr]
        await client.ask(post())
        await client.answer()
        assert len(writes) == 1
        assert writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert writes[0].endswith(b"\r\n\r\n{}")
        assert b"transfer-encoding" not in writes[0]


async def test_head_of_a_stream_does_not_wait_for_its_first_piece() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM)
        await gate.wait()
        await peer.send(chunk(b"data: a\n\n"), chunk(DONE), END)
        await peer.gone()

    gate = asyncio.Event()
    async with serving(script) as r:
        client = await r.connect()
        await client.ask(post())
        status, headers = await client.head()
        assert (status, headers[b"transfer-encoding"]) == (b"HTTP/1.1 200 OK", b"chunked")
        gate.set()
        assert await client.chunked() == b"data: a\n\n" + DONE


async def test_connection_is_kept_for_further_requests() -> None:
    async with serving(answers(OK)) as r:
        client = await r.connect()
        for _ in range(5):
            await client.ask(post())
            assert await client.answer() == (b"HTTP/1.1 200 OK", b"{}")
        assert r.bench.outcomes() == {"completed": 5}


@pytest.mark.parametrize("pieces", [(OK,), (OK[:-2], b"{}")], ids=["whole", "body later"])
async def test_client_that_wants_to_close_gets_its_answer_and_is_no_aborted_turn(pieces: tuple[bytes, ...]) -> None:
    worker = Worker(answers(*pieces))
    async with serving(worker) as r:
        for _ in range(5):
            client = await r.connect()
            await client.ask(post(b"connection: close"))
            raw = await client.rest()
            assert b"\r\nconnection: close\r\n" in raw
            assert raw.endswith(b"{}")
        await until(lambda: r.bench.turns == 0)
        assert r.bench.outcomes() == {"completed": 5}
        assert len(worker.peers) == 1  # the worker's connection was not cut with the client's


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_client_gets_a_body_ended_by_closing(stream: bool) -> None:
    response = STREAM + chunk(b"data: a\n\n") + chunk(DONE) + END if stream else OK
    async with serving(answers(response)) as r:
        client = await r.connect()
        await client.ask(post(b"connection: keep-alive", version=b"1.0"))
        head, body = (await client.rest()).split(b"\r\n\r\n", 1)
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == (b"data: a\n\n" + DONE if stream else b"{}")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(echoes) as r:
        client = await r.connect()
        own = b"GET /own HTTP/1.1\r\nhost: r\r\n\r\n"
        await client.ask(post(body=b'"1"') + post(body=b'"2"') + post(body=b'"3"') + own + post(body=b'"4"'))
        bodies = [(await client.answer())[1] for _ in range(4)]
        assert bodies == [b'"1"', b'"2"', b'"3"', b"own"]
        assert await client.closed()  # the control plane's answer is the last


@pytest.mark.parametrize("framing", [b"content-length: 7\r\n", b"transfer-encoding: chunked\r\n"])
async def test_head_has_no_body_and_the_connection_goes_on(framing: bytes) -> None:
    async with serving(Worker(answers(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n"))) as r:
        client = await r.connect()
        for _ in range(2):
            await client.ask(b"HEAD /v1/x HTTP/1.1\r\nhost: r\r\n\r\n")
            _, headers = await client.head()
            assert headers.get(b"content-length") == (b"7" if b"length" in framing else None)
            assert b"transfer-encoding" not in headers


@pytest.mark.parametrize("status", [204, 304])
async def test_answer_without_a_body_and_the_connection_goes_on(status: int) -> None:
    async with serving(answers(b"HTTP/1.1 %d X\r\n\r\n" % status)) as r:
        client = await r.connect()
        for _ in range(2):
            await client.ask(post())
            first, headers = await client.head()
            assert first.startswith(b"HTTP/1.1 %d " % status)
            assert not headers.keys() & {b"content-length", b"transfer-encoding"}


@pytest.mark.parametrize("status", [299, 418, 529, 599])
async def test_any_status_is_passed_on(status: int) -> None:
    async with serving(answers(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)) as r:
        client = await r.connect()
        await client.ask(post())
        assert (await client.answer())[0].startswith(b"HTTP/1.1 %d " % status)


async def test_expect_100_continue() -> None:
    worker = Worker(answers(OK))
    async with serving(worker) as r:
        client = await r.connect()
        await client.ask(POST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert (await client.head())[0] == b"HTTP/1.1 100 Continue"
        await client.ask(b"{}")
        assert (await client.answer())[1] == b"{}"
        assert b"expect" not in worker.heads[0]


async def test_chunked_request_is_sent_on_with_a_length() -> None:
    worker = Worker(answers(OK))
    async with serving(worker) as r:
        client = await r.connect()
        await client.ask(POST + b"transfer-encoding: chunked\r\n\r\n")
        for piece in (b'{"a":', b"1}"):
            await client.ask(chunk(piece))
            await asyncio.sleep(0.005)
        await client.ask(b"0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.answer())[1] == b"{}"
        [head], [request] = worker.heads, worker.requests
        assert request.body == b'{"a":1}'
        assert b"\r\ncontent-length: 7\r\n" in head
        assert b"chunked" not in head


OFFER = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAARAAAAA")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("body", [b"", b'{"a":1}', b"x" * 300_000])
async def test_offered_upgrade_is_declined_and_the_body_kept(body: bytes, split: bool) -> None:
    """Java's client offers h2c in every request."""
    worker = Worker(answers(OK))
    async with serving(worker) as r:
        client = await r.connect()
        for _ in range(2):
            head, sent = post(*OFFER, body=body).split(b"\r\n\r\n", 1)
            await client.ask(head + b"\r\n\r\n")
            if split:
                await asyncio.sleep(0.01)
            await client.ask(sent)
            assert (await client.answer())[1] == b"{}"
        assert [request.body for request in worker.requests] == [body] * 2
        assert b"upgrade" not in worker.heads[0].lower()
        assert len(worker.peers) == 1


async def test_offered_upgrade_of_chunked_and_of_pipelined_requests() -> None:
    worker = Worker(answers(OK))
    async with serving(worker) as r:
        client = await r.connect()
        chunked = (
            POST + b"\r\n".join((*OFFER, b"transfer-encoding: chunked", b"", b"")) + chunk(b"12") + chunk(b"3") + END
        )
        bare = b"GET /v1/x HTTP/1.1\r\nhost: r\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        await client.ask(chunked + post(body=b"4") + bare + post(*OFFER, body=b"5") + chunked)
        for _ in range(5):
            assert (await client.answer())[1] == b"{}"
        assert [request.body for request in worker.requests] == [b"123", b"4", b"", b"5", b"123"]


# -- requests to the control plane, which uvicorn's own protocol answers

OWN = b"POST /own HTTP/1.1\r\nhost: r\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OWN_BODIES = {
    "none": ([b"\r\n"], b""),
    "of a length": ([b"content-length: 6\r\n\r\nab", b"cd", b"ef"], b"abcdef"),
    "large": ([b"content-length: 300000\r\n\r\n", b"x" * 300_000], b"x" * 300_000),
    "chunked": (
        [b"transfer-encoding: chunked\r\n\r\n3\r\nab", b"c\r\n", chunk(b"def"), b"0\r\nx-t: 1\r\n\r\n"],
        b"abcdef",
    ),
    "offering h2c": ([b"\r\n".join((*OFFER, b"content-length: 3", b"", b"ab")), b"c"], b"abc"),
}


@pytest.mark.parametrize(("pieces", "body"), OWN_BODIES.values(), ids=OWN_BODIES.keys())
@pytest.mark.parametrize("before", [b"", post()], ids=["alone", "behind another"])
async def test_control_plane_gets_whole_requests_and_answers_last(
    pieces: list[bytes], body: bytes, before: bytes
) -> None:
    async with serving(answers(OK)) as r:
        client = await r.connect()
        await client.ask(before + OWN + pieces[0])
        for piece in pieces[1:]:
            await asyncio.sleep(0.01)
            await client.ask(piece)
        if before:
            assert await client.answer() == (b"HTTP/1.1 200 OK", b"{}")
        head, answer = (await client.rest()).split(b"\r\n\r\n", 1)
        assert b"\r\nconnection: close" in head
        assert answer == b"own" + body


async def test_control_plane_gives_leave_to_send() -> None:
    async with serving() as r:
        for framing, body in ((b"content-length: 2", b"{}"), (b"transfer-encoding: chunked", chunk(b"{}") + END)):
            client = await r.connect()
            await client.ask(OWN + b"expect: 100-continue\r\n" + framing + b"\r\n\r\n")
            assert await client.exactly(len(CONTINUE)) == CONTINUE
            await client.ask(body)
            assert (await client.rest()).endswith(b"\r\n\r\nown{}")


async def test_control_plane_answers_head_and_http_1_0() -> None:
    async with serving() as r:
        for request, answer in ((OWN.replace(b"POST", b"HEAD"), b""), (OWN.replace(b"1.1", b"1.0"), b"own")):
            client = await r.connect()
            await client.ask(request + b"\r\n")
            head, body = (await client.rest()).split(b"\r\n\r\n", 1)
            assert b"content-length: 3" in head
            assert body == answer


@pytest.mark.parametrize(
    "framing", [b"content-length: 9000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n800000\r\n"]
)
async def test_control_plane_has_a_limit_and_tells_it_to_who_still_sends(framing: bytes) -> None:
    async with serving() as r:
        client = await r.connect()
        await client.ask(OWN + framing + b"x" * (2 << 20))
        assert (await client.answer())[0].startswith(b"HTTP/1.1 413 ")


async def test_slow_body_for_the_control_plane_is_given_up() -> None:
    async with serving(client_limits=ClientLimits(body_wait=0.1)) as r:
        client = await r.connect()
        await client.ask(OWN + b"content-length: 2\r\n\r\n{")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("leaves", [True, False], ids=["client leaves", "router stops"])
async def test_half_a_request_for_the_control_plane_leaves_nothing(
    leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(grace=0) as r:
        client = await r.connect()
        await client.ask(OWN + b"content-length: 2\r\n\r\n{")
        state = r.server.server_state
        await until(lambda: state.tasks)
        if leaves:
            client.writer.transport.abort()
        else:
            r.server.should_exit = True
            assert await client.closed()
        await until(lambda: not state.tasks and not state.connections)
    caplog.clear()  # uvicorn calls it an error that it has cut something


# -- what is not complete


@pytest.mark.parametrize("stream", [True, False])
async def test_cut_answer_has_no_end_and_makes_no_noise(stream: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if stream:
            await peer.send(STREAM + chunk(b"data: a\n\n"))
        else:
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345")

    async with serving(script) as r:
        client = await r.connect()
        await client.ask(post())
        raw = await client.rest()
        assert not raw.endswith(END)
        assert raw.endswith(b"12345") or b"worker_stream_broken" in raw
        await until(lambda: r.bench.turns == 0)
        assert r.bench.outcomes() == {"broken": 1}
        # That nothing of it is logged as a fault of ours is checked after each test (conftest.py).


async def test_answer_cut_before_its_first_byte_still_shows_its_head() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")

    async with serving(script) as r:
        client = await r.connect()
        await client.ask(post())
        raw = await client.rest()
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
        assert raw.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "request_", [b"nonsense\r\n\r\n", b"GET /v1/x HTTP/9.9\r\n\r\n", b"POST /v1/x HTTP/1.1\r\na b\r\n\r\n"]
)
async def test_what_is_not_http_gets_an_openai_error(request_: bytes) -> None:
    async with serving(answers(OK)) as r:
        client = await r.connect()
        await client.ask(request_)
        head, body = (await client.rest()).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"connection: close" in head
        assert b"content-length: %d" % len(body) in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")


async def test_garbage_after_a_request_is_not_answered_inside_its_answer() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        await asyncio.sleep(0.05)
        await peer.send(chunk(b"data: b\n\n") + END)

    async with serving(script) as r:
        client = await r.connect()
        await client.ask(post())
        await client.reader.readuntil(b"data: a\n\n\r\n")
        await client.ask(b"nonsense\r\n\r\n")
        await client.ask(post())
        answer, _, error = (await client.rest()).partition(b"HTTP/1.1 400 ")
        assert answer == chunk(b"data: b\n\n") + END
        assert error.endswith(b"}}")
        assert b"HTTP/1.1 " not in error.partition(b"\r\n\r\n")[0]  # nothing that follows is served
        assert r.bench.outcomes() == {"completed": 1}


async def test_too_large_request_is_answered_while_it_is_being_sent() -> None:
    async with serving(answers(OK), reading=Reading(body_limit=1024)) as r:
        client = await r.connect()
        await client.ask(POST + b"content-length: 100000\r\n\r\n" + b"x" * 1000)
        first, body = await client.answer()
        assert first.startswith(b"HTTP/1.1 413 ")
        assert json.loads(body)["error"]["code"] == "request_too_large"


# -- clients that leave or are slow


async def test_client_that_leaves_cuts_the_worker() -> None:
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        await peer.gone()
        cut.set()

    async with serving(script) as r:
        client = await r.connect()
        await client.ask(post(b"x-dynamo-session-id: s1", b"x-dynamo-session-final: 1"))
        await client.reader.readuntil(b"data: a")
        client.writer.transport.abort()
        await asyncio.wait_for(cut.wait(), 5)
        await until(lambda: r.bench.turns == 0)
        assert r.bench.outcomes() == {"aborted": 1}
        await until(lambda: not r.bench.affinity.pending_closes)
        assert await r.bench.claim() is None


async def test_client_that_leaves_before_the_head_cuts_the_worker() -> None:
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.gone()
        cut.set()

    asked = asyncio.Event()
    async with serving(script) as r:
        client = await r.connect()
        await client.ask(post())
        await asyncio.wait_for(asked.wait(), 5)
        client.writer.close()
        await asyncio.wait_for(cut.wait(), 5)
        await until(lambda: r.bench.turns == 0)
        assert r.bench.outcomes() == {"aborted": 1}


async def test_client_that_leaves_with_its_next_request_sent_already() -> None:
    """Reading is paused for a pipelined request; leaving is noticed all the same, at the latest with the next write."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM)
        with contextlib.suppress(ConnectionError):
            while True:
                await peer.send(chunk(b"data: a\n\n"))
                await asyncio.sleep(0.01)

    async with serving(script) as r:
        client = await r.connect()
        await client.ask(post() + post())
        await client.reader.readuntil(b"data: a")
        client.writer.transport.abort()
        await until(lambda: r.bench.turns == 0)
        assert r.bench.outcomes() == {"aborted": 1}


async def test_slow_client_stops_the_worker() -> None:
    total = 32 << 20

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for number in range(total >> 16):
            await peer.send(bytes([number % 251]) * 65536)
        await peer.gone()

    worker = Worker(script)
    async with serving(worker) as r:
        client = await r.connect(receive_buffer=4096)
        await client.ask(post())
        await client.head()
        await still(lambda: worker.sent)
        assert worker.sent < total
        client.grow()
        for number in range(total >> 16):
            assert await client.exactly(65536) == bytes([number % 251]) * 65536
        await until(lambda: r.bench.turns == 0)
        assert r.bench.outcomes() == {"completed": 1}


async def test_slow_client_that_leaves() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM)
        while True:
            await peer.send(chunk(b"x" * 65536))

    worker = Worker(script)
    async with serving(worker) as r:
        client = await r.connect(receive_buffer=4096)
        await client.ask(post(b"x-dynamo-session-id: s1"))
        await client.head()
        await still(lambda: worker.sent)
        client.writer.transport.abort()
        await until(lambda: r.bench.turns == 0)
        assert r.bench.outcomes() == {"aborted": 1}


# -- shutdown


async def test_client_that_leaves_before_its_next_turn_begins_leaves_nothing() -> None:
    async with serving(answers(OK)) as r:
        client = await r.connect()
        await client.ask(post())
        await client.answer()
        [protocol] = r.server.server_state.connections
        answered = protocol.answered  # type: ignore[union-attr]

        def cut(keep_alive: bool) -> None:
            protocol._advance = protocol.transport.abort  # type: ignore[union-attr]
            answered(keep_alive)

        protocol.answered = cut  # type: ignore[union-attr]
        await client.ask(post() + post())
        await client.answer()
        await until(lambda: not r.server.server_state.connections)
        assert not r.server.server_state.tasks
        assert r.bench.outcomes() == {"completed": 2}


async def test_shutdown_lets_running_turns_end() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        await gate.wait()
        await peer.send(chunk(DONE) + END)
        await peer.gone()

    gate = asyncio.Event()
    async with serving(script, client_limits=ClientLimits(idle=60.0)) as r:
        idle, busy = await r.connect(), await r.connect()
        await busy.ask(post())
        await busy.reader.readuntil(b"data: a")
        r.server.should_exit = True
        assert await idle.closed()
        gate.set()
        assert (await busy.rest()).endswith(END)  # and it closes the connection after that
        assert r.bench.outcomes() == {"completed": 1}


@pytest.mark.parametrize("kept", [False, True])
async def test_shutdown_answers_a_request_that_has_come(kept: bool) -> None:
    """And was not read yet: a connection that is closed with bytes unread is reset."""
    async with serving(answers(OK)) as r:
        raw = socket.create_connection(("127.0.0.1", r.port))
        reader, writer = await asyncio.open_connection(sock=raw)
        client = Socket(reader, writer)
        await until(lambda: bool(r.server.server_state.connections))
        if kept:
            await client.ask(post())
            await client.answer()
        [protocol] = r.server.server_state.connections
        os.write(raw.fileno(), post())
        protocol.shutdown()
        first, _ = await client.answer()
        assert first.startswith(b"HTTP/1.1 200")
        assert await client.closed()
        writer.close()


async def test_shutdown_cuts_turns_that_do_not_end(caplog: pytest.LogCaptureFixture) -> None:
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        await peer.gone()
        cut.set()

    async with serving(script, grace=0) as r:
        client = await r.connect()
        await client.ask(post(b"x-dynamo-session-id: s1"))
        await client.reader.readuntil(b"data: a")
        r.server.should_exit = True
        assert not (await client.rest()).endswith(END)
        await asyncio.wait_for(cut.wait(), 5)
        await until(lambda: r.bench.turns == 0)
        assert r.bench.worker().in_flight == 0
    # uvicorn calls turns that it has cut itself errors; app/serve.py filters that.
    caplog.clear()


async def test_final_turn_end_to_end() -> None:
    async with serving(answers(STREAM + chunk(b"data: a\n\n") + chunk(DONE) + END)) as r:
        client = await r.connect()
        head = [b"%b: %b" % pair for pair in (SESSION, FINAL)]
        await client.ask(post(head[0]))
        assert (await client.answer())[1].endswith(DONE)
        assert await r.bench.claim() is not None
        await client.ask(post(*head))
        assert (await client.answer())[1].endswith(DONE)
        assert await r.bench.claim() is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "policy": by_cache,
            "foresight": lambda metrics: Prefixes(metrics, memory=1 << 20),
            "reading": Reading(prompts="yes"),
        },
    ],
    ids=["plain", "foreseen"],
)
async def test_turn_leaves_no_cyclic_garbage(settings: dict[str, Any]) -> None:
    """What reference counting frees costs nothing; what is left to the collector costs every turn."""
    prompt = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 200}]}).encode()
    request = raw.post(b"content-type: application/json", body=prompt, target=b"/v1/chat/completions")
    async with serving(answers(OK), **settings) as r:
        client = await r.connect()
        await client.ask(request)
        await client.answer()
        gc.collect()
        gc.freeze()  # what there was before need not be gone through again
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(5):
                await client.ask(request)
                await client.answer()
            gc.collect()
            kinds = {type(item).__name__ for item in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
        assert not kinds & {"Exchange", "Turn", "Driven", "Wake", "WorkerConnection", "Context"}
