"""Attention of whole sequences by the engine's backend, under autograd.

Shapes: T tokens, H query heads, hd head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollout.attention.base import AttentionBackend
from rollout.attention.torch_native import TorchNativeBackend
from rollout.core.forward_batch import ForwardBatch
from rollout.core.specs.layer_specs import KVKind
from rollout.kernels.operator import Gradient
from rollout.memory.kv_pool import KVPool
from rollout.numerics.operators import Differentiable


class DifferentiableAttention(AttentionBackend):
    """`backend` over its `kv`, with the gradients of plain attention, for batches of sequences without cached prefixes.

    `layers`: the kind of KV that each layer keeps.
    """

    def __init__(self, backend: AttentionBackend, layers: Sequence[KVKind | None], tensors: Differentiable) -> None:
        super().__init__(backend.kv)
        self.batch_invariant = backend.batch_invariant
        self._backend, self._layers, self._tensors = backend, layers, tensors
        self._batch: ForwardBatch | None = None

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None

    def plan(self, batch: ForwardBatch) -> None:
        self._backend.plan(batch)
        self._batch = batch

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = self._tensors.stored.get(id(self.kv.k[layer])), self._tensors.stored.get(id(self.kv.v[layer]))

        def operator(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            return self._backend.attend(layer, q, scale, window, sinks)

        formula, rule = self._formula(layer, scale, window), Gradient(flows=("q", "k", "v"), weights=("sinks",))
        (out,) = self._tensors.run(operator, formula, rule, {"q": q, "k": keys, "v": values, "sinks": sinks})
        return out

    def _formula(self, layer: int, scale: float | None, window: int | None) -> Callable[..., torch.Tensor]:
        """Return plain attention to the keys and values of the batch, which are rows of a pool in this formula, too."""
        batch, kept = self._batch, self._layers[layer]
        assert batch is not None and kept is not None, "a step is planned, and this layer keeps its tokens"

        def formula(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            pool = KVPool(0, [kept], q.dtype, q.device)
            pool.k[0], pool.v[0] = k, k[..., : kept.value_size] if v is None else v
            backend = TorchNativeBackend(pool)
            backend.plan(batch)
            return backend.attend(0, q, scale, window, sinks)

        return formula
