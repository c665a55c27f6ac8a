"""Where the prompt of a turn is computed that is decoded elsewhere: the session's own claim for that, before the
client's hint, before the policy. Among those that hand over as the decode worker takes it (`Handover`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from app.errors import TurnError
from app.fleet.policies import Policy, direct, least
from app.fleet.specs import Handover
from app.fleet.workers import Fleet, Target
from app.http.exchange import Exchange
from app.sessions.affinity import Affinity, Binding
from app.sessions.identity import read_prefill_hints
from app.sessions.placing import Placement
from app.turn.fields import BodyHints
from app.turn.releases import Releases
from app.turn.request import Request
from app.turn.routing import Decision, Hint, Routing

PREFILL_HINT = "X-Dynamo-Prefill-Instance-ID"
_RANK_HINT = "X-Dynamo-Prefill-DP-Rank"
_NO_HINTS = BodyHints()


class Prefills:
    """The choices of one router. Decides and only looks, but for `bind`s of the sessions that it gives."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        affinity: Affinity,
        routing: Routing,
        least_new: int,
        reject_conflicts: bool = False,
    ) -> None:
        """`least_new`: bytes of a known session's request that are new at its target, from which on it is split; 0:
        every request is. `reject_conflicts`: as of `Rules`."""
        self._fleet, self._policy, self._affinity, self._routing = fleet, policy, affinity, routing
        self.least_new = least_new
        self._reject_conflicts = reject_conflicts

    def hint(self, request: Request, exchange: Exchange) -> Hint | None:
        """Where the client would have its prompt computed. Raises TurnError."""
        said, hints = read_prefill_hints(request.noted), request.fields.nvext or _NO_HINTS
        name = said.worker
        if name is None and hints.prefill_worker_id is not None:
            name = str(hints.prefill_worker_id)
        rank = said.rank if said.rank is not None else hints.prefill_dp_rank
        if name is None:
            return None if rank is None else Hint(None, rank, ())
        return self._routing.hint_at(exchange, name, rank, PREFILL_HINT, prefill=True)

    def among(self, request: Request, handover: Handover) -> frozenset[str] | None:
        """The names of those that prefill for its model and hand over so; None: all."""
        serving, speaking = self._serving(request), self._fleet.prefilling_by(handover)
        return serving if speaking is None else speaking if serving is None else serving & speaking

    def _serving(self, request: Request) -> frozenset[str] | None:
        model = request.fields.model
        return self._routing.prefilling(model) if model else None

    def known(self, request: Request, handover: Handover) -> Decision | None:
        """Where its session's prompts are computed, if that is known here and still so; else it is to be decided, with
        a `hold`. Nothing is held of it: the session's own claim is, for as long."""
        session = request.identity.session
        if session is None:
            return None
        routing, model = self._routing, request.fields.model
        serving = routing.prefilling(model) if model else None
        target = self._affinity.used(
            routing.prefill_key(request, session, model if serving is not None and model else "")
        )
        if target is None:
            return None
        worker = target.worker
        if (
            worker.phase == "prefill"
            and worker.handover == handover
            and not worker.health.evicting
            and (serving is None or worker.name in serving)
        ):
            return Decision(target, "cached", "memory")
        return None

    def hold(self, request: Request) -> Binding | None:
        """On where its session's prompts are computed, as it is to be decided. None: it has no session, or one that
        ends with this turn and is known to have no such place."""
        identity = request.identity
        if identity.session is None:
            return None
        key = self._key(request, identity.session)
        if identity.final and not self._affinity.knows(key):
            return None
        binding = self._affinity.session(key, final=False)
        binding.bind_cached()
        return binding

    def _key(self, request: Request, session: tuple[bytes, ...]) -> str:
        model = request.fields.model or ""
        return self._routing.prefill_key(request, session, model if self._serving(request) is not None else "")

    async def ending(self, request: Request, handover: Handover) -> Target | None:
        """Where the prompts of a session were computed that ends with this turn and of which nothing is known here. Its
        last one claims no such place."""
        session = request.identity.session
        if session is None:
            return None
        try:
            target = (await self._affinity.look_up(self._key(request, session))).target
        except TurnError:  # the store is away: it is placed as one without a session
            return None
        return target if target is not None and self.holds(target, request, handover) else None

    def placement(self, request: Request, hint: Hint | None, handover: Handover) -> Placement:
        """How that is placed where no claim stands."""
        among = self.among(request, handover)
        if hint is not None and hint.targets:
            self._check(request, hint, among)
            return Placement(candidates=hint.targets, among=among, full_too=True, prefill=True)
        refusal = _needs_worker() if hint is not None else _hint_required() if self._policy is direct else None
        parent = request.identity.parent
        key = None if parent is None else self._key(request, parent)
        return Placement(parent=key, refusal=refusal, among=among, full_too=True, prefill=True)

    def of_session(self, bound: Target, how: str, hint: Hint | None) -> Decision:
        """For a turn whose session is prefilled at `bound`. Raises TurnError when that contradicts the hint and may
        not."""
        overrides = hint is not None and not hint.fits(bound)
        if overrides and self._reject_conflicts:
            raise TurnError("hint_conflict", f"the session is prefilled elsewhere than {hint} asks", param=PREFILL_HINT)
        return Decision(bound, how, "memory", overrides)

    def without_session(
        self, request: Request, hint: Hint | None, lost: frozenset[str], handover: Handover
    ) -> Decision:
        """Raises TurnError."""
        among = self.among(request, handover)
        if hint is not None and not lost:
            if not hint.targets:
                raise _needs_worker()
            self._check(request, hint, among)
            return Decision(least(hint.targets), "none", "hint")
        candidates = self._fleet.candidates(lost, among, prefill=True)
        if not candidates:
            raise TurnError("no_worker", "no worker can take the prompt of the turn")
        if self._policy is direct:
            raise _hint_required()
        return Decision(self._policy(candidates), "none", "policy")

    def holds(self, target: Target, request: Request, handover: Handover) -> bool:
        """Whether a session's prompts are still computed at `target`."""
        worker, among = target.worker, self.among(request, handover)
        if not worker.known or worker.takes_turns or (among is not None and worker.name not in among):
            return False
        return not worker.health.evicting or not self._fleet.has_other(frozenset({worker.name}), among, prefill=True)

    def _check(self, request: Request, hint: Hint, among: frozenset[str] | None) -> None:
        if among is not None and hint.worker is not None and hint.worker not in among:
            message = f"the worker {hint.worker} does not prefill for the model {request.fields.model!r} here"
            raise TurnError("unknown_worker", message, param=PREFILL_HINT)

    async def explain(self, request: Request, hint: Hint | None, handover: Handover) -> dict[str, Any]:
        """Where the prompt would be computed, if it were now. Raises TurnError."""
        session = request.identity.session
        if session is None:
            decision = self.without_session(request, hint, frozenset(), handover)
        else:
            key = self._key(request, session)
            view = await self._affinity.look_up(key)
            if view.target is not None and self.holds(view.target, request, handover):
                how = {"store": "stored", "degraded": "degraded"}.get(view.source, "cached")
                decision = self.of_session(view.target, how, hint)
            else:
                target, because = await self._affinity.choose(self.placement(request, hint, handover), key)
                decision = Decision(target, "created" if view.claim is None else "rebound", because)
        return {
            "worker": decision.target.worker.name,
            "rank": decision.target.rank,
            "affinity": decision.how,
            "because": decision.because,
        }


class Phases(msgspec.Struct, frozen=True):
    """What turns of a fleet with phases share, beside what all turns do."""

    prefills: Prefills
    releases: Releases
    room: Callable[[], int]
    """Another number for each request that two workers are to meet for."""


def _needs_worker() -> TurnError:
    message = f"a rank without a claim needs {PREFILL_HINT} beside it"
    return TurnError("invalid_hint", message, param=_RANK_HINT)


def _hint_required() -> TurnError:
    message = f"this router places nothing by itself; name a worker that prefills in {PREFILL_HINT}"
    return TurnError("hint_required", message, param=PREFILL_HINT)
