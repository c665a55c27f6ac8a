"""Claims in etcd.

Guaranteed: every replica that reaches the cluster agrees, on any host and across restarts of routers and of etcd, and
reads are linearizable. A call, whatever fails, ends within the deadline (2 s unless changed). A watch that is not shown
to be alive raises.
Not guaranteed: etcd's own clock of leases is coarse, so a claim may outlive `1.25 * ttl` by seconds (see `leases`); it
is never shortened. A cluster restored from an older backup repeats revisions, which are our fencing tokens. Full
(NOSPACE), etcd refuses new claims and renewals, 3.5.1 also closes; reads go on.

**Odd faults.** A value that cannot be read costs its own key alone (`ClaimUnreadable`). A single call that hangs is
asked again within its deadline (`cluster`). After `check` has returned, no create that was given up before can still
happen (`fence`). A cluster that was wiped or restored is noticed (`history`): until the subscriber has been told, for
5 s at most, calls that read or create raise instead of saying that claims are gone. A `close` that removed something
returns when our own watch has told of it as well, or after `TOLD_S`.

**Keys.** `prefix/<hex key>`; create_revision is the claim's revision. Creation, close and renewal are one transaction
each, and each is safe to send twice: nonce, create_revision and mod_revision tell that the first one landed. What
begins with `prefix/~` is no claim: the probe of `check`, and the registry's.

Below it: `cluster` (endpoints, login, deadlines) with `attempts` (a call is asked again) and `history` (is etcd where
it was), `fence` (no late creates), `leases` (how long claims live), `batches` (creates that go together), `watch` (what
is told of keys), `registry` (the records beside the claims).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Self

import msgspec
from aetcd import rpc

from backends.base import (
    Claim,
    ClaimLost,
    ClaimOutcome,
    ClaimUnreadable,
    ClaimValue,
    CloseOutcome,
    Deleted,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    decode_value,
    encode_value,
)
from backends.etcd.batches import Batches
from backends.etcd.cluster import DEADLINE_S, PROGRESS_INTERVAL_S, Cluster, any_key
from backends.etcd.faults import Full, NoLease
from backends.etcd.fence import FENCE_TTL_S, Fence, not_there
from backends.etcd.leases import Leases
from backends.etcd.registry import EtcdRegistry
from backends.etcd.url import EtcdUrl
from backends.etcd.watch import Deletions, Subscription

CHECK_TTL_S = 60.0
PATIENCE = 1 / 8
"""The part of the deadline that who has read a claim waits at most to know until when it stands."""
TOLD_S = 0.05
"""The most that a close waits for our own watch to tell it."""
MAX_WARNED = 10_000

_log = logging.getLogger("coatcheck.store")


class EtcdStore:
    """See the module's docstring, and `backends.base` for the contract. It closes the cluster that it is given."""

    across_processes = True

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self.cluster = cluster
        self._prefix = f"{prefix}/".encode()
        # Every key of hex digits under the prefix: the watch sees claims, and neither our probe nor the registry.
        self._range = self._prefix + b"0", self._prefix + b"g"
        self._leases = Leases(cluster)
        self._batches = Batches(cluster)
        self._deletions = Deletions(cluster, self._prefix, *self._range)
        self._fence = Fence(self._prefix)
        self._warned: set[str] = set()
        """Keys whose unreadable value has been logged."""
        self._registry = EtcdRegistry(cluster, self._leases, self._prefix)

    @classmethod
    async def open(
        cls, url: str, *, deadline: float = DEADLINE_S, progress_interval: float = PROGRESS_INTERVAL_S
    ) -> Self:
        """Opens without a connection: an unreachable etcd is for `check` and for every call to report.

        For `deadline` and `progress_interval` see `Cluster`. Raises StoreConfigurationError."""
        parsed = EtcdUrl.parse(url)
        return cls(Cluster(parsed, deadline=deadline, progress_interval=progress_interval), parsed.prefix)

    @property
    def registry(self) -> EtcdRegistry:
        return self._registry

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        until = self.cluster.until()
        name = self._prefix + key.encode()
        value = encode_value(proposal)
        read = rpc.RequestOp(request_range=rpc.RangeRequest(key=name))
        absent = not_there(name)
        while True:
            self._raise_if_untold()
            try:
                bucket = await self._leases.bucket(ttl, until)
                put = rpc.PutRequest(key=name, value=value, lease=bucket.lease)
                fence = self._fence.name
                request = rpc.TxnRequest(
                    compare=[absent, self._fence.compare], success=[rpc.RequestOp(request_put=put)], failure=[read]
                )
                revision, answer = await self._batches.create(name, bucket.lease, request, until)
            except NoLease:
                self._leases.forget(bucket)
                continue
            except Full:
                # A full etcd refuses the whole transaction; the session may well have its claim.
                kv = await self._read(key, until)
                if kv is None:
                    raise
                claim = await self._claim(key, kv, until)
                return ClaimOutcome(claim, claim.value.nonce == proposal.nonce)
            self.cluster.took_space()
            if answer.succeeded:
                claim = Claim(key=key, value=proposal, revision=revision, expires_at=bucket.expires_at)
                return ClaimOutcome(claim, True)
            standing = answer.responses[0].response_range.kvs
            if not standing:
                # No claim, so the fence was in the way: made meanwhile, maybe by a check whose reply was lost.
                self._fence.passed(fence, self.cluster.strays)
                continue
            claim = await self._claim(key, standing[0], until)
            return ClaimOutcome(claim, claim.value.nonce == proposal.nonce)

    async def get(self, key: str) -> Claim | None:
        until = self.cluster.until()
        kv = await self._read(key, until)
        return None if kv is None else await self._claim(key, kv, until)

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        start = time.monotonic()
        until = start + self.cluster.deadline
        name = self._prefix + claim.key.encode()
        while True:
            kv = await self._read(claim.key, until)
            if kv is None or kv.create_revision != claim.revision:
                raise ClaimLost(f"claim {claim.key} is not there any more")
            self._value(claim.key, kv)
            expires_at = await self._leases.expiry(kv.lease, until)
            if expires_at >= start + ttl:
                # Made or renewed lately, perhaps by a peer: our bucket might even end sooner.
                return msgspec.structs.replace(claim, expires_at=expires_at)
            bucket = await self._leases.bucket(ttl, until)
            put = rpc.PutRequest(key=name, lease=bucket.lease, ignore_value=True)
            request = rpc.TxnRequest(
                # The mod_revision keeps a belated copy of this request from undoing a later renewal.
                compare=[_created_at(name, claim.revision), _modified_at(name, kv.mod_revision)],
                success=[rpc.RequestOp(request_put=put)],
            )
            try:
                answer = await self.cluster.call("txn", request, until, write=True)
            except NoLease:
                self._leases.forget(bucket)
                continue
            self.cluster.took_space()
            if answer.succeeded:
                return msgspec.structs.replace(claim, expires_at=bucket.expires_at)

    async def close(self, claim: Claim) -> CloseOutcome:
        name = self._prefix + claim.key.encode()
        request = rpc.TxnRequest(
            compare=[_created_at(name, claim.revision)],
            success=[rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=name))],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=name, count_only=True))],
        )
        with self._deletions.expect(claim.key, claim.revision) as expected:
            answer = await self.cluster.call("txn", request, self.cluster.until(), write=True)
            if answer.succeeded:
                await self._deletions.wait(expected, TOLD_S)
                return CloseOutcome.CLOSED
        return CloseOutcome.SUPERSEDED if answer.responses[0].response_range.count else CloseOutcome.GONE

    def subscribe(self) -> Subscription[Deleted]:
        """The iterator has an `aclose`; unclosed, it is freed with the object or the store."""
        return Subscription(self._deletions)

    def stamp(self, key: str) -> int:
        return 0

    async def check(self) -> None:
        """And see to it that no create that was given up before can happen after this has returned."""
        until = self.cluster.until()
        strays = self.cluster.strays
        fence = self._fence.name if strays != self._fence.strays else None
        # Both beyond the hex keys, where no watch of ours looks.
        name, ttl = (fence, FENCE_TTL_S) if fence else (self._prefix + b"~check", CHECK_TTL_S)
        while True:
            bucket = await self._leases.bucket(ttl, until)
            put = rpc.RequestOp(request_put=rpc.PutRequest(key=name, lease=bucket.lease))
            read = rpc.RequestOp(request_range=any_key(*self._range))
            try:
                await self.cluster.call("txn", rpc.TxnRequest(success=[put, read]), until, write=True)
            except NoLease:
                self._leases.forget(bucket)
            except OutcomeUnknown as error:
                unavailable = StoreUnavailable(str(error))
                unavailable.others_answered = error.others_answered
                raise unavailable from error
            else:
                break
        self.cluster.took_space()
        if fence:
            self._fence.passed(fence, strays)
        self._raise_if_untold()

    async def aclose(self) -> None:
        if self.cluster.closed:
            return
        self.cluster.shut()
        await asyncio.gather(self._leases.aclose(), self._deletions.aclose(), self._registry.aclose())
        await self.cluster.aclose()
        await self._batches.aclose()

    async def _read(self, key: str, until: float) -> Any:
        """The key's KeyValue, or None."""
        answer = await self.cluster.call("range", rpc.RangeRequest(key=self._prefix + key.encode()), until)
        self._raise_if_untold()
        return answer.kvs[0] if answer.kvs else None

    def _raise_if_untold(self) -> None:
        if self._deletions.untold:
            raise StoreUnavailable("etcd is not where it was, and the watch has not said so yet")

    async def _claim(self, key: str, kv: Any, until: float) -> Claim:
        value = self._value(key, kv)
        expires_at = self._leases.known_expiry(kv.lease)
        if not expires_at:
            # A peer's, met for the first time: its claims share one question, where each would else be read again to
            # be renewed. Whatever becomes of that question, the claim was read.
            soon = min(until, time.monotonic() + self.cluster.deadline * PATIENCE)
            with contextlib.suppress(StoreError):
                expires_at = await self._leases.expiry(kv.lease, soon)
        return Claim(key=key, value=value, revision=kv.create_revision, expires_at=expires_at)

    def _value(self, key: str, kv: Any) -> ClaimValue:
        try:
            return decode_value(kv.value)
        except ValueError as error:
            unreadable = ClaimUnreadable(key, kv.create_revision, str(error))
            if key not in self._warned:
                if len(self._warned) >= MAX_WARNED:
                    self._warned.clear()
                self._warned.add(key)
                _log.warning("etcd: %s; it is left alone, and costs only its own session", unreadable)
            raise unreadable from error


def _created_at(name: bytes, revision: int) -> Any:
    return rpc.Compare(key=name, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision)


def _modified_at(name: bytes, revision: int) -> Any:
    return rpc.Compare(key=name, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision)
