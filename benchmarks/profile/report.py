"""Profiles as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.profile.machine import Machine
from benchmarks.profile.operators import OperatorUse
from benchmarks.profile.profile import Profile

NOTICEABLE = 0.01  # of the step; operators below are shown as one line
QUIET = 0.1  # spread of steps on a machine that does nothing else


def machine_line(machine: Machine, threads: int) -> str:
    return (
        f"machine, {threads} threads: {machine.read_bytes_per_s / 1e9:.1f} GB/s read, "
        f"{machine.bf16_flops_per_s / 1e9:.0f} GFLOP/s bfloat16, {machine.fp32_flops_per_s / 1e9:.0f} GFLOP/s float32"
    )


def noise_line(profiles: list[Profile]) -> str | None:
    """Return a warning if steps of one kind took very different times, else None."""
    loud = [title(profile) for profile in profiles if profile.spread > QUIET]
    if not loud:
        return None
    return f"the machine was busy with other things, take these with care: {'; '.join(loud)}"


def title(profile: Profile) -> str:
    if profile.kind == "prefill":
        return f"prefill of {profile.tokens}"
    return f"decode, batch {profile.batch_size}"


def overview(profiles: list[Profile]) -> Table:
    """Return a table with a row for each profile: throughput, and the step in operators and Python."""
    table = Table(box=box.SIMPLE, pad_edge=False, title="Throughput; milliseconds of a step or a whole prompt")
    _add_columns(table, "", "tokens/s", "ms", "spread %", "operators", "Python", "roof %", "read GB/s")
    for profile in profiles:
        least = sum(use.least_seconds for use in profile.operators.values())
        table.add_row(
            title(profile),
            f"{profile.tokens_per_s:.0f}",
            _ms(profile.seconds),
            f"{100 * profile.spread:.0f}",
            _ms(profile.operator_seconds),
            _ms(profile.seconds - profile.operator_seconds),
            f"{100 * least / profile.seconds:.0f}",
            " to ".join(f"{rate / 1e9:.1f}" for rate in profile.read_bytes_per_s),
        )
    return table


def phase_table(profile: Profile) -> Table:
    table = Table(
        box=box.SIMPLE, pad_edge=False, title=f"{title(profile)}: milliseconds by phase, {profile.num_undisturbed} runs"
    )
    _add_columns(table, "phase", "all", "operators", "Python")
    for phase in profile.phases:
        table.add_row(phase.name, _ms(phase.seconds), _ms(phase.operator_seconds), _ms(phase.python_seconds))
    return table


def operator_table(profile: Profile) -> Table:
    """Return a table of the operators that take a noticeable share of the step.

    Then come all other operators in one row, and the time that no operator takes.
    """
    runs = profile.num_undisturbed if profile.played else profile.num_watched
    table = Table(box=box.SIMPLE, pad_edge=False, title=f"{title(profile)}: operators, {runs} runs timed")
    _add_columns(table, "operator", "calls", "ms", "step %", "MB", "GB/s", "GFLOP/s", "roof %")
    shown = {name: use for name, use in profile.operators.items() if use.seconds >= NOTICEABLE * profile.seconds}
    for name, use in shown.items():
        table.add_row(name, *_operator_cells(use, profile.seconds))
    rest = OperatorUse()
    for name, use in profile.operators.items():
        if name not in shown:
            rest.add(use)
    if rest.calls:
        table.add_row(f"{len(profile.operators) - len(shown)} others", *_operator_cells(rest, profile.seconds))
    python = profile.seconds - profile.operator_seconds
    table.add_section()
    table.add_row("no operator", "", _ms(python), f"{100 * python / profile.seconds:.1f}", "", "", "", "")
    return table


def as_json(profile: Profile) -> dict[str, Any]:
    """Return all that was measured, in seconds, bytes and floating-point operations."""
    return asdict(profile) | {"tokens_per_s": profile.tokens_per_s, "operator_seconds": profile.operator_seconds}


def _add_columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")


def _operator_cells(use: OperatorUse, step_seconds: float) -> list[str]:
    seconds = max(use.seconds, 1e-9)
    return [
        f"{use.calls:.1f}",
        _ms(use.seconds),
        f"{100 * use.seconds / step_seconds:.1f}",
        _figures(use.bytes_moved / 1e6),
        f"{use.bytes_moved / seconds / 1e9:.1f}",
        f"{use.flops / seconds / 1e9:.0f}" if use.flops else "",
        f"{100 * use.least_seconds / seconds:.0f}",
    ]


def _ms(seconds: float) -> str:
    return _figures(1000 * seconds)


def _figures(value: float) -> str:
    """Return a number as text: a small one with three decimals, a large one without."""
    return f"{value:.{3 - min(3, len(str(int(abs(value)))) - 1)}f}"
