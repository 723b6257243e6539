"""The kernel that gathers the slots of a step's sequences, interpreted: the slots that torch gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import interpreted  # before any kernel

# isort: split
from rollout.attention.flashinfer_sequences import gather_slots
from rollout.kernels.gpu import gather_slots as kernels

TABLE = torch.randint(0, 1 << 31, (7, 5000), generator=torch.Generator().manual_seed(0))
STEPS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "long and short": ([3, 6, 0, 2], [0, 4, 2500, 4999], [5000, 1, 2049, 1]),
    "a window that has not begun": ([1, 4, 5], [0, 7, 0], [0, 1024, 0]),
    "one block": ([2], [10], [1024]),
    "no sequence": ([], [], []),
}


def is_right(step: tuple[list[int], list[int], list[int]], module: Any = kernels) -> bool:
    rows, first, counts = (np.array(part, dtype=np.int64) for part in step)
    expected = gather_slots(TABLE, rows, first, counts)
    spans = torch.from_numpy(np.stack([rows * TABLE.stride(0) + first, counts, np.cumsum(counts) - counts]))
    found = module.gather_slots(TABLE, spans, int(counts.max(initial=0)), int(counts.sum()))
    return found.dtype == torch.int32 and torch.equal(found, expected)


@pytest.mark.parametrize("name", STEPS)
def test_slots_are_those_that_torch_gathers(name: str) -> None:
    assert is_right(STEPS[name])


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.store(out + begin + at", "tl.store(out + at"),
        ("* BLOCK + tl.arange(0, BLOCK)", "* (BLOCK + 1) + tl.arange(0, BLOCK)"),
        ("tl.load(spans + sequence) + at", "tl.load(spans) + at"),
        ("triton.cdiv(longest, _BLOCK)", "1"),
    ],
)
def test_wrong_kernels_are_noticed(old: str, new: str, tmp_path: Path) -> None:
    wrong = interpreted.mutated(kernels, tmp_path, (old, new))
    assert not is_right(STEPS["long and short"], wrong)
