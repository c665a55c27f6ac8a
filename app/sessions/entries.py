"""What this replica remembers of sessions: a bounded cache of claims, with the count of turns that use each."""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from app.fleet.workers import Target
from backends.base import Claim, Deleted

_UNPROVEN = 0


class View(msgspec.Struct, frozen=True):
    """What is known of a session; nothing is created or renewed to know it."""

    key: str
    claim: Claim | None
    target: Target | None
    """None when there is none, or when the claim names a worker that this replica does not have."""
    active: int
    """Its turns on this replica."""
    source: str
    """memory (proven), store, unproven (the store cannot answer), degraded (placed without the store) or none."""


class Entry:
    """One session on this replica. Its turns are counted by `Entries`."""

    __slots__ = ("active", "claim", "closing", "good_until", "key", "proof", "renew_at", "renewing", "stamp", "target")

    def __init__(self, key: str, target: Target) -> None:
        self.key = key
        self.target = target
        self.claim: Claim | None = None
        """None while it is placed without a store, and once its close has begun."""
        self.active = 0
        """Its turns here; each is counted once."""
        self.closing = False
        """A final turn has decided that the claim is closed when the last turn here ends."""
        self.proof = _UNPROVEN
        """The stretch of the watch's continuity in which the claim was read."""
        self.stamp = 0
        """The store's, from before the claim was read."""
        self.good_until = 0.0
        """When it must be read again, whatever the watch says; and by then the claim may have expired."""
        self.renew_at = 0.0
        self.renewing = False


class Snapshot:
    """What was known when a read of a session's claim began, and what the watch said of it since."""

    __slots__ = ("_deleted", "proof", "stamp")

    def __init__(self, proof: int, stamp: int) -> None:
        self.proof, self.stamp = proof, stamp
        self._deleted: list[Deleted] = []

    def heard(self, event: Deleted) -> None:
        self._deleted.append(event)

    def proof_of(self, claim: Claim) -> int:
        """The proof of a claim that was read; none when it has gone since."""
        gone = any(event.before is None or event.before > claim.revision for event in self._deleted)
        return _UNPROVEN if gone else self.proof


