"""python -m tests.faults [--transport NAME] [--staging MODE] [--fault WORDS]

Plays every cell of the fault matrix, or the chosen ones, and prints the tables; exit status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from tests.faults import adapters, killed, ranks, stopped, stopped_pairs
from tests.faults.cells import FAULTS, STAGINGS, cells
from tests.faults.contents import Zoo
from tests.faults.matrix import Played, play_all
from tests.faults.report import WIDTH, print_report, table
from tests.faults.trainers import TRANSPORTS
from weight_sync.staging import StagingMode


def run(
    zoo: Zoo,
    scratch: Path,
    transports: Sequence[str],
    stagings: Sequence[StagingMode],
    chosen: Callable[[str], bool],
    progress: Callable[[str], None],
) -> dict[str, list[Played]]:
    """Play all cells whose fault's name passes `chosen`; return their outcomes by the title of a table."""
    played: dict[str, list[Played]] = {
        "One rank": [],
        "Trainers that are processes": [],
        "Ranks that are processes": [],
        "Ranks that stop or die": [],
        "Ranks that stop or die, with a model and an adapter": [],
    }
    main, processes, ranked, stopping, of_pairs = played.values()
    for transport in transports:
        for staging in stagings:
            main += play_all(zoo, scratch, [cell for cell in cells(staging, transport) if chosen(cell.fault.title)])
            if transport in killed.TRANSPORTS:
                few = [cell for cell in killed.cells(staging, transport) if chosen(cell.fault.title)]
                processes += play_all(zoo, scratch, few, killed.ProcessTrainer)
        progress(f"{transport}: {len(main) + len(processes)} cells so far")
    of_adapter = _of_adapter(scratch, transports, stagings, chosen)
    progress(f"an adapter as the target: {len(of_adapter)} cells")
    if "flattened" in transports:
        for num_ranks in (1, 2):
            for staging in stagings:
                ranked += [
                    ranks.play(cell) for cell in ranks.cells(staging, num_ranks) if chosen(f"receiver rank {cell.how}")
                ]
    if "tensor safetensors" in transports and "host" in stagings:
        for layout in stopped.LAYOUTS:
            stopping += stopped.play_all(zoo, layout, lambda cell: chosen(cell.title))
            progress(f"ranks that stop or die, {layout}: {len(stopping)} cells so far")
        pairs = stopped_pairs.PairZoo(scratch / "pairs")
        of_pairs += stopped.play_all(pairs, "2 ranks", lambda cell: chosen(cell.title), None, stopped_pairs.PairPlayer)
    order: dict[str, int] = {}
    for number, fault in enumerate(FAULTS):
        order.setdefault(fault.title, number)
    main.sort(key=lambda cell: order[cell.fault])
    return {
        "Faults": main,
        "Faults, with an adapter as the target": of_adapter,
        "Senders that are processes": processes,
        "Ranks that are processes": ranked,
        "Ranks that stop or die": stopping,
        "Ranks that stop or die, with a model and an adapter": of_pairs,
    }


def _of_adapter(
    scratch: Path, transports: Sequence[str], stagings: Sequence[StagingMode], chosen: Callable[[str], bool]
) -> list[Played]:
    zoo, played = adapters.AdapterZoo(scratch / "adapters"), list[Played]()
    for transport in (name for name in transports if name in adapters.TRANSPORTS):
        for staging in stagings:
            few = [cell for cell in adapters.cells(staging, transport) if chosen(cell.fault.title)]
            played += play_all(zoo, scratch, few, adapters.AdapterTrainer, adapters.AdapterEngine)
    return played


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="The fault matrix of weight refresh.")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: all")
    parser.add_argument("--staging", choices=STAGINGS, action="append", help="default: all")
    parser.add_argument("--fault", default="", help="only faults whose name has these words")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()

    def progress(line: str) -> None:
        print(f"{line}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="lockstep-faults-") as folder:
        zoo = Zoo(Path(folder) / "contents")
        transports, stagings = args.transport or TRANSPORTS, args.staging or STAGINGS
        played = run(zoo, Path(folder), transports, stagings, lambda title: args.fault in title, progress)
    tables = [table(part, title) for title, part in played.items() if part]
    everything = [cell for part in played.values() for cell in part]
    return 1 if print_report(tables, everything, time.monotonic() - start, Console(width=WIDTH)) else 0


if __name__ == "__main__":
    sys.exit(main())
