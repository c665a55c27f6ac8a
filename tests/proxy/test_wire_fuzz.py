"""Messages that nobody thought of, against a reading of HTTP/1.1 that is obviously right (tests/support/http_model.py).

Valid answers must arrive as the model says, whatever their framing and however they are cut. Of mutated requests the
worker must see exactly those that the model reads, or fewer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.turn.paths import Kind, Paths
from tests.support import http_model
from tests.support.examples import examples
from tests.support.http_model import Answer, Incomplete, Malformed, Request
from tests.support.raw import END, OK, Kept, Peer, answers, chunk, get, post

FUZZ = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with contextlib.closing(Kept(max_body_bytes=1 << 20)) as kept:
        yield kept


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Any], Any]]:
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        yield runner.run


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut at these places, as far as there are such."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 5000), max_size=6)
TOKEN = st.text("!#$%&'*+-.^_`|~0123456789abcXYZ", min_size=1, max_size=12).map(lambda name: b"x-" + name.encode())
VALUE = st.text('\t !"#,:;=[](){}<>/\\aZ0\x80\xe9\xff', max_size=20).map(lambda value: value.encode("latin-1"))
FIELD = st.tuples(TOKEN, VALUE) | st.sampled_from(
    [
        (b"set-cookie", b"a=1"),
        (b"Set-Cookie", b"a=2; path=/"),
        (b"connection", b"keep-alive"),
        (b"Connection", b"x-named, X-Other"),
        (b"x-named", b"1"),
        (b"X-Other", b"2"),
        (b"keep-alive", b"timeout=5"),
        (b"etag", b'"x"'),
        (b"content-type", b"text/event-stream"),
        (b"content-encoding", b"gzip"),
        (b"vary", b""),
    ]
)
BODY = st.binary(max_size=300) | st.lists(
    st.sampled_from([b"data: 1\n\n", b"\r\n", b"data: [DONE]\n\n", END]), max_size=9
).map(b"".join)


@st.composite
def chunked_bodies(draw: st.DrawFn) -> bytes:
    """A body in chunks of any size, with extensions and trailers here and there."""
    written = []
    for piece in pieces_of(draw(BODY), draw(CUTS)):
        size = draw(st.sampled_from([b"%x", b"%X", b"000%x"])) % len(piece)
        written.append(size + draw(st.sampled_from([b"", b";a", b';a="b c"', b";a=b"])) + b"\r\n" + piece + b"\r\n")
    trailers = draw(st.lists(st.tuples(TOKEN, VALUE), max_size=2))
    last = draw(st.sampled_from([b"0", b"000", b"0;a=b"]))
    return b"".join([*written, last, b"\r\n", *(b"%b: %b\r\n" % pair for pair in trailers), b"\r\n"])


@st.composite
def worker_answers(draw: st.DrawFn, method: bytes) -> bytes:
    """A valid one, 1xx before it included; where nothing says how long it is, it is ended by closing."""
    interim = draw(st.lists(st.sampled_from([b"100 X", b"102 X", b"103 Hints"]), max_size=2))
    written = [
        b"HTTP/1.1 %b\r\n%b\r\n"
        % (status, b"".join(b"%b: %b\r\n" % pair for pair in draw(st.lists(FIELD, max_size=3))))
        for status in interim
    ]
    status = draw(st.sampled_from([200, 200, 200, 201, 204, 206, 299, 304, 400, 404, 429, 500, 503, 599]))
    reason = draw(st.sampled_from([b"", b" ", b" OK", b" caf\xe9 \t!"]))
    fields = draw(st.lists(FIELD, max_size=8))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    bodiless = method == b"HEAD" or status in (204, 304)
    if framing == "length":
        body = draw(BODY)
        fields.insert(draw(st.integers(0, len(fields))), (b"Content-Length", b"%d" % len(body)))
    elif framing == "chunked":
        body = draw(chunked_bodies())
        fields.insert(
            draw(st.integers(0, len(fields))), (b"Transfer-Encoding", draw(st.sampled_from([b"chunked", b"Chunked"])))
        )
    else:
        body = draw(BODY)
    space = draw(st.sampled_from([b"", b" ", b"   "]))
    lines = [b"%b:%b%b%b\r\n" % (name, space, value, space) for name, value in fields]
    return b"".join([*written, b"HTTP/1.1 %d%b\r\n" % (status, reason), *lines, b"\r\n", b"" if bodiless else body])


@settings(FUZZ, max_examples=examples(60))
@given(data=st.data(), method=st.sampled_from([b"GET", b"HEAD", b"POST"]), minor=st.sampled_from([1, 1, 0]), cuts=CUTS)
def test_valid_answer_arrives_as_the_model_says(
    kept: Kept, run: Callable[[Any], Any], data: st.DataObject, method: bytes, minor: int, cuts: list[int]
) -> None:
    sent = data.draw(worker_answers(method), label="answer")
    expected, rest = http_model.read_answer(sent, method, True)
    assert rest == b""
    assert expected.complete
    run(_answered(kept, sent, expected, method, minor, cuts))


async def _answered(kept: Kept, sent: bytes, expected: Answer, method: bytes, minor: int, cuts: list[int]) -> None:
    live = kept.get()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces_of(sent, cuts), pause=0)
        if expected.framing != "close":
            await peer.rest()

    async with live.worker(script), live.client() as client:
        request = (post() if method == b"POST" else get(b"/v1/x")).replace(b"GET", method)
        await client.send(request.replace(b"HTTP/1.1", b"HTTP/1.%d" % minor))
        answer = await client.answer(method)
        if not minor:
            assert await client.closed()
        else:
            assert not client.buffer
    assert answer.complete
    assert answer.normal == http_model.returned(expected)
    passed_on = [interim for interim in expected.interim if interim.status != 100] if minor else []
    assert [interim.normal for interim in answer.interim] == [http_model.returned(interim) for interim in passed_on]
    if expected.framing == "length":
        assert answer.all(b"content-length") == [b"%d" % len(expected.body)]
    elif not minor and expected.framing != "none":
        assert answer.framing == "close"


# -- mutated requests

TEMPLATES = [
    post(b"x-a: 1", body=b"[1, 2]"),
    post(b"content-type: application/json", body=b'{"model": "m"}'),
    post(b"content-type: application/octet-stream", body=bytes(range(40))),
    b"POST /v1/x HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"[1]") + chunk(b"  ") + END,
    b"POST /v1/x HTTP/1.1\r\nHost: r:80\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\n[1]\r\n0\r\nx-t: 1\r\n\r\n",
    get(b"/v1/x%2Fy?a=b&c", b"x-a: 1", b"x-a: 2", b"connection: keep-alive, x-b", b"x-b: 3"),
    get(b"http://evil:81/v1/x", b"cookie: a=b"),
    get(b"/health"),
    get(b"/v1/x").replace(b"GET", b"HEAD"),
    b"GET /v1/x HTTP/1.0\r\nx-a: 1\r\n\r\n",
    b"PUT /v1/x HTTP/1.1\r\nhost: r\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n[1]",
]
STUFF = [
    *(bytes([byte]) for byte in b"\r\n\0 \t:;,0159aZ/%.?#\x0b\x7f\xff"),
    b"\r\n",
    b"\n\n",
    b"\r\n\r\n",
    b"\r\n ",
    b"content-length: 3\r\n",
    b"Content-Length: 0\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding",
    b"content-length",
    b"chunked",
    b"x-a",
    b"host: evil\r\n",
    b"host",
    b"connection: close\r\n",
    b"connection: x-a\r\n",
    b"HTTP/1.0",
    b"HTTP/1.1",
    b"../",
    b"%2e",
    END,
    b"3\r\n[1]\r\n",
    b"GET /v1/smuggled HTTP/1.1\r\nhost: r\r\n\r\n",
]


@st.composite
def mutated_requests(draw: st.DrawFn) -> bytes:
    """One to three requests in which up to four places were changed, most of them in heads."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(TEMPLATES), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        if draw(st.booleans()):  # at the edge of a line or a word: most of what matters is there
            edges = [match.start() for match in re.finditer(rb"\b|\r\n", bytes(data))] or [0]
            at = edges[at % len(edges)]
        gone = draw(st.sampled_from([0, 0, 0, 1, 2, 4, 20]))
        data[at : at + gone] = draw(st.sampled_from(STUFF)) if draw(st.integers(0, 4)) else b""
    return bytes(data)


