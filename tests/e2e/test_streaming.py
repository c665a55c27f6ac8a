"""What the router does to the bytes of an answer: nothing, at once, and in bounded memory. And how it tells that an
answer is broken. The workers are scripted byte by byte, so that order is proven by waiting and not by clocks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import new_session
from tests.support.http_model import Request
from tests.support.late import openai
from tests.support.processes import Processes, Replica, metrics, total, wait_until
from tests.support.raw import DONE, END, OK, STREAM, Peer, Worker, answers, chunk, still, to_each
from tests.support.tcp import TcpProxy
from tests.support.wire import Wire, ask, turn

MIB = 1024 * 1024


@dataclass(frozen=True)
class Setup:
    """Replicas whose workers are played by the tests."""

    usual: Replica
    """At `http` and, by hint, at `https`, whose certificate it knows."""
    hasty: Replica
    """At `http`, with little patience."""
    wary: Replica
    """At `https` alone, whose certificate it does not know."""
    http: socket.socket
    https: socket.socket
    tls: ssl.SSLContext


PATIENCE = 0.4
"""Of the hasty replica, in seconds."""


@pytest.fixture(scope="module")
def setup(module_processes: Processes) -> Iterator[Setup]:
    folder = module_processes.folder
    certificate, key = _certificate(folder)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as https:
        plain = f"--worker=http://127.0.0.1:{http.getsockname()[1]},name=http"
        secure = f"--worker=https://127.0.0.1:{https.getsockname()[1]},name=https"
        claims = f"--claims=file://{folder}/claims"
        unasked = ("--probe-path=off", "--models-interval=0")  # between the tests nobody answers there
        limits = [f"--first-byte-timeout={PATIENCE}", f"--idle-timeout={PATIENCE}"]
        usual, hasty, wary = module_processes.replicas_with(
            [claims, plain, secure, f"--worker-ca={certificate}", *unasked],
            [claims, plain, *limits, *unasked],
            [claims, secure, *unasked],
        )
        yield Setup(usual, hasty, wary, http, https, tls)


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=worker"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def url(setup: Setup) -> str:
    return setup.usual.url


PerRequest = Callable[[Peer, Request], Awaitable[None]]
Play = Callable[[PerRequest], Awaitable[Worker]]


@pytest.fixture
async def play(setup: Setup) -> AsyncIterator[Play]:
    """`await play(script)` makes the `http` worker act by `script`, once for each request, until the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: PerRequest) -> Worker:
            return await stack.enter_async_context(Worker(to_each(script), listener=setup.http))

        yield start
    for replica in (setup.usual, setup.hasty):
        await wait_until(partial(_at_rest, replica), 30)


async def _at_rest(replica: Replica) -> bool:
    samples = await metrics(replica)
    assert not total(samples, "coatcheck_turns_total", 'outcome="failed"'), "a turn ended by a fault of ours"
    return not (total(samples, "coatcheck_turns_running") or total(samples, "coatcheck_in_flight"))


HTTP_HINT = [("x-dynamo-worker-instance-id", "http")]


def saying(*pieces: bytes) -> PerRequest:
    async def script(peer: Peer, _: Request) -> None:
        await peer.send(*pieces, pause=0)

    return script


def event(number: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f" {number}"}, "finish_reason": None}
    answer = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def client(url: str, **options: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="any",
        base_url=f"{url}/v1",
        default_headers={"X-Dynamo-Worker-Instance-ID": "http"},
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False),
        **options,  # type: ignore[arg-type]
    )


# --- at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no session", "session", "final"])
async def test_each_token_is_there_before_the_next_is_made(url: str, play: Play, kind: str) -> None:
    """The worker makes a token only when the client has confirmed the one before: any holding back is a deadlock."""
    confirmed = asyncio.Semaphore(0)

    async def script(peer: Peer, _: Request) -> None:
        await peer.send(STREAM)
        for number in range(50):
            await confirmed.acquire()
            await peer.chunk(event(number))
        await confirmed.acquire()
        await peer.chunk(DONE)
        await peer.send(END)

    await play(script)
    async with asyncio.timeout(20), await Wire.to(url) as wire:
        wire.chat(
            stream=True,
            session=None if kind == "no session" else new_session(),
            final=kind == "final",
            headers=HTTP_HINT,
        )
        assert (await wire.head()).status == 200  # the head, too, comes before there is any token
        for number in range(50):
            confirmed.release()
            assert await wire.read() == event(number)
        confirmed.release()
        assert await wire.body() == DONE


