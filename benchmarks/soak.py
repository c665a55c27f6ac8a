"""The router under mixed load for long: `make soak-proxy`. Does anything grow, leak, stall or fail?

One `coatcheck serve` with claims in files, three mock workers of which one is killed and started again every minute,
and clients of every kind in a process of their own (`benchmarks.soak_load`). This process only looks: at the router's
memory, descriptors and sockets, at its metrics, and, twenty times a second on a kept connection, at how long it takes
to answer `GET /health`, which is the lag of its event loop. The same is asked of a process that has nothing else to
do, so that the machine's own delays are known.

The exit code is 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression, median

import msgspec

from benchmarks import procfs
from benchmarks.children import Child, Children, end_on_sigterm, free_port, raise_file_limit, wait_listening
from benchmarks.soak_load import Report, Unexpected
from benchmarks.tables import Table, machine, met, p99

WORKERS = 3
PROBES_PER_SECOND = 20
SAMPLE_S = 5.0
KILL_EVERY_S = 60.0
DOWN_S = 2.0
WARM_UP = 0.2
"""Part of the time in which memory may grow."""
FLAT = 0.05
LAG_LIMIT_MS = 20.0
END_LIMIT_S = 10.0
"""From the load's end until everything is back to where it was."""
CPU_LIMIT = 0.4
"""Cores; more load than that is not what this is about."""
PROVOKED_S = 0.5
"""A turn that ran at most so long before or after the loss of a worker may have been broken by it."""
GAUGES = (
    "coatcheck_turns_running",
    "coatcheck_in_flight",
    "coatcheck_session_turns_active",
    "coatcheck_pending_closes",
    "coatcheck_worker_connections",
)
TASKS = "coatcheck_tasks"
LAG = "coatcheck_loop_lag_seconds"
"""What has to be 0 in the end."""


@dataclass(frozen=True)
class Sample:
    at_s: float
    """Since the load began."""
    resident: int
    descriptors: int
    established: int
    cpu_s: float
    gauges: dict[str, float]


class Asking:
    """A kept connection to one process, asked for `/health` and `/metrics`."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.took_ms: list[float] = []

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered {answer.status}: {content[:200]!r}")
        return content

    def probe(self) -> None:
        start = time.perf_counter()
        self.get("/health")
        self.took_ms.append((time.perf_counter() - start) * 1e3)

    def gauges(self) -> dict[str, float]:
        """Those of `GAUGES`, each the sum over its labels."""
        sums = dict.fromkeys((*GAUGES, TASKS), 0.0)
        for line in self.get("/metrics").decode().splitlines():
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            if name in sums:
                sums[name] += float(value)
        return sums

    def lags(self) -> tuple[float, float]:
        """How often the router's own measure of its loop's lag was within the limit, and how often it was taken."""
        text = self.get("/metrics").decode()
        of = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(LAG))
        return float(of[f'{LAG}_bucket{{le="{LAG_LIMIT_MS / 1000:g}"}}']), float(of[f"{LAG}_count"])

    def close(self) -> None:
        self._connection.close()


class Fleet:
    """Mock workers, each in a process of its own."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.ports = [free_port() for _ in range(WORKERS)]
        self._running: list[Child | None] = [self._start(number) for number in range(WORKERS)]
        self._up_again_at = 0.0
        self._turn = 0
        self.killed: list[tuple[str, float]] = []
        """Name and time."""

    def wait(self) -> None:
        for child, port in zip(self._running, self.ports, strict=True):
            assert child is not None
            wait_listening(child, port)

    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port},name=w{number}" for number, port in enumerate(self.ports)]

    def kill_next(self) -> None:
        number = self._turn = (self._turn + 1) % WORKERS
        child = self._running[number]
        assert child is not None
        child.kill()
        self.killed.append((f"w{number}", time.monotonic()))
        self._running[number] = None
        self._up_again_at = time.monotonic() + DOWN_S

    def revive(self) -> None:
        if time.monotonic() >= self._up_again_at:
            for number, child in enumerate(self._running):
                if child is None:
                    self._running[number] = self._start(number)

    def _start(self, number: int) -> Child:
        return self._children.start_module(
            "mocker", "--port", str(self.ports[number]), "--name", f"w{number}", "--history", "1000", "--itl-ms", "5"
        )


@dataclass
class Verdict:
    rows: list[list[str]] = field(default_factory=list)
    good: bool = True

    def add(self, what: str, limit: str, found: str, fact: bool) -> None:
        self.rows.append([what, limit, found, met(fact)])
        self.good = self.good and fact


