"""What is done for claims between turns: they are closed, renewed and watched."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from app import logs
from app.metrics import Metrics
from app.sessions.claims import Claims, StoreState, Tasks
from app.sessions.endings import Ending, EndingFiles
from app.sessions.entries import Entries, Entry
from app.sessions.peers import Peers
from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimStore,
    ClaimUnreadable,
    CloseOutcome,
    Reset,
    StoreError,
)

log = logging.getLogger("coatcheck.affinity")
T = TypeVar("T")

_AT_ONCE = 32
_AT_ONCE_PAUSE = 0.02
_LONGEST_PAUSE = 5.0
_FIRST_FILE_PAUSE, _LONGEST_FILE_PAUSE = 0.5, 60.0
"""Seconds; each try at a file system that hangs costs a thread."""
_ENDS_REMEMBERED = 10_000
_LOOK_AGAIN = 15.0
"""Seconds after the end of a session that ended while the store was away: by then every other replica that served it
has found the store back, and has claimed it again."""


async def watch(store: ClaimStore, entries: Entries, metrics: Metrics, rewound: Callable[[], None]) -> None:
    """Tell the entries what the store says of claims that go, and whether it can be relied on to say so. Endless.
    `rewound` is called when the store has forgotten what it held."""
    delay = 0.05
    while True:
        try:
            async for event in store.subscribe():
                if isinstance(event, Reset):
                    delay = 0.05
                    if event.rewound:
                        rewound()
                    entries.watched(True)
                    metrics.resets.inc()
                else:
                    entries.deleted(event)
        except StoreError as error:
            if entries.watching:
                text = "the claim store's watch is lost; claims are read before use: %s"
                log.warning(text, error, extra=logs.event("watch_lost", reason=str(error)))
        except Exception:
            # A fault of the store's code must not end the watch unseen: entries would stay proven for ever.
            log.exception("the claim store's watch failed; it is begun again")
        finally:
            entries.watched(False)
        await asyncio.sleep(delay)
        delay = min(2 * delay, 2.0)


class Closer:
    """Closes the claims of sessions that have ended, again and again until it is done or the claim has expired.

    A session that is known with its claim has that very claim closed. Of one that was placed without the store only
    its end is known: then whatever claim stands is closed that was made before it (`Ending.covers`).

    The other replicas are told of each, before anybody here takes it for done.

    Many methods: each is a step from a session's end to its close, and may be where the store is lost."""

    def __init__(
        self,
        entries: Entries,
        claims: Claims,
        peers: Peers,
        metrics: Metrics,
        tasks: Tasks,
        *,
        limit: float,
        files: EndingFiles | None = None,
    ) -> None:
        """`limit`: seconds that anybody waits for a close; it goes on in the background. `files`: where those are left
        that are not done at the end."""
        self._entries, self._claims, self._metrics, self._tasks = entries, claims, metrics, tasks
        self._peers, self._limit, self._files = peers, limit, files
        self._closings: dict[str, _Closing] = {}
        """The latest of each session; it waits for the one before it."""
        self._ended: OrderedDict[str, float] = OrderedDict()
        """Sessions that have ended here lately, and when, in Unix seconds."""

    def __len__(self) -> int:
        return len(self._closings)

    def is_closing(self, key: str) -> bool:
        return key in self._closings

    def ended_at(self, key: str) -> float:
        """When the session last ended here, in Unix seconds; 0: not lately."""
        return self._ended.get(key, 0.0)

    def has_ended(self, key: str, moment: float) -> None:
        self._ended[key] = moment
        self._ended.move_to_end(key)
        if len(self._ended) > _ENDS_REMEMBERED:
            self._ended.popitem(last=False)

    def begin(self, entry: Entry, *, heard: Ending | None = None) -> asyncio.Task[None] | None:
        """End what is known of the session here, and begin to close its claim. `heard`: how it has ended at another
        replica, which tells all others."""
        if self._entries.find(entry.key) is entry:
            self._entries.forget(entry.key)
        claim, entry.claim, entry.closing, entry.trial = entry.claim, None, False, False
        entry.unprove()
        if entry.ended or entry.unreadable:
            return None
        entry.ended = True
        return self.end(entry.key, claim, heard=heard)

    def drop(self, entry: Entry) -> None:
        """Nobody has been served by it: what was claimed for it is closed, and what was not is forgotten."""
        if entry.claim is not None:
            before = self._ended.get(entry.key)
            self.begin(entry)
            # The session has not ended: a peer may serve it, and must not take it for ended.
            if before is None:
                self._ended.pop(entry.key, None)
            else:
                self._ended[entry.key] = before
        elif self._entries.find(entry.key) is entry:
            self._entries.forget(entry.key)

    def end(self, key: str, claim: Claim | None = None, *, heard: Ending | None = None) -> asyncio.Task[None]:
        """Begin to close the session's claim; the one that is known, or else whichever was made before its end, which
        is now if it was not `heard` of."""
        moment = self._claims.wall() if heard is None else heard.moment
        nonce = claim.value.nonce if claim is not None else "" if heard is None else heard.nonce
        return self._begin(Ending(key, moment, nonce), claim, heard=heard is not None)

    def end_whatever(self, key: str, nonce: str) -> None:
        """As an admin orders who has not been told what stands: also what is no claim that can be read. `nonce`: of the
        claim that is known here, if any."""
        self._begin(Ending(key, self._claims.wall(), nonce, whatever=True), None)

    def _begin(self, ending: Ending, claim: Claim | None, *, heard: bool = False) -> asyncio.Task[None]:
        key, earlier = ending.key, self._closings.get(ending.key)
        self.has_ended(key, ending.moment)
        if earlier is not None and claim is None and earlier.claim is None:
            earlier.ending.moment = max(earlier.ending.moment, ending.moment)
            earlier.ending.nonce = ending.nonce or earlier.ending.nonce
            earlier.ending.whatever |= ending.whatever
            return earlier.task
        closing = _Closing(ending, claim, self._claims.replica)
        closing.told = heard
        closing.task = self._tasks.spawn(self._close(closing, None if earlier is None else earlier.task))
        self._closings[key] = closing
        closing.task.add_done_callback(lambda _: self._closed(key, closing))
        return closing.task

    async def close(self, entry: Entry) -> None:
        """Returns when the claim is closed, or after the limit; while the store is away, when the other replicas have
        been told, and one that has the store has been asked to do it."""
        task = self.begin(entry)
        if self._claims.state is not StoreState.AWAY:
            if task is None and entry.key in self._closings:
                task = self._closings[entry.key].task  # begun by the word of another replica
            await self._wait(task)
        elif entry.key in self._closings:
            await self._ask_peers(self._closings[entry.key])

    async def wait(self, key: str | None = None) -> None:
        """For the close of a session that is under way, if any, or for all; but not longer than the limit."""
        pending = self._closings.values() if key is None else [self._closings[key]] if key in self._closings else []
        await self._wait(*(closing.task for closing in pending))

    async def _wait(self, *tasks: asyncio.Task[None] | None) -> None:
        if pending := [task for task in tasks if task is not None]:
            await asyncio.wait(pending, timeout=self._limit)

    def successor_of(self, key: str) -> float:
        """When a claim that is made now is to be created at the earliest, in Unix seconds, lest the end of the session
        before it covers it."""
        closing = self._closings.get(key)
        return 0.0 if closing is None else closing.ending.moment + 1.0

    def rewound(self) -> None:
        """The claims that are known are no more; their revisions may be others' now."""
        for closing in self._closings.values():
            closing.claim = None

    def _closed(self, key: str, closing: _Closing) -> None:
        if self._closings.get(key) is closing:
            del self._closings[key]

    async def _close(self, closing: _Closing, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        claims, known = self._claims, closing.claim
        until = (known and known.expires_at) or claims.clock() + LIFETIME * claims.ttl
        delay, in_outage = 0.05, False
        while True:
            in_outage = in_outage or claims.state is not StoreState.UP
            if in_outage:
                await self._ask_peers(closing)
            if closing.closed:
                return
            try:
                outcome = await self._try(closing)
            except ClaimUnreadable:
                return
            except StoreError:
                if claims.clock() >= until:
                    self._metrics.closes.inc("expired")
                    return
                await claims.pause(delay)
                delay = min(2 * delay, _LONGEST_PAUSE)
            else:
                break
        self._metrics.closes.inc(outcome.value)
        if outcome is CloseOutcome.SUPERSEDED:
            log.debug("a final turn found its claim superseded; the successor stands")
        if not claims.shows_closes(closing.ending.key):
            await self._peers.tell("closed", closing.ending.key, None if known is None else known.revision)
        if in_outage:
            self._tasks.spawn(self._look_again(closing))

    async def _ask_peers(self, closing: _Closing) -> None:
        """Without the store, once: tell all of the end, so that none claims the session again, and have one that has
        the store close the claim."""
        if closing.told or not self._peers:
            return
        closing.told = True
        ending, revision = closing.ending, None if closing.claim is None else closing.claim.revision
        await self._peers.tell("ended", ending.key, revision, ending=ending)
        outcome = await self._peers.close_for_us(ending, revision)
        # What a peer takes for a successor's by its age alone may be one that we know to be none (`Ending.covers`).
        if outcome is not None and (revision is not None or outcome != CloseOutcome.SUPERSEDED.value):
            closing.closed = True
            self._metrics.closes.inc(outcome)

    async def _try(self, closing: _Closing) -> CloseOutcome:
        claim = closing.claim
        if claim is None:
            try:
                claim = await self._claims.read(closing.ending.key)
            except ClaimUnreadable as error:
                if not closing.ending.whatever:
                    raise
                claim = error.claim
            if claim is None:
                return CloseOutcome.GONE
            if not closing.ending.covers(claim, closing.replica):
                return CloseOutcome.SUPERSEDED
        return await self._claims.close_at_last(claim)

    async def _look_again(self, closing: _Closing) -> None:
        """Another replica that served the session in the outage may have claimed it again, not knowing of its end."""
        await asyncio.sleep(_LOOK_AGAIN)
        closing.claim, closing.replica, closing.ending.whatever = None, "", False
        try:
            outcome = await self._try(closing)
        except StoreError as error:
            log.debug("a session that ended while the store was away was not looked for again: %s", error)
            return
        if outcome is CloseOutcome.CLOSED:
            self._metrics.closes.inc(outcome.value)

    # -- from one replica's end to another's start

    async def resume(self) -> None:
        """Do what replicas before this one have left."""
        if self._files is None:
            return
        left = await self._insist(self._files.load, "closes that an earlier replica may have left cannot be read")
        for file, endings in left or ():
            tasks = [self._begin(ending, None) for ending in endings]
            self._tasks.spawn(self._remove(self._files, file, tasks))

    async def _remove(self, files: EndingFiles, file: Path, tasks: Sequence[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks)
        await self._insist(lambda: files.remove(file), f"{file} is done and cannot be removed")

    async def _insist(self, work: Callable[[], Awaitable[T]], failing: str) -> T | None:
        """What comes of `work` at the files, which a busy machine may keep waiting at first. It is tried again until
        the claims that stand in them have ended by themselves: then nothing comes of it. `failing` is said once."""
        until, delay, said = self._claims.clock() + LIFETIME * self._claims.ttl, _FIRST_FILE_PAUSE, False
        while True:
            try:
                return await work()
            except OSError as error:
                if not said:
                    log.warning("%s; it is tried again: %s", failing, error)
                said = True
            if self._claims.clock() + delay >= until:
                return None
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_FILE_PAUSE)

    async def leave(self) -> None:
        """Finish within the limit, and leave what is not done for the next replica."""
        await self.wait()
        left = [closing.ending for closing in self._closings.values()]
        if not left:
            return
        try:
            if self._files is None:
                raise OSError("there is no folder for them")
            await self._files.save(left)
        except OSError as error:
            log.error("%d claims of ended sessions are not closed; they end by their TTL: %s", len(left), error)
        else:
            log.warning("%d claims of ended sessions are not closed; the next replica here does it", len(left))


class _Closing:
    __slots__ = ("claim", "closed", "ending", "replica", "task", "told")

    task: asyncio.Task[None]

    def __init__(self, ending: Ending, claim: Claim | None, replica: str) -> None:
        self.ending = ending
        self.replica = replica
        """Whose claims are known to be no successor's while this is pending (`Closer.successor_of`)."""
        self.claim = claim
        """The one to be closed; None: whichever stands and is covered."""
        self.told = self.closed = False
        """The other replicas have been told while the store was away; one of them has closed the claim."""


class Renewer:
    """Keeps claims alive whose sessions are in use."""

    def __init__(self, entries: Entries, claims: Claims, tasks: Tasks) -> None:
        self._entries, self._claims, self._tasks = entries, claims, tasks
        self._overdue: dict[str, Entry] = {}
        """Claims whose renewal was due while the store was away, or failed."""

    def soon(self, entry: Entry) -> None:
        """The claim is due to be renewed."""
        if entry.claim is None or entry.renewing:
            return
        if self._claims.state is not StoreState.UP:
            self.overdue(entry)
            return
        entry.renewing = True  # at once: a turn may ask again, at its end, before the renewal has begun
        self._tasks.spawn(self._renew(entry, entry.claim))

    def overdue(self, entry: Entry) -> None:
        """A turn of it is served, and the claim cannot be renewed."""
        self._overdue[entry.key] = entry
        self._entries.goes_on(entry, self._claims.answered_at)

    async def keep_alive(self) -> None:
        """Renew the claims of turns that run longer than a quarter of the TTL. Endless."""
        while True:
            await asyncio.sleep(min(self._claims.ttl / 8, 30.0))
            now = self._claims.clock()
            for entry in list(self._entries.active.values()):
                if now >= entry.renew_at:
                    self.soon(entry)

    async def catch_up(self) -> list[str]:
        """Renew what the store, which is back, could not be asked for. Returns the sessions that are served without a
        claim now: theirs have ended meanwhile by themselves."""
        overdue, self._overdue = list(self._overdue.values()), {}
        await at_once(self._renew_at_last, overdue)
        return [entry.key for entry in overdue if entry.alone is not None]

    async def _renew_at_last(self, entry: Entry) -> None:
        if entry.claim is not None and not entry.renewing:
            entry.renewing = True
            await self._renew(entry, entry.claim, last=True)

    async def _renew(self, entry: Entry, claim: Claim, *, last: bool = False) -> None:
        """`last`: not to be tried again at the store's next return (a store that is away for renewals alone returns
        at once)."""
        try:
            renewed = await self._claims.renew(claim, kept=entry.kept)
        except ClaimLost:
            if entry.claim is claim and not self._entries.outlived(entry):
                entry.unprove()
        except StoreError:  # also one that cannot be read any more
            entry.renew_at = self._claims.clock() + 1.0
            if not last:
                self._overdue[entry.key] = entry
        else:
            if entry.claim is claim:
                self._entries.refresh(entry, renewed)
        finally:
            entry.renewing = False


async def at_once(work: Callable[[T], Awaitable[None]], items: Sequence[T]) -> None:
    """The work for each of them, some at the same time, and not so many a second that nobody else gets a word in."""
    for start in range(0, len(items), _AT_ONCE):
        if start:
            await asyncio.sleep(_AT_ONCE_PAUSE)
        await asyncio.gather(*(work(item) for item in items[start : start + _AT_ONCE]))
