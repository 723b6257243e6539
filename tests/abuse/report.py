"""The table at the end: a row for each attack and server, and all complaints below it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.abuse.play import HEALTH_P99_S, Played
from tests.abuse.prober import percentile

WIDTH = 150


def table(played: Sequence[Played]) -> Table:
    grid = Table(title="Attacks", box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("attack", "server", "verdict"):
        grid.add_column(name, no_wrap=True)
    for name in ("s", "/health p99", "most", "MB peak", "kept"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("what was done; answers by status")
    for one in played:
        verdict = "[red]WRONG[/]" if one.wrong else "held"
        late = [f"{percentile(one.health, share) * 1e3:.0f} ms" if one.health else "-" for share in (0.99, 1.0)]
        sizes = [f"{one.peak_mb:.0f}", f"{one.kept_mb:+.0f}"]
        grid.add_row(one.attack, one.server, verdict, f"{one.seconds:.0f}", *late, *sizes, escape(one.said))
    return grid


def print_report(played: Sequence[Played], seconds: float, console: Console) -> int:
    """Print the table, everything that is wrong, and the sum; return how many attacks did harm."""
    console.print(table(played))
    bad = [one for one in played if one.wrong]
    for one in bad:
        for what in one.wrong:
            console.print(f"WRONG {one.attack} | {one.server}: {what}", style="red", markup=False)
    samples = [sample for one in played for sample in one.health]
    p99 = percentile(samples, 0.99)
    late = p99 >= HEALTH_P99_S
    console.print(
        f"/health: {len(samples)} answers, p50 {percentile(samples, 0.5) * 1e3:.1f} ms, p99 {p99 * 1e3:.0f} ms, "
        f"most {percentile(samples, 1.0) * 1e3:.0f} ms{', WRONG: p99 over a second' if late else ''}"
    )
    verdict = f"{len(bad)} did harm" if bad else "all held"
    console.print(f"{len(played)} attacks, {verdict}, in {seconds:.0f} s")
    return len(bad) + late
