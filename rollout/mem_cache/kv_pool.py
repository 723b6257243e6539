"""The key and value tensors of all layers, by slot.

Also keeps, per slot, the weight epoch that wrote it, so that KV can never lie about its age.
Does not know which slots are free.

Shapes: S slots, T tokens of a step, H_kv key-value heads.
"""

from __future__ import annotations

import numpy as np
import torch


class KVPool:
    """`k[layer]`, `v[layer]`: [S, H_kv, head_dim]."""

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_slots, num_kv_heads, head_dim)
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._epoch = torch.empty(num_slots, dtype=torch.int32, device=device)
        self._epoch_on_host = self._epoch.numpy() if self._epoch.is_cpu else None  # numpy sets few numbers sooner

    def write(self, layer: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, H_kv, head_dim] in slots `out_cache_loc` [T]."""
        self.k[layer].index_copy_(0, out_cache_loc, k)
        self.v[layer].index_copy_(0, out_cache_loc, v)

    def stamp(self, out_cache_loc: torch.Tensor, weight_epoch: int) -> None:
        """Note that the forward that just wrote `out_cache_loc` [T] ran under `weight_epoch`."""
        if self._epoch_on_host is not None:
            self._epoch_on_host[out_cache_loc.numpy()] = weight_epoch
        else:
            self._epoch.index_fill_(0, out_cache_loc, weight_epoch)

    def epochs(self, slots: np.ndarray) -> np.ndarray:
        """The weight epochs int32 that wrote `slots`."""
        return self._epoch.cpu().numpy()[slots]


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
