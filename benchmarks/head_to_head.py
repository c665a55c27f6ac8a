"""Agents before the same fleet by each way of placing, one after the other: what is found in caches, and how soon the
first token comes. Part of `make bench-placement`.

Workers are mock workers with an engine, new and empty for each way; agents are those of `coatcheck demo`, the same for
all. Each way but the oracle has two replicas, which turns reach alternately, as behind a balancer. Peers are taken from
where `make bench-peers` puts them; those that are not there are left out.

Dynamo's frontend speaks to workers in its own way alone: each mock worker has a bridge beside it (`dynamo_bridge`),
which also says who served a turn, for Dynamo does not tell the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from app.demo.fleet import Fleet, free_ports
from app.demo.load import MODEL, Address, Entrance, Figures, InTurn, Load, Served, figures, session_headers
from app.demo.play import PROFILE, agents_for
from app.fleet.policies import POLICIES
from benchmarks import dynamo_bridge
from benchmarks.chart import Panel, svg
from benchmarks.children import REPO, Child, Children, wait_listening
from benchmarks.proxy_peers import INSTALLED, PEERS, Place, find, rust_router
from benchmarks.tables import Table, met
from mocker import traces
from mocker.cache import TOKEN_BYTES
from mocker.engine import profile as profiles
from mocker.engine.blocks import chain_of
from mocker.wire import parse_chat

WORKERS = 4
DYNAMO = "ai-dynamo"
"""As pip knows it."""
_READY_S = 120.0
_LOAD_WEIGHS = 0.02
"""What the oracle gives up of a prompt's cached share for a turn less at a worker, above the least loaded."""


@dataclass(frozen=True)
class Rule:
    """A way of placing: a policy of ours, or the `command` of a peer's replica; with neither of them the oracle."""

    name: str
    policy: str = ""
    command: Callable[[Place], list[str]] | None = None
    executable: str = ""
    session_header: str = "x-dynamo-session-id"
    """Empty: it is told no session."""
    environment: Mapping[str, str] = field(default_factory=dict)
    bridged: bool = False
    """Workers are reached, and tell of their blocks, by way of `dynamo_bridge`."""

    def headers(self, session: str, last: bool) -> dict[str, str]:
        if not self.session_header:
            return {}
        return {self.session_header: session, **session_headers(session, last)}


def rules() -> Iterator[Rule]:
    """All that can be tried here."""
    yield Rule("turn by turn", "round-robin", session_header="")
    for policy in POLICIES:
        if policy != "direct":
            yield Rule(f"coatcheck {policy}", policy)
    for name, policy in (
        ("sglang-router", "cache_aware"),
        ("sglang-router", "manual"),
        ("vllm-router", "cache_aware"),
        ("vllm-router", "consistent_hash"),
        ("vllm-router", "sticky_least_loaded"),
    ):
        peer = PEERS[name]
        executable = find(peer, [])
        if executable is None:
            continue
        first = ("launch", "--disable-health-check", "--log-level=warn") if name == "sglang-router" else ()
        command = rust_router(*(first or ("--log-level=warning",)), f"--policy={policy}")
        yield Rule(f"{name} {policy}", "", command, executable, peer.session_header, peer.environment)
    dynamo = INSTALLED / DYNAMO / "bin" / "python"
    if dynamo.is_file():
        yield Rule("dynamo kv", "", _dynamo, str(dynamo), bridged=True)
    yield Rule("oracle")


def _dynamo(place: Place) -> list[str]:
    """Its frontend, with all that it has for sessions and for several replicas."""
    profile = profiles.load(PROFILE)
    return [
        place.executable,
        *("-m", "dynamo.frontend", "--http-host=127.0.0.1", f"--http-port={place.port}", "--router-mode=kv"),
        f"--kv-cache-block-size={profile.block_size * TOKEN_BYTES}",
        *("--discovery-backend=file", "--router-replica-sync", "--router-session-affinity-ttl-secs=600"),
        f"--router-min-initial-workers={len(place.workers)}",
    ]


class Oracle:
    """Sends each turn where most of its prompt is, by the blocks that each worker was sent, with an eye on the load:
    what no router can know before its workers say so. It asks workers directly. Their caches must have room for all."""

    def __init__(self, workers: Mapping[str, Address], block_size: int) -> None:
        self._workers = workers
        self._width = block_size * TOKEN_BYTES
        self._known: dict[str, set[int]] = {name: set() for name in workers}
        self._sent: Counter[str] = Counter()
        self.served: Sequence[Served] = ()
        """By all, as it grows."""

    def addresses(self, session: str, body: bytes) -> list[Address]:
        chain = chain_of(f"{MODEL}\0", parse_chat(body).prompt, self._width)
        answered = Counter(each.worker for each in self.served)
        loads = {name: self._sent[name] - answered[name] for name in self._workers}
        least = min(loads.values())

        def score(name: str) -> float:
            found = sum(1 for _ in itertools.takewhile(self._known[name].__contains__, chain))
            return found / max(1, len(chain)) - _LOAD_WEIGHS * (loads[name] - least)

        best = max(self._workers, key=score)
        self._sent[best] += 1
        self._known[best].update(chain)
        return [self._workers[best]]


