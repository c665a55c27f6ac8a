"""The history checker itself, on histories made by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.e2e.history.checker import LEFT, Fault, History, Rules, Sent, Served, Verdict, check, timeline

TTL = 3.0


class Story:
    """A history in the making. Times are seconds."""

    def __init__(self, store: str = "file", ttl: float = TTL, max_stale: float = 60.0) -> None:
        self.history = History(rules=Rules(store=store, ttl=ttl, max_stale=max_stale), sent=[], served=[])
        self._numbers = itertools.count()

    def turn(
        self,
        start: float,
        affinity: str | None,
        worker: str,
        *,
        replica: str = "r0",
        session: str = "s",
        lasts: float = 0.05,
        begun: float = 0.01,
        **seen: Any,
    ) -> Sent:
        """Served by `worker` from `start + begun` to just before `start + lasts`."""
        sent = Sent(
            id=f"t{next(self._numbers)}",
            session=session,
            replica=replica,
            start=start,
            head=start + begun + 0.001,
            end=start + lasts,
            status=200,
            affinity=affinity,
            worker=worker,
        )
        for name, value in seen.items():
            setattr(sent, name, value)
        self.history.sent.append(sent)
        outcome = "aborted" if sent.outcome == "aborted" else "completed"
        self.history.served.append(
            Served(
                id=sent.id,
                session=session,
                worker=worker,
                start=start + begun,
                end=start + lasts - 0.001,
                outcome=outcome,
            )
        )
        return sent

    def unserved(self, start: float, outcome: str, *, replica: str = "r0", lasts: float = 0.05, **seen: Any) -> Sent:
        """A turn that reached no worker."""
        sent = Sent(
            id=f"t{next(self._numbers)}", session="s", replica=replica, start=start, end=start + lasts, outcome=outcome
        )
        for name, value in seen.items():
            setattr(sent, name, value)
        self.history.sent.append(sent)
        return sent

    def fault(self, kind: str, target: str, start: float, end: float, **more: Any) -> None:
        self.history.faults.append(Fault(kind=kind, target=target, start=start, end=end, **more))

    def check(self) -> Verdict:
        return check(self.history)

    def broken_rules(self) -> list[str]:
        return [violation.rule for violation in self.check().violations]


# --- one session, one worker ------------------------------------------------------------------------------------------


def test_a_session_that_stays_is_legal() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0")
    story.turn(2, "stored", "w0", replica="r1")
    assert not story.check().violations


@pytest.mark.parametrize("affinity", ["created", "stored", "cached", "rebound"])
@pytest.mark.parametrize("store", ["file", "etcd"])
def test_a_session_that_moves_without_a_reason_is_split(store: str, affinity: str) -> None:
    story = Story(store)
    story.turn(0, "created", "w0")
    story.turn(2, affinity, "w1", replica="r1")
    assert story.broken_rules() == ["split session"]


def test_two_first_turns_at_once_on_two_workers_are_split() -> None:
    story = Story()
    story.turn(0, "created", "w0", lasts=1)
    story.turn(0.001, "created", "w1", replica="r1", lasts=1)
    assert story.broken_rules() == ["split session"]


def test_a_claim_that_is_made_again_at_the_same_worker_must_have_been_lost() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "created", "w0", replica="r1")
    assert story.broken_rules() == ["split session"]


def test_a_final_turn_releases() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", final=True)
    story.turn(1.06, "created", "w1", replica="r1")
    verdict = story.check()
    assert not verdict.violations
    assert verdict.changes == {"final": 1}


def test_a_final_turn_releases_once() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(0.5, "cached", "w0", final=True)
    story.turn(1.06, "created", "w1", replica="r1")
    story.turn(1.5, "created", "w2", replica="r1")
    assert story.broken_rules() == ["split session"]


def test_a_close_that_takes_the_successor_s_claim_is_seen() -> None:
    """What a close without a fence does: two final turns at once, and the later one ends the next claim."""
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", final=True)
    story.turn(1, "stored", "w0", replica="r1", final=True, lasts=0.5)
    story.turn(1.1, "created", "w1")
    story.turn(2, "created", "w2", replica="r2")
    assert "split session" in story.broken_rules()


def test_turns_that_began_before_the_close_may_run_on_beside_the_next_claim() -> None:
    story = Story()
    story.turn(0, "created", "w0", replica="r1", lasts=2)
    story.turn(0.5, "stored", "w0", final=True)
    story.turn(0.6, "created", "w1")
    story.turn(1.0, "stored", "w1", replica="r1")
    assert not story.check().violations


def test_a_final_turn_does_not_release_before_it_ends() -> None:
    story = Story()
    story.turn(0, "created", "w0", final=True, lasts=2)
    story.turn(1, "created", "w1", replica="r1")
    assert story.broken_rules() == ["split session"]


@pytest.mark.parametrize(("status", "legal"), [(200, True), (502, False)])
def test_a_final_turn_that_the_client_will_retry_keeps_the_claim(status: int, legal: bool) -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("worker-killed", "w2", 0.9, 1.2)  # so that the 502 is no lost turn
    story.unserved(
        1, "error" if status == 502 else "aborted", final=True, status=status, worker="w2", head=1.01, affinity="cached"
    )
    story.turn(2, "created", "w1", replica="r1")
    assert ("split session" not in story.broken_rules()) == legal


def test_a_pending_close_lets_turns_join() -> None:
    story = Story()
    story.turn(0, "created", "w0", lasts=2)
    story.turn(0.5, "cached", "w0", final=True)  # pending: the first one still runs
    story.turn(0.6, "stored", "w0", replica="r1", final=True)  # closes
    story.turn(0.7, "created", "w1", replica="r1")
    story.turn(0.8, "cached", "w0")  # joins the pending one
    assert not story.check().violations


def test_a_pending_close_lets_no_turns_join_on_other_replicas() -> None:
    story = Story()
    story.turn(0, "created", "w0", lasts=2)
    story.turn(0.5, "cached", "w0", final=True)
    story.turn(0.6, "stored", "w0", replica="r1", final=True)
    story.turn(0.7, "created", "w1", replica="r1")
    story.turn(0.8, "cached", "w0", replica="r2")
    assert story.broken_rules() == ["split session"]


@pytest.mark.parametrize(("replica", "broken"), [("r0", []), ("r1", ["split session"])])
def test_a_pending_close_goes_with_a_session_that_is_moved_where_it_is_pending(replica: str, broken: list[str]) -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(0.5, "cached", "w0", final=True, lasts=0.6, outcome="broken")
    story.fault("worker-killed", "w0", 1.0, 9.0)
    story.turn(1.02, "rebound", "w1", replica=replica, lasts=0.4)
    story.turn(1.5, "created", "w1", replica=replica)
    assert story.broken_rules() == broken


def test_a_claim_expires_a_ttl_after_the_last_turn() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", lasts=4)
    story.turn(4.9 + TTL, "created", "w1", replica="r1")
    verdict = story.check()
    assert not verdict.violations
    assert verdict.changes == {"expiry": 1}


def test_a_claim_does_not_expire_earlier() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", lasts=4)
    story.turn(4 + TTL, "created", "w1", replica="r1")
    assert story.broken_rules() == ["split session"]


def test_a_turn_on_a_frozen_replica_does_not_renew() -> None:
    story = Story()
    story.turn(0, "created", "w0", replica="r1")
    story.turn(1, "stored", "w0", lasts=8)
    story.fault("replica-frozen", "r0", 1.1, 8)
    story.turn(1.1 + TTL, "created", "w1", replica="r1")
    assert not story.check().violations


def test_a_claim_does_not_die_with_its_replica() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(0.5, "cached", "w0")
    story.fault("replica-killed", "r0", 1, 4)
    story.turn(1.5, "created", "w1", replica="r1")
    assert story.broken_rules() == ["split session"]


def test_a_claim_that_a_replica_made_just_before_its_end_lives_too() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("replica-killed", "r0", 0.1, 4)
    story.turn(1.5, "created", "w1", replica="r1")
    assert story.broken_rules() == ["split session"]


def test_the_sessions_of_a_lost_worker_move() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("worker-killed", "w0", 0.5, 2)
    story.turn(1, "rebound", "w1")
    story.turn(1.2, "rebound", "w1", replica="r1")
    verdict = story.check()
    assert not verdict.violations
    assert verdict.changes == {"worker lost": 1}


def test_the_sessions_of_another_worker_do_not() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("worker-killed", "w2", 0.5, 2)
    story.turn(1, "rebound", "w1")
    assert story.broken_rules() == ["split session"]


def test_a_slow_worker_keeps_its_sessions() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("worker-frozen", "w0", 0.5, 2)
    story.turn(1, "rebound", "w1")
    assert story.broken_rules() == ["split session"]


def test_after_a_rebind_nobody_goes_back() -> None:
    story = Story("etcd", ttl=40)
    story.turn(0, "created", "w0")
    story.fault("worker-killed", "w0", 0.5, 2)
    story.turn(1, "rebound", "w1")
    story.turn(4.5, "cached", "w0", replica="r1")
    assert story.broken_rules() == ["split session"]


@pytest.mark.parametrize("kind", ["claim-removed", "claim-garbled"])
def test_a_claim_that_was_destroyed_is_made_anew(kind: str) -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault(kind, "s", 0.5, 0.5)
    story.turn(1, "created", "w1", replica="r1")
    assert not story.check().violations


@pytest.mark.parametrize(("orders", "legal"), [(2, True), (1, False)])
def test_each_order_of_an_admin_ends_what_stands_when_it_comes(orders: int, legal: bool) -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", lasts=0.3)
    for number in range(orders):
        story.fault("claim-ended", "s", 1.1 + 0.6 * number, 1.11 + 0.6 * number, replica="r0", outcome="pending")
    story.turn(1.5, "created", "w1", replica="r1")
    story.turn(1.9, "created", "w1", replica="r2")
    assert story.broken_rules() == ([] if legal else ["split session"])


@pytest.mark.parametrize(
    ("outcome", "replica", "legal"),
    [("closed", "r0", False), ("pending", "r0", True), ("", "r0", True), ("pending", "r1", False)],
)
def test_an_order_that_was_not_answered_is_done_when_the_turns_there_have_ended(
    outcome: str, replica: str, legal: bool
) -> None:
    story = Story(ttl=60)
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", lasts=6)
    story.fault("claim-ended", "s", 1.1, 1.2, replica=replica, outcome=outcome)
    story.turn(6, "cached", "w0")
    story.turn(7.1, "created", "w0", replica="r2")
    assert story.broken_rules() == ([] if legal else ["split session"])


def test_a_claim_that_was_replaced_is_followed_at_once_where_it_is_read() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("claim-replaced", "s", 0.5, 0.5, worker="w2")
    story.turn(1, "stored", "w2", replica="r1")
    assert not story.check().violations
    story.turn(2, "stored", "w0", replica="r2")
    assert story.broken_rules() == ["split session"]


@pytest.mark.parametrize(("at", "legal"), [(3.0, True), (6.0, False)])
def test_a_claim_that_was_replaced_is_followed_within_max_stale_where_it_is_cached(at: float, legal: bool) -> None:
    story = Story(ttl=40, max_stale=4)
    story.turn(0, "created", "w0")
    story.fault("claim-replaced", "s", 0.5, 0.5, worker="w2")
    story.turn(1, "stored", "w2", replica="r1")
    story.turn(at, "cached", "w0")
    assert story.broken_rules() == ([] if legal else ["split session"])


# --- news -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("store", "legal"), [("etcd", True), ("file", False)])
def test_the_news_of_a_close_may_take_a_moment_where_there_are_no_stamps(store: str, legal: bool) -> None:
    story = Story(store)
    story.turn(0, "created", "w0")
    story.turn(0.1, "cached", "w0", replica="r1")
    story.turn(1, "cached", "w0", final=True)
    story.turn(1.1, "created", "w1")
    story.turn(1.2, "cached", "w0", replica="r1")
    assert story.broken_rules() == ([] if legal else ["split session"])


def test_what_was_asked_of_the_store_is_not_old() -> None:
    story = Story("etcd")
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", final=True)
    story.turn(1.1, "created", "w1")
    story.turn(1.2, "stored", "w0", replica="r1")
    assert story.broken_rules() == ["split session"]


@pytest.mark.parametrize(("at", "legal"), [(5.0, True), (9.0, False)])
def test_a_watch_on_a_frozen_member_is_given_up(at: float, legal: bool) -> None:
    story = Story("etcd", ttl=40)
    story.turn(0, "created", "w0", replica="r1")
    story.fault("member-frozen", "m0", 0.9, 20)
    story.turn(1, "stored", "w0", final=True)
    story.turn(1.1, "created", "w1")
    story.turn(at, "cached", "w0", replica="r1")
    assert story.broken_rules() == ([] if legal else ["split session"])


def test_turns_that_look_together_share_what_they_see() -> None:
    story = Story()
    story.turn(0, "created", "w0", replica="r1")
    story.turn(0.9, "stored", "w0", begun=0.4, lasts=0.5)
    story.turn(1, "cached", "w0", replica="r1", final=True)
    story.turn(1.06, "created", "w1", replica="r2")
    story.turn(1.2, "stored", "w0", begun=0.1, lasts=0.2)
    assert not story.check().violations


# --- without the store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "legal"), [(1.0, True), (9.0, False)])
def test_a_degraded_turn_needs_an_outage(start: float, legal: bool) -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("disk-full", "", 0.5, 3)
    story.turn(start, "degraded", "w1", replica="r1")
    assert story.broken_rules() == ([] if legal else ["degraded"])


@pytest.mark.parametrize(("store_fault", "legal"), [("disk-full", True), ("worker-frozen", False)])
def test_in_an_outage_a_replica_goes_on_with_what_it_knew(store_fault: str, legal: bool) -> None:
    story = Story(ttl=40)
    story.turn(0, "created", "w0")
    story.turn(1, "stored", "w0", replica="r1", final=True)
    story.turn(1.1, "created", "w1", replica="r1")
    story.fault(store_fault, "w9", 20, 30)
    story.turn(25, "cached", "w0")
    story.turn(26, "cached", "w1", replica="r1")
    assert story.broken_rules() == ([] if legal else ["split session"])


def test_degraded_turns_are_no_reason_to_move() -> None:
    story = Story(ttl=40)
    story.turn(0, "created", "w0")
    story.fault("disk-full", "", 0.5, 3)
    story.turn(1, "degraded", "w1", replica="r1")
    story.turn(8, "stored", "w1", replica="r1")
    assert story.broken_rules() == ["split session"]


# --- moved without cause ----------------------------------------------------------------------------------------------


def outage(store: str = "file", ttl: float = 60.0) -> Story:
    """A session that was claimed at w0 by r0, and a store that is away from 1 to 6."""
    story = Story(store, ttl=ttl)
    story.turn(0, "created", "w0")
    story.fault("quorum-lost" if store == "etcd" else "disk-full", "", 1, 6)
    return story


@pytest.mark.parametrize(("worker", "rules"), [("w0", []), ("w1", ["moved without cause"])])
def test_a_replica_that_serves_a_session_does_not_take_it_elsewhere_in_an_outage(worker: str, rules: list[str]) -> None:
    story = outage()
    story.turn(2, "degraded", worker)
    assert story.broken_rules() == rules


@pytest.mark.parametrize(("worker", "rules"), [("w0", []), ("w1", ["moved without cause"])])
def test_what_was_served_in_an_outage_is_the_truth_after_it(worker: str, rules: list[str]) -> None:
    """What the store has done late, and nobody had served, is not."""
    story = Story("etcd", ttl=60)
    story.fault("quorum-lost", "", 1, 6)
    story.turn(2, "degraded", "w0")
    story.turn(3, "degraded", "w0", replica="r1")
    story.turn(8, "stored", worker, replica="r1")
    assert story.broken_rules() == rules


@pytest.mark.parametrize(
    ("replica", "faults", "rules"),
    [("r1", 0, []), ("r0", 0, ["moved without cause"]), ("r0", 1, [])],
)
def test_a_replica_that_does_not_know_a_session_goes_by_hash(replica: str, faults: int, rules: list[str]) -> None:
    story = outage()
    for _ in range(faults):
        story.fault("replica-killed", "r0", 1.2, 1.6)
    story.turn(2, "degraded", "w1", replica=replica)
    verdict = story.check()
    assert [violation.rule for violation in verdict.violations] == rules
    assert verdict.moves.total() == (not rules)


@pytest.mark.parametrize(("at", "rules"), [(8.0, []), (40.0, ["moved without cause"])])
def test_of_two_places_that_both_served_one_gives_way_soon(at: float, rules: list[str]) -> None:
    """But for a session that nobody has used since."""
    story = outage()
    story.turn(2, "degraded", "w1", replica="r1")
    story.turn(at, "degraded", "w1", replica="r1")
    story.turn(at + 1, "stored", "w0", replica="r1")
    assert [rule for rule in story.broken_rules() if rule != "degraded"] == rules
    story = outage()
    story.turn(2, "degraded", "w1", replica="r1")
    story.turn(at, "stored", "w0", replica="r1")
    assert not story.broken_rules()


@pytest.mark.parametrize(("replica", "legal"), [("r1", True), ("r2", False)])
def test_a_late_claim_of_a_replica_that_died_is_believed(replica: str, legal: bool) -> None:
    story = Story("etcd", ttl=60)
    story.fault("quorum-lost", "", 1, 6)
    story.turn(2, "degraded", "w0", replica="r1")
    story.turn(3, "degraded", "w0")
    story.fault("replica-killed", replica, 4, 5)
    story.turn(30, "stored", "w2")
    assert story.broken_rules() == ([] if legal else ["moved without cause"])


@pytest.mark.parametrize(("held_up", "legal"), [(6.0, True), (1.0, False)])
def test_a_claim_that_has_lapsed_while_a_turn_was_held_up_is_known_to_nobody(held_up: float, legal: bool) -> None:
    story = Story("etcd", ttl=3)
    story.turn(0, "created", "w1")
    story.fault("replica-frozen", "r1", 0.4, 0.4 + held_up)
    story.turn(0.5, "created" if legal else "stored", "w1", replica="r1", begun=held_up, lasts=held_up + 0.1)
    story.turn(held_up + 2.2, "cached", "w1", replica="r1")
    story.fault("replica-killed", "r1", held_up + 3.29, held_up + 5.0)
    story.fault("store-cut", "r0", held_up + 3.0, held_up + 5.0)
    story.turn(held_up + 3.3, "degraded", "w0")
    assert story.broken_rules() == ([] if legal else ["moved without cause"])


@pytest.mark.parametrize(("ill", "legal"), [("w0", True), ("w3", False)])
def test_a_session_goes_on_from_the_other_place_when_that_is_lost(ill: str, legal: bool) -> None:
    story = outage("etcd")
    story.turn(2, "degraded", "w1", replica="r1")
    story.fault("worker-killed", ill, 7, 9)
    story.turn(8, "rebound", "w2", replica="r1")
    assert ("moved without cause" not in story.broken_rules() and "split session" not in story.broken_rules()) == legal


def test_a_third_place_is_none_that_has_served() -> None:
    story = outage()
    story.turn(2, "degraded", "w1", replica="r1")
    story.turn(8, "stored", "w2", replica="r1")
    assert set(story.broken_rules()) & {"moved without cause", "split session"}


@pytest.mark.parametrize("kind", ["worker-killed", "worker-sick", "worker-hung", "worker-removed"])
@pytest.mark.parametrize(("ill", "rules"), [("w0", []), ("w2", ["moved without cause"])])
def test_the_worker_that_was_left_was_ill(kind: str, ill: str, rules: list[str]) -> None:
    story = outage()
    story.fault(kind, ill, 1.5, 4)
    story.turn(2, "degraded", "w1")
    assert story.broken_rules() == rules


def test_the_worker_that_was_left_was_slow() -> None:
    story = outage()
    story.fault("worker-frozen", "w0", 1.5, 4)
    story.turn(2, "degraded", "w1")
    assert story.broken_rules() == ["moved without cause"]


@pytest.mark.parametrize(("affinity", "rules"), [("stored", ["moved without cause"]), ("degraded", [])])
def test_a_worker_that_was_lost_in_an_outage_takes_nothing_back(affinity: str, rules: list[str]) -> None:
    """Save by who has not yet heard."""
    story = outage()
    story.fault("worker-killed", "w0", 1.5, 4)
    story.turn(3, "degraded", "w1")
    story.turn(4.5, "degraded", "w1")
    story.turn(5.5, affinity, "w0")
    assert [rule for rule in story.broken_rules() if rule != "split session"] == rules


@pytest.mark.parametrize(
    ("final", "kind", "legal"),
    [(True, "", True), (False, "claim-ended", True), (False, "claim-garbled", True), (False, "", False)],
)
def test_a_close_lay_between(final: bool, kind: str, legal: bool) -> None:
    story = outage()
    story.turn(2, "cached", "w0", final=final)
    if kind:
        story.fault(kind, "s", 2.2, 2.3)
    story.turn(3, "degraded", "w1")
    assert story.broken_rules() == ([] if legal else ["moved without cause"])


@pytest.mark.parametrize(("asleep", "legal"), [("", False), ("r0", True), ("r1", True)])
def test_what_a_peer_knows_is_asked_of_it(asleep: str, legal: bool) -> None:
    """But for a few, whose answers may have been late."""
    story = Story("etcd", ttl=60)
    story.fault("quorum-lost", "", 20, 30)
    if asleep:
        story.fault("replica-frozen", asleep, 23, 24)
    for number in range(4):
        story.turn(10, "created", "w0", session=f"s{number}")
        story.turn(25, "degraded", "w1", session=f"s{number}", replica="r1")
    assert story.broken_rules() == ([] if legal else ["peers not asked"])
    assert not check(History(rules=story.history.rules, sent=story.history.sent[:6], served=story.history.served[:6],
                             faults=story.history.faults)).violations  # fmt: skip


@pytest.mark.parametrize(("ttl", "legal"), [(1.5, True), (60.0, False)])
def test_an_expiry_lay_between(ttl: float, legal: bool) -> None:
    story = outage(ttl=ttl)
    story.turn(4, "degraded", "w1")
    assert story.broken_rules() == ([] if legal else ["moved without cause"])


@pytest.mark.parametrize(("ttl", "legal"), [(4.0, True), (60.0, False)])
def test_a_claim_that_no_turn_could_renew_expires(ttl: float, legal: bool) -> None:
    story = outage(ttl=ttl)
    for second in range(2, 6):
        story.turn(second, "degraded", "w0")
    story.turn(7, "created", "w1")
    assert story.broken_rules() == ([] if legal else ["split session"])


@pytest.mark.parametrize(("target", "legal"), [("r0", True), ("r1", False)])
def test_an_outage_of_one_replica_is_its_own(target: str, legal: bool) -> None:
    story = Story("etcd", ttl=60)
    story.turn(0, "created", "w0")
    story.fault("store-cut", target, 1, 3)
    story.turn(2, "degraded", "w0")
    assert story.broken_rules() == ([] if legal else ["degraded"])


def test_single_calls_that_hang_are_no_outage() -> None:
    story = Story("etcd", ttl=60)
    story.turn(0, "created", "w0")
    story.fault("calls-hang", "r1", 1, 3)
    story.turn(2, "degraded", "w1", replica="r1")
    assert story.broken_rules() == ["degraded", "moved without cause"]


@pytest.mark.parametrize(
    ("outage", "cut_until", "serves", "legal"),
    [
        ((1, 3), 12.0, "w1", True),
        ((1, 3), 12.0, "w0", False),  # it goes where nobody serves the session
        ((1, 3), 6.0, "w1", False),  # that one has the store again, and knows the claim
        (None, 12.0, "w1", False),  # it has no reason to doubt a claim
    ],
)
def test_a_claim_may_be_doubted_where_a_replica_without_the_store_serves_the_session(
    outage: tuple[float, float] | None, cut_until: float, serves: str, legal: bool
) -> None:
    story = Story("etcd", ttl=60)
    if outage:
        story.fault("store-cut", "r2", *outage)
    story.fault("store-cut", "r0", 4, cut_until)
    story.turn(5, "degraded", serves)
    story.turn(6, "created", "w0", replica="r1")
    story.turn(10, "degraded", "w1", replica="r2")
    story.turn(11, "degraded", "w1", replica="r2")
    assert ("degraded" not in story.broken_rules()) is legal


@pytest.mark.parametrize(("start", "worker", "legal"), [(8.0, "w0", True), (8.0, "w1", False), (30.0, "w0", False)])
def test_a_claim_may_be_doubted_that_was_made_since_the_store_was_wiped(start: float, worker: str, legal: bool) -> None:
    story = Story("etcd", ttl=60)
    story.turn(0, "created", "w0")
    story.fault("store-wiped", "", 1, 3)
    story.turn(start - 1, "created", "w1", replica="r1")
    story.turn(start, "degraded", worker)
    assert ("degraded" not in story.broken_rules()) is legal


@pytest.mark.parametrize("legal", [True, False])
def test_a_wiped_store_has_lost_its_claims_until_they_are_made_again(legal: bool) -> None:
    story = Story("etcd", ttl=100)
    story.turn(0, "created", "w0")
    story.fault("store-wiped", "", 0.5, 1.5)
    if not legal:
        story.turn(25, "stored", "w0", replica="r2")
    story.turn(30, "created", "w1", replica="r1")
    assert story.broken_rules() == ([] if legal else ["split session"])


@pytest.mark.parametrize(("start", "legal"), [(2.0, True), (9.0, False)])
def test_a_session_of_which_nothing_can_be_read_does_without_the_store(start: float, legal: bool) -> None:
    story = Story(ttl=60)
    story.turn(0, "created", "w0")
    story.fault("claim-garbled", "s", 1, 4)
    story.turn(start, "degraded", "w0")
    assert story.broken_rules() == ([] if legal else ["degraded"])


@pytest.mark.parametrize(
    ("affinity", "status", "legal"),
    [("created", 500, True), ("created", 429, True), ("created", 400, False), ("stored", 500, False)],
)
def test_a_first_turn_that_fails_releases(affinity: str, status: int, legal: bool) -> None:
    story = Story(ttl=60)
    story.fault("worker-sick", "w9", 0, 5)
    story.turn(0, affinity, "w0", outcome="aborted", status=status)
    story.turn(1, "created", "w1")
    assert story.broken_rules() == ([] if legal else ["split session"])


@pytest.mark.parametrize(("target", "legal"), [("", True), ("r0", True), ("r1", False)])
def test_a_client_that_has_waited_too_long_is_excused_by_a_slow_machine_alone(target: str, legal: bool) -> None:
    story = Story()
    story.fault("machine-slow", target, 10, 12)
    story.unserved(1, "timeout", lasts=30)
    assert story.broken_rules() == ([] if legal else ["lost turn"])


@pytest.mark.parametrize(("sick", "legal"), [("w0", True), ("w1", False)])
def test_a_sick_worker_excuses_its_errors(sick: str, legal: bool) -> None:
    story = Story()
    story.fault("worker-sick", sick, 0, 5)
    story.history.served.append(Served(id="t0", session="s", worker="w0", start=1.01, end=1.02, outcome="aborted"))
    story.unserved(1, "error", status=500, worker="w0", affinity="created")
    assert story.broken_rules() == ([] if legal else ["lost turn"])


# --- time to live -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("affinity", "legal"), [("created", True), ("stored", False), ("cached", False)])
@pytest.mark.parametrize("store", ["file", "etcd"])
def test_no_claim_outlives_its_ttl(store: str, affinity: str, legal: bool) -> None:
    story = Story(store)
    story.turn(0, "created", "w0")
    story.turn(0.05 + story.history.rules.lifetime + 0.1, affinity, "w0", replica="r1")
    assert story.broken_rules() == ([] if legal else ["claim outlived its TTL"])


def test_a_turn_that_a_frozen_replica_still_had_is_no_idle_time() -> None:
    story = Story()
    story.turn(0, "created", "w0", outcome="aborted")
    story.fault("replica-frozen", "r0", 0.04, 4)
    story.turn(6, "stored", "w0", replica="r1")
    assert not story.check().violations


# --- finals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("affinity", "legal"), [("created", True), ("stored", False), ("cached", False)])
@pytest.mark.parametrize("replica", ["r0", "r1"])
def test_a_final_turn_closes(affinity: str, replica: str, legal: bool) -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", final=True)
    story.turn(1.06, affinity, "w0", replica=replica)
    assert story.broken_rules() == ([] if legal else ["final did not close"])


@pytest.mark.parametrize(("affinity", "legal"), [("created", True), ("stored", False)])
def test_a_replica_that_knows_no_worker_says_nothing_of_a_close(affinity: str, legal: bool) -> None:
    """It was started while the source of workers was broken. The turn after that tells."""
    story = Story()
    story.turn(0.0, "created", "w0")
    story.turn(0.2, "cached", "w0", final=True)
    story.fault("source-broken", "", 0.0, 0.5)
    story.fault("replica-killed", "r1", 0.1, 0.5)
    story.unserved(0.3, "error", replica="r1", status=503, affinity="none", head=0.31)
    story.turn(0.4, affinity, "w0")
    assert story.broken_rules() == ([] if legal else ["final did not close"])


def test_the_close_of_a_final_turn_is_heard_of_within_moments() -> None:
    story = Story("etcd")
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", final=True)
    story.turn(1.06, "cached", "w0", replica="r1")
    assert not story.check().violations
    story.turn(1.2, "cached", "w0", final=True, replica="r1")
    story.turn(3, "cached", "w0", replica="r2")
    assert story.broken_rules() == ["final did not close"]


def test_where_another_close_is_pending_the_next_turn_joins_it() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(0.9, "stored", "w0", replica="r1", final=True, lasts=1)
    story.turn(1, "cached", "w0", final=True)
    story.turn(1.06, "cached", "w0", replica="r1")
    assert not story.check().violations


def test_after_a_close_the_next_turn_may_find_its_new_worker_gone() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.turn(1, "cached", "w0", final=True)
    story.fault("worker-killed", "w2", 0.5, 3)
    story.turn(1.06, "rebound", "w1")
    assert not story.check().violations


def test_a_final_turn_with_others_beside_it_may_close_later() -> None:
    story = Story()
    story.turn(0, "created", "w0", lasts=2)
    story.turn(1, "cached", "w0", final=True)
    story.turn(1.06, "cached", "w0")
    assert not story.check().violations


# --- every turn -------------------------------------------------------------------------------------------------------


def test_a_turn_without_an_answer_is_lost() -> None:
    for outcome, status in [("cut", 200), ("broken", 200), ("error", 503), ("timeout", None), ("refused", None)]:
        story = Story()
        story.unserved(0, outcome, status=status)
        assert story.broken_rules() == ["lost turn"], outcome


@pytest.mark.parametrize(("outcome", "legal"), [("cut", True), ("refused", True), ("error", False)])
def test_a_killed_replica_excuses_what_cannot_be_answered(outcome: str, legal: bool) -> None:
    story = Story()
    story.fault("replica-killed", "r0", 0.01, 2)
    story.unserved(0, outcome, status=503 if outcome == "error" else None)
    assert story.broken_rules() == ([] if legal else ["lost turn"])


@pytest.mark.parametrize(
    ("outcome", "status", "legal"), [("broken", 200, True), ("error", 502, True), ("error", 503, False)]
)
def test_a_killed_worker_excuses_what_it_was_answering(outcome: str, status: int, legal: bool) -> None:
    story = Story()
    story.fault("worker-killed", "w0", 0.01, 2)
    story.unserved(0, outcome, status=status, worker="w0")
    assert story.broken_rules() == ([] if legal else ["lost turn"])


def test_nothing_excuses_a_turn_whose_worker_and_replica_lived() -> None:
    story = Story()
    for kind, target in [
        ("worker-killed", "w1"),
        ("replica-killed", "r1"),
        ("replica-frozen", "r0"),
        ("worker-frozen", "w0"),
        ("disk-full", ""),
    ]:
        story.fault(kind, target, 0, 2)
    story.turn(0.5, "created", "w0", outcome="cut")
    assert "lost turn" in story.broken_rules()


def test_a_turn_is_run_once() -> None:
    story = Story()
    turn = story.turn(0, "created", "w0")
    story.history.served.append(Served(id=turn.id, session="s", worker="w0", start=0.02, end=0.04))
    assert "turn run twice" in story.broken_rules()


def test_an_answer_names_the_worker_that_gave_it() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.history.served[0].worker = "w1"
    assert story.broken_rules() == ["misreported turn"]


def test_a_client_that_has_seen_the_end_need_not_stay() -> None:
    story = Story()
    turn = story.turn(0, "created", "w0", note=LEFT)
    story.history.served[0].outcome = "aborted"
    assert not story.check().violations
    turn.note = ""
    assert story.broken_rules() == ["misreported turn"]


def test_nor_does_it_count_for_a_sick_worker_that_had_refused_its_turn() -> None:
    story = Story()
    turn = story.turn(0, "rebound", "w0", note=LEFT)
    refused = Served(id=turn.id, session="s", worker="w1", start=0, end=0.005, outcome="aborted")
    story.history.served.append(refused)
    story.fault("worker-sick", "w1", -1, 5)
    assert not story.check().violations
    refused.outcome = "completed"
    assert "misreported turn" in story.broken_rules()


def test_workers_serve_only_what_was_sent() -> None:
    story = Story()
    story.history.served.append(Served(id="t99", session="s", worker="w0", start=0, end=1))
    assert story.broken_rules() == ["invented turn"]


def test_a_violation_is_told_with_what_everybody_saw() -> None:
    story = Story()
    story.turn(0, "created", "w0")
    story.fault("disk-full", "", 0.1, 0.2)
    story.turn(2, "created", "w1", replica="r1")
    story.turn(1, "created", "w2", session="other")
    [violation] = [v for v in story.check().violations if v.session == "s"]
    told = timeline(story.history, violation)
    assert "sends turn t0 to r0" in told
    assert "begins t1" in told
    assert "disk-full" in told
    assert "t2" not in told


# -- what operators have said of workers


@pytest.mark.parametrize(("at", "legal"), [(0.5, True), (1.9, True), (2.1, False), (5.5, False), (6.5, True)])
def test_a_cordoned_worker_is_given_no_new_session(at: float, legal: bool) -> None:
    """Every replica has two seconds to hear of it."""
    story = Story()
    story.fault("worker-cordoned", "w0", 0, 6)
    story.turn(at, "created", "w0")
    assert story.broken_rules() == ([] if legal else ["placed at a cordoned worker"])


def test_a_cordoned_worker_keeps_its_sessions() -> None:
    story = Story(ttl=100)
    story.turn(-1, "created", "w0")
    story.fault("worker-cordoned", "w0", 0, 6)
    story.turn(3, "cached", "w0")
    assert story.broken_rules() == []
    story.turn(4, "rebound", "w1")
    assert story.broken_rules() == ["split session"]


def test_who_could_not_hear_of_a_mark_cannot_obey() -> None:
    for kind, target in (("replica-frozen", "r0"), ("quorum-lost", "")):
        story = Story()
        story.fault("worker-cordoned", "w0", 0, 6)
        story.fault(kind, target, 1, 2.5)
        story.turn(3, "created", "w0")
        assert story.broken_rules() == []
