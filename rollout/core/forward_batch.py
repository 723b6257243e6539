"""`ForwardBatch`: everything that a model may read in one step.  Passed explicitly, never global.

    one step's tokens (T in all)
    |<- extend seq 0 ->|<- extend seq 1 ->| d0 | d1 | ... | dB-1 |
     q = extend_lens[0]  q = extend_lens[1]   one token for each decoding request

A sequence's KV lives in the slots `req_to_token[req_pool_index, 0:seq_len]`; the slots of this step's own tokens
are `out_cache_loc`, already entered in `req_to_token`.

Shapes: L MoE layers, K top-k, T tokens, B decoding requests, X extending requests, N rows whose logits are wanted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch


class StepKind(enum.IntEnum):
    """The kinds of steps that captures tell apart.  A step of several ranks is of the least kind of any rank."""

    IN_PYTHON = 0  # routers follow given routes in some rows, or hidden states between layers are wanted
    PROMPTS = 1  # with or without requests that decode; drafts whose sequences read their KV once
    DECODE = 2  # alone, or nothing at all; drafts whose tokens may each be a decoding row


class StateOperands(NamedTuple):
    """The recurrent states of a step's N sequences, in the order of the batch, all int64.

    A batch has them on the host, where they may be live arrays; operators get them on the model's device.
    `query_lens` [N]: tokens in this step.  `rows` [N]: the row of the state pool for the state after them.  `sources`
    [N]: the row of the state before them, -1 for none.  `snapshots` [M, 3]: sequence, number of its tokens in this
    step, and the row to which the state after them is copied.
    """

    query_lens: torch.Tensor
    rows: torch.Tensor
    sources: torch.Tensor
    snapshots: torch.Tensor


class WindowOperands(NamedTuple):
    """The KV slots of a step's sequences in layers with a window, int64 on the model's device.

    `slots` [T]: the slot that each token writes; `table` [max requests, positions]: as `req_to_token`, right for the
    positions that a token of this step sees.
    """

    slots: torch.Tensor
    table: torch.Tensor


class DecodeRows(NamedTuple):
    """The B requests that decode, int64: their rows of `req_to_token` and their lengths, this step's token included.

    The same numbers are on the model's device and on the CPU, so that a plan is made without waiting for the device.
    The tensors on the CPU may be live arrays, which advance in place once the step is launched: keep only copies.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices_host: torch.Tensor
    seq_lens_host: torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """The input of one step, valid for that step only.

    All tensors are int64 on the model's device, except the tensors of `decode` for the host.
    """

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] absolute position of each token in its sequence
    out_cache_loc: torch.Tensor  # [T] KV slot that each token writes
    req_to_token: torch.Tensor  # [max requests, max context] KV slot of each (request row, position)

    extend_req_pool_indices: list[int]  # [X]
    extend_prefix_lens: list[int]  # [X] tokens whose KV is there already
    extend_lens: list[int]  # [X] tokens computed in this step

    decode: DecodeRows  # [B]

    logits_rows: torch.Tensor  # [N] rows of T whose logits are wanted, ascending

    forced_routes: torch.Tensor | None = None
    """[L, T, K] logical expert ids that replace the routers' choices, except in rows of -1; None: no row is forced."""

    adapters: torch.Tensor | None = None
    """[T] slot of each token's adapter, -1 for none; None: no token has one."""

    states: StateOperands | None = None  # None: the model has no recurrent layers
    window: WindowOperands | None = None  # None: window layers use the main KV pool

    global_num_tokens: list[int] | None = None  # tokens of every attention-DP rank in this step; None with only one
    kind_everywhere: StepKind = StepKind.IN_PYTHON
    """The least kind of all attention-DP ranks.  A step of one rank has it where it verifies drafts."""

    def kv_slots(self, window: int | None) -> torch.Tensor:
        """Return the slots that the step's tokens write in a layer with this window; None: a layer without a window."""
        return self.out_cache_loc if window is None or self.window is None else self.window.slots

    @property
    def window_table(self) -> torch.Tensor:
        """The slot table of layers with a window."""
        return self.req_to_token if self.window is None else self.window.table

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_extend_tokens(self) -> int:
        return self.num_tokens - self.decode.seq_lens.shape[0]
