"""A fleet by events: what it is compared with live workers, traces, and the command."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app import cli, simulate
from app.fleet.policies import POLICIES, by_cache
from mocker import traces
from mocker.engine import profile as profiles
from mocker.engine.profile import Times
from mocker.engine.scheduler import Scheduler
from mocker.running import serve
from mocker.settings import MockSettings
from mocker.simulation import Outcome, Simulation, Split
from mocker.traces import Agents, Chain, Session, Turn
from mocker.turns import TurnService
from tests.support.fakes import in_virtual_time

QUICK = profiles.load("quick")
SMALL = Agents(
    sessions=40, rate=6.0, prompts=3, prompt_tokens=900, turns=3.0, turn_tokens=80, answer_tokens=60, gap=1.0, seed=3
)


class Everything:
    """Sends each session to the target of its name's number, and counts."""

    def __init__(self, engines: Sequence[Scheduler]) -> None:
        self.engines = engines
        self.placed: list[tuple[str, float, int]] = []
        self.finals: list[str] = []

    def place(self, session: Session, turn: Turn, now: float) -> int:
        target = int(session.name[1:] or 0) % len(self.engines)
        self.placed.append((session.name, now, turn.prompt))
        return target

    def ended(self, session: Session, target: int, now: float, *, final: bool) -> None:
        if final:
            self.finals.append(session.name)


# --- against live workers --------------------------------------------------------------------------------------------