class Asked(InTurn):
    """As that, and remembers by what name the workers know each session that came by a bridge."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        super().__init__(addresses)
        self.names: dict[str, str] = {}

    def addresses(self, session: str, body: bytes) -> list[Address]:
        if session not in self.names:
            self.names[session] = dynamo_bridge.session_of(msgspec.json.decode(body)["messages"])
        return super().addresses(session, body)

    def told(self, served: Sequence[Served], turns: Mapping[str, Sequence[tuple[float, str]]]) -> None:
        """Fill in who served. `turns`: by the workers' names of sessions, when each began, and where."""
        for session, name in self.names.items():
            mine = sorted((each for each in served if each.session == session and not each.trouble), key=_at)
            # One at a time; those that the client did not get are missing here, so the last ones count.
            there = sorted(turns.get(name, ()))[-len(mine) :]
            if len(there) == len(mine):
                for each, (_, worker) in zip(mine, there, strict=True):
                    each.worker = worker


def _at(served: Served) -> float:
    return served.at


def _turns_of(workers: Mapping[str, Address]) -> dict[str, list[tuple[float, str]]]:
    found: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for worker, (host, port) in workers.items():
        with urllib.request.urlopen(f"http://{host}:{port}/mock/turns", timeout=30) as answer:
            for turn in msgspec.json.decode(answer.read())["turns"]:
                if turn["outcome"] == "completed":
                    found[turn["session"]].append((turn["start"], worker))
    return found


@dataclass(frozen=True)
class Result:
    name: str
    served: Sequence[Served]

    @property
    def figures(self) -> Figures:
        return figures(self.served, [])

    @property
    def imbalance(self) -> float | None:
        """Of the tokens that were computed, the most at one worker by the mean; None: who served is not told."""
        work: defaultdict[str, int] = defaultdict(int)
        for each in self.served:
            if not each.trouble:
                work[each.worker] += each.prompt - each.cached
        return max(work.values()) * WORKERS / sum(work.values()) if work and "" not in work else None


def head_to_head(seconds: float, seed: int, out: Path | None, only: Sequence[str] = ()) -> list[Table]:
    """What came of it, and whether it is as it should be. `seconds`: of each. `out`: where the chart goes, if anywhere.
    Raises ValueError for an unknown name in `only`."""
    chosen = {rule.name: rule for rule in rules()}
    for name in only:
        if name not in chosen:
            raise ValueError(f"there is no {name!r} here; there are: {', '.join(chosen)}")
    results = []
    for rule in chosen.values():
        if only and rule.name not in only:
            continue
        print(f"{rule.name} …", file=sys.stderr, flush=True)
        results.append(Result(rule.name, asyncio.run(_play(rule, seconds, seed))))
    if out is not None:
        out.write_text(_chart(results), "utf-8")
    results.sort(key=lambda each: each.figures.cached_share, reverse=True)
    return [_table(results, seconds), *([] if only else [_goals({each.name: each for each in results})])]


