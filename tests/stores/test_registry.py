"""The contract of `backends.registry`, sentence by sentence, against every store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import time
from contextlib import AsyncExitStack

import pytest

from backends.base import LIFETIME, ClaimStore, Reset, StoreUnavailable
from backends.registry import MAX_NAME, MAX_VALUE, Put, Registry, Removed
from tests.stores.conftest import Kind, MakeStore, across_processes
from tests.support.claimant import Claimant
from tests.support.stores import Subscriber, Watcher, a_key, eventually, make

WITHIN = 2.0
"""Seconds in which a change at one replica is known at each other one."""


@pytest.fixture
def registry(store: ClaimStore) -> Registry:
    return store.registry


@pytest.fixture
def others(other: ClaimStore) -> Registry:
    """The registry of a second instance."""
    return other.registry


class TestRecords:
    async def test_what_is_put_is_listed_by_its_name(self, registry: Registry, others: Registry) -> None:
        assert await registry.list("workers") == {}
        await registry.put("workers", "a", b"1", None)
        await others.put("workers", "b", b"2", 600)
        for each in (registry, others):
            assert await each.list("workers") == {"a": b"1", "b": b"2"}

    async def test_the_last_writer_stands(self, registry: Registry, others: Registry) -> None:
        for number in range(6):
            await (others if number % 2 else registry).put("workers", "a", b"%d" % number, random.choice([None, 600]))
            for each in (registry, others):
                assert await each.list("workers") == {"a": b"%d" % number}

    async def test_names_and_values_are_kept_as_they_are(self, registry: Registry, others: Registry) -> None:
        """Names that a path or a key prefix could mistake for something else, and values of any bytes."""
        names = ["a", "A", "a/b", "a/", "/", "..", ".", "../../x", "%2F", "~", "!", "a" * MAX_NAME, "-", "\\", "*", '"']
        records = {name: name.encode() + b"\n\x00\xff" for name in names}
        records["empty"], records["long"] = b"", random.randbytes(MAX_VALUE)
        for name, value in records.items():
            await registry.put("workers", name, value, None)
        assert await others.list("workers") == records

    async def test_kinds_are_apart(self, registry: Registry, others: Registry) -> None:
        kinds = ["workers", "worker", "workers-", "-", "w" * 32]
        for kind in kinds:
            await registry.put(kind, "a", kind.encode(), None)
        await others.remove("worker", "a")
        assert [await others.list(kind) for kind in kinds] == [
            {} if kind == "worker" else {"a": kind.encode()} for kind in kinds
        ]

    async def test_remove_is_idempotent_and_spares_the_rest(self, registry: Registry, others: Registry) -> None:
        await registry.put("marks", "a", b"1", None)
        await registry.put("marks", "b", b"2", None)
        for each in (others, registry, others):
            await each.remove("marks", "a")
            assert await registry.list("marks") == {"b": b"2"}
        await registry.put("marks", "a", b"3", None)
        assert await others.list("marks") == {"a": b"3", "b": b"2"}

    @pytest.mark.parametrize("ttl", [None, 600.0])
    async def test_of_concurrent_puts_one_stands_and_all_agree(self, make_store: MakeStore, ttl: float | None) -> None:
        stores = await make_store.many(3)
        values = [b"%d" % number for number in range(12)]  # each within the deadline, one after the other
        await asyncio.gather(
            *(stores[n % 3].registry.put("workers", "a", value, ttl) for n, value in enumerate(values))
        )
        listed = [await store.registry.list("workers") for store in stores]
        assert listed[0]["a"] in values
        assert listed == [listed[0]] * 3

    async def test_concurrent_puts_and_removals_of_many_names(self, make_store: MakeStore) -> None:
        """Each name has one writer, as a worker's record has: whatever the others do, its last word stands."""
        stores = await make_store.many(3)
        last: dict[str, bytes] = {}

        async def own(name: str, registry: Registry) -> None:
            for number in range(8):
                if random.random() < 0.3:
                    await registry.remove("workers", name)
                    last.pop(name, None)
                else:
                    last[name] = b"%d" % number
                    await registry.put("workers", name, last[name], random.choice([None, 600]))

        await asyncio.gather(*(own(f"w-{n}", stores[n % 3].registry) for n in range(20)))
        assert [await store.registry.list("workers") for store in stores] == [last] * 3

    @across_processes
    async def test_processes_see_each_others_records(self, make_store: MakeStore, registry: Registry) -> None:
        async with AsyncExitStack() as stack:
            peers = await asyncio.gather(*(stack.enter_async_context(Claimant(make_store.url)) for _ in range(2)))
            await registry.put("workers", "a", b"1", 600)
            assert await peers[0].do("list records") == {"a": "1"}
            async with Watcher(registry, "workers") as watcher:
                await peers[0].do("put record", record="b", values=["2"], ttl=None)
                await peers[1].do("remove record", record="a")
                await watcher.knows({"b": b"2"}, WITHIN)
            assert await peers[1].do("list records") == {"b": "2"}
            at = time.monotonic() + 0.2
            for number, peer in enumerate(peers):
                peer.tell("put record", record="c", values=[f"{number}-{n}" for n in range(40)], ttl=600, at=at)
            assert [await peer.answer() for peer in peers] == ["put", "put"]
            assert (await registry.list("workers"))["c"] in (b"0-39", b"1-39")

    @across_processes
    async def test_records_outlive_whoever_put_them(self, make_store: MakeStore, kind: Kind) -> None:
        async with Claimant(make_store.url) as peer:
            await peer.do("put record", record="lasting", values=["1"], ttl=None)
            await peer.do("put record", record="passing", values=["2"], ttl=600)
            await peer.kill()
        first = await make_store()
        await first.registry.put("workers", "third", b"3", None)
        await first.aclose()
        everything = {"lasting": b"1", "passing": b"2", "third": b"3"}
        assert await (await make_store()).registry.list("workers") == everything


