"""Load of every rank in every layer as one SVG picture."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, LEFT, TOP, BOTTOM, GAP = 360, 44, 40, 72, 34  # of one panel
ROW = (4, 14)  # least and most height of a layer
PANEL_HEIGHT = 320
MAX_LABELS = 9  # of an axis
SPAN = 0.5  # deviation from the mean at which a colour is full
COLD, MEAN, HOT = (33, 102, 172), (247, 247, 247), (178, 24, 43)


@dataclass(frozen=True)
class Panel:
    """One picture.  `loads_LG` [L, G]: the load of each layer and rank, where 1 is the mean of the layer."""

    title: str
    loads_LG: np.ndarray


def heatmap_svg(panels: list[Panel]) -> str:
    """Return an SVG picture of the panels side by side, with a row for each layer and a column for each rank."""
    layers = max(len(panel.loads_LG) for panel in panels)
    row = min(max(PANEL_HEIGHT / layers, ROW[0]), ROW[1])
    width, height = len(panels) * (WIDTH + GAP) + LEFT, TOP + row * layers + BOTTOM
    parts = [_panel(panel, LEFT + index * (WIDTH + GAP), row) for index, panel in enumerate(panels)]
    legend = _legend(LEFT, TOP + row * layers + 44)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="sans-serif" '
        f'font-size="11" fill="#24292f"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}{legend}</svg>\n'
    )


def _panel(panel: Panel, left: float, row: float) -> str:
    ranks = panel.loads_LG.shape[1]
    column = WIDTH / ranks
    parts = [f'<text x="{left}" y="20">{escape(panel.title)}</text>', f'<text x="{left}" y="34">layer, by rank</text>']
    bottom = TOP + row * len(panel.loads_LG) + 14
    for rank in _labelled(ranks):
        parts.append(
            f'<text x="{left + (rank + 0.5) * column:.1f}" y="{bottom:.1f}" text-anchor="middle">{rank}</text>'
        )
    for layer in _labelled(len(panel.loads_LG)):
        y = TOP + (layer + 0.5) * row + 4
        parts.append(f'<text x="{left - 6}" y="{y:.1f}" text-anchor="end">{layer}</text>')
    for layer, loads in enumerate(panel.loads_LG):
        for rank, load in enumerate(loads):
            place = f'x="{left + rank * column:.1f}" y="{TOP + layer * row:.1f}"'
            parts.append(f'<rect {place} width="{column:.2f}" height="{row:.2f}" fill="{_colour(float(load))}"/>')
    return "".join(parts)


def _labelled(count: int) -> range:
    """Return which of `count` rows or columns have their number at the axis."""
    return range(0, count, -(-count // MAX_LABELS))


def _legend(left: float, top: float) -> str:
    parts = []
    for index, load in enumerate((1 - SPAN, 1 - SPAN / 2, 1.0, 1 + SPAN / 2, 1 + SPAN)):
        x = left + index * 64
        parts.append(f'<rect x="{x}" y="{top - 10:.1f}" width="12" height="12" fill="{_colour(load)}"/>')
        parts.append(f'<text x="{x + 16}" y="{top:.1f}">{load:g}x</text>')
    return "".join(parts) + f'<text x="{left}" y="{top + 18:.1f}">of the mean load of a rank</text>'


def _colour(load: float) -> str:
    """Return the colour of a load: white at the mean, full colour at `SPAN` from it and beyond."""
    part = min(1.0, abs(load - 1.0) / SPAN)
    end = HOT if load > 1.0 else COLD
    red, green, blue = (round(middle + (far - middle) * part) for middle, far in zip(MEAN, end, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
