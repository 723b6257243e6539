"""Decoding next to a busy neighbour, by how long idle compute threads look for work: `python -m benchmarks.neighbour`.

Each case is a process of its own: `Engine` decodes alone on the cores, then while another process computes without a
pause on any core it gets.  Settings take turns; the table shows the time of a token, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.shapes import SHAPES, checkpoint
from benchmarks.throughput import by_engine
from rollout.server.engine import Engine

SETTINGS: dict[str, dict[str, str]] = {
    "as they find": {},
    "never": {"OMP_WAIT_POLICY": "PASSIVE"},
    "always": {"OMP_WAIT_POLICY": "ACTIVE"},
}
PLACES = ("alone", "beside")
NEW_TOKENS = {"S": 1024, "M": 64}
TIMEOUT_S = 600.0
BUSY = "while True: pass"


def measure(shape: str, batch: int) -> dict[str, float]:
    """Return the seconds of a step of decoding in this process, alone and next to the neighbour."""
    engine = Engine(
        model_path=str(checkpoint(shape)), dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=16384
    )
    generate, new = by_engine(engine), NEW_TOKENS[shape]
    prompts = [[(7 * i + 3 * j) % SHAPES[shape].vocab_size for j in range(16)] for i in range(batch)]
    generate(prompts, new)
    found = {}
    for place in PLACES:
        with _neighbour(place == "beside"):
            started = time.perf_counter()
            generate(prompts, new)
            found[place] = (time.perf_counter() - started) / new
    engine.close()
    return found


@contextmanager
def _neighbour(is_there: bool) -> Iterator[None]:
    if not is_there:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", BUSY]) as neighbour:
        try:
            time.sleep(0.3)
            yield
        finally:
            neighbour.kill()


def run(shapes: list[str], batches: list[int], rounds: int, console: Console) -> list[dict]:
    """Measure all cases in turns, print one table, and return its rows."""
    cases = [(shape, batch, name) for shape in shapes for batch in batches for name in SETTINGS]
    without = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    times: dict[tuple[str, int, str, str], list[float]] = defaultdict(list)
    with Progress(console=console) as progress:
        task = progress.add_task("neighbour", total=rounds * len(cases))
        for _ in range(rounds):
            for shape, batch, name in cases:
                words = [sys.executable, "-m", "benchmarks.neighbour", "--measure", shape, str(batch)]
                done = subprocess.run(
                    words,
                    env=without | SETTINGS[name],
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=True,
                )
                for place, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                    times[shape, batch, name, place].append(seconds)
                progress.advance(task)
    table = Table(title="a step of decoding, milliseconds, alone and next to one busy process")
    for column in ("shape", "batch", "idle threads look", *PLACES, "slower"):
        table.add_column(column, justify="left" if column in ("shape", "idle threads look") else "right")
    rows = []
    for shape, batch, name in cases:
        alone, beside = (statistics.median(times[shape, batch, name, place]) * 1e3 for place in PLACES)
        rows.append({"shape": shape, "batch": batch, "setting": name, "alone_ms": alone, "beside_ms": beside})
        table.add_row(shape, str(batch), name, f"{alone:.2f}", f"{beside:.2f}", f"{beside / alone:.1f}x")
    console.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=["S", "M"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("SHAPE", "BATCH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure[0], int(args.measure[1]))))
    else:
        run(args.shapes, args.batches, args.rounds, Console())


if __name__ == "__main__":
    main()
