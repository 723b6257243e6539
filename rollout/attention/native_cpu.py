"""Attention over paged KV by the compiled CPU operator (`rollout.kernels`): bfloat16, float16 and float32.

Knows how a step is described to the operator: extending and decoding requests alike are sequences whose last tokens are
queries.  Does not know the arithmetic.

A token's result has the same bits however its sequence was cut into steps, whatever else is in the batch, and with any
number of threads.

Shapes: T tokens, N sequences of the step, H query heads, hd head size.
"""

from __future__ import annotations

import torch

from rollout.attention.base import AttentionBackend, KVStore, PagedOperands
from rollout.core.errors import StartupError
from rollout.core.forward_batch import ForwardBatch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_SIZE_MULTIPLE = 8
MAX_HEAD_SIZE = 256


def supports(dtype: torch.dtype, device: torch.device | str, head_dim: int) -> bool:
    """Whether the operator, where it could be compiled, takes KV of this kind."""
    fits = head_dim % HEAD_SIZE_MULTIPLE == 0 and head_dim <= MAX_HEAD_SIZE
    return dtype in DTYPES and torch.device(device).type == "cpu" and fits


class NativeCpuBackend(AttentionBackend):
    """`torch.ops.lockstep` must be loaded.  Raises `StartupError` for KV that the operator does not take."""

    batch_invariant = True

    def __init__(self, kv: KVStore) -> None:
        super().__init__(kv)
        pool = kv.k[0]
        if not supports(pool.dtype, pool.device, pool.shape[2]):
            raise StartupError(f"attention backend 'native_cpu' takes no {pool.dtype} of head size {pool.shape[2]}")
        self._paged_attention = torch.ops.lockstep.paged_attention.default
        empty = torch.empty(0, dtype=torch.int64)
        self._ones_N = empty
        self._planned: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and lengths of a step that only decodes
        self.operands: PagedOperands = PagedOperands(empty, empty, empty, empty)

    def plan(self, batch: ForwardBatch) -> None:
        rows, kv_lens = batch.decode_req_pool_indices, batch.decode_seq_lens
        if self._planned and self._planned[0] is rows and self._planned[1] is kv_lens and not batch.extend_lens:
            return  # the tensors that the operands hold have advanced in place
        self._planned = None if batch.extend_lens else (rows, kv_lens)
        if self._ones_N.shape != kv_lens.shape:
            self._ones_N = torch.ones_like(kv_lens)
        query_lens = self._ones_N
        if batch.extend_lens:
            prefix_lens, extend_lens = torch.tensor(batch.extend_prefix_lens), torch.tensor(batch.extend_lens)
            rows = torch.cat([torch.tensor(batch.extend_req_pool_indices), rows])
            query_lens = torch.cat([extend_lens, query_lens])
            kv_lens = torch.cat([prefix_lens + extend_lens, kv_lens])
        self.operands = PagedOperands(batch.req_to_token, rows, query_lens, kv_lens)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = self._paged_attention(q, self.kv.k[layer], self.kv.v[layer], *self.operands, q.shape[2] ** -0.5)
        return out.view(q.shape[0], -1)
