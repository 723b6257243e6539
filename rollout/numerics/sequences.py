"""The sequences of a trainer's batch, which is padded or packed, as one step of the engine.

Shapes: B rows of the trainer's batch, S positions, N sequences, T tokens that are not padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from rollout.core.errors import BadRequest
from rollout.core.forward_batch import DecodeRows, ForwardBatch, StateOperands


@dataclass(frozen=True, eq=False)
class Sequences:
    """`input_ids` [B, S]; `rows` [T]: the entries among its B * S that are tokens; `lengths`: of the sequences."""

    input_ids: torch.Tensor
    rows: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Sequences:
        """Return the sequences of a batch padded on either side, by its mask [B, S]; without one, nothing is padding.

        A sequence begins wherever `position_ids` [B, S], or [1, S] for all rows, are zero.  Raises `BadRequest` for a
        mask with holes, positions that do not count up from zero, or a batch without tokens.
        """
        if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise BadRequest(f"input_ids must be integers [B, S], got {input_ids.dtype} {list(input_ids.shape)}")
        is_token = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise BadRequest(
                    f"attention_mask must be {list(input_ids.shape)} as input_ids, got {list(attention_mask.shape)}"
                )
            is_token = attention_mask.to(torch.bool)
        counted = is_token.cumsum(1) - 1
        positions = counted if position_ids is None else _expanded(position_ids, input_ids)
        _check(is_token, counted, positions)
        rows = is_token.flatten().nonzero().squeeze(1)
        if rows.shape[0] == 0:
            raise BadRequest("the batch has no token")
        starts = (positions.flatten()[rows] == 0).nonzero().squeeze(1).tolist()
        lengths = [end - start for start, end in zip(starts, [*starts[1:], rows.shape[0]])]
        return cls(input_ids, rows, lengths)

    def check(self, vocab_size: int, longest: int) -> None:
        """Raise `BadRequest` for a token that is not in the vocabulary, or a sequence that is too long."""
        if max(self.lengths) > longest:
            raise BadRequest(f"a sequence of {max(self.lengths)} tokens is longer than the model's {longest}")
        least, most = (int(end) for end in self.token_ids.aminmax())
        if least < 0 or most >= vocab_size:
            raise BadRequest(f"token ids must be in 0..{vocab_size - 1}, got {least} and {most}")

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """[T] int64."""
        return self.input_ids.flatten()[self.rows].long()

    @cached_property
    def positions(self) -> torch.Tensor:
        """[T]: of each token in its sequence."""
        return torch.cat([torch.arange(length, device=self.rows.device) for length in self.lengths])

    def step(self, has_states: bool) -> ForwardBatch:
        """Return one prefill of all tokens; token t lies in slot t, sequence n has row n of every table."""
        device, count = self.rows.device, len(self.lengths)
        slots = torch.arange(self.rows.shape[0], device=device)
        table = torch.zeros(count, max(self.lengths), dtype=torch.int64, device=device)
        for row, of_sequence in zip(table, slots.split(self.lengths)):
            row[: of_sequence.shape[0]] = of_sequence
        none = torch.empty(0, dtype=torch.int64, device=device)
        states = None
        if has_states:
            numbers = torch.arange(count, device=device)
            lengths = torch.tensor(self.lengths, device=device)
            states = StateOperands(lengths, numbers, torch.full_like(numbers, -1), none.view(0, 3))
        return ForwardBatch(
            input_ids=self.token_ids,
            positions=self.positions,
            out_cache_loc=slots,
            req_to_token=table,
            extend_req_pool_indices=list(range(count)),
            extend_prefix_lens=[0] * count,
            extend_lens=self.lengths,
            decode=DecodeRows(none, none, none.cpu(), none.cpu()),
            logits_rows=none,
            states=states,
        )

    def spread(self, values: torch.Tensor, fill: float | torch.Tensor) -> torch.Tensor:
        """Spread `values` [T, ...] of tokens over all entries [B * S, ...]; entries of padding get `fill`."""
        if self.rows.shape[0] == self.input_ids.numel():
            return values
        whole = values.new_empty(self.input_ids.numel(), *values.shape[1:])
        whole[:] = fill
        return whole.index_copy_(0, self.rows, values)

    def kept(self, logits_to_keep: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token number of each kept position, -1 for padding [B, kept], and the flat places of its tokens.

        `logits_to_keep`: the number of last positions of every row to keep, 0 for all, or the positions themselves.
        """
        token_of = torch.full((self.input_ids.numel(),), -1, device=self.rows.device)
        token_of[self.rows] = torch.arange(self.rows.shape[0], device=self.rows.device)
        wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        tokens = token_of.view(self.input_ids.shape)[:, wanted]
        return tokens, (tokens.flatten() >= 0).nonzero().squeeze(1)


def _expanded(position_ids: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    if position_ids.ndim != 2 or position_ids.shape[1] != input_ids.shape[1]:
        raise BadRequest(f"position_ids must be {list(input_ids.shape)}, got {list(position_ids.shape)}")
    if position_ids.shape[0] not in (1, input_ids.shape[0]):
        raise BadRequest(f"position_ids of {position_ids.shape[0]} rows for a batch of {input_ids.shape[0]}")
    return position_ids.expand_as(input_ids)


def _check(is_token: torch.Tensor, counted: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise `BadRequest` unless the tokens of a row are one run and positions count up from zero, once or again."""
    both = is_token[:, 1:] & is_token[:, :-1]
    if bool((is_token[:, 1:] & ~is_token[:, :-1] & (counted[:, 1:] > 0)).any()):
        raise BadRequest("attention_mask has holes: the tokens of a row must lie together, padded on either side")
    follows = positions[:, 1:] == positions[:, :-1] + 1
    begins = is_token & (counted == 0)
    if bool((both & ~follows & (positions[:, 1:] != 0)).any()) or bool((begins & (positions != 0)).any()):
        raise BadRequest("position_ids must count up from 0 in every sequence, as the engine counts them")
