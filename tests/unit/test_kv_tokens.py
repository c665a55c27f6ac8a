"""Prompts as tokens, and what is known by them, at mock workers that tell of their caches."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from app.fleet.placement.kv import Caches, Prompt
from app.fleet.placement.prefix import Prefixes
from app.fleet.placement.tokens import Tokenizer
from app.fleet.served import Known, Served
from app.fleet.specs import WorkerSpec
from app.fleet.workers import Fleet, Target, make_worker
from app.metrics import Metrics
from app.turn.fields import FieldReader
from mocker.engine import profile
from mocker.settings import KvEvents
from tests.support.mocks import Worker

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
LONG = "tell me more of the coats and of the hooks " * 12
PATIENCE = 20.0


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(profile=profile.load("quick"), speed=20.0, kv_events=KvEvents(port=0, replay_port=0))
    yield made
    made.close()


class Router:
    """What `kv` has of one worker."""

    def __init__(self, worker: Worker, *, seconds: float = PATIENCE, adapter: str | None = "") -> None:
        (publisher,) = worker._app.turns.publishers
        self.metrics = Metrics()
        made = make_worker(worker.url, name="w", connect_limit=5, idle_limit=4)
        made.spec = WorkerSpec(
            name="w", url=worker.url, kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint or ""
        )
        self.fleet = Fleet([made])
        self.target: Target = made.targets[0]
        self.tokenizer = Tokenizer(self.metrics, lambda: b"", seconds=seconds)
        self.caches = Caches(
            self.fleet,
            self.metrics,
            Prefixes(self.metrics, memory=1 << 20),
            self.tokenizer,
            adapter=lambda worker, model: adapter,
        )

    async def __aenter__(self) -> Router:
        self.caches.start()
        await self.until(lambda: self.caches.believed == 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.caches.close()
        self.fleet.close()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.005)

    async def prompt(self, body: dict[str, Any], path: bytes = CHAT) -> Prompt:
        said = FieldReader(prompts="exactly").decode(json.dumps(body).encode()).said
        made = self.caches.prompt(path, "mock-model", said)
        assert made is not None
        await made.read()
        return made

    async def share(self, body: dict[str, Any], path: bytes = CHAT) -> float:
        return (await self.prompt(body, path)).shares().get(self.target, 0.0)

    def tokenized(self) -> dict[str, int]:
        return {cell[0]: count for cell, count in self.metrics.tokenized.cells.items() if count}


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], "max_tokens": 4, **more}


def cached(worker: Worker, body: dict[str, Any], path: bytes = CHAT) -> tuple[int, int]:
    """By the worker's own word, when it is asked: of how many tokens how many were cached."""
    answer = worker.http.post(path.decode(), json={"model": "mock-model", **body}).raise_for_status().json()
    return answer["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (chat("chat " + LONG), CHAT),
        (chat("tools " + LONG, tools=[{"type": "function", "function": {"name": "f", "description": LONG}}]), CHAT),
        (chat("salted " + LONG, cache_salt="mine"), CHAT),
        ({"prompt": "plain " + LONG, "max_tokens": 4}, COMPLETIONS),
    ],
)
async def test_what_is_foreseen_is_what_the_worker_reports(worker: Worker, body: dict[str, Any], path: bytes) -> None:
    async with Router(worker) as router:
        assert await router.share(body, path) < 0.3
        await asyncio.to_thread(cached, worker, body, path)
        await router.until(lambda: len(router.caches.index) > 5)
        async with asyncio.timeout(PATIENCE):
            while (share := await router.share(body, path)) < 0.8:
                await asyncio.sleep(0.01)
        tokens, found = await asyncio.to_thread(cached, worker, body, path)
        assert share * tokens == found


async def test_a_prompt_that_is_tokens_is_not_asked_for(worker: Worker) -> None:
    async with Router(worker) as router:
        prompt = await router.prompt({"prompt": [5, 6, 7, 1 << 17]}, COMPLETIONS)
        assert prompt._tokens == array("I", [5, 6, 7, 1 << 17]).tobytes()
        assert router.tokenized() == {"given": 1}


