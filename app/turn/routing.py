"""Where a turn goes, and why: its session's claim before the client's hint before the policy. A turn acts on the same
`Decision` that a dry run prints."""

from __future__ import annotations

from typing import Any

import msgspec

from app.errors import TurnError
from app.fleet.catalog import Catalog
from app.fleet.placement.foresight import Foreseen, Foresight
from app.fleet.policies import WORKER_HINT, Policy, direct, hint_required, least
from app.fleet.workers import Fleet, Target
from app.http.exchange import Exchange
from app.metrics import Metrics
from app.sessions.affinity import Affinity, Binding
from app.sessions.identity import KeyHasher, read_hints
from app.sessions.placing import Placement
from app.sessions.spread import Hold, Spread
from app.sessions.tenants import Admins
from app.turn.fields import BodyHints
from app.turn.kept import Kept, use_of
from app.turn.request import Request

_NO_HINTS = BodyHints()
_MOST_ENDED = 256
"""Of the models that not all workers serve, for how many a final looks whether its session has a claim beside its own,
and for how many of those it asks the store."""
_MOST_ASKED = 32
_HOW = {"degraded": "degraded", "unreadable": "degraded", "store": "stored"}
"""What a turn would be told of a session that is known from there; from anywhere else: cached."""


class Rules(msgspec.Struct, frozen=True):
    """What the operator decided about sessions."""

    soft_overload: int = 0
    """Turns in flight at a target from which on a session may pass it over for one turn; 0: never."""
    reject_conflicts: bool = False
    """A hint that a claim contradicts is refused; else the claim overrides it."""


class Hint(msgspec.Struct, frozen=True):
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


class Decision(msgspec.Struct, frozen=True):
    target: Target
    how: str
    """One of AFFINITY_OUTCOMES: how the turn came there."""
    because: str
    """What decided: kept, hint, parent, policy, overload, or where the session is known from (`View.source`)."""
    overrides: bool = False
    """A claim goes before what the client asked for."""


