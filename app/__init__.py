"""The router: control plane (FastAPI), data plane (on sockets), and the affinity between sessions and targets."""

from __future__ import annotations


def version() -> str:
    """Of the installed package; sources that are run without being installed do not know theirs."""
    import importlib.metadata  # costs more than all the rest of `coatcheck --help`

    try:
        return importlib.metadata.version("coatcheck")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
