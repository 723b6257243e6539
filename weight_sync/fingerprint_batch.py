"""`FingerprintPlan`: F of many tensors together, by calls that are chosen once from their shapes.

Tensors of one shape and dtype are joined in a scratch area as the rows of a matrix, so that each of its columns meets
one multiplier.  One product then gives the sums of many tensors.  So thousands of small tensors take a few parallel
regions of torch's threads instead of several each.  Where cores are busy, each such region waits until a thread runs.
A large tensor is not copied.  No tensor is where a compiled kernel sums shards where they lie (`shard_sums`).

Shapes: S shards in a matrix, J words of a shard, K blocks that a shard touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.block_sums import kernels_of, shard_sums, sums_where_they_lie
from weight_sync.bucket import PackPlan
from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint import RowPrints, fingerprint
from weight_sync.fingerprint_words import BLOCK, UNSIGNED
from weight_sync.tensor_meta import DTYPES, dtype_name

_BATCH_BYTES = 4 << 20
"""The size of one matrix, at most."""
_ALONE_BLOCKS = 256
"""From this size on a tensor is not copied."""

Shard = tuple[torch.Tensor, torch.dtype, int]
"""A tensor, the dtype in which it is meant, and the flat index of its first element in the whole logical tensor."""


class Form(NamedTuple):
    """The form of a shard: its shape, its own dtype, the one it is meant in, its flat index in the whole tensor."""

    shape: tuple[int, ...]
    source: torch.dtype
    dtype: torch.dtype
    offset: int
    device: torch.device

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def fingerprints_of(shards: Iterable[Shard]) -> list[int]:
    """Return F, in [0, 2^64), of each shard as `weight_sync.fingerprint` defines it.

    Tensors may have any shape, strides, device and dtype; one of another dtype than it is meant in is cast.
    Scratch memory is some MiB, and a copy of each tensor that is not contiguous.  Raises `WeightRequestError` for a
    dtype without a fingerprint.
    """
    listed = list(shards)
    plan = FingerprintPlan(
        [Form((tensor.numel(),), tensor.dtype, dtype, offset, tensor.device) for tensor, dtype, offset in listed]
    )
    values: list[int] = plan.values([tensor.detach().reshape(-1) for tensor, _, _ in listed]).tolist()
    return values


class FingerprintPlan:
    """The calls that give F of shards of these forms, whatever they hold.  Holds no shard.

    Raises `WeightRequestError` for a dtype without a fingerprint.
    """

    def __init__(self, forms: Sequence[Form]) -> None:
        self._size = len(forms)
        self._alone: list[tuple[int, Form]] = []
        members: dict[tuple[object, ...], list[int]] = {}
        for index, form in enumerate(forms):
            if form.dtype not in DTYPES.values():
                raise WeightRequestError(f"no fingerprint for dtype {dtype_name(form.dtype)}")
            if form.size >= _ALONE_BLOCKS * BLOCK:
                self._alone.append((index, form))
            elif form.size:
                key = (form.shape, form.source, form.dtype, form.offset % BLOCK, form.device)
                members.setdefault(key, []).append(index)
        self._matrices = [
            _Matrix(forms[some[0]], some, [forms[index].offset // BLOCK for index in some])
            for group in members.values()
            for some in _batches(group, forms[group[0]])
        ]

    @torch.no_grad()
    def values(self, views: Sequence[torch.Tensor]) -> npt.NDArray[np.uint64]:
        """Return F of each shard: uint64 [n].  `views`: the shards, of the planned forms; best contiguous."""
        values = torch.zeros(self._size, dtype=torch.int64)
        found = [(torch.tensor([index]), _alone(views[index], form)) for index, form in self._alone]
        for device in {matrix.device for matrix in self._matrices}:
            matrices = [matrix for matrix in self._matrices if matrix.device == device]
            scratch = torch.empty(max(matrix.num_bytes for matrix in matrices), dtype=torch.uint8, device=device)
            found += [(matrix.indices, matrix.values(views, scratch)) for matrix in matrices]
        for device in {result.device for _, result in found}:  # what lies on a device is read back at once
            here = [(indices, result) for indices, result in found if result.device == device]
            values[torch.cat([indices for indices, _ in here])] = torch.cat([result for _, result in here]).cpu()
        return values.numpy().view(np.uint64)


def _batches(group: list[int], form: Form) -> Iterator[list[int]]:
    step = max(_BATCH_BYTES // (form.size * form.dtype.itemsize), 1)
    return (group[start : start + step] for start in range(0, len(group), step))


def _alone(view: torch.Tensor, form: Form) -> torch.Tensor:
    """Return F of one shard, int64 [1]; on a CUDA device without waiting for it."""
    kernels = kernels_of(view.device)
    if kernels is None:
        return torch.from_numpy(np.array([fingerprint(view.to(form.dtype), form.offset)], np.uint64).view(np.int64))
    words = view.to(form.dtype).reshape(-1).view(UNSIGNED[form.dtype.itemsize])
    value: torch.Tensor = kernels.gpu_sum(words, form.offset)
    return value


class _Matrix:
    """Shards of one form, but for the blocks `firsts` that they begin with; `indices` number them among all."""

    def __init__(self, form: Form, indices: list[int], firsts: list[int]) -> None:
        self.indices = torch.tensor(indices)
        self.device = form.device
        self._ranges = _ranges(indices)
        self._form, self._count = form, len(indices)
        self._pack = PackPlan([form.shape] * len(indices), form.source, form.dtype, (form.device, form.device))
        one_or_each = firsts[:1] if len(set(firsts)) == 1 else firsts
        self._prints = RowPrints(form.size, form.offset % BLOCK, one_or_each, form.device)

    @property
    def num_bytes(self) -> int:
        """The scratch area that `values` needs: the matrix."""
        return self._count * self._form.size * self._form.dtype.itemsize

    def values(self, views: Sequence[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
        """Return F of each shard, int64 [S], where the shards are."""
        own = [view for first, last in self._ranges for view in views[first:last]]
        is_direct = self._form.source == self._form.dtype and sums_where_they_lie(self.device)
        is_direct = is_direct and all(map(torch.Tensor.is_contiguous, own))  # a transposed source has other views
        if is_direct:
            return self._prints.of_sums(shard_sums(own, self._form.offset % BLOCK))
        joined = scratch[: self.num_bytes].view(self._form.dtype)
        self._pack.pack(own, joined)
        return self._prints.of(joined.view(UNSIGNED[joined.itemsize]).view(self._count, -1))


def _ranges(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as runs: (first, last + 1)."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
