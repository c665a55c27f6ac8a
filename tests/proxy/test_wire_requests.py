"""What a request becomes on its way to the worker, byte by byte, by the letter of RFC 9110 and 9112."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support import http_model
from tests.support.raw import (
    END,
    LIMIT,
    OK,
    OK_NORMAL,
    POST,
    STREAM,
    Client,
    Kept,
    Live,
    Peer,
    answers,
    chunk,
    echoes,
    get,
    openai_error,
    post,
    until,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

MIB = 1 << 20
CAP = 40 * MIB


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with contextlib.closing(Kept(max_body_bytes=CAP)) as kept:
        yield kept


@pytest.fixture
def live(kept: Kept) -> Live:
    return kept.get()


class Row(NamedTuple):
    name: str
    section: str
    """Of RFC 9112, or of RFC 9110 where it has a 0 before it."""
    sent: bytes
    at_worker: bytes
    """Without Host, framing, X-Forwarded-* and X-Request-Id, which are the router's to say."""
    framing: tuple[str, ...] = ("length", "chunked")


def ids(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


BOUNDARY = b'--b\r\ncontent-disposition: form-data; name="f"\r\n\r\n\x00\xff\r\n--b--\r\n'
ZIPPED = gzip.compress(b'{"model": "m"}', mtime=0)
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
PLAIN = b"POST /v1/x HTTP/1.1\r\n\r\n"

FRAMING = [
    Row("no body", "6.3", get(b"/v1/x"), b"GET /v1/x HTTP/1.1\r\n\r\n", ("none",)),
    Row("a method that has a body, without one", "08.6", POST + b"\r\n", PLAIN, ("length",)),
    Row("length", "6.2", post(body=b"[1]"), PLAIN + b"[1]"),
    Row("length with leading zeros", "6.2", POST + b"content-length: 0003\r\n\r\n[1]", PLAIN + b"[1]"),
    Row(
        "GET with a body",
        "09.3.1",
        get(b"/v1/x").replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n[1]"),
        b"GET /v1/x HTTP/1.1\r\n\r\n[1]",
    ),
    Row(
        "DELETE with length 0",
        "08.6",
        get(b"/v1/x", b"content-length: 0").replace(b"GET", b"DELETE"),
        b"DELETE /v1/x HTTP/1.1\r\n\r\n",
        ("length", "none"),
    ),
    Row("chunked", "7.1", CHUNKED + b"\r\n" + chunk(b"[1") + chunk(b"]") + END, PLAIN + b"[1]"),
    Row("chunked, nothing in it", "7.1", CHUNKED + b"\r\n" + END, PLAIN),
    Row(
        "chunked, another spelling",
        "7",
        POST + b"Transfer-Encoding:  CHUNKED \r\n\r\n" + b"00003\r\n[1]\r\nA\r\n          \r\n000\r\n\r\n",
        PLAIN + b"[1]          ",
    ),
    Row(
        "chunk extensions",
        "7.1.1",
        CHUNKED + b'\r\n2;a;b=c\r\n[1\r\n1;d="e;\xe9"\r\n]\r\n0;f\r\n\r\n',
        PLAIN + b"[1]",
    ),
    Row(
        "trailers", "7.1.2", CHUNKED + b"trailer: x-t\r\n\r\n" + chunk(b"[1]") + b"0\r\nx-t: 1\r\n\r\n", PLAIN + b"[1]"
    ),
    Row(
        "trailers that mean something in a head",
        "06.5.1",
        CHUNKED + b"\r\n" + chunk(b"[1]") + b"0\r\nhost: evil\r\nauthorization: x\r\nx-dynamo-session-id: \xff\r\n\r\n",
        PLAIN + b"[1]",
    ),
    Row("an empty line before the request", "2.2", b"\r\n" + post(body=b"[1]"), PLAIN + b"[1]"),
    Row(
        "multipart",
        "7",
        post(b"content-type: multipart/form-data; boundary=b", body=BOUNDARY),
        b"POST /v1/x HTTP/1.1\r\ncontent-type: multipart/form-data; boundary=b\r\n\r\n" + BOUNDARY,
    ),
    Row(
        "multipart, chunked",
        "7",
        CHUNKED + b"content-type: multipart/form-data; boundary=b\r\n\r\n" + chunk(BOUNDARY) + END,
        b"POST /v1/x HTTP/1.1\r\ncontent-type: multipart/form-data; boundary=b\r\n\r\n" + BOUNDARY,
    ),
    Row(
        "gzip",
        "08.4",
        post(b"content-type: application/json", b"content-encoding: gzip", body=ZIPPED),
        b"POST /v1/x HTTP/1.1\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n\r\n" + ZIPPED,
    ),
    Row(
        "gzip, chunked byte by byte",
        "08.4",
        CHUNKED
        + b"content-encoding: gzip\r\n\r\n"
        + b"".join(chunk(ZIPPED[at : at + 1]) for at in range(len(ZIPPED)))
        + END,
        b"POST /v1/x HTTP/1.1\r\ncontent-encoding: gzip\r\n\r\n" + ZIPPED,
    ),
]


def line(*sent: bytes, kept: tuple[bytes, ...] | None = None) -> tuple[bytes, bytes]:
    """A GET with these lines, and what the worker is to get of it (without `kept`: all)."""
    return get(b"/v1/x", *sent), b"\r\n".join([b"GET /v1/x HTTP/1.1", *(sent if kept is None else kept), b"", b""])


LONG = b"x-long: " + b"v" * 60 * 1024
HEADERS = [
    Row("twice, in their order", "05.2", *line(b"x-a: 1", b"x-b: 2", b"x-a: 3", b"x-a: 1")),
    Row("latin-1", "05.5", *line(b"x-a: caf\xe9 \xff\x80")),
    Row("utf-8", "05.5", *line("x-a: caf\u00e9 \U0001f9e5".encode())),
    Row("empty", "05.5", *line(b"x-a: ", b"x-b: 1", b"x-c: ")),
    Row("spaces around, tabs within", "5.1", *line(b"x-a:\t v\tw  ", b"x-b:v", kept=(b"x-a: v\tw", b"x-b: v"))),
    Row("every character of a name", "05.6.2", *line(b"!#$%&'*+-.^_`|~9z: v")),
    Row("names with underscores beside those with dashes", "05.1", *line(b"x_a: 1", b"x-a: 2")),
    Row("upper case", "05.1", *line(b"X-Upper-CASE: KEPT", kept=(b"x-upper-case: KEPT",))),
    Row("60 KiB", "05.4", *line(LONG)),
    Row("500 of them", "05.4", *line(*(b"x-%d: %d" % (number, number) for number in range(500)))),
    Row("quoted and commas", "05.6", *line(b'x-a: "a, \\"b", c;d=" "', b"x-b: ,, ,")),
    Row("a cookie", "06265 5.4", *line(b"cookie: a=1; b=2", b"cookie: c=3")),
    Row("credentials", "011.6", *line(b"authorization: Bearer x", b"x-api-key: y")),
    Row("Connection: keep-alive", "9.3", *line(b"connection: keep-alive", b"x-a: 1", kept=(b"x-a: 1",))),
    Row(
        "named by Connection",
        "07.6.1",
        *line(b"x-foo: 1", b"Connection: close, X-Foo", b"x-bar: 2", b"x-foo: 3", kept=(b"x-bar: 2",)),
    ),
    Row(
        "named by a second Connection, oddly spelled",
        "07.6.1",
        *line(
            b"connection: keep-alive", b"connection: ,\tX-FOO ,,x-baz", b"x-foo: 1", b"x-bar: 2", kept=(b"x-bar: 2",)
        ),
    ),
    Row(
        "of one connection",
        "07.6.1",
        *line(
            b"keep-alive: timeout=5",
            b"te: trailers",
            b"trailer: x-t",
            b"proxy-connection: keep-alive",
            b"proxy-authorization: Basic eA==",
            b"x-kept: 1",
            kept=(b"x-kept: 1",),
        ),
    ),
    Row("any Proxy-*", "07.6.1", *line(b"proxy-authenticate: x", b"proxy-connection: x", b"x-a: 1", kept=(b"x-a: 1",))),
    Row(
        "Connection cannot name the framing",
        "07.6.1",
        post(b"connection: content-length, host, transfer-encoding", body=b"[1]"),
        PLAIN + b"[1]",
    ),
    Row(
        "an offer of another protocol",
        "07.8",
        *line(
            b"connection: Upgrade, HTTP2-Settings",
            b"upgrade: h2c",
            b"http2-settings: AAMAAABkAARAAAAA",
            b"x-a: 1",
            kept=(b"x-a: 1",),
        ),
    ),
]

TARGETS = [
    b"/v1/files/a%2Fb%2fc/content",
    b"/v1/%41%7E",
    b"/v1//x//",
    b"/v1/;/x;a=1;b?;",
    b"/v1/x?a=b?c",
    b"/v1/%zz%",
    b"/v1/x|y",
    b'/v1/"q"?"r"',
    b"/v1/{x}[y]^z`w<v>",
    b"/v1/x?q=../../%2e%2e/..",
    b"/v1/..x/x../.../.x/%2e%2ex/x.",
    b"/v1/%e2%82%ac",
    b"/v1/x?a=http://evil/?b&c=//d",
    b"/v1/x,y:z@w$!*()'",
    b"/v1/http://evil/x",
    b"/v1/x?",
    b"/v1/x??",
    b"/v1/" + b"l" * 30_000 + b"?" + b"q" * 30_000,
]
ABSOLUTE = {
    b"http://evil/v1/x": b"/v1/x",
    b"http://evil:81/v1/x?a=b": b"/v1/x?a=b",
    b"https://user:word@evil/v1/%2F": b"/v1/%2F",
    b"HTTP://EVIL/v1/x": b"/v1/x",
}
TARGET_ROWS = [Row(repr(t[:40]), "3.2.1", get(t), b"GET %b HTTP/1.1\r\n\r\n" % t, ("none",)) for t in TARGETS]
TARGET_ROWS += [
    Row(repr(t), "3.2.2", get(t), b"GET %b HTTP/1.1\r\n\r\n" % path, ("none",)) for t, path in ABSOLUTE.items()
]

FORWARDED = FRAMING + [row._replace(framing=("none", "length", "chunked")) for row in HEADERS] + TARGET_ROWS


@pytest.mark.parametrize("row", FORWARDED, ids=ids(FORWARDED))
@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
async def test_request_is_sent_on(live: Live, row: Row, split: bool) -> None:
    """Whole, and in two parts with the cut within the head; twice on the connection unless the client ends it."""
    closes = b"close" in row.sent
    async with live.worker(answers(OK)) as worker, live.client() as client:
        for _ in range(1 if closes else 2):
            middle = len(row.sent) // 2
            await client.send(*((row.sent[:middle], row.sent[middle:]) if split else (row.sent,)))
            answer = await client.answer()
            assert (answer.normal, answer.complete) == (OK_NORMAL, True)
        if closes:
            assert await client.closed()
    assert worker.normals == [row.at_worker] * (1 if closes else 2)
    for request in worker.requests:
        assert request.framing in row.framing
        assert request.all(b"host") == [b"127.0.0.1:%d" % live.worker_port]
        assert len(request.all(b"x-request-id")) == 1


@pytest.mark.parametrize("kind", [b"multipart/form-data; boundary=b", b"application/octet-stream", b"gzip"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_large_body_arrives_as_it_was_sent(live: Live, kind: bytes, framing: str) -> None:
    body = random.Random(1).randbytes(MIB) * 25
    lines = b"content-encoding: gzip\r\n" if kind == b"gzip" else b"content-type: " + kind + b"\r\n"
    async with live.worker(answers(OK)) as worker, live.client() as client:
        if framing == "length":
            await client.send(POST + lines + b"content-length: %d\r\n\r\n" % len(body), body)
        else:
            step = 999_983
            pieces = [chunk(body[at : at + step]) for at in range(0, len(body), step)]
            await client.send(CHUNKED + lines + b"\r\n", *pieces, END, pause=0)
        assert (await client.answer()).normal == OK_NORMAL
    [request] = worker.requests
    assert hashlib.sha256(request.body).digest() == hashlib.sha256(body).digest()


async def test_large_body_waits_for_the_end_of_its_head(live: Live) -> None:
    """The head comes in two parts, and the first says how long the body is; on a new connection, and on a used one."""
    body = random.Random(1).randbytes(300_000)
    async with live.worker(answers(OK)) as worker, live.client() as client:
        for _ in range(2):
            head = POST + b"content-type: text/plain\r\ncontent-length: %d\r\nx-a: 1\r\n" % len(body)
            await client.send(head, b"x-b: 2\r\n\r\n", body)
            assert (await client.answer()).normal == OK_NORMAL
    assert [(request.all(b"x-b"), request.body) for request in worker.requests] == [([b"2"], body)] * 2


# -- who asked

SPOOFED = (
    b"x-forwarded-for: 6.6.6.6, 7.7.7.7",
    b"X-Forwarded-For: 8.8.8.8",
    b"x-forwarded-proto: https",
    b"x-forwarded-host: spoofed",
    b"forwarded: for=6.6.6.6;proto=https",
    b"x-real-ip: 6.6.6.6",
)
NAMES = (b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded", b"x-real-ip")
OURS = [[b"127.0.0.1"], [b"http"], [b"r.example"], [], []]
KEPT = [
    [b"6.6.6.6, 7.7.7.7, 8.8.8.8, 127.0.0.1"],
    [b"https"],
    [b"spoofed"],
    [b"for=6.6.6.6;proto=https"],
    [b"6.6.6.6"],
]


class Trust(NamedTuple):
    trusted: tuple[str, ...] | str
    """The setting `trusted_proxies`."""
    sent: tuple[bytes, ...]
    at_worker: list[list[bytes]]
    """The values of NAMES; of the first, all lines as one list."""


TRUST = {
    "nobody is trusted": Trust((), SPOOFED, OURS),
    "nobody is trusted, and Connection names them": Trust((), (b"connection: x-forwarded-for, x-real-ip",), OURS),
    "another is trusted": Trust(("10.0.0.0/8",), SPOOFED, OURS),
    "the peer is trusted": Trust(("10.0.0.0/8", "127.0.0.1"), SPOOFED, KEPT),
    "the peer's network is trusted": Trust(("127.0.0.0/8",), SPOOFED, KEPT),
    "written as one": Trust("10.0.0.0/8,127.0.0.1", SPOOFED, KEPT),
    "all are trusted": Trust(("*",), SPOOFED, KEPT),
    "a trusted peer that says nothing": Trust(("*",), (), OURS),
    "a trusted peer that says some": Trust(
        ("*",), (b"x-forwarded-proto: https",), [[b"127.0.0.1"], [b"https"], [b"r.example"], [], []]
    ),
}


@pytest.mark.parametrize("row", TRUST.values(), ids=TRUST.keys())
async def test_worker_is_told_who_asked(row: Trust) -> None:
    settings: dict[str, Any] = {"trusted_proxies": row.trusted} if row.trusted else {}  # the default is what is tested
    with Live(**settings) as live:
        async with live.worker(answers(OK)) as worker, live.client() as client:
            await client.send(get(b"/v1/x", *row.sent))
            await client.answer()
    [at_worker] = worker.requests
    values = [at_worker.all(name) for name in NAMES]
    assert [[b", ".join(values[0])], *values[1:]] == row.at_worker


async def test_request_of_http_1_0_has_no_host_to_tell(live: Live) -> None:
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(b"GET /v1/x HTTP/1.0\r\nx-a: 1\r\n\r\n")
        assert (await client.answer()).normal == OK_NORMAL
        assert await client.closed()
    assert worker.normals == [b"GET /v1/x HTTP/1.1\r\nx-a: 1\r\n\r\n"]
    assert worker.requests[0].all(b"x-forwarded-host") == []


async def test_cookies_stay_with_their_client(live: Live) -> None:
    """Two clients by the same connection of the worker (RFC 6265)."""

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            cookie = b"set-cookie: a=%b; Path=/\r\nset-cookie: b\r\n" % (request.get(b"cookie") or b"none")
            first = cookie if len(worker.requests) == 1 else b""
            await peer.send(b"HTTP/1.1 200 OK\r\n" + first + b"content-length: 0\r\n\r\n")

    async with live.worker(script) as worker, live.client() as one, live.client() as other:
        await one.send(get(b"/v1/x", b"cookie: s=1"))
        assert (await one.answer()).all(b"set-cookie") == [b"a=s=1; Path=/", b"b"]
        for client in (other, one):
            await client.send(get(b"/v1/x"))
            assert (await client.answer()).all(b"set-cookie") == []
    assert [request.all(b"cookie") for request in worker.requests] == [[b"s=1"], [], []]
    assert set(worker.carriers) == {0}


# -- what never travels

DOTS = [
    b"/v1/../x",
    b"/v1/%2e%2e/x",
    b"/v1/./x",
    b"/v1/%2E/x",
    b"/v1/x/..",
    b"/v1/x/.",
    b"/v1/x/%2e%2E/y",
    b"/v1/.%2e/x",
    b"/v1/%2E./x",
    b"/v1/x/../y?a=b",
    b"/v1/..?a",
    b"/v1/../v1/x",
    b"/v1/../../admin/sessions",
    b"/v1/../health",
    b"http://evil/v1/../x",
    b"http://evil/v1/%2e/x",
]


@pytest.mark.parametrize("target", DOTS, ids=repr)
async def test_dot_segments_are_refused(live: Live, target: bytes) -> None:
    """RFC 3986 5.2.4: two readers may see two paths in them."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(get(target))
        openai_error(await client.answer(b"GET"), [400], "invalid_request")
    assert worker.nothing_came()


ELSEWHERE = {
    "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nhost: r\r\n\r\n",
    "another method at *": b"POST * HTTP/1.1\r\nhost: r\r\ncontent-length: 0\r\n\r\n",
    "another scheme": b"GET ftp://evil/v1/x HTTP/1.1\r\nhost: r\r\n\r\n",
    "CONNECT": b"CONNECT evil:443 HTTP/1.1\r\nhost: evil:443\r\n\r\n",
    "CONNECT to a path": b"CONNECT /v1/x HTTP/1.1\r\nhost: r\r\n\r\n",
    "CONNECT to an address": b"CONNECT http://evil/v1/x HTTP/1.1\r\nhost: r\r\n\r\n",
    "an absolute target of another path": b"GET http://evil/x HTTP/1.1\r\nhost: r\r\n\r\n",
    "TRACE": b"TRACE /v1/x HTTP/1.1\r\nhost: r\r\n\r\n",
    "an absolute target without a host": b"GET http:///v1/x HTTP/1.1\r\nhost: r\r\n\r\n",
    "an absolute target with half a host": b"GET http://[::1/v1/x HTTP/1.1\r\nhost: r\r\n\r\n",
    "a path beside ours": b"GET /v1 HTTP/1.1\r\nhost: r\r\n\r\n",
}


@pytest.mark.parametrize("sent", ELSEWHERE.values(), ids=ELSEWHERE.keys())
async def test_what_is_not_for_a_worker_is_refused(live: Live, sent: bytes) -> None:
    """RFC 9112 3.2, RFC 9110 9.3.6 and 9.3.7."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(sent)
        answer = await client.answer(sent.split()[0])
        assert 400 <= answer.status < 500 or answer.status == 501
        assert answer.status == 405 or b'"error"' in answer.body
    assert worker.nothing_came()


async def test_tunnel_that_was_refused_is_not_one(live: Live) -> None:
    """What follows a refused CONNECT may be anything but a request that is served by mistake."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(ELSEWHERE["CONNECT"] + b"\x16\x03\x01\x02\x00" + post())
        await client.rest()
    assert worker.nothing_came()


# -- leave to send


async def test_leave_to_send_is_given_before_the_body_is_read(live: Live) -> None:
    """RFC 9110 10.1.1"""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        for _ in range(2):
            await client.send(POST + b"Expect: 100-Continue\r\ncontent-length: 3\r\n\r\n")
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert not client.buffer
            await client.send(b"[1]")
            answer = await client.answer()
            assert (answer.normal, answer.interim) == (OK_NORMAL, [])
    assert worker.normals == [PLAIN + b"[1]"] * 2


async def test_leave_to_send_a_streamed_body(live: Live) -> None:
    async with live.worker(answers(OK)) as worker, live.client() as client:
        kind = b"content-type: application/octet-stream\r\n"
        await client.send(CHUNKED + kind + b"expect: 100-continue\r\n\r\n")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(chunk(b"\xff"), END)
        answer = await client.answer()
        assert (answer.normal, answer.interim) == (OK_NORMAL, [])
    assert worker.normals == [PLAIN[:-2] + kind + b"\r\n\xff"]


EXPECT = b"expect: 100-continue\r\n"
NO_LEAVE = {
    "too large": (POST + EXPECT + b"content-length: %d\r\n\r\n" % (CAP + 1), [413]),
    "dot segments": (POST.replace(b"/v1/x", b"/v1/../x") + EXPECT + b"content-length: 2\r\n\r\n", [400]),
    "two lengths": (POST + EXPECT + b"content-length: 2\r\ncontent-length: 3\r\n\r\n", [400]),
    "a session id that is none": (
        POST + EXPECT + b"x-dynamo-session-id: a b\r\ncontent-length: 2\r\n\r\n",
        [400],
    ),
}


@pytest.mark.parametrize(("sent", "statuses"), NO_LEAVE.values(), ids=NO_LEAVE.keys())
async def test_no_leave_to_send_what_is_refused_at_once(live: Live, sent: bytes, statuses: list[int]) -> None:
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(sent)
        answer = await client.answer()
        openai_error(answer, statuses)
        assert answer.interim == []
    assert worker.nothing_came()


async def test_http_1_0_has_no_leave_to_send(live: Live) -> None:
    """RFC 9110 10.1.1: the expectation is ignored there."""
    async with live.worker(answers(OK)), live.client() as client:
        await client.send(POST.replace(b"1.1", b"1.0") + EXPECT + b"content-length: 2\r\n\r\n{}")
        answer = await client.answer()
        assert (answer.normal, answer.interim) == (OK_NORMAL, [])


async def test_other_expectation_is_ignored_or_refused(live: Live) -> None:
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(post(b"expect: 200-ok"))
        answer = await client.answer()
        assert (answer.status, worker.normals) in [(200, [PLAIN + b"{}"]), (417, [])]


# -- bodies that are streamed


UPLOAD = POST + b"content-type: application/octet-stream\r\n"
BLOCK = random.Random(2).randbytes(MIB)


async def upload(client: Client, blocks: int) -> None:
    """As far as it gets."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        for _ in range(blocks):
            await client.send(chunk(BLOCK))


async def test_body_that_is_not_json_is_sent_on_as_it_comes(live: Live) -> None:
    """The client sends each part when the worker has the one before."""
    turn = asyncio.Semaphore(0)

    async def script(peer: Peer) -> None:
        await peer.head()
        for number in range(20):
            await peer.until(b"%d.ends" % number)
            turn.release()
        await peer.until(END)
        await peer.send(OK)
        await peer.rest()

    async with live.worker(script), live.client() as client, asyncio.timeout(LIMIT):
        await client.send(UPLOAD + b"transfer-encoding: chunked\r\n\r\n")
        for number in range(20):
            await client.send(chunk(b"x" * 30_000 + b"%d.ends" % number))
            await turn.acquire()
        await client.send(END)
        assert (await client.answer()).normal == OK_NORMAL


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_slow_worker_slows_the_upload(live: Live, framing: str) -> None:
    """What it has not taken is not taken from the client either."""
    go_on = asyncio.Event()
    sent, total = 0, 32

    async def script(peer: Peer) -> None:
        await peer.head()
        await go_on.wait()
        await peer.skip(b"the end")
        await peer.send(OK)
        await peer.rest()

    async def send(client: Client) -> None:
        nonlocal sent
        if framing == "length":
            await client.send(UPLOAD + b"content-length: %d\r\n\r\n" % (total * MIB + 7))
        else:
            await client.send(UPLOAD + b"transfer-encoding: chunked\r\n\r\n")
        while sent < total:
            await client.send(BLOCK if framing == "length" else chunk(BLOCK))
            sent += 1
        await client.send(b"the end" if framing == "length" else chunk(b"the end") + END)

    async with live.worker(script), live.client() as client:
        sending = asyncio.create_task(send(client))
        await until(lambda: sent > 0)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.15)
        assert sent < total * 3 // 4, "the router takes what its worker does not"
        go_on.set()
        await sending
        assert (await client.answer()).normal == OK_NORMAL


EARLY = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nno"


@pytest.mark.parametrize("status", [b"413 Content Too Large", b"401 Unauthorized"])
@pytest.mark.parametrize("end", ["reads no more", "reads on", "closes its half", "cuts"])
async def test_worker_answers_while_the_client_still_sends(live: Live, status: bytes, end: str) -> None:
    """RFC 9112 9.6"""

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.more()
        await peer.send(EARLY % status)
        if end == "cuts":
            await asyncio.sleep(0.05)  # a reset may overtake data on their way
        elif end == "reads on":
            await peer.rest()
        else:
            if end == "closes its half":
                peer.finish_sending()
            await left.wait()

    left = asyncio.Event()
    async with live.worker(script), live.client() as client:
        await client.send(UPLOAD + b"transfer-encoding: chunked\r\n\r\n")
        sending = asyncio.create_task(upload(client, 36))
        answer = await client.answer()
        assert (answer.normal, answer.complete) == (status[:3] + b"\r\ncontent-type: text/plain\r\n\r\nno", True)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        left.set()


async def test_upload_that_is_cut_is_not_completed(live: Live) -> None:
    """RFC 9112 8"""
    got = b""

    async def script(peer: Peer) -> None:
        nonlocal got
        await peer.head()
        began.set()
        got = await peer.rest()
        over.set()

    began, over = asyncio.Event(), asyncio.Event()
    async with live.worker(script), live.client() as client, asyncio.timeout(LIMIT):
        await client.send(UPLOAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"x" * 300_000))
        await began.wait()
        client.close()
        await over.wait()
    assert not got.endswith(END)


# -- pipelining


def echo(body: bytes, *lines: bytes, target: bytes = b"/v1/x") -> bytes:
    return post(*lines, body=body, target=target)


HEALTH = get(b"/health")
OK_HEALTH = b'{"status":"ok"}'
PIPELINES: dict[str, list[tuple[bytes, bytes]]] = {
    "bodies": [(echo(b"%d" % n), b"%d" % n) for n in range(6)],
    "control plane behind": [(echo(b"1"), b"1"), (echo(b"2"), b"2"), (HEALTH, OK_HEALTH)],
    "the first one slow": [(echo(b'"slow"'), b'"slow"'), (echo(b"1"), b"1"), (echo(b"2"), b"2"), (HEALTH, OK_HEALTH)],
    "chunked and empty": [
        (CHUNKED + b"\r\n" + chunk(b"1") + END, b"1"),
        (POST + b"\r\n", b""),
        (CHUNKED + b"\r\n" + chunk(b"2") + b"0\r\nx-t: 1\r\n\r\n", b"2"),
        (HEALTH, OK_HEALTH),
    ],
    "large": [(echo(b'"%b"' % (b"x" * 500_000)), b'"%b"' % (b"x" * 500_000)), (echo(b"1"), b"1")] * 3,
    "streamed ones": [
        (echo(b"x" * 400_000, b"content-type: application/octet-stream"), b"x" * 400_000),
        (CHUNKED + b"content-type: audio/wav\r\n\r\n" + chunk(b"y" * 1000) + END, b"y" * 1000),
        (echo(b"1"), b"1"),
        (HEALTH, OK_HEALTH),
    ],
    "offers of another protocol": [
        (echo(b"1", b"connection: upgrade", b"upgrade: h2c"), b"1"),
        (echo(b"2", b"connection: upgrade", b"upgrade: h2c"), b"2"),
        (HEALTH, OK_HEALTH),
    ],
}


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES.keys())
@pytest.mark.parametrize("split", [False, True], ids=["at once", "in pieces"])
async def test_pipelined_requests_are_answered_in_their_order(
    live: Live, pipeline: list[tuple[bytes, bytes]], split: bool
) -> None:
    """RFC 9112 9.3.2"""

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if b"slow" in request.body:
                await asyncio.sleep(0.1)
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(request.body), request.body))

    sent = b"".join(request for request, _ in pipeline)
    step = max(1, len(sent) // 7) if split else len(sent)
    async with live.worker(script), live.client() as client:
        sending = asyncio.create_task(client.send(*(sent[at : at + step] for at in range(0, len(sent), step))))
        for request, expected in pipeline:
            answer = await client.answer(request.split()[0])
            assert answer.complete
            assert answer.body == expected
        await sending


async def test_nothing_is_served_after_the_last_request(live: Live) -> None:
    """RFC 9112 9.6"""
    async with live.worker(echoes) as worker, live.client() as client:
        await client.send(echo(b"1") + echo(b"2", b"connection: close") + echo(b"3") + HEALTH)
        assert [(await client.answer()).body for _ in range(2)] == [b"1", b"2"]
        assert await client.closed()
    assert [request.body for request in worker.requests] == [b"1", b"2"]


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", echo(b"2", target=b"/v1/../x"), echo(b"2", b"content-length: 2")])
@pytest.mark.parametrize("cut", [0, 30, -2, 99], ids=["at once", "in the head", "in the body", "behind the first"])
async def test_good_request_before_a_bad_one_keeps_its_answer(live: Live, bad: bytes, cut: int) -> None:
    """The refusal must not be taken for the answer to the first; the connection may as well end behind that."""
    good = echo(b'"first"')
    async with live.worker(echoes) as worker, live.client() as client:
        await client.send(good[:cut], good[cut:] + bad + echo(b"3"), pause=0.005)
        assert (await client.answer()).body == b'"first"'
        if rest := await client.rest():
            openai_error(http_model.read_answer(rest, b"POST", True)[0], [400])
    assert [request.body for request in worker.requests] == [b'"first"']


# -- clients that leave by half


@pytest.mark.parametrize("when", ["with the request", "before the answer", "in a stream", "in an upload"])
async def test_half_closed_client_has_left(live: Live, when: str) -> None:
    """A client that ends its sending is taken for one that is gone: most that end it are."""

    async def script(peer: Peer) -> None:
        if when == "in an upload":
            await peer.head()
        else:
            await peer.request()
        if when == "in a stream":
            await peer.send(STREAM + chunk(b"data: 1\n\n"))
        began.set()
        await peer.rest(limit=5)
        cut.set()

    began, cut = asyncio.Event(), asyncio.Event()
    async with live.worker(script), live.client() as client, asyncio.timeout(LIMIT):
        if when == "in an upload":
            await client.send(UPLOAD + b"content-length: 9000000\r\n\r\n" + b"x" * 300_000)
        else:
            await client.send(post(b"x-dynamo-session-id: half"))
        if when != "with the request":
            await began.wait()
            if when == "in a stream":
                await client.until(b"data: 1")
        client.finish_sending()
        if when == "with the request":
            with contextlib.suppress(TimeoutError):  # it may be gone before a worker has heard of it
                await asyncio.wait_for(began.wait(), 0.2)
        if began.is_set():
            await cut.wait()
        await live.rest()
        await client.rest()


@pytest.mark.parametrize(
    ("target", "host", "told"),
    [
        (b"/v1/x", b"host: r.example\r\n", b"r.example"),
        (b"http://a.example:81/v1/x", b"host: r.example\r\n", b"a.example:81"),
        (b"http://user:word@a.example/v1/x", b"host: r.example\r\n", b"a.example"),
        (b"http://[::1]:8000/v1/x", b"host: r.example\r\n", b"[::1]:8000"),
    ],
)
async def test_host_of_an_absolute_target_is_the_one_that_counts(
    live: Live, target: bytes, host: bytes, told: bytes
) -> None:
    """RFC 9112 3.2.2."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(b"GET %b HTTP/1.1\r\n%b\r\n" % (target, host))
        await client.answer(b"GET")
    assert worker.requests[0].all(b"x-forwarded-host") == [told]


async def test_host_of_an_absolute_target_of_http_1_0(live: Live) -> None:
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(b"GET http://a.example/v1/x HTTP/1.0\r\n\r\n")
        await client.answer(b"GET")
    assert worker.requests[0].all(b"x-forwarded-host") == [b"a.example"]


@pytest.mark.parametrize("target", [b"/v1/x", b"/health", b"/nothing"])
async def test_leave_to_send_is_not_given_to_http_1_0(live: Live, target: bytes) -> None:
    """RFC 9110 10.1.1. It does not know what that is, and would take it for the answer."""
    request = b"POST %b HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n" % target
    async with live.worker(answers(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)), live.client() as client:
        await client.send(request, b"{}", pause=0.05)
        assert b" 100 " not in await client.rest()


async def test_trace_is_refused_with_what_is_allowed(live: Live) -> None:
    async with live.client() as client:
        await client.send(b"TRACE /v1/x HTTP/1.1\r\nhost: r\r\n\r\n")
        answer = await client.answer()
        openai_error(answer, [405], "method_not_allowed")
        assert b"GET, HEAD" in answer.all(b"allow")[0]
    async with live.client() as client:
        await client.send(b"TRACE /health HTTP/1.1\r\nhost: r\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.all(b"allow")) == (405, [b"GET, HEAD"])


@pytest.mark.parametrize("path", [b"/", b"/healthz", b"/livez", b"/ping", b"/health", b"/ready", b"/metrics"])
async def test_what_load_balancers_probe_is_answered_to_get_and_head(live: Live, path: bytes) -> None:
    heads = []
    for method in (b"GET", b"HEAD"):
        async with live.client() as client:
            await client.send(get(path).replace(b"GET", method))
            answer = await client.answer(method)
            assert answer.status == 200
            assert bool(answer.body) is (method == b"GET")
            assert not await client.rest()
            heads.append([pair for pair in answer.headers if pair[0] != b"content-length"])
    assert heads[0] == heads[1]


async def test_head_of_models_and_of_what_is_not_there(live: Live) -> None:
    listed = b'{"object":"list","data":[]}'
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(listed), listed)
    async with live.worker(answers(answer)):
        for path, status in ((b"/v1/models", 200), (b"/health", 200), (b"/nothing", 404)):
            async with live.client() as client:
                await client.send(get(path).replace(b"GET", b"HEAD"))
                assert (await client.answer(b"HEAD")).status == status


@pytest.mark.parametrize(
    "path", [b"/health/", b"/ready/", b"/metrics/", b"/v1/models/", b"/admin/workers/", b"//health"]
)
async def test_no_redirect_is_ours(live: Live, path: bytes) -> None:
    """It would lead to whatever the request calls its host."""
    async with live.worker(answers(OK)), live.client() as client:
        await client.send(get(path).replace(b"r.example", b"evil.example"))
        answer = await client.answer(b"GET")
        assert not 300 <= answer.status < 400
        assert not answer.all(b"location")
