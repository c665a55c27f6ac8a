"""OpenAI's JSON: requests as they come in, answers as they go out, errors.

Requests are parsed leniently, as engines do: fields that a mock has no use for are ignored. The shapes follow OpenAI's
API reference (https://platform.openai.com/docs/api-reference) for chat completions, legacy completions and embeddings.
"""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mocker.cache import TOKEN_BYTES

MAX_TOKENS = 1_000_000
"""Beyond this a request is refused: an answer that does not stream is built in memory."""

BOS = b"<s>\n"
"""Begins every prompt that has no chat template. One token, so that even a one-word prompt has a prefix to cache."""

encode = msgspec.json.encode


class RequestError(Exception):
    """The request is answered with this error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if allow is None else {"allow": allow}
        self.body = error_body(message, kind="invalid_request_error", param=param, code=code)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """The only shape of which openai-python shows the message."""
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


@dataclass(slots=True, kw_only=True)
class Ask:
    """What a request wants, of whichever endpoint."""

    model: str
    prompt: bytes
    """Rendered: what the simulated engine sees."""
    max_tokens: int | None = None
    seed: int = 0
    stream: bool = False
    include_usage: bool = False
    inputs: Sequence[bytes] = ()
    """Embeddings: what to embed, one vector each."""
    dimensions: int = 0
    base64: bool = False


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


class _Generation(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    seed: int | None = None


class _Chat(_Generation, kw_only=True):
    messages: list[_Message]


class _Completion(_Generation, kw_only=True):
    prompt: str | list[Any]


class _Embedding(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None


_Request = TypeVar("_Request", bound=msgspec.Struct)


def _decoder(kind: type[_Request]) -> Callable[[bytes], _Request]:
    decode = msgspec.json.Decoder(kind).decode

    def parse(body: bytes) -> _Request:
        try:
            return decode(body)
        except msgspec.ValidationError as error:
            message = str(error)
            named = message.split("`")
            missing = message.startswith("Object missing required field") and "$" not in message
            raise RequestError(400, message, param=named[1] if missing else None) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(400, f"The body is not valid JSON: {error}") from error

    return parse


_parse_chat = _decoder(_Chat)
_parse_completion = _decoder(_Completion)
_parse_embedding = _decoder(_Embedding)


def parse_chat(body: bytes) -> Ask:
    """`POST /v1/chat/completions`. Raises RequestError."""
    request = _parse_chat(body)
    if not request.messages:
        raise RequestError(400, "messages must not be empty", param="messages")
    return _ask(request, render_chat(request.messages))


def parse_completion(body: bytes) -> Ask:
    """`POST /v1/completions`. One prompt per request. Raises RequestError."""
    request = _parse_completion(body)
    prompts = _inputs(request.prompt, "prompt")
    if len(prompts) != 1:
        raise RequestError(400, "only one prompt per request is supported", param="prompt")
    return _ask(request, BOS + prompts[0])


def parse_embedding(body: bytes) -> Ask:
    """`POST /v1/embeddings`. Raises RequestError."""
    request = _parse_embedding(body)
    if request.encoding_format not in (None, "float", "base64"):
        raise RequestError(400, "encoding_format must be 'float' or 'base64'", param="encoding_format")
    dimensions = 16 if request.dimensions is None else request.dimensions
    if not 1 <= dimensions <= 4096:
        raise RequestError(400, "dimensions must be 1 to 4096", param="dimensions")
    inputs = _inputs(request.input, "input")
    return Ask(
        model=request.model,
        prompt=b"".join(inputs),
        inputs=inputs,
        dimensions=dimensions,
        base64=request.encoding_format == "base64",
    )


def _ask(request: _Generation, prompt: bytes) -> Ask:
    if request.n not in (None, 1):
        raise RequestError(400, "only n=1 is supported", param="n")
    limit, param = request.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, param = request.max_tokens, "max_tokens"
    if limit is not None and not 1 <= limit <= MAX_TOKENS:
        raise RequestError(400, f"{param} must be 1 to {MAX_TOKENS}", param=param)
    return Ask(
        model=request.model,
        prompt=prompt,
        max_tokens=limit,
        seed=request.seed or 0,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def render_chat(messages: Sequence[_Message]) -> bytes:
    """The prompt by the ChatML template: a conversation grown by a message extends the bytes of what came before."""
    text = "".join(f"<|im_start|>{message.role}\n{_content(message)}<|im_end|>\n" for message in messages)
    return _utf8(f"{text}<|im_start|>assistant\n")


def _content(message: _Message) -> str:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part["text"] if isinstance(part.get("text"), str) else _json(part) for part in content)
    return content + _json(message.tool_calls) if message.tool_calls else content


def _json(value: Any) -> str:
    return encode(value).decode()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _inputs(value: str | list[Any], param: str) -> list[bytes]:
    """A text, texts, token ids, or lists of token ids. A token id becomes the `TOKEN_BYTES` of one token."""
    if isinstance(value, str):
        return [_utf8(value)]
    if value and all(isinstance(item, str) for item in value):
        return [_utf8(item) for item in value]
    lists = [value] if value and isinstance(value[0], int) else value
    if not lists or not all(isinstance(ids, list) and ids for ids in lists):
        raise RequestError(400, f"{param} must be a string, a list of strings, or token ids", param=param)
    try:
        return [b"".join(identity.to_bytes(TOKEN_BYTES, "little") for identity in ids) for ids in lists]
    except (AttributeError, OverflowError) as error:
        raise RequestError(400, f"{param} holds what is not a token id", param=param) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """How chat and legacy completions differ on the wire."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    role_first: bool
    whole: Callable[[str], dict[str, Any]]
    """The text's part of the choice of an answer that does not stream."""
    piece: Callable[[str | None], dict[str, Any]]
    """The token's part of the choice of a chunk; None: no token."""


