"""`python -m tests.e2e.day`: an operator's day, by the commands and files of the documentation alone.

Two replicas on etcd stand behind nginx, with API keys, and Prometheus scrapes them with the rules of `deploy/`. While
turns of two tenants come at a steady rate, a worker falls sick: that is found on the page's stream, in the log and by
an alert, and each line of the board has figures. It is drained, removed and replaced; both replicas are restarted, one
after the other, as for an upgrade; one tenant's key is revoked by a change of the file. No turn may fail but at the
sick worker, no session move but from it, and the tenant without a key be served no more. About four minutes, because
alerts wait; a line for each step, exit code 1 when it was otherwise. `make day`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from app.overview import merge
from tests.support.etcd import EtcdServer
from tests.support.fronts import NGINX, front_command
from tests.support.processes import (
    REPO,
    Process,
    Processes,
    Replica,
    Worker,
    order_fault,
    turns,
    wait_until,
)
from tests.support.prometheus import BINARY, board, firing, prometheus_command, query
from tests.support.tcp import free_ports
from tests.support.wire import Cut, Wire, ask

TENANTS = ("alice", "bob")
SESSIONS = 40
"""Of each tenant."""
WORKERS, REPLICAS = 3, 2
SICK = "w1"
NEW = "w3"
DONE = b"data: [DONE]"
LIMIT = 400.0
"""Seconds for each step; generous, because a busy machine takes its time."""
SILENT = {"Sources of workers"}
"""Panels of the board that have nothing to show here: the workers stand in the settings."""
ALERT_LIMIT = 400.0
"""`CoatcheckWorkerDown` waits for two minutes, in which a trial turn may still be running."""


class Load:
    """Turns of all sessions at the front, one after the other, and what became of them."""

    def __init__(self, url: str, keys: dict[str, str], rate: float) -> None:
        self._url, self._keys, self._rate = url, keys, rate
        self.served: Counter[str] = Counter()
        """By tenant."""
        self.sick: Counter[str] = Counter()
        """That failed at the sick worker, by their status."""
        self.refused = 0
        """Whose key is not taken any more."""
        self.failed: Counter[str] = Counter()
        self.needless: list[str] = []
        self.at: dict[str, str] = {}
        """Where each session was last."""
        self.moves = 0
        self.revoked: set[str] = set()
        """Tenants that may be refused."""
        self.shut: set[str] = set()
        """Tenants that must be."""

    async def run(self, stop: asyncio.Event) -> None:
        running: set[asyncio.Task[None]] = set()
        busy: set[str] = set()
        due, number = time.monotonic(), 0
        while not stop.is_set():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + 1 / self._rate, time.monotonic() - 1.0)
            tenant = TENANTS[number % 2]
            session = f"{tenant}-{number // 2 % SESSIONS}"
            number += 1
            if session in busy:  # the machine is slower than the rate
                continue
            busy.add(session)
            task = asyncio.create_task(self._turn(tenant, session, stream=number % 3 == 0))
            running.add(task)
            task.add_done_callback(running.discard)
            task.add_done_callback(lambda _, session=session: busy.discard(session))  # type: ignore[misc]
        await asyncio.gather(*running)

    async def _turn(self, tenant: str, session: str, *, stream: bool) -> None:
        shut = tenant in self.shut
        try:
            async with await Wire.to(self._url) as wire:
                key = [("authorization", f"Bearer {self._keys[tenant]}")]
                wire.chat(session=session, stream=stream, tokens=8, headers=key)
                answer = await wire.answer()
        except (Cut, OSError) as failure:
            self.failed[f"{type(failure).__name__}: {failure}"] += 1
            return
        if answer.status == 401 and tenant in self.revoked:
            self.refused += 1
        elif answer.status == 200 and (not stream or DONE in answer.body):
            if shut:
                self.failed[f"{tenant} was served without a key"] += 1
            self.served[tenant] += 1
            self._note(session, answer.worker or "?")
        elif answer.worker == SICK:
            self.sick[str(answer.status)] += 1
        else:
            self.failed[f"{answer.status} at {answer.worker}: {answer.body[:200]!r} ({time.strftime('%H:%M:%S')})"] += 1

    def _note(self, session: str, worker: str) -> None:
        before = self.at.get(session, worker)
        self.at[session] = worker
        if before != worker:
            self.moves += 1
            if before != SICK:
                self.needless.append(f"{session}: {before} -> {worker}")


class Day:
    """The processes, and an operator at a terminal."""

    def __init__(self, processes: Processes, claims: str, rate: float) -> None:
        self._processes = processes
        self._folder = processes.folder
        self._began = time.monotonic()
        ports = free_ports(WORKERS + 1 + REPLICAS + 2)
        self._worker_ports, rest = ports[: WORKERS + 1], ports[WORKERS + 1 :]
        self._replica_ports, (front, scraper) = rest[:REPLICAS], rest[REPLICAS:]
        self.keys = self._make_keys()
        self._config = self._write_settings(claims)
        self.workers = [self._start_worker(number) for number in range(WORKERS)]
        self.replicas = [self._start_replica(number) for number in range(REPLICAS)]
        folder = self._folder / "nginx"
        folder.mkdir()
        self._start("nginx", front_command("nginx", folder, front, self._replica_ports))
        folder = self._folder / "prometheus"
        folder.mkdir()
        command = prometheus_command(folder, scraper, self._replica_ports, self._worker_ports[:WORKERS])
        self._start("prometheus", command)
        self.prometheus = f"http://127.0.0.1:{scraper}"
        self.load = Load(f"http://127.0.0.1:{front}", self.keys, rate)

    # -- what is started

    def _make_keys(self) -> dict[str, str]:
        """`coatcheck key alice >> keys`, for each: the key itself is only on the terminal."""
        keys = {}
        with (self._folder / "keys").open("w") as file:
            for tenant in TENANTS:
                done = _coatcheck("key", tenant)
                file.write(done.stdout)
                keys[tenant] = done.stderr.split()[-1]
        return keys

    def _write_settings(self, claims: str) -> Path:
        (self._folder / "admin-token").write_text("the-operators-own-word\n")
        config = self._folder / "coatcheck.toml"
        workers = [f"http://127.0.0.1:{port},name=w{n}" for n, port in enumerate(self._worker_ports[:WORKERS])]
        settings = {
            "claims": claims,
            "worker": workers,
            "api-keys": str(self._folder / "keys"),
            "admin-token-file": str(self._folder / "admin-token"),
            "log-format": "json",
            "drain-delay": 4,
            "drain-timeout": 30,
        }
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        return config

    def _start(self, label: str, command: Sequence[str]) -> None:
        self._processes.all.append(Process(label, command, self._folder / f"{label}.log"))

    def _start_worker(self, number: int) -> Worker:
        port = self._worker_ports[number]
        options = ("--ttft-ms", "20", "--itl-ms", "10")
        process = self._processes.start("worker", "mocker", "--port", str(port), *options)
        process.urls(1)
        return Worker(f"w{number}", f"http://127.0.0.1:{port}", process)

    def _start_replica(self, number: int) -> Replica:
        port = self._replica_ports[number]
        process = self._processes.start("replica", "app", "serve", f"--config={self._config}", f"--port={port}")
        return Replica(f"http://127.0.0.1:{port}", process)

    # -- the operator

    def say(self, what: str) -> None:
        served, sick = self.load.served.total(), self.load.sick.total()
        print(
            f"{time.monotonic() - self._began:5.0f} s  {what} ({served} turns served, {sick} failed at {SICK})",
            flush=True,
        )

    def coatcheck(self, *words: str) -> str:
        """`coatcheck WORDS` at the first replica; the token is the settings'."""
        done = _coatcheck(*words, f"--url={self.replicas[0].url}", f"--config={self._config}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def rows(self, replica: Replica) -> dict[str, dict[str, Any]]:
        done = await asyncio.to_thread(
            _coatcheck, "workers", "--json", f"--url={replica.url}", f"--config={self._config}"
        )
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)["workers"]}

    async def page(self, replica: Replica) -> AsyncGenerator[dict[str, Any], None]:
        """What the page shows, again and again, by the stream that it reads."""
        token = (self._folder / "admin-token").read_text().strip()
        async with await Wire.to(replica.url) as wire:
            wire.request("GET", "/admin/stream", [("authorization", f"Bearer {token}")])
            assert (await wire.head()).status == 200
            shown: dict[str, Any] = {}
            while True:
                event = (await wire.until(b"\n\n")).decode()
                fields = dict(line.partition(": ")[::2] for line in event.splitlines() if ": " in line)
                match fields.get("event"):
                    case "snapshot":
                        shown = json.loads(fields["data"])
                    case "change":
                        merge(shown, json.loads(fields["data"]))
                yield shown

    def logged(self, replica: Replica, event: str, **fields: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in replica.process.output().splitlines() if line.startswith("{")]
        wanted = {"event": event} | fields
        return [line for line in lines if wanted.items() <= line.items()]

    def told_by(self, label: str) -> str:
        """The end of its log."""
        [process] = [each for each in self._processes.all if each.label == label]
        return process.output()[-4000:]

    # -- the day

    async def run(self) -> None:
        await wait_until(self._all_ready, LIMIT)
        stop = asyncio.Event()
        load = asyncio.create_task(self.load.run(stop))
        try:
            await wait_until(lambda: len(self.load.at) == len(TENANTS) * SESSIONS, LIMIT)
            await wait_until(self._is_scraped, LIMIT)
            self.say("all is well")
            assert not await firing(self.prometheus)
            await self._a_worker_falls_sick()
            await self._it_is_replaced()
            await self._replicas_are_upgraded()
            await self._a_key_is_revoked()
        finally:
            stop.set()
            await load
        assert not await query(self.prometheus, 'coatcheck_turns_total{outcome="failed"} > 0')

    async def _all_ready(self) -> bool:
        for replica in self.replicas:
            assert replica.process.alive, replica.process.output()
        urls = [*(replica.url for replica in self.replicas), self.load._url]
        return all([await _is_ready(url) for url in urls])

    async def _is_scraped(self) -> bool:
        with contextlib.suppress(OSError, Cut):
            up = await query(self.prometheus, 'up{job="coatcheck"} == 1')
            return len(up) == REPLICAS
        return False

    async def _a_worker_falls_sick(self) -> None:
        sick = self.workers[1]
        await order_fault(sick, mode="status", status=500, times=None)
        self.say(f"{SICK} answers every turn with 500, and its probes as ever")
        for replica in self.replicas:
            async with asyncio.timeout(LIMIT), contextlib.aclosing(self.page(replica)) as page:
                async for shown in page:
                    row = shown["workers"]["rows"][SICK]
                    if row["state"] in ("suspect", "down"):
                        break
            assert row["why"], row
            assert "500" in row["error"], row
            assert shown["workers"]["order"][0] == SICK, "the worst stands first"
            told = [event for event in shown["events"].values() if event["kind"] == "worker_state"]
            assert told, shown["events"]
        self.say(f"the page of each replica shows it first: {row['state']}, {row['why']}")
        for replica in self.replicas:
            [change, *_] = self.logged(replica, "worker_state", worker=SICK, to="suspect")
            [turn, *_] = self.logged(replica, "turn", worker=SICK, outcome="worker_error")
            assert (change["level"], turn["level"], turn["status"]) == ("warning", "warning", 500)
            assert turn["tenant"] in TENANTS
        self.say(f"the log of each says so: {change['message']}")
        await wait_until(self._has_no_session, LIMIT)
        self.say("its sessions have moved by themselves")
        await wait_until(self._is_alerted, ALERT_LIMIT)
        self.say("an alert fires: CoatcheckWorkerDown")
        panels = board()
        empty = {title for title, expression in panels if not await query(self.prometheus, expression)}
        assert empty <= SILENT, f"panels of the board without a line: {empty - SILENT}"
        self.say(f"the {len(panels)} lines of the board have figures")

    async def _has_no_session(self) -> bool:
        return SICK not in self.load.at.values()

    async def _is_alerted(self) -> bool:
        await asyncio.sleep(1)
        now = await firing(self.prometheus)
        return any(each["alertname"] == "CoatcheckWorkerDown" and each["worker"] == SICK for each in now)

    async def _it_is_replaced(self) -> None:
        await asyncio.to_thread(self.coatcheck, "workers", "drain", SICK, "--deadline", "600")
        await wait_until(self._is_drained, LIMIT)
        await asyncio.to_thread(self.coatcheck, "workers", "remove", SICK)
        self.workers[1].process.terminate()
        assert await asyncio.to_thread(self.workers[1].process.wait, LIMIT) == 0
        fresh = self._start_worker(WORKERS)
        await asyncio.to_thread(self.coatcheck, "workers", "add", f"{fresh.url},name={NEW}")
        self.say(f"{SICK} is drained, stopped and removed, {NEW} added")
        for replica in self.replicas:
            await wait_until(lambda replica=replica: self._has_new(replica), LIMIT)  # type: ignore[misc]
        await wait_until(lambda: self._gets_sessions(fresh), LIMIT)
        await wait_until(self._is_quiet, LIMIT)
        self.say(f"{NEW} has sessions at both replicas, and no alert fires any more")

    async def _is_drained(self) -> bool:
        rows = [(await self.rows(replica))[SICK] for replica in self.replicas]
        return all(row["mark"] == "draining" and not row["sessions"] and not row["in_flight"] for row in rows)

    async def _has_new(self, replica: Replica) -> bool:
        rows = await self.rows(replica)
        return SICK not in rows and rows.get(NEW, {}).get("state") == "up"

    async def _gets_sessions(self, worker: Worker) -> bool:
        """A few that are new, because those that there are stay where they are."""
        key = [("authorization", f"Bearer {self.keys['alice']}")]
        async with await Wire.to(self.load._url) as wire:
            wire.chat(session=os.urandom(8).hex(), headers=key)
            answer = await wire.answer()
        assert answer.status == 200, answer.body
        return bool(await turns(worker))

    async def _is_quiet(self) -> bool:
        await asyncio.sleep(0.5)
        return not await firing(self.prometheus)

    async def _replicas_are_upgraded(self) -> None:
        moves = self.load.moves
        for number, replica in enumerate(self.replicas):
            replica.process.terminate()
            assert await asyncio.to_thread(replica.process.wait, LIMIT) == 0
            fresh = self.replicas[number] = self._start_replica(number)
            await wait_until(lambda fresh=fresh: _is_ready(fresh.url), LIMIT)  # type: ignore[misc]
            await wait_until(lambda fresh=fresh: self._takes_turns(fresh), LIMIT)  # type: ignore[misc]
            rows = await self.rows(fresh)
            assert (SICK not in rows, rows[NEW]["state"]) == (True, "up"), "what was decided holds for who comes later"
            self.say(f"replica {number + 1} is another process, and takes turns")
        assert self.load.moves == moves, "a session has moved"

    async def _takes_turns(self, replica: Replica) -> bool:
        text = (await ask(replica.url, target="/metrics")).body.decode()
        counted = [line for line in text.splitlines() if line.startswith("coatcheck_turns_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in counted) > 0

    async def _a_key_is_revoked(self) -> None:
        keys = self._folder / "keys"
        lines = keys.read_text().splitlines(keepends=True)
        self.load.revoked.add("bob")
        keys.write_text("".join(line for line in lines if not line.startswith("bob ")))
        for replica in self.replicas:
            await wait_until(lambda replica=replica: self._refuses(replica, "bob"), LIMIT)  # type: ignore[misc]
        self.load.shut.add("bob")
        served, refused = self.load.served["alice"], self.load.refused
        await wait_until(lambda: self.load.served["alice"] > served + SESSIONS, LIMIT)
        assert self.load.refused > refused
        self.say(f"bob's key is taken no more: {self.load.refused} turns refused")

    async def _refuses(self, replica: Replica, tenant: str) -> bool:
        headers = [("authorization", f"Bearer {self.keys[tenant]}")]
        return (await ask(replica.url, target="/v1/models", headers=headers)).status == 401


async def _is_ready(url: str) -> bool:
    with contextlib.suppress(Cut, OSError):
        return (await ask(url, target="/ready")).status == 200
    return False


def _coatcheck(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *words], cwd=REPO, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.day", description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="turns a second (default: %(default)s)")
    args = parser.parse_args(arguments)
    missing = [name for name, binary in (("nginx", NGINX), ("prometheus", BINARY)) if binary is None]
    if missing:
        print(f"wants {' and '.join(missing)}: apt-get install {' '.join(missing)}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory() as folder,
        EtcdServer() as etcd,
        Processes(Path(folder)) as processes,
    ):
        day = Day(processes, etcd.url("day"), args.rate)
        asyncio.run(day.run())
        if day.load.failed:
            print(day.told_by("nginx"))
    load = day.load
    for failure, count in load.failed.most_common(10):
        print(f"{count} x {failure}")
    for move in load.needless[:10]:
        print(f"moved without need: {move}")
    print(
        f"{load.served.total()} turns served, {load.failed.total()} failed, {load.sick.total()} at the sick worker"
        f" ({dict(load.sick)}), {load.moves} moves from it, {len(load.needless)} without need"
    )
    return 1 if load.failed or load.needless else 0


if __name__ == "__main__":
    sys.exit(main())