async def test_half_an_event_is_not_kept_for_its_other_half(url: str, play: Play) -> None:
    confirmed = asyncio.Semaphore(0)

    async def script(peer: Peer, _: Request) -> None:
        await peer.send(STREAM)
        for byte in event(1):
            await peer.chunk(bytes([byte]))
            await confirmed.acquire()
        await peer.send(END)

    await play(script)
    async with asyncio.timeout(20), await Wire.to(url) as wire:
        wire.chat(stream=True, headers=HTTP_HINT)
        await wire.head()
        for byte in event(1):
            assert await wire.read() == bytes([byte])
            confirmed.release()
        assert await wire.body() == b""


# --- unchanged -------------------------------------------------------------------------------------------------------

BODIES = {
    "CRLF events": b"event: message\r\ndata: {}\r\n\r\ndata:[DONE]\r\n\r\n" * 3,
    "comments": b": a comment\n\n:\n\nid: 7\n\nretry: 10\ndata\n\ndata: \n\n" + DONE,
    "many bytes per character": "data: \u00e9\u20ac\U0001f9e5 \u2028\x00\ufeff\n\n".encode() * 20
    + b"data: \xff\xfe\n\n"
    + DONE,
    "an early marker": DONE + b"data: and more\n\n" + b"data: [DONE] \n\n" + DONE,
    "no marker": b"data: {}\n\n",
    "a large event": b"data: " + random.Random(5).randbytes(5 * MIB).replace(b"\n", b"-") + b"\n\n" + DONE,
    "nothing": b"",
}


@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_bodies_arrive_as_they_were_sent(url: str, play: Play, body: bytes, framing: str, final: bool) -> None:
    step = 65_521 if len(body) > 10_000 else 1
    pieces = [body[at : at + step] for at in range(0, len(body), step)]

    async def script(peer: Peer, _: Request) -> None:
        kind = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        if framing == "chunked":
            await peer.send(kind + b"transfer-encoding: chunked\r\n\r\n")
            await peer.chunk(*pieces)
            await peer.send(END)
        elif framing == "length":
            await peer.send(kind + b"content-length: %d\r\n\r\n" % len(body), *pieces, pause=0)
        else:
            await peer.send(kind + b"\r\n", *pieces, pause=0)
            peer.close()

    await play(script)
    answer = await turn(url, stream=True, session=new_session(), final=final, headers=HTTP_HINT)
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()
    assert answer.get("content-length") == (str(len(body)) if framing == "length" else None)


async def test_request_bodies_arrive_as_they_were_sent(url: str, play: Play) -> None:
    worker = await play(saying(OK))
    body = b'{ "model":"m",\t"x":1e400, "y":"\\ud83e\\udde5", "z":"' + b"k" * 3 * MIB + b'" }\n'
    async with await Wire.to(url) as wire:
        wire.request("POST", "/v1/responses", HTTP_HINT, body)
        assert (await wire.answer()).status == 200
        wire.request("POST", "/v1/responses", [*HTTP_HINT, ("transfer-encoding", "chunked")])
        for at in range(0, len(body), 100_003):
            wire.write(chunk(body[at : at + 100_003]))
        wire.write(END)
        assert (await wire.answer()).status == 200
    assert [request.body for request in worker.requests] == [body, body]
    assert [request.all(b"content-length") for request in worker.requests] == [[b"%d" % len(body)]] * 2
    assert [request.all(b"transfer-encoding") for request in worker.requests] == [[], []]


@pytest.mark.parametrize(
    "target",
    [
        "/v1/files/a%2Fb%2fc/content",
        "/v1/x...y/.z//w",
        "/v1/%e2%82%ac;p=1,2?q=%2f%2F+a%20b&&q=;#".removesuffix("#"),
        "/v1/t?",
        "/v1/t?a=http://h/?b",
    ],
)
async def test_targets_arrive_as_they_were_sent(url: str, play: Play, target: str) -> None:
    worker = await play(saying(OK))
    assert (await ask(url, "GET", target, HTTP_HINT)).status == 200
    assert [request.target for request in worker.requests] == [target.encode()]


