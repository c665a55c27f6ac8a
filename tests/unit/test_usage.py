"""What answers tell of their tokens, in every API's words."""

from __future__ import annotations

from app.turn.usage import FAR, tokens
from tests.support.rows import rows

CHAT = (
    b'{"id":"x","choices":[],"usage":{"prompt_tokens":1234,"total_tokens":1334,"completion_tokens":100,'
    b'"prompt_tokens_details":{"cached_tokens":1024}},"prompt_logprobs":null}'
)


@rows(
    ("answer", "told"),
    [
        (CHAT, (1234, 1024)),
        (CHAT.replace(b":", b": "), (1234, 1024)),
        (CHAT.replace(b":", b" :\n").replace(b",", b" ,\n"), (1234, 1024)),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":5},"prompt_tokens":7}}', (7, 5)),
        (b'{"usage":{"prompt_tokens":7,"total_tokens":9,"prompt_tokens_details":null}}', (7, 0)),
        (b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":null}}}', (7, 0)),
        (b'{"object":"list","data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}\n', (7, 0)),
        (b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":1}}', (9, 4)),
        (b'{"usage":{"input_tokens":9,"cache_creation_input_tokens":2,"cache_read_input_tokens":30}}', (41, 30)),
        (b'data: {"usage":{"prompt_tokens":1}}\n\ndata: {"usage":{"prompt_tokens":7}}\n\ndata: [DONE]\n\n', (7, 0)),
        (b"data: " + CHAT + b"\n\ndata: [DONE]\n\n", (1234, 1024)),
        (b'{"content":"\\"usage\\":{\\"prompt_tokens\\":1}"}', None),
        (b'{"usage":null}', None),
        (b'{"usage":{"prompt_tokens":-1}}', None),
        (b'{"usage":{"prompt_tokens":1e3}}', (1, 0)),
        (b'{"usage":{"prompt_tokens":' + b"9" * 5000 + b"}}", None),
        (CHAT + b" " * FAR, None),
        (b"\x1f\x8b\x00", None),
        (b"", None),
    ],
)
def test_usage(answer: bytes, told: tuple[int, int] | None) -> None:
    assert tokens(answer) == told
