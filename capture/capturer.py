"""`RoutedExpertsCapturer`: where routers leave their choices during one step.

Knows the step's rows and which layers have recorded.  Does not know requests, KV slots or batches.

Shapes: T tokens of the step, L MoE layers, K top-k.
"""

from __future__ import annotations

import torch

from capture.storage import storage_dtype


class RoutedExpertsCapturer:
    """A device buffer [max_tokens, L, K] at a fixed address; a step fills its first T rows, once per layer.

    begin_step(T) -> record(0, ids) .. record(L - 1, ids), in any order -> finish_step() -> [T, L, K] on the host

    A layer that records twice or not at all is a bug of the model's code, hence assertions.
    """

    def __init__(
        self,
        max_tokens: int,
        num_moe_layers: int,
        top_k: int,
        num_experts: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_tokens = max_tokens
        self.num_moe_layers = num_moe_layers
        self.top_k = top_k
        self.num_experts = num_experts
        self._buffer_TLK = torch.empty(
            (max_tokens, num_moe_layers, top_k), dtype=storage_dtype(num_experts), device=device
        )
        self._num_tokens: int | None = None
        self._pending: dict[int, torch.Tensor] = {}  # MoE layer -> its view [T, K] of the buffer, until it recorded

    def begin_step(self, num_tokens: int) -> None:
        """Expect one record of `num_tokens` rows from every MoE layer.  Drops what an unfinished step left."""
        assert 0 <= num_tokens <= self.max_tokens, f"{num_tokens} tokens, the buffer holds {self.max_tokens}"
        self._num_tokens = num_tokens
        self._pending = dict(enumerate(self._buffer_TLK[:num_tokens].unbind(1)))

    def record(self, moe_layer: int, logical_ids_TK: torch.Tensor) -> None:
        """Hook for routers: the choices [T, K] int64 of the `moe_layer`-th MoE layer, in the router's order."""
        assert self._num_tokens is not None, "record outside a step"
        view_TK = self._pending.pop(moe_layer, None)
        assert view_TK is not None, f"MoE layer {moe_layer} recorded twice, or is not below {self.num_moe_layers}"
        assert logical_ids_TK.shape == view_TK.shape, f"{tuple(logical_ids_TK.shape)} != {tuple(view_TK.shape)}"
        view_TK.copy_(logical_ids_TK)

    def finish_step(self) -> torch.Tensor:
        """The step's rows [T, L, K] of the storage dtype, copied to the host; waits for the device."""
        assert self._num_tokens is not None, "finish outside a step"
        assert not self._pending, f"MoE layers {sorted(self._pending)} did not record"
        rows_TLK = self._buffer_TLK[: self._num_tokens].to("cpu", copy=True)
        self._num_tokens = None
        return rows_TLK
