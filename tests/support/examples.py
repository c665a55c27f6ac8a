"""How many examples generated tests take: few in each run, which draws new ones, and many with `make fuzz`."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("EXAMPLES_TIMES", "1"))


def examples(count: int) -> int:
    return count * TIMES
