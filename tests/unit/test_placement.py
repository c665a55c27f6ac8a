"""Placing by what is cached: prompts as chains, what is remembered of where they went, and the policy."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from app.fleet import policies
from app.fleet.health import Tolerance
from app.fleet.placement.blocks import ENDS, LEAST, Piece, Text, full_blocks
from app.fleet.placement.prefix import BYTES_A_BLOCK, Prefixes, Prompt
from app.fleet.policies import by_cache, least_loaded
from app.fleet.workers import Cache, Fleet, Target, make_worker
from app.metrics import Metrics
from app.turn.fields import FieldReader

CHAT = b"/v1/chat/completions"
MIB = 1 << 20


def words(seed: str, size: int) -> str:
    """Text of so many bytes, another one for each seed."""
    return "".join(f"{seed} {number} " for number in range(size // (len(seed) + 2) + 1))[:size]


def said(**body: Any) -> Mapping[str, Piece]:
    """What is read of a request's body, as the router reads it."""
    return FieldReader(prompts="yes").decode(json.dumps(body).encode()).said


def chat(system: str, user: str = "") -> Mapping[str, Piece]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return said(model="m", messages=messages, stream=True)


class Placing:
    """One replica with the policy: places prompts, as first turns of sessions are."""

    def __init__(self, workers: int = 4, *, memory: int = MIB, max_turns: int = 0) -> None:
        self.now = 1000.0
        self.fleet = Fleet(
            (
                make_worker(
                    f"http://h:{number + 1}",
                    name=f"w{number}",
                    connect_limit=1,
                    idle_limit=1,
                    max_turns=max_turns,
                    clock=lambda: self.now,
                    tolerance=Tolerance(),
                )
                for number in range(workers)
            ),
            clock=lambda: self.now,
        )
        self.metrics = Metrics()
        self.prefixes = Prefixes(self.metrics, memory=memory)
        self._keys = itertools.count()

    def prompt(self, fields: Mapping[str, Piece], *, path: bytes = CHAT, model: str = "m") -> Prompt:
        made = self.prefixes.prompt(path, model, fields)
        assert made is not None
        return made

    def would_go(self, prompt: Prompt | None) -> Target:
        return by_cache(self.fleet.candidates(key=f"key {next(self._keys)}", prompt=prompt))

    def place(self, fields: Mapping[str, Piece], **how: Any) -> Target:
        prompt = self.prompt(fields, **how)
        target = self.would_go(prompt)
        self.fleet.note_placed(target)
        target.worker.health.good += 1
        prompt.placed(target)
        return target

    def at(self, number: int) -> Target:
        return list(self.fleet)[number].targets[0]

    def known(self, target: Target, fields: Mapping[str, Piece]) -> float:
        return self.prompt(fields).shares().get(target, 0.0)


# --- prompts as chains -----------------------------------------------------------------------------------------------


def test_blocks_are_small_at_first_and_a_quarter_of_what_is_before_them_at_most() -> None:
    assert ENDS[:3] == (LEAST, 2 * LEAST, 3 * LEAST)
    assert all(end - begin <= max(LEAST, begin / 4) for begin, end in itertools.pairwise((0, *ENDS)))
    assert full_blocks(40_000) < 30


def test_chains_are_equal_as_far_as_texts_are() -> None:
    text = words("a", 90_000).encode()
    for changed in (0, 255, 256, 3000, 8999, 32_767, 32_768, 89_999):
        other = text[:changed] + b"#" + text[changed + 1 :]
        one, two = Text("m", [text]).hashes, Text("m", [other]).hashes
        assert one[: full_blocks(changed)] == two[: full_blocks(changed)]
        assert not set(one[full_blocks(changed) :]) & set(two[full_blocks(changed) :])


