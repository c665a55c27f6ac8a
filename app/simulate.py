"""`coatcheck simulate`: what the router's policies make of a fleet, without one.

Engines are the mock workers' (`mocker/engine/`), policies the router's own (`app/fleet/policies.py`), over a fleet for
each replica that knows what a replica knows: its own turns at once, the others' as often as they tell. Claims are as in
one store that always answers. For comparison there is also what other ways would do that share nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from app import Trouble
from app.fleet.candidates import Candidates
from app.fleet.loads import Lately
from app.fleet.placement.blocks import ENDS, Chained, full_blocks
from app.fleet.placement.prefix import Prefixes, Prompt
from app.fleet.policies import POLICIES, Policy, by_cache, rendezvous
from app.fleet.workers import Fleet, Target, make_worker
from app.metrics import Metrics
from app.replicas import BEAT
from mocker import traces
from mocker.engine import profile as profiles
from mocker.engine.profile import Profile
from mocker.engine.scheduler import Scheduler
from mocker.settings import KvTransfer
from mocker.simulation import Outcome, Simulation, Split
from mocker.traces import Agents, Session, Turn

GENERATOR = "agents"
_WIDTH = 100
_AGENTS = Agents(sessions=1000, rate=10.0)

_TOKEN_BYTES = 4
"""About what a token of English text has."""
_PREFIX_MEMORY = 64 << 20
_NAMED = 4
"""Blocks by which what follows in a prompt is named."""

Choice = Callable[[Session, Turn, Sequence[int]], int]
"""Picks one of some targets, for a turn that is free to go anywhere."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    parser.set_defaults(run=run)
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help=f"a file in Mooncake's (.jsonl) or Azure's (.csv) format, or {GENERATOR}: made-up ones",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=[*_ROUTED, *_UNROUTED],
        help="repeatable (default: least-loaded). hash: by the session, as balancers do. turns: one worker after the "
        "other, whatever the session. oracle: knows all caches",
    )
    parser.add_argument(
        "--prefill-workers",
        action="append",
        type=partial(_whole, least=0),
        metavar="N",
        help="so many of the workers only compute prompts, for the others; repeatable (default: 0: whole turns)",
    )
    for flag, kind, default, metavar, meaning in (
        ("--workers", _whole, 8, "N", "simulated workers"),
        ("--ranks", _whole, 1, "N", "data-parallel ranks of each"),
        ("--replicas", _whole, 2, "N", "replicas of the router"),
        ("--profile", str, "llama-8b-h100", "NAME", "what a worker simulates, as in coatcheck mock"),
        ("--prefill-from", partial(_whole, least=0), 8192, "N", "bytes that are new of a prompt that is computed so"),
        ("--kv-gb-s", float, KvTransfer().gb_s, "X", "10^9 bytes a second from worker to worker"),
        ("--kv-blocks", _whole, None, "N", "blocks of each rank (default: the profile's)"),
        ("--limit", _whole, None, "N", "only the first N turns or sessions of the trace"),
        ("--seed", int, _AGENTS.seed, "N", "of what is made up"),
        ("--sessions", _whole, _AGENTS.sessions, "N", "of agents, beside their sub-agents"),
        ("--rate", float, _AGENTS.rate, "X", "sessions that begin in a second"),
        ("--models", _whole, _AGENTS.models, "N", "models, each served by its share of the workers"),
        ("--prompts", _whole, _AGENTS.prompts, "N", "system prompts of each model"),
        ("--prompt-tokens", _whole, _AGENTS.prompt_tokens, "N", "of a system prompt, in the mean"),
        ("--turns", float, _AGENTS.turns, "X", "of a session, in the mean"),
        ("--turn-tokens", _whole, _AGENTS.turn_tokens, "N", "that a turn adds, in the mean"),
        ("--answer-tokens", _whole, _AGENTS.answer_tokens, "N", "of an answer, in the mean"),
        ("--gap", float, _AGENTS.gap, "S", "seconds from an answer to the next turn, in the mean"),
        ("--children", float, _AGENTS.children, "X", "the share of turns after which a sub-agent works"),
    ):
        shown = "" if default is None else " (%(default)s)"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=meaning + shown)
    parser.add_argument("--json", action="store_true", help="say it in JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate the trace with each policy, and say what came of it."""
    try:
        profile = profiles.resized(profiles.load(args.profile), blocks=args.kv_blocks, block_size=None)
        fleets = list(dict.fromkeys(args.prefill_workers or [0]))
        for prefill in fleets:
            least = min(args.workers - prefill, prefill or args.workers)
            if args.models > least:
                raise ValueError("there must be a worker for each model, and for each phase")
        if args.kv_gb_s <= 0:
            raise ValueError("--kv-gb-s must be more than 0")
        policies = dict.fromkeys(args.policy or ["least-loaded"])
        rows = [_simulate(args, profile, name, prefill) for name in policies for prefill in fleets]
    except ValueError as error:
        raise Trouble(str(error), code=2) from None
    except OSError as error:
        raise Trouble(f"{args.trace}: {error.strerror}", code=1) from None
    if args.json:
        print(json.dumps({"trace": args.trace, "profile": profile.name, "runs": rows}, indent=2))
    else:
        _show(rows)
    return 0


def _simulate(args: argparse.Namespace, profile: Profile, name: str, prefill: int = 0) -> dict[str, Any]:
    """`prefill`: so many of the workers compute prompts for the others."""
    began = time.process_time()
    decode = args.workers - prefill
    split = None
    if prefill:
        split = Split(
            engines=prefill * args.ranks,
            place=partial(_placer, args, name, prefill),
            seconds_per_token=profile.token_bytes / (args.kv_gb_s * 1e9),
            least_new=args.prefill_from // _TOKEN_BYTES,
        )
    simulation = Simulation(profile, decode * args.ranks, partial(_placer, args, name, decode), split)
    with _uncollected():
        outcome = simulation.run(_sessions(args, profile.block_size))
    said: dict[str, Any] = {"policy": name}
    if prefill:
        said["prefill_workers"] = prefill
    return {**said, **_said(outcome), "cpu_seconds": round(time.process_time() - began, 2)}


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What is made lives long, and there is much of it: looking for circles in it finds few, and takes its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _sessions(args: argparse.Namespace, block_size: int) -> Iterator[Session]:
    """Raises ValueError, OSError."""
    sessions = _read(args, block_size)
    return sessions if args.limit is None else itertools.islice(sessions, args.limit)


def _read(args: argparse.Namespace, block_size: int) -> Iterator[Session]:
    if args.trace == GENERATOR:
        wanted = Agents(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Agents)})
        return traces.agents(wanted, block_size)
    path = Path(args.trace)
    if path.suffix == ".jsonl":
        return traces.mooncake(path, block_size)
    if path.suffix == ".csv":
        return traces.azure(path, block_size)
    raise ValueError(f"{args.trace} is neither a .jsonl nor a .csv file, nor {GENERATOR}")


