"""Where a turn goes: decided once, and again when its worker is lost, busy, full or does not know what it names."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.errors import TurnError
from app.fleet.capacity import Choice, Full
from app.fleet.health import Health
from app.fleet.loads import Place
from app.fleet.placement.foresight import Foreseen
from app.fleet.workers import Target
from app.http.exchange import Exchange
from app.http.inplace import InPlace
from app.http.worker import AttemptFailed
from app.sessions.placing import Placement
from app.sessions.spread import Hold
from app.turn.kept import Kept
from app.turn.presence import Presence
from app.turn.request import Request
from app.turn.routing import Decision, Hint
from app.turn.shared import Shared
from app.turn.slots import Slots
from app.turn.tracing import TurnTrace

log = logging.getLogger("coatcheck.turn")


class Course(InPlace):
    """A turn's way to its target, as far as it has been read. `Turn` has the rest of it, and makes what stands here; a
    class below it, not an object beside it, because each step of an attempt asks for it.

    Every step leaves its choice in `_decision`, for the next attempt.
    """

    _shared: Shared
    _loop: asyncio.AbstractEventLoop
    _exchange: Exchange
    _began: float
    _presence: Presence
    _request: Request
    _among: frozenset[str] | None
    """The names of the workers that serve its model; None: all do, or it names none."""
    _hint: Hint | None
    _slots: Slots | None
    """None: nothing is limited."""
    _read_at: float
    """When its request had come, where it is measured what the router itself needs; below 0: that is to be noted, 0: it
    is not, or no more."""
    _trace: TurnTrace | None
    """None: nobody wants one."""
    # Defaults in the class: these are set before they are looked at, or seldom looked at.
    _binding: Hold | None = None
    _kept: Kept | None = None
    _decision: Decision | None = None
    _prompt: Foreseen | None = None
    """By which it was placed; None: it was bound, or placed otherwise."""

    def _goes_on(self) -> bool:
        """Whether it goes where its session is known to be: what most turns do, and nothing is waited for. Else
        `_route`."""
        routing, binding, model = self._shared.routing, self._binding, self._request.fields.model
        if binding is None or self._kept is not None or (model and routing.serving(model) is not None):
            return False
        if not binding.bind_cached():
            return False
        worker = binding.target.worker
        if not worker.known or worker.health.watchful:
            return False
        self._go(routing.of_session(binding.target, binding.how, "memory", self._hint, None))
        return True

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
            if binding.how == "none" and not binding.bind_cached():
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
                self._settles(prompt)

    @abc.abstractmethod
    def _settles(self, prompt: Foreseen) -> None:
        """When it has ended, the prompt is to be told how it was served."""

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
