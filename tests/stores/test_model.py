"""Any sequence of calls, to any instance, does what thirty lines say.

Keys, claims (also long closed ones), proposals (also used ones) and instances are drawn at random; time passes where
the test owns the clock.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule, run_state_machine_as_test

from backends import open_store
from backends.base import LIFETIME, Claim, ClaimLost, ClaimStore, ClaimValue, CloseOutcome
from backends.file import FileStore
from backends.file.disk import Clock
from backends.memory import MemoryStore
from tests.support.etcd import ETCD_BINARIES, EtcdServer
from tests.support.examples import examples

T = TypeVar("T")
KEYS = st.sampled_from([f"{n:x}" * 40 for n in (10, 11)])
# Far from the multiples of 100 in which time passes, so that the time the test itself takes does not matter.
TTLS = st.sampled_from([200.0, 1000.0])


@dataclass
class Model:
    now: float = 0.0
    standing: dict[str, Claim] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    revisions: set[tuple[str, int]] = field(default_factory=set)

    def get(self, key: str) -> Claim | None:
        return self.standing.get(key) if self.now < self.until.get(key, 0) else None

    def made(self, claim: Claim, ttl: float) -> None:
        assert (claim.key, claim.revision) not in self.revisions, "a revision was used twice"
        self.revisions.add((claim.key, claim.revision))
        self.standing[claim.key] = claim
        self.until[claim.key] = self.now + LIFETIME * ttl

    def close(self, claim: Claim) -> CloseOutcome:
        found = self.get(claim.key)
        if found is None:
            return CloseOutcome.GONE
        if found.revision != claim.revision:
            return CloseOutcome.SUPERSEDED
        del self.until[claim.key]
        return CloseOutcome.CLOSED


class Machine(RuleBasedStateMachine):
    """`open` answers two instances over the same fresh claims, and how to let time pass."""

    open: Callable[[], Awaitable[tuple[list[ClaimStore], Callable[[float], None] | None]]]
    claims = Bundle("claims")
    proposals = Bundle("proposals")

    @initialize(target=proposals)
    def begin(self) -> Any:
        self.runner = asyncio.Runner()
        self.model = Model()
        self.stores, self.advance = self.run(type(self).open())
        return multiple(*(ClaimValue(worker=f"w-{n}", rank=n) for n in range(2)))

    def run(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self.runner.run(awaited())

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores:
                self.run(store.aclose())
            self.runner.close()

    @rule(target=proposals)
    def propose(self) -> ClaimValue:
        return ClaimValue(worker="w-new")

    @rule(target=claims, at=st.sampled_from([0, 1]), key=KEYS, proposal=proposals, ttl=TTLS)
    def create_or_get(self, at: int, key: str, proposal: ClaimValue, ttl: float) -> Claim:
        before = self.model.get(key)
        outcome = self.run(self.stores[at].create_or_get(key, proposal, ttl))
        if before is None:
            assert outcome.created
            assert outcome.claim.value == proposal
            self.model.made(outcome.claim, ttl)
        else:
            assert (outcome.claim.value, outcome.claim.revision) == (before.value, before.revision)
            assert outcome.created is (before.value.nonce == proposal.nonce)
        return outcome.claim

    @rule(at=st.sampled_from([0, 1]), key=KEYS)
    def get(self, at: int, key: str) -> None:
        claim, expected = self.run(self.stores[at].get(key)), self.model.get(key)
        assert (claim and (claim.value, claim.revision)) == (expected and (expected.value, expected.revision))

    @rule(at=st.sampled_from([0, 1]), claim=claims, ttl=TTLS)
    def renew(self, at: int, claim: Claim, ttl: float) -> None:
        expected = self.model.get(claim.key)
        if expected is None or expected.revision != claim.revision:
            with pytest.raises(ClaimLost):
                self.run(self.stores[at].renew(claim, ttl))
        else:
            renewed = self.run(self.stores[at].renew(claim, ttl))
            assert (renewed.value, renewed.revision) == (claim.value, claim.revision)
            self.model.until[claim.key] = max(self.model.until[claim.key], self.model.now + LIFETIME * ttl)

    @rule(at=st.sampled_from([0, 1]), claim=claims)
    def close(self, at: int, claim: Claim) -> None:
        stamps = [store.stamp(claim.key) for store in self.stores]
        expected = self.model.close(claim)
        assert self.run(self.stores[at].close(claim)) is expected
        if expected is CloseOutcome.CLOSED and any(stamps):
            assert all(store.stamp(claim.key) != stamp for store, stamp in zip(self.stores, stamps, strict=True))

    @rule(hundreds=st.integers(1, 8))
    def time_passes(self, hundreds: int) -> None:
        if self.advance is not None:
            self.advance(100.0 * hundreds)
            self.model.now += 100.0 * hundreds


class Later(Clock):
    """A file system's clock that the test can put forward."""

    def __init__(self) -> None:
        super().__init__()
        self.by_s = 0.0

    def learn(self, before_ns: int, given_ns: int) -> int:
        return super().learn(before_ns, given_ns) + int(self.by_s * 1e9)

    def now_ns(self) -> int:
        return super().now_ns() + int(self.by_s * 1e9)


def _check(
    opened: Callable[[], Awaitable[tuple[list[ClaimStore], Callable[[float], None] | None]]], count: int
) -> None:
    machine = type("Checked", (Machine,), {"open": staticmethod(opened)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_memory() -> None:
    async def opened() -> tuple[list[ClaimStore], Callable[[float], None]]:
        passed = 0.0

        def advance(by_s: float) -> None:
            nonlocal passed
            passed += by_s

        store = MemoryStore(clock=lambda: time.monotonic() + passed)
        return [store, store], advance

    _check(opened, examples(40))


def test_file(quick_path: Path) -> None:
    async def opened() -> tuple[list[ClaimStore], Callable[[float], None]]:
        root = Path(tempfile.mkdtemp(dir=quick_path))
        stores = [await FileStore.open(root) for _ in range(2)]
        clocks = [Later() for _ in stores]
        for store, clock in zip(stores, clocks, strict=True):
            store._disk.clock = clock
            await store.check()  # the clock learns the time

        def advance(by_s: float) -> None:
            for clock in clocks:
                clock.by_s += by_s

        return list(stores), advance

    _check(opened, examples(20))


def test_etcd(etcd_servers: Callable[[Path], EtcdServer]) -> None:
    server = etcd_servers(ETCD_BINARIES["etcd-3.5"])

    async def opened() -> tuple[list[ClaimStore], None]:
        url = server.url(f"model/{secrets.token_hex(6)}")
        return [await open_store(url) for _ in range(2)], None

    _check(opened, examples(10))
