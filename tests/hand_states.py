"""States of a model's sequences by hand, for tests that run a model without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from rollout.core.layer_specs import RecurrentState


class HandStates:
    """Row n is that of request n; the last row is nobody's."""

    def __init__(self, layers: Sequence[RecurrentState | None], num_rows: int, dtype: torch.dtype) -> None:
        shapes = [layer or RecurrentState(0, 1, 0, 0, 0) for layer in layers]
        state = torch.promote_types(dtype, torch.float32)
        nan = float("nan")
        self.conv = [torch.full((num_rows, x.conv_size - 1, x.conv_channels), nan, dtype=dtype) for x in shapes]
        self.state = [torch.full((num_rows, x.num_heads, x.key_dim, x.value_dim), nan, dtype=state) for x in shapes]

    def operands(
        self,
        lens: Sequence[int],
        rows: Sequence[int],
        sources: Sequence[int],
        snapshots: Sequence[tuple[int, int, int]] = (),
    ) -> Any:
        tensors = [torch.tensor(values, dtype=torch.int64) for values in (lens, rows, sources)]
        return SimpleNamespace(
            pool=self, operands=(*tensors, torch.tensor(list(snapshots), dtype=torch.int64).view(-1, 3))
        )
