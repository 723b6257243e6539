"""`take_spans`: a bucket is taken to where its tensors live by two tables, in one pass: copies, casts and checks.

The tables are described in `weight_sync.spans`.  `SpanTables` takes a bucket

* in an engine on a CPU by a compiled kernel (`rollout/kernels/csrc/take_spans.cpp`), which knows all kinds of moves;
* on a CUDA device with Triton by the kernel of `weight_sync.spans_gpu`, which knows boxes;
* elsewhere in plain torch, which knows boxes, and no `INT8_BLOCKS_CODE`.

The first and the last are `torch.ops.weight_sync.take_spans`.
Every number of both tables is checked before anything is written.

Shapes: T tensors, R rows, C columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weight_sync.block_sums import kernels_of
from weight_sync.fingerprint import EXPONENTS, fingerprint, fingerprint_slice
from weight_sync.fingerprint_words import multipliers, signed, words_of
from weight_sync.spans import SpanMove, SpanTensor, checked_tables
from weight_sync.tensor_meta import DTYPES

Found = tuple[torch.Tensor, torch.Tensor]


def take_spans(
    source: torch.Tensor,
    tensors: torch.Tensor,
    moves: torch.Tensor,
    storages: Sequence[torch.Tensor],
    checks: bool = True,
    writes: bool = True,
) -> Found:
    """Take a bucket; return fingerprints int64 [T, 2] and flags bool [T, 2], of the values as sent and as held.

    A fingerprint is a 64-bit integer that wrapped; a flag is set where a value is not finite.  Without `checks` both
    are zeros, and nothing is read for them.  Without `writes` nothing is written.

    `source`: uint8 [bytes], the bucket or one message of it.  `storages`: uint8 [bytes] each, whole storages or their
    shadows.  Raises `RuntimeError` for a table that does not fit them.
    """
    table = multipliers(str(source.device))
    found: Found = torch.ops.weight_sync.take_spans(source, tensors, moves, storages, table, checks, writes)
    return found


class SpanTables:
    """The two tables of one layout, to be taken for bucket after bucket.

    On a CUDA device with Triton they are checked and copied to the device once for storages of the same sizes.
    """

    def __init__(self, tensors: torch.Tensor, moves: torch.Tensor) -> None:
        self.tensors, self.moves = tensors, moves
        self._on_device: Any = None

    def take(
        self,
        source: torch.Tensor,
        storages: Sequence[torch.Tensor],
        checks: bool = True,
        writes: bool = True,
        live: Sequence[torch.Tensor] | None = None,
    ) -> Found:
        """Compute `take_spans`.

        With `live` storages, on a CUDA device with Triton, `storages` are to hold the exclusive or of what would be
        written there and what the live ones hold; they lie on the device or in pinned memory of the host.
        """
        if kernels_of(source.device) is None:
            assert live is None, "only the kernel of a device folds"
            return take_spans(source, self.tensors, self.moves, storages, checks, writes)
        checked = storages if live is None else live
        if self._on_device is None or not self._on_device.fits(source, checked):
            kernels = importlib.import_module("weight_sync.spans_gpu")
            self._on_device = kernels.GpuSpans(source, self.tensors, self.moves, checked)
        found: Found = self._on_device.take(source, storages, checks, writes, live)
        return found


def on_host(found: Found) -> tuple[np.ndarray, np.ndarray]:
    """Return fingerprints uint64 [T, 2] and flags bool [T, 2] on the host; from a device they are read back at once."""
    sums_T2, flags_T2 = found
    if sums_T2.device.type != "cpu":
        sums_T2, flags_T2 = torch.stack([sums_T2, flags_T2.to(torch.int64)]).cpu().unbind()
    return sums_T2.numpy().view(np.uint64), flags_T2.numpy().astype(np.bool_, copy=False)


def take_spans_plainly(
    source: torch.Tensor,
    tensors: torch.Tensor,
    moves: torch.Tensor,
    storages: Sequence[torch.Tensor],
    table: torch.Tensor,
    checks: bool,
    writes: bool,
) -> Found:
    """Compute the operator without a kernel."""
    spans, steps = checked_tables(source, tensors, moves, storages)
    fingerprints_T2 = torch.zeros(len(spans), 2, dtype=torch.int64, device=source.device)
    infinite_T2 = torch.zeros(len(spans), 2, dtype=torch.bool, device=source.device)
    by_tensor: list[list[SpanMove]] = [[] for _ in spans]
    for step in steps:
        by_tensor[step.tensor].append(step)
    dtypes = list(DTYPES.values())
    for index, span in enumerate(spans):
        sent_RC = _matrix(source, span)
        held_RC = sent_RC.to(dtypes[span.held])
        if checks:
            for column, values in enumerate((sent_RC, held_RC)):
                fingerprints_T2[index, column] = signed(_share(span, values))
                infinite_T2[index, column] = _is_infinite(values)
        for step in by_tensor[index] if writes else ():
            _write(held_RC, span, step, storages[step.storage])
    return fingerprints_T2, infinite_T2


torch.library.define(
    "weight_sync::take_spans",
    "(Tensor source, Tensor tensors, Tensor moves, Tensor(a!)[] storages, Tensor multipliers, bool checks, bool writes)"
    " -> (Tensor, Tensor)",
)
torch.library.impl("weight_sync::take_spans", "CompositeExplicitAutograd", take_spans_plainly)


def _matrix(source: torch.Tensor, span: SpanTensor) -> torch.Tensor:
    """Return the values of a tensor's box [R, C] as they were sent, contiguous."""
    dtype = list(DTYPES.values())[span.sent]
    view = _elements(source, span.offset, dtype.itemsize, span.sizes, span[5:7])
    copied = view.clone(memory_format=torch.contiguous_format)  # which lies well for any dtype
    return copied.view(-1).view(dtype).view(span.sizes)


def _share(span: SpanTensor, values: torch.Tensor) -> int:
    """Return what a box [R, C] contributes to the fingerprint of its tensor."""
    if values.numel() == span.rows * span.columns:
        return fingerprint(values)
    rows = slice(span.first_row, span.first_row + span.num_rows)
    columns = slice(span.first_column, span.first_column + span.num_columns)
    return fingerprint_slice(values, (span.rows, span.columns), (rows, columns))


def _elements(
    content: torch.Tensor, offset: int, width: int, sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Return the bytes of a matrix that lies in `content`, uint8 [R, C, width], a view."""
    return content.as_strided(
        (*sizes, width), (*(stride * width for stride in strides), 1), content.storage_offset() + offset
    )


def _is_infinite(values: torch.Tensor) -> bool:
    mask = EXPONENTS.get(values.dtype)
    if mask is None:
        return False
    return bool(((words_of(values) & mask) == mask).any())


def _write(held_RC: torch.Tensor, span: SpanTensor, step: SpanMove, storage: torch.Tensor) -> None:
    """Write what the box of a tensor has of a move."""
    top, left = max(span.first_row, step.first_row), max(span.first_column, step.first_column)
    bottom = min(span.first_row + span.num_rows, step.first_row + step.num_rows)
    right = min(span.first_column + span.num_columns, step.first_column + step.num_columns)
    if top >= bottom or left >= right:
        return
    rows = slice(top - span.first_row, bottom - span.first_row)
    box = held_RC[rows, left - span.first_column : right - span.first_column].contiguous()
    width = box.itemsize
    offset = step.offset + ((top - step.first_row) * step.a + (left - step.first_column) * step.b) * width
    place = _elements(storage, offset, width, box.shape, (step.a, step.b))
    place.copy_(box.view(-1).view(torch.uint8).view(place.shape))
