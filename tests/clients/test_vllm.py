"""One real vLLM on CPU, where it is installed: `python -m tests.clients.install vllm`. Not part of `make test`.

`tiny_model.py` makes the model. Two replicas stand before two workers, which are one vLLM and a mock: that a session
keeps its worker is seen at the mock's records, and that this is worth something in vLLM's own count of cached tokens.
A third replica has vLLM alone, behind a wire tap: what its client gets is compared with what vLLM said.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from openai import BadRequestError, NotFoundError, OpenAI

from tests.clients.vllm import (
    MAX_TOKENS,
    MODEL,
    START_SECONDS,
    consecutive_ports,
    installed,
    kv_events,
    make_model,
    standing_vllm,
)
from tests.support.http_model import Answer, Incomplete, read_answer
from tests.support.kv_events import Blocks, Frames, asked, events, form, recorded
from tests.support.processes import Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.raw import Client
from tests.support.tcp import TcpProxy
from tests.support.wire import Wire, ask

ANSWER_SECONDS = 120
SESSIONS, TURNS = 10, 3
BLOCK_TOKENS = 128
"""vLLM's on CPU; only whole blocks are found again."""
JSON = [("content-type", "application/json")]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"

pytestmark = pytest.mark.timeout(START_SECONDS + 300)


@pytest.fixture(scope="module")
def events_port() -> int:
    """Where it tells of its blocks; where it is asked for what was missed is the next one."""
    return consecutive_ports(2)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory, events_port: int) -> Iterator[str]:
    """Its address."""
    if not installed():
        pytest.skip("vllm is not installed: python -m tests.clients.install vllm")
    folder = tmp_path_factory.mktemp("vllm")
    events = kv_events(events_port, events_port + 1)
    with standing_vllm(make_model(folder / "model"), folder / "vllm.log", events) as url:
        yield url


@dataclass(frozen=True)
class Fronts:
    """What stands before vLLM."""

    mock: Worker
    replicas: list[Replica]
    """Two, over vLLM and the mock."""
    alone: Replica
    """Over vLLM behind what listens at `tap`."""
    tap: socket.socket

    @property
    def clients(self) -> list[OpenAI]:
        return [OpenAI(base_url=f"{it.url}/v1", api_key="any", timeout=ANSWER_SECONDS) for it in self.replicas]


