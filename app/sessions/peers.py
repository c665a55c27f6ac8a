"""What replicas ask and tell each other directly, beside the store.

A replica that cannot reach the store asks where a session is before it guesses, and has one that can reach it decide;
whoever closes a claim tells all others, which forget it before the client sees the end; what ends or moves while the
store is away is known to all; and so is a worker that has failed turns, before each has lost some to it. It is the
second best that there is: nothing here is believed against a claim that the store has shown, and a peer that does not
answer in time is done without: one that has gone in silence is waited for once, one that is busy each time.

Here is who asks; `door` has who is asked. On the wire: POST /peers/quick and /peers/slow on the peers' own listener,
`Authorization: Bearer` with the token of the peer's record, a `Message` and a `Reply` in JSON. Quick is what a peer
knows by itself, slow what it asks its store. Readers ignore fields and questions that they do not know. What is asked
of one peer while it has not answered goes together, in its next message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from app.fleet.health import Word
from app.fleet.naming import Naming, Spot
from app.fleet.policies import rank_by_hash
from app.fleet.workers import Target, Worker
from app.http.calling import call
from app.http.worker import AttemptFailed, AttemptTimeout, ConnectRefused, Pool
from app.metrics import Metrics
from app.sessions.endings import Ending
from backends.base import Claim, ClaimValue

QUICK, SLOW = b"/peers/quick", b"/peers/slow"
_ON_THE_WAY = 0.5
"""Seconds more that its answer may be on its way."""
_LEFT_OUT = 1.0
"""Seconds that a peer is not asked after it has not answered."""
_DOUBTED = 3.0
"""Seconds that a peer is not taken to have the store after it did not get an answer from it in time."""
_FADING = 60.0
"""Seconds that a peer is still asked whose record has gone: it may be cut off from the store alone."""
AT_ONCE = 256
"""Questions in one message."""
_MOST_WAITING = 4096
MOST_BYTES = 1 << 20
_SLOW_AT_ONCE = 4
_IDLE = 30.0
UP = "up"


class Patience(msgspec.Struct, frozen=True):
    """Seconds that a turn waits for its peers."""

    where: float = 0.1
    """To know where a session is, for one that did not answer when it was last asked."""
    late: float = 1.0
    """For any other: it is there, and may be busy. Who guesses while it would have known puts a session at two workers,
    and who waits for one that has just gone does so once."""
    closed: float = 0.05
    """To know that they have heard of a close."""
    store: float = 1.0
    """For one that asks the store."""


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One question, or piece of news, about the session `key`; health: about the worker `at`, `key` is empty."""

    do: str
    """quick: where; closed, ended, moved, health: news. slow: bind, close."""
    key: str
    revision: int | None = None
    """Of the claim that is meant; None: whichever."""
    at: tuple[Spot, ...] = ()
    """bind: where it may be placed, should no claim stand; empty: anywhere. moved: where it is now."""
    parent: str = ""
    lost: tuple[str, ...] = ()
    """bind, moved: workers that cannot be reached; a claim that names one is replaced."""
    standing: bool = False
    """bind: only a claim that stands will do."""
    kept: bool = False
    said: str = ""
    """health: a `Word`."""
    ending: Ending | None = None
    """ended, close: the end of the session, which tells it from a successor where no revision does; None: from a
    replica of a version that does not say."""


