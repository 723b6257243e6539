"""`change_spans` reads tensors from where they live and changes them by a delta, with no step for each of them.

It takes the tables of `weight_sync.spans`, of whole tensors that lie dense in the content and are held as they are
sent.  Moves are read instead of written.  There is a compiled kernel for an engine on a CPU
(`rollout/kernels/csrc/change_spans.cpp`), and no other: `is_compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weight_sync.delta.planes import SizeTable
from weight_sync.spans import MOVE_COLUMNS

_NAME = "weight_sync::change_spans"

torch.library.define(
    _NAME,
    "(Tensor(a!) content, Tensor tensors, Tensor moves, Tensor[] storages, Tensor sizes, Tensor[] planes, bool changes)"
    " -> Tensor",
)


def is_compiled() -> bool:
    """Return whether this process has loaded the kernel."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(_NAME, "CPU"))


class SpanChange:
    """A delta of T tensors that lie in `content`, uint8 [bytes], as `tensors` states.

    `planes`: uint8 each, of all tensors end to end.
    """

    def __init__(
        self, content: torch.Tensor, tensors: torch.Tensor, sizes: SizeTable, planes: Sequence[np.ndarray]
    ) -> None:
        numbers = np.concatenate([sizes.num_changes[:, None], sizes.is_dense[:, None], sizes.counts], axis=1)
        self._content, self._tensors = content, tensors
        self._delta = torch.from_numpy(numbers), [torch.from_numpy(plane) for plane in planes]

    def read(self, moves: torch.Tensor, storages: Sequence[torch.Tensor]) -> None:
        """Read the tensors from `storages`, uint8 [bytes] each.  Raises `RuntimeError` for tables that do not fit."""
        torch.ops.weight_sync.change_spans(self._content, self._tensors, moves, storages, *self._delta, False)

    def apply(self) -> bool:
        """Change the tensors; return whether the planes of each agree with one another, and do not leave it.

        If not, what is in the content is of no use.  Raises `RuntimeError` for sizes that do not fit.
        """
        moves = torch.empty(0, MOVE_COLUMNS, dtype=torch.int64)
        wrong_T = torch.ops.weight_sync.change_spans(self._content, self._tensors, moves, [], *self._delta, True)
        return not bool(wrong_T.any())
