"""python -m tests.abuse [--attack WORDS] [--server NAME] [--list]

Plays every attack, or the chosen ones, and prints the table; exit status 1 if one did harm.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tests.abuse.attacks  # noqa: F401 - fills the list
from tests.abuse.play import Played, play_all
from tests.abuse.registry import ATTACKS, MODEL, SETUPS
from tests.abuse.report import WIDTH, print_report
from tests.model_zoo import tiny_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse", description="Hostile clients against a real server.")
    parser.add_argument("--attack", default="", help="only attacks whose name has these words")
    parser.add_argument("--server", choices=SETUPS, action="append", help="default: all")
    parser.add_argument("--list", action="store_true", help="say which attacks there are, and end")
    args = parser.parse_args()
    chosen = [attack for attack in ATTACKS if args.attack in attack.name]
    setups = [SETUPS[name] for name in args.server or SETUPS]
    if args.list:
        for attack in chosen:
            print(f"{attack.name} ({', '.join(attack.on)}): {(attack.play.__doc__ or '').splitlines()[0]}")
        return 0
    raise_descriptor_limit()
    started = time.monotonic()
    total = sum(setup.name in attack.on for setup in setups for attack in chosen)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-abuse-") as folder, Progress(*columns, console=console) as bar:
        task = bar.add_task("attacks", total=total)

        def say(one: Played) -> None:
            verdict = "WRONG: " + "; ".join(one.wrong)[:300] if one.wrong else "held"
            bar.console.print(f"{one.attack} | {one.server}: {verdict} ({one.seconds:.0f} s)", markup=False)
            bar.advance(task, 0 if one.attack.startswith("SIGTERM") else 1)

        model = tiny_checkpoint(Path(folder) / "model", "moe", seed=7, **MODEL)
        played = play_all(setups, chosen, model, say)
    return 1 if print_report(played, time.monotonic() - started, Console(width=WIDTH)) else 0


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors: hostile clients need more of them than their server."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
