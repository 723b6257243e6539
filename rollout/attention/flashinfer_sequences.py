"""The KV slots that the sequences of a step read, as FlashInfer's CSR arrays, without waiting for the device.

    sequences    | extend 0 | extend 1 | d0 | d1 |     in the order of the batch
    positions    [first, kv_len) of each               first > 0 with a window: no query of the step sees earlier ones
    kv_indices   slots of all these positions, one sequence behind the other; a slot is a page of one token
    kv_indptr    where the slots of each sequence begin

All sizes are known on the host; the slots are gathered on the device from the slot table.

Shapes: N sequences of the step, X that extend, B that decode, n sequences of a part, P slots that they read.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch

from rollout.core.forward_batch import ForwardBatch


class CsrPart(NamedTuple):
    """The extending or the decoding sequences of a step, all int32.

    `qo_indptr`, `kv_indptr` [n + 1]; `kv_lens` [n], slots read of each; `last_page_len` [n], ones; `kv_indices` [P].
    All but `kv_indices` are on the host, page-locked for a CUDA device.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    last_page_len: torch.Tensor
    kv_indices: torch.Tensor


class StepSequences:
    """The sequences of one step: copies of their lengths and rows on the host, and the tables with their slots.

    `extend_lens`, `prefix_lens` [X] int64: new and cached tokens of the ones that extend.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        self.num_extends = len(batch.extend_lens)
        self.num_extend_tokens = sum(batch.extend_lens)
        self.num_decodes = batch.decode.seq_lens_host.shape[0]
        lens = np.array(batch.extend_lens, dtype=np.int64)
        prefixes = np.array(batch.extend_prefix_lens, dtype=np.int64)
        rows = np.array(batch.extend_req_pool_indices, dtype=np.int64)
        self._rows_N = np.concatenate([rows, batch.decode.req_pool_indices_host.numpy()])
        self.extend_lens, self.prefix_lens = lens, prefixes
        self._query_lens_N = np.concatenate([lens, np.ones(self.num_decodes, dtype=np.int64)])
        self._kv_lens_N = np.concatenate([prefixes + lens, batch.decode.seq_lens_host.numpy()])
        self._tables = batch.req_to_token, batch.window_table
        self._parts: dict[int | None, tuple[CsrPart | None, CsrPart | None]] = {}

    @property
    def max_context(self) -> int:
        """Positions that a row of the slot table has."""
        return self._tables[0].shape[1]

    def parts(self, window: int | None) -> tuple[CsrPart | None, CsrPart | None]:
        """Return the parts that extend and decode, for layers with this window; None in place of an empty one."""
        if window not in self._parts:
            self._parts[window] = self._read(window)
        return self._parts[window]

    def slots_of(self, sequences: slice, first_n: np.ndarray, counts_n: np.ndarray) -> torch.Tensor:
        """Return the slots [P] int32 of `counts_n` positions from `first_n` on, of some of the step's sequences."""
        return gather_slots(self._tables[0], self._rows_N[sequences], first_n, counts_n)

    def _read(self, window: int | None) -> tuple[CsrPart | None, CsrPart | None]:
        first_N = np.zeros_like(self._kv_lens_N)
        if window is not None:
            first_N = np.maximum(self._kv_lens_N - self._query_lens_N - (window - 1), 0)
        counts_N = self._kv_lens_N - first_N
        table = self._tables[window is not None]
        slots_P = gather_slots(table, self._rows_N, first_N, counts_N)
        cut = int(counts_N[: self.num_extends].sum())
        extends, decodes = slice(0, self.num_extends), slice(self.num_extends, None)
        return (
            _part(self._query_lens_N[extends], counts_N[extends], slots_P[:cut]) if self.num_extends else None,
            _part(self._query_lens_N[decodes], counts_N[decodes], slots_P[cut:]) if self.num_decodes else None,
        )


def gather_slots(table: torch.Tensor, rows_N: np.ndarray, first_N: np.ndarray, counts_N: np.ndarray) -> torch.Tensor:
    """Return the slots [P] int32 of `counts_N` positions from `first_N` on, in `rows_N` of `table` [rows, positions].

    `table` is contiguous.  The arrays are int64 on the host.  The slots are on the device of `table`, and the host does
    not wait for them.
    """
    begins_N = np.cumsum(counts_N) - counts_N
    out_P = torch.empty(int(counts_N.sum()), dtype=torch.int32, device=table.device)
    _gather_into(out_P, table, rows_N * table.stride(0) + first_N, counts_N, begins_N)
    return out_P


def gather_rows(slots_P: torch.Tensor, first_N: np.ndarray, counts_N: np.ndarray) -> torch.Tensor:
    """Return `counts_N` slots from `first_N` on in a row for each sequence, int32 [N, longest]; 0 behind the last.

    The arrays are int64 on the host, which does not wait.
    """
    num_rows, longest = len(counts_N), int(counts_N.max(initial=0))
    rows_Nl = torch.zeros(num_rows, longest, dtype=torch.int32, device=slots_P.device)
    _gather_into(rows_Nl.view(-1), slots_P, first_N, counts_N, np.arange(num_rows) * longest)
    return rows_Nl


def _gather_into(
    out: torch.Tensor, table: torch.Tensor, places_N: np.ndarray, counts_N: np.ndarray, begins_N: np.ndarray
) -> None:
    """Copy `counts_N` slots from `places_N` of the flat table on, to `begins_N` of `out` on."""
    total, device = int(counts_N.sum()), table.device
    host = _host_array((3, len(counts_N)), torch.int64, device)
    host.numpy()[:] = places_N, counts_N, begins_N
    spans = host.to(device, non_blocking=True)
    if table.is_cuda:
        by_kernel: Callable[..., None] = import_module("rollout.kernels.gpu.gather_slots").gather_slots
        by_kernel(table, spans, int(counts_N.max(initial=0)), out)
        return
    # The p-th slot of all is the nth of its sequence.
    sequence_P = torch.repeat_interleave(spans[1], output_size=total)
    nth_P = torch.arange(total, device=device) - (spans[1].cumsum(0) - spans[1])[sequence_P]
    slots_P = table.view(-1).index_select(0, spans[0][sequence_P] + nth_P)
    out.index_copy_(0, spans[2][sequence_P] + nth_P, slots_P.to(torch.int32))


def _part(query_lens_n: np.ndarray, counts_n: np.ndarray, slots_P: torch.Tensor) -> CsrPart:
    count = len(counts_n)
    host = _host_array((4 * count + 2,), torch.int32, slots_P.device)
    qo_indptr, kv_indptr, kv_lens, last_page_len = host.split([count + 1, count + 1, count, count])
    for indptr, lens in ((qo_indptr.numpy(), query_lens_n), (kv_indptr.numpy(), counts_n)):
        indptr[0] = 0
        np.cumsum(lens, out=indptr[1:])
    kv_lens.numpy()[:] = counts_n
    last_page_len.fill_(1)
    return CsrPart(qo_indptr, kv_indptr, kv_lens, last_page_len, slots_P)


def _host_array(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory on the host, page-locked for a CUDA device.

    Each call gives new memory: torch reuses page-locked memory only once the copies from it are done.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
