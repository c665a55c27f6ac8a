"""The metrics' text as Prometheus would read it, and that clients' words cannot make it grow without bound."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.exposition import text
from app.metrics import AFFINITY_OUTCOMES, TURN_OUTCOMES, Histogram, Metrics, WorkerCells


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text(metrics.families()).decode()))
    assert len({family.name for family in families}) == len(families)
    samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return samples


def test_every_metric_is_described_and_named_by_its_unit() -> None:
    families = list(text_string_to_metric_families(text(Metrics().families()).decode()))
    ours = [family for family in families if family.name.startswith("coatcheck_")]
    assert len(ours) >= 11
    assert all(family.documentation for family in ours)
    assert all(family.name.endswith("_seconds") for family in ours if family.type == "histogram")


def test_counters_without_an_event_are_zero() -> None:
    samples = scrape(Metrics())
    for outcome in AFFINITY_OUTCOMES:
        assert samples["coatcheck_affinity_total", (("outcome", outcome),)] == 0
    assert samples["coatcheck_watch_resets_total", ()] == 0
    assert samples["coatcheck_ttft_seconds_count", ()] == 0


def test_counters_count() -> None:
    metrics = Metrics()
    metrics.connects.inc("w1", "ok")
    metrics.connects.inc("w1", "ok")
    metrics.connects.inc("w2", "failed")
    samples = scrape(metrics)
    assert samples["coatcheck_worker_connects_total", (("outcome", "ok"), ("worker", "w1"))] == 2
    assert samples["coatcheck_worker_connects_total", (("outcome", "failed"), ("worker", "w2"))] == 1


def test_histogram_is_cumulative_and_bounds_are_inclusive() -> None:
    metrics = Metrics()
    for seconds in (0.004, 0.005, 0.0051, 599.0, 601.0):
        metrics.turn_seconds.observe(seconds)
    samples = scrape(metrics)
    buckets = {
        labels[0][1]: value for (name, labels), value in samples.items() if name == "coatcheck_turn_seconds_bucket"
    }
    assert buckets["0.005"] == 2
    assert buckets["0.01"] == 3
    assert buckets["300.0"] == 3
    assert buckets["600.0"] == 4
    assert buckets["+Inf"] == samples["coatcheck_turn_seconds_count", ()] == 5
    assert samples["coatcheck_turn_seconds_sum", ()] == pytest.approx(0.004 + 0.005 + 0.0051 + 599 + 601)
    ordered = sorted(buckets.items(), key=lambda pair: float(pair[0]))
    assert [count for _, count in ordered] == sorted(buckets.values())


def test_histogram_with_labels() -> None:
    histogram = Histogram("x_seconds", "x", (1.0,), {"op": ()})
    assert histogram.family().cells == []
    histogram.observe_of(("get",), 0.5)
    histogram.observe_of(("get",), 2.0)
    assert histogram.family().cells == [(("get",), [1, 1, 2.5])]


def test_histogram_of_what_comes_together() -> None:
    histogram = Histogram("x_seconds", "x", (1.0, 2.0), {"part": ("a", "b")})
    for number in range(100):  # more than are sorted at a time
        histogram.observe_each((0.0, 1.0 + number % 2))
    histogram.observe_each((1.0, 9.0))
    assert histogram.family().cells == [(("a",), [101, 0, 0, 1.0]), (("b",), [50, 50, 1, 159.0])]
    histogram.observe_each((3.0, 3.0))
    histogram.forget()
    assert histogram.family().cells == []


def test_gauges_are_read_when_scraped() -> None:
    metrics = Metrics()
    value = 1.0
    metrics.gauge("coatcheck_a", "a", lambda: value)
    metrics.gauges("coatcheck_b", "b", "worker", lambda: [("w1", value), ("w2", 2.0)])
    assert scrape(metrics)["coatcheck_a", ()] == 1
    value = 5.0
    samples = scrape(metrics)
    assert samples["coatcheck_a", ()] == 5
    assert samples["coatcheck_b", (("worker", "w1"),)] == 5
    assert samples["coatcheck_b", (("worker", "w2"),)] == 2


def models(metrics: Metrics) -> set[str]:
    return {dict(labels)["model"] for name, labels in scrape(metrics) if name == "coatcheck_turns_total"}


def test_models_of_turns_that_worked_have_a_series() -> None:
    metrics = Metrics()
    metrics.turn("m", "completed")
    metrics.turn("m", "broken")
    metrics.turn("", "completed")
    assert models(metrics) == {"m", "", "other"}
    assert all(outcome in TURN_OUTCOMES for _, outcome in metrics.turns.cells)


def test_the_first_turn_that_ends_in_some_way_is_an_increase_like_any_other() -> None:
    """A series that begins with 1 has no increase, and the alert about it is never raised."""
    metrics = Metrics()
    metrics.workers = lambda: [("w", WorkerCells())]
    seen = scrape(metrics)
    metrics.turn("m", "failed")  # no turn for it has worked yet
    metrics.turn("m", "completed")
    seen |= scrape(metrics)
    metrics.turn("m", "failed")
    metrics.connects.inc("w", "failed")
    now = scrape(metrics)
    counters = {name for name, _ in now if name in ("coatcheck_turns_total", "coatcheck_worker_connects_total")}
    assert len(counters) == 2
    assert not [key for key in now if key[0] in counters and key not in seen]
    assert seen["coatcheck_turns_total", (("model", "m"), ("outcome", "failed"))] == 0
    assert now["coatcheck_turns_total", (("model", "m"), ("outcome", "failed"))] == 1
    assert now["coatcheck_turns_total", (("model", "other"), ("outcome", "failed"))] == 1


def test_models_that_never_worked_have_none() -> None:
    metrics = Metrics()
    for number in range(1000):
        metrics.turn(f"guess-{number}", "client_error")
    assert models(metrics) == {"other"}


def test_number_of_models_is_bounded() -> None:
    """Some workers answer to any model's name."""
    metrics = Metrics()
    for number in range(1000):
        metrics.turn(f"m{number}", "completed")
    assert len(models(metrics)) == 101
    assert metrics.turns.cells["other", "completed"] == 900
    metrics.turn("m5", "completed")
    assert metrics.turns.cells["m5", "completed"] == 2


def test_length_of_a_models_name_is_bounded() -> None:
    metrics = Metrics()
    metrics.turn("m" * 100_000, "completed")
    assert len(text(metrics.families())) < 50_000


def test_any_word_of_a_client_is_rendered() -> None:
    metrics = Metrics()
    words = ['"', "\\", "\n", "{}", "ü", "\x00", "a\\nb", "\U0001f9e5"]
    for word in words:
        metrics.turn(word, "completed")
    assert models(metrics) == {*words, "other"}


def test_two_routers_fit_in_one_process() -> None:
    one, two = Metrics(), Metrics()
    one.resets.inc()
    assert scrape(two)["coatcheck_watch_resets_total", ()] == 0
