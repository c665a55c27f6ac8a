"""How fast each fault of a worker is seen, with the default settings: `python -m benchmarks.faults` prints the table
of docs/workers.md.

One `coatcheck serve` and three mock workers, each a process. New sessions come at a steady rate, and sessions that are
bound to the first worker go on, each once in half a second. Then that worker falls ill. What is measured, from that
moment: when its state says so, the last turn of a new session that was lost there, how many were, when the first of
its sessions has moved; and how long it takes from the fault's end until it is up again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import httpx

from benchmarks.children import Child, Children, free_port, wait_listening
from benchmarks.tables import Table, machine

WORKERS = 3
NEW_PER_S = 20.0
BOUND = 5
BOUND_EVERY_S = 0.5
LONGEST_S = 40.0
SILENT = ["--first-byte-timeout", "3"]
"""Of silence nothing is known before that; its default, 600 s, is for long prompts."""

ORDERS: dict[str, dict[str, object]] = {
    "5xx to turns": {"mode": "status", "status": 500},
    "Closes without an answer": {"mode": "reset"},
    "Never answers turns": {"mode": "hang"},
    "5xx to turns and probes": {"mode": "status", "status": 500, "probes": True},
    "503 to turns and probes": {"mode": "status", "status": 503, "probes": True},
}
Act = Callable[[], Awaitable[None]]
FROZEN, KILLED = "Frozen: answers nothing", "Its process is gone"


@dataclass
class Seen:
    """Of one fault, in seconds from it on."""

    state: float | None = None
    lost: int = 0
    last_lost: float = 0.0
    moved: float | None = None
    back: float | None = None
    bound_lost: dict[str, int] = field(default_factory=dict)


class Fleet:
    def __init__(self, children: Children, options: list[str]) -> None:
        self._children = children
        self.ports = [free_port() for _ in range(WORKERS + 1)]
        self.workers = [self._start(number) for number in range(WORKERS)]
        named = [f"--worker=http://127.0.0.1:{port},name=w{n}" for n, port in enumerate(self.ports[:-1])]
        serve = ["serve", "--port", str(self.ports[-1]), f"--claims=file://{children.folder}/claims"]
        router = children.start_module("app", *serve, *named, *options)
        wait_listening(router, self.ports[-1])
        self.url = f"http://127.0.0.1:{self.ports[-1]}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        self.client = httpx.AsyncClient(trust_env=False, timeout=60.0, limits=limits)
        self.seen = Seen()
        self._number = 0

    def _start(self, number: int) -> Child:
        child = self._children.start_module("mocker", "--port", str(self.ports[number]), "--ttft-ms", "5")
        wait_listening(child, self.ports[number])
        return child

    async def state(self) -> str:
        rows = (await self.client.get(f"{self.url}/admin/workers", headers={"host": "localhost"})).json()["workers"]
        return str(next(row["state"] for row in rows if row["name"] == "w0"))

    async def turn(self, session: str) -> tuple[int, str | None]:
        """Its status, 0 where there is none, and its worker."""
        body = {"model": "mock-model", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello."}]}
        try:
            answer = await self.client.post(
                f"{self.url}/v1/chat/completions", json=body, headers={"x-dynamo-session-id": session}
            )
        except httpx.HTTPError:
            return 0, None
        return answer.status_code, answer.headers.get("x-coatcheck-worker")

    # -- one fault

    async def bound(self) -> list[str]:
        """Sessions that are at the first worker."""
        found: list[str] = []
        while len(found) < BOUND:
            session = self._new()
            if (await self.turn(session))[1] == "w0":
                found.append(session)
        return found

    def _new(self) -> str:
        self._number += 1
        return f"{os.getpid()}-{self._number}"

    async def suffer(self, begin: Act, end: Act) -> Seen:
        self.seen = seen = Seen()
        sessions = await self.bound()
        await begin()
        began = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        due = began
        going = [asyncio.create_task(self._go_on(session, began)) for session in sessions]
        while time.monotonic() - began < LONGEST_S and (seen.state is None or seen.moved is None):
            if seen.state is None and await self.state() != "up":
                seen.state = time.monotonic() - began
            task = asyncio.create_task(self._new_turn(began))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += 1 / NEW_PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        for task in going:
            task.cancel()
        await asyncio.gather(*going, *tasks, return_exceptions=True)
        await end()
        ended = time.monotonic()
        while await self.state() != "up" and time.monotonic() - ended < 2 * LONGEST_S:
            await self.turn(self._new())
            await asyncio.sleep(0.05)
        seen.back = time.monotonic() - ended
        return seen

    async def _new_turn(self, began: float) -> None:
        at = time.monotonic() - began
        status, _ = await self.turn(self._new())
        if status != 200:
            self.seen.lost += 1
            self.seen.last_lost = max(self.seen.last_lost, at)

    async def _go_on(self, session: str, began: float) -> None:
        while self.seen.moved is None:
            status, worker = await self.turn(session)
            if status != 200:
                self.seen.bound_lost[session] = self.seen.bound_lost.get(session, 0) + 1
            elif worker != "w0" and self.seen.moved is None:
                self.seen.moved = time.monotonic() - began
            await asyncio.sleep(BOUND_EVERY_S)

    # -- how it begins and ends

    def fault(self, name: str) -> tuple[Act, Act]:
        if name == KILLED:
            return self.kill, self.start
        if name == FROZEN:
            return partial(self.send, signal.SIGSTOP), partial(self.send, signal.SIGCONT)
        return partial(self.order, ORDERS[name]), self.clear

    async def until_up(self) -> None:
        give_up_at = time.monotonic() + LONGEST_S
        while await self.state() != "up":
            if time.monotonic() > give_up_at:
                raise RuntimeError("it is not found up")
            await asyncio.sleep(0.05)

    async def order(self, fault: dict[str, object]) -> None:
        await self.client.post(f"http://127.0.0.1:{self.ports[0]}/mock/faults", json={"times": None, **fault})

    async def clear(self) -> None:
        await self.client.delete(f"http://127.0.0.1:{self.ports[0]}/mock/faults")

    async def send(self, number: signal.Signals) -> None:
        os.kill(self.workers[0].pid, number)

    async def kill(self) -> None:
        self.workers[0].kill()

    async def start(self) -> None:
        self.workers[0] = await asyncio.to_thread(self._start, 0)


async def measure(children: Children, name: str, times: int) -> list[Seen]:
    fleet = Fleet(children, SILENT if name in ("Never answers turns", FROZEN) else [])
    found = []
    async with fleet.client:
        await fleet.until_up()
        for _ in range(times):
            found.append(await fleet.suffer(*fleet.fault(name)))
            await asyncio.sleep(12)  # its slow start
    return found


def _range(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if len(known) < len(values):
        return "not seen"
    return f"{median(known):.1f} s ({known[0]:.1f} to {known[-1]:.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="each (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=[KILLED, FROZEN, *ORDERS])
    args = parser.parse_args()
    columns = ["Fault", "State tells after", "New sessions lost", "Its sessions move after", "Up again after"]
    rows = []
    for name in args.only or [KILLED, *ORDERS, FROZEN]:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            found = asyncio.run(measure(stack.enter_context(Children(Path(folder))), name, args.times))
        states, moved, back = ([getattr(each, what) for each in found] for what in ("state", "moved", "back"))
        lost = sorted(each.lost for each in found)
        row = [name, _range(states), f"{lost[0]} to {lost[-1]}", _range(moved), _range(back)]
        print(" | ".join(row), flush=True)
        rows.append(row)
    print(f"\n{machine()}\n")
    print(Table("How fast faults are seen", columns, rows).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