def test_a_prompt_is_what_engines_render_in_their_order_wherever_it_stands_in_the_body() -> None:
    tools, system, messages = (
        [{"name": words("t", 500)}],
        words("s", 500),
        [{"role": "user", "content": words("u", 500)}],
    )
    one = said(model="m", max_tokens=5, tools=tools, system=system, messages=messages)
    other = said(messages=messages, system=system, metadata={"messages": "x"}, tools=tools, temperature=1)
    placing = Placing()
    assert list(placing.prompt(one)._text.hashes) == list(placing.prompt(other)._text.hashes)
    assert len(placing.prompt(one)._text.hashes) >= 5
    assert placing.prompt(said(messages=messages))._text.hashes[0] != placing.prompt(one)._text.hashes[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": words("u", 900)}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": words("u", 900)}]}]}),
        (b"/v1/completions", {"prompt": words("p", 900)}),
        (b"/v1/completions", {"prompt": list(range(900))}),
        (b"/v1/messages", {"system": words("s", 450), "messages": [{"role": "user", "content": words("u", 450)}]}),
        (b"/v1/responses", {"instructions": words("i", 450), "input": words("u", 450), "tools": None}),
        (b"/v1/responses", {"input": [{"role": "user", "content": words("u", 900)}]}),
    ],
)
def test_every_api_has_prompts(path: bytes, body: dict[str, Any]) -> None:
    placing = Placing()
    where = placing.place(said(**body), path=path)
    assert placing.prompt(said(**body), path=path).shares()[where] > 0.7


def test_what_has_no_prompt_to_cache_has_none() -> None:
    assert Placing().prefixes.prompt(b"/v1/embeddings", "m", said(input=words("e", 900))) is None


def test_models_adapters_and_salts_share_nothing() -> None:
    placing = Placing()
    fields = chat(words("a", 2000))
    where = placing.place(fields)
    assert placing.prompt(fields).shares() == {where: pytest.approx(1, abs=0.2)}
    assert not placing.prompt(fields, model="adapter").shares()
    assert not placing.prompt({**fields, "cache_salt": msgspec.Raw(b'"mine"')}).shares()


def test_replicas_name_what_follows_alike() -> None:
    code = (
        "from app.fleet.placement.blocks import Text\n"
        "text = Text('m', [b'x' * 5000]); print(text.name(2), text.hashes[0])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout.split()
        for seed in "12"
    ]
    assert said[0][0] == said[1][0]
    assert said[0][1] != said[1][1]  # nobody outside can make two prompts collide


# --- what is remembered ----------------------------------------------------------------------------------------------


def test_each_target_is_known_to_have_what_it_was_sent() -> None:
    placing = Placing()
    system = words("system", 6000)
    short, long, other = chat(system), chat(system, words("user", 3000)), chat(system, words("other", 3000))
    placing.prompt(short).placed(placing.at(0))
    placing.prompt(long).placed(placing.at(1))
    shares = placing.prompt(other).shares()
    assert shares.keys() == {placing.at(0), placing.at(1)}
    assert 0.55 < shares[placing.at(0)] <= 6100 / 9100
    assert shares[placing.at(0)] == shares[placing.at(1)]
    again = placing.prompt(long).shares()
    assert again[placing.at(1)] > 0.9 > again[placing.at(0)]


def test_of_prompts_that_begin_alike_and_are_placed_at_once_each_is_remembered() -> None:
    """Each is looked up before any is placed: what nobody had then, somebody may have by now."""
    placing = Placing()
    one, two, third = (placing.prompt(chat(words("shared", 4000), user)) for user in ("one", "two", "three"))
    assert [prompt.shares() for prompt in (one, two)] == [{}, {}]
    for number, prompt in enumerate((one, two, one)):
        prompt.placed(placing.at(number))
    assert third.shares().keys() == {placing.at(0), placing.at(1), placing.at(2)}


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    placing = Placing(memory=4000 * BYTES_A_BLOCK)
    used, left = chat(words("used", 5000)), chat(words("left", 5000))
    placing.prompt(used).placed(placing.at(0))
    placing.prompt(left).placed(placing.at(0))
    for number in range(400):
        placing.prompt(chat(words(f"other {number}", 5000))).placed(placing.at(1))
        placing.prompt(used).placed(placing.at(0))
        assert len(placing.prefixes) <= 4000 + 20
    assert placing.known(placing.at(0), used) > 0.75
    assert placing.known(placing.at(0), left) == 0


@pytest.mark.parametrize("blocks", [6500, 11_000, 15_000])
def test_a_block_takes_so_many_bytes(blocks: int) -> None:
    """Of prompts of a kilobyte and more, whether or not the table has just grown."""
    placing = Placing(memory=blocks * BYTES_A_BLOCK)
    prompts = blocks // 4
    gc.collect()
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        for number in range(prompts):
            placing.prefixes.note(Text("m", [b"%-1024d" % number]).hashes, placing.at(number % 4))
        taken = tracemalloc.get_traced_memory()[0] - begun
    finally:
        tracemalloc.stop()
    assert len(placing.prefixes) > 0.85 * blocks
    assert taken / len(placing.prefixes) < BYTES_A_BLOCK