async def test_request_headers_end_or_travel(url: str, play: Play) -> None:
    worker = await play(saying(OK))
    sent = [
        ("authorization", "Bearer secret"),
        ("x-twice", "one"),
        ("x-twice", "two, three"),
        ("x-empty", ""),
        ("connection", "keep-alive, X-Named"),
        ("x-named", "ends here"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic eA=="),
        ("x-request-id", "mine"),
        ("accept-encoding", "gzip"),
    ]
    await ask(url, "POST", "/v1/chat/completions", [*sent, *HTTP_HINT], b"{}")
    [request] = worker.requests
    assert request.all(b"x-twice") == [b"one", b"two, three"]
    assert request.all(b"authorization") == [b"Bearer secret"]
    assert request.all(b"x-empty") == [b""]
    assert request.all(b"accept-encoding") == [b"gzip"]
    assert request.all(b"x-request-id") == [b"mine"]
    assert len(request.all(b"host")) == 1
    for name in (b"x-named", b"keep-alive", b"te", b"proxy-authorization"):
        assert request.all(name) == []


async def test_response_headers_end_or_travel(url: str, play: Play) -> None:
    head = (
        b"HTTP/1.1 200 Fine By Me\r\ncontent-type: text/plain\r\ncontent-length: 2\r\nSet-Cookie: a=1\r\n"
        b"set-cookie: b=2\r\nx-odd:  caf\xe9 \r\nconnection: keep-alive, x-named\r\nx-named: ends here\r\n"
        b"keep-alive: timeout=5\r\nproxy-authenticate: Basic\r\nupgrade: h2c\r\nx-coatcheck-worker: not-you\r\n\r\nhi"
    )
    await play(saying(head))
    answer = await turn(url, headers=HTTP_HINT)
    assert (answer.status, answer.body) == (200, b"hi")
    assert answer.all("set-cookie") == ["a=1", "b=2"]
    assert answer.all("x-odd") == ["caf\xe9"]
    assert answer.all("x-coatcheck-worker") == ["http"]
    for name in ("x-named", "keep-alive", "proxy-authenticate", "upgrade"):
        assert answer.all(name) == []


async def test_interim_responses_are_passed_on(url: str, play: Play) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\ncontent-length: 7\r\n\r\n"
    await play(saying(interim, STREAM, chunk(b"data: 1\n\n"), END))
    async with await Wire.to(url) as wire:
        for _ in range(2):
            wire.chat(stream=True, headers=HTTP_HINT)
            hints = await wire.head()
            assert (hints.status, hints.headers) == (103, [("link", "</x>")])  # 100 was for the router
            answer = await wire.answer()
            assert (answer.status, answer.body, answer.get("link")) == (200, b"data: 1\n\n", None)


async def test_a_client_that_waits_for_leave_to_send_gets_it(url: str, play: Play) -> None:
    worker = await play(saying(OK))
    async with await Wire.to(url) as wire:
        wire.request("POST", "/v1/x", [*HTTP_HINT, ("expect", "100-continue"), ("content-length", "2")])
        assert (await wire.head()).status == 100
        wire.write(b"[]")
        assert (await wire.answer()).status == 200
    assert [(request.body, request.all(b"expect")) for request in worker.requests] == [(b"[]", [])]


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\netag: x\r\ncontent-length: 1234\r\n\r\n"),
        ("POST", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ],
)
async def test_answers_without_a_body_end_with_their_head(url: str, play: Play, method: str, head: bytes) -> None:
    """The next answer on both connections is read from its beginning, so nothing was left over. A worker that announces
    a body, where there can be none, may send it: its connection is not used again."""
    worker = await play(saying(head))
    async with await Wire.to(url) as wire:
        for _ in range(3):
            wire.request(method, "/v1/x", HTTP_HINT, b"" if method == "POST" else None)
            answer = await wire.answer()
            assert answer.status == int(head.split()[1])
            assert answer.body == b""
            if method == "HEAD" and b"1234" in head:
                assert answer.get("content-length") == "1234"
    announced = b"1234" in head or b"chunked" in head
    assert worker.carriers == ([0, 1, 2] if announced else [0, 0, 0])


# --- in bounded memory -----------------------------------------------------------------------------------------------


