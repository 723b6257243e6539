"""The facts that the demo asserts of a trainer's report: one row each, with its bound where it has one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from examples.demo.messages import RolloutReport, StepReport, TrainerReport
from examples.demo.mismatch import BitAgreement

MAX_MEAN_ABS = 0.1
"""Nats.  bfloat16 engine against float32 trainer under the same routes; a wrong route alone costs more."""
MAX_KL = 0.01
"""Nats per token, for the same comparison."""
STALE_FACTOR = 2.0
"""The weights before a step must disagree more than this many times as much as the weights after it."""


@dataclass(frozen=True)
class Row:
    """A fact.  `ok` None: it is shown, and has no bound."""

    section: str
    name: str
    value: str
    bound: str = ""
    ok: bool | None = None


def rows_of(report: TrainerReport) -> list[Row]:
    """Return all rows, in the order in which things happened."""
    rows = rollout_rows(report.rollouts[0])
    fingerprints = report.trainer_start
    for step, rollout in zip(report.steps, report.rollouts[1:]):
        rows += (
            step_rows(step, forced=rollout.forced is not None)
            + refresh_rows(step, fingerprints)
            + rollout_rows(rollout)
        )
        fingerprints = step.trainer_after
    return rows


def rollout_rows(report: RolloutReport) -> list[Row]:
    """Return rows about the mismatch between engine and trainer, and about the versions that the samples carry."""
    section = f"Rollout, weight version {report.version}"
    own, forced, stale = report.own, report.forced, report.stale

    def row(name: str, value: str, bound: str = "", ok: bool | None = None) -> Row:
        return Row(section, name, value, bound, ok)

    right_versions = report.num_samples - report.num_version_problems
    rows = [
        row("samples, tokens", f"{report.num_samples}, {report.num_tokens}"),
        row("mean reward", f"{report.reward_mean:.4f}"),
        row("prompts whose samples differ in reward", f"{report.num_groups_with_signal} of {report.num_groups}"),
        row(
            "samples that carry this version, KV and routes too",
            f"{right_versions} of {report.num_samples}",
            "all",
            report.num_samples > 0 and report.num_version_problems == 0,
        ),
    ]
    if report.routes is not None and forced is not None:
        most = min(MAX_MEAN_ABS, own.mean_abs)
        rows += [
            row("tokens with another expert in any layer", f"{report.routes.token_share:.1%}"),
            row("(token, layer) pairs with another expert", f"{report.routes.token_layer_share:.1%}"),
            row("mean |Δ log-prob|, trainer's own routes", f"{own.mean_abs:.4f}"),
            row("mean |Δ log-prob|, engine's routes forced", *_at_most(forced.mean_abs, most)),
            row("KL(engine, trainer), own routes", f"{own.kl:.6f}"),
            row("KL(engine, trainer), routes forced", *_at_most(forced.kl, min(MAX_KL, own.kl), digits=6)),
        ]
    else:
        rows += [
            row("mean |Δ log-prob|", *_at_most(own.mean_abs, MAX_MEAN_ABS)),
            row("KL(engine, trainer)", *_at_most(own.kl, MAX_KL, digits=6)),
        ]
    rows += [Row(section, *facts) for facts in _exact_facts(report.exact)]
    if stale is not None:
        name = "mean |Δ log-prob|, weights before the step" + ("" if forced is None else ", forced")
        rows.append(row(name, *_above(stale.mean_abs, STALE_FACTOR * (own if forced is None else forced).mean_abs)))
    return rows


def _exact_facts(exact: BitAgreement | None) -> list[tuple[str, str, str, bool | None]]:
    """Return name, value, bound and verdict of each row about a trainer under engine numerics."""
    kl, bits = "KL(engine, trainer), engine numerics", "log-probs with the engine's bits, engine numerics"
    if exact is None:
        return [(kl, "no compiled operators", "", None), (bits, "no compiled operators", "", None)]
    equal, total = exact.num_equal, exact.num_tokens
    return [
        (kl, f"{exact.kl:g}", "exactly 0", exact.kl == 0),
        (bits, f"{equal} of {total}", "all", total > 0 and equal == total),
    ]


def step_rows(step: StepReport, *, forced: bool) -> list[Row]:
    """Return rows which show that the policy gradient is real and was followed."""
    section = f"Policy-gradient step {step.version}" + (", routes forced" if forced else "")
    norm = step.gradient_norm
    return [
        Row(section, "norm of the gradient", f"{norm:.5f}", "> 0, finite", math.isfinite(norm) and norm > 0),
        Row(
            section,
            "loss of the same samples, before and after",
            f"{step.loss_before:+.5f}, {step.loss_after:+.5f}",
            "lower after",
            step.loss_after < step.loss_before,
        ),
    ]


def refresh_rows(step: StepReport, trainer_before: dict[str, str]) -> list[Row]:
    """Return rows which show that the engine served the trainer's old tensors, and then all new ones, which differ."""
    section = f"Refresh to version {step.version}"
    changed = [name for name, value in step.engine_after.items() if step.engine_before.get(name) != value]
    megabytes = step.refresh_bytes / 1e6
    return [
        Row(section, "sent by broadcast (gloo)", f"{megabytes:.1f} MB in {step.refresh_seconds:.1f} s"),
        _equal_fingerprints(section, "tensors equal on both sides before", trainer_before, step.engine_before),
        Row(
            section,
            "tensors that the step changed",
            f"{len(changed)} of {len(step.engine_after)}",
            "> 0",
            bool(changed),
        ),
        _equal_fingerprints(section, "tensors equal on both sides after", step.trainer_after, step.engine_after),
    ]


def _equal_fingerprints(section: str, name: str, trainer: dict[str, str], engine: dict[str, str]) -> Row:
    names = trainer.keys() | engine.keys()
    equal = sum(trainer.get(tensor) == engine.get(tensor) for tensor in names)
    return Row(section, name, f"{equal} of {len(names)}", "all", bool(names) and equal == len(names))


def _at_most(value: float, bound: float, digits: int = 4) -> tuple[str, str, bool]:
    return f"{value:.{digits}f}", f"<= {bound:.{digits}f}", value <= bound


def _above(value: float, bound: float) -> tuple[str, str, bool]:
    return f"{value:.4f}", f"> {bound:.4f}", value > bound