def soak(seconds: float, folder: Path, children: Children) -> bool:
    """Whether all was as it should be."""
    sample_s = min(SAMPLE_S, seconds / 30)
    kill_every_s = min(KILL_EVERY_S, seconds / 4)
    fleet = Fleet(children)
    idle_port = free_port()
    idle = children.start_module("benchmarks.proxy_worker", str(idle_port))
    fleet.wait()
    wait_listening(idle, idle_port)
    port = free_port()
    # Sessions that are not ended by a turn are to end within the warm-up, or memory would grow with them.
    ttl = max(3.0, min(60.0, seconds * WARM_UP / 4))
    options = [f"--port={port}", f"--claims={(folder / 'claims').as_uri()}", f"--session-ttl={ttl:g}"]
    router = children.start_module("app", "serve", *options, *(f"--worker={url}" for url in fleet.urls()))
    wait_listening(router, port)

    with contextlib.ExitStack() as cleanup:
        asking, control = (cleanup.enter_context(contextlib.closing(Asking(each))) for each in (port, idle_port))
        for _ in range(10):
            asking.probe()
            control.probe()
        asking.gauges()
        asking.took_ms.clear()
        control.took_ms.clear()
        before = _sample(router, asking, 0.0)
        load = children.start_module("benchmarks.soak_load", str(port), str(seconds), str(folder / "report.json"))
        began = time.monotonic()
        samples: list[Sample] = []
        next_sample, next_kill, next_probe, next_news = sample_s, kill_every_s, 0.0, 0.0
        busy = procfs.machine()
        while load.alive:
            now = time.monotonic() - began
            if now > seconds + 120:
                raise RuntimeError("the clients do not come to an end")
            if not router.alive:
                raise RuntimeError(f"the router has ended with {router.popen.returncode}: {router.said()}")
            # The probes come first, so that what takes long in this process is not taken for the router's lag.
            asking.probe()
            control.probe()
            fleet.revive()
            if now >= next_kill and now < seconds - kill_every_s / 2:
                fleet.kill_next()
                next_kill += kill_every_s
            if now >= next_sample and now <= seconds:
                samples.append(_sample(router, asking, now))
                next_sample += sample_s
            if now >= next_news and samples:
                _tell(samples[-1], asking)
                next_news += seconds / 10
            next_probe = max(next_probe + 1 / PROBES_PER_SECOND, now)
            time.sleep(max(0.0, began + next_probe - time.monotonic()))
        if load.popen.returncode:
            raise RuntimeError(f"the clients have ended with {load.popen.returncode}: {load.said()}")
        report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
        spent = procfs.machine()
        others = (spent.busy_s - busy.busy_s) / (time.monotonic() - began)
        own_lags = asking.lags()
        after = _back_to_rest(router, asking, before)

    verdict = judge(samples, before, after, asking.took_ms, control.took_ms, report, fleet.killed, own_lags)
    print(_course(samples).markdown())
    counts = ", ".join(f"{count:,} of {client}" for client, count in sorted(report.turns.items()))
    print(
        f"Turns: {counts}. {len(fleet.killed)} losses of a worker. The router used {_cores(samples):.2f} cores; "
        f"the machine was using {others:.1f}.\n"
    )
    print(Table("Verdict", ("", "limit", "found", "held"), verdict.rows).markdown(), flush=True)
    return verdict.good