class Routing:
    """The choices of one router. Decides and only looks: whoever acts on a decision counts it."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        affinity: Affinity,
        hasher: KeyHasher,
        metrics: Metrics,
        catalog: Catalog | None = None,
        admins: Admins | None = None,
        rules: Rules | None = None,
        foresight: Foresight | None = None,
    ) -> None:
        """Left out: every worker serves every model, admins from this machine, hard affinity, a policy that does not
        ask for prompts."""
        self._fleet, self._policy, self._affinity, self._hasher = fleet, policy, affinity, hasher
        self._metrics = metrics
        self._catalog = catalog or Catalog.off(fleet)
        self.serving, self.prefilling = self._catalog.serving, self._catalog.prefilling
        self._admins = admins or Admins()
        self._rules = rules or Rules()
        self._foresight = foresight

    def session(self, request: Request) -> Hold | None:
        """The session of a turn, not bound yet; None: it has none."""
        identity = request.identity
        if identity.session is None:
            return None
        binding = self._affinity.session(self._hasher.key(request.tenant, *identity.session), final=identity.final)
        if identity.final and (self._catalog.partial or self._fleet.prefilling):
            return Spread(self._affinity, binding, lambda: self._ending_with(request, binding))
        return binding

    def beside(self, request: Request) -> Binding:
        """The claim that the turn's session has for its model, which the session's own worker does not serve; not bound
        yet."""
        key = self._key_beside(request, request.fields.model or "")
        return self._affinity.session(key, final=request.identity.final)

    def spread(self, session: Hold, beside: Binding) -> Spread:
        """A turn's hold on both."""
        return Spread(self._affinity, session, beside=beside)

    def _key_beside(self, request: Request, model: str) -> str:
        """No session has it: no part of a session's id is empty."""
        session = request.identity.session or ()
        return self._hasher.key(request.tenant, *session, b"", b"model", model.encode("utf-8", "surrogatepass"))

    def prefill_key(self, request: Request, session: tuple[bytes, ...], model: str) -> str:
        """Of the claim that says where a session's prompts are computed. `model`: empty, unless not everybody who
        prefills serves it. No session has it."""
        return self._hasher.key(request.tenant, *session, b"", b"prefill", model.encode("utf-8", "surrogatepass"))

    def _prefill_keys(self, request: Request) -> list[str]:
        session = request.identity.session or ()
        models = self._catalog.partly_prefilled[:_MOST_ENDED]
        keys = [self.prefill_key(request, session, model) for model in models]
        return [self.prefill_key(request, session, ""), *filter(self._affinity.knows, keys)]

    def _ending_with(self, request: Request, own: Binding) -> list[str]:
        """The keys of the claims that may stand beside a session's own, which ends: those that are known here, and
        those of models that its own worker does not serve, and of its prefill."""
        asked = 0
        keys = self._prefill_keys(request) if self._fleet.prefilling else []
        for model in self._catalog.partial[:_MOST_ENDED]:
            key = self._key_beside(request, model)
            if not self._affinity.knows(key):
                serving = self.serving(model)
                if asked >= _MOST_ASKED or serving is None or own.worker_name in serving:
                    continue
                asked += 1
            keys.append(key)
        return keys

    async def learn(self, request: Request) -> frozenset[str] | None:
        """The names of the workers that serve the request's model, which nobody is known to; None: all. To be run in a
        task. Raises TurnError."""
        return await self._catalog.learn(request.fields.model or "")

    def check_hint(self, request: Request, hint: Hint | None, among: frozenset[str]) -> None:
        """Raises TurnError when the client has named a worker that does not serve its model."""
        if hint is not None and hint.worker is not None and hint.worker not in among:
            message = f"the worker {hint.worker} does not serve the model {request.fields.model!r}"
            raise TurnError("unknown_worker", message, param=WORKER_HINT)

    def kept(self, request: Request, exchange: Exchange) -> Kept | None:
        """The turn's part in what workers keep; None: it has none."""
        use = use_of(exchange.method, exchange.raw_path)
        if use is None:
            return None
        body = b"" if request.more else request.body
        return Kept(use, body, request.tenant, self._affinity, self._hasher, self._metrics)

    def hint(self, request: Request, exchange: Exchange) -> Hint | None:
        """What the client asks for; headers before the body's `nvext`, as Dynamo has it. Raises TurnError."""
        said, hints = read_hints(request.noted), request.fields.nvext or _NO_HINTS
        prefill = said.prefill or hints.prefill_worker_id is not None or hints.prefill_dp_rank is not None
        if prefill and not self._fleet.prefilling:
            self._metrics.hints_ignored.inc("prefill")
        if request.misfits:
            self._metrics.hints_ignored.inc("malformed")
        name = said.worker
        if name is None:
            given = hints.backend_instance_id if hints.backend_instance_id is not None else hints.decode_worker_id
            name = None if given is None else str(given)
        rank = said.rank if said.rank is not None else hints.dp_rank
        if name is None:
            return None if rank is None else Hint(None, rank, ())
        return self.hint_at(exchange, name, rank, WORKER_HINT)

    def hint_at(self, exchange: Exchange, name: str, rank: int | None, header: str, *, prefill: bool = False) -> Hint:
        """A worker that the client names by `header`, for its turn, or to `prefill`. Raises TurnError."""
        worker = self._fleet.worker(name)
        targets = () if worker is None else tuple(t for t in worker.targets if rank is None or t.rank == rank)
        message = ""
        if worker is None:
            message = f"{header} names no worker of this router"
        elif worker.takes_turns == prefill:
            message = f"the worker {name} prefills for nobody" if prefill else f"the worker {name} only prefills"
        elif not targets:
            message = f"the worker {name} has no rank {rank}"
        if message:
            if self._admins.allows(exchange.peer, exchange.headers):
                fits = (each.name for each in self._fleet if each.takes_turns != prefill)
                message += f"; it has {', '.join(fits)}"
            raise TurnError("unknown_worker", message, param=header)
        return Hint(name, rank, targets)

    def placement(
        self,
        request: Request,
        hint: Hint | None,
        kept: Target | None = None,
        among: frozenset[str] | None = None,
    ) -> Placement:
        """How the request's session is to be placed where no claim stands. `kept`: where what it names is kept;
        `among`: the names of the workers that serve its model, None: all."""
        if kept is not None:
            return Placement(candidates=(kept,))
        if hint is not None and hint.targets:
            return Placement(candidates=hint.targets, among=among)
        refusal = None
        if hint is not None:
            refusal = _needs_worker()
        elif self._policy is direct:
            refusal = hint_required()
        parent = request.identity.parent
        key = None if parent is None else self._hasher.key(request.tenant, *parent)
        return Placement(parent=key, refusal=refusal, among=among, prompt=self.prompt(request))

    def prompt(self, request: Request) -> Foreseen | None:
        """That of a turn which is free to choose; None: the policy does not ask for it, or there is none."""
        if request.prompt is None and self._foresight is not None:
            fields = request.fields
            request.prompt = self._foresight.prompt(request.path, fields.model or "", fields.said)
        return request.prompt

    def without_session(
        self,
        request: Request,
        hint: Hint | None,
        lost: frozenset[str] = frozenset(),
        among: frozenset[str] | None = None,
    ) -> Decision:
        """For a turn that has no session, or must go on at a worker that is not `lost`. Raises TurnError."""
        if hint is not None and not lost:
            if not hint.targets:
                raise _needs_worker()
            return Decision(least(hint.targets), "none", "hint")
        candidates = self._fleet.candidates(lost, among, prompt=self.prompt(request))
        if not candidates:
            raise TurnError("no_worker", "no worker can take the turn")
        return Decision(self._policy(candidates), "none", "policy")

    def of_session(
        self, bound: Target, how: str, because: str, hint: Hint | None, among: frozenset[str] | None = None
    ) -> Decision:
        """For a turn whose session is at `bound`. Raises TurnError when that contradicts the hint and may not."""
        overrides = hint is not None and not hint.fits(bound)
        if overrides and self._rules.reject_conflicts:
            raise TurnError("hint_conflict", f"the session is bound elsewhere than {hint} asks", param=WORKER_HINT)
        limit = self._rules.soft_overload
        if 0 < limit <= bound.in_flight:
            # Soft affinity: this one turn may go to a target that is not overloaded, if there is one. The claim stays.
            near = self._fleet.candidates(among=among, trials=False).compared()
            free = [each for each in near if each is not bound and each.in_flight < limit]
            if free:
                return Decision(least(free), "bypassed", "overload", overrides)
        return Decision(bound, how, because, overrides)

    async def explain(self, request: Request, hint: Hint | None, kept: str | None = None) -> dict[str, Any]:
        """The decision that the turn would get, for JSON, with the session's key and the revision of the claim that
        stands. Nothing is claimed, renewed or counted. `kept`: the key of what the turn names. Raises TurnError."""
        session, model = request.identity.session, request.fields.model
        among = self.serving(model) if model else None
        if among is not None:
            if not among:
                among = await self.learn(request)
            if among is not None:
                self.check_hint(request, hint, among)
        view = None if kept is None else await self._affinity.look_up(kept)
        if kept is not None and view is not None and view.target is not None:
            key, claim = kept, view.claim
            decision = Decision(view.target, _HOW.get(view.source, "cached"), "kept")
        elif session is None:
            key, claim = None, None
            prompt = self.prompt(request) if hint is None else None
            if prompt is not None and prompt.waits:
                await prompt.read()
            decision = self.without_session(request, hint, among=among)
        else:
            key = self._hasher.key(request.tenant, *session)
            view = await self._affinity.look_up(key)
            if among is not None and view.target is not None and view.target.worker.name not in among:
                key = self._key_beside(request, model or "")
                view = await self._affinity.look_up(key)
            claim, there = view.claim, view.target
            if there is not None and (among is None or there.worker.name in among):
                decision = self.of_session(there, _HOW.get(view.source, "cached"), view.source, hint, among)
            else:
                target, because = await self._affinity.choose(self.placement(request, hint, among=among), key)
                decision = Decision(target, "created" if claim is None else "rebound", because)
        return {
            "object": "coatcheck.dry_run",
            "session": key,
            "worker": decision.target.worker.name,
            "rank": decision.target.rank,
            "affinity": decision.how,
            "because": decision.because,
            "revision": None if claim is None else claim.revision,
        } | self._why(request, decision)

    def _why(self, request: Request, decision: Decision) -> dict[str, Any]:
        """What a policy that places by prompts has seen, where it was asked."""
        prompt, target = request.prompt, decision.target
        if prompt is None or decision.because != "policy":
            return {}
        shares = prompt.shares()
        cached = {
            "cached_share": round(shares.get(target, 0.0), 4),
            "best_share": round(max(shares.values(), default=0.0), 4),
        }
        return {"placement": cached | {"load": target.load, "sessions": target.settled}}


def _needs_worker() -> TurnError:
    return TurnError("invalid_hint", f"a rank without a claim needs {WORKER_HINT} beside it", param="X-Dynamo-DP-Rank")
