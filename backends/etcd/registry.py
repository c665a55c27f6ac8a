"""Records beside the claims, in etcd.

Guaranteed: what the claims are (see `store`), and that a late copy of a write changes nothing: of a write that was sent
twice, or whose caller has gone on after OutcomeUnknown. So a mark that was taken back stays away.

**Keys.** `prefix/~records/<kind>/<hex name>`, and `prefix/~removals/<kind>`, which each removal of the kind writes.
Both are beyond the hex digits of claims, where no claim's read or watch looks.

**Leases** are the buckets that claims share (see `leases`), so that a put is one call, and a grant now and then: a
record that is put every few seconds would cost a lease of its own two calls each time, to keep it alive and to write.
Each put attaches the record to a lease that is young, so a lease that was lost costs no more than the next put.

**One transaction** writes only if its key is as it was (mod_revision) and, where there was none, if nobody has removed
from the kind since: an absent key alone does not tell, it may have come and gone. We remember both, so an owner that is
alone with its name needs one call. When others write it, the first call learns and the second writes; when that one
finds a record written *during this call*, ours counts as the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aetcd import rpc

from backends.etcd.cluster import Cluster
from backends.etcd.faults import Full, NoLease, Refused
from backends.etcd.leases import Leases
from backends.etcd.watch import Subscription, Watches
from backends.registry import Put, RegistryChange, Removed, by_name, check_kind, check_name, check_record

PAGE = 48
"""Records in one answer: of the longest, 3 MiB; gRPC takes 4."""
MAX_KNOWN = 10_000
"""Names whose last write we remember."""


class EtcdRegistry:
    """See `backends.registry` for the contract. `prefix` as the claims' keys have it."""

    def __init__(self, cluster: Cluster, leases: Leases, prefix: bytes) -> None:
        self._cluster = cluster
        self._leases = leases
        self._prefix = prefix
        self._modified: dict[bytes, int] = {}
        """Of a record's key, and of a kind's note of removals: its mod_revision as far as we know; 0: there is none."""
        self._watches: dict[str, Watches[RegistryChange]] = {}
        """By kind."""

    async def put(self, kind: str, name: str, value: bytes, ttl: float | None) -> None:
        check_record(kind, name, value, ttl)
        until = self._cluster.until()
        key = self._first(kind) + name.encode().hex().encode()
        request = rpc.PutRequest(key=key, value=value)
        while True:
            bucket = None if ttl is None else await self._leases.bucket(ttl, until)
            request.lease = 0 if bucket is None else bucket.lease
            try:
                await self._write(kind, key, [rpc.RequestOp(request_put=request)], until, creates=True)
            except NoLease:
                if bucket is None:
                    raise
                self._leases.forget(bucket)
            else:
                self._cluster.took_space()
                return

    async def remove(self, kind: str, name: str) -> None:
        check_name(kind, name)
        until = self._cluster.until()
        key = self._first(kind) + name.encode().hex().encode()
        delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
        note = rpc.RequestOp(request_put=rpc.PutRequest(key=self._removals(kind)))
        try:
            await self._write(kind, key, [delete, note], until)
        except Full:
            # Only the note needs space. Without it, a put of an absent name that is still on its way may yet land.
            await self._write(kind, key, [delete], until)
        else:
            self._cluster.took_space()

    async def list(self, kind: str) -> dict[str, bytes]:
        check_kind(kind)
        until = self._cluster.until()
        while True:
            try:
                return await self._list(self._first(kind), until)
            except Refused as error:
                if "required revision has been compacted" not in str(error):
                    raise  # else it was, between two pages: the deadline ends this

    def watch(self, kind: str) -> Subscription[RegistryChange]:
        """The iterator has an `aclose`; unclosed, it is freed with the object or the store."""
        check_kind(kind)
        if kind not in self._watches:
            first = self._first(kind)
            self._watches[kind] = Watches(self._cluster, first, _after(first), _told(len(first)), previous=True)
        return Subscription(self._watches[kind], by_name)

    async def aclose(self) -> None:
        await asyncio.gather(*(watches.aclose() for watches in self._watches.values()))

    def _first(self, kind: str) -> bytes:
        return self._prefix + f"~records/{kind}/".encode()

    def _removals(self, kind: str) -> bytes:
        return self._prefix + f"~removals/{kind}".encode()

    async def _write(
        self, kind: str, key: bytes, operations: Sequence[Any], until: float, *, creates: bool = False
    ) -> None:
        """`creates`: also where there is no such key."""
        note = self._removals(kind)
        reads = [rpc.RequestOp(request_range=rpc.RangeRequest(key=each, keys_only=True)) for each in (key, note)]
        record, removal = self._modified.get(key, 0), self._modified.get(note, 0)
        learned_at = 0
        while True:
            compare = [_as_it_was(key, record)]
            if creates and not record:
                compare.append(_as_it_was(note, removal))
            request = rpc.TxnRequest(compare=compare, success=operations, failure=reads)
            answer = await self._cluster.call("txn", request, until, write=True)
            if answer.succeeded:
                self._learn(key, answer.header.revision if creates else 0)
                return
            record, removal = (
                part.response_range.kvs[0].mod_revision if part.response_range.kvs else 0 for part in answer.responses
            )
            self._learn(key, record)
            self._learn(note, removal)
            learned_at = learned_at or answer.header.revision
            if record > learned_at:
                return

    def _learn(self, key: bytes, modified: int) -> None:
        if len(self._modified) >= MAX_KNOWN:
            self._modified.clear()  # who is put again is learned again
        self._modified[key] = modified

    async def _list(self, first: bytes, until: float) -> dict[str, bytes]:
        """All pages of one revision: what was there at one moment."""
        records: dict[str, bytes] = {}
        request = rpc.RangeRequest(key=first, range_end=_after(first), limit=PAGE)
        while True:
            page = await self._cluster.call("range", request, until)
            for kv in page.kvs:
                name = _name(kv.key[len(first) :])
                if name is not None:
                    records[name] = kv.value
            if not page.more:
                return records
            request.key = page.kvs[-1].key + b"\0"
            request.revision = request.revision or page.header.revision


def _told(skip: int) -> Callable[[Any], RegistryChange | None]:
    def told(event: Any) -> RegistryChange | None:
        name = _name(event.kv.key[skip:])
        if name is None:
            return None
        if event.type == rpc.Event.DELETE:
            return Removed(name)
        if event.HasField("prev_kv") and event.prev_kv.value == event.kv.value:
            return None
        return Put(name, event.kv.value)

    return told


def _name(digits: bytes) -> str | None:
    """None: somebody else's key."""
    try:
        raw = bytes.fromhex(digits.decode("ascii"))
        name = raw.decode("ascii")
        check_name("any", name)
    except ValueError:
        return None
    return name if raw.hex().encode() == digits else None


def _after(first: bytes) -> bytes:
    """Where the keys that begin with `first` end, which ends with a slash."""
    return first[:-1] + b"0"


def _as_it_was(key: bytes, modified: int) -> Any:
    """0: there is no such key."""
    return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=modified)
