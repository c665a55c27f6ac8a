"""What is no request, by the letter of RFC 9112, is refused with an error of OpenAI's shape and never reaches a worker,
and neither does what follows it; what is too large or too slow is refused as well."""

from __future__ import annotations

import asyncio
import contextlib
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
    POST,
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

CAP = 100_000


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with contextlib.closing(Kept(max_body_bytes=CAP)) as kept:
        yield kept


@pytest.fixture
def live(kept: Kept) -> Live:
    return kept.get()


SMUGGLED = post(target=b"/v1/smuggled")


class Row(NamedTuple):
    name: str
    section: str
    """Of RFC 9112, or of RFC 9110 where it has a 0 before it."""
    sent: bytes
    statuses: tuple[int, ...] = (400,)


def lengths(*values: bytes) -> bytes:
    return POST + b"".join(b"content-length: %b\r\n" % value for value in values) + b"\r\n[1, 2]"


def codings(*values: bytes, more: bytes = b"", version: bytes = b"1.1") -> bytes:
    lines = b"".join(b"transfer-encoding: %b\r\n" % value for value in values)
    return POST.replace(b"1.1", version) + lines + more + b"\r\n" + chunk(b"[1]") + END


def field(line: bytes) -> bytes:
    """A request with a whole line between two others."""
    return POST + b"x-a: 1\r\n" + line + b"\r\nx-b: 2\r\ncontent-length: 3\r\n\r\n[1]"


