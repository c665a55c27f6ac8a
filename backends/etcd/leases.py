"""The leases that claims share, and what we know of those that peers made.

Claims share leases (*buckets*): one is granted for `1.25 * ttl`, takes claims for the first quarter TTL, and is then
left to expire; it is never kept alive and never revoked, so claims outlive the process. In use, a store holds five
leases per TTL, six for the moment of handing over. The next bucket is made ahead, so that a claim costs one round trip;
only the first after an idle quarter TTL costs two.

Not guaranteed: etcd counts leases in whole seconds, sweeps them twice a second, starts them afresh when its leader
changes and has a shortest lease (2 s with its default election timeout), so a claim may outlive `1.25 * ttl` by that
much; it is never shortened.
"""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
import time
from dataclasses import dataclass

from aetcd import rpc

from backends.base import LIFETIME
from backends.etcd.cluster import Cluster, shared
from backends.etcd.faults import Refused
from backends.singleflight import SingleFlight

MAX_KNOWN_LEASES = 10_000
MAX_AHEAD_S = 2.0
"""The next bucket is made so long before its time, where a tenth of a bucket's use is longer."""


@dataclass(eq=False)
class Bucket:
    """A lease that claims are attached to until `fresh_until`, so that each gets its whole TTL."""

    ttl: float
    lease: int
    expires_at: float
    fresh_until: float
    used: bool = False


class Leases:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._buckets: dict[float, Bucket] = {}
        """By TTL."""
        self._refills: dict[float, asyncio.TimerHandle] = {}
        """By TTL: when the next bucket of that TTL is made ahead."""
        self.expiries: dict[int, float] = {}
        """Lease id → until when it surely lives (monotonic)."""
        self._grants: SingleFlight[float, Bucket] = SingleFlight(outlives=True)
        self._look_ups: SingleFlight[int, float] = SingleFlight(outlives=True)

    async def bucket(self, ttl: float, until: float) -> Bucket:
        """A lease that lives `ttl` seconds from now at least."""
        bucket = self._buckets.get(ttl)
        while bucket is None or time.monotonic() > bucket.fresh_until:
            bucket = await shared(self._grants, ttl, functools.partial(self._grant, ttl), until)
        bucket.used = True
        return bucket

    def forget(self, bucket: Bucket) -> None:
        """The lease is gone: revoked by hand, or etcd lost it."""
        self.expiries.pop(bucket.lease, None)
        if self._buckets.get(bucket.ttl) is bucket:
            del self._buckets[bucket.ttl]

    def known_expiry(self, lease: int) -> float:
        """Until when the lease surely lives; 0.0: not known, but asked for now."""
        if not lease:
            return math.inf
        expires_at = self.expiries.get(lease, 0.0)
        # A lease may outlive what we know (a new leader starts it afresh), so a past time says nothing.
        if expires_at > time.monotonic():
            return expires_at
        self._look_ups.start(lease, functools.partial(self._look_up, lease))
        return 0.0

    async def expiry(self, lease: int, until: float) -> float:
        """As `known_expiry`, after a round trip where needed; 0.0: it is gone."""
        return self.known_expiry(lease) or await shared(
            self._look_ups, lease, functools.partial(self._look_up, lease), until
        )

    async def aclose(self) -> None:
        for timer in self._refills.values():
            timer.cancel()
        await asyncio.gather(self._grants.aclose(), self._look_ups.aclose())

    async def _grant(self, ttl: float) -> Bucket:
        start = time.monotonic()
        seconds = max(1, math.ceil(LIFETIME * ttl))
        # Our own number makes the request safe to repeat, and no lease is left over from a lost reply.
        lease = secrets.randbelow(2**63 - 1) + 1
        try:
            request = rpc.LeaseGrantRequest(TTL=seconds, ID=lease)
            answer = await self._cluster.call("lease_grant", request, self._cluster.until())
            # etcd may have given more (it has a shortest lease), which never hurts.
            seconds = max(seconds, answer.TTL)
        except Refused as error:
            if "lease already exists" not in str(error):
                raise
        expires_at = start + seconds
        bucket = self._buckets[ttl] = Bucket(ttl, lease, expires_at, expires_at - ttl)
        self._remember(lease, expires_at)
        ahead = min((seconds - ttl) / 10, MAX_AHEAD_S)
        delay = max(0.0, bucket.fresh_until - ahead - time.monotonic())
        if ttl in self._refills:
            self._refills[ttl].cancel()
        self._refills[ttl] = asyncio.get_running_loop().call_later(delay, self._refill, bucket)
        return bucket

    def _refill(self, bucket: Bucket) -> None:
        del self._refills[bucket.ttl]
        if self._buckets.get(bucket.ttl) is bucket:
            if bucket.used:
                self._grants.start(bucket.ttl, functools.partial(self._grant, bucket.ttl))
            else:
                # Nobody made a claim for a quarter TTL: the next one makes its lease itself.
                del self._buckets[bucket.ttl]

    async def _look_up(self, lease: int) -> float:
        start = time.monotonic()
        request = rpc.LeaseTimeToLiveRequest(ID=lease)
        answer = await self._cluster.call("lease_time_to_live", request, self._cluster.until())
        # Rounded down, and counted from before we asked: a lower bound. -1 means that it is gone.
        expires_at = start + answer.TTL if answer.TTL > 0 else 0.0
        self._remember(lease, expires_at)
        return expires_at

    def _remember(self, lease: int, expires_at: float) -> None:
        if len(self.expiries) >= MAX_KNOWN_LEASES:
            self.expiries.clear()  # those still in use are asked for again
        self.expiries[lease] = expires_at
