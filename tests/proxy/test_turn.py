"""A turn that works, one that is tried again, one whose client is slow or leaves, and the end of a session: exact
messages in, exact bytes out."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from app.fleet.workers import Target
from app.http.client import ClientLimits
from app.http.worker import WorkerConnection
from app.turn.shared import Limits
from backends.base import ClaimValue, OutcomeUnknown, StoreUnavailable
from tests.support.bench import FINAL, JSON, SESSION, Bench, bench
from tests.support.client import Call
from tests.support.fakes import settle
from tests.support.raw import DONE, END, OK, STREAM, Peer, Script, Worker, answers, chunk, still, tells, until

MIB = 1 << 20
NOBODY = (b"x-dynamo-worker-instance-id", b"nobody")
"""A hint that the router refuses."""


def lines(head: bytes) -> list[bytes]:
    return head.split(b"\r\n")


# -- what travels


async def test_request_and_answer_travel_untouched() -> None:
    body = b'{ "model" : "m",\n "messages":[ ] , "x": 1e400}'
    answer = b'{"a" :  1}'
    worker = Worker(answers(b"HTTP/1.1 201 Fine\r\nContent-Type: a/b\r\nContent-Length: 10\r\n\r\n" + answer))
    async with bench(worker) as b:
        client = await b.get(JSON, (b"authorization", b"Bearer k"), body=body, query=b"a=1&b=%20")
        assert (client.status, client.body) == (201, answer)
        assert worker.requests[0].body == body
        assert lines(worker.heads[0]) == [
            b"POST /v1/chat/completions?a=1&b=%20 HTTP/1.1",
            b"host: 127.0.0.1:%d" % worker.port,
            b"content-type: application/json",
            b"authorization: Bearer k",
            b"x-forwarded-for: 127.0.0.1",
            b"x-forwarded-proto: http",
            b"x-forwarded-host: router",
            b"x-request-id: " + client.headers[b"x-request-id"],
            b"content-length: %d" % len(body),
            b"",
            b"",
        ]
        assert client.headers == {
            b"content-type": b"a/b",
            b"content-length": b"10",
            b"x-coatcheck-affinity": b"none",
            b"x-coatcheck-worker": b"w0",
            b"x-request-id": client.headers[b"x-request-id"],
        }
        assert b.outcomes() == {"completed": 1}


async def test_request_id_is_kept_or_made() -> None:
    worker = Worker(answers(OK.replace(b"\r\n\r\n", b"\r\nx-request-id: the worker's\r\n\r\n", 1)))
    async with bench(worker) as b:
        for given in (b"mine", b"a" * 128):
            client = await b.get((b"x-request-id", given))
            assert client.headers[b"x-request-id"] == given
            assert b"x-request-id: " + given in lines(worker.heads[-1])
        made = set()
        for unusable in (None, b"", b"a" * 129, b"\xff"):
            client = await b.get(*([] if unusable is None else [(b"x-request-id", unusable)]))
            made.add(client.headers[b"x-request-id"])
            assert [line for line in lines(worker.heads[-1]) if line.startswith(b"x-request-id")] == [
                b"x-request-id: " + client.headers[b"x-request-id"]
            ]
        assert len(made) == 4


async def test_headers_of_one_connection_end_here() -> None:
    worker = Worker(
        answers(
            b"HTTP/1.1 200 OK\r\nconnection: x-hop\r\nx-hop: 1\r\nkeep-alive: 5\r\nx-coatcheck-worker: lie\r\n"
            b"x-kept: 1\r\ncontent-length: 2\r\n\r\n{}"
        )
    )
    async with bench(worker) as b:
        client = await b.get(
            (b"connection", b"close, X-One"),
            (b"x-one", b"1"),
            (b"connection", b"x-two"),
            (b"x-two", b"2"),
            (b"x-three", b"3"),
            (b"te", b"trailers"),
            (b"transfer-encoding", b"chunked"),
            (b"proxy-authorization", b"secret"),
            (b"expect", b"100-continue"),
        )
        names = {line.partition(b":")[0] for line in lines(worker.heads[0])[1:]}
        ours = {b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-request-id"}
        assert names == {b"", b"host", b"x-three", b"content-length"} | ours
        assert b"x-hop" not in client.headers
        assert b"keep-alive" not in client.headers
        assert client.headers[b"x-kept"] == b"1"
        assert client.headers[b"x-coatcheck-worker"] == b"w0"


@pytest.mark.parametrize(
    ("method", "body", "given", "length"),
    [
        ("GET", b"", [], None),
        ("GET", b"", [(b"content-length", b"0")], b"0"),
        ("DELETE", b"", [], None),
        ("POST", b"", [], b"0"),
        ("PUT", b"ab", [], b"2"),
        ("DELETE", b"ab", [], b"2"),
    ],
)
async def test_length_of_the_request(
    method: str, body: bytes, given: list[tuple[bytes, bytes]], length: bytes | None
) -> None:
    worker = Worker(answers(OK))
    async with bench(worker) as b:
        assert (await b.get(*given, method=method, body=body)).status == 200
        found = [line for line in lines(worker.heads[0]) if line.startswith(b"content-length")]
        assert found == ([] if length is None else [b"content-length: " + length])


async def test_rank_of_the_target_is_told() -> None:
    worker = Worker(answers(OK))
    async with bench(worker) as b:
        b.worker().targets = (Target(b.worker(), 0), Target(b.worker(), 1))
        hints = ((b"x-dynamo-worker-instance-id", b"w0"), (b"x-dynamo-dp-rank", b"0"))
        client = await b.get(SESSION, *hints)
        assert client.headers[b"x-coatcheck-rank"] == b"0"
        assert b"x-data-parallel-rank: 0" in lines(worker.heads[0])
        client = await b.get(SESSION, hints[0], (b"x-dynamo-dp-rank", b"1"))
        assert client.headers[b"x-coatcheck-rank"] == b"0"  # the claim is stronger
        assert b.metrics.hints_overridden.cells[()] == 1


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
    ],
)
async def test_answers_without_a_body(response: bytes) -> None:
    worker = Worker(answers(response))
    async with bench(worker) as b:
        for _ in range(2):
            client = await b.get(method="GET", body=b"")
            assert (client.body, client.complete) == (b"", True)
            assert b"content-length" not in client.headers
        assert len(worker.peers) == (2 if b"content-length" in response else 1)  # a body that was announced may come


@pytest.mark.parametrize(
    "framing", [b"content-length: 1000\r\n", b"transfer-encoding: chunked\r\n", b"", b"content-length: 0\r\n"]
)
async def test_head_ends_at_the_head(framing: bytes) -> None:
    worker = Worker(answers(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n"))
    async with bench(worker) as b:
        client = await b.get(method="HEAD", body=b"")
        assert (client.status, client.body, client.complete) == (200, b"", True)
        assert client.headers.get(b"content-length") == (framing[16:-2] if framing.startswith(b"c") else None)


@pytest.mark.parametrize(("line", "connections"), [(b"content-length: 0\r\n", 1), (b"content-length: 9\r\n", 2)])
async def test_connection_goes_on_after_head_if_no_body_was_announced(line: bytes, connections: int) -> None:
    worker = Worker(answers(b"HTTP/1.1 200 OK\r\n" + line + b"\r\n"))
    async with bench(worker) as b:
        for _ in range(2):
            await b.get(method="HEAD", body=b"")
        assert len(worker.peers) == connections


async def test_answer_to_head_with_a_body_costs_the_connection() -> None:
    script = tells(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * 500)

    worker = Worker(script, answers(OK))
    async with bench(worker) as b:
        assert (await b.get(method="HEAD", body=b"")).complete
        assert (await b.get()).body == b"{}"
        assert len(worker.peers) == 2


async def test_interim_responses_and_trailers_end_here() -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(
                b"HTTP/1.1 100 Continue\r\n\r\n",
                b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-length: 7\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ntrailer: x-t\r\ntransfer-encoding: chunked\r\nx-a: 1\r\n\r\n",
                chunk(b"abc") + b"0\r\nx-t: 1\r\nx-request-id: 2\r\n\r\n",
            )

    worker = Worker(script)
    async with bench(worker) as b:
        for _ in range(2):
            client = await b.get()
            assert (client.status, client.body, client.complete) == (200, b"abc", True)
            assert client.headers.keys() == {b"x-a", b"x-request-id", b"x-coatcheck-affinity", b"x-coatcheck-worker"}
        assert len(worker.peers) == 1


async def test_trailers_that_come_with_the_head_end_here_too() -> None:
    head = b"HTTP/1.1 200 OK\r\ntrailer: x-t\r\ntransfer-encoding: chunked\r\nx-a: 1\r\n\r\n"
    async with bench(answers(head + chunk(b"abc") + b"0\r\nx-t: 1\r\n\r\n")) as b:
        client = await b.get()
        assert client.headers.keys() == {b"x-a", b"x-request-id", b"x-coatcheck-affinity", b"x-coatcheck-worker"}


async def test_interim_and_final_response_in_one_segment() -> None:
    worker = Worker(answers(b"HTTP/1.1 102 Processing\r\n\r\n" * 3 + OK))
    async with bench(worker) as b:
        assert (await b.get()).body == b"{}"
        assert (await b.get()).body == b"{}"


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n"])
async def test_close_delimited_answer_is_complete(head: bytes) -> None:
    async with bench(tells(head + b"\r\n", b"ab", b"cd", stays=False)) as b:
        client = await b.get()
        assert (client.body, client.complete) == (b"abcd", True)
        assert b.outcomes() == {"completed": 1}


async def test_connection_that_the_worker_will_close_is_not_reused() -> None:
    worker = Worker(answers(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)))
    async with bench(worker) as b:
        for _ in range(3):
            assert (await b.get()).complete
        assert len(worker.peers) == 3
        await until(lambda: b.worker().pool.open == 0)


@pytest.mark.parametrize("extra", [OK, b"x", b"\r\n\r\nHTTP/1.1 500 Oops\r\n\r\n"])
@pytest.mark.parametrize("later", [False, True])
async def test_more_than_one_answer_costs_the_connection(extra: bytes, later: bool) -> None:
    """A second answer must never be taken for that of the next request."""

    script = tells(*((OK, extra) if later else (OK + extra,)))

    worker = Worker(script, answers(OK.replace(b"{}", b"[]")))
    async with bench(worker) as b:
        client = await b.get()
        assert (client.status, client.body) == (200, b"{}")
        await until(lambda: b.worker().pool.open == 0)
        assert (await b.get()).body == b"[]"


async def test_answer_before_the_request_was_sent() -> None:
    """An early 4xx: the connection still has our bytes in it and is not used again."""

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")
        await checked.wait()

    checked = asyncio.Event()
    worker = Worker(script, answers(OK))
    async with bench(worker) as b:
        client = b.request(body=b"x" * (32 * MIB)).start()
        await client.finish()
        assert (client.status, client.body) == (413, b"{}")
        assert (await b.get()).status == 200
        assert len(worker.peers) == 2
        checked.set()
        assert b.outcomes() == {"client_error": 1, "completed": 1}


async def test_big_bodies_both_ways() -> None:
    body = bytes(range(256)) * (4 * 1024 * 20)
    answer = body[::-1]

    async def script(peer: Peer) -> None:
        assert (await peer.request()).body == body
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        await peer.gone()

    async with bench(script) as b:
        client = await b.get(body=[body[:MIB], body[MIB:]])
        assert client.body == answer


async def test_huge_headers_are_passed_on() -> None:
    value = b"a" * 60_000
    worker = Worker(answers(b"HTTP/1.1 200 OK\r\nx-big: " + value + b"\r\ncontent-length: 0\r\n\r\n"))
    async with bench(worker) as b:
        client = await b.get((b"x-mine", value))
        assert client.headers[b"x-big"] == value
        assert b"x-mine: " + value in lines(worker.heads[0])


async def test_coded_bodies_are_not_looked_into() -> None:
    worker = Worker(answers(OK))
    async with bench(worker) as b:
        body = gzip.compress(b"{}")
        client = await b.get(JSON, (b"content-encoding", b"gzip"), body=body)
        assert client.status == 200
        assert worker.requests[0].body == body


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_answer_in_the_smallest_pieces(size: int) -> None:
    wire = STREAM + chunk(b"data: a\n\n") + chunk(DONE) + END

    async with bench(tells(*(wire[at : at + size] for at in range(0, len(wire), size)))) as b:
        client = await b.get(SESSION)
        assert (client.body, client.complete) == (b"data: a\n\n" + DONE, True)


# -- tried again


async def answers_once(peer: Peer) -> None:
    """And reads no more: closed by hand."""
    await peer.request()
    await peer.send(OK)
    await asyncio.Event().wait()


def closed_when_taken(b: Bench, worker: Worker) -> Callable[[], WorkerConnection | None]:
    """The worker closes all that is open just before the router uses it, and so unseen by the router."""
    take = b.worker().pool.take

    def taken() -> WorkerConnection | None:
        for peer in worker.peers:
            peer.close()
        return take()

    return taken


async def test_stale_connection_is_tried_once_more_at_the_same_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(answers_once, answers(OK))
    async with bench(worker) as b:
        await b.get(SESSION)
        monkeypatch.setattr(b.worker().pool, "take", closed_when_taken(b, worker))
        client = await b.get(SESSION)
        assert (client.status, client.headers[b"x-coatcheck-affinity"]) == (200, b"cached")
        assert len(worker.peers) == 2
        assert +Counter(b.metrics.retries.cells) == {("stale_connection",): 1}


async def test_stale_retry_uses_a_fresh_connection_not_another_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three idle connections that all went stale cost one retry, not three."""
    gate = asyncio.Event()

    async def once(peer: Peer) -> None:
        await peer.request()
        await gate.wait()
        await peer.send(OK)
        await asyncio.Event().wait()

    worker = Worker(once, once, once, answers(OK))
    async with bench(worker) as b:
        clients = [b.request().start() for _ in range(3)]
        await until(lambda: len(worker.requests) == 3)
        gate.set()
        for client in clients:
            await client.finish()
        assert b.worker().pool.open == 3
        monkeypatch.setattr(b.worker().pool, "take", closed_when_taken(b, worker))
        assert (await b.get()).status == 200
        assert len(worker.peers) == 4
        assert +Counter(b.metrics.retries.cells) == {("stale_connection",): 1}


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("pause", [0.0, 0.02, 0.3])
async def test_request_that_was_read_on_a_kept_connection_is_not_sent_again(end: str, pause: float) -> None:
    """However soon the worker closes, and although it listens still: it may be at work."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await asyncio.sleep(pause)
        peer.reset() if end == "reset" else peer.close()

    worker = Worker(script, answers(OK))
    async with bench(worker) as b:
        await b.get(SESSION)
        client = await b.get(SESSION)
        assert (client.status, client.json["error"]["code"]) == (502, "worker_reset")
        assert "may have read" in client.json["error"]["message"]
        assert worker.carriers == [0, 0]
        assert not +Counter(b.metrics.retries.cells)


async def test_fresh_connection_that_closes_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(peer: Peer) -> None:
        await peer.request()

    worker = Worker(answers_once, never)
    async with bench(worker) as b:
        await b.get()
        monkeypatch.setattr(b.worker().pool, "take", closed_when_taken(b, worker))
        assert (await b.get()).status == 502
        assert len(worker.requests) == 2


async def test_reused_connection_that_breaks_after_a_byte_is_not_tried_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await peer.send(b"H")

    worker = Worker(script)
    async with bench(worker) as b:
        await b.get()
        assert (await b.get()).status == 502
        assert len(worker.requests) == 2


async def test_idle_connection_closed_by_the_worker_leaves_the_pool() -> None:
    once = tells(OK, stays=False)

    worker = Worker(once)
    async with bench(worker) as b:
        for _ in range(3):
            assert (await b.get()).status == 200
            await until(lambda: b.worker().pool.open == 0)
        assert not +Counter(b.metrics.retries.cells)


async def test_idle_connections_are_reaped_oldest_first() -> None:
    gate = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await gate.wait()
        while True:
            await peer.send(OK)
            await peer.request()

    async with bench(script, idle_limit=0.5) as b:
        pool = b.worker().pool
        clients = [b.request().start() for _ in range(3)]
        await until(lambda: pool.open == 3)
        gate.set()
        for client in clients:
            await client.finish()
        assert pool.open == 3
        # One of them is kept busy; the others go although it comes back again and again.
        while pool.open > 1:
            await b.get()
            await asyncio.sleep(0.01)
        await until(lambda: pool.open == 0)


def first(candidates: Any) -> Any:
    return candidates[0]


async def test_unreachable_worker_is_left_for_another() -> None:
    async with Worker(answers(OK)) as dead:
        url = f"http://127.0.0.1:{dead.port}"
    async with bench(url, Worker(answers(OK)), policy=first) as b:
        client = await b.get(SESSION, FINAL)
        assert (client.status, client.headers[b"x-coatcheck-worker"]) == (200, b"w1")
        assert client.headers[b"x-coatcheck-affinity"] == b"rebound"
        assert await b.claim() is None  # the final turn closed the claim that it had moved to
        client = await b.get()
        assert (client.status, client.headers[b"x-coatcheck-worker"]) == (200, b"w1")
        assert b.metrics.retries.cells[("worker_unreachable",)] == 1  # the second turn knew


async def test_turns_count_once_for_load_from_their_placing_to_their_end() -> None:
    """At each step of the loop, whether their claim is made or another replica's stands; and those that leave count no
    more."""
    placed = 0
    over = asyncio.Event()

    def policy(candidates: Any) -> Any:
        nonlocal placed
        placed += 1
        return min(candidates, key=lambda target: (target.load, target.placed))

    async def waits(peer: Peer) -> None:
        await peer.request()
        await over.wait()
        await peer.send(OK)

    async with bench(waits, waits, waits, policy=policy) as b:
        targets = [target for worker in b.fleet for target in worker.targets]
        names = [b"s%d" % number for number in range(40)]
        for name in names[:8]:
            key = b.hasher.key(b"", name)
            await b.store.create_or_get(key, ClaimValue(worker="w0", replica="other"), 60)
        gate = b.store.before["create"] = asyncio.Event()
        clients = [b.request((SESSION[0], name)).start() for name in names]
        await until(lambda: b.store.calls["create"] == len(names) + 8)
        assert placed == len(names) == sum(target.reserved for target in targets)
        gate.set()
        while (under_way := sum(target.in_flight for target in targets)) < len(names):
            assert under_way + sum(target.reserved for target in targets) == len(names)
            await asyncio.sleep(0)
        shares = [target.in_flight for target in targets[1:3]]
        assert max(shares) - min(shares) <= 1, shares
        for client in clients[:10]:
            client.leave()
        await until(lambda: sum(target.load for target in targets) == 30)
        over.set()
        for client in clients:
            await client.finish()
        assert b.outcomes() == {"completed": 30, "aborted": 10}


async def test_turn_without_a_session_moves_too() -> None:
    async with Worker(answers(OK)) as dead:
        url = f"http://127.0.0.1:{dead.port}"
    async with bench(url, Worker(answers(OK)), policy=first) as b:
        client = await b.get()
        assert (client.status, client.headers[b"x-coatcheck-affinity"]) == (200, b"none")


async def test_lost_worker_moves_the_session_without_an_error() -> None:
    async with contextlib.AsyncExitStack() as stack:
        second = await stack.enter_async_context(Worker(answers(OK)))
        async with Worker(answers(OK)) as lost:
            urls = [f"http://127.0.0.1:{worker.port}" for worker in (lost, second)]
            b = await stack.enter_async_context(bench(*urls, policy=first))
            assert (await b.get(SESSION)).headers[b"x-coatcheck-worker"] == b"w0"
        clients = [b.request(SESSION).start() for _ in range(20)]
        for client in clients:
            await client.finish()
        assert {client.status for client in clients} == {200}
        assert {client.headers[b"x-coatcheck-worker"] for client in clients} == {b"w1"}
        claim = await b.claim()
        assert (claim.value.worker, claim.value.generation) == ("w1", 1)


# -- a client that is slow


def drip(total: int, piece: int) -> Callable[[Peer], Any]:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for number in range(total // piece):
            await peer.send(bytes([number % 251]) * piece)
        await peer.gone()

    return script


def dripped(total: int, piece: int) -> bytes:
    return b"".join(bytes([number % 251]) * piece for number in range(total // piece))


EVENT = b"data: %b\n\n" % (b"a" * 300_000)
"""More than the router keeps for a client that does not read."""


async def test_slow_client_stops_the_worker_and_loses_nothing() -> None:
    total, piece = 32 * MIB, 65536
    worker = Worker(drip(total, piece))
    async with bench(worker) as b:
        client = b.request(little=True).start()
        await until(lambda: client.body)
        client.stall()
        await still(lambda: worker.sent)
        assert worker.sent < total
        for _ in range(5):  # and again and again
            client.go_on()
            await asyncio.sleep(0)
            client.stall()
            await asyncio.sleep(0.002)
        client.go_on()
        await client.finish()
        assert client.body == dripped(total, piece)
        assert client.complete
        assert b.outcomes() == {"completed": 1}


async def test_client_takes_a_little_at_a_time() -> None:
    total, piece = MIB, 4096
    async with bench(drip(total, piece)) as b:
        client = b.request(little=True)
        count = 0

        async def pause(_: bytes) -> None:
            nonlocal count
            count += 1
            await asyncio.sleep(0 if count % 2 else 0.0005)

        client.on_data = pause
        await client.finish()
        assert client.body == dripped(total, piece)
        assert client.complete


@pytest.mark.parametrize("final", [False, True])
async def test_failure_while_the_client_is_slow_gives_everything_back_at_once(final: bool) -> None:
    """And the client gets what was sent, and after that the error."""
    event = b"data: %b\n\n" % (b"a" * 1000)

    async def script(peer: Peer) -> None:
        await peer.request()
        # Slowly, so that each is read by itself and the client is full between two.
        await peer.send(STREAM, *[chunk(event)] * 150)
        await peer.gone()

    async with bench(Worker(script), limits=Limits(total=3.0)) as b:
        client = b.request(SESSION, *([FINAL] if final else []), little=True)
        client.stall()
        client.start()
        await until(lambda: b.worker().in_flight)
        await until(lambda: not b.turns)
        assert (b.worker().in_flight, b.affinity.active_turns) == (0, 0)
        await until(lambda: b.worker().pool.open == 0)
        assert b.outcomes() == {"broken": 1}
        assert (await b.claim() is None) is final
        client.go_on()
        await client.finish()
        *first, error = client.events
        assert len(first) > 60
        assert set(first) == {event[:-2]}
        assert b"worker_stalled" in error
        assert not client.complete


async def test_cut_of_an_answer_that_closing_would_end_comes_after_what_was_sent() -> None:
    """Where only a reset says that it is not complete."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 100_000)
        await peer.gone()

    async with bench(script, limits=Limits(total=1.0)) as b:
        client, state = await b.entrance.connect(little=True)
        with contextlib.closing(client):
            await client.send(b"POST /v1/x HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
            await until(lambda: b.outcomes() == {"broken": 1})
            assert state.connections
            body = (await client.rest()).partition(b"\r\n\r\n")[2]
            assert client.ended == "reset"
            assert len(body) > 65536


@pytest.mark.parametrize("wire", [b"HTTP/1.1 200 OK\r\ncontent-length: 33554432\r\n\r\n", STREAM + b"2000000\r\n"])
async def test_client_that_takes_nothing_is_cut_off(wire: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(wire, *[b"a" * 65536] * 512, pause=0)

    async with bench(script, client_limits=ClientLimits(read_wait=0.3)) as b:
        client = b.request(SESSION, little=True)
        client.stall()
        client.start()
        await until(lambda: b.outcomes() == {"aborted": 1})
        assert b.worker().available
        client.go_on()
        await client.finish()
        assert not client.complete


async def test_client_that_takes_no_end_is_cut_off() -> None:
    """Its turn is over, and what it was answered is still here."""
    script = answers(b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n" + b"a" * 60000)
    async with bench(script, client_limits=ClientLimits(read_wait=0.2, idle=60)) as b:
        client, state = await b.entrance.connect(little=True)
        with contextlib.closing(client):
            await client.send(b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
            await until(lambda: b.outcomes() == {"completed": 1})
            await until(lambda: not state.connections)
            _, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert len(body) < 60000, "it was sent all of the answer"


async def test_client_that_takes_little_is_not_cut_off() -> None:
    async with bench(drip(600_000, 4096), client_limits=ClientLimits(read_wait=1.0)) as b:
        client, state = await b.entrance.connect(little=True)
        with contextlib.closing(client):
            await client.send(b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
            await until(lambda: b.worker().in_flight)
            for _ in range(12):
                await asyncio.sleep(0.15)
                await client.exactly(6000)
                client.buffer.clear()
            assert state.connections


@pytest.mark.parametrize("limits", [Limits(idle=0.25), Limits(first_byte=0.25)])
async def test_slow_client_is_not_the_workers_silence(limits: Limits) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(EVENT))
        await going_on.wait()
        await peer.send(chunk(DONE) + END)
        await peer.gone()

    going_on = asyncio.Event()
    async with bench(script, limits=limits) as b:
        client = b.request(little=True)
        client.stall()
        client.start()
        await asyncio.sleep(0.6)
        assert b.turns == 1
        client.go_on()
        going_on.set()
        await client.finish()
        assert (client.body, client.complete) == (EVENT + DONE, True)


async def test_client_leaves_while_it_is_slow() -> None:
    worker = Worker(drip(32 * MIB, 65536))
    async with bench(worker) as b:
        client = b.request(SESSION, little=True).start()
        await until(lambda: client.body)
        client.stall()
        await still(lambda: worker.sent)
        client.leave()
        await client.finish()
        assert b.outcomes() == {"aborted": 1}
        assert not client.complete


# -- a client that leaves


hangs = tells()


hangs_after_head = tells(STREAM)


hangs_in_stream = tells(STREAM + chunk(b"data: a\n\n"))


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("script", [hangs, hangs_after_head, hangs_in_stream])
async def test_client_leaves_while_the_worker_works(script: Callable[[Peer], Any], final: bool) -> None:
    cut = asyncio.Event()

    async def watched(peer: Peer) -> None:
        await script(peer)
        cut.set()

    worker = Worker(watched)
    async with bench(worker) as b:
        client = b.request(SESSION, *([FINAL] if final else [])).start()
        told = {hangs: (0, b""), hangs_after_head: (200, b""), hangs_in_stream: (200, b"data: a\n\n")}[script]
        await until(lambda: worker.requests and (client.status, client.body) == told)
        client.leave()
        await client.finish()
        await asyncio.wait_for(cut.wait(), 5)
        assert b.outcomes() == {"aborted": 1}
        assert b.worker().available
        await until(lambda: not b.affinity.pending_closes)
        assert (await b.claim() is None) is (final or script is hangs)  # a first turn without an answer leaves none
        assert (client.status, client.body) == told


async def test_client_leaves_while_sending_its_body() -> None:
    worker = Worker(answers(OK))
    async with bench(worker) as b:
        client = b.request(SESSION, body=b"{", ends=False).start()
        await asyncio.sleep(0)
        client.leave()
        await client.finish()
        assert b.outcomes() == {"aborted": 1}
        assert not worker.peers
        assert not client.status


@pytest.mark.parametrize("done", [False, True])
async def test_client_leaves_while_its_session_is_bound(done: bool) -> None:
    """Before the store has created the claim, or after, with the reply on its way."""
    worker = Worker(answers(OK))
    gate = asyncio.Event()
    async with bench(worker) as b:
        (b.store.after if done else b.store.before)["create"] = gate
        clients = [b.request(SESSION).start() for _ in range(3)]
        await until(lambda: b.store.calls["create"])
        for client in clients:
            client.leave()
        for client in clients:
            await client.finish()
        assert b.outcomes() == {"aborted": 3}
        assert not worker.peers
        gate.set()
        assert (await b.get(SESSION)).status == 200


@pytest.mark.parametrize("done", [False, True])
async def test_client_leaves_while_its_final_turn_is_bound(done: bool) -> None:
    """What is claimed for it is closed again: nobody else would."""
    worker = Worker(answers(OK))
    gate = asyncio.Event()
    async with bench(worker) as b:
        (b.store.after if done else b.store.before)["create"] = gate
        client = b.request(SESSION, FINAL).start()
        await until(lambda: b.store.calls["create"])
        client.leave()
        await asyncio.sleep(0.01)
        gate.set()
        await client.finish()
        assert b.outcomes() == {"aborted": 1}
        assert not worker.peers
        await until(lambda: not b.affinity.pending_closes)
        assert await b.claim() is None


async def test_client_leaves_while_a_connection_is_made() -> None:
    async with (
        Worker(Peer.gone) as worker,
        bench(f"https://127.0.0.1:{worker.port}", tls=ssl.create_default_context()) as b,
    ):
        client = b.request(SESSION).start()
        await until(lambda: worker.peers)
        assert b.worker().in_flight == 1
        client.leave()
        await client.finish()
        assert b.outcomes() == {"aborted": 1}
        assert b.worker().available


async def test_client_leaves_in_the_step_in_which_the_answer_comes() -> None:
    """At each moment of a turn's life, counted in steps of the loop."""
    for steps in range(40):
        worker = Worker(answers(STREAM + chunk(DONE) + END))
        async with bench(worker) as b:
            client = b.request(SESSION, FINAL).start()
            await until(lambda w=worker: w.requests)  # type: ignore[misc]
            for _ in range(steps):
                await asyncio.sleep(0)
            client.leave()
            await client.finish()
            assert sum(b.outcomes().values()) == 1
            await until(lambda bb=b: not bb.affinity.pending_closes)  # type: ignore[misc]
            assert await b.claim() is None


@pytest.mark.parametrize("steps", [*range(20), 25, 30, 40, 50])
async def test_turn_is_cancelled_at_any_moment(steps: int) -> None:
    """As uvicorn does with turns that outlive the shutdown's limit."""
    async with bench(answers(STREAM + chunk(b"data: a\n\n"))) as b:
        b.store.jitter = lambda: 0
        client = (await b.request(SESSION, FINAL).connect()).start()
        for _ in range(steps):
            await asyncio.sleep(0)
        client.cut()
        client.leave()
        await client.finish()
        assert not client.complete
        await until(lambda: not b.affinity.pending_closes)


@pytest.mark.parametrize("steps", range(8))
async def test_bound_session_is_given_back_when_the_turn_is_cancelled_in_the_same_step(steps: int) -> None:
    """Whichever of the two comes first: in one of these steps both are on their way."""
    async with bench(hangs) as b:
        gate = b.store.hold("create")
        client = b.request(SESSION).start()
        await until(lambda: b.store.calls["create"])
        gate.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        client.cut()
        await client.finish()
        assert client.answer is None
        await until(lambda: b.affinity.active_turns == 0)


# -- the end of a session


async def final_turn(script: Script, check: Callable[[Call, Bench], Any]) -> None:
    """Runs a final turn whose close is held, calls `check` once the close is asked for, and lets it be done."""
    async with bench(script) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL).start()
        await until(lambda: b.store.calls["close"])
        await asyncio.sleep(0.005)
        await check(client, b)
        gate.set()
        await client.finish()
        assert client.complete
        assert await b.claim() is None


@pytest.mark.parametrize("more", [True, False])
async def test_done_marker_waits_for_the_close(more: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"), chunk(DONE) + (b"" if more else END))
        if more:
            await until(lambda: seen)
            await peer.send(END)
        await peer.gone()

    seen: list[bytes] = []

    async def check(client: Call, b: Bench) -> None:
        seen.append(client.body)
        assert await b.claim() is not None

    await final_turn(script, check)
    assert seen == [b"data: a\n\n"]


async def split_at(at: int, wire: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(wire[:at]))
        await until(lambda: client.body or b.store.calls["close"])
        await peer.send(chunk(wire[at:]) + END)
        await peer.gone()

    async with bench(script) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL).start()
        await until(lambda: b.store.calls["close"])
        assert b"[DONE]" not in client.body
        gate.set()
        await client.finish()
        assert (client.body, client.complete) == (wire, True)


@pytest.mark.parametrize("marker", [b"data: [DONE]", b"data:[DONE]"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_marker_split_anywhere_is_held(marker: bytes, newline: bytes) -> None:
    wire = b"data: a" + newline * 2 + marker + newline * 2
    for at in range(1, len(wire)):
        await split_at(at, wire)


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
async def test_end_of_an_answer_waits_for_the_close(wire: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(wire + b"ab")
        await until(lambda: client_body())
        await peer.send(b"cd" + (b"\r\n0\r\n\r\n" if b"chunked" in wire else b""))
        if wire[-4:] != b"\r\n\r\n" or b"length" in wire:
            await peer.gone()

    clients: list[Call] = []

    def client_body() -> bytes:
        return clients[0].body

    async with bench(script) as b:
        gate = b.store.hold("close")
        clients.append(b.request(SESSION, FINAL).start())
        await until(lambda: b.store.calls["close"])
        await asyncio.sleep(0.005)
        assert not clients[0].complete
        gate.set()
        await clients[0].finish()
        assert (clients[0].body, clients[0].complete) == (b"abcd", True)


async def test_answer_without_body_waits_for_the_close() -> None:
    async def check(client: Call, b: Bench) -> None:
        assert not client.complete

    await final_turn(answers(b"HTTP/1.1 204 No Content\r\n\r\n"), check)


async def test_error_event_waits_for_the_close() -> None:
    async with bench(tells(STREAM + chunk(b"data: a\n\n"), stays=False)) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL).start()
        await until(lambda: b.store.calls["close"])
        await asyncio.sleep(0.005)
        assert client.body == b"data: a\n\n"
        gate.set()
        await client.finish()
        assert b"worker_stream_broken" in client.body
        assert await b.claim() is None


async def test_close_that_hangs_holds_the_end_only_so_long() -> None:
    async with bench(answers(STREAM + chunk(DONE) + END), close_limit=0.05) as b:
        gate = b.store.hold("close")
        client = await b.get(SESSION, FINAL)
        assert (client.body, client.complete) == (DONE, True)
        assert b.affinity.pending_closes == 1
        gate.set()
        await until(lambda: not b.affinity.pending_closes)
        assert await b.claim() is None


@pytest.mark.parametrize("fault", [StoreUnavailable("no"), OutcomeUnknown("late")])
async def test_close_that_fails_is_tried_on(fault: Exception) -> None:
    async with bench(answers(OK)) as b:
        b.store.next_faults["close"] = deque([fault])
        client = await b.get(SESSION, FINAL)
        assert client.complete
        assert await b.claim() is None


def after_one(script: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    """A first turn that goes well, and then what the script says."""

    async def played(peer: Peer) -> None:
        if not peer.number:
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            await script(peer)

    return played


@pytest.mark.parametrize(
    ("status", "kept"),
    [(s, False) for s in (200, 204, 400, 401, 404, 413, 422)]
    + [(s, True) for s in (408, 409, 425, 429, 500, 502, 503, 529)],
)
async def test_which_answers_end_a_session(status: int, kept: bool) -> None:
    async with bench(after_one(answers(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status))) as b:
        await b.get(SESSION)
        client = await b.get(SESSION, FINAL)
        assert client.status == status
        assert (await b.claim() is not None) is kept


@pytest.mark.parametrize("script", [hangs, answers(b"garbage\r\n\r\n")])
async def test_no_answer_keeps_the_session(script: Callable[[Peer], Any]) -> None:
    async with bench(after_one(script), limits=Limits(first_byte=2.0)) as b:
        assert (await b.get(SESSION)).status == 200
        assert (await b.get(SESSION, FINAL)).status in (502, 504)
        assert await b.claim() is not None


async def test_final_turn_that_is_refused_for_good_ends_its_session() -> None:
    """The client will not send it again."""
    async with bench(answers(OK)) as b:
        await b.get(SESSION)
        assert (await b.get(SESSION, NOBODY)).status == 400
        assert await b.claim() is not None
        assert (await b.get(SESSION, FINAL, NOBODY)).status == 400
        assert await b.claim() is None


async def test_last_turn_out_closes_before_its_own_end() -> None:
    go: dict[int, asyncio.Event] = {1: asyncio.Event(), 2: asyncio.Event()}

    async def script(peer: Peer) -> None:
        await peer.request()
        mine = go[peer.number + 1]
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        await mine.wait()
        await peer.send(chunk(DONE) + END)
        await peer.gone()

    async with bench(script) as b:
        final = b.request(SESSION, FINAL).start()
        await until(lambda: final.body)
        other = b.request(SESSION).start()
        await until(lambda: other.body)
        go[1].set()
        await final.finish()
        assert final.complete
        assert await b.claim() is not None  # the other one is still here
        gate = b.store.hold("close")
        go[2].set()
        await until(lambda: b.store.calls["close"])
        await asyncio.sleep(0.005)
        assert other.body == b"data: a\n\n"
        gate.set()
        await other.finish()
        assert other.complete
        assert await b.claim() is None


async def test_turn_that_has_joined_at_the_marker_and_leaves_before_the_end() -> None:
    """The marker passes, since another turn is there; when that is gone the end is held, and comes after the close."""
    marker, end, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n"))
        await marker.wait()
        await peer.send(chunk(DONE))
        await end.wait()
        await peer.send(END)
        await peer.gone()

    async def joins(peer: Peer) -> None:
        await peer.request()
        await over.wait()
        await peer.send(OK)
        await peer.gone()

    worker = Worker(script, joins)
    async with bench(worker) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL).start()
        await until(lambda: client.body)
        other = b.request(SESSION).start()
        await until(lambda: len(worker.requests) == 2)
        marker.set()
        await until(lambda: client.body == b"data: a\n\n" + DONE)
        over.set()
        await other.finish()
        assert not b.store.calls["close"]
        end.set()
        await until(lambda: b.store.calls["close"])
        await asyncio.sleep(0.005)
        assert not client.complete
        gate.set()
        await client.finish()
        assert client.complete
        assert await b.claim() is None


async def test_data_that_comes_while_the_claim_is_closed_stays_in_order() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n" + DONE))
        await until(lambda: b.store.calls["close"])
        await peer.send(chunk(b": more\n\n"), chunk(b": and more\n\n"), END)
        await peer.gone()

    async with bench(script) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL).start()
        await until(lambda: b.store.calls["close"])
        await asyncio.sleep(0.02)
        assert client.body == b""
        gate.set()
        await client.finish()
        assert client.body == b"data: a\n\n" + DONE + b": more\n\n: and more\n\n"
        assert client.complete


async def test_failure_while_the_claim_is_closed() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: a\n\n" + DONE))
        await until(lambda: b.store.calls["close"])
        peer.reset()

    async with bench(script) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL).start()
        await until(lambda: b.store.calls["close"])
        await until(lambda: b.worker().pool.open == 0)
        gate.set()
        await client.finish()
        assert client.body == b"data: a\n\n" + DONE
        assert client.complete  # as it is by the marker
        assert b.outcomes() == {"completed": 1}


@pytest.mark.parametrize(
    ("held", "outcome"), [(b"", "aborted"), (chunk(EVENT), "aborted"), (chunk(EVENT) + END, "completed")]
)
async def test_client_leaves_while_its_claim_is_closed(held: bytes, outcome: str) -> None:
    """Or afterwards, while it is slow to take what was held; whether it takes the very end nobody can tell."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(DONE))
        await until(lambda: b.store.calls["close"])
        await peer.send(held)
        came.set()
        await peer.gone()

    came = asyncio.Event()
    async with bench(script) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL, little=True)
        client.stall()
        client.start()
        await came.wait()
        await asyncio.sleep(0.02)
        if held:
            gate.set()
            await asyncio.sleep(0.02)
            assert b.turns == (outcome == "aborted")
        client.leave()
        await asyncio.sleep(0.01)
        gate.set()
        await client.finish()
        assert b.outcomes() == {outcome: 1}
        assert await b.claim() is None


async def test_slow_client_gets_the_held_end() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(DONE))
        await until(lambda: b.store.calls["close"])
        await peer.send(chunk(EVENT))
        await released.wait()
        await peer.send(chunk(b": tail\n\n") + END)
        await peer.gone()

    released = asyncio.Event()
    worker = Worker(script)
    async with bench(worker) as b:
        gate = b.store.hold("close")
        client = b.request(SESSION, FINAL, little=True)
        client.stall()
        client.start()
        await until(lambda: worker.sent > len(EVENT))
        await asyncio.sleep(0.02)
        gate.set()
        await until(lambda: not b.affinity.pending_closes)
        released.set()
        await asyncio.sleep(0.01)
        client.go_on()
        await client.finish()
        assert (client.body, client.complete) == (DONE + EVENT + b": tail\n\n", True)


# -- sessions through the proxy


async def test_what_the_affinity_header_says() -> None:
    async with bench(answers(OK), answers(OK)) as b:

        async def how(*headers: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
            client = await b.get(*headers)
            return client.headers[b"x-coatcheck-affinity"], client.headers[b"x-coatcheck-worker"]

        assert (await how())[0] == b"none"
        outcome, worker = await how(SESSION)
        assert outcome == b"created"
        assert await how(SESSION) == (b"cached", worker)
        b.store.drop_watch()
        await settle()
        assert await how(SESSION) == (b"stored", worker)
        b.store.go_away()
        outcome, worker = await how((b"session-id", b"other"))
        assert outcome == b"degraded"
        assert await how((b"session-id", b"other")) == (b"degraded", worker)
        counted = b.metrics.affinity.cells
        assert counted == {
            ("none",): 1,
            ("created",): 1,
            ("cached",): 1,
            ("stored",): 1,
            ("degraded",): 2,
            ("rebound",): 0,
            ("bypassed",): 0,
        }


async def test_hint_without_a_session_places_the_turn() -> None:
    async with bench(answers(OK), answers(OK)) as b:
        for name in (b"w1", b"w0", b"w1"):
            client = await b.get((b"x-dynamo-worker-instance-id", name))
            assert client.headers[b"x-coatcheck-worker"] == name


async def test_many_turns_of_everything_leave_nothing() -> None:
    """Two hundred turns of ten sessions at two workers that misbehave in turns; clients that leave."""
    count = 0

    async def moody(peer: Peer) -> None:
        nonlocal count
        while True:
            await peer.request()
            count += 1
            match count % 7:
                case 0:
                    return
                case 1:
                    await peer.send(STREAM + chunk(b"data: a\n\n"))
                    return
                case 2:
                    await peer.send(STREAM + chunk(b"data: a\n\n"), chunk(DONE), END)
                case 3:
                    peer.reset()
                    return
                case 4:
                    await peer.send(b"HTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n")
                case _:
                    await peer.send(OK)

    async with bench(moody, moody) as b:
        clients = []
        for number in range(200):
            headers = [(b"session-id", b"s%d" % (number % 10))] + ([FINAL] if number % 5 == 0 else [])
            clients.append(b.request(*headers).start())
            if number % 3 == 0:
                clients[number // 2].leave()
            await asyncio.sleep(0)
        for client in clients:
            await client.finish()
        assert sum(b.outcomes().values()) == 200
        await until(lambda: not b.affinity.pending_closes)
