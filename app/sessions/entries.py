"""What this replica remembers of sessions: a bounded cache of claims, with the count of turns that use each."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

import msgspec

from app.fleet.workers import Target
from backends.base import Claim, Deleted

UNPROVEN = 0
NEAR_ITS_END = 1 / 8
"""Of a TTL: with less left a claim might end before a turn that goes by it has had it renewed."""


class View(msgspec.Struct, frozen=True):
    """What is known of a session; nothing is created or renewed to know it."""

    key: str
    claim: Claim | None
    target: Target | None
    """None when there is none, or when the claim names a worker that this replica does not have."""
    active: int
    """Its turns on this replica."""
    source: str
    """memory (proven), store, unproven (the store cannot answer), degraded (placed without the store), unreadable (what
    stands is no claim) or none."""


class Alone(msgspec.Struct):
    """How a session is served at its target without a claim. Times in Unix seconds."""

    since: float
    """The store was well until then: what was proposed before it was answered, or given up long ago."""
    served_at: float
    """When its last turn began."""
    lost: frozenset[str] = frozenset()
    """Workers that it was moved off meanwhile."""
    rewound: bool = False
    """It had a claim, which the store has forgotten at `since`; what stands from before that may be of any age."""
    doubted_until: float = 0.0
    """By the monotonic clock: until then another replica's claim that contradicts it is not believed. 0: none yet."""
    ended_at: float = 0.0
    """When that claim was closed, as far as was heard."""


class Entry:
    """One session on this replica. Its turns are counted by `Entries`."""

    __slots__ = ("active", "alone", "claim", "closing", "ended", "good_until", "kept", "key", "proof", "renew_at",
                 "renewing", "seen", "served", "stamp", "target", "trial", "unheard", "unreadable")  # fmt: skip

    def __init__(self, key: str, target: Target) -> None:
        self.key, self.target = key, target
        self.claim: Claim | None = None
        """None while it is placed without a store, and once its close has begun."""
        self.alone: Alone | None = None
        """What is known of its being served without a claim; None: its claim was read."""
        self.unheard: Alone | None = None
        """What is known of its being served by its claim while the store cannot be asked whether that stands."""
        self.active = 0
        """Its turns here; each is counted once."""
        self.closing = False
        """A final turn has decided that the claim is closed when the last turn here ends."""
        self.proof = UNPROVEN
        """The stretch of the watch's continuity in which the claim was read."""
        self.stamp = 0
        """The store's, from before the claim was read."""
        self.good_until = self.renew_at = 0.0
        """When it must be read again whatever the watch says, at the latest when it may have expired; when renewed."""
        self.renewing = False
        self.seen = 0
        """Bytes of the last request that its target has answered here, where turns have phases; 0: not known."""
        self.kept = False
        """It is no session but something that a worker keeps."""
        self.trial = False
        """It was made by a turn that is here, and no turn of it has been answered yet."""
        self.served = False
        """A turn of it here was answered by its target."""
        self.ended = False
        """Its close has begun."""
        self.unreadable = False
        """What stands at its key is no claim, and is left alone."""

    def unprove(self) -> None:
        """The next turn reads what stands there, and until then nothing is renewed."""
        self.proof = UNPROVEN
        self.renew_at = float("inf")

    def continues(self, claim: Claim, target: Target) -> bool:
        """It is of this very claim, or was placed without the store where the claim now says. Not when its worker has
        left, and another one has come under its name."""
        if self.claim is None or self.target is not target:
            return self.target is target
        return (self.claim.revision, self.claim.value.nonce) == (claim.revision, claim.value.nonce)


class Snapshot(msgspec.Struct, eq=False, weakref=True):
    """What was known when a read of a session's claim began, and what the watch said of it since."""

    proof: int
    stamp: int
    deleted: list[Deleted] = []


