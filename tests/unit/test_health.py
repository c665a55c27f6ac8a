"""How a worker is, by what evidence: each row computed by hand, in virtual time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest

from app.fleet.health import Cause, Change, Health, Probe, State, Tolerance, Word
from app.http.worker import ConnectRefused
from app.turn.retry import blame
from tests.support.rows import rows

STARTING, UP, SUSPECT, DOWN = State.STARTING, State.UP, State.SUSPECT, State.DOWN


class Worker:
    """What happens to one, a word for each event."""

    def __init__(self, *, probed: bool = True, joins: bool = False, may: Callable[[], bool] = lambda: True) -> None:
        self.now = 1000.0
        self.changes: list[Change] = []
        self.told: list[Word] = []
        self.health = Health(
            Tolerance(probed=probed),
            joins=joins,
            clock=lambda: self.now,
            may_suspect=may,
            changed=self.changes.append,
        )
        self.health.told = self.told.append

    @property
    def state(self) -> State:
        return self.health.state

    def see(self, events: str) -> State:
        """Turns: `+` good, `5` failed, `4` a 4xx, `b` busy (429 or 503); connections: `c` made, `x` refused, `u` none;
        probes: `G`ood, `R`eachable, `N`ot yet, `B`ad, `X` no connection, `D`: no name; what another replica says:
        `f`ailed, `s`ick, `t`ried, `w`ell; a digit in brackets: so many seconds pass."""
        health = self.health
        while events:
            event, events = events[0], events[1:]
            match event:
                case "+":
                    health.good += 1
                    if health.watchful:
                        health.served_well()
                case "5":
                    health.failed("status 500")
                case "b":
                    health.busy("status 503")
                case "c":
                    health.connected()
                case "x" | "u":
                    health.unreachable("refused" if event == "x" else "no answer", refused=event == "x")
                case "G" | "R" | "N" | "B" | "X" | "D":
                    kinds = {"G": Probe.GOOD, "R": Probe.REACHABLE, "N": Probe.NOT_YET, "B": Probe.BAD}
                    kinds |= {"X": Probe.UNREACHABLE, "D": Probe.NAMELESS}
                    health.probed(kinds[event], f"probe {event}")
                case "(":
                    seconds, _, events = events.partition(")")
                    for _ in range(round(float(seconds) / 0.5)):
                        self.now += 0.5
                        if health.watchful:
                            health.tick()
                case "f" | "s" | "t" | "w":
                    health.heard({"f": Word.FAILED, "s": Word.SICK, "t": Word.TRIED, "w": Word.WELL}[event])
                case "4" | " ":
                    pass  # nobody is told of a 4xx
        return self.state


@rows(
    ("events", "state"),
    [
        # what changes nothing
        ("G 5", UP),
        ("G 55+5+55", UP),
        ("G 55" + "4" * 20 + "+", UP),
        ("G " + "b" * 100, UP),
        ("G B", UP),
        ("G BBGBB", UP),
        ("G BB+BB", UP),
        ("G N", UP),
        ("G NGN", UP),
        ("G X", UP),
        ("G XGX", UP),
        ("G XcX", UP),
        ("G D(29)D", UP),
        # turns
        ("G 555", SUSPECT),
        ("G 55" + "4" * 20 + "5", SUSPECT),  # 4xx count for nothing, good or bad
        ("G 55bb5", SUSPECT),
        ("G " + "5+" * 9 + "5", UP),
        ("G " + "5+" * 10 + "5", SUSPECT),  # eleven of 21, from the first failure on
        ("G " + "++5" * 30, UP),
        ("G " + "+5(1.5)" * 20, UP),  # never twenty within ten seconds
        # what another replica has found
        ("G fffffstw", UP),
        ("G ffff55", UP),
        ("G s5", SUSPECT),
        ("G s(9.5)5", SUSPECT),
        ("G s(10)5", UP),  # no news any more
        ("G 5s", SUSPECT),  # whichever comes first
        ("G 5(9.5)s", SUSPECT),
        ("G 5(10)s", UP),
        ("G 5+s", UP),
        ("G 55f", UP),
        ("G sf5", SUSPECT),
        ("G s(10)f5", UP),
        ("G sw5", UP),  # there it serves again
        ("G sws5", SUSPECT),
        ("G t5", UP),  # nobody says that it fails
        ("G w5", UP),
        ("G s+5", UP),  # here it serves
        ("G s" + "4" * 20, UP),
        ("G BBBs5", SUSPECT),
        # and on
        ("G 555(60)", SUSPECT),  # of one moment; nothing has failed since, and nothing was asked
        ("G 555(1)5(3.5)", SUSPECT),
        ("G 555(1)5(4)", DOWN),
        ("GG 555(1)5+(4)", UP),  # a bound session's turn is a trial as well
        ("G 555(1)5GGG(4)", DOWN),  # it answers probes as it always did
        # probes
        ("G BBB", SUSPECT),
        ("G BBB(4.5)", SUSPECT),
        ("G BBB(5)", DOWN),
        ("G BBB(4.5)+(4.5)", SUSPECT),  # its turns are good signs
        ("G BBBG", SUSPECT),
        ("G BBBGG", UP),
        ("G BBB(5)GG", UP),
        ("G BBBGBG", SUSPECT),
        # "not yet"
        ("G NN", STARTING),
        ("G NNG", UP),
        ("G NN+", STARTING),
        ("G NN555", STARTING),
        ("N", STARTING),
        ("+", UP),  # of a worker that nobody has asked yet
        ("R", UP),
        # connections
        ("G x", DOWN),
        ("G XX", DOWN),
        ("G u", SUSPECT),
        ("G u(0.5)u", DOWN),
        ("G uuuuuuu", SUSPECT),  # many turns of one moment
        ("G u(5)", DOWN),
        ("G uc", UP),
        ("G x+", DOWN),  # by probes it is known soon enough
        ("G xG", DOWN),
        ("G xGG", UP),
        ("G xGXG", DOWN),
        ("G xRR", UP),
        ("G xN", STARTING),  # it is there again, and loads
        ("G xNG", UP),
        ("G D(30)D", DOWN),
        ("G D(30)GD(1)D", UP),
    ],
)
def test_what_evidence_makes_of_a_worker(events: str, state: State) -> None:
    assert Worker().see(events) is state


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("", UP),
        ("555", SUSPECT),
        ("555+", UP),
        ("x", DOWN),
        ("xc", UP),  # nothing else would find out
        ("x(60)", DOWN),
    ],
)
def test_without_probes(events: str, state: State) -> None:
    assert Worker(probed=False).see(events) is state


def due(worker: Worker, *, cheap: bool = True) -> bool:
    return worker.health.trial_due(worker.now, cheap=cheap)


def test_who_is_suspected_by_its_turns_is_up_by_a_turn_and_probes() -> None:
    worker = Worker()
    worker.see("G 555(1)5(4)")
    assert worker.state is DOWN
    assert not due(worker)
    worker.see("GG")
    assert not due(worker)  # five seconds after the last failure
    worker.see("(1)")
    assert due(worker)
    worker.health.trial_begun()
    assert not due(worker)  # one at a time
    assert worker.see("5(7)") is DOWN
    assert not due(worker)  # one and a half as long after that
    worker.see("(0.5)B")
    assert not due(worker)  # its probes do not agree
    worker.see("GG")
    assert due(worker)
    assert not due(worker, cheap=False)  # ten seconds, where little is placed beside it
    worker.see("(2.5)")
    assert due(worker, cheap=False)
    worker.health.trial_begun()
    assert worker.see("+") is UP


@pytest.mark.parametrize("cheap", [True, False])
def test_who_is_silent_is_given_no_more_turns_to_try_than_who_fails_them_at_once(cheap: bool) -> None:
    """Of a trial that it has not answered nobody knows yet how it ends."""
    given: dict[bool, list[float]] = {}
    for silent in (False, True):
        worker = Worker(probed=False)
        worker.see("G 555")
        began = worker.now
        given[silent] = []
        while worker.now < began + 100:
            if due(worker, cheap=cheap):
                given[silent].append(worker.now - began)
                worker.health.trial_begun()
                if not silent:
                    worker.see("5")
            worker.see("(0.5)")
    assert given[True] == [5, 15, 35, 65, 95]
    assert given[False] == ([5 + 7.5 * number for number in range(13)] if cheap else given[True])
    assert worker.health.on_trial
    assert worker.see("+") is UP  # it only took its time


def tell(others: list[Worker], word: Word) -> None:
    for other in others:
        other.health.heard(word)


def who_tell_each_other(count: int) -> list[Worker]:
    """Replicas that see one worker, and suspect it."""
    replicas = [Worker(probed=False) for _ in range(count)]
    for replica in replicas:
        replica.health.told = functools.partial(tell, [each for each in replicas if each is not replica])
    for replica in replicas:
        replica.see("555")
    return replicas


def pass_on(replicas: list[Worker]) -> None:
    for each in replicas:
        each.see("(0.5)")


def test_what_one_replica_finds_sick_is_suspected_by_the_others_at_its_next_failure() -> None:
    replicas = [Worker(probed=False) for _ in range(3)]
    first, *others = replicas
    first.health.told = functools.partial(tell, others)
    first.see("555")
    assert all(other.health.burden.penalty(1000.0) == 8.0 for other in others)  # as if two had failed here
    for other in others:
        assert other.state is UP
        assert other.see("5") is SUSPECT


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("cheap", [True, False])
def test_many_replicas_that_tell_each_other_give_a_sick_worker_hardly_more_turns_to_try_than_one(
    count: int, cheap: bool
) -> None:
    """They take turns; and where turns are many, hardly any time passes without one."""
    replicas = who_tell_each_other(count)
    given: dict[int, list[float]] = {number: [] for number in range(count)}
    for tick in range(240):
        for number in range(count):
            replica = replicas[(number + tick) % count]  # whoever has a turn for it
            if due(replica, cheap=cheap):
                given[(number + tick) % count].append(replica.now - 1000)
                replica.health.trial_begun()
                replica.see("5")
        pass_on(replicas)
    every = sorted(at for each in given.values() for at in each)
    assert every[0] == 5
    assert all(given.values())
    assert len(every) <= (30 if cheap else 8)
    assert max(after - before for before, after in itertools.pairwise(every)) <= (7.5 if cheap else 30)


@pytest.mark.parametrize("relapses", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_who_is_well_again_is_up_at_all_replicas_soon(count: int, relapses: int) -> None:
    """However long it was sick: 8 s at most, and at most 6 in the mean."""
    took = []
    for sick_for in range(1, 81, 4):
        replicas = who_tell_each_other(count)
        for _ in range(relapses):
            for replica in replicas:
                replica.see("+" * 8)
                assert replica.state is UP
            for replica in replicas:
                replica.see("555")
        began = replicas[0].now
        while any(replica.state is not UP for replica in replicas):
            for replica in replicas:
                if replica.state is not UP and due(replica):
                    replica.health.trial_begun()
                    replica.see("5" if replica.now < began + sick_for / 2 else "+")
            if any(replica.state is not UP and not due(replica) for replica in replicas):
                pass_on(replicas)
        took.append(replicas[0].now - began - sick_for / 2)
    assert max(took) <= 8
    assert sum(took) / len(took) <= 6


@pytest.mark.parametrize("fail", [1, 3])
def test_a_replica_whose_way_to_a_worker_is_bad_keeps_nobody_else_from_trying_it(fail: int) -> None:
    *failing, well = replicas = who_tell_each_other(fail + 1)
    while not due(well):
        for replica in failing:  # has turns for it at any time
            if due(replica):
                replica.health.trial_begun()
                replica.see("5")
        pass_on(replicas)
        assert well.now <= 1000 + 5 * len(replicas), "it is its turn before any other's second"
    well.health.trial_begun()
    assert well.see("+") is UP
    assert all(due(replica) for replica in failing)


def test_who_relapses_must_prove_more_each_time() -> None:
    """Else half of its turns, good or bad by turns, would take it in and out for ever."""
    worker = Worker(probed=False)
    for needed in (1, 2, 4, 8, 16, 16):
        assert worker.see("555") is SUSPECT
        assert worker.see("+" * (needed - 1)) is SUSPECT
        assert worker.see("+") is UP
    worker.see("555++5+++")
    assert worker.state is SUSPECT
    worker.see("+" * 13 + "(60)")
    assert worker.state is UP
    assert worker.see("555+") is UP  # long ago


def test_a_restart_ends_what_was_held_against_it() -> None:
    worker = Worker()
    worker.see("G 555(1)5(4)")
    assert (worker.state, worker.health.cause) == (DOWN, Cause.TURNS)
    assert worker.see("XXGG") is UP


@rows(
    ("events", "evicting"),
    [
        ("G 555", False),
        ("G 555(1)5(4)", True),
        ("G 555(1)5(4)(2)GG", True),
        ("G x", True),
        ("G xGG", False),
        ("G xN", True),  # what its sessions had there is gone
        ("G NN", False),
        ("G NN(4.5)N", False),
        ("G NN(5)N", True),
        ("N(5)", True),  # of a session that another replica bound
        ("(60)", False),  # nobody has asked
        ("G BBB", False),
        ("G BBB(5)", True),
    ],
)
def test_whose_sessions_move(events: str, evicting: bool) -> None:
    worker = Worker()
    worker.see(events)
    assert worker.health.evicting is evicting


def test_turns_alone_need_leave() -> None:
    worker = Worker(may=lambda: False)
    assert worker.see("G " + "5" * 100 + "(60)5") is UP
    assert worker.see("BBB") is SUSPECT
    assert worker.see("555GG") is UP
    assert worker.see("x") is DOWN


@pytest.mark.parametrize(
    ("events", "joins", "slow"),
    [
        ("G", False, False),  # it was there before the router
        ("G", True, True),
        ("NG", False, True),
        ("G 555+GG", False, False),
        ("G 555(1)5(5)GG+", False, True),
        ("G xGG", False, True),
        ("G NNG", False, True),
    ],
)
def test_who_starts_slowly(events: str, joins: bool, slow: bool) -> None:
    worker = Worker(joins=joins)
    assert worker.see(events) is UP
    later = worker.now + 9  # of ten seconds
    assert worker.health.burden.newness(later) == pytest.approx(0.1 if slow else 0.0)
    assert worker.health.burden.newness(worker.now + 10) == 0.0


def test_each_change_is_told_once_with_its_evidence() -> None:
    worker = Worker()
    worker.see("GGG 555 5(1)5(4) x NN G")
    assert [(each.before, each.after, each.why, each.first) for each in worker.changes] == [
        (STARTING, UP, "a probe was answered: probe G", True),
        (UP, SUSPECT, "3 turns failed in a row, the last one with status 500", False),
        (SUSPECT, DOWN, "no good sign for 5.0 s; status 500", False),
        (DOWN, STARTING, "probe N", False),
        (STARTING, UP, "a probe was answered: probe G", False),
    ]


def test_errors_of_a_minute() -> None:
    worker = Worker()
    worker.see("G 5(30)5b(29.5)")
    assert (worker.health.errors.per_minute(), worker.health.errors.last) == (2, "status 503")
    worker.see("(1)")
    assert worker.health.errors.per_minute() == 1
    worker.see("xXB")  # what probes find, and whoever looks after a turn, are no turns
    assert worker.health.errors.per_minute() == 1
    blame(worker.health, ConnectRefused("nobody listens"))
    assert worker.health.errors.per_minute() == 2


@pytest.mark.parametrize(
    ("events", "soon"),
    [("G", False), ("GX", True), ("GN", True), ("GB", True), ("GBBB", False), ("GBBBG", True), ("GxG", True)],
)
def test_when_the_next_probe_had_better_come_soon(events: str, soon: bool) -> None:
    worker = Worker()
    worker.see(events)
    assert worker.health.undecided is soon
