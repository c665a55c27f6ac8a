"""Anthropic's Messages API: `POST /v1/messages`, whole or as a stream, and its count of tokens.

The shapes follow Anthropic's API reference (https://docs.anthropic.com/en/api/messages, and …/messages-streaming for
the order of the events). Every event has a name there, since its SDKs ignore what has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mocker import identity, wire
from mocker.cache import count_tokens
from mocker.wire import Ask, Finish, Message, RequestError, Usage

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOP_REASONS: dict[Finish, str] = {"stop": "end_turn", "length": "max_tokens"}


class _Prompt(msgspec.Struct, kw_only=True):
    model: str
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


class _Request(_Prompt, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    metadata: Any = None
    kv_transfer_params: dict[str, Any] | None = None


_parse_prompt = wire.decoder(_Prompt)
_parse_request = wire.decoder(_Request)


def parse(body: bytes) -> Ask:
    """`POST /v1/messages`. Raises RequestError.

    `max_tokens` must be set there, and clients set it to what a model can do at most. So it is a limit here, and not
    the length as elsewhere.
    """
    request = _parse_request(body)
    prompt = _render(request)
    return Ask(
        model=request.model,
        prompt=prompt,
        prompt_tokens=count_tokens(prompt),
        answer=lambda id_: MessageAnswer(f"msg_{id_}", request.model),
        most_tokens=wire.checked_limit(request.max_tokens, "max_tokens"),
        stream=bool(request.stream),
        named=identity.of_body(None, request.metadata),
        transfer=request.kv_transfer_params,
    )


def parse_count(body: bytes) -> Ask:
    """`POST /v1/messages/count_tokens`. Raises RequestError."""
    request = _parse_prompt(body)
    prompt = _render(request)
    tokens = count_tokens(prompt)
    counted = wire.encode({"input_tokens": tokens})
    return Ask(model=request.model, prompt=prompt, prompt_tokens=tokens, compute=lambda _: counted, reads=False)


def _render(request: _Prompt) -> bytes:
    if not request.messages:
        raise RequestError(400, "messages: at least one message is required", param="messages")
    tools = [Message(role="system", content=wire.json_text(request.tools))] if request.tools else []
    system = [Message(role="system", content=request.system)] if request.system else []
    return wire.render_chat([*tools, *system, *request.messages])


def error_body(error: RequestError) -> bytes:
    """Anthropic's shape: the only one of which its SDKs show type and message."""
    return wire.encode({**_error(error), "request_id": "req_mock"})


def _error(error: RequestError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageAnswer:
    """One message of one block of text."""

    def __init__(self, identity: str, model: str) -> None:
        self._identity = identity
        self._model = model
        text = {"type": "text_delta", "text": wire.SLOT}
        delta = _event("content_block_delta", {"index": 0, "delta": text})
        self._head, self._tail = wire.split_at_slot(delta)

    def whole(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        content = [{"type": "text", "text": text} for text in texts]
        return wire.encode(self._message(content, _STOP_REASONS[finish], usage))

    def begin(self, usage: Usage) -> bytes:
        return (
            _event("message_start", {"message": self._message([], None, usage)})
            + _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
            + _event("ping", {})
        )

    def token(self, pieces: Sequence[bytes]) -> bytes:
        return self._head + pieces[0] + self._tail

    def end(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        delta = {"stop_reason": _STOP_REASONS[finish], "stop_sequence": None}
        return (
            _event("content_block_stop", {"index": 0})
            + _event("message_delta", {"delta": delta, "usage": _usage(usage)})
            + _event("message_stop", {})
        )

    def failed(self, error: RequestError) -> bytes:
        return wire.event(_error(error), name="error")

    def left(self) -> None:
        pass

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._identity,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what came from the cache beside the input tokens, and not among them."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return wire.event({"type": kind, **fields}, name=kind)