class TestBounds:
    async def test_a_kind_out_of_bounds(self, registry: Registry) -> None:
        for bad in ("", "w" * 33, "Workers", "a/b", "..", "a b", "a\n", "ä", "a1"):
            for call in (registry.put(bad, "a", b"", None), registry.remove(bad, "a"), registry.list(bad)):
                with pytest.raises(ValueError, match="kind"):
                    await call
            with pytest.raises(ValueError, match="kind"):
                registry.watch(bad)

    async def test_a_name_out_of_bounds(self, registry: Registry) -> None:
        for bad in ("", "a" * (MAX_NAME + 1), "a b", "a\n", "ä", "\x7f", "\x00"):
            for call in (registry.put("workers", bad, b"", None), registry.remove("workers", bad)):
                with pytest.raises(ValueError, match="name"):
                    await call
        assert await registry.list("workers") == {}

    async def test_a_value_or_a_ttl_out_of_bounds(self, registry: Registry) -> None:
        with pytest.raises(ValueError, match="65536"):
            await registry.put("workers", "a", bytes(MAX_VALUE + 1), None)
        for ttl in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="ttl"):
                await registry.put("workers", "a", b"", ttl)
        assert await registry.list("workers") == {}


@pytest.mark.usefixtures("quick_looks")
class TestLifetime:
    async def test_a_record_stands_for_its_ttl_and_little_longer(
        self, registry: Registry, others: Registry, kind: Kind
    ) -> None:
        async with Watcher(others, "replicas") as watcher:
            began = time.monotonic()
            await registry.put("replicas", "a", b"1", kind.ttl)
            put = time.monotonic()
            await registry.put("replicas", "lasting", b"2", None)
            while "a" in await others.list("replicas"):
                await asyncio.sleep(0.02)
            assert began + kind.ttl <= time.monotonic() <= put + LIFETIME * kind.ttl + kind.late
            await watcher.knows({"lasting": b"2"}, kind.late)
            assert watcher.of("a") == [Put("a", b"1"), Removed("a")]
        assert await registry.list("replicas") == {"lasting": b"2"}

    async def test_a_record_that_is_put_again_before_it_ends_goes_on(
        self, registry: Registry, others: Registry, kind: Kind
    ) -> None:
        async with Watcher(others, "replicas") as watcher:
            ttl = max(kind.ttl, 1.6)  # a machine without time puts it again too late, else
            until = time.monotonic() + 2 * LIFETIME * ttl
            while time.monotonic() < until:
                await registry.put("replicas", "a", b"1", ttl)
                await asyncio.sleep(ttl / 4)
                assert await others.list("replicas") == {"a": b"1"}
            assert watcher.of("a") == [Put("a", b"1")], "told once, as it stays what it is"

    async def test_the_last_put_decides_how_long(self, registry: Registry, others: Registry, kind: Kind) -> None:
        for name, ttls in {"a": (kind.ttl, None), "b": (None, kind.ttl), "c": (600, kind.ttl)}.items():
            for ttl in ttls:
                await registry.put("replicas", name, b"1", ttl)
        async with Watcher(others, "replicas") as watcher:
            await watcher.knows({"a": b"1"}, LIFETIME * kind.ttl + kind.late)

    async def test_a_record_that_ended_can_be_put_again(self, registry: Registry, others: Registry, kind: Kind) -> None:
        async with Watcher(others, "replicas") as watcher:
            await registry.put("replicas", "a", b"1", kind.ttl)
            await watcher.until(lambda: Removed("a") in watcher.events, LIFETIME * kind.ttl + kind.late)
            await registry.put("replicas", "a", b"1", 600)
            await watcher.knows({"a": b"1"}, WITHIN)