async def _play(rule: Rule, seconds: float, seed: int) -> Sequence[Served]:
    profile = profiles.load(PROFILE)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coatcheck-bench-")))
        fleet = Fleet(
            workers=WORKERS,
            replicas=2 if rule.policy else 0,
            policy="kv" if rule.bridged else rule.policy,  # for which workers tell of their blocks
            claims=(folder / "claims").as_uri(),
            profile=PROFILE,
            folder=folder,
        )
        stack.callback(fleet.close)
        await fleet.start()
        oracle = Oracle(fleet.workers, profile.block_size)
        entrance: Entrance = oracle
        if rule.policy:
            entrance = InTurn(list(fleet.replicas.values()))
        elif rule.command is not None:
            children = stack.enter_context(Children(folder))
            environment = dict(rule.environment)
            if rule.bridged:
                environment |= {"DYN_FILE_KV": str(folder / "kv"), "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
                _bridge(rule, children, fleet, folder, environment)
            entrance = (Asked if rule.bridged else InTurn)(
                _replicas(rule, rule.command, children, fleet, folder, environment)
            )
        load = Load(
            traces.agents(agents_for(WORKERS, seed), profile.block_size),
            entrance,
            seconds=seconds,
            seed=seed,
            block_size=profile.block_size,
            headers=rule.headers,
        )
        oracle.served = load.served
        await load.run()
        if isinstance(entrance, Asked):
            entrance.told(load.served, await asyncio.to_thread(_turns_of, fleet.workers))
        return load.served


def _bridge(rule: Rule, children: Children, fleet: Fleet, folder: Path, environment: Mapping[str, str]) -> None:
    """Beside each worker; returns when all are known to Dynamo."""
    dynamo_bridge.write_model(folder / "model")
    profile = profiles.load(PROFILE)
    bridges = []
    for name, (host, port) in fleet.workers.items():
        events = fleet.events_of(name)
        command = [
            rule.executable,
            str(REPO / "benchmarks" / "dynamo_bridge.py"),
            f"--worker=http://{host}:{port}",
            f"--events={events}",
            f"--block-bytes={profile.block_size * TOKEN_BYTES}",
            f"--blocks={profile.blocks}",
            f"--model={folder / 'model'}",
        ]
        bridges.append(children.start(f"bridge-{name}", command, environment))
    for bridge in bridges:
        _until(bridge, lambda bridge=bridge: dynamo_bridge.READY in bridge.said())  # type: ignore[misc]


def _until(child: Child, done: Callable[[], bool]) -> None:
    """Raises RuntimeError if it ends, or is not done in time."""
    give_up_at = time.monotonic() + _READY_S
    while not done():
        if not child.alive or time.monotonic() > give_up_at:
            raise RuntimeError(f"{child.log.name} is not ready: {child.said()}")
        time.sleep(0.1)


def _serves(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            return MODEL.encode() in answer.read()
    except OSError:
        return False


def _replicas(
    rule: Rule,
    command: Callable[[Place], list[str]],
    children: Children,
    fleet: Fleet,
    folder: Path,
    environment: Mapping[str, str],
) -> list[Address]:
    addresses = []
    for port in free_ports(2):
        place = Place(rule.executable, port, [port for _, port in fleet.workers.values()], folder)
        child = children.start(f"{rule.name}-{port}".replace(" ", "-"), command(place), environment)
        addresses.append((child, ("127.0.0.1", port)))
    for child, (_, port) in addresses:
        wait_listening(child, port, _READY_S)
        if rule.bridged:
            _until(child, lambda port=port: _serves(port))  # type: ignore[misc]
    return [address for _, address in addresses]


def _table(results: Sequence[Result], seconds: float) -> Table:
    rows = []
    for each in results:
        now = each.figures
        known = each.imbalance is not None
        rows.append(
            [
                each.name,
                f"{now.cached_share:.1%}",
                *(f"{1000 * value:,.0f} ms" for value in (now.p50, now.p95, now.p99)),
                f"{each.imbalance:.2f}" if known else "–",
                f"{now.moved_needlessly} of {now.sessions}" if known else "–",
                f"{now.failed}",
                f"{now.turns:,}",
            ]
        )
    return Table(
        "Head to head",
        (
            "placing",
            "prompt tokens cached",
            "TTFT p50",
            "p95",
            "p99",
            "max/mean work",
            "sessions split",
            "failed",
            "turns",
        ),
        rows,
        f"{seconds:g} s of agents each, {WORKERS} workers ({PROFILE}), two replicas; load average "
        f"{os.getloadavg()[0]:.1f} in the end.",
    )


def _goals(results: Mapping[str, Result]) -> Table:
    """What it is all for."""
    shares = {name: each.figures.cached_share for name, each in results.items()}
    peers = {name for name in results if not name.startswith("coatcheck") and name not in ("oracle", "turn by turn")}
    oracle = shares["oracle"]
    rows = []
    for policy, least in (("kv", 0.97), ("prefix", 0.9)):
        share = shares[f"coatcheck {policy}"] / oracle
        rows.append([f"{policy}: cached share / the oracle's", f"≥ {least}", f"{share:.3f}", met(share >= least)])
    for policy, others in (("kv", peers), ("prefix", {name for name in peers if name.endswith("cache_aware")})):
        best = max(others, key=shares.__getitem__, default="")
        if best:
            share = shares[f"coatcheck {policy}"] / shares[best]
            rows.append([f"{policy}: cached share / {best}'s", "> 1", f"{share:.3f}", met(share > 1)])
    best = min(peers, key=lambda name: results[name].figures.p95, default="")
    for policy in ("kv", "prefix") if best else ():
        ratio = results[f"coatcheck {policy}"].figures.p95 / results[best].figures.p95
        rows.append([f"{policy}: TTFT p95 / {best}'s", "< 1", f"{ratio:.2f}", met(ratio < 1)])
    split = sum(each.figures.moved_needlessly for name, each in results.items() if name.startswith("coatcheck "))
    rows.append(["sessions split by coatcheck, whatever the policy", "0", str(split), met(not split)])
    return Table("Goals", ("", "goal", "measured", "met"), rows)


def _chart(results: Sequence[Result]) -> str:
    told = [(each.name, each.figures) for each in results]
    panels = (
        Panel(
            "Prompt tokens cached, %", sorted(((name, 100 * now.cached_share) for name, now in told), key=_value)[::-1]
        ),
        Panel("TTFT p95, ms", sorted(((name, 1000 * now.p95) for name, now in told), key=_value)),
    )
    return svg(panels, "coatcheck")


def _value(bar: tuple[str, float]) -> float:
    return bar[1]
