"""What a session's claim costs: `make bench-claims` measures and prints the tables that `benchmarks/README.md` keeps.

Etcd is a server of its own in memory on this machine, so its round trips are short and our own part of them is large:
over a real network every ratio here comes out better. Compared calls are interleaved in one run, so that other load on
the machine meets both. Ratios first; they travel between machines, milliseconds do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import aetcd
import uvloop

from app.sessions.affinity import Affinity
from app.sessions.placing import ANYWHERE
from backends import open_store
from backends.base import ClaimStore, ClaimValue, Deleted, Reset, encode_value
from benchmarks.claims_child import SESSION_TTL, WORKER, new_affinity, session_key
from benchmarks.tables import Table, machine, met, p99
from tests.support.etcd import EtcdServer

REPO = Path(__file__).parents[1]

FIRST_TURN_LIMIT = 1.5
"""Of a store's create to a bare transaction, both p50."""
CACHED_LIMIT_US = 10.0
ENTRY_LIMIT_BYTES = 600
DELETES_PER_SECOND = 2000.0
CLOSERS = 2
"""Processes; one of Python does not reach that pace with files."""
EVENT_LIMIT_S = 30.0
WARMUP = 20
IN_FLIGHT = (32, 100)


@dataclass(frozen=True)
class Sizes:
    first_turns: int = 1500
    windows: int = 400
    per_window: int = 1000
    idle: int = 1_000_000
    bound: int = 100_000
    deletes: int = 20_000
    creates: int = 8_000

    @classmethod
    def scaled(cls, scale: float) -> Self:
        full = cls()
        return cls(**{name: max(20, int(size * scale)) for name, size in vars(full).items()})


# --- a: the first turn -----------------------------------------------------------------------------------------------


async def first_turn(bench: Bench) -> Table:
    """A new session: the store's create beside the barest thing that could do it, and the whole of `bind`."""
    rows = []
    for kind in ("etcd", "file", "memory"):
        async with bench.affinity(kind) as (store, affinity):
            calls: dict[str, Callable[[str], Awaitable[Any]]] = {
                "store": lambda key, store=store: store.create_or_get(key, _proposal(), SESSION_TTL),  # type: ignore[misc]
                "bind": lambda key, affinity=affinity: _bind(affinity, key),  # type: ignore[misc]
            }
            if kind == "etcd":
                calls["bare"] = bench.bare_transaction
            elif kind == "file":
                calls["bare"] = bench.bare_link
            took = await _interleaved(
                calls, bench.sizes.first_turns if kind == "etcd" else bench.sizes.first_turns // 3
            )
            calls_each = await _calls_per_bind(bench.etcd, affinity) if kind == "etcd" else None
        p50 = {name: median(times) for name, times in took.items()}
        bare = p50.get("bare")
        rows.append(
            [
                kind,
                "–" if bare is None else f"{p50['store'] / bare:.2f}",
                "–" if bare is None else f"{p50['bind'] / bare:.2f}",
                "–" if calls_each is None else f"{calls_each:.2f}",
                "–" if bare is None else f"{bare * 1e6:.0f} µs",
                f"{p50['store'] * 1e6:.0f} µs",
                f"{p50['bind'] * 1e6:.0f} µs",
                met(p50["store"] / bare <= FIRST_TURN_LIMIT) if kind == "etcd" and bare else "–",
            ]
        )
    return Table(
        "A session's first turn",
        (
            "store",
            "create / bare",
            "bind / bare",
            "calls per bind",
            "bare p50",
            "create p50",
            "bind p50",
            f"create within {FIRST_TURN_LIMIT}×",
        ),
        rows,
        "Bare: one create transaction through aetcd's own client, with a lease; for files one write, fsync, link and "
        "unlink in this thread. Calls are etcd's own count of unary calls. `bind` is `Binding.bind` of a new session.",
    )


