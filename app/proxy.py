"""The data plane: a turn's life, from the request's first byte to the last of the answer, as raw ASGI.

`Turn.run` reads top to bottom. Response bytes are pushed: the worker's connection calls `on_data`, which drives the
server's `send` coroutine in place. Only when `send` really suspends (the client's buffer is full) is the worker's
connection paused, and the rest sent when the client has caught up. No future and no task switch per piece.

The client's leaving is seen by driving one `receive()` per turn in the same way. It cuts the attempt; nothing of the
turn's own code is cancelled, so that slots, connections and claims are released by plain `finally`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import msgspec

from app import sse
from app.affinity import Affinity, Entry
from app.errors import ClientDisconnected, TurnError, error_body, error_response
from app.headers import Header, Noted, header, response_headers, sort_request
from app.identity import HEADERS as IDENTITY_HEADERS
from app.identity import Identity, KeyHasher, identify
from app.metrics import AFFINITY_OUTCOMES, Metrics
from app.policies import Policy
from app.upstream import (
    AttemptFailed,
    AttemptTimeout,
    BadResponse,
    ConnectFailed,
    ConnectionBroken,
    LocalLimit,
    StaleConnection,
    WorkerConnection,
)
from app.workers import Fleet, Target, Worker

log = logging.getLogger("coatcheck.proxy")

ON_DISCONNECT = "coatcheck.on_disconnect"
"""A function in the scope with which a server offers to call when the client leaves. Without it a `receive()` is kept
pending, as in any ASGI application."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
T = TypeVar("T")

_TENANT = b""
_WANTED = IDENTITY_HEADERS | {b"content-length", b"content-type", b"content-encoding", b"x-request-id"}
_EMPTY_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose requests say `content-length: 0` when they have no body (RFC 9110 8.6)."""
_KEPT_STATUSES = frozenset({408, 409, 425, 429})
"""With 5xx: the client will try the turn again, so a final turn that was answered so keeps its claim."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one turn: bytes, and seconds (0: none)."""

    body_bytes: int = 64 * 1024 * 1024
    first_byte: float = 600.0
    idle: float = 300.0
    total: float = 0.0


class _Fields(msgspec.Struct):
    """What routing needs of a request body; everything else is skipped, and the bytes travel as they came."""

    model: str | None = None
    stream: bool | None = None


_decode_fields = msgspec.json.Decoder(_Fields).decode
_NO_FIELDS = _Fields()


class Proxy:
    """The ASGI application of the proxied paths. One per router; holds what its turns share."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        affinity: Affinity,
        hasher: KeyHasher,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self.fleet, self.policy, self.affinity, self.hasher = fleet, policy, affinity, hasher
        self.metrics, self.limits = metrics, limits
        self.affinity_headers = {how: (b"x-coatcheck-affinity", how.encode()) for how in AFFINITY_OUTCOMES}
        self._running: set[Turn] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        bounds = [limit for limit in (limits.first_byte, limits.idle, limits.total) if limit]
        self._sweep_every = min(1.0, max(0.01, min(bounds) / 8)) if bounds else 0.0
        self._request_prefix = os.urandom(8).hex()
        self._request_count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()  # asked once: it is a system call (getpid)
        turn = Turn(self, loop, scope, receive, send)
        self._running.add(turn)
        if self._sweeper is None and self._sweep_every:
            self._sweeper = loop.call_later(self._sweep_every, self._sweep, loop)
        try:
            await turn.run()
        finally:
            self._running.discard(turn)

    @property
    def turns(self) -> int:
        """Running now."""
        return len(self._running)

    def next_request_id(self) -> bytes:
        return f"{self._request_prefix}-{next(self._request_count):x}".encode()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the limits of every running turn. One timer for all: most turns end long before any limit."""
        now = loop.time()
        for turn in tuple(self._running):
            turn.check_limits(now)
        self._sweeper = loop.call_later(self._sweep_every, self._sweep, loop) if self._running else None