class Known(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer knows of a session."""

    spot: Spot | None = None
    """Where it is; None: the peer does not know it."""
    value: ClaimValue | None = None
    """Of its claim; None: it was placed without the store."""
    revision: int = 0
    proven: bool = False
    """The peer has the store's word for it."""
    active: int = 0
    """Its turns there."""
    served: bool = False
    """A turn of it was answered there, by this spot."""
    ended: bool = False
    """Its final turn was there, and its claim is still to be closed."""
    ended_at: float = 0.0
    """When it last ended there, in Unix seconds; 0: not lately."""
    how: str = ""
    """bind: created, stored, ..., or refused by the peer, which has the store; close: closed, gone or superseded."""

    def claim(self, key: str) -> Claim | None:
        """The claim that the peer has seen, of which nothing is known to us but that it stood."""
        if self.value is None:
            return None
        return Claim(key=key, value=self.value, revision=self.revision, expires_at=0.0)


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    replica: str
    asks: list[Ask]


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    state: str
    """Of the peer's store: up, read-only or away."""
    answers: list[Known | None]


class Peer(msgspec.Struct, frozen=True):
    """Another replica, as its record says."""

    replica: str
    incarnation: str
    host: str
    port: int
    token: str
    state: str
    """Of its store."""


class Peers:
    """The other replicas that can be asked. Each waits for them for a bounded time, raises nothing, and costs nothing
    while there is no other replica."""

    def __init__(
        self,
        replica: str,
        names: Naming,
        metrics: Metrics,
        *,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica, self._names, self._metrics, self._clock = replica, names, metrics, clock
        self._patience = patience or Patience()
        self._links: dict[str, _Link] = {}
        """By incarnation."""

    def __len__(self) -> int:
        return len(self._links)

    def update(self, peers: Iterable[Peer]) -> None:
        """These are all whose records stand."""
        now = self._clock()
        standing = {peer.incarnation: peer for peer in peers}
        for incarnation, peer in standing.items():
            link = self._links.get(incarnation)
            if link is None or (link.peer.host, link.peer.port) != (peer.host, peer.port):
                if link is not None:
                    link.close()
                self._links[incarnation] = link = _Link(peer, self._replica, self._metrics, self._patience, self._clock)
            link.peer, link.state, link.fades_at = peer, peer.state, None
        for incarnation, link in list(self._links.items()):
            if incarnation not in standing:
                link.fades_at = link.fades_at or now + _FADING
                if link.gone or now >= link.fades_at:
                    link.close()
                    del self._links[incarnation]

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    @property
    def any_up(self) -> bool:
        """Whether one that can be asked is thought to reach the store."""
        return any(link.up for link in self._usable())

    async def find(self, ask: Ask) -> tuple[Known, Target] | None:
        """Where the session of `ask` (a bind) is, for a replica that cannot ask the store: by the word of a peer that
        has the store's, else by a peer that asks it, else by what any knows. None: nobody knows."""
        links = self._usable()
        if not links:
            return None
        told = await self._all(links, msgspec.structs.replace(ask, do="where", at=()))
        known = [(each, target) for _, each in told if (target := self._meant(each)) is not None and not each.ended]
        known = [pair for pair in known if pair[1].worker.name not in ask.lost]
        best = max(known, key=_trust, default=None)
        if best is not None and best[0].proven:
            return self._found("where", best)
        if best is not None and best[0].value is None:
            # What was served is the truth: a claim that is made now says so.
            ask = msgspec.structs.replace(ask, at=(self._names.spot(best[1]),), standing=False)
        for link in sorted((link for link, _ in told), key=lambda link: rank_by_hash(ask.key, link.peer.incarnation)):
            if link.up:
                answer = await _within(link.slow.ask(ask), self._patience.store)
                if answer is None or answer.spot is None:
                    if answer is None or not answer.how:
                        link.doubt()
                    continue
                target = self._meant(answer)
                if target is not None and target.worker.name not in ask.lost:
                    return self._found("bind", (answer, target))
        return None if best is None else self._found("where", best)

    async def serving(self, key: str) -> tuple[Target | None, bool]:
        """Where one of them serves the session without a claim, if any does; and whether all there are have said."""
        links = self._usable()
        told = await self._all(links, Ask("where", key)) if links else []
        known = [(each, there) for _, each in told if each.value is None and (there := self._meant(each)) is not None]
        return max(known, key=_trust)[1] if known else None, 0 < len(told) == len(self._links)

    async def served_by(self, claim: Claim) -> bool:
        """Whether one of them serves the session by this claim, and has the store's word for it."""
        links = self._usable()
        told = await self._all(links, Ask("where", claim.key)) if links else []
        return any(known.proven and known.revision == claim.revision for _, known in told)

    async def have_served(self, claim: Claim) -> bool:
        """Whether one of them has had a turn answered by this claim."""
        links = self._usable()
        told = await self._all(links, Ask("where", claim.key)) if links else []
        return any(known.served and known.value is not None and known.revision == claim.revision for _, known in told)

    async def ended_at(self, key: str) -> float:
        """When the session last ended at any of them, in Unix seconds; 0: nobody knows of an end."""
        links = self._usable()
        told = await self._all(links, Ask("where", key)) if links else []
        return max((known.ended_at for _, known in told), default=0.0)

    async def tell(
        self,
        do: str,
        key: str,
        revision: int | None,
        at: Target | None = None,
        lost: frozenset[str] = frozenset(),
        ending: Ending | None = None,
    ) -> None:
        """closed, ended, moved: returns when all have heard it, or after a limit."""
        links = self._usable()
        if links:
            spots = () if at is None else (self._names.spot(at),)
            news = Ask(do, key, revision, spots, lost=tuple(sorted(lost)), ending=ending)
            await self._all(links, news, self._patience.closed)

    def say(self, worker: Worker, word: Word) -> None:
        """Have all hear it soon; nobody waits for that."""
        for link in self._usable():
            link.quick.ask(Ask("health", "", at=(self._names.spot(worker.targets[0]),), said=word.value))

    async def close_for_us(self, ending: Ending, revision: int | None) -> str | None:
        """Have a peer that reaches the store close the claim: closed, gone or superseded; None: nobody could."""
        ask = Ask("close", ending.key, revision, ending=ending)
        for link in self._usable():
            if link.up:
                answer = await _within(link.slow.ask(ask), self._patience.store)
                if answer is not None and answer.how:
                    return answer.how
                link.doubt()
        return None

    def _usable(self) -> list[_Link]:
        now = self._clock()
        return [link for link in self._links.values() if now >= link.left_out_until and not link.gone]

    async def _all(self, links: Sequence[_Link], ask: Ask, seconds: float | None = None) -> list[tuple[_Link, Known]]:
        """Those that have answered in time, and what. `seconds` for all; None: what each deserves, and who has not
        answered then is done without for a while. News goes to all in any case, as soon as may be."""
        waiting = [(link, link.quick.ask(ask)) for link in links]
        futures = [future for _, future in waiting]
        if seconds is None:
            await asyncio.wait(futures, timeout=self._patience.where)
            there = [future for link, future in waiting if link.answers and not future.done()]
            if there:
                await asyncio.wait(there, timeout=self._patience.late - self._patience.where)
        else:
            await asyncio.wait(futures, timeout=seconds)
        answers = []
        for link, future in waiting:
            if not future.done():
                self._metrics.peer_calls.inc(ask.do, "late")
                if seconds is None:
                    future.cancel()
                    link.leave_out()
            elif (answer := future.result()) is not None:
                answers.append((link, answer))
        return answers

    def _meant(self, known: Known) -> Target | None:
        return None if known.spot is None else self._names.at(known.spot)

    def _found(self, by: str, found: tuple[Known, Target]) -> tuple[Known, Target]:
        self._metrics.peer_found.inc(by)
        return found


def _trust(found: tuple[Known, Target]) -> tuple[bool, bool, int, int, str]:
    """Greater for what is rather to be believed; the last word is the same on every replica."""
    known, target = found
    generation = known.value.generation if known.value is not None else 0
    return known.proven, known.value is not None, generation, known.active, target.worker.name


async def _within(future: asyncio.Future[Known | None], seconds: float) -> Known | None:
    await asyncio.wait([future], timeout=seconds)
    if not future.done():
        future.cancel()
        return None
    return future.result()


class _Link:
    """The way to one peer."""

    def __init__(
        self, peer: Peer, replica: str, metrics: Metrics, patience: Patience, clock: Callable[[], float]
    ) -> None:
        self.peer, self._clock = peer, clock
        self.state = peer.state
        """Of its store, as it has said last."""
        self.left_out_until = self._doubted_until = 0.0
        self.fades_at: float | None = None
        """When it is given up; None: its record stands."""
        self.gone = False
        """Nobody listens at its address, or somebody else."""
        self.answers = True
        """It did when it was last asked, or has not been asked yet."""
        self._pool = Pool(peer.host, peer.port, connect_limit=patience.late, idle_limit=_IDLE)
        head = (
            f"host: {peer.host if ':' not in peer.host else f'[{peer.host}]'}:{peer.port}\r\n"
            f"authorization: Bearer {peer.token}\r\ncontent-type: application/json\r\ncontent-length: "
        ).encode()
        quick, slow = (b"POST %b HTTP/1.1\r\n" % path + head for path in (QUICK, SLOW))
        self.quick = _Line(self, self._pool, quick, replica, metrics, 2 * patience.late, 1, self.failed)
        # Its store may take all the time that it is given there, and then its answer says so.
        limit = patience.store + _ON_THE_WAY
        self.slow = _Line(self, self._pool, slow, replica, metrics, limit, _SLOW_AT_ONCE, self.failed_slowly)

    @property
    def up(self) -> bool:
        return self.state == UP and self._clock() >= self._doubted_until

    def doubt(self) -> None:
        self._doubted_until = self._clock() + _DOUBTED

    def has_answered(self, state: str) -> None:
        self.state, self.answers, self.left_out_until = state, True, 0.0

    def leave_out(self) -> None:
        """It has not answered in time."""
        self.answers, self.left_out_until = False, self._clock() + _LEFT_OUT

    def failed_slowly(self, failure: Exception) -> None:
        """What it was to ask its store. That it takes long says nothing of what it knows by itself."""
        if isinstance(failure, AttemptTimeout):
            self.doubt()
        else:
            self.failed(failure)

    def failed(self, failure: Exception) -> None:
        self.leave_out()
        if isinstance(failure, ConnectRefused | _Stranger):
            self.gone = self.fades_at is not None

    def close(self) -> None:
        self.quick.close()
        self.slow.close()
        self._pool.close()


class _Stranger(AttemptFailed):
    """What listens at the address is not the peer of the record."""


class _Line:
    """What is asked of one peer: a few messages at a time, each with all that has come until it leaves."""

    def __init__(
        self,
        link: _Link,
        pool: Pool,
        head: bytes,
        replica: str,
        metrics: Metrics,
        seconds: float,
        at_once: int,
        failed: Callable[[Exception], None],
    ) -> None:
        self._link, self._pool, self._head, self._replica, self._metrics = link, pool, head, replica, metrics
        self._seconds, self._at_once, self._failed = seconds, at_once, failed
        self._waiting: list[tuple[Ask, asyncio.Future[Known | None]]] = []
        self._running: set[asyncio.Task[None]] = set()

    def ask(self, ask: Ask) -> asyncio.Future[Known | None]:
        """Set when the peer has answered; to None when it cannot be asked. Never raises; may be cancelled."""
        future: asyncio.Future[Known | None] = asyncio.get_running_loop().create_future()
        if len(self._waiting) >= _MOST_WAITING:
            future.set_result(None)
            return future
        self._waiting.append((ask, future))
        if len(self._running) < self._at_once:
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return future

    def close(self) -> None:
        for task in self._running:
            task.cancel()
        self._give_up()

    async def _run(self) -> None:
        while self._waiting:
            asked = [pair for pair in self._waiting[:AT_ONCE] if not pair[1].done()]
            del self._waiting[:AT_ONCE]
            if not asked:
                continue
            outcome = "failed"
            answers: list[Known | None] = [None] * len(asked)
            try:
                answers = await self._post([ask for ask, _ in asked])
                outcome = "ok"
            except AttemptFailed as failure:
                self._failed(failure)
                self._give_up()
            finally:
                for (ask, future), answer in zip(asked, answers, strict=True):
                    self._metrics.peer_calls.inc(ask.do, outcome)
                    if not future.done():
                        future.set_result(answer)

    def _give_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_result(None)

    async def _post(self, asks: list[Ask]) -> list[Known | None]:
        body = _encode(Message(self._replica, asks))
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        status, said = await call(self._pool, request, seconds=self._seconds, most=MOST_BYTES)
        if status != 200:
            raise _Stranger(f"the peer answered with status {status}")
        try:
            reply = _decode_reply(said)
        except msgspec.DecodeError as error:
            raise _Stranger(str(error)) from error
        if len(reply.answers) != len(asks):
            raise _Stranger("the peer has not answered what it was asked")
        self._link.has_answered(reply.state)
        return reply.answers


_encode = msgspec.json.Encoder().encode
_decode_reply = msgspec.json.Decoder(Reply).decode
