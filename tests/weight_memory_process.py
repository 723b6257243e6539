"""A process that refreshes matrices of a few hundred MB in one staging mode and prints the memory that it took.

python -m tests.weight_memory_process MODE FOLDER  ->  {"peak": more than before, "weights", "bucket", "tensor"}
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.memory import read_memory
from rollout.kernels.build import load_kernels
from rollout.kernels.ops import compiled_ops
from weight_sync.tensor_meta import Piece, Place, TensorMeta
from weight_sync.transaction import WeightTransaction, new_staging

# 8 packed matrices of 42 MB, in full buckets of two: too large for malloc to keep when they are let go.
COUNT, ROWS, COLUMNS, PER_BUCKET = 8, 20480, 1024, 2


class Matrices:
    """`LogicalWeights` of packed matrices."""

    def __init__(self) -> None:
        ops = compiled_ops()
        storages = {f"w{i}": ops.storage.empty_matrix(ROWS, COLUMNS, torch.bfloat16, "cpu") for i in range(COUNT)}
        self._places = {name: ops.storage.matrix_place(t, range(ROWS), COLUMNS) for name, t in storages.items()}
        self._metas = {name: TensorMeta(name, torch.bfloat16, (ROWS, COLUMNS)) for name in storages}
        for name in storages:
            self.write(name, torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16))

    def metas(self) -> Mapping[str, TensorMeta]:
        return self._metas

    def split(self, wire: TensorMeta) -> list[Piece]:
        return [Piece(wire.name)]

    def nearest(self, name: str) -> str | None:
        return None

    def places(self, name: str) -> list[Place]:
        return [self._places[name]]

    def write(self, name: str, source: torch.Tensor) -> None:
        self._places[name].write(source)

    def read(self, name: str) -> torch.Tensor:
        return self._places[name].read()

    def restore(self, name: str, content: torch.Tensor) -> None:
        self._places[name].restore(content)

    def recompute_derived(self) -> None:
        pass


def refresh(weights: Matrices, mode: str, folder: str) -> None:
    """Refresh with buckets as a receiver delivers them: views of one area that is let go with the bucket."""
    staging = new_staging(weights, mode, folder if mode == "journal" else None)  # type: ignore[arg-type]
    transaction = WeightTransaction(weights, staging=staging)
    names = list(weights.metas())
    for start in range(0, COUNT, PER_BUCKET):
        bucket = names[start : start + PER_BUCKET]
        area = torch.full((len(bucket), ROWS, COLUMNS), 2.0, dtype=torch.bfloat16)
        transaction.receive(list(zip(bucket, area, strict=True)))
        del area
    transaction.verify()
    transaction.commit(lambda mine: mine)


def main() -> None:
    torch.set_num_threads(1)
    assert load_kernels().available
    mode, folder = sys.argv[1:]
    weights = Matrices()
    refresh(weights, mode, folder)  # first use of everything
    ctypes.CDLL(None).malloc_trim(0)  # what the first one freed must not hide what the second takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = read_memory(os.getpid()).resident
    refresh(weights, mode, folder)
    assert bool((weights.read("w0") == 2.0).all())
    tensor = ROWS * COLUMNS * 2
    sizes = {"weights": COUNT * tensor, "bucket": PER_BUCKET * tensor}
    print(json.dumps({"peak": read_memory(os.getpid()).peak - before} | sizes))


if __name__ == "__main__":
    main()
