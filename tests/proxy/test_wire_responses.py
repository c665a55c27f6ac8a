"""What a worker's answer becomes on its way to the client, byte by byte, by the letter of RFC 9110 and 9112."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support import http_model
from tests.support.http_model import Answer
from tests.support.raw import (
    END,
    LIMIT,
    OK,
    OK_NORMAL,
    STREAM,
    Client,
    Kept,
    Live,
    Peer,
    answers,
    chunk,
    get,
    openai_error,
    post,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

MIB = 1 << 20


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with contextlib.closing(Kept()) as kept:
        yield kept


@pytest.fixture
def live(kept: Kept) -> Live:
    return kept.get()


class Row(NamedTuple):
    name: str
    section: str
    """Of RFC 9112, or of RFC 9110 where it has a 0 before it."""
    worker: bytes
    """What the worker sends, and closes if its length does not say where it ends."""
    at_client: bytes
    """Without framing, Connection, and what is the router's to say."""
    framing: str = "length"
    """At the client, if it speaks HTTP/1.1; of HTTP/1.0 a chunked one is ended by closing. Empty: any will do."""
    method: bytes = b"GET"
    interim: tuple[tuple[int, list[tuple[bytes, bytes]]], ...] = ()


def closes(answer: bytes) -> bool:
    """Whether the worker has to end the answer by closing."""
    head = answer.rpartition(b"\r\n\r\n")[0].lower() if b"content-length" not in answer.lower() else b"content-length"
    return b"content-length" not in head and b"chunked" not in answer.lower()


def length(
    body: bytes, *lines: bytes, status: bytes = b"200 OK", kept: tuple[bytes, ...] | None = None
) -> tuple[bytes, bytes]:
    """An answer with a length, and what the client is to get of it (without `kept`: all)."""
    worker = [b"HTTP/1.1 " + status, *lines, b"content-length: %d" % len(body), b"", body]
    client = [status[:3], *(lines if kept is None else kept), b"", body]
    return b"\r\n".join(worker), b"\r\n".join(client)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b"data: 1\n\ndata: [DONE]\n\n"
ZIPPED = gzip.compress(b'{"object": "x"}', mtime=0)
FINAL = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
FINAL_NORMAL = b"200\r\n\r\nok"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a>; rel=preload\r\nLink: </b>\r\n\r\n"
HINTED = (103, [(b"link", b"</a>; rel=preload"), (b"link", b"</b>")])

