"""Turns in two phases by each router, before the same workers, one after the other: `make bench-phases`.

Workers are mock workers, new and empty for each router: two that prefill and two that decode, and hand over as vLLM's
do or as SGLang's; and for what a turn costs that is not split (`whole`), two that do both. Each router has two
replicas, which turns reach alternately. Clients are agents that each have a few turns. Who served which turn, and what
of its prompt was cached there, is read from the workers' own records. What a turn costs is measured behind that, with a
few clients that each have a session and one turn after the other. Then the agents once more, and amid them a worker of
each phase is killed. What a turn of ours costs is measured last, with all its kinds standing at once and in turns of
many short rounds, for a machine is not as fast in one minute as in the next: the figures are medians. Peers are taken
from where `make bench-peers` puts them; those that are not there are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.request import ProxyHandler, build_opener

from app.demo.fleet import free_ports
from app.demo.load import MODEL, Address, InTurn, Load, Served, figures, session_headers
from benchmarks.children import Child, Children, end_on_sigterm, wait_listening
from benchmarks.procfs import Cpu, cpu, tree
from benchmarks.proxy_peers import PEERS, find
from benchmarks.tables import Table, machine
from mocker import traces

Kind = Literal["vllm", "sglang", "whole"]

_EACH = 2
"""Workers of each phase."""
_AGENTS = traces.Agents(
    sessions=1_000_000,
    rate=4.0,
    prompts=8,
    prompt_tokens=500,
    turns=6.0,
    turn_tokens=200,
    answer_tokens=6,
    gap=0.3,
    children=0.0,
)
_BLOCK = 16
_WORKER = ("--ttft-ms", "25", "--itl-ms", "4", "--history", "100000", "--kv-lease-s", "600")
_COST_CLIENTS, _COST_TURNS = 8, 60
_ROUNDS, _ROUND_TURNS = 24, 10
"""Of each kind of ours, and in each of them the turns of a client."""
_COST_LIMIT_S = 120.0
_IDLE_S = 3.0
_SETTLE_S = 8.0
"""Until every router has probed its workers."""


@dataclass(frozen=True)
class Worker:
    port: int
    phase: str
    bootstrap: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Rule:
    """A router, and the kind of its workers; `command` starts a replica."""

    name: str
    kind: Kind
    command: Callable[[int, Sequence[Worker], str], list[str]]
    session_header: str = "x-dynamo-session-id"
    environment: Mapping[str, str] = field(default_factory=dict)

    def headers(self, session: str, last: bool) -> dict[str, str]:
        return {self.session_header: session, **session_headers(session, last)}


def rules() -> Iterator[Rule]:
    """All that can be tried here."""
    ours: tuple[Kind, ...] = ("whole", "vllm", "sglang")
    for kind in ours:
        yield Rule(f"coatcheck, {_NAMED[kind]}", kind, _coatcheck)
    theirs: tuple[tuple[str, tuple[Kind, Kind], tuple[str, str]], ...] = (
        ("vllm-router", ("whole", "vllm"), ("consistent_hash", "cache_aware")),
        ("sglang-router", ("whole", "sglang"), ("manual", "cache_aware")),
    )
    for name, kinds, policies in theirs:
        peer = PEERS[name]
        executable = find(peer, [])
        if executable is None:
            continue
        for policy in policies:
            for kind in kinds:
                command = _peer(executable, name, policy)
                title = f"{name} {policy}, {_NAMED[kind]}"
                yield Rule(title, kind, command, peer.session_header, peer.environment)


_NAMED = {"whole": "whole turns", "vllm": "vLLM's hand-over", "sglang": "SGLang's hand-over"}


def _coatcheck(port: int, workers: Sequence[Worker], claims: str) -> list[str]:
    command = [sys.executable, "-m", "app", "serve", f"--port={port}", f"--claims={claims}", "--log-level=error"]
    command += ["--prefill-from=0", "--drain-timeout=1", "--store-deadline=20"]  # no outage is looked for
    for number, each in enumerate(workers):
        option = f"--worker={each.url},name=w{number}"
        if each.phase != "both":
            option += f",phase={each.phase}"
        if each.bootstrap:
            option += ",handover=sglang" + (f",bootstrap-port={each.bootstrap}" if each.phase == "prefill" else "")
        command.append(option)
    return command


def _peer(executable: str, name: str, policy: str) -> Callable[[int, Sequence[Worker], str], list[str]]:
    def command(port: int, workers: Sequence[Worker], claims: str) -> list[str]:
        [prometheus] = free_ports(1)
        quiet = ["--log-level=warn", "--disable-health-check"] if name == "sglang-router" else ["--log-level=warning"]
        started = [executable, *(["launch"] if name == "sglang-router" else [])]
        started += ["--host=127.0.0.1", f"--port={port}", f"--policy={policy}", f"--prometheus-port={prometheus}"]
        if workers[0].phase == "both":
            return [*started, *quiet, "--worker-urls", *(each.url for each in workers)]
        started.append("--pd-disaggregation" if name == "sglang-router" else "--vllm-pd-disaggregation")
        for each in workers:
            if each.phase == "decode":
                started += ["--decode", each.url]
            else:
                started += ["--prefill", each.url, *([str(each.bootstrap)] if each.bootstrap else [])]
        return [*started, *quiet]

    return command


@dataclass(frozen=True)
class Result:
    rule: Rule
    served: Sequence[Served]
    cost_s: float
    """CPU time of all replicas for a turn of a known session."""
    cached: float
    """Share of all prompts' tokens that were cached where they were computed."""
    split: int
    """Sessions that two workers of one phase have served."""
    stranded: int
    """Hand-overs that nobody has fetched in the end."""
    broken: int
    """Failed turns of the same, while workers were killed."""
    after: int
    """Turns that were served in that time."""
    times: float = 0.0
    """The cost as a multiple of that of a whole turn of the same router, where the two were measured in turns."""


