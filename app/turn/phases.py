"""A turn in a fleet whose workers have phases: its prompt is computed at one worker, and it is decoded at another one.

It is routed as any turn, which gives its decode target. When that only decodes, and there is more than little to
compute for it, the prompt goes to a prefill worker first; what that says of the blocks that it has staged (the
*hand-over*) goes into the request for the decode worker, and the turn is attempted as any other.

A hand-over is sent to one worker that may have read it, and never to another: who fetches blocks that are freed already
gets another prompt's. So

- nothing was read (no connection, or the client left before): it goes to another worker, or is released;
- it may have been read (the worker has died, or says that it cannot fetch): the prompt is computed anew, once where the
  decode worker says so, and as often as the law of trying again has the turn go on where one was lost;
- the client leaves: the prefill's answer, and then the first byte of the decode worker's, are waited for
  `_FREED_WITHIN` seconds before the attempt is cut, since a request that is cut on its way may leave what was staged to
  nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from app.errors import TurnError
from app.fleet.capacity import Choice, Full, Slot
from app.fleet.placement.foresight import Foreseen
from app.fleet.workers import Target
from app.http.calling import Whole
from app.http.exchange import Exchange
from app.http.headers import Header, response_headers
from app.http.inplace import Wake
from app.http.worker import AttemptFailed, AttemptTimeout, ConnectFailed, ConnectionBroken, WorkerConnection
from app.sessions.affinity import Binding
from app.turn.access import Told
from app.turn.fields import with_member
from app.turn.prefills import TRANSFER, NoHandover, Parts, Phases, can_be_split, handover_in, split
from app.turn.request import Request
from app.turn.retry import Attempt, Next, Sent, after, after_busy, blame, connect, error_of, is_gone, judge
from app.turn.routing import Decision, Hint
from app.turn.shared import Shared
from app.turn.slots import Slots
from app.turn.turn import Turn

_FREED_WITHIN = 5.0
"""Seconds that a worker has to begin to answer a request whose client has left, before it is cut off."""
_MOST_ANSWER = 4 << 20
"""Bytes of a prefill worker's answer: block numbers of a million tokens, and one token."""
_ENOUGH = 64
"""Bytes of a stream that tell whether its first event is an error."""
_is_error = re.compile(rb'\s*data:\s*\{\s*"error"\s*:').match
_NOT_BEGUN = frozenset({400, 404, 413, 415, 422})
"""Statuses of a request that was refused before anything was done for it."""
_NOBODY: frozenset[str] = frozenset()
_QUEUE, _PREFILL, _HANDOVER, _FIRST_TOKEN = (("queue",), ("prefill",), ("handover",), ("first_token",))
_WAITED = ("cached", "stored")
"""How a turn came to its session's target where that may have the session's cache."""


class HandoverLost(Exception):
    """The decode worker could not fetch what the hand-over names, or has begun to answer and broken off (`failure`);
    and nothing of that was passed on."""

    def __init__(self, failure: AttemptFailed | None) -> None:
        super().__init__("the decode worker cannot go on with the prompt")
        self.failure = failure


class _Relayed(Exception):
    """The client has its answer: the prefill worker's."""


class _SplitRequest(Request):
    """Knows whether it was sent."""

    sent_at = 0.0
    undelivered = False
    """It has a hand-over in it, and surely no worker has read that."""

    def send(self, connection: WorkerConnection, target: Target) -> Wake:
        self.undelivered = False
        wake = super().send(connection, target)
        self.sent_at = time.monotonic()
        return wake


