"""The package as its users get it: build the wheel, install it into an environment of its own, and let it route a turn.

`python -m tests.smoke` installs the versions of constraints.txt, `--lowest` the lowest that pyproject.toml allows.
Nothing is run from the checkout, and nothing of it can be imported: what is missing in the wheel is missing here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[2:]:
    found = importlib.import_module(name).__file__
    assert found and found.startswith(sys.argv[1]), f"{name} is {found}"
"""


def lowest(requirement: str) -> str:
    """`name[extra]>=1.2,<2` as the constraint `name==1.2`."""
    match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*>=\s*([\w.]+)", requirement)
    assert match, f"{requirement} has no lower bound"
    return f"{match[1]}=={match[2]}"


def build(folder: Path) -> Path:
    """The wheel, from a copy: an earlier build's leftovers do not get in, and the checkout stays clean."""
    source = folder / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("app", "backends", "mocker"):
        shutil.copytree(REPO / name, source / name, ignore=unwanted)
    written = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, f"--wheel-dir={folder}", str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == written, f"the wheel lacks {written - packed} and has {packed - written}"
    return wheel


def install(wheel: Path, folder: Path, constraints: Path) -> Path:
    """Answers the new environment's folder of programs."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "-qq", "--no-compile", "--only-binary", ":all:", "-c", str(constraints), str(wheel)],
        check=True,
    )
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return environment / "bin"


class Installed:
    """Programs of the environment, run in a folder that is not the checkout."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder = programs, folder
        self.folder.mkdir()
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("COATCHECK_", "PYTHON"))
        } | {"PYTHONUNBUFFERED": "1", "XDG_STATE_HOME": str(folder)}

    def run(self, program: str, *arguments: str) -> str:
        command = [str(self.programs / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def serving(self, *arguments: str) -> Iterator[str]:
        """`coatcheck ARGUMENTS` while it serves: its URL. It must end well on SIGTERM."""
        log = self.folder / f"{arguments[0]}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(self.programs / "coatcheck"), *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            give_up_at = time.monotonic() + START_LIMIT_S
            while (found := re.search(r" at (http://[\d.:]+)", log.read_text())) is None:
                assert process.poll() is None, f"{arguments} ended:\n{log.read_text()}"
                assert time.monotonic() < give_up_at, f"{arguments} does not come up:\n{log.read_text()}"
                time.sleep(0.05)
            yield found[1]
            process.terminate()
            assert process.wait(STOP_LIMIT_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def ask(url: str, **request: object) -> tuple[str, str]:
    """A session's turn: how it came to its worker, and the answer's body."""
    body = json.dumps({"model": "mock-model", "messages": [{"role": "user", "content": "Hello."}], **request})
    headers = {"content-type": "application/json", "x-dynamo-session-id": "smoke"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body.encode(), headers)
    with opener.open(asked, timeout=30) as answer:
        return answer.headers["X-Coatcheck-Affinity"], answer.read().decode()


def smoke(installed: Installed, version: str, modules: list[str]) -> None:
    assert version in installed.run("coatcheck", "--version")
    installed.run("python", "-c", IMPORT_ALL, str(installed.programs.parent), *modules)
    installed.run("coatcheck", "serve", "--check", "--worker", "http://127.0.0.1:9")
    with (
        installed.serving("mock", "--port", "0") as worker,
        installed.serving("serve", "--port", "0", "--worker", worker) as router,
    ):
        how, text = ask(router, max_tokens=3)
        assert (how, json.loads(text)["usage"]["completion_tokens"]) == ("created", 3), (how, text)
        how, text = ask(router, stream=True)
        # "stored" when the watch on the claims began after the first turn: then the claim is read once more.
        assert how in ("cached", "stored"), (how, text)
        assert text.rstrip().endswith("data: [DONE]"), text
        for path in ("", "page.css", "page.js", "icon.svg", "stream"):
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{router}/admin/{path}") as page:
                assert page.readline(), path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.smoke", description=__doc__)
    parser.add_argument("--lowest", action="store_true", help="the lowest versions that pyproject.toml allows")
    arguments = parser.parse_args()
    began = time.monotonic()
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory(prefix="coatcheck-smoke-") as name:
        folder = Path(name)
        constraints = REPO / "constraints.txt"
        if arguments.lowest:
            constraints = folder / "lowest.txt"
            constraints.write_text("".join(f"{lowest(each)}\n" for each in project["dependencies"]))
        wheel = build(folder)
        with zipfile.ZipFile(wheel) as archive:
            files = [Path(each) for each in archive.namelist() if each.endswith(".py")]
        modules = [".".join(file.with_suffix("").parts) for file in files if file.stem not in ("__init__", "__main__")]
        smoke(Installed(install(wheel, folder, constraints), folder / "elsewhere"), project["version"], modules)
    print(f"{wheel.name} is complete and serves ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
