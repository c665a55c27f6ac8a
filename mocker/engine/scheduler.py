"""One rank's scheduler: which sequences each step computes, and how long it takes.

It follows vLLM's V1 scheduler (vllm/v1/core/sched/scheduler.py), which knows no phases: in each step every running
sequence is given tokens to compute out of a budget, those that wait follow as far as budget, running sequences and
blocks allow, and who lacks a block takes those of the sequence that began last, which is computed again later. What is
simplified here: sequences that generate are given their one token before prompts are given chunks; and generated blocks
are cached when their sequence ends or is preempted, as SGLang does it.

**Steps that are alike.** While nobody's prompt is computed, nobody can begin and nobody ends, steps differ only by the
context, which grows by a token per sequence. `begin` plans as many of those as are wanted at once, `cut` shortens a
plan, and what came of it is the same as one by one, so that a fleet can be simulated by events and the live mock by
steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from mocker.engine.blocks import BlockCache, Chain, Listener, Run
from mocker.engine.profile import Profile


class QueueFull(Exception):
    """As many sequences run or wait as may."""


class TooLong(ValueError):
    """A sequence would never fit into the cache."""


class Job:
    """A sequence: a prompt, and an answer of known length. Times are what the scheduler's caller calls time."""

    __slots__ = ("answer", "arrived", "cached", "chain", "computed", "ended", "fetched", "first", "held", "owner",
                 "preempted", "prompt", "run", "running", "said", "since")  # fmt: skip

    def __init__(self, chain: Chain, prompt: int, answer: int, owner: Any = None, *, fetched: bool = False) -> None:
        """`chain`: of the blocks of prompt and answer. `prompt`, `answer`: tokens of each, at least one. `owner`: for
        the caller. `fetched`: another engine has computed the prompt, and what is there of it has come."""
        self.chain = chain
        self.fetched = fetched
        """Of the prompt only the last token is computed; all of it after a preemption."""
        self.prompt = prompt
        self.answer = answer
        self.owner = owner
        self.arrived = 0.0
        self.first: float | None = None
        """When its first token was said."""
        self.ended: float | None = None
        self.cached: int | None = None
        """Tokens of the prompt that were found in the cache when it first began."""
        self.preempted = 0
        """How often."""
        self.said = 0
        """Tokens of the answer; behind while it generates (`Scheduler.said`)."""
        self.computed = 0
        """Tokens whose keys and values are there, or are being computed; as `said`."""
        self.running = False
        self.run: Run | None = None
        """Its cached blocks."""
        self.held = 0
        """Blocks of its own beside them; as `said`."""
        self.since = -1
        """The step with which it began to generate; -1: it does not."""


@dataclass(slots=True)
class Plan:
    """Steps that are under way: the first takes `first` seconds, each further one `growth` more than the one before."""

    start: float
    steps: int
    first: float
    growth: float
    chunks: list[tuple[Job, int]]
    """Prompts that are computed in it, each with how many tokens."""
    end: float = 0.0

    def after(self, steps: int) -> float:
        """When so many of its steps are done."""
        return self.start + steps * self.first + self.growth * (steps * (steps - 1) / 2)