class Turn:
    """One request. The sink of its worker's connection."""

    # Defaults in the class: most turns never set most of these.
    _request_id = b""
    _lines = b""
    _body = b""
    _framed = False
    _fields = _NO_FIELDS
    _final = False
    _entry: Entry | None = None
    _target: Target | None = None
    _how = "none"
    _slot: Worker | None = None
    _connection: WorkerConnection | None = None
    _client: _Driven | None = None
    _gone = False
    _pending: asyncio.Task[Any] | None = None
    _done: asyncio.Future[None] | None = None
    _failure: AttemptFailed | None = None
    _stalled: _Driven | None = None
    _backlog: list[bytes] | None = None
    _backlog_end = False
    _held: list[bytes] | None = None
    _held_end = False
    _marker: sse.DoneDetector | None = None
    _last = b""
    _ttft = False
    _outcome = "completed"

    def __init__(
        self, proxy: Proxy, loop: asyncio.AbstractEventLoop, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._proxy, self._scope, self._receive, self._send = proxy, scope, receive, send
        self.loop = loop
        self._started = self.loop.time()

    # -- the turn, top to bottom

    async def run(self) -> None:
        try:
            identity = await self._read()
            self._watch_client()
            await self._bind(identity)
            await self._attempt()
            await self._relay()
        except TurnError as error:
            await self._refuse(error)
        except ClientDisconnected:
            self._outcome = "aborted"
            if self._final and self._entry is not None:
                self._entry.closing = True
        except Exception:  # a fault of ours: the operator sees it in the log, the client a proper error
            self._outcome = "failed"
            log.exception("turn %s failed", self._request_id.decode("latin-1"))
            if self._done is not None:
                raise  # the answer has begun: the server cuts the connection
            await self._refuse(TurnError("internal_error", "the router failed; its log has the reason"))
        finally:
            self._account()

    async def _read(self) -> Identity:
        """The request body (whole, capped), the fields that routing needs, and the session's identity."""
        self._lines, noted = sort_request(self._scope["headers"], _WANTED)
        self._request_id = _given_request_id(noted) or self._proxy.next_request_id()
        cap = self._proxy.limits.body_bytes
        declared = noted.get(b"content-length")
        if declared is not None:
            self._framed = True
            if int(declared[0]) > cap:
                raise _too_large(cap)
        message = await self._receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body", False):
            pieces, size = [body], len(body)
            while message.get("more_body", False):
                message = await self._receive()
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > cap:
                    raise _too_large(cap)
            body = b"".join(pieces)
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if body:
            if len(body) > cap:
                raise _too_large(cap)
            self._body = body
            self._fields = _routing_fields(body, noted)
        return identify(noted)

    async def _bind(self, identity: Identity) -> None:
        """Decide the target: the session's claim, else a valid hint, else the policy's choice."""
        proxy = self._proxy
        hint = self._hinted(identity) if identity.hinted else None
        if identity.session is None:
            self._target = hint or self._place(frozenset())
        else:
            key = proxy.hasher.key(_TENANT, identity.session)
            self._final = identity.final
            entry = self._proxy.affinity.bind_cached(key)
            if entry is not None:
                self._bound((entry, "cached" if entry.claim is not None else "degraded"))
            else:
                await self._claimed(self._proxy.affinity.bind(key, hint), self._unbind)
            if hint is not None and hint is not self._target:
                proxy.metrics.hints_overridden.inc()
        proxy.metrics.affinity.cells[self._how,] += 1

    async def _attempt(self) -> None:
        """Send the request to the target until a response head is there. What surely did not run is tried again: on a
        fresh connection when a reused one was already closed, at another worker when this one cannot be reached."""
        proxy, scope = self._proxy, self._scope
        lost: frozenset[str] = frozenset()
        fresh = False
        while True:
            target = self._target
            assert target is not None
            worker = target.worker
            self._take_slot(worker)
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
                    await self._move(lost, error)
                    fresh = False
                    continue
                proxy.metrics.connects.inc(worker.name, "ok")
                worker.reached()
            self._connection = connection
            head = connection.send(self._head(worker, target.rank), self._body, head_only=scope["method"] == "HEAD")
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
        if entry is not None and self._final and status < 500 and status not in _KEPT_STATUSES:
            entry.closing = True
        headers = response_headers(connection.headers, status)
        headers += self._own_headers()
        self._done = self.loop.create_future()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        connection.relay(self)
        await self._done
        while self._held is not None:  # again when another turn had joined at `[DONE]` and left before the end
            await self._close_session()
            self._done = self.loop.create_future()
            held, self._held = self._held, None
            self._push(b"".join(held), self._held_end)
            if self._failure is not None and self._stalled is None:
                self._finish()
            await self._done
        if self._failure is not None:
            self._check_client()
            await self._break(self._failure)

    async def _refuse(self, error: TurnError) -> None:
        """Answer with an error of our own, before any response was started."""
        status, headers, body = error_response(error)
        if self._outcome != "failed":
            self._outcome = "rejected" if status < 500 else "unplaced" if self._connection is None else "worker_error"
        if self._entry is not None and self._final and status < 500:
            self._entry.closing = True
            await self._close_session()
        headers += self._own_headers()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if self._client is not None:
            self._client.close()
        await self._send({"type": "http.response.body", "body": body})

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
            code = "worker_stalled" if isinstance(failure, AttemptTimeout) else "worker_stream_broken"
            event = sse.error_event(error_body(TurnError(code, str(failure))), self._last)
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def _account(self) -> None:
        """Give everything back, whatever happened."""
        if self._slot is not None:
            self._slot.in_flight -= 1
        if self._entry is not None:
            self._proxy.affinity.release(self._entry)
        if self._connection is not None:
            self._connection.release()
        for driven in (self._client, self._stalled):  # last: they run the server's code
            if driven is not None:
                driven.close()
        if self._gone:
            self._outcome = "aborted"
        self._proxy.metrics.turn(self._fields.model, self._outcome)
        self._proxy.metrics.turn_seconds.observe(self.loop.time() - self._started)

    # -- steps of binding and attempting

    def _hinted(self, identity: Identity) -> Target:
        worker, rank = identity.worker_hint, identity.rank_hint
        if worker is None:
            name = "X-Dynamo-DP-Rank"
            raise TurnError("invalid_hint", f"{name} needs X-Dynamo-Worker-Instance-ID beside it", param=name)
        target = self._proxy.fleet.find(worker, rank)
        if target is None:
            name = "X-Dynamo-Worker-Instance-ID"
            raise TurnError("unknown_worker", f"{name} names no worker of this router", param=name)
        return target

    async def _move(self, lost: frozenset[str], error: ConnectFailed) -> None:
        """Find another target after every worker in `lost` could not be reached."""
        proxy = self._proxy
        proxy.metrics.retries.inc("worker_unreachable")
        try:
            if self._entry is None:
                self._target = self._place(lost)
                return
            await self._claimed(self._proxy.affinity.rebind(self._entry, lost), self._bound)
        except TurnError as none_left:
            raise TurnError("worker_unreachable", f"no worker can be reached ({error})") from none_left
        proxy.metrics.affinity.cells[self._how,] += 1

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
        if self._final:
            self._bound(await work)
            self._check_client()
        else:
            self._bound(await self._unless_gone(work, undo))

    def _unbind(self, bound: tuple[Entry, str]) -> None:
        self._proxy.affinity.release(bound[0])

    def _take_slot(self, worker: Worker) -> None:
        if self._slot is not worker:
            if self._slot is not None:
                self._slot.in_flight -= 1
            worker.in_flight += 1
            self._slot = worker

    def _head(self, worker: Worker, rank: int | None) -> bytes:
        scope = self._scope
        query = scope["query_string"]
        parts = [
            scope["method"].encode(),
            b" ",
            worker.base_path,
            scope["raw_path"],
            b"?" if query else b"",
            query,
            worker.host_line,
            self._lines,
            b"x-request-id: ",
            self._request_id,
        ]
        if rank is not None:
            parts.append(b"\r\nx-data-parallel-rank: %d" % rank)
        if self._body or self._framed or scope["method"] in _EMPTY_BODY_METHODS:
            parts.append(b"\r\ncontent-length: %d" % len(self._body))
        parts.append(b"\r\n\r\n")
        return b"".join(parts)

    def _own_headers(self) -> list[Header]:
        own = [self._proxy.affinity_headers[self._how], (b"x-request-id", self._request_id)]
        target = self._target
        if target is not None:
            own += target.headers
        return own

    # -- the client's leaving, and limits

    async def _unless_gone(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
        """Await, but not longer than the client waits. `undo` gives back a result that came too late."""
        if self._gone:
            work.close()
            raise ClientDisconnected
        self._pending = task = self.loop.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # we are being cancelled ourselves
            if task.done():
                _undo(task, undo)
            else:
                task.cancel()
                task.add_done_callback(lambda late: _undo(late, undo))
            raise
        finally:
            self._pending = None
        if self._gone:
            _undo(task, undo)
            raise ClientDisconnected
        return task.result()

    def _watch_client(self) -> None:
        on_disconnect = self._scope.get(ON_DISCONNECT)
        if on_disconnect is not None:
            on_disconnect(self._client_left)
        else:
            self._client = _Driven(self._received, self._receive_failed)
            self._client.start(self._receive())
        self._check_client()

    def _received(self, message: Message | None) -> None:
        if message is not None and message["type"] == "http.request":
            assert self._client is not None
            self._client.start(self._receive())
        else:
            self._client_left()

    def _client_left(self) -> None:
        self._gone = True
        if self._pending is not None:
            self._pending.cancel()
        if self._connection is not None:
            self._connection.fail(ConnectionBroken("the client left"))
        if self._done is not None and not self._done.done() and self._held is None:
            self._done.set_result(None)

    def _receive_failed(self, fault: Exception) -> None:
        log.error("turn %s cannot listen to its client", self._request_id.decode("latin-1"), exc_info=fault)
        self._received(None)

    def _check_client(self) -> None:
        if self._gone:
            raise ClientDisconnected

    def check_limits(self, now: float) -> None:
        """Cut the attempt when the worker has been silent, or the turn has lasted, longer than is allowed."""
        limits, connection = self._proxy.limits, self._connection
        if connection is None:
            return  # connecting and binding have limits of their own
        if limits.total and now - self._started > limits.total:
            connection.fail(AttemptTimeout(f"the turn took longer than {limits.total:g} s"))
        # While the client is the slow one, the worker is not being read and cannot be blamed.
        elif self._stalled is None and self._held is None:
            limit = limits.idle if self._ttft else limits.first_byte
            if limit and now - connection.last_read > limit:
                what = "sent nothing for" if self._ttft else "did not begin to answer within"
                connection.fail(AttemptTimeout(f"the worker {what} {limit:g} s"))

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

    def on_failure(self, failure: AttemptFailed) -> None:
        self._failure = failure
        if self._stalled is None:
            self._finish()

    def _hold(self, data: bytes, end: bool) -> bool:
        """Keep back the end of a session's last answer until its claim is closed; clients take either the end of
        the body or the `[DONE]` event for it."""
        if self._marker is None:
            self._marker = sse.DoneDetector()
        if not end and not self._marker.feed(data):
            return False
        self._held, self._held_end = [data], end
        if self._stalled is None:
            self._finish()
        return True

    def _push(self, data: bytes, end: bool) -> None:
        if self._stalled is not None:
            (self._backlog or self._new_backlog()).append(data)
            self._backlog_end = end
            return
        if not data and not end:
            return
        self._last = data
        if end and self._client is not None:
            self._client.close()  # the server answers a pending receive() with a disconnect when the response is done
        sending = self._send({"type": "http.response.body", "body": data, "more_body": not end})
        try:
            waits_for = sending.send(None)
        except StopIteration:
            if end:
                self._finish()
            return
        except Exception as fault:
            self._send_failed(fault)
            return
        assert self._connection is not None
        self._connection.pause()
        self._backlog_end = end
        self._stalled = _Driven(self._unstall, self._send_failed)
        self._stalled.adopt(sending, waits_for)

    def _unstall(self, _: Any) -> None:
        """The client has taken what was stuck."""
        self._stalled = None
        connection = self._connection
        assert connection is not None
        if self._backlog:
            backlog, self._backlog = self._backlog, None
            self._push(b"".join(backlog), self._backlog_end)
        if self._stalled is not None:
            return
        if self._backlog_end or self._failure is not None or self._held is not None:
            self._finish()
        else:
            connection.last_read = self.loop.time()  # the wait was not the worker's
            connection.resume()

    def _send_failed(self, fault: Exception) -> None:
        """The server's fault, or ours. Raised where the turn waits; in a connection's callback nobody would hear it."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(fault)

    def _new_backlog(self) -> list[bytes]:
        self._backlog = []
        return self._backlog

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def _close_session(self) -> None:
        entry = self._entry
        if entry is not None and entry.closing and entry.active == 1:
            await self._proxy.affinity.close(entry)


class _Driven:
    """A coroutine run step by step on the loop, without a task of its own; `returned` gets what it returns, or None
    when it was cancelled, `failed` what it raises. It must be one that only awaits futures, as ASGI servers' `send` and
    `receive` are."""

    __slots__ = ("_coroutine", "_failed", "_returned", "_waits_for")

    def __init__(self, returned: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        self._returned, self._failed = returned, failed
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._waits_for: Any = None

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._step(None)

    def adopt(self, coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        """Go on with a coroutine that has been started and waits for a future."""
        self._coroutine = coroutine
        self._wait(waits_for)

    def close(self) -> None:
        """Stop, wherever it is. Idempotent."""
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            if self._waits_for is not None:
                self._waits_for.remove_done_callback(self._step)
            coroutine.close()

    def _wait(self, waits_for: Any) -> None:
        self._waits_for = waits_for
        if waits_for is None:  # a bare yield, as of asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(self._step, None)
        else:
            waits_for._asyncio_future_blocking = False  # as a Task does with a future it is given
            waits_for.add_done_callback(self._step)

    def _step(self, _: Any) -> None:
        if self._coroutine is None:
            return
        try:
            waits_for = self._coroutine.send(None)
        except StopIteration as stop:
            self._coroutine = None
            self._returned(stop.value)
        except asyncio.CancelledError:
            self._coroutine = None
            self._returned(None)
        except Exception as fault:
            self._coroutine = None
            self._failed(fault)
        else:
            self._wait(waits_for)


def _routing_fields(body: bytes, noted: Noted) -> _Fields:
    """Raises TurnError `invalid_json` or `invalid_request`, for bodies that say they are JSON; others are the worker's
    business."""
    try:
        return _decode_fields(body)
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


def _too_large(cap: int) -> TurnError:
    return TurnError("request_too_large", f"the request body is larger than {cap} bytes")


def _discard(connection: WorkerConnection) -> None:
    connection.close()


def _undo(task: asyncio.Task[T], undo: Callable[[T], object]) -> None:
    if not task.cancelled() and task.exception() is None:
        undo(task.result())
