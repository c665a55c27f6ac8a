"""Claims in etcd.

Guaranteed: every replica that reaches the cluster agrees, on any host and across restarts of routers and of etcd, and
reads are linearizable. A call, whatever fails, ends within the deadline (2 s unless changed). A watch that is not shown
to be alive raises.
Not guaranteed: etcd counts leases in whole seconds, sweeps them twice a second, starts them afresh when its leader
changes and has a shortest lease (2 s with its default election timeout), so a claim may outlive `1.25 * ttl` by that
much; it is never shortened. A cluster restored from an older backup repeats revisions, which are our fencing tokens:
stop the routers first. Full (NOSPACE), etcd refuses new claims and renewals, 3.5.1 also closes; reads go on.

Of aetcd we use the gRPC stubs and messages (`aetcd.rpc`) and nothing above them. Its client knows one host, no TLS, no
deadlines and no second login, its watcher takes refused and ended watches for silent ones, and its lock does not lock.

**Keys.** `prefix/<hex key>`; create_revision is the claim's revision. Creation, close and renewal are one transaction
each, and each is safe to send twice: nonce, create_revision and mod_revision tell that the first one landed.

**Batches.** A gRPC call costs several times the CPU of its create. So what is to be created while others
are under way goes together, as nested transactions of one: each wins or loses by itself. One alone goes as it is.

**Leases.** Claims share leases (*buckets*): one is granted for `1.25 * ttl`, takes claims for the first quarter TTL,
and is then left to expire; it is never kept alive and never revoked, so claims outlive the process. In use, a store
holds five leases per TTL, six for the moment of handing over. The next bucket is made ahead, so that a claim costs one
round trip; only the first after an idle quarter TTL costs two.

**Endpoints.** One channel each; all calls go to one endpoint until it fails, then to the next (list them in another
order on other replicas to spread the load). With several, an attempt gets a quarter of the deadline.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import logging
import math
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote

import grpc
import msgspec
from aetcd import rpc

from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimOutcome,
    ClaimValue,
    CloseOutcome,
    Deleted,
    Event,
    Guarantee,
    OutcomeUnknown,
    Reset,
    StoreConfigurationError,
    StoreUnavailable,
    decode_value,
    encode_value,
)
from backends.fanout import MAILBOX_SIZE, Mailbox

DEADLINE_S = 2.0
PROGRESS_INTERVAL_S = 2.0
"""How often a watch is asked for a sign of life; it raises after `SILENT_INTERVALS` of silence."""
SILENT_INTERVALS = 2.5
MAX_KNOWN_LEASES = 10_000
CHECK_TTL_S = 60.0
AGAIN_PAUSE_S = 0.05
CREATES_IN_FLIGHT = 2
"""Calls that create claims. What comes while so many are under way waits for one to end, and goes together."""
MAX_BATCH = 64
"""Creates in one transaction; etcd counts each as one operation, and takes 128 unless --max-txn-ops says otherwise."""
CLOSE_GRACE_S = 0.1
"""Calls on their way when the store is closed may still end by themselves for so long."""
SUSPECT_S = 5.0
"""An endpoint that failed is passed over this long while another is left."""

_log = logging.getLogger("coatcheck.store")


# --- the URL ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EtcdUrl:
    """`etcd://[user:password@]host[:2379][,host[:2379]]/prefix[?tls=true&ca=&cert=&key=&server_name=&password_file=]`

    Hosts are IPv4 addresses, DNS names and [IPv6 addresses], in any mix. User, password and prefix are
    percent-decoded; with `password_file` the password is read from there at each login, so that it can be changed.
    Without `ca` the server's certificate is checked against gRPC's own list of authorities.
    """

    targets: tuple[str, ...]
    """As gRPC writes them."""
    prefix: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises StoreConfigurationError."""
        scheme, separator, rest = url.partition("://")
        if scheme != "etcd" or not separator:
            raise StoreConfigurationError("an etcd store's URL starts with etcd://")
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        login, _, hosts = authority.rpartition("@")
        prefix = unquote(path).rstrip("/")
        if not prefix:
            raise StoreConfigurationError("an etcd store's URL needs a prefix for its keys: etcd://host:2379/prefix")
        options = _parse_options(query)
        user, _, password = login.partition(":")
        password_file = options.get("password_file")
        if user and not (password or password_file):
            raise StoreConfigurationError("etcd: a user needs a password or a password_file")
        if (password_file and password) or ((password or password_file) and not user):
            raise StoreConfigurationError("etcd: give one user and one password, in the URL or as password_file")
        tls = {"true": True, "false": False}.get(options.get("tls", "false"))
        if tls is None:
            raise StoreConfigurationError("etcd: tls is true or false")
        if not tls and options.keys() & {"ca", "cert", "key", "server_name"}:
            raise StoreConfigurationError("etcd: ca, cert, key and server_name need tls=true")
        if ("cert" in options) != ("key" in options):
            raise StoreConfigurationError("etcd: a client certificate is a cert and a key")
        files = {name: Path(options[name]) for name in ("ca", "cert", "key", "password_file") if name in options}
        for name, file in files.items():
            if not file.is_file():
                raise StoreConfigurationError(f"etcd: {name}: there is no file {file}")
        return cls(
            targets=tuple(_target(host) for host in hosts.split(",")),
            prefix=prefix,
            user=unquote(user) or None,
            password=unquote(password) or None,
            tls=tls,
            server_name=options.get("server_name"),
            **files,
        )

    def read_password(self) -> str:
        if self.password_file is None:
            return self.password or ""
        return self.password_file.read_text(encoding="utf-8").rstrip("\r\n")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Raises StoreConfigurationError when a certificate or key cannot be read or does not match."""
        if not self.tls:
            return None
        try:
            # gRPC only says "handshake failed" later, in its own log; the ssl module checks now and says why.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if self.ca:
                context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as error:
            raise StoreConfigurationError(f"etcd: the TLS files do not work: {error}") from error
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes() if self.ca else None,
            self.key.read_bytes() if self.key else None,
            self.cert.read_bytes() if self.cert else None,
        )


_OPTIONS = frozenset({"tls", "ca", "cert", "key", "server_name", "password_file"})


def _parse_options(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise StoreConfigurationError(f"etcd: {error}") from error
    options = dict(pairs)
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise StoreConfigurationError(
            f"etcd: unknown option {', '.join(sorted(unknown))}; {sorted(_OPTIONS)} are known"
        )
    if len(options) != len(pairs):
        raise StoreConfigurationError("etcd: an option is given twice")
    if not all(options.values()):
        raise StoreConfigurationError("etcd: an option is empty")
    return options


def _target(host: str) -> str:
    """One endpoint as a gRPC target: `ipv4:10.0.0.1:2379`, `ipv6:[::1]:2379`, `dns:///etcd:2379`."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        port = rest.removeprefix(":") if rest else "2379"
        scheme = "ipv6" if bracket and _is_address(ipaddress.IPv6Address, name) and rest[:1] in ("", ":") else ""
    else:
        name, colon, rest = host.partition(":")
        port = rest if colon else "2379"
        if name.replace(".", "").isdigit():
            scheme = "ipv4" if _is_address(ipaddress.IPv4Address, name) else ""
        else:
            scheme = "dns" if name else ""
    if not scheme or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StoreConfigurationError(f"etcd: {host!r} is no host:port")
    return {"ipv4": f"ipv4:{name}:{port}", "ipv6": f"ipv6:[{name}]:{port}", "dns": f"dns:///{name}:{port}"}[scheme]


