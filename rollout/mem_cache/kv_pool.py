"""The key and value tensors of all layers, by slot.

Also keeps, per slot, the weight epoch that wrote it, so that KV can never lie about its age.
Does not know which slots are free.

Shapes: S slots, T tokens of a step, H_kv key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.core.layer_specs import FullKV


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
        self._epoch = torch.empty(num_slots, dtype=torch.int32, device=device)
        self._epoch_on_host = self._epoch.numpy() if self._epoch.is_cpu else None  # numpy sets few numbers sooner

    def stamp(self, out_cache_loc: torch.Tensor, weight_epoch: int) -> None:
        """Note that the forward that just wrote `out_cache_loc` [T] ran under `weight_epoch`."""
        if self._epoch_on_host is not None:
            self._epoch_on_host[out_cache_loc.numpy()] = weight_epoch
        else:
            self._epoch.index_fill_(0, out_cache_loc, weight_epoch)

    def epochs(self, slots: np.ndarray) -> np.ndarray:
        """The weight epochs int32 that wrote `slots`."""
        return self._epoch.cpu().numpy()[slots]


def kv_bytes_per_token(layers: Sequence[FullKV], dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return sum(layer.elements_per_token for layer in layers) * dtype.itemsize
