"""Who is an admin: the whole table, on the object that decides. Over real sockets: tests/e2e/test_admin.py."""

from __future__ import annotations

import pytest

from app.http.headers import FORWARDED
from app.sessions.tenants import Admins
from tests.support.rows import rows

HERE = "127.0.0.1"
OWN = [(b"host", b"localhost:8000")]


def headers(**more: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]


@rows(
    "host",
    [
        "localhost",
        "localhost.",
        "LocalHost:80",
        "localhost:8000",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.9.9.9:1",
        "[::1]",
        "[::1]:8000",
        "[::ffff:127.0.0.1]:8000",
    ],
)
def test_this_machine_by_its_own_name_is_an_admin(host: str) -> None:
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert Admins().allows(peer, headers(host=host))
    assert Admins(at_path=True).allows(None, headers(host=host))


@rows(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.localhost",
        "127.0.0.1.evil.example:8000",
        "127.1",
        "2130706433",
        "0.0.0.0:8000",
        "[::]:8000",
        "10.0.0.1",
        "[::ffff:10.0.0.1]",
        "::1",
        "localhost@evil.example",
        "localhost:8000:8000",
        "router",
        "",
    ],
)
def test_another_name_is_not_whoever_asks(host: str) -> None:
    for admins, peer in ((Admins(), HERE), (Admins(at_path=True), None)):
        assert not admins.allows(peer, headers(host=host))


def test_a_request_without_exactly_one_host_is_not() -> None:
    assert not Admins().allows(HERE, [])
    assert not Admins().allows(HERE, OWN * 2)
    assert not Admins().allows(HERE, [*OWN, (b"host", b"evil.example")])


@pytest.mark.parametrize("peer", [None, "", "192.0.2.1", "::ffff:192.0.2.1", "localhost", "10.0.0.1"])
def test_who_comes_from_elsewhere_is_not(peer: str | None) -> None:
    assert not Admins().allows(peer, OWN)


@rows("name", sorted({*FORWARDED, b"via", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip"}))
def test_who_speaks_for_others_is_not(name: bytes) -> None:
    for value in (b"127.0.0.1", b""):
        assert not Admins().allows(HERE, [*OWN, (name, value)])


@rows(
    ("more", "allowed"),
    [
        (headers(origin="http://localhost:8000"), True),
        (headers(origin="HTTP://LOCALHOST:8000"), True),
        (headers(origin="https://localhost:8000"), True),
        (headers(origin="http://localhost"), False),
        (headers(origin="http://localhost:3000"), False),
        (headers(origin="http://127.0.0.1:8000"), False),
        (headers(origin="http://evil.example"), False),
        (headers(origin="null"), False),
        (headers(origin=""), False),
        (headers(sec_fetch_site="none"), True),
        (headers(sec_fetch_site="same-origin"), True),
        (headers(sec_fetch_site="same-site"), False),
        (headers(sec_fetch_site="cross-site"), False),
        (headers(sec_fetch_site="none") + headers(sec_fetch_site="cross-site"), False),
    ],
)
def test_the_page_of_another_site_is_not(more: list[tuple[bytes, bytes]], allowed: bool) -> None:
    assert Admins().allows(HERE, OWN + more) is allowed


def test_nobody_is_while_others_can_connect_unless_there_is_a_token() -> None:
    assert "admin-token" in (Admins(local=False).refusal(HERE, OWN) or "")
    assert not Admins(local=False).allows(HERE, [*OWN, (b"authorization", b"Bearer ")])
    assert Admins("hush", local=False).allows("192.0.2.1", headers(host="a.example", authorization="Bearer hush"))


def test_the_token_counts_from_anywhere_and_nothing_else_does_where_there_is_one() -> None:
    admins = Admins("hush")
    assert not admins.allows(HERE, OWN)
    for given in (headers(authorization="Bearer hus"), headers(x_coatcheck_admin_token="hush2")):
        assert not admins.allows(HERE, OWN + given)
    for given in (headers(authorization="Bearer hush"), headers(x_coatcheck_admin_token="hush")):
        assert admins.allows("192.0.2.1", headers(host="a.example", x_forwarded_for="192.0.2.9") + given)