def compare(seconds: float, seed: int, only: Sequence[str]) -> Table:
    """`seconds`: of each router, twice. Raises ValueError for an unknown name in `only`."""
    chosen = {rule.name: rule for rule in rules()}
    if unknown := [name for name in only if name not in chosen]:
        raise ValueError(f"there is no {unknown[0]!r} here; there are: {'; '.join(chosen)}")
    results = []
    for rule in chosen.values():
        if not only or rule.name in only:
            print(f"{rule.name} …", file=sys.stderr, flush=True)
            results.append(asyncio.run(_measure(rule, seconds, seed)))
            _tell(results[-1])
    ours = [each.rule for each in results if each.rule.command is _coatcheck]
    if ours and ours[0].kind == "whole":
        print("coatcheck, in turns …", file=sys.stderr, flush=True)
        cost = asyncio.run(_interleaved(ours))
        results = [
            replace(each, cost_s=cost[each.rule.name][0], times=cost[each.rule.name][1])
            if each.rule.name in cost
            else each
            for each in results
        ]
    return _table(results, seconds)


async def _measure(rule: Rule, seconds: float, seed: int) -> Result:
    with contextlib.ExitStack() as stack:
        started, workers, replicas = _stand(rule, stack)
        await asyncio.sleep(_SETTLE_S)
        calm = _load(rule, replicas, seconds, seed)
        await calm.run()
        found = _found(workers)
        cost_s = await _cost(rule, replicas)
        rough = _load(rule, replicas, seconds, seed + 1)
        killing = asyncio.create_task(_kill(started, workers, seconds / 3))
        await rough.run()
        await killing
        troubles = figures(rough.served, [])
        return Result(rule, calm.served, cost_s, *found, broken=troubles.failed, after=troubles.turns)


