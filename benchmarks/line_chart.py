"""Line charts with logarithmic axes as one SVG file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 420, 320  # of one chart
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 84
COLOURS = ("#1f6feb", "#c2410c", "#15803d", "#7e22ce")


@dataclass(frozen=True)
class Line:
    """Points (x, y), all positive.  A dashed line has the colour of the line before it."""

    name: str
    points: list[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    lines: list[Line]


def write_svg(path: Path, charts: list[Chart]) -> None:
    """Write the charts side by side into one SVG file."""
    parts = [_chart(chart, index * WIDTH) for index, chart in enumerate(charts)]
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(charts)} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#24292f"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n')


def _chart(chart: Chart, offset: int) -> str:
    xs = sorted({x for line in chart.lines for x, _ in line.points})
    ys = [y for line in chart.lines for _, y in line.points]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    x_low, x_high = xs[0], xs[-1]

    def x_of(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _position(x, x_low, x_high)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _position(y, low, high)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [_text(WIDTH / 2, 20, chart.title, "middle"), _text(WIDTH / 2, bottom + 32, chart.x_label, "middle")]
    decade = low
    while decade <= high:
        y = y_of(decade)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#d0d7de"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{decade:,.0f}", "end"))
        decade *= 10
    for x in xs:
        parts.append(f'<path d="M{x_of(x):.1f} {TOP}V{bottom}" stroke="#eaeef2"/>')
        parts.append(_text(x_of(x), bottom + 15, f"{x:g}", "middle"))
    colour = -1
    for index, line in enumerate(chart.lines):
        colour += not line.dashed
        look = f'stroke="{COLOURS[colour % len(COLOURS)]}" fill="none" stroke-width="1.8"'
        look += ' stroke-dasharray="5 4"' if line.dashed else ""
        path = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<path d="M{path}" {look}/>')
        key_x, key_y = LEFT + 170 * (index % 2), bottom + 50 + 18 * (index // 2)
        parts.append(f'<path d="M{key_x} {key_y}h28" {look}/>' + _text(key_x + 34, key_y + 4, line.name, "start"))
    return f'<g transform="translate({offset} 0)">{"".join(parts)}</g>'


def _position(value: float, low: float, high: float) -> float:
    """Return where `value` lies between the two, 0 to 1, on a logarithmic scale."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