def _is_address(kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address], name: str) -> bool:
    try:
        kind(name)
    except ValueError:
        return False
    return True


# --- what an error means ---------------------------------------------------------------------------------------------


class _Fault(enum.Enum):
    NOT_SENT = enum.auto()
    """No connection: surely not applied; the next endpoint may do."""
    NOT_NOW = enum.auto()
    """Surely not applied, and likely to work in a moment."""
    DOUBTFUL = enum.auto()
    """Late, or broken off: perhaps applied."""
    LOGIN = enum.auto()
    """Surely not applied; a new login may help."""
    FULL = enum.auto()
    NO_LEASE = enum.auto()
    REFUSED = enum.auto()
    """Surely not applied, and it would be refused again."""


_BY_TEXT = (
    ("failed to connect to all addresses", _Fault.NOT_SENT),
    ("errors resolving", _Fault.NOT_SENT),
    ("DNS resolution failed", _Fault.NOT_SENT),
    ("etcdserver: no leader", _Fault.NOT_NOW),
    ("etcdserver: leader changed", _Fault.NOT_NOW),
    ("etcdserver: too many requests", _Fault.NOT_NOW),
    ("etcdserver: invalid auth token", _Fault.LOGIN),
    ("etcdserver: revision of auth store is old", _Fault.LOGIN),
    ("auth: revision in header is old", _Fault.LOGIN),  # the same in the words of 3.5, as UNKNOWN
    ("etcdserver: user name is empty", _Fault.LOGIN),
    ("etcdserver: mvcc: database space exceeded", _Fault.FULL),
    ("etcdserver: requested lease not found", _Fault.NO_LEASE),
)
"""What etcd (v3rpc/rpctypes/error.go) and gRPC say before anything was proposed, or while refusing to apply it."""