def _stand(rule: Rule, stack: contextlib.ExitStack) -> tuple[list[Child], list[Worker], list[tuple[Child, Address]]]:
    """Workers and replicas, as long as the stack stands: the workers' processes, where they are, and the replicas."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coatcheck-bench-")))
    children = stack.enter_context(Children(folder))
    workers = _workers(rule.kind)
    started = [children.start_module("mocker", *_mock(each, rule.kind)) for each in workers]
    for child, each in zip(started, workers, strict=True):
        wait_listening(child, each.port)
    return started, workers, _replicas(rule, workers, children, (folder / "claims").as_uri())


def _load(rule: Rule, replicas: Sequence[tuple[Child, Address]], seconds: float, seed: int) -> Load:
    return Load(
        traces.agents(_agents(seed), _BLOCK),
        InTurn([address for _, address in replicas]),
        seconds=seconds,
        seed=seed,
        block_size=_BLOCK,
        headers=rule.headers,
        members=_members,
    )


async def _interleaved(chosen: Sequence[Rule]) -> dict[str, tuple[float, float]]:
    """By name, the seconds of CPU for a turn of a known session, and that as a multiple of the first one's: medians
    over rounds, in each of which all have their turns, one after the other."""
    with contextlib.ExitStack() as stack:
        standing = [(rule, _stand(rule, stack)[2]) for rule in chosen]
        await asyncio.sleep(_SETTLE_S)
        spent: dict[str, list[float]] = {rule.name: [] for rule in chosen}
        for rule, replicas in standing:
            await _converse(rule, replicas, 3 * _ROUND_TURNS)
        for number in range(_ROUNDS):
            for rule, replicas in standing if number % 2 else reversed(standing):
                before = _cpu(replicas)
                await _converse(rule, replicas, _ROUND_TURNS)
                spent[rule.name].append(_cpu(replicas).since(before) / (_COST_CLIENTS * _ROUND_TURNS))
    first = spent[chosen[0].name]
    return {
        name: (median(each), median(own / whole for own, whole in zip(each, first, strict=True)))
        for name, each in spent.items()
    }


async def _cost(rule: Rule, replicas: Sequence[tuple[Child, Address]]) -> float:
    """Seconds of the replicas' CPU for a turn, without what they spend with no turns at all."""
    before, begun = _cpu(replicas), time.monotonic()
    await asyncio.sleep(_IDLE_S)
    idle = _cpu(replicas).since(before) / (time.monotonic() - begun)
    await _converse(rule, replicas, 3)
    before, begun = _cpu(replicas), time.monotonic()
    await _converse(rule, replicas, _COST_TURNS)
    spent = _cpu(replicas).since(before) - idle * (time.monotonic() - begun)
    return spent / (_COST_CLIENTS * _COST_TURNS)


async def _converse(rule: Rule, replicas: Sequence[tuple[Child, Address]], turns: int) -> None:
    """Raises RuntimeError for any answer but 200."""

    async def client(number: int) -> None:
        host, port = replicas[number % len(replicas)][1]
        headers = "".join(f"{name}: {value}\r\n" for name, value in rule.headers(f"cost-{number}", False).items())
        text = f"{number} " + "word " * 400
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        asked = f"{head}{headers}content-length: {len(body)}\r\n\r\n".encode() + body
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for _ in range(turns):
                writer.write(asked)
                answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                if not answer.startswith(b"http/1.1 200 "):
                    raise RuntimeError(f"{rule.name}: {answer!r}")
                if b"transfer-encoding: chunked" in answer:
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r")[0]))
        finally:
            writer.close()

    async with asyncio.timeout(_COST_LIMIT_S), asyncio.TaskGroup() as group:
        for number in range(_COST_CLIENTS):
            group.create_task(client(number))


def _workers(kind: Kind) -> list[Worker]:
    ports = iter(free_ports(3 * _EACH))
    if kind == "whole":
        return [Worker(next(ports), "both") for _ in range(_EACH)]
    # 0 where nobody is met there: those that decode.
    prefill = [Worker(next(ports), "prefill", next(ports) if kind == "sglang" else 0) for _ in range(_EACH)]
    return prefill + [Worker(next(ports), "decode", 1 if kind == "sglang" else 0) for _ in range(_EACH)]


def _mock(worker: Worker, kind: Kind) -> list[str]:
    options = ["--port", str(worker.port), "--phase", worker.phase, *_WORKER]
    if kind == "sglang":
        options += ["--handover", "sglang"]
        if worker.phase == "prefill":
            options += ["--bootstrap-port", str(worker.bootstrap)]
    return options


