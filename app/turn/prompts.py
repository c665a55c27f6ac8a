"""A turn's way to its prompt, where that is computed by another worker than the one that decodes."""

from __future__ import annotations

import abc
import asyncio
import functools
import time
from collections.abc import Callable

from app.errors import TurnError
from app.fleet.capacity import Choice, Full, Slot
from app.fleet.specs import HANDOVERS, Handover
from app.fleet.workers import Target, Worker
from app.http.exchange import Exchange
from app.http.headers import Header, response_headers
from app.http.inplace import Wake
from app.http.worker import AttemptFailed, AttemptTimeout, ConnectionBroken, WorkerConnection
from app.sessions.affinity import Binding
from app.turn.fields import with_member
from app.turn.handovers import TRANSFER, Halves, NoHandover, Parts, handover_in, refuse_meeting, worded
from app.turn.meeting import Meeting, whole
from app.turn.prefills import Phases
from app.turn.releases import fetches
from app.turn.request import Request
from app.turn.retry import Attempt, Next, Sent, after, after_busy, blame, connect, error_of, is_gone, is_silent, judge
from app.turn.routing import Decision, Hint
from app.turn.shared import Shared
from app.turn.slots import Slots
from app.turn.turn import Turn

_NOBODY: frozenset[str] = frozenset()


class Relayed(Exception):
    """The client has its answer: the prefill worker's."""