def test_a_target_that_is_gone_is_not_known_and_not_kept() -> None:
    placing = Placing()
    fields = chat(words("a", 4000))
    placing.prompt(fields).placed(placing.at(0))
    gone = placing.at(0)
    placing.fleet.remove("w0")
    assert not placing.prompt(fields).shares()
    assert gone.cache.target is gone  # another one, which no block has
    placing.prompt(fields).placed(placing.at(1))
    assert placing.prompt(fields).shares().keys() == {placing.at(1)}
    assert [each for each in gc.get_referrers(gone) if isinstance(each, Cache)] == [gone.cache]


def test_the_bits_of_lost_caches_are_used_again_when_no_block_has_them() -> None:
    """Workers come and go for ever; what was known of one is never another one's."""
    placing = Placing(memory=800 * BYTES_A_BLOCK)
    for number in range(60):
        kept, lost = chat(words(f"kept {number}", 4000)), chat(words(f"lost {number}", 4000))
        placing.prompt(kept).placed(placing.at(1))
        placing.prompt(lost).placed(placing.at(0))
        placing.prompt(kept).placed(placing.at(0))
        assert placing.prompt(kept).shares().keys() == {placing.at(0), placing.at(1)}
        placing.at(0).forget()
        assert placing.prompt(kept).shares().keys() == {placing.at(1)}
        assert not placing.prompt(lost).shares()
        for other in range(4):
            placing.prompt(chat(words(f"other {number} {other}", 4000))).placed(placing.at(2))
    assert len(placing.prefixes._caches) < 20


def test_the_garbage_collector_does_not_look_through_what_is_known() -> None:
    placing = Placing()
    for number in range(50):
        placing.prompt(chat(words(f"{number % 20}", 4000))).placed(placing.at(number % 3))
    assert not any(map(gc.is_tracked, placing.prefixes._generations))


def test_a_worker_that_comes_back_cold_is_another_one() -> None:
    """With another incarnation, or after it was down."""
    placing = Placing()
    fields = chat(words("a", 4000))
    placing.prompt(fields).placed(placing.at(0))
    placing.prompt(fields).placed(placing.at(1))
    placing.fleet.put(make_worker("http://h:1", name="w0", connect_limit=1, idle_limit=1, clock=lambda: placing.now))
    list(placing.fleet)[1].health.unreachable("refused", refused=True)
    assert not placing.prompt(fields).shares()


def served(placing: Placing, fields: Mapping[str, Piece], tokens: int, cached: int, number: int = 0) -> None:
    target = placing.at(number)
    prompt = placing.prompt(fields)
    prompt.placed(target)
    target.worker.cells.cached_tokens += cached
    prompt.settle(target, (tokens, cached))


def test_who_reports_far_less_than_was_foreseen_has_lost_its_cache() -> None:
    placing = Placing()
    one, other = chat(words("one", 4000)), chat(words("other", 4000))
    served(placing, one, 1000, 0)
    served(placing, other, 1000, 0)
    served(placing, one, 1000, 900)
    assert placing.known(placing.at(0), other) > 0.75
    served(placing, one, 1000, 16)
    assert placing.known(placing.at(0), other) == 0
    assert placing.known(placing.at(0), one) > 0.75  # it has just computed that
    assert placing.metrics.foresights_wrong.cells[()] == 1
    assert placing.metrics.found_tokens.cells[()] == 916
    assert placing.metrics.foreseen_tokens.cells[()] == pytest.approx(1762, abs=100)


def test_who_never_tells_of_cached_tokens_may_have_some() -> None:
    placing = Placing()
    fields = chat(words("one", 4000))
    for _ in range(3):
        served(placing, fields, 1000, 0)
    assert placing.known(placing.at(0), fields) > 0.75
    assert placing.metrics.foresights_wrong.cells[()] == 0


# --- the policy ------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_is() -> None:
    placing = Placing(workers=40)
    systems = [words(f"system {number}", 8000) for number in range(30)]
    homes = [placing.place(chat(system, "first")) for system in systems]
    assert len(set(homes)) > 10
    for _ in range(3):
        assert [placing.place(chat(system, words(f"{number}", 300))) for number, system in enumerate(systems)] == homes


