"""The data plane: a turn's life, from the request's first byte to the last of the answer.

`Turn.run` reads top to bottom. It is a coroutine that is run in place (`app/http/inplace.py`): by the client's
connection until it waits for the worker's head, and by the worker's connection from there, which pushes the body into
the turn's `Answer`. The client's leaving cuts the attempt; nothing of the turn's own code is cancelled, so that slots,
connections and claims are released by plain `finally`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.errors import ClientDisconnected, TurnError, error_response
from app.fleet.placement.foresight import Foreseen
from app.http.exchange import Exchange
from app.http.headers import Header, let_events_through, response_headers
from app.http.worker import AttemptFailed, AttemptTimeout, ConnectionBroken, WorkerConnection
from app.logs import event, shown
from app.metrics import AFFINITY_OUTCOMES, TurnOutcome
from app.turn.access import Told
from app.turn.answer import Answer
from app.turn.course import Course
from app.turn.presence import Presence
from app.turn.request import Request
from app.turn.retry import Attempt, Next, Sent, after, after_busy, blame, connect, error_of, is_gone, judge
from app.turn.shared import Shared
from app.turn.slots import Slots
from app.turn.tracing import TurnTrace

log = logging.getLogger("coatcheck.turn")

_encode_json = msgspec.json.Encoder().encode
_NOBODY: frozenset[str] = frozenset()
_UNPLACED = frozenset(
    {"no_worker", "store_unavailable", "overloaded", "worker_unreachable", "worker_full", "fleet_full"}
)
"""Errors of turns that no worker was given."""
_MEASURED_OF = 16
_AFTER_THE_LAST = 1.0
"""Seconds that are waited, at least, for what should follow an answer's last event."""
_HOW = {how: how.encode() for how in AFFINITY_OUTCOMES}
_OWN_LINES = b"\r\nx-coatcheck-affinity: %b\r\nx-request-id: %b%b%b"


class Turns:
    """The turns that are running."""

    def __init__(self, shared: Shared, phased: type[Turn] | None = None) -> None:
        """`phased`: those of a fleet with phases."""
        self._phased = phased
        self._running: set[Turn] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._opened = 0
        self.share(shared)

    def share(self, shared: Shared) -> None:
        """What turns that begin from now on share; those that run keep what they have."""
        self.shared = shared
        kind = Turn if self._phased is None or shared.phases is None else self._phased
        self._make = functools.partial(kind, shared, self._running)
        limits = shared.limits
        bounds = [limit for limit in (limits.first_byte, limits.idle, limits.total) if limit]
        self._sweep_every = min(1.0, max(0.01, min(bounds) / 8)) if bounds else 1.0

    @property
    def count(self) -> int:
        """Running now."""
        return len(self._running)

    def tenants(self) -> Counter[bytes]:
        """Turns running now, by whose they are."""
        return Counter(turn.tenant for turn in self._running)

    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn:
        """Begin a turn. `over` is called when it has ended, with the fault that ended it if the server must cut the
        connection for it."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()  # asked once: it is a system call (getpid)

        turn = self._make(loop, exchange, over)
        self._opened += 1
        if not self._opened % _MEASURED_OF:
            turn.measure()
        self._running.add(turn)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._sweep_every, self._sweep, loop)
        return turn

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the limits of every running turn. One timer for all: most turns end long before any limit."""
        now = loop.time()
        for turn in tuple(self._running):
            turn.check_limits(now)
        self._sweeper = loop.call_later(self._sweep_every, self._sweep, loop) if self._running else None