async def test_a_slow_client_slows_its_worker_and_costs_no_memory(setup: Setup, play: Play) -> None:
    """The client stops three times until the worker can send no more."""
    amount, step = 200 * MIB, MIB
    block = random.Random(7).randbytes(step)
    produced = 0

    async def script(peer: Peer, _: Request) -> None:
        nonlocal produced
        await peer.send(STREAM)
        while produced < amount:
            await peer.chunk(block)
            produced += step
        await peer.send(END)

    await play(script)
    process = setup.usual.process
    await turn_away_from_cold_start(setup.usual.url)
    before = process.memory()
    process.forget_peak()
    digest, received = hashlib.sha256(), 0
    async with await Wire.to(setup.usual.url) as wire:
        wire.chat(stream=True, headers=HTTP_HINT)
        await wire.head()
        while piece := await wire.read():
            digest.update(piece)
            stop = received // (40 * MIB) != (received + len(piece)) // (40 * MIB) or not received
            received += len(piece)
            if stop and received < 110 * MIB:
                await still(lambda: produced, quiet_for=0.15)
                assert produced < amount, "the kernel's buffers have swallowed it all"
    assert received == amount
    assert digest.digest() == hashlib.sha256(block * (amount // step)).digest()
    assert process.memory("VmHWM") - before < 30 * MIB


async def turn_away_from_cold_start(url: str) -> None:
    """One small answer first: what a process needs once is not this test's matter."""
    assert (await ask(url, target="/metrics")).status == 200


# --- broken ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("cut", [b"", event(1)[:20], event(1)[:-1]], ids=["between", "within", "before the last byte"])
async def test_a_stream_that_breaks_says_so_and_does_not_end(url: str, play: Play, cut: bytes, end: str) -> None:
    seen = asyncio.Event()

    async def script(peer: Peer, _: Request) -> None:
        await peer.send(STREAM)
        await peer.chunk(event(0) + cut)
        await seen.wait()  # a reset may overtake data on their way
        peer.close() if end == "close" else peer.reset()

    await play(script)
    got = b""
    async with await Wire.to(url) as wire:
        wire.chat(stream=True, headers=HTTP_HINT)
        got += await wire.until_body(event(0) + cut)
        seen.set()
        got += await wire.until_cut()
    rest = got.removeprefix(event(0) + cut)
    if cut:
        assert rest == b""
        return
    [message] = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
    error = json.loads(message.removeprefix(b"data: "))["error"]
    assert error["code"] == "worker_stream_broken"
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in got


async def test_the_official_client_raises_for_a_stream_that_breaks(url: str, play: Play) -> None:
    async def script(peer: Peer, _: Request) -> None:
        await peer.send(STREAM)
        await peer.chunk(event(0), event(1))
        peer.close()

    await play(script)
    async with client(url) as official:
        stream = await official.chat.completions.create(model="m", messages=[], stream=True)
        got = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match="closed the connection"):
            await anext(stream)
    assert got == [" 0", " 1"]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n64\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 100\r\n\r\n",
    ],
    ids=["length", "chunked", "stream with a length"],
)
async def test_a_whole_answer_that_breaks_is_cut_and_nothing_is_added(url: str, play: Play, head: bytes) -> None:
    async def script(peer: Peer, _: Request) -> None:
        await peer.send(head, b'{"object": ')
        peer.close()

    await play(script)
    async with await Wire.to(url) as wire:
        wire.chat(headers=HTTP_HINT)
        await wire.head()
        assert await wire.until_cut() == b'{"object": '
    async with client(url, max_retries=0) as official:
        with pytest.raises(openai.APIConnectionError):
            await official.chat.completions.create(model="m", messages=[])


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_request_read_on_a_kept_connection_is_not_tried_again(url: str, play: Play, end: str) -> None:
    async def script(peer: Peer, _: Request) -> None:
        if peer.number == 0 and len(worker.requests) == 2:
            peer.close() if end == "close" else peer.reset()
        else:
            await peer.send(OK)

    worker = await play(script)
    assert [(await turn(url, headers=HTTP_HINT)).status for _ in range(3)] == [200, 502, 200]
    assert worker.carriers[:2] == [0, 0]
    assert len(worker.carriers) == 3  # connections between were to ask whether it is there


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_turn_that_a_worker_may_have_begun_is_not_tried_again(url: str, play: Play, end: str) -> None:
    async def script(peer: Peer, _: Request) -> None:
        peer.close() if end == "close" else peer.reset()

    worker = await play(script)
    answer = await turn(url, headers=HTTP_HINT)
    assert (answer.status, answer.json["error"]["code"]) == (502, "worker_reset")
    assert len(worker.requests) == 1


async def test_a_reused_connection_that_breaks_within_the_head_is_not_tried_again(url: str, play: Play) -> None:
    async def script(peer: Peer, _: Request) -> None:
        if len(worker.requests) == 1:
            await peer.send(OK)
        else:
            await peer.send(b"HTTP/1.1 200 O")
            peer.close()

    worker = await play(script)
    assert (await turn(url, headers=HTTP_HINT)).status == 200
    assert (await turn(url, headers=HTTP_HINT)).status == 502
    assert worker.carriers == [0, 0]


