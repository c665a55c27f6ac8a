"""One etcd cluster as its users see it: a call that ends in time, and a watch that is shown to be alive.

Guaranteed: a call, whatever fails, ends within its deadline and says whether it may have been applied. A watch that is
not shown to be alive raises. What the keys mean is the users' affair.

Of aetcd we use the gRPC stubs and messages (`aetcd.rpc`) and nothing above them. Its client knows one host, no TLS, no
deadlines and no second login, its watcher takes refused and ended watches for silent ones, and its lock does not lock.

**Endpoints.** One channel each; all calls go to one endpoint until it fails, then to the next (list them in another
order on other replicas to spread the load). With several, an attempt gets a quarter of the deadline.
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

from backends.base import OutcomeUnknown, StoreConfigurationError, StoreError, StoreUnavailable
from backends.etcd.faults import Fault, Full, NoLease, Refused, failure, judge
from backends.etcd.url import EtcdUrl
from backends.singleflight import Abandoned, SingleFlight, Work

DEADLINE_S = 2.0
PROGRESS_INTERVAL_S = 2.0
"""How often a watch is asked for a sign of life; it raises after `SILENT_INTERVALS` of silence."""
SILENT_INTERVALS = 2.5
AGAIN_PAUSE_S = 0.05
CLOSE_GRACE_S = 0.1
"""Calls on their way when the cluster is closed may still end by themselves for so long."""
SUSPECT_S = 5.0
"""An endpoint that failed is passed over this long while another is left."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

_REQUIRE_LEADER = (("hasleader", "true"),)
"""Makes a member that has lost its cluster say so at once (clientv3.WithRequireLeader)."""

_log = logging.getLogger("coatcheck.store")


