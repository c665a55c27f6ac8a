"""`coatcheck demo` as its user starts it: real processes, of which none is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 120.0


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "app", "demo", "--plain", "--workers", "2", "--report", folder / "r.html", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COATCHECK_POLICY": "of the user's own router"},
        cwd=folder,
    )


def test_a_worker_and_a_replica_are_killed_and_no_session_is_split(tmp_path: Path) -> None:
    running = demo(tmp_path, "--way", "coatcheck", "--seconds", "3")
    said, _ = running.communicate(timeout=LIMIT)
    assert running.returncode == 0, said
    assert "worker w2 killed" in said
    assert "replica r2 killed" in said
    assert "worker w2 is back, empty" in said
    row = next(line for line in said.splitlines() if line.startswith("coatcheck ") and "%" in line and ":" not in line)
    assert re.search(r" 0 of [1-9]\d* ", row), said
    assert (tmp_path / "r.html").as_uri() in said
    page = (tmp_path / "r.html").read_text()
    assert "<b>No session</b> left a worker that was there" in page
    assert len(re.findall("<rect ", page)) > 3


def test_ctrl_c_stops_all_that_it_has_started(tmp_path: Path) -> None:
    running = demo(tmp_path, "--way", "hash")
    assert running.stdout is not None
    with running, running.stdout:
        assert "hash" in running.stdout.readline()  # its workers are being started
        give_up_at = time.monotonic() + LIMIT
        while len(started := children(running.pid)) < 2:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        said = running.stdout.read()
        running.wait(LIMIT)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_what_dies_by_itself_ends_it_with_a_word(tmp_path: Path) -> None:
    running = demo(tmp_path, "--way", "hash")
    assert running.stdout is not None
    with running, running.stdout:
        give_up_at = time.monotonic() + LIMIT
        while len(started := children(running.pid)) < 2:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        os.kill(started[0], signal.SIGKILL)
        said = running.stdout.read()
        running.wait(LIMIT)
    assert running.returncode == 1, said
    assert "coatcheck: w1 was killed by SIGKILL" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
