"""The table: a row for each fault and point, a column for each transport, and in each field the version that served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.faults.matrix import Played

_STAGINGS = ("host", "device", "journal", "in_place")
_SHORT = {"host": "h", "device": "d", "journal": "j", "in_place": "i"}
_WORDS = {"old": "old", "new": "new", "POISONED": "P", "ENDED": "ended"}
WIDTH = 200


def table(played: Sequence[Played], title: str) -> Table:
    """Build the table of some cells; points of one fault with the same outcomes share a row."""
    columns = list(dict.fromkeys(cell.transport for cell in played))
    grid = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for header in ("fault", "at", *columns):
        grid.add_column(header.replace("_", " ").replace(" ", "\n"), no_wrap=True)
    for fault in dict.fromkeys(cell.fault for cell in played):
        name = fault
        for points, row in _rows([cell for cell in played if cell.fault == fault], columns):
            grid.add_row(name, ", ".join(points), *row)
            name = ""
    return grid


def print_report(tables: Iterable[Table], played: Sequence[Played], seconds: float, console: Console) -> int:
    """Print the tables, the wrong cells and the sum; return how many cells are wrong."""
    for grid in tables:
        console.print(grid)
    wrong = [cell for cell in played if cell.wrong is not None]
    for cell in wrong:
        console.print(
            f"WRONG {cell.fault} | {cell.point} | {cell.transport} | {cell.staging}: {cell.wrong}", style="red"
        )
    verdict = f"{len(wrong)} wrong" if wrong else "all as they must be"
    console.print(f"{len(played)} cells, {verdict}, in {seconds:.0f} s")
    return len(wrong)


def _rows(played: Sequence[Played], columns: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    rows: list[tuple[list[str], list[str]]] = []
    for point in dict.fromkeys(cell.point for cell in played):
        row = [_text([cell for cell in played if cell.point == point and cell.transport == name]) for name in columns]
        if rows and rows[-1][1] == row:
            rows[-1][0].append(point)
        else:
            rows.append(([point], row))
    return rows


def _text(played: Sequence[Played]) -> str:
    """Return one word if all staging modes agree (P: poisoned), or `old/P` if in_place alone is poisoned."""
    found = {cell.staging: "WRONG" if cell.outcome is None else _WORDS[cell.outcome] for cell in played}
    if not found:
        return "-"
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    rest = {outcome for staging, outcome in found.items() if staging != "in_place"}
    if len(rest) == 1 and found.get("in_place") == "P":
        return f"{rest.pop()}/P"
    return " ".join(f"{_SHORT.get(staging, staging)}:{found[staging]}" for staging in found)
