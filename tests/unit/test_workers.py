"""Workers' names and URLs, who may be given a session, and the pool's own rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.workers import Fleet, Target, Worker, WorkerError, make_worker, normal_url, worker_name


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(url: str, name: str | None = None, clock: Clock | None = None) -> Worker:
    return make_worker(url, name=name, connect_limit=1, idle_limit=1, clock=clock or Clock())


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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


def test_headers_of_a_target() -> None:
    worker = make("http://a:1", "a")
    assert worker.targets[0].headers == [(b"x-coatcheck-worker", b"a")]
    assert Target(worker, 0).headers == [(b"x-coatcheck-worker", b"a"), (b"x-coatcheck-rank", b"0")]


def test_unreachable_worker_is_avoided_longer_each_time_and_tried_again() -> None:
    clock = Clock()
    worker = make("http://a:1", clock=clock)
    for avoided in (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0):
        worker.unreachable()
        clock.now += avoided - 0.01
        assert not worker.available
        clock.now += 0.02
        assert worker.available
    worker.reached()
    worker.unreachable()
    clock.now += 0.51
    assert worker.available


def test_turns_that_fail_together_are_one_time() -> None:
    """A hundred turns that find a worker away at once do not make it a hundred times as suspicious."""
    clock = Clock()
    worker = make("http://a:1", clock=clock)
    for _ in range(100):
        worker.unreachable()
    clock.now += 0.51
    assert worker.available


def test_reached_worker_is_available_at_once() -> None:
    worker = make("http://a:1")
    worker.unreachable()
    worker.reached()
    assert worker.available


def test_candidates_leave_out_lost_and_avoided_workers() -> None:
    workers = {name: make(f"http://{name}:1", name) for name in "abc"}
    fleet = Fleet(workers.values())

    def names(excluded: str = "") -> list[str]:
        return [target.worker.name for target in fleet.candidates(frozenset(excluded))]

    assert names() == ["a", "b", "c"]
    assert names("b") == ["a", "c"]
    workers["a"].unreachable()
    assert names() == ["b", "c"]
    workers["b"].known = False
    assert names() == ["c"]
    assert names("c") == ["a"]  # better tried than refused
    workers["c"].unreachable()
    assert names() == ["a", "c"]
    assert names("ac") == []
    workers["a"].known = workers["c"].known = False
    assert names() == []


def test_load_counts_turns_and_claims_being_made() -> None:
    (target,) = make("http://a:1").targets
    target.in_flight = 2
    with target.reserve(), target.reserve():
        assert (target.in_flight, target.reserved, target.load) == (2, 2, 4)
    assert (target.in_flight, target.reserved, target.load) == (2, 0, 2)


@given(st.text(max_size=30))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    for url in (text, f"http://{text}", f"http://h{text}"):
        try:
            normal = normal_url(url)
        except WorkerError:
            continue
        assert normal_url(normal) == normal