@pytest.fixture(scope="module")
def fronts(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("fronts")
    with Processes(folder) as processes, socket.create_server(("127.0.0.1", 0), backlog=64) as tap:
        [mock] = processes.workers(1, "--tokens", "8")
        real = Worker("vllm", vllm, mock.process)  # no process of ours, and nobody asks for it
        tapped = Worker("vllm", f"http://127.0.0.1:{tap.getsockname()[1]}", mock.process)
        # The tap is open only while a test listens there: nothing but turns is to be sent to it.
        [alone] = processes.replicas(1, [tapped], folder / "alone", "--probe-path=off", "--models-interval=0")
        yield Fronts(mock, processes.replicas(2, [real, mock], folder / "claims"), alone, tap)


# -- sessions


async def hits(url: str) -> float:
    """Tokens that vLLM found in its prefix cache since its start."""
    return total(await metrics(_At(url)), "vllm:prefix_cache_hits_total")


@dataclass(frozen=True)
class _At:
    url: str


@pytest.mark.parametrize("stream", [False, True])
async def test_sessions_stay_on_their_worker_and_find_their_cache(vllm: str, fronts: Fronts, stream: bool) -> None:
    before = await hits(vllm)
    where: dict[str, list[str]] = {}
    cached: dict[str, list[int]] = {}
    for number in range(SESSIONS):
        session = secrets.token_hex(8)
        history = [{"role": "user", "content": f"{session} " + "a ticket names a hook " * 40}]
        for turn in range(TURNS):
            worker, text, found = await asyncio.to_thread(
                _chat, fronts.clients[(number + turn) % 2], session, history, stream
            )
            where.setdefault(session, []).append(worker)
            cached.setdefault(session, []).append(found)
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then " * 10}]
    assert all(len(set(workers)) == 1 for workers in where.values()), where
    assert {workers[0] for workers in where.values()} == {"vllm", fronts.mock.name}, "both were to be used"
    for session, workers in where.items():
        assert len(await turns(fronts.mock, session)) == (TURNS if workers[0] == fronts.mock.name else 0)
    real = {session: counts for session, counts in cached.items() if where[session][0] == "vllm"}
    assert all(later >= BLOCK_TOKENS for counts in real.values() for later in counts[1:]), real
    assert await hits(vllm) - before >= sum(sum(counts[1:]) for counts in real.values())
    print(f"{len(real)} of {SESSIONS} sessions on vLLM, tokens from its cache by turn: {list(real.values())}")


def _chat(client: OpenAI, session: str, history: list[Any], stream: bool) -> tuple[str, str, int]:
    """Where it was served, what was said, and how many tokens were in the worker's cache."""
    asked: dict[str, Any] = {"model": MODEL, "messages": history, "max_tokens": 8}
    asked["extra_headers"] = {"X-Dynamo-Session-ID": session}
    if not stream:
        raw = client.chat.completions.with_raw_response.create(**asked)
        answer = raw.parse()
        text, usage, worker = answer.choices[0].message.content, answer.usage, raw.headers["x-coatcheck-worker"]
    else:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        with client.chat.completions.with_streaming_response.create(**asked) as streamed:
            worker = streamed.headers["x-coatcheck-worker"]
            chunks = list(streamed.parse())
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        [usage] = [chunk.usage for chunk in chunks if chunk.usage]
    details = usage.prompt_tokens_details if usage else None
    return worker, text or "", (details and details.cached_tokens) or 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_final_turn_ends_its_session_in_every_api(fronts: Fronts, path: str, stream: bool) -> None:
    session = secrets.token_hex(8)
    named = ("x-dynamo-session-id", session)
    here, there = (replica.url for replica in fronts.replicas)
    hint = ("x-dynamo-worker-instance-id", "vllm")
    first = await ask(here, "POST", path, [*JSON, named, hint], _body(path))
    assert (first.status, first.worker, first.affinity) == (200, "vllm", "created"), first.body
    last = await ask(
        there, "POST", path, [*JSON, named, ("x-dynamo-session-final", "true")], _body(path, stream=stream)
    )
    assert (last.status, last.worker) == (200, "vllm"), last.body
    assert last.affinity in ("stored", "cached")
    assert (await ask(here, "POST", path, [*JSON, named], _body(path))).affinity == "created"


async def test_a_stored_response_is_found_at_every_replica_without_a_session(fronts: Fronts) -> None:
    here, there = (replica.url for replica in fronts.replicas)
    for _ in range(4):  # else it may have been chance
        made = await ask(here, "POST", RESPONSES, [*JSON, ("x-dynamo-worker-instance-id", "vllm")], _body(RESPONSES))
        assert (made.status, made.worker) == (200, "vllm"), made.body
        found = await ask(there, "GET", f"{RESPONSES}/{made.json['id']}")
        assert (found.status, found.worker) == (200, "vllm"), found.body
        assert (found.json["id"], found.json["output"]) == (made.json["id"], made.json["output"])
        body = _body(RESPONSES, previous_response_id=made.json["id"])
        further = await ask(there, "POST", RESPONSES, JSON, body)
        assert (further.status, further.worker) == (200, "vllm"), further.body
        assert further.json["usage"]["input_tokens"] > made.json["usage"]["input_tokens"]


def _body(path: str, **more: Any) -> bytes:
    """Of a short request."""
    said: dict[str, Any] = {"input": "Hello."} if path == RESPONSES else {"messages": [_USER]}
    said |= {"max_output_tokens": 8} if path == RESPONSES else {"max_tokens": 8}
    return json.dumps({"model": MODEL} | said | more).encode()


_USER: Any = {"role": "user", "content": "Hello."}


# -- what it tells of its blocks


async def test_its_kv_events_are_as_they_were_recorded(vllm: str, events_port: int) -> None:
    """`recorded` is what the mock workers' events and the readers of events are compared with."""
    steps = recorded().run("numbers").steps
    known = form([event for step in steps for frames in step.frames for event in events(frames)])["BlockStored"]
    prompt = f"{secrets.token_hex(8)} " + "a ticket names a hook " * 40
    cached = []
    blocks = Blocks()
    for _ in range(2):
        answer = await ask(
            vllm, "POST", COMPLETIONS, JSON, json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
        )
        cached.append(((answer.json["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")) or 0)
    tokens = (await ask(vllm, "POST", "/tokenize", JSON, json.dumps({"model": MODEL, "prompt": prompt}).encode())).json

    def told() -> list[Frames]:
        with zmq.Context() as context:
            return asked(context, f"tcp://127.0.0.1:{events_port + 1}", 0, ANSWER_SECONDS)

    async def overlap() -> int:
        *batches, _ = await asyncio.to_thread(told)
        for frames in batches[blocks.expected :]:
            blocks.read(frames, 0)
            for name, types in form(events(frames)).get("BlockStored", {}).items():
                assert types <= known[name], (name, types)
        return blocks.overlap(tokens["tokens"])

    found = await wait_until(overlap, ANSWER_SECONDS)
    assert cached == [0, found]


# -- bytes


CASES: dict[str, tuple[str, dict[str, Any] | bytes, int]] = {
    "chat": (CHAT, {"messages": [_USER], "max_tokens": 8}, 200),
    "chat, in two ways, with probabilities": (
        CHAT,
        {"messages": [_USER], "max_tokens": 8, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 2},
        200,
    ),
    "chat, streamed": (CHAT, {"messages": [_USER], "max_tokens": 64, "ignore_eos": True, "stream": True}, 200),
    "chat, streamed in two ways, with usage": (
        CHAT,
        {
            "messages": [_USER],
            "max_tokens": 16,
            "n": 2,
            "temperature": 1,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        200,
    ),
    "completion": (COMPLETIONS, {"prompt": "A coat", "max_tokens": 8}, 200),
    "completion of tokens, streamed": (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 8, "stream": True}, 200),
    "messages": (MESSAGES, {"messages": [_USER], "max_tokens": 8}, 200),
    "messages, streamed": (MESSAGES, {"messages": [_USER], "max_tokens": 8, "stream": True}, 200),
    "messages, counted": (f"{MESSAGES}/count_tokens", {"messages": [_USER]}, 200),
    "responses": (RESPONSES, {"input": "Hello.", "max_output_tokens": 8}, 200),
    "responses, not stored": (RESPONSES, {"input": "Hello.", "max_output_tokens": 8, "store": False}, 200),
    "responses, streamed": (RESPONSES, {"input": "Hello.", "max_output_tokens": 8, "stream": True}, 200),
    "responses, rendered, which it has to be started for": (f"{RESPONSES}/render", {"input": "Hello."}, 403),
    "tokens": ("/tokenize", {"messages": [_USER]}, 200),
    "no JSON": (CHAT, b'{"model": ', 400),
    "no messages": (CHAT, {}, 400),
    "another type": (CHAT, {"messages": [_USER], "max_tokens": "many"}, 400),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "x " * 4 * MAX_TOKENS}], "max_tokens": 8}, 400),
    "too long, streamed": (
        CHAT,
        {"messages": [{"role": "user", "content": "x " * 4 * MAX_TOKENS}], "max_tokens": 8, "stream": True},
        400,
    ),
    "messages without an end": (MESSAGES, {"messages": [_USER]}, 400),
    "messages, too long": (
        MESSAGES,
        {"messages": [{"role": "user", "content": "x " * 4 * MAX_TOKENS}], "max_tokens": 8},
        400,
    ),
    "responses to nothing": (RESPONSES, {}, 400),
    "nothing of the kind": ("/v1/audio/nothing", {}, 404),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_vllm_says_arrives_byte_for_byte(vllm: str, fronts: Fronts, case: str) -> None:
    path, body, status = CASES[case]
    if isinstance(body, dict):
        body = json.dumps({"model": MODEL} | body).encode()
    async with TcpProxy("127.0.0.1", urlsplit(vllm).port or 0, listener=fronts.tap, records=True) as tap:
        got = await _post(fronts.alone.url, path, body)
    [told] = [told for asked, told in tap.heard if asked.startswith(b"POST ")]
    said, rest = read_answer(told, b"POST", True)
    assert not rest
    assert (got.status, got.normal, got.complete) == (status, said.normal, said.complete), got.body[:500]


