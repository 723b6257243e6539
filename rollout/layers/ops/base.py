"""What layers compute with: the operations of which there is more than one implementation.

A model is given one `LayerOps` when it is built and hands it to its layers.  It also decides how matrices are stored:
layers allocate through it and reach logical content through `Place`s.  Knows nothing of parameters, names or requests.

Shapes: T tokens, D hidden, O output features, E logical experts, P physical experts, K top-k, I intermediate,
H query heads, Hkv key/value heads, hd head size, S slots of the KV pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from rollout.attention.base import AttentionBackend
from rollout.layers.ops.place import Place

ExpertPart = Literal["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What an attention block computes with: `norm` [D], the matrices `qkv` and `out`, `qk_norm` [H + Hkv, hd]."""

    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_size: int
    qk_norm: torch.Tensor
    eps: float
    out: torch.Tensor
    hidden_size: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class SparseWeights:
    """What a sparse block computes with where all experts are here: `norm` [D], the router's matrix, the experts."""

    norm: torch.Tensor
    eps: float
    router: torch.Tensor
    num_logical_experts: int
    top_k: int
    normalise: bool
    w13: torch.Tensor
    w2: torch.Tensor
    inner: int


@dataclass(frozen=True)
class LayerRun:
    """Sparse decoder layers `layer_ids` (step 1) of one shape: what each computes with."""

    layers: Sequence[tuple[AttentionWeights, SparseWeights]]
    layer_ids: range

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Eight a layer, in the order in which they are used."""
        return [
            tensor
            for a, s in self.layers
            for tensor in (a.norm, a.qkv, a.qk_norm, a.out, s.norm, s.router, s.w13, s.w2)
        ]


class LayerOps(ABC):
    """Stateless.  All floating-point arguments of a call have one dtype, which is that of the result.

    `weight`, `w13` and `w2` are storage that `empty_matrix` and `empty_experts` gave out.  `residual_TD` is changed in
    place: `hidden_TD` is added to it, where there is one, before the norm.
    """

    # Whether a row of every result has the same bits whatever else is in the batch and however many threads compute.
    batch_invariant = False

    # --- storage ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty_matrix(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Storage for [O, D]."""

    @abstractmethod
    def matrix_place(self, weight: torch.Tensor, rows: range, in_features: int) -> Place:
        """Where the logical rows `rows` (step 1) live: content [len(rows), D]."""

    @abstractmethod
    def empty_experts(
        self, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage `w13` for gate and up projections [P, I, D] each, and `w2` for down projections [P, D, I]."""

    @abstractmethod
    def expert_place(
        self, w13: torch.Tensor, w2: torch.Tensor, part: ExpertPart, physical_id: int, inner: int, hidden: int
    ) -> Place:
        """Where one projection of one expert lives: content [I, D], or [D, I] for the down projection."""

    # --- arithmetic -------------------------------------------------------------------------------------------------

    @abstractmethod
    def gather_rows(self, table: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of a plain table [N, ...] by number [T, ...].  Raises `IndexError`."""

    @abstractmethod
    def matrix_rows(self, weight: torch.Tensor, ids_T: torch.Tensor, in_features: int) -> torch.Tensor:
        """Rows of a matrix by number [T, D]."""

    @abstractmethod
    def linear(self, hidden_TD: torch.Tensor, weight: torch.Tensor, out_features: int) -> torch.Tensor:
        """`hidden @ weight.T` [T, O]."""

    @abstractmethod
    def add_rms_norm(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Root mean square norm over D of the new residual, rounded to the dtype, then times the weight."""

    @abstractmethod
    def norm_linear(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        out_features: int,
    ) -> torch.Tensor:
        """`linear` of `add_rms_norm` [T, O]."""

    @abstractmethod
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
        """`add_rms_norm` [T, D], and of its router logits the K largest probabilities of each token, best first, with
        their logical expert ids [T, K] int64.

        The softmax runs in float32 at least.  With `normalise` the weights of a token are divided by their sum.
        """

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
        """`norm_linear`, `heads_to_pool`, the backend's attention and `linear` [T, D]."""
        w, kv = weights, attention.kv
        qkv = self.norm_linear(residual_TD, hidden_TD, w.norm, w.eps, w.qkv, w.qkv_size)
        query = self.heads_to_pool(qkv, w.qk_norm, angles, w.eps, kv.k[layer_id], kv.v[layer_id], slots_T)
        return self.linear(attention.attend(layer_id, query), w.out, w.hidden_size)

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
        """Layer by layer `attention_block`, `norm_route` and `experts`: what the last one adds to the residual [T, D],
        and the logical ids chosen in each [T, K].

        `tables`: by layer, the physical id of each logical expert [E] where experts do not lie in their own order.
        """
        chosen = []
        for (attention_weights, w), layer_id, table_E in zip(run.layers, run.layer_ids, tables, strict=True):
            hidden_TD = self.attention_block(
                residual_TD, hidden_TD, attention_weights, angles, attention, layer_id, slots_T
            )
            normed_TD, weights_TK, logical_ids_TK = self.norm_route(
                residual_TD, hidden_TD, w.norm, w.eps, w.router, w.num_logical_experts, w.top_k, w.normalise
            )
            physical_ids_TK = logical_ids_TK if table_E is None else table_E[logical_ids_TK]
            hidden_TD = self.experts(normed_TD, physical_ids_TK, weights_TK, w.w13, w.w2, w.inner)
            chosen.append(logical_ids_TK)
        assert hidden_TD is not None, "a run has layers"
        return hidden_TD, chosen

    @abstractmethod
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
        """Norm and rotate queries and keys per head, store keys and values in their slots, return q [T, H, hd].

        `qkv` [T, (H + 2 Hkv) * hd], `qk_weight` [H + Hkv, hd], `angles` [T, 2, hd] of cos and sign-folded sin, pools
        [S, Hkv, hd], `slots_T` [T] int64.
        """

    @abstractmethod
    def silu_and_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` [T, I], gate first, silu(gate) rounded to the dtype."""

    @abstractmethod
    def experts(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
        inner: int,
    ) -> torch.Tensor:
        """SwiGLU of expert `ids[t, k]` on row t: [T, K, D], or with weights their sum over K in slot order [T, D]."""
