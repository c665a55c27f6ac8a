"""The data plane: a turn's life, from the request's first byte to the last of the answer.

`Turn.run` reads top to bottom. It is a coroutine that is run in place (`app/http/inplace.py`): by the client's
connection until it waits for the worker's head, and by the worker's connection from there, which pushes the body into
the turn's `Answer`. The client's leaving cuts the attempt; nothing of the turn's own code is cancelled, so that slots,
connections and claims are released by plain `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.errors import ClientDisconnected, TurnError, error_response
from app.fleet.capacity import Bounds, Capacity, Choice, Full
from app.fleet.health import Health
from app.fleet.loads import Place
from app.fleet.placement.foresight import Foreseen
from app.fleet.workers import Fleet, Target
from app.http.exchange import Exchange
from app.http.headers import Header, let_events_through, response_headers
from app.http.inplace import Driven
from app.http.worker import AttemptFailed, AttemptTimeout, ConnectionBroken, WorkerConnection
from app.logs import event, shown
from app.metrics import AFFINITY_OUTCOMES, Metrics, TurnOutcome
from app.sessions.placing import Placement
from app.sessions.spread import Hold
from app.turn.access import AccessLog, Told
from app.turn.answer import Answer
from app.turn.kept import Kept
from app.turn.prefills import Phases
from app.turn.presence import Presence
from app.turn.request import Reading, Request
from app.turn.retry import Attempt, Next, Sent, after, after_busy, blame, connect, error_of, is_gone, judge
from app.turn.routing import Decision, Hint, Routing
from app.turn.slots import Slots
from app.turn.tracing import Tracing, TurnTrace

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
_AFFINITY_HEADERS = {how: (b"x-coatcheck-affinity", how.encode()) for how in AFFINITY_OUTCOMES}


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one turn, in seconds (0: none)."""

    first_byte: float = 600.0
    idle: float = 300.0
    total: float = 0.0


class Shared(msgspec.Struct, frozen=True):
    """What all turns of a router share."""

    fleet: Fleet
    reading: Reading
    routing: Routing
    metrics: Metrics
    limits: Limits
    capacity: Capacity | None = None
    """None: as many turns as come, anywhere."""
    bounds: Bounds = Bounds()
    """Of waiting for a slot."""
    tracing: Tracing | None = None
    """None: there are no spans."""
    access: AccessLog | None = None
    """None: the log has no line of any turn."""
    own_headers: tuple[Header, ...] = ()
    """Said in every answer: which replica this is."""
    phases: Phases | None = None
    """None: every worker takes whole turns."""


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


