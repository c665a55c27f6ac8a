"""WebSocket through the router (RFC 6455 4, RFC 9110 7.8): the handshake is a turn, what follows it are bytes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Iterator

import pytest

from tests.support import http_model
from tests.support.raw import (
    LIMIT,
    OK,
    OK_NORMAL,
    POST,
    Client,
    Kept,
    Live,
    Peer,
    answers,
    get,
    openai_error,
    post,
    until,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

MIB = 1 << 20
SOON = 1.0
"""Seconds within which the end of one side must reach the other."""
KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
ASKED = (
    b"upgrade: websocket",
    b"connection: Upgrade",
    KEY,
    b"sec-websocket-version: 13",
    b"sec-websocket-protocol: realtime, openai-insecure-api-key.x",
    b"sec-websocket-extensions: permessage-deflate",
)
ACCEPT = b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + ACCEPT
SWITCHED += b"\r\nsec-websocket-protocol: realtime\r\nset-cookie: a=1\r\n\r\n"
SESSION = b"x-dynamo-session-id: talk"


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with contextlib.closing(Kept()) as kept:
        yield kept


@pytest.fixture
def live(kept: Kept) -> Live:
    return kept.get()


def handshake(*lines: bytes, target: bytes = b"/v1/realtime?model=m") -> bytes:
    return get(target, *ASKED, *lines)


async def reflects(peer: Peer) -> None:
    """Takes the offer, and says everything back."""
    await peer.request()
    await peer.send(SWITCHED + bytes(peer.buffer))
    peer.buffer.clear()
    while await peer.more():
        await peer.send(bytes(peer.buffer))
        peer.buffer.clear()


async def switched(client: Client) -> http_model.Answer:
    answer = await client.answer(b"GET")
    assert answer.status == 101, answer.normal
    return answer


TARGETS = [b"/v1/realtime?model=m", b"/v1/realtime", b"/v1/audio/live;a=1?b"]


@pytest.mark.parametrize("target", TARGETS, ids=repr)
async def test_handshake_and_bytes_both_ways(live: Live, target: bytes) -> None:
    async with live.worker(reflects) as worker, live.client() as client:
        await client.send(handshake(b"x-a: caf\xe9", b"keep-alive: 5", target=target))
        answer = await switched(client)
        assert [value.lower() for value in answer.all(b"upgrade")] == [b"websocket"]
        assert [value.lower() for value in answer.all(b"connection")] == [b"upgrade"]
        assert answer.all(b"sec-websocket-accept") == [ACCEPT.partition(b": ")[2]]
        assert answer.all(b"sec-websocket-protocol") == [b"realtime"]
        assert answer.all(b"set-cookie") == [b"a=1"]
        assert answer.all(b"x-coatcheck-worker") == [b"w0"]
        assert not answer.all(b"transfer-encoding")
        assert not answer.all(b"content-length")
        for message in (b"\x81\x05hello", bytes(range(256)), b"\r\n\r\nGET / HTTP/1.1\r\n\r\n", b"\x00"):
            await client.send(message)
            assert await client.exactly(len(message)) == message
    [request] = worker.requests
    assert (request.method, request.target) == (b"GET", target)
    assert [value.lower() for value in request.all(b"upgrade")] == [b"websocket"]
    assert [value.lower() for value in request.all(b"connection")] == [b"upgrade"]
    others = [pair for pair in request.headers if pair[0].startswith(b"sec-") or pair[0] == b"x-a"]
    assert [b"%b: %b" % pair for pair in others] == [*ASKED[2:], b"x-a: caf\xe9"]
    assert request.all(b"host") == [b"127.0.0.1:%d" % live.worker_port]
    assert request.framing == "none"
    assert not request.all(b"keep-alive")


SPELLINGS = {
    "as browsers do": (b"connection: keep-alive, Upgrade", b"upgrade: websocket", KEY),
    "in capitals": (b"Connection: UPGRADE", b"Upgrade: WebSocket", KEY),
    "in two lines": (b"connection: keep-alive", b"connection: upgrade", b"upgrade: websocket", KEY),
}


@pytest.mark.parametrize("lines", SPELLINGS.values(), ids=SPELLINGS.keys())
async def test_offer_is_understood_however_it_is_spelled(live: Live, lines: tuple[bytes, ...]) -> None:
    async with live.worker(reflects), live.client() as client:
        await client.send(get(b"/v1/realtime", *lines))
        await switched(client)
        await client.send(b"x")
        assert await client.exactly(1) == b"x"


@pytest.mark.parametrize("split", [False, True], ids=["at once", "in pieces"])
async def test_bytes_right_behind_the_heads(live: Live, split: bool) -> None:
    """Either side may send before it has heard of the other; what looks like a request there is none."""
    early = post(body=b"early") + handshake()

    async def script(peer: Peer) -> None:
        await peer.request()
        whole = SWITCHED + b"\x82\x03abc" + OK
        await peer.send(*((whole[at : at + 50] for at in range(0, len(whole), 50)) if split else (whole,)))
        heard.append(await peer.exactly(len(early)))

    heard: list[bytes] = []
    async with live.worker(script) as worker, live.client() as client:
        sent = handshake() + early
        await client.send(*((sent[at : at + 50] for at in range(0, len(sent), 50)) if split else (sent,)))
        await switched(client)
        assert await client.rest() == b"\x82\x03abc" + OK
    assert heard == [early]
    assert len(worker.requests) == 1


async def test_many_bytes_both_ways_at_once(live: Live) -> None:
    amount = 8
    up, down = random.Random(1).randbytes(MIB), random.Random(2).randbytes(MIB)
    digests: list[bytes] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(SWITCHED)
        sending = asyncio.create_task(peer.send(*[down] * amount, pause=0))
        digests.append(hashlib.sha256(await peer.exactly(amount * MIB)).digest())
        await sending
        took.set()
        await peer.rest()

    took = asyncio.Event()
    async with live.worker(script), live.client() as client, asyncio.timeout(LIMIT):
        await client.send(handshake())
        await switched(client)
        sending = asyncio.create_task(client.send(*[up] * amount, pause=0))
        digests.append(hashlib.sha256(await client.exactly(amount * MIB)).digest())
        await sending
        await took.wait()
    assert sorted(digests) == sorted(hashlib.sha256(block * amount).digest() for block in (up, down))


@pytest.mark.parametrize("slow", ["client", "worker"])
async def test_slow_side_slows_the_other(live: Live, slow: str) -> None:
    """What one end does not take is not taken from the other either."""
    total, sent = 32, 0
    block = bytes(MIB)

    async def flood(end: Client | Peer) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            while sent < total:
                await end.send(block)
                sent += 1

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(SWITCHED)
        if slow == "client":
            await flood(peer)
        await over.wait()

    over = asyncio.Event()
    async with live.worker(script), live.client(receive_buffer=8192) as client:
        await client.send(handshake())
        await client.until(b"\r\n\r\n")
        flooding = asyncio.create_task(flood(client)) if slow == "worker" else None
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.15)
        assert sent < total * 3 // 4, "the router takes what the other end does not"
        if flooding is not None:
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
        client.reset()
        over.set()


@pytest.mark.parametrize("end", ["close", "reset", "half"])
async def test_client_that_leaves_ends_the_workers_side(live: Live, end: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(SWITCHED)
        assert await peer.rest() == b"bye"
        gone.set()

    gone = asyncio.Event()
    async with live.worker(script), live.client() as client:
        await client.send(handshake(SESSION))
        await switched(client)
        await client.send(b"bye")
        await asyncio.sleep(0.02)  # a reset may overtake data on their way
        {"close": client.close, "reset": client.reset, "half": client.finish_sending}[end]()
        async with asyncio.timeout(SOON):
            await gone.wait()


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_worker_that_leaves_ends_the_clients_side(live: Live, end: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(SWITCHED + b"bye")
        await asyncio.sleep(0.02)
        peer.close() if end == "close" else peer.reset()

    async with live.worker(script), live.client() as client:
        await client.send(handshake(SESSION))
        await switched(client)
        assert await client.rest(limit=SOON) == b"bye"
        await live.rest(limit=SOON)


REFUSED = (
    b"HTTP/1.1 %b\r\nx-a: 1\r\nsec-websocket-version: 13\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nno"
)


@pytest.mark.parametrize("status", [b"400 X", b"401 X", b"403 X", b"404 X", b"426 X", b"429 X", b"500 X", b"200 OK"])
async def test_worker_that_declines_is_passed_on(live: Live, status: bytes) -> None:
    """As any answer; nobody is hung up on."""
    async with live.worker(answers(REFUSED % status)) as worker:
        async with live.client() as client:
            await client.send(handshake(SESSION))
            answer = await client.answer(b"GET")
            kept = b"x-a: 1\r\nsec-websocket-version: 13\r\ncontent-type: text/plain"
            assert answer.normal == status[:3] + b"\r\n" + kept + b"\r\n\r\nno"
            assert answer.complete
            assert answer.all(b"x-coatcheck-worker") == [b"w0"]
        async with live.client() as client:
            await client.send(post())
            assert (await client.answer()).status == int(status[:3])
    assert len(worker.requests) == 2


async def test_worker_that_breaks_the_handshake(live: Live) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()

    async with live.worker(script), live.client() as client:
        await client.send(handshake())
        openai_error(await client.answer(b"GET"), [502], "worker_reset")


async def test_worker_that_speaks_another_protocol(live: Live) -> None:
    async with live.worker(answers(b"\x81\x05hello")), live.client() as client:
        await client.send(handshake())
        openai_error(await client.answer(b"GET"), [502], "worker_bad_response")


async def test_tunnel_is_a_turn_of_its_session() -> None:
    """It is counted while it lasts, and the session's other turns go where it is."""
    with Live(workers=2, policy="round-robin") as live:

        async def script(peer: Peer) -> None:
            request = await peer.request()
            if request.get(b"upgrade"):
                await peer.send(SWITCHED)
                await peer.rest()
            else:
                await peer.send(OK)

        async def counts() -> list[float]:
            names = ("turns_running", "in_flight", "session_turns_active")
            return [await live.count(f"coatcheck_{name}") for name in names]

        async with live.worker(script), live.worker(script, number=1), live.client() as client:
            await client.send(handshake(SESSION))
            answer = await switched(client)
            assert answer.all(b"x-coatcheck-affinity") == [b"created"]
            assert await counts() == [1, 1, 1]
            for _ in range(3):
                async with live.client() as other:
                    await other.send(post(SESSION, b"connection: close"))
                    joined = await other.answer()
                assert joined.all(b"x-coatcheck-worker") == answer.all(b"x-coatcheck-worker")
                assert joined.all(b"x-coatcheck-affinity") == [b"cached"]
            assert await counts() == [1, 1, 1]
            client.close()
            await until(lambda: _is(counts(), [0, 0, 0]), SOON)
            async with live.client() as again:
                await again.send(handshake(SESSION))
                back = await switched(again)
            assert back.all(b"x-coatcheck-worker") == answer.all(b"x-coatcheck-worker")


