"""Processes that a measurement starts. All are stopped by their process ids when it ends, whichever way it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

REPO = Path(__file__).parents[1]
STOP_LIMIT_S = 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Child:
    """One process, and those that it starts in its session. Its output is in `log`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        # The environment's settings are for the user's own router.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
        self.log = log
        self._gone = False
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                command,
                cwd=REPO,
                env={**inherited, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def said(self) -> str:
        """The end of its output."""
        return self.log.read_bytes()[-2000:].decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()
        self._gone = True

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left of it."""
        if self._gone:
            return
        self.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(STOP_LIMIT_S)
        self.kill()


class Children:
    """`with Children(folder) as children`: what it starts is stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._all:
            child.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        child = Child(command, self.folder / f"{len(self._all)}-{name}.log", environment)
        self._all.append(child)
        return child

    def start_module(self, module: str, *arguments: str) -> Child:
        return self.start(module.rpartition(".")[2], [sys.executable, "-m", module, *arguments])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_listening(child: Child, port: int, limit_s: float = 30.0) -> None:
    """Raises RuntimeError if it ends or does not listen in time."""
    give_up_at = time.monotonic() + limit_s
    while True:
        if not child.alive:
            raise RuntimeError(f"ended with {child.popen.returncode}: {child.said()}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"does not listen after {limit_s:.0f} s: {child.said()}") from None
            time.sleep(0.05)
        else:
            return


def raise_file_limit() -> None:
    """Thousands of streams need two descriptors each; what is started later inherits it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_on_sigterm() -> None:
    """So that SIGTERM ends us as Ctrl-C does, by way of every `finally`."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
