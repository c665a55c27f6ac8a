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


@pytest.mark.parametrize("options", [[], ["-p", "xdist", "-n", "2"]], ids=["alone", "in-parallel"])
@pytest.mark.parametrize("skipped", ["test_some.py::test_three", "test_whole.py"])
def test_in_ci_a_skipped_test_fails_the_run(tmp_path: Path, skipped: str, options: list[str]) -> None:
    shutil.copy(CONFTEST, tmp_path)
    names = ["test_passed.py", skipped.partition("::")[0]]
    for name in names:
        (tmp_path / name).write_text(FILES[name])
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", ".", *names]
    environment = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for ci, code, count in [({}, 0, 0), ({"CI": "true"}, 1, 1)]:
        done = subprocess.run(command, cwd=tmp_path, env=environment | ci, capture_output=True, text=True)
        assert (done.returncode, done.stdout.count(SAID + skipped + "\n")) == (code, count), done.stdout