@pytest.mark.usefixtures("quick_looks")
class TestWatch:
    async def test_reset_first_then_each_change_in_order(self, registry: Registry, others: Registry) -> None:
        await registry.put("workers", "before", b"0", None)
        async with Watcher(others, "workers") as watcher, Watcher(registry, "workers") as its_own:
            for step in ([b"1"], [b"2"], [None], [b"3"]):
                if step[0] is None:
                    await registry.remove("workers", "a")
                else:
                    await registry.put("workers", "a", step[0], None)
                expected = {"before": b"0"} | ({} if step[0] is None else {"a": step[0]})
                await watcher.knows(expected, WITHIN)
                await its_own.knows(expected, WITHIN)
            for each in (watcher, its_own):
                assert each.of("a") == [Put("a", b"1"), Put("a", b"2"), Removed("a"), Put("a", b"3")]
                assert not each.of("before")

    async def test_what_already_stood_and_what_is_of_another_kind_is_not_told(
        self, registry: Registry, others: Registry
    ) -> None:
        async with Watcher(others, "workers") as watcher:
            await registry.put("workers", "a", b"1", 600)
            await watcher.knows({"a": b"1"}, WITHIN)
            for ttl in (600, None, 300):
                await registry.put("workers", "a", b"1", ttl)
            await registry.put("worker", "b", b"2", None)
            await registry.put("workers-", "c", b"2", None)
            await registry.remove("workers", "never")
            await registry.put("workers", "end", b"", None)
            await watcher.knows({"a": b"1", "end": b""}, WITHIN)
            assert watcher.events == [Reset(), Put("a", b"1"), Put("end", b"")]

    async def test_whoever_lists_at_reset_and_follows_knows_what_stands(self, make_store: MakeStore) -> None:
        stores = await make_store.many(3)

        async def churn(registry: Registry) -> None:
            for number in range(25):
                name = random.choice("abcd")
                if random.random() < 0.4:
                    await registry.remove("workers", name)
                else:
                    await registry.put("workers", name, b"%d" % number, random.choice([None, 600]))

        async with AsyncExitStack() as stack:
            early = await stack.enter_async_context(Watcher(stores[0].registry, "workers"))
            churning = asyncio.gather(*(churn(store.registry) for store in stores))
            late = [await stack.enter_async_context(Watcher(store.registry, "workers")) for store in stores]
            await churning
            stands = await stores[1].registry.list("workers")
            for watcher in (early, *late):
                await watcher.knows(stands, WITHIN)

    async def test_several_watch_one_kind_and_one_may_leave(self, registry: Registry, others: Registry) -> None:
        async with Watcher(registry, "workers") as stays:
            async with Watcher(registry, "workers") as leaves:
                await others.put("workers", "a", b"1", None)
                for each in (stays, leaves):
                    await each.knows({"a": b"1"}, WITHIN)
            await others.put("workers", "a", b"2", None)
            await stays.knows({"a": b"2"}, WITHIN)
        async with Watcher(registry, "workers") as comes:
            assert comes.known == {"a": b"2"}

    async def test_a_watcher_that_stops_frees_what_it_held(self, registry: Registry) -> None:
        await registry.put("workers", "warm", b"", 600)
        tasks = len(asyncio.all_tasks())
        watches = [registry.watch("workers") for _ in range(4)]
        for watch in watches:
            assert await anext(watch) == Reset()
        await watches.pop().aclose()  # type: ignore[attr-defined]
        waits = asyncio.ensure_future(anext(watches[0]))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
        gc.disable()
        del watches, watch, waits
        try:
            await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
        finally:
            gc.enable()
        async with Watcher(registry, "workers") as watcher:
            await registry.put("workers", "a", b"1", None)
            await watcher.knows({"warm": b"", "a": b"1"}, WITHIN)

    async def test_a_watcher_that_lags_holds_the_last_value_of_each_name(self, registry: Registry) -> None:
        """A reader that stands still must not make the process hold every heartbeat since."""
        watch = registry.watch("replicas")
        assert await anext(watch) == Reset()
        for number in range(300):
            await registry.put("replicas", "a", b"%d" % number, 600)
        await registry.put("replicas", "end", b"", 600)
        heard: list[object] = []
        async with asyncio.timeout(5):
            while Put("a", b"299") not in heard or Put("end", b"") not in heard:
                heard.append(await anext(watch))
        assert len(heard) <= 10
        await watch.aclose()  # type: ignore[attr-defined]

    async def test_aclose_ends_every_watch(self, store: ClaimStore) -> None:
        watch = store.registry.watch("workers")
        assert await anext(watch) == Reset()
        waits = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.01)
        await store.aclose()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waits, 5)


