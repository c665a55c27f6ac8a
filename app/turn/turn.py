"""The data plane: a turn's life, from the request's first byte to the last of the answer.

`Turn.run` reads top to bottom. It is a coroutine that is run in place (`app/http/inplace.py`): by the client's
connection until it waits for the worker's head, and by the worker's connection from there. Response bytes are pushed:
the worker's connection calls `on_data`, which writes to the client. Only when the client's buffer is full is the
worker's connection paused, until the client has caught up. No task, no future and no round of the event loop per turn
or per piece.

The client's leaving cuts the attempt; nothing of the turn's own code is cancelled, so that slots, connections and
claims are released by plain `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec

from app.errors import ClientDisconnected, TurnError, error_body, error_response
from app.fleet.policies import WORKER_HINT, Policy, least_loaded
from app.fleet.workers import Fleet, Target, Worker
from app.http import sse
from app.http.headers import (
    FORWARDED,
    NOT_TO_WORKER,
    Forwarding,
    Header,
    Noted,
    header,
    response_headers,
    sort_request,
    without_origin,
)
from app.http.inplace import Driven, Wake
from app.http.worker import (
    AttemptFailed,
    AttemptTimeout,
    BadResponse,
    ConnectFailed,
    ConnectionBroken,
    ConnectRefused,
    Expected,
    LocalLimit,
    StaleConnection,
    WorkerConnection,
)
from app.metrics import AFFINITY_OUTCOMES, Metrics
from app.sessions.affinity import Affinity, Entry, Placement
from app.sessions.identity import HINTS, Identifier, Identity, KeyHasher, read_hints
from app.sessions.tenants import ADMIN_TOKEN, CREDENTIALS, NOBODY, Admins, Tenants

log = logging.getLogger("coatcheck.proxy")

T = TypeVar("T")

DRY_RUN = b"x-coatcheck-dry-run"
"""Asks where a turn would go, without sending it there."""
_RARE = HINTS | {DRY_RUN}
_WANTED = _RARE | {b"content-length", b"content-type", b"content-encoding", b"x-request-id", b"host"}
_STREAMED_FROM = 256 * 1024
"""Bytes from which on a request body that says nothing of routing goes through as it comes; smaller ones, whole, can be
sent again."""
_EMPTY_BODY_METHODS = frozenset({b"POST", b"PUT", b"PATCH"})
"""Methods whose requests say `content-length: 0` when they have no body (RFC 9110 8.6)."""
_DYING_PAUSES = (0.0, 0.02, 0.1, 0.3)
"""Seconds before each time that a worker which broke a connection is asked whether it is still there."""
_KEPT_STATUSES = frozenset({408, 409, 425, 429})
"""With 5xx: the client will try the turn again, so a final turn that was answered so keeps its claim."""


class Client(Protocol):
    """A request, and the way back to who sent it: what a turn needs of the server in front of it."""

    method: bytes
    raw_path: bytes
    query: bytes
    """Without the question mark."""
    headers: list[Header]
    """Names in lower case."""
    peer: str | None
    """The address that the connection comes from."""
    scheme: bytes
    switches: bytes
    """The protocol that the client asks to go on with; empty: none."""

    async def receive(self, least: int = 1) -> tuple[bytes, bool]:
        """The next piece of the body, of so many bytes unless it ends, and whether more will come. Raises
        ClientDisconnected, or TurnError when the rest cannot be had."""

    def watch(self) -> None:
        """The whole body was received. From now on `Turn.client_left` tells when the client leaves."""

    def interim(self, status: int, headers: list[Header]) -> None:
        """Pass on a 1xx response."""

    def start(self, status: int, headers: list[Header]) -> None:
        """Begin the answer. Its head may wait for the first piece of the body, or `flush`."""

    def write(self, data: bytes, end: bool) -> bool:
        """Send a piece of the body. False: the client is slow, and `Turn.client_took` tells when it has taken what was
        written; anything written before that is kept, in order."""

    def write_chunk(self, frame: bytes, start: int) -> bool:
        """As `write`, of a chunk with its framing; its data is `frame[start:-2]`."""

    def flush(self) -> None:
        """The next piece may be long in coming."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one turn: bytes, and seconds (0: none)."""

    body_bytes: int = 64 * 1024 * 1024
    first_byte: float = 600.0
    idle: float = 300.0
    total: float = 0.0


class Rules(msgspec.Struct, frozen=True):
    """What the operator decided about sessions."""

    soft_overload: int = 0
    """Turns in flight at a target from which on a session may pass it over for one turn; 0: never."""
    reject_conflicts: bool = False
    """A hint that a claim contradicts is refused; else the claim overrides it."""
    hints_only: bool = False
    """Nothing is placed without a hint (the policy `direct`)."""
    worker_key: bytes = b""
    """Sent to the workers in place of the client's key; empty: the client's is passed on."""
    rank_header: bytes = b"x-data-parallel-rank"
    """Tells a worker the rank. Lower-case; the default is vLLM's."""


