"""The table of docs/integrations.md, between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.integrations.framework import Row

BEGIN, END = "<!-- written by make test-integrations -->", "<!-- end -->"


def write_table(page: Path, rows: Sequence[Row]) -> None:
    """Replace what is between the marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n{END}{after}")


def table(rows: Sequence[Row]) -> str:
    """Write a table with a line for each framework, and under it the names of their steps."""
    lines = ["| framework | version | steps | flags of the server | shimmed | not there |", "|---|---|---|---|---|---|"]
    for row in rows:
        steps = f"{len(row.passed)} of {len(row.passed) + len(row.failed)}"
        flags = " ".join(f"`{flag}`" for flag in row.flags)
        cells = [row.name, ", ".join(row.versions), steps, flags, "; ".join(row.shimmed), "; ".join(row.not_there)]
        lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    lines += ["", "Steps:", ""]
    for row in rows:
        failed = f" Failed: {', '.join(row.failed)}." if row.failed else ""
        lines.append(f"* {row.name}: {', '.join(row.passed)}.{failed}")
    return "\n".join(lines) + "\n"
