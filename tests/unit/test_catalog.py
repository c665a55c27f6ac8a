"""Which workers serve which model: every promise of app/fleet/catalog.py, in virtual time, with workers that list what
a test has them list."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from app.errors import TurnError
from app.fleet.catalog import MODELS, Catalog
from app.fleet.workers import Fleet, Worker, make_worker
from app.http.headers import Header
from backends.memory import MemoryStore
from backends.registry import MAX_VALUE, Registry
from tests.support.fakes import in_virtual_time, settle

INTERVAL = 30.0
DAY = 86_400.0


def raw(model: str) -> msgspec.Raw:
    return msgspec.Raw(json.dumps({"id": model, "of": "worker"}).encode())


class Workers:
    """What each lists; an error: it does not. `slow`: seconds until it says so."""

    def __init__(self, **lists: list[str] | TurnError) -> None:
        self.lists: dict[str, list[str] | TurnError] = dict(lists)
        self.asked: Counter[str] = Counter()
        self.slow = 0.0
        self.together = self.most = 0

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient()

    async def read(self, client: httpx.AsyncClient, worker: Worker, headers: list[Header]) -> dict[str, msgspec.Raw]:
        said = self.lists[worker.name]
        self.asked[worker.name] += 1
        self.together += 1
        self.most = max(self.most, self.together)
        await asyncio.sleep(self.slow)
        self.together -= 1
        if isinstance(said, TurnError):
            raise said
        return {model: raw(model) for model in said}


def fleet_of(*names: str) -> Fleet:
    loop = asyncio.get_running_loop()
    made = (
        make_worker(f"http://{name}:1", name=name, connect_limit=1, idle_limit=1, clock=loop.time) for name in names
    )
    return Fleet(made, clock=loop.time)


@contextlib.asynccontextmanager
async def catalog_of(
    workers: Workers,
    *,
    fleet: Fleet | None = None,
    registry: Registry | None = None,
    strict: bool = True,
    interval: float = INTERVAL,
) -> AsyncIterator[Catalog]:
    loop = asyncio.get_running_loop()
    catalog = Catalog(
        fleet or fleet_of(*workers.lists),
        workers,
        list,
        interval=interval,
        strict=strict,
        clock=loop.time,
        wall=lambda: loop.time() + 1_000_000.0,
        rng=random.Random(1),
    )
    await catalog.start(registry)
    try:
        await settle()
        yield catalog
    finally:
        await catalog.aclose()


def serving(catalog: Catalog, model: str) -> set[str] | None:
    names = catalog.serving(model)
    return None if names is None else set(names)


async def learnt(catalog: Catalog, model: str) -> set[str] | None:
    names = await catalog.learn(model)
    return None if names is None else set(names)


async def refusal(catalog: Catalog, model: str) -> str:
    with pytest.raises(TurnError) as told:
        await catalog.learn(model)
    return told.value.code


@in_virtual_time
async def test_a_name_of_any_length_is_not_remembered() -> None:
    workers = Workers(a=["m"], b=["m"])
    async with catalog_of(workers) as catalog:
        before = workers.asked.copy()
        assert await refusal(catalog, "n" * 1025) == "model_not_found"
        assert workers.asked == before
        assert not catalog._absent
        assert await refusal(catalog, "n" * 1024) == "model_not_found"
        assert list(catalog._absent) == ["n" * 1024]


AWAY = TurnError("worker_unreachable", "nobody")
SLOW = TurnError("worker_timeout", "late")
KEYED = TurnError("invalid_api_key", "who?")


@in_virtual_time
async def test_what_all_serve_is_not_looked_at_any_further() -> None:
    async with catalog_of(Workers(x=["m"], y=["m", "n"])) as catalog:
        assert (serving(catalog, "m"), serving(catalog, "n"), serving(catalog, "o")) == (None, {"y"}, set())
        assert catalog.partial == ("n",)
        assert list(catalog.entries() or ()) == ["m", "n"]
        assert (catalog.models_of("y"), catalog.models_of("z")) == (("m", "n"), None)


@in_virtual_time
async def test_who_serves_what_a_worker_serves() -> None:
    async with catalog_of(Workers(x=["m"], y=["m", "n"], z=["m", "n", "o"], u=["m"])) as catalog:
        assert catalog.choices_with("x") == {None}
        assert catalog.choices_with("y") == {None, frozenset("yz")}
        assert catalog.choices_with("z") == {None, frozenset("yz"), frozenset("z")}
    async with catalog_of(Workers(x=["m"], y=["n"], z=KEYED)) as catalog:
        assert catalog.choices_with("x") == {frozenset("xz")}
        assert catalog.choices_with("z") == {frozenset("xz"), frozenset("yz")}
    assert Catalog.off(fleet_of("x")).choices_with("x") == {None}


@in_virtual_time
async def test_a_worker_whose_list_nobody_knows_may_serve_any_model() -> None:
    workers = Workers(x=["m"], y=AWAY, z=KEYED)
    async with catalog_of(workers) as catalog:
        assert (serving(catalog, "m"), await learnt(catalog, "n")) == (None, {"y", "z"})
        assert [each.name for each in catalog.refused()] == ["z"]
        workers.lists["y"] = ["n"]
        await asyncio.sleep(5)  # not INTERVAL: nothing is known of it
        assert (serving(catalog, "m"), serving(catalog, "n")) == ({"x", "z"}, {"y", "z"})
    async with catalog_of(Workers(x=AWAY, y=KEYED)) as catalog:
        assert (serving(catalog, "m"), catalog.entries(), catalog.partial) == (None, None, ())


@in_virtual_time
async def test_a_name_that_nobody_lists_has_the_workers_asked_once_for_all_who_wait() -> None:
    workers = Workers(x=["m"], y=["m"])
    async with catalog_of(workers) as catalog:
        await asyncio.sleep(2)
        before = workers.asked.copy()
        workers.lists["y"] = ["m", "new"]
        found = await asyncio.gather(*(learnt(catalog, "new") for _ in range(50)))
        assert found == [{"y"}] * 50
        assert (workers.asked - before) == {"x": 1, "y": 1}


@in_virtual_time
async def test_names_that_never_were_cost_the_workers_little() -> None:
    workers = Workers(x=["m"])
    async with catalog_of(workers) as catalog:
        loop = asyncio.get_running_loop()
        began, before = loop.time(), workers.asked["x"]
        for number in range(300):
            code, _ = await asyncio.gather(refusal(catalog, f"never-{number}"), asyncio.sleep(0.1))
            assert code == "model_not_found"
        assert workers.asked["x"] - before <= loop.time() - began + 2
        began = loop.time()
        for _ in range(100):
            await refusal(catalog, "never-299")
        assert loop.time() - began < 2.1, "it was looked for just now"


@in_virtual_time
async def test_a_request_waits_five_seconds_at_most_and_is_not_told_what_nobody_knows() -> None:
    workers = Workers(x=["m"], y=["m"])
    async with catalog_of(workers) as catalog:
        workers.slow = 100.0
        began = asyncio.get_running_loop().time()
        assert await refusal(catalog, "new") == "no_worker"
        assert asyncio.get_running_loop().time() - began < 5.1


@in_virtual_time
async def test_what_was_loaded_while_its_worker_was_asked_is_found_by_the_next_question() -> None:
    """Of all who ask then, by one question for them all, which a second later another name may cause."""
    workers = Workers(x=["m"], y=["m"])
    async with catalog_of(workers) as catalog:
        await asyncio.sleep(2)
        workers.slow = 1.4
        catalog.look()
        await asyncio.sleep(0.1)  # both are asked, and say what they served until now
        before = workers.asked.copy()
        workers.lists["y"] = ["m", "new"]
        assert await asyncio.gather(*(learnt(catalog, "new") for _ in range(20))) == [{"y"}] * 20
        assert (workers.asked - before) == {"x": 1, "y": 1}


@in_virtual_time
async def test_an_older_word_of_another_replica_costs_a_request_nothing() -> None:
    """It comes while the worker is asked for a model that it has just loaded."""
    registry = MemoryStore().registry
    workers = Workers(x=["m"], y=["m"])
    async with catalog_of(workers, registry=registry) as catalog:
        await asyncio.sleep(2)
        workers.slow = 0.5
        workers.lists["y"] = ["m", "new"]
        finding = asyncio.create_task(learnt(catalog, "new"))
        await asyncio.sleep(0.2)
        record = {"models": {"m": None}, "at": 1_000_001.0}
        await registry.put(MODELS, "y", json.dumps(record).encode(), None)
        assert await finding == {"y"}
        await asyncio.sleep(1)
        assert list(json.loads((await registry.list(MODELS))["y"])["models"]) == ["m", "new"]


@in_virtual_time
async def test_in_a_large_fleet_that_was_asked_a_moment_ago_a_name_is_absent() -> None:
    """Its next round may not begin before ten seconds are over; nobody waits for that."""
    workers = Workers(**{f"w{number}": ["m"] for number in range(200)})
    async with catalog_of(workers) as catalog:
        await asyncio.sleep(2)
        assert await refusal(catalog, "never") == "model_not_found"
        assert await refusal(catalog, "another") == "model_not_found"


@in_virtual_time
async def test_one_slow_worker_does_not_keep_a_request_from_what_another_says() -> None:
    workers = Workers(x=["m"], y=["m"])
    async with catalog_of(workers) as catalog:
        await asyncio.sleep(2)
        original = workers.read

        async def read(client: httpx.AsyncClient, worker: Worker, headers: list[Header]) -> dict[str, msgspec.Raw]:
            if worker.name == "x":
                await asyncio.sleep(1.5)
            return await original(client, worker, headers)

        workers.read = read  # type: ignore[method-assign]
        workers.lists["y"] = ["m", "new"]
        began = asyncio.get_running_loop().time()
        assert await learnt(catalog, "new") == {"y"}
        assert asyncio.get_running_loop().time() - began < 0.1


@in_virtual_time
async def test_a_large_fleet_is_asked_less_often_and_not_all_at_once() -> None:
    names = [f"w{number}" for number in range(400)]
    workers = Workers(**{name: ["m"] for name in names})
    workers.slow = 0.01
    async with catalog_of(workers) as catalog:
        assert serving(catalog, "m") is None
        before = workers.asked.total()
        await asyncio.sleep(300)
        assert (workers.asked.total() - before) / 300 < 5
        assert workers.most <= 32


@in_virtual_time
async def test_what_a_worker_serves_is_known_right_after_a_restart_and_at_every_replica() -> None:
    registry = MemoryStore().registry
    workers = Workers(x=["m"], y=["n"])
    async with catalog_of(workers, registry=registry) as one:
        await asyncio.sleep(1)
        workers.lists["y"] = AWAY
        async with catalog_of(workers, registry=registry) as other:
            assert (serving(other, "m"), serving(other, "n")) == ({"x"}, {"y"})
            assert (other.entries() or {})["n"] == raw("n"), "as the worker said it"
            workers.lists["x"] = ["m", "new"]
            asked = workers.asked["x"]
            one.look()
            await asyncio.sleep(0.1)
            assert (serving(other, "new"), workers.asked["x"]) == ({"x"}, asked + 1)
    workers.lists = {"x": AWAY, "y": AWAY}
    async with catalog_of(workers, registry=registry) as later:
        assert (serving(later, "new"), serving(later, "n")) == ({"x"}, {"y"})
        assert await refusal(later, "never") == "model_not_found"


@in_virtual_time
async def test_a_record_is_written_on_change_only() -> None:
    registry = MemoryStore().registry
    workers = Workers(x=["m"])
    async with catalog_of(workers, registry=registry) as catalog:
        await asyncio.sleep(1)
        first = await registry.list(MODELS)
        await asyncio.sleep(300)
        assert workers.asked["x"] > 8
        assert await registry.list(MODELS) == first
        workers.lists["x"] = ["n"]
        catalog.look()
        await asyncio.sleep(1)
        assert list(json.loads((await registry.list(MODELS))["x"])["models"]) == ["n"]
        assert (serving(catalog, "m"), serving(catalog, "n")) == (set(), None)


@in_virtual_time
async def test_what_was_asked_before_another_replica_told_does_not_go_before_that() -> None:
    registry = MemoryStore().registry
    workers = Workers(x=["m"])
    async with catalog_of(workers, registry=registry) as catalog:
        await asyncio.sleep(1)
        workers.slow = 0.5
        catalog.look()
        await asyncio.sleep(0.1)  # it is being asked, and says what it served until now
        workers.lists["x"], workers.slow = ["m", "new"], 0.0
        record = {"models": {"m": None, "new": None}, "at": 1_000_000.0}
        await registry.put(MODELS, "x", json.dumps(record).encode(), None)
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert serving(catalog, "new") is None
            assert list(json.loads((await registry.list(MODELS))["x"])["models"]) == ["m", "new"]


@in_virtual_time
async def test_a_record_that_cannot_be_read_costs_only_itself() -> None:
    registry = MemoryStore().registry
    await registry.put(MODELS, "x", b"\xff{", None)
    async with catalog_of(Workers(x=["m"], y=AWAY), registry=registry) as catalog:
        await asyncio.sleep(1)
        assert serving(catalog, "m") is None
        assert list(json.loads((await registry.list(MODELS))["x"])["models"]) == ["m"], "it is written again"


@in_virtual_time
async def test_a_list_that_is_too_long_for_a_record_is_written_without_its_entries_or_not_at_all() -> None:
    registry = MemoryStore().registry
    some, many = ([f"adapter-{number:06}" for number in range(count)] for count in (2000, 20_000))
    workers = Workers(x=some, y=many)
    async with catalog_of(workers, registry=registry) as catalog:
        await asyncio.sleep(1)
        assert (serving(catalog, many[-1]), serving(catalog, some[0])) == ({"y"}, None)
        records = await registry.list(MODELS)
        assert set(records) == {"x"}
        assert len(records["x"]) <= MAX_VALUE
    workers.lists["x"] = AWAY
    async with catalog_of(workers, registry=registry) as later:
        assert later.models_of("x") == tuple(some)
        assert json.loads(bytes((later.entries() or {})[some[0]])) == {"id": some[0], "object": "model"}


@in_virtual_time
async def test_models_of_a_worker_that_has_left_are_known_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fleet.catalog._LOOK_EVERY", 30.0)  # a day of half seconds takes seconds
    registry = MemoryStore().registry
    workers = Workers(x=["m"], y=["n"])
    fleet = fleet_of("x", "y")
    async with catalog_of(workers, fleet=fleet, registry=registry, interval=600) as catalog:
        await asyncio.sleep(1)
        fleet.remove("y")
        catalog.fleet_changed()
        assert serving(catalog, "m") is None
        assert list(catalog.entries() or ()) == ["m"]
        assert await refusal(catalog, "n") == "no_worker"
        await asyncio.sleep(DAY + 2000)
        assert await refusal(catalog, "n") == "model_not_found"
        assert set(await registry.list(MODELS)) == {"x"}
        await registry.remove(MODELS, "x")
        await asyncio.sleep(31)
        assert set(await registry.list(MODELS)) == {"x"}, "whoever has the worker writes it again"


@in_virtual_time
async def test_another_worker_under_the_name_is_asked_at_once() -> None:
    workers = Workers(x=["m"], y=["m"])
    fleet = fleet_of("x", "y")
    async with catalog_of(workers, fleet=fleet) as catalog:
        workers.lists["x"] = ["n"]
        fleet.put(next(iter(fleet_of("x"))))
        catalog.fleet_changed()
        await asyncio.sleep(0.1)
        assert (serving(catalog, "m"), serving(catalog, "n")) == ({"y"}, {"x"})
        fleet.put(next(iter(fleet_of("z"))))
        workers.lists["z"] = ["m"]
        catalog.fleet_changed()
        assert serving(catalog, "m") == {"y"}, "who has just come is asked before it may serve anything"
        await asyncio.sleep(0.1)
        assert serving(catalog, "m") == {"y", "z"}


@in_virtual_time
async def test_engines_that_take_any_name_get_it_at_once() -> None:
    workers = Workers(x=["m"], y=["n"])
    async with catalog_of(workers, strict=False) as catalog:
        assert (serving(catalog, "m"), serving(catalog, "o")) == ({"x"}, None)
