"""`GraphBuffers`: the inputs and outputs of captured steps, at fixed addresses.

    rows    0 .. n - 1     n .. size - 1      size .. B - 1
            the step's     padding            padding: a larger captured step would read it

A padding row is a sequence of one token in the padding row of the slot table.  It writes KV to the padding slot, and
attends to nothing else.  It begins without a recurrent state, and keeps none.  Nothing reads its results.

Shapes: B rows of the largest captured step, n of a step, L MoE layers, K top-k, D hidden, W most ids of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.core.forward_batch import DecodeRows, ForwardBatch, StateOperands, WindowOperands
from rollout.core.host_copy import to_device
from rollout.memory.kv_pool import KVPool, ReqToTokenPool
from rollout.sampling.base import PlainRows, PlainTokens


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """`hidden` [B, D]; `routes` [B, L, K], logical ids; `tokens` of B rows, with masks [B, W]."""

    hidden: torch.Tensor
    routes: torch.Tensor
    tokens: PlainTokens


class GraphBuffers:
    """Buffers for steps of at most `most` requests that decode.

    `window_table` is the slot table of layers with a window, if there is one.  `hidden_like` [D] and `routes_like`
    [L, K] have the sizes, types and device of the outputs.  `has_states`: the model has recurrent layers.
    `mask_width` is W.
    """

    def __init__(
        self,
        most: int,
        kv_pool: KVPool,
        pool: ReqToTokenPool,
        window_table: torch.Tensor | None,
        hidden_like: torch.Tensor,
        routes_like: torch.Tensor,
        has_states: bool = False,
        mask_width: int = 0,
    ) -> None:
        device = hidden_like.device
        padding = {
            "input_ids": 0,
            "positions": 0,
            "slots": kv_pool.padding_slot,
            "window_slots": kv_pool.window_padding_slot,
            "rows": pool.padding_row,
            "seq_lens": 1,
            "state_rows": -1,
            "adapters": -1,
        }
        self._padding = torch.tensor(list(padding.values()), dtype=torch.int64, device=device)[:, None]
        self._inputs = self._padding.repeat(1, most)  # [inputs, B]
        inputs = self._inputs.unbind()
        self._input_ids, self._positions, self._slots, self._window_slots, self._rows, self._lens = inputs[:6]
        self._state_rows, self._adapters = inputs[6:]
        self._have_adapters = False  # the step's rows in the buffers
        self._has_states = has_states
        self._snapshots = torch.full((most, 3), -1, dtype=torch.int64, device=device)
        self._ones = torch.ones(most, dtype=torch.int64, device=device)
        self._padding_on_host = torch.tensor([[pool.padding_row], [1]], dtype=torch.int64)
        self._on_host = self._padding_on_host.repeat(1, most)
        self._num_real = 0  # rows from here on are padding
        self._table, self._window_table = pool.table, window_table
        self._plain = PlainRows.unused(most, device)
        self._sample_positions = torch.zeros(most, dtype=torch.int64, device=device)
        self.outputs = StepOutputs(
            hidden=torch.zeros((most, *hidden_like.shape), dtype=hidden_like.dtype, device=device),
            routes=torch.zeros((most, *routes_like.shape), dtype=routes_like.dtype, device=device),
            tokens=PlainTokens.empty(most, mask_width, device),
        )

    def batch(self, size: int, is_adapted: bool = False) -> ForwardBatch:
        """Return the step of the first `size` rows, as views of the buffers that `fill` writes.

        `is_adapted`: it has the adapter of each row, or none.
        """
        window = None
        if self._window_table is not None:
            window = WindowOperands(self._window_slots[:size], self._window_table)
        states = None
        if self._has_states:
            rows = self._state_rows[:size]
            states = StateOperands(self._ones[:size], rows, rows, self._snapshots[:size])
        return ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            out_cache_loc=self._slots[:size],
            req_to_token=self._table,
            extend_req_pool_indices=[],
            extend_prefix_lens=[],
            extend_lens=[],
            decode=DecodeRows(self._rows[:size], self._lens[:size], self._on_host[0, :size], self._on_host[1, :size]),
            logits_rows=torch.arange(size, device=self._rows.device),
            window=window,
            states=states,
            adapters=self._adapters[:size] if is_adapted else None,
        )

    def plain_rows(self, size: int) -> tuple[PlainRows, torch.Tensor]:
        """Return the sampling inputs of the first `size` rows: settings, and the position of each sampled token."""
        return PlainRows(*(part[:size] for part in self._plain)), self._sample_positions[:size]

    def fill(self, batch: ForwardBatch) -> None:
        """Fill the first rows with `batch`, a step that only decodes, and make the other rows padding."""
        count, rows = batch.num_tokens, batch.decode
        assert batch.req_to_token is self._table, "another slot table than was captured"
        held = [self._input_ids, self._positions, self._slots, self._rows, self._lens]
        given = [batch.input_ids, batch.positions, batch.out_cache_loc, rows.req_pool_indices, rows.seq_lens]
        if batch.window is not None:
            held.append(self._window_slots)
            given.append(batch.window.slots)
        if batch.states is not None:
            held.append(self._state_rows)  # a request's state lies in its row
            given.append(rows.req_pool_indices)
            self._fill_snapshots(batch.states.snapshots)
        if batch.adapters is not None:
            held.append(self._adapters)
            given.append(batch.adapters)
        elif self._have_adapters:
            self._adapters[:count] = -1
        self._have_adapters = batch.adapters is not None
        if count:
            torch._foreach_copy_([buffer[:count] for buffer in held], given)  # one launch
        self._on_host[0, :count].copy_(batch.decode.req_pool_indices_host)
        self._on_host[1, :count].copy_(batch.decode.seq_lens_host)
        self._pad(count)

    def _fill_snapshots(self, snapshots: torch.Tensor) -> None:
        count = snapshots.shape[0]
        self._snapshots[:count].copy_(to_device(snapshots, self._snapshots.device))
        self._snapshots[count:] = -1

    def clear(self) -> None:
        """Make all rows padding."""
        self._snapshots[:] = -1
        self._pad(0)

    def _pad(self, first: int) -> None:
        if first < self._num_real:
            self._inputs[:, first : self._num_real] = self._padding
            self._on_host[:, first : self._num_real] = self._padding_on_host
        self._num_real = first

    def fill_plain(self, rows: PlainRows) -> None:
        """Enter the sampling settings of the first rows.  Tokens that the other rows draw are not read.

        The other rows want no mask, as the kernels would take time for it.
        """
        for held, given in zip(self._plain, rows, strict=True):
            held[: len(given)].copy_(given)
        count = len(rows.greedy)
        self._plain.greedy[count:] = True
        self._plain.wants_mask[count:] = False

    def fill_positions(self, positions_N: torch.Tensor) -> None:
        """Enter the positions of the sampled tokens: `positions_N` int64 on the host, which may change afterwards."""
        held = self._sample_positions[: len(positions_N)]
        held.copy_(to_device(positions_N, held.device))