# --- what came of it -------------------------------------------------------------------------------------------------


def _said(outcome: Outcome) -> dict[str, Any]:
    first, between = sorted(outcome.first_token), sorted(outcome.between)
    return {
        "sessions": outcome.sessions,
        "turns": outcome.turns,
        "refused": outcome.refused,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_share": round(outcome.cached_share, 4),
        "ttft_seconds": {f"p{part}": _quantile(first, part / 100) for part in (50, 95, 99)},
        "itl_seconds": {f"p{part}": _quantile(between, part / 100) for part in (50, 95)},
        "max_over_mean_work": round(outcome.imbalance, 3),
        "split_sessions": outcome.split,
        "preemptions": outcome.preemptions,
        "simulated_seconds": round(outcome.seconds, 3),
    }


def _quantile(values: Sequence[float], part: float) -> float:
    """The least of values in order that this part of them does not exceed; 0 where there are none."""
    return round(values[max(0, math.ceil(part * len(values)) - 1)], 6) if values else 0.0


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for title in ("turns", "cached", "TTFT ms p50", "p95", "p99", "ITL ms", "max/mean", "split", "refused"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        ttft = row["ttft_seconds"]
        table.add_row(
            row["policy"] + (f", {row['prefill_workers']} prefill" if "prefill_workers" in row else ""),
            f"{row['turns']:,}",
            f"{row['cached_share']:.1%}",
            *(f"{1000 * ttft[part]:,.0f}" for part in ("p50", "p95", "p99")),
            f"{1000 * row['itl_seconds']['p50']:.1f}",
            f"{row['max_over_mean_work']:.2f}",
            f"{row['split_sessions']:,}",
            f"{row['refused']:,}",
        )
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)  # what is cut off says nothing
    console.print(table)


