"""The clients of `benchmarks.soak`, in a process of their own: `python -m benchmarks.soak_load PORT SECONDS REPORT`.

Well-behaved clients check every answer; others leave at any moment, read slowly, or send what is wrong. The file REPORT
tells in the end what they did and what they did not expect; which of that was provoked, by the loss of a worker, is for
the reader to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httptools
import msgspec
import uvloop

ANSWER_LIMIT_S = 60.0
MOST_ERRORS = 500
BIG_BODY = 400_000
TEXT = "Which of the three coats on this hook is mine, and since when has it been there? "
STREAM_TOKENS = (20, 200)
SLOW_TOKENS = 1500
SLOW_BUFFER = 4096
"""Of the socket, so that what is not read waits in the router and at the worker."""


class Unexpected(msgspec.Struct, frozen=True):
    """What a client did not expect, by the monotonic clock, which all processes of a machine share."""

    client: str
    worker: str
    """That of the answer, if it said so."""
    begin: float
    end: float
    what: str


class Report(msgspec.Struct):
    turns: dict[str, int]
    unexpected: list[Unexpected]
    others: int
    """Beyond the first `MOST_ERRORS`."""


class Failed(Exception):
    """Of an answer, or of its absence."""


class Answer:
    """What has come of one. Its callbacks are the parser's."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True

    @property
    def worker(self) -> str:
        return self.headers.get(b"x-coatcheck-worker", b"").decode()

    def check(self, stream: bool) -> None:
        """Raises Failed unless it is a whole and good one."""
        if not self.complete:
            raise Failed(f"cut after {len(self.body)} bytes of status {self.status}: {self._tail()}")
        if self.status != 200:
            raise Failed(f"status {self.status}: {self._tail()}")
        if stream and (b"data: [DONE]" not in self.body[-100:] or b'"error"' in self.body):
            raise Failed(f"a stream without its end: {self._tail()}")
        if not stream and b'"choices"' not in self.body:
            raise Failed(f"not a completion: {self._tail()}")

    def _tail(self) -> str:
        return bytes(self.body[-200:]).decode(errors="replace")


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read(self, answer: Answer, size: int = 65536) -> bool:
        """A piece of the answer; whether there is more."""
        data = await self.reader.read(size)
        if not data:
            return False
        answer.parser.feed_data(data)
        return not answer.complete

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


