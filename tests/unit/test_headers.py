"""What travels through the router and what ends at it."""

from __future__ import annotations

import pytest

from app.http.headers import (
    HOP_BY_HOP,
    Forwarding,
    Header,
    Noted,
    Origin,
    connection_named,
    header,
    response_headers,
    sort_request,
)
from tests.support.rows import rows

WANTED = frozenset({b"session-id", b"content-length"})


def sent(*headers: Header) -> list[bytes]:
    lines, _ = sort_request(list(headers), WANTED)
    return lines.split(b"\r\n")[:-1]


def test_request_headers_keep_order_repetition_and_bytes() -> None:
    headers = [(b"b", b"1"), (b"a", b"\xff \t"), (b"b", b"2"), (b"c", b"")]
    assert sent(*headers) == [b"b: 1", b"a: \xff \t", b"b: 2", b"c: "]


@rows("name", [*sorted(HOP_BY_HOP), b"host", b"content-length", b"expect", b"x-request-id"])
def test_what_is_the_routers_to_say_does_not_go_to_the_worker(name: bytes) -> None:
    assert sent((b"a", b"1"), (name, b"x"), (b"b", b"2")) == [b"a: 1", b"b: 2"]


def test_wanted_headers_are_noted_and_go_on() -> None:
    lines, noted = sort_request(
        [(b"session-id", b"a"), (b"content-length", b"3"), (b"session-id", b"b"), (b"x", b"y")], WANTED
    )
    assert noted == {b"session-id": [b"a", b"b"], b"content-length": [b"3"]}
    assert lines == b"session-id: a\r\nsession-id: b\r\nx: y\r\n"


@pytest.mark.parametrize(
    "connections",
    [[b"x-a, x-b"], [b"X-A,X-B"], [b" x-a ,, x-b , "], [b"x-a", b"x-b"], [b"close", b"x-a, keep-alive", b"x-b"]],
)
def test_fields_that_connection_names_end_here(connections: list[bytes]) -> None:
    headers = [(b"x-a", b"1"), *((b"connection", value) for value in connections), (b"x-b", b"2"), (b"x-c", b"3")]
    assert sent(*headers) == [b"x-c: 3"]
    assert response_headers(headers, 200) == [(b"x-c", b"3")]


def test_connection_alone_names_nothing() -> None:
    for value in (b"close", b"keep-alive", b"Keep-Alive, close", b"", b","):
        assert connection_named(value) == set()


def test_named_session_header_is_no_session() -> None:
    _, noted = sort_request([(b"connection", b"session-id"), (b"session-id", b"a")], WANTED)
    assert noted == {}


@rows("name", [*sorted(HOP_BY_HOP), b"x-request-id", b"x-coatcheck-worker", b"x-coatcheck-new"])
def test_what_is_the_routers_to_say_does_not_come_from_the_worker(name: bytes) -> None:
    assert response_headers([(b"a", b"1"), (name, b"x"), (b"a", b"2")], 200) == [(b"a", b"1"), (b"a", b"2")]


@pytest.mark.parametrize(("status", "kept"), [(200, True), (404, True), (204, False), (304, False)])
def test_length_of_what_has_no_body(status: int, kept: bool) -> None:
    assert bool(response_headers([(b"content-length", b"5")], status)) is kept


def test_response_headers_is_a_new_list() -> None:
    headers = [(b"a", b"1")]
    response_headers(headers, 200).append((b"b", b"2"))
    assert headers == [(b"a", b"1")]


def test_header() -> None:
    assert header([(b"a", b"1"), (b"a", b"2")], b"a") == b"1"
    assert header([(b"a", b"1")], b"b") is None


PREFIXED = Origin(b"http", b"Worker.example:80", b"/llm/a")
PATHS = {
    b"http://worker.example/llm/a/v1/x?y": b"/v1/x?y",
    b"http://worker.example:80/llm/a/v1/x": b"/v1/x",
    b"HTTP://WORKER.example:/llm/a": b"/",
    b"//worker.example/llm/a?x": b"/?x",
    b"http://user@worker.example/llm/a/v1/x": b"/v1/x",
    b"/llm/a/v1/x": b"/v1/x",
    b"/llm/a": b"/",
    b"/llm/a#f": b"/#f",
    b"/llm/ab/v1/x": b"/llm/ab/v1/x",
    b"http://worker.example/other": b"/other",
    b"http://worker.example/llm/a//evil/x": b"/.//evil/x",
    b"http://worker.example/llm/a/\\evil/x": b"/./\\evil/x",
    b"https://worker.example/llm/a/v1/x": b"https://worker.example/llm/a/v1/x",  # port 443
    b"http://worker.example:81/llm/a/v1/x": b"http://worker.example:81/llm/a/v1/x",
    b"http://worker.example.evil/llm/a": b"http://worker.example.evil/llm/a",
    b"ftp://worker.example/llm/a": b"ftp://worker.example/llm/a",
    b"v1/x": b"v1/x",
    b"": b"",
}


@rows(("said", "told"), PATHS.items())
def test_addresses_of_a_worker_become_paths(said: bytes, told: bytes) -> None:
    assert PREFIXED.hide(b"location", said) == told
    assert PREFIXED.hide(b"link", b"<%b>; rel=a, <%b>" % (said, said)) == b"<%b>; rel=a, <%b>" % (told, told)
    if said:
        assert PREFIXED.hide(b"refresh", b"0;URL='%b'" % said) == b"0;URL='%b'" % told


def test_refresh_without_an_address() -> None:
    assert PREFIXED.hide(b"refresh", b"5") == b"5"


def test_default_port_of_tls() -> None:
    assert Origin(b"https", b"w:443", b"").path_of(b"https://w/x") == b"/x"
    assert Origin(b"https", b"w:443", b"").path_of(b"//w/x") == b"/x"


# -- what is told of who came by a unix socket

_SAID: Noted = {b"host": [b"r"], b"x-forwarded-for": [b"192.0.2.9", b"10.0.0.1"], b"x-forwarded-proto": [b"https"]}


@pytest.mark.parametrize("trusted", [(), ("10.0.0.0/8",)])
def test_who_comes_by_a_unix_socket_speaks_for_nobody(trusted: tuple[str, ...]) -> None:
    forwarding = Forwarding(trusted)
    assert not forwarding.trusts(None)
    assert forwarding.lines("", b"http", _SAID, False) == b"x-forwarded-proto: http\r\nx-forwarded-host: r\r\n"


@pytest.mark.parametrize("trusted", [("unix",), ("*",), ("10.0.0.0/8", "unix")])
def test_a_trusted_proxy_at_a_unix_socket_speaks_for_its_clients(trusted: tuple[str, ...]) -> None:
    forwarding = Forwarding(trusted)
    assert forwarding.trusts(None)
    assert forwarding.trusts("192.0.2.1") is ("*" in trusted)
    lines = forwarding.lines("", b"http", _SAID, True)
    assert lines == b"x-forwarded-for: 192.0.2.9, 10.0.0.1\r\nx-forwarded-host: r\r\n"
    assert forwarding.lines("", b"http", {}, True) == b"x-forwarded-proto: http\r\n"
