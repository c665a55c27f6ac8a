"""A table as one test: what a row costs in pytest (a test made in each process, started, ended, reported) is many times
what most rows of a pure function cost. All rows run; those that fail are told each by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def rows(names: str | Sequence[str], table: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """As `pytest.mark.parametrize`, for checks that want nothing but the row and leave nothing behind."""
    arguments = [names] if isinstance(names, str) else list(names)
    cases = [(row,) if isinstance(names, str) else tuple(row) for row in table]
    assert cases, "a table without rows"

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            failed: list[BaseException] = []
            for case in cases:
                row = dict(zip(arguments, case, strict=True))
                try:
                    check(**row)
                # A failed assertion or whatever the code raises; and `pytest.raises`, which fails by no Exception.
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"row: {row!r}")
                    failed.append(error)
            print(f"{len(cases)} rows")
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} rows", failed)

        functools.update_wrapper(test, check)
        del test.__wrapped__  # type: ignore[attr-defined]  # else its arguments would be taken for fixtures
        return test

    return decorate
