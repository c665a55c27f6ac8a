"""The simulated engine: schedules that were computed by hand, and its shortcuts against doing it one by one."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest

from mocker.engine import profile as profiles
from mocker.engine.blocks import BlockCache, Chain, Run, chain_of
from mocker.engine.profile import Profile, Times
from mocker.engine.scheduler import Done, Job, QueueFull, Scheduler, TooLong

ROUND = Profile(
    times=Times(step=1.0, sequence=0.0, context=0.0, prefill=0.1),
    block_size=4,
    blocks=100,
    max_tokens=16,
    max_running=8,
)
"""A step takes a second, and 0.1 s for each token of a prompt; four tokens a block, sixteen a step."""


def job(name: int, prompt: int, answer: int, *, common: int = 0) -> Job:
    """`common`: so many blocks are those of every job."""
    blocks = (prompt + answer) // 4
    return Job([*range(common), *(1000 * name + at for at in range(common, blocks))], prompt, answer)


def step(engine: Scheduler, now: float, most: int = 1) -> tuple[float, Done]:
    plan = engine.begin(now, most)
    assert plan is not None
    return plan.end, engine.end()


def run(engine: Scheduler, now: float = 0.0, most: int = 1) -> float:
    """Until nothing runs; returns when that is."""
    while (plan := engine.begin(now, most)) is not None:
        now = plan.end
        engine.end()
    return now


def whole(engine: Scheduler) -> None:
    """All blocks are accounted for, and at rest none is used."""
    cache = engine.cache
    assert (engine.running, engine.waiting, cache.held, cache.used) == (0, 0, 0, 0)
    assert cache.free + cache.idle == cache.blocks


# --- schedules -------------------------------------------------------------------------------------------------------


def test_one_prompt_in_one_chunk() -> None:
    engine, one = Scheduler(ROUND), job(1, 10, 3)
    engine.add(one, 0.0)
    # 1 + 10 x 0.1 for the prompt and the first token, a step for each of the others.
    assert run(engine) == pytest.approx(4.0)
    assert one.first == pytest.approx(2.0)
    assert one.ended == pytest.approx(4.0)
    assert one.cached == 0
    # 12 tokens have keys and values (nothing follows the last one): three blocks.
    assert engine.cache.cached == 3
    whole(engine)


def test_a_long_prompt_is_computed_in_chunks_beside_who_generates() -> None:
    engine, short, long = Scheduler(ROUND), job(1, 4, 10), job(2, 40, 1)
    engine.add(short, 0.0)
    now, _ = step(engine, 0.0)
    assert now == pytest.approx(1.4)
    engine.add(long, now)
    # Of 16 tokens one is the short one's: chunks of 15, 15 and 10.
    for tokens, said in ((15, 2), (15, 3), (10, 4)):
        plan = engine.begin(now)
        assert plan is not None
        assert plan.chunks == [(long, tokens)]
        assert plan.end - now == pytest.approx(1 + tokens * 0.1)
        now = plan.end
        engine.end()
        assert engine.said(short) == said
    assert long.ended == long.first == pytest.approx(1.4 + 2.5 + 2.5 + 2.0)
    assert run(engine, now) == pytest.approx(now + 6)
    whole(engine)


def test_a_common_beginning_is_computed_once() -> None:
    engine, one, two = Scheduler(ROUND), job(1, 12, 1, common=2), job(2, 14, 1, common=2)
    engine.add(one, 0.0)
    engine.add(two, 0.0)
    plan = engine.begin(0.0)
    assert plan is not None
    # The second finds what the first is only about to compute: both are in the same step.
    assert plan.chunks == [(one, 12), (two, 4)]
    assert two.cached == 8
    engine.end()
    again = job(1, 12, 1, common=2)
    engine.add(again, 5.0)
    run(engine, 5.0)
    # Three blocks are there, but the last token's scores are wanted: two of them count.
    assert again.cached == 8
    assert (engine.counters.queries, engine.counters.hits) == (12 + 14 + 12, 8 + 8)
    whole(engine)


def test_inter_token_latency_grows_with_the_batch_and_its_context() -> None:
    engine = Scheduler(replace(ROUND, times=Times(step=1.0, sequence=0.25, context=0.01, prefill=0.0)))
    engine.add(job(1, 8, 3), 0.0)
    engine.add(job(2, 4, 3), 0.0)
    now, _ = step(engine, 0.0)
    assert now == pytest.approx(1.5)  # two sequences; nobody generates yet
    before, (now, _) = now, step(engine, now)
    assert now - before == pytest.approx(1.5 + 0.12)
    before, (now, done) = now, step(engine, now)
    assert now - before == pytest.approx(1.5 + 0.14)
    assert len(done.ended) == 2


def test_who_lacks_a_block_takes_those_of_who_began_last() -> None:
    engine, first, last = Scheduler(replace(ROUND, blocks=5)), job(1, 8, 5), job(2, 7, 5)
    engine.add(first, 0.0)
    engine.add(last, 0.0)
    now, _ = step(engine, 0.0)  # 2 + 2 blocks
    now, _ = step(engine, now)  # the first one's ninth token is in the fifth, the last one's eighth fills its second
    assert engine.cache.room == 0
    assert engine.said(last) == 2
    now, _ = step(engine, now)  # the last one's ninth token has no room: it is the last itself
    assert (engine.running, engine.waiting, last.preempted) == (1, 1, 1)
    # Two of its blocks are cached and idle, and the first one's end is near: 8 + 5 - 1 tokens are in three blocks.
    end = run(engine, now)
    assert first.ended == pytest.approx(2.5 + 4)
    # When the first has gone: nine tokens are known of the last, eight of them in the cache.
    assert last.ended == pytest.approx(6.5 + 1.1 + 2) == end
    assert (last.cached, last.said, engine.counters.preemptions) == (0, 5, 1)
    whole(engine)


def test_who_waits_begins_when_there_are_blocks_and_places() -> None:
    engine = Scheduler(replace(ROUND, max_running=1))
    one, two = job(1, 4, 4), job(2, 4, 4)
    engine.add(one, 0.0)
    engine.add(two, 0.0)
    assert run(engine) == pytest.approx(2 * 4.4)
    assert two.first == pytest.approx(4.4 + 1.4)

    engine = Scheduler(replace(ROUND, blocks=4, max_tokens=32))
    one, two = job(1, 8, 4), job(2, 12, 2)
    engine.add(one, 0.0)
    engine.add(two, 0.0)
    run(engine)
    # Three blocks and then four: they do not fit together, whatever the budget has room for.
    assert one.ended == pytest.approx(4.8)
    assert two.first == pytest.approx(4.8 + 2.2)
    whole(engine)


def test_a_full_queue_refuses_and_what_never_fits_as_well() -> None:
    engine = Scheduler(replace(ROUND, max_queued=2))
    engine.add(job(1, 4, 4), 0.0)
    engine.begin(0.0)
    engine.add(job(2, 4, 4), 0.0)
    with pytest.raises(QueueFull):
        engine.add(job(3, 4, 4), 0.0)
    assert engine.counters.refused == 1
    with pytest.raises(TooLong):
        engine.add(job(4, 390, 12), 0.0)
    engine.end()
    run(engine, 1.4)
    engine.add(job(4, 390, 11), 10.0)
    run(engine, 10.0)
    whole(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_who_leaves_leaves_no_block_behind(steps: int) -> None:
    engine, stays, leaves = Scheduler(ROUND), job(1, 6, 9), job(2, 20, 9)
    engine.add(stays, 0.0)
    engine.add(leaves, 0.0)
    now = 0.0
    for _ in range(steps):
        now, _ = step(engine, now)
    plan = engine.begin(now)
    assert plan is not None
    engine.abort(leaves)  # in mid-step: it is over when the step is
    engine.end()
    assert engine.load == 1
    assert not leaves.ended
    run(engine, plan.end)
    assert stays.said == 9
    waits = job(3, 4, 4)
    engine.add(waits, 50.0)
    engine.abort(waits)
    whole(engine)


def test_steps_that_are_alike_are_cut_where_something_happens() -> None:
    engine = Scheduler(replace(ROUND, times=Times(step=1.0, context=0.125)))
    engine.add(job(1, 8, 100), 0.0)
    now, _ = step(engine, 0.0, 1000)
    plan = engine.begin(now, 1000)
    assert plan is not None
    assert plan.steps == 99
    assert [plan.after(done) for done in (1, 2, 3)] == [3.0, 5.125, 7.375]
    engine.cut(5.2)
    assert (plan.steps, plan.end) == (3, 7.375)
    engine.cut(0.0)
    assert plan.steps == 1


def test_many_steps_at_once_are_what_they_are_one_by_one() -> None:
    """Random jobs that arrive, want common blocks, lack room and are preempted: the same history, by events and by
    steps."""
    preempted = 0
    for seed in range(40):
        histories = []
        for most in (1, 10**9):
            rng = random.Random(seed)
            blocks = rng.choice([30, 60, 400])
            engine = Scheduler(
                replace(ROUND, blocks=blocks, times=Times(1.0, 0.01, 0.001, 0.05, 0.0001), max_tokens=32)
            )
            arrivals = sorted(
                (
                    rng.uniform(0, 100),
                    number,
                    job(number, rng.randint(1, 50), rng.randint(1, 60), common=rng.choice([0, 0, 3])),
                )
                for number in range(1, 30)
            )
            for _, _, each in arrivals:
                each.chain = each.chain[: (each.prompt + each.answer) // 4]
            history = [each for _, _, each in arrivals]
            now, ahead = 0.0, list(arrivals)
            while True:
                plan = engine.begin(now, most)
                if plan is None:
                    if not ahead:
                        break
                    now = max(now, ahead[0][0])
                else:
                    if ahead:
                        engine.cut(ahead[0][0])
                    now = plan.end
                    engine.end()
                while ahead and ahead[0][0] <= now:
                    at, _, each = ahead.pop(0)
                    engine.add(each, at)
            whole(engine)
            preempted += engine.counters.preemptions
            histories.append(
                (
                    [(each.first, each.ended, each.cached, each.preempted, each.said) for each in history],
                    engine.counters,
                    engine.cache.cached,
                )
            )
        one, many = histories
        assert one[1:] == many[1:], seed
        for a, b in zip(one[0], many[0], strict=True):
            assert a == pytest.approx(b), seed
    assert preempted > 50  # it was tried


# --- the cache -------------------------------------------------------------------------------------------------------


class OneByOne:
    """A cache as vLLM describes it: each block by itself, with a count of users and a queue of those without."""

    def __init__(self, blocks: int) -> None:
        self.users: dict[int, int] = {}
        self.queue: OrderedDict[int, None] = OrderedDict()
        self.free = blocks
        self.removed: list[int] = []

    def found(self, chain: Chain, most: int) -> int:
        return next((at for at in range(most) if chain[at] not in self.users), most)

    def use(self, chain: Chain) -> None:
        for each in chain:
            if not self.users.get(each):
                self.queue.pop(each, None)
            self.users[each] = self.users.get(each, 0) + 1

    def leave(self, chain: Chain) -> None:
        for each in reversed(chain):
            self.users[each] -= 1
            if not self.users[each]:
                self.queue[each] = None

    def take(self, count: int) -> None:
        while self.free < count:
            gone, _ = self.queue.popitem(last=False)
            del self.users[gone]
            self.removed.append(gone)
            self.free += 1
        self.free -= count


class Heard:
    def __init__(self) -> None:
        self.gone: list[int] = []
        self.there: set[int] = set()

    def stored(self, owner: object, start: int, end: int) -> None:
        assert isinstance(owner, list)
        new = set(owner[start:end])
        assert not new & self.there
        self.there |= new

    def removed(self, hashes: list[int]) -> None:
        self.gone += hashes
        self.there -= set(hashes)

    def cleared(self) -> None:
        self.there.clear()


def test_runs_are_what_single_blocks_are() -> None:
    """Random prompts from a tree of words: found, used, filled, left and evicted as block by block, and told so."""
    for seed in range(60):
        rng = random.Random(seed)
        heard = Heard()
        cache, model = BlockCache(40, heard), OneByOne(40)
        names: dict[tuple[int, ...], int] = {}
        running: list[tuple[list[int], Run]] = []
        for _ in range(300):
            if running and (rng.random() < 0.5 or len(running) == 4):
                chain, held = running.pop(rng.randrange(len(running)))
                cache.leave(held)
                model.leave(chain)
            else:
                words = [rng.choice([0, 0, 0, 1]) for _ in range(rng.randint(1, 10))]
                chain = [names.setdefault(tuple(words[: at + 1]), len(names)) for at in range(len(words))]
                most = rng.randint(0, len(chain))
                found, idle = cache.find(chain, most)
                assert found == model.found(chain, most)
                assert idle == sum(not model.users[each] for each in chain[:found])
                held = cache.hold(chain, found)
                assert held.end == found
                model.use(chain[:found])
                cache.take(len(chain) - found)
                model.take(len(chain) - found)
                # Filled in two pieces. What others have filled meanwhile is given back.
                middle = rng.randint(found, len(chain))
                held = cache.publish(held, chain, chain, middle)
                held = cache.publish(held, chain, chain, len(chain))
                assert held.end == len(chain)
                model.free += sum(each in model.users for each in chain[found:])
                model.use(chain[found:])
                running.append((chain, held))
            assert cache.free == model.free
            assert cache.idle == len(model.queue)
            assert cache.held == 0
            assert heard.gone == model.removed
            assert heard.there == set(model.users)
        for _, held in running:
            cache.leave(held)
        with_none = cache.find([0], 1)
        cache.clear()
        assert (cache.free, cache.idle, heard.there) == (40, 0, set())
        assert with_none >= cache.find([0], 1) == (0, 0)


def test_a_cache_in_use_is_not_cleared() -> None:
    cache = BlockCache(4)
    cache.take(1)
    with pytest.raises(RuntimeError):
        cache.clear()


def test_chains_are_equal_as_far_as_tokens_and_model_are() -> None:
    text, other = b"abcdefgh" * 4, b"abcdefgh" * 2 + b"abcdefgX" * 2
    one, two = chain_of("m", text, 8), chain_of("m", other, 8)
    assert len(one) == 4
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert len(set(one)) == 4
    assert not set(chain_of("n", text, 8)) & set(one)
    assert chain_of("m", text + b"more", 8, before=one[:1]) == one


# --- profiles --------------------------------------------------------------------------------------------------------


def test_times_follow_from_published_figures() -> None:
    """Llama 3.1 8B on an H100, by hand: 16.06 GB at 75 % of 3350 GB/s, 2 x 8.03 G operations at half of 989 T, 128 KiB
    of keys and values for a token, in what 0.9 x 80 GB - 3 GB leave."""
    profile = profiles.load("llama-8b-h100")
    assert profile.times.step == pytest.approx(16.06 / 2512.5 + 0.001)
    assert profile.times.prefill == pytest.approx(16.06e9 / 494.5e12)
    assert profile.times.context == pytest.approx(131072 / 2512.5e9)
    assert profile.blocks == int((72 - 3 - 16.06) * 1e9 / (131072 * 16))


@pytest.mark.parametrize("name", profiles.names())
def test_every_profile_names_its_sources_and_is_plausible(name: str) -> None:
    text = (profiles.FOLDER / f"{name}.toml").read_text()
    profile = profiles.load(name)
    assert ("sources = [" in text) == ("[hardware]" in text)
    assert 0.001 < profile.times.step < 0.1
    assert profile.blocks * profile.block_size >= 32_768


def test_a_profile_can_be_resized() -> None:
    profile = profiles.load("quick")
    assert profiles.resized(profile, blocks=None, block_size=64).blocks == profile.blocks // 4
    assert profiles.resized(profile, blocks=10, block_size=64).blocks == 10


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("about = 'x'", "say \\[hardware\\] and \\[model\\]"),
        ("about = 'x'\n[times]\nstep_ms = 1", "say \\[hardware\\]"),
        ("about = 'x'\n[times]\nstep = 1", "unknown field"),
        ("about = 'x'\n[times]\nstep_ms = 1\n[engine]\nblocks = 0", "blocks"),
        ("about = 'x'\n[times]\nstep_ms = 1\n[engine]\nblocks = 9\nmax_tokens = 5", "max_tokens must be more"),
        ("about", "profile"),
    ],
)
def test_what_is_wrong_with_a_profile_is_said(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        profiles.load(str(path))


def test_an_unknown_profile_is_named_beside_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no profile 'b200'; there are flat, llama-70b-4xh100, llama-8b-h100"):
        profiles.load("b200")
