"""Workers behind TLS: what is promised of those without it holds for them too."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from typing import Any

import pytest

from app.http.worker import ConnectFailed, Pool
from tests.support.bench import SESSION, bench
from tests.support.raw import DONE, END, OK, STREAM, Peer, Worker, answers, chunk, echoes, still, until
from tests.support.tls import Contexts, TlsPeer, TlsWorker, contexts

KIB, MIB = 1 << 10, 1 << 20
REFUSED = b"HTTP/1.1 413 X\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 9\r\n\r\ntoo large"
UNENDING = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
"""The connection's end is the body's."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return contexts(tmp_path_factory.mktemp("tls"))


# -- an answer before the request was read


@pytest.mark.parametrize("says_end", [False, True], ids=["cut", "ended"])
@pytest.mark.parametrize("kind", [(), ((b"content-type", b"a/b"),)], ids=["whole", "streamed"])
@pytest.mark.parametrize("size", [MIB, 4 * MIB])
async def test_answer_that_comes_before_the_body_was_read_reaches_the_client(
    tls: Contexts, kind: tuple[tuple[bytes, bytes], ...], size: int, says_end: bool
) -> None:
    """Often: whether writing or reading finds the end first is chance."""

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(REFUSED)  # and closes, which resets what is still being sent
        if says_end:
            await _say_the_end(peer)

    async with TlsWorker(tls.server, script) as worker, bench(worker.url, tls=tls.client) as b:
        for _ in range(6):
            client = await b.get(*kind, body=b"x" * size)
            assert (client.status, client.body, client.complete) == (413, b"too large", True)
        assert b.worker().available


async def test_early_answer_is_read_whole_after_the_write_has_failed(tls: Contexts) -> None:
    """All that had come when the connection broke, be it more than one read; what is cut stays cut."""
    large = MIB
    answer = b"HTTP/1.1 413 X\r\ncontent-length: %d\r\n\r\n" % (2 * large) + b"x" * large

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer)

    async with TlsWorker(tls.server, script) as worker, bench(worker.url, tls=tls.client) as b:
        client = await b.get((b"content-type", b"a/b"), body=b"y" * 8 * MIB)
        assert client.status == 413
        assert not client.complete
        assert b.worker().in_flight == 0


# -- bytes


async def test_bodies_arrive_as_sent_both_ways_and_connections_are_used_again(tls: Contexts) -> None:
    body = bytes(range(256)) * 4 * KIB * 3
    async with TlsWorker(tls.server, echoes) as worker, bench(worker.url, tls=tls.client) as b:
        for kind in ((), ((b"content-type", b"a/b"),), ()):
            assert (await b.get(*kind, body=body)).body == body
        assert worker.carriers == [0, 1, 1], "what cannot be sent again gets a connection of its own"


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_stream_comes_as_it_was_said(tls: Contexts, at_once: bool) -> None:
    events = [b"data: %d\n\n" % number for number in range(50)]
    pieces = [STREAM, *map(chunk, events), chunk(DONE) + END]

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            for piece in [b"".join(pieces)] if at_once else pieces:
                await peer.send(piece)
                await asyncio.sleep(0)

    async with TlsWorker(tls.server, script) as worker, bench(worker.url, tls=tls.client) as b:
        for _ in range(2):
            client = await b.get(SESSION)
            assert (client.body, client.complete) == (b"".join(events) + DONE, True)
        assert worker.carriers == [0, 0]