class TestErrors:
    async def test_a_closed_store_is_unavailable(self, store: ClaimStore) -> None:
        await store.aclose()
        registry = store.registry
        for call in (
            registry.put("workers", "a", b"", None),
            registry.put("workers", "a", b"", 600),
            registry.remove("workers", "a"),
            registry.list("workers"),
            anext(registry.watch("workers")),
        ):
            with pytest.raises(StoreUnavailable):
                await call

    async def test_cancelled_calls_leave_it_usable(self, registry: Registry, others: Registry) -> None:
        for turn in range(40):
            calls = [
                asyncio.create_task(call)
                for call in (
                    registry.put("workers", "a", b"%d" % turn, 600),
                    registry.put("workers", "b", b"%d" % turn, None),
                    registry.remove("workers", "c"),
                    registry.list("workers"),
                )
            ]
            await asyncio.sleep(random.random() * 0.002)
            for call in calls:
                call.cancel()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert not isinstance(outcome, Exception)
        await registry.put("workers", "a", b"last", 600)
        await others.remove("workers", "b")
        assert await others.list("workers") == {"a": b"last"}

    async def test_a_call_may_be_repeated(self, registry: Registry, others: Registry) -> None:
        for _ in range(3):
            await registry.put("workers", "a", b"1", 600)
            assert await others.list("workers") == {"a": b"1"}
        for _ in range(3):
            await registry.remove("workers", "a")
            assert await others.list("workers") == {}


@pytest.mark.usefixtures("quick_looks")
class TestApartFromTheClaims:
    async def test_neither_hears_sees_or_touches_the_other(self, store: ClaimStore, other: ClaimStore) -> None:
        claims = [await make(store, a_key()) for _ in range(20)]
        async with Subscriber(other) as subscriber, Watcher(other.registry, "workers") as watcher:
            for claim in claims:  # also under the names that claims have
                for name in (claim.key, f"w-{claim.key}"):
                    await store.registry.put("workers", name, b"1", random.choice([600, None]))
            for claim in claims[:10]:
                await store.registry.remove("workers", claim.key)
            await watcher.until(lambda: len(watcher.known) == 30, WITHIN)
            for claim in claims:
                again = await other.get(claim.key)
                assert again is not None
                assert again.revision == claim.revision
            await other.close(claims[-1])
            await subscriber.hears(claims[-1].key)
            assert subscriber.deleted == [claims[-1].key]
            assert len(await other.registry.list("workers")) == 30
            assert not [event for event in watcher.events[1:] if isinstance(event, Reset)]
            await store.check()

    async def test_the_registry_is_one_object_and_ends_with_its_store(self, store: ClaimStore) -> None:
        assert store.registry is store.registry
        async with contextlib.aclosing(store.registry.watch("workers")) as watch:  # type: ignore[type-var]
            assert await anext(watch) == Reset()
