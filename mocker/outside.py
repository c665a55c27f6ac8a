"""What engines serve outside `/v1`: small plausible answers, each in the shape of the engine that has the path.

vLLM: `/tokenize`, `/detokenize`, `/rerank`, `/score`, `/pooling`, `/classify`, and `/invocations`, which is SageMaker's
and takes the body of whatever API. SGLang: `/generate`. llama.cpp: `/completion`, `/infill`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from mocker import wire
from mocker.cache import TOKEN_BYTES, count_tokens
from mocker.voice import Voice
from mocker.wire import Ask, Finish, Message, RequestError, Usage

_DIMENSIONS = 8
_LABELS = ("no", "yes")


class _Tokenize(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


class _Detokenize(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class _Rerank(msgspec.Struct):
    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None


class _Score(msgspec.Struct):
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class _Input(msgspec.Struct):
    input: str | list[Any]
    model: str | None = None


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None


class _Generate(msgspec.Struct):
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: _Sampling | None = None
    stream: bool | None = None
    model: str | None = None


class _Llama(msgspec.Struct):
    prompt: str | list[Any] = ""
    input_prefix: str = ""
    input_suffix: str = ""
    n_predict: int | None = None
    stream: bool | None = None
    model: str | None = None


_parse_tokenize = wire.decoder(_Tokenize)
_parse_detokenize = wire.decoder(_Detokenize)
_parse_rerank = wire.decoder(_Rerank)
_parse_score = wire.decoder(_Score)
_parse_input = wire.decoder(_Input)
_parse_generate = wire.decoder(_Generate)
_parse_llama = wire.decoder(_Llama)


def parse_tokenize(body: bytes) -> Ask:
    """The tokens that the engine sees: of messages those of chat completions, of a prompt with `add_special_tokens`
    those of completions."""
    request = _parse_tokenize(body)
    if request.messages is not None:
        text = wire.render_chat(request.messages)
    elif request.prompt is not None:
        text = (wire.BOS if request.add_special_tokens else b"") + wire.utf8(request.prompt)
    else:
        raise RequestError(400, "prompt or messages must be given", param="prompt")
    ids = [int.from_bytes(text[at : at + TOKEN_BYTES], "little") for at in range(0, len(text), TOKEN_BYTES)]
    answer = {"count": len(ids), "max_model_len": wire.MAX_TOKENS, "tokens": ids, "token_strs": None}
    return _at_once(request.model, text, lambda _: answer, reads=False)


def parse_detokenize(body: bytes) -> Ask:
    request = _parse_detokenize(body)
    (text,) = wire.texts_of(request.tokens, "tokens")
    answer = {"prompt": text.rstrip(b"\0").decode("utf-8", "replace")}
    return _at_once(request.model, text, lambda _: answer, reads=False)


def parse_rerank(body: bytes) -> Ask:
    request = _parse_rerank(body)
    query = wire.utf8(request.query)

    def answer(voice: Voice) -> Any:
        scores = [_score(voice, query, wire.utf8(text)) for text in request.documents]
        found = [
            {"index": index, "document": {"text": request.documents[index]}, "relevance_score": scores[index]}
            for index in sorted(range(len(scores)), key=lambda index: -scores[index])
        ]
        return {"id": "rerank-mock", "model": request.model, "usage": usage, "results": found[: request.top_n]}

    read = query + b"".join(map(wire.utf8, request.documents))
    usage = {"total_tokens": count_tokens(read), "prompt_tokens": count_tokens(read)}
    return _at_once(request.model, read, answer)


def parse_score(body: bytes) -> Ask:
    request = _parse_score(body)
    ones, others = wire.texts_of(request.text_1, "text_1"), wire.texts_of(request.text_2, "text_2")
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise RequestError(400, "text_1 must be one text, or as many as text_2", param="text_1")
    return _listed(
        request.model,
        b"".join(ones + others),
        "score",
        lambda voice: [{"score": _score(voice, one, other)} for one, other in zip(ones, others, strict=True)],
    )


def parse_pooling(body: bytes) -> Ask:
    request = _parse_input(body)
    inputs = wire.texts_of(request.input, "input")
    return _listed(
        request.model,
        b"".join(inputs),
        "pooling",
        lambda voice: [{"data": voice.embedding(text, _DIMENSIONS)} for text in inputs],
    )


def parse_classify(body: bytes) -> Ask:
    request = _parse_input(body)
    inputs = wire.texts_of(request.input, "input")

    def classify(voice: Voice) -> list[dict[str, Any]]:
        chances = [_score(voice, text, b"") for text in inputs]
        return [
            {"label": _LABELS[chance >= 0.5], "probs": [1 - chance, chance], "num_classes": len(_LABELS)}
            for chance in chances
        ]

    return _listed(request.model, b"".join(inputs), "classify", classify)


def parse_generate(body: bytes) -> Ask:
    request = _parse_generate(body)
    if request.text is None and not request.input_ids:
        raise RequestError(400, "text or input_ids must be given", param="text")
    (text,) = wire.texts_of(request.input_ids or request.text or "", "text")
    limit = request.sampling_params.max_new_tokens if request.sampling_params else None
    return Ask(
        model=request.model,
        prompt=wire.BOS + text,
        prompt_tokens=count_tokens(wire.BOS + text),
        answer=SGLangAnswer,
        max_tokens=wire.checked_limit(limit, "max_new_tokens"),
        stream=bool(request.stream),
    )


def parse_llama(body: bytes) -> Ask:
    """`/completion` and `/infill`."""
    request = _parse_llama(body)
    prompts = wire.texts_of(request.prompt, "prompt")
    if len(prompts) != 1:
        raise RequestError(400, "only one prompt per request is supported", param="prompt")
    prompt = wire.BOS + wire.utf8(request.input_prefix) + prompts[0] + wire.utf8(request.input_suffix)
    limit = None if request.n_predict == -1 else request.n_predict
    return Ask(
        model=request.model,
        prompt=prompt,
        prompt_tokens=count_tokens(prompt),
        answer=lambda _: LlamaAnswer(),
        max_tokens=wire.checked_limit(limit, "n_predict"),
        stream=bool(request.stream),
    )


def parse_invocation(body: bytes) -> Ask:
    """Whatever its fields say that it is."""
    fields = wire.decoder(dict[str, msgspec.Raw])(body)
    for field, parse in (
        ("messages", wire.parse_chat),
        ("prompt", wire.parse_completion),
        ("input", wire.parse_embedding),
    ):
        if field in fields:
            return parse(body)
    raise RequestError(400, "The body is of no API that is known here.")


PARSERS: Mapping[str, Callable[[bytes], Ask]] = {
    "/tokenize": parse_tokenize,
    "/detokenize": parse_detokenize,
    "/rerank": parse_rerank,
    "/v1/rerank": parse_rerank,
    "/v2/rerank": parse_rerank,
    "/score": parse_score,
    "/v1/score": parse_score,
    "/pooling": parse_pooling,
    "/classify": parse_classify,
    "/generate": parse_generate,
    "/completion": parse_llama,
    "/infill": parse_llama,
    "/invocations": parse_invocation,
}


def _at_once(model: str | None, read: bytes, answer: Callable[[Voice], Any], *, reads: bool = True) -> Ask:
    return Ask(
        model=model,
        prompt=read,
        prompt_tokens=count_tokens(read),
        compute=lambda voice: wire.encode(answer(voice)),
        reads=reads,
    )


def _listed(model: str | None, read: bytes, kind: str, results: Callable[[Voice], list[dict[str, Any]]]) -> Ask:
    """vLLM's list of results, one per input."""
    usage = {"prompt_tokens": count_tokens(read), "total_tokens": count_tokens(read), "completion_tokens": 0}
    return _at_once(
        model,
        read,
        lambda voice: {
            "id": f"{kind}-mock",
            "object": "list",
            "model": model,
            "data": [{"index": index, "object": kind, **each} for index, each in enumerate(results(voice))],
            "usage": usage,
        },
    )


