"""What is said to the two workers of a turn in two phases, as their engines have it (the *hand-over* between them).

vLLM's, one after the other (`vllm/distributed/kv_transfer/kv_connector/v1/nixl/`, read at 0.33, and its
`toy_proxy_server.py`):

- the prefill worker gets the client's request for one token, in one piece, with `kv_transfer_params` that ask for
  remote decode; its answer says in the same field where the prompt's blocks are;
- the decode worker gets the client's request with that in it, and every other byte as it was.

SGLang's, both at once (`sglang/srt/disaggregation/`, read at 0.5.23, and `sglang_router/mini_lb.py`, at 0.3.2): both
get the client's request with `bootstrap_host` and `bootstrap_port`, which are the prefill worker's, and a number that
nobody else has, `bootstrap_room`, in which the two find each other. The prefill worker computes one token whatever the
request allows, and gets the request without `stream`, for then its errors have a status; its answer is not passed on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from app.errors import TurnError
from app.fleet.specs import Handover
from app.fleet.workers import Target
from app.turn.fields import TooLarge, members, names, with_member

TRANSFER = "kv_transfer_params"
_HOST = "bootstrap_host"
_OURS = frozenset({_HOST, "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"})
"""Whoever decodes goes wherever these say."""
_PATHS: dict[Handover, frozenset[bytes]] = {
    "vllm": frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/messages"}),
    "sglang": frozenset({b"/v1/chat/completions", b"/v1/completions"}),
}
_ASKED = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_NULL = b"null"
_ONE = msgspec.Raw(b"1")
_ONES = frozenset({b"1", _NULL})
_NO_TEXT = msgspec.Raw(b'""')
_FALSE = msgspec.Raw(b"false")
_OF_THE_PROMPT = ("best_of", "use_beam_search", "prompt_embeds", "prompt_logprobs", "echo")
_HARMLESS = frozenset({_NULL, b"false", b"1"})
_NOT_OF_THE_PROMPT = ("stream_options", "min_tokens")
_TELLING = frozenset({"n", TRANSFER, "prompt", *_OF_THE_PROMPT, *_NOT_OF_THE_PROMPT, "max_completion_tokens"})
"""Members that may say that it cannot be split, or split in another way than most."""


class Parts(msgspec.Struct, frozen=True):
    """A request that can be split, as for vLLM."""

    prompt: bytes
    """For one token: has its prompt computed, for another worker."""
    members: dict[str, msgspec.Raw]
    """Of that."""

    def fetching(self, handover: bytes) -> bytes:
        """Fetches what was staged, and does little more."""
        return _encode({**self.members, TRANSFER: msgspec.Raw(handover)})


class Halves(msgspec.Struct, frozen=True):
    """A request that can be split, as for SGLang."""

    whole: bytes
    in_one_piece: bytes
    """It does not stream."""

    def meeting(self, prefill: Target, room: int) -> tuple[bytes, bytes]:
        """What the worker of `prefill` gets, and what the one that decodes. `room`: below 2^63, and no other
        request's."""
        worker, rank = prefill.worker, prefill.rank
        at = b'%b,"bootstrap_port":%d,"bootstrap_room":%d' % (_host(worker.url), worker.bootstrap_port, room)
        prompt = with_member(self.in_one_piece, _HOST, at)
        if rank is not None:  # told the worker itself in a header; without one both take it from the room
            at += b',"disagg_prefill_dp_rank":%d' % rank
        return prompt, with_member(self.whole, _HOST, at)


class _Blocks(msgspec.Struct):
    """What a hand-over of vLLM's must say."""

    do_remote_prefill: bool
    remote_block_ids: msgspec.Raw
    """Many numbers, which are not read."""
    remote_engine_id: str
    remote_host: str
    remote_port: int


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(_NULL)


_decode_prefilled = msgspec.json.Decoder(_Prefilled).decode
_decode_blocks = msgspec.json.Decoder(_Blocks).decode
_encode = msgspec.json.Encoder().encode


