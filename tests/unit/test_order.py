"""The order of a parallel run: no test is lost, and what takes long comes first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.order import TOGETHER, dealt

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("parts", [2, 5, 8])
def test_every_test_has_its_place_and_each_part_begins_with_what_takes_long(parts: int) -> None:
    long = [module for group in TOGETHER for module in group]
    modules = [f"tests/{module}" for module in long for _ in range(10)]
    modules += [f"tests/unit/test_{number}.py" for number in range(3001)]
    random.Random(parts).shuffle(modules)
    order = dealt(modules, parts)
    assert sorted(order) == list(range(len(modules)))

    rest = list(order)
    cut = [[rest.pop(0) for _ in range(len(rest) // (parts - number))] for number in range(parts)]  # as xdist does
    where = {modules[number].removeprefix("tests/"): number_of for number_of, part in enumerate(cut) for number in part}
    assert all(len({where[module] for module in group}) == 1 for group in TOGETHER)
    for part in cut:
        first = [modules[number].removeprefix("tests/") in long for number in part]
        assert first[0]
        assert first == sorted(first, reverse=True)


def test_few_tests_have_an_order_as_well() -> None:
    modules = ["tests/e2e/test_up.py"] * 3 + ["tests/unit/test_a.py"]
    assert sorted(dealt(modules, 8)) == [0, 1, 2, 3]
    assert dealt([], 5) == []


def test_what_is_to_come_first_is_there() -> None:
    assert [module for group in TOGETHER for module in group if not (TESTS / module).is_file()] == []
