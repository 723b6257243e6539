"""What layers compute with: the operations of which there is more than one implementation.

A model is given one `LayerOps` when it is built and hands it to its layers.  Knows nothing of parameters, names or
requests.

Shapes: T tokens, D hidden, O output features, E logical experts, P physical experts, K top-k, I expert intermediate,
H query heads, Hkv key/value heads, hd head size, S slots of the KV pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sign-folded sin, each [T, 1, hd], in the model's dtype


class LayerOps(ABC):
    """Stateless.  All floating-point arguments of a call have one dtype, which is that of the result."""

    # Whether a row of a result has the same bits whatever other rows are there and however many threads compute.
    batch_invariant = False

    @abstractmethod
    def linear(self, hidden_TD: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
        """`hidden @ weight.T` [T, O]."""

    @abstractmethod
    def rms_norm(self, hidden_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square norm over D, rounded to the dtype, then times the weight."""

    @abstractmethod
    def add_rms_norm(
        self, hidden_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """`residual += hidden` in place; the norm of it is returned."""

    @abstractmethod
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
        """Norm and rotate queries and keys per head, store keys and values in their slots, return q [T, H, hd].

        `qkv` [T, (H + 2 Hkv) * hd], `qk_weight` [H + Hkv, hd], pools [S, Hkv, hd], `slots_T` [T] int64.
        """

    @abstractmethod
    def softmax_topk(self, logits_TE: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The K largest probabilities of each token, best first, and their logical expert ids [T, K] int64.

        The softmax runs in float32 at least.  With `normalise` the weights of a token are divided by their sum.
        """

    @abstractmethod
    def experts(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> torch.Tensor:
        """SwiGLU of expert `ids[t, k]` on row t: [T, K, D], or with weights their sum over K in slot order [T, D].

        `w13` [P, 2I, D] holds gate rows, then up rows; `w2` [P, D, I].
        """
