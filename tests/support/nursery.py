"""Children without the price of their imports: `python -m MODULE`, forked off a process that has imported it.

Importing the router costs more CPU than most tests do, and the suite starts hundreds of routers, workers and commands.
So each test process has one nursery, which imports them once, makes a router and a worker that nobody uses, opens
nothing and starts no thread, and forks whoever is asked for. A child then runs its module as `python -m` does: its own
arguments, environment, output and exit code. What depends on the start itself (which modules a command imports, signals
during it, an installed script) is tested with processes that are started as users start them: `e2e/test_serve.py`,
`e2e/test_up.py`, `tests/smoke.py`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
_PRELOADED = (
    "app.cli",
    "app.checking",
    "app.options",
    "app.register",
    "app.remote",
    "mocker.cli",
    "backends.file",
    "backends.memory",
    # What these import late: when they first ask a worker, listen, or make a route
    "anyio._backends._asyncio",
    "anyio.streams.tls",
    "certifi",
    "encodings.idna",
    "fastapi.telemetry",
    "h11",
    "httpcore",
    "pydantic.v1",
    "uvicorn.lifespan.off",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
)
_MOST = 1 << 18
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """What one needs of `subprocess.Popen`. Its parent is the nursery, which says how it ended."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._pidfd = os.pidfd_open(pid)  # readable once it has ended; nobody reaps it before we ask

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"child {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._pidfd, select.POLLIN)
            if waiting.poll(None if timeout is None else 1000 * timeout):
                self.returncode = int(self._nursery.ask({"ended": self.pid}))
                os.close(self._pidfd)
        return self.returncode


class Nursery:
    """The process that forks, seen from the tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
            cwd=REPO,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],  # it ends with ours, whose other end only this process has
        )
        theirs.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: int, errors: int) -> Child:
        """`command`: a module's name and its arguments; `output` and `errors` are descriptors."""
        message = {"command": list(command), "environment": dict(environment)}
        return Child(self, self.ask(message, [output, errors]))

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """To its end, as `subprocess.run` with the output captured."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(os.fdopen(os.memfd_create("said"), "r")) for _ in range(2)]
            child = self.start(command, environment, *(file.fileno() for file in files))
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                raise
            for file in files:
                file.seek(0)
            return subprocess.CompletedProcess(list(command), code, *(file.read() for file in files))

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with self._lock:
            self._socket.sendmsg([json.dumps(message).encode()], passed)
            said = self._socket.recv(_MOST)
        assert said, "the nursery has ended"
        return json.loads(said)

    def close(self) -> None:
        """It ends, and what lives of its children."""
        self._socket.close()
        self._process.wait()


@functools.cache
def nursery() -> Nursery:
    """This process's own, for as long as it lives."""
    it = Nursery()
    atexit.register(it.close)
    return it


def as_module(command: Sequence[str]) -> Sequence[str] | None:
    """The module and the arguments of a command that runs one with this interpreter."""
    return command[2:] if list(command[:2]) == [sys.executable, "-m"] else None


# --- in the nursery --------------------------------------------------------------------------------------------------


def _serve(asked: socket.socket) -> list[str] | None:
    """Fork as asked. Returns in each child, what it is to run, and in the nursery at the end (None)."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, _MOST, 2)
        if not data:
            return None
        message = json.loads(data)
        if "ended" in message:
            _, status = os.waitpid(message["ended"], 0)
            asked.send(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if not pid:
            asked.close()
            die_with_parent()
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(message["environment"])
            command: list[str] = message["command"]
            return command
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(b"%d" % pid)


def _warm() -> None:
    """What is made once in a process (routes, patterns, the options' texts) its children have already."""
    from app.config import Settings
    from app.main import create_app
    from app.options import options_table
    from mocker.server import create_mock
    from mocker.settings import MockSettings

    options_table()
    create_app(Settings.flat(worker=("http://127.0.0.1:9",), claims="memory://"))
    create_mock(MockSettings())


class _End:
    """Ends a child that is done. An interpreter takes all apart that it has imported: twice the CPU of the start that
    was spared, most of it for copies of the pages that were the nursery's until then."""

    code: int | None = None
    """Unknown: it ends as it does."""

    def __call__(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code & 0xFF)


def _main() -> None:
    end = _End()
    atexit.register(end)  # before all others, which come to their turn before it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which stop their children
    for name in _PRELOADED:
        importlib.import_module(name)
    _warm()
    gc.collect()
    gc.freeze()
    command = _serve(socket.socket(fileno=int(sys.argv[1])))
    if command is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = command
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        end.code = 0
    except SystemExit as error:
        if isinstance(error.code, int | None):
            end.code = error.code or 0
        raise


if __name__ == "__main__":
    _main()
