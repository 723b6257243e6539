"""`LayerOps` by the compiled CPU operators (`rollout.kernels`): bfloat16 and float32.

Matrices are packed once, when they are written.  A row of a result depends on that row of the input only: not on other
rows, their number, or the number of threads.  Rounds where `TorchOps` rounds; sums run in another order.  Of equal
router scores the lowest expert comes first.

Shapes: as in `base`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.attention.base import AttentionBackend
from rollout.layers.ops.base import AttentionWeights, ExpertPart, LayerOps, LayerRun
from rollout.layers.ops.place import PackedPlace, Place

DTYPES = (torch.bfloat16, torch.float32)
_ROW_BLOCK = 16  # rows of a projection that lie together; gate and up projections alternate by such blocks


class NativeOps(LayerOps):
    """`torch.ops.lockstep` must be loaded."""

    batch_invariant = True

    def __init__(self) -> None:
        operators = torch.ops.lockstep
        self._empty_packed = operators.empty_packed.default
        self._packed_embedding = operators.packed_embedding.default
        self._gather_rows = operators.gather_rows.default
        self._linear = operators.linear.default
        self._add_rms_norm = operators.add_rms_norm.default
        self._norm_linear = operators.norm_linear.default
        self._norm_route = operators.norm_route.default
        self._decoder_layers = operators.decoder_layers.default
        self._attention_block = operators.attention_block.default
        self._qk_norm_rope_store = operators.qk_norm_rope_store.default
        self._silu_and_mul = operators.silu_and_mul.default
        self._fused_experts = operators.fused_experts.default

    def empty_matrix(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        return self._empty_packed([], out_features, in_features, dtype)

    def matrix_place(self, weight: torch.Tensor, rows: range, in_features: int) -> Place:
        return PackedPlace(weight, rows, in_features)

    def empty_experts(
        self, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = 2 * _ROW_BLOCK * -(-inner // _ROW_BLOCK)
        return self._empty_packed([experts], both, hidden, dtype), self._empty_packed([experts], hidden, inner, dtype)

    def expert_place(
        self, w13: torch.Tensor, w2: torch.Tensor, part: ExpertPart, physical_id: int, inner: int, hidden: int
    ) -> Place:
        if part == "down_proj":
            return PackedPlace(w2[physical_id], range(hidden), inner)
        return PackedPlace(w13[physical_id], range(inner), hidden, step=2, offset=int(part == "up_proj"))

    def gather_rows(self, table: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        return self._gather_rows(table, ids_T)

    def matrix_rows(self, weight: torch.Tensor, ids_T: torch.Tensor, in_features: int) -> torch.Tensor:
        return self._packed_embedding(weight, ids_T, in_features)

    def linear(self, hidden_TD: torch.Tensor, weight: torch.Tensor, out_features: int) -> torch.Tensor:
        return self._linear(hidden_TD, weight, out_features)

    def add_rms_norm(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._add_rms_norm(residual_TD, hidden_TD, weight_D, eps)

    def norm_linear(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        out_features: int,
    ) -> torch.Tensor:
        return self._norm_linear(residual_TD, hidden_TD, norm_weight_D, eps, weight, out_features)

    def norm_route(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        num_logical_experts: int,
        top_k: int,
        normalise: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._norm_route(
            residual_TD, hidden_TD, norm_weight_D, eps, weight, num_logical_experts, top_k, normalise
        )

    def attention_block(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        weights: AttentionWeights,
        angles: torch.Tensor,
        attention: AttentionBackend,
        layer_id: int,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        operands = attention.operands
        if operands is None:
            return super().attention_block(residual_TD, hidden_TD, weights, angles, attention, layer_id, slots_T)
        w, kv = weights, attention.kv
        return self._attention_block(
            residual_TD,
            hidden_TD,
            *(w.norm, w.eps, w.qkv, w.qkv_size, w.qk_norm),
            *(angles, kv.k[layer_id], kv.v[layer_id], slots_T),
            *operands,
            w.head_dim**-0.5,
            w.out,
            w.hidden_size,
        )

    def decoder_layers(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        run: LayerRun,
        tables: Sequence[torch.Tensor | None],
        angles: torch.Tensor,
        attention: AttentionBackend,
        slots_T: torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kv, operands, ids = attention.kv, attention.operands, run.layer_ids
        if operands is None:
            return super().decoder_layers(residual_TD, hidden_TD, run, tables, angles, attention, slots_T)
        a, s = run.layers[0]
        return self._decoder_layers(
            *(residual_TD, hidden_TD, run.tensors, tables, angles),
            *(kv.k[ids.start : ids.stop], kv.v[ids.start : ids.stop], slots_T),
            *operands,
            *(a.eps, a.head_dim**-0.5, a.qkv_size, a.hidden_size),
            *(s.num_logical_experts, s.top_k, s.normalise, s.inner),
        )

    def heads_to_pool(
        self,
        qkv: torch.Tensor,
        qk_weight: torch.Tensor,
        angles: torch.Tensor,
        eps: float,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        return self._qk_norm_rope_store(qkv, qk_weight, angles, k_pool, v_pool, slots_T, eps)

    def silu_and_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        return self._silu_and_mul(gate_up_T2I)

    def experts(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
        inner: int,
    ) -> torch.Tensor:
        return self._fused_experts(hidden_TD, physical_ids_TK, weights_TK, w13, w2, inner)