class Soak:
    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self._end_at = time.monotonic() + seconds
        self._numbers = itertools.count()
        self._turns: Counter[str] = Counter()
        self._unexpected: list[Unexpected] = []
        self._others = 0

    async def run(self) -> Report:
        clients: list[tuple[Callable[[], Awaitable[None]], int, float]] = [
            # one's life, how many of them, seconds between its turns
            (self.whole_answers, 4, 0.1),
            (self.streams, 8, 0.2),
            (self.conversations, 6, 0.3),
            (self.big_bodies, 2, 0.7),
            (self.leavers, 6, 0.2),
            (self.slow_readers, 2, 1.0),
            (self.wrong_requests, 2, 0.3),
        ]
        async with asyncio.TaskGroup() as group:
            for client, count, pause in clients:
                for _ in range(count):
                    group.create_task(self._live(client, pause))
        return Report(dict(self._turns), self._unexpected, self._others)

    async def _live(self, client: Callable[[], Awaitable[None]], pause: float) -> None:
        await asyncio.sleep(random.random() * pause)
        while time.monotonic() < self._end_at:
            await client()
            await asyncio.sleep(random.uniform(0.5, 1.5) * pause)

    # Clients that behave

    async def whole_answers(self) -> None:
        async with self._connection() as connection:
            for _ in range(random.randint(1, 20)):
                if not await self._good_turn("whole answers", connection):
                    return
                await asyncio.sleep(0.05)

    async def streams(self) -> None:
        async with self._connection() as connection:
            await self._good_turn("streams", connection, tokens=random.randint(*STREAM_TOKENS), stream=True)

    async def conversations(self) -> None:
        """Some sessions are ended by their final turn, the others by time."""
        session = f"soak-{next(self._numbers)}"
        turns = random.randint(2, 6)
        begin, before = time.monotonic(), ""
        for number in range(turns):
            final = number == turns - 1 and random.random() < 0.7
            headers = f"x-dynamo-session-id: {session}\r\n" + ("x-dynamo-session-final: true\r\n" if final else "")
            async with self._connection() as connection:
                stream = random.random() < 0.5
                worker = await self._good_turn("conversations", connection, headers, tokens=20, stream=stream)
            if worker and before and worker != before:
                self._note("conversations", before, begin, f"moved to {worker}")
                begin = time.monotonic()
            before = worker or before
            await asyncio.sleep(random.random() * 0.2)

    async def big_bodies(self) -> None:
        """Some come in pieces, and some of those without their length."""
        chunked = random.random() < 0.3
        request = _request(body=_body(prompt=BIG_BODY), chunked=chunked)
        async with self._connection() as connection:
            pieces = random.choice((1, 1, 10))
            size = len(request) // pieces + 1
            await self._good_turn(
                "big bodies", connection, pieces=[request[at : at + size] for at in range(0, len(request), size)]
            )

    async def slow_readers(self) -> None:
        """They read nothing for seconds while their stream goes on, and find all of it in the end."""
        async with self._connection(buffer=SLOW_BUFFER) as connection:
            await self._good_turn(
                "slow readers", connection, tokens=SLOW_TOKENS, stream=True, stalls=random.uniform(1, 6)
            )

    async def _good_turn(
        self,
        client: str,
        connection: Connection | None,
        headers: str = "",
        *,
        tokens: int = 5,
        stream: bool = False,
        pieces: list[bytes] | None = None,
        stalls: float = 0.0,
    ) -> str:
        """The worker's name, or nothing where it failed, which is noted."""
        begin, answer = time.monotonic(), Answer()
        try:
            if connection is None:
                raise Failed("cannot connect")
            async with asyncio.timeout(ANSWER_LIMIT_S):
                for piece in pieces or [_request(headers, _body(tokens=tokens, stream=stream))]:
                    connection.writer.write(piece)
                    await connection.writer.drain()
                    await asyncio.sleep(0.02 if pieces and len(pieces) > 1 else 0)
                more = await connection.read(answer, 1024)
                if stalls:
                    await asyncio.sleep(stalls)
                while more:
                    more = await connection.read(answer)
            answer.check(stream)
        except (OSError, Failed, TimeoutError, httptools.HttpParserError) as error:
            self._note(client, answer.worker, begin, repr(error))
            return ""
        self._turns[client] += 1
        return answer.worker

    # Clients that do not

    async def leavers(self) -> None:
        """They leave at any moment: amid the request, before the answer, within it, with a session and without."""
        tokens, stream = random.randint(5, 200), random.random() < 0.7
        headers = ""
        if random.random() < 0.5:
            headers = f"x-dynamo-session-id: left-{next(self._numbers)}\r\n"
            if random.random() < 0.3:
                headers += "x-dynamo-session-final: true\r\n"
        request = _request(headers, _body(tokens=tokens, stream=stream))
        if random.random() < 0.2:
            request = request[: random.randrange(1, len(request))]
        begin, answer = time.monotonic(), Answer()
        async with self._connection() as connection:
            if connection is None:
                return
            connection.writer.write(request)
            with contextlib.suppress(TimeoutError, OSError, httptools.HttpParserError):
                async with asyncio.timeout(random.random()):
                    while await connection.read(answer):
                        pass
            if answer.status not in (0, 200):
                self._note("leavers", answer.worker, begin, f"status {answer.status}")
            if random.random() < 0.5:
                connection.reset()
        self._turns["leavers"] += 1

    async def wrong_requests(self) -> None:
        session = "x-dynamo-session-id: "
        wrong: list[tuple[bytes, tuple[int, ...]]] = [
            (_request(body=b"{not json"), (200, 400)),
            (_request(body=b""), (200, 400)),
            (_request(f"{session}{'x' * 300}\r\n"), (400,)),
            (_request(f"{session}one\r\n{session}other\r\n"), (400,)),
            (_request("x-dynamo-worker-instance-id: 12345\r\n"), (400,)),
            (_request(path="/nothing"), (404,)),
            (_request(path="/v1/nothing"), (404,)),
            (_request(method="PUT"), (404, 405)),
            (b"NOT HTTP AT ALL\r\n\r\n", (400,)),
            (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", (413,)),
            (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", (400,)),
        ]
        request, statuses = random.choice(wrong)
        begin, answer = time.monotonic(), Answer()
        async with self._connection() as connection:
            if connection is None:
                return
            connection.writer.write(request)
            with contextlib.suppress(TimeoutError, OSError, httptools.HttpParserError):
                async with asyncio.timeout(5):
                    while await connection.read(answer):
                        pass
        if answer.status not in statuses:
            self._note("wrong requests", answer.worker, begin, f"status {answer.status} to {request[:120]!r}")
        self._turns["wrong requests"] += 1

    # What they share

    @contextlib.asynccontextmanager
    async def _connection(self, buffer: int = 0) -> AsyncIterator[Connection | None]:
        """None where it cannot be opened."""
        connection = None
        with contextlib.suppress(OSError):
            raw = socket.socket()
            raw.setblocking(False)
            if buffer:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self._port))
            connection = Connection(*await asyncio.open_connection(sock=raw, limit=buffer or 65536))
        try:
            yield connection
        finally:
            if connection is not None:
                connection.close()

    def _note(self, client: str, worker: str, begin: float, what: str) -> None:
        if len(self._unexpected) < MOST_ERRORS:
            self._unexpected.append(Unexpected(client, worker, begin, time.monotonic(), what))
        else:
            self._others += 1


def _body(*, tokens: int = 5, stream: bool = False, prompt: int = 200) -> bytes:
    content = (TEXT * (prompt // len(TEXT) + 1))[:prompt]
    fields = {"model": "mock-model", "max_tokens": tokens, "messages": [{"role": "user", "content": content}]}
    return json.dumps(fields | ({"stream": True} if stream else {})).encode()


def _request(
    headers: str = "",
    body: bytes | None = None,
    *,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    chunked: bool = False,
) -> bytes:
    body = _body() if body is None else body
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return f"{method} {path} HTTP/1.1\r\nhost: router\r\n{headers}{framing}\r\n\r\n".encode() + body


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(Soak(int(sys.argv[1]), float(sys.argv[2])).run())
    Path(sys.argv[3]).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
