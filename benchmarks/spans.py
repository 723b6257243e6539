"""`take_spans`: what it takes to bring a tensor from a bucket to where it lives, next to a plain copy of its bytes.

    python -m benchmarks.spans [--megabytes 64] [--threads 1]

A bucket is full of tensors of one size.  "plain copy" copies the bucket as one tensor; "sums" is the operator without
writes; "copies" is the operator without checks.  Rounds of all kinds alternate, and the best of each counts.  With one
thread the process's CPU time is taken.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fingerprint import best_seconds
from rollout.kernels.build import load_kernels
from weight_sync.moves import MoveKind
from weight_sync.spans import DTYPE_CODES, SpanTensor
from weight_sync.take_spans import take_spans

SIZES = {"512 B": (4, 64), "8 kB": (16, 256), "2 MB": (1024, 1024)}
"""Rows and columns of bfloat16."""
BF16 = torch.bfloat16


class Bucket:
    """A bucket of tensors [rows, columns] of `sent`, and a storage that holds them as `held`."""

    def __init__(
        self,
        num_bytes: int,
        shape: tuple[int, int],
        sent: torch.dtype = BF16,
        held: torch.dtype = BF16,
        packed: bool = False,
        turned: bool = False,
    ) -> None:
        rows, columns = shape
        size, numel = rows * columns * sent.itemsize, rows * columns
        self.count = num_bytes // size
        self.source = torch.randn(self.count * numel).to(sent).view(torch.uint8)
        strides = (1, rows) if turned else (columns, 1)
        codes = DTYPE_CODES[sent], DTYPE_CODES[held]
        wholes = [SpanTensor.whole(n * size, *codes, rows, columns, *strides) for n in range(self.count)]
        self._tensors = torch.tensor(wholes)
        if packed:
            storage = torch.ops.lockstep.empty_packed([self.count], rows, columns, held)
            kind, layout = MoveKind.PACKED, (0, 1, 0)
        else:
            storage = torch.zeros(self.count, numel, dtype=held)
            kind, layout = MoveKind.BOX, (columns, 1, 0)
        step = storage[0].nbytes
        moves = [(n, kind, 0, n * step, 0, rows, 0, columns, *layout) for n in range(self.count)]
        self._moves, self._storage = torch.tensor(moves), storage.view(-1).view(torch.uint8)

    def take(self, checks: bool = True, writes: bool = True) -> None:
        take_spans(self.source, self._tensors, self._moves, [self._storage], checks, writes)


def run(num_bytes: int, rounds: int, console: Console) -> list[dict]:
    """Measure every size, print one table each, and return the rows."""
    status = load_kernels()
    assert status.available, status.reason
    return [row for size in SIZES for row in _of_size(size, num_bytes, rounds, console)]


def _of_size(size: str, num_bytes: int, rounds: int, console: Console) -> list[dict]:
    shape = SIZES[size]
    plain = Bucket(num_bytes, shape)
    buckets = {
        "copied and checked": plain,
        "packed": Bucket(num_bytes, shape, packed=True),
        "turned": Bucket(num_bytes, shape, turned=True),
        "float32 cast": Bucket(num_bytes, shape, sent=torch.float32),
        "float32 cast and packed": Bucket(num_bytes, shape, sent=torch.float32, packed=True),
    }
    target = torch.empty_like(plain.source)
    kinds: dict[str, tuple[Bucket, Callable[[], object]]] = {
        "plain copy": (plain, functools.partial(target.copy_, plain.source)),
        "copies": (plain, functools.partial(plain.take, checks=False)),
        "sums": (plain, functools.partial(plain.take, writes=False)),
        **{name: (bucket, bucket.take) for name, bucket in buckets.items()},
    }
    best = best_seconds({name: evaluate for name, (_, evaluate) in kinds.items()}, rounds)
    copy = best["plain copy"] / plain.source.numel()
    rows = [
        {
            "kind": f"spans, {name}",
            "tensor": size,
            "us_a_tensor": best[name] / bucket.count * 1e6,
            "bytes_per_s": bucket.source.numel() / best[name],
            "times_a_copy": best[name] / bucket.source.numel() / copy,
        }
        for name, (bucket, _) in kinds.items()
    ]
    _print(rows, size, console)
    return rows


def _print(rows: list[dict], size: str, console: Console) -> None:
    table = Table(title=f"A bucket of tensors of {size}, {torch.get_num_threads()} threads")
    for column in ("what", "us a tensor", "GB/s", "time, in plain copies"):
        table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
    for row in rows:
        numbers = f"{row['us_a_tensor']:.3f}", f"{row['bytes_per_s'] / 1e9:.2f}", f"{row['times_a_copy']:.1f}"
        table.add_row(row["kind"].removeprefix("spans, "), *numbers)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = run(args.megabytes << 20, args.rounds, Console())
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
