"""Groups of horizontal bars as one SVG file."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

LEFT, BARS, RIGHT, TOP = 190, 260, 70, 34
BAR, GAP, BETWEEN = 13, 3, 14
COLOURS = ("#1f6feb", "#c2410c", "#15803d")


@dataclass(frozen=True)
class Bars:
    """One chart: of each group of `values` (label -> a value for each of `series`) the bars of each series.

    Bars of a series are measured against its largest value; `form` says how a value is written.
    """

    title: str
    series: list[str]
    values: dict[str, list[float]]
    form: str = ",.0f"

    @property
    def height(self) -> int:
        group = len(self.series) * (BAR + GAP) + BETWEEN
        return TOP + group * len(self.values) + 26


def write_svg(path: Path, charts: list[Bars]) -> None:
    """The charts side by side."""
    width, height = (LEFT + BARS + RIGHT) * len(charts), max(chart.height for chart in charts)
    parts = [_chart(chart, index * (LEFT + BARS + RIGHT)) for index, chart in enumerate(charts)]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = 'font-family="sans-serif" font-size="11" fill="#24292f"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n')


def _chart(chart: Bars, offset: int) -> str:
    parts = [_text((LEFT + BARS + RIGHT) / 2, 20, chart.title, "middle")]
    largest = [max(values[index] for values in chart.values.values()) for index in range(len(chart.series))]
    y = TOP
    for label, values in chart.values.items():
        parts.append(_text(LEFT - 8, y + len(values) * (BAR + GAP) / 2 + 4, label, "end"))
        for index, value in enumerate(values):
            width = BARS * value / largest[index]
            colour = COLOURS[index % len(COLOURS)]
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(_text(LEFT + width + 5, y + BAR - 3, f"{value:{chart.form}}", "start"))
            y += BAR + GAP
        y += BETWEEN
    x = LEFT
    for index, name in enumerate(chart.series):
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(_text(x + 14, y + 9, name, "start"))
        x += 24 + 7 * len(name)
    return f'<g transform="translate({offset} 0)">{"".join(parts)}</g>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
