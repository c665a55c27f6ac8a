"""The life of a turn, from its head to its record's end.

Turns are served as raw ASGI, below Starlette's routing and middleware: that is cheaper per token, and a turn can reset
its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from mocker import wire
from mocker.faults import Fault, FaultySend, reset_connection
from mocker.flow import Flow
from mocker.handover import Handover, NotFetched, asks_for_decode, names_blocks
from mocker.records import Recording
from mocker.responses import ResponseAnswer
from mocker.rooms import Room, Rooms, place_of
from mocker.turns import NAME_HEADER, Api, TurnService, read_headers
from mocker.waiting import left_before, left_now, left_within
from mocker.wire import Answer, Ask, RequestError, Usage

_NO_HEADERS: Mapping[str, str] = {}


class _ClientLeft(Exception):
    """The client went away before its request was complete."""


async def serve(service: TurnService, scope: Scope, receive: Receive, send: Send) -> None:
    """A request for one of the worker's `apis`."""
    api = service.apis[scope["path"]]
    try:
        if scope["method"] != "POST":
            message = f"Method Not Allowed: {scope['method']} {scope['path']}"
            raise RequestError(405, message, headers={"allow": "POST"})
        headers = read_headers(scope)
        service.authorise(scope["path"], headers)
        ask = api.parse(await _read_body(receive))
        model = service.check_model(ask.model)
        service.check_loaded()
        turn = service.admit(scope, headers, ask, model)
        fault = service.faults.take(ask.prompt)
        flow = service.flow(ask, turn, fault)
    except RequestError as error:
        await service.reply(send, error.status, api.error(error), error.headers)
    except _ClientLeft:
        pass
    else:
        turn.fault = None if fault is None else fault.mode
        # Nothing awaits between the flow's making and the block that ends it, and the record.
        with service.log.record(turn) as recording, service.connected(send):
            try:
                await _RunningTurn(service, recording, api, ask, fault, flow, receive, send).run(scope)
            finally:
                if not recording.detached:
                    flow.close()


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


async def _read_body(receive: Receive) -> bytes:
    """The whole body of a request. Raises _ClientLeft if it does not come."""
    pieces = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)
