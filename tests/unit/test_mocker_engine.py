"""The mock worker with an engine: what its cache, its metrics and its KV events say of the same blocks, and faults of
the whole worker."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from mocker import cli
from mocker.engine import profile as profiles
from mocker.engine.profile import Profile
from mocker.running import serve
from mocker.settings import KvEvents, MockSettings
from mocker.turns import TurnService
from tests.support.fakes import in_virtual_time
from tests.support.kv_events import Blocks, Frames, asked, events, form, recorded
from tests.support.mocks import CHAT, Worker, eventually

QUICK = replace(profiles.load("quick"), blocks=256)
LONG = "Never lose a coat. " * 40


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    running = Worker(profile=QUICK, dp_size=2, kv_events=KvEvents(port=0, replay_port=0))
    yield running
    running.close()


@pytest.fixture
def clean(worker: Worker) -> Worker:
    """It has nothing cached."""
    eventually(lambda: all(not rank["running"] for rank in ranks(worker)), 10)
    worker.http.post("/reset_prefix_cache").raise_for_status()
    worker.http.delete("/mock/turns")
    return worker


def ranks(worker: Worker) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = worker.get("/mock/engine")["ranks"]
    return found


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def ask(worker: Worker, *texts: str, rank: int = 0, **more: Any) -> tuple[int, int, str]:
    """Cached tokens, prompt tokens, answer."""
    body = {**CHAT, "messages": messages(*texts), **more}
    answer = worker.http.post("/v1/chat/completions", json=body, headers={"x-data-parallel-rank": str(rank)})
    said = answer.raise_for_status().json()
    usage = said["usage"]
    return (
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
        said["choices"][0]["message"]["content"],
    )


# --- cached tokens ---------------------------------------------------------------------------------------------------


def test_all_sessions_share_what_is_cached(clean: Worker) -> None:
    cached, tokens, _ = ask(clean, LONG + "one")
    assert cached == 0
    # All but the block in which the prompts begin to differ.
    cached, _, _ = ask(clean, LONG + "two")
    assert cached == (len(f"<|im_start|>user\n{LONG}") // 4) // 16 * 16 > tokens - 32
    assert ask(clean, LONG + "two", rank=1)[0] == 0
    assert [turn["cached_tokens"] for turn in clean.get("/mock/turns")["turns"]] == [0, cached, 0]


def test_answers_are_cached_as_well_and_the_last_token_is_always_computed(clean: Worker) -> None:
    _, tokens, answer = ask(clean, LONG, max_tokens=64)
    cached, longer, _ = ask(clean, LONG, answer, "more", max_tokens=64)
    # The last token of the answer has no keys and values yet.
    assert cached == (tokens + 63) // 16 * 16
    again, _, _ = ask(clean, LONG, answer, "more", max_tokens=64)
    assert again == (longer - 1) // 16 * 16


def test_a_stream_says_the_same_at_its_end(clean: Worker) -> None:
    ask(clean, LONG)
    body = {**CHAT, "messages": messages(LONG), "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    answer = clean.http.post("/v1/chat/completions", json=body, headers={"x-data-parallel-rank": "0"}).text
    *chunks, usage = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160
    assert usage["usage"]["completion_tokens"] == 32
    for index in (0, 1):
        said = [each for each in chunks if each["choices"][0]["index"] == index]
        assert len("".join(each["choices"][0]["delta"].get("content", "") for each in said).split()) == 16


def test_other_models_and_salts_share_nothing(clean: Worker) -> None:
    clean.http.post("/v1/load_lora_adapter", json={"lora_name": "poet"}).raise_for_status()
    try:
        assert ask(clean, LONG)[0] == 0
        assert ask(clean, LONG, cache_salt="mine")[0] == ask(clean, LONG, model="poet")[0] == 0
        assert ask(clean, LONG)[0] == ask(clean, LONG, cache_salt="mine")[0] == ask(clean, LONG, model="poet")[0] > 0
    finally:
        clean.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).raise_for_status()


def test_who_leaves_leaves_no_block_in_use(clean: Worker) -> None:
    for stream in (True, False):
        with clean.connect(f"leaver-{stream}", stream=stream, max_tokens=4000):
            eventually(lambda: sum(rank["running"] for rank in ranks(clean)) == 1, 10)
        eventually(lambda: clean.get("/mock/state")["active"] == 0, 10)
        eventually(lambda: all(rank["free"] + rank["idle"] == rank["blocks"] for rank in ranks(clean)), 10)
        assert all(not rank["running"] and not rank["waiting"] for rank in ranks(clean))
    recorded = [turn["outcome"] for turn in clean.get("/mock/turns")["turns"]]
    assert recorded == ["aborted", "aborted"]


def test_tokens_are_counted_by_the_engines_own_tokenizer(clean: Worker) -> None:
    tokens = clean.http.post("/tokenize", json={"messages": messages(LONG)}).json()
    assert tokens["count"] == ask(clean, LONG)[1]
    body = {"model": "mock-model", "prompt": LONG, "max_tokens": 2}
    counted = clean.http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
    with_bos = clean.http.post("/tokenize", json={"prompt": LONG, "add_special_tokens": True}).json()
    assert with_bos["count"] == counted
    assert with_bos["tokens"][1:] == clean.http.post("/tokenize", json={"prompt": LONG}).json()["tokens"]


@in_virtual_time
async def test_time_passes_as_the_profile_says() -> None:
    """Two milliseconds a step, 20 µs a sequence, 5 µs a token of the prompt: by hand, of a cold and a warm prompt."""
    loop = asyncio.get_running_loop()
    times = replace(QUICK.times, context=0, prefill_context=0)
    service = TurnService(MockSettings(profile=replace(QUICK, times=times)), loop.time)

    async def turn(text: str) -> tuple[float, dict[str, Any]]:
        began = loop.time()
        said = await served(service, {**CHAT, "messages": messages(text), "max_tokens": 11})
        return loop.time() - began, said["usage"]

    took, usage = await turn(LONG)
    prompt = usage["prompt_tokens"]
    # Up to a tick later: that is as finely as the loop times.
    assert took == pytest.approx(11 * 0.00202 + prompt * 5e-6, abs=0.0011)
    again, usage = await turn(LONG)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == (prompt - 1) // 16 * 16
    assert again == pytest.approx(11 * 0.00202 + (prompt - cached) * 5e-6, abs=0.0011)
    assert again < took


async def served(service: TurnService, body: dict[str, Any]) -> Any:
    """The answer's JSON, without a socket."""
    sent: list[Any] = []
    asked = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if asked:
            return asked.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    await serve(service, scope, receive, send)
    assert sent[0]["status"] == 200, sent
    return json.loads(b"".join(each.get("body", b"") for each in sent))


