"""Agents that talk to a fleet, as their clients see it: real requests, streamed, and what each turn found there.

Each turn is a chat completion on a connection of its own. What was cached is what the answer's usage says, the time to
first token is from the connection's opening to the first piece of text, and where a turn was is told by the worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httptools
import msgspec

from mocker.cache import TOKEN_BYTES
from mocker.traces import Session, Turn

Address = tuple[str, int]

MODEL = "mock-model"
WORKER_HEADER = "x-mock-worker"
"""By which mock workers tell their names."""
_TRIES = 3
"""Of a turn, as many as clients make by themselves."""
_RETRY = 0.4
"""Seconds between two."""
_LIMIT = 60.0
"""Seconds for a turn."""
_SAID = re.compile(rb'"(?:content|text)":"[^"]')
_POINTS = 64


@dataclass(slots=True)
class Served:
    """One turn, or a try of one that failed. Times in seconds since the load began."""

    session: str
    at: float
    ended: float = 0.0
    first_token: float = 0.0
    """From `at`."""
    worker: str = ""
    prompt: int = 0
    cached: int = 0
    """Tokens, as the worker says."""
    trouble: str = ""
    """Why it failed; empty: it did not."""


class Entrance(Protocol):
    """Where turns enter."""

    def addresses(self, session: str, body: bytes) -> Iterable[Address]:
        """To try for a turn of a session that asks for `body`, one after the other until one can be connected to."""


class InTurn:
    """Several that are alike, one after the other: what a plain balancer makes of replicas."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = list(addresses)
        self._turns = 0

    def addresses(self, session: str, body: bytes) -> list[Address]:
        self._turns += 1
        first = self._turns % len(self._addresses)
        return self._addresses[first:] + self._addresses[:first]


class ByHash:
    """Each session's own, by consistent hashing: a ring with many points for each address, as nginx and HAProxy do it.
    The session goes on to the next one on the ring while its own is not up, and back as soon as it is."""

    def __init__(self, addresses: Sequence[Address], is_up: Callable[[Address], bool]) -> None:
        self._is_up = is_up
        self._ring = sorted((_place(f"{each} {point}"), each) for each in addresses for point in range(_POINTS))

    def addresses(self, session: str, body: bytes) -> Iterator[Address]:
        begin = bisect_left(self._ring, (_place(session), ("", 0)))
        order = dict.fromkeys(each for _, each in (*self._ring[begin:], *self._ring[:begin]))
        return (each for each in order if self._is_up(each))


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Load:
    """The sessions, from now on."""

    def __init__(
        self,
        sessions: Iterable[Session],
        entrance: Entrance,
        *,
        seconds: float,
        seed: int,
        block_size: int,
        headers: Callable[[str, bool], dict[str, str]],
        members: Callable[[str], dict[str, Any]] = lambda session: {},
    ) -> None:
        """Turns begin within `seconds`. `headers`: what says a turn's session, and whether it is the last one;
        `members`: what its body says of it."""
        self._sessions = sessions
        self._entrance = entrance
        self._seconds = seconds
        self._seed = seed
        self._block_size = block_size
        self._headers, self._members = headers, members
        self._began = 0.0
        self.served: list[Served] = []
        """As they end."""

    @property
    def now(self) -> float:
        """Seconds since it began; 0 before."""
        return asyncio.get_running_loop().time() - self._began if self._began else 0.0

    async def run(self) -> None:
        """Until the last turn has ended."""
        self._began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for session in self._sessions:
                if session.start >= self._seconds:
                    break
                await asyncio.sleep(session.start - self.now)
                group.create_task(self._talk(session))

    async def _talk(self, session: Session) -> None:
        conversation = _Conversation(session, self._seed, self._block_size)
        for turn in session.turns:
            if self.now + turn.after >= self._seconds:
                return  # nobody need wait for what will not be asked
            await asyncio.sleep(turn.after)
            body = conversation.ask(turn, self._members(session.name))
            headers = self._headers(session.name, turn is session.turns[-1])
            answer = await self._insist(session.name, body, headers)
            if answer is None:
                return
            conversation.hear(answer)
            async with asyncio.TaskGroup() as children:
                for child in turn.children:
                    children.create_task(self._talk(child))

    async def _insist(self, session: str, body: bytes, headers: dict[str, str]) -> str | None:
        """The answer; None when the client has given up."""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_RETRY)
            served = Served(session, self.now)
            try:
                async with asyncio.timeout(_LIMIT):
                    text = await self._ask(served, body, headers)
            except (OSError, TimeoutError) as error:
                served.trouble = str(error) or "no answer in time"
                text = None
            served.ended = self.now
            self.served.append(served)
            if text is not None:
                return text
        return None

    async def _ask(self, served: Served, body: bytes, headers: dict[str, str]) -> str | None:
        """Raises OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        exchange = None
        for host, port in self._entrance.addresses(served.session, body):
            try:
                _, exchange = await loop.create_connection(lambda: _Exchange(loop), host, port)
                break
            except ConnectionError:
                continue
        if exchange is None:
            raise ConnectionError("nobody can be connected to")
        try:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n{lines}"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            exchange.send(head.encode() + body)
            await exchange.ended
        finally:
            exchange.close()
        served.worker = exchange.headers.get(WORKER_HEADER, "")
        if exchange.status != 200:
            served.trouble = f"status {exchange.status}"
            return None
        if exchange.first is None:
            served.trouble = "an answer without text"
            return None
        served.first_token = exchange.first - self._began - served.at
        text, usage, error = _read(bytes(exchange.body))
        if error:
            served.trouble = error
            return None
        served.prompt = usage.get("prompt_tokens", 0)
        served.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return text


class _Conversation:
    """What is said in a session, in as many tokens as its turns say, and alike where prompts are to be alike."""

    def __init__(self, session: Session, seed: int, block_size: int) -> None:
        system = _text(f"{seed} {session.chain[0]}", session.chain.shared * block_size * TOKEN_BYTES)
        self._name = f"{seed} {session.name}"
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, turn: Turn, members: Mapping[str, Any] = {}) -> bytes:
        length = sum(len(each["content"]) + 30 for each in self._messages)  # with what a template puts around
        text = _text(f"{self._name} {len(self._messages)}", max(8, turn.prompt * TOKEN_BYTES - length - 50))
        self._messages.append({"role": "user", "content": text})
        asked = {"model": MODEL, "messages": self._messages, "max_tokens": turn.answer, "stream": True}
        return msgspec.json.encode({**asked, "stream_options": {"include_usage": True}, **members})

    def hear(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


def _text(of: str, length: int) -> str:
    return hashlib.shake_128(of.encode()).hexdigest((length + 1) // 2)[:length]


def _read(body: bytes) -> tuple[str, dict[str, Any], str]:
    """What a stream has said, its usage, and what went wrong in it."""
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    done = False
    for line in body.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = msgspec.json.decode(data)
        if "error" in event:
            return "", {}, str(event["error"].get("message", "an error in the stream"))
        usage = event.get("usage") or usage
        pieces += (choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
    return "".join(pieces), usage, "" if done else "the stream has no end"


class _Exchange(asyncio.Protocol):
    """One request and its answer. `ended` raises OSError when the connection ends before the answer does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.first: float | None = None
        """When the first text came."""

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()
        if not self.ended.done():
            self.ended.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the connection broke")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.body += piece
        if self.first is None and _SAID.search(piece):
            self.first = self._loop.time()

    def on_message_complete(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(why))


