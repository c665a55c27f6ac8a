"""Every way a turn can fail, and the one table that says what the client is told.

A failure is named by its phase. Only the table knows HTTP: status, OpenAI's error object (which the official clients
show only in the shape `{"error": {"message", "type", "param", "code"}}`), and whether trying again can help
(`Retry-After`, and `x-should-retry`, which those clients obey).
"""

from __future__ import annotations

from typing import Any

import msgspec

Header = tuple[bytes, bytes]


class Answer(msgspec.Struct, frozen=True):
    """What a failure looks like to the client."""

    status: int
    type: str
    retry: bool | None = None
    """True/False: said in `x-should-retry`. None: left to the client's own rules."""
    retry_after: int | None = None
    """Seconds, said in `Retry-After`."""


_INVALID = "invalid_request_error"
_SERVER = "server_error"

TABLE: dict[str, Answer] = {
    # the request itself
    "invalid_json": Answer(400, _INVALID),
    "invalid_request": Answer(400, _INVALID),
    "invalid_session_id": Answer(400, _INVALID),
    "invalid_hint": Answer(400, _INVALID),
    "unknown_worker": Answer(400, _INVALID),
    "hint_required": Answer(400, _INVALID),
    "hint_conflict": Answer(400, _INVALID),
    "invalid_api_key": Answer(401, "authentication_error"),
    "forbidden": Answer(403, "permission_error"),
    "not_found": Answer(404, _INVALID),
    "model_not_found": Answer(404, _INVALID),
    "method_not_allowed": Answer(405, _INVALID),
    "request_timeout": Answer(408, _INVALID),
    "request_too_large": Answer(413, _INVALID),
    "head_too_large": Answer(431, _INVALID),
    # placing
    "no_worker": Answer(503, _SERVER, retry=True, retry_after=1),
    "store_unavailable": Answer(503, _SERVER, retry=True, retry_after=1),
    "overloaded": Answer(503, _SERVER, retry=True, retry_after=1),
    # the attempt, before the head; in all but the first the worker may have begun to work on it
    "worker_unreachable": Answer(503, _SERVER, retry=True, retry_after=1),
    "worker_reset": Answer(502, _SERVER),
    "worker_bad_response": Answer(502, _SERVER, retry=False),
    "worker_timeout": Answer(504, _SERVER, retry=False),
    # after the head (inside the stream)
    "worker_stream_broken": Answer(502, _SERVER),
    "worker_stalled": Answer(504, _SERVER),
    # ours
    "internal_error": Answer(500, _SERVER),
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
    answer = TABLE[error.code]
    body = error_body(error)
    headers: list[Header] = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *error.headers,
    ]
    if answer.retry is not None:
        headers.append((b"x-should-retry", b"true" if answer.retry else b"false"))
    if answer.retry_after is not None:
        headers.append((b"retry-after", b"%d" % answer.retry_after))
    return answer.status, headers, body


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
