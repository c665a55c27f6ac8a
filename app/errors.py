"""Every way a turn can fail, and the one table that says what the client is told.

A failure is named by its phase. Only the table knows HTTP: status, the type of OpenAI's error object, and whether
trying again can help (`Retry-After`, and `x-should-retry`, which the official clients obey). The path chooses the
shape, because a client shows an error only in that of its API: OpenAI's `{"error": {"message", "type", "param",
"code"}}`, or below `/v1/messages` Anthropic's `{"type": "error", "error": {"type", "message"}, "request_id"}`, whose
types go by the status.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

Header = tuple[bytes, bytes]


class ErrorShape(msgspec.Struct, frozen=True):
    """What a failure looks like to the client."""

    status: int
    type: str
    retry: bool | None = None
    """True/False: said in `x-should-retry`. None: left to the client's own rules."""
    retry_after: int | None = None
    """Seconds, said in `Retry-After`."""


_INVALID = "invalid_request_error"
_SERVER = "server_error"

TABLE: dict[str, ErrorShape] = {
    # the request itself
    "invalid_request": ErrorShape(400, _INVALID),
    "invalid_session_id": ErrorShape(400, _INVALID),
    "invalid_hint": ErrorShape(400, _INVALID),
    "unknown_worker": ErrorShape(400, _INVALID),
    "hint_required": ErrorShape(400, _INVALID),
    "hint_conflict": ErrorShape(400, _INVALID),
    "invalid_api_key": ErrorShape(401, "authentication_error"),
    "forbidden": ErrorShape(403, "permission_error"),
    "not_found": ErrorShape(404, _INVALID),
    "model_not_found": ErrorShape(404, _INVALID),
    "gone": ErrorShape(404, _INVALID, retry=False),  # 404, which clients have a class for, as they have for no 410
    "method_not_allowed": ErrorShape(405, _INVALID),
    "request_timeout": ErrorShape(408, _INVALID),
    "request_too_large": ErrorShape(413, _INVALID),
    "head_too_large": ErrorShape(431, _INVALID),
    # placing
    "no_worker": ErrorShape(503, _SERVER, retry=True, retry_after=1),
    "store_unavailable": ErrorShape(503, _SERVER, retry=True, retry_after=1),
    "overloaded": ErrorShape(503, _SERVER, retry=True, retry_after=1),
    # capacity; how long to wait is estimated where it is known
    "tenant_limit": ErrorShape(429, "rate_limit_error", retry=True, retry_after=1),
    "worker_full": ErrorShape(503, _SERVER, retry=True, retry_after=1),
    "fleet_full": ErrorShape(503, _SERVER, retry=True, retry_after=1),
    # the attempt, before the head; in all but the first the worker may have begun to work on it
    "worker_unreachable": ErrorShape(503, _SERVER, retry=True, retry_after=1),
    "worker_reset": ErrorShape(502, _SERVER),
    "workers_died": ErrorShape(502, _SERVER, retry=False),
    "worker_bad_response": ErrorShape(502, _SERVER, retry=False),
    "worker_timeout": ErrorShape(504, _SERVER, retry=False),
    "bad_handover": ErrorShape(502, _SERVER, retry=False),
    # after the head (inside the stream)
    "worker_stream_broken": ErrorShape(502, _SERVER),
    "worker_stalled": ErrorShape(504, _SERVER),
    # ours
    "internal_error": ErrorShape(500, _SERVER),
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Of the other statuses it is invalid_request_error, or api_error from 500 on."""
_MESSAGES = re.compile(rb"/v1/messages(?:/|$)")


class TurnError(Exception):
    """A turn cannot go on; `code` is a key of TABLE."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: tuple[Header, ...] = (),
        retry_after: int | None = None,
    ) -> None:
        """`retry_after`: seconds, where they are known better than by the table."""
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        self.param = param
        self.headers = headers


class ClientDisconnected(Exception):
    """The client went away. Nobody's fault: no worker is blamed and no error is counted."""


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _Body(msgspec.Struct):
    error: _Detail


class _AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class _AnthropicBody(msgspec.Struct, tag_field="type", tag="error"):
    error: _AnthropicDetail
    request_id: str | None


_encode = msgspec.json.Encoder().encode


def is_messages(path: bytes) -> bool:
    """Whether `path`, as it came and with or without a query, is of Anthropic's API."""
    return _MESSAGES.match(unquote_to_bytes(path.partition(b"?")[0])) is not None


def error_body(error: TurnError, path: bytes = b"", request_id: bytes = b"") -> bytes:
    """The error object of the API that `path` belongs to, as JSON."""
    shape = TABLE[error.code]
    if is_messages(path):
        kind = _ANTHROPIC_TYPES.get(shape.status, "api_error" if shape.status >= 500 else _INVALID)
        return _encode(_AnthropicBody(_AnthropicDetail(kind, str(error)), request_id.decode("latin-1") or None))
    return _encode(_Body(_Detail(str(error), shape.type, error.param, error.code)))


def error_event(error: TurnError, path: bytes = b"", request_id: bytes = b"") -> bytes:
    """The error as one event of a stream. Anthropic's clients see only one that is named."""
    body = error_body(error, path, request_id)
    return b"event: error\ndata: %b\n\n" % body if is_messages(path) else b"data: %b\n\n" % body


def error_response(error: TurnError, path: bytes = b"", request_id: bytes = b"") -> tuple[int, list[Header], bytes]:
    """Status, headers and body of an error answer at `path`. `request_id`: nothing, where none is known."""
    shape = TABLE[error.code]
    body = error_body(error, path, request_id)
    headers: list[Header] = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *error.headers,
    ]
    if request_id and is_messages(path):
        headers.append((b"request-id", request_id))  # where Anthropic's clients look for it
    if shape.retry is not None:
        headers.append((b"x-should-retry", b"true" if shape.retry else b"false"))
    retry_after = shape.retry_after if error.retry_after is None else error.retry_after
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after))
    return shape.status, headers, body


def documented(*codes: str) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of a path's errors: keys of TABLE, by their statuses."""
    text = {"type": "string"}
    fields = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": text}
    error = {"type": "object", "required": list(fields), "properties": fields}
    schema = {"type": "object", "required": ["error"], "properties": {"error": error}}
    statuses: dict[int, list[str]] = {}
    for code in codes:
        statuses.setdefault(TABLE[code].status, []).append(code)
    return {
        status: {"description": ", ".join(names), "content": {"application/json": {"schema": schema}}}
        for status, names in statuses.items()
    }
