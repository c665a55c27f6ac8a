"""The tests' own rule: where CI is set, a test that was skipped is one that did not pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
FILES = {
    "test_passed.py": "def test_one(): pass\n",
    "test_some.py": "import pytest\ndef test_two(): pass\ndef test_three(): pytest.skip('a reason')\n",
    "test_whole.py": "import pytest\npytest.skip('a reason', allow_module_level=True)\n",
}
SAID = "in CI, skipped tests are failures: "


@pytest.mark.parametrize(
    ("options", "ci"),
    [([], False), ([], True), (["-p", "xdist", "-n", "2"], True)],
    ids=["alone-not-in-ci", "alone", "in-parallel"],
)
def test_in_ci_a_skipped_test_fails_the_run(tmp_path: Path, options: list[str], ci: bool) -> None:
    shutil.copy(CONFTEST, tmp_path)
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", ".", *FILES]
    environment = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(CONFTEST.parents[1])}
    environment |= {"CI": "true"} if ci else {}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    said = [line.removeprefix(SAID).split(", ") for line in done.stdout.splitlines() if line.startswith(SAID)]
    assert done.returncode == ci, done.stdout
    assert [sorted(each) for each in said] == ([["test_some.py::test_three", "test_whole.py"]] if ci else [])
