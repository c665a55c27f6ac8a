"""A chart of horizontal bars as SVG, with nothing but the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABEL, VALUE, ROW, PAD = 760, 170, 70, 22, 16
LETTER = 7.4
"""Of a label, in bold, at the most."""
OURS, THEIRS = "#2f6f4f", "#9aa5b1"
FONT = "font-family='system-ui, sans-serif' font-size='13'"


@dataclass(frozen=True)
class Panel:
    title: str
    bars: Sequence[tuple[str, float]]
    """Shortest first is for the caller to arrange."""


def svg(panels: Sequence[Panel], ours: str) -> str:
    """Bars whose label begins with `ours` stand out. One that is four times the median is cut and says so."""
    parts: list[str] = []
    top = PAD
    left = max(LABEL, *(round(LETTER * len(label)) + PAD for panel in panels for label, _ in panel.bars), 0)
    for panel in panels:
        values = sorted(value for _, value in panel.bars)
        longest = min(values[-1], 4 * values[len(values) // 2]) if values else 0.0
        longest = longest or 1.0
        room = WIDTH - left - VALUE - PAD
        parts.append(f"<text x='{PAD}' y='{top + 14}' font-weight='600'>{escape(panel.title)}</text>")
        top += ROW + 6
        for label, value in panel.bars:
            mine = label.startswith(ours)
            width = max(1.0, room * min(value, longest) / longest)
            cut = " →" if value > longest else ""
            weight = " font-weight='600'" if mine else ""
            parts += [
                f"<text x='{left - 8}' y='{top + 14}' text-anchor='end'{weight}>{escape(label)}</text>",
                f"<rect x='{left}' y='{top + 3}' width='{width:.1f}' height='{ROW - 7}' rx='2' "
                f"fill='{OURS if mine else THEIRS}'/>",
                f"<text x='{left + width + 6:.1f}' y='{top + 14}'>{_number(value)}{cut}</text>",
            ]
            top += ROW
        top += PAD
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{top}' viewBox='0 0 {WIDTH} {top}' {FONT}>\n"
        f"<rect width='{WIDTH}' height='{top}' fill='#ffffff'/>\n<g fill='#1f2933'>\n"
        + "\n".join(parts)
        + "\n</g></svg>\n"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
