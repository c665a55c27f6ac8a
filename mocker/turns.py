"""What the turns of one worker share, and what becomes a turn."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Scope, Send

from mocker import identity, live, messages, outside, wire
from mocker.cache import PrefixCache
from mocker.engine.scheduler import QueueFull, TooLong
from mocker.events import publishers_of
from mocker.faults import Fault, Faults, reset_connection
from mocker.flow import Computed, Flow, Paced
from mocker.handover import Handover
from mocker.records import Turn, TurnLog
from mocker.responses import Responses
from mocker.rooms import Rooms, place_of
from mocker.settings import MockSettings
from mocker.voice import Completion, Voice
from mocker.waiting import Metronome, Pace
from mocker.wire import Ask, Finish, RequestError, Usage

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


class TurnService:
    """What the turns of one worker share, and which of them it takes. `running.serve` serves them."""

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

    def flow(self, ask: Ask, turn: Turn, fault: Fault | None) -> Flow:
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

    @contextmanager
    def connected(self, send: Send) -> Iterator[None]:
        """A turn runs on this connection."""
        self._senders.add(send)
        try:
            yield
        finally:
            self._senders.discard(send)

    def reset_running(self) -> None:
        """Reset the connections of all running turns; they are recorded as aborted."""
        for send in self._senders:
            reset_connection(send)

    def admit(self, scope: Scope, headers: Mapping[str, str], ask: Ask, model: str) -> Turn:
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


def read_headers(scope: Scope) -> dict[str, str]:
    """Of several with one name, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