_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


def _judge(error: grpc.aio.AioRpcError) -> _Fault:
    """The law of what may be tried again. Whatever is not known to be harmless is doubtful."""
    text = error.details() or ""
    for start, fault in _BY_TEXT:
        if text.startswith(start):
            return fault
    return _Fault.REFUSED if error.code() in _REFUSALS else _Fault.DOUBTFUL


class _Full(StoreUnavailable):
    pass


class _NoLease(StoreUnavailable):
    pass


class _Refused(StoreUnavailable):
    pass


# --- the store -------------------------------------------------------------------------------------------------------


_REQUIRE_LEADER = (("hasleader", "true"),)
"""Makes a member that has lost its cluster say so at once (clientv3.WithRequireLeader)."""


class _Endpoint:
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
            ("grpc.use_local_subchannel_pool", 1),  # no other store's connections and backoffs
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


@dataclass
class _Bucket:
    """A lease that claims are attached to until `fresh_until`, so that each gets its whole TTL."""

    lease: int
    expires_at: float
    fresh_until: float
    used: bool = False


@dataclass(eq=False, slots=True)
class _Create:
    """A create that waits to be sent, or for its answer."""

    name: bytes
    lease: int
    request: Any
    until: float
    answer: asyncio.Future[tuple[int, Any] | Exception | None]
    """What `_create` answers, or raises; None: its batch was refused, and alone it may succeed."""
    sent: bool = False

    def give(self, answer: tuple[int, Any] | Exception | None) -> None:
        if not self.answer.done():  # as it is when the caller was cancelled, or told that it is too late
            self.answer.set_result(answer)

    def expire(self) -> None:
        self.give(_failure(self.sent, OutcomeUnknown(), "no answer in time"))


