"""The law of trying again, as a table: what failed, what was sent, what came → what follows."""

from __future__ import annotations

import itertools

import pytest

from app.errors import TABLE
from app.http.worker import (
    AttemptFailed,
    AttemptTimeout,
    BadResponse,
    ConnectFailed,
    ConnectionBroken,
    ConnectRefused,
    ConnectReset,
    LocalLimit,
    NameUnknown,
    StaleConnection,
)
from app.turn.retry import Next, Sent, after, after_busy, error_of
from tests.support.rows import rows

NOTHING = Sent()
EVERY_SENT = [Sent(*each) for each in itertools.product((False, True), repeat=4)]

ROWS: list[tuple[type[AttemptFailed], list[Sent], Next]] = [
    # Surely nothing ran, whatever the request is.
    (ConnectFailed, EVERY_SENT, Next.ELSEWHERE),
    (ConnectRefused, EVERY_SENT, Next.ELSEWHERE),
    (ConnectReset, EVERY_SENT, Next.ELSEWHERE),
    (StaleConnection, EVERY_SENT, Next.AGAIN),
    # The name server's trouble is no reason to leave a worker where a session's cache is.
    (NameUnknown, [sent for sent in EVERY_SENT if sent.free], Next.ELSEWHERE),
    (NameUnknown, [sent for sent in EVERY_SENT if not sent.free], Next.FAIL),
    # It may have run: only where the process that ran it is gone, only once, and only if all of it can be sent again.
    (ConnectionBroken, [NOTHING, Sent(free=True)], Next.ELSEWHERE_IF_GONE),
    (ConnectionBroken, [sent for sent in EVERY_SENT if sent not in (NOTHING, Sent(free=True))], Next.FAIL),
    # It may be running.
    (AttemptTimeout, EVERY_SENT, Next.FAIL),
    (BadResponse, EVERY_SENT, Next.FAIL),
    # Elsewhere would be no better: it is the router that has no sockets left.
    (LocalLimit, EVERY_SENT, Next.FAIL),
]


@rows(
    ("failure", "sent", "then"),
    [(failure, sent, then) for failure, many, then in ROWS for sent in many],
)
def test_what_follows(failure: type[AttemptFailed], sent: Sent, then: Next) -> None:
    assert after(failure("x"), sent) is then


@rows("sent", EVERY_SENT)
def test_a_503_is_left_only_by_turns_that_may_go_anywhere(sent: Sent) -> None:
    assert after_busy(sent) is (Next.ELSEWHERE_IF_ANY if sent.free and not sent.once else Next.FAIL)


def test_the_table_knows_every_failure() -> None:
    def kinds(kind: type[AttemptFailed]) -> set[type[AttemptFailed]]:
        return {kind}.union(*map(kinds, kind.__subclasses__()))

    at_workers = {kind for kind in kinds(AttemptFailed) if kind.__module__ == "app.http.worker"}
    assert {row[0] for row in ROWS} == at_workers - {AttemptFailed}


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (AttemptTimeout, "worker_timeout"),
        (BadResponse, "worker_bad_response"),
        (ConnectionBroken, "worker_reset"),
        (LocalLimit, "overloaded"),
        (NameUnknown, "worker_unreachable"),
    ],
)
def test_what_the_client_is_told(failure: type[AttemptFailed], code: str) -> None:
    error = error_of(failure("the reason"))
    assert (error.code, str(error)) == (code, "the reason")
    assert code in TABLE


def test_a_request_of_which_two_workers_died_is_not_to_be_sent_again() -> None:
    """By the client either: its library would go on by itself."""
    error = error_of(ConnectionBroken("the reason"), killed=True)
    assert (error.code, TABLE[error.code].retry) == ("workers_died", False)
    assert error_of(AttemptTimeout("x"), killed=True).code == "worker_timeout"
