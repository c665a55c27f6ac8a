"""One etcd cluster as its users see it: a call that ends in time, and a watch that is shown to be alive.

Guaranteed: a call, whatever fails, ends within its deadline and says whether it may have been applied. A watch that is
not shown to be alive raises. What the keys mean is the users' affair.

Of aetcd we use the gRPC stubs and messages (`aetcd.rpc`) and nothing above them. Its client knows one host, no TLS, no
deadlines and no second login, its watcher takes refused and ended watches for silent ones, and its lock does not lock.

**Endpoints.** All calls go to one endpoint until it fails, then to the next (list them in another order on other
replicas to spread the load). A call without an answer after a quarter of its deadline is asked again at the next one,
up to three times, while the earlier attempts go on. A single endpoint is two connections, for a connection may hang;
there, few calls are asked again (`AGAIN_MOST`), so that an etcd or a replica that is overloaded is not loaded more.
An endpoint is only suspect if it answers nothing that was asked later either.

**Evidence.** A call that fails says in `others_answered` whether etcd answered what was asked after it: then the
trouble is this call's alone. `history` notices a cluster that was wiped or restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from aetcd import rpc

from backends.base import StoreConfigurationError, StoreError, StoreUnavailable
from backends.etcd.attempts import Attempt, Attempts
from backends.etcd.endpoint import Endpoint
from backends.etcd.faults import Fault, Full, NoLease, Refused, failure, judge
from backends.etcd.history import History, Mark
from backends.etcd.url import EtcdUrl
from backends.singleflight import Abandoned, SingleFlight, Work

DEADLINE_S = 2.0
PROGRESS_INTERVAL_S = 2.0
"""How often a watch is asked for a sign of life; it raises after `SILENT_INTERVALS` of silence."""
SILENT_INTERVALS = 2.5
AGAIN_PAUSE_S = 0.05
CLOSE_GRACE_S = 0.1
"""Calls on their way when the cluster is closed may still end by themselves for so long."""
ATTEMPTS = 4
"""The most that a call is asked, each a part of the deadline after the one before."""
AGAIN_MOST = 20.0
"""So many calls may be asked again at the only endpoint at once,"""
AGAIN_SHARE = 0.1
"""and for each call that is answered this much of one more."""
SUSPECT_S = 5.0
"""An endpoint that failed is passed over this long while another is left."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

_REQUIRE_LEADER = (("hasleader", "true"),)
"""Makes a member that has lost its cluster say so at once (clientv3.WithRequireLeader)."""
_LINEARIZABLE = frozenset({"range", "txn"})
"""Methods whose answers tell etcd's revision as of then, and not a member's that may lag."""

_log = logging.getLogger("coatcheck.store")


Sent = Attempt[Endpoint, Mark]