# --- who places ------------------------------------------------------------------------------------------------------


class Routed:
    """Replicas of the router that share claims. Turns reach them by chance."""

    def __init__(
        self, policy: Policy, *, workers: int, ranks: int, replicas: int, models: int, seed: int, block_size: int = 16
    ) -> None:
        """`block_size`: tokens of a block of the sessions' chains."""
        self._policy = policy
        self._block_bytes = block_size * _TOKEN_BYTES
        self._rng = random.Random(seed)
        self._now = 0.0
        self._among = [
            None if models == 1 else frozenset(f"w{worker}" for worker in range(model, workers, models))
            for model in range(models)
        ]
        self._replicas = [_Replica(workers, ranks, lambda: self._now) for _ in range(replicas)]
        self._claims: dict[str, tuple[int, _Replica]] = {}
        """By session: its target, and the replica that has made it."""
        self._turns: dict[Session, _Replica] = {}
        """The replica at which each session's turn runs. A session has one at a time."""
        self._told_at = 0.0
        self.engines: Sequence[Scheduler] | None = None
        """Those whose caches are known, as `kv` knows them."""

    def place(self, session: Session, turn: Turn, now: float) -> int:
        self._now = now
        if now - self._told_at >= BEAT:
            self._tell(now)
        replica = self._rng.choice(self._replicas)
        claimed = self._claims.get(session.name) if session.name else None
        if claimed is not None:
            number = claimed[0]
        else:
            text = _Text(session, turn, self._block_bytes)
            held = None if self.engines is None else partial(_held, self.engines, session, turn)
            number = replica.choose(self._policy, session.name, self._among[session.model], text, held)
            if session.name:
                self._claims[session.name] = number, replica
                replica.targets[number].sessions += 1
        replica.targets[number].in_flight += 1
        replica.targets[number].spent -= now
        self._turns[session] = replica
        return number

    def ended(self, session: Session, target: int, now: float, *, final: bool) -> None:
        there = self._turns.pop(session).targets[target]
        there.in_flight -= 1
        there.spent += now
        there.worker.health.good += 1  # else it would owe its answers for ever
        there.worker.cells.turns["completed", 200] += 1
        if final and session.name:
            self.forget(session)

    def forget(self, session: Session) -> None:
        claimed = self._claims.pop(session.name, None)
        if claimed is not None:
            number, replica = claimed
            replica.targets[number].sessions -= 1

    @property
    def at_rest(self) -> bool:
        """Nothing is claimed, and nothing runs."""
        targets = [target for replica in self._replicas for target in replica.targets]
        return not self._claims and not self._turns and not any(each.in_flight or each.sessions for each in targets)

    def _tell(self, now: float) -> None:
        self._told_at = now
        for number, replica in enumerate(self._replicas):
            lately = itertools.chain.from_iterable(each.tell(now) for each in replica.lately)
            loads = [(turns, each.sessions) for turns, each in zip(lately, replica.targets, strict=True)]
            for other in self._replicas:
                if other is not replica:
                    other.fleet.heard(f"r{number}", dict(zip(other.targets, loads, strict=True)))


class _Replica:
    """What one replica knows of the fleet."""

    def __init__(self, workers: int, ranks: int, clock: Callable[[], float]) -> None:
        self.fleet = Fleet(
            (
                make_worker(
                    f"http://127.0.0.1:{1 + worker}",
                    name=f"w{worker}",
                    ranks=ranks if ranks > 1 else 0,
                    connect_limit=1.0,
                    idle_limit=1.0,
                    clock=clock,
                )
                for worker in range(workers)
            ),
            clock=clock,
        )
        self.targets = [target for worker in self.fleet for target in worker.targets]
        self.lately = [Lately[Target](worker, clock()) for worker in self.fleet]
        self._prefixes = Prefixes(Metrics(), memory=_PREFIX_MEMORY)
        self._numbers = {target: number for number, target in enumerate(self.targets)}

    def choose(
        self,
        policy: Policy,
        key: str,
        among: frozenset[str] | None,
        text: Chained,
        held: Callable[[], list[float]] | None,
    ) -> int:
        prompt: Prompt | _Known | None = self._prefixes.prompt_of(text) if policy is by_cache else None
        if prompt is not None and held is not None:
            prompt = _Known(self._prefixes.prompt_of(text), self.targets, held)
        target = policy(self.fleet.candidates(among=among, key=key, prompt=prompt))
        self.fleet.note_placed(target)
        if prompt is not None:
            prompt.placed(target)
        return self._numbers[target]


