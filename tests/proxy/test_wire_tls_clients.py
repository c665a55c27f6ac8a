"""Clients that come by TLS: what is promised of those without it holds for them too, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.raw import DONE, END, OK, STREAM, Client, Live, Peer, answers, chunk, echoes, get, post, still, until
from tests.support.tls import Contexts, TlsClient, TlsLive, contexts

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])  # the router has its own
KIB, MIB = 1 << 10, 1 << 20
SECRET = b"what nobody on the way may read"
UNENDING = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
"""The connection's end is the body's."""
HEAD_LIMIT = 1.0


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return contexts(tmp_path_factory.mktemp("tls"), "router")


@pytest.fixture(scope="module")
def router(tls: Contexts) -> Iterator[TlsLive]:
    with TlsLive(tls, client_head_timeout=HEAD_LIMIT) as live:
        yield live


@pytest.fixture
async def client(router: TlsLive) -> AsyncIterator[TlsClient]:
    client = await router.connect()
    with contextlib.closing(client):
        yield client


# -- bytes


async def test_a_stream_is_the_same_with_tls_and_without(router: TlsLive, client: TlsClient) -> None:
    """Piece by piece as its worker says it, and nothing of it can be read on the way."""
    events = [b"data: %b %d\n\n" % (SECRET, number) for number in range(40)]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM)
        for event in [*events, DONE]:
            await peer.send(chunk(event))
            await asyncio.sleep(0)
        await peer.send(END)

    with Live() as plain:
        async with plain.worker(script), plain.client() as other:
            await other.send(post(b"x-request-id: 1", body=b'{"stream": true}'))
            expected = await other.answer()
    async with router.worker(script) as worker:
        await client.send(post(b"x-request-id: 1", body=b'{"stream": true, "x": "%b"}' % SECRET))
        answer = await client.answer()
        assert (answer.normal, answer.complete) == (expected.normal, True)
        assert answer.body == b"".join(events) + DONE
        assert SECRET not in client.seen
        assert SECRET in worker.requests[0].body
        assert b"x-forwarded-proto: https\r\n" in worker.heads[0].lower()


async def test_a_token_does_not_wait_for_the_next(router: TlsLive, client: TlsClient) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: 1\n\n"))
        await go.wait()
        await peer.send(chunk(DONE) + END)

    async with router.worker(script):
        await client.send(post())
        assert (await client.until(b"data: 1\n\n")).startswith(b"HTTP/1.1 200 ")
        go.set()
        await client.until(END)


async def test_large_bodies_pass_both_ways_and_the_connection_is_kept(router: TlsLive, client: TlsClient) -> None:
    body = bytes(range(256)) * 4 * KIB * 3
    async with router.worker(echoes) as worker:
        for kind in (b"application/json", b"application/octet-stream", b"application/json"):
            await client.send(post(b"content-type: " + kind, body=body))
            assert (await client.answer()).body == body
        assert len(worker.requests) == 3


async def test_requests_that_come_at_once_are_answered_in_their_order(router: TlsLive, client: TlsClient) -> None:
    async with router.worker(echoes):
        await client.send(b"".join(post(body=b"%d" % number) for number in range(20)))
        assert [(await client.answer()).body for _ in range(20)] == [b"%d" % number for number in range(20)]


async def test_a_slow_client_stops_the_worker_and_loses_nothing(router: TlsLive) -> None:
    total, piece = 16 * MIB, b"p" * 64 * KIB

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(total // len(piece)):
            await peer.send(piece)

    client = await router.connect(receive_buffer=4096)
    with contextlib.closing(client):
        async with router.worker(script) as worker:
            await client.send(post())
            await client.until(b"\r\n\r\n")
            await still(lambda: worker.sent)
            assert worker.sent < total
            client.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
            assert await client.exactly(total) == piece * (total // len(piece))


async def test_leave_to_send_a_body_is_given(router: TlsLive, client: TlsClient) -> None:
    async with router.worker(echoes):
        whole = post(b"expect: 100-continue", body=b"later")
        await client.send(whole.removesuffix(b"later"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"later")
        assert (await client.answer()).body == b"later"


async def test_a_websocket_is_made_and_carries_both_ways(router: TlsLive, client: TlsClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.until(b"\r\n\r\n")
        await peer.send(
            b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: x\r\n\r\n"
        )
        await peer.send((await peer.exactly(5)).upper())
        assert await peer.rest() == b""

    asked = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: x", b"sec-websocket-version: 13")
    async with router.worker(script):
        await client.send(get(b"/v1/realtime", *asked))
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        await client.send(b"hello")
        assert await client.exactly(5) == b"HELLO"
        await client.say_the_end()
        assert await client.rest() == b""


async def test_the_control_plane_answers_there(router: TlsLive) -> None:
    for target, word in ((b"/health", b"ok"), (b"/metrics", b"coatcheck_turns_total")):
        async with router.client() as client:
            await client.send(get(target))
            answer = await client.answer(b"GET")
            assert (answer.status, word in answer.body, answer.complete) == (200, True, True)
            assert await client.closed()
            assert client.ended == "closed"


# -- ends


@pytest.mark.parametrize("whole", [True, False])
async def test_a_body_that_ends_with_the_connection_is_whole_only_if_tls_says_so(router: TlsLive, whole: bool) -> None:
    """To clients of HTTP/1.0; anybody on the way can end a connection (RFC 9112 9.8)."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"half"))
        if whole:
            await peer.send(END)
        else:
            peer.reset()

    async with router.worker(script), router.client() as client:
        await client.send(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"half" in await client.rest()
        assert (client.ended == "closed") is whole


async def test_an_answer_that_its_worker_breaks_off_has_no_end(router: TlsLive, client: TlsClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: 1\n\n"))
        peer.reset()

    async with router.worker(script):
        await client.send(post())
        answer = await client.answer()
        assert (answer.status, answer.complete) == (200, False)
        assert b'"error"' in answer.body


@pytest.mark.parametrize("how", ["close", "reset", "say_the_end", "finish_sending"])
async def test_a_client_that_leaves_ends_its_turn(router: TlsLive, how: str) -> None:
    left = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: 1\n\n"))
        await peer.gone()
        left.set()

    async with router.worker(script), router.client() as client:
        await client.send(post())
        await client.until(b"data: 1\n\n")
        done = getattr(client, how)()
        if how == "say_the_end":
            await done
        await asyncio.wait_for(left.wait(), 10)


async def test_a_client_that_is_still_sending_reads_why_it_was_refused(router: TlsLive) -> None:
    """Closed with bytes unread a connection is reset, and its client loses the answer."""
    async with router.client() as client:
        await client.send(b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n" % (1 << 40))
        sending = asyncio.create_task(client.send(b"x" * 4 * MIB))
        answer = await client.answer()
        assert (answer.status, answer.complete) == (413, True)
        with contextlib.suppress(ConnectionError):
            await sending


# -- handshakes


async def test_http_1_1_is_what_is_agreed_on(router: TlsLive, tls: Contexts) -> None:
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    client = TlsClient((await Live.connect(router)).raw, context)
    with contextlib.closing(client):
        await client.shake_hands()
        assert client.protocol == "http/1.1"


async def test_who_speaks_no_tls_is_told_so(router: TlsLive) -> None:
    client: Client = await Live.connect(router)
    with contextlib.closing(client):
        await client.send(get(b"/health"))
        said = await client.rest()
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"this port speaks TLS" in said


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 64, b"SSH-2.0-x\r\n"])
async def test_a_handshake_that_does_not_come_about_is_given_up(router: TlsLive, said: bytes) -> None:
    client: Client = await Live.connect(router)
    with contextlib.closing(client):
        if said:
            await client.send(said)
        await asyncio.wait_for(client.gone(), 10 * HEAD_LIMIT)


async def test_a_handshake_that_waits_does_not_hold_up_the_end(tls: Contexts) -> None:
    with TlsLive(tls, client_head_timeout=0, drain_timeout=600) as router:
        client: Client = await Live.connect(router)
        # It is accepted once another one behind it has been served.
        async with router.client() as other:
            await other.send(get(b"/health"))
            assert (await other.answer(b"GET")).status == 200
        stopping = asyncio.get_running_loop().run_in_executor(None, router.stop)
        with contextlib.closing(client):
            await asyncio.wait_for(client.gone(), 10)
        await asyncio.wait_for(stopping, 20)


async def test_clients_without_tls_are_told_apart_from_those_with_it() -> None:
    with Live() as plain:
        async with plain.worker(answers(OK)) as worker, plain.client() as client:
            await client.send(post())
            await client.answer()
            assert b"x-forwarded-proto: http\r\n" in worker.heads[0].lower()
            await until(lambda: worker.requests)