# --- limits, metrics -------------------------------------------------------------------------------------------------


def test_a_full_engine_answers_503_and_what_never_fits_400() -> None:
    busy = Worker(profile=replace(QUICK, max_queued=2))
    try:
        with busy.connect("a", stream=True, max_tokens=3000), busy.connect("b", stream=True, max_tokens=3000):
            eventually(lambda: ranks(busy)[0]["running"] == 2, 10)
            refused = busy.http.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (
                'vllm:admission_rejections_total{engine="0",model_name="mock-model",reason="max_num_queued_reqs"} 1'
                in (busy.http.get("/metrics").text)
            )
        too_long = busy.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 9000})
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
        eventually(lambda: ranks(busy)[0]["running"] == 0, 10)
        assert busy.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    finally:
        busy.close()


def metrics(worker: Worker) -> dict[str, float]:
    """Of the first rank."""
    lines = [line for line in worker.http.get("/metrics").text.splitlines() if 'engine="0"' in line]
    return {name.partition("{")[0]: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_have_vllms_names(clean: Worker) -> None:
    before = metrics(clean)
    _, tokens, _ = ask(clean, LONG)
    cached, _, _ = ask(clean, LONG)
    after = metrics(clean)
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 2 * tokens,
        "vllm:prefix_cache_hits_total": cached,
        "vllm:prompt_tokens_total": 2 * tokens,
        "vllm:generation_tokens_total": 32,
        "vllm:num_preemptions_total": 0,
        "vllm:admission_rejections_total": 0,
    }
    with clean.connect("runs", stream=True, max_tokens=4000):
        eventually(lambda: sum(rank["running"] for rank in ranks(clean)) == 1, 10)
        assert sum(rank["blocks"] - rank["free"] - rank["idle"] for rank in ranks(clean)) > 0


# --- KV events -------------------------------------------------------------------------------------------------------


