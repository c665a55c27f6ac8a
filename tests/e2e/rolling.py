"""`python -m tests.e2e.rolling`: one replica after the other is restarted, and one worker after the other, behind nginx
and HAProxy with the files of `deploy/`, while turns come at a steady rate. Every turn must be answered whole, and
a session moves only when its worker is drained. A line for
each at the end; exit code 1 when it was otherwise. Part of `make soak`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.etcd import EtcdServer
from tests.support.fronts import INSTALLED, front_command
from tests.support.processes import Process, Processes, Replica, Worker, turns, wait_until
from tests.support.tcp import free_ports
from tests.support.wire import Answer, Cut, Wire, ask, turn

FRONTS = [name for name in INSTALLED if name in ("nginx", "haproxy")]
SESSIONS = 120
WORKERS, REPLICAS = 3, 2
TOKENS = 10
DONE = b"data: [DONE]"
ADMIN = [("host", "localhost")]
SETTINGS = ("--drain-delay=4", "--drain-timeout=30", "--slow-start=2", "--store-deadline=20")
"""`drain-delay` is longer than the fronts take to see that a replica is not ready."""
LIMIT = 180.0
"""Seconds for each step; generous, because a busy machine takes its time."""


@dataclass
class Seen:
    """What clients got."""

    served: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    at: dict[str, str] = field(default_factory=dict)
    """Where each session was last."""
    moves: int = 0
    needless: list[str] = field(default_factory=list)


class Rolling:
    """Workers, replicas and a front, and the load at it."""

    def __init__(self, processes: Processes, front: str, claims: str, rate: float) -> None:
        self._processes, self._claims, self._rate = processes, claims, rate
        self.seen = Seen()
        self._left: dict[str, set[str]] = {}
        """Of each worker, the sessions that it was drained of and that may move for it, once."""
        self._ports = free_ports(WORKERS + REPLICAS + 1)
        self.workers = [self._start_worker(number) for number in range(WORKERS)]
        self.replicas = [self._start_replica(number) for number in range(REPLICAS)]
        for each in self.replicas:
            self._await_ready(each)
        port = self._ports[-1]
        folder = processes.folder / front
        folder.mkdir()
        command = front_command(front, folder, port, self._ports[WORKERS : WORKERS + REPLICAS])
        processes.all.append(Process(front, command, folder / "log"))
        self.url = f"http://127.0.0.1:{port}"

    def _start_worker(self, number: int) -> Worker:
        options = ["--ttft-ms", "20", "--itl-ms", "20"]
        process = self._processes.start("worker", "mocker", "--port", str(self._ports[number]), *options)
        return Worker(f"w{number}", f"http://127.0.0.1:{self._ports[number]}", process)

    def _start_replica(self, number: int) -> Replica:
        named = [f"--worker=http://127.0.0.1:{port},name=w{n}" for n, port in enumerate(self._ports[:WORKERS])]
        port = str(self._ports[WORKERS + number])
        command = ["app", "serve", "--port", port, f"--claims={self._claims}", *named, *SETTINGS]
        return Replica(f"http://127.0.0.1:{port}", self._processes.start("replica", *command))

    def _await_ready(self, replica: Replica) -> None:
        asyncio.run(wait_until(lambda: _is_ready(replica.url), LIMIT))

    # -- the load

    async def load(self, stop: asyncio.Event) -> None:
        """Turns of all sessions, one after the other, each session one at a time, at the rate; some are streams."""
        running: set[asyncio.Task[None]] = set()
        busy: set[str] = set()
        due, number = time.monotonic(), 0
        while not stop.is_set():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += 1 / self._rate
            session = f"s{number % SESSIONS}"
            number += 1
            if session in busy:  # the machine is slower than the rate
                continue
            busy.add(session)
            task = asyncio.create_task(self._turn(session, stream=number % 2 == 0))
            running.add(task)
            task.add_done_callback(running.discard)
            task.add_done_callback(lambda _, session=session: busy.discard(session))  # type: ignore[misc]
        await asyncio.gather(*running)

    async def _turn(self, session: str, *, stream: bool) -> None:
        try:
            answer = await self._ask(session, stream=stream)
        except (Cut, OSError) as failure:
            self.seen.failed[f"{type(failure).__name__}: {failure}"] += 1
            return
        if answer.status != 200 or (stream and DONE not in answer.body):
            self.seen.failed[f"{answer.status} {answer.body[:200]!r}"] += 1
            return
        self.seen.served += 1
        self._note(session, answer.worker or "?")

    async def _ask(self, session: str, *, stream: bool) -> Answer:
        if not stream:
            return await turn(self.url, session=session, tokens=2)
        async with await Wire.to(self.url) as wire:
            wire.chat(session=session, stream=True, tokens=TOKENS)
            return await wire.answer()

    def _note(self, session: str, worker: str) -> None:
        before = self.seen.at.get(session)
        self.seen.at[session] = worker
        if before is None or before == worker:
            return
        self.seen.moves += 1
        may = self._left.get(before, set())
        if session in may:
            may.discard(session)
        else:
            self.seen.needless.append(f"{session}: {before} -> {worker}")

    # -- the restarts

    async def restart_replica(self, number: int) -> None:
        replica = self.replicas[number]
        replica.process.terminate()
        assert await asyncio.to_thread(replica.process.wait, LIMIT) == 0
        self.replicas[number] = fresh = self._start_replica(number)
        await wait_until(lambda: _is_ready(fresh.url), LIMIT)
        await wait_until(lambda: self._gets_turns(fresh), LIMIT)

    async def _gets_turns(self, replica: Replica) -> bool:
        """The front has noticed that it is back."""
        text = (await ask(replica.url, target="/metrics")).body.decode()
        counted = [line for line in text.splitlines() if line.startswith("coatcheck_turns_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in counted) > 0

    async def restart_worker(self, number: int) -> None:
        """As operating.md has it: drain, wait until nothing runs there, restart, uncordon."""
        worker = self.workers[number]
        await self._mark(worker.name, "drain?deadline=1")
        self._left[worker.name] = {session for session, at in self.seen.at.items() if at == worker.name}
        await wait_until(lambda: self._is_left(worker), LIMIT)
        worker.process.terminate()
        await asyncio.to_thread(worker.process.wait, LIMIT)
        self.workers[number] = fresh = self._start_worker(number)
        await self._mark(worker.name, "uncordon")
        await wait_until(lambda: self._is_up(fresh.name), LIMIT)

    async def _all_get_new_sessions(self) -> bool:
        """Also the worker that came back last, to which no session has moved."""
        await asyncio.gather(*(turn(self.url, session=f"new-{time.monotonic()}-{n}") for n in range(WORKERS * 3)))
        return all([await turns(worker) for worker in self.workers])

    async def _mark(self, name: str, word: str) -> None:
        answer = await ask(self.replicas[0].url, "POST", f"/admin/workers/{name}/{word}", ADMIN)
        assert answer.status == 200, answer.body

    async def _is_left(self, worker: Worker) -> bool:
        """No session is there any more, and no turn runs."""
        if worker.name in self.seen.at.values():
            return False
        return not (await ask(worker.url, target="/mock/state")).json["active"]

    async def _is_up(self, name: str) -> bool:
        found = []
        for replica in self.replicas:
            rows = (await ask(replica.url, target="/admin/workers", headers=ADMIN)).json["workers"]
            found.append(next((row["state"] for row in rows if row["name"] == name), "gone"))
        return set(found) == {"up"}

    async def run(self, rounds: int) -> None:
        await wait_until(lambda: _is_ready(self.url), LIMIT)
        stop = asyncio.Event()
        load = asyncio.create_task(self.load(stop))
        try:
            await wait_until(lambda: len(self.seen.at) == SESSIONS, LIMIT)
            for _ in range(rounds):
                for number in range(REPLICAS):
                    await self.restart_replica(number)
                for number in range(WORKERS):
                    await self.restart_worker(number)
        finally:
            stop.set()
            await load
        await wait_until(self._all_get_new_sessions, LIMIT)


async def _is_ready(url: str) -> bool:
    try:
        return (await ask(url, target="/ready")).status == 200
    except (Cut, OSError):
        return False


def roll(front: str, store: str, rate: float, rounds: int) -> bool:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        claims = f"file://{folder}/claims"
        if store == "etcd":
            claims = stack.enter_context(EtcdServer()).url("rolling")
        processes = stack.enter_context(Processes(folder))
        rolling = Rolling(processes, front, claims, rate)
        began = time.monotonic()
        asyncio.run(rolling.run(rounds))
        seen, seconds = rolling.seen, time.monotonic() - began
    failed = sum(seen.failed.values())
    print(
        f"{front}, {store}: {seen.served} turns in {seconds:.0f} s ({seen.served / seconds:.0f} a second), "
        f"{failed} failed, {seen.moves} moves, {len(seen.needless)} of them needless",
        flush=True,
    )
    for what, count in seen.failed.most_common(10):
        print(f"  {count} x {what}")
    for move in seen.needless[:20]:
        print(f"  needless: {move}")
    return not failed and not seen.needless


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.rolling", description=__doc__)
    parser.add_argument("--front", action="append", choices=FRONTS, help="(default: all that are installed)")
    parser.add_argument("--store", choices=["file", "etcd"], default="file")
    parser.add_argument("--rate", type=float, default=50.0, help="turns a second (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of restarts of everything (default: %(default)s)")
    args = parser.parse_args(arguments)
    if not FRONTS:
        print("neither nginx nor HAProxy is installed: nothing is restarted behind them")
        return 1
    well = [roll(front, args.store, args.rate, args.rounds) for front in args.front or FRONTS]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
