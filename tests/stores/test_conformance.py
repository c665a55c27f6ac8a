"""The contract of `backends.base`, sentence by sentence, against every store."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from contextlib import AsyncExitStack, suppress

import msgspec
import pytest

from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimStore,
    ClaimUnreadable,
    ClaimValue,
    CloseOutcome,
    Deleted,
    Reset,
    StoreError,
    StoreUnavailable,
    decode_value,
    encode_value,
)
from tests.stores.conftest import Kind, MakeStore, across_processes, can_plant
from tests.support.claimant import Claimant
from tests.support.stores import Subscriber, a_key, a_value, eventually, make, until_gone

CLOSED, GONE, SUPERSEDED = CloseOutcome.CLOSED, CloseOutcome.GONE, CloseOutcome.SUPERSEDED


class TestClaimsAreImmutable:
    async def test_the_first_writer_wins_and_the_other_adopts(self, store: ClaimStore, other: ClaimStore) -> None:
        key = a_key()
        first = await store.create_or_get(key, a_value("w-1"), 600)
        second = await other.create_or_get(key, a_value("w-2"), 600)
        assert (first.created, second.created) == (True, False)
        assert second.claim.value == first.claim.value
        assert second.claim.revision == first.claim.revision
        assert second.claim.key == key

    @pytest.mark.parametrize("rank", [None, 0, 7])
    async def test_what_is_written_is_read(self, store: ClaimStore, other: ClaimStore, rank: int | None) -> None:
        value = ClaimValue(worker='w "ü"/\\\n', rank=rank, replica="r-1", generation=3)
        made = (await store.create_or_get(a_key(), value, 600)).claim
        read = await other.get(made.key)
        assert read is not None
        assert (read.key, read.value, read.revision) == (made.key, value, made.revision)

    async def test_each_claim_of_a_key_has_a_revision_of_its_own(self, store: ClaimStore, other: ClaimStore) -> None:
        key = a_key()
        revisions = set()
        for turn in range(20):
            claim = await make(store if turn % 2 else other, key)
            revisions.add(claim.revision)
            await other.close(claim)
        assert len(revisions) == 20

    async def test_get_answers_what_stands_and_never_creates(self, store: ClaimStore, other: ClaimStore) -> None:
        key = a_key()
        assert await store.get(key) is None
        assert (await other.create_or_get(key, a_value(), 600)).created
        assert await store.get(key) is not None

    async def test_adopting_does_not_renew(self, store: ClaimStore, other: ClaimStore) -> None:
        made = await make(store, a_key(), ttl=600)
        adopted = await other.create_or_get(made.key, a_value(), 60_000)
        assert adopted.claim.expires_at <= made.expires_at + 1

    def test_unknown_fields_of_a_value_are_ignored(self) -> None:
        raw = msgspec.json.decode(encode_value(a_value("w-9"))) | {"colour": "red", "version": 2}
        assert decode_value(msgspec.json.encode(raw)).worker == "w-9"


class TestRaces:
    @pytest.mark.parametrize("racers", [8, 100])
    async def test_of_racing_tasks_exactly_one_wins(self, make_store: MakeStore, racers: int) -> None:
        stores = await make_store.many(3)
        for _ in range(5):
            key = a_key()
            outcomes = await asyncio.gather(
                *(stores[n % 3].create_or_get(key, a_value(f"w-{n}"), 600) for n in range(racers))
            )
            assert sum(outcome.created for outcome in outcomes) == 1
            assert len({(outcome.claim.revision, outcome.claim.value.nonce) for outcome in outcomes}) == 1

    async def test_of_racing_closes_exactly_one_closes(self, make_store: MakeStore) -> None:
        stores = await make_store.many(3)
        for _ in range(5):
            claim = await make(stores[0], a_key())
            outcomes = await asyncio.gather(*(stores[n % 3].close(claim) for n in range(30)))
            assert sorted(outcome.value for outcome in outcomes) == ["closed"] + 29 * ["gone"]

    @across_processes
    async def test_of_racing_processes_exactly_one_wins(self, make_store: MakeStore) -> None:
        keys = [a_key() for _ in range(60)]
        async with AsyncExitStack() as stack:
            others = await asyncio.gather(*(stack.enter_async_context(Claimant(make_store.url)) for _ in range(3)))
            at = time.monotonic() + 0.2
            for n, other in enumerate(others):
                other.tell("create", keys=keys, worker=f"w-{n}", ttl=600, at=at)
            answers = [await other.answer() for other in others]
        for of_key in zip(*answers, strict=True):
            assert sum(answer["created"] for answer in of_key) == 1
            assert len({(answer["claim"]["revision"], answer["claim"]["value"]["worker"]) for answer in of_key}) == 1

    async def test_what_was_made_less_what_was_removed_is_what_stands(self, make_store: MakeStore) -> None:
        """Each claim made is closed at most once, whoever tries, however late: fencing, seen as book-keeping."""
        stores = await make_store.many(2)
        keys = [a_key() for _ in range(3)]
        balance = dict.fromkeys(keys, 0)
        seen: list[Claim] = []

        async def churn(store: ClaimStore) -> None:
            for _ in range(40):
                key = random.choice(keys)
                if random.random() < 0.5:
                    outcome = await store.create_or_get(key, a_value(), 600)
                    balance[key] += outcome.created
                    seen.append(outcome.claim)
                elif seen:
                    claim = random.choice(seen[-6:])
                    outcome_of_close = await store.close(claim)
                    balance[claim.key] -= outcome_of_close is CLOSED

        await asyncio.gather(*(churn(stores[n % 2]) for n in range(10)))
        assert balance == {key: int(await stores[0].get(key) is not None) for key in keys}

    @across_processes
    async def test_the_books_balance_across_processes(self, make_store: MakeStore, store: ClaimStore) -> None:
        keys = [a_key() for _ in range(2)]
        async with AsyncExitStack() as stack:
            others = await asyncio.gather(
                *(stack.enter_async_context(Claimant(make_store.url, deadline=20.0)) for _ in range(3))
            )
            for n, other in enumerate(others):
                other.tell("churn", keys=keys, worker=f"w-{n}", rounds=80)
            balances = [await other.answer() for other in others]
        for key in keys:
            assert sum(balance[key] for balance in balances) == int(await store.get(key) is not None)

    async def test_a_claim_that_keeps_vanishing_is_tried_again_within_bounds(self, make_store: MakeStore) -> None:
        """Nothing but an outcome or StoreUnavailable, and soon, while another opens and closes the same key."""
        mine, other = await make_store.many(2)
        key = a_key()
        stop = False

        async def come_and_go() -> None:
            while not stop:
                await other.close((await other.create_or_get(key, a_value(), 600)).claim)
                await asyncio.sleep(0)

        task = asyncio.create_task(come_and_go())
        try:
            async with asyncio.timeout(60):  # much less than so many deadlines
                for _ in range(50):
                    with suppress(StoreUnavailable):
                        await mine.create_or_get(key, a_value(), 600)
                    await asyncio.sleep(0)
        finally:
            stop = True
            await task


class TestClose:
    async def test_it_removes_and_is_idempotent(self, store: ClaimStore, other: ClaimStore) -> None:
        claim = await make(store, a_key())
        assert await other.close(claim) is CLOSED
        assert await store.get(claim.key) is None
        assert await store.close(claim) is GONE
        assert await other.close(claim) is GONE

    async def test_a_late_close_leaves_the_successor_alone(self, store: ClaimStore, other: ClaimStore) -> None:
        late = await make(store, a_key())
        await other.close(late)
        successor = await make(other, late.key, worker="w-2")
        assert await store.close(late) is SUPERSEDED
        standing = await other.get(late.key)
        assert standing is not None
        assert standing.revision == successor.revision

    async def test_a_claim_made_again_with_the_same_value_is_another(self, store: ClaimStore) -> None:
        """The nonce alone does not fence: a proposal may be sent again after its claim was closed."""
        value = a_value()
        first = (await store.create_or_get(a_key(), value, 600)).claim
        await store.close(first)
        again = await store.create_or_get(first.key, value, 600)
        assert again.created
        assert again.claim.revision != first.revision
        assert await store.close(first) is SUPERSEDED
        assert await store.get(first.key) is not None


class TestRenew:
    async def test_it_keeps_the_revision_and_the_old_claim_still_closes(
        self, store: ClaimStore, other: ClaimStore
    ) -> None:
        claim = await make(store, a_key(), ttl=60)
        renewed = await other.renew(claim, 600)
        assert (renewed.key, renewed.value, renewed.revision) == (claim.key, claim.value, claim.revision)
        assert renewed.expires_at == 0 or renewed.expires_at >= claim.expires_at
        assert await store.close(claim) is CLOSED
        assert await store.get(claim.key) is None

    async def test_a_closed_claim_is_lost(self, store: ClaimStore, other: ClaimStore) -> None:
        claim = await make(store, a_key())
        await other.close(claim)
        with pytest.raises(ClaimLost):
            await store.renew(claim, 600)
        assert await store.get(claim.key) is None

    async def test_a_superseded_claim_is_lost(self, store: ClaimStore, other: ClaimStore) -> None:
        claim = await make(store, a_key())
        await other.close(claim)
        successor = await make(other, claim.key)
        with pytest.raises(ClaimLost):
            await store.renew(claim, 60_000)
        standing = await store.get(claim.key)
        assert standing is not None
        assert standing.expires_at <= successor.expires_at + 1


class TestLifetime:
    async def test_a_claim_lives_for_one_to_one_and_a_quarter_ttl(
        self, store: ClaimStore, other: ClaimStore, kind: Kind
    ) -> None:
        """Then it makes way, also where no sweeper has been yet."""
        began = time.monotonic()
        read, proposed = await make(store, a_key(), ttl=kind.ttl), await make(store, a_key(), ttl=kind.ttl)
        returned = time.monotonic()
        assert read.expires_at == 0 or began < read.expires_at <= returned + LIFETIME * kind.ttl

        async def until_it_makes_way() -> float:
            while not (outcome := await other.create_or_get(proposed.key, a_value("w-2"), 600)).created:
                await asyncio.sleep(0.02)
            assert outcome.claim.revision != proposed.revision
            return time.monotonic()

        async with asyncio.timeout(LIFETIME * kind.ttl + kind.late):
            gone, made_way = await asyncio.gather(until_gone(store, read.key, within=60), until_it_makes_way())
        assert min(gone, made_way) - began >= kind.ttl
        assert read.expires_at <= gone

    async def test_an_expired_claim_is_gone_in_every_respect_and_a_renewed_one_stands(
        self, store: ClaimStore, other: ClaimStore, kind: Kind
    ) -> None:
        claim, renewed = await make(store, a_key(), ttl=kind.ttl), await make(store, a_key(), ttl=kind.ttl)
        await other.renew(renewed, 600)
        assert await other.get(claim.key) is not None
        async with Subscriber(other) as subscriber:
            await subscriber.hears(claim.key, within=LIFETIME * kind.ttl + kind.late + 2)
            assert renewed.key not in subscriber.deleted
        assert await store.get(renewed.key) is not None
        assert await store.get(claim.key) is None
        with pytest.raises(ClaimLost):
            await store.renew(claim, 600)
        assert await other.close(claim) is GONE
        successor = await make(other, claim.key)
        assert successor.revision != claim.revision
        assert await store.close(claim) is SUPERSEDED

    @across_processes
    async def test_a_claim_does_not_die_with_the_process_that_made_it(
        self, make_store: MakeStore, store: ClaimStore
    ) -> None:
        key = a_key()
        async with Claimant(make_store.url) as other:
            made = await other.create(key, "w-5", 600)
            await other.kill()
        standing = await store.get(key)
        assert standing is not None
        assert (standing.value, standing.revision) == (made.value, made.revision)


class TestErrorsAndCancelling:
    async def test_the_same_proposal_again_is_recognised_as_our_own(self, store: ClaimStore, other: ClaimStore) -> None:
        value = a_value()
        first = await store.create_or_get(a_key(), value, 600)
        again = await other.create_or_get(first.claim.key, value, 600)
        assert again.created
        assert again.claim.revision == first.claim.revision

    async def test_a_cancelled_call_leaves_either_outcome_and_the_next_call_works(
        self, store: ClaimStore, other: ClaimStore
    ) -> None:
        for round_ in range(30):
            key, value = a_key(), a_value()
            call = asyncio.create_task(store.create_or_get(key, value, 600))
            await _some_steps(round_)
            call.cancel()
            await asyncio.wait([call])
            claim = (await other.create_or_get(key, value, 600)).claim
            closing = asyncio.create_task(store.close(claim))
            await _some_steps(round_)
            closing.cancel()
            await asyncio.wait([closing])
            assert await other.close(claim) in (CLOSED, GONE)
            assert await store.get(key) is None

    async def test_check_proves_the_store_and_leaves_nothing(self, store: ClaimStore, other: ClaimStore) -> None:
        await store.check()
        await asyncio.gather(*(each.check() for each in (store, other) for _ in range(5)))

    async def test_after_aclose_every_call_says_that_it_is_unavailable(
        self, store: ClaimStore, other: ClaimStore, kind: Kind, make_store: MakeStore
    ) -> None:
        claim = await make(other, a_key())
        await store.aclose()
        await store.aclose()
        for call in (
            store.create_or_get(a_key(), a_value(), 600),
            store.get(claim.key),
            store.renew(claim, 600),
            store.close(claim),
            store.check(),
        ):
            with pytest.raises(StoreUnavailable):
                await call
        with pytest.raises(StoreUnavailable):
            await anext(aiter(store.subscribe()))
        store.stamp(claim.key)
        if kind.name != "memory":
            assert await (await make_store()).get(claim.key) is not None, "claims stay"


async def _some_steps(count: int) -> None:
    for _ in range(count % 10):
        await asyncio.sleep(0)
    if count >= 10:
        await asyncio.sleep(count / 10_000)


GARBAGE = [b"", b'{"worker":"w-1","ra', b"\xff\x00" * 50, b'{"worker":5,"version":2}', b"[]", b" " * 70_000]


async def unreadable(store: ClaimStore, key: str) -> Claim:
    with pytest.raises(ClaimUnreadable) as caught:
        await store.get(key)
    return caught.value.claim


@can_plant
class TestWhatCannotBeRead:
    """One bad record costs only itself, and is left alone."""

    @pytest.mark.parametrize("raw", GARBAGE, ids=["empty", "torn", "no text", "of a later version", "a list", "long"])
    async def test_every_call_of_its_key_says_so_and_none_touches_it(
        self, make_store: MakeStore, store: ClaimStore, other: ClaimStore, raw: bytes
    ) -> None:
        key, elsewhere = a_key(), await make(store, a_key())
        await make_store.plant(key, raw)
        former = Claim(key=key, value=a_value(), revision=5, expires_at=0.0)
        for each in (store, other):
            for call in (each.get(key), each.create_or_get(key, a_value(), 600), each.renew(former, 600)):
                with pytest.raises(ClaimUnreadable) as caught:
                    await call
                assert caught.value.claim.key == key
            assert await each.close(former) is SUPERSEDED
        assert await make_store.planted(key) == raw
        await store.check()
        await other.renew(elsewhere, 700)
        assert await other.close(elsewhere) is CLOSED

    async def test_an_operator_closes_it_and_the_key_is_free(
        self, make_store: MakeStore, store: ClaimStore, other: ClaimStore
    ) -> None:
        key = a_key()
        await make_store.plant(key, b"garbage")
        claim = await unreadable(store, key)
        assert await other.close(claim) is CLOSED
        assert await make_store.planted(key) is None
        assert await store.close(claim) is GONE
        successor = await make(store, key)
        assert await other.close(claim) is SUPERSEDED
        assert await other.close(successor) is CLOSED

    async def test_only_what_was_seen_is_closed(self, make_store: MakeStore, store: ClaimStore) -> None:
        key = a_key()
        await make_store.plant(key, b"garbage")
        claim = await unreadable(store, key)
        await make_store.plant(key, b"other garbage")
        assert await store.close(claim) is SUPERSEDED
        assert await make_store.planted(key) == b"other garbage"
        assert await store.close(await unreadable(store, key)) is CLOSED

    async def test_the_watch_goes_on_and_the_log_has_it_once(
        self, make_store: MakeStore, store: ClaimStore, other: ClaimStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        key, claim = a_key(), await make(other, a_key())
        await make_store.plant(key, b"garbage")
        async with Subscriber(store) as subscriber:
            for _ in range(5):
                await unreadable(store, key)
                with suppress(ClaimUnreadable):
                    await store.create_or_get(key, a_value(), 600)
            await other.close(claim)
            await subscriber.hears(claim.key)
            assert key not in subscriber.deleted
        assert sum(key in record.getMessage() for record in caplog.records) == 1
        assert await make_store.planted(key) == b"garbage"

    async def test_a_claim_of_a_later_version_is_honoured_and_never_rewritten(
        self, make_store: MakeStore, store: ClaimStore, other: ClaimStore
    ) -> None:
        key = a_key()
        later = {"worker": "w-9", "rank": 3, "version": 2, "replica": {"name": "r"}, "nonce": ["n"], "phase": "decode"}
        await make_store.plant_value(key, later)
        raw = await make_store.planted(key)
        claim = await store.get(key)
        assert claim is not None
        assert (claim.value.worker, claim.value.rank, claim.value.version) == ("w-9", 3, 2)
        outcome = await other.create_or_get(key, a_value("w-1"), 600)
        assert (outcome.created, outcome.claim.value.worker) == (False, "w-9")
        assert (await other.renew(outcome.claim, 900)).revision == claim.revision
        assert await make_store.planted(key) == raw
        assert await store.close(claim) is CLOSED
        assert await make_store.planted(key) is None


class TestEvents:
    async def test_every_subscriber_hears_of_every_close_by_whoever(self, store: ClaimStore, other: ClaimStore) -> None:
        mine, theirs = await make(store, a_key()), await make(other, a_key())
        async with Subscriber(store) as one, Subscriber(store) as two, Subscriber(other) as three:
            await store.close(mine)
            await store.close(theirs)
            for subscriber in (one, two, three):
                await subscriber.hears(mine.key, theirs.key)

    async def test_creations_renewals_and_checks_are_not_reported(self, store: ClaimStore, other: ClaimStore) -> None:
        async with Subscriber(store) as subscriber:
            claim = await make(other, a_key())
            await store.create_or_get(claim.key, a_value(), 600)
            await other.renew(claim, 700)
            await other.check()
            last = await make(store, a_key())
            await other.close(last)
            await subscriber.hears(last.key)
            assert set(subscriber.deleted) == {last.key}
            assert subscriber.resets == 1

    async def test_a_claim_closed_and_made_again_at_once_is_reported(
        self, store: ClaimStore, other: ClaimStore
    ) -> None:
        async with Subscriber(store) as subscriber:
            claim = await make(other, a_key())
            assert await store.get(claim.key) is not None
            await other.close(claim)
            await make(other, claim.key)
            await subscriber.hears(claim.key)

    async def test_where_an_event_names_a_bound_the_successor_is_above_it(
        self, store: ClaimStore, other: ClaimStore
    ) -> None:
        async with Subscriber(store) as subscriber:
            claim = await make(store, a_key())
            await other.close(claim)
            successor = await make(other, claim.key)
            await subscriber.hears(claim.key)
            for event in subscriber.events:
                if isinstance(event, Deleted) and event.before is not None:
                    assert claim.revision < event.before <= successor.revision

    async def test_nothing_that_was_closed_after_the_reset_is_missed(
        self, store: ClaimStore, other: ClaimStore
    ) -> None:
        claims = [await make(other, a_key()) for _ in range(30)]
        async with Subscriber(store) as subscriber:
            await asyncio.gather(*(other.close(claim) for claim in claims))
            await subscriber.until(lambda: subscriber.resets > 1 or {c.key for c in claims} <= set(subscriber.deleted))

    async def test_a_subscriber_may_leave_and_another_come(self, store: ClaimStore, other: ClaimStore) -> None:
        for _ in range(3):
            claim = await make(other, a_key())
            async with Subscriber(store) as subscriber:
                await other.close(claim)
                await subscriber.hears(claim.key)

    async def test_aclose_ends_every_subscription(self, store: ClaimStore) -> None:
        async with Subscriber(store) as one, Subscriber(store) as two:
            await store.aclose()
            async with asyncio.timeout(5):
                await asyncio.gather(one.task, two.task)

    async def test_a_cancelled_subscription_frees_task_thread_and_descriptor(
        self, make_store: MakeStore, store: ClaimStore
    ) -> None:
        async def subscribe_and_leave() -> None:
            async with Subscriber(store):
                pass
            events = store.subscribe()
            assert await anext(events) == Reset()
            await events.aclose()  # type: ignore[attr-defined]

        await subscribe_and_leave()
        # What one subscription leaves is settled; more of them must not leave more.
        await asyncio.sleep(0.1)
        before = _held()
        for _ in range(3):
            await subscribe_and_leave()
        await eventually(lambda: _held() <= before)

    @across_processes
    async def test_a_close_in_one_process_is_heard_in_another(self, make_store: MakeStore, store: ClaimStore) -> None:
        async with Claimant(make_store.url) as other:
            assert await other.do("subscribe") == "reset"
            async with Subscriber(store) as subscriber:
                mine, theirs = await make(store, a_key()), await other.create(a_key(), "w-1", 600)
                await other.create(mine.key, "w-2", 600)
                await store.get(theirs.key)
                await store.close(mine)
                assert await other.do("heard", key=mine.key)
                assert await other.close(theirs) == "closed"
                await subscriber.hears(theirs.key)


def _held() -> _Held:
    return _Held((len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd"))))


class _Held(tuple[int, ...]):
    def __le__(self, other: tuple[int, ...]) -> bool:
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


class TestStamps:
    async def test_a_close_changes_the_stamp_everywhere_before_it_returns(
        self, store: ClaimStore, other: ClaimStore, kind: Kind
    ) -> None:
        for closer, reader in ((store, other), (other, store), (store, store)):
            key = a_key()
            before = reader.stamp(key)
            await make(store, key)
            claim = await reader.get(key)
            assert claim is not None
            await reader.renew(claim, 700)
            assert reader.stamp(key) == before
            await closer.close(claim)
            assert (reader.stamp(key) != before) is kind.stamps

    async def test_each_close_changes_it_again(self, store: ClaimStore, other: ClaimStore, kind: Kind) -> None:
        key = a_key()
        stamps = [store.stamp(key)]
        for _ in range(20):
            await other.close(await make(other, key))
            stamps.append(store.stamp(key))
        assert len(set(stamps)) == (21 if kind.stamps else 1)

    async def test_a_store_without_stamps_always_answers_0(self, store: ClaimStore, kind: Kind) -> None:
        if not kind.stamps:
            assert {store.stamp(a_key()) for _ in range(100)} == {0}

    @across_processes
    async def test_a_close_in_another_process_changes_the_stamp_here(
        self, make_store: MakeStore, store: ClaimStore, kind: Kind
    ) -> None:
        async with Claimant(make_store.url) as other:
            claim = await make(store, a_key())
            before = store.stamp(claim.key)
            assert await other.do("stamp", key=claim.key) == before
            assert await other.close(claim) == "closed"
            assert (store.stamp(claim.key) != before) is kind.stamps


async def test_a_store_raises_nothing_but_its_errors(store: ClaimStore, other: ClaimStore) -> None:
    """Everything at once on one key."""
    key = a_key()

    async def torment(each: ClaimStore) -> None:
        for _ in range(15):
            with suppress(StoreError):
                claim = (await each.create_or_get(key, a_value(), 600)).claim
                await each.get(key)
                await each.renew(claim, 600)
                await each.close(claim)

    await asyncio.gather(*(torment(each) for each in (store, other) for _ in range(5)))