class Prompt:
    """The calls whose first attempt is not late yet. One timer for all: one for each costs a round of the loop."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._calls: dict[_Call, Sent] = {}
        """The oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, call: _Call, first: Sent) -> None:
        self._calls[call] = first
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._late_s / 16, self._look)

    def leave(self, call: _Call) -> None:
        self._calls.pop(call, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        late = time.monotonic() - self._late_s
        for call, first in list(self._calls.items()):
            if first.began > late:
                break
            del self._calls[call]
            call.hurry(first)
        if self._calls:
            self._timer = asyncio.get_running_loop().call_later(self._late_s / 16, self._look)


class Cluster:
    """Open it inside the running loop; an unreachable etcd is for every call to report. `aclose` it.

    `deadline` in seconds per call; `progress_interval` in seconds between signs of life of a watch.
    Raises StoreConfigurationError."""

    def __init__(
        self, url: EtcdUrl, *, deadline: float = DEADLINE_S, progress_interval: float = PROGRESS_INTERVAL_S
    ) -> None:
        if deadline <= 0 or progress_interval <= 0:
            raise StoreConfigurationError("etcd: deadline and progress_interval are positive numbers of seconds")
        self.deadline = deadline
        self.closed = False
        self.full = False
        """Its last word to a write that needs space was that it has none."""
        credentials = url.credentials()
        targets = url.targets if len(url.targets) > 1 else url.targets * 2
        self.endpoints = [Endpoint(target, url, credentials) for target in targets]
        self.history = History()
        self.strays = 0
        """Writes that etcd may still do although nobody waits for them: given up, or asked again and answered."""
        self.has_user = url.user is not None
        self._url = url
        self._progress_interval = progress_interval
        self._current = 0
        self.attempt_s = deadline / ATTEMPTS
        """What has no answer after so many seconds is late."""
        self.prompt = Prompt(self.attempt_s)
        self._again = AGAIN_MOST
        self._metadata: Metadata = _REQUIRE_LEADER
        self.logged_in = url.user is None
        self._logins: SingleFlight[str, None] = SingleFlight(outlives=True)
        self._away = False

    def until(self) -> float:
        """The deadline of a call that begins now, in seconds of `time.monotonic`."""
        return time.monotonic() + self.deadline

    async def call(self, method: str, request: Any, until: float, *, write: bool = False, login: bool = True) -> Any:
        """One request, at whichever endpoint answers, within the deadline. A write must be safe to send twice.

        `method`: one of an `Endpoint`'s. Raises StoreUnavailable (and its kinds) or, for a write only, OutcomeUnknown.
        """
        call = _Call(self, method, request, until, write=write, login=login)
        try:
            attempt, answer = await call.run()
        finally:
            if write and call.in_doubt:
                self.strays += 1
            call.end()
        if self._again < AGAIN_MOST:
            self._again += AGAIN_SHARE
        if method in _LINEARIZABLE:
            self.history.heard(attempt.mark, answer.header)
        if self._away:
            self._away = False
            _log.warning("etcd answers again")
        return answer

    @contextlib.asynccontextmanager
    async def open_watch(
        self, first: bytes, end: bytes, *, filters: Sequence[int] = (), previous: bool = False
    ) -> AsyncIterator[Watch]:
        """The changes of all keys from `first` to before `end`, from the moment of entering on; `filters` as
        etcd's WatchCreateRequest has them; `previous`: with what stood before. Raises StoreUnavailable."""
        for last_try in (False, True):
            await self.log_in(self.until())
            endpoint, metadata = self.endpoints[self._current], self._metadata
            async with contextlib.aclosing(Watch(self, endpoint, metadata, self._progress_interval)) as watch:
                try:
                    await watch.begin(first, end, filters, previous)
                except Refused:
                    # Some versions say "permission denied" for an expired token.
                    if last_try or not self._url.user:
                        raise
                else:
                    yield watch
                    return
            await self.log_in(self.until(), metadata)

    def suspect(self, endpoint: Endpoint) -> None:
        """Go on at another endpoint: the next one that has not failed lately, or else simply the next."""
        now = time.monotonic()
        endpoint.suspect_until = now + SUSPECT_S
        if self.endpoints[self._current] is endpoint:
            ring = [*self._ring()[1:], endpoint]
            fit = next((other for other in ring if other.suspect_until <= now), ring[0])
            self._current = self.endpoints.index(fit)

    def attempt(self, method: str, request: Any, seconds: float, *, login: bool, besides: Sequence[Endpoint]) -> Sent:
        """Send it, to an endpoint other than those where there is one."""
        now = time.monotonic()
        endpoint = self.endpoints[self._current]
        if besides:
            others = [other for other in self._ring() if other not in besides] or self._ring()
            endpoint = next((other for other in others if other.suspect_until <= now), others[0])
        # An expired token would make etcd refuse even the login.
        metadata = self._metadata if login else _REQUIRE_LEADER
        call = getattr(endpoint, method)(request, timeout=seconds, metadata=metadata)
        return Attempt(call, endpoint, metadata, self.history.mark, now)

    def may_ask_again(self) -> bool:
        """Once, although an attempt is under way."""
        if len(self._url.targets) == 1:
            if self._again < 1:
                return False
            self._again -= 1
        return True

    def took_space(self) -> None:
        """To be told of each write that needed space and was applied."""
        if self.full:
            self.full = False
            _log.warning("etcd takes something new again")

    def shut(self) -> None:
        """Begin nothing more; what is under way goes on until `aclose`."""
        self.closed = True

    async def aclose(self) -> None:
        self.shut()
        await self._logins.aclose()
        for endpoint in self.endpoints:
            await endpoint.channel.close(CLOSE_GRACE_S)
        self.prompt.close()
        # gRPC ends cancelled calls on a thread of its own, and complains when their loop is gone by then.
        await asyncio.sleep(0.01)

    def unreached(self, doubtful: bool, text: str, asked: float) -> StoreError:
        """What a caller hears that had no answer; `asked`: when for the last time."""
        error = failure(doubtful, text)
        asked = max(asked, time.monotonic() - self.deadline / 2)  # what was answered before that is no news
        error.others_answered = any(endpoint.answered > asked for endpoint in self.endpoints)
        if not self._away and not error.others_answered:
            self._away = True
            _log.warning("etcd does not answer: %s", text)
        return error

    def refused(self, fault: Fault, doubtful: bool, text: str) -> StoreError:
        """What a caller hears whom etcd refused, when it may have done it at an earlier attempt."""
        if doubtful and fault is not Fault.NO_LEASE:
            return failure(doubtful, text)
        if fault is Fault.FULL:
            if not self.full:
                self.full = True
                _log.warning("etcd is full and takes nothing new: %s", text)
            return Full(f"etcd is full: {text}")
        if fault is Fault.NO_LEASE:
            return NoLease(text)
        return Refused(f"etcd refuses: {text}")

    def _ring(self) -> list[Endpoint]:
        """All endpoints, the current one first."""
        return self.endpoints[self._current :] + self.endpoints[: self._current]

    async def log_in(self, until: float, stale: Metadata | None = None) -> None:
        """Unless there is a token, newer than the `stale` metadata. All callers share one login."""
        if self._metadata is stale or not self.logged_in:
            await shared(self._logins, "login", self._authenticate, until)

    async def _authenticate(self) -> None:
        try:
            password = self._url.read_password()
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"etcd: the password file cannot be read: {error}") from error
        request = rpc.AuthenticateRequest(name=self._url.user, password=password)
        token: Metadata = ()
        try:
            answer = await self.call("authenticate", request, self.until(), login=False)
            token = (("token", answer.token),)
        except Refused as error:
            # As etcd's own client does: without authentication the login is simply not needed.
            if "authentication is not enabled" not in str(error):
                raise StoreUnavailable(f"etcd: the login of {self._url.user!r} failed: {error}") from error
        self._metadata = (*_REQUIRE_LEADER, *token)
        self.logged_in = True