class Entries:
    """The table. An entry is *proven* while the store's watch is alive and continuous since the claim was read, for at
    most `max_stale`, and until the claim is near its end; otherwise the claim is read before the entry is used.

    Many methods: what is known of a session is changed nowhere else, so that what is proven is judged in one place."""

    def __init__(
        self,
        stamp: Callable[[str], int],
        *,
        ttl: float,
        kept_ttl: float,
        max_stale: float,
        capacity: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`ttl`, `kept_ttl` (of what is `kept`) and `max_stale` in seconds; `stamp` and `clock` are the store's; `wall`
        says Unix seconds."""
        self._stamp, self._clock, self._wall = stamp, clock, wall
        self._ttl, self._kept_ttl, self._max_stale, self._capacity = ttl, kept_ttl, max_stale, capacity
        self._table: OrderedDict[str, Entry] = OrderedDict()
        """The longest unused first. One that was replaced or closed lives on in the turns that hold it. Each target
        counts its sessions in it."""
        self._by_worker: Counter[str] = Counter()
        """How many of them are at each, by its name."""
        self.active: dict[str, Entry] = {}
        """Those of the table that have turns; the others make room when it is full."""
        self._reads: WeakValueDictionary[str, Snapshot] = WeakValueDictionary()
        """Of the sessions whose claims are being read now: one at a time for each."""
        self._stretches = 0
        self._proof = UNPROVEN
        """The watch's current stretch of continuity; UNPROVEN while it is not shown to be alive."""
        self.watched_until = 0.0
        """When the last stretch ended, in Unix seconds."""

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
            self.active[key] = entry
        entry.active += 1
        return entry

    def used(self, key: str, now: float) -> Entry | None:
        """A session that was served here by its claim, as is known here, for who is no turn of it, and leaves nothing;
        None when that does not do."""
        entry = self._table.get(key)
        if entry is None or not entry.served or entry.trial or entry.closing or entry.claim is None:
            return None
        if not self.proven(entry, now):
            return None
        self._table.move_to_end(key)
        return entry

    def enter(self, entry: Entry) -> None:
        """One more turn of this very entry, proven or not. To be given to `leave`."""
        if not entry.active:
            self._put(entry)
            self.active[entry.key] = entry
        entry.active += 1

    def leave(self, entry: Entry) -> None:
        entry.active -= 1
        key = entry.key
        if not entry.active and self.active.get(key) is entry:
            del self.active[key]
            self._table.move_to_end(key)
            if len(self._table) > self._capacity:
                self._trim()

    def install(self, entry: Entry) -> None:
        """Make this, which has no turns yet, the key's entry."""
        self.forget(entry.key)
        self._put(entry)
        self._trim()

    def forget(self, key: str) -> None:
        self._drop(key)
        self.active.pop(key, None)

    def _put(self, entry: Entry) -> None:
        before = self._table.get(entry.key)
        if before is not entry:
            self._drop(entry.key)
            self._table[entry.key] = entry
            entry.target.sessions += not entry.kept
            self._by_worker[entry.target.worker.name] += 1

    def _drop(self, key: str) -> None:
        entry = self._table.pop(key, None)
        if entry is not None:
            name = entry.target.worker.name
            entry.target.sessions -= not entry.kept
            self._by_worker[name] -= 1
            if not self._by_worker[name]:
                del self._by_worker[name]

    def _trim(self) -> None:
        while len(self._table) > max(self._capacity, len(self.active)):
            key, entry = next(iter(self._table.items()))
            if entry.active:
                self._table.move_to_end(key)
            else:
                self._drop(key)

    # -- proof

    @property
    def watching(self) -> bool:
        return self._proof != UNPROVEN

    def proven(self, entry: Entry, now: float) -> bool:
        return (
            entry.proof == self._proof != UNPROVEN
            and now < entry.good_until
            and self._stamp(entry.key) == entry.stamp
            and entry.target.worker.known
        )

    def snapshot(self, key: str) -> Snapshot:
        """Taken before a claim is read or made, and kept until it is noted."""
        snapshot = self._reads[key] = Snapshot(self._proof, self._stamp(key))
        return snapshot

    def note(self, claim: Claim, target: Target, snapshot: Snapshot, *, kept: bool = False) -> Entry:
        """Note a claim that was just read: its session is at `target`."""
        entry = self.find(claim.key)
        if entry is None or not entry.continues(claim, target):
            entry = Entry(claim.key, target)
            entry.kept = kept
            self.install(entry)
        self.refresh(entry, claim)
        gone = any(event.before is None or event.before > claim.revision for event in snapshot.deleted)
        entry.proof, entry.stamp = UNPROVEN if gone else snapshot.proof, snapshot.stamp
        return entry

    def hearsay(self, claim: Claim, target: Target, *, kept: bool = False) -> Entry:
        """Note a claim as another replica knows it. It is not proven: who uses it next asks again."""
        entry = self.find(claim.key)
        if entry is None or not entry.continues(claim, target):
            entry = Entry(claim.key, target)
            entry.kept = kept
            self.install(entry)
        entry.claim, entry.alone, entry.unheard = claim, None, None
        entry.unprove()
        return entry

    def refresh(self, entry: Entry, claim: Claim) -> None:
        """The claim stood just now. That does not prove what the watch missed."""
        entry.claim, entry.alone, entry.unheard, entry.unreadable = claim, None, None, False
        entry.good_until = self._clock() + self._max_stale
        entry.renew_at = 0.0
        if claim.expires_at:
            ttl = self._kept_ttl if entry.kept else self._ttl
            entry.good_until = min(entry.good_until, claim.expires_at - ttl * NEAR_ITS_END)
            entry.renew_at = claim.expires_at - ttl

    # -- without the store

    def alone(self, answered_at: float) -> Alone:
        """From now on, without the store. `answered_at`: when it last answered anything, in Unix seconds."""
        wall = self._wall()
        return Alone(since=wall if self.watching else max(answered_at, self.watched_until), served_at=wall)

    def goes_on(self, entry: Entry, answered_at: float) -> None:
        """A turn is served by the claim, which the store cannot confirm."""
        entry.unheard = entry.unheard or self.alone(answered_at)
        entry.unheard.served_at = self._wall()

    def outlived(self, entry: Entry) -> bool:
        """The claim, which is gone, has ended by itself because nobody could renew it: the session has not ended. It is
        served without a claim from now on."""
        if not self._outlives(entry):
            return False
        entry.claim, entry.alone, entry.unheard = None, entry.unheard, None
        entry.unprove()
        return True

    def _outlives(self, entry: Entry) -> bool:
        claim, unheard = entry.claim, entry.unheard
        if claim is None or unheard is None or not 0.0 < claim.expires_at <= self._clock() or entry.closing:
            return False
        return entry.active > 0 or self._wall() - unheard.served_at < (self._kept_ttl if entry.kept else self._ttl)

    def watched(self, stands: bool) -> None:
        """A stretch of the watch's continuity begins or ends; what was read before is not proven any more."""
        self._stretches += stands
        if self.watching and not stands:
            self.watched_until = self._wall()
        self._proof = self._stretches if stands else UNPROVEN

    def rewound(self) -> None:
        """The store has forgotten what it held: what is known here is served on where it is, without a claim."""
        now = self._wall()
        for entry in list(self):
            if entry.claim is not None and 0.0 < entry.claim.expires_at < self._clock() and not entry.active:
                self.forget(entry.key)  # it has ended by itself
            elif entry.claim is not None:
                entry.claim, entry.alone = None, Alone(since=now, served_at=now, rewound=True)
                entry.unprove()

    def deleted(self, event: Deleted) -> None:
        """The watch says that a claim is gone."""
        if event.key in self._reads:
            self._reads[event.key].deleted.append(event)
        entry = self.find(event.key)
        if entry is None or entry.claim is None:
            if entry is not None and entry.alone is not None and entry.alone.doubted_until:
                entry.alone.ended_at = self._wall()
            return
        if event.before is not None and entry.claim.revision >= event.before:
            return  # the end of a predecessor
        entry.proof = UNPROVEN
        if not entry.active and not self._outlives(entry):
            self.forget(event.key)

    # -- all of them

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._table.values())

    def census(self) -> Counter[str]:
        """How many sessions this replica knows, by the name of their worker."""
        return self._by_worker.copy()

    def page(self, after: str, limit: int, worker: str = "") -> list[View]:
        """The first `limit` of the sessions that this replica knows, by their keys, of those after `after` and at
        `worker` (empty: any)."""
        wanted = (entry for entry in self if entry.key > after and worker in ("", entry.target.worker.name))
        return [self.view(entry) for entry in heapq.nsmallest(limit, wanted, key=lambda entry: entry.key)]

    def view(self, entry: Entry) -> View:
        proven = self.proven(entry, self._clock())
        source = "degraded" if entry.claim is None else "memory" if proven else "unproven"
        if entry.unreadable:
            source = "unreadable"
        return View(entry.key, entry.claim, entry.target, entry.active, source)
