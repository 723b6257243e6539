"""`LayerOps` by the compiled CPU operators (`rollout.kernels`): bfloat16 and float32.

A row of a result depends on that row of the input only: not on other rows, their number, or the number of threads.
Rounds where `TorchOps` rounds; sums run in another order.  Of equal router scores the lowest expert comes first.

Shapes: as in `base`.
"""

from __future__ import annotations

import torch

from rollout.layers.ops.base import LayerOps, Rotary

DTYPES = (torch.bfloat16, torch.float32)


class NativeOps(LayerOps):
    """`torch.ops.lockstep` must be loaded."""

    batch_invariant = True

    def __init__(self) -> None:
        operators = torch.ops.lockstep
        self._linear = operators.linear.default
        self._rms_norm = operators.rms_norm.default
        self._add_rms_norm = operators.add_rms_norm.default
        self._qk_norm_rope_store = operators.qk_norm_rope_store.default
        self._topk_softmax = operators.topk_softmax.default
        self._fused_experts = operators.fused_experts.default

    def linear(self, hidden_TD: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
        return self._linear(hidden_TD, weight_OD)

    def rms_norm(self, hidden_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return self._rms_norm(hidden_TD, weight_D, eps)

    def add_rms_norm(
        self, hidden_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._add_rms_norm(hidden_TD, residual_TD, weight_D, eps)

    def heads_to_pool(
        self,
        qkv: torch.Tensor,
        qk_weight: torch.Tensor,
        rotary: Rotary,
        eps: float,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        return self._qk_norm_rope_store(qkv, qk_weight, *rotary, k_pool, v_pool, slots_T, eps)

    def softmax_topk(self, logits_TE: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._topk_softmax(logits_TE, top_k, normalise)

    def experts(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> torch.Tensor:
        return self._fused_experts(hidden_TD, physical_ids_TK, weights_TK, w13, w2)
