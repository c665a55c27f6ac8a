"""Other people's client libraries, imported when a test first uses one.

Importing them takes seconds of CPU, and every process of a parallel run imports every test's module, while only one or
two of them come to run these tests.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Late:
    """Stands for a module. pytest looks at whatever a test's module has, which must not load it: hence no names that
    begin with an underscore."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


if TYPE_CHECKING:
    import anthropic as anthropic
    import openai as openai
else:
    anthropic, openai = _Late("anthropic"), _Late("openai")
