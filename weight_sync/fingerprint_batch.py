"""`fingerprints_of`: F of many tensors together, for a price by bytes and not by tensors.

On a CPU the words of small tensors are copied end to end into blocks of a scratch area.  Each tensor stands at its own
place within a block, with zeros around it.  One product then gives the sums of all blocks.  So thousands of small
tensors take a few parallel regions of torch's threads instead of several each.  Where cores are busy, each such region
waits until a thread runs.  On a CUDA device there is one kernel a tensor, and all results are read back at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from weight_sync.block_sums import kernels_of
from weight_sync.bucket import copy_into
from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint import NO_MASK, fingerprint
from weight_sync.fingerprint_words import BLOCK, UNSIGNED, mix_odd, multipliers
from weight_sync.tensor_meta import DTYPES, dtype_name

_BATCH_BLOCKS = 1024
"""Blocks of one product: 8 MiB of bfloat16."""
_ALONE_BLOCKS = 256
"""From this size on a tensor is not copied."""
_MASK = (1 << 64) - 1

Shard = tuple[torch.Tensor, torch.dtype, int]
"""A tensor, the dtype in which it is meant, and the flat index of its first element in the whole logical tensor."""


def fingerprints_of(shards: Iterable[Shard]) -> list[int]:
    """Return F, in [0, 2^64), of each shard as `weight_sync.fingerprint` defines it.

    Tensors may have any shape, strides, device and dtype; one of another dtype than it is meant in is cast.
    Scratch memory is some MiB for each item size, and a copy of one tensor.  Raises `WeightRequestError` for a dtype
    without a fingerprint.
    """
    values: dict[int, int] = {}
    batches: dict[int, _Batch] = {}
    on_device: dict[int, torch.Tensor] = {}
    for index, (tensor, dtype, offset) in enumerate(shards):
        if dtype not in DTYPES.values():
            raise WeightRequestError(f"no fingerprint for dtype {dtype_name(dtype)}")
        kernels = kernels_of(tensor.device)
        if kernels is not None:
            words = tensor.detach().to(dtype).contiguous().view(-1).view(UNSIGNED[dtype.itemsize])
            on_device[index] = kernels.gpu_sum_and_flag(words, offset, NO_MASK)[0]
        elif tensor.device.type != "cpu" or tensor.numel() >= _ALONE_BLOCKS * BLOCK:
            values[index] = fingerprint(tensor.detach().to(dtype), offset)
        else:
            batch = batches.setdefault(dtype.itemsize, _Batch(dtype.itemsize))
            if not batch.has_room_for(tensor.numel(), offset):
                values |= batch.taken()
            batch.add(index, tensor.detach(), dtype, offset)
    for batch in batches.values():
        values |= batch.taken()
    for device in {result.device for result in on_device.values()}:
        here = {index: result for index, result in on_device.items() if result.device == device}
        values |= zip(here, (value & _MASK for value in torch.stack(list(here.values())).tolist()), strict=True)
    return [values[index] for index in range(len(values))]


@dataclass
class _Rows:
    """The blocks of one shard in the scratch area: `count` of them, of the logical tensor from block `block` on.

    The shard begins `phase` words into the first, and has `size` words.
    """

    index: int
    block: int
    count: int
    phase: int
    size: int


@dataclass
class _Batch:
    """Shards of one item size, `width` bytes, that wait for their product."""

    width: int
    _rows: list[_Rows] = field(default_factory=list)
    _num_rows: int = 0

    def __post_init__(self) -> None:
        self._words = torch.empty(_BATCH_BLOCKS * BLOCK, dtype=UNSIGNED[self.width])

    def has_room_for(self, size: int, offset: int) -> bool:
        return self._num_rows + _num_blocks(size, offset) <= _BATCH_BLOCKS

    def add(self, index: int, tensor: torch.Tensor, dtype: torch.dtype, offset: int) -> None:
        """Copy a shard to its place, in its dtype."""
        rows = _Rows(index, offset // BLOCK, _num_blocks(tensor.numel(), offset), offset % BLOCK, tensor.numel())
        room = self._words[self._num_rows * BLOCK : (self._num_rows + rows.count) * BLOCK]
        end = rows.phase + rows.size
        room[: rows.phase].zero_()
        room[end:].zero_()
        copy_into(room[rows.phase : end].view(dtype).view(tensor.shape), tensor)
        self._rows.append(rows)
        self._num_rows += rows.count

    def taken(self) -> dict[int, int]:
        """Return F of each shard by its index, and make room for others.

        R rows in the scratch area, of S shards.
        """
        rows, num_rows = self._rows, self._num_rows
        self._rows, self._num_rows = [], 0
        if num_rows == 0:
            return {shard.index: 0 for shard in rows}
        words_RN = self._words[: num_rows * BLOCK].view(num_rows, BLOCK)
        table = multipliers("cpu")
        sums_R, _ = torch.ops.weight_sync.block_sums(words_RN, table, 0)
        counts_S = np.array([shard.count for shard in rows])
        of_shard_R = np.repeat(np.arange(len(rows)), counts_S)
        nth_R = np.arange(num_rows) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)
        phase_R = np.array([shard.phase for shard in rows])[of_shard_R]
        end_R = phase_R + np.array([shard.size for shard in rows])[of_shard_R]
        first_R = np.clip(phase_R - nth_R * BLOCK, 0, BLOCK)
        last_R = np.clip(end_R - nth_R * BLOCK, 0, BLOCK)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), table.cumsum(0)])  # sums of multipliers wrap, too
        sums_R = sums_R + before[torch.from_numpy(last_R)] - before[torch.from_numpy(first_R)]  # the "+ 1" of a word
        blocks_R = torch.from_numpy(np.array([shard.block for shard in rows])[of_shard_R] + nth_R)
        totals_S = torch.zeros(len(rows), dtype=torch.int64)
        totals_S.index_add_(0, torch.from_numpy(of_shard_R), mix_odd(2 * blocks_R) * sums_R)
        return {shard.index: value & _MASK for shard, value in zip(rows, totals_S.tolist(), strict=True)}


def _num_blocks(size: int, offset: int) -> int:
    """Return how many blocks a shard of `size` words at flat index `offset` touches."""
    return -(-(offset % BLOCK + size) // BLOCK) if size else 0
