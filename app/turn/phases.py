"""A turn in a fleet whose workers have phases: its prompt is computed at one worker, and it is decoded at another one.

It is routed as any turn, which gives its decode target. When that only decodes, and there is more than little to
compute for it, its prompt is computed by a prefill worker (`prompts`), first or meanwhile as the two hand over, and the
turn is attempted as any other.

First, as vLLM has it: what the prefill worker says of the blocks that it has staged (the *hand-over*) goes into the
request for the decode worker. It is sent to one worker that may have read it, and never to another: who fetches blocks
that are freed already gets another prompt's. So

- nothing was read (no connection, or the client left before): it goes to another worker, or is released;
- it may have been read (the worker has died, or says that it cannot fetch): the prompt is computed anew, once where the
  decode worker says so, or where it is silent, for `first-byte-timeout` and to its probes: then at another one, while
  the session stays; and as often as the law of trying again has the turn go on where one was lost;
- the client leaves: the prefill's answer, and then the first byte of the decode worker's, are waited for
  `_FREED_WITHIN` seconds before the attempt is cut, since a request that is cut on its way may leave what was staged to
  nobody.

Meanwhile, as SGLang has it: the two are sent together, and find each other. A prefill that fails, or is lost, cuts the
attempt, which waits for it, and the turn starts over once, in another room; a client that leaves cuts both, and each
worker lets go by itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.errors import ClientDisconnected, TurnError
from app.fleet.placement.foresight import Foreseen
from app.http.inplace import Wake
from app.http.response import Response
from app.http.worker import (
    AttemptFailed,
    AttemptTimeout,
    ConnectFailed,
    ConnectionBroken,
    StaleConnection,
    WorkerConnection,
)
from app.sessions.spread import Hold
from app.turn.access import Told
from app.turn.handovers import can_be_split, split
from app.turn.prompts import PrefillFailed, PromptTurn, Relayed
from app.turn.retry import Next, blame, error_of, is_gone, is_silent
from app.turn.routing import Decision
from app.turn.slots import Slots
from app.turn.turn import Turn

_FREED_WITHIN = 5.0
"""Seconds that a worker has to begin to answer a request whose client has left, before it is cut off."""
_ENOUGH = 64
"""Bytes that tell whether an event is an error."""
_MOST_OPENING = 8192
"""Bytes after which what has no end is no event that opens a stream."""
_event = re.compile(rb"(?:data|event):").match
_end_of_event = re.compile(rb"\n\r?\n").search
_message_start = re.compile(rb"event: ?message_start\b").match
_no_content = re.compile(rb'"delta":\s?\{\s?"role":\s?"assistant",\s?"content":\s?""[,}]').match
_is_error = re.compile(rb'\s*(?:event:\s*error\s|data:\s*\{\s*"error"\s*:)').match
"""In the words of either API."""
_NOT_BEGUN = frozenset({400, 404, 413, 415, 422})
"""Statuses of a request that was refused before anything was done for it."""
_WAITED = ("cached", "stored")
"""How a turn came to its session's target where that may have the session's cache."""


@functools.lru_cache(maxsize=1024)
def _prefill_lines(worker: str, rank: int | None) -> bytes:
    named = b"\r\nx-coatcheck-prefill-worker: %b" % worker.encode()
    return named if rank is None else named + b"\r\nx-coatcheck-prefill-rank: %d" % rank


class HandoverLost(Exception):
    """The decode worker could not fetch what the hand-over names, or has begun to answer and broken off (`failure`);
    and nothing of that was passed on."""

    def __init__(self, failure: AttemptFailed | None) -> None:
        super().__init__("the decode worker cannot go on with the prompt")
        self.failure = failure


def spoken(text: bytes) -> bytes:
    """Of the beginning of an answer, what stands behind the event that opens a stream, if one does; nothing, as long as
    that is not whole. Such an event says nothing yet: vLLM sends it with what comes next, be that an error."""
    if text.startswith(b"{") or _event(text) is None:
        return text
    end = _end_of_event(text)
    if end is None:
        return text if len(text) >= _MOST_OPENING else b""
    return text[end.end() :] if _opens(text) else text


def _opens(text: bytes) -> bool:
    if _message_start(text) is not None:
        return True
    delta = text.find(b'"delta":', 0, _MOST_OPENING)
    return delta >= 0 and _no_content(text, delta) is not None and text.find(b"\n", 0, delta) < 0


class First:
    """Takes the beginning of an answer (`Sink`), and gives it back to whoever relays it."""

    __slots__ = ("came", "failure", "said", "text")

    def __init__(self) -> None:
        self.text = self.said = b""
        """What has come, and as `spoken`."""
        self.came = Wake()
        self.failure: AttemptFailed | None = None

    def on_data(self, data: bytes, end: bool) -> None:
        self.text = text = self.text + data if self.text else data
        if end or len(text) >= _ENOUGH:
            self.said = said = spoken(text)
            if end or len(said) >= _ENOUGH:
                self.came.set()

    def on_chunk(self, frame: bytes, start: int) -> None:
        self.on_data(frame[start:-2], False)

    def on_failure(self, failure: AttemptFailed) -> None:
        self.failure = failure
        self.came.set()


class PhasedTurn(PromptTurn):
    """What differs from a `Turn`, each in the step where it does. Long for the same reason."""

    _started_over = False
    _cut_at = 0.0
    """When what is under way is cut for a client that has left; 0: it has not, or that was cut at once."""

    # -- the turn's steps

    def _heed(self) -> None:
        Turn._heed(self)
        if self._request.may_hint:
            self._prefill_hint = self._phases.prefills.hint(self._request, self._exchange)

    def _goes_on(self) -> bool:
        if not Turn._goes_on(self):
            return False
        decision = self._decision
        assert decision is not None
        return decision.target.worker.phase != "prefill" and not self._is_split(decision)

    def _route(self) -> Coroutine[Any, Any, None]:
        return self._route_anew() if self._parts is None else self._compute_prompt(self._parts)

    async def _route_anew(self) -> None:
        if self._decision is None:
            await super()._route()
        decision = self._decision
        assert decision is not None
        if decision.target.worker.phase == "prefill" and self._binding is not None:
            decision = await self._leave_prefill_worker(self._binding)
        if self._is_split(decision):
            assert self._parts is not None
            await self._compute_prompt(self._parts)

    async def _leave_prefill_worker(self, binding: Hold) -> Decision:
        """The claim names a worker that took whole turns when it was made, and only prefills now."""
        await self._rebind(binding, frozenset({binding.target.worker.name}))
        decision = Decision(binding.target, binding.how, "memory")
        self._go(decision)
        return decision

    def _is_split(self, decision: Decision) -> bool:
        """False: the turn goes whole to its decode target, and that is counted."""
        request, exchange, shared, parts = self._request, self._exchange, self._shared, None
        worker, phases = decision.target.worker, shared.phases
        assert phases is not None
        if worker.phase != "decode":
            how = "one_worker"
        elif exchange.method != b"POST" or not can_be_split(exchange.raw_path, worker.handover):
            how = "path"
        elif phases.prefills.least_new and self._is_little(decision):
            how = "little_new"
        else:
            self._speaks = worker.handover
            parts = None if request.once or not request.body else split(request.body, worker.handover, request.members)
            how = "body" if parts is None else "two_phases"
        shared.metrics.phase_turns.cells[how,] += 1
        if parts is None:
            if self._prefill_hint is not None:
                shared.metrics.hints_ignored.inc("prefill")
            return False
        self._parts, self._whole = parts, request.body
        return True

    def _is_little(self, decision: Decision) -> bool:
        """Whether little of the prompt is new where the session was served last, and a whole turn is taken there."""
        binding, least = self._binding, self._phases.prefills.least_new
        if (
            binding is None
            or decision.target.worker.handover == "sglang"
            or decision.how not in _WAITED
            or decision.target is not binding.target
        ):
            return False
        return 0 < binding.seen <= len(self._request.body) < binding.seen + least

    async def _try_until_answered(self) -> None:
        if self._relayed:
            return
        try:
            while True:
                try:
                    await Turn._try_until_answered(self)
                    return
                except (HandoverLost, PrefillFailed, TurnError) as fault:
                    await self._start_over(self._may_start_over(fault))
        except Relayed:
            pass

    def _may_start_over(self, fault: HandoverLost | PrefillFailed | TurnError) -> HandoverLost | PrefillFailed:
        """Raises a TurnError of which nothing follows."""
        if not isinstance(fault, TurnError):
            return fault
        if not isinstance(fault.__cause__, AttemptTimeout) or not self._is_computed or self._started_over:
            raise fault
        return HandoverLost(fault.__cause__)

    @property
    def _is_computed(self) -> bool:
        """The prompt is, or will be, and it is the decode worker that is waited for."""
        return self._handover is not None or self._meeting is not None

    async def _start_over(self, fault: HandoverLost | PrefillFailed) -> None:
        """With another prompt; at another target when the decode worker is gone. Raises TurnError, ClientDisconnected,
        Relayed."""
        assert self._decision is not None
        metrics, worker = self._shared.metrics, self._decision.target.worker
        self._attempt = None
        self._status = 0
        if self._trace is not None:
            self._trace.failed(fault)
        if isinstance(fault, PrefillFailed):
            stale = isinstance(fault.meeting.failure, StaleConnection)
            if not stale:
                await self._go_on_without(fault.meeting, again=not self._started_over)
            self._fresh = stale
        else:
            stale = False
            if self._meeting is not None:
                if fault.failure is None:  # else it was the other one
                    self._prefill_spared |= {self._meeting.attempt.target.worker.name}
                self._let_go()  # who waits for another slot to decode holds none to prefill
            if fault.failure is not None:
                if isinstance(fault.failure, AttemptTimeout):
                    if not await self._leave_silent():
                        raise error_of(fault.failure) from fault.failure
                elif not self._killed and await is_gone(worker, self._presence, metrics):
                    self._killed = True
                    await super()._move(frozenset({worker.name}), fault.failure)
                else:
                    raise error_of(fault.failure, killed=self._killed) from fault.failure
        self._started_over = self._started_over or not stale
        self._again += 1
        metrics.retries.inc(Next.AGAIN.value if stale else Next.ANEW.value)
        self._request.undelivered = False
        await self._prepare()

    async def _leave_silent(self) -> bool:
        """Whether the turn goes on at another decode worker, because its own is silent. Its session stays, unless it
        has just begun: a worker that is silent may be back. Raises TurnError, ClientDisconnected."""
        decision, binding, request = self._decision, self._binding, self._request
        at_maker = self._kept is not None and self._kept.target is not None
        if decision is None or self._hint is not None or at_maker or self._late:
            return False
        lost = frozenset({decision.target.worker.name})
        if not is_silent(decision.target.worker) or not self._shared.fleet.has_other(lost, self._among):
            return False
        if binding is None or binding.own:
            await self._take(lost)
        else:
            other = self._shared.routing.without_session(request, None, lost, self._among)
            self._go(Decision(other.target, "bypassed", other.because))
        return True

    def _relay(self, connection: WorkerConnection) -> Coroutine[Any, Any, None] | None:
        response = connection.response
        if self._handover is None and self._meeting is None:
            rest = Turn._relay(self, connection)  # not `super()`: see `SplitRequest`
        elif response.complete or response.status >= 300:
            text = b"".join(response.pieces)
            self._begins(response, text, spoken(text), None)
            rest = Turn._relay(self, connection)
        else:
            rest = self._relay_from_first(connection)
        if rest is not None:
            return self._relay_rest(rest)
        self._note_seen()
        return None

    async def _relay_rest(self, rest: Coroutine[Any, Any, None]) -> None:
        await rest
        self._note_seen()

    async def _relay_from_first(self, connection: WorkerConnection) -> None:
        """Look at the beginning of the answer to a request with a hand-over, before anything is passed on of it."""
        first = First()
        connection.relay(first)
        await first.came
        response, text = connection.response, first.text
        response.pieces.insert(0, text)
        self._begins(response, text, first.said or spoken(text), first.failure)
        rest = Turn._relay(self, connection)
        if rest is not None:
            await rest

    def _note_seen(self) -> None:
        """How much of the session its target has seen."""
        binding, attempt, body = self._binding, self._attempt, self._whole
        if binding is None or attempt is None or attempt.target is not binding.target or self._status >= 300:
            return
        if body:
            binding.saw(len(body))
        elif can_be_split(self._exchange.raw_path, attempt.target.worker.handover):
            binding.saw(len(self._request.body))

    def _begins(self, response: Response, text: bytes, said: bytes, failure: AttemptFailed | None) -> None:
        """An answer to a request with a hand-over: `text` is its beginning, and that as `spoken`. Raises HandoverLost,
        PrefillFailed where the turn can begin anew."""
        attempt, status = self._attempt, response.status
        assert attempt is not None
        if self._presence.gone:
            raise ClientDisconnected
        if attempt.upload_fault is not None:
            raise attempt.upload_fault
        self._first = True
        if status < 300 and failure is None and said.startswith(b"{") and self._doubted is None:
            return  # as most do that are no streams
        if not said and response.complete:
            said = text
        refused = status == 500 or (status < 300 and _is_error(said) is not None)
        if refused:
            self._shared.metrics.handover_failures.inc("refused")
        if (refused or (failure is not None and not said)) and not self._started_over:
            if failure is not None:
                blame(attempt.target.worker.health, failure)
            raise HandoverLost(failure)
        if failure is None and status < 300 and not refused:
            self._clear(attempt.target.worker)
        if status in _NOT_BEGUN:
            self._request.undelivered = True  # nothing was fetched: it is released in the end

    async def _move(self, lost: frozenset[str], failure: AttemptFailed) -> None:
        if self._slots is not None and self._meeting is not None:
            self._let_go()  # it may wait for a slot there: for a turn, perhaps, that waits for the one that it holds
        met = self._meeting is not None and not self._meeting.failed
        if (self._handover is not None or met) and isinstance(failure, ConnectFailed):
            self._request.undelivered = True  # whatever was sent before, on a stale connection, nobody has read
        await super()._move(lost, failure)
        await self._prepare()

    async def _is_taken_elsewhere(self, busy: frozenset[str]) -> bool:
        if not await super()._is_taken_elsewhere(busy):
            return False
        attempt = self._attempt
        if self._slots is not None and attempt is not None:
            # Its slot is not held while another prompt is computed. What ends again gives nothing back twice.
            attempt.end()
            attempt.connection = None
        await self._prepare()
        return True

    async def _wait_for_slot(self, slots: Slots, decision: Decision, lost: frozenset[str]) -> None:
        began = self._loop.time()
        await super()._wait_for_slot(slots, decision, lost)
        self._queued_s += self._loop.time() - began
        await self._prepare()

    async def _prepare(self) -> None:
        """The turn may go to another target than its prompt was computed for."""
        decision = self._decision
        if self._parts is None or decision is None or self._relayed:
            return
        worker = decision.target.worker
        if worker.phase != "decode" or worker.handover != self._speaks:
            self._let_go()
            self._speaks = worker.handover
            self._parts = split(self._whole, self._speaks) if worker.phase == "decode" else None
            if self._parts is None:
                self._request.body = self._whole
                return
        if not self._request.undelivered:
            if self._handover is not None or self._meeting is not None:
                self._let_go()
            self._first = False
            await self._compute_prompt(self._parts)
            if self._relayed:
                raise Relayed

    # -- its end

    def _settle(self, prompt: Foreseen, over: Callable[[Exception | None], None], fault: Exception | None) -> None:
        if self._parts is None:
            super()._settle(prompt, over, fault)
        else:  # the decode worker counts what it has fetched as cached
            self._over = over
            over(fault)

    def _account(self) -> None:
        meeting, request = self._meeting, self._request
        if meeting is not None and self._first and self._outcome == "completed" and not self._presence.gone:
            meeting.part(_FREED_WITHIN)
            self._meeting = None
        if request.undelivered or self._meeting is not None:
            self._let_go()
        Turn._account(self)
        answer = self._answer
        if self._parts is not None and answer is not None and answer.came and self._outcome == "completed":
            sent, first, done = request.sent_at, self._began + answer.ttft, self._prefilled_at
            if meeting is None:
                spent = (self._queued_s, self._prefill_s, sent - done, first - sent)
            else:  # what is computed meanwhile hands over as it goes, to its last layer
                prefill = max(0.0, min(done or first, first) - sent)
                spent = (self._queued_s, prefill, 0.0, max(0.0, first - max(sent, done)))
            self._shared.metrics.phase_seconds.observe_each(spent)
        if request.missed is not None:
            # Else it would live, with its body, until the collector comes.
            request.missed = request.meeting = None

    def _own_lines(self) -> bytes:
        prefill = self._prefill
        if prefill is None:
            return Turn._own_lines(self)
        return Turn._own_lines(self) + _prefill_lines(prefill.target.worker.name, prefill.target.rank)

    def _told(self) -> Told:
        prefill = self._prefill
        if prefill is None:
            return super()._told()
        return msgspec.structs.replace(
            super()._told(),
            prefill_worker=prefill.target.worker.name,
            prefill_affinity=prefill.how,
            prefill_ms=round(1000 * self._prefill_s, 1),
        )

    async def _explained(self) -> dict[str, Any]:
        hint = self._phases.prefills.hint(self._request, self._exchange) if self._request.may_hint else None
        said = await super()._explained()
        worker = self._shared.fleet.worker(said["worker"])
        if worker is None or worker.phase != "decode":
            return said
        if can_be_split(self._exchange.raw_path, worker.handover):
            explained = self._phases.prefills.explain(self._request, hint, worker.handover)
            said["prefill"] = await self._presence.unless_gone(explained)
        return said

    # -- limits, and the client's leaving

    def check_limits(self, now: float) -> None:
        attempt = self._prefilling or self._attempt
        connection = attempt.connection if attempt is not None else None
        if self._cut_at:
            if now > self._cut_at and connection is not None:
                connection.fail(ConnectionBroken("the client left"))
            return
        meeting, limits = self._meeting, self._shared.limits
        if meeting is not None and meeting.under_way and limits.first_byte and not self._first:
            # The decode worker says nothing as long as the prefill worker is not done.
            met = meeting.attempt.connection
            if met is not None and met.quiet_for(now) > limits.first_byte:
                met.fail(AttemptTimeout(f"the worker did not compute the prompt within {limits.first_byte:g} s"))
                return
        if self._prefilling is None:
            super().check_limits(now)
            return
        if connection is None:
            return
        if limits.total and now - self._began > limits.total:
            connection.fail(AttemptTimeout(f"the turn took longer than {limits.total:g} s"))
        elif limits.first_byte and connection.quiet_for(now) > limits.first_byte:
            connection.fail(AttemptTimeout(f"the worker did not compute the prompt within {limits.first_byte:g} s"))

    def client_left(self) -> None:
        attempt = self._prefilling
        if attempt is None and self._handover is not None and not self._first:
            attempt = self._attempt
        if attempt is None or attempt.connection is None:
            super().client_left()
            return
        self._cut_at = self._loop.time() + _FREED_WITHIN
        self._presence.left()