class _Call:
    """One request until it is answered: what was tried, and what is known of it. `end` it.

    The ordinary way is to await one attempt; what it takes to ask again is made when that attempt is late."""

    __slots__ = (
        "_asked",
        "_attempts",
        "_cluster",
        "_doubt",
        "_login",
        "_logins",
        "_method",
        "_request",
        "_rest",
        "_trouble",
        "_unreachable",
        "_until",
        "_write",
    )

    def __init__(self, cluster: Cluster, method: str, request: Any, until: float, *, write: bool, login: bool) -> None:
        self._cluster = cluster
        self._method, self._request, self._until = method, request, until
        self._write, self._login = write, login
        self._attempts: Attempts[Endpoint, Mark] = Attempts()
        self._rest: asyncio.Task[tuple[Sent, Any]] | None = None
        """Begun when the first attempt was late: it asks again, and ends that attempt when another one is answered."""
        self._doubt = False
        """An attempt that ended may have been applied."""
        self._trouble = "no answer in time"
        self._unreachable: frozenset[Endpoint] = frozenset()
        self._logins = 0
        self._asked = 0.0
        """When for the last time."""

    @property
    def in_doubt(self) -> bool:
        """A write may have been applied, or may be even later."""
        return self._write and (self._doubt or bool(self._attempts.under_way))

    def end(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._attempts.cancel()

    async def run(self) -> tuple[Sent, Any]:
        """The attempt that was answered, and the answer."""
        first = self._send(await self._left())
        self._cluster.prompt.enter(self, first)
        trouble: grpc.aio.AioRpcError | None = None
        try:
            answer = await first.call
        except grpc.aio.AioRpcError as error:
            trouble = error
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            if self._rest is None:
                raise self._cut() from None
        else:
            self._attempts.forget(first)
            return self._answered(first, answer)
        finally:
            # Now: what is done from here on is not the first attempt's lateness.
            self._cluster.prompt.leave(self)
        if self._rest is not None:
            return await self._rest
        assert trouble is not None
        self._attempts.forget(first)
        await self._failed(first, trouble)
        return await self._answer()

    def hurry(self, first: Sent) -> None:
        """The first attempt is late."""
        self._late(first)
        self._attempts.watch(first)
        self._rest = asyncio.get_running_loop().create_task(self._answer())
        self._rest.add_done_callback(lambda rest: rest.cancelled() or rest.exception())  # seen, if nobody wants it
        self._rest.add_done_callback(lambda _: first.call.cancel())

    async def _answer(self) -> tuple[Sent, Any]:
        while True:
            left = await self._left()
            # Once more, where that can help and there is time for an answer.
            waiting = bool(self._attempts.under_way)
            if not waiting or (
                left > self._cluster.attempt_s / 2 and not self._all_unreachable and self._cluster.may_ask_again()
            ):
                self._attempts.watch(self._send(left))
            attempt = await self._attempts.next_end(min(self._cluster.attempt_s, left))
            if attempt is None:
                self._late(self._attempts.under_way[-1])
                continue
            try:
                return self._answered(attempt, await attempt.call)
            except grpc.aio.AioRpcError as error:
                await self._failed(attempt, error)
            except asyncio.CancelledError:
                if _being_cancelled():
                    raise
                raise self._cut() from None

    async def _left(self) -> float:
        """Seconds. Raises where there is nothing to be tried any more."""
        cluster = self._cluster
        if self._login and not cluster.closed and not cluster.logged_in:
            await cluster.log_in(self._until)
        if cluster.closed:
            raise failure(self.in_doubt, "it is closed")
        left = self._until - time.monotonic()
        if left <= 0:
            raise self._unreached()
        return left

    def _send(self, left: float) -> Sent:
        under_way = self._attempts.under_way
        besides = [attempt.endpoint for attempt in under_way] if under_way else ()
        attempt = self._cluster.attempt(self._method, self._request, left, login=self._login, besides=besides)
        self._asked = attempt.began
        under_way.append(attempt)
        return attempt

    def _answered(self, attempt: Sent, answer: Any) -> tuple[Sent, Any]:
        attempt.endpoint.answered = max(attempt.endpoint.answered, attempt.began)
        return attempt, answer

    def _cut(self) -> BaseException:
        """Closing the channel cancels its calls, and their callers did not ask for that."""
        if self._cluster.closed:
            return failure(self._write, "it was closed")
        return asyncio.CancelledError()

    def _late(self, attempt: Sent) -> None:
        self._trouble = f"{attempt.endpoint.target}: no answer in time"
        if attempt.endpoint.answered <= attempt.began:
            self._cluster.suspect(attempt.endpoint)

    async def _failed(self, attempt: Sent, error: grpc.aio.AioRpcError) -> None:
        """Returns when it may be tried again."""
        fault = judge(error)
        cluster = self._cluster
        self._trouble = f"{attempt.endpoint.target}: {error.details() or error.code().name}"
        if fault is Fault.LOGIN and self._login and cluster.has_user and self._logins < 2:
            self._logins += 1
            await cluster.log_in(self._until, attempt.metadata)
        elif fault is Fault.DOUBTFUL:
            self._doubt = True
            cluster.suspect(attempt.endpoint)
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                await asyncio.sleep(AGAIN_PAUSE_S)
        elif fault is Fault.NOT_SENT:
            self._unreachable |= {attempt.endpoint}
            cluster.suspect(attempt.endpoint)
            if self._all_unreachable and not self._attempts.under_way:
                raise self._unreached() from error
        elif fault is Fault.NOT_NOW:
            cluster.suspect(attempt.endpoint)
            if self._until - time.monotonic() < AGAIN_PAUSE_S:
                raise self._unreached() from error
            await asyncio.sleep(AGAIN_PAUSE_S)
        else:
            raise cluster.refused(fault, self.in_doubt, self._trouble) from error

    @property
    def _all_unreachable(self) -> bool:
        return len(self._unreachable) == len(self._cluster.endpoints)

    def _unreached(self) -> StoreError:
        return self._cluster.unreached(self.in_doubt, self._trouble, self._asked)


class Watch:
    """Keys watched at one member, through one stream. `Cluster.open_watch` makes it, begins it and closes it."""

    def __init__(self, cluster: Cluster, endpoint: Endpoint, metadata: Metadata, interval: float) -> None:
        self._cluster = cluster
        self._endpoint = endpoint
        self._metadata = metadata
        self._interval = interval
        self._call = endpoint.watch(metadata=metadata)
        self._rewinds = cluster.history.rewinds
        self._pings: asyncio.Task[None] | None = None

    async def begin(self, first: bytes, end: bytes, filters: Sequence[int], previous: bool) -> None:
        """Raises Refused where a new login may help, and StoreUnavailable."""
        create = rpc.WatchCreateRequest(
            key=first, range_end=end, filters=filters, prev_kv=previous, progress_notify=True, fragment=True
        )
        deadline = self._cluster.deadline
        with self._explained():
            async with asyncio.timeout(deadline):
                await self._call.write(rpc.WatchRequest(create_request=create))
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    raise StoreUnavailable("etcd ended the watch at once")
                if message.canceled:
                    raise Refused(f"etcd refuses the watch: {message.cancel_reason or 'no reason given'}")
                if not message.created:
                    raise StoreUnavailable("etcd did not confirm the watch")
                # The member of this watch has a quorum and etcd answers: from here on we miss nothing.
                mark = self._cluster.history.mark
                answer = await self._endpoint.range(any_key(first, end), timeout=deadline, metadata=self._metadata)
                self._cluster.history.heard(mark, answer.header)
                self._rewinds = self._cluster.history.rewinds
        self._pings = asyncio.get_running_loop().create_task(self._ping())

    async def read(self) -> Sequence[Any] | None:
        """etcd's next events, as they come; none when all is quiet. None: the watch is over because its history was
        compacted away, or because etcd is not where it was; a new one may follow at once. Raises StoreUnavailable when
        it is over for any other reason."""
        with self._explained():
            async with asyncio.timeout(SILENT_INTERVALS * self._interval):
                message = await self._call.read()
        if message is grpc.aio.EOF:
            raise StoreUnavailable("etcd ended the watch")
        if message.canceled:
            if message.compact_revision:
                return None
            raise StoreUnavailable(f"etcd cancelled the watch: {message.cancel_reason or 'no reason given'}")
        if self._rewinds != self._cluster.history.rewinds:
            return None
        events: Sequence[Any] = message.events
        return events

    async def aclose(self) -> None:
        self._call.cancel()
        if self._pings is not None:
            self._pings.cancel()
            await asyncio.wait({self._pings})

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        where = self._endpoint.target
        try:
            yield
        except TimeoutError as error:
            self._cluster.suspect(self._endpoint)
            raise StoreUnavailable(f"etcd: the watch at {where} is silent") from error
        except grpc.aio.AioRpcError as error:
            if judge(error) is Fault.LOGIN:
                raise Refused(f"etcd refuses the watch: {error.details()}") from error
            self._cluster.suspect(self._endpoint)
            raise StoreUnavailable(f"etcd: the watch at {where} ended: {error.details()}") from error
        except asyncio.InvalidStateError as error:
            self._cluster.suspect(self._endpoint)
            raise StoreUnavailable(f"etcd: the watch at {where} ended at once") from error

    async def _ping(self) -> None:
        """Any answer counts; etcd's own notifications come only every ten minutes."""
        request = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
        try:
            while True:
                await asyncio.sleep(self._interval)
                await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # The reader meets the same end and reports it.


def any_key(first: bytes, end: bytes) -> Any:
    """A read that proves that the range can be read, however much there is in it."""
    return rpc.RangeRequest(key=first, range_end=end, limit=1, keys_only=True)


async def shared(flights: SingleFlight[K, T], key: K, work: Work[T], until: float) -> T:
    """What the work for `key` returns, which all callers share. Raises StoreUnavailable, and what the work raises."""
    try:
        return await flights.run(key, work, timeout=until - time.monotonic())
    except TimeoutError:
        raise StoreUnavailable("etcd does not answer") from None
    except Abandoned:
        raise StoreUnavailable("etcd: it is closed") from None


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