FRAMING = [
    Row("length", "6.2", *length(b"[1]")),
    Row("length 0", "6.2", *length(b"")),
    Row("chunked", "7.1", CHUNKED + chunk(b"[1") + chunk(b"]") + END, b"200\r\n\r\n[1]", "chunked"),
    Row("chunked, nothing in it", "7.1", CHUNKED + END, b"200\r\n\r\n", "chunked"),
    Row(
        "chunked, another spelling",
        "7.1",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding:Chunked\r\n\r\n0003\r\n[1]\r\nA\r\n0123456789\r\n00\r\n\r\n",
        b"200\r\n\r\n[1]0123456789",
        "chunked",
    ),
    Row(
        "chunk extensions end here",
        "7.1.1",
        CHUNKED + b'3;a;b="c d"\r\n[1]\r\n0;e=f\r\n\r\n',
        b"200\r\n\r\n[1]",
        "chunked",
    ),
    Row(
        "trailers end here",
        "7.1.2",
        CHUNKED.replace(b"\r\n\r\n", b"\r\ntrailer: x-t\r\n\r\n")
        + chunk(b"[1]")
        + b"0\r\nx-t: 1\r\nset-cookie: a=b\r\n\r\n",
        b"200\r\n\r\n[1]",
        "chunked",
    ),
    Row("ended by closing", "6.3", b"HTTP/1.1 200 OK\r\nx-a: 1\r\n\r\n[1]", b"200\r\nx-a: 1\r\n\r\n[1]", "chunked"),
    Row("ended by closing, nothing in it", "6.3", b"HTTP/1.1 200 OK\r\n\r\n", b"200\r\n\r\n", "chunked"),
    Row("HTTP/1.0, ended by closing", "6.3", b"HTTP/1.0 200 OK\r\n\r\n[1]", b"200\r\n\r\n[1]", "chunked"),
    Row("HTTP/1.0 with a length", "6.3", b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\n[1]", b"200\r\n\r\n[1]"),
    Row(
        "events ended by closing",
        "6.3",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENTS,
        b"200\r\ncontent-type: text/event-stream\r\n\r\n" + EVENTS,
        "chunked",
    ),
    Row("HEAD with a length", "6.3", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", b"200\r\n\r\n", "none", b"HEAD"),
    Row("HEAD, chunked", "6.3", CHUNKED, b"200\r\n\r\n", "none", b"HEAD"),
    Row("HEAD with neither", "6.3", b"HTTP/1.1 200 OK\r\netag: x\r\n\r\n", b"200\r\netag: x\r\n\r\n", "none", b"HEAD"),
    Row("204", "6.3", b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n", b"204\r\nx-a: 1\r\n\r\n", "none"),
    Row(
        "304 with a length",
        "6.3",
        b"HTTP/1.1 304 X\r\ncontent-length: 99\r\netag: x\r\n\r\n",
        b"304\r\netag: x\r\n\r\n",
        "none",
    ),
    Row("304, chunked", "6.3", b"HTTP/1.1 304 X\r\ntransfer-encoding: chunked\r\n\r\n", b"304\r\n\r\n", "none"),
    Row("205 with length 0", "015.3.6", b"HTTP/1.1 205 X\r\ncontent-length: 0\r\n\r\n", b"205\r\n\r\n"),
]

INTERIM = [
    Row("100 ends here", "015.2.1", b"HTTP/1.1 100 Continue\r\n\r\n" + FINAL, FINAL_NORMAL),
    Row(
        "100 with headers ends here",
        "015.2.1",
        b"HTTP/1.1 100 X\r\nx-a: 1\r\ncontent-length: 5\r\n\r\n" + FINAL,
        FINAL_NORMAL,
    ),
    Row("102", "015.2", b"HTTP/1.1 102 Processing\r\n\r\n" + FINAL, FINAL_NORMAL, interim=((102, []),)),
    Row("103", "015.2", HINTS + FINAL, FINAL_NORMAL, interim=(HINTED,)),
    Row("103 thrice", "015.2", HINTS * 3 + FINAL, FINAL_NORMAL, interim=(HINTED,) * 3),
    Row(
        "100, 102, 103 and a stream",
        "015.2",
        b"HTTP/1.1 100 X\r\n\r\nHTTP/1.1 102 X\r\nx-a: 1\r\n\r\n" + HINTS + STREAM + chunk(EVENTS) + END,
        b"200\r\ncontent-type: text/event-stream\r\n\r\n" + EVENTS,
        "chunked",
        interim=((102, [(b"x-a", b"1")]), HINTED),
    ),
    Row(
        "103 without what is of one connection",
        "07.6.1",
        b"HTTP/1.1 103 X\r\nconnection: x-foo\r\nx-foo: 1\r\nte: x\r\nlink: </a>\r\nx-coatcheck-worker: x\r\n\r\n"
        + FINAL,
        FINAL_NORMAL,
        interim=((103, [(b"link", b"</a>")]),),
    ),
    Row("103 before 404", "015.2", HINTS + length(b"no", status=b"404 X")[0], b"404\r\n\r\nno", interim=(HINTED,)),
    Row("199", "015.2", b"HTTP/1.1 199 X\r\n\r\n" + FINAL, FINAL_NORMAL, interim=((199, []),)),
    Row(
        "103 to HEAD",
        "015.2",
        HINTS + b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
        b"200\r\n\r\n",
        "none",
        b"HEAD",
        (HINTED,),
    ),
]

RETRY = (b"content-type: application/json", b"retry-after: 7", b"x-should-retry: false")
STATUSES = [
    Row(str(status), "015", *length(b"body", b"x-a: 1", status=b"%d X" % status))
    for status in (201, 202, 203, 206, 226, 299, 300, 400, 401, 403, 404, 418, 422, 426, 451, 499, 500, 501, 529, 599)
]
STATUSES += [
    Row(
        "429 to a stream", "010.2.3", *length(b'{"error":{}}', *RETRY, status=b"429 Too Many Requests"), method=b"POST"
    ),
    Row("503 to a stream", "010.2.3", *length(b'{"error":{}}', *RETRY, status=b"503 Unavailable"), method=b"POST"),
    Row("500 to a stream", "015.6.1", *length(b"<html>", b"content-type: text/html", status=b"500 X"), method=b"POST"),
    Row("JSON to a stream", "08.3", *length(b'{"a":1}', b"content-type: application/json"), method=b"POST"),
    Row(
        "Retry-After as a date", "010.2.3", *length(b"", b"retry-after: Fri, 31 Dec 1999 23:59:59 GMT", status=b"503 X")
    ),
    Row("no reason", "4", b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nok", FINAL_NORMAL),
    Row("no reason and no space", "4", b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok", FINAL_NORMAL),
    Row("an odd reason", "4", b"HTTP/1.1 200 caf\xe9: <ok> \t!\r\ncontent-length: 2\r\n\r\nok", FINAL_NORMAL),
]

HEADERS = [
    Row("twice, in their order", "05.2", *length(b"x", b"x-a: 1", b"x-b: 2", b"x-a: 3", b"x-a: 1")),
    Row(
        "cookies", "06265 3", *length(b"x", b"set-cookie: a=1; Path=/", b"set-cookie: b=2", b"set-cookie: a=1; Path=/")
    ),
    Row("latin-1", "05.5", *length(b"x", b"x-a: caf\xe9 \xff\x80")),
    Row("utf-8", "05.5", *length(b"x", "x-a: caf\u00e9 \U0001f9e5".encode())),
    Row("empty", "05.5", *length(b"x", b"x-a: ", b"x-b: 1", b"x-c: ")),
    Row("spaces around, tabs within", "5.1", *length(b"x", b"x-a:\t v\tw  ", b"x-b:v", kept=(b"x-a: v\tw", b"x-b: v"))),
    Row("every character of a name", "05.6.2", *length(b"x", b"!#$%&'*+-.^_`|~9z: v")),
    Row("60 KiB", "05.4", *length(b"x", b"x-long: " + b"v" * 60 * 1024)),
    Row("500 of them", "05.4", *length(b"x", *(b"x-%d: %d" % (number, number) for number in range(500)))),
    Row(
        "zipped",
        "08.4",
        *length(ZIPPED, b"content-type: application/json", b"content-encoding: gzip", b"vary: accept-encoding"),
    ),
    Row(
        "zipped events",
        "08.4",
        CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") + chunk(ZIPPED) + END,
        b"200\r\ncontent-encoding: gzip\r\n\r\n" + ZIPPED,
        "chunked",
    ),
    Row(
        "of one connection",
        "07.6.1",
        *length(
            b"x",
            b"connection: keep-alive",
            b"keep-alive: timeout=5",
            b"trailer: x-t",
            b"te: trailers",
            b"upgrade: h2c",
            b"proxy-connection: keep-alive",
            b"proxy-authenticate: Basic",
            b"proxy-authentication-info: x",
            b"x-kept: 1",
            kept=(b"x-kept: 1",),
        ),
    ),
    Row(
        "named by Connection",
        "07.6.1",
        *length(b"x", b"x-foo: 1", b"Connection: close, X-Foo", b"x-bar: 2", b"x-foo: 3", kept=(b"x-bar: 2",)),
    ),
    Row(
        "named by a second Connection",
        "07.6.1",
        *length(
            b"x", b"connection: keep-alive", b"connection: ,x-foo ,", b"x-foo: 1", b"x-bar: 2", kept=(b"x-bar: 2",)
        ),
    ),
    Row("Connection cannot name the framing", "07.6.1", *length(b"[1]", b"connection: content-length", kept=()), ""),
    Row(
        "what only the router says",
        "",
        *length(b"x", b"x-coatcheck-worker: evil", b"X-Coatcheck-Affinity: evil", b"x-a: 1", kept=(b"x-a: 1",)),
    ),
]

OWN = b"http://127.0.0.1:%d"
"""The worker's address; its port is filled in."""
MOVED = {
    OWN + b"/v1/y?z": b"/v1/y?z",
    OWN + b"/v1/y?u=http://a/&v#w": b"/v1/y?u=http://a/&v#w",
    OWN + b"/": b"/",
    OWN + b"/v1/%2F;x": b"/v1/%2F;x",
    OWN: b"/",
    OWN + b"?x": b"/?x",
    OWN + b"#x": b"/#x",
    OWN + b"//evil/v1/y": b"/.//evil/v1/y",  # RFC 3986 4.2: as it is, it would lead to another host
    b"//127.0.0.1:%d/v1/y": b"/v1/y",
    b"HTTP://127.0.0.1:%d/v1/y": b"/v1/y",
    OWN + b"1/v1/y": None,  # another port
    OWN + b"@evil/v1/y": None,  # a user, and another host
    OWN + b".evil/v1/y": None,
    b"http://127.0.0.1:1/v1/y": None,
    b"http://other:%d/v1/y": None,
    b"http://other/v1/y?back=http://127.0.0.1:%d/x": None,
    b"/v1/y?z": None,
    b"../y": None,
    b"y": None,
    b"?z": None,
    b"//other/v1/y": None,
    b"": None,
}

ANSWERS = FRAMING + INTERIM + STATUSES + HEADERS


@pytest.mark.parametrize("row", ANSWERS, ids=[row.name for row in ANSWERS])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["1.1", "1.0"])
async def test_answer_is_passed_on(live: Live, row: Row, version: bytes) -> None:
    """Twice on the connection of an HTTP/1.1 client: nothing is left over on either side."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(row.worker)
            if closing:
                return

    request = {b"POST": post(body=b'{"stream":true}')}.get(row.method, get(b"/v1/x").replace(b"GET", row.method))
    closing = row.framing in ("chunked",) and closes(row.worker)
    modern = version == b"1.1"
    async with live.worker(script) as worker, live.client() as client:
        for _ in range(2 if modern else 1):
            await client.send(request.replace(b"HTTP/1.1", b"HTTP/" + version))
            answer = await client.answer(row.method)
            assert (answer.normal, answer.complete) == (row.at_client, True)
            if row.framing:
                assert answer.framing == (row.framing if modern or row.framing != "chunked" else "close")
            if row.framing == "length":
                assert answer.all(b"content-length") == [b"%d" % len(answer.body)]
            assert [(it.status, it.headers) for it in answer.interim] == list(row.interim if modern else ())
            assert len(answer.all(b"x-request-id")) == 1
            assert len(answer.all(b"x-coatcheck-worker")) == 1
        if not modern:
            assert await client.closed()
    assert len(worker.requests) == (2 if modern else 1)


@pytest.mark.parametrize("name", [b"location", b"Content-Location"])
@pytest.mark.parametrize("status", [b"201 X", b"301 X", b"302 X", b"303 X", b"307 X", b"308 X"])
async def test_redirect_is_not_followed_and_does_not_tell_the_workers_address(
    live: Live, name: bytes, status: bytes
) -> None:
    """Like nginx's proxy_redirect. RFC 9110 10.2.2 and 8.7."""
    asked: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(length(b"moved", b"%b: %b" % (name, asked[-1]), status=status)[0])

    async with live.worker(script) as worker, live.client() as client:
        for said, expected in MOVED.items():
            asked.append(said.replace(b"%d", b"%d" % live.worker_port))
            await client.send(get(b"/v1/x"))
            answer = await client.answer(b"GET")
            assert (answer.status, answer.body) == (int(status[:3]), b"moved")
            assert answer.all(name.lower()) == [asked[-1] if expected is None else expected]
    assert len(worker.requests) == len(MOVED)


@pytest.mark.parametrize("status", [b"200 OK", b"202 X", b"404 X"])
async def test_addresses_in_other_answers_are_not_told_either(live: Live, status: bytes) -> None:
    own = OWN % live.worker_port
    lines = (b"link: <%b/v1/y?a=2>; rel=next, </b>; rel=x" % own, b"refresh: 5; url=%b/v1/z" % own, b"location: " + own)
    told = (b"link: </v1/y?a=2>; rel=next, </b>; rel=x", b"refresh: 5; url=/v1/z", b"location: /")
    worker, client_s = length(b"x", *lines, status=status, kept=told)
    hints = b"HTTP/1.1 103 X\r\n%b\r\n\r\n" % lines[0]
    async with live.worker(answers(hints + worker)), live.client() as client:
        await client.send(get(b"/v1/x"))
        answer = await client.answer(b"GET")
        assert answer.normal == client_s
        assert answer.interim[0].headers == [(b"link", b"</v1/y?a=2>; rel=next, </b>; rel=x")]


async def test_interim_answer_comes_before_the_final_one(live: Live) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(HINTS)
        await seen.wait()
        await peer.send(FINAL)

    seen = asyncio.Event()
    async with live.worker(script), live.client() as client, asyncio.timeout(LIMIT):
        await client.send(get(b"/v1/x"))
        assert b"103" in await client.until(b"\r\n\r\n")
        seen.set()
        assert (await client.answer(b"GET")).normal == FINAL_NORMAL


async def test_interim_answers_behind_leave_to_send(live: Live) -> None:
    """The leave is ours; the worker's own ends here (RFC 9110 10.1.1)."""
    async with live.worker(answers(b"HTTP/1.1 100 Continue\r\n\r\n" + HINTS + OK)), live.client() as client:
        for _ in range(2):
            await client.send(post(b"expect: 100-continue").removesuffix(b"{}"))
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"{}")
            answer = await client.answer()
            assert (answer.normal, [it.status for it in answer.interim]) == (OK_NORMAL, [103])


# -- however it is cut

BODIES = {
    "line feeds": b"data: {}\n\nid: 7\ndata: [DONE]\n\n",
    "carriage returns": b"data: {}\r\rdata: [DONE]\r\r",
    "both": b"event: m\r\ndata: {}\r\n\r\ndata:[DONE]\r\n\r\n",
    "comments and retry": b": c\n\n:\n\nretry: 10\ndata\n\ndata: \n\ndata: [DONE]\n\n",
    "byte order mark": b"\xef\xbb\xbfdata: \xff\xfe\x00\n\ndata: [DONE]\n\n",
    "more after the end": b"data: [DONE]\n\ndata: more\n\ndata: [DONE]\n\n: c\n\n",
    "no end": b"data: 1\n\ndata: 2",
}


def in_chunks(body: bytes) -> bytes:
    """Of one to five bytes, with an extension here and there."""
    pieces = [body[at : at + at % 5 + 1] for at in [0]]
    at = len(pieces[0])
    while at < len(body):
        pieces.append(body[at : at + at % 5 + 1])
        at += len(pieces[-1])
    return b"".join(b"%x%b\r\n%b\r\n" % (len(p), b";x=y" if len(p) == 3 else b"", p) for p in pieces) + END


FRAMED = [("chunked", name) for name in BODIES] + [("length", "both"), ("close", "both"), ("close", "no end")]


@pytest.mark.parametrize(("framing", "name"), FRAMED)
async def test_streamed_answer_may_be_cut_anywhere(live: Live, framing: str, name: str) -> None:
    """In two parts, at each byte of the whole; and byte by byte. Many at once: it is mostly waiting."""
    body = BODIES[name]
    kind = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    whole = {
        "length": kind + b"content-length: %d\r\n\r\n%b" % (len(body), body),
        "chunked": kind + b"transfer-encoding: chunked\r\n\r\n" + in_chunks(body),
        "close": kind + b"\r\n" + body,
    }[framing]

    async def script(peer: Peer) -> None:
        while True:
            cut = int((await peer.request()).target.rpartition(b"/")[2])
            parts = (whole[:cut], whole[cut:]) if cut else tuple(whole[at : at + 1] for at in range(len(whole)))
            await peer.send(*parts)
            if framing == "close":
                return

    async def ask(cuts: range) -> None:
        async with live.client() as client:
            for cut in cuts:
                await client.send(get(b"/v1/%d" % cut))
                answer = await client.answer(b"GET")
                assert (answer.status, answer.body, answer.complete) == (200, body, True), cut

    async with live.worker(script), asyncio.TaskGroup() as tasks:
        for number in range(16):
            tasks.create_task(ask(range(number, len(whole), 16)))


# -- what is no answer

GOOD = b"HTTP/1.1 200 OK\r\n"


class Bad(NamedTuple):
    name: str
    section: str
    worker: bytes


def bad_line(line: bytes) -> bytes:
    return GOOD + b"x-a: 1\r\n" + line + b"\r\ncontent-length: 2\r\n\r\nok"


def lengths(*values: bytes) -> bytes:
    return GOOD + b"".join(b"content-length: %b\r\n" % value for value in values) + b"\r\nok"


def codings(*values: bytes) -> bytes:
    return GOOD + b"".join(b"transfer-encoding: %b\r\n" % value for value in values) + b"\r\n" + chunk(b"ok") + END


BAD = [
    Bad("two lengths", "6.3", lengths(b"2", b"3")),
    Bad("two lengths in one", "6.3", lengths(b"2, 3")),
    Bad("length and chunked", "6.3", GOOD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n" + END),
    Bad("chunked and length", "6.3", GOOD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n" + END),
    Bad("length +2", "6.3", lengths(b"+2")),
    Bad("length -2", "6.3", lengths(b"-2")),
    Bad("length 0x2", "6.3", lengths(b"0x2")),
    Bad("length 2 2", "6.3", lengths(b"2 2")),
    Bad("empty length", "6.3", lengths(b"")),
    Bad("length over 64 bits", "6.3", lengths(b"18446744073709551618")),
    Bad("gzip, chunked", "6.1", codings(b"gzip, chunked")),
    Bad("gzip", "6.1", codings(b"gzip")),
    Bad("xchunked", "6.1", codings(b"xchunked")),
    Bad("chunked with a vertical tab", "6.1", codings(b"chunked\x0b")),
    Bad("chunked twice", "6.1", codings(b"chunked", b"chunked")),
    Bad("chunked, identity", "6.1", codings(b"chunked, identity")),
    Bad("chunk of size -1", "7.1", CHUNKED + b"-1\r\nok\r\n" + END),
    Bad("chunk of size 0x2", "7.1", CHUNKED + b"0x2\r\nok\r\n" + END),
    Bad("chunk over 64 bits", "7.1", CHUNKED + b"f" * 17 + b"\r\nok\r\n" + END),
    Bad("bare LF behind a chunk's size", "7.1", CHUNKED + b"2\nok\r\n" + END),
    Bad("bare LF after the status line", "2.2", GOOD.replace(b"\r", b"") + b"content-length: 2\r\n\r\nok"),
    Bad("bare LF after a line", "2.2", bad_line(b"x-c: 3\nx-d: 4")),
    Bad("bare LF everywhere", "2.2", FINAL.replace(b"\r", b"")),
    Bad("bare CR in a value", "2.2", bad_line(b"x-c: 3\rset-cookie: a")),
    Bad("bare CR as a line's end", "2.2", FINAL.replace(b"\n", b"")),
    Bad("folded", "5.2", bad_line(b"x-c: 3\r\n 4")),
    Bad("folded with a tab", "5.2", bad_line(b"x-c: 3\r\n\t4")),
    Bad("folded length", "5.2", GOOD + b"content-length:\r\n 2\r\n\r\nok"),
    Bad("NUL in a value", "05.5", bad_line(b"x-c: 3\x004")),
    Bad("NUL in a name", "05.1", bad_line(b"x\x00c: 3")),
    Bad("control character in a value", "05.5", bad_line(b"x-c: \x1b[2J")),
    Bad("vertical tab in a value", "05.5", bad_line(b"x-c: 3\x0b4")),
    Bad("DEL in a value", "05.5", bad_line(b"x-c: 3\x7f")),
    Bad("space before the colon", "5.1", bad_line(b"x-c : 3")),
    Bad("space before the colon of a length", "5.1", GOOD + b"content-length : 2\r\n\r\nok"),
    Bad("space in a name", "05.1", bad_line(b"x c: 3")),
    Bad("empty name", "05.1", bad_line(b": 3")),
    Bad("no colon", "5", bad_line(b"nonsense")),
    Bad("status 099", "4", b"HTTP/1.1 099 X\r\ncontent-length: 2\r\n\r\nok"),
    Bad("status 600", "015", b"HTTP/1.1 600 X\r\ncontent-length: 2\r\n\r\nok"),
    Bad("status 999", "015", b"HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\nok"),
    Bad("status 20", "4", b"HTTP/1.1 20 X\r\ncontent-length: 2\r\n\r\nok"),
    Bad("status 2000", "4", b"HTTP/1.1 2000 X\r\ncontent-length: 2\r\n\r\nok"),
    Bad("status 2x0", "4", b"HTTP/1.1 2x0 X\r\ncontent-length: 2\r\n\r\nok"),
    Bad("no status", "4", b"HTTP/1.1\r\ncontent-length: 2\r\n\r\nok"),
    Bad(
        "101 that nobody asked for",
        "015.2.2",
        b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nhello",
    ),
    Bad("101 without a word", "015.2.2", b"HTTP/1.1 101 X\r\n\r\n"),
    Bad("HTTP/2.0", "2.3", b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\nok"),
    Bad("HTTP/0.9", "2.3", b"hello\n"),
    Bad("HTTP/2 frames", "2.3", b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x80" + bytes(30)),
    Bad("another protocol", "2.3", b"ICY 200 OK\r\ncontent-length: 2\r\n\r\nok"),
    Bad("a request", "4", get(b"/v1/x")),
    Bad("TLS", "2.3", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200))),
    Bad("a head of 300 KiB", "05.4", GOOD + b"x-a: " + b"v" * 300 * 1024 + b"\r\ncontent-length: 2\r\n\r\nok"),
    Bad("a head of many lines", "05.4", GOOD + b"x-aaaaaaaaaaaaaaaaa: 1\r\n" * 14_000 + b"content-length: 2\r\n\r\nok"),
    Bad("interim answers without an end", "015.2", b"HTTP/1.1 102 X\r\nx-a: %b\r\n\r\n" % (b"v" * 1000) * 300),
    Bad("a head without an end", "05.4", GOOD + b"x-a: " + b"v" * 300 * 1024),
    Bad("a status line without an end", "4", b"HTTP/1.1 200 " + b"O" * 300 * 1024),
]


@pytest.mark.parametrize("row", BAD, ids=[row.name for row in BAD])
async def test_what_is_no_answer_is_a_bad_gateway(live: Live, row: Bad) -> None:
    """And its connection serves nobody else; the client's does."""

    async def script(peer: Peer) -> None:
        if not peer.number:
            await peer.request()
            await peer.send(row.worker)
        while True:
            await peer.request()
            await peer.send(FINAL)

    async with live.worker(script) as worker, live.client() as client:
        await client.send(get(b"/v1/x"))
        answer = await client.answer(b"GET")
        if row.section == "7.1":
            # Its head was good, and may have been sent before the rest was seen.
            assert answer.status == 502 or (answer.status == 200 and not answer.complete)
        else:
            openai_error(answer, [502], "worker_bad_response")
        if answer.complete:
            await client.send(get(b"/v1/y"))
            assert (await client.answer(b"GET")).normal == FINAL_NORMAL
            assert worker.carriers == [0, 1] or row.section == "015"  # of that one the end was clear


REPEATED = FINAL + FINAL.replace(b"ok", b"no")


class Excess(NamedTuple):
    name: str
    worker: bytes
    """More than one answer."""
    at_client: bytes
    method: bytes = b"GET"
    harmless: bool = False
    """The connection may be used again all the same."""


EXCESS = [
    Excess("a longer body than was declared", FINAL + b"-and more", FINAL_NORMAL),
    Excess("a second answer", REPEATED, FINAL_NORMAL),
    Excess("a second answer without a body", FINAL + b"HTTP/1.1 204 X\r\n\r\n", FINAL_NORMAL),
    Excess("an interim answer behind the answer", FINAL + HINTS, FINAL_NORMAL),
    Excess("a second answer behind a chunked one", CHUNKED + chunk(b"ok") + END + FINAL, FINAL_NORMAL),
    Excess("a line end behind the answer", FINAL + b"\r\n", FINAL_NORMAL, harmless=True),
    Excess("a body behind 204", b"HTTP/1.1 204 X\r\n\r\n" + b"no", b"204\r\n\r\n"),
    Excess("an answer behind 204", b"HTTP/1.1 204 X\r\n\r\n" + FINAL, b"204\r\n\r\n"),
    Excess("a body behind 304", b"HTTP/1.1 304 X\r\ncontent-length: 9\r\n\r\n" + b"other one", b"304\r\n\r\n"),
    Excess("a body behind the answer to HEAD", FINAL, b"200\r\n\r\n", b"HEAD"),
    Excess("a chunked body behind the answer to HEAD", CHUNKED + chunk(b"ok") + END, b"200\r\n\r\n", b"HEAD"),
    Excess("an answer behind the answer to HEAD", FINAL.removesuffix(b"ok") + FINAL, b"200\r\n\r\n", b"HEAD"),
    Excess("length 0 and a body", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\nno", b"200\r\n\r\n"),
]


@pytest.mark.parametrize("row", EXCESS, ids=[row.name for row in EXCESS])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
async def test_excess_never_reaches_the_next_client(live: Live, row: Excess, late: bool) -> None:
    """RFC 9112 9.2: response splitting, as seen from the router."""

    async def script(peer: Peer) -> None:
        while peer.number:
            await peer.request()
            await peer.send(FINAL.replace(b"ok", b"hi"))
        await peer.request()
        if late:
            head = row.worker.find(b"\r\n\r\n") + 4
            body = len(row.at_client.partition(b"\r\n\r\n")[2])
            end = row.worker.find(END) + len(END) if END in row.worker and body else head + body
            await peer.send(row.worker[:end], row.worker[end:], pause=0.02)
        else:
            await peer.send(row.worker)
        while row.harmless:
            await peer.request()
            await peer.send(FINAL.replace(b"ok", b"hi"))
        await peer.rest()

    async with live.worker(script) as worker, live.client() as one, live.client() as other:
        await one.send(get(b"/v1/x").replace(b"GET", row.method))
        assert (await one.answer(row.method)).normal == row.at_client
        await asyncio.sleep(0.04 if late else 0)
        for client in (other, one):
            await client.send(get(b"/v1/y"))
            assert (await client.answer(b"GET")).normal == b"200\r\n\r\nhi"
            assert not client.buffer
    assert worker.carriers == [0, 1, 1] or row.harmless


CUT = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[1, ",
    "length, nothing yet": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
    "chunked": CHUNKED + chunk(b"[1, "),
    "within a chunk": CHUNKED + b"9\r\n[1, ",
    "before the last line": CHUNKED + chunk(b"[1, ") + b"0\r\n",
    "zipped": CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") + chunk(ZIPPED[:9]),
}


@pytest.mark.parametrize("sent", CUT.values(), ids=CUT.keys())
@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["1.1", "1.0"])
async def test_answer_that_is_cut_does_not_look_complete(live: Live, sent: bytes, end: str, version: bytes) -> None:
    """RFC 9112 8. To a client of HTTP/1.0 only a reset tells a cut from an end, where there is no length."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        await asyncio.sleep(0.02)  # a reset may overtake data on their way
        peer.close() if end == "close" else peer.reset()

    async with live.worker(script), live.client() as client:
        await client.send(get(b"/v1/x").replace(b"1.1", version))
        got = await client.rest()
        answer, rest = http_model.read_answer(got, b"GET", True)
        assert rest == b""
        assert answer.status == 200
        assert b"[1, ".startswith(answer.body) or answer.body == ZIPPED[:9]
        if answer.framing == "close":
            assert client.ended == "reset"
        else:
            assert not answer.complete


async def test_answer_ended_by_a_reset_is_not_complete(live: Live) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n[1]")
        await asyncio.sleep(0.02)
        peer.reset()

    async with live.worker(script), live.client() as client:
        await client.send(get(b"/v1/x"))
        answer, _ = http_model.read_answer(await client.rest(), b"GET", True)
        assert (answer.body, answer.complete) == (b"[1]", False)


# -- slow readers


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_slow_reader_stops_the_worker(live: Live, framing: str) -> None:
    """What the client does not take is not taken from the worker: only so much is on its way."""
    block, total, sent = random.Random(3).randbytes(MIB), 32, 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        kind = {
            "length": b"content-length: %d\r\n" % (total * MIB),
            "chunked": b"transfer-encoding: chunked\r\n",
            "close": b"",
        }
        await peer.send(b"HTTP/1.1 200 OK\r\n" + kind[framing] + b"\r\n")
        while sent < total:
            await peer.send(chunk(block) if framing == "chunked" else block)
            sent += 1
        await peer.send(END if framing == "chunked" else b"")

    async with live.worker(script), live.client(receive_buffer=8192) as client:
        await client.send(get(b"/v1/x"))
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.15)
        assert sent < total * 3 // 4, "the router takes what its client does not"
        answer = await client_answer(client)
    assert answer.complete
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(block * total).digest()


async def client_answer(client: Client) -> Answer:
    """As fast as others read."""
    client.raw.setsockopt(1, 8, 1 << 20)  # SOL_SOCKET, SO_RCVBUF
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(client.answer(b"GET"), 20)
    raise AssertionError("it does not come to an end")
