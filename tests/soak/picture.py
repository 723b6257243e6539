"""The picture of a soak: memory, descriptors, step time and refresh times over time, a column for each layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.abuse.usage import MB
from tests.soak.play import Played

FAMILIES = {  # groups of transports: many points need few colours
    "broadcast": ("broadcast", "our sender", "trainer killed"),
    "in the body or shared memory": ("pickle", "safetensors", "parameter server"),
    "folders": ("disk", "xor", "overwrite", "ulp-gap"),
}
COLOURS = ("#0b6e99", "#c0562f", "#4b7f2d")
GREY = "#888888"


def draw(soaked: Sequence[Played], path: Path) -> None:
    """Write the picture as a PNG file."""
    figure = Figure(figsize=(6.5 * len(soaked), 11), layout="constrained", dpi=110)
    grid = figure.subplots(4, len(soaked), sharex="col", squeeze=False)
    for column, played in zip(grid.T, soaked):
        column[0].set_title(played.layout.name)
        _usage(column[0], played, [usage.rss / MB for usage in played.curves.usage], MB, "memory of all processes, MB")
        _usage(column[1], played, [usage.descriptors for usage in played.curves.usage], 1, "descriptors")
        _steps(column[2], played)
        _refreshes(column[3], played)
        column[3].set_xlabel("minutes")
        for axes in column:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
    figure.savefig(path)


def _usage(axes: Axes, played: Played, values: Sequence[float], unit: int, name: str) -> None:
    axes.plot([at / 60 for at in played.curves.at], values, color=COLOURS[0], linewidth=0.7, label="at work")
    rest = [usage.rss if unit == MB else usage.descriptors for _, usage in played.curves.rest]
    times = [at / 60 for at, _ in played.curves.rest]
    axes.plot(times, [each / unit for each in rest], "o", color=COLOURS[1], markersize=3.5, label="at rest")
    axes.set_ylim(0, 1.1 * max(values, default=1))
    axes.set_ylabel(name)
    axes.legend(loc="lower right", frameon=False)


def _steps(axes: Axes, played: Played) -> None:
    known = [(at / 60, step) for at, step in zip(played.curves.at, played.curves.step_ms) if step is not None]
    axes.plot([at for at, _ in known], [step for _, step in known], ".", color=COLOURS[0], markersize=2.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("a step, mean of a second, ms")


def _refreshes(axes: Axes, played: Played) -> None:
    for colour, (family, names) in zip(COLOURS, FAMILIES.items()):
        mine = [each for each in played.refreshes if each.transport.startswith(names) and each.came]
        _points(axes, played, mine, colour, family, "o")
    _points(axes, played, [each for each in played.refreshes if not each.came], GREY, "refused", "x")
    axes.set_yscale("log")
    axes.set_ylabel("a refresh, s")
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _points(axes: Axes, played: Played, refreshes: Sequence, colour: str, name: str, marker: str) -> None:
    times = [(each.when - played.started) / 60 for each in refreshes]
    axes.plot(times, [each.seconds for each in refreshes], marker, color=colour, markersize=3, label=name)
