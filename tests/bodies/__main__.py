"""python -m tests.bodies [--count N] [--seed S] [--only NUMBER]

Sends mutated bodies to a server of its own and prints what was wrong; exit status 1 if anything was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.abuse.registry import MODEL
from tests.bodies.run import Found, play
from tests.model_zoo import tiny_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bodies", description=__doc__.splitlines()[2])
    parser.add_argument("--count", type=int, default=100_000, help="bodies to send (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="default: another one in every run")
    parser.add_argument("--first", type=int, default=0, help="number of the first body (%(default)s)")
    parser.add_argument("--only", type=int, help="send this body alone, as a run of the seed would")
    args = parser.parse_args()
    seed = time.time_ns() % 100_000 if args.seed is None else args.seed
    numbers = range(args.first, args.first + args.count) if args.only is None else range(args.only, args.only + 1)
    console = Console(stderr=True)
    columns = (
        TextColumn(f"seed {seed}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=console) as bar,
    ):
        task = bar.add_task("bodies", total=len(numbers))
        told = 0

        def say(found: Found) -> None:
            nonlocal told
            for wrong in found.wrong[told : told + 20]:
                bar.console.print(wrong, markup=False)
            told = len(found.wrong)
            bar.update(task, completed=found.sent)

        found = play(tiny_checkpoint(Path(folder) / "model", "moe", seed=7, **MODEL), seed, numbers, say)
    counts = ", ".join(f"{status}: {number}" for status, number in sorted(found.statuses.items()))
    memory = f"{found.memory_mb[0]:.0f} to {found.memory_mb[-1]:.0f} MB" if found.memory_mb else "not measured"
    print(f"seed {seed}: {found.sent} bodies; answers {counts}; memory {memory}; {len(found.wrong)} wrong")
    for wrong in found.wrong[told:]:
        print(wrong)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