async def _interleaved(calls: dict[str, Callable[[str], Awaitable[Any]]], count: int) -> dict[str, list[float]]:
    """Seconds of each call on new keys, each round in another order."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    orders = itertools.cycle(itertools.permutations(calls))
    for number in range(WARMUP + count):
        for name in next(orders):
            key = secrets.token_hex(20)
            start = time.perf_counter()
            await calls[name](key)
            if number >= WARMUP:
                took[name].append(time.perf_counter() - start)
    return took


async def _calls_per_bind(etcd: EtcdServer, affinity: Affinity) -> float:
    count = 100
    before = etcd.metric("grpc_server_started_total", 'grpc_type="unary"')
    for _ in range(count):
        await _bind(affinity, secrets.token_hex(20))
    return (etcd.metric("grpc_server_started_total", 'grpc_type="unary"') - before) / count


# --- b: a cached turn ------------------------------------------------------------------------------------------------


async def cached_turn(bench: Bench) -> Table:
    """What a known session adds to a turn: this thread's CPU, the least of many windows."""
    rows = []
    for kind in ("memory", "file", "etcd"):
        async with bench.affinity(kind) as (_, affinity):
            keys = [secrets.token_hex(20) for _ in range(min(200, bench.sizes.per_window))]
            await _each(keys, lambda key, affinity=affinity: _bind(affinity, key))  # type: ignore[misc]
            rounds = bench.sizes.per_window // len(keys)
            windows = []
            for _ in range(bench.sizes.windows):
                windows.append(_cached_window(affinity, keys, rounds))
                await asyncio.sleep(0)  # the watch goes on
        best = min(windows) * 1e6
        rows.append([kind, f"{best:.2f} µs", f"{median(windows) * 1e6:.2f} µs", met(best < CACHED_LIMIT_US)])
    hashing = [_hash_window(bench.sizes.per_window) for _ in range(bench.sizes.windows)]
    rows.append(["hashing the key", f"{min(hashing) * 1e6:.2f} µs", f"{median(hashing) * 1e6:.2f} µs", "–"])
    return Table(
        "A cached turn",
        ("store", "session + bind_cached + release", "median window", f"under {CACHED_LIMIT_US:.0f} µs"),
        rows,
        "Thread CPU time of a turn's three calls, the loop around them included. The key is hashed once per turn.",
    )


def _cached_window(affinity: Affinity, keys: Sequence[str], rounds: int) -> float:
    start = time.thread_time()
    for _ in range(rounds):
        for key in keys:
            binding = affinity.session(key, final=False)
            assert binding.bind_cached()
            binding.answered(200)
            binding.release()
    return (time.thread_time() - start) / (rounds * len(keys))


def _hash_window(count: int) -> float:
    start = time.thread_time()
    for number in range(count):
        session_key("hashing", number)
    return (time.thread_time() - start) / count


# --- c: idle claims --------------------------------------------------------------------------------------------------


async def idle_claims(bench: Bench) -> Table:
    """Memory of the local cache in a process of its own: all sessions kept, and as many passing through a bound."""
    sessions, bound = bench.sizes.idle, bench.sizes.bound
    kept, passing = await asyncio.gather(
        _child("idle", str(sessions), str(sessions + 1000), "foreign"),
        _child("idle", str(sessions), str(bound), "foreign"),
    )
    each = (kept[-1]["resident"] - kept[0]["resident"]) / (kept[-1]["entries"] - kept[0]["entries"])
    full = next(report for report in passing if report["sessions"] >= bound)
    grown = passing[-1]["resident"] - full["resident"]
    after = passing[-1]["sessions"] - full["sessions"]
    return Table(
        "Idle claims in the local cache",
        ("bound", "sessions", "entries at the end", "bytes per entry", "memory", "holds"),
        [
            [
                f"{sessions:,}",
                f"{sessions:,}",
                f"{kept[-1]['entries']:,}",
                f"{each:.0f}",
                f"{_mib(kept[-1]['resident'] - kept[0]['resident'])}",
                met(each <= ENTRY_LIMIT_BYTES),
            ],
            [
                f"{bound:,}",
                f"{sessions:,}",
                f"{passing[-1]['entries']:,}",
                "–",
                f"{_mib(full['resident'] - passing[0]['resident'])}; {_mib(grown, sign=True)} in the next {after:,}",
                met(passing[-1]["entries"] == bound and grown < 0.05 * after * each),
            ],
        ],
        "Resident memory above that of the same process with no entries. Keys and nonces differ, and claims are "
        f"decoded from bytes as another replica's are. Limits: {ENTRY_LIMIT_BYTES} bytes per entry; once the bound is "
        "reached, growth by less than a twentieth of what the sessions that pass would take.",
    )


# --- d: deletions ----------------------------------------------------------------------------------------------------


