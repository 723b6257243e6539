"""The table and the plot of all runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from rich.table import Table

from examples.lora.train import Result

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#8250df")


def results_table(results: Sequence[Result]) -> Table:
    """Return a table with a row for each adapter of each run."""
    table = Table(title="Adapters trained at once against one server; bytes and seconds of a refresh: adapter, model")
    for name in (
        "seed",
        "adapter",
        "before",
        "after",
        "steps",
        "run",
        "bytes",
        "of the model",
        "refresh",
        "of the model",
    ):
        table.add_column(name, justify="left" if name == "adapter" else "right")
    for result in results:
        for each in result.adapters:
            table.add_row(
                str(result.seed),
                each.adapter,
                *(f"{each.judgements[place][1]:.3f}" for place in (0, -1)),
                str(len(each.rewards)),
                f"{result.seconds:.0f} s",
                f"{each.refresh_bytes / 1e6:.2f} MB",
                f"{result.full_bytes / 1e6:.1f} MB",
                f"{1000 * statistics.median(each.refresh_seconds[1:]):.0f} ms",
                f"{1000 * result.full_seconds:.0f} ms",
            )
    return table


def plot_rewards(results: Sequence[Result], path: Path) -> Path:
    """Write the plot; return its path."""
    figure, (held_out, training) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for result in results:
        for each, colour in zip(result.adapters, COLOURS):
            label = f"{each.adapter}, seed {result.seed}"
            held_out.plot(*zip(*each.judgements, strict=True), color=colour, marker="o", label=label)
            window = min(5, len(each.rewards))
            smooth = np.convolve(each.rewards, np.ones(window) / window, mode="valid")
            training.plot(np.arange(window, len(each.rewards) + 1), smooth, color=colour)
    held_out.set(xlabel="step", ylabel="reward", title="held-out problems, one sample each")
    training.set(xlabel="step", title="training samples, mean of 5 steps")
    for axis in (held_out, training):
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.2)
    held_out.legend(loc="best", fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path
