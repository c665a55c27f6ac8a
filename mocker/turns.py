"""The life of a turn, from its head to its record's end.

Turns are served as raw ASGI, below Starlette's routing and middleware: that is cheaper per token, and a turn can reset
its connection.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from mocker import wire
from mocker.cache import PrefixCache, count_tokens
from mocker.engine import Completion, Engine, Metronome, Pace, left_now, left_within
from mocker.faults import Fault, Faults
from mocker.records import Recording, Turn, TurnLog
from mocker.settings import MockSettings
from mocker.wire import Ask, RequestError, Usage

SESSION_HEADER = "x-dynamo-session-id"
RANK_HEADER = "x-data-parallel-rank"
REQUEST_ID_HEADER = "x-request-id"
NAME_HEADER = "x-mock-worker"

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
EMBEDDINGS_PATH = "/v1/embeddings"

PARSERS = {
    CHAT_PATH: wire.parse_chat,
    COMPLETIONS_PATH: wire.parse_completion,
    EMBEDDINGS_PATH: wire.parse_embedding,
}
"""The paths whose requests are turns."""

_NO_HEADERS: Mapping[str, str] = {}


class ClientLeft(Exception):
    """The client went away before its request was complete."""


class TurnService:
    """What the turns of one worker share, and the ASGI app that serves them."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.log = TurnLog(settings.history)
        self.cache = PrefixCache(settings.cache_sessions)
        self.faults = Faults()
        self.engine = Engine(settings.seed)
        self.metronome = Metronome()
        self.pace = Pace(settings.ttft_ms / 1000, settings.itl_ms / 1000)
        self._senders: set[Send] = set()
        self._ids = random.Random(f"{settings.seed}/{settings.name}")
        self._expected_authorization = None if settings.api_key is None else f"Bearer {settings.api_key}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] != "POST":
                raise RequestError(405, f"Method Not Allowed: {scope['method']} {scope['path']}", allow="POST")
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self.authorise(headers.get("authorization"))
            ask = PARSERS[scope["path"]](await read_body(receive))
            self.check_model(ask.model)
            turn = self._admit(scope["path"], headers, ask)
        except RequestError as error:
            await self.reply(send, error.status, error.body, error.headers)
        except ClientLeft:
            pass
        else:
            fault = self.faults.take()
            turn.fault = None if fault is None else fault.mode
            # Nothing awaits between here and the block that ends the record.
            with self.log.record(turn) as recording:
                self._senders.add(send)
                try:
                    await _RunningTurn(self, recording, ask, fault, receive, send).run(scope)
                finally:
                    self._senders.discard(send)

    def authorise(self, authorization: str | None) -> None:
        """Raises RequestError if the worker wants a key and this header has not got it."""
        if self._expected_authorization not in (None, authorization):
            raise RequestError(401, "Incorrect API key provided.", code="invalid_api_key")

    def check_model(self, model: str) -> None:
        """Raises RequestError if the worker does not serve `model`."""
        if model not in self.settings.models:
            raise RequestError(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")

    def new_id(self) -> str:
        """For an answer. As seeded as the rest, but different on every worker."""
        return f"{self._ids.getrandbits(96):024x}"

    def reset_running(self) -> None:
        """Reset the connections of all running turns; they are recorded as aborted."""
        for send in self._senders:
            reset_connection(send)

    def _admit(self, path: str, headers: Mapping[str, str], ask: Ask) -> Turn:
        session = headers.get(SESSION_HEADER) or None
        rank = self._rank(headers.get(RANK_HEADER))
        generates = path != EMBEDDINGS_PATH
        return Turn(
            session=session,
            rank=rank,
            model=ask.model,
            stream=ask.stream,
            start=time.time(),
            prompt_tokens=count_tokens(ask.prompt) if generates else sum(map(count_tokens, ask.inputs)),
            cached_tokens=self.cache.cached_tokens(session, ask.model, rank, ask.prompt)
            if session and generates
            else 0,
            request_id=headers.get(REQUEST_ID_HEADER),
            path=path,
        )

    def _rank(self, value: str | None) -> int | None:
        if value is None:
            return None
        size = self.settings.dp_size
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) < size):
            raise RequestError(400, f"{RANK_HEADER} must be 0 to {size - 1}, not {value!r}.", param=RANK_HEADER)
        return int(value)

    async def reply(self, send: Send, status: int, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Send a JSON answer in one piece."""
        fields = {
            NAME_HEADER: self.settings.name,
            "content-type": "application/json",
            "content-length": str(len(body)),
            **headers,
        }
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class _RunningTurn:
    """One admitted turn on its connection."""

    def __init__(
        self, service: TurnService, recording: Recording, ask: Ask, fault: Fault | None, receive: Receive, send: Send
    ) -> None:
        self._service = service
        self._recording = recording
        self._turn = recording.turn
        self._ask = ask
        self._fault = fault
        self._pace = service.pace
        self._receive = receive
        self._send = send
        self._started = time.monotonic()

    async def run(self, scope: Scope) -> None:
        """Returns when the answer is out or the client has left. The caller ends the record."""
        match self._fault:
            case Fault(mode="status", status=status, headers=headers):
                kind = "server_error" if status >= 500 else "invalid_request_error"
                body = wire.error_body("This fault was ordered.", kind=kind, code="injected_fault")
                await self._service.reply(self._send, status, body, headers)
                return
            case Fault(mode="hang"):
                await left_within(self._receive, None)
                return
            case Fault(mode="slow") as fault:
                self._pace = self._pace.slowed(fault.ttft_ms, fault.itl_ms)
        if self._turn.path == EMBEDDINGS_PATH:
            await self._embed()
        else:
            await self._generate(scope)

    async def _embed(self) -> None:
        ask, engine = self._ask, self._service.engine
        vectors = [engine.embedding(text, ask.dimensions) for text in ask.inputs]
        body = wire.embedding_answer(ask.model, vectors, as_base64=ask.base64, prompt_tokens=self._turn.prompt_tokens)
        if await self._answer(body, self._pace.ttft):
            self._recording.complete()

    async def _generate(self, scope: Scope) -> None:
        ask, turn, service = self._ask, self._turn, self._service
        shape = wire.CHAT if turn.path == CHAT_PATH else wire.COMPLETION
        tokens = service.settings.tokens if ask.max_tokens is None else ask.max_tokens
        finish = "stop" if ask.max_tokens is None else "length"
        usage = Usage(prompt_tokens=turn.prompt_tokens, cached_tokens=turn.cached_tokens, completion_tokens=tokens)
        completion = service.engine.completion(ask.prompt, ask.seed, tokens)
        try:
            if ask.stream:
                answer = wire.StreamedAnswer(shape, service.new_id(), ask.model, include_usage=ask.include_usage)
                events = self._events(completion, answer, answer.end(finish, usage))
                headers = {NAME_HEADER: service.settings.name}
                await EventSourceResponse(events, headers=headers, sep="\n", ping=0)(scope, self._receive, self._send)
            else:
                body = wire.whole_answer(shape, service.new_id(), ask.model, completion.text(), finish, usage)
                if await self._answer(body, self._pace.total(tokens)):
                    turn.completion_tokens = tokens
                    self._complete(completion)
        finally:
            if turn.end is None and (turn.completion_tokens or time.monotonic() - self._started >= self._pace.ttft):
                self._remember(completion)

    async def _events(self, completion: Completion, answer: wire.StreamedAnswer, end: bytes) -> AsyncIterator[bytes]:
        """The stream's events, each when it is due; a late one does not delay the next.

        sse-starlette begins and ends the response and watches for the client's leaving. The tokens between go straight
        to the server: yielding each takes a cancel scope, and a token then costs 71 µs of CPU instead of 49.
        """
        turn, fault = self._turn, self._fault
        first, itl = self._started + self._pace.ttft, self._pace.itl
        head, tail = answer.head, answer.tail
        last = completion.tokens - 1
        send, metronome = self._send, self._service.metronome
        stop = min(fault.after_tokens, last) if fault is not None and fault.mode == "reset" else None
        for place, piece in enumerate(completion.pieces()):
            await metronome.until(first + place * itl)
            if place == stop:
                await self._reset()
                return
            event = head + piece + tail
            if place == 0:
                event = answer.begin + event
            if place < last:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            else:
                yield event + end
            turn.completion_tokens = place + 1
        # The last event was sent just now; it was dropped if the client had left by then.
        if not left_now(self._receive):
            self._complete(completion)

    async def _answer(self, body: bytes, seconds: float) -> bool:
        """Give the answer in one piece, `seconds` after the start. True if it was handed to the transport."""
        if await left_within(self._receive, self._started + seconds - time.monotonic()):
            return False
        if self._fault is not None and self._fault.mode == "reset":
            await self._reset()
            return False
        await self._service.reply(self._send, 200, body)
        return True

    def _complete(self, completion: Completion) -> None:
        # In one step with the last write, so that whoever has read the answer finds it recorded and cached.
        self._remember(completion)
        self._recording.complete()

    def _remember(self, completion: Completion) -> None:
        turn = self._turn
        if turn.session is not None:
            held = self._ask.prompt + completion.text(turn.completion_tokens).encode()
            self._service.cache.remember(turn.session, turn.model, turn.rank, held)

    async def _reset(self) -> None:
        reset_connection(self._send)
        await left_within(self._receive, None)


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request. Raises ClientLeft if it does not come."""
    pieces = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def reset_connection(send: Send) -> None:
    """Close the client's connection at once and with a TCP RST, as a crashing worker does.

    ASGI has no way to do that, hence the look into uvicorn's `send`. What was written in this round of the event loop
    may be lost. Raises RuntimeError on another server, which breaks the connection too.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise RuntimeError("a connection can only be reset under uvicorn")
    connection = transport.get_extra_info("socket")
    if connection is not None and not transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
