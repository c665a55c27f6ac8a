"""That the benchmarks run and say what they measured. How fast anything is, is not for tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from app.demo.load import MODEL, Served
from benchmarks import procfs
from benchmarks.head_to_head import Oracle
from benchmarks.soak import GAUGES, TASKS, Sample, judge, provoked
from benchmarks.soak_load import Report, Unexpected

REPO = Path(__file__).parents[2]


def test_the_claims_benchmark_prints_every_table_and_finds_no_event_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.claims", "--scale", "0.005"],
        cwd=REPO,
        env=os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "false"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^### (.+)$", done.stdout, re.M) == [
        "A session's first turn",
        "A cached turn",
        "Idle claims in the local cache",
        "Deletions at 2,000/s",
        "New claims",
    ]
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert all(len(row) > 3 and all(row) for row in rows)
    # What does not depend on the machine's speed: one round trip per new session, and every deletion is heard.
    first_turn, deletions = rows[1], [row for row in rows if re.fullmatch(r"\d+ of 100", row[3])]
    assert first_turn[3] == "1.00"
    assert [row[0] for row in deletions] == ["etcd", "file"]
    assert all(row[2] == "0" and row[3] == "0 of 100" and row[4] == "0 of 100" for row in deletions)


def test_the_proxy_benchmark_measures_and_judges(tmp_path: Path) -> None:
    """On nginx as well where it is installed."""
    nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    asked = ["--quick", "--rounds", "1", "--scale", "0.05", "--only", "requests", "--only", "streams"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.proxy", *asked, "--out", tmp_path, "--peers", "nginx" if nginx else "none"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^### (.+)$", done.stdout, re.M) == ["Proxies side by side", "Sessions", "Targets"]
    rows = {
        cells[0]: cells[1:]
        for line in done.stdout.partition("### Sessions")[0].splitlines()
        if len(cells := line.strip("| ").split(" | ")) > 3
    }
    assert {"no proxy", "coatcheck"} <= rows.keys()
    columns = (0, 3, 6, 7, 8, 9)  # CPU time and latencies; the others are ratios, and memory that was not measured
    for proxy in ["coatcheck", "nginx"] if nginx else ["coatcheck"]:
        assert all(float(rows[proxy][column].replace(",", "")) > 0 for column in columns), done.stdout
    # Its windows are so short here that a busy machine answers nothing in one now and then.
    failed = re.findall(r"^- failed, .+?: (.+)$", done.stdout, re.M)
    assert all(each.endswith("no answers") for each in failed), done.stdout
    ElementTree.parse(tmp_path / "proxy-quick.svg")


def test_what_a_lost_worker_may_have_caused_is_no_fault_of_the_router() -> None:
    turn = Unexpected("streams", "w1", begin=10.0, end=12.0, what="cut")
    assert provoked(turn, [("w1", 11.0)])
    assert provoked(turn, [("w1", 12.1)])  # the client noticed first
    assert not provoked(turn, [("w2", 11.0), ("w1", 9.0), ("w1", 13.0)])
    assert provoked(msgspec.structs.replace(turn, worker=""), [("w2", 11.0)])  # an answer that names no worker


def test_the_soak_tells_growth_and_leftovers(capsys: pytest.CaptureFixture[str]) -> None:
    rest = Sample(0.0, 60 << 20, 19, 1, 0.0, dict.fromkeys(GAUGES, 0.0) | {TASKS: 8.0})
    flat = [replace(rest, at_s=5.0 * number, cpu_s=number) for number in range(1, 41)]
    growing = [replace(sample, resident=sample.resident + (number << 19)) for number, sample in enumerate(flat)]
    left = replace(rest, descriptors=20, gauges=rest.gauges | {"coatcheck_in_flight": 1.0, TASKS: 9.0})
    quiet = [1.0] * 100
    nothing = Report({}, [], 0)

    def failed(
        samples: list[Sample], after: Sample, lags: list[float], report: Report, own: tuple[float, float] = (99, 100)
    ) -> list[str]:
        verdict = judge(samples, rest, after, lags, quiet, report, [], own)
        return [row[0] for row in verdict.rows if row[-1] != "yes"]

    assert failed(flat, rest, quiet, nothing) == []
    assert failed(growing, rest, quiet, nothing) == ["memory after the warm-up, by the line through it"]
    assert failed(flat, left, quiet, nothing) == [
        "descriptors, 10 s after the load",
        "tasks then",
        "`coatcheck_in_flight` then",
    ]
    assert failed(flat, rest, [1.0] * 90 + [50.0] * 10, nothing) == ["lag of the loop, p99"]
    assert failed(flat, rest, quiet, nothing, (98, 100)) == ["the router's own measure of that, within 20 ms"]
    broken = Report({}, [Unexpected("streams", "w1", 1.0, 2.0, "cut")], 0)
    assert failed(flat, rest, quiet, broken) == ["what clients did not expect"]
    assert "not expected, 1×: streams: cut" in capsys.readouterr().out


def test_processor_time_and_memory_are_those_of_the_whole_tree() -> None:
    burn = "import os, time\nif not os.fork(): \n while time.process_time() < 0.2: pass\n time.sleep(9)\nos.wait()"
    with subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) as parent:
        try:
            give_up_at = time.monotonic() + 20
            # Its child burns 0.2 s, of which some may have been its parent's.
            while len(pids := procfs.tree(parent.pid)) < 2 or procfs.cpu(pids).since(procfs.cpu(pids[:1])) < 0.1:
                assert time.monotonic() < give_up_at
                time.sleep(0.02)
            assert procfs.resident(pids) > procfs.resident(pids[:1]) > 1 << 20
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_the_oracle_goes_where_the_prompt_is_unless_others_have_much_less_to_do() -> None:
    workers = {f"w{number}": ("127.0.0.1", number) for number in (1, 2)}
    oracle = Oracle(workers, 16)
    served: list[Served] = []
    oracle.served = served

    def sent(*messages: str) -> str:
        said = [{"role": "user", "content": each * 200} for each in messages]
        ((_, port),) = oracle.addresses("", msgspec.json.encode({"model": MODEL, "messages": said}))
        return f"w{port}"

    def done(worker: str) -> None:
        served.append(Served("", 0.0, worker=worker))

    first = sent("a")
    other = sent("other")
    assert {first, other} == {"w1", "w2"}  # nobody knows anything, so the load decides
    done(first)
    done(other)
    for _ in range(3):
        assert sent("a", "b") == first
    for _ in range(50):
        if sent("a", "b") == other:  # it has had enough
            break
    else:
        raise AssertionError