def _score(voice: Voice, one: bytes, other: bytes) -> float:
    """From 0 to 1, the same for the same two texts on every worker."""
    return (voice.embedding(one + b"\0" + other, 2)[0] + 1) / 2


class SGLangAnswer:
    """Its stream says in every event all that was said so far."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self._text = b""

    def whole(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        return wire.encode(self._object(texts[0], finish, usage))

    def begin(self, usage: Usage) -> bytes:
        return b""

    def token(self, pieces: Sequence[bytes]) -> bytes:
        self._text += pieces[0]
        return b'data: {"text":"%b","meta_info":{"finish_reason":null}}\n\n' % self._text

    def end(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        return wire.event(self._object(texts[0], finish, usage)) + wire.DONE

    def failed(self, error: RequestError) -> bytes:
        return b"data: " + wire.error_body(error) + b"\n\n" + wire.DONE

    def left(self) -> None:
        pass

    def _object(self, text: str, finish: Finish, usage: Usage) -> dict[str, Any]:
        meta = {
            "id": self._identity,
            "finish_reason": {"type": finish},
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        }
        return {"text": text, "meta_info": meta}


class LlamaAnswer:
    """llama.cpp's."""

    def whole(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        return wire.encode(self._object(texts[0], finish, usage))

    def begin(self, usage: Usage) -> bytes:
        return b""

    def token(self, pieces: Sequence[bytes]) -> bytes:
        return b'data: {"index":0,"content":"%b","stop":false}\n\n' % pieces[0]

    def end(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        return wire.event(self._object("", finish, usage))

    def failed(self, error: RequestError) -> bytes:
        return wire.event({"code": error.status, "message": error.message, "type": "server_error"}, name="error")

    def left(self) -> None:
        pass

    def _object(self, text: str, finish: Finish, usage: Usage) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "stop_type": "eos" if finish == "stop" else "limit",
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
        }
