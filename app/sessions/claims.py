"""The claim store as this replica finds it. Here alone its claim methods are called.

**One call that fails is no outage.** A call that fails, or has not been answered within a quarter of the store's
deadline, has the store examined: it is checked a few times, each check begun a little after the one before, while all
other calls go on. A check that succeeds, or a claim that is made meanwhile, proves the store well, and what failed or
was late is tried again, begun within a deadline at most. The store is away when the checks fail, or when by the end of
the call's deadline nothing at all has been answered; then whatever waits goes on without it at once. So a store that
hangs costs its first turn one deadline and the next ones nothing; one that refuses costs a moment; and a call that was
begun before the store came back cannot send it away again.

**Our own lateness is not the store's.** While somebody waits for it, `Pulse` sees how long the event loop keeps
everybody waiting, by how late its own timers run; that time does not count for any of this.

**What was given up may still be done**, by a store that was only late. The nonces of our proposals that were given up
are remembered, so that such a claim is known for what it is: nobody has been served by it (`Claims.gave_up`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from app.fleet.workers import Target
from app.logs import event
from app.metrics import Metrics
from app.sessions.entries import NEAR_ITS_END
from backends.base import (
    Claim,
    ClaimLost,
    ClaimOutcome,
    ClaimStore,
    ClaimUnreadable,
    ClaimValue,
    CloseOutcome,
    OutcomeUnknown,
    StoreError,
)

log = logging.getLogger("coatcheck.affinity")
T = TypeVar("T")

_CHECKS = 3
"""So many failing ones say that the store is away."""
_CHECK_PAUSE = 0.04
_TRIES = 4
"""Of a call that a turn waits for."""
_MOMENT = 2.0
"""Seconds in which other replicas find the store back, when they look."""
_RENEWALS = 3
_BEAT = 0.05
"""Seconds between two looks at how late our own event loop is. A lateness that is shorter may be missed."""
_PUNCTUAL = 0.002
"""Seconds by which timers and clocks may differ."""
_REMEMBERED = 10_000
"""Proposals that were given up, and keys that could not be read."""


class StoreState(enum.Enum):
    UP = "up"
    READ_ONLY = "read-only"
    """Claims can be read but not made."""
    AWAY = "away"


class Tasks:
    """What runs in the background until `aclose`."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of the affinity failed", exc_info=task.exception())

    async def aclose(self) -> None:
        tasks = set(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Pulse:
    """A clock that stands still while our own event loop is late. It knows only of lateness within its `with`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0
        self._due = float("inf")
        """When the next beat is to run; inf: none is set."""
        self._missed = 0.0

    def time(self) -> float:
        now = self._clock()
        return now - self._missed - max(0.0, now - self._due)

    def missed(self) -> float:
        """Seconds in all."""
        return self._clock() - self.time()

    def __enter__(self) -> None:
        self._waiting += 1
        if self._due == float("inf"):
            self._set()

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1

    def _set(self) -> None:
        self._due = self._clock() + _BEAT
        asyncio.get_running_loop().call_later(_BEAT, self._beat)

    def _beat(self) -> None:
        self._missed += max(0.0, self._clock() - self._due)
        self._due = float("inf")
        if self._waiting:
            self._set()


class _Call:
    """One that somebody waits for."""

    __slots__ = ("alarm", "began", "limit")

    alarm: asyncio.TimerHandle

    def __init__(self, limit: asyncio.Timeout, began: float) -> None:
        self.limit = limit
        self.began = began
        """By the pulse."""


class Claims:
    """The store's calls: measured, tried again while that helps, and what they tell of the store (`state`).

    `get`, `create`, `prolonged` and `close` are for who has a turn waiting, and are given up when the store is away;
    `read`, `renew` and `close_at_last` are nobody's wait and get the store's whole deadline.

    Long because every call tells of the store's state, and the state decides how every call goes on."""

    def __init__(
        self,
        store: ClaimStore,
        metrics: Metrics,
        tasks: Tasks,
        *,
        replica: str,
        ttl: float,
        kept_ttl: float,
        deadline: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
        meanwhile: str,
        returned: Callable[[], Awaitable[None]],
    ) -> None:
        """`deadline`: the store's, in seconds; `wall`: says Unix seconds. `meanwhile`: what happens to new sessions
        while the store is away, for the log. `returned` is called when it is back."""
        self._store, self._metrics, self._tasks = store, metrics, tasks
        self.replica, self._meanwhile, self._returned = replica, meanwhile, returned
        self.ttl, self._kept_ttl, self.deadline = ttl, kept_ttl, deadline
        self.clock, self.wall = clock, wall
        self._patience = deadline / 4
        self._pulse = Pulse(clock)
        self.state = StoreState.UP
        self._up = asyncio.Event()
        """Set exactly while the state is UP."""
        self._up.set()
        self._up_since = clock()
        self._back_at = float("-inf")
        self.answered_at = wall()
        """When the store last answered anything, in Unix seconds."""
        self._answers = self._made = 0
        """How often it answered; how often that was a claim of ours."""
        self._late: set[asyncio.Timeout] = set()
        """Of the calls that wait for what the examination says."""
        self._examination: asyncio.Task[None] | None = None
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._unreadable: OrderedDict[str, None] = OrderedDict()

    # -- calls that a turn waits for

    def patience(self) -> float:
        """Until when the calls of one turn, beginning now, may be tried again, by the pulse."""
        return self._pulse.time() + self.deadline

    async def get(self, key: str, until: float | None = None) -> Claim | None:
        return await self._hurried("get", lambda: self._store.get(key), until)

    async def create(
        self,
        key: str,
        target: Target,
        generation: int,
        *,
        kept: bool = False,
        served: bool = False,
        created_at: float = 0.0,
        until: float | None = None,
    ) -> ClaimOutcome:
        """`kept`: of something that a worker keeps, as for `renew`. `served`: turns of it have been served there, the
        last one at `created_at` (0: now) in Unix seconds."""
        ttl = self._kept_ttl if kept else self.ttl
        # One proposal, so one nonce, for every try: a create whose reply was lost is recognised as our own.
        value = ClaimValue(
            worker=target.worker.name,
            rank=target.rank,
            replica=self.replica,
            generation=generation,
            created_at=int(created_at or self.wall()),
            served=served,
        )
        try:
            outcome = await self._hurried("create", lambda: self._store.create_or_get(key, value, ttl), until)
        except ClaimUnreadable:
            raise
        except BaseException:  # cancelled, too: nobody waits for it any more, and it may be done all the same
            _remember(self._given_up, value.nonce)
            raise
        self._made += outcome.created
        return outcome

    async def close(self, claim: Claim, until: float | None = None) -> CloseOutcome:
        return await self._hurried("close", lambda: self._store.close(claim), until)

    async def prolonged(self, claim: Claim, until: float | None = None, *, kept: bool = False) -> Claim | None:
        """The claim, which has been read: renewed where it may end by itself before a renewal beside the turn, which is
        served meanwhile, has come through. None: it has ended."""
        ttl = self._kept_ttl if kept else self.ttl
        if claim.expires_at - self.clock() > ttl * NEAR_ITS_END:
            return claim
        try:
            return await self._hurried("renew", lambda: self._store.renew(claim, ttl), until)
        except ClaimLost:
            return None
        except ClaimUnreadable:
            raise
        except StoreError:
            return claim

    # -- calls that nobody waits for

    @property
    def suspected(self) -> bool:
        """The store may be away; the next moments tell."""
        return self._examination is not None and not self._examination.done()

    def kept_waiting(self, until: float) -> bool:
        """The store has had the calls of one turn, of this `patience`, wait so long that another replica may have given
        it up."""
        return self._pulse.time() > until - self.deadline + self._patience

    def back_within(self, seconds: float) -> bool:
        """The store has come back so lately that other replicas may not know."""
        return self.clock() - self._back_at < seconds

    def was_late(self, until: float) -> bool:
        """The store was late or away a moment ago, to a turn of this `patience`: what it says now may be what others
        have given up and are about to take back."""
        return self.kept_waiting(until) or self.back_within(_MOMENT)

    async def read(self, key: str) -> Claim | None:
        return await self._patient("get", lambda: self._store.get(key))

    async def renew(self, claim: Claim, *, kept: bool = False) -> Claim:
        ttl = self._kept_ttl if kept else self.ttl
        for _ in range(_RENEWALS - 1):
            try:
                return await self._patient("renew", lambda: self._store.renew(claim, ttl))
            except (ClaimLost, ClaimUnreadable):
                raise
            except StoreError:
                await self._examined()
                if self.state is not StoreState.UP:
                    raise
                await asyncio.sleep(self._patience)
        return await self._patient("renew", lambda: self._store.renew(claim, ttl))

    async def close_at_last(self, claim: Claim) -> CloseOutcome:
        return await self._patient("close", lambda: self._store.close(claim))

    def shows_closes(self, key: str) -> bool:
        """Whoever has a claim of the key in its cache knows by itself, at once, that a close has returned here."""
        return self._store.stamp(key) != 0

    async def pause(self, seconds: float) -> None:
        """Before something is tried again: so long, or until the store is back and a little more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._up.wait()
        await asyncio.sleep(min(seconds, 0.25))

    # -- what was given up

    def give_up(self, claim: Claim) -> None:
        """A claim of ours, just made, that nobody will be served by, and that may stand."""
        _remember(self._given_up, claim.value.nonce)

    def gave_up(self, claim: Claim) -> bool:
        """It is a proposal of ours that we did not wait for, and that nobody has been served by."""
        return claim.value.nonce in self._given_up

    def adopt(self, claim: Claim) -> None:
        """Turns are served by this claim from now on, whatever it was."""
        self._given_up.pop(claim.value.nonce, None)

    # -- calling

    async def _hurried(self, op: str, call: Callable[[], Awaitable[T]], until: float | None) -> T:
        """Tried again when it fails or is late although the store is well; given up when the store is away."""
        until = self.patience() if until is None else until
        began = self.clock()
        try:
            async with asyncio.timeout(None) as limit:
                with self._pulse:
                    waiting = _Call(limit, self._pulse.time())
                    self._wake(waiting, self._patience)
                    try:
                        return await self._measured(op, call)
                    finally:
                        waiting.alarm.cancel()
                        self._late.discard(limit)
        except (ClaimLost, ClaimUnreadable):
            raise
        except TimeoutError:
            failure: StoreError = OutcomeUnknown(f"no answer within {self.clock() - began:.1f} s")
        except StoreError as error:
            failure = error
            if began >= self._up_since:
                await self._examined()
        if self.state is not StoreState.UP:
            raise failure
        self._metrics.store_calls_alone.inc(op)
        with self._pulse:
            return await self._again(op, call, until, failure)

    async def _again(self, op: str, call: Callable[[], Awaitable[T]], until: float, failure: StoreError) -> T:
        """One more try, and others begun until `until`, each beside those that are late: the first answer counts."""
        left = _TRIES - 1
        tries: set[asyncio.Task[T]] = set()
        try:
            while self.state is StoreState.UP:
                if left == _TRIES - 1 or (left and self._pulse.time() < until):
                    left -= 1
                    tries.add(asyncio.create_task(self._measured(op, call)))
                if not tries:
                    break
                done, tries = await asyncio.wait(tries, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
                ends = [(task, task.exception()) for task in done]  # asked of each: else the loop complains of it
                for task, error in ends:
                    if not isinstance(error, StoreError) or isinstance(error, ClaimLost | ClaimUnreadable):
                        return task.result()
                    failure = error
                if done:
                    await self._examined()
                else:
                    self._examine()
        finally:
            for task in tries:
                task.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
        raise failure

    async def _patient(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        """Once, with all the time that the store gives it."""
        began = self.clock()
        try:
            return await self._measured(op, call)
        except (ClaimLost, ClaimUnreadable):
            raise
        except StoreError:
            if began >= self._up_since:
                self._examine()
            raise

    async def _measured(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        started = time.perf_counter()
        outcome = "ok"
        try:
            answer = await call()
            self._has_answered()
            return answer
        except StoreError as error:
            outcome = "lost" if isinstance(error, ClaimLost) else "failed"
            if isinstance(error, ClaimUnreadable):
                self._note_unreadable(error)
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._metrics.store_seconds.observe_of((op, outcome), time.perf_counter() - started)

    def _has_answered(self) -> None:
        self._answers += 1
        self.answered_at = self.wall()

    def _note_unreadable(self, error: ClaimUnreadable) -> None:
        self._has_answered()
        self._metrics.claims_unreadable.inc()
        if error.claim.key not in self._unreadable:
            _remember(self._unreadable, error.claim.key)
            log.error("%s; its session is served by hash until `coatcheck sessions close` removes it", error)

    # -- well or away

    def _wake(self, call: _Call, seconds: float) -> None:
        call.alarm = asyncio.get_running_loop().call_later(seconds, self._is_late, call)

    def _is_late(self, call: _Call) -> None:
        if self.state is StoreState.AWAY:
            call.limit.reschedule(asyncio.get_running_loop().time())
            return
        left = self._patience - (self._pulse.time() - call.began)
        if left > _PUNCTUAL:
            self._wake(call, left)
        elif self.state is StoreState.UP:
            self._late.add(call.limit)
            self._examine()

    async def _examined(self) -> None:
        """Returns when it is known whether the store is away."""
        task = self._examine()
        if task is not None:
            await asyncio.wait({task})

    def _examine(self) -> asyncio.Task[None] | None:
        if self.state is StoreState.UP and (self._examination is None or self._examination.done()):
            self._examination = self._tasks.spawn(self._judge())
        return self._examination

    async def _judge(self) -> None:
        """Decide whether the store is away, and tell the calls that are late."""
        with self._pulse:
            well, failures = await self._judged()
        if not well:
            self._is_away(failures[-1] if failures else OutcomeUnknown("it answers nothing"))
        now = asyncio.get_running_loop().time()
        for limit in self._late:
            limit.reschedule(now)
        self._late.clear()

    async def _judged(self) -> tuple[bool, list[StoreError]]:
        """Whether the store is well, and what was wrong."""
        answers, made, began = self._answers, self._made, self._pulse.time()
        checks: dict[asyncio.Task[StoreError | None], float] = {}
        """And what our own loop had missed when each began."""
        failures: list[StoreError] = []
        try:
            while True:
                if len(checks) + len(failures) < _CHECKS:
                    checks[asyncio.create_task(self._check())] = self._pulse.missed()
                done, _ = await asyncio.wait(checks, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
                for check in done:
                    ours = self._pulse.missed() - checks.pop(check) > self._patience
                    if (failure := check.result()) is None:
                        return True, failures
                    if not ours:  # else it may have had no time to be answered
                        failures.append(failure)
                if self._made > made:
                    return True, failures
                # One that is slow but answers is not away: its checks may take their time.
                waited = self._pulse.time() - began + _PUNCTUAL
                silent = self._answers == answers and waited >= self.deadline - self._patience
                if silent or len(failures) >= _CHECKS:
                    return False, failures
                if done:
                    await asyncio.sleep(_CHECK_PAUSE)
        finally:
            for check in checks:
                check.cancel()

    async def _check(self) -> StoreError | None:
        """What is wrong with the store; None: nothing."""
        try:
            await self._store.check()
        except StoreError as error:
            return error
        except Exception as error:
            # A fault of the store's code must not end the judging unseen.
            log.exception("the claim store's check failed")
            return StoreError(str(error))
        self._has_answered()
        return None

    def _is_away(self, why: StoreError | None) -> None:
        self.state = StoreState.AWAY
        self._up.clear()
        text = "the claim store is away (%s); known sessions go on, new ones are %s"
        log.error(text, why, self._meanwhile, extra=event("store_away", reason=str(why), new_sessions=self._meanwhile))
        self._tasks.spawn(self._await_return())

    async def _await_return(self) -> None:
        delay = 0.05
        while await self._check() is not None:
            try:
                await self._store.get("0" * 40)
                self.state = StoreState.READ_ONLY
            except StoreError:
                self.state = StoreState.AWAY
            await asyncio.sleep(delay)
            delay = min(2 * delay, 1.0)
        self.state = StoreState.UP
        self._up_since = self._back_at = self.clock()
        self._up.set()
        log.warning("the claim store is back", extra=event("store_back"))
        await self._returned()


def _remember(memory: OrderedDict[str, None], what: str) -> None:
    memory[what] = None
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
