"""That the benchmarks run and say what they measured. How fast anything is, is not for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
