"""Connections to workers, and what comes over them at another time than it should: answers before the request was
read, farewells to idle connections, trailers without an end; and which address of a name is connected to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.http import tcp
from app.http.names import Names
from app.http.worker import ConnectFailed, ConnectRefused, Pool
from tests.support.bench import JSON, SESSION, bench
from tests.support.raw import (
    END,
    LIMIT,
    OK,
    OK_NORMAL,
    STREAM,
    Kept,
    Live,
    Peer,
    Worker,
    answers,
    chunk,
    get,
    openai_error,
    post,
    until,
)

KIB, MIB = 1 << 10, 1 << 20
REFUSED = b"HTTP/1.1 413 X\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 9\r\n\r\ntoo large"
SIZES = [1, KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB - KIB]


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with contextlib.closing(Kept(max_body_bytes=64 * MIB)) as kept:
        yield kept


@pytest.fixture
def live(kept: Kept) -> Live:
    return kept.get()


# -- an answer before the request was read


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("kind", [(), (b"content-type: a/b",)], ids=["whole", "streamed"])
@pytest.mark.parametrize("size", SIZES)
async def test_answer_that_comes_before_the_body_was_read_reaches_the_client(
    live: Live, kind: tuple[bytes, ...], size: int
) -> None:
    """Often: whether writing or reading finds the end first is chance."""

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(REFUSED)  # and closes, which resets what is still being sent

    request = post(*kind, body=b"x" * size)
    async with live.worker(script):
        for _ in range(2 if size > 8 * MIB else 15):
            async with live.client() as client:
                sending = asyncio.create_task(client.send(request))
                answer = await client.answer()
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                assert (answer.status, answer.body, answer.complete) == (413, b"too large", True)


@pytest.mark.parametrize("large", [300 * KIB, 3 * MIB])
async def test_early_answer_is_read_whole_after_the_write_has_failed(large: int) -> None:
    """All that had come when the connection broke, be it more than one read; what is cut stays cut."""
    answer = b"HTTP/1.1 413 X\r\ncontent-length: %d\r\n\r\n" % (2 * large) + b"x" * large

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer)

    async with bench(script) as b:
        client = await b.get((b"content-type", b"a/b"), body=b"y" * 8 * MIB)
        assert client.status == 413
        assert not client.complete
        assert b.worker().in_flight == 0


# -- what nobody asked for

LATE = {
    "a farewell": b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno",
    "an answer": OK.replace(b"{}", b"no"),
    "a line end": b"\r\n",
    "nonsense": b"\0",
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE.keys())
async def test_what_came_to_an_idle_connection_is_nobodys_answer(late: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it came just before the connection was taken, and the loop has not told of it."""

    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await asyncio.Event().wait()

    worker = Worker(once, answers(OK))
    async with bench(worker) as b:
        await b.get(SESSION)
        pool = b.worker().pool
        take = pool.take
        await asyncio.sleep(0.15)

        def taken() -> Any:
            if len(worker.peers) == 1:
                worker.peers[0].raw.send(late)
            return take()

        monkeypatch.setattr(pool, "take", taken)
        client = await b.get(SESSION)
        assert (client.status, client.body) == (200, b"{}")
        assert worker.carriers == [0, 1]