CHAT = AnswerShape(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    role_first=True,
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    piece=lambda token: {"delta": {} if token is None else {"content": token}},
)

COMPLETION = AnswerShape(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    role_first=False,
    whole=lambda text: {"text": text},
    piece=lambda token: {"text": token or ""},
)


def whole_answer(shape: AnswerShape, identity: str, model: str, text: str, finish: str, usage: Usage) -> bytes:
    """The answer of a request that does not stream."""
    return encode(
        {
            "id": shape.id_prefix + identity,
            "object": shape.whole_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
            "choices": [{"index": 0, **shape.whole(text), "logprobs": None, "finish_reason": finish}],
            "usage": usage.as_json(),
        }
    )


class StreamedAnswer:
    """The events of one stream, encoded once but for the token: event = `head` + token + `tail`.

    Tokens must be JSON string content already. With `include_usage` every chunk carries `usage: null` and a last one
    without choices carries the usage, as OpenAI does it.
    """

    def __init__(self, shape: AnswerShape, identity: str, model: str, *, include_usage: bool) -> None:
        self._shape = shape
        self._base: dict[str, Any] = {
            "id": shape.id_prefix + identity,
            "object": shape.chunk_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._include_usage = include_usage
        slot = "{token}"
        self.head, _, self.tail = self._chunk(shape.piece(slot)).rpartition(slot.encode())
        self.begin = self._chunk({"delta": {"role": "assistant", "content": ""}}) if shape.role_first else b""
        """What goes before the first token."""

    def end(self, finish: str, usage: Usage) -> bytes:
        """What goes after the last token."""
        events = self._chunk(self._shape.piece(None), finish)
        if self._include_usage:
            events += _event({**self._base, "choices": [], "usage": usage.as_json()})
        return events + b"data: [DONE]\n\n"

    def _chunk(self, piece: dict[str, Any], finish: str | None = None) -> bytes:
        chunk = {**self._base, "choices": [{"index": 0, **piece, "logprobs": None, "finish_reason": finish}]}
        if self._include_usage:
            chunk["usage"] = None
        return _event(chunk)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def embedding_answer(model: str, vectors: Sequence[Sequence[float]], *, as_base64: bool, prompt_tokens: int) -> bytes:
    """Vectors as JSON numbers, or as base64 of little-endian float32, which openai-python asks for by default."""
    return encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _float32(vector) if as_base64 else vector}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }
    )


def _float32(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
