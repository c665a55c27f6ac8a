"""Real processes on free ports: mock workers and replicas of the router, and what can be asked of them.

Starting one takes seconds, so that tests share them where they can; whatever is started is stopped by its process id
when the `Processes` that started it is left, and dies with the tests' process in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, overload
from urllib.parse import urlsplit

from tests.support.nursery import Child, as_module, die_with_parent, nursery
from tests.support.tcp import free_ports
from tests.support.wire import ask

REPO = Path(__file__).parents[2]
START_LIMIT = 60.0
"""Seconds; generous, because a busy machine starts many at once."""
STOP_LIMIT = 60.0
"""Seconds from SIGTERM, which ends every process of ours, to SIGKILL."""
LONGEST_PAUSE = 0.25
"""Seconds between two looks at what does not come about at once; each is a page that a router makes for it."""
_LISTENING = "0A"
_URL = re.compile(r"(?:coatcheck \S+|serves .*?|admin API) at (https?://\S+?)(?:,|\s)")
"""What it says when it listens; a router may name its workers' URLs before."""

T = TypeVar("T")


class Process:
    """One child. Its output is in `log`."""

    def __init__(self, label: str, command: Sequence[str], log: Path) -> None:
        self.label = label
        self.log = log
        # The environment's settings are for the user's own router.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
        module = as_module(command)
        self._popen: subprocess.Popen[bytes] | Child
        with log.open("wb") as output:
            if module is not None:
                self._popen = nursery().start(module, environment, output.fileno(), output.fileno())
                return
            self._popen = subprocess.Popen(
                command,
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._popen.kill()
        self._popen.wait()

    def terminate(self) -> None:
        """SIGTERM; it may take its time."""
        self._popen.terminate()

    def freeze(self) -> None:
        """SIGSTOP, until `thaw`."""
        self._popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def wait(self, limit: float) -> int:
        """The exit code (negative: the signal that ended it)."""
        return self._popen.wait(limit)

    def urls(self, count: int) -> list[str]:
        """Where it says that it listens, once it has said so `count` times. Raises AssertionError."""
        give_up_at = time.monotonic() + START_LIMIT
        while len(found := _URL.findall(self.output())) < count:
            assert self.alive, f"{self.label} has ended with {self._popen.returncode}:\n{self.output()}"
            assert time.monotonic() < give_up_at, f"{self.label} does not come up:\n{self.output()}"
            time.sleep(0.02)
        return found

    def output(self, start: int = 0) -> str:
        return self.log.read_bytes()[start:].decode(errors="replace")

    # What the kernel knows of it

    def connections(self, *ports: int) -> set[str]:
        """Its open TCP sockets with one of these ports at either end, in whatever state, but for those that listen."""
        mine = set()
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed while we look
                mine.add(os.readlink(f"/proc/{self.pid}/fd/{name}"))
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, remote, state, *others = line.split()
                ends = {int(end.rpartition(":")[2], 16) for end in (local, remote)}
                if state != _LISTENING and not ends.isdisjoint(ports):
                    found.add(f"socket:[{others[5]}]")
        return found & mine

    def memory(self, what: str = "VmRSS") -> int:
        """Bytes; `VmHWM` is the peak since `forget_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(rf"^{what}:\s+(\d+) kB$", status, re.M)[1]) * 1024  # type: ignore[index]

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


class Place(Protocol):
    """What answers at a URL."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True)
class Worker:
    """A mock worker. Several may live in one process."""

    name: str
    url: str
    process: Process


@dataclass(frozen=True)
class Replica:
    url: str
    process: Process


class Processes:
    """`with Processes(folder) as processes`: everything that is started through it is stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.all:
            if process.alive:
                process.thaw()
                process.terminate()
        give_up_at = time.monotonic() + STOP_LIMIT
        stuck = []
        for process in self.all:
            try:
                process.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                stuck.append(process.label)
        assert error is not None or not stuck, f"had to be killed after {STOP_LIMIT} s: {', '.join(stuck)}"

    def start(self, label: str, *arguments: str) -> Process:
        """`python -m ARGUMENTS`."""
        number = len(self.all)
        process = Process(label, [sys.executable, "-m", *arguments], self.folder / f"{number}-{label}.log")
        self.all.append(process)
        return process

    def workers(self, count: int, *options: str, apart: bool = False) -> list[Worker]:
        """Mock workers called w0, w1 ...: in one process, or each in its own (`apart`), so that one can be killed."""
        if apart:
            started = [self.start("worker", "mocker", "--port", str(port), *options) for port in free_ports(count)]
            places = [(process.urls(1)[0], process) for process in started]
        else:
            process = self.start("workers", "mocker", "--port", "0", "--count", str(count), *options)
            places = [(url, process) for url in process.urls(count)]
        return [Worker(f"w{number}", url, process) for number, (url, process) in enumerate(places)]

    def replicas(self, count: int, workers: Sequence[Worker], claims: Path, *options: str) -> list[Replica]:
        """Replicas of the router over `workers` that keep their claims in the folder `claims`; all are ready."""
        named = [f"--worker={worker.url},name={worker.name}" for worker in workers]
        return self.replicas_with(*([f"--claims=file://{claims}", *named, *options] for _ in range(count)))

    def replicas_with(self, *options: Sequence[str]) -> list[Replica]:
        """One replica for each list of options; all are ready."""
        ports = free_ports(len(options))
        started = [
            self.start("replica", "app", "serve", "--port", str(port), *each)
            for port, each in zip(ports, options, strict=True)
        ]
        replicas = [Replica(process.urls(1)[0], process) for process in started]
        for replica in replicas:
            _wait_ready(replica)
        return replicas


# --- the truth -------------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Running, and not merely waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def turns(worker: Worker, session: str | None = None) -> list[dict[str, Any]]:
    """What the worker served and serves: all turns, or a session's."""
    answer = await ask(worker.url, target="/mock/turns" + (f"?session={session}" if session else ""))
    return answer.json["turns"]  # type: ignore[no-any-return]


async def order_fault(worker: Place, **fault: Any) -> None:
    """For the worker's next turns; fields as in `mocker.faults.Fault`."""
    answer = await ask(worker.url, "POST", "/mock/faults", body=json.dumps(fault).encode())
    assert answer.status == 200, answer.body


async def clear_faults(worker: Place) -> None:
    await ask(worker.url, "DELETE", "/mock/faults")


async def metrics(replica: Place) -> dict[str, float]:
    """Every sample by its name with its labels, as Prometheus would read it."""
    text = (await ask(replica.url, target="/metrics")).body.decode()
    samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def total(samples: dict[str, float], name: str, *labels: str) -> float:
    """The sum over all samples of this name that have all of `labels` (like `outcome="closed"`)."""
    return sum(
        value
        for sample, value in samples.items()
        if sample.partition("{")[0] == name and all(label in sample for label in labels)
    )


@overload
async def wait_until(predicate: Callable[[], Awaitable[T]], limit: float) -> T: ...
@overload
async def wait_until(predicate: Callable[[], T], limit: float) -> T: ...
async def wait_until(predicate: Callable[[], T | Awaitable[T]], limit: float) -> T:
    """Ask until the answer is true, at most `limit` seconds; answers that answer. Raises AssertionError.

    What is asked is most often a process, which has its own work to do meanwhile: the longer it takes, the rarer."""
    give_up_at = time.monotonic() + limit
    pause = 0.01
    while True:
        answer = predicate()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < give_up_at, f"still {answer!r} after {limit} s"
        await asyncio.sleep(pause)
        pause = min(1.3 * pause, LONGEST_PAUSE)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _wait_ready(replica: Replica) -> None:
    parts = urlsplit(replica.url)
    assert parts.hostname
    give_up_at = time.monotonic() + START_LIMIT
    status = 0
    while status != 200:
        assert replica.process.alive, f"a replica has ended:\n{replica.process.output()}"
        assert time.monotonic() < give_up_at, f"a replica does not get ready ({status}):\n{replica.process.output()}"
        with (
            contextlib.suppress(OSError),
            contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)) as connection,
        ):
            connection.request("GET", "/ready")
            status = connection.getresponse().status
        if status != 200:
            time.sleep(0.02)
