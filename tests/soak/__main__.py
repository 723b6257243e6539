"""python -m tests.soak --minutes N [--seed S] [--layout 1|2x2] [--picture FILE] [--write-docs]

Soaks each layout for its share of the time, prints the table and draws the picture; exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import functools
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.model_zoo import tiny_checkpoint
from tests.soak.judge import JudgeProcess
from tests.soak.picture import draw
from tests.soak.play import LAYOUTS, MODEL, play
from tests.soak.report import WIDTH, markdown, print_report

ROOT = Path(__file__).parents[2]
DOCS, DOCS_PICTURE = ROOT / "docs" / "reliability.md", ROOT / "docs" / "soak.png"
BEGIN, END = "<!-- soak: begin -->\n", "<!-- soak: end -->\n"
SAY_EVERY_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Everything at once, for a long time.")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all layouts together")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="default: all")
    parser.add_argument("--picture", type=Path, default=Path("soak.png"), help="where the picture goes")
    parser.add_argument("--write-docs", action="store_true", help="table and picture go into docs/ too")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    layouts = [LAYOUTS[name] for name in args.layout or LAYOUTS]
    print(f"{args.minutes:g} minutes on {', '.join(each.name for each in layouts)}; --seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        model = make_model(Path(folder) / "model")
        say = _Said()
        judge = functools.partial(JudgeProcess, keep=ROOT / "runs" / f"soak-{seed}")
        soaked = [play(layout, model, 60 * args.minutes / len(layouts), seed, say, judge) for layout in layouts]
    right = print_report(soaked, Console(width=WIDTH))
    draw(soaked, args.picture)
    print(f"picture: {args.picture}; --seed {seed}")
    if args.write_docs:
        write_docs(markdown(soaked), DOCS)
        draw(soaked, DOCS_PICTURE)
    return 0 if right else 1


def make_model(folder: Path) -> Path:
    spec: dict[str, Any] = dict(MODEL)
    return tiny_checkpoint(folder, spec.pop("kind"), **spec)


def write_docs(table: str, path: Path) -> None:
    """Put table and picture between the markers of a page."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(
        f"{before}{BEGIN}{table}\n![Memory, descriptors, step and refresh times]({DOCS_PICTURE.name})\n{END}{after}"
    )


class _Said:
    """A line of progress every few seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, line: str) -> None:
        if time.monotonic() - self._last >= SAY_EVERY_S:
            self._last = time.monotonic()
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