@dataclass(slots=True)
class Done:
    """What steps have brought, beside a token for each sequence that generates."""

    first: list[Job] = field(default_factory=list)
    """They have said their first token."""
    ended: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What vLLM counts, in tokens if not said otherwise."""

    queries: int = 0
    """Of prompts, looked up in the cache."""
    hits: int = 0
    prompts: int = 0
    """Computed or found, of prompts that were done."""
    generated: int = 0
    preemptions: int = 0
    """Sequences."""
    refused: int = 0
    """Sequences, because the queue was full."""


class Scheduler:
    """One rank. Long because a step takes from the queue, the budget and the blocks at once."""

    def __init__(self, profile: Profile, listener: Listener | None = None) -> None:
        self.profile = profile
        self.cache = BlockCache(profile.blocks, listener)
        self.counters = Counters()
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        """In the order in which they began."""
        self._prefilling: dict[Job, None] = {}
        """Those of which more than the last token is to be computed."""
        self._generating = 0
        """How many of the others there are."""
        self._context = 0
        """Tokens that the generating ones look back on."""
        self._steps = 0
        """Of generating, done."""
        self._due = [0] * profile.block_size
        """How many generating sequences need a block in step n, by n modulo the size of a block."""
        self._ends: list[tuple[int, int, Job]] = []
        """The step after which each ends; some are out of date."""
        self._number = count()
        self._size = profile.block_size
        self._times = profile.times
        self._plan: Plan | None = None
        self._leaving: list[Job] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def load(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def plan(self) -> Plan | None:
        """What is under way."""
        return self._plan

    def generating(self) -> list[Job]:
        """Those that each step gives a token."""
        return [job for job in self._running if job.since >= 0]

    def said(self, job: Job) -> int:
        """Tokens of its answer so far."""
        return job.said + (self._steps - job.since if job.since >= 0 else 0)

    def add(self, job: Job, now: float) -> None:
        """It waits for its turn. Raises QueueFull, and TooLong."""
        profile = self.profile
        if -(-(job.prompt + job.answer - 1) // profile.block_size) > profile.blocks:
            most = profile.blocks * profile.block_size + 1
            raise TooLong(f"prompt and answer are {job.prompt + job.answer} tokens; at most {most} fit into the cache")
        if profile.max_queued and self.load >= profile.max_queued:
            self.counters.refused += 1
            raise QueueFull(f"{profile.max_queued} requests run or wait already")
        job.arrived = now
        self._waiting.append(job)

    def abort(self, job: Job) -> None:
        """Nobody wants it any more. While it is being computed its blocks are used until the end of the step."""
        if not job.running:
            if job in self._waiting:
                self._waiting.remove(job)
        elif self._plan is not None:
            self._leaving.append(job)
        else:
            self._stop(job)

    # --- steps

    def begin(self, now: float, most: int = 1) -> Plan | None:
        """Decide what is computed from `now` on, in `most` steps at most. None: there is nothing to do. `end` it."""
        assert self._plan is None
        if not self._running and not self._waiting:
            return None
        plan, generating = Plan(now, 1, 0.0, 0.0, []), self._generating
        preempted = self._give_blocks() if generating and self._due[self._steps % self._size] else False
        if self._prefilling or self._waiting:
            budget = self.profile.max_tokens - self._generating
            if self._prefilling:
                budget, lost = self._go_on(plan, budget)
                preempted = preempted or lost
            if self._waiting and not preempted:
                self._let_in(plan, budget)
            if not self._running:
                return None
        self._time(plan)
        plan.end = now + plan.first
        if most > 1 and not plan.chunks and not preempted and (steps := self._alike(most)) > 1:
            plan.steps = steps
            plan.end = plan.after(steps)
        self._plan = plan
        return plan

    def cut(self, now: float) -> None:
        """End the plan with the step that is under way at `now`."""
        plan = self._plan
        if plan is None or plan.steps == 1 or plan.after(plan.steps - 1) < now:
            return
        # Where the sum of the steps (a quadratic of their number) reaches `now`; rounding may be a step off.
        first, growth, past = plan.first, plan.growth, now - plan.start
        root = math.sqrt((first - growth / 2) ** 2 + 2 * growth * max(past, 0.0))
        steps = max(1, min(plan.steps, int(2 * past / (first - growth / 2 + root))))
        while steps > 1 and plan.after(steps - 1) >= now:
            steps -= 1
        while plan.after(steps) < now:
            steps += 1
        plan.steps = steps
        plan.end = plan.after(steps)

    def end(self) -> Done:
        """The plan has been carried out."""
        plan, self._plan = self._plan, None
        assert plan is not None
        now, steps, done = plan.end, plan.steps, Done([], [])
        if steps > 1:
            self.cache.take(self._blocks_for(self._steps + 1, steps - 1))
        if self._generating:
            said = steps * self._generating
            self.counters.generated += said
            self._context += said
        self._steps = now_at = self._steps + steps
        if self._leaving:
            for job in self._leaving:
                if job.running:
                    self._stop(job)
            self._leaving.clear()
        for job, _ in plan.chunks:
            if job.running and job.computed == job.prompt + job.said:
                del self._prefilling[job]
                self._say_first(job, now, done)
        ends = self._ends
        while ends and ends[0][0] <= now_at:
            step, _, job = heappop(ends)
            if job.since >= 0 and job.since + job.answer - job.said == step:
                self._stop(job)
                job.ended = now
                done.ended.append(job)
        return done

    def _give_blocks(self) -> bool:
        """To those that generate, where a block is full. Returns whether somebody was preempted."""
        due, step = self._due, self._steps % self._size
        preempted = False
        while due[step] > self.cache.room:
            self._preempt()
            preempted = True
        if due[step]:
            self.cache.take(due[step])
        return preempted

    def _go_on(self, plan: Plan, budget: int) -> tuple[int, bool]:
        """With prompts that have begun. Returns what is left of the budget, and whether somebody was preempted."""
        preempted = False
        for job in list(self._prefilling):
            if not job.running or budget <= 0:
                continue
            tokens = min(job.prompt + job.said - job.computed, budget)
            while job.running and self._lacking(job, tokens) > self.cache.room:
                self._preempt(plan)
                preempted = True
            if job.running:
                self._compute(plan, job, tokens, self._lacking(job, tokens))
                budget -= tokens
        return budget, preempted

    def _let_in(self, plan: Plan, budget: int) -> None:
        profile, cache, size = self.profile, self.cache, self.profile.block_size
        while self._waiting and budget > 0 and len(self._running) < profile.max_running:
            job = self._waiting[0]
            length = job.prompt + job.said
            # At least the last token is computed, for what comes after it is wanted.
            run, found, idle = cache.look(job.chain, min((length - 1) // size, len(job.chain)))
            computed = found * size
            tokens = length - computed if job.fetched else min(length - computed, budget)
            lacking = -(-(computed + tokens) // size) - found
            if lacking > cache.room - idle:
                return
            self._waiting.popleft()
            job.run = cache.hold_found(run, found)
            job.computed = computed
            if job.cached is None:
                job.cached = length - 1 if job.fetched else computed
                self.counters.queries += job.prompt
                self.counters.hits += job.cached
            job.running = True
            self._running[job] = None
            self._prefilling[job] = None
            self._compute(plan, job, tokens, lacking)
            if job.fetched:
                plan.chunks[-1] = job, 1
                tokens = 1
            budget -= tokens

    def _lacking(self, job: Job, tokens: int) -> int:
        """How many blocks it needs to compute so many more."""
        assert job.run is not None
        return -(-(job.computed + tokens) // self._size) - job.run.end - job.held

    def _compute(self, plan: Plan, job: Job, tokens: int, lacking: int) -> None:
        """`lacking`: the blocks that it needs for that."""
        self.cache.take(lacking)
        job.held += lacking
        job.computed += tokens
        plan.chunks.append((job, tokens))
        self._publish(job)

    def _publish(self, job: Job) -> None:
        """Its full blocks are cached, as vLLM does it: as soon as they are going to be computed."""
        run, chain = job.run, job.chain
        assert run is not None
        before, full = run.end, job.computed // self._size
        if full > before and (full := min(full, len(chain))) > before:
            job.run = self.cache.publish(run, job, chain, full)
            job.held -= full - before

    def _say_first(self, job: Job, now: float, done: Done) -> None:
        """Of a prompt that has been computed; or, after a preemption, the next."""
        if job.first is None:
            job.first = now
            self.counters.prompts += job.prompt
            done.first.append(job)
        job.said += 1
        self.counters.generated += 1
        if job.said == job.answer:
            self._stop(job)
            job.ended = now
            done.ended.append(job)
            return
        job.since = self._steps
        self._generating += 1
        self._context += job.computed
        self._due[(self._steps - job.computed) % self._size] += 1
        heappush(self._ends, (self._steps + job.answer - job.said, next(self._number), job))

    def _stop(self, job: Job) -> None:
        """It runs no more; what it has computed stays cached."""
        if job.since >= 0:
            steps, size = self._steps - job.since, self._size
            self._due[(job.since - job.computed) % size] -= 1
            job.computed += steps
            job.said += steps
            job.since = -1
            self._generating -= 1
            self._context -= job.computed
            assert job.run is not None
            job.held = -(-job.computed // size) - job.run.end
            self._publish(job)
        else:
            self._prefilling.pop(job, None)
        del self._running[job]
        job.running = False
        assert job.run is not None
        self.cache.give(job.held)
        self.cache.leave(job.run)
        job.held, job.run = 0, None

    def _preempt(self, plan: Plan | None = None) -> None:
        """The one that began last gives its blocks and is the next to begin again."""
        job = next(reversed(self._running))
        self._stop(job)
        if plan is not None:
            plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not job]
        job.computed = 0
        job.fetched = False
        job.preempted += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(job)

    # --- time

    def _time(self, plan: Plan) -> None:
        times = self._times
        first = times.step + times.sequence * len(self._running) + times.context * self._context
        for job, tokens in plan.chunks:
            # Each token looks back on what is before it, half of its chunk in the mean.
            first += tokens * (times.prefill + times.prefill_context * (job.computed - tokens / 2))
        plan.first, plan.growth = first, times.context * self._generating

    def _alike(self, most: int) -> int:
        """How many steps can follow before anything else has to be decided."""
        ends = self._ends
        step, _, job = ends[0]
        while job.since < 0 or job.since + job.answer - job.said != step:
            heappop(ends)
            step, _, job = ends[0]
        steps = min(most, step - self._steps)
        room, after = self.cache.room, self._steps + 1
        most_blocks = self._generating * (1 + steps // self._size)
        if most_blocks <= room or self._blocks_for(after, steps - 1) <= room:
            return steps
        low, high = 1, steps - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._blocks_for(after, middle - 1) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def _blocks_for(self, step: int, steps: int) -> int:
        """How many blocks those that generate need in `steps` steps from number `step` on."""
        size, due = self._size, self._due
        rounds, rest = divmod(steps, size)
        begin = step % size
        end = begin + rest
        part = sum(due[begin:end]) if end <= size else sum(due[begin:]) + sum(due[: end - size])
        return rounds * self._generating + part
