"""Attention with splits at fixed positions by Triton kernels on CUDA: a token has the same bits in every batch.

`rollout.kernels.gpu.fixed_attention` has the kernels.  **Not run** on a device: tests interpret them.

    plan, once a step    tiles of the sequences that extend, in one transfer; tiles of the ones that decode
    attend               a launch for the tokens that extend; one or two for the ones that decode

Shapes: T tokens, B decoding requests, H query heads, N tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch
from rollout.core.host_copy import to_device
from rollout.core.specs.layer_specs import KVKind, WindowKV
from rollout.memory.kv_pool import KVPool

if TYPE_CHECKING:
    from rollout.kernels.gpu.fixed_attention import Shape

_KERNELS = "rollout.kernels.gpu.fixed_attention"  # loads triton
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KEY_SIZES, _LATENT_SIZES = 256, (512, 64)


class FixedSplitsBackend(AttentionBackend):
    """Attention by `fixed_attention`, for any head size up to 256 and latents of up to 512 + 64 elements."""

    batch_invariant = True

    def __init__(self, kv: KVPool) -> None:
        super().__init__(kv)
        self._kernels: Any = import_module(_KERNELS)
        self._batch: ForwardBatch | None = None
        self._extends: dict[int, torch.Tensor] = {}  # by tokens of a tile
        self._decodes: torch.Tensor | None = None

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        if not kernels_available:
            return "the Triton kernels are not loaded"
        for k, v in zip(kv.k, kv.v, strict=True):
            if k.device.type != "cuda":
                return f"it runs on CUDA, not on {k.device.type}"
            if kv.dtype not in DTYPES:
                return f"it takes bfloat16, float16 and float32, not {kv.dtype}"
            latent, size = k.data_ptr() == v.data_ptr(), k.shape[2]
            if latent and (v.shape[2], size - v.shape[2]) > _LATENT_SIZES:
                return f"it takes latents of up to 512 elements and 64 rotated ones, got {v.shape[2]} of {size}"
            if not latent and size > _KEY_SIZES:
                return f"it takes heads of up to {_KEY_SIZES} elements, got {size}"
        return None

    @staticmethod
    def partial_bytes(
        layers: Iterable[tuple[int, KVKind]], dtype: torch.dtype, counts: Iterable[int], longest: int
    ) -> int:
        kernels, most = import_module(_KERNELS), 0
        for (heads, kv), tokens in product(set(layers), counts):
            shape = kernels.Shape.of(heads // kv.num_heads, kv.key_size, kv.value_size, dtype)
            window = kv.window if isinstance(kv, WindowKV) else None
            sizes = tokens, heads, kv.num_heads, kv.value_size, shape, longest, window
            parts = kernels.Parts.of_step(*sizes, "meta")
            most = max(most, 0 if parts is None else parts.nbytes)
        return most

    def for_graph(self, batch_size: int) -> AttentionBackend:
        return _CapturedFixedSplits(self.kv, batch_size)

    def plan(self, batch: ForwardBatch) -> None:
        self._batch, self._extends = batch, {}
        rows, lens = batch.decode.req_pool_indices, batch.decode.seq_lens
        self._longest = int(batch.decode.seq_lens_host.max()) if len(rows) else 0
        self._decodes = None
        if len(rows):
            one = torch.ones_like(rows)
            self._decodes = torch.stack((rows, one.cumsum(0) - 1, one, lens - 1), 1)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, k, v = self._batch, self.kv.k[layer], self.kv.v[layer]
        assert batch is not None, "plan comes before attend"
        (num_tokens, heads, key_size), (_, kv_heads, value_size) = q.shape, v.shape
        table = batch.req_to_token if window is None else batch.window_table
        shape: Shape = self._kernels.Shape.of(heads // kv_heads, key_size, value_size, q.dtype)
        k_scale, v_scale = self.kv.scales[layer]
        scale = (key_size**-0.5 if scale is None else scale) * k_scale
        out, cut = q.new_empty(num_tokens, heads, value_size), batch.num_extend_tokens
        rest = (shape, scale, window, sinks)
        if cut:
            self._kernels.attend(q[:cut], k, v, table, self._tiles(shape.tokens), out[:cut], *rest, None, v_scale)
        if self._decodes is not None:
            sizes = num_tokens - cut, heads, kv_heads, value_size, shape, self._longest, window
            parts = self._kernels.Parts.of_step(*sizes, q.device)
            self._kernels.attend(q[cut:], k, v, table, self._decodes, out[cut:], *rest, parts, v_scale)
        return out.flatten(1)

    def _tiles(self, tokens: int) -> torch.Tensor:
        """Return the tiles [N, 4] of the sequences that extend, of `tokens` tokens each."""
        if tokens not in self._extends:
            assert self._batch is not None
            self._extends[tokens] = to_device(extend_tiles(self._batch, tokens), self.kv.k[0].device)
        return self._extends[tokens]


class _CapturedFixedSplits(FixedSplitsBackend):
    """The backend of captured steps of `batch_size` decoding requests: a plan fills its tiles in place.

    Programs of splits that a sequence does not have end at once.
    """

    def __init__(self, kv: KVPool, batch_size: int) -> None:
        super().__init__(kv)
        device = kv.k[0].device
        self._decodes = torch.zeros((batch_size, 4), dtype=torch.int64, device=device)
        self._decodes[:, 1] = torch.arange(batch_size, device=device)
        self._decodes[:, 2] = 1

    def plan(self, batch: ForwardBatch) -> None:
        assert self._decodes is not None and not batch.extend_lens, "a captured step only decodes"
        assert len(batch.decode.seq_lens) == len(self._decodes), "a captured step has its size"
        self._batch, self._longest = batch, batch.req_to_token.shape[1]
        self._decodes[:, 0] = batch.decode.req_pool_indices
        torch.sub(batch.decode.seq_lens, 1, out=self._decodes[:, 3])


def extend_tiles(batch: ForwardBatch, tokens: int) -> torch.Tensor:
    """Return a row for each tile of at most `tokens` tokens that extend: int64 [N, 4] on the host.

    A row has the sequence's row of the slot table, the first token's place in the step, the number of tokens and the
    first one's position.
    """
    lens = np.array(batch.extend_lens, dtype=np.int64)
    counts = -(-lens // tokens)
    ends = np.cumsum(counts)
    ahead = (np.arange(counts.sum()) - np.repeat(ends - counts, counts)) * tokens  # tokens of the sequence before

    def of_each(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, counts)

    firsts = of_each(np.cumsum(lens) - lens) + ahead
    positions = of_each(np.array(batch.extend_prefix_lens, dtype=np.int64)) + ahead
    rows = of_each(np.array(batch.extend_req_pool_indices, dtype=np.int64))
    return torch.from_numpy(np.stack((rows, firsts, np.minimum(tokens, of_each(lens) - ahead), positions), 1))
