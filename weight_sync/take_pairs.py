"""`take_pairs`: the quantised weights of a bucket are taken to where they live by two tables, in one pass.

A weight that comes in parts (`paired_wire`), or that is quantised here (`held_format`), is one row, if all of it lies
in the bucket:

    as sent    values in a dtype | FP8, elements and scales | INT4, words, scales and shape
    values     cast, or elements times scales, in the model's dtype
    as held    values | in 8 bits | FP8 or INT4, as they came or made of the values

`fp8_blocks`, `int4_groups` and `int8_blocks` define the bits.

* `pairs`: int64 [Q, 11], of each weight a `PairRow`.
* `moves`: int64 [M, 11], as in `weight_sync.spans`.  Values go by the kinds of `take_spans`, elements and scales by
  PACKED_FP8 and PACKED_INT4, or by ROWS_FP8 and ROWS_INT4.

Engines on a CPU bring the kernel (`rollout/kernels/csrc/take_pairs.cpp`).  A CUDA device with Triton has that of
`weight_sync.pairs_gpu`.  Elsewhere such weights go tensor by tensor.

Shapes: Q weights, M moves.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from weight_sync.block_sums import kernels_of
from weight_sync.fingerprint_words import multipliers
from weight_sync.moves import ROW_KINDS, MoveKind
from weight_sync.pair_tables import PAIR_COLUMNS, PairRow

SCALE_TOO_LARGE = 8
"""The flag of a scale of 2**120 or more, which matters where pairs are held as they came."""
_WRONG = 7


class PairsFound(NamedTuple):
    """The result of one call: `sums` uint64 [Q, 4], F of the parts in the order of their kind and F of the values held
    last; `wrong` uint8 [Q], which is 0 for a weight of which all is right.
    """

    sums: np.ndarray
    wrong: np.ndarray


class PairTables:
    """The two tables of one layout.  `limited` [Q]: whether a large scale is wrong."""

    def __init__(self, rows: Sequence[PairRow], moves: torch.Tensor, limited: Sequence[bool]) -> None:
        self._pairs = torch.tensor(rows, dtype=torch.int64).view(-1, PAIR_COLUMNS)
        self._moves = moves
        self._on_device: Any = None
        self._mask = np.where(np.array(limited, dtype=np.bool_), _WRONG | SCALE_TOO_LARGE, _WRONG).astype(np.uint8)

    def take(
        self,
        source: torch.Tensor,
        storages: Sequence[torch.Tensor],
        checks: bool = True,
        writes: bool = True,
        live: Sequence[torch.Tensor] | None = None,
    ) -> PairsFound:
        """Take a bucket, uint8 [bytes]; without `checks` or `writes`, and with `live`, as `SpanTables.take`.

        Raises `RuntimeError` for a table that does not fit the source and the storages; nothing is written then.  With
        `checks` the host waits for a device here.
        """
        if kernels_of(source.device) is not None:
            return self._take_on_device(source, storages, checks, writes, live)
        assert live is None, "only the kernel of a device folds"
        table = multipliers(str(source.device))
        sums_Q4, wrong_Q = torch.ops.weight_sync.take_pairs(
            source, self._pairs, self._moves, storages, table, checks, writes
        )
        return PairsFound(sums_Q4.numpy().view(np.uint64), wrong_Q.numpy() & self._mask)

    def _take_on_device(
        self,
        source: torch.Tensor,
        storages: Sequence[torch.Tensor],
        checks: bool,
        writes: bool,
        live: Sequence[torch.Tensor] | None,
    ) -> PairsFound:
        checked = storages if live is None else live
        if self._on_device is None or not self._on_device.fits(source, checked):
            kernels = importlib.import_module("weight_sync.pairs_gpu")
            self._on_device = kernels.GpuPairs(source, self._pairs, self._moves, checked)
        sums_Q4, wrong_Q = self._on_device.take(source, storages, checks, writes, live)
        if not checks:  # both are zeros, and nothing waits for them
            return PairsFound(np.zeros(sums_Q4.shape, np.uint64), np.zeros(wrong_Q.shape, np.uint8))
        found_Q5 = torch.cat([sums_Q4, wrong_Q.unsqueeze(1).to(torch.int64)], 1).cpu().numpy()
        return PairsFound(found_Q5[:, :4].view(np.uint64), found_Q5[:, 4].astype(np.uint8) & self._mask)


def is_compiled(device: torch.device | None) -> bool:
    """Return whether there is a kernel for weights on `device`; None: no weights, as on a CPU."""
    if device is not None and kernels_of(device) is not None:
        return True
    is_cpu = device is None or device.type == "cpu"
    return is_cpu and torch._C._dispatch_has_kernel_for_dispatch_key("weight_sync::take_pairs", "CPU")


def kinds_of(device: torch.device | None) -> Collection[MoveKind]:
    """Return the kinds of moves that the kernel for weights on `device` knows."""
    if device is not None and kernels_of(device) is not None:
        return (MoveKind.BOX, *ROW_KINDS)
    return [kind for kind in MoveKind if kind not in ROW_KINDS]


torch.library.define(
    "weight_sync::take_pairs",
    "(Tensor source, Tensor pairs, Tensor moves, Tensor(a!)[] storages, Tensor multipliers, bool checks, bool writes)"
    " -> (Tensor, Tensor)",
)
