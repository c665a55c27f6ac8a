"""What keeps a command of `coatcheck` from going on, in words for its user."""

from __future__ import annotations


class Trouble(Exception):
    """Each of `lines` is told as one line on stderr; `code`: the exit code, 2 where the user asked wrongly."""

    def __init__(self, *lines: str, code: int = 1) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.code = code
