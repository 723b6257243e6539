"""`RoutedExpertsCapturer`: where routers leave their choices during one step.

Knows the step's rows and which layers have recorded.  Does not know requests, KV slots or batches.

Shapes: T tokens of the step, L MoE layers, K top-k.
"""

from __future__ import annotations

import numpy as np
import torch


class RoutedExpertsCapturer:
    """Takes one record of every MoE layer in every step, by copy, into a buffer that belongs to that step alone.

    begin_step(T) -> record(0, ids) .. record(L - 1, ids), in any order -> finish_step() -> [T, L, K]

    A layer that records twice or not at all is a bug of the model's code, hence assertions.
    """

    def __init__(
        self,
        num_moe_layers: int,
        top_k: int,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str = "cpu",
    ) -> None:
        """`dtype`: of the rows; it holds every id."""
        self.num_moe_layers = num_moe_layers
        self.top_k = top_k
        self._dtype, self._device = dtype, torch.device(device)
        self._dtype_on_host = torch.empty(0, dtype=dtype).numpy().dtype
        self._rows_TLK: np.ndarray | torch.Tensor | None = None  # on the host numpy copies few numbers sooner
        self._shape_TK = (0, top_k)
        self._recorded = [False] * num_moe_layers

    def begin_step(self, num_tokens: int) -> None:
        """Expect one record of `num_tokens` rows from every MoE layer.  Drops what an unfinished step left."""
        shape = (num_tokens, self.num_moe_layers, self.top_k)
        if self._device.type == "cpu":
            self._rows_TLK = np.empty(shape, dtype=self._dtype_on_host)
        else:
            self._rows_TLK = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._shape_TK = (num_tokens, self.top_k)
        self._recorded = [False] * self.num_moe_layers

    def record(self, moe_layer: int, logical_ids_TK: torch.Tensor) -> None:
        """Hook for routers: copy the choices [T, K] of the `moe_layer`-th MoE layer, in the router's order."""
        rows_TLK = self._rows_TLK
        assert rows_TLK is not None, "record outside a step"
        known = 0 <= moe_layer < self.num_moe_layers
        assert known and not self._recorded[moe_layer], f"MoE layer {moe_layer} recorded twice, or does not exist"
        assert logical_ids_TK.shape == self._shape_TK, f"{tuple(logical_ids_TK.shape)} != {self._shape_TK}"
        if isinstance(rows_TLK, np.ndarray):
            rows_TLK[:, moe_layer] = logical_ids_TK.numpy()
        else:
            rows_TLK[:, moe_layer] = logical_ids_TK
        self._recorded[moe_layer] = True

    def finish_step(self) -> torch.Tensor:
        """The step's choices [T, L, K], the caller's to keep."""
        rows_TLK = self._rows_TLK
        assert rows_TLK is not None, "finish outside a step"
        assert all(self._recorded), f"MoE layers {self._absent()} did not record"
        self._rows_TLK = None
        return torch.from_numpy(rows_TLK) if isinstance(rows_TLK, np.ndarray) else rows_TLK

    def _absent(self) -> list[int]:
        return [layer for layer, is_there in enumerate(self._recorded) if not is_there]
