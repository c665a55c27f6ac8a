"""The contract of a claim store.

A *claim* is the shared record that binds one session (its hashed key) to one target (worker and rank). A store keeps
claims for every replica of the router. This module says what each store must do; `tests/stores/` checks each sentence
against every store.

**Claims are immutable.** The first writer of a key wins and everyone else adopts its claim. A target is changed only by
closing the observed claim and creating a new one. A claim's `revision` is its fencing token: it differs from the
revision of every other claim ever made of that key, and `close` and `renew` act only on the claim with that revision.

**Lifetime.** `create_or_get` and `renew` give a claim at least `ttl` seconds from the call on and at most
`1.25 * ttl` (`LIFETIME`), so that a busy claim needs at most four renewals per TTL and a store may share leases
between claims. A claim does not die with the process that made it. `Claim.expires_at` is when it surely still
stands, by the monotonic clock of this process (0.0 when the store cannot tell).

**Errors** say what is known. `StoreUnavailable`: surely not applied. `OutcomeUnknown`: may have been applied; the
remedy is to call again with the same arguments, which is safe: `create_or_get` recognises its own proposal by its nonce
and returns `created=True`, and `close` of a claim that is already gone returns `GONE`. `ClaimLost`: the claim is not
there any more, a normal event. `ClaimUnreadable`: this one record is no claim, and the store is well. A store raises
nothing else, and every call ends within the store's deadline. Cancelling a call is allowed at any time and leaves
either outcome; the next call works.

**Events.** `subscribe` first yields `Reset` when its watch stands: whatever the caller knew before may be outdated.
Then it yields `Deleted` for each claim that goes (closed, expired or removed by hand), in order per key; one that this
store object has never returned to anybody may be left out. Creations are never reported. When continuity cannot be
proven (overflow, a slow subscriber, compaction, a new connection) it yields `Reset` again. When the watch is not shown
to be alive any more it raises `StoreUnavailable`; it never falls silent. A subscriber that stops iterating and closes
the iterator frees what it held.

**Stamps.** `stamp(key)` is a number that a store changes, where it can do so without I/O in the reader, before a
`close` of that key returns to *any* process that it reaches. A cached claim whose stamp (taken before the claim was
read) still matches has not been closed. A store that cannot do this always returns 0, and its readers rely on events.
"""

from __future__ import annotations

import enum
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from backends.events import Reset as Reset  # part of this contract
from backends.registry import Registry

VERSION = 1
"""Of what is written."""
LIFETIME = 1.25
"""The most that a store may stretch a TTL."""


class StoreError(Exception):
    """Base of everything a claim store raises."""

    others_answered = False
    """The store answered what was asked after this call, so the trouble is this call's alone. False: not known."""


class StoreUnavailable(StoreError):
    """The store did not do it: refused, unreachable, full, or read-only. Surely not applied."""


class OutcomeUnknown(StoreError):
    """The store may or may not have done it: the reply was lost or late. Call again with the same arguments."""


class ClaimLost(StoreError):
    """The claim is closed, expired, or superseded. Normal: read again and adopt what stands there."""


class ClaimUnreadable(StoreError):
    """What stands at the key is no claim that this version can read; whoever made it may. The rest of the store is as
    well as before, and what stands is left alone: only `close(error.claim)`, an operator's word, removes it."""

    def __init__(self, key: str, revision: int, why: str) -> None:
        super().__init__(f"what stands at {key} is no claim that can be read: {why}")
        self.claim = Claim(key=key, value=ClaimValue(worker="", nonce=""), revision=revision, expires_at=0.0)
        """What stands, as far as `close` needs it."""


class StoreConfigurationError(ValueError):
    """A store's URL cannot mean anything: raised when a store is opened, never later."""


class ClaimValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False, gc=False):
    """What is written; JSON with a version. Readers ignore fields they do not know."""

    worker: str
    """The worker's name."""
    rank: int | None = None
    """Data-parallel rank inside the worker; 0 is a rank, None is no rank."""
    replica: str = ""
    """The replica that created the claim."""
    generation: int = 0
    """How often the session has been rebound."""
    nonce: str = msgspec.field(default_factory=lambda: secrets.token_hex(12))
    """Recognises our own write after an ambiguous timeout."""
    created_at: int = 0
    """Unix seconds by the creator's clock: when it was proposed or, if `served`, when its last turn before that was. No
    store decides anything by it. 0: not said."""
    served: bool = False
    """Turns of the session had been served there before the claim was made (without the store, which was away)."""
    version: int = VERSION

    def __post_init__(self) -> None:
        # A process may hold a million claims that name a few workers and replicas.
        msgspec.structs.force_setattr(self, "worker", sys.intern(self.worker))
        msgspec.structs.force_setattr(self, "replica", sys.intern(self.replica))


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One claim as read from a store."""

    key: str
    """Lower-case hex of the hashed (tenant, session id)."""
    value: ClaimValue
    revision: int
    """Fencing token. Compare for equality only."""
    expires_at: float
    """Until when it surely stands, in seconds of `time.monotonic`; 0.0: unknown."""


class ClaimOutcome(msgspec.Struct, frozen=True):
    claim: Claim
    created: bool
    """True when the claim that stands is the caller's own proposal."""


class CloseOutcome(enum.Enum):
    CLOSED = "closed"
    """It stood, and this call removed it."""
    GONE = "gone"
    """There was no claim of that key."""
    SUPERSEDED = "superseded"
    """Another claim of that key stands; it was left alone."""


class Deleted(msgspec.Struct, frozen=True):
    """A claim of `key` is gone."""

    key: str
    before: int | None = None
    """Where revisions are ordered: only claims with a revision below this are gone. None: read again to know."""


Event = Deleted | Reset


class ClaimStore(Protocol):
    """See the module's docstring for what each method promises."""

    @property
    def across_processes(self) -> bool:
        """Processes on one host agree; `open_store` refuses a store that lacks it where the deployment needs it."""
        ...

    @property
    def registry(self) -> Registry:
        """The records beside the claims (`backends.registry`): always the same object, which ends with the store."""
        ...

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        """Create the claim, or return the one that stands. `ttl` in seconds. Does not renew a claim that stands.

        Raises StoreUnavailable, OutcomeUnknown or ClaimUnreadable."""
        ...

    async def get(self, key: str) -> Claim | None:
        """The claim that stands, or None. Never creates or renews. Raises StoreUnavailable or ClaimUnreadable."""
        ...

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        """Give the claim at least `ttl` seconds more; returns it with its new `expires_at` and the same revision.

        Raises ClaimLost, StoreUnavailable, OutcomeUnknown or ClaimUnreadable."""
        ...

    async def close(self, claim: Claim) -> CloseOutcome:
        """Remove this very claim, if it stands. Idempotent. Raises StoreUnavailable or OutcomeUnknown."""
        ...

    def subscribe(self) -> AsyncIterator[Event]:
        """Deletions from now on. Raises StoreUnavailable from the iterator. Several subscribers may iterate at once."""
        ...

    def stamp(self, key: str) -> int:
        """See *Stamps* above; makes no I/O and does not raise."""
        ...

    async def check(self) -> None:
        """Prove by a real round trip that claims can be read and made. Raises StoreUnavailable."""
        ...

    async def aclose(self) -> None:
        """Free everything; ends every subscription. Claims stay. Idempotent."""
        ...


class _Later(msgspec.Struct):
    """What must be there, and readable, of a claim that a later version made."""

    version: int
    worker: str
    rank: int | None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ClaimValue)
_later_decoder = msgspec.json.Decoder(_Later)


def encode_value(value: ClaimValue) -> bytes:
    return _encoder.encode(value)


def decode_value(raw: bytes) -> ClaimValue:
    """Of a later version, as much as can be read, if worker and rank can. Raises ValueError (msgspec's errors are
    ValueErrors) when this is no claim value."""
    try:
        try:
            return _decoder.decode(raw)
        except msgspec.ValidationError:
            later = _later_decoder.decode(raw)
            if later.version <= VERSION:
                raise
            return ClaimValue(worker=later.worker, rank=later.rank, nonce="", version=later.version)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
