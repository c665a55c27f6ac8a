"""What the benchmarks print: Markdown tables, and the words that are common to them."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [
            f"### {self.title}",
            "",
            f"| {' | '.join(self.columns)} |",
            "|" + "---|" * len(self.columns),
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]
        return "\n".join([*lines, "", self.note, ""] if self.note else [*lines, ""])


def met(fact: bool) -> str:
    return "yes" if fact else "**no**"


def p99(ordered: Sequence[float]) -> float:
    return quantiles(ordered, n=100, method="inclusive")[98] if len(ordered) > 1 else math.nan


def machine() -> str:
    """In general words."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}), Python {platform.python_version()}; "
        f"load average at the start {load:.1f}"
    )
