"""Metrics as text, and those of several processes as one answer that never runs backwards."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from app.errors import TurnError
from app.exposition import Merging, text, wants_open_metrics
from app.gathering import Gathering, Member
from app.metrics import Family, Metrics, WorkerCells
from tests.support.rows import rows

Process = tuple[Metrics, dict[str, WorkerCells]]


def process(*workers: str) -> Process:
    metrics = Metrics()
    cells = {name: WorkerCells() for name in workers}
    metrics.workers = lambda: tuple(cells.items())
    metrics.table("state", "s", ("worker",), lambda: [((name,), 1.0) for name in cells], merge="max")
    metrics.gauge("running", "r", lambda: 3)
    metrics.gauge("store_up", "u", lambda: True, merge="min")
    return metrics, cells


def turns(families: list[Family], worker: str) -> float | None:
    """Completed ones; None: it has no series."""
    (family,) = [each for each in families if each.name == "coatcheck_worker_turns"]
    return dict(family.cells).get((worker, "completed", "2xx"), [None])[0]


def value(families: list[Family], name: str, *labels: str) -> float:
    (family,) = [each for each in families if each.name == name]
    return dict(family.cells)[labels][0]


@pytest.mark.parametrize("open_metrics", [False, True])
def test_the_text_is_what_prometheus_reads(open_metrics: bool) -> None:
    metrics, cells = process('w"0\\\n')
    metrics.ended("m", "completed", 1.5, cells['w"0\\\n'], 200, 0.25)
    said = text(metrics.families(), open_metrics).decode()
    read = read_open_metrics if open_metrics else text_string_to_metric_families
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in read(said) for s in family.samples}
    worker = ("worker", 'w"0\\\n')
    assert samples["coatcheck_worker_turns_total", ("outcome", "completed"), ("status", "2xx"), worker] == 1
    assert samples["coatcheck_turn_seconds_sum",] == 1.5
    assert samples["coatcheck_worker_ttft_seconds_bucket", ("le", "0.1"), worker] == 0
    assert samples["coatcheck_worker_ttft_seconds_bucket", ("le", "0.25"), worker] == 1
    assert samples["coatcheck_worker_ttft_seconds_count", worker] == 1


@rows(
    ("accept", "wanted"),
    [
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2", True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;q=0, text/plain", False),
        ("text/plain", False),
        ("*/*", False),
        ("", False),
        (";=,;", False),
    ],
)
def test_open_metrics_is_for_who_asks_for_it(accept: str, wanted: bool) -> None:
    assert wants_open_metrics(accept) is wanted


def test_counts_of_several_processes_add_up_and_gauges_by_what_they_mean() -> None:
    (one, of_one), (two, of_two) = process("w0"), process("w0")
    one.ended("m", "completed", 1.0, of_one["w0"], 200, 0.1)
    two.ended("m", "completed", 1.0, of_two["w0"], 200, 0.1)
    merged = Merging().merge({"1": one.families(), "2": two.families()})
    assert turns(merged, "w0") == 2
    assert value(merged, "running") == 6
    assert value(merged, "state", "w0") == 1
    assert value(merged, "store_up") == 1
    assert value(merged, "python_info", *next(c for f in merged if f.name == "python_info" for c, _ in f.cells)) == 1
    (ttft,) = [each for each in merged if each.name == "coatcheck_ttft_seconds"]
    assert sum(ttft.cells[0][1][:-1]) == 2
    assert list(text_string_to_metric_families(text(merged).decode()))


def test_a_process_that_is_gone_or_silent_still_counts() -> None:
    merging = Merging()
    (one, of_one), (two, of_two) = process("w0"), process("w0")
    for _ in range(5):
        one.ended("m", "completed", 1.0, of_one["w0"], 200, 0.1)
        two.ended("m", "completed", 1.0, of_two["w0"], 200, 0.1)
    assert turns(merging.merge({"1": one.families(), "2": two.families()}), "w0") == 10
    silent = merging.merge({"1": one.families()}, silent=["2"])
    assert turns(silent, "w0") == 10
    assert value(silent, "running") == 3  # of which nobody knows whether it is still so
    assert turns(merging.merge({"1": one.families()}), "w0") == 10
    three, of_three = process("w0")
    three.ended("m", "completed", 1.0, of_three["w0"], 200, 0.1)
    for _ in range(3):  # and only once
        assert turns(merging.merge({"1": one.families(), "3": three.families()}), "w0") == 11


def test_a_worker_that_has_left_one_process_counts_until_it_has_left_all() -> None:
    merging = Merging()
    (one, of_one), (two, of_two) = process("w0", "w1"), process("w0", "w1")
    for cells in (*of_one.values(), *of_two.values()):
        cells.turns["completed", 200] = 5
    assert turns(merging.merge({"1": one.families(), "2": two.families()}), "w1") == 10
    del of_one["w1"]
    assert turns(merging.merge({"1": one.families(), "2": two.families()}), "w1") == 10
    del of_two["w1"]
    merged = merging.merge({"1": one.families(), "2": two.families()})
    assert turns(merged, "w1") is None
    assert b'"w1"' not in text(merged)
    of_one["w1"] = WorkerCells()
    assert turns(merging.merge({"1": one.families(), "2": two.families()}), "w1") == 0
    assert turns(merging.merge({"1": one.families()}), "w0") == 10


def test_a_worker_that_only_a_silent_process_has_keeps_what_others_have_counted() -> None:
    merging = Merging()
    (one, _), (two, of_two), (three, of_three) = process("w0"), process("w0", "w1"), process("w0", "w1")
    for cells in (of_two, of_three):
        cells["w1"].turns["completed", 200] = 5
    assert turns(merging.merge({"1": one.families(), "2": two.families(), "3": three.families()}), "w1") == 10
    assert turns(merging.merge({"1": one.families()}, silent=["2"]), "w1") == 10
    assert turns(merging.merge({"1": one.families(), "2": two.families()}), "w1") == 10


async def test_whichever_process_is_asked_the_answer_is_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering()
    running: dict[str, tuple[Member, asyncio.Task[None]]] = {}
    silent = False

    def begin(name: str) -> tuple[Metrics, dict[str, WorkerCells]]:
        metrics, cells = process("w0")
        end: socket.socket = gathering.admit(name)
        end.setblocking(False)
        member = Member(end, lambda: pytest.fail("says nothing") if silent else metrics.families())
        running[name] = member, asyncio.create_task(member.run())
        return metrics, cells

    async def count(name: str) -> float:
        samples = text_string_to_metric_families((await running[name][0].scrape(False)).decode())
        return next(
            sample.value
            for family in samples
            for sample in family.samples
            if sample.name == "coatcheck_worker_turns_total" and sample.labels["outcome"] == "completed"
        )

    async def until_counted(name: str, wanted: float) -> None:
        async with asyncio.timeout(30):
            while await count(name) != wanted:
                await asyncio.sleep(0.01)

    try:
        for name, number in (("r-1", 3), ("r-2", 4)):
            begin(name)[1]["w0"].turns["completed", 200] = number
        await until_counted("r-1", 7)
        assert await count("r-2") == 7
        _, task = running.pop("r-2")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await count("r-1") == 7
        begin("r-3")[1]["w0"].turns["completed", 200] = 1
        await until_counted("r-3", 8)
        assert await count("r-1") == 8

        # None of them says anything: there is no answer, and nothing is forgotten.
        with monkeypatch.context() as quick:
            quick.setattr("app.gathering._SAYS_WITHIN", 0.01)
            quick.setattr("app.gathering._ANSWERS_WITHIN", 0.5)
            silent = True
            with pytest.raises(TurnError):
                await count("r-1")
            silent = False
        await until_counted("r-1", 8)
    finally:
        for _, task in running.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in running.values()), return_exceptions=True)
        gathering.close()