async def deletions(bench: Bench) -> Table:
    """Other replicas close at a steady pace; this one holds every session in its cache and watches."""
    rows = []
    for kind in ("etcd", "file"):
        url = bench.url(kind)
        count = bench.sizes.deletes // CLOSERS * CLOSERS
        groups = [secrets.token_hex(4) for _ in range(CLOSERS)]
        share, pace = str(count // CLOSERS), str(DELETES_PER_SECOND / CLOSERS)
        closers = [
            await asyncio.create_subprocess_exec(
                *_child_command("closer", url, group, share, pace),
                cwd=REPO,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 26,
            )
            for group in groups
        ]
        try:
            for closer in closers:
                await _line(closer)
            async with bench.affinity(kind, url, capacity=count + 1000) as (store, affinity):
                keys = [session_key(group, number) for group in groups for number in range(count // CLOSERS)]
                await _each(keys, lambda key, affinity=affinity: _bind(affinity, key))  # type: ignore[misc]
                entries = affinity.size
                heard = _Heard(store, count)
                await heard.start()
                resets = affinity._metrics.resets.cells[()]
                for closer in closers:
                    assert closer.stdin is not None
                    closer.stdin.write(b"go\n")
                done = [json.loads(line) for line in await asyncio.gather(*map(_line, closers))]
                await heard.finish()
                resets = affinity._metrics.resets.cells[()] - resets + heard.resets
                left = affinity.size
        finally:
            for closer in closers:
                with contextlib.suppress(ProcessLookupError):
                    closer.kill()
                await closer.wait()
                closer._transport.close()  # type: ignore[attr-defined]
        began = [pair for each in done for pair in each["began"].items()]
        lags = sorted(heard.at[key] - at for key, at in began if key in heard.at)
        took = [seconds for each in done for seconds in each["took"]]
        rate = count / max(each["elapsed"] for each in done)
        rows.append(
            [
                kind,
                f"{rate / DELETES_PER_SECOND:.2f}",
                str(resets),
                f"{count - len(lags)} of {count:,}",
                f"{left} of {entries:,}",
                f"{median(lags) * 1e3:.1f} ms",
                f"{p99(lags) * 1e3:.1f} ms",
                f"{median(took) * 1e3:.1f} ms",
                _kept_up(rate) if not resets and len(lags) == count and not left else met(False),
            ]
        )
    return Table(
        f"Deletions at {DELETES_PER_SECOND:,.0f}/s",
        (
            "store",
            "pace reached",
            "Resets",
            "events missing",
            "entries left in the cache",
            "lag p50",
            "lag p99",
            "close p50",
            "keeps up",
        ),
        rows,
        "Lag: from the call of `close` in one process to `Deleted` in another, so the close itself is in it. All "
        "processes and etcd share this machine's cores.",
    )


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


class _Heard:
    """When each key's `Deleted` came."""

    def __init__(self, store: ClaimStore, count: int) -> None:
        self.at: dict[str, float] = {}
        self.resets = -1
        self._store, self._count = store, count
        self._all, self._stands = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._listen())
        await self._stands.wait()

    async def finish(self) -> None:
        assert self._task is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVENT_LIMIT_S):
                await self._all.wait()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._store.subscribe()) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Reset):
                    self.resets += 1
                    self._stands.set()
                elif isinstance(event, Deleted):
                    self.at.setdefault(event.key, time.monotonic())
                    if len(self.at) == self._count:
                        self._all.set()


# --- e: creation -----------------------------------------------------------------------------------------------------


