"""A table that is one test says of each row that fails which it is."""

from __future__ import annotations

import pytest

from tests.support.rows import rows


def test_all_rows_run_and_each_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    @rows(("text", "length"), [("a", 1), ("bb", 1), ("ccc", 3), ("", "none")])
    def check(text: str, length: int) -> None:
        seen.append(text)
        assert text, "empty"
        assert len(text) == length

    with pytest.raises(BaseExceptionGroup, match="2 of 4 rows") as failed:
        check()
    assert seen == ["a", "bb", "ccc", ""]
    assert capsys.readouterr().out == "4 rows\n"
    notes = [note for error in failed.value.exceptions for note in error.__notes__]
    assert notes == ["row: {'text': 'bb', 'length': 1}", "row: {'text': '', 'length': 'none'}"]


def test_an_error_that_does_not_come_is_a_failure() -> None:
    @rows("number", [0, 1])
    def check(number: int) -> None:
        with pytest.raises(ZeroDivisionError):
            assert 1 / number

    with pytest.raises(BaseExceptionGroup, match="1 of 2 rows"):
        check()


def test_a_table_has_rows() -> None:
    with pytest.raises(AssertionError):
        rows("number", [])