def chunked(body: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([POST[:-2], *lines, b"transfer-encoding: chunked", b"", body])


def first(line: bytes) -> bytes:
    return line + b"\r\nhost: r\r\ncontent-length: 3\r\n\r\n[1]"


NOT_HTTP = (400, 505)
CODING = (400, 501)

FRAMING = [
    Row("length and chunked", "6.3", POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n" + END),
    Row("chunked and length", "6.3", POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n" + END),
    Row("chunked and length 0", "6.3", POST + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n" + END),
    Row("length and identity", "6.3", POST + b"content-length: 3\r\ntransfer-encoding: identity\r\n\r\n[1]", CODING),
    Row("two lengths", "6.3", lengths(b"6", b"7")),
    Row("two lengths, the first 0", "6.3", lengths(b"0", b"6")),
    Row("the same length twice", "6.3", lengths(b"6", b"6")),
    Row("length +6", "6.3", lengths(b"+6")),
    Row("length -1", "6.3", lengths(b"-1")),
    Row("length -0", "6.3", lengths(b"-0")),
    Row("length 0x6", "6.3", lengths(b"0x6")),
    Row("length 6 6", "6.3", lengths(b"6 6")),
    Row("length 6,6", "6.3", lengths(b"6,6")),
    Row("length 6, 7", "6.3", lengths(b"6, 7")),
    Row("length 6.0", "6.3", lengths(b"6.0")),
    Row("length 6;", "6.3", lengths(b"6;")),
    Row("length 6e0", "6.3", lengths(b"6e0")),
    Row("length 1_0", "6.3", lengths(b"1_0")),
    Row("length with a vertical tab", "6.3", lengths(b"\x0b6")),
    Row("length in another script", "6.3", lengths("\u0666".encode())),
    Row("no number", "6.3", lengths(b"six")),
    Row("empty length", "6.3", lengths(b"")),
    Row("length over 64 bits", "6.3", lengths(b"18446744073709551622"), (400, 413)),
    Row("length over 64 bits, and back to 6", "6.3", lengths(b"36893488147419103238"), (400, 413)),
    Row("chunked, gzip", "6.1", codings(b"chunked, gzip"), CODING),
    Row("gzip, chunked", "6.1", codings(b"gzip, chunked"), CODING),
    Row("gzip", "6.1", codings(b"gzip"), CODING),
    Row("identity", "6.1", codings(b"identity"), CODING),
    Row("xchunked", "6.1", codings(b"xchunked"), CODING),
    Row("chunkedx", "6.1", codings(b"chunkedx"), CODING),
    Row("chunked, chunked", "7", codings(b"chunked, chunked"), CODING),
    Row("chunked,", "6.1", codings(b"chunked,"), CODING),
    Row(", chunked", "6.1", codings(b", chunked"), CODING),
    Row("chunked with a parameter", "7", codings(b"chunked;q=1"), CODING),
    Row("quoted chunked", "6.1", codings(b'"chunked"'), CODING),
    Row("chunked with a vertical tab", "6.1", codings(b"chunked\x0b"), CODING),
    Row("a vertical tab and chunked", "6.1", codings(b"\x0bchunked"), CODING),
    Row("chunked with a form feed", "6.1", codings(b"chunked\x0c"), CODING),
    Row("chunked with a no-break space", "6.1", codings(b"chunked\xa0"), CODING),
    Row("empty coding", "6.1", codings(b""), CODING),
    Row("chunked twice", "6.1", codings(b"chunked", b"chunked"), CODING),
    Row("gzip and chunked in two lines", "6.1", codings(b"gzip", b"chunked"), CODING),
    Row("chunked and gzip in two lines", "6.1", codings(b"chunked", b"gzip"), CODING),
    Row("chunked and identity in two lines", "6.1", codings(b"chunked", b"identity"), CODING),
    Row("chunked in HTTP/1.0", "6.1", codings(b"chunked", version=b"1.0"), CODING),
    Row(
        "chunked in HTTP/1.0, kept alive",
        "6.1",
        codings(b"chunked", more=b"connection: keep-alive\r\n", version=b"1.0"),
        CODING,
    ),
]

LINES = [
    Row("space before the colon", "5.1", field(b"x-c : 3")),
    Row("tab before the colon", "5.1", field(b"x-c\t: 3")),
    Row("space before the colon of a length", "5.1", POST + b"content-length : 3\r\n\r\n[1]"),
    Row("space before the colon of a coding", "5.1", POST + b"transfer-encoding : chunked\r\n\r\n" + END),
    Row("bare LF after the request line", "2.2", POST.replace(b"1.1\r\n", b"1.1\n") + b"content-length: 3\r\n\r\n[1]"),
    Row("bare LF after a line", "2.2", field(b"x-c: 3\nx-d: 4")),
    Row("bare LF everywhere", "2.2", post().replace(b"\r\n", b"\n")),
    Row("bare LF as the empty line", "2.2", POST + b"content-length: 3\r\n\n[1]"),
    Row("bare LF twice", "2.2", POST + b"content-length: 3\n\n[1]"),
    Row("bare CR in a value", "2.2", field(b"x-c: 3\rx-d: 4")),
    Row("bare CR at a value's end", "2.2", field(b"x-c: 3\r")),
    Row("bare CR before a name", "2.2", field(b"\rx-c: 3")),
    Row("bare CR as the empty line", "2.2", POST + b"content-length: 3\r\n\r[1]" + b" " * 10),
    Row("folded with a space", "5.2", field(b"x-c: 3\r\n 4")),
    Row("folded with a tab", "5.2", field(b"x-c: 3\r\n\t4")),
    Row("folded to nothing", "5.2", field(b"x-c: 3\r\n ")),
    Row("folded length", "5.2", POST + b"content-length:\r\n 3\r\n\r\n[1]"),
    Row("folded coding", "5.2", POST + b"transfer-encoding:\r\n chunked\r\n\r\n" + END),
    Row("folded before the first", "2.2", POST.replace(b"host", b" host") + b"content-length: 3\r\n\r\n[1]"),
    Row("NUL in a value", "05.5", field(b"x-c: 3\x004")),
    Row("NUL at a value's end", "05.5", field(b"x-c: 3\x00")),
    Row("NUL in a name", "05.1", field(b"x\x00c: 3")),
    Row("NUL in the target", "3.2", first(b"POST /v1/x\x00 HTTP/1.1")),
    Row("control character in a value", "05.5", field(b"x-c: 3\x014")),
    Row("vertical tab in a value", "05.5", field(b"x-c: 3\x0b4")),
    Row("escape in a value", "05.5", field(b"x-c: \x1b[2J")),
    Row("DEL in a value", "05.5", field(b"x-c: 3\x7f")),
    Row("empty name", "05.1", field(b": 3")),
    Row("space in a name", "05.1", field(b"x c: 3")),
    Row("bracket in a name", "05.1", field(b"x(c: 3")),
    Row("slash in a name", "05.1", field(b"x/c: 3")),
    Row("quote in a name", "05.1", field(b'x"c: 3')),
    Row("latin-1 in a name", "05.1", field(b"x\xe9c: 3")),
    Row("control character in a name", "05.1", field(b"x\x01c: 3")),
    Row("no colon", "5", field(b"x-c 3")),
    Row("no host", "3.2", b"POST /v1/x HTTP/1.1\r\ncontent-length: 3\r\n\r\n[1]"),
    Row("no host, an absolute target", "3.2", b"POST http://r/v1/x HTTP/1.1\r\ncontent-length: 3\r\n\r\n[1]"),
    Row("two hosts", "3.2", field(b"host: evil")),
    Row("the same host twice", "3.2", field(b"host: r.example")),
    Row("two hosts in one", "3.2", POST.replace(b"r.example", b"r, evil") + b"\r\n"),
    Row("space in the host", "3.2", POST.replace(b"r.example", b"r evil") + b"\r\n"),
    Row("path in the host", "3.2", POST.replace(b"r.example", b"r/evil") + b"\r\n"),
    Row("user in the host", "3.2", POST.replace(b"r.example", b"user@evil") + b"\r\n"),
]

CHUNKS = [
    Row("chunk of size -1", "7.1", chunked(b"-1\r\n[1]\r\n" + END)),
    Row("chunk of size +3", "7.1", chunked(b"+3\r\n[1]\r\n" + END)),
    Row("chunk of size 0x3", "7.1", chunked(b"0x3\r\n[1]\r\n" + END)),
    Row("space behind a chunk's size", "7.1", chunked(b"3 \r\n[1]\r\n" + END)),
    Row("space before a chunk's size", "7.1", chunked(b" 3\r\n[1]\r\n" + END)),
    Row("tab behind a chunk's size", "7.1", chunked(b"3\t\r\n[1]\r\n" + END)),
    Row("chunk over 64 bits", "7.1", chunked(b"f" * 17 + b"\r\n[1]\r\n" + END), (400, 413)),
    Row("chunk over 64 bits, and back to 3", "7.1", chunked(b"1" + b"0" * 15 + b"3\r\n[1]\r\n" + END), (400, 413)),
    Row("chunk without a size", "7.1", chunked(b"\r\n[1]\r\n" + END)),
    Row("chunk with an extension and no size", "7.1", chunked(b";a=1\r\n[1]\r\n" + END)),
    Row("chunk of size g", "7.1", chunked(b"g\r\n[1]\r\n" + END)),
    Row("chunk of size 3_0", "7.1", chunked(b"3_0\r\n[1]\r\n" + END)),
    Row("bare LF behind a chunk's size", "7.1", chunked(b"3\n[1]\r\n" + END)),
    Row("bare CR behind a chunk's size", "7.1", chunked(b"3\r[1]\r\n" + END)),
    Row("bare LF in a chunk's extension", "7.1.1", chunked(b"3;a\n[1]\r\n" + END)),
    Row("bare CR in a chunk's extension", "7.1.1", chunked(b"3;a\rb\r\n[1]\r\n" + END)),
    Row("NUL in a chunk's extension", "7.1.1", chunked(b"3;a\x00\r\n[1]\r\n" + END)),
    Row("chunk without its line end", "7.1", chunked(b"3\r\n[1]0\r\n\r\n")),
    Row("chunk with a bare LF behind it", "7.1", chunked(b"3\r\n[1]\n" + END)),
    Row("chunk with a bare CR behind it", "7.1", chunked(b"3\r\n[1]\r" + END)),
    Row("chunk longer than its size", "7.1", chunked(b"2\r\n[1]\r\n" + END)),
    Row("chunk shorter than its size", "7.1", chunked(b"4\r\n[1]\r\n" + END)),
    Row("trailer without a colon", "7.1.2", chunked(chunk(b"[1]") + b"0\r\nnonsense\r\n\r\n")),
    Row("folded trailer", "7.1.2", chunked(chunk(b"[1]") + b"0\r\nx-t: 1\r\n 2\r\n\r\n")),
    Row("bare LF in the trailers", "7.1.2", chunked(chunk(b"[1]") + b"0\r\nx-t: 1\n\r\n")),
    Row("bare LF as the end", "7.1.2", chunked(chunk(b"[1]") + b"0\r\n\n")),
    Row("NUL in a trailer", "7.1.2", chunked(chunk(b"[1]") + b"0\r\nx-t: \x00\r\n\r\n")),
    Row("space before a trailer's colon", "7.1.2", chunked(chunk(b"[1]") + b"0\r\nx-t : 1\r\n\r\n")),
]

FIRST_LINES = [
    Row("HTTP/2 preface", "09113 3.4", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", NOT_HTTP),
    Row("HTTP/2.0", "2.3", first(b"POST /v1/x HTTP/2.0"), NOT_HTTP),
    Row("HTTP/3.0", "2.3", first(b"POST /v1/x HTTP/3.0"), NOT_HTTP),
    Row("HTTP/1.2", "2.3", first(b"POST /v1/x HTTP/1.2"), NOT_HTTP),
    Row("HTTP/0.9", "2.3", first(b"POST /v1/x HTTP/0.9"), NOT_HTTP),
    Row("HTTP/1.10", "2.3", first(b"POST /v1/x HTTP/1.10"), NOT_HTTP),
    Row("HTTP/01.1", "2.3", first(b"POST /v1/x HTTP/01.1"), NOT_HTTP),
    Row("HTTP/1", "2.3", first(b"POST /v1/x HTTP/1"), NOT_HTTP),
    Row("HTTP/1,1", "2.3", first(b"POST /v1/x HTTP/1,1"), NOT_HTTP),
    Row("http/1.1", "2.3", first(b"POST /v1/x http/1.1"), NOT_HTTP),
    Row("another protocol", "2.3", first(b"POST /v1/x ICE/1.0"), NOT_HTTP),
    Row("no version", "2.3", first(b"POST /v1/x"), NOT_HTTP),
    Row("HTTP/0.9 as it was", "2.3", b"GET /v1/x\r\n", NOT_HTTP),
    Row("no version, a space", "2.3", first(b"POST /v1/x "), NOT_HTTP),
    Row("TLS", "08446 4.1.2", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)) * 3),
    Row("no target", "3", first(b"POST  HTTP/1.1")),
    Row("tabs", "3", first(b"POST\t/v1/x\tHTTP/1.1")),
    Row("a tab before the version", "3", first(b"POST /v1/x\tHTTP/1.1")),
    Row("space before the method", "3", first(b" POST /v1/x HTTP/1.1")),
    Row("space behind the version", "3", first(b"POST /v1/x HTTP/1.1 ")),
    Row("bytes behind the version", "3", first(b"POST /v1/x HTTP/1.1 HTTP/1.1")),
    Row("space in the target", "3.2", first(b"POST /v1/x y HTTP/1.1")),
    Row("tab in the target", "3.2", first(b"POST /v1/x\ty HTTP/1.1")),
    Row("control character in the target", "3.2", first(b"POST /v1/x\x01 HTTP/1.1")),
    Row("DEL in the target", "3.2", first(b"POST /v1/x\x7f HTTP/1.1")),
    Row("latin-1 in the target", "3.2", first(b"POST /v1/\xe9 HTTP/1.1")),
    Row("utf-8 in the query", "3.2", first("POST /v1/x?\u00e9 HTTP/1.1".encode())),
    Row("fragment", "3.2", first(b"POST /v1/x#y HTTP/1.1")),
    Row("no slash", "3.2", first(b"POST v1/x HTTP/1.1")),
    Row("an authority alone", "3.2.3", first(b"POST evil:80 HTTP/1.1")),
    Row("a lower-case method", "3.1", first(b"post /v1/x HTTP/1.1"), (400, 405, 501)),
    Row("a bracket in the method", "3.1", first(b"PO(ST /v1/x HTTP/1.1")),
    Row("text", "3", b"hello, is anybody there?\r\n\r\n"),
    Row("a response", "3", OK),
]

REFUSALS = FRAMING + LINES + CHUNKS + FIRST_LINES


async def refusal(client: Client, statuses: tuple[int, ...]) -> None:
    """One answer, which refuses, and the end."""
    answer = await client.answer()
    openai_error(answer, statuses)
    assert (answer.get(b"connection") or b"").lower() == b"close"
    assert await client.closed()


@pytest.mark.parametrize("row", REFUSALS, ids=[row.name for row in REFUSALS])
async def test_what_is_no_request_is_refused(live: Live, row: Row) -> None:
    """With another request right behind it; on a fresh connection, and on one that has had an answer."""
    async with live.worker(answers(OK)) as worker:
        async with live.client() as client:
            await client.send(row.sent + SMUGGLED)
            await refusal(client, row.statuses)
        assert worker.nothing_came()
        async with live.client() as client:
            await client.send(post(body=b'"before"'))
            assert (await client.answer()).normal == OK_NORMAL
            await client.send(row.sent + SMUGGLED)
            await refusal(client, row.statuses)
    assert [request.body for request in worker.requests] == [b'"before"']


async def test_what_is_no_request_is_refused_however_it_is_cut(live: Live) -> None:
    """Byte by byte: what stands before the fault does not travel before it is seen."""
    rows = [REFUSALS[number] for number in range(0, len(REFUSALS), 7)]

    async def one(row: Row) -> None:
        async with live.client() as client:
            sent = row.sent[:200]
            with contextlib.suppress(ConnectionError):
                await client.send(*(sent[at : at + 1] for at in range(len(sent))), pause=0.0005)
            with contextlib.suppress(ConnectionError):
                await client.send(SMUGGLED)
            openai_error(await client.answer(), row.statuses)

    async with live.worker(answers(OK)) as worker:
        await asyncio.gather(*map(one, rows))
    assert worker.nothing_came()


TOLERABLE = {
    "two spaces": first(b"POST  /v1/x HTTP/1.1"),
    "two spaces before the version": first(b"POST /v1/x  HTTP/1.1"),
    "an empty CR": b"\r" + first(b"POST /v1/x HTTP/1.1"),
    "an empty LF": b"\n" + first(b"POST /v1/x HTTP/1.1"),
}


@pytest.mark.parametrize("sent", TOLERABLE.values(), ids=TOLERABLE.keys())
async def test_space_that_may_be_read_over_is_not_sent_on(live: Live, sent: bytes) -> None:
    """RFC 9112 3 leaves it to the reader whether these are requests. The worker gets none, or a proper one."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(sent)
        answer = await client.answer()
        if answer.status == 200:
            assert worker.normals == [b"POST /v1/x HTTP/1.1\r\n\r\n[1]"]
        else:
            openai_error(answer, [400])
            assert worker.nothing_came()


async def test_underscores_are_no_dashes(live: Live) -> None:
    """RFC 9110 5.1: a length with an underscore frames nothing."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(POST + b"content_length: 9\r\n\r\n" + get(b"/health"))
        assert (await client.answer()).normal == OK_NORMAL
        assert (await client.answer(b"GET")).body == b'{"status":"ok"}'
    assert [request.body for request in worker.requests] == [b""]


BAD_IN_STREAM = {
    "a chunk's size": b"0x3\r\nabc\r\n" + END,
    "a chunk's end": b"2\r\nabc\r\n" + END,
    "a trailer": b"0\r\nx-t : 1\r\n\r\n",
    "a chunk over 64 bits": b"f" * 17 + b"\r\nabc\r\n" + END,
}


@pytest.mark.parametrize("bad", BAD_IN_STREAM.values(), ids=BAD_IN_STREAM.keys())
async def test_streamed_body_that_turns_bad_is_not_completed(live: Live, bad: bytes) -> None:
    """RFC 9112 8: the worker has its beginning, and must not take that for the whole."""
    got: list[bytes] = []

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.until(b"beginning")
        began.set()
        got.append(await peer.rest())

    began = asyncio.Event()
    async with live.worker(script) as worker, live.client() as client, asyncio.timeout(LIMIT):
        await client.send(
            chunked(chunk(b"beginning"), b"content-type: application/octet-stream"),
        )
        await began.wait()
        await client.send(bad + SMUGGLED)
        rest = await client.rest()
    assert not any(END in piece or b"smuggled" in piece for piece in got)
    assert len(worker.heads) == 1
    if rest:
        openai_error(http_model.read_answer(rest, b"POST", True)[0], [400])


# -- too large

BIG = 70 * 1024
ENDLESS = 400 * 1024
"""Above the limit and whatever is read at once."""
TOO_LONG = {
    "many lines": (get(b"/v1/x", *(b"x-%d: %b" % (n, b"v" * 90) for n in range(BIG // 90))), [431]),
    "one line": (get(b"/v1/x", b"x-a: " + b"v" * BIG), [431]),
    "one line without an end": (POST + b"x-a: " + b"v" * ENDLESS, [431]),
    "one name without an end": (POST + b"n" * ENDLESS, [431]),
    "lines without an end": (POST + b"x-a: 1\r\n" * (ENDLESS // 8), [431]),
    "a target": (get(b"/v1/" + b"t" * BIG), [414, 431]),
    "a target without an end": (b"GET /v1/" + b"t" * ENDLESS, [414, 431]),
    "a query without an end": (b"GET /v1/x?" + b"q" * ENDLESS, [414, 431]),
    "a chunk's extension without an end": (chunked(b"3;" + b"e" * ENDLESS), [400, 413, 431]),
    "trailers without an end": (chunked(chunk(b"[1]") + b"0\r\n" + b"x-t: 1\r\n" * (ENDLESS // 8)), [400, 413, 431]),
    "a trailer without an end": (chunked(chunk(b"[1]") + b"0\r\nx-t: " + b"v" * ENDLESS), [400, 413, 431]),
    "a head of the control plane": (get(b"/health", b"x-a: " + b"v" * BIG), [431]),
}


@pytest.mark.parametrize(("sent", "statuses"), TOO_LONG.values(), ids=TOO_LONG.keys())
@pytest.mark.parametrize("slowly", [False, True], ids=["at once", "slowly"])
async def test_head_that_is_too_long_is_refused(live: Live, sent: bytes, statuses: list[int], slowly: bool) -> None:
    """RFC 6585 5, RFC 9110 15.5.15, RFC 9112 7.1.1"""
    step = 9000 if slowly else len(sent)
    async with live.worker(answers(OK)) as worker, live.client() as client:
        with contextlib.suppress(ConnectionError):
            await client.send(*(sent[at : at + step] for at in range(0, len(sent), step)), pause=0.002)
        answer = await client.answer()
        openai_error(answer, statuses)
        assert await client.closed()
    assert worker.nothing_came()


@pytest.mark.parametrize("size", [1000, 5000])
async def test_limit_of_a_head_is_a_setting(size: int) -> None:
    with Live(max_header_bytes=4096) as live:
        async with live.worker(answers(OK)) as worker, live.client() as client:
            await client.send(get(b"/v1/x", b"x-a: " + b"v" * size))
            assert (await client.answer(b"GET")).status == (200 if size < 4096 else 431)
        assert len(worker.requests) == (size < 4096)


BODY = SMUGGLED * (CAP // len(SMUGGLED) + 2)
"""A body that is too large, and full of requests."""
TOO_LARGE = {
    "declared": post(body=BODY),
    "declared, no JSON": post(b"content-type: application/octet-stream", body=BODY),
    "declared, far too large": POST + b"content-length: 99999999999999\r\n\r\n" + BODY,
    "chunked": chunked(chunk(BODY) + END),
    "chunked, in small pieces": chunked(chunk(SMUGGLED) * (len(BODY) // len(SMUGGLED)) + END),
    "chunked, one piece far too large": chunked(b"fffffffffff\r\n" + BODY),
}


@pytest.mark.parametrize("sent", TOO_LARGE.values(), ids=TOO_LARGE.keys())
async def test_body_that_is_too_large_is_refused(live: Live, sent: bytes) -> None:
    """RFC 9110 15.5.14. None of it is taken for a request."""
    async with live.worker(answers(OK)) as worker, live.client() as client:
        with contextlib.suppress(ConnectionError):
            await client.send(*(sent[at : at + 30_000] for at in range(0, len(sent), 30_000)))
        openai_error(await client.answer(), [413], "request_too_large")
        client.close()
    assert worker.nothing_came()


async def test_streamed_body_that_becomes_too_large_is_not_completed(live: Live) -> None:
    got: list[bytes] = []

    async def script(peer: Peer) -> None:
        await peer.head()
        got.append(await peer.rest())

    async with live.worker(script), live.client() as client:
        await client.send(chunked(b"", b"content-type: application/octet-stream"))
        with contextlib.suppress(ConnectionError):
            await client.send(*[chunk(b"x" * 10_000)] * (CAP // 10_000 + 2), END)
        openai_error(await client.answer(), [413], "request_too_large")
    assert not any(piece.endswith(END) for piece in got)


async def test_body_of_just_the_limit_is_served(live: Live) -> None:
    body = b'"' + b"x" * (CAP - 2) + b'"'
    async with live.worker(answers(OK)) as worker, live.client() as client:
        await client.send(post(body=body))
        assert (await client.answer()).normal == OK_NORMAL
        await client.send(chunked(chunk(body) + END))
        assert (await client.answer()).normal == OK_NORMAL
    assert [request.body for request in worker.requests] == [body] * 2


# -- too slow

PATIENCE = 0.4
KEEP_ALIVE = 1
OCTETS = b"content-type: application/octet-stream\r\n"


class Slow(NamedTuple):
    name: str
    sent: tuple[bytes, ...]
    """Each a fourth of PATIENCE after the one before, and nothing after the last."""
    statuses: tuple[int, ...]
    """Of the answers; then the end."""
    at_least: float
    at_most: float
    """Seconds from the first byte to the end."""


DRIP = tuple(bytes([byte]) for byte in get(b"/v1/drip", b"x-a: " + b"v" * 20))
SLOW = [
    Slow("a part of a head", (POST,), (408,), PATIENCE, PATIENCE + 1),
    Slow("a part of a request line", (b"PO",), (408,), PATIENCE, PATIENCE + 1),
    Slow("a head byte by byte", DRIP, (408,), PATIENCE, PATIENCE + 1),
    Slow("nothing at all", (), (), KEEP_ALIVE * 0.9, KEEP_ALIVE + 1.5),
    Slow("an empty line", (b"\r\n",), (), KEEP_ALIVE * 0.9, KEEP_ALIVE + 1.5),
    Slow("a head after an answer", (post() + POST,), (200, 408), PATIENCE, PATIENCE + 1),
    Slow("nothing after an answer", (post(),), (200,), KEEP_ALIVE * 0.9, KEEP_ALIVE + 1.5),
    Slow("no body", (POST + b"content-length: 9\r\n\r\n",), (408,), PATIENCE, PATIENCE + 1),
    Slow("a part of a body", (POST + b"content-length: 9\r\n\r\n[1",), (408,), PATIENCE, PATIENCE + 1),
    Slow("a chunk", (chunked(b"2\r\n[1"),), (408,), PATIENCE, PATIENCE + 1),
    Slow("a body without an end", (chunked(chunk(b"[1]")),), (408,), PATIENCE, PATIENCE + 1),
    Slow("a streamed body", (chunked(chunk(b"x"), OCTETS[:-2]),), (408,), PATIENCE, PATIENCE + 1),
    Slow(
        "a streamed body of known length",
        (POST + OCTETS + b"content-length: 99999\r\n\r\nx",),
        (408,),
        PATIENCE,
        PATIENCE + 1,
    ),
    Slow(
        "a body that waits for leave",
        (POST + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n",),
        (408,),
        PATIENCE,
        PATIENCE + 1,
    ),
    Slow(
        "a slow body that comes",
        (POST + b"content-length: 6\r\nconnection: close\r\n\r\n", *(b"[1, 2]"[at : at + 1] for at in range(6))),
        (200,),
        PATIENCE * 1.4,
        PATIENCE + 1.5,
    ),
    Slow(
        "a slow body that comes and is streamed",
        (
            POST + OCTETS + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n",
            *[chunk(b"x")] * 5,
            END,
        ),
        (200,),
        PATIENCE * 1.4,
        PATIENCE + 1.5,
    ),
    Slow("a slow worker", (post(b"connection: close", target=b"/v1/slow"),), (200,), PATIENCE * 2, PATIENCE * 2 + 1),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome | Exception]:
    """All rows at once, outside of any test: each is nearly all waiting."""
    with Live(client_head_timeout=PATIENCE, client_body_timeout=PATIENCE, keepalive_timeout=KEEP_ALIVE) as live:
        return asyncio.run(_play(live))


class Outcome(NamedTuple):
    answers: list[Answer]
    took: float


async def _play(live: Live) -> dict[str, Outcome | Exception]:
    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.target == b"/v1/slow":
                await asyncio.sleep(PATIENCE * 2)
            await peer.send(OK)

    async with live.worker(script):
        played = await asyncio.gather(*(_one(live, row) for row in SLOW), return_exceptions=True)
    return dict(zip((row.name for row in SLOW), played, strict=True))  # type: ignore[arg-type]


async def _one(live: Live, row: Slow) -> Outcome:
    clock = asyncio.get_running_loop().time
    async with live.client() as client:
        began = clock()
        sending = asyncio.create_task(client.send(*row.sent, pause=PATIENCE / 4))
        got = await client.rest(limit=row.at_most + 1)
        took = clock() - began
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    read = []
    while got:
        answer, got = http_model.read_answer(got, b"POST", True)
        read.append(answer)
    return Outcome(read, took)


@pytest.mark.parametrize("row", SLOW, ids=[row.name for row in SLOW])
async def test_slow_client_is_given_up(outcomes: dict[str, Outcome | Exception], row: Slow) -> None:
    """RFC 9110 15.5.9. That no worker's connection stays with it is seen when all have ended."""
    outcome = outcomes[row.name]
    assert isinstance(outcome, Outcome), f"neither answered nor closed: {outcome!r}"
    assert tuple(answer.status for answer in outcome.answers) == row.statuses
    assert row.at_least <= outcome.took <= row.at_most
    for answer in outcome.answers:
        assert answer.complete
        if answer.status == 408:
            openai_error(answer, [408])
            assert (answer.get(b"connection") or b"").lower() == b"close"
