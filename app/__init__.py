"""The router: control plane (FastAPI), data plane (on sockets), and the affinity between sessions and targets."""

from __future__ import annotations

import functools


class Trouble(Exception):
    """Keeps a command from going on. Each of `lines` is told its user as one line; `code`: 2 where the user asked
    wrongly, else 1."""

    def __init__(self, *lines: str, code: int = 1) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.code = code


@functools.cache
def version() -> str:
    """Of the installed package; sources that are run without being installed do not know theirs."""
    import importlib.metadata  # costs more than all the rest of `coatcheck --help`

    try:
        return importlib.metadata.version("coatcheck")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
