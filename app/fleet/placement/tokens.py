"""Prompts as tokens, by a worker's own `/tokenize`: it knows its template exactly.

vLLM takes there what chat completions and completions take, as far as it changes the prompt. A request that says more
than that, of which pictures are the most frequent, has no exact tokens here. What was tokenised lately is remembered.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from app.fleet.placement.blocks import Piece
from app.fleet.workers import Worker
from app.http.calling import call
from app.http.worker import AttemptFailed
from app.metrics import Metrics

_PATH = b"/tokenize"
_MOST_ANSWER = 64 << 20
_MOST_REMEMBERED = 16 << 20
"""Bytes of tokens, four each, and `_AN_ENTRY` for each prompt."""
_AN_ENTRY = 300
_PASSED = ("messages", "tools", "prompt", "add_generation_prompt", "continue_final_message", "add_special_tokens",
           "chat_template", "chat_template_kwargs")  # fmt: skip
"""Fields of a request that change its prompt, and that `/tokenize` takes as well."""
_INEXACT = ("reasoning_effort", "documents", "tool_choice", "response_format", "mm_processor_kwargs", "prompt_embeds",
            "truncate_prompt_tokens", "structured_outputs", "functions", "include_reasoning",
            "kv_transfer_params")  # fmt: skip
"""Fields that change it, or may, and that it does not."""
_has_other_parts = re.compile(
    rb'"type"\s*:\s*"(?!text"|function"|object"|string"|number"|integer"|array"|boolean"|null")'
).search
_HARMLESS = {"tool_choice": (b'"auto"',)}


class Tokenizer:
    """Of one router."""

    def __init__(self, metrics: Metrics, key_line: Callable[[], bytes], *, seconds: float) -> None:
        """`key_line`: the header with the workers' key, as it is now, if they want one. `seconds`: for an answer."""
        self._metrics, self._key_line, self._seconds = metrics, key_line, seconds
        self._known: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        """By the hash and the length of what was asked: the tokens as they are hashed. The longest unused first."""
        self._size = 0
        self._asking: dict[tuple[int, int], asyncio.Future[bytes | None]] = {}

    async def tokens(self, path: bytes, model: str, said: Mapping[str, Piece], worker: Worker) -> bytes | None:
        """Of a request's prompt, as they are hashed (`index.token_bytes`); None: they cannot be had, which is
        counted."""
        body = _request(path, model, said)
        if body is None:
            self._metrics.tokenized.inc("inexact")
            return None
        if isinstance(body, array):
            self._metrics.tokenized.inc("given")
            return body.tobytes()
        key = hash(body), len(body)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._metrics.tokenized.inc("remembered")
            return known
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._ask(key, body, worker))
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(asking)

    async def _ask(self, key: tuple[int, int], body: bytes, worker: Worker) -> bytes | None:
        head = b"POST %b%b%bcontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n" % (
            worker.base_path,
            _PATH,
            worker.host_line,
            self._key_line(),
            len(body),
        )
        try:
            status, answer = await call(worker.pool, head + body, seconds=self._seconds, most=_MOST_ANSWER)
            if status != 200:
                raise ValueError(f"status {status}")
            tokens = array("I", msgspec.json.decode(answer, type=_Tokens).tokens).tobytes()
        except (AttemptFailed, ValueError, OverflowError, RecursionError, OSError):
            self._metrics.tokenized.inc("failed")
            return None
        self._metrics.tokenized.inc("ok")
        self._remember(key, tokens)
        return tokens

    def _remember(self, key: tuple[int, int], tokens: bytes) -> None:
        self._known[key] = tokens
        self._size += len(tokens) + _AN_ENTRY
        while self._size > _MOST_REMEMBERED:
            self._size -= len(self._known.popitem(last=False)[1]) + _AN_ENTRY


class _Tokens(msgspec.Struct):
    tokens: list[int]


def _request(path: bytes, model: str, said: Mapping[str, Piece]) -> bytes | array[int] | None:
    """What is asked; tokens, where the prompt is tokens already; None: there are none that are exact."""
    if any(name in said and bytes(said[name]) not in _HARMLESS.get(name, ()) for name in _INEXACT):
        return None
    if path == b"/v1/completions" and "prompt" in said:
        prompt = bytes(said["prompt"])
        if prompt[:1] == b"[":
            try:
                return array("I", msgspec.json.decode(prompt, type=list[int]))
            except (msgspec.DecodeError, OverflowError):
                return None  # several prompts
    elif path != b"/v1/chat/completions" or "messages" not in said or _has_other_parts(bytes(said["messages"])):
        return None
    wanted = [name for name in _PASSED if name in said and (name == "prompt") >= (path == b"/v1/completions")]
    if path == b"/v1/completions" and "add_special_tokens" not in said:
        said = {**said, "add_special_tokens": b"true"}  # as there
        wanted.append("add_special_tokens")
    fields = [b'"model":%b' % msgspec.json.encode(model), *(b'"%b":%b' % (n.encode(), bytes(said[n])) for n in wanted)]
    return b"{%b}" % b",".join(fields)
