"""The key and value tensors of all layers, by slot.

Also keeps, per slot, the weight epoch that wrote it, so that KV can never lie about its age.
Does not know which slots are free.

Stamps are copied, and entered some steps later, in their order, at the latest when somebody reads: torch calls in a row
cost a fraction of the same calls after a forward that emptied the caches.

Shapes: S slots, T tokens of a step, H_kv key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.core.layer_specs import FullKV

_MOST_STEPS_NOTED = 32


class KVPool:
    """`k[layer]`, `v[layer]`: [S, H_kv, head_dim].  They keep their addresses."""

    def __init__(
        self,
        num_slots: int,
        layers: Sequence[FullKV],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shapes = [(num_slots, layer.num_heads, layer.head_dim) for layer in layers]
        self.k = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self._epoch = torch.empty(num_slots, dtype=torch.int32)
        self._noted: list[tuple[torch.Tensor | np.ndarray, int]] = []

    def stamp(self, out_cache_loc: torch.Tensor, weight_epoch: int) -> None:
        """Note that the forward that just wrote `out_cache_loc` [T] ran under `weight_epoch`."""
        # numpy copies a few numbers in a third of the time
        copied = out_cache_loc.numpy().copy() if out_cache_loc.is_cpu else out_cache_loc.clone()
        self._noted.append((copied, weight_epoch))
        if len(self._noted) >= _MOST_STEPS_NOTED:
            self._enter_noted()

    def epochs(self, slots: np.ndarray) -> np.ndarray:
        """The weight epochs int32 that wrote `slots`."""
        self._enter_noted()
        return self._epoch.numpy()[slots]

    def _enter_noted(self) -> None:
        for slots, weight_epoch in self._noted:
            self._epoch.index_fill_(0, torch.as_tensor(slots, device="cpu"), weight_epoch)
        self._noted.clear()


def kv_bytes_per_token(layers: Sequence[FullKV], dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return sum(layer.elements_per_token for layer in layers) * dtype.itemsize
