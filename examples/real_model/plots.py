"""The table and the plot of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from rich.table import Table

from examples.real_model.train import Result

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#8250df", "#cf222e")


def results_table(results: Sequence[Result]) -> Table:
    """Return a table with a row for each run."""
    table = Table(title="GRPO on word problems, SmolLM2-135M-Instruct: held-out reward")
    for name in ("seed", "before", "after", "greedy before", "greedy after", "steps", "seconds", "groups used",
                 "KL, same version"):  # fmt: skip
        table.add_column(name, justify="right")
    for result in results:
        first, last = result.judgements[0], result.judgements[-1]
        kls = [step.kl for step in result.steps if step.kl is not None]
        table.add_row(
            str(result.seed),
            f"{first.sampled:.3f}",
            f"{last.sampled:.3f}",
            *("" if each.greedy is None else f"{each.greedy:.3f}" for each in (first, last)),
            str(len(result.steps)),
            f"{result.seconds:.0f}",
            f"{np.mean([step.groups_used for step in result.steps]):.1f}",
            f"{np.mean(kls):.2g}" if kls else "",
        )
    return table


def plot_rewards(results: Sequence[Result], path: Path) -> Path:
    """Write the plot; return its path."""
    figure, (held_out, training) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for result, colour in zip(results, COLOURS * len(results)):
        judgements = result.judgements
        steps = [judgement.step for judgement in judgements]
        name = f"seed {result.seed}"
        held_out.plot(steps, [judgement.sampled for judgement in judgements], color=colour, marker="o", label=name)
        rewards = np.array([step.reward for step in result.steps])
        window = min(5, len(rewards))
        smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
        training.plot(np.arange(window, len(rewards) + 1), smooth, color=colour, label=name)
    held_out.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="held-out problems, one sample each")
    training.set(xlabel="step", ylim=(0, 1), title="training samples, mean of 5 steps")
    for axis in (held_out, training):
        axis.grid(alpha=0.2)
    held_out.legend(loc="best", fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path