async def test_farewell_that_crosses_the_request_is_nobodys_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9110 15.5.9. On its way when the request was written: the worker has not acknowledged it."""

    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await asyncio.Event().wait()

    worker = Worker(once, answers(OK))
    async with bench(worker) as b:
        await b.get(SESSION)
        pool = b.worker().pool
        take = pool.take

        def taken() -> Any:
            if len(worker.peers) == 1:
                worker.peers[0].raw.send(LATE["a farewell"])
                worker.peers[0].close()
            return take()

        monkeypatch.setattr(pool, "take", taken)
        client = await b.get(SESSION)
        assert (client.status, client.body) == (200, b"{}")


@pytest.mark.parametrize("pause", [0.0, 0.1])
async def test_worker_s_own_408_is_passed_on(pause: float) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await asyncio.sleep(pause)
        await peer.send(LATE["a farewell"])

    worker = Worker(script)
    async with bench(worker) as b:
        await b.get(SESSION)
        assert (await b.get(SESSION)).status == 408
        assert len(worker.requests) == 2


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("what", [b"x-t: 1\r\n" * 1000, b"x" * 8000], ids=["lines", "a line"])
async def test_trailers_without_an_end_are_given_up(live: Live, what: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n") + b"0\r\n" + (b"" if b":" in what else b"x-t: "))
        while True:
            await peer.send(what)

    async with live.worker(script) as worker, live.client() as client:
        await client.send(get(b"/v1/x"))
        await client.until(b"data: a\n\n")
        assert b"x-t" not in await client.rest()
    assert worker.sent < 16 * MIB


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_extensions_of_chunks_without_an_end_are_given_up(live: Live) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n") + b"9;")
        while True:
            await peer.send(b"x=y;" * 1000)

    async with live.worker(script), live.client() as client:
        await client.send(get(b"/v1/x"))
        await client.rest()


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 X\r\ncontent-length: 5\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 X\r\ntransfer-encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 X\r\ncontent-length: 5\r\n\r\n"),
    ],
)
async def test_body_that_was_announced_where_there_is_none_reaches_nobody(
    live: Live, method: bytes, answer: bytes
) -> None:
    """It may come behind the next request, when nobody could tell it from the answer to that."""

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number:
            await peer.send(OK)
        else:
            await peer.send(answer)
            await peer.request()
            await peer.send(b"12345" + OK)
        await peer.gone()

    async with live.worker(script) as worker, live.client() as client:
        await client.send(get(b"/v1/x").replace(b"GET", method))
        assert (await client.answer(method)).complete
        await client.send(get(b"/v1/x"))
        assert (await client.answer(b"GET")).normal == OK_NORMAL
    assert worker.carriers == [0, 1]


# -- the framing said again


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("cut", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 2\r\nContent-Length: 2\r\nx-a: 1\r\n",
        b"content-length: 2\r\nx-a: 1\r\ncontent-length:2 \r\ncontent-length: 2\r\n",
        b"x-a: 1\r\ncontent-length: 2, 2\r\n",
        b"content-length: 2 ,2\r\nx-a: 1\r\ncontent-length: 2\r\n",
    ],
)
@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 103 X\r\nlink: </a>\r\n\r\n"], ids=["alone", "behind 103"])
async def test_length_that_is_said_twice_alike_is_one(live: Live, lines: bytes, cut: bool, before: bytes) -> None:
    """RFC 9112 6.3. And the connection goes on."""
    whole = before + b"HTTP/1.1 200 OK\r\n" + lines + b"\r\nok"

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*([whole[at : at + 1] for at in range(len(whole))] if cut else [whole]), pause=0)

    async with live.worker(script) as worker, live.client() as client:
        for _ in range(2):
            await client.send(get(b"/v1/x"))
            answer = await client.answer(b"GET")
            assert (answer.normal, answer.all(b"content-length")) == (b"200\r\nx-a: 1\r\n\r\nok", [b"2"])
            assert [it.status for it in answer.interim] == ([103] if before else [])
    assert worker.carriers == [0, 0]


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_spaces_behind_a_chunks_size_are_nothing(live: Live) -> None:
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2  \r\nok\r\n" + END
    async with live.worker(answers(answer)), live.client() as client:
        await client.send(get(b"/v1/x"))
        assert (await client.answer(b"GET")).normal == b"200\r\n\r\nok"


# -- a request of which workers die


@pytest.mark.parametrize("workers", [2, 3, 6])
async def test_a_request_that_kills_workers_kills_two(workers: int) -> None:
    async def dies(peer: Peer) -> None:
        await peer.request()
        await peer.worker.die()
        peer.reset()

    doomed = [Worker(dies) for _ in range(workers)]
    async with bench(*doomed) as b:
        client = await b.get(JSON)
        assert (client.status, client.json["error"]["code"]) == (502, "workers_died")
        assert client.headers[b"x-should-retry"] == b"false"
        assert sum(len(worker.requests) for worker in doomed) == 2


async def test_a_worker_that_dies_alone_is_not_the_requests_fault() -> None:
    async def dies(peer: Peer) -> None:
        await peer.request()
        await peer.worker.die()
        peer.reset()

    async with bench(dies, answers(OK)) as b:
        assert [(await b.get(JSON)).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("takes", ["and drops", "and keeps"])
async def test_a_killed_worker_that_has_no_time_to_end_is_waited_for(takes: str) -> None:
    """The kernel goes on to take connections for a process that was killed, and resets them when it gets to that."""

    waiting = asyncio.Event()

    async def dying(peer: Peer) -> None:
        if not waiting.is_set():
            await peer.request()
            if len(peer.worker.requests) < 2:
                await waiting.wait()
            waiting.set()
        elif takes == "and drops" and peer.number == 11:
            await peer.worker.die()
        elif takes == "and keeps" and peer.number == 2:
            await asyncio.sleep(0.8)
            await peer.worker.die()
        elif takes == "and keeps":
            await peer.gone()
        peer.reset()

    doomed = Worker(dying)
    async with bench(doomed, answers(OK)) as b:
        clients = await asyncio.gather(*(b.get(JSON) for _ in range(4)))
        assert [client.status for client in clients] == [200] * 4, [client.json for client in clients]
        assert len(doomed.requests) == 2


async def test_a_connection_that_is_made_while_our_own_loop_has_no_time_counts() -> None:
    """Else a busy machine moves the sessions of workers that are well."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = Pool("127.0.0.1", listener.getsockname()[1], connect_limit=0.2)
        connecting = asyncio.create_task(pool.connect())
        await asyncio.sleep(0)
        time.sleep(0.5)
        assert (await connecting).connected
        pool.close()