class PrefillFailed(Exception):
    """The decode worker waits for a prompt that does not come."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__("the prompt was not computed")
        self.meeting = meeting


class SplitRequest(Request):
    """Knows whether it was sent."""

    sent_at = 0.0
    undelivered = False
    """It has a hand-over in it, and surely no worker has read that."""
    meeting: Meeting | None = None
    """Where it is to be met."""
    missed: Callable[[Meeting], None]
    """Told when it is sent and nobody comes there any more."""

    def send(self, connection: WorkerConnection, target: Target) -> Wake:
        """Raises TurnError."""
        worker = target.worker
        if self.meeting is None and worker.phase == "decode" and worker.handover == "sglang" and not self.more:
            try:
                refuse_meeting(self.body)
            except TurnError:
                connection.close()
                raise
        self.undelivered = False
        wake = super().send(connection, target)
        self.sent_at = time.monotonic()
        if self.meeting is not None and self.meeting.failed:
            self.missed(self.meeting)
        return wake


class PromptTurn(Turn):
    """What there is of the prompt in a turn in two phases; `PhasedTurn` has the steps of which it is a part.

    `_whole` is the client's body, which is sent to whoever takes the whole turn. `_handover` is what the body that is
    sent now has in it, of vLLM's kind; None when it has none. `_meeting` is where that body is met, of SGLang's kind.
    """

    _request: SplitRequest
    _parts: Parts | Halves | None = None
    """None: it is not split."""
    _speaks: Handover = HANDOVERS[0]
    """As whose engines the two hand over, as it was split."""
    _whole = b""
    _handover: bytes | None = None
    _meeting: Meeting | None = None
    _prefill: Decision | None = None
    """Where its prompt was computed, or is."""
    _prefill_hint: Hint | None = None
    _prefilling: Attempt | None = None
    """The one that the turn waits for."""
    _prefill_lost = _NOBODY
    """The names of workers that have died of the prompt."""
    _prefill_spared = _NOBODY
    """Of those that have failed at it, and live: it is taken to another one, if there is one; the claim stays."""
    _doubted: tuple[Worker, Worker, AttemptTimeout] | None = None
    """Who should have prefilled, and who decoded, when nothing came of it in time: the next meeting shows whose fault
    that was."""
    _fresh = False
    """The next connection to a prefill worker is a new one."""
    _first = False
    """The first byte of the decode worker's answer has come."""
    _relayed = False
    """The client was answered what the prefill worker did."""
    _queued_s = _prefill_s = _prefilled_at = 0.0

    def __init__(
        self,
        shared: Shared,
        running: set[Turn],
        loop: asyncio.AbstractEventLoop,
        exchange: Exchange,
        over: Callable[[Exception | None], None],
    ) -> None:
        super().__init__(shared, running, loop, exchange, over)
        assert shared.phases is not None
        self._phases: Phases = shared.phases
        self._request = SplitRequest(shared.reading, exchange)
        self._request.missed = self._soon_given_up

    @abc.abstractmethod
    async def _leave_silent(self) -> bool:
        """Whether the turn goes on at another decode worker, because its own is silent."""

    async def _compute_prompt(self) -> None:
        """Have it computed, and put into what the decode worker gets how that comes by it. Raises TurnError,
        ClientDisconnected."""
        self._let_go()
        self._handover, self._first = None, False
        self._read_at = 0.0
        parts, slots = self._parts, self._slots
        assert parts is not None
        if isinstance(parts, Halves):
            await self._meet(parts)
            return
        if slots is not None:
            slots.give_back()  # who waits for a slot to prefill holds none, or tenants would wait for themselves
        binding = self._phases.prefills.session(self._request)
        try:
            await self._prefill_until_answered(parts, binding)
        finally:
            if binding is not None:
                binding.release()

    async def _prefill_until_answered(self, parts: Parts, binding: Binding | None) -> None:
        """Attempts, as the law of trying again allows, until one prefill worker has answered."""
        metrics, presence = self._shared.metrics, self._presence
        lost = self._prefill_lost
        busy = again = False
        while True:
            presence.raise_if_gone()
            target = await self._decide(binding, lost)
            worker = target.worker
            slot = None if self._shared.capacity is None else await self._slot_at(target)
            self._prefilling = attempt = Attempt(target, self._loop, slot)
            free = self._prefill_hint is None and (binding is None or binding.own)
            try:
                connection = None if again else worker.pool.take()
                if connection is None:
                    connection = await connect(worker, presence, metrics)
                began = self._loop.time()
                trace = None if self._trace is None else self._trace.attempts(target, "prefill")
                await self._send(parts.prompt, attempt, connection, trace)
                answer = await whole(connection)
            except AttemptFailed as error:
                presence.raise_if_gone()
                blame(worker.health, error)
                if self._trace is not None:
                    self._trace.failed(error)
                then = after(error, Sent(first_byte=attempt.came, killed=self._killed, free=free))
                if then is Next.ELSEWHERE_IF_GONE and not await is_gone(worker, presence, metrics):
                    then = Next.FAIL
                if then is Next.FAIL and self._is_spared(worker, error):
                    then = Next.ANEW
                if then is Next.FAIL:
                    raise error_of(error, killed=self._killed) from error
                metrics.retries.inc(then.value)
                again = then is Next.AGAIN
                if not again and then is not Next.ANEW:
                    self._killed = self._killed or then is Next.ELSEWHERE_IF_GONE
                    lost |= {worker.name}
                continue
            finally:
                attempt.end()
                self._prefilling = None
            response = connection.response
            status, headers = response.status, response.headers  # before somebody else has the connection
            judge(worker.health, status)
            if self._trace is not None:
                self._trace.answered(status)
            if status == 503 and after_busy(Sent(once=busy, free=free)) is Next.ELSEWHERE_IF_ANY:
                busy = True
                names = lost | {worker.name}
                if self._shared.fleet.has_other(
                    names, self._phases.prefills.among(self._request, self._speaks), prefill=True
                ):
                    lost = names
                    metrics.retries.inc(Next.ELSEWHERE_IF_ANY.value)
                    continue
            if binding is not None:
                binding.answered(status)
            self._prefilled_at = self._loop.time()
            self._prefill_s += self._prefilled_at - began
            if status >= 400:
                await self._pass_on(status, headers, target, answer)
            else:
                self._take_over(parts, answer)
            return

    def _is_spared(self, worker: Worker, failure: AttemptFailed) -> bool:
        """A worker is silent, and was no other one before: another one computes the prompt, once."""
        if not isinstance(failure, AttemptTimeout) or self._prefill_spared or self._late or not is_silent(worker):
            return False
        self._prefill_spared = frozenset({worker.name})
        among = self._phases.prefills.among(self._request, self._speaks)
        return self._prefill_hint is None and self._shared.fleet.has_other(self._prefill_spared, among, prefill=True)

    @property
    def _late(self) -> bool:
        """It has lasted as long as it may."""
        total = self._shared.limits.total
        return bool(total) and self._loop.time() - self._began > total

    async def _decide(self, binding: Binding | None, lost: frozenset[str]) -> Target:
        """Where the prompt is computed next. Raises TurnError or ClientDisconnected."""
        prefills, request, hint, speaks = self._phases.prefills, self._request, self._prefill_hint, self._speaks
        spared = lost | self._prefill_spared
        aside = (
            len(spared) > len(lost)
            and hint is None
            and self._shared.fleet.has_other(spared, prefills.among(request, speaks), prefill=True)
        )
        try:
            if aside or binding is None:
                decision = prefills.without_session(request, hint, spared if aside else lost, speaks)
            else:
                if binding.how == "none" and not binding.bind_cached():
                    await self._claim(binding.bind, prefills.placement(request, hint, speaks), None)
                name = binding.target.worker.name
                if name in lost or not prefills.holds(binding.target, request, speaks):
                    rebind = functools.partial(binding.rebind, lost | {name})
                    await self._claim(rebind, prefills.placement(request, hint, speaks), None)
                decision = prefills.of_session(binding.target, binding.how, hint)
        except Full:
            raise
        except TurnError as error:
            if lost and error.code in ("no_worker", "hint_required"):
                raise TurnError("worker_unreachable", "no worker that prefills can be reached") from error
            raise
        if decision.overrides and self._prefill is None:
            self._shared.metrics.hints_overridden.inc()
        if aside or binding is None:
            self._shared.fleet.note_placed(decision.target)
        self._prefill = decision
        return decision.target

    async def _slot_at(self, target: Target, *, beside: bool = False) -> Slot | None:
        """`beside` the one that the turn holds. Raises TurnError or ClientDisconnected."""
        shared = self._shared
        if shared.capacity is None:
            return None
        slots = Slots(shared.capacity, shared.bounds, self._request.tenant, self._presence, self._began, beside=beside)
        began = self._loop.time()
        while not slots.ready(target):
            await slots.wait(target, Choice(model=self._request.fields.model or None), stays=True)
        self._queued_s += self._loop.time() - began
        return slots.hand_over()

    def _send(self, prompt: bytes, attempt: Attempt, connection: WorkerConnection, trace: Header | None) -> Wake:
        request = self._request
        if trace is not None:
            request.trace_line = b"%b: %b\r\n" % trace
        own, request.body = request.body, prompt
        try:
            attempt.connection = connection
            return request.send(connection, attempt.target)
        finally:
            request.body = own

    def _take_over(self, parts: Parts, answer: bytes) -> None:
        """What the prefill worker has said goes into the request. Raises TurnError, ClientDisconnected."""
        try:
            handover = handover_in(answer)
        except NoHandover as error:
            self._shared.metrics.handover_failures.inc(error.kind)
            worker = self._prefill.target.worker.name if self._prefill is not None else ""
            raise TurnError("bad_handover", f"{error}: the worker {worker} prefills for no other one") from error
        self._handover = handover
        self._request.body, self._request.undelivered = with_member(self._whole, TRANSFER, handover), True
        self._presence.raise_if_gone()

    async def _pass_on(self, status: int, headers: list[Header], target: Target, body: bytes) -> None:
        """The prefill worker's error is the turn's."""
        self._presence.raise_if_gone()
        if status > 599:
            raise TurnError("worker_bad_response", f"the worker answered with status {status}")
        self._status, self._relayed = status, True
        self._outcome = "worker_error" if status >= 500 else "client_error"
        if self._binding is not None and self._request.identity.final:
            await self._presence.in_any_case(self._binding.refused(status))
        passed = response_headers(headers, status, target.worker.origin)
        kept = [pair for pair in passed if pair[0] != b"content-length"]
        self._say(status, [*kept, (b"content-length", b"%d" % len(body))], body, self._own_lines())
        self._decision = None  # no decode worker was given it

    # -- computed meanwhile

    async def _meet(self, halves: Halves) -> None:
        """Send the prompt to a prefill worker, as the request for the decode worker is about to be. Raises TurnError,
        ClientDisconnected."""
        slots, decision = self._slots, self._decision
        assert decision is not None
        if slots is not None and not slots.ready(decision.target):
            return  # it waits for that first. Who has it, and waits to prefill, is waited for by nobody who prefills
        binding = self._phases.prefills.session(self._request)
        try:
            attempt, connection = await self._reach(binding)
        except BaseException:  # also when the turn is cut
            if binding is not None:
                binding.release()
            raise
        prompt, rest = halves.meeting(attempt.target, self._phases.room())
        span = None if self._trace is None else self._trace.beside(attempt.target)
        meeting = Meeting(attempt, binding, self._loop, self._prompt_ended, span)
        self._meeting = self._request.meeting = meeting
        meeting.begin(self._send(prompt, attempt, connection, None if span is None else span.header))
        self._request.body, self._request.undelivered = rest, True

    async def _reach(self, binding: Binding | None) -> tuple[Attempt, WorkerConnection]:
        """A prefill worker that can be connected to. Raises TurnError, ClientDisconnected."""
        metrics, presence = self._shared.metrics, self._presence
        fresh, self._fresh = self._fresh, False
        lost = self._prefill_lost
        while True:
            presence.raise_if_gone()
            target = await self._decide(binding, lost)
            worker = target.worker
            attempt = Attempt(target, self._loop, await self._slot_at(target, beside=True))
            try:
                connection = None if fresh else worker.pool.take()
                return attempt, connection or await connect(worker, presence, metrics)
            except AttemptFailed as error:
                attempt.end()
                blame(worker.health, error)
                free = self._prefill_hint is None and (binding is None or binding.own)
                if after(error, Sent(free=free)) is not Next.ELSEWHERE:
                    raise error_of(error) from error
                metrics.retries.inc(Next.ELSEWHERE.value)
                lost |= {worker.name}
            except BaseException:  # also when the turn is cut
                attempt.end()
                raise

    def _prompt_ended(self, meeting: Meeting) -> None:
        if meeting is not self._meeting:
            return  # the turn has gone on without it
        self._prefilled_at = meeting.ended_at
        self._prefill_s += meeting.ended_at - meeting.began
        if meeting.failed:
            self._soon_given_up(meeting)

    def _soon_given_up(self, meeting: Meeting) -> None:
        # Not in place: it may end the turn, and with it what calls us.
        self._loop.call_soon(self._give_up, meeting)

    def _give_up(self, meeting: Meeting) -> None:
        """The decode worker's attempt, as long as nothing has come of it; where it is not sent yet, it will be."""
        attempt = self._attempt
        if meeting is not self._meeting or self._first or attempt is None or attempt.connection is None:
            return
        attempt.upload_fault = PrefillFailed(meeting)
        attempt.connection.fail(ConnectionBroken("its prompt was not computed"))

    async def _go_on_without(self, meeting: Meeting, *, again: bool) -> None:
        """Its prompt may be computed elsewhere, if it may be `again`; else the client is told what came of it. Raises
        TurnError, ClientDisconnected, Relayed."""
        target, failure = meeting.attempt.target, meeting.failure
        self._shared.metrics.handover_failures.inc("prefill")
        if meeting.status and (not again or meeting.status < 500):
            await self._pass_on(meeting.status, meeting.headers, target, worded(meeting.body))
            raise Relayed
        if isinstance(failure, AttemptTimeout):
            self._doubt(target.worker, failure)
        if failure is not None and (not again or (self._killed and isinstance(failure, ConnectionBroken))):
            raise error_of(failure, killed=self._killed) from failure
        if isinstance(failure, ConnectionBroken) and await is_gone(target.worker, self._presence, self._shared.metrics):
            self._killed = True
            self._prefill_lost |= {target.worker.name}
        elif not isinstance(failure, AttemptTimeout) or not await self._leave_silent():
            self._prefill_spared |= {target.worker.name}

    def _doubt(self, prefill: Worker, failure: AttemptTimeout) -> None:
        """Nothing has come of a meeting in time. Who was at the one before as well is blamed; both, if both were."""
        assert self._decision is not None
        decode = self._decision.target.worker
        before, self._doubted = self._doubted, (prefill, decode, failure)
        if before is not None:
            for worker in {prefill, decode}.intersection(before[:2]):
                blame(worker.health, failure)

    def _clear(self, decode: Worker) -> None:
        """It has begun to answer. If nothing came of it before, whoever should have prefilled then is blamed."""
        if self._doubted is not None:
            prefill, before, failure = self._doubted
            self._doubted = None
            if decode is before:
                blame(prefill.health, failure)

    # -- its end

    def _let_go(self) -> None:
        """What is computed for it, or was, is not wanted any more."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            self._request.meeting, self._request.undelivered = None, False
            meeting.cut()
        handover, parts, self._handover = self._handover, self._parts, None
        if handover is None or not isinstance(parts, Parts) or not self._request.undelivered:
            return
        self._request.undelivered = False
        decision, request = self._decision, self._request
        at = decision.target if decision is not None and fetches(decision.target.worker) else None
        body = parts.fetching(handover)
        self._phases.releases.begin(lambda target: request.whole(target, body), at, self._among)
