"""The processes of one way through the demonstration: mock workers with an engine, and replicas of the router."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from app import Trouble, children
from app.config import VARIABLE_PREFIX
from app.demo.load import Address
from app.listening import is_free

HOST = "127.0.0.1"
TOLD = ("kv",)
"""Policies that want workers to tell of their blocks."""
_FIRST_PORT, _SHARE, _SHARES = 10_000, 100, 100
"""All below those that Linux gives to connections (`ip_local_port_range`)."""
_READY_LIMIT = 60.0
_STOP_GRACE = 3.0


class Fleet:
    """Workers w1, w2 … and replicas r1, r2 …, all stopped by `close`."""

    def __init__(self, *, workers: int, replicas: int, policy: str, claims: str, profile: str, folder: Path) -> None:
        """Decides who listens where. `claims`: the store's URL. `folder`: of their logs. Raises Trouble."""
        ports = iter(free_ports(3 * workers + replicas))
        self.workers = {f"w{number}": (HOST, next(ports)) for number in range(1, workers + 1)}
        self.replicas = {f"r{number}": (HOST, next(ports)) for number in range(1, replicas + 1)}
        self._events = {name: (next(ports), next(ports)) for name in self.workers} if policy in TOLD else {}
        """Where workers tell of their blocks, and where they are asked for what was missed."""
        self._profile = profile
        self._router = ["app", "serve", "--claims", claims, "--policy", policy, "--drain-timeout", "1"]
        self._router += [f"--worker={self._option(name)}" for name in self.workers]
        # Everything is said in flags; the user's variables are for a router of the user's own.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._up: set[Address] = set()

    async def start(self) -> None:
        """All of them; returns when they are ready. Raises Trouble."""
        for name in self.workers:
            self._start(name)
        for name, (_, port) in self.replicas.items():
            self._running[name] = self._child(name, [*self._router, "--port", str(port)])
        try:
            async with asyncio.timeout(_READY_LIMIT):
                for worker in self.workers:
                    await self.until_up(worker)
                for address in self.replicas.values():
                    await self._until_answers(address, "/ready")
        except TimeoutError:
            raise Trouble(f"the processes are not ready after {_READY_LIMIT:g} s; all are stopped") from None

    async def until_up(self, worker: str) -> None:
        """Until it serves."""
        await self._until_answers(self.workers[worker], "/health")
        self._up.add(self.workers[worker])

    def events_of(self, worker: str) -> str:
        """Where a worker tells of its blocks: the policy is one of `TOLD`."""
        return f"tcp://{HOST}:{self._events[worker][0]}"

    def is_up(self, address: Address) -> bool:
        """A worker serves, or did until a moment ago."""
        return address in self._up

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash would be."""
        child = self._running.pop(name)
        self._up.discard(self.workers.get(name, (HOST, 0)))
        child.send_signal(signal.SIGKILL)
        children.stop([child], grace=0)

    async def start_again(self, worker: str) -> None:
        """At its old address, with nothing cached; returns when it serves."""
        self._start(worker)
        await self.until_up(worker)

    def check(self) -> None:
        """Raises Trouble when one has ended that nobody has killed."""
        for name, child in self._running.items():
            code = child.poll()
            if code is not None:
                said = (self._folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
                why = f": {said[-1]}" if said else ""
                raise Trouble(f"{name} {children.spoken_end(code)}{why}")

    def close(self) -> None:
        children.stop(self._running.values(), grace=_STOP_GRACE)
        self._running.clear()

    def _start(self, worker: str) -> None:
        port = str(self.workers[worker][1])
        arguments = ["mocker", "--port", port, "--name", worker, "--profile", self._profile, "--startup-s", "0"]
        if worker in self._events:
            events, replay = self._events[worker]
            arguments += ["--kv-events-port", str(events), "--kv-replay-port", str(replay)]
        self._running[worker] = self._child(worker, arguments)

    def _option(self, worker: str) -> str:
        host, port = self.workers[worker]
        option = f"http://{host}:{port},name={worker}"
        if worker in self._events:
            events, replay = self._events[worker]
            option += f",kv-events=tcp://{host}:{events},kv-replay=tcp://{host}:{replay}"
        return option

    def _child(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("a") as log:
            return children.start(*command, environment=self._environment, stdout=subprocess.DEVNULL, stderr=log)

    async def _until_answers(self, address: Address, path: str) -> None:
        while not await _answers(address, path):
            self.check()
            await asyncio.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """That nobody listens on now, and that no connection takes until somebody does, or while who did is killed. Raises
    Trouble when there are not so many."""
    ports = range(_FIRST_PORT, _FIRST_PORT + _SHARE * _SHARES)
    begin = random.randrange(_SHARES) * _SHARE  # another demonstration begins elsewhere
    free = (port for port in itertools.chain(ports[begin:], ports[:begin]) if is_free(HOST, port))
    found = list(itertools.islice(free, count))
    if len(found) < count:
        raise Trouble(
            f"of the ports {ports[0]} to {ports[-1]} of {HOST} only {len(found)} are free, and {count} are needed; "
            "end what listens there, or ask for fewer (--workers)"
        )
    return found


async def _answers(address: Address, path: str) -> bool:
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {address[0]}\r\nconnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