def text_of(session: Session, size: int, tokens: int, at: int) -> bytes:
    """Text of so many tokens from token `at` of a session on: the same where chains are."""
    blocks = range(at // size, (at + tokens) // size + 1)
    text = b"".join(
        b"%0*x" % (size * 4, session.chain[block] if block < len(session.chain) else -1 - block) for block in blocks
    )
    return text[at % size * 4 :][: tokens * 4]


@in_virtual_time
async def test_a_simulated_fleet_is_like_live_workers() -> None:
    """The same sessions, each at the same of two workers: by events, and by requests to mock workers that stream their
    answers token by token. Time is virtual, so that a busy machine changes nothing."""
    loop = asyncio.get_running_loop()
    profile = replace(QUICK, blocks=400, max_tokens=256)
    simulated = Simulation(profile, 2, Everything).run(traces.agents(SMALL, profile.block_size))

    workers = [TurnService(MockSettings(profile=profile), loop.time) for _ in range(2)]
    began = loop.time()
    first_token: list[float] = []
    usages: list[dict[str, Any]] = []

    async def live(session: Session) -> None:
        worker = workers[int(session.name[1:]) % 2]
        prompt = b""
        for turn in session.turns:
            await asyncio.sleep(turn.after)
            # The first token is the one that begins all prompts.
            prompt += text_of(session, profile.block_size, turn.prompt - len(prompt) // 4 - 1, len(prompt) // 4)
            asked = loop.time()
            body = {"model": "mock-model", "prompt": prompt.decode(), "max_tokens": turn.answer, "stream": True}
            answer = b""
            async for at, event in streamed(worker, body | {"stream_options": {"include_usage": True}}):
                if not answer:
                    first_token.append(at - asked)
                if event["choices"]:
                    answer += event["choices"][0]["text"].encode()
                else:
                    usages.append(event["usage"])
            prompt += answer + b" "  # the first word has no blank
            async with asyncio.TaskGroup() as children:
                for child in turn.children:
                    children.create_task(live(child))

    async def later(session: Session) -> None:
        await asyncio.sleep(session.start)
        await live(session)

    async with asyncio.TaskGroup() as group:
        for session in traces.agents(SMALL, profile.block_size):
            group.create_task(later(session))

    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert len(usages) == simulated.turns > 100
    assert sum(usage["prompt_tokens"] for usage in usages) == pytest.approx(simulated.prompt_tokens, rel=0.01)
    assert cached == pytest.approx(simulated.cached_tokens, rel=0.1)
    assert statistics.fmean(first_token) == pytest.approx(statistics.fmean(simulated.first_token), rel=0.1)
    assert sorted(first_token)[-10] == pytest.approx(sorted(simulated.first_token)[-10], rel=0.1)
    assert loop.time() - began == pytest.approx(simulated.seconds, rel=0.1)
    # It was not an easy one.
    assert 0.2 < simulated.cached_share < 0.9
    assert sum(rank.scheduler.cache.free for worker in workers for rank in worker.ranks) < 20


async def streamed(worker: TurnService, body: dict[str, Any]) -> Any:
    """The events of a completion, each with when it came; without a socket."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
    asked = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if asked:
            return asked.pop()
        return await loop.create_future()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            events.put_nowait((loop.time(), message.get("body", b"")))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "http_version": "1.1"}
    serving = asyncio.create_task(serve(worker, scope, receive, send))
    serving.add_done_callback(lambda _: events.put_nowait(None))
    while (came := await events.get()) is not None:
        at, text = came
        for line in text.splitlines():
            if line.startswith(b"data: {"):
                yield at, json.loads(line[6:])
    await serving


# --- events ----------------------------------------------------------------------------------------------------------


def test_turns_follow_each_other_and_wait_for_sub_agents() -> None:
    def session(name: str, *turns: Turn) -> Session:
        return Session(name, 0, 1.0, Chain((), 1000 * int(name[1:]), 100), list(turns))

    child = session("s2", Turn(10, 5, 0.0))
    parent = session("s1", Turn(10, 3, 0.0, [child]), Turn(40, 2, 2.0))
    made: list[Everything] = []

    def placer(engines: Sequence[Scheduler]) -> Everything:
        made.append(Everything(engines))
        return made[0]

    outcome = Simulation(replace(QUICK, times=Times(step=1.0)), 2, placer).run([parent])
    # Three steps, then the child's five, then a pause of two.
    assert made[0].placed == [("s1", 1.0, 10), ("s2", 4.0, 10), ("s1", 11.0, 40)]
    assert made[0].finals == ["s2", "s1"]
    assert (outcome.turns, outcome.sessions, outcome.seconds) == (3, 2, 13.0)


def test_turns_that_are_refused_come_again_a_few_times() -> None:
    def flood() -> Iterator[Session]:
        for number in range(50):
            yield Session(f"s{number}", 0, 0.0, Chain((), number << 20, 20), [Turn(100, 200, 0.0)])

    outcome = Simulation(replace(QUICK, max_queued=4), 1, Everything).run(flood())
    assert outcome.turns + outcome.refused == outcome.sessions == 50
    assert 4 <= outcome.turns < 50


def _given(routed: simulate.Routed, engines: Sequence[Scheduler]) -> simulate.Routed:
    return routed


def test_everything_is_at_rest_in_the_end() -> None:
    for policy in simulate._ROUTED.values():
        routed = simulate.Routed(policy, workers=4, ranks=2, replicas=3, models=2, seed=1)
        simulation = Simulation(QUICK, 8, partial(_given, routed))
        outcome = simulation.run(traces.agents(replace(SMALL, models=2), QUICK.block_size))
        assert outcome.split == 0
        assert routed.at_rest
        assert all(not engine.load and not engine.cache.used for engine in simulation.engines)
        assert all(outcome.worked) or policy is by_cache  # for which there are only a few prompts


def test_turns_of_a_split_fleet_are_computed_once_and_leave_nothing() -> None:
    def split_by(seconds: float, least: int) -> tuple[Simulation, Outcome]:
        routed = [
            simulate.Routed(POLICIES["least-loaded"], workers=2, ranks=1, replicas=2, models=1, seed=1) for _ in "pd"
        ]
        split = Split(engines=2, place=partial(_given, routed[0]), seconds_per_token=seconds, least_new=least)
        simulation = Simulation(replace(QUICK, blocks=400), 2, partial(_given, routed[1]), split)
        outcome = simulation.run(traces.agents(SMALL, QUICK.block_size))
        assert all(each.at_rest for each in routed)
        assert all(not engine.load and not engine.cache.used for engine in simulation.engines)
        return simulation, outcome

    whole = Simulation(replace(QUICK, blocks=400), 2, Everything).run(traces.agents(SMALL, QUICK.block_size))
    for least in (0, 200):
        simulation, quick = split_by(0.0, least)
        slow = split_by(0.001, least)[1]
        for outcome in (quick, slow):
            same = (outcome.turns, outcome.prompt_tokens, outcome.answer_tokens, outcome.refused)
            assert same == (whole.turns, whole.prompt_tokens, whole.answer_tokens, 0)
        assert sum(slow.first_token) > sum(quick.first_token)
        decoding, computing = simulation.engines[:2], simulation.engines[2:]
        assert (sum(each.counters.generated for each in decoding) == quick.answer_tokens) == (not quick.preemptions)
        computed = [sum(each.counters.prompts - each.counters.hits for each in some) for some in (decoding, computing)]
        assert computed[1] + (least and computed[0]) >= quick.prompt_tokens - quick.cached_tokens
        assert (computed[0] == quick.turns) == (least == 0)  # the last token of each


def test_turns_that_are_placed_one_by_one_find_less_in_the_cache_than_sessions_that_stay() -> None:
    found = {}
    for name in ("least-loaded", "turns"):
        args = parsed("agents", "--sessions", "150", "--profile", "quick", "--workers", "6")
        found[name] = simulate._simulate(args, QUICK, name)
    assert found["least-loaded"]["cached_share"] > found["turns"]["cached_share"] + 0.1
    assert found["turns"]["split_sessions"] > 50
    assert found["least-loaded"]["split_sessions"] == 0


def parsed(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return parser.parse_args(words)


# --- traces ----------------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_agents() -> None:
    def told(seed: int) -> list[Any]:
        return [
            (each.start, each.model, [(turn.prompt, turn.answer, turn.after) for turn in each.turns], each.chain[0])
            for each in traces.agents(replace(SMALL, seed=seed, models=3), 16)
        ]

    assert told(1) == told(1) != told(2)
    assert {model for _, model, _, _ in told(1)} == {0, 1, 2}


def test_agents_begin_alike_and_grow() -> None:
    sessions = list(traces.agents(replace(SMALL, sessions=300, children=0.3), 16))
    assert [each.start for each in sessions] == sorted(each.start for each in sessions)
    beginnings = {each.chain[0] for each in sessions}
    assert len(beginnings) == 3  # system prompts
    assert len({each.chain[len(each.chain) - 1] for each in sessions}) == 300
    for each in sessions:
        told = [turn.prompt for turn in each.turns]
        assert told == sorted(told)
        assert len(each.chain) == (each.turns[-1].prompt + each.turns[-1].answer) // 16
    children = [child for each in sessions for turn in each.turns for child in turn.children]
    assert children
    assert {child.chain[0] for child in children} <= beginnings
    assert 2.5 < statistics.fmean(len(each.turns) for each in sessions) < 3.5


def test_mooncakes_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 1500, "input_length": 1025, "output_length": 1, "hash_ids": [0, 1, 7], "session_id": "a"}\n\n'
    )
    first, second = traces.mooncake(path, 16)
    assert (first.start, first.name, first.ends) == (0, "", True)
    assert (first.turns[0].prompt, first.turns[0].answer) == (1200, 52)
    assert (second.start, second.name, second.ends) == (1.5, "a", False)
    assert first.chain[:64] == second.chain[:64]  # two blocks of 512 tokens
    assert not set(first.chain[64:]) & set(second.chain[64:])
    assert (len(first.chain), len(second.chain)) == (1252 // 16, 1026 // 16)
    outcome = Simulation(QUICK, 1, Everything).run(traces.mooncake(path, 16))
    assert (outcome.turns, outcome.cached_tokens) == (2, 1024)


def test_azures_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    first, second = traces.azure(path, 16)
    assert first.start == 0.0
    assert second.start == pytest.approx(0.052)
    assert (second.turns[0].prompt, second.turns[0].answer) == (3180, 8)
    assert not set(first.chain[:]) & set(second.chain[:])


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.jsonl", '{"timestamp": 1}\n', "t.jsonl:1: Object missing required field `input_length`"),
        ("t.jsonl", "\nx\n", "t.jsonl:2: "),
        ("t.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.1,5\n", "t.csv:2: KeyError('GeneratedTokens')"),
        ("t.txt", "", "is neither a .jsonl nor a .csv file, nor agents"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said(
    tmp_path: Path, name: str, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert cli.main(["simulate", str(tmp_path / name), "--profile", "quick"]) == 2
    assert complaint in capsys.readouterr().err


# --- the command -----------------------------------------------------------------------------------------------------


def test_each_policy_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "agents", "--sessions", "20", "--profile", "quick", "--policy", "hash", "--policy", "oracle"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["policy", "turns", "cached"]
    assert [line.split()[0] for line in lines[1:]] == ["hash", "oracle"]


def test_json_says_the_same_of_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert cli.main(["simulate", "agents", "--sessions", "30", "--profile", "quick", "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        del run["cpu_seconds"]
        said.append(run)
    assert said[0] == said[1]
    assert said[0]["policy"] == "least-loaded"
    assert said[0]["turns"] > 60


def test_a_fleet_under_pressure_comes_to_what_it_always_came_to() -> None:
    """To the token and the microsecond, whatever is done for speed: preempted, refused, sub-agents,
    blocks that are evicted, models, ranks."""
    words = ("agents", "--sessions", "150", "--rate", "40", "--workers", "4", "--ranks", "2", "--models", "2")
    profile = replace(QUICK, blocks=1200, max_running=12, max_queued=24)
    args = parsed(*words, "--answer-tokens", "400", "--replicas", "3", "--seed", "5", "--children", "0.3")
    said = simulate._simulate(args, profile, "least-loaded")
    del said["cpu_seconds"]
    assert said == GOLDEN


GOLDEN = {
    "policy": "least-loaded",
    "sessions": 288,
    "turns": 1106,
    "refused": 10,
    "prompt_tokens": 10063543,
    "cached_share": 0.3019,
    "ttft_seconds": {"p50": 0.082695, "p95": 4.250181, "p99": 6.173377},
    "itl_seconds": {"p50": 0.002111, "p95": 0.002415},
    "max_over_mean_work": 1.58,
    "split_sessions": 0,
    "preemptions": 303,
    "simulated_seconds": 785.421,
}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["agents", "--models", "9"], "there must be a worker for each model"),
        (["agents", "--rate", "0"], "rate must be more than 0"),
        (["agents", "--profile", "x"], "there is no profile 'x'"),
        (["nowhere.jsonl"], "nowhere.jsonl: No such file"),
    ],
)
def test_what_cannot_be_simulated_is_said(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *words]) in (1, 2)
    assert complaint in capsys.readouterr().err
