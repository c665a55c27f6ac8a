"""The processes that `benchmarks.claims` measures from outside: a cache that fills, and a replica that closes.

Each prints JSON lines. `idle` binds sessions that nobody comes back for; `closer` makes claims, waits for a line on
stdin, and closes them at a steady pace.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import resource
import secrets
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvloop

from app.fleet.policies import least_loaded
from app.fleet.specs import worker_name
from app.fleet.workers import Fleet, make_worker
from app.metrics import Metrics
from app.sessions.affinity import Affinity
from app.sessions.identity import KeyHasher
from app.sessions.placing import ANYWHERE
from backends import open_store
from backends.base import (
    Claim,
    ClaimOutcome,
    ClaimStore,
    ClaimValue,
    CloseOutcome,
    Event,
    Reset,
    decode_value,
    encode_value,
)
from backends.memory import MemoryStore
from backends.registry import Registry

WORKERS = tuple(f"http://127.0.0.1:{port}" for port in range(9001, 9005))
"""Never called."""
WORKER = worker_name(WORKERS[0])
REPLICA = "router-0-12345-abcd"
SESSION_TTL = 1800.0
MAX_STALE = 3600.0
"""So long that no entry of a slow run has to be read again."""
CLOSES_IN_FLIGHT = 256
TICK = 0.005
REPORTS = 5

_hasher = KeyHasher()


def session_key(group: str, number: int) -> str:
    """The key of a session as an agent would name it: 36 characters."""
    return _hasher.key(b"", f"{group:>8.8}-0000-4000-8000-{number:012d}".encode())


def new_affinity(store: ClaimStore, capacity: int) -> Affinity:
    """As `create_app` makes it."""
    fleet = Fleet(make_worker(url, connect_limit=5.0, idle_limit=4.0) for url in WORKERS)
    return Affinity(
        store,
        fleet,
        least_loaded,
        Metrics(),
        replica=REPLICA,
        ttl=SESSION_TTL,
        max_stale=MAX_STALE,
        capacity=capacity,
    )


# --- idle ------------------------------------------------------------------------------------------------------------


class EchoStore:
    """Answers as etcd would and keeps nothing, so that the memory measured is the cache's alone. A million real claims
    would also take etcd minutes.

    `foreign`: every claim was made by another replica, so it is decoded from bytes and shares nothing with us.
    """

    across_processes = False

    def __init__(self, foreign: bool) -> None:
        self.registry: Registry = MemoryStore().registry
        self._foreign = foreign
        self._revisions = itertools.count(1_000_000)
        self._expires_at = 0.0

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        revision = next(self._revisions)
        if not revision % 10_000:
            self._expires_at = time.monotonic() + 1.25 * ttl  # one lease serves many claims
        value = proposal
        if self._foreign:
            value = decode_value(encode_value(ClaimValue(worker=proposal.worker, replica="router-1-12345-abcd")))
        claim = Claim(key=key, value=value, revision=revision, expires_at=self._expires_at or time.monotonic() + ttl)
        return ClaimOutcome(claim, not self._foreign)

    async def get(self, key: str) -> Claim | None:
        return None

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        return claim

    async def close(self, claim: Claim) -> CloseOutcome:
        return CloseOutcome.CLOSED

    async def subscribe(self) -> AsyncIterator[Event]:
        yield Reset()
        await asyncio.Event().wait()

    def stamp(self, key: str) -> int:
        return 0

    async def check(self) -> None:
        return

    async def aclose(self) -> None:
        return


async def idle(sessions: int, capacity: int, foreign: bool) -> None:
    store = EchoStore(foreign)
    affinity = new_affinity(store, capacity)
    affinity.start()
    await asyncio.sleep(0)
    for number in range(1000):  # what is allocated once is not an entry's
        binding = affinity.session(session_key("warm", number), final=False)
        await binding.bind(ANYWHERE)
        binding.answered(200)
        binding.release()
    _report_memory(affinity, 0)
    target, _ = await affinity.choose(ANYWHERE)
    value = ClaimValue(worker=target.worker.name, replica=REPLICA)
    for number in range(sessions):
        key = session_key("idle", number)
        # What `bind` does in the end. All of it, for a million sessions, would take minutes.
        proposal = msgspec.structs.replace(value, nonce=secrets.token_hex(12))
        outcome = await store.create_or_get(key, proposal, SESSION_TTL)
        affinity._entries.note(outcome.claim, target, affinity._entries.snapshot(key))
        if (number + 1) % (sessions // REPORTS) == 0:
            _report_memory(affinity, number + 1)
    await affinity.aclose()


def _report_memory(affinity: Affinity, sessions: int) -> None:
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * resource.getpagesize()
    _say({"sessions": sessions, "entries": affinity.size, "resident": resident})


# --- closer ----------------------------------------------------------------------------------------------------------


async def closer(url: str, group: str, count: int, per_second: float) -> None:
    store = await open_store(url)
    keys = (session_key(group, number) for number in range(count))
    claims: list[Claim] = []

    async def make() -> None:
        for key in keys:
            outcome = await store.create_or_get(key, ClaimValue(worker=WORKER), SESSION_TTL)
            claims.append(outcome.claim)

    await asyncio.gather(*(make() for _ in range(32)))
    _say({"made": len(claims)})
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

    began: dict[str, float] = {}
    took: list[float] = []
    room = asyncio.Semaphore(CLOSES_IN_FLIGHT)

    async def close(claim: Claim) -> None:
        async with room:
            start = began[claim.key] = time.monotonic()
            outcome = await store.close(claim)
            assert outcome is CloseOutcome.CLOSED, f"{outcome} of {claim}"
            took.append(time.monotonic() - start)

    start = time.monotonic()
    async with asyncio.TaskGroup() as group_of_closes:
        for number, claim in enumerate(claims):
            while number > (time.monotonic() - start) * per_second:  # noqa: ASYNC110 (a pace, not an event)
                await asyncio.sleep(TICK)
            group_of_closes.create_task(close(claim))
    elapsed = time.monotonic() - start
    await store.aclose()
    _say({"began": began, "took": took, "elapsed": elapsed})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims_child", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("idle")
    command.add_argument("sessions", type=int)
    command.add_argument("capacity", type=int)
    command.add_argument("origin", choices=("own", "foreign"))
    command = commands.add_parser("closer")
    command.add_argument("url")
    command.add_argument("group")
    command.add_argument("count", type=int)
    command.add_argument("per_second", type=float)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.command == "idle":
            runner.run(idle(args.sessions, args.capacity, args.origin == "foreign"))
        else:
            runner.run(closer(args.url, args.group, args.count, args.per_second))
    sys.stdout.flush()
    os._exit(0)  # taking a million entries apart takes seconds


if __name__ == "__main__":
    main()
