"""The kernel that gathers the slots of a step's sequences, interpreted: the slots that torch gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import interpreted  # before any kernel

# isort: split
from rollout.attention.flashinfer_sequences import gather_rows, gather_slots
from rollout.kernels.gpu import gather_slots as kernels

TABLE = torch.randint(0, 1 << 31, (7, 5000), generator=torch.Generator().manual_seed(0))
STEPS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "long and short": ([3, 6, 0, 2], [0, 4, 2500, 4999], [5000, 1, 2049, 1]),
    "a window that has not begun": ([1, 4, 5], [0, 7, 0], [0, 1024, 0]),
    "one block": ([2], [10], [1024]),
    "no sequence": ([], [], []),
}


def is_right(step: tuple[list[int], list[int], list[int]], module: Any = kernels, *, in_rows: bool = False) -> bool:
    rows, first, counts = (np.array(part, dtype=np.int64) for part in step)
    places, begins, longest = rows * TABLE.stride(0) + first, np.cumsum(counts) - counts, int(counts.max(initial=0))
    if in_rows:
        expected, begins = gather_rows(TABLE.view(-1).int(), places, counts), np.arange(len(counts)) * longest
    else:
        expected = gather_slots(TABLE, rows, first, counts)
    found = torch.zeros(expected.shape, dtype=torch.int32)
    module.gather_slots(TABLE, torch.from_numpy(np.stack([places, counts, begins])), longest, found.view(-1))
    return torch.equal(found, expected)


def by_numpy(step: tuple[list[int], list[int], list[int]]) -> list[list[int]]:
    return [TABLE[row, at : at + count].tolist() for row, at, count in zip(*step)]


@pytest.mark.parametrize("name", STEPS)
def test_torch_gathers_the_slots_of_each_sequence(name: str) -> None:
    rows, first, counts = (np.array(part, dtype=np.int64) for part in STEPS[name])
    wanted = by_numpy(STEPS[name])
    assert gather_slots(TABLE, rows, first, counts).tolist() == [slot for slots in wanted for slot in slots]
    found = gather_rows(TABLE.view(-1).int(), rows * TABLE.stride(0) + first, counts)
    longest = max(map(len, wanted), default=0)
    assert found.tolist() == [slots + [0] * (longest - len(slots)) for slots in wanted]


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_slots_are_those_that_torch_gathers(name: str, in_rows: bool) -> None:
    assert is_right(STEPS[name], in_rows=in_rows)


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