class NoHandover(Exception):
    """A prefill worker has answered without one that can be used: `kind` is missing or malformed."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the hand-over of the prompt is {kind}")
        self.kind = kind


def can_be_split(path: bytes, handover: Handover) -> bool:
    """Whether requests to this path have two phases: others have no field for the hand-over. (vLLM's Responses API has
    one, but a prefill worker would store the response, and call its tools.)"""
    return path in _PATHS[handover]


def split(
    body: bytes, handover: Handover = "vllm", said: Mapping[str, msgspec.Raw] | None = None
) -> Parts | Halves | None:
    """None: it cannot be, so that it goes whole to the decode worker. `said`: its members, where they are known."""
    said = members(body) if said is None else dict(said)
    if not said:
        return None
    try:
        return _halves(body, said) if handover == "sglang" else _parts(said)
    except UnicodeEncodeError:  # half a surrogate pair in a name
        return None


def _parts(said: dict[str, msgspec.Raw]) -> Parts | None:
    """None: it has several prompts or asks for several answers, wants to know of its prompt's tokens, or is split by
    somebody in front of us."""
    limits = "max_tokens"
    if not _TELLING.isdisjoint(said):
        if not _is_plain(said):
            return None
        for name in _NOT_OF_THE_PROMPT:
            said.pop(name, None)
        if "max_completion_tokens" in said:
            said["max_completion_tokens"] = _ONE
            limits = "max_tokens" if "max_tokens" in said else "max_completion_tokens"
    said[limits] = _ONE
    said["stream"] = _FALSE
    said[TRANSFER] = _ASKED
    return Parts(_encode(said), said)


def _is_plain(said: dict[str, msgspec.Raw]) -> bool:
    if bytes(said.get("n", _ONE)) not in _ONES or bytes(said.get(TRANSFER, _NULL)) != _NULL:
        return False
    prompt = bytes(said.get("prompt", _NO_TEXT)).strip()
    if prompt[:1] == b"[" and not prompt[1:].lstrip()[:1].isdigit():  # not one list of tokens
        return False
    return all(bytes(said.get(name, _NULL)) in _HARMLESS for name in _OF_THE_PROMPT)


def _halves(body: bytes, said: dict[str, msgspec.Raw]) -> Halves:
    """Nothing stops it, for whoever decodes takes no whole one; of several prompts, or answers, each has the room
    behind that of the one before. What a client says of how its workers are to meet is left out."""
    if not _OURS.isdisjoint(said):
        for name in _OURS:
            said.pop(name, None)
        body = _encode(said)
    if bytes(said.get("stream", _NULL)) in (_NULL, b"false"):
        return Halves(body, body)
    for name in ("stream", "stream_options"):
        said.pop(name, None)
    return Halves(body, _encode(said))


def refuse_meeting(body: bytes) -> None:
    """Nobody but the router says how two of SGLang's workers meet: not in a request that is sent whole either. Raises
    TurnError."""
    try:
        found = sorted(_OURS.intersection(names(body)))
    except TooLarge:
        raise TurnError("request_too_large", "the body is too intricate for a worker that decodes") from None
    if found:
        raise TurnError("invalid_request", f"leave {found[0]} out: the router says where workers meet", param=found[0])


@functools.lru_cache(maxsize=1024)
def _host(url: str) -> bytes:
    """As JSON, the host of a worker's URL."""
    host = urlsplit(url).hostname or ""
    return _encode(f"[{host}]" if ":" in host else host)


def handover_in(answer: bytes) -> bytes:
    """As the prefill worker says it. Raises NoHandover."""
    found = answer[answer.rfind(_SAYS_IT) + len(_SAYS_IT) : -1]  # vLLM says it last
    try:
        said = _decode_blocks(found)
    except (msgspec.DecodeError, RecursionError):
        try:
            found = bytes(_decode_prefilled(answer).kv_transfer_params)
            if found == _NULL:
                raise NoHandover("missing")
            said = _decode_blocks(found)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NoHandover("malformed") from error
    if not (said.do_remote_prefill and _some(said.remote_block_ids) and said.remote_engine_id and said.remote_host):
        raise NoHandover("malformed")
    return found


_SAYS_IT = b'"kv_transfer_params":'
"""In no string, for there the last quote would have a backslash before it."""


_some = re.compile(rb"\[\s*[^\s\]]").match


class _Plain(msgspec.Struct):
    """SGLang's form of an error."""

    message: str
    object: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


_decode_plain = msgspec.json.Decoder(_Plain).decode


def worded(body: bytes) -> bytes:
    """A worker's error as OpenAI's clients read it: SGLang's has its members outside of an `error`."""
    try:
        said = _decode_plain(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    if said.object != "error":
        return body
    detail = {"message": said.message, "type": said.type, "param": said.param, "code": said.code}
    return _encode({"error": detail})