def session_headers(session: str, last: bool) -> dict[str, str]:
    """What says a turn's session to coatcheck, and to Dynamo."""
    return {"X-Dynamo-Session-ID": session, **({"X-Dynamo-Session-Final": "true"} if last else {})}


def no_headers(session: str, last: bool) -> dict[str, str]:
    return {}


# --- what came of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """Of some turns."""

    turns: int
    """That were served."""
    failed: int
    cut_by_worker: int
    """Failed turns that were under way when a worker was killed."""
    cut_by_replica: int
    """The same for a replica."""
    cached_share: float
    p50: float
    p95: float
    p99: float
    sessions: int
    moved_needlessly: int
    """Sessions that had a turn at another worker than before, while the one before was there."""
    moved_on_loss: int
    """Sessions that had, because it was killed."""


def figures(
    served: Sequence[Served], losses: Sequence[tuple[str, float]], replica_losses: Sequence[float] = ()
) -> Figures:
    """`losses`: workers that were killed, and when; `replica_losses`: when replicas were."""
    good = [each for each in served if not each.trouble]
    first = sorted(each.first_token for each in good)
    prompt = sum(each.prompt for each in good)
    needlessly, on_loss = moves(served, losses)
    return Figures(
        turns=len(good),
        failed=len(served) - len(good),
        cut_by_worker=_cut(served, [at for _, at in losses]),
        cut_by_replica=_cut(served, replica_losses),
        cached_share=sum(each.cached for each in good) / prompt if prompt else 0.0,
        p50=quantile(first, 0.5),
        p95=quantile(first, 0.95),
        p99=quantile(first, 0.99),
        sessions=len({each.session for each in served}),
        moved_needlessly=len(needlessly),
        moved_on_loss=len(on_loss),
    )


def _cut(served: Sequence[Served], at: Iterable[float]) -> int:
    """Turns that failed, and were under way at one of these times."""
    times = list(at)
    return sum(any(each.at <= time <= each.ended for time in times) for each in served if each.trouble)


def moves(served: Sequence[Served], losses: Sequence[tuple[str, float]]) -> tuple[set[str], set[str]]:
    """The sessions that moved without need, and those that moved since their worker was killed."""
    needlessly: set[str] = set()
    on_loss: set[str] = set()
    last: dict[str, Served] = {}
    for each in sorted((each for each in served if not each.trouble), key=lambda each: each.at):
        before = last.get(each.session)
        last[each.session] = each
        if before is None or before.worker == each.worker:
            continue
        lost = any(worker == before.worker and before.at <= at <= each.ended for worker, at in losses)
        (on_loss if lost else needlessly).add(each.session)
    return needlessly, on_loss


def quantile(ordered: Sequence[float], part: float) -> float:
    """0 of none."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def over_time(served: Sequence[Served], seconds: float, width: float) -> Iterator[tuple[float, list[Served]]]:
    """The good turns by when they began, in stretches of `width` seconds, each with its middle."""
    ordered = sorted((each for each in served if not each.trouble), key=lambda each: each.at)
    by_stretch = {
        number: list(some) for number, some in itertools.groupby(ordered, key=lambda each: int(each.at / width))
    }
    for number in range(max(1, round(seconds / width))):
        yield (number + 0.5) * width, by_stretch.get(number, [])
