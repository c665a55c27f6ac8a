"""What an answer tells of its tokens, looked up in its last bytes; the rest of it is not read.

OpenAI's chat, completions, embeddings: `usage.prompt_tokens`, in it `prompt_tokens_details.cached_tokens`. Responses:
`usage.input_tokens`, `input_tokens_details.cached_tokens`. Anthropic's Messages: `usage.input_tokens`, without what
`cache_read_input_tokens` and `cache_creation_input_tokens` count. Of a stream it is what the last `usage` says.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

FAR = 2048
"""Bytes from the end in which it is looked for."""
_NEAR = 640
"""Bytes behind its name in which what it says stands."""
# A text that JSON carries has a backslash before each quote, so this is never part of one.
_NAME = b'"usage"'
_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class _Details(msgspec.Struct):
    cached_tokens: _Count


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    prompt_tokens_details: _Details


_decode = msgspec.json.Decoder(_Usage).decode
_fields = re.compile(
    rb'"(prompt_tokens|input_tokens|cached_tokens|cache_read_input_tokens|cache_creation_input_tokens)"'
    rb"[ \t\r\n]*:[ \t\r\n]*(\d{1,12})(?!\d)"
).findall


def tokens(answer: bytes) -> tuple[int, int] | None:
    """Of the prompt, and of these the cached ones; None: it does not say."""
    at = answer.rfind(_NAME, -FAR if len(answer) > FAR else 0)
    if at < 0:
        return None
    # As vLLM and SGLang write it: the details stand last. The general way takes several times as long.
    end = answer.find(b"}}", at, at + _NEAR)
    if end > 0:
        try:
            usage = _decode(answer[at + 8 : end + 2])
        except msgspec.DecodeError:
            pass
        else:
            return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
    return _read(answer[at : at + _NEAR])


def _read(said: bytes) -> tuple[int, int] | None:
    found = {name: int(number) for name, number in reversed(_fields(said))}  # the first of equal names
    if b"prompt_tokens" in found:
        return found[b"prompt_tokens"], found.get(b"cached_tokens", 0)
    if b"input_tokens" not in found:
        return None
    read = found.get(b"cache_read_input_tokens", 0)
    beside = read + found.get(b"cache_creation_input_tokens", 0)
    return found[b"input_tokens"] + beside, found.get(b"cached_tokens", read)