class Entries:
    """The table. An entry is *proven* while the store's watch is alive and continuous since the claim was read, for at
    most `max_stale`, and until the claim may have expired; otherwise the claim is read before the entry is used."""

    def __init__(
        self, stamp: Callable[[str], int], *, ttl: float, max_stale: float, capacity: int, clock: Callable[[], float]
    ) -> None:
        """`ttl` and `max_stale` in seconds; `stamp` and `clock` are the store's."""
        self._stamp, self._clock = stamp, clock
        self._ttl, self._max_stale, self._capacity = ttl, max_stale, capacity
        self._table: OrderedDict[str, Entry] = OrderedDict()
        """The longest unused first. One that was replaced or closed lives on in the turns that hold it."""
        self._active: dict[str, Entry] = {}
        """Those of the table that have turns; the others make room when it is full."""
        self._reads: dict[str, Snapshot] = {}
        """Of the sessions whose claims are being read now."""
        self._stretches = 0
        self._proof = _UNPROVEN
        """The watch's current stretch of continuity; _UNPROVEN while it is not shown to be alive."""

    # -- turns

    def find(self, key: str) -> Entry | None:
        return self._table.get(key)

    def join(self, key: str, now: float) -> Entry | None:
        """One more turn of a session by what is known here; None when that does not do. To be given to `leave`."""
        entry = self._table.get(key)
        # While it is closing, the turns that are still here decide where; the pending close stands.
        if entry is None or not (entry.closing or self.proven(entry, now)):
            return None
        if not entry.active:
            self._active[key] = entry
        entry.active += 1
        return entry

    def enter(self, entry: Entry) -> None:
        """One more turn of this very entry, proven or not. To be given to `leave`."""
        if not entry.active:
            self._table[entry.key] = self._active[entry.key] = entry
        entry.active += 1

    def leave(self, entry: Entry) -> None:
        entry.active -= 1
        if not entry.active and self._active.get(entry.key) is entry:
            del self._active[entry.key]
            self._table.move_to_end(entry.key)
            if len(self._table) > self._capacity:
                self._trim()

    def install(self, entry: Entry) -> None:
        """Make this, which has no turns yet, the key's entry."""
        self.forget(entry.key)
        self._table[entry.key] = entry
        self._trim()

    def forget(self, key: str) -> None:
        self._table.pop(key, None)
        self._active.pop(key, None)

    def _trim(self) -> None:
        while len(self._table) > max(self._capacity, len(self._active)):
            key, entry = next(iter(self._table.items()))
            if entry.active:
                self._table.move_to_end(key)
            else:
                del self._table[key]

    # -- proof

    @property
    def watching(self) -> bool:
        return self._proof != _UNPROVEN

    def proven(self, entry: Entry, now: float) -> bool:
        return (
            entry.proof == self._proof != _UNPROVEN
            and now < entry.good_until
            and self._stamp(entry.key) == entry.stamp
            and entry.target.worker.known
        )

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[Snapshot]:
        """While a claim is read or made, which only one does at a time for each key."""
        snapshot = self._reads[key] = Snapshot(self._proof, self._stamp(key))
        try:
            yield snapshot
        finally:
            del self._reads[key]

    def note(self, claim: Claim, target: Target, snapshot: Snapshot) -> Entry:
        """Note a claim that was just read: its session is at `target`."""
        entry = self.find(claim.key)
        if entry is None or not _continues(entry, claim, target):
            entry = Entry(claim.key, target)
            self.install(entry)
        self.refresh(entry, claim)
        entry.proof, entry.stamp = snapshot.proof_of(claim), snapshot.stamp
        return entry

    def refresh(self, entry: Entry, claim: Claim) -> None:
        """The claim stood just now. That does not prove what the watch missed."""
        entry.claim = claim
        entry.good_until = self._clock() + self._max_stale
        entry.renew_at = 0.0
        if claim.expires_at:
            entry.good_until = min(entry.good_until, claim.expires_at)
            entry.renew_at = claim.expires_at - self._ttl

    def unprove(self, entry: Entry) -> None:
        """The next turn reads what stands there, and until then nothing is renewed."""
        entry.proof = _UNPROVEN
        entry.renew_at = float("inf")

    def watch_stands(self) -> None:
        """A stretch of continuity begins; what was read before is not proven any more."""
        self._stretches += 1
        self._proof = self._stretches

    def watch_is_lost(self) -> None:
        self._proof = _UNPROVEN

    def deleted(self, event: Deleted) -> None:
        """The watch says that a claim is gone."""
        if event.key in self._reads:
            self._reads[event.key].heard(event)
        entry = self.find(event.key)
        if entry is None or entry.claim is None:
            return
        if event.before is not None and entry.claim.revision >= event.before:
            return  # the end of a predecessor
        entry.proof = _UNPROVEN
        if not entry.active:
            self.forget(event.key)

    # -- all of them

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._table.values())

    @property
    def in_use(self) -> list[Entry]:
        return list(self._active.values())

    @property
    def turns(self) -> int:
        return sum(entry.active for entry in self._active.values())

    def census(self) -> Counter[str]:
        """How many sessions this replica knows, by the name of their worker."""
        return Counter(entry.target.worker.name for entry in self)

    def page(self, after: str, limit: int, worker: str = "") -> list[View]:
        """The first `limit` of the sessions that this replica knows, by their keys, of those after `after` and at
        `worker` (empty: any)."""
        wanted = (entry for entry in self if entry.key > after and worker in ("", entry.target.worker.name))
        return [self.view(entry) for entry in heapq.nsmallest(limit, wanted, key=lambda entry: entry.key)]

    def view(self, entry: Entry) -> View:
        proven = self.proven(entry, self._clock())
        source = "degraded" if entry.claim is None else "memory" if proven else "unproven"
        return View(entry.key, entry.claim, entry.target, entry.active, source)


def _continues(entry: Entry, claim: Claim, target: Target) -> bool:
    """The entry is of this very claim, or was placed without the store where the claim now says."""
    if entry.claim is None:
        return entry.target is target
    return entry.claim.revision == claim.revision and entry.claim.value.nonce == claim.value.nonce
