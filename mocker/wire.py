"""What every API's wire shares, and OpenAI's JSON: requests as they come in, answers as they go out, errors.

Requests are parsed leniently, as engines do: fields that a mock has no use for are ignored. The shapes follow OpenAI's
API reference (https://platform.openai.com/docs/api-reference) for chat completions, legacy completions and embeddings.
"""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from mocker import identity
from mocker.cache import TOKEN_BYTES, count_tokens
from mocker.voice import Voice

MAX_TOKENS = 1_000_000
"""Beyond this a request is refused: an answer that does not stream is built in memory."""

BOS = b"<s>\n"
"""Begins every prompt that has no chat template. One token, so that even a one-word prompt has a prefix to cache."""

MAX_CHOICES = 128
"""As OpenAI's limit of `n`."""

encode = msgspec.json.encode


Finish = Literal["stop", "length"]
"""Why an answer ends: by itself, or at the limit that the request set."""


class RequestError(Exception):
    """The request is answered with this error; each API has a shape for it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}


def error_body(error: RequestError) -> bytes:
    """The only shape of which openai-python shows the message."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return encode({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


class Answer(Protocol):
    """How an API says one generated answer: as a whole, or as the events of a stream, each a blank line's end."""

    def whole(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        """The answer of a request that does not stream; a text per choice."""

    def begin(self, usage: Usage) -> bytes:
        """The events before the first token; `usage` has no completion tokens yet."""

    def token(self, pieces: Sequence[bytes]) -> bytes:
        """The events of one step: a token per choice, each JSON string content already."""

    def end(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        """The events after the last token."""

    def failed(self, error: RequestError) -> bytes:
        """The events that say in mid-stream that there is no more, in place of `end`."""

    def left(self) -> None:
        """The client left, or its connection was broken, before the end."""


@dataclass(slots=True, kw_only=True)
class Ask:
    """What a request wants, of whichever endpoint: `answer` to be generated, or what `compute` says at once."""

    model: str | None
    """None: the request named none, and any will do."""
    prompt: bytes
    """Rendered: what the simulated engine sees."""
    prompt_tokens: int
    answer: Callable[[str], Answer] | None = None
    """Made with an id."""
    compute: Callable[[Voice], bytes] | None = None
    max_tokens: int | None = None
    """How long the answer is."""
    most_tokens: int | None = None
    """How long it may be; what would be longer by default is cut."""
    choices: int = 1
    seed: int = 0
    stream: bool = False
    background: bool = False
    """The answer is made without its request; `answer` makes a `responses.ResponseAnswer`."""
    kept_as: str | None = None
    """The id by which the answer is kept here, and its conversation cached if nothing else names a session."""
    named: identity.Named | None = None
    """The session, as the body says it."""
    salt: str = ""
    """Prompts with another share no blocks with it."""
    transfer: dict[str, Any] | None = None
    """vLLM's `kv_transfer_params`."""
    met_at: dict[str, Any] | None = None
    """SGLang's place and room, as far as they are said."""
    reads: bool = True
    """The model is needed for it; False: only its tokens are counted."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Message(msgspec.Struct):
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
    prompt_cache_key: Any = None
    metadata: Any = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


class _Chat(_Generation, kw_only=True):
    messages: list[Message]


class _Completion(_Generation, kw_only=True):
    prompt: str | list[Any]


class _Embedding(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None


_Request = TypeVar("_Request")


def decoder(kind: type[_Request]) -> Callable[[bytes], _Request]:
    """Reads a body as `kind`, which raises RequestError."""
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


_parse_chat = decoder(_Chat)
_parse_completion = decoder(_Completion)
_parse_embedding = decoder(_Embedding)


def parse_chat(body: bytes) -> Ask:
    """`POST /v1/chat/completions`. Raises RequestError."""
    request = _parse_chat(body)
    if not request.messages:
        raise RequestError(400, "messages must not be empty", param="messages")
    return _ask(request, render_chat(request.messages), CHAT)


def parse_completion(body: bytes) -> Ask:
    """`POST /v1/completions`. One prompt per request. Raises RequestError."""
    request = _parse_completion(body)
    prompts = texts_of(request.prompt, "prompt")
    if len(prompts) != 1:
        raise RequestError(400, "only one prompt per request is supported", param="prompt")
    return _ask(request, BOS + prompts[0], COMPLETION)


def parse_embedding(body: bytes) -> Ask:
    """`POST /v1/embeddings`. Raises RequestError."""
    request = _parse_embedding(body)
    if request.encoding_format not in (None, "float", "base64"):
        raise RequestError(400, "encoding_format must be 'float' or 'base64'", param="encoding_format")
    dimensions = 16 if request.dimensions is None else request.dimensions
    if not 1 <= dimensions <= 4096:
        raise RequestError(400, "dimensions must be 1 to 4096", param="dimensions")
    inputs = texts_of(request.input, "input")
    tokens = sum(map(count_tokens, inputs))

    def compute(voice: Voice) -> bytes:
        vectors = [voice.embedding(text, dimensions) for text in inputs]
        as_base64 = request.encoding_format == "base64"
        return embedding_answer(request.model, vectors, as_base64=as_base64, prompt_tokens=tokens)

    return Ask(model=request.model, prompt=b"".join(inputs), prompt_tokens=tokens, compute=compute)


def _ask(request: _Generation, prompt: bytes, shape: AnswerShape) -> Ask:
    choices = 1 if request.n is None else request.n
    if not 1 <= choices <= MAX_CHOICES:
        raise RequestError(400, f"n must be 1 to {MAX_CHOICES}", param="n")
    limit, param = request.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, param = request.max_tokens, "max_tokens"
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    return Ask(
        model=request.model,
        prompt=prompt,
        prompt_tokens=count_tokens(prompt),
        answer=lambda id_: ChatAnswer(shape, id_, request.model, choices, include_usage=include_usage),
        max_tokens=checked_limit(limit, param),
        choices=choices,
        seed=request.seed or 0,
        stream=bool(request.stream),
        named=identity.of_body(request.prompt_cache_key, request.metadata),
        salt=request.cache_salt or "",
        transfer=request.kv_transfer_params,
        met_at={
            "host": request.bootstrap_host,
            "port": request.bootstrap_port,
            "room": request.bootstrap_room,
        },
    )


def checked_limit(limit: int | None, param: str) -> int | None:
    """A request's limit of tokens, if it sets one. Raises RequestError."""
    if limit is not None and not 1 <= limit <= MAX_TOKENS:
        raise RequestError(400, f"{param} must be 1 to {MAX_TOKENS}", param=param)
    return limit


def render_chat(messages: Sequence[Message]) -> bytes:
    """The prompt by the ChatML template: a conversation grown by a message extends the bytes of what came before."""
    text = "".join(f"<|im_start|>{message.role}\n{_content(message)}<|im_end|>\n" for message in messages)
    return utf8(f"{text}<|im_start|>assistant\n")


def _content(message: Message) -> str:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part["text"] if isinstance(part.get("text"), str) else json_text(part) for part in content)
    return content + json_text(message.tool_calls) if message.tool_calls else content


def json_text(value: Any) -> str:
    return encode(value).decode()


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def texts_of(value: str | list[Any], param: str) -> list[bytes]:
    """A text, texts, token ids, or lists of token ids. A token id becomes the `TOKEN_BYTES` of one token."""
    if isinstance(value, str):
        return [utf8(value)]
    if value and all(isinstance(item, str) for item in value):
        return [utf8(item) for item in value]
    lists = [value] if value and isinstance(value[0], int) else value
    if not lists or not all(isinstance(ids, list) and ids for ids in lists):
        raise RequestError(400, f"{param} must be a string, a list of strings, or token ids", param=param)
    try:
        return [b"".join(identity.to_bytes(TOKEN_BYTES, "little") for identity in ids) for ids in lists]
    except (AttributeError, OverflowError) as error:
        raise RequestError(400, f"{param} holds what is not a token id", param=param) from error


@dataclass(frozen=True, slots=True)
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


class ChatAnswer:
    """A chat's or a legacy completion's answer. Its chunks are encoded once but for the token: head + token + tail.

    With `include_usage` every chunk carries `usage: null` and a last one without choices carries the usage, as OpenAI
    does it.
    """

    def __init__(self, shape: AnswerShape, identity: str, model: str, choices: int, *, include_usage: bool) -> None:
        self._shape = shape
        self._base: dict[str, Any] = {
            "id": shape.id_prefix + identity,
            "object": shape.chunk_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._include_usage = include_usage
        self._frames = [split_at_slot(self._chunk(index, shape.piece(SLOT))) for index in range(choices)]

    def whole(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        return encode(
            {
                **self._base,
                "object": self._shape.whole_object,
                "choices": [
                    {"index": index, **self._shape.whole(text), "logprobs": None, "finish_reason": finish}
                    for index, text in enumerate(texts)
                ],
                "usage": usage.as_json(),
            }
        )

    def begin(self, usage: Usage) -> bytes:
        if not self._shape.role_first:
            return b""
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(index, role) for index in range(len(self._frames)))

    def token(self, pieces: Sequence[bytes]) -> bytes:
        if len(pieces) == 1:
            head, tail = self._frames[0]
            return head + pieces[0] + tail
        return b"".join([head + piece + tail for (head, tail), piece in zip(self._frames, pieces, strict=True)])

    def end(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        events = b"".join(self._chunk(index, self._shape.piece(None), finish) for index in range(len(texts)))
        if self._include_usage:
            events += event({**self._base, "choices": [], "usage": usage.as_json()})
        return events + DONE

    def failed(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def left(self) -> None:
        pass

    def _chunk(self, index: int, piece: dict[str, Any], finish: str | None = None) -> bytes:
        chunk = {**self._base, "choices": [{"index": index, **piece, "logprobs": None, "finish_reason": finish}]}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)


DONE = b"data: [DONE]\n\n"

SLOT = "{token}"
"""Stands for the token in an event that is encoded once."""


def split_at_slot(encoded: bytes) -> tuple[bytes, bytes]:
    """What goes before the token, and after it."""
    head, _, tail = encoded.rpartition(SLOT.encode())
    return head, tail


def event(data: Mapping[str, Any], *, name: str | None = None) -> bytes:
    """One event of a stream; `name` where its API names them."""
    line = b"" if name is None else b"event: %b\n" % name.encode()
    return line + b"data: " + encode(data) + b"\n\n"


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