class Turn(Course):
    """One request. Told of the client by its connection; the worker's connection pushes into its answer.

    Long on purpose: every step of a request stands here once, in its order, but for where it goes (`Course`).
    What a step knows is in the object that it asks (`Request`, `Routing`, `Attempt`, `Answer`, `Binding`, `Kept`).
    """

    _new_request = Request
    # Defaults in the class: these are set before they are looked at, or seldom looked at.
    _attempt: Attempt | None = None
    _answer: Answer | None = None
    """None: nothing has been answered yet."""
    _status = 0
    """What the worker answered; 0: nothing."""
    _killed = False
    """A worker has died of it."""
    _again = 0
    """How often an attempt followed another one."""
    _refusal: TurnError | None = None
    """Why it was answered with an error of ours."""
    _left_at = 0.0
    """When the client left that had its answer, of which only the worker's end had not come. 0: it did not."""

    def __init__(
        self,
        shared: Shared,
        running: set[Turn],
        loop: asyncio.AbstractEventLoop,
        exchange: Exchange,
        over: Callable[[Exception | None], None],
    ) -> None:
        self._coroutine = self._wake = None
        self._shared, self._running, self._loop = shared, running, loop
        self._exchange, self._over = exchange, over
        self._began = loop.time()
        self._presence = Presence(loop)
        self._request = self._new_request(shared.reading, exchange)
        self._outcome: TurnOutcome = "completed"
        self._among = self._hint = self._slots = None
        self._read_at = 0.0
        self._trace = None if shared.tracing is None else shared.tracing.begin(exchange)

    def measure(self) -> None:
        """Note what the router itself needs for it."""
        self._read_at = -1.0

    @property
    def tenant(self) -> bytes:
        return self._request.tenant

    # -- the turn, top to bottom

    async def run(self) -> None:
        request = self._request
        try:
            request.read_head()
            try:
                if not self._exchange.switches:  # else what follows is not HTTP
                    rest = request.read_body()
                    if rest is not None:
                        await rest
            finally:
                # Also when it raises: a final turn that is refused or left ends its session all the same.
                if not request.dry_run:
                    self._binding = self._shared.routing.session(request)
            self._heed()
            if request.dry_run:
                await self._explain()
            else:
                if self._trace is not None:
                    self._trace.binds()
                if not self._goes_on():
                    await self._route()
                await self._try_until_answered()
        except TurnError as error:
            await self._refuse(error)
        except ClientDisconnected:
            self._outcome = "aborted"
            if self._binding is not None and request.identity.final:
                await self._presence.in_any_case(self._binding.left())
        except asyncio.CancelledError:  # the router's time to drain is over
            if not self._exchange.response_complete:
                self._outcome = "broken"
                self._shared.metrics.turns_cut += 1
            raise
        except Exception:  # a fault of ours: the operator sees it in the log, the client a proper error
            self._outcome = "failed"
            name = request.id.decode("latin-1")
            log.exception("turn %s failed", name, extra=event("fault", request=name))
            if self._answer is not None:
                raise  # the server cuts the connection
            await self._refuse(TurnError("internal_error", "the router failed; its log has the reason"))
        finally:
            self._account()

    def _heed(self) -> None:
        """What the client would like. Raises TurnError, ClientDisconnected."""
        request, shared = self._request, self._shared
        if request.identity.final_unclear:
            shared.metrics.final_unclear.inc()
        for why in request.identity.ignored:
            shared.metrics.ids_ignored.inc(why)
        if request.may_hint:
            self._hint = shared.routing.hint(request, self._exchange)
        self._kept = shared.routing.kept(request, self._exchange)
        if shared.capacity is not None:
            self._slots = Slots(shared.capacity, shared.bounds, request.tenant, self._presence, self._began)
        if self._presence.gone:
            raise ClientDisconnected
        if self._read_at:
            self._read_at = time.perf_counter()

    async def _try_until_answered(self) -> None:
        """Attempts, as the law of trying again allows (`retry.after`), until one is answered and relayed."""
        request, metrics, slots = self._request, self._shared.metrics, self._slots
        trace = self._trace
        once = fresh = request.once
        busy = False
        lost = _NOBODY
        while True:
            assert self._decision is not None
            slot = None
            if slots is not None:
                while not slots.ready(self._decision.target):
                    await self._wait_for_slot(slots, self._decision, lost)
                slot = slots.hand_over()
            target = self._decision.target
            worker = target.worker
            self._attempt = attempt = Attempt(target, self._loop, slot)
            try:
                if trace is not None:
                    request.trace_line = b"%b: %b\r\n" % trace.attempts(target)
                connection = None if fresh else worker.pool.take()
                if connection is None:
                    connection = await connect(worker, self._presence, metrics)
                attempt.connection = connection
                head = request.send(connection, target)
                if request.more:
                    attempt.send_rest(request)
                if self._read_at:
                    metrics.overhead.observe(time.perf_counter() - self._read_at)
                    self._read_at = 0.0
                await head
            except AttemptFailed as error:
                self._presence.raise_if_gone()
                if attempt.upload_fault is not None:
                    raise attempt.upload_fault from error
                failure = error
                blame(worker.health, error)
                if trace is not None:
                    trace.failed(error)
                then = after(failure, Sent(once=once, first_byte=attempt.came, killed=self._killed, free=self._free))
                if then is Next.ELSEWHERE_IF_GONE and not await is_gone(worker, self._presence, metrics):
                    then = Next.FAIL
            else:
                self._status = status = connection.response.status
                if trace is not None:
                    trace.answered(status)
                judge(worker.health, status)
                if status == 404 and self._asks_on(lost | {worker.name}):
                    self._again += 1
                    self._status = 0
                    lost |= {worker.name}
                    continue
                if status == 503 and after_busy(Sent(once=once or busy, free=self._free)) is Next.ELSEWHERE_IF_ANY:
                    busy = True
                    if await self._is_taken_elsewhere(lost | {worker.name}):
                        self._again += 1
                        self._status = 0
                        metrics.retries.inc(Next.ELSEWHERE_IF_ANY.value)
                        lost |= {worker.name}
                        continue
                rest = self._relay(connection)
                if rest is not None:
                    await rest
                break
            finally:
                attempt.end()
            self._attempt = None
            if then is Next.FAIL:
                raise error_of(failure, killed=self._killed) from failure
            metrics.retries.inc(then.value)
            fresh = once or then is Next.AGAIN
            if then is not Next.AGAIN:
                self._killed = self._killed or then is Next.ELSEWHERE_IF_GONE
                lost |= {worker.name}
                await self._move(lost, failure)
            self._again += 1
        self._attempt = None
        if self._answer is not None and self._answer.failure is not None:
            await self._break_off(self._answer, self._answer.failure)

    def _relay(self, connection: WorkerConnection) -> Coroutine[Any, Any, None] | None:
        """The worker's answer, as it comes. Returns what is to be awaited, where not all of it has gone by already.
        Raises TurnError."""
        attempt = self._attempt
        assert attempt is not None
        response, binding = connection.response, self._binding
        status = response.status
        if status >= 400:
            if status > 599:
                raise TurnError("worker_bad_response", f"the worker answered with status {status}")
            self._outcome = "worker_error" if status >= 500 else "client_error"
        if binding is not None:
            binding.answered(status)
        headers = response_headers(response.headers, status, attempt.target.worker.origin)
        if response.open_ended:
            let_events_through(headers)
        self._answer = answer = Answer(self._exchange, self._presence, self._began)
        self._exchange.start(status, headers, self._own_lines())
        if status == 101:
            attempt.send_rest(self._request)
        keeper = None
        if self._kept is not None:
            self._kept.answered(status)
            keeper = self._kept.keeper(status, headers, attempt.target)
        return None if answer.relay(connection, binding, keeper) else self._until_ended(answer, attempt)

    async def _until_ended(self, answer: Answer, attempt: Attempt) -> None:
        await answer.ended()
        fault = attempt.upload_fault
        if fault is not None and answer.failure is not None and not isinstance(fault, TurnError):
            raise fault

    async def _break_off(self, answer: Answer, failure: AttemptFailed) -> None:
        """The worker's answer will not be completed."""
        self._presence.raise_if_gone()
        if self._binding is not None and self._binding.holds_end:
            await self._presence.in_any_case(self._binding.close())
        if self._left_at or answer.over:
            answer.end()
        else:
            self._outcome = "broken"
            if self._trace is not None:
                self._trace.failed(failure)
            if self._decision is not None and not isinstance(failure, AttemptTimeout):  # which may be long, or ours
                self._decision.target.worker.health.failed("an answer that broke off")
            answer.say_broken(failure, self._request.id)

    async def _refuse(self, error: TurnError) -> None:
        """Answer with an error of our own, before any response was started."""
        status, headers, body = error_response(error, self._exchange.raw_path, self._request.id)
        self._refusal = error
        if self._outcome != "failed":
            self._outcome = "rejected" if status < 500 else "unplaced" if error.code in _UNPLACED else "worker_error"
        if self._binding is not None and self._request.identity.final:
            await self._presence.in_any_case(self._binding.refused(status))
        self._say(status, headers, body, self._own_lines())

    async def _explain(self) -> None:
        """Answer where the turn would go, and why, without anything done."""
        body = _encode_json(await self._explained())
        self._outcome = "explained"
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self._say(200, headers, body, b"\r\nx-request-id: %b%b" % (self._request.id, self._shared.own_lines))

    async def _explained(self) -> dict[str, Any]:
        kept = None if self._kept is None else self._kept.named
        return await self._presence.unless_gone(self._shared.routing.explain(self._request, self._hint, kept))

    def _account(self) -> None:
        """Count it, and give the session back, whatever happened."""
        if self._binding is not None:
            self._binding.release()
        if self._kept is not None:
            self._kept.release()
        if self._slots is not None:
            self._slots.give_back()
        if self._presence.gone:
            self._outcome = "aborted"
        shared, decision, answer, outcome = self._shared, self._decision, self._answer, self._outcome
        metrics, seconds = shared.metrics, self._loop.time() - self._began
        cells = ttft = None
        if decision is not None:
            cells = decision.target.worker.cells
            if answer is not None and answer.came and outcome == "completed":
                ttft = answer.ttft
                cells.usage_unread += 1
                if metrics.usages_left:
                    metrics.usages_left -= 1
                    cells.read_usage(answer.usage)
                pieces = self._exchange.pieces
                if pieces > 1:
                    cells.gaps.observe((seconds - ttft) / (pieces - 1))
        metrics.ended(self._request.fields.model, outcome, seconds, cells, self._status, ttft)
        self._running.discard(self)
        if self._trace is not None:
            self._end(self._trace)
        access = shared.access
        if access is not None and (outcome != "completed" or access.every) and access.wants(outcome):
            access.told(self._told())

    def _end(self, trace: TurnTrace) -> None:
        request, decision, answer = self._request, self._decision, self._answer
        trace.end(
            self._outcome,
            http__response__status_code=self._exchange.status or None,
            coatcheck__request_id=request.id.decode("latin-1"),
            coatcheck__session=None if self._binding is None else shown(self._binding.key),
            coatcheck__worker=None if decision is None else decision.target.worker.name,
            coatcheck__affinity=None if decision is None else decision.how,
            coatcheck__first_byte_seconds=answer.ttft if answer is not None and answer.came else None,
            gen_ai__request__model=request.fields.model or None,
        )

    def _told(self) -> Told:
        """For the access log."""
        request, exchange, decision, answer = self._request, self._exchange, self._decision, self._answer
        status, why = exchange.status or (499 if self._outcome == "aborted" else 500), ""
        if self._refusal is not None:
            why = f"{self._refusal.code}: {self._refusal}"
        elif self._outcome == "broken":
            failure = None if answer is None else answer.failure
            why = "cut when the router stopped" if failure is None else str(failure)
        elif self._outcome == "aborted":
            why = "the client left"
        return Told(
            method=exchange.method.decode("latin-1"),
            path=exchange.raw_path.decode("latin-1"),
            status=status,
            outcome=self._outcome,
            why=why,
            request=request.id.decode("latin-1"),
            tenant=request.tenant.decode(),
            session="" if self._binding is None else shown(self._binding.key),
            worker="" if decision is None else decision.target.worker.name,
            rank=None if decision is None else decision.target.rank,
            affinity="" if decision is None else decision.how,
            attempts=0 if decision is None else 1 + self._again,
            first_byte_ms=round(1000 * answer.ttft, 1) if answer is not None and answer.came else None,
            ms=round(1000 * (self._loop.time() - self._began), 1),
        )

    # -- steps of it

    def _settles(self, prompt: Foreseen) -> None:
        self._over = functools.partial(self._settle, prompt, self._over)

    def _settle(self, prompt: Foreseen, over: Callable[[Exception | None], None], fault: Exception | None) -> None:
        """It has ended: was it as foreseen?"""
        self._over = over  # which kept the turn, and its body, in a circle
        answer, decision, metrics = self._answer, self._decision, self._shared.metrics
        if self._outcome == "completed" and answer is not None and decision is not None and metrics.usages_left:
            prompt.settle(decision.target, answer.usage)
        over(fault)

    def _say(self, status: int, headers: list[Header], body: bytes, lines: bytes) -> None:
        self._answer = Answer(self._exchange, self._presence, self._began)
        self._answer.say(status, headers, body, lines)

    def _own_lines(self) -> bytes:
        """Our own headers, as `Exchange.start` takes them."""
        decision, shared = self._decision, self._shared
        if decision is None:
            return _OWN_LINES % (b"none", self._request.id, shared.own_lines, b"")
        return _OWN_LINES % (_HOW[decision.how], self._request.id, shared.own_lines, decision.target.lines)

    def check_limits(self, now: float) -> None:
        """Cut the attempt when the worker has been silent, or the turn has lasted, longer than is allowed."""
        limits, answer = self._shared.limits, self._answer
        connection = self._attempt.connection if self._attempt is not None else None
        if connection is None:
            return  # connecting and binding have limits of their own
        if limits.total and now - self._began > limits.total:
            connection.fail(AttemptTimeout(f"the turn took longer than {limits.total:g} s"))
        elif self._left_at and now - self._left_at > _AFTER_THE_LAST:
            connection.fail(AttemptTimeout("the worker did not end its answer behind the last event"))
        # While the client is the slow one, the worker is not being read, or has no request, and cannot be blamed.
        elif (answer is None or answer.waits_for_worker) and not connection.uploading:
            began = answer is not None and answer.came
            limit = limits.idle if began else limits.first_byte
            silent = connection.quiet_for(now)
            if limit and silent > limit:
                what = "sent nothing for" if began else "did not begin to answer within"
                connection.fail(AttemptTimeout(f"the worker {what} {limit:g} s"))
            elif began and silent > _AFTER_THE_LAST and answer is not None and answer.over:
                connection.fail(AttemptTimeout("the worker did not end its answer behind the last event"))

    # -- called from the client's connection

    def start(self) -> None:
        """Run up to where it waits for the first time."""
        self._run(self.run())

    # `cancel` stops it wherever it is, as when the router's time to drain is over.

    def client_left(self) -> None:
        answer = self._answer
        if self._attempt is not None and answer is not None and not answer.stalled and answer.over:
            self._left_at = self._loop.time()  # it has its answer; the rest is read for the worker's connection
            return
        self._presence.left()
        if self._attempt is not None and self._attempt.connection is not None:
            self._attempt.connection.fail(ConnectionBroken("the client left"))
        if self._answer is not None:
            self._answer.client_left()

    def client_took(self) -> None:
        """The client has taken what was written."""
        if self._answer is not None:
            self._answer.client_took()

    # -- its end

    def _returned(self, result: None) -> None:
        self._over(None)

    def _failed(self, fault: Exception) -> None:
        self._over(fault)
