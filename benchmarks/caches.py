"""What it costs to know the workers' caches: a turn that is free to choose under `prefix`, and the index of KV events.
Part of `make bench-placement`."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import multiprocessing
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import uvloop
import zmq

from app.fleet.placement.events import Holdings, read
from app.fleet.placement.feeds import Feeds
from app.fleet.placement.index import Index
from app.fleet.placement.prefix import Prefixes
from app.fleet.policies import by_cache, least_loaded
from app.fleet.specs import WorkerSpec
from app.fleet.workers import Fleet, make_worker
from app.metrics import Metrics
from app.turn.fields import FieldReader
from benchmarks.tables import Table

_PATH = b"/v1/chat/completions"
_PER_BATCH = 20
_SIZE = 16
_PARTS = 25
_NEAR, _FAR = 2, (10, 40)
"""Kilobytes."""


def free_turns(new_fleet: Callable[[int], Fleet], windows: int) -> Table:
    """Of this thread's CPU, the least of many windows. From the body's fields to where it goes."""
    rows = []
    for title, made, full in (
        ("known", _known, False),
        ("known up to its end", _known_but_end, False),
        ("unknown", _unknown, False),
        ("unknown, to a table that is full", _unknown, True),
    ):
        more = {size: _more(new_fleet(8), made(size, random.Random(1)), windows, full=full) for size in (_NEAR, *_FAR)}
        rows.append(
            [
                title,
                f"{more[_NEAR]:.1f} µs",
                *(f"{more[size]:.1f} µs ({(more[size] - more[_NEAR]) / (size - _NEAR):.2f} a kB)" for size in _FAR),
            ]
        )
    columns = ("a prompt that is", f"{_NEAR} kB", *(f"{size} kB (beyond {_NEAR} kB)" for size in _FAR))
    note = (
        "More than under `least-loaded`: turns without a session, eight targets, thread CPU time, the least of windows."
    )
    return Table("What a free turn costs more under `prefix`", columns, rows, note)


def _more(fleet: Fleet, bodies: Iterator[list[bytes]], windows: int, *, full: bool = False) -> float:
    """`full`: the table is, as after some hours: there is more of it to look through, and less of it is near."""
    prefixes = Prefixes(Metrics(), memory=64 << 20)
    if full:
        rng = random.Random(0)
        targets = itertools.cycle([target for worker in fleet for target in worker.targets])
        before = -1
        while before < len(prefixes):  # until what is noted makes less of what was
            before = len(prefixes)
            prefixes.note([rng.getrandbits(60) for _ in range(32)], next(targets))
    plain, telling = FieldReader().decode, FieldReader(prompts="yes").decode
    least, most = math.inf, math.inf
    for _ in range(windows):
        batch = next(bodies)
        start = time.thread_time()
        for body in batch:
            plain(body)
            target = least_loaded(fleet.candidates())
            fleet.note_placed(target)
            target.worker.health.good += 1
        middle = time.thread_time()
        for body in batch:
            prompt = prefixes.prompt(_PATH, "m", telling(body).said)
            assert prompt is not None
            target = by_cache(fleet.candidates(prompt=prompt))
            fleet.note_placed(target)
            prompt.placed(target)
            target.worker.health.good += 1
        least, most = min(least, middle - start), min(most, time.thread_time() - middle)
    return 1e6 * (most - least) / _PER_BATCH


def _body(system: str, user: str) -> bytes:
    return json.dumps({"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}).encode()


def _text(rng: random.Random, size: int) -> str:
    return rng.randbytes(size // 2).hex()


def _known(size: int, rng: random.Random) -> Iterator[list[bytes]]:
    bodies = [_body(_text(rng, 1024 * size - 300), _text(rng, 200))] * _PER_BATCH
    while True:
        yield bodies


def _known_but_end(size: int, rng: random.Random) -> Iterator[list[bytes]]:
    system = _text(rng, 1024 * size - 300)
    while True:
        yield [_body(system, _text(rng, 200)) for _ in range(_PER_BATCH)]


def _unknown(size: int, rng: random.Random) -> Iterator[list[bytes]]:
    while True:
        yield [_body(_text(rng, 1024 * size - 300), _text(rng, 200)) for _ in range(_PER_BATCH)]


def index(blocks: int) -> Table:
    """Of KV events: CPU and memory of a block at the one worker that has it, and what the garbage collector takes."""
    rows = []
    for each in (1, 50):
        rng = random.Random(1)
        names = [[rng.getrandbits(64) for _ in range(each)] for _ in range(blocks // each)]
        stored = _batches([_stored(some, rng) for some in names], 50 // each)
        # Engines tell of each block that goes by itself.
        gone: list[dict[str, object]] = [
            {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for some in names for name in some
        ]
        removed = _batches(gone, 50)
        best = [math.inf] * 4
        for _ in range(5):
            best = [min(pair) for pair in zip(best, _once(stored, removed, blocks), strict=True)]
        rows.append(
            [
                str(each),
                *(f"{1e6 * seconds / blocks:.2f} µs" for seconds in best[:2]),
                f"{best[2]:.0f}",
                f"{best[3]:.2f} ms",
            ]
        )
    return Table(
        "What KV events cost",
        (
            "blocks of an event that tells of stored ones",
            "a block stored",
            "removed, one an event",
            "bytes of a block",
            "garbage collection, all of them there",
        ),
        rows,
        f"{blocks:,} blocks of {_SIZE} tokens, from the bytes of a batch of 50 blocks to the index, which has had as "
        "many before.",
    )


def _stored(names: Sequence[int], rng: random.Random) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": [rng.randrange(100_000) for _ in range(_SIZE * len(names))],
        "block_size": _SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
    }


def _batches(events: Sequence[dict[str, object]], each: int) -> list[bytes]:
    return [msgspec.msgpack.encode([0.0, events[at : at + each], 0]) for at in range(0, len(events), each)]


def _once(stored: Sequence[bytes], removed: Sequence[bytes], blocks: int) -> tuple[float, float, float, float]:
    def apply(batches: Sequence[bytes], holdings: Holdings) -> float:
        """Seconds, by the quickest of some parts: others may have the machine's caches in between."""
        part = len(batches) // _PARTS
        least = math.inf
        for begin in range(0, part * _PARTS, part):
            start = time.thread_time()
            for batch in batches[begin : begin + part]:
                for _ in holdings.apply(read(batch), []):
                    pass
            least = min(least, time.thread_time() - start)
        return least * _PARTS

    holdings = Holdings(Index())
    apply(stored, holdings)
    apply(removed, holdings)
    stores = apply(stored, holdings)
    gc.collect()
    gc.freeze()  # as a router does when it has started
    other = Holdings(Index())
    tracemalloc.start()
    try:
        apply(stored, other)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    start = time.thread_time()
    gc.collect()
    collects = time.thread_time() - start
    gc.unfreeze()
    return stores, apply(removed, holdings), taken / blocks, collects


