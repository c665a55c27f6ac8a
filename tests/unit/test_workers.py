"""Workers' names and URLs, who may be given a session, and the pool's own rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.health import Probe, Tolerance
from app.fleet.loads import Place
from app.fleet.policies import least_loaded
from app.fleet.specs import WorkerError, normal_url, worker_name
from app.fleet.workers import Fleet, Target, Worker, make_worker
from tests.support.rows import rows


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(url: str, name: str | None = None, clock: Clock | None = None) -> Worker:
    return make_worker(url, name=name, connect_limit=1, idle_limit=1, clock=clock or Clock())


@rows(
    ("url", "normal"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h", "http://h:80"),
        ("https://h", "https://h:443"),
        ("HTTP://Host.Example:8000", "http://host.example:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("http://h:8000/a/b/v1", "http://h:8000/a/b"),
        ("http://h:8000/a/", "http://h:8000/a"),
        ("http://h:8000/av1", "http://h:8000/av1"),
        ("http://h:8000/v10", "http://h:8000/v10"),
        (" http://h:8000 ", "http://h:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]", "http://[::1]:80"),
        ("http://10.0.0.1:1", "http://10.0.0.1:1"),
    ],
)
def test_one_spelling(url: str, normal: str) -> None:
    assert normal_url(url) == normal
    assert normal_url(normal) == normal
    assert worker_name(url) == worker_name(normal)


@rows(
    "url",
    [
        "",
        "h:8000",
        "ftp://h",
        "http://",
        "http://:8000",
        "http://h:port",
        "http://h:99999",
        "http://user@h",
        "http://user:secret@h",
        "http://h?x=1",
        "http://h#x",
        "//h:1",
        "unix:///x",
    ],
)
def test_urls_that_mean_nothing_are_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(WorkerError, match="write it as http"):
        normal_url(url)


def test_names_are_opaque_stable_and_distinct() -> None:
    assert worker_name("http://10.0.0.1:8000") == "w-bac9be4bbf"  # the same on every replica and in every version
    names = {worker_name(f"http://10.0.{a}.{b}:8000") for a in range(20) for b in range(50)}
    assert len(names) == 1000
    assert all(len(name) == 12 and name.startswith("w-") for name in names)


def test_given_name_is_used() -> None:
    assert make("http://h:1", "gpu-0").name == "gpu-0"
    assert make("http://h:1").name == worker_name("http://h:1")


def test_name_clash_is_refused_and_names_both() -> None:
    with pytest.raises(WorkerError, match=r"http://a:1.*http://b:1"):
        Fleet([make("http://a:1", "w"), make("http://b:1", "w")])
    with pytest.raises(WorkerError):
        Fleet([make("http://a:1/v1"), make("http://A:1")])


@pytest.mark.parametrize(
    ("url", "host", "path"),
    [
        ("http://h:8000/base/v1", b"h:8000", b"/base"),
        ("http://[::1]:8000", b"[::1]:8000", b""),
        ("https://h", b"h:443", b""),
    ],
)
def test_request_line_and_path(url: str, host: bytes, path: bytes) -> None:
    worker = make(url)
    assert worker.host_line == b" HTTP/1.1\r\nhost: " + host + b"\r\n"
    assert worker.base_path == path


def test_finding_targets() -> None:
    plain, ranked = make("http://a:1", "a"), make("http://b:1", "b")
    ranked.targets = (Target(ranked, 0), Target(ranked, 1))
    fleet = Fleet([plain, ranked])
    assert len(fleet) == 2
    assert fleet.find("a", None) is plain.targets[0]
    assert fleet.find("a", 0) is None  # 0 is a rank
    assert fleet.find("b", 0) is ranked.targets[0]
    assert fleet.find("b", 1) is ranked.targets[1]
    assert fleet.find("b", 2) is None
    assert fleet.find("b", None) is None
    assert fleet.find("c", None) is None
    assert [(t.worker.name, t.rank) for t in fleet.candidates()] == [("a", None), ("b", 0), ("b", 1)]


def test_header_lines_of_a_target() -> None:
    worker = make("http://a:1", "a")
    assert worker.targets[0].lines == b"\r\nx-coatcheck-worker: a"
    assert Target(worker, 0).lines == b"\r\nx-coatcheck-worker: a\r\nx-coatcheck-rank: 0"


def of(letters: str, clock: Clock | None = None, **tolerance: Any) -> tuple[dict[str, Worker], Fleet]:
    clock = clock or Clock()
    workers = {
        name: make_worker(
            f"http://{name}:1", name=name, connect_limit=1, idle_limit=1, tolerance=Tolerance(**tolerance), clock=clock
        )
        for name in letters
    }
    return workers, Fleet(workers.values(), clock=clock)


def names(fleet: Fleet, excluded: str = "") -> str:
    return "".join(target.worker.name for target in fleet.candidates(frozenset(excluded)))


def fail(worker: Worker, times: int = 3) -> None:
    for _ in range(times):
        worker.health.failed("status 500")


def lose(worker: Worker) -> None:
    worker.health.unreachable("Connection refused", refused=True)


def test_candidates_leave_out_who_is_lost_marked_or_gone() -> None:
    workers, fleet = of("abc")
    assert names(fleet) == "abc"
    assert names(fleet, "b") == "ac"
    lose(workers["a"])
    assert names(fleet) == "bc"
    workers["b"].mark = "cordoned"
    assert names(fleet) == "c"
    assert names(fleet, "c") == "a"  # better tried than refused
    lose(workers["c"])
    assert names(fleet) == "ac"
    workers["a"].dismiss()
    assert names(fleet) == "c"
    workers["c"].mark = "draining"
    assert names(fleet) == ""


def test_what_a_worker_is_called() -> None:
    workers, _ = of("a", probed=True)
    worker = workers["a"]
    assert (worker.state, worker.available) == ("starting", False)
    worker.health.probed(Probe.GOOD, "status 200")
    assert (worker.state, worker.available) == ("up", True)
    worker.mark = "cordoned"
    assert (worker.state, worker.available) == ("cordoned", False)
    lose(worker)
    assert worker.state == "down"  # which its sessions feel, whatever was decided
    worker.dismiss()
    assert worker.state == "gone"


def test_turns_alone_take_out_at_most_half() -> None:
    """When all fail, it is what all stand on, or the requests; taking all out would help nobody."""
    workers, fleet = of("abcde")
    for name in "abcde":
        fail(workers[name], 10)
    assert [workers[name].state for name in "abcde"] == ["suspect", "suspect", "up", "up", "up"]
    alone, _ = of("a")
    fail(alone["a"], 100)
    assert alone["a"].state == "up"
    # What is gone or lost by other evidence is another matter.
    lose(workers["c"])
    lose(workers["d"])
    assert names(fleet) == "eab"


def test_turns_alone_take_out_at_most_half_of_those_that_serve_a_model() -> None:
    """However many others there are, and of each model that a worker serves."""
    workers, fleet = of("abcdefghij")
    base, tuned, alone = frozenset("abcdef"), frozenset("ab"), frozenset("c")
    choices = {name: [base] for name in "def"} | {name: [base, tuned] for name in "ab"} | {"c": [base, alone]}
    fleet.choices_with = lambda name: choices.get(name, [None])
    for name in "ab":  # both, or the tuned model had nobody
        fail(workers[name])
    assert [workers[name].state for name in "ab"] == ["suspect", "up"]
    for name in "cdef":  # that c alone serves another one does not save it
        fail(workers[name])
    assert [workers[name].state for name in "cdef"] == ["suspect", "suspect", "up", "up"]
    for name in "gh":  # those that may serve any model: half of all
        fail(workers[name])
    assert [workers[name].state for name in "gh"] == ["suspect", "suspect"]
    fail(workers["i"])
    assert workers["i"].state == "up"


def test_suspected_ones_are_candidates_when_most_are() -> None:
    workers, fleet = of("abc", probed=True)
    for worker in workers.values():
        worker.health.probed(Probe.GOOD, "status 200")

    def hang(name: str) -> None:
        for _ in range(3):
            workers[name].health.probed(Probe.BAD, "no answer")

    hang("a")
    assert names(fleet) == "bc"
    hang("b")
    assert names(fleet) == "cab"
    hang("c")
    assert names(fleet) == "abc"


def test_failing_fast_attracts_nothing() -> None:
    """Where not even suspicion is allowed, and the healthy one has many turns in flight."""
    clock = Clock()
    workers, fleet = of("ab", clock, failures=1000)
    (sick,), (well,) = workers["a"].targets, workers["b"].targets
    well.in_flight = 10
    placed = 0
    for _ in range(100):  # a second
        target = least_loaded(fleet.candidates())
        fleet.note_placed(target)
        if target is sick:
            placed += 1
            sick.worker.health.failed("status 500")
        clock.now += 0.01
    assert placed == 1  # it owes an answer, and may be given the next one when it has had a second for it
    clock.now += 60
    assert least_loaded(fleet.candidates()) is sick  # forgotten
    assert workers["a"].burden == 0.0


@pytest.mark.parametrize(
    ("a_second", "tried"), [(1, [5, 15, 26, 37, 48, 59]), (10, [5, 12.5, 20, 27.5, 35, 42.5, 50, 57.5, 65])]
)
def test_a_suspected_worker_is_tried_now_and_then(a_second: int, tried: list[float]) -> None:
    """Where little is placed less often, for each trial that fails is one of its turns."""
    clock = Clock()
    workers, fleet = of("ab", clock)
    (sick,), (well,) = workers["a"].targets, workers["b"].targets
    fail(sick.worker)
    began, found = clock.now, []
    for number in range(70 * a_second):
        clock.now = began + number / a_second
        target = least_loaded(fleet.candidates())
        fleet.note_placed(target)
        if target is sick:
            found.append(clock.now - began)
            sick.worker.health.failed("status 500")
    assert found == pytest.approx(tried)
    clock.now += 30
    assert list(fleet.candidates(trials=False)) == [well]
    assert set(fleet.candidates()) == {well, sick}
    fleet.note_placed(sick)
    sick.worker.health.good += 1
    sick.worker.health.served_well()
    assert sick.worker.state == "up"


def test_many_suspected_workers_cost_no_more_trials_than_one() -> None:
    """But for the first one of each."""
    clock = Clock()
    workers, fleet = of("abcdefgh", clock)
    some = [workers[name] for name in "abcd"]
    for worker in some:
        fail(worker)
    clock.now += 5
    tried: list[str] = []
    for _ in range(100):
        target = least_loaded(fleet.candidates())
        fleet.note_placed(target)
        if target.worker in some:
            tried.append(target.worker.name)
            target.worker.health.failed("status 500")
        clock.now += 0.4
    assert set(tried) == set("abcd")
    assert len(tried) <= 18  # one of them alone has six


def test_only_looking_begins_no_trial() -> None:
    clock = Clock()
    workers, fleet = of("ab", clock)
    fail(workers["a"])
    clock.now += 5
    for _ in range(3):
        assert least_loaded(fleet.candidates()).worker.name == "a"
    fleet.note_placed(workers["b"].targets[0])
    assert least_loaded(fleet.candidates()).worker.name == "a"


def test_the_share_of_a_returner_grows() -> None:
    """Its load follows that of the others up, a tenth of it each second."""
    clock = Clock()
    workers, fleet = of("abc", clock, slow_start=10.0)
    (back,) = workers["c"].targets
    lose(back.worker)
    workers["a"].targets[0].in_flight = workers["b"].targets[0].in_flight = 100
    back.worker.health.connected()
    loads = []
    for _ in range(11):
        while least_loaded(fleet.candidates()) is back:
            back.in_flight += 1
        loads.append(back.in_flight)
        clock.now += 1
    assert loads == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


def test_each_change_is_told_once_with_its_evidence(caplog: pytest.LogCaptureFixture) -> None:
    workers, _ = of("ab")
    fail(workers["a"], 5)
    lose(workers["b"])
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "worker a: up -> suspect: 3 turns failed in a row, the last one with status 500"),
        ("WARNING", "worker b: up -> down: Connection refused"),
    ]
    assert workers["a"].cells.changes == {("up", "suspect"): 1}


def test_only_of_who_is_in_the_fleet_others_are_told() -> None:
    """The turns of one that was replaced end later, and badly."""
    clock = Clock()
    workers, fleet = of("abcd", clock)
    told: list[Worker] = []
    fleet.tell = lambda worker, word: told.append(worker)
    after = of("a", clock)[0]["a"]
    fleet.put(after)
    fleet.remove("b")
    clock.now += 1.0
    fail(workers["a"])
    fail(workers["b"])
    assert not told
    fail(after)
    assert set(told) == {after}


def test_load_counts_a_turn_once_from_its_placing_to_its_attempt() -> None:
    (a,), (b,) = make("http://a:1").targets, make("http://b:1").targets
    a.in_flight = 2

    def told() -> tuple[float, int, float, int]:
        return a.load, a.settled, b.load, b.settled

    place = Place()
    with place.claiming(a):
        assert told() == (3, 1, 0, 0)
    assert told() == (3, 0, 0, 0)
    place.at(b)  # the claim was another replica's
    assert told() == (2, 0, 1, 0)
    with place.claiming(a):  # it gives way
        assert told() == (3, 1, 0, 0)
    place.end()
    place.end()
    place.at(b)
    assert told() == (2, 0, 0, 0)


def test_a_claim_that_is_made_counts_when_its_turn_has_left_and_a_slot_that_is_held_counts_by_itself() -> None:
    (a,), (b,) = make("http://a:1").targets, make("http://b:1").targets
    place = Place()
    with place.claiming(a):
        place.end()
        place.at(b)
        assert (a.load, a.settled, b.load) == (1, 1, 0)
    assert (a.load, a.settled, b.load) == (0, 0, 0)
    with pytest.raises(ValueError, match="no"), place.claiming(a):
        raise ValueError("no")
    a.in_flight = 1
    with Place(held=a).claiming(a):
        assert (a.load, a.settled) == (1, 1)
    assert (a.load, a.settled) == (1, 0)


@given(st.text(max_size=30))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    for url in (text, f"http://{text}", f"http://h{text}"):
        try:
            normal = normal_url(url)
        except WorkerError:
            continue
        assert normal_url(normal) == normal
