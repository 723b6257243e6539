"""Horizontal bars as one SVG file: a panel with an axis of its own for each series."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

LEFT, BARS, RIGHT, TOP, BOTTOM = 150, 150, 62, 50, 30
BAR, GAP = 14, 8
COLOURS = ("#1f6feb", "#c2410c", "#15803d")


@dataclass(frozen=True)
class Bars:
    """One chart: `values` (label -> a value for each of `series`) as a row of bars for each label.

    A series is a panel: its bars share one scale, which its axis shows.  `form` writes a value.
    """

    title: str
    series: list[str]
    values: dict[str, list[float]]
    form: str = ",.0f"

    @property
    def width(self) -> int:
        return LEFT + (BARS + RIGHT) * len(self.series)

    @property
    def height(self) -> int:
        return TOP + (BAR + GAP) * len(self.values) + BOTTOM


def write_svg(path: Path, charts: list[Bars]) -> None:
    """Write the charts side by side into one SVG file."""
    width, height = sum(chart.width for chart in charts), max(chart.height for chart in charts)
    offsets = [sum(chart.width for chart in charts[:index]) for index in range(len(charts))]
    parts = [_chart(chart, offset) for chart, offset in zip(charts, offsets, strict=True)]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = 'font-family="sans-serif" font-size="11" fill="#24292f"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n')


def _chart(chart: Bars, offset: int) -> str:
    parts = [_text(chart.width / 2, 18, chart.title, "middle")]
    largest = [max(values[index] for values in chart.values.values()) for index in range(len(chart.series))]
    lefts = [LEFT + (BARS + RIGHT) * index for index in range(len(chart.series))]
    bottom = TOP + (BAR + GAP) * len(chart.values)
    for x, name, most in zip(lefts, chart.series, largest, strict=True):
        parts += [_text(x, TOP - 10, name, "start"), *_axis(x, bottom, most, chart.form)]
    for row, (label, values) in enumerate(chart.values.items()):
        y = TOP + (BAR + GAP) * row
        parts.append(_text(LEFT - 8, y + BAR - 3, label, "end"))
        for index, (x, value) in enumerate(zip(lefts, values, strict=True)):
            width = BARS * value / largest[index]
            colour = COLOURS[index % len(COLOURS)]
            parts.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(_text(x + width + 5, y + BAR - 3, f"{value:{chart.form}}", "start"))
    return f'<g transform="translate({offset} 0)">{"".join(parts)}</g>'


def _axis(x: float, bottom: float, most: float, form: str) -> list[str]:
    """Return the elements of an axis from 0 to `most`, with a line and a number at each tick."""
    parts = [f'<path d="M{x} {bottom}h{BARS}" stroke="#8c959f"/>']
    for value in _ticks(most):
        at = x + BARS * value / most
        parts.append(f'<path d="M{at:.1f} {TOP - 4}V{bottom + 4}" stroke="#d0d7de"/>')
        parts.append(_text(at, bottom + 17, f"{value:{form}}", "middle"))
    return parts


def _ticks(most: float) -> list[float]:
    """Return two or three round numbers from 0 to `most`, for the ticks of an axis."""
    size = 10 ** math.floor(math.log10(most / 2))
    step = next(n * size for n in (1, 2, 2.5, 5, 10) if most / (n * size) < 3)
    return [step * index for index in range(int(most / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
