"""One run: start everything, load and nemesis together, rest, check."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.e2e.history.checker import RECOVERY, History, Rules, Sent, Verdict, check, timeline
from tests.e2e.history.deployment import Deployment
from tests.e2e.history.load import Load
from tests.e2e.history.nemesis import Nemesis
from tests.e2e.history.witness import Witness
from tests.support.processes import Processes

SHOWN_VIOLATIONS = 5


@dataclass(kw_only=True)
class Report:
    history: History
    verdict: Verdict
    seed: int
    seconds: float
    """All of it, starting and checking too."""

    @property
    def ok(self) -> bool:
        return not self.verdict.violations

    def complaint(self) -> str:
        """The violations, each with what was seen of its session around it."""
        shown = self.verdict.violations[:SHOWN_VIOLATIONS]
        parts = [f"{len(self.verdict.violations)} violations, seed {self.seed}"]
        parts += [timeline(self.history, violation) if violation.session else violation.text for violation in shown]
        return "\n\n".join(parts)


async def run(
    rules: Rules,
    *,
    seconds: float,
    seed: int,
    folder: Path,
    sessions: int = 120,
    think_s: float = 1.0,
    pause_s: tuple[float, float] = (0.5, 1.5),
    etcd: Path | None = None,
    only: Collection[str] = (),
) -> Report:
    """Faults for `seconds`; starting, resting and checking come on top."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        processes = Processes(folder)
        deployment = Deployment(processes, folder, rules, etcd)
        stack.callback(deployment.stop)  # the store last: it goes when nobody needs it any more
        stack.enter_context(processes)
        await deployment.start()
        await deployment.ready()
        urls = {replica.name: replica.url for replica in deployment.replicas}
        load = Load(urls, seed=seed, sessions=sessions, ttl=rules.ttl, lifetime=rules.lifetime, think_s=think_s)
        nemesis = Nemesis(deployment, load, seed=seed, pause_s=pause_s, only=only)
        living = asyncio.ensure_future(load.run())
        try:
            async with Witness(deployment, nemesis.faults):
                await nemesis.run(seconds)
                await asyncio.sleep(RECOVERY)
        finally:
            load.end()
            await living
        for fault in list(nemesis.faults):
            if fault.kind == "claim-garbled" and fault.end == math.inf:
                await nemesis.end_session(fault.target, random.Random(seed))
        await load.close_all()
        leftovers = await deployment.leftovers()
        await deployment.collect()
        await deployment.unlink()
    history = History(rules=rules, sent=load.sent, served=deployment.served, faults=nemesis.faults)
    verdict = check(history)
    verdict.violations += leftovers
    return Report(history=history, verdict=verdict, seed=seed, seconds=time.monotonic() - began)


def run_in_rounds(
    rules: list[Rules],
    *,
    seconds: float,
    round_s: float,
    seed: int,
    keep: Path | None = None,
    only: Collection[str] = (),
) -> list[Report]:
    """Rounds of about `round_s`, each with fresh processes, the next seed and the next rules. Histories that are not
    legal are written to the folder `keep`, beside what the processes have logged."""
    reports: list[Report] = []
    began = time.monotonic()
    rounds = max(1, round(seconds / round_s))
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="coatcheck-history-") as folder:
            report = asyncio.run(
                run(
                    rules[number % len(rules)],
                    seconds=max(10.0, seconds / rounds - 15.0),
                    seed=seed + number,
                    folder=Path(folder),
                    sessions=60,
                    pause_s=(0.5, 3.0),
                    only=only,
                )
            )
            kept = None if keep is None or report.ok else keep / f"history-{report.history.rules.store}-{report.seed}"
            if kept is not None:
                kept.mkdir(parents=True, exist_ok=True)
                for log in Path(folder).glob("*.log"):
                    shutil.copy(log, kept)
        reports.append(report)
        print(f"round {number + 1} of {rounds}, seed {report.seed}, ttl {report.history.rules.ttl:g} s, "
              f"{time.monotonic() - began:.0f} s: {len(report.verdict.violations)} violations", flush=True)  # fmt: skip
        if not report.ok:
            print(report.complaint(), flush=True)
            if kept is not None:
                file = kept / "history.msgpack"
                file.write_bytes(msgspec.msgpack.encode(report.history))
                print(f"kept as {file}", flush=True)
    return reports


def check_again(file: Path) -> Report:
    """Of a history that was kept."""
    history = msgspec.msgpack.decode(file.read_bytes(), type=History)
    return Report(history=history, verdict=check(history), seed=0, seconds=0.0)


def summary(reports: list[Report]) -> str:
    """A table over all rounds. What was excused is counted by its reason, so that too much of it is seen."""
    sent = [turn for report in reports for turn in report.history.sent]
    faults = Counter(
        fault.kind + (" (leader)" if fault.leader and fault.kind.startswith("member") else "")
        for report in reports
        for fault in report.history.faults
    )
    rows: list[tuple[str, object]] = [
        ("turns sent", len(sent)),
        ("  finals", sum(turn.final for turn in sent)),
        ("  left by their clients", sum(turn.outcome == "aborted" for turn in sent)),
        ("  completed", sum(turn.outcome == "completed" for turn in sent)),
        ("sessions", sum(len({turn.session for turn in report.history.sent}) for report in reports)),
        ("turns that workers served", sum(len(report.history.served) for report in reports)),
        ("longest wait for a head", f"{max(map(_wait, sent), default=0.0):.1f} s"),
    ]
    for title, counts in (
        ("how turns came to their worker", Counter(turn.affinity or "not known" for turn in sent)),
        ("faults", faults),
        ("changes of worker, excused by", _sum(report.verdict.changes for report in reports)),
        ("the same worker again, after", _sum(report.verdict.renewals for report in reports)),
        ("moves around outages, excused by", _sum(report.verdict.moves for report in reports)),
        ("turns without an answer", _sum(report.verdict.lost for report in reports)),
        ("judged", _sum(report.verdict.facts for report in reports)),
        ("violations", Counter(v.rule for report in reports for v in report.verdict.violations)),
    ):
        rows.append((title, sum(counts.values())))
        rows += [(f"  {name}", count) for name, count in counts.most_common()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {count!s:>8}" for name, count in rows)


def _wait(turn: Sent) -> float:
    return (turn.head or turn.start) - turn.start


def _sum(counters: object) -> Counter[str]:
    found: Counter[str] = Counter()
    for counter in counters:  # type: ignore[attr-defined]
        found.update(counter)
    return found
