"""Short runs of the history checker; `make soak` runs it for longer. Another seed: HISTORY_SEED=7."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.history.checker import Rules
from tests.e2e.history.run import run, summary

ACTS = {
    "file": {"kill-replica", "freeze-replica", "end-by-admin", "kill-worker", "freeze-worker", "sicken-worker"}
    | {"fill-disk", "remove-files", "garble-files", "unname-worker", "break-source"},
    "etcd": {"kill-replica", "freeze-replica", "kill-worker", "flap-worker", "sicken-worker"}
    | {"kill-leader", "freeze-store", "wipe-store", "garble-keys", "cut-links-apart", "hang-calls"},
}
"""What a short run has time for; the soak does everything."""
SEED = int(os.environ.get("HISTORY_SEED", "1"))


@pytest.mark.timeout(300)  # a busy machine takes its time to start a dozen processes
@pytest.mark.parametrize(
    "rules",
    [
        Rules(store="file", ttl=2.5, deadline=2.0, max_stale=3.0),
        Rules(store="etcd", ttl=3.0, deadline=2.5),
    ],
    ids=lambda rules: rules.store,
)
async def test_what_happens_under_faults_is_legal(rules: Rules, tmp_path: Path) -> None:
    report = await run(
        rules,
        seconds=7 if rules.store == "file" else 9,
        seed=SEED,
        folder=tmp_path,
        sessions=40,
        think_s=0.6,
        pause_s=(0.1, 0.4),
        only=ACTS[rules.store],
    )
    print(summary([report]))
    assert report.ok, report.complaint()
    # That it has looked at something.
    assert len({fault.kind for fault in report.history.faults}) >= 4, report.history.faults
    assert report.verdict.changes.total() > 20
