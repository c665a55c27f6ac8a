"""A turn's way to its prompt, where that is computed by another worker than the one that decodes."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.errors import ClientDisconnected, TurnError
from app.fleet.capacity import Choice, Full, Slot
from app.fleet.specs import HANDOVERS, Handover
from app.fleet.workers import Target, Worker
from app.http.headers import Header, response_headers
from app.http.inplace import Wake
from app.http.worker import AttemptFailed, AttemptTimeout, ConnectionBroken, WorkerConnection
from app.sessions.affinity import Binding
from app.turn.fields import strict_members, with_member
from app.turn.handovers import TRANSFER, Halves, NoHandover, Parts, handover_in, refuse_meeting, worded
from app.turn.meeting import Meeting, whole
from app.turn.prefills import Phases
from app.turn.releases import fetches
from app.turn.request import COPIED, Request
from app.turn.retry import Attempt, Next, Sent, after, after_busy, blame, connect, error_of, is_gone, is_silent, judge
from app.turn.routing import Decision, Hint
from app.turn.slots import Slots
from app.turn.turn import Turn

_NOBODY: frozenset[str] = frozenset()
_LONG = 1024
"""Bytes of a body from which on to read it twice takes longer than to write some of it anew."""
_encode = msgspec.json.Encoder().encode


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
    _members: dict[str, msgspec.Raw] | None = None
    _members_of = b""
    missed: Callable[[Meeting], None] | None = None
    """Told when it is sent and nobody comes there any more. None: there is no meeting."""

    def _read_fields(self, body: bytes) -> None:
        """To be split it is read by its members; where it is long, then its fields are read of those."""
        if len(body) > _LONG and (names := self._reading.fields.names) is not None:
            said = strict_members(body)
            if said is not None:
                self._members, self._members_of = said, body
                body = _encode({name: said[name] for name in names if name in said})
        Request._read_fields(self, body)  # not `super()`, here and below: it costs ten times as much

    @property
    def members(self) -> dict[str, msgspec.Raw] | None:
        """Of its body; None: they are not known yet."""
        return self._members if self._members_of is self.body else None

    def send(self, connection: WorkerConnection, target: Target) -> Wake:
        """Raises TurnError."""
        meeting = self.meeting
        if meeting is None and target.worker.handover == "sglang":
            self._check_unmet(connection, target.worker)
        self.undelivered = False
        wake = Request.send(self, connection, target)
        self.sent_at = time.monotonic()
        if meeting is not None and meeting.failed and self.missed is not None:
            self.missed(meeting)
        return wake

    def _check_unmet(self, connection: WorkerConnection, worker: Worker) -> None:
        """Raises TurnError."""
        if worker.phase == "decode" and not self.more:
            try:
                refuse_meeting(self.body)
            except TurnError:
                connection.close()
                raise

    def send_prompt(self, connection: WorkerConnection, target: Target, prompt: bytes) -> Wake:
        """As `send`, to whoever computes the prompt: with another body, and nothing is noted of it."""
        self._origin = target.worker.origin
        head, body = (prompt, b"") if len(prompt) <= COPIED else (b"", prompt)
        return connection.send(self._head(target, prompt, head), body, on_interim=self._pass_interim)


class PromptTurn(Turn):
    """What there is of the prompt in a turn in two phases; `PhasedTurn` has the steps of which it is a part.

    `_whole` is the client's body, which is sent to whoever takes the whole turn. `_handover` is what the body that is
    sent now has in it, of vLLM's kind; None when it has none. `_meeting` is where that body is met, of SGLang's kind.
    """

    _new_request = SplitRequest
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

    @property
    def _phases(self) -> Phases:
        phases = self._shared.phases
        assert phases is not None
        return phases

    @abc.abstractmethod
    async def _leave_silent(self) -> bool:
        """Whether the turn goes on at another decode worker, because its own is silent."""

    def _compute_prompt(self, parts: Parts | Halves) -> Coroutine[Any, Any, None]:
        """Have it computed, and put into what the decode worker gets how that comes by it. Raises TurnError,
        ClientDisconnected."""
        self._read_at = 0.0
        return self._meet(parts) if isinstance(parts, Halves) else self._prefill_until_answered(parts)

    async def _prefill_until_answered(self, parts: Parts) -> None:
        """Attempts, as the law of trying again allows, until one prefill worker has answered."""
        request, loop, presence, trace = self._request, self._loop, self._presence, self._trace
        if self._slots is not None:
            self._slots.give_back()  # who waits for a slot to prefill holds none, or tenants would wait for themselves
        lost = self._prefill_lost
        busy = again = False
        known = self._known_place()
        binding = None if known is not None else self._phases.prefills.hold(request)
        try:
            while True:
                if presence.gone:
                    raise ClientDisconnected
                if known is None:
                    target = await self._decide(binding, lost)
                else:
                    self._prefill, target = known, known.target
                worker = target.worker
                slot = None if self._slots is None else await self._slot_at(target)
                self._prefilling = attempt = Attempt(target, loop, slot)
                try:
                    connection = None if again else worker.pool.take()
                    if connection is None:
                        connection = await connect(worker, presence, self._shared.metrics)
                    attempt.connection = connection
                    if trace is not None:
                        request.trace_line = b"%b: %b\r\n" % trace.attempts(target, "prefill")
                    began = loop.time()
                    await request.send_prompt(connection, target, parts.prompt)
                    response = connection.response
                    answer = b"".join(response.pieces) if response.complete else await whole(connection)
                except AttemptFailed as error:
                    if known is not None:
                        known, binding = None, self._phases.prefills.hold(request)
                    then = await self._after_failed(attempt, error, binding)
                    again = then is Next.AGAIN
                    if not again and then is not Next.ANEW:
                        lost |= {worker.name}
                    continue
                finally:
                    attempt.end()
                    self._prefilling = None
                status, headers = response.status, response.headers  # before somebody else has the connection
                judge(worker.health, status)
                if trace is not None:
                    trace.answered(status)
                if status == 503 and not busy:
                    if known is not None:
                        known, binding = None, self._phases.prefills.hold(request)
                    if self._is_computed_elsewhere(lost | {worker.name}, binding):
                        busy = True
                        lost |= {worker.name}
                        continue
                if binding is not None:
                    binding.answered(status)
                self._prefilled_at = now = loop.time()
                self._prefill_s += now - began
                if status >= 400:
                    await self._pass_on(status, headers, target, answer)
                else:
                    self._take_over(answer)
                return
        finally:
            if binding is not None:
                binding.release()

    def _known_place(self) -> Decision | None:
        """Where the prompt is computed, if nothing speaks against where its session's were."""
        if self._prefill_hint is not None or self._prefill_lost or self._prefill_spared:
            return None
        phases = self._shared.phases
        assert phases is not None
        return phases.prefills.known(self._request, self._speaks)

    async def _after_failed(self, attempt: Attempt, failure: AttemptFailed, binding: Binding | None) -> Next:
        """What follows for the prompt. Raises TurnError, ClientDisconnected."""
        worker, metrics, presence = attempt.target.worker, self._shared.metrics, self._presence
        presence.raise_if_gone()
        blame(worker.health, failure)
        if self._trace is not None:
            self._trace.failed(failure)
        then = after(failure, Sent(first_byte=attempt.came, killed=self._killed, free=self._is_free_to_choose(binding)))
        if then is Next.ELSEWHERE_IF_GONE and not await is_gone(worker, presence, metrics):
            then = Next.FAIL
        if then is Next.FAIL and self._is_spared(worker, failure):
            then = Next.ANEW
        if then is Next.FAIL:
            raise error_of(failure, killed=self._killed) from failure
        metrics.retries.inc(then.value)
        self._killed = self._killed or then is Next.ELSEWHERE_IF_GONE
        return then

    def _is_computed_elsewhere(self, busy: frozenset[str], binding: Binding | None) -> bool:
        """The workers in `busy` have answered 503. Whether there is another one: then the prompt goes there, once."""
        if after_busy(Sent(free=self._is_free_to_choose(binding))) is not Next.ELSEWHERE_IF_ANY:
            return False
        among = self._phases.prefills.among(self._request, self._speaks)
        if not self._shared.fleet.has_other(busy, among, prefill=True):
            return False
        self._shared.metrics.retries.inc(Next.ELSEWHERE_IF_ANY.value)
        return True

    def _is_free_to_choose(self, binding: Binding | None) -> bool:
        """`binding`: to where its session's prompts are computed."""
        return self._prefill_hint is None and (binding is None or binding.own)

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
        ending = None
        if binding is None and not spared and request.identity.final:
            ending = await self._presence.unless_gone(prefills.ending(request, speaks))
        try:
            if ending is not None:
                decision = prefills.of_session(ending, "stored", hint)
            elif aside or binding is None:
                decision = prefills.without_session(request, hint, spared if aside else lost, speaks)
            else:
                if binding.how == "none":
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
        if ending is None and (aside or binding is None):
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

    def _take_over(self, answer: bytes) -> None:
        """What the prefill worker has said goes into the request. Raises TurnError, ClientDisconnected."""
        try:
            handover = handover_in(answer)
        except NoHandover as error:
            self._shared.metrics.handover_failures.inc(error.kind)
            worker = self._prefill.target.worker.name if self._prefill is not None else ""
            raise TurnError("bad_handover", f"{error}: the worker {worker} prefills for no other one") from error
        request, self._handover = self._request, handover
        request.body, request.undelivered = with_member(self._whole, TRANSFER, handover), True
        if self._presence.gone:
            raise ClientDisconnected

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
        attempt, connection, binding = await self._reach()
        prompt, rest = halves.meeting(attempt.target, self._phases.room())
        span = None if self._trace is None else self._trace.beside(attempt.target)
        meeting = Meeting(attempt, binding, self._loop, self._prompt_ended, span)
        request = self._request
        self._meeting = request.meeting = meeting
        request.missed = self._soon_given_up
        if span is not None:
            request.trace_line = b"%b: %b\r\n" % span.header
        attempt.connection = connection
        meeting.begin(request.send_prompt(connection, attempt.target, prompt))
        request.body, request.undelivered = rest, True

    async def _reach(self) -> tuple[Attempt, WorkerConnection, Binding | None]:
        """A prefill worker that can be connected to, and the hold with which it was decided. Raises TurnError,
        ClientDisconnected."""
        metrics, presence = self._shared.metrics, self._presence
        fresh, self._fresh = self._fresh, False
        lost = self._prefill_lost
        known = self._known_place()
        binding = None if known is not None else self._phases.prefills.hold(self._request)
        try:
            while True:
                presence.raise_if_gone()
                if known is None:
                    target = await self._decide(binding, lost)
                else:
                    self._prefill, target = known, known.target
                worker = target.worker
                slot = None if self._slots is None else await self._slot_at(target, beside=True)
                attempt = Attempt(target, self._loop, slot)
                try:
                    connection = None if fresh else worker.pool.take()
                    return attempt, connection or await connect(worker, presence, metrics), binding
                except AttemptFailed as error:
                    attempt.end()
                    blame(worker.health, error)
                    if known is not None:
                        known, binding = None, self._phases.prefills.hold(self._request)
                    if after(error, Sent(free=self._is_free_to_choose(binding))) is not Next.ELSEWHERE:
                        raise error_of(error) from error
                    metrics.retries.inc(Next.ELSEWHERE.value)
                    lost |= {worker.name}
                except BaseException:  # also when the turn is cut
                    attempt.end()
                    raise
        except BaseException:  # also when the turn is cut
            if binding is not None:
                binding.release()
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
