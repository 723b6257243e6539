"""The tables of a run, and its rows for `--json`."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.agreement import TOP
from benchmarks.peers.measure import ShapeRun
from benchmarks.peers.rates import Cell, counted_s, floor_tokens_per_s, tokens_per_s
from benchmarks.peers.systems import BEFORE
from benchmarks.peers.targets import AGAINST_BEFORE, TARGETS, Verdict, judge
from benchmarks.shapes import SHAPES


def speeds(run: ShapeRun) -> dict[tuple[str, str], float]:
    """Return the measured tokens a second, by (system, column)."""
    rates = {(name, cell.name): tokens_per_s(cell, seconds) for (name, cell), seconds in run.seconds.items()}
    return {key: rate for key, rate in rates.items() if rate is not None}


def verdicts(run: ShapeRun, cells: list[Cell], peers: tuple[str, ...]) -> list[Verdict]:
    """Return the verdicts on the targets whose column was asked for."""
    columns = {cell.name for cell in cells}
    targets = TARGETS if BEFORE not in peers else AGAINST_BEFORE
    measured = speeds(run)
    rounds = {(name, cell.name): counted_s(seconds) for (name, cell), seconds in run.seconds.items()}
    rounds = {key: seconds for key, seconds in rounds.items() if key in measured}
    return [judge(t, rounds, peers) for t in targets if t.shape == run.shape and t.column in columns]


def rows(run: ShapeRun, cells: list[Cell], peers: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the results of a run as JSON objects, distinguished by "kind"."""
    spec, result = SHAPES[run.shape], speeds(run)
    found: list[dict[str, Any]] = [
        {"kind": "floor", "shape": run.shape, "column": cell.name, "turn": turn, **vars(machine)}
        for cell, machines in run.machines.items()
        for turn, machine in enumerate(machines)
    ]
    for (name, cell), seconds in run.seconds.items():
        rate = result.get((name, cell.name))
        floor = floor_tokens_per_s(spec, cell, run.machine(cell))
        found.append(
            {
                "kind": "speed",
                "shape": run.shape,
                "system": name,
                "column": cell.name,
                "tokens_per_s": rate,
                "share_of_floor": None if rate is None else rate / floor,
                "choice": run.choices[name, cell],
                "new_tokens": cell.counts,
                "seconds": seconds,
            }
        )
    about = {"kind": "system", "shape": run.shape}
    found += [{**about, "system": name, "about": text} for name, text in run.about.items()]
    found += [{**about, "system": name, "missing": reason} for name, reason in run.missing.items()]
    found += [{"kind": "agreement", "shape": run.shape, "system": n} | vars(a) for n, a in run.agreements.items()]
    for verdict in verdicts(run, cells, peers):
        target = vars(verdict.target) | {"against": verdict.against}
        found.append({"kind": "target", **target, "ratio": verdict.ratio, "met": verdict.met, "note": verdict.note})
    return found


def show(run: ShapeRun, names: list[str], cells: list[Cell], peers: tuple[str, ...], console: Console) -> None:
    console.print(_speed_table(run, names, cells))
    machines = [machine for found in run.machines.values() for machine in found]
    for word, rates in (
        ("GB/s read", [machine.read_bytes_per_s for machine in machines]),
        ("GFLOP/s bf16", [machine.bf16_flops_per_s for machine in machines]),
    ):
        least, middle, most = (value / 1e9 for value in (min(rates), statistics.median(rates), max(rates)))
        console.print(f"floor, next to every cell: {least:.0f} to {most:.0f} {word}, median {middle:.0f}")
    for name, text in run.about.items():
        chosen = {f"{cell.name} {run.choices[name, cell]}" for cell in cells if run.choices.get((name, cell))}
        console.print(f"{name}: {text}" + (f"; {'; '.join(sorted(chosen))}" if chosen else ""))
    for name, reason in run.missing.items():
        console.print(f"[bold red]missing: {name}: {reason}[/]")
    console.print(_agreement_table(run))
    if found := verdicts(run, cells, peers):
        console.print(_target_table(run, found))


def _speed_table(run: ShapeRun, names: list[str], cells: list[Cell]) -> Table:
    spec, result = SHAPES[run.shape], speeds(run)
    rounds = max(map(len, run.seconds.values()), default=0)
    table = Table(title=f"Shape {run.shape}: tokens/s (share of the floor), bf16, greedy, medians of {rounds}")
    table.add_column("")
    for cell in cells:
        decode = f"\n{cell.prompt_tokens} in, {cell.new_tokens} out" if cell.new_tokens > 1 else ""
        table.add_column(cell.name + decode, justify="right")
    floors = {cell: floor_tokens_per_s(spec, cell, run.machine(cell)) for cell in cells}
    for name in names:
        entries = []
        for cell in cells:
            rate = result.get((name, cell.name))
            noise = "noise" if (name, cell) in run.seconds else "[red]missing[/]"
            entries.append(noise if rate is None else f"{rate:.0f} ({100 * rate / floors[cell]:.0f} %)")
        table.add_row(name, *entries)
    table.add_row("floor", *(f"{floors[cell]:.0f}" for cell in cells))
    return table


def _agreement_table(run: ShapeRun) -> Table:
    table = Table(title=f"Shape {run.shape}: the same weights? Compared with lockstep")
    headers = ("", "same first token", "of the others, near ties", f"shared of the top {TOP}", "max |Δ log-prob|")
    for header in (*headers, "same tokens"):
        table.add_column(header, justify="right" if header else "left")
    for name, found in run.agreements.items():
        table.add_row(
            name,
            f"{found.same_first} of {found.prompts}",
            f"{found.near_ties} of {found.prompts - found.same_first}",
            f"{100 * found.overlap:.1f} %",
            f"{found.logprob_error:.4f}",
            f"{found.same_tokens:.1f} of {found.generated}",
        )
    return table


def _target_table(run: ShapeRun, found: list[Verdict]) -> Table:
    table = Table(title=f"Shape {run.shape}: ratios, medians over the rounds")
    for header in ("column", "system", "against", "ratio", "wanted", ""):
        table.add_column(header, justify="right" if header in ("ratio", "wanted") else "left")
    for verdict in found:
        target = verdict.target
        ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.2f}x"
        word = {True: "[green]met[/]", False: "[red]not met[/]", None: "[red]not measured[/]"}[verdict.met]
        note = f" ({verdict.note})" if verdict.note else ""
        table.add_row(target.column, target.system, verdict.against, ratio, f">= {target.factor:g}x", word + note)
    return table