def read_all(data: bytes) -> tuple[list[Request], bool]:
    """What the model reads, and whether what comes then is no request (or else not yet one)."""
    read: list[Request] = []
    while True:
        try:
            request, data = http_model.read_request(data)
        except Incomplete:
            return read, False
        except Malformed:
            return read, True
        read.append(request)


def is_for_a_worker(request: Request) -> bool:
    path = unquote_to_bytes(http_model.origin_form(request.target).partition(b"?")[0])
    kind = Paths().kind(path.decode("utf-8", "replace"))
    return kind is Kind.TURN and not {b".", b".."} & set(path.split(b"/"))


@settings(FUZZ, max_examples=examples(100))
@given(sent=mutated_requests(), cuts=CUTS)
def test_mutated_request_is_read_as_the_model_reads_it_or_refused(
    kept: Kept, run: Callable[[Any], Any], sent: bytes, cuts: list[int]
) -> None:
    run(_asked(kept, sent, *read_all(sent), cuts))


async def _asked(kept: Kept, sent: bytes, read: list[Request], malformed: bool, cuts: list[int]) -> None:
    live = kept.get()
    statuses: list[int] = []
    async with live.worker(answers(OK)) as worker, live.client() as client:
        with contextlib.suppress(ConnectionError):
            await client.send(*pieces_of(sent, cuts), pause=0)
        with contextlib.suppress(ConnectionError):
            for request in read:
                answer = await client.answer(request.method)
                assert answer.complete
                statuses.append(answer.status)
        if malformed:
            with contextlib.suppress(ConnectionError):
                await client.send(b"\r\n\r\n")  # some of it is seen only when the head is complete
            rest = await client.rest()
            if rest:
                refusal, rest = http_model.read_answer(rest, b"POST", True)
                assert rest == b""
                assert 400 <= refusal.status < 600, refusal
    expected = [http_model.forwarded(request) for request in read if is_for_a_worker(request)]
    seen = worker.normals
    remaining = iter(expected)
    assert all(request in remaining for request in seen), f"{seen} is not of {expected}"
    assert statuses.count(200) >= len(seen)