def test_replicas_that_have_learnt_nothing_choose_alike() -> None:
    one, other = Placing(), Placing()
    systems = [chat(words(f"system {number}", 3000)) for number in range(30)]
    assert [one.would_go(one.prompt(each)) for each in systems] == [
        one.at([other.at(number) for number in range(4)].index(other.would_go(other.prompt(each)))) for each in systems
    ]


def test_who_is_ahead_is_chosen_as_if_all_had_been_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        named = 0

        def __init__(self, shares: Mapping[Target, float]) -> None:
            self._shares = shares

        def shares(self) -> Mapping[Target, float]:
            return self._shares

        def name(self, beyond: float) -> str:
            Known.named += 1
            return str(beyond)

    rng, placing = random.Random(3), Placing(workers=5, max_turns=9)
    targets = [placing.at(number) for number in range(5)]
    for number in range(200):
        for target in targets:
            target.in_flight, target.sessions = rng.randrange(10), rng.randrange(30)
        known = Known({target: rng.choice((0.2, 0.5, 0.9)) for target in rng.sample(targets, rng.randrange(6))})
        candidates = placing.fleet.candidates(key=rng.choice(("", str(number))), prompt=known)
        chosen = by_cache(candidates)
        named = Known.named
        with monkeypatch.context() as patched:
            patched.setattr(policies, "_ahead", lambda shares: None)
            assert by_cache(candidates) is chosen
        assert Known.named == named + 1
    assert 100 < Known.named - 200 < 180  # where nobody is ahead


def test_what_all_have_counts_for_nothing() -> None:
    """One system prompt for the whole fleet: what follows it decides, and places spread."""
    placing = Placing()
    system = words("everybody's", 8000)
    for number in range(4):
        placing.prompt(chat(system)).placed(placing.at(number))
    homes = {text: placing.place(chat(system, words(text, 2000))) for text in map(str, range(24))}
    assert max(Counter(homes.values()).values()) <= 14
    assert len(set(homes.values())) == 4
    for text, home in homes.items():
        assert placing.would_go(placing.prompt(chat(system, words(text, 2000) + "and more"))) is home


def test_a_prompt_that_many_want_spreads() -> None:
    placing = Placing()
    hot = chat(words("hot", 8000))
    homes: Counter[Target] = Counter()
    for _ in range(40):
        target = placing.place(hot)
        target.in_flight += 1
        homes[target] += 1
    assert max(homes.values()) <= 22  # twice the mean, and chance; alone it would have had all


def test_one_busy_worker_does_not_switch_it_off_for_the_others() -> None:
    placing = Placing()
    systems = [words(f"system {number}", 8000) for number in range(24)]
    homes = [placing.place(chat(system)) for system in systems]
    busy = homes[0]
    busy.in_flight += 30
    now = [placing.would_go(placing.prompt(chat(system, "next"))) for system in systems]
    assert busy not in now
    assert [home for home in homes if home is not busy] == [
        target for target, home in zip(now, homes, strict=True) if home is not busy
    ]


def test_sessions_are_not_heaped_up_where_a_prompt_is() -> None:
    """They stay, and bring their next turns there."""
    placing = Placing()
    hot = chat(words("hot", 8000))
    for _ in range(80):
        placing.place(hot).sessions += 1
    counts = [placing.at(number).sessions for number in range(4)]
    assert max(counts) <= 2 * 80 / 4, counts


@pytest.mark.parametrize("prompt", [None, {"messages": [{"role": "user", "content": "hi"}]}])
def test_what_is_too_short_to_be_cached_goes_by_load(prompt: dict[str, Any] | None) -> None:
    placing = Placing()
    made = None if prompt is None else placing.prompt(said(**prompt))
    for number in range(20):
        candidates = placing.fleet.candidates(key=f"key {number}", prompt=made)
        assert by_cache(candidates) is least_loaded(candidates)


def test_who_is_full_or_owes_answers_is_passed_over() -> None:
    placing = Placing(max_turns=1)
    fields = chat(words("a", 8000))
    home = placing.place(fields)
    assert placing.would_go(placing.prompt(fields)) is home
    home.in_flight = 1
    assert placing.would_go(placing.prompt(fields)) is not home
    home.in_flight = 0
    for _ in range(20):
        home.worker.owed.chosen()
    home.worker.health.failed("500")
    assert placing.would_go(placing.prompt(fields)) is not home