class _Hints(msgspec.Struct):
    """Dynamo's extension of the request (`nvext`), as far as it places."""

    backend_instance_id: str | int | None = None
    decode_worker_id: str | int | None = None
    prefill_worker_id: str | int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None


class _Fields(msgspec.Struct):
    """What routing needs of a request body; everything else is skipped, and the bytes travel as they came."""

    model: str | None = None
    stream: bool | None = None
    nvext: _Hints | None = None

    def ids(self) -> dict[str, Any]:
        """The fields that a session's id may be in."""
        return {}


class _FieldsWithIds(_Fields):
    """Also what some clients fill with a session's id. The types are the worker's to judge."""

    prompt_cache_key: Any = None
    user: Any = None
    metadata: Any = None

    def ids(self) -> dict[str, Any]:
        return {"prompt_cache_key": self.prompt_cache_key, "user": self.user, "metadata": self.metadata}


_encode_json = msgspec.json.Encoder().encode
_NO_FIELDS = _Fields()
_NO_HINTS = _Hints()
_NO_IDENTITY = Identity()


class Proxy:
    """Opens the turns of the proxied paths. One per router; holds what they share."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        affinity: Affinity,
        hasher: KeyHasher,
        metrics: Metrics,
        limits: Limits,
        identifier: Identifier | None = None,
        tenants: Tenants | None = None,
        admins: Admins | None = None,
        rules: Rules | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:
        """Left out: the default sources of ids, no API keys, admins from this machine, hard affinity."""
        self.admins = admins or Admins("")
        self.identifier = identifier or Identifier()
        self.tenants = tenants or Tenants({})
        self.rules = rules or Rules()
        self.decode_fields = msgspec.json.Decoder(_FieldsWithIds if self.identifier.reads_body else _Fields).decode
        self.authenticates = len(self.tenants) > 0
        self.forwarding = forwarding or Forwarding()
        self.wanted = (
            _WANTED | FORWARDED | self.identifier.wanted | (CREDENTIALS if self.authenticates else frozenset())
        )
        self.kept_back = NOT_TO_WORKER | {DRY_RUN, ADMIN_TOKEN}
        self.key_line = b""
        if self.rules.worker_key:
            self.kept_back |= CREDENTIALS
            self.key_line = b"authorization: Bearer %b\r\n" % self.rules.worker_key
        if any(target.rank is not None for worker in fleet for target in worker.targets):
            self.kept_back |= {self.rules.rank_header}  # ours to say
        self.kept_back_of_trusted = self.kept_back | {b"x-forwarded-for"}
        self.kept_back |= FORWARDED
        self.among_hinted = least_loaded()
        self.fleet, self.policy, self.affinity, self.hasher = fleet, policy, affinity, hasher
        self.metrics, self.limits = metrics, limits
        self.affinity_headers = {how: (b"x-coatcheck-affinity", how.encode()) for how in AFFINITY_OUTCOMES}
        self._running: set[Turn] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        bounds = [limit for limit in (limits.first_byte, limits.idle, limits.total) if limit]
        self._sweep_every = min(1.0, max(0.01, min(bounds) / 8)) if bounds else 0.0
        self._request_prefix = os.urandom(8).hex().encode()
        self._request_count = itertools.count(1)

    def open(self, client: Client, over: Callable[[Exception | None], None]) -> Turn:
        """Begin a turn. `over` is called when it has ended, with the fault that ended it if the server must cut the
        connection for it."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()  # asked once: it is a system call (getpid)
        turn = Turn(self, loop, client, over)
        self._running.add(turn)
        if self._sweeper is None and self._sweep_every:
            self._sweeper = loop.call_later(self._sweep_every, self._sweep, loop)
        return turn

    def closed(self, turn: Turn) -> None:
        self._running.discard(turn)

    @property
    def turns(self) -> int:
        """Running now."""
        return len(self._running)

    def next_request_id(self) -> bytes:
        return b"%b-%x" % (self._request_prefix, next(self._request_count))

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the limits of every running turn. One timer for all: most turns end long before any limit."""
        now = loop.time()
        for turn in tuple(self._running):
            turn.check_limits(now)
        self._sweeper = loop.call_later(self._sweep_every, self._sweep, loop) if self._running else None


class _Wish(msgspec.Struct, frozen=True):
    """Where the client would like its turn: a worker, one of its ranks, or (without a worker) a rank of wherever its
    session is."""

    worker: str | None
    rank: int | None
    targets: tuple[Target, ...]

    def __str__(self) -> str:
        parts = [] if self.worker is None else [f"worker {self.worker}"]
        return " ".join(parts if self.rank is None else [*parts, f"rank {self.rank}"])

    def fits(self, target: Target) -> bool:
        return target in self.targets if self.targets else target.rank == self.rank

    def placed(self) -> tuple[Target, ...]:
        """Raises TurnError when it says too little to place by."""
        if not self.targets:
            raise self.needs_worker()
        return self.targets

    def conflict(self) -> TurnError:
        return TurnError("hint_conflict", f"the session is bound elsewhere than {self} asks", param=WORKER_HINT)

    def needs_worker(self) -> TurnError:
        return TurnError(
            "invalid_hint", f"a rank without a claim needs {WORKER_HINT} beside it", param="X-Dynamo-DP-Rank"
        )


class Turn:
    """One request. The sink of its worker's connection."""

    # Defaults in the class: most turns never set most of these.
    _request_id = b""
    _lines = b""
    _body = b""
    _framed = False
    _fields = _NO_FIELDS
    _tenant = NOBODY
    _identity = _NO_IDENTITY
    _dry_run = False
    _wish: _Wish | None = None
    _entry: Entry | None = None
    _target: Target | None = None
    _how = "none"
    _slot: Target | None = None
    _connection: WorkerConnection | None = None
    _gone = False
    _pending: asyncio.Task[Any] | None = None
    _answering = False
    _done: Wake | None = None
    _fault: Exception | None = None
    _failure: AttemptFailed | None = None
    _upload: Driven | None = None
    _refusal: TurnError | None = None
    _more = False
    _length = -1
    _stalled = False
    _over = False
    _held: list[bytes] | None = None
    _held_end = False
    _marker: sse.DoneDetector | None = None
    _last = b""
    _last_framing = 0
    _ttft = False
    _outcome = "completed"

    def __init__(
        self,
        proxy: Proxy,
        loop: asyncio.AbstractEventLoop,
        client: Client,
        over: Callable[[Exception | None], None],
    ) -> None:
        self._proxy, self.loop, self._client, self._ended = proxy, loop, client, over
        self._started = loop.time()
        self._driven: Driven | None = Driven(self._returned, self._failed)

    def start(self) -> None:
        """Run up to where it waits for the first time."""
        assert self._driven is not None
        self._driven.start(self.run())

    def cancel(self) -> None:
        """Stop wherever it is, as when the router's time to drain is over."""
        if self._driven is not None:
            self._driven.cancel()

    def _returned(self, _: object) -> None:
        self._driven = None  # it holds us: left alone, both would be garbage for the collector
        self._ended(None)

    def _failed(self, fault: Exception) -> None:
        self._driven = None
        self._ended(fault)

    # -- the turn, top to bottom

    async def run(self) -> None:
        try:
            await self._read()
            self._check_client()
            if self._dry_run:
                await self._explain()
                return
            await self._bind()
            await self._attempt()
            await self._relay()
        except TurnError as error:
            await self._refuse(error)
        except ClientDisconnected:
            self._outcome = "aborted"
            if self._ends_session:
                if self._entry is not None:
                    self._entry.closing = True  # closed when this turn is released
                else:
                    await self._end_session()
        except Exception:  # a fault of ours: the operator sees it in the log, the client a proper error
            self._outcome = "failed"
            log.exception("turn %s failed", self._request_id.decode("latin-1"))
            if self._answering:
                raise  # the server cuts the connection
            await self._refuse(TurnError("internal_error", "the router failed; its log has the reason"))
        finally:
            self._account()

    async def _read(self) -> None:
        """Who asks, the session's identity, the request body (capped), and the fields that routing needs."""
        proxy = self._proxy
        client = self._client
        trusted = proxy.forwarding.trusts(client.peer)
        kept_back = proxy.kept_back_of_trusted if trusted else proxy.kept_back
        lines, noted = sort_request(client.headers, proxy.wanted, kept_back)
        self._lines = lines + proxy.forwarding.lines((client.peer or "").encode(), client.scheme, noted, trusted)
        self._request_id = _given_request_id(noted) or proxy.next_request_id()
        if proxy.authenticates:
            self._tenant = proxy.tenants.authenticate(noted)
        rare = not _RARE.isdisjoint(noted)
        if rare and DRY_RUN in noted:
            self._dry_run = noted[DRY_RUN][0].strip().lower() in (b"1", b"true", b"yes", b"on")
        identity = self._identity = proxy.identifier.identify(noted)
        if identity.final_unclear:
            proxy.metrics.final_unclear.inc()
        if not client.switches:  # else what follows is not HTTP
            await self._read_body(noted)
        if rare or self._fields.nvext is not None:
            self._wish = self._wished(noted)

    async def _read_body(self, noted: Noted) -> None:
        proxy = self._proxy
        cap = proxy.limits.body_bytes
        declared = noted.get(b"content-length")
        if declared is not None:
            self._length = int(declared[0])
            if self._length > cap:
                raise _too_large(cap)
        whole = _routable(noted) or 0 <= self._length <= _STREAMED_FROM
        body, more = await self._client.receive(cap + 1 if whole else 1)
        if whole and more:
            raise _too_large(cap)
        self._more = more  # nothing in it says where to: it goes through as it comes
        if body:
            if len(body) > cap:
                raise _too_large(cap)
            self._body = body
            if not self._more:
                self._fields = _routing_fields(body, noted, proxy.decode_fields)
                if self._identity.session is None and proxy.identifier.reads_body:
                    self._identity = proxy.identifier.identify(noted, self._fields.ids())
        if not self._more:
            self._client.watch()

    async def _bind(self) -> None:
        """Decide the target: the session's claim, else the client's wish, else the policy's choice."""
        proxy, identity, wish = self._proxy, self._identity, self._wish
        if identity.session is None:
            if wish is None:
                self._target = self._place(frozenset())
            else:
                self._target = proxy.among_hinted(wish.placed())
        else:
            key = proxy.hasher.key(self._tenant, *identity.session)
            entry = proxy.affinity.bind_cached(key)
            if entry is not None:
                self._bound((entry, "cached" if entry.claim is not None else "degraded"))
            else:
                await self._claimed(proxy.affinity.bind(key, self._placement()), self._unbind)
            assert self._target is not None
            if wish is not None and not wish.fits(self._target):
                if proxy.rules.reject_conflicts:
                    raise wish.conflict()
                proxy.metrics.hints_overridden.inc()
            if 0 < proxy.rules.soft_overload <= self._target.in_flight:
                self._pass_over()
        proxy.metrics.affinity.cells[self._how,] += 1

    async def _attempt(self) -> None:
        """Send the request to the target until a response head is there. This is the law of trying again:

        - a request whose body goes through as it comes, or that asks for another protocol, goes on a fresh connection,
          and is sent once;
        - a reused connection was closed before any byte of an answer: it was closed already when we wrote into it, so
          the request surely did not run; once more at the same worker, on a fresh connection;
        - no connection can be made: surely nothing ran; the worker is lost, and the turn goes on at another one;
        - a fresh connection broke before any byte of an answer, and the worker, asked at once, refuses new ones: its
          process is gone, and what it had begun is gone with it; the worker is lost, and the turn goes on at another
          one. Once: a request of which two workers have died is not taken to a third.

        Nothing else is tried again: the worker may be at work on it."""
        proxy, client = self._proxy, self._client
        lost: frozenset[str] = frozenset()
        died = False
        fresh = once = self._more or bool(client.switches)
        expected = (
            Expected.SWITCH if client.switches else Expected.HEAD if client.method == b"HEAD" else Expected.ANSWER
        )
        while True:
            target = self._target
            assert target is not None
            worker = target.worker
            self._take_slot(target)
            connection = None if fresh else worker.pool.take()
            if connection is None:
                try:
                    connection = await self._unless_gone(worker.pool.connect(), _discard)
                except LocalLimit as error:
                    raise TurnError("overloaded", str(error)) from error
                except ConnectFailed as error:
                    proxy.metrics.connects.inc(worker.name, "failed")
                    worker.unreachable()
                    lost |= {worker.name}
                    proxy.metrics.retries.inc("worker_unreachable")
                    await self._move(lost, error)
                    fresh = once
                    continue
                proxy.metrics.connects.inc(worker.name, "ok")
                worker.reached()
            self._connection = connection
            body = _chunk(self._body) if self._more and self._length < 0 else self._body
            head = connection.send(
                self._head(worker, target.rank), body, expected=expected, on_interim=self._interim, more=self._more
            )
            if self._more:
                self._send_on(connection)
            try:
                await head
            except StaleConnection:
                self._check_client()
                proxy.metrics.retries.inc("stale_connection")
                connection.release()
                self._connection = None
                fresh = True
                continue
            except AttemptFailed as error:
                self._check_client()
                if self._refusal is not None:
                    raise self._refusal from error
                if (
                    not (died or once)
                    and isinstance(error, ConnectionBroken)
                    and not connection.first_byte
                    and await self._is_gone(worker)
                ):
                    connection.release()
                    self._connection = None
                    lost |= {worker.name}
                    died = True
                    proxy.metrics.retries.inc("worker_died")
                    await self._move(lost, error)
                    fresh = False
                    continue
                raise _before_head(error) from error
            return

    async def _relay(self) -> None:
        """The answer, as it comes."""
        connection, entry = self._connection, self._entry
        assert connection is not None
        status = connection.status
        if status > 599:
            raise TurnError("worker_bad_response", f"the worker answered with status {status}")
        if status >= 400:
            self._outcome = "worker_error" if status >= 500 else "client_error"
        if entry is not None and self._identity.final and _ends(status):
            entry.closing = True
        headers = response_headers(connection.headers, status)
        if 300 <= status < 400 or status == 201:
            assert self._target is not None
            headers = without_origin(headers, self._target.worker.authority)
        headers += self._own_headers()
        self._done = Wake()
        self._answering = True
        self._client.start(status, headers)
        connection.relay(self)
        if status == 101:
            self._send_on(connection)
        if self._held is None:  # else a head that is a whole answer would be seen before the claim is closed
            self._client.flush()
        if not self._done.is_set or self._fault is not None:
            await self._wait()
        while self._held is not None:  # again when another turn had joined at `[DONE]` and left before the end
            await self._close_session()
            self._done = Wake()
            held, self._held = self._held, None
            self._push(b"".join(held), self._held_end)
            if self._failure is not None and not self._stalled:
                self._finish()
            await self._wait()
        if self._failure is not None:
            self._check_client()
            await self._break(self._failure)

    async def _refuse(self, error: TurnError) -> None:
        """Answer with an error of our own, before any response was started."""
        status, headers, body = error_response(error)
        if self._outcome != "failed":
            self._outcome = "rejected" if status < 500 else "unplaced" if self._connection is None else "worker_error"
        if self._ends_session and _ends(status):
            await self._end_session()
        await self._answer(status, headers + self._own_headers(), body)

    async def _answer(self, status: int, headers: list[Header], body: bytes) -> None:
        """With something of our own, whole."""
        self._answering = True
        self._client.start(status, headers)
        await self._say(body, True)

    async def _say(self, data: bytes, end: bool) -> None:
        """A last piece, of our own."""
        self._over = True
        self._done = Wake()
        if not self._client.write(data, end):
            self._stalled = True
            await self._wait()
        elif self._fault is not None:
            raise self._fault

    async def _wait(self) -> None:
        assert self._done is not None
        await self._done
        if self._fault is not None:
            raise self._fault

    @property
    def _ends_session(self) -> bool:
        identity = self._identity
        return identity.final and identity.session is not None and not self._dry_run

    async def _end_session(self) -> None:
        """A final turn that we refuse for good, or whose client has left, ends its session all the same: the client
        will not send it again."""
        if self._entry is not None:
            self._entry.closing = True
            await self._close_session()
        elif self._identity.session is not None:
            with contextlib.suppress(TurnError):  # the store is away; the claim ends by its TTL
                key = self._proxy.hasher.key(self._tenant, *self._identity.session)
                await self._in_task(self._proxy.affinity.end(key), _nothing)

    async def _explain(self) -> None:
        """Answer where the turn would go, and why, without anything done."""
        proxy, identity, wish = self._proxy, self._identity, self._wish
        view, key = None, None
        if identity.session is not None:
            key = proxy.hasher.key(self._tenant, *identity.session)
            view = await self._unless_gone(proxy.affinity.look_up(key), _nothing)
        target: Target
        if view is not None and view.target is not None:
            target, why = view.target, view.source
            how = why if why == "degraded" else "stored" if why == "store" else "cached"
            if wish is not None and not wish.fits(target) and proxy.rules.reject_conflicts:
                raise wish.conflict()
            if 0 < proxy.rules.soft_overload <= target.in_flight and (free := self._not_overloaded(target)):
                target, why, how = copy.copy(proxy.among_hinted)(free), "overload", "bypassed"
        else:
            target, why = await self._unless_gone(proxy.affinity.choose(self._placement()), _nothing)
            how = "none" if key is None else "created" if view is None or view.claim is None else "rebound"
        body = _encode_json(
            {
                "object": "coatcheck.dry_run",
                "session": key,
                "worker": target.worker.name,
                "rank": target.rank,
                "affinity": how,
                "because": why,
                "revision": view.claim.revision if view is not None and view.claim is not None else None,
            }
        )
        self._outcome = "explained"
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._answer(200, [*headers, (b"x-request-id", self._request_id)], body)

    async def _break(self, failure: AttemptFailed) -> None:
        """The attempt failed after the head. Say so inside an event stream, and never end the body cleanly: clients
        take a clean end for a complete answer."""
        self._outcome = "broken"
        await self._close_session()
        connection = self._connection
        assert connection is not None
        kind = header(connection.headers, b"content-type") or b""
        if (
            kind.lower().startswith(b"text/event-stream")
            and header(connection.headers, b"content-length") is None
            and header(connection.headers, b"content-encoding") is None
        ):
            last = self._last[: len(self._last) - self._last_framing]
            code = "worker_stalled" if isinstance(failure, AttemptTimeout) else "worker_stream_broken"
            event = sse.error_event(error_body(TurnError(code, str(failure))), last)
            await self._say(event, False)

    def _account(self) -> None:
        """Give everything back, whatever happened."""
        if self._slot is not None:
            self._slot.in_flight -= 1
        if self._entry is not None:
            self._proxy.affinity.release(self._entry)
        if self._connection is not None:
            self._connection.release()
        if self._upload is not None:
            self._upload.close()
        if self._gone:
            self._outcome = "aborted"
        self._proxy.metrics.turn(self._fields.model, self._outcome)
        self._proxy.metrics.turn_seconds.observe(self.loop.time() - self._started)
        self._proxy.closed(self)

    # -- steps of binding and attempting

    def _wished(self, noted: Noted) -> _Wish | None:
        """What the client's hints ask for; headers before the body's `nvext`, as Dynamo has it."""
        said, hints = read_hints(noted), self._fields.nvext or _NO_HINTS
        if said.prefill or hints.prefill_worker_id is not None or hints.prefill_dp_rank is not None:
            self._proxy.metrics.hints_ignored.inc("prefill")
        name = said.worker
        if name is None:
            given = hints.backend_instance_id if hints.backend_instance_id is not None else hints.decode_worker_id
            name = None if given is None else str(given)
        rank = said.rank if said.rank is not None else hints.dp_rank
        if name is None:
            return None if rank is None else _Wish(None, rank, ())
        worker = self._proxy.fleet.worker(name)
        targets = () if worker is None else tuple(t for t in worker.targets if rank is None or t.rank == rank)
        if not targets:
            raise self._unknown(name, rank if worker is not None else None)
        return _Wish(name, rank, targets)

    def _unknown(self, name: str, rank: int | None) -> TurnError:
        message = f"{WORKER_HINT} names no worker of this router"
        if rank is not None:
            message = f"the worker {name} has no rank {rank}"
        if self._proxy.admins.allows(self._client.peer, self._client.headers):
            message += f"; it has {', '.join(worker.name for worker in self._proxy.fleet)}"
        return TurnError("unknown_worker", message, param=WORKER_HINT)

    def _placement(self) -> Placement:
        """How a session without a claim is to be placed."""
        proxy, identity, wish = self._proxy, self._identity, self._wish
        if wish is not None and wish.targets:
            return Placement(candidates=wish.targets)
        refusal = None
        if wish is not None:
            refusal = wish.needs_worker()
        elif proxy.rules.hints_only:
            refusal = TurnError("hint_required", f"this router places nothing by itself; send {WORKER_HINT}")
        parent = None
        if identity.parent is not None and identity.session is not None:
            parent = proxy.hasher.key(self._tenant, *identity.parent)
        return Placement(parent=parent, refusal=refusal)

    def _pass_over(self) -> None:
        """Soft affinity: take this one turn to a target that is not overloaded, if there is one. The claim stays."""
        assert self._target is not None
        if free := self._not_overloaded(self._target):
            self._target = self._proxy.among_hinted(free)
            self._how = "bypassed"

    def _not_overloaded(self, bound: Target) -> list[Target]:
        limit = self._proxy.rules.soft_overload
        return [t for t in self._proxy.fleet.candidates() if t is not bound and t.in_flight < limit]

    async def _is_gone(self, worker: Worker) -> bool:
        """Whether nobody listens at the worker's address. Asked a few times: a process that is killed loses its
        connections before the socket that it listens on, and takes new ones in between."""
        for pause in _DYING_PAUSES:
            if pause:
                await self._unless_gone(asyncio.sleep(pause), _nothing)
            try:
                connection = await self._unless_gone(worker.pool.connect(), _discard)
            except ConnectRefused:
                self._proxy.metrics.connects.inc(worker.name, "failed")
                worker.unreachable()
                return True
            except AttemptFailed:
                return False  # a path that is cut says nothing of the worker behind it
            connection.close()
        return False

    async def _move(self, lost: frozenset[str], error: AttemptFailed) -> None:
        """Find another target after every worker in `lost` could not be reached."""
        entry = self._entry
        try:
            if entry is None:
                self._target = self._place(lost)
                return
            if entry.target.worker.name not in lost:  # it was passed over for the one that is lost
                self._target, self._how = entry.target, "cached"
            else:
                await self._claimed(self._proxy.affinity.rebind(entry, lost, self._placement()), self._bound)
        except TurnError as none_left:
            raise TurnError("worker_unreachable", f"no worker can be reached ({error})") from none_left
        self._proxy.metrics.affinity.cells[self._how,] += 1

    def _place(self, lost: frozenset[str]) -> Target:
        candidates = self._proxy.fleet.candidates(lost)
        if not candidates:
            raise TurnError("no_worker", "no worker can take the turn")
        return self._proxy.policy(candidates)

    def _bound(self, bound: tuple[Entry, str]) -> None:
        self._entry, self._how = bound
        self._target = self._entry.target

    async def _claimed(
        self, work: Coroutine[Any, Any, tuple[Entry, str]], undo: Callable[[tuple[Entry, str]], object]
    ) -> None:
        """Be bound by what `work` claims. A final turn does not give up when its client leaves: a claim that nobody
        waited for would be closed by nobody."""
        if self._identity.final:
            self._bound(await self._in_task(work, undo))
            self._check_client()
        else:
            self._bound(await self._unless_gone(work, undo))

    def _unbind(self, bound: tuple[Entry, str]) -> None:
        self._proxy.affinity.release(bound[0])

    def _take_slot(self, target: Target) -> None:
        if self._slot is not target:
            if self._slot is not None:
                self._slot.in_flight -= 1
            target.in_flight += 1
            self._slot = target

    def _head(self, worker: Worker, rank: int | None) -> bytes:
        client = self._client
        parts = [
            client.method,
            b" ",
            worker.base_path,
            client.raw_path,
            b"?" if client.query else b"",
            client.query,
            worker.host_line,
            self._proxy.key_line,
            self._lines,
            b"x-request-id: ",
            self._request_id,
        ]
        if rank is not None:
            parts.append(b"\r\n%b: %d" % (self._proxy.rules.rank_header, rank))
        if client.switches:
            parts.append(b"\r\nconnection: upgrade\r\nupgrade: %b" % client.switches)
        elif self._more:
            parts.append(
                b"\r\ntransfer-encoding: chunked" if self._length < 0 else b"\r\ncontent-length: %d" % self._length
            )
        elif self._body or self._length >= 0 or client.method in _EMPTY_BODY_METHODS:
            parts.append(b"\r\ncontent-length: %d" % len(self._body))
        parts.append(b"\r\n\r\n")
        return b"".join(parts)

    def _interim(self, status: int, headers: list[Header]) -> None:
        self._client.interim(status, response_headers(headers, status))

    def _own_headers(self) -> list[Header]:
        own = [self._proxy.affinity_headers[self._how], (b"x-request-id", self._request_id)]
        target = self._target
        if target is not None:
            own += target.headers
        return own

    # -- the client's leaving, and limits

    async def _unless_gone(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
        """Await in a task, but not longer than the client waits. `undo` gives back a result that came too late."""
        if self._gone:
            work.close()
            raise ClientDisconnected
        self._pending = task = self.loop.create_task(work)
        try:
            await self._until_done(task, undo)
        finally:
            self._pending = None
        if self._gone:
            _undo(task, undo)
            raise ClientDisconnected
        return task.result()

    async def _in_task(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
        """Await in a task, whether the client leaves or not."""
        task = self.loop.create_task(work)
        await self._until_done(task, undo)
        return task.result()

    async def _until_done(self, task: asyncio.Task[T], undo: Callable[[T], object]) -> None:
        done = Wake()
        task.add_done_callback(lambda _: done.set())
        try:
            await done
        except asyncio.CancelledError:  # we are being cancelled ourselves
            if task.done():
                _undo(task, undo)
            else:
                task.cancel()
                task.add_done_callback(lambda late: _undo(late, undo))
            raise

    def _check_client(self) -> None:
        if self._gone:
            raise ClientDisconnected

    def _send_on(self, connection: WorkerConnection) -> None:
        """Begin to pass on what the client goes on to send, while the worker may already answer."""
        self._upload = Driven(_nothing, self._upload_failed)
        self._upload.start(self._send_rest(connection))

    async def _send_rest(self, connection: WorkerConnection) -> None:
        """The rest of a body that goes through as it comes, or all that is said in another protocol."""
        switched = bool(self._client.switches)
        chunked = self._length < 0 and not switched
        cap, size, more = self._proxy.limits.body_bytes, len(self._body), True
        while more:
            piece, more = await self._client.receive()
            size += len(piece)
            if size > cap and not switched:
                raise _too_large(cap)
            if chunked:
                piece = _chunk(piece) if more else _chunk(piece) + b"0\r\n\r\n"
            await connection.write(piece)
        connection.written()
        self._client.watch()

    def _upload_failed(self, fault: Exception) -> None:
        if isinstance(fault, TurnError):
            self._refusal = fault
        elif isinstance(fault, ClientDisconnected):
            self._gone = True
        else:
            self._fault = fault
        if self._connection is not None:  # not in place: it may end the turn, and with it what calls us
            self.loop.call_soon(self._connection.fail, ConnectionBroken("the request was not completed"))

    def check_limits(self, now: float) -> None:
        """Cut the attempt when the worker has been silent, or the turn has lasted, longer than is allowed."""
        limits, connection = self._proxy.limits, self._connection
        if connection is None:
            return  # connecting and binding have limits of their own
        if limits.total and now - self._started > limits.total:
            connection.fail(AttemptTimeout(f"the turn took longer than {limits.total:g} s"))
        # While the client is the slow one, the worker is not being read, or has no request, and cannot be blamed.
        elif not self._stalled and self._held is None and not connection.uploading:
            limit = limits.idle if self._ttft else limits.first_byte
            if limit and now - connection.last_read > limit:
                what = "sent nothing for" if self._ttft else "did not begin to answer within"
                connection.fail(AttemptTimeout(f"the worker {what} {limit:g} s"))

    # -- called from the client's connection

    def client_left(self) -> None:
        self._gone = True
        if self._pending is not None:
            self._pending.cancel()
        if self._connection is not None:
            self._connection.fail(ConnectionBroken("the client left"))
        if self._held is None:
            self._finish()

    def client_took(self) -> None:
        """The client has taken what was written."""
        if not self._stalled:
            return
        self._stalled = False
        connection = self._connection
        if self._over or self._failure is not None or self._held is not None:
            self._finish()
        elif connection is not None:
            connection.last_read = self.loop.time()  # the wait was not the worker's
            connection.resume()

    # -- the sink: called from the worker's connection

    def on_data(self, data: bytes, end: bool) -> None:
        if not self._ttft:
            self._ttft = True
            self._proxy.metrics.ttft.observe(self.loop.time() - self._started)
        if self._held is not None:  # the claim is being closed, whatever `closing` says by now: nothing overtakes
            self._held.append(data)
            self._held_end = end
            return
        entry = self._entry
        if entry is not None and entry.closing and entry.active == 1 and self._hold(data, end):
            return
        self._push(data, end)

    def on_chunk(self, frame: bytes, start: int) -> None:
        entry = self._entry
        if self._held is not None or not self._ttft or (entry is not None and entry.closing):
            self.on_data(frame[start:-2], False)
            return
        self._last, self._last_framing = frame, 2
        if not self._client.write_chunk(frame, start):
            self._stall()

    def on_failure(self, failure: AttemptFailed) -> None:
        self._failure = failure
        if not self._stalled:
            self._finish()

    def _hold(self, data: bytes, end: bool) -> bool:
        """Keep back the end of a session's last answer until its claim is closed; clients take either the end of
        the body or the `[DONE]` event for it."""
        if self._marker is None:
            self._marker = sse.DoneDetector()
        if not end and not self._marker.feed(data):
            return False
        self._held, self._held_end = [data], end
        if not self._stalled:
            self._finish()
        return True

    def _push(self, data: bytes, end: bool) -> None:
        self._last, self._last_framing = data, 0
        self._over = end
        if not self._client.write(data, end):
            self._stall()
        elif end:
            self._finish()

    def _stall(self) -> None:
        """The client is full: read no more from the worker until it has taken what it got."""
        self._stalled = True
        if self._connection is not None:
            self._connection.pause()

    def _finish(self) -> None:
        """Go on where the turn waits. The last thing that a callback does."""
        if self._done is not None:
            self._done.set()

    async def _close_session(self) -> None:
        entry = self._entry
        if entry is not None and entry.closing and entry.active == 1:
            await self._in_task(self._proxy.affinity.close(entry), _nothing)


def _ends(status: int) -> bool:
    """Whether a final turn that is answered so ends its session."""
    return status < 500 and status not in _KEPT_STATUSES


def _routing_fields(body: bytes, noted: Noted, decode: Callable[[bytes], _Fields]) -> _Fields:
    """Raises TurnError `invalid_json` or `invalid_request`, for bodies that say they are JSON; others are the worker's
    business."""
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        kind = noted.get(b"content-type", (b"",))[0]
        if b"json" not in kind.lower() or b"content-encoding" in noted:
            return _NO_FIELDS
        if isinstance(error, msgspec.ValidationError):
            raise TurnError("invalid_request", f"the request body is not as expected: {error}") from error
        raise TurnError("invalid_json", f"the request body is not valid JSON: {error}") from error


def _before_head(failure: AttemptFailed) -> TurnError:
    """The error for an attempt that failed after the request was sent and before a response began."""
    if isinstance(failure, AttemptTimeout):
        return TurnError("worker_timeout", str(failure))
    if isinstance(failure, BadResponse):
        return TurnError("worker_bad_response", str(failure))
    return TurnError("worker_reset", str(failure))


def _given_request_id(noted: Noted) -> bytes | None:
    values = noted.get(b"x-request-id")
    return values[0] if values and 0 < len(values[0]) <= 128 and values[0].isascii() else None


def _routable(noted: Noted) -> bool:
    """Whether a request body may say where its turn is to go."""
    kind = noted.get(b"content-type")
    return b"content-encoding" not in noted and (kind is None or b"json" in kind[0].lower())


def _chunk(data: bytes) -> bytes:
    """One chunk of a body without a length (RFC 9112 7.1). Of no bytes none: that would be the end."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _too_large(cap: int) -> TurnError:
    return TurnError("request_too_large", f"the request body is larger than {cap} bytes")


def _discard(connection: WorkerConnection) -> None:
    connection.close()


def _nothing(_: object) -> None:
    pass


def _undo(task: asyncio.Task[T], undo: Callable[[T], object]) -> None:
    if not task.cancelled() and task.exception() is None:
        undo(task.result())
