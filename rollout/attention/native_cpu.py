"""Attention over paged KV by the compiled CPU operator (`rollout.kernels`): bfloat16, float16 and float32.

Extending and decoding requests alike are sequences whose last tokens are queries.  A token's result has the same bits
however its sequence was cut into steps, in every batch, and with any number of threads.

Shapes: T tokens, N sequences of the step, H query heads, hd head size.
"""

from __future__ import annotations

import torch

from rollout.attention.base import AttentionBackend, PagedOperands
from rollout.core.forward_batch import ForwardBatch
from rollout.memory.kv_pool import KVPool

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of queries; keys and values are the same, or FP8
HEAD_SIZE_MULTIPLE = 8
MAX_KEY_SIZE, MAX_VALUE_SIZE = 576, 512


class NativeCpuBackend(AttentionBackend):
    """Attention by the operator `paged_attention`.  `torch.ops.lockstep` must be loaded."""

    batch_invariant = True

    def __init__(self, kv: KVPool) -> None:
        super().__init__(kv)
        self._paged_attention = torch.ops.lockstep.paged_attention.default
        empty = torch.empty(0, dtype=torch.int64)
        self._ones_N = empty
        self._window_table = empty
        self._planned: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and lengths of a step that only decodes
        self.operands: PagedOperands = PagedOperands(empty, empty, empty, empty)

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        if not kernels_available:
            return "the operator is not compiled"
        for pool, most in (*((k, MAX_KEY_SIZE) for k in kv.k), *((v, MAX_VALUE_SIZE) for v in kv.v)):
            size = pool.shape[2]
            if kv.dtype not in DTYPES or pool.device.type != "cpu" or size % HEAD_SIZE_MULTIPLE or size > most:
                return f"the operator takes no {kv.dtype} of head size {size} on {pool.device.type}"
        return None

    def for_graph(self, batch_size: int) -> AttentionBackend:
        return _CapturedCpuBackend(self.kv, batch_size)

    def plan(self, batch: ForwardBatch) -> None:
        self._window_table = batch.window_table
        rows, kv_lens = batch.decode.req_pool_indices, batch.decode.seq_lens
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

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_scale, v_scale = self.kv.scales[layer]
        scale = (q.shape[2] ** -0.5 if scale is None else scale) * k_scale
        operands = self.operands
        if window is not None:
            operands = operands._replace(req_to_token=self._window_table)
        out = self._paged_attention(q, self.kv.k[layer], self.kv.v[layer], *operands, scale, window, sinks, v_scale)
        rows: torch.Tensor = out.flatten(1)
        return rows


class _CapturedCpuBackend(NativeCpuBackend):
    """The backend of captured steps of `batch_size` decoding requests: a plan fills its operands in place."""

    def __init__(self, kv: KVPool, batch_size: int) -> None:
        super().__init__(kv)
        ones_N = torch.ones(batch_size, dtype=torch.int64)
        self.operands = PagedOperands(torch.empty(0, dtype=torch.int64), ones_N.clone(), ones_N, ones_N.clone())

    def plan(self, batch: ForwardBatch) -> None:
        _, rows, _, kv_lens = self.operands
        rows.copy_(batch.decode.req_pool_indices)
        kv_lens.copy_(batch.decode.seq_lens)
        self._window_table = batch.window_table
        self.operands = self.operands._replace(req_to_token=batch.req_to_token)
