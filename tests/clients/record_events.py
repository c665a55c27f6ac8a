"""`python -m tests.clients.record_events [NAME ...]`: what the installed vLLM says of its blocks, into
`tests/unit/files/`.

Engines with room for a few blocks, so that they remove some: `numbers` as hashes, with an adapter and a salt; `bytes`
as hashes, and a topic; two `ranks`, which are seven processes that take long to start.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import zmq

from tests.clients.vllm import MODEL, consecutive_ports, installed, kv_events, make_model, standing_vllm, version
from tests.support.kv_events import FILE, Frames, Recording, Run, Step, asked, recorded, write

BLOCK_SIZE, BLOCKS = 32, 12
QUIET_SECONDS = 1.5
"""So long after the last message none comes any more."""
ANSWER_SECONDS = 120
ADAPTER = "poet"
_BYTES = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
_OPTIONS = [f"--block-size={BLOCK_SIZE}", f"--num-gpu-blocks-override={BLOCKS}", f"--max-model-len={8 * BLOCK_SIZE}"]


class Recorder:
    """Asks an engine, and listens to its ranks."""

    def __init__(self, url: str, context: zmq.Context[Any], events: Sequence[str], replay: str) -> None:
        self._url = url
        self._context = context
        self._replay = replay
        self._sockets = []
        for endpoint in events:
            listening = context.socket(zmq.SUB)
            listening.subscribe(b"")
            listening.connect(endpoint)
            self._sockets.append(listening)
        self.steps: list[Step] = []

    def complete(self, what: str, prompt: list[int], *, rank: int = 0, **more: Any) -> None:
        """A prompt of tokens."""
        self._ask(what, "/v1/completions", prompt, rank, {"prompt": prompt} | more)

    def chat(self, what: str, text: str, **more: Any) -> None:
        messages = [{"role": "user", "content": text}]
        tokens = self._post("/tokenize", {"model": MODEL, "messages": messages})["tokens"]
        self._ask(what, "/v1/chat/completions", tokens, 0, {"messages": messages} | more)

    def order(self, what: str, path: str) -> None:
        self._post(path, {})
        self.steps.append(Step(what, 0, [], 0, self._heard(0)))

    def replay(self, first: int) -> list[Frames]:
        return asked(self._context, self._replay, first, ANSWER_SECONDS)

    def _ask(self, what: str, path: str, prompt: list[int], rank: int, body: dict[str, Any]) -> None:
        asked_for: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "temperature": 0, "ignore_eos": True} | body
        usage = self._post(path, asked_for, rank)["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        adapter = asked_for["model"] if asked_for["model"] != MODEL else ""
        salt = asked_for.get("cache_salt", "")
        self.steps.append(Step(what, rank, prompt, cached, self._heard(rank), adapter, salt))

    def _post(self, path: str, body: dict[str, Any], rank: int = 0) -> Any:
        headers = {"content-type": "application/json", "x-data-parallel-rank": str(rank)}
        request = Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        try:
            with urlopen(request, timeout=ANSWER_SECONDS) as answer:
                text = answer.read()
        except HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode(errors='replace')}") from error
        return json.loads(text) if text else None

    def _heard(self, rank: int) -> list[Frames]:
        found: list[Frames] = []
        while self._sockets[rank].poll(int(QUIET_SECONDS * 1000)):
            topic, at, payload = self._sockets[rank].recv_multipart()
            found.append((topic, at, payload))
        return found


class How(TypedDict):
    """How an engine is started and asked."""

    ranks: int
    options: list[str]
    settings: dict[str, str]
    topic: str
    ask: Callable[[Recorder], None]


def record(
    name: str,
    model: Path,
    folder: Path,
    *,
    ranks: int,
    options: list[str],
    settings: dict[str, str],
    topic: str,
    ask: Callable[[Recorder], None],
) -> Run:
    first = consecutive_ports(2 * ranks)
    options = [*_OPTIONS, *options]
    started = [each.format(model=model) for each in options]
    started.append(kv_events(first, first + ranks, topic))
    log = folder / f"{name}.log"
    print(f"{name}: {log}", flush=True)
    with standing_vllm(model, log, *started, settings=settings) as url, zmq.Context() as context:
        endpoints = [f"tcp://127.0.0.1:{first + rank}" for rank in range(ranks)]
        recorder = Recorder(url, context, endpoints, f"tcp://127.0.0.1:{first + ranks}")
        time.sleep(QUIET_SECONDS)  # until it has heard that we listen
        ask(recorder)
        replay_from = 1
        replayed = recorder.replay(replay_from)
        context.destroy(linger=0)
    return Run(name, options, settings, BLOCK_SIZE, recorder.steps, replay_from, replayed)


def _blocks(recorder: Recorder) -> None:
    one = [100 + at for at in range(3 * BLOCK_SIZE + 4)]
    recorder.complete("three blocks and a bit", one)
    recorder.complete("the same again", one)
    recorder.complete("all are told again on request", one, vllm_xargs={"kv_cache_report_mode": "full"})
    recorder.complete("one block more, of a session", [*one, *range(30, 60)], session_id="ticket-42")
    recorder.complete("a block is filled by the answer", [*range(200, 230)], max_tokens=BLOCK_SIZE + 4)
    recorder.chat("a chat", "Where is my coat? " * 3)
    recorder.chat("a chat with a salt", "Where is my coat? " * 3, cache_salt="mine")
    recorder.complete("an adapter's", one[: 2 * BLOCK_SIZE + 2], model=ADAPTER)
    recorder.complete("no room: some are removed", [*range(250, 250 - 5 * BLOCK_SIZE - 1, -1)])
    recorder.order("the cache is cleared", "/reset_prefix_cache")
    recorder.complete("and filled again", one[: BLOCK_SIZE + 1])


def _ranks(recorder: Recorder) -> None:
    for rank in (0, 1):
        recorder.complete(f"rank {rank}", [*range(100, 100 + 2 * BLOCK_SIZE + 1)], rank=rank)
        recorder.complete(f"rank {rank}, one block more", [*range(100, 100 + 3 * BLOCK_SIZE + 1)], rank=rank)


def _bytes(recorder: Recorder) -> None:
    one = [*range(100, 100 + 2 * BLOCK_SIZE + 1)]
    recorder.complete("two blocks", one)
    recorder.complete("one block more", [*one, *range(30, 30 + BLOCK_SIZE)])
    recorder.complete("others", [*range(30, 30 + 7 * BLOCK_SIZE)])
    recorder.complete("no room: some are removed", [*range(250, 250 - 5 * BLOCK_SIZE - 1, -1)])


RUNS: dict[str, How] = {
    "numbers": {
        "ranks": 1,
        "options": ["--enable-lora", f"--lora-modules={ADAPTER}={{model}}/adapter"],
        "settings": {"VLLM_SERVER_DEV_MODE": "1"},
        "topic": "",
        "ask": _blocks,
    },
    "bytes": {"ranks": 1, "options": [], "settings": _BYTES, "topic": "kv", "ask": _bytes},
    "ranks": {"ranks": 2, "options": ["--data-parallel-size=2"], "settings": {}, "topic": "", "ask": _ranks},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.record_events", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(RUNS)} (all)")
    names = parser.parse_args().names or list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"not known: {', '.join(unknown)}")
    if not installed():
        print("vllm is not installed: python -m tests.clients.install vllm", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="record-events-"))
    model = make_model(folder / "model")
    kept = {run.name: run for run in recorded().runs} if FILE.exists() else {}
    for name in names:
        kept[name] = record(name, model, folder, **RUNS[name])
        write(Recording(f"vLLM {version()}", [kept[each] for each in RUNS if each in kept]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
