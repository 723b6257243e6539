"""The table and the plot of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from rich.table import Table

from examples.agent.train import Result

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#8250df", "#cf222e")


def results_table(results: Sequence[Result]) -> Table:
    """Return a table with a row for each run.  Rewards are of held-out problems, the rest of the training episodes."""
    table = Table(title="Held-out reward of the agent, before and after")
    for name in ("seed", "before", "after", "calls", "steps", "time", "cached", "mismatch"):
        table.add_column(name, justify="right")
    for result in results:
        first, last = result.judgements[0], result.judgements[-1]
        table.add_row(
            str(result.seed),
            f"{first.reward:.3f}",
            f"{last.reward:.3f}",
            f"{first.calls:.2f} to {last.calls:.2f}",
            str(result.steps[-1].step),
            f"{result.steps[-1].seconds:.0f} s",
            f"{sum(step.cached for step in result.steps) / len(result.steps):.0%}",
            f"{sum(step.mismatch for step in result.steps) / len(result.steps):.4f}",
        )
    return table


def plot(results: Sequence[Result], path: Path) -> Path:
    """Write the plot of rewards and calls; return its path."""
    figure, (rewards, calls) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, result in enumerate(results):
        colour = COLOURS[number % len(COLOURS)]
        steps = [step.step for step in result.steps]
        judged = [judgement.step for judgement in result.judgements]
        rewards.plot(steps, [step.reward for step in result.steps], color=colour, alpha=0.35)
        rewards.plot(
            judged, [each.reward for each in result.judgements], color=colour, marker="o", label=f"seed {result.seed}"
        )
        calls.plot(steps, [step.calls for step in result.steps], color=colour, label=f"seed {result.seed}")
    rewards.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="right answers; dots: held-out problems")
    calls.set(xlabel="step", ylabel="calls an episode", ylim=(0, 2.5), title="calls of the calculator; 2 are needed")
    for axis in (rewards, calls):
        axis.grid(alpha=0.2)
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