class EtcdStore:
    """See the module's docstring, and `backends.base` for the contract. Open it inside the running loop."""

    guarantees = (
        Guarantee.ACROSS_PROCESSES | Guarantee.ACROSS_HOSTS | Guarantee.SURVIVES_RESTART | Guarantee.LINEARIZABLE
    )

    def __init__(self, url: EtcdUrl, *, deadline: float, progress_interval: float) -> None:
        self._url = url
        self._deadline = deadline
        self._progress_interval = progress_interval
        self._prefix = f"{url.prefix}/".encode()
        credentials = url.credentials()
        self._endpoints = [_Endpoint(target, url, credentials) for target in url.targets]
        self._current = 0
        self._attempt_s = deadline if len(self._endpoints) == 1 else deadline / 4
        self._metadata: tuple[tuple[str, str], ...] = _REQUIRE_LEADER
        self._logged_in = url.user is None
        self._buckets: dict[float, _Bucket] = {}
        self._leases: dict[int, float] = {}
        """Lease id → until when it surely lives (monotonic)."""
        self._shared: dict[object, asyncio.Task[Any]] = {}
        """Work that several callers wait for: the login, the grant for a TTL, the look-up of a lease."""
        self._batching = True
        """Until etcd refuses nested transactions."""
        self._creating = 0
        """Calls under way that create, or about to be."""
        self._waiting: list[_Create] = []
        self._senders: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._closed = False
        self._away = False
        self._full = False

    @classmethod
    async def open(
        cls, url: str, *, deadline: float = DEADLINE_S, progress_interval: float = PROGRESS_INTERVAL_S
    ) -> Self:
        """Opens without a connection: an unreachable etcd is for `check` and for every call to report.

        `deadline` in seconds per call; `progress_interval` in seconds between signs of life of a watch.
        Raises StoreConfigurationError."""
        if deadline <= 0 or progress_interval <= 0:
            raise StoreConfigurationError("etcd: deadline and progress_interval are positive numbers of seconds")
        return cls(EtcdUrl.parse(url), deadline=deadline, progress_interval=progress_interval)

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        until = time.monotonic() + self._deadline
        name = self._prefix + key.encode()
        value = encode_value(proposal)
        read = rpc.RequestOp(request_range=rpc.RangeRequest(key=name))
        while True:
            try:
                bucket = await self._bucket(ttl, until)
                put = rpc.PutRequest(key=name, value=value, lease=bucket.lease)
                request = rpc.TxnRequest(
                    compare=[_created_at(name, 0)], success=[rpc.RequestOp(request_put=put)], failure=[read]
                )
                revision, answer = await self._create(name, bucket.lease, request, until)
            except _NoLease:
                self._forget(ttl, bucket)
                continue
            except _Full:
                # A full etcd refuses the whole transaction; the session may well have its claim.
                kv = await self._read(key, until)
                if kv is None:
                    raise
                standing = self._claim(key, kv)
                return ClaimOutcome(standing, standing.value.nonce == proposal.nonce)
            self._has_space()
            if answer.succeeded:
                claim = Claim(key=key, value=proposal, revision=revision, expires_at=bucket.expires_at)
                return ClaimOutcome(claim, True)
            claim = self._claim(key, answer.responses[0].response_range.kvs[0])
            return ClaimOutcome(claim, claim.value.nonce == proposal.nonce)

    async def get(self, key: str) -> Claim | None:
        kv = await self._read(key, time.monotonic() + self._deadline)
        return None if kv is None else self._claim(key, kv)

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        start = time.monotonic()
        until = start + self._deadline
        name = self._prefix + claim.key.encode()
        while True:
            kv = await self._read(claim.key, until)
            if kv is None or kv.create_revision != claim.revision:
                raise ClaimLost(f"claim {claim.key} is not there any more")
            expires_at = await self._expiry(kv.lease, until)
            if expires_at >= start + ttl:
                # Made or renewed lately, perhaps by a peer: our bucket might even end sooner.
                return msgspec.structs.replace(claim, expires_at=expires_at)
            bucket = await self._bucket(ttl, until)
            put = rpc.PutRequest(key=name, lease=bucket.lease, ignore_value=True)
            request = rpc.TxnRequest(
                # The mod_revision keeps a belated copy of this request from undoing a later renewal.
                compare=[_created_at(name, claim.revision), _modified_at(name, kv.mod_revision)],
                success=[rpc.RequestOp(request_put=put)],
            )
            try:
                answer = await self._call("txn", request, until, write=True)
            except _NoLease:
                self._forget(ttl, bucket)
                continue
            self._has_space()
            if answer.succeeded:
                return msgspec.structs.replace(claim, expires_at=bucket.expires_at)

    async def close(self, claim: Claim) -> CloseOutcome:
        until = time.monotonic() + self._deadline
        name = self._prefix + claim.key.encode()
        request = rpc.TxnRequest(
            compare=[_created_at(name, claim.revision)],
            success=[rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=name))],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=name, count_only=True))],
        )
        answer = await self._call("txn", request, until, write=True)
        if answer.succeeded:
            return CloseOutcome.CLOSED
        return CloseOutcome.SUPERSEDED if answer.responses[0].response_range.count else CloseOutcome.GONE

    def subscribe(self) -> AsyncIterator[Event]:
        """The iterator has an `aclose`; unclosed, it is freed with the object or the store."""
        return _Subscription(self)

    def stamp(self, key: str) -> int:
        return 0

    async def check(self) -> None:
        until = time.monotonic() + self._deadline
        # Beyond the hex keys, where no watch of ours looks.
        name = self._prefix + b"~check"
        while True:
            bucket = await self._bucket(CHECK_TTL_S, until)
            put = rpc.RequestOp(request_put=rpc.PutRequest(key=name, lease=bucket.lease))
            read = rpc.RequestOp(request_range=self._any_claim())
            try:
                await self._call("txn", rpc.TxnRequest(success=[put, read]), until, write=True)
            except _NoLease:
                self._forget(CHECK_TTL_S, bucket)
            except OutcomeUnknown as error:
                raise StoreUnavailable(str(error)) from error
            else:
                self._has_space()
                return

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        tasks = [*self._shared.values(), *self._watches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoint in self._endpoints:
            await endpoint.channel.close(CLOSE_GRACE_S)
        await asyncio.gather(*self._senders, return_exceptions=True)
        # gRPC ends cancelled calls on a thread of its own, and complains when their loop is gone by then.
        await asyncio.sleep(0.01)

    # --- creating

    async def _create(self, name: bytes, lease: int, request: Any, until: float) -> tuple[int, Any]:
        """etcd's revision and its answer to the request. Raises what `_call` does."""
        together = self._batching and self._creating > 0
        if together:
            loop = asyncio.get_running_loop()
            create = _Create(name, lease, request, until, loop.create_future())
            self._waiting.append(create)
            self._send_waiting()
            timer = loop.call_later(until - time.monotonic(), create.expire)
            try:
                answer = await create.answer
            finally:
                timer.cancel()
            if isinstance(answer, tuple):
                return answer
            if answer is not None:
                # An exception of its own for each caller: they raise it at the same time.
                raise type(answer)(*answer.args) from answer
        self._creating += 1
        try:
            alone = await self._call("txn", request, until, write=True)
        finally:
            self._creating -= 1
            self._send_waiting()
        if together and self._batching:
            self._batching = False
            _log.warning("etcd, or a proxy before it, refuses nested transactions: each claim is made by its own call")
        return alone.header.revision, alone

    def _send_waiting(self) -> None:
        if self._waiting and self._creating < CREATES_IN_FLIGHT:
            # It begins in the loop's next turn, and takes along what else comes in this one.
            self._creating += 1
            sender = asyncio.get_running_loop().create_task(self._send_batches())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def _send_batches(self) -> None:
        """Runs in a task of its own: the cancellation of a caller concerns no other."""
        try:
            while batch := self._next_batch():
                await self._send(batch)
        finally:
            self._creating -= 1

    async def _send(self, batch: list[_Create]) -> None:
        """In one call; gives each its answer."""
        request = batch[0].request
        if len(batch) > 1:
            request = rpc.TxnRequest(
                success=[rpc.RequestOp(request_txn=create.request) for create in batch],
                # Never run. A full etcd 3.4 sees no nested puts, and would take them.
                failure=request.success,
            )
        try:
            answer = await self._call("txn", request, max(create.until for create in batch), write=True)
        except (StoreUnavailable, OutcomeUnknown) as error:
            alone = isinstance(error, _Refused) and len(batch) > 1
            for create in batch:
                create.give(None if alone else error)
        else:
            answers = [part.response_txn for part in answer.responses] if len(batch) > 1 else [answer]
            for create, its in zip(batch, answers, strict=True):
                # No response to either of its operations: somebody dropped the nested transaction.
                create.give((answer.header.revision, its) if its.responses else None)

    def _next_batch(self) -> list[_Create]:
        """Who may share a transaction: each key once, as etcd wants it, and one lease: its loss concerns all."""
        batch: dict[bytes, _Create] = {}
        left = []
        lease = 0
        for create in self._waiting:
            if create.answer.done():
                continue
            lease = lease or create.lease
            if len(batch) < MAX_BATCH and create.lease == lease and create.name not in batch:
                batch[create.name] = create
                create.sent = True
            else:
                left.append(create)
        self._waiting = left
        return list(batch.values())

    # --- reading

    async def _read(self, key: str, until: float) -> Any:
        """The key's KeyValue, or None."""
        answer = await self._call("range", rpc.RangeRequest(key=self._prefix + key.encode()), until)
        return answer.kvs[0] if answer.kvs else None

    def _any_claim(self) -> Any:
        first, end = self.claim_range
        return rpc.RangeRequest(key=first, range_end=end, limit=1, keys_only=True)

    @property
    def claim_range(self) -> tuple[bytes, bytes]:
        """Every key of hex digits under the prefix: the watch sees claims and not our probe."""
        return self._prefix + b"0", self._prefix + b"g"

    def _claim(self, key: str, kv: Any) -> Claim:
        try:
            value = decode_value(kv.value)
        except ValueError as error:
            raise StoreUnavailable(f"etcd: what stands at {self._url.prefix}/{key} is no claim: {error}") from error
        expires_at = self._known_expiry(kv.lease)
        if not expires_at and not self._closed:
            # Not worth a round trip of the caller's time: the next read will know.
            self._share(("lease", kv.lease), self._look_up(kv.lease))
        return Claim(key=key, value=value, revision=kv.create_revision, expires_at=expires_at)

    # --- leases

    async def _bucket(self, ttl: float, until: float) -> _Bucket:
        """A lease that lives `ttl` seconds from now at least."""
        bucket = self._buckets.get(ttl)
        while bucket is None or time.monotonic() > bucket.fresh_until:
            bucket = await self._await(self._share(("grant", ttl), self._grant(ttl)), until)
        bucket.used = True
        return bucket

    def _forget(self, ttl: float, bucket: _Bucket) -> None:
        """The lease is gone: revoked by hand, or etcd lost it."""
        self._leases.pop(bucket.lease, None)
        if self._buckets.get(ttl) is bucket:
            del self._buckets[ttl]

    async def _grant(self, ttl: float) -> _Bucket:
        start = time.monotonic()
        seconds = max(1, math.ceil(LIFETIME * ttl))
        # Our own number makes the request safe to repeat, and no lease is left over from a lost reply.
        lease = secrets.randbelow(2**63 - 1) + 1
        try:
            answer = await self._call(
                "lease_grant", rpc.LeaseGrantRequest(TTL=seconds, ID=lease), start + self._deadline
            )
            # etcd may have given more (it has a shortest lease), which never hurts.
            seconds = max(seconds, answer.TTL)
        except _Refused as error:
            if "lease already exists" not in str(error):
                raise
        expires_at = start + seconds
        bucket = self._buckets[ttl] = _Bucket(lease, expires_at, expires_at - ttl)
        self._remember(lease, expires_at)
        ahead = min((seconds - ttl) / 10, DEADLINE_S)
        self._later(bucket.fresh_until - ahead, ttl, bucket)
        return bucket

    def _later(self, when: float, ttl: float, bucket: _Bucket) -> None:
        def refill() -> None:
            self._timers.discard(timer)
            if self._buckets.get(ttl) is bucket:
                if bucket.used:
                    self._share(("grant", ttl), self._grant(ttl))
                else:
                    # Nobody made a claim for a quarter TTL: the next one makes its lease itself.
                    del self._buckets[ttl]

        timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), refill)
        self._timers.add(timer)

    def _known_expiry(self, lease: int) -> float:
        """Until when the lease surely lives; 0.0: not known."""
        if not lease:
            return math.inf
        expires_at = self._leases.get(lease, 0.0)
        # A lease may outlive what we know (a new leader starts it afresh), so a past time says nothing.
        return expires_at if expires_at > time.monotonic() else 0.0

    async def _expiry(self, lease: int, until: float) -> float:
        known = self._known_expiry(lease)
        if known:
            return known
        found: float = await self._await(self._share(("lease", lease), self._look_up(lease)), until)
        return found

    async def _look_up(self, lease: int) -> float:
        start = time.monotonic()
        answer = await self._call("lease_time_to_live", rpc.LeaseTimeToLiveRequest(ID=lease), start + self._deadline)
        # Rounded down, and counted from before we asked: a lower bound. -1 means that it is gone.
        expires_at = start + answer.TTL if answer.TTL > 0 else 0.0
        self._remember(lease, expires_at)
        return expires_at

    def _remember(self, lease: int, expires_at: float) -> None:
        if len(self._leases) >= MAX_KNOWN_LEASES:
            now = time.monotonic()
            self._leases = {lease: when for lease, when in self._leases.items() if when > now}
            if len(self._leases) >= MAX_KNOWN_LEASES:
                self._leases.clear()
        self._leases[lease] = expires_at

    # --- work that callers share

    def _share(self, what: object, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """The running task for `what`, or a new one. It outlives its callers, who may be cancelled."""
        task = self._shared.get(what)
        if task is not None:
            work.close()
            return task
        task = self._shared[what] = asyncio.get_running_loop().create_task(work)

        def done(task: asyncio.Task[Any]) -> None:
            self._shared.pop(what, None)
            # Perhaps nobody waits; who does gets it from the task.
            if not task.cancelled():
                task.exception()

        task.add_done_callback(done)
        return task

    async def _await(self, task: asyncio.Task[Any], until: float) -> Any:
        await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
        if task.cancelled():
            raise StoreUnavailable("etcd: the store is closed")
        if not task.done():
            raise StoreUnavailable("etcd does not answer")
        return task.result()

    # --- calls

    async def _call(self, method: str, request: Any, until: float, *, write: bool = False, login: bool = True) -> Any:
        """One request, at whichever endpoint answers, within the deadline. A write must be safe to send twice.

        Raises StoreUnavailable (and its kinds) or, for a write only, OutcomeUnknown."""
        doubt: Exception | None = None
        trouble = ""
        unreachable = logins = 0
        while True:
            if login and not self._logged_in and not self._closed:
                await self._log_in(self._metadata, until)
            if self._closed:
                raise _failure(write, doubt, "the store is closed")
            endpoint = self._endpoints[self._current]
            # An expired token would make etcd refuse even the login.
            metadata = self._metadata if login else _REQUIRE_LEADER
            timeout = min(self._attempt_s, until - time.monotonic())
            if timeout <= 0:
                raise self._unreached(write, doubt, trouble or "no answer in time")
            try:
                answer = await getattr(endpoint, method)(request, timeout=timeout, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                fault = _judge(error)
                text = trouble = f"{endpoint.target}: {error.details() or error.code().name}"
                if fault is _Fault.DOUBTFUL:
                    doubt = error
                    self._suspect(endpoint)
                    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                        await asyncio.sleep(AGAIN_PAUSE_S)
                elif fault is _Fault.NOT_SENT:
                    unreachable += 1
                    self._suspect(endpoint)
                    if unreachable >= len(self._endpoints):
                        raise self._unreached(write, doubt, text) from error
                elif fault is _Fault.NOT_NOW:
                    self._suspect(endpoint)
                    if until - time.monotonic() < AGAIN_PAUSE_S:
                        raise self._unreached(write, doubt, text) from error
                    await asyncio.sleep(AGAIN_PAUSE_S)
                elif fault is _Fault.LOGIN and self._url.user and login and logins < 2:
                    logins += 1
                    await self._log_in(metadata, until)
                else:
                    raise self._refused(fault, write, doubt, text) from error
            except asyncio.CancelledError:
                # Closing the channel cancels its calls, and their callers did not ask for that.
                if self._closed and not _being_cancelled():
                    raise _failure(write, doubt or StoreUnavailable(), "the store was closed") from None
                raise
            else:
                if self._away:
                    self._away = False
                    _log.warning("etcd answers again")
                return answer

    def _suspect(self, endpoint: _Endpoint) -> None:
        """Go on at another endpoint: the next one that has not failed lately, or else simply the next."""
        now = time.monotonic()
        endpoint.suspect_until = now + SUSPECT_S
        if self._endpoints[self._current] is endpoint:
            count = len(self._endpoints)
            ring = [(self._current + step) % count for step in range(1, count + 1)]
            self._current = next((index for index in ring if self._endpoints[index].suspect_until <= now), ring[0])

    def _unreached(self, write: bool, doubt: Exception | None, text: str) -> Exception:
        if not self._away:
            self._away = True
            _log.warning("etcd does not answer: %s", text)
        return _failure(write, doubt, text)

    def _refused(self, fault: _Fault, write: bool, doubt: Exception | None, text: str) -> Exception:
        if write and doubt is not None and fault is not _Fault.NO_LEASE:
            return OutcomeUnknown(f"etcd: {doubt}; then {text}")
        if fault is _Fault.FULL:
            if not self._full:
                self._full = True
                _log.warning("etcd is full and takes no new claims: %s", text)
            return _Full(f"etcd is full: {text}")
        if fault is _Fault.NO_LEASE:
            return _NoLease(text)
        return _Refused(f"etcd refuses: {text}")

    def _has_space(self) -> None:
        if self._full:
            self._full = False
            _log.warning("etcd takes new claims again")

    # --- the login

    async def _log_in(self, stale: object, until: float) -> None:
        """A token newer than the `stale` metadata. All callers share one login."""
        if self._metadata is stale or not self._logged_in:
            await self._await(self._share("login", self._authenticate()), until)

    async def _authenticate(self) -> None:
        try:
            password = self._url.read_password()
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"etcd: the password file cannot be read: {error}") from error
        request = rpc.AuthenticateRequest(name=self._url.user, password=password)
        token: tuple[tuple[str, str], ...] = ()
        try:
            answer = await self._call("authenticate", request, time.monotonic() + self._deadline, login=False)
            token = (("token", answer.token),)
        except _Refused as error:
            # As etcd's own client does: without authentication the login is simply not needed.
            if "authentication is not enabled" not in str(error):
                raise StoreUnavailable(f"etcd: the login of {self._url.user!r} failed: {error}") from error
        self._metadata = (*_REQUIRE_LEADER, *token)
        self._logged_in = True


def _created_at(name: bytes, revision: int) -> Any:
    """0: the key does not exist."""
    return rpc.Compare(key=name, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision)


def _modified_at(name: bytes, revision: int) -> Any:
    return rpc.Compare(key=name, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision)


def _failure(write: bool, doubt: Exception | None, text: str) -> Exception:
    if write and doubt is not None:
        return OutcomeUnknown(f"etcd may or may not have done it: {text}")
    return StoreUnavailable(f"etcd: {text}")


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- the watch -------------------------------------------------------------------------------------------------------


class _WatchRefused(Exception):
    pass


class _Subscription:
    """What `subscribe` hands out. Its watch begins with the first `anext` and ends with the object at the latest."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self._mailbox = Mailbox(MAILBOX_SIZE)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._task is None and not self._closed:
            # The task must not know this object, so that dropping it is noticed.
            self._task = asyncio.get_running_loop().create_task(_Watch(self._store, self._mailbox).run())
            self._store._watches.add(self._task)
            self._task.add_done_callback(self._store._watches.discard)
        try:
            return await anext(self._mailbox)
        finally:
            # A cancelled reader's traceback keeps this frame for a while; it must not keep the watch, too.
            del self

    async def aclose(self) -> None:
        self._closed = True
        self._mailbox.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def __del__(self) -> None:
        if self._task is not None and not self._task.done() and not self._task.get_loop().is_closed():
            self._task.cancel()


class _Watch:
    """Fills one mailbox."""

    def __init__(self, store: EtcdStore, mailbox: Mailbox) -> None:
        self._store = store
        self._mailbox = mailbox

    async def run(self) -> None:
        try:
            while not self._store._closed:
                await self._watch()
            raise StoreUnavailable("etcd: the store is closed")
        except StoreUnavailable as error:
            self._mailbox.end(error)
        except Exception as error:
            # Whatever it was, the subscriber must not take a dead watch for a quiet one.
            _log.exception("the watch failed")
            self._mailbox.end(StoreUnavailable(f"etcd: the watch failed: {error!r}"))
        finally:
            self._mailbox.end()

    async def _watch(self) -> None:
        """One watch until it ends. Returns when a new one may follow at once (compaction); else StoreUnavailable."""
        store = self._store
        for last_try in (False, True):
            endpoint = store._endpoints[store._current]
            if not store._logged_in:
                await store._log_in(store._metadata, time.monotonic() + store._deadline)
            metadata = store._metadata
            call = endpoint.watch(metadata=metadata)
            pings: asyncio.Task[None] | None = None
            try:
                async with asyncio.timeout(store._deadline) as silence:
                    await call.write(self._create_request())
                    self._expect_created(await call.read())
                    # The member of this watch has a quorum and the store answers: from here on we miss nothing.
                    await endpoint.range(store._any_claim(), timeout=store._deadline, metadata=metadata)
                    self._mailbox.put(Reset())
                    pings = asyncio.get_running_loop().create_task(self._ping(call))
                    patience = SILENT_INTERVALS * store._progress_interval
                    while True:
                        silence.reschedule(asyncio.get_running_loop().time() + patience)
                        if not self._take(await call.read()):
                            return
            except TimeoutError as error:
                store._suspect(endpoint)
                raise StoreUnavailable(f"etcd: the watch at {endpoint.target} is silent") from error
            except _WatchRefused as error:
                if last_try or not store._url.user:
                    raise StoreUnavailable(f"etcd refuses the watch: {error}") from error
                # Some versions say "permission denied" for an expired token.
                await store._log_in(metadata, time.monotonic() + store._deadline)
            except grpc.aio.AioRpcError as error:
                if _judge(error) is _Fault.LOGIN and store._url.user and not last_try:
                    await store._log_in(metadata, time.monotonic() + store._deadline)
                    continue
                store._suspect(endpoint)
                raise StoreUnavailable(f"etcd: the watch at {endpoint.target} ended: {error.details()}") from error
            except asyncio.InvalidStateError as error:
                store._suspect(endpoint)
                raise StoreUnavailable(f"etcd: the watch at {endpoint.target} ended at once") from error
            finally:
                call.cancel()
                if pings is not None:
                    pings.cancel()
                    await asyncio.wait({pings})

    def _create_request(self) -> Any:
        first, end = self._store.claim_range
        return rpc.WatchRequest(
            create_request=rpc.WatchCreateRequest(
                key=first,
                range_end=end,
                filters=[rpc.WatchCreateRequest.NOPUT],
                progress_notify=True,
                fragment=True,
            )
        )

    def _expect_created(self, message: Any) -> None:
        if message is grpc.aio.EOF:
            raise StoreUnavailable("etcd ended the watch at once")
        if message.canceled:
            raise _WatchRefused(message.cancel_reason or "no reason given")
        if not message.created:
            raise StoreUnavailable("etcd did not confirm the watch")

    def _take(self, message: Any) -> bool:
        """False: the watch is over because its history was compacted away."""
        if message is grpc.aio.EOF:
            raise StoreUnavailable("etcd ended the watch")
        if message.canceled:
            if message.compact_revision:
                return False
            raise StoreUnavailable(f"etcd cancelled the watch: {message.cancel_reason or 'no reason given'}")
        skip = len(self._store._prefix)
        for event in message.events:
            if event.type == rpc.Event.DELETE:
                kv = event.kv
                self._mailbox.put(Deleted(kv.key[skip:].decode("ascii", "replace"), kv.mod_revision))
        return True

    async def _ping(self, call: Any) -> None:
        """Any answer counts; etcd's own notifications come only every ten minutes."""
        request = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
        try:
            while True:
                await asyncio.sleep(self._store._progress_interval)
                await call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # The reader meets the same end and reports it.
