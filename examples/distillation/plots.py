"""The table and the plot of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from rich.table import Table

from examples.distillation.train import Result

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#8250df", "#cf222e")


def results_table(results: Sequence[Result]) -> Table:
    """Return a table with a row for each run."""
    table = Table(title="On-policy distillation: the student on held-out problems")
    for name in ("seed", "layers", "KL before", "after", "same likeliest token before", "after",
                 "greedy answers right before", "after", "teacher", "steps", "seconds"):  # fmt: skip
        table.add_column(name, justify="right")
    for result in results:
        first, last = result.judgements[0], result.judgements[-1]
        table.add_row(
            str(result.seed),
            f"{result.layers[0]} -> {result.layers[1]}",
            *(f"{each.kl:.3f}" for each in (first, last)),
            *(f"{each.agreement:.1%}" for each in (first, last)),
            *(f"{each.greedy:.3f}" for each in (first, last)),
            f"{result.teacher_greedy:.3f}",
            str(len(result.steps)),
            f"{result.seconds:.0f}",
        )
    return table


def plot_curves(results: Sequence[Result], path: Path) -> Path:
    """Write the plot; return its path."""
    figure, (kl, greedy) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for result, colour in zip(results, COLOURS * len(results)):
        judgements = result.judgements
        steps = [judgement.step for judgement in judgements]
        own = [step.step for step in result.steps]
        kl.plot(own, [step.kl for step in result.steps], color=colour, alpha=0.3)
        kl.plot(steps, [each.kl for each in judgements], color=colour, marker="o", label=f"seed {result.seed}")
        greedy.plot(steps, [each.greedy for each in judgements], color=colour, marker="o")
        greedy.axhline(result.teacher_greedy, color="grey", linestyle=":", linewidth=1)
    kl.set(xlabel="step", ylabel="reverse KL a token", title="student's own samples; points: held out")
    greedy.set(xlabel="step", ylabel="greedy answers right", ylim=(0, 1), title="held-out problems; dotted: teacher")
    kl.set_ylim(bottom=0)
    for axis in (kl, greedy):
        axis.grid(alpha=0.2)
    kl.legend(loc="best", fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path