def _replicas(rule: Rule, workers: Sequence[Worker], children: Children, claims: str) -> list[tuple[Child, Address]]:
    replicas = []
    for port in free_ports(2):
        child = children.start(f"router-{port}", rule.command(port, workers, claims), rule.environment)
        replicas.append((child, ("127.0.0.1", port)))
    for child, (_, port) in replicas:
        wait_listening(child, port, 60)
    return replicas


def _members(session: str) -> dict[str, Any]:
    """By which workers know a session where a router does not pass its header on: it is theirs to know, for their
    caches."""
    return {"prompt_cache_key": session, "metadata": {"session_id": session}}


def _agents(seed: int) -> traces.Agents:
    return replace(_AGENTS, seed=seed)


def _cpu(replicas: Sequence[tuple[Child, Address]]) -> Cpu:
    return cpu(pid for child, _ in replicas for pid in tree(child.pid))


async def _kill(started: Sequence[Child], workers: Sequence[Worker], after: float) -> None:
    """One of each phase, one after the other."""
    phases = {each.phase: child for child, each in reversed(list(zip(started, workers, strict=True)))}
    for child in phases.values():
        await asyncio.sleep(after)
        await asyncio.to_thread(child.kill)


def _found(workers: Sequence[Worker]) -> tuple[float, int, int]:
    """What of the prompts was cached where they were computed, how many sessions were split, and what is staged
    still."""
    opener = build_opener(ProxyHandler({}))

    def ask(worker: Worker, path: str) -> Any:
        return json.load(opener.open(worker.url + path, timeout=30))

    prompt = cached = stranded = 0
    places: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for worker in workers:
        for turn in ask(worker, "/mock/turns")["turns"]:
            places[worker.phase, turn["session"]].add(worker.url)
            if worker.phase != "decode":
                prompt += turn["prompt_tokens"]
                cached += turn["cached_tokens"]
        stranded += ask(worker, "/mock/state").get("staged", 0)
    split = {session for (_, session), where in places.items() if len(where) > 1}
    return cached / prompt if prompt else 0.0, len(split), stranded


def _tell(result: Result) -> None:
    print(f"  {' | '.join(_row(result, None))}", file=sys.stderr, flush=True)


def _row(each: Result, whole_s: float | None) -> list[str]:
    now = figures(each.served, [])
    troubles = sorted({served.trouble for served in each.served if served.trouble})
    if troubles:
        print(f"  {each.rule.name}: {'; '.join(troubles[:5])}", file=sys.stderr)
    turn_s = each.cost_s
    return [
        each.rule.name,
        f"{each.cached:.1%}",
        *(f"{1000 * value:,.0f} ms" for value in (now.p50, now.p95)),
        f"{each.split} of {now.sessions}",
        f"{now.failed} of {now.turns + now.failed:,}",
        f"{each.broken} of {each.after + each.broken:,}",
        f"{each.stranded}",
        f"{1e6 * turn_s:,.0f}",
        "–" if whole_s is None or each.rule.kind == "whole" else f"{each.times or turn_s / whole_s:.2f}",
    ]


def _table(results: Sequence[Result], seconds: float) -> Table:
    whole = {each.rule.name.partition(",")[0]: each.cost_s for each in results if each.rule.kind == "whole"}
    return Table(
        "Turns in two phases",
        (
            "router",
            "prompt tokens cached",
            "TTFT p50",
            "p95",
            "sessions split",
            "failed",
            "failed while two workers were killed",
            "stranded",
            "CPU µs per turn of a known session",
            "× its own whole turn",
        ),
        [_row(each, whole.get(each.rule.name.partition(",")[0])) for each in results],
        f"{seconds:g} s of agents each, and again with kills; {_EACH} workers of each phase, two replicas. The cost of"
        f" ours: medians of {_ROUNDS} rounds in turns.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a look")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="as the table names it; repeatable")
    args = parser.parse_args()
    end_on_sigterm()
    print(machine(), end="\n\n")
    print(compare(5.0 if args.quick else 10.0, args.seed, args.only).markdown())


if __name__ == "__main__":
    main()
