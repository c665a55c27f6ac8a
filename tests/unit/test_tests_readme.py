"""tests/README.md names tests that there are."""

from __future__ import annotations

import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = (TESTS / "README.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:unit|stores|proxy|e2e|browser)/\w+\.py)::([\w:]+)`", README)
DEFINED = re.compile(r"^(?:class (\w+)|( {4})?(?:async )?def (test_\w+))", re.MULTILINE)


@functools.cache
def names_in(file: str) -> set[str]:
    """Of the tests in a file, as pytest names them without their parameters. Parsing all files would take seconds."""
    found: set[str] = set()
    scope = ""
    for name, inside, test in DEFINED.findall((TESTS / file).read_text(encoding="utf-8")):
        if name:
            scope = f"{name}::"
        else:
            found.add(scope + test if inside else test)
    return found


def test_a_test_that_is_named_is_there() -> None:
    assert not [(file, test) for file, test in sorted(set(NAMED)) if test not in names_in(file)]


def test_every_fault_has_a_test() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith("| Fault ")]
    assert len(faults) == len(NAMED) > 80
