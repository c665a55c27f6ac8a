"""tests/README.md names tests that there are."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
README = (TESTS / "README.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:unit|stores|proxy|e2e)/\w+\.py)::([\w:]+)`", README)


@functools.cache
def names_in(file: str) -> set[str]:
    """Of the tests in a file, as pytest names them without their parameters."""
    found: set[str] = set()
    for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        scope = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {scope + each.name for each in members if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)))
def test_a_test_that_is_named_is_there(file: str, test: str) -> None:
    assert test in names_in(file)


def test_every_fault_has_a_test() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith("| Fault ")]
    assert len(faults) == len(NAMED) > 80
