"""The life of a turn, from its head to its record's end.

Turns are served as raw ASGI, below Starlette's routing and middleware: that is cheaper per token, and a turn can reset
its connection.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from mocker import identity, live, messages, outside, wire
from mocker.cache import PrefixCache
from mocker.engine.scheduler import QueueFull, TooLong
from mocker.events import publishers_of
from mocker.faults import Fault, Faults, FaultySend, reset_connection
from mocker.flow import Computed, Flow, Paced
from mocker.handover import Handover, NotFetched, asks_for_decode, names_blocks
from mocker.records import Recording, Turn, TurnLog
from mocker.responses import ResponseAnswer, Responses
from mocker.rooms import Room, Rooms, place_of
from mocker.settings import MockSettings
from mocker.voice import Completion, Voice
from mocker.waiting import Metronome, Pace, left_before, left_now, left_within
from mocker.wire import Answer, Ask, Finish, RequestError, Usage

RANK_HEADER = "x-data-parallel-rank"
REQUEST_ID_HEADER = "x-request-id"
NAME_HEADER = "x-mock-worker"

_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Api:
    """A path whose requests are turns."""

    parse: Callable[[bytes], Ask]
    """Raises RequestError."""
    error: Callable[[RequestError], bytes] = wire.error_body


class ClientLeft(Exception):
    """The client went away before its request was complete."""


class TurnService:
    """What the turns of one worker share, and the ASGI app that serves them."""

    def __init__(self, settings: MockSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError when a port for KV events is taken."""
        self.settings = settings
        self.clock = clock
        self.log = TurnLog(settings.history)
        self.cache = PrefixCache(settings.cache_sessions)
        self.faults = Faults()
        self.voice = Voice(settings.seed)
        self.metronome = Metronome(clock)
        self.pace = Pace(settings.ttft_ms / settings.speed / 1000, settings.itl_ms / settings.speed / 1000)
        self.publishers = publishers_of(settings)
        self.ranks = live.ranks_of(settings, self.metronome, clock, self.publishers)
        """Empty: it has no engine, and its pace is set."""
        self._ready_at = clock() + settings.loading
        self.responses = Responses(self.new_id)
        self.adapters: dict[str, int] = {}
        """The names of loaded LoRA adapters, models that this worker serves beside its own, and their numbers: never
        the same again, as vLLM counts them."""
        self._adapters_loaded = itertools.count(1)
        self.apis = {
            "/v1/chat/completions": Api(wire.parse_chat),
            "/v1/completions": Api(wire.parse_completion),
            "/v1/embeddings": Api(wire.parse_embedding),
            "/v1/messages": Api(messages.parse, messages.error_body),
            "/v1/messages/count_tokens": Api(messages.parse_count, messages.error_body),
            "/v1/responses": Api(self.responses.parse),
            **{path: Api(parse) for path, parse in outside.PARSERS.items()},
        }
        self.handover: Handover | None = None
        """None: it has no KV connector, and passes over what is said of other workers' blocks."""
        self.rooms: Rooms | None = None
        """None: nobody is met here."""
        if settings.phase != "both" and settings.transfer.handover == "sglang":
            self.rooms = Rooms(settings.transfer)
        elif settings.phase != "both":
            self.handover = Handover(settings.transfer, random.Random(f"{settings.seed}/{settings.name}/handover"))
        self._senders: set[Send] = set()
        self._ids = random.Random(f"{settings.seed}/{settings.name}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = self.apis[scope["path"]]
        try:
            if scope["method"] != "POST":
                message = f"Method Not Allowed: {scope['method']} {scope['path']}"
                raise RequestError(405, message, headers={"allow": "POST"})
            headers = read_headers(scope)
            self.authorise(scope["path"], headers)
            ask = api.parse(await read_body(receive))
            model = self.check_model(ask.model)
            self.check_loaded()
            turn = self._admit(scope, headers, ask, model)
            fault = self.faults.take(ask.prompt)
            flow = self._flow(ask, turn, fault)
        except RequestError as error:
            await self.reply(send, error.status, api.error(error), error.headers)
        except ClientLeft:
            pass
        else:
            turn.fault = None if fault is None else fault.mode
            # Nothing awaits between the flow's making and the block that ends it, and the record.
            with self.log.record(turn) as recording:
                self._senders.add(send)
                try:
                    await _RunningTurn(self, recording, api, ask, fault, flow, receive, send).run(scope)
                finally:
                    self._senders.discard(send)
                    if not recording.detached:
                        flow.close()

    def authorise(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises RequestError if the worker wants a key for this path and these headers have not got it."""
        expected = self.settings.api_key
        if expected is None or not path.startswith("/v1/") or headers.get("x-api-key") == expected:
            return
        if headers.get("authorization") != f"Bearer {expected}":
            raise RequestError(401, "Incorrect API key provided.", code="invalid_api_key")

    @property
    def loaded(self) -> bool:
        return self.clock() >= self._ready_at

    def check_loaded(self) -> None:
        """Raises RequestError as long as the model is being loaded, as llama.cpp's server says it."""
        if not self.loaded:
            raise RequestError(503, "Loading model", code="unavailable_error", headers={"retry-after": "1"})

    def load(self, seconds: float) -> None:
        """It is being loaded, from now on for so long."""
        self._ready_at = self.clock() + seconds

    def crash(self, seconds: float) -> None:
        """As when the process is gone and another comes in its place, which is ready after `seconds`: connections are
        reset, and what was cached is lost."""
        for rank in self.ranks:
            rank.restart()
        self.cache.clear()
        if self.between_workers is not None:
            self.between_workers.restart()
        self.reset_running()
        self.load(seconds)

    @property
    def between_workers(self) -> Handover | Rooms | None:
        """How it hands over, and takes; None: it does not."""
        return self.handover or self.rooms

    def load_adapter(self, name: str) -> None:
        """Serve it as a model."""
        self.adapters[name] = next(self._adapters_loaded)

    def check_model(self, model: str | None) -> str:
        """The model that serves a request for `model`. Raises RequestError if the worker does not serve it."""
        if model is None:
            return self.settings.models[0]
        if model not in self.settings.models and model not in self.adapters:
            raise RequestError(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")
        return model

    def answer_now(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of a request of a batch: nobody waits for it, and it is no turn."""
        api = self.apis.get(path)
        try:
            if api is None:
                raise RequestError(404, f"Not Found: POST {path}")
            ask = api.parse(body)
            self.check_model(ask.model)
            if ask.compute is not None:
                return 200, ask.compute(self.voice)
            assert ask.answer is not None
            tokens, finish = self.length(ask)
            texts = [each.text() for each in self.completions(ask, tokens)]
            usage = Usage(ask.prompt_tokens, 0, tokens * ask.choices)
            return 200, ask.answer(self.new_id()).whole(texts, finish, usage)
        except RequestError as error:
            return error.status, wire.error_body(error)

    def _flow(self, ask: Ask, turn: Turn, fault: Fault | None) -> Flow:
        """Raises RequestError if the engine does not take it."""
        pace, mode = self.pace, None if fault is None else fault.mode
        if fault is not None and mode == "slow":
            pace = pace.slowed(fault.ttft_ms, fault.itl_ms)
        if not self.ranks or mode in ("slow", "status", "hang", "crash"):
            return Paced(self.metronome, self.clock, pace)
        if ask.answer is None and not ask.reads:
            return Paced(self.metronome, self.clock, Pace(0.0, 0.0))
        tokens, _ = self.length(ask) if ask.answer is not None else (1, None)
        answers = [each.text() for each in self.completions(ask, tokens)] if ask.answer is not None else [""]
        rank = self.ranks[turn.rank] if turn.rank is not None else min(self.ranks, key=lambda each: each.scheduler.load)
        adapter = self.adapters.get(turn.model)
        sequences = [
            live.Sequence(
                rank,
                ask.prompt + answer.encode(),
                max(1, ask.prompt_tokens),
                tokens,
                model=turn.model,
                adapter=adapter,
                salt=ask.salt,
            )
            for answer in answers
        ]
        try:
            return Computed(rank, sequences, turn)
        except QueueFull as error:
            # vLLM's status for its max-num-queued-reqs.
            raise RequestError(503, str(error), code="queue_full", headers={"retry-after": "1"}) from error
        except TooLong as error:
            raise RequestError(400, str(error), code="context_length_exceeded") from error

    def next_step(self) -> Flow:
        """Of a turn whose prompt need not be computed."""
        return Paced(self.metronome, self.clock, Pace(self.pace.itl, self.pace.itl))

    def length(self, ask: Ask) -> tuple[int, Finish]:
        """How many tokens each choice of the answer has, and why it ends there."""
        if self.rooms is not None and self.settings.phase == "prefill":
            return 1, "length"
        if ask.max_tokens is not None:
            return ask.max_tokens, "length"
        if ask.most_tokens is not None and ask.most_tokens <= self.settings.tokens:
            return ask.most_tokens, "length"
        return self.settings.tokens, "stop"

    def completions(self, ask: Ask, tokens: int) -> list[Completion]:
        """One per choice; the first is as that of a request for one."""
        return [self.voice.completion(ask.prompt, ask.seed + index, tokens) for index in range(ask.choices)]

    def new_id(self) -> str:
        """For an answer. As seeded as the rest, but different on every worker."""
        return f"{self._ids.getrandbits(96):024x}"

    def reset_running(self) -> None:
        """Reset the connections of all running turns; they are recorded as aborted."""
        for send in self._senders:
            reset_connection(send)

    def _admit(self, scope: Scope, headers: Mapping[str, str], ask: Ask, model: str) -> Turn:
        named_by, session = identity.of_headers(headers) or ask.named or (None, None)
        rank = self._rank(headers.get(RANK_HEADER))
        place = place_of(ask.met_at) if self.rooms is not None and ask.answer is not None else None
        return Turn(
            session=session,
            named_by=named_by,
            rank=rank,
            model=model,
            stream=ask.stream,
            start=time.time(),
            prompt_tokens=ask.prompt_tokens,
            cached_tokens=self.cache.cached_tokens(session, model, rank, ask.prompt)
            if session and ask.answer is not None and not self.ranks
            else 0,
            request_id=headers.get(REQUEST_ID_HEADER),
            method=scope["method"],
            path=scope["path"],
            authorization=headers.get("authorization"),
            api_key=headers.get("x-api-key"),
            room=None if place is None else place.room,
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
        self,
        service: TurnService,
        recording: Recording,
        api: Api,
        ask: Ask,
        fault: Fault | None,
        flow: Flow,
        receive: Receive,
        send: Send,
    ) -> None:
        self._service = service
        self._recording = recording
        self._turn = recording.turn
        self._api = api
        self._ask = ask
        self._fault = fault
        self._flow = flow
        self._receive = receive
        self._connection = send
        self._send = FaultySend(send, fault) if fault is not None and fault.mode in ("cut", "drop") else send
        self._tokens, self._finish = service.length(ask)
        self._completions = service.completions(ask, self._tokens) if ask.answer is not None else []
        self._fails = fault is not None and fault.mode == "fail"
        self._spoken = min(fault.after_tokens, self._tokens) if fault is not None and self._fails else self._tokens
        """How many tokens each choice gets to say."""
        self._last = self._spoken if self._fails else self._tokens - 1
        """The last step's place."""
        self._room: Room | None = None
        """Where its prompt is fetched."""

    async def run(self, scope: Scope) -> None:
        """Returns when the answer is out or the client has left. The caller ends the record."""
        match self._fault:
            case Fault(mode="status", status=status, headers=headers):
                await self._refuse(ordered(status, headers))
                return
            case Fault(mode="hang"):
                await left_within(self._receive, None)
                return
            case Fault(mode="crash") as fault:
                self._service.crash(fault.seconds)
                await left_within(self._receive, None)
                return
        rooms, number = self._service.rooms, self._turn.room
        if rooms is None or number is None or self._service.settings.phase != "prefill":
            await self._answer(scope)
            return
        with rooms.open(number, self._turn.prompt_tokens) as self._room:
            await self._answer(scope)

    async def _answer(self, scope: Scope) -> None:
        ask, service = self._ask, self._service
        if ask.compute is not None:
            if await self._due(1):
                await service.reply(self._send, 200, ask.compute(service.voice))
                self._complete()
            return
        assert ask.answer is not None
        answer = ask.answer(service.new_id())
        if ask.background:
            assert isinstance(answer, ResponseAnswer)
            await self._queue(scope, answer)
            return
        try:
            if ask.stream:
                await self._stream(scope, self._events(answer))
            else:
                await self._generate_whole(answer)
        finally:
            if self._turn.end is None:
                answer.left()
                if self._turn.completion_tokens or self._flow.begun:
                    self._remember()

    async def _generate_whole(self, answer: Answer) -> None:
        if (self._ask.transfer or self._turn.room is not None) and not await self._came(self._fetch()):
            return
        if not await self._due(self._tokens):
            return
        if self._room is not None and not await self._came(self._hand_out(self._room)):
            return
        if self._fails:
            error = ordered(500)
            answer.failed(error)
            await self._refuse(error)
            return
        self._turn.completion_tokens = self._tokens * self._ask.choices
        body = answer.whole([each.text() for each in self._completions], self._finish, self._usage())
        if self._service.handover is not None and asks_for_decode(self._ask.transfer):
            body = body[:-1] + b',"kv_transfer_params":' + wire.encode(self._stage(self._service.handover)) + b"}"
        await self._service.reply(self._send, 200, body)
        self._complete()

    async def _came(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether it did before the client left, and raised no RequestError, which is answered."""
        task = asyncio.create_task(work)
        if await left_before(self._receive, _ended(task)):
            task.cancel()
            return False
        try:
            task.result()
        except RequestError as refusal:
            await self._refuse(refusal)
            return False
        return True

    def _stage(self, handover: Handover) -> dict[str, Any] | None:
        """What is said of the prompt's blocks, which stay for another worker."""
        turn, fault = self._turn, self._fault
        how = fault.how if fault is not None and fault.mode == "handover" else None
        if how == "missing":
            return None
        said = handover.stage(turn.request_id or self._service.new_id(), turn.prompt_tokens)
        turn.handover, turn.blocks = "staged", sum(map(len, said["remote_block_ids"]))
        if how is not None:
            handover.forget(said)
        if how == "malformed":
            del said["remote_engine_id"]
        return said

    async def _fetch(self) -> None:
        """Have the blocks that another worker has computed, if the request names some. Raises RequestError."""
        if self._service.rooms is not None and self._turn.room is not None:
            await self._meet(self._service.rooms)
            return
        handover, params, turn = self._service.handover, self._ask.transfer, self._turn
        if handover is None or not params or not params.get("do_remote_prefill"):
            return
        turn.handover = "anew"
        if not names_blocks(params):
            return
        try:
            turn.blocks = await asyncio.shield(handover.fetch(params))
        except NotFetched as error:
            if not self._service.settings.transfer.recompute:
                turn.handover = "failed"
                raise RequestError(500, "Internal server error", code="internal_error") from error
        else:
            turn.handover = "fetched"
            self._flow = self._service.next_step()

    async def _meet(self, rooms: Rooms) -> None:
        """The other worker that has the request. Raises RequestError."""
        turn, place = self._turn, place_of(self._ask.met_at)
        try:
            if self._room is not None:
                await rooms.joined(self._room)
            else:
                turn.blocks = await rooms.join(place)
                turn.handover = "fetched"
                self._flow = self._service.next_step()
        except NotFetched as error:
            raise self._failed_to_come(error) from error

    async def _hand_out(self, room: Room) -> None:
        """Raises RequestError."""
        fault, rooms = self._fault, self._service.rooms
        assert rooms is not None
        if fault is not None and fault.mode == "handover":
            room.close()
        try:
            await rooms.handed_out(room)
        except NotFetched as error:
            raise self._failed_to_come(error) from error
        self._turn.handover, self._turn.blocks = "staged", room.blocks

    def _failed_to_come(self, error: NotFetched) -> RequestError:
        self._turn.handover = "failed"
        return RequestError(500, f"KV transfer failed: {error}", code="internal_error")

    async def _stream(self, scope: Scope, events: AsyncIterator[bytes]) -> None:
        """sse-starlette begins and ends the response and watches for the client's leaving."""
        headers = {NAME_HEADER: self._service.settings.name}
        await EventSourceResponse(events, headers=headers, sep="\n", ping=0)(scope, self._receive, self._send)

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        """The stream's events, each when it is due; a late one does not delay the next.

        The tokens between the first and the last go straight to the server: yielding each to sse-starlette takes a
        cancel scope, and a token then costs 71 µs of CPU instead of 49.
        """
        fault, send, receive = self._fault, self._send, self._receive
        last, choices, turn = self._last, self._ask.choices, self._turn
        reset = min(fault.after_tokens, last) if fault is not None and fault.mode == "reset" else -1
        try:
            await self._fetch()
        except RequestError as error:
            opening, ends, _ = answer.begin(self._usage(0)).partition(b"\n\n")
            if turn.handover == "failed" and self._service.handover is not None and ends:
                yield opening + ends  # vLLM says so much first
            yield answer.failed(error)
            return
        token = self._flow.token
        steps = self._steps(answer)
        for place in range(last + 1):
            await token(place)
            if self._room is not None:  # it has one token
                try:
                    await self._hand_out(self._room)
                except RequestError as error:
                    yield answer.failed(error)
                    return
            if place == reset:
                reset_connection(self._connection)
                await left_within(receive, None)
                return
            events = next(steps)
            if place < last:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                turn.completion_tokens = (place + 1) * choices
            else:
                yield events
        turn.completion_tokens = self._spoken * choices
        # The last event was sent just now; it was dropped if the client had left by then.
        if left_now(receive):
            return
        if fault is not None:
            await asyncio.sleep(fault.end_ms / 1000)  # the client's leaving ends it
        self._complete()

    def _steps(self, answer: Answer) -> Iterator[bytes]:
        """What is said at each step, made when it is asked for: a token per choice, with what goes before the first and
        after the last."""
        last, spoken = self._last, self._spoken
        for place, pieces in enumerate(zip(*(each.pieces() for each in self._completions), strict=True)):
            if place == spoken:
                break
            events = answer.begin(self._usage(0)) if place == 0 else b""
            events += answer.token(pieces)
            if place == last:
                events += answer.end([each.text() for each in self._completions], self._finish, self._usage())
            yield events
        begin = b"" if spoken else answer.begin(self._usage(0))
        yield begin + answer.failed(ordered(500))

    async def _queue(self, scope: Scope, answer: ResponseAnswer) -> None:
        """Answer at once, or with the events as they come; the work goes on without the client."""
        if self._fault is not None and self._fault.mode == "reset":
            reset_connection(self._connection)
            return
        self._recording.detach()
        work = asyncio.create_task(self._work(answer))
        work.add_done_callback(lambda _: self._recording.abort())
        answer.kept.work = work
        if self._ask.stream:
            await self._stream(scope, answer.kept.follow(0))
        else:
            await self._service.reply(self._send, 200, answer.queued())

    async def _work(self, answer: ResponseAnswer) -> None:
        try:
            steps = self._steps(answer)
            for place in range(self._last + 1):
                await self._flow.token(place)
                answer.kept.append(next(steps))
                self._turn.completion_tokens = min(place + 1, self._spoken)
            self._complete()
        finally:
            self._flow.close()
            if self._turn.end is None:
                self._remember()

    async def _due(self, tokens: int) -> bool:
        """Wait until an answer in one piece, of so many tokens, is due. True if it is to be given then."""
        if await self._flow.whole(self._receive, tokens):
            return False
        if self._fault is not None and self._fault.mode == "reset":
            reset_connection(self._connection)
            await left_within(self._receive, None)
            return False
        return True

    async def _refuse(self, error: RequestError) -> None:
        await self._service.reply(self._send, error.status, self._api.error(error), error.headers)

    def _usage(self, tokens: int | None = None) -> Usage:
        """With so many tokens of each choice, all by default."""
        tokens = self._tokens if tokens is None else tokens
        return Usage(self._turn.prompt_tokens, self._turn.cached_tokens, tokens * self._ask.choices)

    def _complete(self) -> None:
        # In one step with the last write, so that whoever has read the answer finds it recorded and cached.
        if self._fault is None or self._fault.mode not in ("cut", "fail"):
            self._remember()
            self._recording.complete()

    def _remember(self) -> None:
        turn = self._turn
        session = turn.session or self._ask.kept_as
        if session is not None and not self._service.ranks:
            said = turn.completion_tokens // self._ask.choices
            for completion in self._completions:
                held = self._ask.prompt + completion.text(said).encode()
                self._service.cache.remember(session, turn.model, turn.rank, held)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


def ordered(status: int, headers: Mapping[str, str] = _NO_HEADERS) -> RequestError:
    """The error of an injected fault."""
    return RequestError(status, "This fault was ordered.", code="injected_fault", headers=headers)


def read_headers(scope: Scope) -> dict[str, str]:
    """Of several with one name, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


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
