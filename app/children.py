"""Child processes that cannot outlive their parent, and how they are stopped.

A child's standard input is a pipe whose other end only its parent holds. When the parent is gone, however it went, the
child reads the end of the pipe and sends itself SIGTERM. Children have sessions of their own, so that Ctrl-C reaches
the parent alone and the parent decides.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

# Our own code, wherever it was found, and not a folder called `app` where the user happens to be (-P).
_BOOT = "import sys; r = sys.argv.pop(1); r in sys.path or sys.path.insert(0, r); import app.children as c; c.run()"


def start(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
) -> subprocess.Popen[bytes]:
    """Run `module` as the main program of a child with this interpreter. The caller stops it, with `stop`."""
    command = [sys.executable, "-P", "-c", _BOOT, str(Path(__file__).parents[1]), module, *arguments]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def stop(
    children: Iterable[subprocess.Popen[bytes]], *, grace: float, hurried: Callable[[], bool] = lambda: False
) -> None:
    """SIGTERM to all, SIGKILL to those still there after `grace` seconds or once `hurried`. All are gone, and reaped,
    on return."""
    children = list(children)
    for child in children:
        child.terminate()
    give_up = time.monotonic() + grace
    while any(child.poll() is None for child in children) and time.monotonic() < give_up and not hurried():
        time.sleep(0.02)
    for child in children:
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def spoken_end(code: int) -> str:
    """How a process ended, from its return code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def run() -> None:
    """What a child does: `sys.argv` is -c, the module, and its arguments."""
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