async def test_slow_client_stops_the_worker_and_loses_nothing(tls: Contexts) -> None:
    total, piece = 16 * MIB, b"p" * 64 * KIB

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(total // len(piece)):
            await peer.send(piece)

    async with TlsWorker(tls.server, script) as worker, bench(worker.url, tls=tls.client) as b:
        client = b.request(little=True).start()
        await until(lambda: client.body)
        client.stall()
        await still(lambda: worker.sent)
        assert worker.sent < total
        client.go_on()
        await client.finish()
        assert (client.body, client.complete) == (piece * (total // len(piece)), True)


# -- ends


@pytest.mark.parametrize("says_end", [False, True], ids=["cut", "ended"])
async def test_a_body_that_ends_with_the_connection_is_whole_only_if_tls_says_so(tls: Contexts, says_end: bool) -> None:
    """RFC 9112 9.8. Anybody on the way can end a connection."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(UNENDING + b"half of it")
        if says_end:
            await _say_the_end(peer)

    async with TlsWorker(tls.server, script) as worker, bench(worker.url, tls=tls.client) as b:
        client = await b.get()
        assert (client.status, client.body) == (200, b"half of it")
        assert client.complete is says_end


@pytest.mark.parametrize("says_end", [False, True], ids=["cut", "ended"])
@pytest.mark.parametrize("just_now", [False, True], ids=["before", "just now"])
async def test_request_that_meets_a_closed_idle_connection_goes_by_another(
    tls: Contexts, monkeypatch: pytest.MonkeyPatch, just_now: bool, says_end: bool
) -> None:
    closed = asyncio.Event()

    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await closed.wait()
        if says_end:
            await _say_the_end(peer)

    worker = TlsWorker(tls.server, once, answers(OK))
    async with worker, bench(worker.url, tls=tls.client) as b:
        await b.get(SESSION)
        pool = b.worker().pool
        take = pool.take

        def taken() -> Any:
            if len(worker.peers) == 1:
                worker.peers[0].finish_sending()
            return take()

        if just_now:
            monkeypatch.setattr(pool, "take", taken)
        else:
            closed.set()
            await until(lambda: not pool.open)
        assert (await b.get(SESSION)).status == 200
        assert worker.carriers == [0, 1]


async def test_client_that_leaves_cuts_the_worker(tls: Contexts) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        await peer.gone()
        gone.set()

    async with TlsWorker(tls.server, script) as worker, bench(worker.url, tls=tls.client) as b:
        client = b.request(SESSION).start()
        await until(lambda: client.body)
        client.leave()
        await client.finish()
        await asyncio.wait_for(gone.wait(), 5)
        assert b.outcomes() == {"aborted": 1}


@pytest.mark.parametrize(
    ("before", "status"), [(b"", 502), (STREAM + chunk(b"data: a\n\n"), 200)], ids=["head", "body"]
)
async def test_bytes_that_were_changed_on_the_way_are_a_broken_connection(
    tls: Contexts, before: bytes, status: int
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if before:
            await peer.send(before)
        # A record that nobody with the keys has made.
        await asyncio.get_running_loop().sock_sendall(peer.raw, b"\x17\x03\x03\x00\x20" + b"?" * 32)
        await peer.gone()

    async with TlsWorker(tls.server, script) as worker, bench(worker.url, tls=tls.client) as b:
        client = await b.get(SESSION)
        assert (client.status, client.complete) == (status, not before)
        assert b"?" not in client.body


# -- handshakes


async def _plain(peer: Peer) -> None:
    await peer.more()
    await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await peer.gone()


async def _closes(peer: Peer) -> None:
    await peer.more()


async def _resets(peer: Peer) -> None:
    await peer.more()
    peer.reset()


@pytest.mark.parametrize("script", [_plain, _closes, _resets])
async def test_what_is_no_handshake_is_no_connection(tls: Contexts, script: Any) -> None:
    async with Worker(script) as worker:
        with pytest.raises(ConnectFailed):
            await Pool("127.0.0.1", worker.port, tls=tls.client).connect()


async def test_who_is_not_believed_gets_no_request(tls: Contexts) -> None:
    stranger = ssl.create_default_context()
    async with TlsWorker(tls.server, answers(OK)) as worker:
        for context, name in ((stranger, "127.0.0.1"), (tls.client, "other.test")):
            with pytest.raises(ConnectFailed, match="certificate"):
                await Pool("127.0.0.1", worker.port, tls=context, server_name=name).connect()
        connection = await Pool("127.0.0.1", worker.port, tls=tls.client, server_name="worker.test").connect()
        connection.close()
        assert not worker.requests


async def test_a_handshake_that_is_left_leaves_nothing(tls: Contexts) -> None:
    async with Worker(Peer.gone) as worker:
        pool = Pool("127.0.0.1", worker.port, tls=tls.client)
        connecting = asyncio.create_task(pool.connect())
        await until(lambda: worker.peers)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
        await until(lambda: worker.peers[0].ended)
        assert pool.open == 0
        gc.collect()  # a failure that nobody has asked for would be told now


async def _say_the_end(peer: Peer) -> None:
    assert isinstance(peer, TlsPeer)
    await peer.say_the_end()
