"""`TokenBuffers`: the inputs and outputs of steps that are captured in pieces, at fixed addresses.

Shapes: B tokens of the largest captured step, T of a step, M MoE layers, K top-k, D hidden, H query heads, hd head
size.
"""

from __future__ import annotations

import torch

from rollout.core.forward_batch import DecodeRows, ForwardBatch, WindowOperands
from rollout.memory.kv_pool import KVPool, ReqToTokenPool


class TokenBuffers:
    """Buffers for steps of at most `most` tokens.

    `hidden` [B, D] and `routes` [B, M, K], logical ids, are the outputs.  `window_table` is the slot table of layers
    with a window, if there is one.  `hidden_like` [D] and `routes_like` [M, K] have the sizes, types and device of the
    outputs.  `count`: the tokens of the step whose inputs are in the buffers.
    """

    def __init__(
        self,
        most: int,
        kv_pool: KVPool,
        pool: ReqToTokenPool,
        window_table: torch.Tensor | None,
        hidden_like: torch.Tensor,
        routes_like: torch.Tensor,
    ) -> None:
        device = hidden_like.device
        padding = [0, 0, kv_pool.padding_slot, kv_pool.window_padding_slot, -1]
        self._padding = torch.tensor(padding, dtype=torch.int64, device=device)[:, None]
        self._inputs = self._padding.repeat(1, most)  # [inputs, B]
        self._input_ids, self._positions, self._slots, self._window_slots, self._adapters = self._inputs.unbind()
        self._have_adapters = False  # the step's tokens in the buffers
        self._table, self._window_table = pool.table, window_table
        self._most, self._device, self._dtype = most, device, hidden_like.dtype
        self._queries: dict[tuple[int, ...], torch.Tensor] = {}
        self._attended: dict[int, torch.Tensor] = {}
        self.count = 0
        self.hidden = torch.zeros((most, *hidden_like.shape), dtype=hidden_like.dtype, device=device)
        self.routes = torch.zeros((most, *routes_like.shape), dtype=routes_like.dtype, device=device)

    def batch(self, size: int, is_adapted: bool = False) -> ForwardBatch:
        """Return the step of the first `size` tokens, as views of the buffers that `fill` writes.

        It names no sequence: attention is planned with the step itself.  `is_adapted`: it has the adapter of each
        token, or none.
        """
        window = None
        if self._window_table is not None:
            window = WindowOperands(self._window_slots[:size], self._window_table)
        nothing = torch.empty(0, dtype=torch.int64)
        on_device = nothing.to(self._device)
        return ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            out_cache_loc=self._slots[:size],
            req_to_token=self._table,
            extend_req_pool_indices=[],
            extend_prefix_lens=[],
            extend_lens=[],
            decode=DecodeRows(on_device, on_device, nothing, nothing),
            logits_rows=on_device,
            window=window,
            adapters=self._adapters[:size] if is_adapted else None,
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Fill the first rows with the tokens of `batch`, and make the rows of the step before that remain padding."""
        count = batch.num_tokens
        held, given = [self._input_ids, self._positions, self._slots], [batch.input_ids, batch.positions]
        given.append(batch.out_cache_loc)
        if batch.window is not None:
            held.append(self._window_slots)
            given.append(batch.window.slots)
        if batch.adapters is not None:
            held.append(self._adapters)
            given.append(batch.adapters)
        elif self._have_adapters:
            self._adapters[:count] = -1
        self._have_adapters = batch.adapters is not None
        if count:
            torch._foreach_copy_([rows[:count] for rows in held], given)
        self._pad(count)

    def clear(self) -> None:
        """Make all rows padding."""
        self._pad(0)

    def _pad(self, first: int) -> None:
        if first < self.count:
            self._inputs[:, first : self.count] = self._padding
        self.count = first

    def queries(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the buffer [B, H, hd] for the queries of a layer, by the shape [H, hd] of one token's."""
        if shape not in self._queries:
            self._queries[shape] = torch.zeros((self._most, *shape), dtype=self._dtype, device=self._device)
        return self._queries[shape]

    def attended(self, width: int) -> torch.Tensor:
        """Return the buffer [B, width] for attention's results.  Its numbers are finite, also in rows of padding."""
        if width not in self._attended:
            self._attended[width] = torch.zeros((self._most, width), dtype=self._dtype, device=self._device)
        return self._attended[width]
