"""A bar chart with error bars as an SVG image: twenty lines of shapes need no plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

BAR_WIDTH, VALUE_WIDTH, ROW_HEIGHT, TOP = 440, 110, 30, 56
LETTER_WIDTH = 7
"""About what a letter of a label takes."""


class Bar(NamedTuple):
    """One bar: its label, its length, and half the length of its error bar."""

    label: str
    value: float
    error: float


def figure(title: str, axis: str, bars: Sequence[Bar]) -> str:
    """The chart as an SVG document; all bars begin at 0."""
    longest = max((bar.value + bar.error for bar in bars), default=0.0) or 1.0
    label_width = max(150, 16 + LETTER_WIDTH * max((len(bar.label) for bar in bars), default=0))
    width, height = label_width + BAR_WIDTH + VALUE_WIDTH, TOP + ROW_HEIGHT * len(bars) + 16
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="42" font-size="12" fill="#555">{escape(axis)}</text>',
    ]
    for number, bar in enumerate(bars):
        y = TOP + ROW_HEIGHT * number
        length = BAR_WIDTH * bar.value / longest
        low, high = (label_width + BAR_WIDTH * (bar.value + side * bar.error) / longest for side in (-1, 1))
        shapes += [
            f'<text x="{label_width - 8}" y="{y + 15}" font-size="12" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{label_width}" y="{y + 2}" width="{length:.1f}" height="18" fill="#4c78a8"/>',
            f'<line x1="{low:.1f}" y1="{y + 11}" x2="{high:.1f}" y2="{y + 11}" stroke="black" stroke-width="1.5"/>',
            f'<text x="{high + 6:.1f}" y="{y + 15}" font-size="12">{bar.value:,.0f}</text>',
        ]
    return "\n".join([*shapes, "</svg>", ""])


def write_figure(path: Path, title: str, axis: str, bars: Sequence[Bar]) -> None:
    """Write the chart to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(figure(title, axis, bars))