class Subscriber(Blocks):
    """What a router would know of one rank."""

    def __init__(self, worker: Worker, rank: int = 0) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        said = ranks(worker)[rank]
        self._socket.connect(said["kv_events"])
        self._replay = said["kv_replay"]
        self.rank = rank
        self.size = said["block_size"]

    def close(self) -> None:
        self._context.destroy(linger=0)

    def all_from(self, first: int) -> list[Frames]:
        """All from there on, and the end mark."""
        return asked(self._context, self._replay, first, 10)

    def replay(self, first: int = 0) -> int:
        """Ask for all from there on; returns how many batches came."""
        *batches, _ = self.all_from(first)
        for frames in batches:
            self.read(frames, self.rank)
        return len(batches)

    def catch_up(self) -> None:
        """Read what has been published; what was before the subscription is asked for."""
        self.replay(self.expected)
        while self._socket.poll(0):
            topic, at, payload = self._socket.recv_multipart()
            if int.from_bytes(at, "big") >= self.expected:
                self.read((topic, at, payload), self.rank)

    def predicted(self, worker: Worker, *texts: str) -> int:
        """How many tokens of the prompt are cached, by what it was told."""
        said = worker.http.post("/tokenize", json={"messages": messages(*texts)}).json()["tokens"]
        return self.overlap(said)


@pytest.fixture
def heard(clean: Worker) -> Iterator[Subscriber]:
    subscriber = Subscriber(clean)
    ask(clean, "Hello.")  # that its cache is clean is told with the next step
    subscriber.catch_up()
    yield subscriber
    subscriber.close()


def test_what_events_promise_is_what_the_engine_finds(clean: Worker, heard: Subscriber) -> None:
    """Conversations that grow, share beginnings and push each other out of a small cache."""
    histories: dict[int, list[str]] = {}
    for turn in range(60):
        session = turn * 7 % 12
        history = histories.setdefault(session, [LONG + f"I am guest {session % 5}. " * 20])
        heard.catch_up()
        expected = heard.predicted(clean, *history)
        cached, _, answer = ask(clean, *history, max_tokens=24)
        assert cached == expected, (turn, session)
        history += [answer, f"And now, in turn {turn}? " * 12]
    heard.catch_up()
    (rank, _) = ranks(clean)
    assert len(heard.chains) == rank["cached"]
    assert "BlockRemoved" in heard.kinds
    assert rank["free"] < 32


def test_events_that_were_missed_are_replayed_from_where_one_asks(clean: Worker, heard: Subscriber) -> None:
    ask(clean, LONG)
    ask(clean, LONG + "more")
    heard.catch_up()
    late = Subscriber(clean)
    try:
        late.expected = heard.expected - 1
        late.chains = dict(heard.chains)
        for block in heard.stored[-1]["block_hashes"]:
            del late.chains[block]
        assert late.replay(heard.expected - 1) == 1
        assert late.chains == heard.chains
        assert late.replay(heard.expected) == 0
    finally:
        late.close()


def test_events_are_what_a_real_vllm_sends(clean: Worker, heard: Subscriber) -> None:
    """By a recording: the same kinds, names and types, and the same frames around them."""
    numbers = recorded().run("numbers")
    real = form([event for step in numbers.steps for frames in step.frames for event in events(frames)])
    clean.http.post("/v1/load_lora_adapter", json={"lora_name": "poet"}).raise_for_status()
    try:
        for at in range(8):  # until there is no room
            ask(clean, f"Guest {at} has a coat. " * 200)
        ask(clean, LONG, model="poet")
        ask(clean, LONG, cache_salt="mine")
    finally:
        clean.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).raise_for_status()
    clean.http.post("/reset_prefix_cache").raise_for_status()
    ask(clean, LONG)
    first = heard.expected
    *batches, end = heard.all_from(first)
    mine = [event for frames in batches for event in events(frames)]
    assert set(real) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    mocked = form(mine)
    assert mocked.keys() == real.keys()
    for kind, names in real.items():
        assert names.keys() - mocked[kind].keys() == {name for name, types in names.items() if "absent" in types}
        for name, types in mocked[kind].items():
            assert types <= names[name], (kind, name)
    assert {len(event["block_hashes"]) for event in mine if event["type"] == "BlockRemoved"} == {1}
    [adapter] = {event["lora_id"] for event in mine if event.get("lora_name") == "poet"}
    assert adapter >= 1
    assert end == numbers.replayed[-1]
    told = numbers.steps[0].frames[0]
    assert [len(each) for each in batches[0][:2]] == [len(each) for each in told[:2]]
    for each in (batches[0], told):
        at, _, rank = msgspec.msgpack.decode(each[2])
        assert (type(at), rank) == (float, 0)


