"""Every way a turn can fail, and the one table that says what the client is told.

A failure is named by its phase. Only the table knows HTTP: status, OpenAI's error object (which the official clients
show only in the shape `{"error": {"message", "type", "param", "code"}}`), and whether trying again can help
(`Retry-After`, and `x-should-retry`, which those clients obey).
"""

from __future__ import annotations

from typing import Any

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
    "invalid_json": ErrorShape(400, _INVALID),
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
    # the attempt, before the head; in all but the first the worker may have begun to work on it
    "worker_unreachable": ErrorShape(503, _SERVER, retry=True, retry_after=1),
    "worker_reset": ErrorShape(502, _SERVER),
    "worker_bad_response": ErrorShape(502, _SERVER, retry=False),
    "worker_timeout": ErrorShape(504, _SERVER, retry=False),
    # after the head (inside the stream)
    "worker_stream_broken": ErrorShape(502, _SERVER),
    "worker_stalled": ErrorShape(504, _SERVER),
    # ours
    "internal_error": ErrorShape(500, _SERVER),
}


class TurnError(Exception):
    """A turn cannot go on; `code` is a key of TABLE."""

    def __init__(self, code: str, message: str, *, param: str | None = None, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
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


_encode = msgspec.json.Encoder().encode


def error_body(error: TurnError) -> bytes:
    """OpenAI's error object as JSON."""
    return _encode(_Body(_Detail(str(error), TABLE[error.code].type, error.param, error.code)))


def error_response(error: TurnError) -> tuple[int, list[Header], bytes]:
    """Status, headers and body of an error answer."""
    shape = TABLE[error.code]
    body = error_body(error)
    headers: list[Header] = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *error.headers,
    ]
    if shape.retry is not None:
        headers.append((b"x-should-retry", b"true" if shape.retry else b"false"))
    if shape.retry_after is not None:
        headers.append((b"retry-after", b"%d" % shape.retry_after))
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