async def test_a_prompt_is_asked_for_once(worker: Worker) -> None:
    async with Router(worker) as router:
        body = chat("once " + LONG)
        await asyncio.gather(*(router.share(body) for _ in range(5)))
        await router.share(body)
        assert router.tokenized() == {"ok": 1, "remembered": 1}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (chat("x", reasoning_effort="low"), CHAT),
        (chat("x", documents=[{"text": "d"}]), CHAT),
        (chat("x", tool_choice="required"), CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, CHAT),
        ({"prompt": ["a", "b"]}, COMPLETIONS),
        ({"prompt": [-1]}, COMPLETIONS),
        ({"system": "s", "messages": [{"role": "user", "content": "x"}]}, b"/v1/messages"),
        ({"input": "x"}, b"/v1/responses"),
    ],
)
async def test_what_has_no_exact_tokens_is_not_asked_for(worker: Worker, body: dict[str, Any], path: bytes) -> None:
    async with Router(worker) as router:
        before = len(worker.get("/mock/turns")["turns"])
        prompt = await router.prompt(body, path)
        prompt.placed(router.target)
        assert router.tokenized() == {"inexact": 1}
        assert len(worker.get("/mock/turns")["turns"]) == before


def test_a_prompt_that_is_placed_by_load_anyway_waits_for_no_tokens() -> None:
    metrics = Metrics()
    caches = Caches(
        Fleet([]),
        metrics,
        Prefixes(metrics, memory=1 << 20),
        Tokenizer(metrics, lambda: b"", seconds=PATIENCE),
        adapter=lambda worker, model: "",
    )

    def waits(body: dict[str, Any]) -> bool:
        prompt = caches.prompt(CHAT, "m", FieldReader(prompts="exactly").decode(json.dumps(body).encode()).said)
        assert prompt is not None
        assert prompt.waits == bool(prompt.name(0.0))
        return prompt.waits

    assert [waits(chat(text)) for text in ("hi", "x" * 200, "x" * 256, LONG)] == [False, False, True, True]


async def test_without_tokens_it_is_known_what_was_sent(worker: Worker) -> None:
    async with Router(worker, seconds=0.0001) as router:
        body = chat("without " + LONG)
        (await router.prompt(body)).placed(router.target)
        assert await router.share(body) > 0.7
        assert router.tokenized() == {"failed": 2}


async def test_what_an_adapter_has_is_not_known_where_it_is_not_said_which_model_is_one(worker: Worker) -> None:
    body = chat("adapter " + LONG)
    await asyncio.to_thread(cached, worker, body)
    for adapter, least, most in (("", 0.8, 1.0), ("poet", 0.0, 0.0), (None, 0.0, 0.0)):
        async with Router(worker, adapter=adapter) as router:
            assert least <= await router.share(body) <= most, adapter


async def test_tokens_that_are_remembered_are_bounded() -> None:
    tokenizer = Tokenizer(Metrics(), lambda: b"", seconds=1.0)
    for number in range(40):
        tokenizer._remember((number, number), array("I", range(1 << 18)).tobytes())
    assert tokenizer._size <= 16 << 20
    assert sum(map(len, tokenizer._known.values())) >= 15 << 20
    assert (39, 39) in tokenizer._known
    assert (0, 0) not in tokenizer._known


async def test_prompts_of_next_to_no_tokens_are_bounded_as_well() -> None:
    """An entry takes memory of its own."""
    tokenizer = Tokenizer(Metrics(), lambda: b"", seconds=1.0)
    for number in range(100_000):
        tokenizer._remember((number, number), b"")
    assert len(tokenizer._known) < 60_000


@pytest.mark.parametrize(
    ("entries", "model", "adapter"),
    [
        ([{"id": "m"}], "m", ""),
        ([{"id": "m", "parent": None}, {"id": "a", "parent": "m"}], "m", ""),
        ([{"id": "m", "parent": None}, {"id": "a", "parent": "m"}], "a", "a"),
        ([{"id": "m"}, {"id": "a"}], "m", None),
        ([{"id": "m"}], "other", None),
        ([{"id": "m", "parent": 3}], "m", None),
        ([{"id": "m"}], "", ""),
    ],
)
def test_which_model_is_an_adapter_is_what_the_list_says(
    entries: list[dict[str, Any]], model: str, adapter: str | None
) -> None:

    worker = make_worker("http://h:1", name="w", connect_limit=1, idle_limit=1)
    served = Served(Fleet([worker]), strict=True, changed=lambda: None)
    assert served.adapter(worker, model) is None
    served.by_name["w"] = Known()
    served.note("w", served.by_name["w"], {each["id"]: msgspec.Raw(json.dumps(each).encode()) for each in entries})
    assert served.adapter(worker, model) == adapter
