"""What turns came to, in sums and over time, from the cells that are counted anyway."""

from __future__ import annotations

import msgspec
import pytest

from app.fleet.workers import Fleet, Worker, make_worker
from app.metrics import Metrics
from app.traffic import SLOT, SLOTS, Figures, History, Part, Sums, Traffic, quantile


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def worker(name: str = "w") -> Worker:
    return make_worker("http://10.0.0.1:1", name=name, connect_limit=1, idle_limit=1)


def test_a_quantile_lies_in_the_bucket_that_has_it() -> None:
    assert quantile((1.0, 2.0, 4.0), [0, 0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0, 4.0), [10, 0, 0, 0], 0.5) == 0.5
    assert quantile((1.0, 2.0, 4.0), [5, 0, 5, 0], 0.95) == pytest.approx(3.8)
    assert quantile((1.0, 2.0, 4.0), [0, 0, 0, 3], 0.5) == 4.0


def test_a_workers_figures_are_of_its_last_minute() -> None:
    clock, one = Clock(), worker()
    traffic = Traffic(Metrics(), Fleet([one]), clock=clock)
    traffic.tick()
    for _ in range(30):
        one.cells.turns["completed", 200] += 1
        one.cells.ttft.observe(0.3)
    for _ in range(30):
        clock.now += 2
        traffic.tick()
    busy = traffic.figures(one)
    assert busy.turns == pytest.approx(30, rel=0.2)
    assert sum(busy.buckets()) == 30
    for _ in range(40):
        clock.now += 2
        traffic.tick()
    assert not traffic.figures(one), "what was before that is past"


def test_a_worker_that_comes_anew_begins_anew() -> None:
    clock, one = Clock(), worker()
    fleet = Fleet([one])
    traffic = Traffic(Metrics(), fleet, clock=clock)
    traffic.tick()
    one.cells.turns["completed", 200] += 9
    again = worker()
    fleet.put(again)
    clock.now += 2
    traffic.tick()
    assert not traffic.figures(again)
    fleet.remove("w")
    traffic.tick()
    assert not traffic.figures(again)


def said(turns: int, failed: int = 0) -> Sums:
    return Sums(
        {"cached": turns}, {"completed": turns - failed, "worker_error": failed}, [turns] + [0] * 16, (turns, 0)
    )


def test_replicas_add_up_and_what_was_before_is_not_counted() -> None:
    history = History()
    history.hear(100.0, {"a": (1, said(50)), "b": (7, said(1000))})
    assert history.last(60, 100.0).turns == 0, "nobody knows when those were"
    history.hear(102.0, {"a": (2, said(60, failed=1)), "b": (8, said(1005))})
    minute = history.last(60, 102.0)
    assert (minute.turns, minute.failed, minute.how["cached"], minute.tokens) == (15, 1, 15, (15, 0))
    history.hear(104.0, {"a": (2, said(99)), "b": (8, said(1005))})
    assert history.last(60, 104.0).turns == 15, "a word that was heard already says nothing"
    history.hear(106.0, {"a": (4, said(61, failed=1))})
    assert history.last(60, 106.0).turns == 16, "a replica that is gone takes nothing with it"
    history.hear(108.0, {"a": (5, said(3))})
    assert history.last(60, 108.0).turns == 16, "nothing ever counts less than nothing"


def test_the_history_is_a_quarter_of_an_hour_and_no_more() -> None:
    history = History()
    for tick in range(1200):
        history.hear(2.0 * tick, {"a": (tick, said(tick))})
    assert len(history.slots) == SLOTS
    assert sum(part.turns for part in history.slots.values()) == pytest.approx(SLOTS * SLOT / 2, abs=SLOT)
    assert history.last(10.0, 2398.0).turns == 5


def test_a_clock_that_is_set_back_leaves_nothing_of_the_future() -> None:
    history = History()
    history.hear(10_000.0, {"a": (1, said(0))})
    history.hear(10_002.0, {"a": (2, said(50))})
    history.hear(5000.0, {"a": (3, said(51))})
    assert history.last(60, 5000.0).turns == 1
    history.hear(5002.0, {"a": (4, said(52))})
    assert history.last(60, 5002.0).turns == 2


def test_more_than_can_be_counted_is_as_much_as_can_be() -> None:
    history = History()
    for beat, tokens in enumerate((0, 2**70)):
        history.hear(2.0 * beat, {name: (beat, Sums(tokens=(tokens, -tokens))) for name in "abc"})
    assert history.last(60, 2.0).tokens[0] > 2**53


def test_another_versions_word_is_read_as_far_as_it_is_known() -> None:
    part = Part.of(Sums({"cached": 3, "teleported": 4}, {"completed": 3, "daydreamed": 1}, [1, 2, 3]))
    assert part.how["cached"] == part.turns == 3
    assert not any(part.ttft)
    longer = msgspec.json.encode([1.0, 2, 3.0, 4.0, 5, 6, [0, 1], "more"])
    assert msgspec.json.decode(longer, type=Figures).moved_to == 6
    assert Figures(ttft=(99, 5)).buckets() == [0] * 17
