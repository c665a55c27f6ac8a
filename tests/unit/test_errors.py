"""The error table, and the shape that the official clients understand."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from app.errors import TABLE, TurnError, error_body, error_event, error_response
from tests.support.rows import rows

ROOT = Path(__file__).parents[2]


def raised_codes() -> set[str]:
    """Every code that the router's sources name where they make an error."""
    calls = [
        node
        for path in (ROOT / "app").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TurnError"
    ]
    codes = (call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))
    return {code for code in codes if isinstance(code, str)}


@rows("code", TABLE)
def test_shape(code: str) -> None:
    error = TurnError(code, 'what happened, "quoted"\n', param="p", headers=((b"allow", b"GET"),))
    status, headers, body = error_response(error)
    pairs = dict(headers)
    assert len(pairs) == len(headers)
    assert pairs[b"content-type"] == b"application/json"
    assert pairs[b"content-length"] == b"%d" % len(body)
    assert pairs[b"allow"] == b"GET"
    answer = TABLE[code]
    assert status == answer.status
    assert json.loads(body) == {
        "error": {"message": 'what happened, "quoted"\n', "type": answer.type, "param": "p", "code": code}
    }
    assert body == error_body(error)
    assert b"\n" not in body  # it also travels as one line of an event stream


@rows("code", TABLE)
def test_shape_at_messages(code: str) -> None:
    error = TurnError(code, "what\nhappened", param="p", headers=((b"allow", b"GET"),))
    status, headers, body = error_response(error, b"/v1/messages?beta=true", b"r7")
    pairs = dict(headers)
    assert (pairs[b"request-id"], pairs[b"allow"], pairs[b"content-length"]) == (b"r7", b"GET", b"%d" % len(body))
    told = json.loads(body)
    kind = told["error"]["type"]
    assert told == {"type": "error", "error": {"type": kind, "message": "what\nhappened"}, "request_id": "r7"}
    assert kind in {
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
        "rate_limit_error", "api_error", "overloaded_error", "timeout_error",
    }  # fmt: skip
    assert (kind in ("api_error", "overloaded_error", "timeout_error")) is (status >= 500)
    assert error_event(error, b"/v1/messages", b"r7") == b"event: error\ndata: " + body + b"\n\n"
    assert error_event(error, b"/v1/responses", b"r7") == b"data: " + error_body(error) + b"\n\n"
    unknown = json.loads(error_body(error, b"/v1/messages"))
    assert unknown["request_id"] is None


@pytest.mark.parametrize("path", [b"", b"/v1/messages2", b"/v1/messages.x/", b"/v1/x?/v1/messages", b"/x/v1/messages"])
def test_other_paths_have_openais_shape(path: bytes) -> None:
    assert error_body(TurnError("no_worker", "x"), path) == error_body(TurnError("no_worker", "x"))


@rows("code", TABLE)
def test_retry_headers(code: str) -> None:
    _, headers, _ = error_response(TurnError(code, "x"))
    pairs = dict(headers)
    retry = {None: None, True: b"true", False: b"false"}[TABLE[code].retry]
    assert pairs.get(b"x-should-retry") == retry
    assert (b"retry-after" in pairs) is (TABLE[code].retry_after is not None)


@rows("code", TABLE)
def test_the_table_makes_sense(code: str) -> None:
    answer = TABLE[code]
    assert 400 <= answer.status < 600
    assert (answer.type == "server_error") is (answer.status >= 500 and answer.status != 501)
    if answer.retry_after is not None:
        assert answer.retry is True
    if answer.status == 503:
        assert (answer.retry, answer.retry_after) == (True, 1)  # nothing ran: trying again is safe and can help
    if code in ("worker_timeout", "worker_bad_response"):
        assert answer.retry is False  # it may have run, and would fail again


def test_param_may_be_missing() -> None:
    assert json.loads(error_body(TurnError("no_worker", "x")))["error"]["param"] is None


def test_every_error_is_in_the_table() -> None:
    """`error_response` would fail where it is needed most."""
    codes = raised_codes()
    assert len(codes) > 10
    assert codes <= TABLE.keys()
