"""KV events as they are believed: never more than is true."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from app.fleet.placement.events import Holdings, read
from app.fleet.placement.index import Index, Shelf, links, root, token_bytes
from tests.support.kv_events import Run, recorded
from tests.support.rows import rows

SIZE = 4


class Engine:
    """One rank: its own names for blocks, and what it tells."""

    def __init__(self, index: Index, *, seed: int = 1, size: int = SIZE, names: str = "int") -> None:
        self.index, self.size, self.holdings = index, size, Holdings(index)
        self._seed, self._names = seed, names

    def name(self, tokens: Sequence[int], keys: object = None) -> int | bytes:
        number = hash((self._seed, self.size, tuple(tokens), repr(keys))) & (2**64 - 1)
        return number if self._names == "int" else number.to_bytes(8, "little") * 4

    def stored(self, tokens: Sequence[int], begin: int = 0, **more: Any) -> dict[str, Any]:
        """That all blocks of these tokens from block `begin` on are there."""
        ends = range((begin + 1) * self.size, len(tokens) + 1, self.size)
        keys = more.get("extra_keys")
        return {
            "type": "BlockStored",
            "block_hashes": [self.name(tokens[:end], keys) for end in ends],
            "parent_block_hash": self.name(tokens[: begin * self.size], keys) if begin else None,
            "token_ids": list(tokens[begin * self.size : len(tokens) // self.size * self.size]),
            "block_size": self.size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(ends),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        } | more

    def removed(self, *prompts: Sequence[int], **more: Any) -> dict[str, Any]:
        """That the last block of each of these is no more."""
        return {"type": "BlockRemoved", "block_hashes": [self.name(each) for each in prompts], "medium": "GPU"} | more

    def tell(self, *events: Any) -> None:
        """As they come over the wire."""
        dead: list[Shelf] = []
        for _ in self.holdings.apply(read(msgspec.msgpack.encode([1.0, events, 0])), dead):
            pass
        self.sweep(dead)

    def sweep(self, dead: list[Shelf]) -> None:
        for shelf in dead:
            for _ in self.index.sweep(shelf):
                pass

    def overlap(self, tokens: Sequence[int], adapter: str = "", salt: str = "") -> int:
        """Tokens of a prompt that are taken to be there: of what all groups have."""
        held = []
        for shelf in self.holdings.shelves.values():
            size = shelf.block_size
            chain = links(root(size, adapter, salt), token_bytes(tokens), size)
            held.append(self.index.find(chain).get(shelf, 0) * size)
        return min(held, default=0)


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def engine(index: Index) -> Engine:
    return Engine(index)


ONE = list(range(100, 120))


def test_what_is_stored_is_there_and_what_is_removed_is_not(engine: Engine) -> None:
    engine.tell(engine.stored(ONE))
    assert engine.overlap(ONE) == 20
    assert engine.overlap([*ONE, 1, 2, 3]) == 20
    assert engine.overlap(ONE[:11]) == 8
    assert engine.overlap([*ONE[:9], 0, *ONE[10:]]) == 8
    assert engine.overlap([0, *ONE]) == 0
    engine.tell(engine.removed(ONE[:16]))
    assert engine.overlap(ONE) == 12  # what follows on it is there, and of no use
    engine.tell(engine.stored(ONE[:16], 3))
    assert engine.overlap(ONE) == 20
    engine.tell(engine.stored(ONE), engine.stored([]), engine.removed())  # it may be told again
    engine.tell({"type": "AllBlocksCleared"})
    assert engine.overlap(ONE) == 0
    assert len(engine.index) == 0


def test_blocks_follow_on_others_by_the_workers_own_names(engine: Engine) -> None:
    engine.tell(engine.stored(ONE[:8]), engine.stored(ONE, 2), engine.stored([*ONE[:8], *range(8)], 2))
    assert engine.overlap(ONE) == 20
    assert engine.overlap([*ONE[:8], *range(8)]) == 16


@pytest.mark.parametrize("names", ["int", "bytes"])
def test_workers_with_other_seeds_share_what_is_equal(index: Index, names: str) -> None:
    one, other = Engine(index, seed=1), Engine(index, seed=2, names=names)
    one.tell(one.stored(ONE))
    other.tell(other.stored(ONE[:12]))
    assert len(index) == 5
    assert (one.overlap(ONE), other.overlap(ONE)) == (20, 12)
    one.tell(one.removed(ONE[:4]))
    assert (one.overlap(ONE), other.overlap(ONE)) == (0, 12)


def test_what_follows_on_something_unknown_is_not_known(engine: Engine) -> None:
    engine.tell(engine.stored(ONE, 2))
    assert engine.overlap(ONE) == engine.overlap(ONE[8:]) == 0
    assert engine.holdings.opaque == 3
    engine.tell(engine.removed(ONE[:12]))  # of what is not known


def test_block_sizes_differ_between_workers(index: Index) -> None:
    one, other = Engine(index, size=4), Engine(index, size=5)
    one.tell(one.stored(ONE))
    other.tell(other.stored(ONE[:10]))
    assert (one.overlap(ONE), other.overlap(ONE)) == (20, 10)


def test_a_block_size_that_changes_is_not_understood(engine: Engine) -> None:
    engine.tell(engine.stored(ONE))
    with pytest.raises(ValueError, match="of 5 tokens among those of 4"):
        engine.tell(Engine(engine.index, size=5).stored(ONE))


def test_what_counts_is_in_all_groups_of_the_cache(engine: Engine) -> None:
    engine.tell(engine.stored(ONE), engine.stored(ONE, group_idx=1))
    assert engine.overlap(ONE) == 20
    engine.tell(engine.removed(ONE[:12], group_idx=1))
    assert engine.overlap(ONE) == 8
    engine.tell(engine.removed(ONE[:4], ONE[:8], group_idx=1))
    assert engine.overlap(ONE) == 0


def test_adapters_and_salts_share_nothing(engine: Engine) -> None:
    engine.tell(
        engine.stored(ONE[:8], lora_id=1, lora_name="poet", extra_keys=[["poet"], ["poet"]]),
        engine.stored(ONE[:12], extra_keys=[["mine"], None, None]),
    )
    assert engine.overlap(ONE) == 0
    assert engine.overlap(ONE, adapter="poet") == 8
    assert engine.overlap(ONE, salt="mine") == 12
    assert engine.overlap(ONE, adapter="poet", salt="mine") == engine.overlap(ONE, salt="others") == 0
    engine.tell(engine.stored(ONE[:4], lora_id=1, lora_name="poet", extra_keys=[["poet", "mine"]]))
    assert engine.overlap(ONE, adapter="poet", salt="mine") == 4


@pytest.mark.parametrize(
    ("what", "known"),
    [
        ({"extra_keys": [None, None, [["picture-hash", 3]], None, None]}, 8),
        ({"extra_keys": [["picture-hash", 0]] + [None] * 4}, 0),
        ({"extra_keys": [None, ["salt"], None, None, None]}, 4),
        ({"extra_keys": [None, {"a": 1}, None, None, None]}, 4),
        ({"extra_keys": None}, 0),
        ({"extra_keys": [None]}, 0),
        ({"lora_id": 3}, 0),
        ({"lora_name": "poet"}, 0),
        ({"lora_id": 3, "lora_name": "poet", "extra_keys": [None] * 5}, 0),
        ({"medium": "CPU"}, 0),
    ],
)
def test_what_does_not_tell_all_is_passed_over_with_what_follows(
    engine: Engine, what: dict[str, Any], known: int
) -> None:
    engine.tell(engine.stored(ONE, **what))
    assert engine.overlap(ONE) == known
    assert engine.overlap(ONE, adapter="poet") == 0
    more = [*ONE, 1, 2, 3, 4]
    engine.tell(engine.stored(more, 5))
    assert engine.overlap(more) == known


def test_arrays_as_engines_before_024_send_them_do_not_tell_all(engine: Engine) -> None:
    event = engine.stored(ONE)
    engine.tell(["BlockStored", *list(event.values())[1:7]])
    assert engine.overlap(ONE) == 0
    engine.tell(["BlockStored", *list(event.values())[1:9]])
    assert engine.overlap(ONE) == 20
    engine.tell(["BlockRemoved", [engine.name(ONE[:8])], "GPU"])
    assert engine.overlap(ONE) == 4
    engine.tell(["AllBlocksCleared"])
    assert engine.overlap(ONE) == 0


def test_a_name_that_is_used_for_something_else_does_not_mean_both(engine: Engine) -> None:
    other = [7, *ONE[1:]]
    engine.tell(engine.stored(ONE))
    engine.tell(engine.stored(other) | {"block_hashes": engine.stored(ONE)["block_hashes"]})
    assert engine.overlap(other) == 20
    assert engine.overlap(ONE) == 0
    engine.tell(engine.stored(ONE[:4]) | {"extra_keys": [["picture", 1]]})
    assert engine.overlap(ONE) == engine.overlap(other) == 0


def test_a_removal_elsewhere_leaves_what_is_computed_from(engine: Engine) -> None:
    engine.tell(engine.stored(ONE))
    engine.tell(engine.removed(ONE[:4], medium="CPU"), engine.removed(ONE[:4], group_idx=1))
    assert engine.overlap(ONE) == 20


@rows(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(3),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [], "zero"]),
        msgspec.msgpack.encode([1.0, ["BlockStored"]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlocksMoved"}]]),
        msgspec.msgpack.encode([1.0, [[]]]),
        *(
            msgspec.msgpack.encode([1.0, [Engine(Index()).stored(ONE) | wrong]])
            for wrong in (
                {"block_size": 0},
                {"block_size": "4"},
                {"token_ids": ONE[:-1]},
                {"token_ids": [-1] * 20},
                {"token_ids": ["a"] * 20},
                {"block_hashes": [None] * 5},
                {"block_hashes": None},
                {"parent_block_hash": "x"},
                {"group_idx": -1},
            )
        ),
    ],
)
def test_what_is_not_understood_is_said(payload: bytes) -> None:
    holdings = Holdings(Index())
    with pytest.raises(ValueError):
        list(holdings.apply(read(payload), []))


def test_by_chance_it_is_what_an_obvious_reader_knows(index: Index) -> None:
    """Two engines with groups of prompts that begin alike, blocks that come and go in any order."""
    rng = random.Random(5)
    engines = [Engine(index, seed=seed) for seed in (1, 2)]
    truths: list[set[tuple[int, ...]]] = [set(), set()]
    prompts = [[rng.randrange(2) for _ in range(6 * SIZE)] for _ in range(12)]
    for _ in range(1500):
        number = rng.randrange(2)
        engine, truth, prompt = engines[number], truths[number], rng.choice(prompts)
        blocks = [tuple(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]
        begin = next((at for at, block in enumerate(blocks) if block not in truth), len(blocks))
        what = rng.random()
        if what < 0.5 and begin < len(blocks):
            upto = rng.randint(begin + 1, len(blocks))
            engine.tell(engine.stored(prompt[: upto * SIZE], begin))
            truth.update(blocks[begin:upto])
        elif what < 0.98 and truth:
            gone = rng.choice(sorted(truth))
            engine.tell(engine.removed(gone))
            truth.discard(gone)
        elif what > 0.995:
            engine.sweep(engine.holdings.forget())
            truth.clear()
        asked = rng.choice(prompts)
        for each, known in zip(engines, truths, strict=True):
            blocks = [tuple(asked[:end]) for end in range(SIZE, len(asked) + 1, SIZE)]
            there = next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
            assert each.overlap(asked) == there * SIZE
    assert len(index) == len(truths[0] | truths[1])
    for each in engines:
        each.sweep(each.holdings.forget())
    assert len(index) == 0


@pytest.mark.parametrize("blocks", [5000, 7500, 11_000])
def test_a_block_takes_less_than_120_bytes(blocks: int) -> None:
    """At the one worker that has it, however full the tables happen to be."""
    rng = random.Random(1)
    index, size = Index(), 16
    shelves = [Shelf(size) for _ in range(2)]
    chains = [
        links(root(size, "", ""), token_bytes(rng.randrange(100_000) for _ in range(size * 500)), size)
        for _ in range(blocks // 500)
    ]
    names = [rng.randbytes(8) for _ in range(blocks)]
    gc.collect()
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        for number, chain in enumerate(chains):
            for at, block in enumerate(chain):
                index.put(shelves[number % 2], names[number * 500 + at], [block])
        taken = tracemalloc.get_traced_memory()[0] - begun
    finally:
        tracemalloc.stop()
    # The hashes themselves were there before.
    assert taken / len(index) + 32 < 120


def test_a_name_is_not_found_across_two_others(index: Index) -> None:
    shelf, name, across = Shelf(SIZE), bytes([0] * 7 + [1]), bytes([0, 0, 0, 1, 7, 0, 0, 0])
    seven = int.from_bytes(bytes([7] + [0] * 7), sys.byteorder)
    index.put(shelf, name, [seven])
    assert name + seven.to_bytes(8, sys.byteorder) in shelf.buckets[0]
    assert across in shelf.buckets[0]
    assert shelf.find(across) is None
    index.take(shelf, across)
    assert shelf.find(name) == seven
    index.put(shelf, across, [5])
    assert (shelf.find(name), shelf.find(across), len(shelf), len(index)) == (seven, 5, 2, 2)


def test_a_shelf_is_swept_in_pieces(index: Index) -> None:
    engine = Engine(index)
    engine.tell(engine.stored(list(range(4000))))
    assert len(index) == 1000
    (shelf,) = engine.holdings.forget()
    pieces = index.sweep(shelf)
    next(pieces)
    assert 700 < len(index) < 1000
    assert not index.find(links(root(SIZE, "", ""), token_bytes(range(4000)), SIZE))
    assert sum(1 for _ in pieces) == 2
    assert len(index) == 0


def test_the_garbage_collector_does_not_look_through_the_index(index: Index) -> None:
    """Of half a million blocks that would stop the loop for 80 ms."""
    engines = [Engine(index) for _ in range(3)]
    for each in engines:
        each.tell(each.stored(ONE))
    assert len(index) == 5
    assert not any(map(gc.is_tracked, index._each))


def test_a_bit_is_another_shelfs_only_when_no_block_has_it(index: Index) -> None:
    engine, other = Engine(index), Engine(index)
    other.tell(other.stored(ONE))
    for _ in range(5):
        engine.tell(engine.stored(ONE))
        dead = engine.holdings.forget()
        assert engine.overlap(ONE) == 0
        engine.tell(engine.stored(ONE[:SIZE]))  # before it is swept
        assert (engine.overlap(ONE), other.overlap(ONE)) == (SIZE, len(ONE))
        dead += engine.holdings.forget()
        engine.sweep(dead)
        assert (engine.overlap(ONE), other.overlap(ONE)) == (0, len(ONE))
    assert len(index._shelves) <= 3


def test_a_long_batch_is_applied_in_pieces(engine: Engine) -> None:
    """Of 64 blocks, be they in one event or each in one of its own."""
    stored = engine.stored(list(range(4000)))
    batch = read(msgspec.msgpack.encode([1.0, [stored], 0]))
    assert sum(1 for _ in engine.holdings.apply(batch, [])) == 15
    gone = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in stored["block_hashes"]]
    pieces = engine.holdings.apply(read(msgspec.msgpack.encode([1.0, gone, 0])), [])
    left = [len(engine.index) for _ in pieces]
    assert left == list(range(1000 - 64, 0, -64))
    assert len(engine.index) == 0


@pytest.mark.parametrize("run", recorded().runs, ids=lambda run: run.name)
def test_of_a_real_vllm_it_is_known_what_it_reports_as_cached(index: Index, run: Run) -> None:
    """What it said was recorded, beside the cached tokens of each of its answers."""
    engines: dict[int, Engine] = {}
    for step in run.steps:
        engine = engines.setdefault(step.rank, Engine(index))
        if step.prompt:
            whole = (len(step.prompt) - 1) // run.block_size * run.block_size  # the last token is always computed
            assert min(whole, engine.overlap(step.prompt, step.adapter, step.salt)) == step.cached, step.what
        for _, _, payload in step.frames:
            dead: list[Shelf] = []
            for _ in engine.holdings.apply(read(payload), dead):
                pass
            engine.sweep(dead)
    assert any(step.cached for step in run.steps)
    assert not any(engine.holdings.opaque for engine in engines.values())