def _held(engines: Sequence[Scheduler], session: Session, turn: Turn) -> list[float]:
    """What part of a turn's prompt each engine has in its cache."""
    size = engines[0].profile.block_size
    blocks = min((turn.prompt - 1) // size, len(session.chain))
    return [engine.cache.find(session.chain, blocks)[0] * size / turn.prompt for engine in engines]


class _Known:
    """A prompt of which it is known who has it."""

    def __init__(self, prompt: Prompt, targets: Sequence[Target], held: Callable[[], list[float]]) -> None:
        self.name, self.placed = prompt.name, prompt.placed
        self._targets, self._held = targets, held

    def shares(self) -> dict[Target, float]:
        return {target: share for target, share in zip(self._targets, self._held(), strict=True) if share}


class _Text:
    """A turn's prompt, as `prefix` sees it."""

    def __init__(self, session: Session, turn: Turn, block_bytes: int) -> None:
        self._chain, self._block_bytes = session.chain, block_bytes
        self.size = turn.prompt * _TOKEN_BYTES

    @property
    def hashes(self) -> list[int]:
        ends = (end // self._block_bytes for end in ENDS[: full_blocks(self.size)])
        return [self._chain[max(end, 1) - 1] for end in ends if end <= len(self._chain)]

    def name(self, blocks: int) -> str:
        hashes = self.hashes
        return str(hashes[min(blocks + _NAMED, len(hashes)) - 1])


class Unrouted:
    """One who knows nothing of sessions but what `choose` makes of them; each turn is placed anew."""

    def __init__(self, choose: Choice, *, targets: int, ranks: int, models: int) -> None:
        self._choose = choose
        self._targets = [
            [number for number in range(targets) if number // ranks % models == model] for model in range(models)
        ]

    def place(self, session: Session, turn: Turn, now: float) -> int:
        return self._choose(session, turn, self._targets[session.model])

    def ended(self, session: Session, target: int, now: float, *, final: bool) -> None:
        pass

    def forget(self, session: Session) -> None:
        pass


def _hashed(candidates: Candidates[Target]) -> Target:
    return rendezvous(candidates.key, candidates) if candidates.key else POLICIES["round-robin"](candidates)


_ROUTED: dict[str, Policy] = {name: policy for name, policy in POLICIES.items() if name != "direct"} | {"hash": _hashed}
"""What a router can do. By hash is what it does while its store is away, and what a balancer does."""
_UNROUTED = ("turns", "oracle")
_LOAD_WEIGHS = 0.02
"""What the oracle gives up of a prompt's cached share for a turn less at a target, above the least loaded."""


def _placer(args: argparse.Namespace, name: str, workers: int, engines: Sequence[Scheduler]) -> Routed | Unrouted:
    if name in _ROUTED:
        routed = Routed(
            _ROUTED[name],
            workers=workers,
            ranks=args.ranks,
            replicas=args.replicas,
            models=args.models,
            seed=args.seed,
            block_size=engines[0].profile.block_size,
        )
        routed.engines = engines if name == "kv" else None
        return routed
    choose = _in_turn() if name == "turns" else partial(_best, engines)
    return Unrouted(choose, targets=len(engines), ranks=args.ranks, models=args.models)


def _in_turn() -> Choice:
    """One target after the other, whatever the turn is."""
    places: dict[int, Iterator[int]] = {}

    def choose(session: Session, turn: Turn, targets: Sequence[int]) -> int:
        if session.model not in places:
            places[session.model] = itertools.cycle(targets)
        return next(places[session.model])

    return choose


def _best(engines: Sequence[Scheduler], session: Session, turn: Turn, targets: Sequence[int]) -> int:
    """Where most of the prompt is cached, by the caches themselves, with an eye on the load."""
    blocks = min(turn.prompt // engines[0].profile.block_size, len(session.chain))
    least = min(engines[target].load for target in targets)

    def score(target: int) -> float:
        engine = engines[target]
        found, _ = engine.cache.find(session.chain, blocks)
        return found / max(1, blocks) - _LOAD_WEIGHS * (engine.load - least)

    return max(targets, key=score)


def _whole(text: str, least: int = 1) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, not {text!r}")
    return number
