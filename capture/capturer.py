"""`RoutedExpertsCapturer`: where routers leave their choices during one step.

Knows the step's rows and which layers have recorded.  Does not know requests, KV slots or batches.

Shapes: T tokens of the step, L MoE layers, K top-k.
"""

from __future__ import annotations

import torch


class RoutedExpertsCapturer:
    """Takes one record of every MoE layer in every step.

    begin_step(T) -> record(0, ids) .. record(L - 1, ids), in any order -> finish_step() -> L times [T, K]

    The tensors are kept as they are: whoever records one does not change it afterwards.
    A layer that records twice or not at all is a bug of the model's code, hence assertions.
    """

    def __init__(self, num_moe_layers: int, top_k: int) -> None:
        self.num_moe_layers = num_moe_layers
        self.top_k = top_k
        self._shape: tuple[int, int] | None = None
        self._ids: list[torch.Tensor | None] = []

    def begin_step(self, num_tokens: int) -> None:
        """Expect one record of `num_tokens` rows from every MoE layer.  Drops what an unfinished step left."""
        self._shape = (num_tokens, self.top_k)
        self._ids = [None] * self.num_moe_layers

    def record(self, moe_layer: int, logical_ids_TK: torch.Tensor) -> None:
        """Hook for routers: the choices [T, K] int64 of the `moe_layer`-th MoE layer, in the router's order."""
        assert self._shape is not None, "record outside a step"
        known = 0 <= moe_layer < self.num_moe_layers
        assert known and self._ids[moe_layer] is None, f"MoE layer {moe_layer} recorded twice, or does not exist"
        assert logical_ids_TK.shape == self._shape, f"{tuple(logical_ids_TK.shape)} != {self._shape}"
        self._ids[moe_layer] = logical_ids_TK

    def finish_step(self) -> list[torch.Tensor]:
        """The step's choices, by MoE layer."""
        assert self._shape is not None, "finish outside a step"
        ids = [ids_TK for ids_TK in self._ids if ids_TK is not None]
        assert len(ids) == self.num_moe_layers, f"MoE layers {self._absent()} did not record"
        self._shape = None
        return ids

    def _absent(self) -> list[int]:
        return [layer for layer, ids_TK in enumerate(self._ids) if ids_TK is None]
