"""The table and the plots of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from rich.table import Table

from examples.grpo.measure import Mismatch
from examples.grpo.policy import VARIANTS
from examples.grpo.train import Result

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"replay": "#1f6feb", "plain": "#d29922", "exact": "#2da44e"}
NAMES = {
    "replay": "routes replayed",
    "plain": "nothing replayed",
    "exact": "engine numerics",
}


def results_tables(results: Sequence[Result]) -> list[Table]:
    """Return a table of rewards and one of mismatches, a row for each run; mismatches are means over its judgements."""
    rewards = _table("Held-out reward", ("variant", "seed", "before", "after", "best", "steps", "time"))
    titles = ("variant", "seed", "KL", "ratios", "off by 5 %", "same bits", "flips")
    mismatches = _table("Trainer against engine, same weights; ratios: 0.1 and 99.9 %", titles)
    for result in results:
        run = (result.variant, str(result.seed))
        found = [judgement.reward for judgement in result.judgements]
        seconds = f"{result.judgements[-1].seconds:.0f} s"
        steps = str(result.steps[-1].step)
        rewards.add_row(*run, *(f"{reward:.3f}" for reward in (found[0], found[-1], max(found))), steps, seconds)
        mismatches.add_row(*run, *_mismatch_cells([judgement.mismatch for judgement in result.judgements]))
    return [rewards, mismatches]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    return table


def _mismatch_cells(found: Sequence[Mismatch]) -> list[str]:
    return [
        f"{np.mean([each.kl for each in found]):.2g}",
        f"{np.mean([each.ratio_low for each in found]):.3f}, {np.mean([each.ratio_high for each in found]):.3f}",
        f"{np.mean([each.share_off for each in found]):.2%}",
        f"{sum(each.bits_equal for each in found)} of {len(found)}",
        f"{np.mean([each.flips_by_layer for each in found]):.2%}",
    ]


def plot_all(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the plots; return their paths."""
    return [_plot_rewards(results, folder / "rewards.png"), _plot_mismatch(results, folder / "mismatch.png")]


def _plot_rewards(results: Sequence[Result], path: Path) -> Path:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for result in results:
        judgements = result.judgements
        x = [judgement.step for judgement in judgements]
        minutes = [judgement.seconds / 60 for judgement in judgements]
        for axis, values in zip(axes, (x, minutes)):
            axis.plot(values, [judgement.reward for judgement in judgements], color=COLOURS[result.variant], alpha=0.85)
    for axis, label in zip(axes, ("step of GRPO", "minutes of GRPO")):
        axis.set(xlabel=label, ylabel="held-out reward")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.2)
    _legend(axes[0], results)
    figure.suptitle("Problems never trained on, one sample each")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plot_mismatch(results: Sequence[Result], path: Path) -> Path:
    figure, (kl, ratios, flips) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    variants = [variant for variant in VARIANTS if any(result.variant == variant for result in results)]
    width = 0.8 / len(variants)
    num_layers = len(results[0].judgements[0].mismatch.flips_by_layer)
    for result in results:
        colour, found = COLOURS[result.variant], [judgement.mismatch for judgement in result.judgements]
        steps = [judgement.step for judgement in result.judgements]
        kl.plot(steps, [each.kl for each in found], color=colour, alpha=0.85)
        ratios.plot(steps, [each.ratio_high for each in found], color=colour, alpha=0.85)
        ratios.plot(steps, [each.ratio_low for each in found], color=colour, alpha=0.85)
    for i, variant in enumerate(variants):
        mine = [result for result in results if result.variant == variant]
        rates = np.mean([each.mismatch.flips_by_layer for result in mine for each in result.judgements], axis=0)
        flips.bar(
            np.arange(num_layers) + (i - (len(variants) - 1) / 2) * width,
            100 * rates,
            0.9 * width,
            color=COLOURS[variant],
        )
    kl.set(xlabel="step of GRPO", ylabel="KL(engine, trainer)", title="same weights, same samples")
    kl.set_yscale("symlog", linthresh=1e-6)  # zero has a place
    kl.set_ylim(-2e-7, 1e-1)
    ratios.set(
        xlabel="step of GRPO", ylabel="trainer's / engine's probability", title="0.1 and 99.9 percentiles of tokens"
    )
    flips.set(xlabel="MoE layer", ylabel="% of tokens", title="tokens that the trainer alone routes otherwise")
    flips.set_xticks(range(num_layers))
    for axis in (kl, ratios, flips):
        axis.grid(alpha=0.2)
    _legend(kl, results)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _legend(axis: Axes, results: Sequence[Result]) -> None:
    for variant in VARIANTS:
        if any(result.variant == variant for result in results):
            axis.plot([], [], color=COLOURS[variant], label=NAMES[variant])
    axis.legend(loc="best", fontsize=8)