@pytest.mark.parametrize("name", [run.name for run in recorded().runs])
def test_what_a_real_vllm_has_said_foretells_what_it_found(name: str) -> None:
    """So the recording is read as it is meant: `cached` is vLLM's own count."""
    run = recorded().run(name)
    ranks: dict[int, Blocks] = {}
    for step in run.steps:
        blocks = ranks.setdefault(step.rank, Blocks())
        if step.prompt:
            assert blocks.overlap(step.prompt, step.adapter, step.salt) == step.cached, step.what
        for frames in step.frames:
            blocks.read(frames, step.rank)
    assert {blocks.size for blocks in ranks.values()} == {run.block_size}
    published = [frames for step in run.steps if step.rank == 0 for frames in step.frames]
    assert run.replayed[:-1] == published[run.replayed_from :]
    assert run.replayed[-1] == (b"", b"\xff" * 8, b"")


def test_a_cleared_cache_is_told(clean: Worker, heard: Subscriber) -> None:
    ask(clean, LONG)
    clean.http.post("/reset_prefix_cache").raise_for_status()
    heard.catch_up()
    assert heard.chains  # it is told with the next step, as vLLM does it
    heard.kinds.clear()
    assert ask(clean, LONG)[0] == 0
    heard.catch_up()
    assert heard.kinds[0] == "AllBlocksCleared"
    assert len(heard.chains) == ranks(clean)[0]["cached"]


def test_each_rank_tells_of_its_own_blocks(clean: Worker, heard: Subscriber) -> None:
    other = Subscriber(clean, 1)
    try:
        other.catch_up()
        heard.catch_up()
        before = len(heard.chains)
        ask(clean, LONG, rank=1)
        other.catch_up()
        heard.catch_up()
        assert (len(heard.chains), bool(other.chains)) == (before, True)
    finally:
        other.close()


def test_adapters_and_salts_are_told(clean: Worker, heard: Subscriber) -> None:
    clean.http.post("/v1/load_lora_adapter", json={"lora_name": "poet"}).raise_for_status()
    try:
        ask(clean, LONG, model="poet", cache_salt="mine")
        heard.catch_up()
    finally:
        clean.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).raise_for_status()
    first = heard.stored[-2] if heard.stored[-1]["parent_block_hash"] else heard.stored[-1]
    assert first["lora_name"] == "poet"
    assert first["extra_keys"][:2] == [["poet", "mine"], ["poet"]]


def test_older_engines_send_arrays() -> None:
    old = Worker(profile=QUICK, kv_events=KvEvents(port=0, replay_port=0, topic="kv", old=True))
    try:
        ask(old, LONG)
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.connect(ranks(old)[0]["kv_replay"])
            asking.send_multipart((b"", bytes(8)))
            assert asking.poll(10_000)
            _, topic, number, payload = asking.recv_multipart()
            asking.setsockopt(zmq.LINGER, 0)
        _, [[kind, hashes, parent, tokens, *rest], *_], rank = msgspec.msgpack.decode(payload)
        assert (topic, number, kind, parent, rest, rank) == (b"kv", bytes(8), "BlockStored", None, [16, None, "GPU"], 0)
        assert len(tokens) == 16 * len(hashes)
    finally:
        old.close()


# --- faults of the whole worker --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def victim() -> Iterator[Worker]:
    running = Worker(profile=QUICK, kv_events=KvEvents(port=0, replay_port=0))
    yield running
    running.close()