class Turn:
    """One request. Told of the client by its connection; the worker's connection pushes into its answer.

    Long on purpose: every step of a request stands here once, in its order. What a step knows is in the object that it
    asks (`Request`, `Routing`, `Attempt`, `Answer`, `Binding`, `Kept`).
    """

    _driven: Driven | None = None
    """While it runs."""
    _binding: Hold | None = None
    _among: frozenset[str] | None = None
    """The names of the workers that serve its model; None: all do, or it names none."""
    _hint: Hint | None = None
    _kept: Kept | None = None
    _slots: Slots | None = None
    """None: nothing is limited."""
    _decision: Decision | None = None
    _attempt: Attempt | None = None
    _answer: Answer | None = None
    """None: nothing has been answered yet."""
    _outcome: TurnOutcome = "completed"
    _status = 0
    """What the worker answered; 0: nothing."""
    _trace: TurnTrace | None = None
    """None: nobody wants one."""
    _measured = False
    """Whether it is measured what the router itself needs; when its request had come (0: not, or no more)."""
    _read_at = 0.0
    _prompt: Foreseen | None = None
    """By which it was placed; None: it was bound, or placed otherwise."""
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
        self._shared, self._running, self._loop = shared, running, loop
        self._exchange, self._over = exchange, over
        self._began = loop.time()
        self._presence = Presence(loop)
        self._request = Request(shared.reading, exchange)
        if shared.tracing is not None:
            self._trace = shared.tracing.begin(exchange)

    def measure(self) -> None:
        """Note what the router itself needs for it."""
        self._measured = True

    @property
    def tenant(self) -> bytes:
        return self._request.tenant

    # -- the turn, top to bottom

    async def run(self) -> None:
        try:
            await self._read()
            if self._request.dry_run:
                await self._explain()
            else:
                if self._trace is not None:
                    self._trace.binds()
                await self._route()
                await self._try_until_answered()
        except TurnError as error:
            await self._refuse(error)
        except ClientDisconnected:
            self._outcome = "aborted"
            if self._binding is not None and self._request.identity.final:
                await self._presence.in_any_case(self._binding.left())
        except asyncio.CancelledError:  # the router's time to drain is over
            if not self._exchange.response_complete:
                self._outcome = "broken"
                self._shared.metrics.turns_cut += 1
            raise
        except Exception:  # a fault of ours: the operator sees it in the log, the client a proper error
            self._outcome = "failed"
            name = self._request.id.decode("latin-1")
            log.exception("turn %s failed", name, extra=event("fault", request=name))
            if self._answer is not None:
                raise  # the server cuts the connection
            await self._refuse(TurnError("internal_error", "the router failed; its log has the reason"))
        finally:
            self._account()

    async def _read(self) -> None:
        """Who asks, which session, and what the client would like."""
        request, shared = self._request, self._shared
        try:
            request.read_head()
            if not self._exchange.switches:  # else what follows is not HTTP
                await request.read_body()
        finally:
            # Also when it raises: a final turn that is refused or left ends its session all the same.
            if not request.dry_run:
                self._binding = shared.routing.session(request)
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
        if self._measured:
            self._read_at = time.perf_counter()

    async def _route(self) -> None:
        """Decide the target: where what it names is kept, else the session's claim, else the client's hint, else the
        policy's choice."""
        routing, binding, kept = self._shared.routing, self._binding, self._kept
        model = self._request.fields.model
        if model and (among := routing.serving(model)) is not None:
            await self._narrow(among)
        maker: Target | None = None
        if kept is not None:
            await kept.find(self._presence)
            maker = kept.target
        if binding is not None:
            if not binding.bind_cached():
                await self._bind(binding.bind, routing.placement(self._request, self._hint, maker, self._among))
            if self._among is not None and maker is None and binding.target.worker.name not in self._among:
                binding = await self._go_beside(binding, self._among)
            worker = binding.target.worker
            if not worker.known or (worker.health.watchful and self._is_to_leave(binding, worker.health)):
                await self._leave(binding)
        if kept is not None and maker is not None:
            self._go(Decision(maker, kept.how_beside(binding), "kept"))
        elif binding is None:
            self._note_unnamed()
            prompt = routing.prompt(self._request) if self._hint is None else None
            if prompt is not None and prompt.waits:
                await self._presence.unless_gone(prompt.read())
            self._go(routing.without_session(self._request, self._hint, among=self._among))
        else:
            self._go(routing.of_session(binding.target, binding.how, "memory", self._hint, self._among))

    async def _try_until_answered(self) -> None:
        """Attempts, as the law of trying again allows (`retry.after`), until one is answered and relayed."""
        request, metrics, slots = self._request, self._shared.metrics, self._slots
        trace = self._trace
        once = fresh = request.once
        killed = busy = False
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
                then = after(failure, Sent(once=once, first_byte=attempt.came, killed=killed, free=self._free))
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
                await self._relay(connection)
                break
            finally:
                attempt.end()
            self._attempt = None
            if then is Next.FAIL:
                raise error_of(failure, killed=killed) from failure
            metrics.retries.inc(then.value)
            fresh = once or then is Next.AGAIN
            if then is not Next.AGAIN:
                killed = killed or then is Next.ELSEWHERE_IF_GONE
                lost |= {worker.name}
                await self._move(lost, failure)
            self._again += 1
        self._attempt = None
        if self._answer is not None and self._answer.failure is not None:
            await self._break_off(self._answer, self._answer.failure)

    async def _relay(self, connection: WorkerConnection) -> None:
        """The worker's answer, as it comes."""
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
        headers += self._own_headers()
        self._exchange.start(status, headers)
        if status == 101:
            attempt.send_rest(self._request)
        keeper = None
        if self._kept is not None:
            self._kept.answered(status)
            keeper = self._kept.keeper(status, headers, attempt.target)
        if not answer.relay(connection, binding, keeper):
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
        self._say(status, headers + self._own_headers(), body)

    async def _explain(self) -> None:
        """Answer where the turn would go, and why, without anything done."""
        body = _encode_json(await self._explained())
        self._outcome = "explained"
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self._say(200, [*headers, (b"x-request-id", self._request.id), *self._shared.own_headers], body)

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
        if access is not None and access.wants(outcome):
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

    async def _narrow(self, among: frozenset[str]) -> None:
        """Not every worker serves its model: these do, as far as is known. Raises TurnError when nobody does."""
        routing, request = self._shared.routing, self._request
        self._among = among or await self._presence.unless_gone(routing.learn(request))
        if self._among is not None:
            routing.check_hint(request, self._hint, self._among)

    async def _go_beside(self, session: Hold, among: frozenset[str]) -> Hold:
        """The session is at a worker that does not serve the turn's model: it has a claim beside its own for that.
        Raises TurnError."""
        routing, request = self._shared.routing, self._request
        beside = routing.beside(request)
        self._binding = spread = routing.spread(session, beside)
        if not beside.bind_cached():
            await self._bind(beside.bind, routing.placement(request, self._hint, among=among))
        worker = beside.target.worker.name
        if self._among is not None and worker not in self._among:  # it served the model once
            await self._rebind(spread, frozenset({worker}))
        return spread

    def _go(self, decision: Decision) -> None:
        self._decision = decision
        if self._trace is not None:
            self._trace.goes(decision.how)
        metrics = self._shared.metrics
        metrics.affinity.cells[decision.how,] += 1
        if decision.overrides:
            metrics.hints_overridden.inc()
        # The affinity notes where it places sessions, and the capacity where those go that waited.
        if decision.how in ("none", "bypassed") and not decision.target.full:
            self._shared.fleet.note_placed(decision.target)
            self._foresee(decision.target)

    def _foresee(self, target: Target) -> None:
        """It was free to choose, and goes there."""
        prompt = self._request.prompt
        if prompt is not None:
            prompt.placed(target)
            if self._prompt is None:
                self._prompt = prompt
                self._over = functools.partial(self._settle, prompt, self._over)

    def _settle(self, prompt: Foreseen, over: Callable[[Exception | None], None], fault: Exception | None) -> None:
        """It has ended: was it as foreseen?"""
        self._over = over  # which kept the turn, and its body, in a circle
        answer, decision, metrics = self._answer, self._decision, self._shared.metrics
        if self._outcome == "completed" and answer is not None and decision is not None and metrics.usages_left:
            prompt.settle(decision.target, answer.usage)
        over(fault)

    def _note_unnamed(self) -> None:
        """Count a turn without a session, and what might have named one."""
        request, metrics = self._request, self._shared.metrics
        reading = self._shared.reading
        metrics.turn_without_session(self._exchange.raw_path)
        if request.unread is not None and reading.identifier.reads_body:
            metrics.bodies_unread.inc(request.unread)
        for header in reading.identifier.unread.intersection(request.noted):
            name = header.decode()
            if (name,) not in metrics.headers_unread.cells:
                log.warning("%s names no session here: session-from does not list it (told once)", name)
            metrics.headers_unread.inc(name)

    def _asks_on(self, asked: frozenset[str]) -> bool:
        """The worker knows nothing of what the turn names. Whether another one is to be asked, which is not known to
        know nothing: then the turn goes there. Of a 404 nothing was done that could be done twice."""
        kept, request = self._kept, self._request
        if kept is None or not kept.asks or self._binding is not None or self._hint is not None or request.once:
            return False
        try:
            self._go(self._shared.routing.without_session(request, None, asked, self._among))
        except TurnError:
            return False
        return True

    @property
    def _free(self) -> bool:
        """It may be served anywhere: it has no session, or the claim is its own, and the client has named no worker."""
        if self._hint is not None or (self._kept is not None and self._kept.target is not None):
            return False
        return self._binding is None or self._binding.own

    async def _is_taken_elsewhere(self, busy: frozenset[str]) -> bool:
        """The workers in `busy` have answered 503. Whether there is another one: then the turn goes there."""
        fleet, among = self._shared.fleet, self._among
        if not fleet.has_other(busy, among) or all(target.full for target in fleet.candidates(busy, among)):
            return False
        try:
            await self._take(busy, waits=False)
        except TurnError:
            return False
        return True

    def _is_to_leave(self, binding: Hold, health: Health) -> bool:
        """Whether the session is to move off its worker, which is not up."""
        if health.evicting and not (binding.own and health.on_trial):
            return True
        # It fell ill while the claim was made, and has nothing of the session yet.
        return health.since > self._began and binding.own and self._free

    async def _leave(self, binding: Hold) -> None:
        """The session's worker is down, or gone: it moves, if there is a worker that is not."""
        lost = frozenset({binding.target.worker.name})
        if (self._kept is None or self._kept.target is None) and self._shared.fleet.has_other(lost, self._among):
            try:
                await self._rebind(binding, lost)
            except Full:
                raise
            except TurnError:
                pass  # it stays where it is, and is told what comes of it

    async def _rebind(self, binding: Hold, lost: frozenset[str], *, waits: bool = True) -> None:
        """Raises TurnError."""
        left = binding.target.worker
        placement = self._shared.routing.placement(self._request, self._hint, among=self._among)
        await self._bind(functools.partial(binding.rebind, lost), placement, lost, waits=waits)
        if binding.target.worker is not left:
            left.cells.moved_from += 1
            binding.target.worker.cells.moved_to += 1

    async def _take(self, lost: frozenset[str], *, waits: bool = True) -> None:
        """Decide on a target away from the workers in `lost`; `waits`: also when all are full, until one is not. Raises
        TurnError."""
        routing, binding = self._shared.routing, self._binding
        if binding is None:
            self._go(routing.without_session(self._request, self._hint, lost, self._among))
        elif binding.target.worker.name not in lost:  # it was passed over for the one that is lost
            self._go(Decision(binding.target, "cached", "memory"))
        else:
            await self._rebind(binding, lost, waits=waits)
            self._go(Decision(binding.target, binding.how, "memory"))

    async def _move(self, lost: frozenset[str], failure: AttemptFailed) -> None:
        """Find another target after every worker in `lost` could not be reached."""
        kept = self._kept
        if kept is not None and kept.target is not None:
            raise kept.lost(failure)
        try:
            await self._take(lost)
        except Full:
            raise
        except TurnError as none_left:
            raise TurnError("worker_unreachable", f"no worker can be reached ({failure})") from none_left

    async def _wait_for_slot(self, slots: Slots, decision: Decision, lost: frozenset[str]) -> None:
        """Until there is one where it is to go; or, where it is free to choose, anywhere: then it goes there.
        Raises TurnError or ClientDisconnected."""
        binding, kept = self._binding, self._kept
        at_maker = kept is not None and kept.target is not None
        self._decision = None  # no worker is given it while it waits
        self._read_at = 0.0
        if binding is None and self._hint is None and not at_maker:
            target = await self._wait_anywhere(slots, lost)
            self._decision = Decision(target, decision.how, decision.because)
            self._foresee(target)
            return
        moves = binding is not None and decision.target is binding.target and not at_maker
        if await slots.wait(decision.target, self._choice(lost), stays=not moves) is None and binding is not None:
            await self._leave(binding)
            if binding.target is not decision.target:
                self._go(Decision(binding.target, binding.how, "memory"))
                return
        self._decision = decision

    async def _bind(
        self,
        work: Callable[[Placement], Coroutine[Any, Any, None]],
        placement: Placement,
        lost: frozenset[str] = frozenset(),
        *,
        waits: bool = True,
    ) -> None:
        """Be bound by what `work` makes of the placement: where the policy would choose and nobody has room, at the
        first that has, with its slot held. `waits`: else it raises Full. Raises TurnError or ClientDisconnected."""
        slots = self._slots
        if slots is None or not waits or placement.candidates or placement.refusal or slots.allowed:
            try:
                await self._claim(work, placement, None)
                self._foresee_claimed()
                return
            except Full:
                if slots is None or not waits:
                    raise
        while True:
            target = await self._wait_anywhere(slots, lost)
            with contextlib.suppress(Full):  # its worker left just then
                await self._claim(work, msgspec.structs.replace(placement, among=self._among), target)
                self._foresee_claimed()
                return

    def _foresee_claimed(self) -> None:
        binding = self._binding
        if binding is not None and binding.how != "stored":  # else it was not free
            self._foresee(binding.target)

    async def _wait_anywhere(self, slots: Slots, lost: frozenset[str]) -> Target:
        """Where a slot is held now. Raises TurnError or ClientDisconnected."""
        self._read_at = 0.0
        target = await slots.wait(None, self._choice(lost))
        assert target is not None
        model = self._request.fields.model
        serving = self._shared.routing.serving(model) if model else None
        if serving is None or serving:  # as it is now: that worker may have come since
            self._among = serving
        return target

    def _choice(self, lost: frozenset[str]) -> Choice:
        return Choice(lost, self._request.fields.model or None, self._among)

    async def _claim(
        self, work: Callable[[Placement], Coroutine[Any, Any, None]], placement: Placement, slot: Target | None
    ) -> None:
        """Be bound by what `work` claims. A final turn does not give up when its client leaves: a claim that nobody
        waited for would be closed by nobody. `slot`: where one is held."""
        place = Place(slot, clock=self._loop.time)
        claims = work(msgspec.structs.replace(placement, slot=slot, place=place))
        try:
            if self._request.identity.final:
                await self._presence.in_any_case(claims)
                self._presence.raise_if_gone()
            else:
                await self._presence.unless_gone(claims)
        finally:
            place.end()  # from here on the turn goes on to its attempt, or to another choice, without a wait

    def _say(self, status: int, headers: list[Header], body: bytes) -> None:
        self._answer = Answer(self._exchange, self._presence, self._began)
        self._answer.say(status, headers, body)

    def _own_headers(self) -> list[Header]:
        decision, named = self._decision, (b"x-request-id", self._request.id)
        if decision is None:
            return [_AFFINITY_HEADERS["none"], named, *self._shared.own_headers]
        return [_AFFINITY_HEADERS[decision.how], named, *self._shared.own_headers, *decision.target.headers]

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
        self._driven = driven = Driven(self._returned, self._failed)
        driven.start(self.run())

    def cancel(self) -> None:
        """Stop wherever it is, as when the router's time to drain is over."""
        if self._driven is not None:
            self._driven.cancel()

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

    def _returned(self, _: object) -> None:
        self._driven = None  # it holds us: left alone, both would be garbage for the collector
        self._over(None)

    def _failed(self, fault: Exception) -> None:
        self._driven = None
        self._over(fault)