def judge(
    samples: Sequence[Sample],
    before: Sample,
    after: Sample,
    lags_ms: Sequence[float],
    idle_ms: Sequence[float],
    report: Report,
    killed: Sequence[tuple[str, float]],
    own_lags: tuple[float, float],
) -> Verdict:
    """`idle_ms`: what a process that has nothing to do took to answer."""
    verdict = Verdict()
    warm = [sample for sample in samples if sample.at_s >= WARM_UP * samples[-1].at_s]
    slope, start = linear_regression([s.at_s for s in warm], [float(s.resident) for s in warm])
    span = warm[-1].at_s - warm[0].at_s
    growth = slope * span / (start + slope * warm[0].at_s)
    verdict.add(
        "memory after the warm-up, by the line through it",
        f"± {FLAT:.0%}",
        f"{growth:+.1%}, {slope * 60 / 1024:+.0f} KiB/min",
        abs(growth) <= FLAT,
    )
    verdict.add(
        f"descriptors, {END_LIMIT_S:.0f} s after the load",
        f"≤ {before.descriptors}, as before it",
        str(after.descriptors),
        after.descriptors <= before.descriptors,
    )
    verdict.add(
        "established connections then",
        f"≤ {before.established}",
        str(after.established),
        after.established <= before.established,
    )
    verdict.add(
        "tasks then",
        f"≤ {before.gauges[TASKS]:g}",
        f"{after.gauges[TASKS]:g}",
        after.gauges[TASKS] <= before.gauges[TASKS],
    )
    for name in GAUGES:
        verdict.add(f"`{name}` then", "0", f"{after.gauges[name]:g}", after.gauges[name] == 0)
    unprovoked = [each for each in report.unexpected if not provoked(each, killed)]
    count = len(unprovoked) + report.others
    verdict.add(
        "what clients did not expect",
        "0",
        f"{count}, and {len(report.unexpected) - len(unprovoked)} at a worker's loss",
        count == 0,
    )
    for what, times in Counter(f"{each.client}: {_general(each.what)}" for each in unprovoked).most_common(10):
        print(f"not expected, {times}×: {what}")
    lag, idle = p99(lags_ms), p99(idle_ms)
    verdict.add(
        "lag of the loop, p99",
        f"< {LAG_LIMIT_MS:.0f} ms",
        f"{lag:.1f} ms, p50 {median(lags_ms):.1f} ms (an idle process: {idle:.1f} and {median(idle_ms):.1f} ms)",
        lag < LAG_LIMIT_MS,
    )
    within, taken = own_lags
    verdict.add(
        f"the router's own measure of that, within {LAG_LIMIT_MS:.0f} ms",
        "≥ 99 %",
        f"{within / taken:.2%} of {taken:,.0f}",
        within >= 0.99 * taken,
    )
    verdict.add("cores used by the router", f"≤ {CPU_LIMIT}", f"{_cores(samples):.2f}", _cores(samples) <= CPU_LIMIT)
    return verdict


def provoked(unexpected: Unexpected, killed: Sequence[tuple[str, float]]) -> bool:
    """Whether the loss of the worker, or of any where the answer names none, may be its cause."""
    return any(
        unexpected.begin - PROVOKED_S <= at <= unexpected.end + PROVOKED_S
        for worker, at in killed
        if unexpected.worker in ("", worker)
    )


def _back_to_rest(router: Child, asking: Asking, before: Sample) -> Sample:
    """How things are once they are as before the load, or after the limit."""
    give_up_at = time.monotonic() + END_LIMIT_S
    while True:
        after = _sample(router, asking, 0.0)
        rested = not any(after.gauges[name] for name in GAUGES) and after.descriptors <= before.descriptors
        if rested or time.monotonic() > give_up_at:
            return after
        time.sleep(0.2)


def _sample(router: Child, asking: Asking, at_s: float) -> Sample:
    pid = router.pid
    return Sample(
        at_s,
        procfs.resident([pid]),
        procfs.descriptors(pid),
        procfs.established(pid),
        procfs.cpu([pid]).processes_s,
        asking.gauges(),
    )


def _tell(sample: Sample, asking: Asking) -> None:
    print(
        f"{sample.at_s:5.0f} s: {sample.resident / (1 << 20):.1f} MiB, {sample.descriptors} descriptors, "
        f"lag p99 so far {p99(asking.took_ms):.1f} ms",
        file=sys.stderr,
        flush=True,
    )


def _course(samples: Sequence[Sample]) -> Table:
    """Means of ten parts of the time."""
    parts = 10
    rows = []
    for number in range(parts):
        part = samples[number * len(samples) // parts : (number + 1) * len(samples) // parts]
        if part:
            rows.append(
                [
                    f"{part[-1].at_s:,.0f} s",
                    f"{fmean(s.resident for s in part) / (1 << 20):.1f}",
                    f"{fmean(s.descriptors for s in part):.0f}",
                    f"{fmean(s.established for s in part):.0f}",
                    *(f"{fmean(s.gauges[name] for s in part):.1f}" for name in GAUGES),
                ]
            )
    names = [name.removeprefix("coatcheck_").replace("_", " ") for name in GAUGES]
    return Table("The course of it", ("until", "MiB", "descriptors", "connections", *names), rows, "Means.")


def _cores(samples: Sequence[Sample]) -> float:
    return (samples[-1].cpu_s - samples[0].cpu_s) / (samples[-1].at_s - samples[0].at_s)


def _general(what: str) -> str:
    """Without what differs between two of a kind."""
    return re.sub(r"\d{4,}|[0-9a-f]{8,}", "…", what)[:300]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of load (default: %(default).0f)")
    args = parser.parse_args(argv)
    end_on_sigterm()
    raise_file_limit()
    print(f"{machine()}\n", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="coatcheck-soak-"))
    try:
        with Children(folder) as children:
            good = soak(args.seconds, folder, children)
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