async def _is(asked: Awaitable[list[float]], expected: list[float]) -> bool:
    return await asked == expected


async def test_final_tunnel_closes_its_session(live: Live) -> None:
    async with live.worker(reflects), live.client() as client:
        await client.send(handshake(b"x-dynamo-session-id: last", b"x-dynamo-session-final: true"))
        await switched(client)
        client.close()
        await live.rest()
        async with live.client() as after:
            await after.send(
                b"GET /admin/session?session=last HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            assert (await after.answer(b"GET")).status == 404


async def test_worker_that_is_not_there() -> None:
    """As in any turn: another one takes it, or nobody can."""
    with Live(workers=1, absent=1) as live:
        async with live.worker(reflects):
            for number in range(2):
                async with live.client() as client:
                    await client.send(handshake(b"x-dynamo-session-id: s%d" % number))
                    assert (await switched(client)).all(b"x-coatcheck-worker") == [b"w1"]
                    await client.send(b"x")
                    assert await client.exactly(1) == b"x"
    with Live(workers=0, absent=1) as live:
        async with live.client() as client:
            await client.send(handshake())
            openai_error(await client.answer(b"GET"), [502, 503], "worker_unreachable")


DECLINED = {
    "h2c": (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAARAAAAA"),
    "another protocol": (b"connection: upgrade", b"upgrade: TLS/1.0, HTTP/1.1"),
    "websocket that Connection does not name": (b"upgrade: websocket", KEY),
    "websocket and Connection: close": (b"connection: close", b"upgrade: websocket", KEY),
}


@pytest.mark.parametrize("lines", DECLINED.values(), ids=DECLINED.keys())
async def test_other_offers_are_declined(live: Live, lines: tuple[bytes, ...]) -> None:
    """RFC 9110 7.8: and the request is served."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        for request in (get(b"/v1/x", *lines), post(*lines)):
            await client.send(request)
            assert (await client.answer()).normal == OK_NORMAL
            if b"connection: close" in lines:
                break
    for served in worker.requests:
        assert served.all(b"upgrade") == served.all(b"connection") == served.all(b"http2-settings") == []


async def test_websocket_by_post_or_in_http_1_0_is_none(live: Live) -> None:
    """RFC 6455 4.1, RFC 9110 7.8"""
    async with live.worker(answers(OK)) as worker:
        for sent in (post(*ASKED), get(b"/v1/x", *ASKED).replace(b"HTTP/1.1", b"HTTP/1.0")):
            async with live.client() as client:
                await client.send(sent)
                assert (await client.answer()).normal == OK_NORMAL
    assert [request.all(b"upgrade") for request in worker.requests] == [[], []]


async def test_switch_that_nobody_offered_is_a_bad_answer(live: Live) -> None:
    async with live.worker(answers(SWITCHED)), live.client() as client:
        await client.send(post(*DECLINED["h2c"]))
        openai_error(await client.answer(), [502], "worker_bad_response")


async def test_websocket_to_the_control_plane_is_served_as_http(live: Live) -> None:
    async with live.worker(answers(OK)) as worker:
        for target, status in ((b"/health", 200), (b"/nothing", 404), (b"/v1/../realtime", 400)):
            async with live.client() as client:
                await client.send(handshake(target=target))
                assert (await client.answer(b"GET")).status == status
                assert await client.closed()
    assert worker.nothing_came()


async def test_handshake_behind_another_request(live: Live) -> None:
    """Pipelined: it waits for its turn, and so do the bytes behind it."""

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.get(b"upgrade"):
                break
            await asyncio.sleep(0.05)
            await peer.send(OK)
        await peer.send(SWITCHED)
        heard.append(await peer.exactly(5))

    heard: list[bytes] = []
    async with live.worker(script), live.client() as client, asyncio.timeout(LIMIT):
        await client.send(post(body=b"{}") + handshake() + b"early")
        assert (await client.answer()).normal == OK_NORMAL
        await switched(client)
        assert await client.closed()
    assert heard == [b"early"]


@pytest.mark.parametrize("bad", [b"connection : upgrade", b"x-a: \x00", b"host: two"])
async def test_bad_handshake_is_refused(live: Live, bad: bytes) -> None:
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(handshake(bad) + POST)
        openai_error(await client.answer(b"GET"), [400])
        assert await client.closed()
    assert worker.nothing_came()


async def test_silence_in_a_tunnel_is_no_slow_request() -> None:
    with Live(client_head_timeout=1.0, client_body_timeout=1.0) as live:
        async with live.worker(reflects), live.client() as client:
            await client.send(handshake())
            await switched(client)
            await asyncio.sleep(2.5)
            await client.send(b"still here")
            assert await client.exactly(10) == b"still here"


async def test_hint_places_a_tunnel_too(live: Live) -> None:
    async with live.worker(reflects) as worker, live.client() as client:
        await client.send(handshake(b"x-dynamo-worker-instance-id: nobody"))
        openai_error(await client.answer(b"GET"), [400], "unknown_worker")
    assert worker.nothing_came()
