"""Where the prompt of a turn is computed that is decoded elsewhere: the session's own claim for that, before the
client's hint, before the policy. And what is said to each of the two, as vLLM's KV connectors have it:

- the prefill worker gets the client's request for one token, in one piece, with `kv_transfer_params` that ask for
  remote decode; its answer says in the same field where the prompt's blocks are (the *hand-over*);
- the decode worker gets the client's request with the hand-over in it, and every other byte as it was.

(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/`, read at 0.33, and its `toy_proxy_server.py`.)
"""

from __future__ import annotations

from typing import Any

import msgspec

from app.errors import TurnError
from app.fleet.policies import Policy, direct, least
from app.fleet.workers import Fleet, Target
from app.http.exchange import Exchange
from app.sessions.affinity import Affinity, Binding
from app.sessions.identity import read_prefill_hints
from app.sessions.placing import Placement
from app.turn.fields import BodyHints, members, with_member
from app.turn.releases import Releases
from app.turn.request import Request
from app.turn.routing import Decision, Hint, Routing

PREFILL_HINT = "X-Dynamo-Prefill-Instance-ID"
_RANK_HINT = "X-Dynamo-Prefill-DP-Rank"
TRANSFER = "kv_transfer_params"
_PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions"})
_ASKED = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_ONE = msgspec.Raw(b"1")
_ONES = frozenset({b"1", b"null"})
_NO_TEXT = msgspec.Raw(b'""')
_OF_THE_PROMPT = ("best_of", "use_beam_search", "prompt_embeds", "prompt_logprobs", "echo")
_HARMLESS = frozenset({b"null", b"false", b"1"})
_NO_HINTS = BodyHints()


class Parts(msgspec.Struct, frozen=True):
    """A request that can be split."""

    one_token: bytes
    """For one token: with a hand-over it fetches what was staged, and does little more."""

    @property
    def prompt(self) -> bytes:
        """Has its prompt computed, for another worker."""
        return with_member(self.one_token, TRANSFER, _ASKED)


class _Blocks(msgspec.Struct):
    """What a hand-over must say."""

    do_remote_prefill: bool
    remote_block_ids: list[Any]
    remote_engine_id: str
    remote_host: str
    remote_port: int


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_decode_prefilled = msgspec.json.Decoder(_Prefilled).decode
_decode_blocks = msgspec.json.Decoder(_Blocks).decode
_encode = msgspec.json.Encoder().encode


class NoHandover(Exception):
    """A prefill worker has answered without one that can be used: `kind` is missing or malformed."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the hand-over of the prompt is {kind}")
        self.kind = kind


def can_be_split(path: bytes) -> bool:
    """Whether requests to this path have two phases: others have no field for the hand-over."""
    return path in _PATHS


def split(body: bytes) -> Parts | None:
    """None: it cannot be: it has several prompts or asks for several answers, wants to know of its prompt's tokens, is
    split by somebody in front of us, or cannot be read."""
    said = members(body)
    if not said or bytes(said.get("n", _ONE)) not in _ONES or bytes(said.get(TRANSFER, b"null")) != b"null":
        return None
    prompt = bytes(said.get("prompt", _NO_TEXT)).strip()
    if prompt[:1] == b"[" and not prompt[1:].lstrip()[:1].isdigit():  # not one list of tokens
        return None
    if any(bytes(said.get(name, b"null")) not in _HARMLESS for name in _OF_THE_PROMPT):
        return None
    for name in ("stream", "stream_options", "min_tokens", TRANSFER):
        said.pop(name, None)
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in said]
    for name in limits or ("max_tokens",):
        said[name] = _ONE
    said["stream"] = msgspec.Raw(b"false")
    try:
        return Parts(_encode(said))
    except UnicodeEncodeError:  # half a surrogate pair in a name
        return None


def handover_in(answer: bytes) -> bytes:
    """As the prefill worker says it. Raises NoHandover."""
    try:
        found = bytes(_decode_prefilled(answer).kv_transfer_params)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoHandover("malformed") from error
    if found == b"null":
        raise NoHandover("missing")
    try:
        said = _decode_blocks(found)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoHandover("malformed") from error
    if not (said.do_remote_prefill and said.remote_block_ids and said.remote_engine_id and said.remote_host):
        raise NoHandover("malformed")
    return found


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

    def among(self, request: Request) -> frozenset[str] | None:
        """The names of those that prefill for its model; None: all."""
        model = request.fields.model
        return self._routing.prefilling(model) if model else None

    def session(self, request: Request) -> Binding | None:
        """Where its session's prompts are computed, not bound yet; None: it has no session, or one that ends with this
        turn and is known to have no such place."""
        session = request.identity.session
        if session is None:
            return None
        key = self._key(request, session)
        if request.identity.final and not self._affinity.knows(key):
            return None
        return self._affinity.session(key, final=False)

    def _key(self, request: Request, session: tuple[bytes, ...]) -> str:
        model = request.fields.model or ""
        return self._routing.prefill_key(request, session, model if self.among(request) is not None else "")

    def placement(self, request: Request, hint: Hint | None) -> Placement:
        """How that is placed where no claim stands."""
        among = self.among(request)
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

    def without_session(self, request: Request, hint: Hint | None, lost: frozenset[str]) -> Decision:
        """Raises TurnError."""
        among = self.among(request)
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

    def holds(self, target: Target, request: Request) -> bool:
        """Whether a session's prompts are still computed at `target`."""
        worker, among = target.worker, self.among(request)
        if not worker.known or worker.takes_turns or (among is not None and worker.name not in among):
            return False
        return not worker.health.evicting or not self._fleet.has_other(frozenset({worker.name}), among, prefill=True)

    def _check(self, request: Request, hint: Hint, among: frozenset[str] | None) -> None:
        if among is not None and hint.worker is not None and hint.worker not in among:
            message = f"the worker {hint.worker} does not prefill for the model {request.fields.model!r}"
            raise TurnError("unknown_worker", message, param=PREFILL_HINT)

    async def explain(self, request: Request, hint: Hint | None) -> dict[str, Any]:
        """Where the prompt would be computed, if it were now. Raises TurnError."""
        session = request.identity.session
        if session is None:
            decision = self.without_session(request, hint, frozenset())
        else:
            key = self._key(request, session)
            view = await self._affinity.look_up(key)
            if view.target is not None and self.holds(view.target, request):
                how = {"store": "stored", "degraded": "degraded"}.get(view.source, "cached")
                decision = self.of_session(view.target, how, hint)
            else:
                target, because = await self._affinity.choose(self.placement(request, hint), key)
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


def _needs_worker() -> TurnError:
    message = f"a rank without a claim needs {PREFILL_HINT} beside it"
    return TurnError("invalid_hint", message, param=_RANK_HINT)


def _hint_required() -> TurnError:
    message = f"this router places nothing by itself; name a worker that prefills in {PREFILL_HINT}"
    return TurnError("hint_required", message, param=PREFILL_HINT)