async def creation(bench: Bench) -> Table:
    """New claims per second by how many are under way, in turns with bare transactions."""
    rows = []
    for kind in ("etcd", "file"):
        async with bench.affinity(kind) as (store, _):
            calls: dict[str, Callable[[str], Awaitable[Any]]] = {
                "store": lambda key, store=store: store.create_or_get(key, _proposal(), SESSION_TTL),  # type: ignore[misc]
            }
            if kind == "etcd":
                calls["bare"] = bench.bare_transaction
            count = bench.sizes.creates if kind == "etcd" else bench.sizes.creates // 4
            for flight in IN_FLIGHT:
                spent = dict.fromkeys(calls, 0.0)
                parts = 4
                for name in [*calls] * parts:
                    keys = [secrets.token_hex(20) for _ in range(count // parts)]
                    start = time.perf_counter()
                    await _each(keys, calls[name], flight)
                    spent[name] += time.perf_counter() - start
                rate = {name: parts * (count // parts) / seconds for name, seconds in spent.items()}
                bare = rate.get("bare")
                rows.append(
                    [
                        kind,
                        str(flight),
                        "–" if bare is None else f"{rate['store'] / bare:.2f}",
                        f"{rate['store']:,.0f}/s",
                        "–" if bare is None else f"{bare:,.0f}/s",
                    ]
                )
    return Table("New claims", ("store", "in flight", "create / bare", "create", "bare"), rows)


# --- what is measured on ---------------------------------------------------------------------------------------------


class Bench:
    """An etcd server, a bare client of it, and a folder, for one run."""

    def __init__(self, sizes: Sizes, etcd: EtcdServer, folder: Path) -> None:
        self.sizes, self.etcd, self.folder = sizes, etcd, folder
        self._bare = aetcd.Client("127.0.0.1", etcd.client_port)
        self._lease = 0
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self._bare.connect()
        self._lease = (await self._bare.lease(int(1.25 * SESSION_TTL))).id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bare.close()

    def url(self, kind: str) -> str:
        """Of a store that is empty."""
        number = next(self._numbers)
        if kind == "etcd":
            return self.etcd.url(f"bench-{number}")
        return "memory://" if kind == "memory" else (self.folder / f"claims-{number}").as_uri()

    @contextlib.asynccontextmanager
    async def affinity(
        self, kind: str, url: str | None = None, capacity: int = 100_000
    ) -> AsyncIterator[tuple[ClaimStore, Affinity]]:
        """A replica's affinity over a store, its watch standing."""
        store = await open_store(url or self.url(kind))
        affinity = new_affinity(store, capacity)
        affinity.start()
        try:
            async with asyncio.timeout(EVENT_LIMIT_S):
                while not affinity.watching:  # noqa: ASYNC110 (it tells nobody)
                    await asyncio.sleep(0.01)
            yield store, affinity
        finally:
            await affinity.aclose()
            await store.aclose()

    async def bare_transaction(self, key: str) -> None:
        """Create unless it exists, or read, through aetcd's own client: one round trip with nothing around it."""
        name, client = b"bare/" + key.encode(), self._bare
        created, _ = await client.transaction(
            compare=[client.transactions.create(name) == 0],
            success=[client.transactions.put(name, encode_value(_proposal()), self._lease)],
            failure=[client.transactions.get(name)],
        )
        assert created

    async def bare_link(self, key: str) -> None:
        """What is needed at the least to create a file that is complete, exclusive and synced."""
        made, name = self.folder / f"{key}.new", self.folder / key
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, encode_value(_proposal()))
        os.fsync(descriptor)
        os.close(descriptor)
        os.link(made, name)
        os.unlink(made)


async def _bind(affinity: Affinity, key: str) -> None:
    binding = affinity.session(key, final=False)
    await binding.bind(ANYWHERE)
    binding.answered(200)
    binding.release()


async def _each(keys: Iterable[str], call: Callable[[str], Awaitable[Any]], flight: int = 32) -> None:
    left = iter(keys)

    async def work() -> None:
        for key in left:
            await call(key)

    async with asyncio.TaskGroup() as group:
        for _ in range(flight):
            group.create_task(work())


def _proposal() -> ClaimValue:
    return ClaimValue(worker=WORKER, replica="router-0-12345-abcd")


def _child_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.claims_child", *arguments]


async def _child(*arguments: str) -> list[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *_child_command(*arguments), cwd=REPO, stdout=asyncio.subprocess.PIPE
    )
    try:
        said, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, f"{arguments} ended with {process.returncode}"
    return [json.loads(line) for line in said.splitlines()]


def _mib(size: float, *, sign: bool = False) -> str:
    return f"{size / 1048576:{'+' if sign else ''}.0f} MiB"


def _kept_up(rate: float) -> str:
    return "yes" if rate >= 0.95 * DELETES_PER_SECOND else f"yes, at {rate:,.0f}/s"


MEASURES: dict[str, Callable[[Bench], Awaitable[Table]]] = {
    "first-turn": first_turn,
    "cached-turn": cached_turn,
    "idle": idle_claims,
    "deletions": deletions,
    "creation": creation,
}


async def run(sizes: Sizes, names: Sequence[str]) -> None:
    """Measures and prints one table after the other."""
    start = time.monotonic()
    print(f"{machine()}\n", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="coatcheck-bench-"))
    try:
        with EtcdServer() as etcd:
            async with Bench(sizes, etcd, folder) as bench:
                for name in names:
                    print((await MEASURES[name](bench)).markdown(), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of everything; under half a minute")
    parser.add_argument("--scale", type=float, help="this part of everything")
    parser.add_argument("--only", action="append", choices=MEASURES, help="one measure; repeatable")
    args = parser.parse_args(argv)
    scale = args.scale or (0.05 if args.quick else 1.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(Sizes.scaled(scale), args.only or list(MEASURES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
