"""Speed of the fingerprint, next to a plain read of the same bytes and to other things that one does with them.

    python -m benchmarks.fingerprint [--megabytes 512] [--threads 2]

"read" is `torch.sum` over the bytes as int64: one stream through memory.  Rounds of all kinds alternate, and the best
of each counts, so that what the machine does meanwhile falls on all.  With one thread the process's CPU time is taken.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from weight_sync.block_sums import wrapping_block_sums
from weight_sync.fingerprint import fingerprint, fingerprint_slice, fingerprint_update
from weight_sync.fingerprint_words import BLOCK

GOAL = 4.0  # reads of the same bytes that a bf16 fingerprint may take
MATRIX_ROWS = 2048  # a tensor [rows, columns] for the shards
DELTA_SHARE = 64  # one element in this many changes
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8)


def run(num_bytes: int, rounds: int, console: Console) -> list[dict]:
    """Measure all kinds in turns, print one table, and return its rows."""
    raw = torch.randint(-(2**63), 2**63 - 1, (num_bytes // 8,), dtype=torch.int64)
    tensor = raw.view(torch.bfloat16)
    matrix = tensor[: tensor.numel() // MATRIX_ROWS * MATRIX_ROWS].view(MATRIX_ROWS, -1)
    half = (slice(None), slice(0, matrix.shape[1] // 2))
    columns = matrix[half].contiguous()
    at = torch.randperm(tensor.numel() // DELTA_SHARE) * DELTA_SHARE
    old = tensor[at]
    blocks = tensor.view(torch.uint16)[: tensor.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    rows = matrix[:1024]
    kinds: dict[str, tuple[int, Callable[[], object]]] = {
        "read": (num_bytes, raw.sum),
        "finite (aminmax of bfloat16)": (num_bytes, functools.partial(torch.aminmax, tensor)),
        **{f"fingerprint, {_name(d)}": (num_bytes, functools.partial(fingerprint, raw.view(d))) for d in DTYPES},
        "rows of a shard": (rows.nbytes, lambda: fingerprint_slice(rows, matrix.shape, (slice(0, 1024),))),
        "columns of a shard": (columns.nbytes, lambda: fingerprint_slice(columns, matrix.shape, half)),
        f"delta of 1 element in {DELTA_SHARE}": (old.nbytes, lambda: fingerprint_update(0, at, old, old)),
        "64-bit products, bfloat16": (blocks.nbytes, lambda: wrapping_block_sums(blocks)),
    }
    best = best_seconds({name: evaluate for name, (_, evaluate) in kinds.items()}, rounds)
    read = num_bytes / best["read"]
    result = [
        {"kind": name, "bytes": size, "bytes_per_s": size / best[name], "times_a_read": read * best[name] / size}
        for name, (size, _) in kinds.items()
    ]
    _print(result, num_bytes, console)
    return result


def best_seconds(kinds: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least time of each kind, in rounds of all kinds; of the process's CPU if it has one thread."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(kinds, float("inf"))
    for turn in range(rounds + 1):
        for name, evaluate in kinds.items():
            start = clock()
            evaluate()
            seconds = clock() - start
            if turn:  # the first one fills caches and tables
                best[name] = min(best[name], seconds)
    return best


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print(rows: list[dict], num_bytes: int, console: Console) -> None:
    table = Table(title=f"Fingerprints of {num_bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    for column in ("what", "GB/s", "time, in reads of as many bytes"):
        table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
    for row in rows:
        table.add_row(row["kind"], f"{row['bytes_per_s'] / 1e9:.2f}", f"{row['times_a_read']:.1f}")
    console.print(table)
    taken = next(row["times_a_read"] for row in rows if row["kind"] == "fingerprint, bfloat16")
    console.print(f"bfloat16 in {taken:.1f} reads, goal {GOAL:.0f}: {'reached' if taken <= GOAL else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = run(args.megabytes << 20, args.rounds, Console())
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
