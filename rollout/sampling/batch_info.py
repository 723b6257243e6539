"""The sampling parameters of the rows of one step, as tensors.

Building them costs Python time per row, so the caller keeps them while the rows stay the same; then only
`update_histories` costs anything, and only for rows with penalties.

Shapes: N rows, V vocabulary, F rows with filters.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from rollout.core.host_copy import to_device
from rollout.core.sampling_params import SamplingParams

_SPANS = ("chosen", "bias", "ends", "prompt", "output")  # entries begin .. end - 1 of a list of the batch
# One row as the compiled operators read it: `RowSettings` in rollout/kernels/csrc/sampler_edits.h.
ROW_SETTINGS = np.dtype(
    [
        ("seed", "u8"),
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("frequency_penalty", "f8"),
        ("presence_penalty", "f8"),
        ("repetition_penalty", "f8"),
        ("top_k", "i8"),
        ("is_greedy", "i8"),
        ("wants_logprob", "i8"),
        ("wants_mask", "i8"),
        ("top_logprobs", "i8"),
        ("min_new_tokens", "i8"),
        *((f"{name}_{end}", "i8") for name in _SPANS for end in ("begin", "end")),
    ]
)
_PACK = struct.Struct(f"=Q6d{6 + 2 * len(_SPANS)}q").pack
_NO_SPANS = (0,) * (2 * len(_SPANS))
_MIN_HISTORY = 64
_MAX_TOP_K = 2**31  # more than any vocabulary


@dataclass(eq=False, slots=True)
class SamplingRow:
    """What one row brings: `seed` as an unsigned 64-bit number, the ids that end it, its tokens so far, which
    log-probabilities are wanted: of the sampled token, of so many best ones, of chosen ones; and whether the tokens are
    that could have been sampled."""

    params: SamplingParams
    seed: int
    end_ids: Sequence[int]
    prompt_ids: Sequence[int]
    output_ids: list[int]  # the live list, read at every step
    wants_logprob: bool = True
    top_logprobs: int = 0
    chosen_ids: Sequence[int] = ()
    wants_mask: bool = False
    settings: bytes = field(init=False, repr=False)  # one `ROW_SETTINGS` without spans
    has_lists: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        params = self.params
        self.settings = _PACK(
            self.seed,
            params.effective_temperature,
            params.top_p,
            params.min_p,
            params.frequency_penalty,
            params.presence_penalty,
            params.repetition_penalty,
            min(params.top_k, _MAX_TOP_K),
            params.is_greedy,
            self.wants_logprob,
            self.wants_mask,
            self.top_logprobs,
            params.min_new_tokens,
            *_NO_SPANS,
        )
        self.has_lists = bool(self.chosen_ids or params.logit_bias or params.min_new_tokens > 0 or params.has_penalties)

    def end_ids_below(self, vocab_size: int) -> list[int]:
        """Those that can be sampled: an end token of the configuration may lie outside the vocabulary."""
        return [token for token in self.end_ids if token < vocab_size]


class PlainRows(NamedTuple):
    """What rows without filters, edits, masks, top and chosen log-probabilities are sampled by, on the logits' device.

    `seeds` int64 [N] (the bits of unsigned numbers), `temperatures` float32 [N], 1 for greedy rows, `greedy` bool [N].
    """

    seeds: torch.Tensor
    temperatures: torch.Tensor
    greedy: torch.Tensor


@dataclass(eq=False, slots=True)
class _History:
    """Where the output tokens of a row with penalties are in `SamplingBatchInfo.histories`."""

    index: int
    output_ids: list[int]
    begin: int
    capacity: int
    filled: int = 0


class SamplingBatchInfo:
    """Parameters of N rows.

    `settings` [N] of `ROW_SETTINGS`; its spans point into `chosen_ids`, `bias_ids` (and `bias_values`, float32),
    `end_ids` and `histories`, all int64 on the CPU.  `operands` are those tensors in the order of the operator's
    arguments; `rows_with_lists` are the rows, with their indices, that have chosen ids, bias, penalties or a minimum
    length.  The cached properties are the same parameters for plain torch, on `device`.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.rows = list(rows)
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.settings = np.frombuffer(bytearray(b"".join([row.settings for row in rows])), dtype=ROW_SETTINGS)
        self.top_n = max([row.top_logprobs for row in rows], default=0)
        self.rows_with_lists = with_lists = [(i, row) for i, row in enumerate(rows) if row.has_lists]
        self.chosen_ids = self._spans("chosen", [(i, row.chosen_ids) for i, row in with_lists])
        self.bias_ids = self._spans("bias", [(i, list(row.params.logit_bias)) for i, row in with_lists])
        biases = [value for _, row in with_lists for value in row.params.logit_bias.values()]
        self.bias_values = torch.tensor(biases, dtype=torch.float32)
        with_minimum = [(i, row) for i, row in with_lists if row.params.min_new_tokens > 0]
        self.end_ids = self._spans("ends", [(i, row.end_ids_below(vocab_size)) for i, row in with_minimum])
        self._penalised = [(i, row) for i, row in with_lists if row.params.has_penalties]
        self._lay_out_histories()

    def update_histories(self) -> None:
        """Take in the tokens that rows with penalties got since the last call."""
        for history in self._histories:
            count = len(history.output_ids)
            if count > history.capacity:
                self._lay_out_histories()
                return
            if count != history.filled:
                begin = history.begin
                self._tokens[begin + history.filled : begin + count] = history.output_ids[history.filled :]
                self.settings["output_end"][history.index] = begin + count
                history.filled = count

    def _lay_out_histories(self) -> None:
        """Per penalised row: its distinct prompt tokens if they count, then its output with room to grow."""
        self._histories: list[_History] = []
        prompts: list[np.ndarray] = []
        end = 0
        for i, row in self._penalised:
            repeats = row.params.repetition_penalty != 1.0
            prompt = np.unique(np.array(row.prompt_ids if repeats else (), dtype=np.int64))
            capacity = max(_MIN_HISTORY, 2 * len(row.output_ids))
            begin = end + len(prompt)
            for name, value in (("prompt_begin", end), ("prompt_end", begin), ("output_begin", begin)):
                self.settings[name][i] = value
            self.settings["output_end"][i] = begin
            self._histories.append(_History(i, row.output_ids, begin, capacity))
            prompts.append(prompt)
            end = begin + capacity
        self._tokens = np.zeros(end, dtype=np.int64)
        for history, prompt in zip(self._histories, prompts):
            self._tokens[history.begin - len(prompt) : history.begin] = prompt
        self.histories = torch.from_numpy(self._tokens)
        self.update_histories()
        table = torch.from_numpy(self.settings.view(np.int64).reshape(len(self.rows), ROW_SETTINGS.itemsize // 8))
        self.operands = (
            table,
            self.chosen_ids,
            self.bias_ids,
            self.bias_values,
            self.end_ids,
            self.histories,
            self.top_n,
        )

    def _spans(self, name: str, lists: list[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """One list after the other; their places are entered in the settings of their rows."""
        flat: list[int] = []
        for i, ids in lists:
            self.settings[f"{name}_begin"][i] = len(flat)
            flat += ids
            self.settings[f"{name}_end"][i] = len(flat)
        return torch.tensor(flat, dtype=torch.int64)

    # --- for plain torch ------------------------------------------------------------------------------------------

    @cached_property
    def plain_rows(self) -> PlainRows | None:
        """The rows where all of them are as `PlainRows` says, else None."""
        if self.rows_with_lists or self.masked_rows or self.top_n or self._has_filters.any():
            return None
        seeds = to_device(torch.from_numpy(self.settings["seed"].copy().view(np.int64)), self.device)
        return PlainRows(seeds, self.temperatures, self.greedy)

    @cached_property
    def temperatures(self) -> torch.Tensor:
        """[N] float32."""
        return self._column("temperature", torch.float32)

    @cached_property
    def scales(self) -> bool:
        """Whether any row has a temperature other than 1."""
        return bool((self.settings["temperature"] != 1.0).any())

    @cached_property
    def greedy(self) -> torch.Tensor:
        """[N] bool."""
        return self._column("is_greedy", torch.bool)

    @cached_property
    def all_greedy(self) -> bool:
        return bool(self.settings["is_greedy"].all())

    @cached_property
    def wants_logprob(self) -> torch.Tensor:
        """[N] bool."""
        return self._column("wants_logprob", torch.bool)

    @cached_property
    def masked_rows(self) -> list[int]:
        """The rows that want the tokens which could have been sampled."""
        return [i for i, row in enumerate(self.rows) if row.wants_mask]

    @cached_property
    def top_logprobs(self) -> torch.Tensor:
        """[N] int64: how many best tokens each row asks for."""
        return self._column("top_logprobs", torch.int64)

    @cached_property
    def filtered_rows(self) -> torch.Tensor | None:
        """Indices [F] of the random rows with top-k, top-p or min-p; None if there are none."""
        rows = np.flatnonzero(self._has_filters)
        return to_device(torch.from_numpy(rows), self.device) if len(rows) else None

    @cached_property
    def largest_top_k(self) -> int:
        """Of the filtered rows; V where one has no limit."""
        top_k = self.settings["top_k"][self._has_filters]
        return int(np.where(top_k > 0, top_k, self.vocab_size).max(initial=0))

    @cached_property
    def top_k(self) -> torch.Tensor:
        """Of the filtered rows [F] int64; V where there is no limit."""
        top_k = self._column("top_k", torch.int64)[self.filtered_rows]
        return torch.where(top_k > 0, top_k, self.vocab_size)

    @cached_property
    def top_p(self) -> torch.Tensor:
        """Of the filtered rows [F] float64."""
        return self._column("top_p", torch.float64)[self.filtered_rows]

    @cached_property
    def min_p(self) -> torch.Tensor:
        """Of the filtered rows [F] float64."""
        return self._column("min_p", torch.float64)[self.filtered_rows]

    @cached_property
    def _has_filters(self) -> np.ndarray:
        """[N] bool: random, with top-k, top-p or min-p."""
        table = self.settings
        filters = (table["top_p"] < 1.0) | (table["top_k"] > 0) | (table["min_p"] > 0.0)
        return (table["is_greedy"] == 0) & filters

    def _column(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.from_numpy(self.settings[name].copy()).to(dtype), self.device)