# --- events at their full rate ---------------------------------------------------------------------------------------

_RANKS, _BLOCKS_A_SECOND = 100, 1000
"""Of each rank: as many stored, and then removed."""
_OF_A_BATCH = 50


def rate(seconds: float) -> Table:
    """All ranks publish from another process, at `_BLOCKS_A_SECOND` each; one router's loop follows them."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds, blocks, cpu, lost = runner.run(_follow(seconds))
    rounds.sort()
    row = [
        f"{blocks / seconds:,.0f}",
        str(lost),
        f"{1e6 * cpu / blocks:.2f} µs",
        *(f"{1000 * rounds[int(part * (len(rounds) - 1))]:.1f} ms" for part in (0.5, 0.99, 1.0)),
    ]
    columns = ("blocks a second", "batches lost", "CPU of a block", "a round, p50", "p99", "the longest")
    return Table(
        "Following KV events",
        columns,
        [row],
        f"{_RANKS} ranks publish {_BLOCKS_A_SECOND:,} blocks a second each, for {seconds:g} s, in batches of "
        f"{_OF_A_BATCH}: all stored in one event, or each removed in one of its own. A round is what is done of that "
        "between two looks of the loop at all else, with garbage collection: CPU of its thread, and of it that of "
        "connecting too. CPU of a block: of the whole process, "
        "its ZeroMQ thread with it.",
    )


async def _follow(seconds: float) -> tuple[list[float], int, float, int]:
    """What each round took, how many blocks there were, the CPU of all, and how many batches are missing."""
    processes = multiprocessing.get_context("spawn")
    ports: Any = processes.Queue()
    subscribed = processes.Event()
    publisher = processes.Process(target=_publish, args=(ports, subscribed, seconds), daemon=True)
    publisher.start()
    workers = []
    for number, port in enumerate(await asyncio.to_thread(ports.get)):
        worker = make_worker(f"http://h:{number + 1}", name=f"w{number}", connect_limit=1, idle_limit=1)
        worker.spec = WorkerSpec(name=worker.name, url=worker.url, kv_events=f"tcp://127.0.0.1:{port}")
        workers.append(worker)
    rounds: list[float] = []
    metrics = Metrics()
    gc.collect()
    gc.freeze()  # as a router does when it has started
    feeds = Feeds(Fleet(workers), Index(), metrics, loop=asyncio.get_running_loop())
    work = feeds._work

    def timed() -> None:
        start = time.thread_time()
        work()
        rounds.append(time.thread_time() - start)

    feeds._work = timed  # type: ignore[method-assign]
    try:
        while sum(feed.trusted for feed in feeds.by_target.values()) < _RANKS:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
        start = time.process_time()
        subscribed.set()
        batches = int(seconds * _RANKS * _BLOCKS_A_SECOND / _OF_A_BATCH)
        seen = -1
        while seen < (seen := metrics.kv_batches.cells[()]) < batches or not seen:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(1.0)  # until nothing more comes
        return rounds, seen * _OF_A_BATCH, time.process_time() - start, batches - seen
    finally:
        feeds.close()
        gc.unfreeze()
        publisher.terminate()
        publisher.join()


def _publish(ports: Any, subscribed: Any, seconds: float) -> None:
    rng = random.Random(1)
    payloads = []
    for _ in range(100):
        names = [rng.getrandbits(64) for _ in range(_OF_A_BATCH)]
        payloads += _batches([_stored(names, rng)], 1)
        payloads += _batches([{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in names], 50)
    context = zmq.Context()
    sockets = [context.socket(zmq.XPUB) for _ in range(_RANKS)]
    ports.put([socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets])
    for socket in sockets:
        socket.recv()  # somebody has subscribed: before that nobody is sent what is published
    subscribed.wait()
    start = time.monotonic()
    for number in range(int(seconds * _RANKS * _BLOCKS_A_SECOND / _OF_A_BATCH)):
        while time.monotonic() - start < number * _OF_A_BATCH / (_RANKS * _BLOCKS_A_SECOND):
            time.sleep(0.001)
        turn, rank = divmod(number, _RANKS)
        sockets[rank].send_multipart((b"", turn.to_bytes(8, "big"), payloads[turn % len(payloads)]))
    time.sleep(10 * seconds)  # until it is ended