async def test_a_connection_that_is_not_made_is_given_up_when_our_own_loop_had_no_time_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool("127.0.0.1", 9, connect_limit=0.2)
    monkeypatch.setattr(pool, "_open", lambda loop: asyncio.sleep(60))
    connecting = asyncio.create_task(pool.connect())
    await asyncio.sleep(0)
    time.sleep(0.5)
    with pytest.raises(ConnectFailed):
        async with asyncio.timeout(30):
            await connecting


# -- streams of events


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"", ([b"no"], [b"no-cache"])),
        (b"cache-control: no-store\r\n", ([b"no"], [b"no-store"])),
        (b"X-Accel-Buffering: yes\r\n", ([b"yes"], [b"no-cache"])),
    ],
)
async def test_event_streams_say_that_nobody_is_to_hold_them_back(
    live: Live, said: bytes, expected: tuple[list[bytes], list[bytes]]
) -> None:
    answer = STREAM.replace(b"\r\n\r\n", b"\r\n" + said + b"\r\n") + chunk(b"data: a\n\n") + END
    async with live.worker(answers(answer)), live.client() as client:
        await client.send(get(b"/v1/x"))
        got = await client.answer(b"GET")
        assert (got.all(b"x-accel-buffering"), got.all(b"cache-control")) == expected


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_other_answers_say_nothing_of_buffers(live: Live) -> None:
    async with live.worker(answers(OK)), live.client() as client:
        await client.send(get(b"/v1/x"))
        got = await client.answer(b"GET")
        assert not got.all(b"x-accel-buffering")
        assert not got.all(b"cache-control")


# -- the addresses of a name


def leading_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> Names:
    """Names that lead to these addresses, whatever they are. Of a name only hosts are asked for; here each has a port
    of its own."""

    async def known(names: Names, host: str, port: int) -> list[Any]:
        return [(socket.AF_INET, address) for address in addresses]

    monkeypatch.setattr(Names, "addresses", known)
    return Names()


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, int]]:
    """An address where connecting takes for ever: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(20):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()


@contextlib.contextmanager
def refusing() -> Iterator[tuple[str, int]]:
    with socket.socket() as raw:
        raw.bind(("127.0.0.1", 0))
        yield raw.getsockname()


async def test_the_next_address_is_tried_after_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 8305 5: a name whose first address does not answer costs that, not the whole limit."""
    async with Worker(answers(OK)) as worker:
        with silent() as nobody:
            leading_to(monkeypatch, nobody, ("127.0.0.1", worker.port))
            pool = Pool("name.example", 1, connect_limit=LIMIT)
            began = time.monotonic()
            connection = await pool.connect()
            assert 0.2 < time.monotonic() - began < LIMIT / 2
            assert connection._socket.getpeername()[1] == worker.port
            pool.close()
            connection.fail(ConnectFailed("over"))


async def test_the_next_address_is_tried_at_once_where_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Worker(answers(OK)) as worker:
        with refusing() as nobody:
            leading_to(monkeypatch, nobody, ("127.0.0.1", worker.port))
            connection = await Pool("name.example", 1).connect()
            assert connection._socket.getpeername()[1] == worker.port
            connection.fail(ConnectFailed("over"))


async def test_only_where_all_addresses_refuse_the_worker_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing() as one, refusing() as other, silent() as nobody:
        leading_to(monkeypatch, one, other)
        with pytest.raises(ConnectRefused):
            await Pool("name.example", 1).connect()
        leading_to(monkeypatch, one, nobody)
        with pytest.raises(ConnectFailed) as raised:
            await Pool("name.example", 1, connect_limit=0.5).connect()
        assert not isinstance(raised.value, ConnectRefused)


def test_families_take_turns() -> None:
    six = [(socket.AF_INET6, (f"::{n}", 1, 0, 0)) for n in range(3)]
    four = [(socket.AF_INET, (f"127.0.0.{n}", 1)) for n in range(2)]
    assert tcp.alternating([*six, *four, six[0]]) == [six[0], four[0], six[1], four[1], six[2]]


async def test_connections_to_workers_ask_for_life() -> None:
    async with Worker(answers(OK)) as worker:
        connection = await Pool("127.0.0.1", worker.port).connect()
        await until(lambda: worker.peers)
        raw = connection._socket
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        connection.fail(ConnectFailed("over"))


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_first_byte_of_a_kept_connection_that_is_no_answer(live: Live) -> None:
    """A reused connection is held to the same rules as a fresh one."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await peer.send(b"nonsense\r\n\r\n")

    async with live.worker(script), live.client() as client:
        await client.send(get(b"/v1/x"))
        assert (await client.answer(b"GET")).status == 200
        await client.send(get(b"/v1/x"))
        openai_error(await client.answer(b"GET"), [502], "worker_bad_response")