async def _post(url: str, path: str, body: bytes) -> Answer:
    parts = urlsplit(url)
    raw = socket.create_connection((parts.hostname or "", parts.port or 0))
    with contextlib.closing(Client(raw)) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        await client.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while True:
            try:
                return read_answer(client.buffer, b"POST", bool(client.ended))[0]
            except Incomplete:
                assert await client.more(ANSWER_SECONDS), bytes(client.buffer)


async def test_usage_is_vllms_own(vllm: str, fronts: Fronts) -> None:
    asked = await ask(vllm, "POST", "/tokenize", JSON, json.dumps({"model": MODEL, "messages": [_USER]}).encode())
    client = fronts.clients[0]
    for stream in (False, True):
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = await asyncio.to_thread(
            lambda options=options: client.chat.completions.create(  # type: ignore[misc]
                model=MODEL,
                messages=[_USER],
                max_tokens=12,
                extra_body={"ignore_eos": True},
                extra_headers={"x-dynamo-worker-instance-id": "vllm"},
                **options,
            )
        )
        usage = list(answer)[-1].usage if stream else answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (asked.json["count"], 12)


async def test_vllms_errors_are_the_librarys_own(fronts: Fronts) -> None:
    client, hint = fronts.clients[0], {"x-dynamo-worker-instance-id": "vllm"}
    long: Any = [{"role": "user", "content": "x " * 4 * MAX_TOKENS}]
    for stream in (False, True):
        with pytest.raises(BadRequestError, match=str(MAX_TOKENS)):
            await asyncio.to_thread(
                lambda stream=stream: client.chat.completions.create(  # type: ignore[misc]
                    model=MODEL, messages=long, max_tokens=8, stream=stream, extra_headers=hint
                )
            )
    with pytest.raises(NotFoundError):
        await asyncio.to_thread(lambda: client.responses.retrieve("resp_nobody_has_made_this", extra_headers=hint))


async def test_a_stream_that_is_left_ends_at_vllm(vllm: str, fronts: Fronts) -> None:
    async def count(name: str) -> float:
        return total(await metrics(_At(vllm)), name)

    async def rests() -> bool:
        return not await count("vllm:num_requests_running")

    before, most = await count("vllm:generation_tokens_total"), MAX_TOKENS - 100
    body = _body(CHAT, stream=True, max_tokens=most, ignore_eos=True)
    async with await Wire.to(fronts.replicas[0].url) as wire:
        wire.request("POST", CHAT, [*JSON, ("x-dynamo-worker-instance-id", "vllm")], body)
        head = await wire.head()
        assert (head.status, head.get("x-coatcheck-worker")) == (200, "vllm")
        await wire.until(b"data: ")
        wire.leave()
    await wait_until(rests, ANSWER_SECONDS)
    assert await count("vllm:generation_tokens_total") - before < most / 2
