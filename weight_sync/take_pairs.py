"""`take_pairs`: the quantised weights of a bucket are taken to where they live by two tables, in one pass.

A weight that comes in parts (`paired_wire`), or that is quantised here (`held_format`), is one row, if all of it lies
in the bucket:

    as sent    values in a dtype | FP8, elements and scales | INT4, words, scales and shape
    values     cast, or elements times scales, in the model's dtype
    as held    values | in 8 bits | FP8 or INT4, as they came or made of the values

`fp8_blocks`, `int4_groups` and `int8_blocks` define the bits.

* `pairs`: int64 [Q, 11], of each weight a `PairRow`.
* `moves`: int64 [M, 11], as in `weight_sync.spans`.  Values go by the kinds of `take_spans`, elements and scales by
  PACKED_FP8 and PACKED_INT4.

Engines on a CPU bring the kernel (`rollout/kernels/csrc/take_pairs.cpp`).  Elsewhere such weights go tensor by tensor.

Shapes: Q weights, M moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from weight_sync.fingerprint_words import multipliers

SCALE_TOO_LARGE = 8
"""The flag of a scale of 2**120 or more, which matters where pairs are held as they came."""
_WRONG = 7


class PairForm(IntEnum):
    """The forms in which a weight comes and is held; in `INT8` (`weight_sync.int8_blocks`) it never comes."""

    VALUES = 0
    FP8 = 1
    INT4 = 2
    INT8 = 3


class PairRow(NamedTuple):
    """A row of the table of weights; all parts are dense and row-major.

    `offset`, `scales`, `shape`: bytes of the source at which the parts begin.  `sent`: the dtype (`DTYPE_CODES`) of
    values, of scales of FP8, of the shape of INT4.  `group`: elements that share a scale of INT4.  `rows`, `columns`:
    of the weight.  `values`: the model's dtype.  `held_group`: the same of INT4 that is held.
    """

    offset: int
    form: PairForm
    sent: int
    scales: int
    shape: int
    group: int
    rows: int
    columns: int
    values: int
    held: PairForm
    held_group: int


PAIR_COLUMNS = len(PairRow._fields)


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
        self._mask = np.where(np.array(limited, dtype=np.bool_), _WRONG | SCALE_TOO_LARGE, _WRONG).astype(np.uint8)

    def take(
        self, source: torch.Tensor, storages: Sequence[torch.Tensor], checks: bool = True, writes: bool = True
    ) -> PairsFound:
        """Take a bucket, uint8 [bytes]; without `checks` or `writes` as `take_spans`.

        Raises `RuntimeError` for a table that does not fit the source and the storages; nothing is written then.
        """
        table = multipliers(str(source.device))
        sums_Q4, wrong_Q = torch.ops.weight_sync.take_pairs(
            source, self._pairs, self._moves, storages, table, checks, writes
        )
        return PairsFound(sums_Q4.numpy().view(np.uint64), wrong_Q.numpy() & self._mask)


def is_compiled(device: torch.device | None) -> bool:
    """Return whether there is a kernel for weights on `device`; None: no weights, as on a CPU."""
    is_cpu = device is None or device.type == "cpu"
    return is_cpu and torch._C._dispatch_has_kernel_for_dispatch_key("weight_sync::take_pairs", "CPU")


torch.library.define(
    "weight_sync::take_pairs",
    "(Tensor source, Tensor pairs, Tensor moves, Tensor(a!)[] storages, Tensor multipliers, bool checks, bool writes)"
    " -> (Tensor, Tensor)",
)