class First:
    """Takes the beginning of an answer (`Sink`), and gives it back to whoever relays it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.came = Wake()
        self.failure: AttemptFailed | None = None
        self._size = 0

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)

    def on_data(self, data: bytes, end: bool) -> None:
        self.pieces.append(data)
        self._size += len(data)
        if end or self._size >= _ENOUGH:
            self.came.set()

    def on_chunk(self, frame: bytes, start: int) -> None:
        self.on_data(frame[start:-2], False)

    def on_failure(self, failure: AttemptFailed) -> None:
        self.failure = failure
        self.came.set()


async def _whole(connection: WorkerConnection) -> bytes:
    """The body of the answer whose head has come. Raises AttemptFailed."""
    response = connection.response
    if response.complete:
        pieces, response.pieces = response.pieces, []
        return b"".join(pieces)
    whole = Whole(_MOST_ANSWER)
    connection.relay(whole)
    await whole.complete
    return whole.body


class PhasedTurn(Turn):
    """What differs from a `Turn`, each in the step where it does. Long for the same reason.

    `_whole` is the client's body, which is sent to whoever takes the whole turn. `_handover` is what the body that is
    sent now has in it: None when that is the client's.
    """

    _request: _SplitRequest
    _parts: Parts | None = None
    """None: it is not split."""
    _whole = b""
    _handover: bytes | None = None
    _started_over = False
    _prefill: Decision | None = None
    """Where its prompt was computed, or is."""
    _prefill_hint: Hint | None = None
    _prefilling: Attempt | None = None
    _cut_at = 0.0
    """When what is under way is cut for a client that has left; 0: it has not, or that was cut at once."""
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
        self._request = _SplitRequest(shared.reading, exchange)

    # -- the turn's steps

    async def _read(self) -> None:
        await super()._read()
        if self._request.may_hint:
            self._prefill_hint = self._phases.prefills.hint(self._request, self._exchange)

    async def _route(self) -> None:
        await super()._route()
        await self._leave_prefill_worker()
        self._parts = self._parts_of_it()
        if self._parts is not None:
            self._whole = self._request.body
            await self._compute_prompt()

    async def _leave_prefill_worker(self) -> None:
        """The claim names a worker that took whole turns when it was made, and only prefills now."""
        binding = self._binding
        if self._decision is None or self._decision.target.worker.takes_turns or binding is None:
            return
        await self._rebind(binding, frozenset({binding.target.worker.name}))
        self._go(Decision(binding.target, binding.how, "memory"))

    def _parts_of_it(self) -> Parts | None:
        """None: the turn goes whole to its decode target, and that is counted."""
        request, decision, metrics = self._request, self._decision, self._shared.metrics
        if decision is None or decision.target.worker.phase != "decode":
            how, parts = "one_worker", None
        elif self._exchange.method != b"POST" or not can_be_split(self._exchange.raw_path):
            how, parts = "path", None
        elif self._is_little(decision):
            how, parts = "little_new", None
        else:
            parts = None if request.once or not request.body else split(request.body)
            how = "body" if parts is None else "two_phases"
        metrics.phase_turns.inc(how)
        if parts is None and self._prefill_hint is not None:
            metrics.hints_ignored.inc("prefill")
        return parts

    def _is_little(self, decision: Decision) -> bool:
        """Whether little of the prompt is new where the session was served last."""
        binding, least = self._binding, self._phases.prefills.least_new
        if binding is None or not least or decision.how not in _WAITED or decision.target is not binding.target:
            return False
        return 0 < binding.seen <= len(self._request.body) < binding.seen + least

    async def _try_until_answered(self) -> None:
        if self._relayed:
            return
        with contextlib.suppress(_Relayed):
            try:
                await super()._try_until_answered()
            except HandoverLost as lost:
                await self._start_over(lost.failure)
                await super()._try_until_answered()

    async def _start_over(self, failure: AttemptFailed | None) -> None:
        """With another prompt; at another target when the decode worker is gone. Raises TurnError,
        ClientDisconnected."""
        assert self._decision is not None
        metrics, worker = self._shared.metrics, self._decision.target.worker
        self._attempt = None
        self._status = 0
        self._again += 1
        self._started_over = True
        if failure is not None:
            blame(worker.health, failure)
            if not await is_gone(worker, self._presence, metrics):
                raise error_of(failure) from failure
            await super()._move(frozenset({worker.name}), failure)
        metrics.retries.inc(Next.ANEW.value)
        await self._prepare()

    async def _relay(self, connection: WorkerConnection) -> None:
        if self._handover is not None:
            await self._await_first(connection)
            if connection.response.status in _NOT_BEGUN:
                self._request.undelivered = True  # nothing was fetched: it is released in the end
        await super()._relay(connection)
        binding, attempt = self._binding, self._attempt
        if (
            binding is not None
            and attempt is not None
            and attempt.target is binding.target
            and self._status < 300
            and can_be_split(self._exchange.raw_path)
        ):
            binding.saw(len(self._whole or self._request.body))

    async def _await_first(self, connection: WorkerConnection) -> None:
        """Wait for the beginning of an answer to a request with a hand-over. Raises HandoverLost where the turn can
        begin anew."""
        response = connection.response
        first = First()
        if response.status < 300 and not response.complete:
            connection.relay(first)
            await first.came
        self._first = True
        self._presence.raise_if_gone()
        refused = response.status == 500 or _is_error(first.text) is not None
        if refused:
            self._shared.metrics.handover_failures.inc("refused")
        if not self._started_over and (refused or (first.failure is not None and not first.pieces)):
            raise HandoverLost(first.failure)
        response.pieces[:0] = first.pieces

    async def _move(self, lost: frozenset[str], failure: AttemptFailed) -> None:
        if self._handover is not None and isinstance(failure, ConnectFailed):
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
        if decision.target.worker.phase != "decode":
            self._let_go()
            self._request.body, self._parts = self._whole, None
        elif not self._request.undelivered:
            await self._compute_prompt()
            if self._relayed:
                raise _Relayed

    # -- the prompt

    async def _compute_prompt(self) -> None:
        """Have it computed, and the hand-over put into what the decode worker gets. Raises TurnError,
        ClientDisconnected."""
        assert self._parts is not None
        self._handover, self._first = None, False
        self._read_at = 0.0
        if self._slots is not None:
            self._slots.give_back()  # who waits for a slot to prefill holds none, or tenants would wait for themselves
        binding = self._phases.prefills.session(self._request)
        try:
            await self._prefill_until_answered(self._parts, binding)
        finally:
            if binding is not None:
                binding.release()

    async def _prefill_until_answered(self, parts: Parts, binding: Binding | None) -> None:
        """Attempts, as the law of trying again allows, until one prefill worker has answered."""
        metrics, presence = self._shared.metrics, self._presence
        lost = _NOBODY
        killed = busy = again = False
        while True:
            presence.raise_if_gone()
            target = await self._decide(binding, lost)
            worker = target.worker
            slot = await self._slot_at(target)
            self._prefilling = attempt = Attempt(target, self._loop, slot)
            free = self._prefill_hint is None and (binding is None or binding.own)
            try:
                connection = None if again else worker.pool.take()
                if connection is None:
                    connection = await connect(worker, presence, metrics)
                began = self._loop.time()
                await self._send(parts.prompt, attempt, connection)
                answer = await _whole(connection)
            except AttemptFailed as error:
                presence.raise_if_gone()
                blame(worker.health, error)
                if self._trace is not None:
                    self._trace.failed(error)
                then = after(error, Sent(first_byte=attempt.came, killed=killed, free=free))
                if then is Next.ELSEWHERE_IF_GONE and not await is_gone(worker, presence, metrics):
                    then = Next.FAIL
                if then is Next.FAIL:
                    raise error_of(error, killed=killed) from error
                metrics.retries.inc(then.value)
                again = then is Next.AGAIN
                if not again:
                    killed = killed or then is Next.ELSEWHERE_IF_GONE
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
                if self._shared.fleet.has_other(names, self._phases.prefills.among(self._request), prefill=True):
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

    async def _decide(self, binding: Binding | None, lost: frozenset[str]) -> Target:
        """Where the prompt is computed next. Raises TurnError or ClientDisconnected."""
        prefills, request, hint = self._phases.prefills, self._request, self._prefill_hint
        try:
            if binding is None:
                decision = prefills.without_session(request, hint, lost)
            else:
                if binding.how == "none" and not binding.bind_cached():
                    await self._claim(binding.bind, prefills.placement(request, hint), None)
                name = binding.target.worker.name
                if name in lost or not prefills.holds(binding.target, request):
                    rebind = functools.partial(binding.rebind, lost | {name})
                    await self._claim(rebind, prefills.placement(request, hint), None)
                decision = prefills.of_session(binding.target, binding.how, hint)
        except Full:
            raise
        except TurnError as error:
            if lost and error.code in ("no_worker", "hint_required"):
                raise TurnError("worker_unreachable", "no worker that prefills can be reached") from error
            raise
        if decision.overrides and self._prefill is None:
            self._shared.metrics.hints_overridden.inc()
        if binding is None:
            self._shared.fleet.note_placed(decision.target)
        self._prefill = decision
        return decision.target

    async def _slot_at(self, target: Target) -> Slot | None:
        """Raises TurnError or ClientDisconnected."""
        shared = self._shared
        if shared.capacity is None:
            return None
        slots = Slots(shared.capacity, shared.bounds, self._request.tenant, self._presence, self._began)
        began = self._loop.time()
        while not slots.ready(target):
            await slots.wait(target, Choice(model=self._request.fields.model or None), stays=True)
        self._queued_s += self._loop.time() - began
        return slots.hand_over()

    def _send(self, prompt: bytes, attempt: Attempt, connection: WorkerConnection) -> Wake:
        request = self._request
        if self._trace is not None:
            request.trace_line = b"%b: %b\r\n" % self._trace.attempts(attempt.target, "prefill")
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
        self._say(status, [*kept, (b"content-length", b"%d" % len(body)), *self._own_headers()], body)
        self._decision = None  # no decode worker was given it

    def _let_go(self) -> None:
        """Nobody will fetch what was staged for it."""
        handover, parts, self._handover = self._handover, self._parts, None
        if handover is None or parts is None or not self._request.undelivered:
            return
        self._request.undelivered = False
        decision, request = self._decision, self._request
        at = decision.target if decision is not None and decision.target.worker.phase == "decode" else None
        body = with_member(parts.one_token, TRANSFER, handover)
        self._phases.releases.begin(lambda target: request.whole(target, body), at, self._among)

    # -- its end

    def _settle(self, prompt: Foreseen, over: Callable[[Exception | None], None], fault: Exception | None) -> None:
        if self._handover is None:
            super()._settle(prompt, over, fault)
        else:  # the decode worker counts what it has fetched as cached
            self._over = over
            over(fault)

    def _account(self) -> None:
        self._let_go()
        super()._account()
        if self._parts is None:
            return
        answer, metrics = self._answer, self._shared.metrics
        if answer is not None and answer.came and self._outcome == "completed":
            sent = self._request.sent_at
            metrics.phase_seconds.observe_each(
                (
                    (_QUEUE, self._queued_s),
                    (_PREFILL, self._prefill_s),
                    (_HANDOVER, max(0.0, sent - self._prefilled_at)),
                    (_FIRST_TOKEN, max(0.0, self._began + answer.ttft - sent)),
                )
            )

    def _own_headers(self) -> list[Header]:
        prefill = self._prefill
        if prefill is None:
            return super()._own_headers()
        headers = [*super()._own_headers(), (b"x-coatcheck-prefill-worker", prefill.target.worker.name.encode())]
        if prefill.target.rank is not None:
            headers.append((b"x-coatcheck-prefill-rank", b"%d" % prefill.target.rank))
        return headers

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
        said = await super()._explained()
        worker = self._shared.fleet.worker(said["worker"])
        if worker is not None and worker.phase == "decode" and can_be_split(self._exchange.raw_path):
            explained = self._phases.prefills.explain(self._request, self._prefill_hint)
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
        if self._prefilling is None:
            super().check_limits(now)
            return
        limits = self._shared.limits
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