def broken(connection: socket.socket) -> bool:
    """Read to the end; whether that was a reset."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return False


def order(worker: Worker, **fault: Any) -> None:
    worker.http.post("/mock/faults", json=fault).raise_for_status()


def test_a_crash_breaks_what_runs_and_loses_what_was_cached(victim: Worker) -> None:
    ask(victim, LONG)
    heard = Subscriber(victim)
    try:
        heard.catch_up()
        assert heard.chains
        with victim.connect("runs", stream=True, max_tokens=4000) as running:
            assert running.recv(65536).startswith(b"HTTP/1.1 200")
            order(victim, mode="crash", seconds=0.2, contains="poison")
            assert ask(victim, LONG)[0] > 0  # it is not for this one
            with victim.connect("eats", messages=messages("some poison")) as eating:
                assert broken(eating)
            assert broken(running)
        eventually(lambda: victim.http.get("/health").status_code == 200, 10)
        assert ask(victim, LONG)[0] == 0
        again = Subscriber(victim)
        try:
            again.catch_up()  # from number 0 on, and only what came after
            assert len(again.chains) == ranks(victim)[0]["cached"] > 0
        finally:
            again.close()
        eventually(lambda: victim.get("/mock/state")["active"] == 0, 10)
    finally:
        heard.close()


def test_while_it_loads_everything_is_503(victim: Worker) -> None:
    order(victim, mode="load", seconds=30)
    asked = ("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/v1/responses/x")
    for method, path in asked:
        answer = victim.http.request(method, path, json=CHAT if method == "POST" else None)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Loading model")
    order(victim, mode="load", seconds=0)
    assert victim.http.get("/health").status_code == 200
    loading = Worker(profile=QUICK, startup_s=3000, speed=100)
    try:
        assert loading.http.get("/health").status_code == 503
    finally:
        loading.close()


def test_a_frozen_worker_says_nothing_and_then_goes_on(victim: Worker) -> None:
    with victim.connect("frozen", stream=True, max_tokens=4000) as stream:
        assert stream.recv(65536).startswith(b"HTTP/1.1 200")
        order(victim, mode="freeze", seconds=1.0)
        began = time.monotonic()
        assert victim.http.get("/health").status_code == 200
        assert time.monotonic() - began > 0.8
        stream.settimeout(10)
        assert stream.recv(65536)


def test_new_connections_are_refused_for_a_while(victim: Worker) -> None:
    with victim.connect("stays", stream=True, max_tokens=4000) as stays:
        assert stays.recv(65536).startswith(b"HTTP/1.1 200")
        order(victim, mode="refuse", seconds=0.5)

        def refused() -> bool:
            try:
                socket.create_connection((victim.host, victim.port), timeout=5).close()
            except ConnectionRefusedError:
                return True
            return False

        eventually(refused, 10)
        assert stays.recv(65536)
        eventually(lambda: not refused(), 10)
        with httpx.Client(base_url=victim.url, trust_env=False, verify=False) as fresh:
            assert fresh.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_dropped_connection_is_not_announced(victim: Worker, stream: bool) -> None:
    order(victim, mode="drop")
    with victim.connect("drop", stream=stream) as connection:
        read = b"".join(iter(lambda: connection.recv(65536), b""))
    head = read.partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 200")
    assert b"connection: close" not in head
    assert read.endswith(b"0\r\n\r\n") if stream else b'"usage"' in read
    assert victim.turns("drop")[-1]["outcome"] == "completed"


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--profile", "gtx"], "there is no profile 'gtx'"),
        (["--kv-blocks", "5"], "--kv-blocks needs a --profile"),
        (["--kv-events-port", "5557"], "KV events need a profile"),
        (["--profile", "quick", "--kv-replay-port", "1"], "--kv-replay-port needs a --kv-events-port"),
        (["--profile", "quick", "--kv-events-port", "65535", "--dp-size", "2"], "the last one would be above 65535"),
        (["--speed", "0"], "speed must be more than 0"),
    ],
)
def test_options_of_the_engine_that_do_not_fit_are_explained(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--port", "0", *options]) == 2
    assert complaint in capsys.readouterr().err


def test_each_worker_and_rank_has_ports_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = [
        "--profile",
        "quick",
        "--count",
        "2",
        "--dp-size",
        "3",
        "--kv-events-port",
        "6000",
        "--kv-replay-port",
        "7000",
    ]
    where = cli._settings(parser.parse_args(words), 9002, 1).kv_events
    assert where is not None
    assert (where.port, where.replay_port) == (6003, 7003)


def test_a_port_for_events_in_use_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--port", "0", "--profile", "quick", "--kv-events-port", str(port)]) == 1
    assert f"KV events at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_a_profile_of_ones_own_is_read(tmp_path: Any) -> None:
    path = tmp_path / "own.toml"
    path.write_text("about = 'x'\n[times]\nstep_ms = 3\n[engine]\nblocks = 9\n")
    own: Profile = profiles.load(str(path))
    assert (own.name, own.times.step, own.blocks) == ("own", 0.003, 9)