@pytest.mark.parametrize(
    "garbage",
    [b"Hello?\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x16\x03\x01\x00\x00", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"],
)
async def test_garbage_is_a_bad_gateway_and_the_official_client_does_not_insist(
    url: str, play: Play, garbage: bytes
) -> None:
    worker = await play(saying(garbage))
    async with client(url) as official:
        with pytest.raises(openai.InternalServerError) as caught:
            await official.chat.completions.create(model="m", messages=[])
    assert (caught.value.status_code, caught.value.code) == (502, "worker_bad_response")
    assert len(worker.requests) == 1


async def test_garbage_within_a_stream_breaks_it(url: str, play: Play) -> None:
    await play(saying(STREAM, chunk(event(0)), b"not a chunk\r\n"))
    async with await Wire.to(url) as wire:
        wire.chat(stream=True, headers=HTTP_HINT)
        await wire.until_body(b'"worker_stream_broken"')
        await wire.until_cut()


async def test_bytes_after_an_answer_are_not_taken_for_the_next_one(url: str, play: Play) -> None:
    async def script(peer: Peer, _: Request) -> None:
        await peer.send(OK + OK.replace(b"{}", b"[]"))

    worker = await play(script)
    for _ in range(3):
        assert (await turn(url, headers=HTTP_HINT)).body == b"{}"
    assert worker.carriers == [0, 1, 2]


# --- silent ----------------------------------------------------------------------------------------------------------


async def test_a_worker_that_does_not_begin_is_given_up(setup: Setup, play: Play) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer, _: Request) -> None:
        assert await peer.rest() == b""  # never more than one request at once
        gone.set()

    worker = await play(script)
    async with asyncio.timeout(10):
        async with client(setup.hasty.url) as official:
            with pytest.raises(openai.InternalServerError) as caught:
                await official.chat.completions.create(model="m", messages=[])
        await gone.wait()
    assert (caught.value.status_code, caught.value.code) == (504, "worker_timeout")
    assert len(worker.requests) == 1


async def test_a_worker_that_falls_silent_in_its_stream_is_given_up(setup: Setup, play: Play) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer, _: Request) -> None:
        await peer.send(STREAM)
        await peer.chunk(event(0))
        assert await peer.rest() == b""  # never more than one request at once
        gone.set()

    await play(script)
    async with asyncio.timeout(10), await Wire.to(setup.hasty.url) as wire:
        wire.chat(stream=True)
        await wire.until_body(b'"worker_stalled"')
        await wire.until_cut()
        await gone.wait()


async def test_a_client_s_slowness_is_not_taken_for_the_worker_s(setup: Setup, play: Play) -> None:
    """The worker is not being read while the client takes nothing; it cannot be silent then."""
    amount, produced = 100, 0

    async def script(peer: Peer, _: Request) -> None:
        nonlocal produced
        await peer.send(STREAM)
        for produced in range(amount):  # noqa: B007
            await peer.chunk(bytes(MIB))
        await peer.chunk(DONE)
        await peer.send(END)

    await play(script)
    async with asyncio.timeout(30), await Wire.to(setup.hasty.url) as wire:
        wire.chat(stream=True)
        await wire.head()
        await still(lambda: produced, quiet_for=3 * PATIENCE)
        assert produced < amount - 1, "the kernel's buffers have swallowed it all"
        body = await wire.body()
    assert len(body) == amount * MIB + len(DONE)


# --- TLS -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def secure(setup: Setup, *pieces: bytes) -> AsyncIterator[Worker]:
    async with (
        Worker(answers(*pieces)) as worker,
        TcpProxy("127.0.0.1", worker.port, listener=setup.https, tls=setup.tls),
    ):
        yield worker


async def test_an_https_worker_whose_certificate_is_known(setup: Setup) -> None:
    async with secure(setup, STREAM, chunk(event(0)), chunk(DONE), END) as worker:
        for _ in range(2):
            answer = await turn(setup.usual.url, stream=True, headers=[("x-dynamo-worker-instance-id", "https")])
            assert (answer.worker, answer.body) == ("https", event(0) + DONE)
        assert worker.carriers == [0, 0]


async def test_an_https_worker_whose_certificate_is_not_known_gets_nothing(setup: Setup) -> None:
    async with secure(setup, OK) as worker:
        answer = await turn(setup.wary.url)
        assert (answer.status, answer.json["error"]["code"]) == (503, "worker_unreachable")
        assert "certificate" in answer.json["error"]["message"]
    assert worker.nothing_came()
