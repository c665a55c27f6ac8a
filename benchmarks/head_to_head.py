"""Agents before the same fleet by each way of placing, one after the other: what is found in caches, and how soon the
first token comes. Part of `make bench-placement`.

Workers are mock workers with an engine, new and empty for each way; agents are those of `coatcheck demo`, the same for
all. Each way but the oracle has two replicas, which turns reach alternately, as behind a balancer. Peers are taken from
where `make bench-peers` puts them; those that are not there are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.demo.fleet import Fleet, free_ports
from app.demo.load import MODEL, Address, Entrance, InTurn, Load, Served, figures, session_headers
from app.demo.play import PROFILE, agents_for
from app.fleet.policies import POLICIES
from benchmarks.chart import Panel, svg
from benchmarks.children import Children, wait_listening
from benchmarks.proxy_peers import PEERS, Place, find, rust_router
from benchmarks.tables import Table
from mocker import traces
from mocker.cache import TOKEN_BYTES
from mocker.engine import profile as profiles
from mocker.engine.blocks import chain_of
from mocker.wire import parse_chat

WORKERS = 4
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
    yield Rule("oracle")


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


@dataclass(frozen=True)
class Result:
    name: str
    served: Sequence[Served]

    @property
    def imbalance(self) -> float | None:
        """Of the tokens that were computed, the most at one worker by the mean; None: who served is not told."""
        work: defaultdict[str, int] = defaultdict(int)
        for each in self.served:
            if not each.trouble:
                work[each.worker] += each.prompt - each.cached
        return max(work.values()) * WORKERS / sum(work.values()) if work and "" not in work else None


def head_to_head(seconds: float, seed: int, out: Path | None, only: Sequence[str] = ()) -> Table:
    """`seconds`: of each. `out`: where the chart goes, if anywhere. Raises ValueError for an unknown name in `only`."""
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
    return _table(results, seconds)


async def _play(rule: Rule, seconds: float, seed: int) -> Sequence[Served]:
    profile = profiles.load(PROFILE)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coatcheck-bench-")))
        fleet = Fleet(
            workers=WORKERS,
            replicas=2 if rule.policy else 0,
            policy=rule.policy,
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
            entrance = InTurn(_replicas(rule, rule.command, children, fleet, folder))
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
        return load.served


def _replicas(
    rule: Rule, command: Callable[[Place], list[str]], children: Children, fleet: Fleet, folder: Path
) -> list[Address]:
    addresses = []
    for port in free_ports(2):
        place = Place(rule.executable, port, [port for _, port in fleet.workers.values()], folder)
        child = children.start(f"{rule.name}-{port}".replace(" ", "-"), command(place), rule.environment)
        addresses.append((child, ("127.0.0.1", port)))
    for child, (_, port) in addresses:
        wait_listening(child, port)
    return [address for _, address in addresses]


def _table(results: Sequence[Result], seconds: float) -> Table:
    rows = []
    for each in results:
        now = figures(each.served, [])
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


def _chart(results: Sequence[Result]) -> str:
    told = [(each.name, figures(each.served, [])) for each in results]
    panels = (
        Panel(
            "Prompt tokens cached, %", sorted(((name, 100 * now.cached_share) for name, now in told), key=_value)[::-1]
        ),
        Panel("TTFT p95, ms", sorted(((name, 1000 * now.p95) for name, now in told), key=_value)),
    )
    return svg(panels, "coatcheck")


def _value(bar: tuple[str, float]) -> float:
    return bar[1]