class Endpoint:
    """One member: its channel and the calls we make on it. Made inside the running loop, as gRPC wants it."""

    def __init__(self, target: str, url: EtcdUrl, credentials: grpc.ChannelCredentials | None) -> None:
        options: list[tuple[str, Any]] = [
            ("grpc.keepalive_time_ms", 10_000),  # etcd ends connections that ping more often than every 5 s,
            ("grpc.keepalive_timeout_ms", 3_000),
            ("grpc.http2.ping_timeout_ms", 3_000),  # newer gRPC wants both, or waits for a minute
            ("grpc.keepalive_permit_without_calls", 0),  # or that ping without a call.
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1_000),  # in fact the time a connection attempt gets
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.use_local_subchannel_pool", 1),  # no other cluster's connections and backoffs
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
        ]
        if url.server_name:
            options.append(("grpc.ssl_target_name_override", url.server_name))
        self.target = target
        self.channel = (
            rpc.secure_channel(target, credentials, options=options)
            if credentials
            else rpc.insecure_channel(target, options=options)
        )
        kv, lease = rpc.KVStub(self.channel), rpc.LeaseStub(self.channel)
        self.range = kv.Range
        self.txn = kv.Txn
        self.lease_grant = lease.LeaseGrant
        self.lease_time_to_live = lease.LeaseTimeToLive
        self.authenticate = rpc.AuthStub(self.channel).Authenticate
        self.watch = rpc.WatchStub(self.channel).Watch
        self.suspect_until = 0.0


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
        self.endpoints = [Endpoint(target, url, credentials) for target in url.targets]
        self._url = url
        self._progress_interval = progress_interval
        self._current = 0
        self._attempt_s = deadline if len(self.endpoints) == 1 else deadline / 4
        self._metadata: Metadata = _REQUIRE_LEADER
        self._logged_in = url.user is None
        self._logins: SingleFlight[str, None] = SingleFlight(outlives=True)
        self._away = False

    def until(self) -> float:
        """The deadline of a call that begins now, in seconds of `time.monotonic`."""
        return time.monotonic() + self.deadline

    async def call(self, method: str, request: Any, until: float, *, write: bool = False, login: bool = True) -> Any:
        """One request, at whichever endpoint answers, within the deadline. A write must be safe to send twice.

        `method`: one of an `Endpoint`'s. Raises StoreUnavailable (and its kinds) or, for a write only, OutcomeUnknown.
        """
        doubt: Exception | None = None
        """Why a write may have been applied already."""
        trouble = ""
        unreachable = logins = 0
        while True:
            if login and not self._logged_in and not self.closed:
                await self._log_in(self._metadata, until)
            if self.closed:
                raise failure(doubt, "it is closed")
            endpoint = self.endpoints[self._current]
            # An expired token would make etcd refuse even the login.
            metadata = self._metadata if login else _REQUIRE_LEADER
            timeout = min(self._attempt_s, until - time.monotonic())
            if timeout <= 0:
                raise self._unreached(doubt, trouble or "no answer in time")
            try:
                answer = await getattr(endpoint, method)(request, timeout=timeout, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                fault = judge(error)
                trouble = f"{endpoint.target}: {error.details() or error.code().name}"
                if fault is Fault.DOUBTFUL:
                    doubt = error if write else None
                    self.suspect(endpoint)
                    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                        await asyncio.sleep(AGAIN_PAUSE_S)
                elif fault is Fault.NOT_SENT:
                    unreachable += 1
                    self.suspect(endpoint)
                    if unreachable >= len(self.endpoints):
                        raise self._unreached(doubt, trouble) from error
                elif fault is Fault.NOT_NOW:
                    self.suspect(endpoint)
                    if until - time.monotonic() < AGAIN_PAUSE_S:
                        raise self._unreached(doubt, trouble) from error
                    await asyncio.sleep(AGAIN_PAUSE_S)
                elif fault is Fault.LOGIN and self._url.user and login and logins < 2:
                    logins += 1
                    await self._log_in(metadata, until)
                else:
                    raise self._refused(fault, doubt, trouble) from error
            except asyncio.CancelledError:
                # Closing the channel cancels its calls, and their callers did not ask for that.
                if self.closed and not _being_cancelled():
                    raise failure(write, "it was closed") from None
                raise
            else:
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
            if not self._logged_in:
                await self._log_in(self._metadata, self.until())
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
            await self._log_in(metadata, self.until())

    def suspect(self, endpoint: Endpoint) -> None:
        """Go on at another endpoint: the next one that has not failed lately, or else simply the next."""
        now = time.monotonic()
        endpoint.suspect_until = now + SUSPECT_S
        if self.endpoints[self._current] is endpoint:
            count = len(self.endpoints)
            ring = [(self._current + step) % count for step in range(1, count + 1)]
            self._current = next((index for index in ring if self.endpoints[index].suspect_until <= now), ring[0])

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
        # gRPC ends cancelled calls on a thread of its own, and complains when their loop is gone by then.
        await asyncio.sleep(0.01)

    def _unreached(self, doubt: Exception | None, text: str) -> StoreError:
        if not self._away:
            self._away = True
            _log.warning("etcd does not answer: %s", text)
        return failure(doubt, text)

    def _refused(self, fault: Fault, doubt: Exception | None, text: str) -> StoreError:
        if doubt is not None and fault is not Fault.NO_LEASE:
            return OutcomeUnknown(f"etcd: {doubt}; then {text}")
        if fault is Fault.FULL:
            if not self.full:
                self.full = True
                _log.warning("etcd is full and takes nothing new: %s", text)
            return Full(f"etcd is full: {text}")
        if fault is Fault.NO_LEASE:
            return NoLease(text)
        return Refused(f"etcd refuses: {text}")

    async def _log_in(self, stale: Metadata, until: float) -> None:
        """A token newer than the `stale` metadata. All callers share one login."""
        if self._metadata is stale or not self._logged_in:
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
        self._logged_in = True


class Watch:
    """Keys watched at one member, through one stream. `Cluster.open_watch` makes it, begins it and closes it."""

    def __init__(self, cluster: Cluster, endpoint: Endpoint, metadata: Metadata, interval: float) -> None:
        self._cluster = cluster
        self._endpoint = endpoint
        self._metadata = metadata
        self._interval = interval
        self._call = endpoint.watch(metadata=metadata)
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
                await self._endpoint.range(any_key(first, end), timeout=deadline, metadata=self._metadata)
        self._pings = asyncio.get_running_loop().create_task(self._ping())

    async def read(self) -> Sequence[Any] | None:
        """etcd's next events, as they come; none when all is quiet. None: the watch is over because its history was
        compacted away; a new one may follow at once. Raises StoreUnavailable when it is over for any other reason."""
        with self._explained():
            async with asyncio.timeout(SILENT_INTERVALS * self._interval):
                message = await self._call.read()
        if message is grpc.aio.EOF:
            raise StoreUnavailable("etcd ended the watch")
        if message.canceled:
            if message.compact_revision:
                return None
            raise StoreUnavailable(f"etcd cancelled the watch: {message.cancel_reason or 'no reason given'}")
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
