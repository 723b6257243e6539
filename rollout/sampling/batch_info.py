"""The sampling parameters of the rows of one step, as tensors.

Building them costs Python time per row, so the caller keeps them while the rows stay the same.  Then only
`update_histories` costs time, and only for rows with penalties.  The rows' lists are in `RowLists`, which outlive a
batch: the next batch does not copy the prompt, bias and end tokens of a row that stays.

Shapes: N rows, V vocabulary, F rows with filters.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.core.host_copy import to_device
from rollout.core.prompt import Prompt
from rollout.core.sampling_params import SamplingParams
from rollout.sampling.row_lists import Place, RowLists, SharedLists

_SPANS = ("chosen", "bias", "ends", "prompt", "output")  # a row has the entries begin .. end - 1 of each list
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
        ("allowed", "i8"),
        *((f"{name}_{end}", "i8") for name in _SPANS for end in ("begin", "end")),
    ]
)
_PACK = struct.Struct(f"=Q6d{7 + 2 * len(_SPANS)}q").pack
_PACK_SPANS = struct.Struct(f"={2 * len(_SPANS)}q").pack
_NO_SPANS = (0,) * (2 * len(_SPANS))
_SPANS_AT = ROW_SETTINGS.itemsize - 8 * len(_NO_SPANS)  # bytes before the spans
_MIN_HISTORY = 64
_NONE = np.empty(0, dtype=np.int64)
_MAX_TOP_K = 2**31  # more than any vocabulary


@dataclass(eq=False, slots=True)
class SamplingRow:
    """The inputs of one row: `seed` as an unsigned 64-bit number, the ids that end it, its tokens so far, its wishes.

    A row may want log-probabilities: of the sampled token, of the `top_logprobs` best ones, of chosen ones.  It may
    want the mask of the tokens that could have been sampled.  The caller enters the tokens that it may sample
    (`is_restricted`) at every step.  `shared` has its lists as arrays; samples of one prompt
    may share them.  `place` is the place where they were entered last.
    """

    params: SamplingParams
    seed: int
    end_ids: Sequence[int]
    prompt_ids: Sequence[int]
    output_ids: list[int]  # the live list, read at every step
    wants_logprob: bool = True
    top_logprobs: int = 0
    chosen_ids: Sequence[int] = ()
    wants_mask: bool = False
    is_restricted: bool = False
    settings: bytes = field(init=False, repr=False)  # one `ROW_SETTINGS` without spans
    has_penalties: bool = field(init=False, repr=False)
    has_lists: bool = field(init=False, repr=False)
    wants_more: bool = field(init=False, repr=False)  # more than a token and its log-probability
    shared: SharedLists = field(init=False, repr=False)
    place: Place | None = field(init=False, repr=False, default=None)

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
            -1,
            *_NO_SPANS,
        )
        self.has_penalties = params.has_penalties
        self.has_lists = self.has_penalties or self.is_restricted or params.min_new_tokens > 0
        self.has_lists = self.has_lists or bool(self.chosen_ids or params.logit_bias)
        self.wants_more = bool(self.top_logprobs or self.chosen_ids or self.wants_mask)
        self.shared = SharedLists(Prompt(self.prompt_ids), self.end_ids, params.logit_bias, self.chosen_ids)

    def lists(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of bias, end tokens and distinct prompt tokens, int64; a list without effect is empty."""
        params, shared = self.params, self.shared
        return (
            shared.bias_ids,
            shared.ends(vocab_size) if params.min_new_tokens > 0 else _NONE,
            shared.distinct if params.repetition_penalty != 1.0 else _NONE,
        )


def _table_of(settings: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(bytearray(b"".join(settings)), dtype=ROW_SETTINGS)


class PlainRows(NamedTuple):
    """The settings of rows without edits, top and chosen log-probabilities, on the logits' device: each [N].

    `seeds` int64 have the bits of unsigned numbers, `temperatures` float32 are 1 for greedy rows, `greedy` is bool.
    `top_k` int64 is V, `top_p` float64 is 1 and `min_p` float32 is 0 where there is no filter.  `min_p` is rounded up,
    as weights in float32 are compared with it.  `wants_mask` is bool.
    """

    seeds: torch.Tensor
    temperatures: torch.Tensor
    greedy: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    wants_mask: torch.Tensor

    @classmethod
    def unused(cls, count: int, device: torch.device | str) -> PlainRows:
        """Return greedy rows without filters and masks."""
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        ones = torch.ones(count, dtype=torch.float64, device=device)
        return cls(zeros, ones.float(), zeros == 0, zeros + 1, ones, zeros.float(), zeros > 0)


class SamplingBatchInfo:
    """Parameters of N rows.

    `settings` are [N] of `ROW_SETTINGS`, without spans.  `operands` are the same with spans, and the tensors that the
    spans point into, in the order of the operator's arguments.  `rows_with_lists` are the rows, with their indices,
    that have chosen ids, bias, penalties, a minimum length or a restriction.  `allowed_GW` int32 are the tokens that
    the `restricted` rows may sample, one row after the other: bit i % 32 of word i // 32.  The caller writes them
    before each step; at first they are all tokens.  The cached properties are the same parameters for plain
    torch, on `device`.

    `lists` hold the lists of the rows: row i has the place `places[i]` in them.  By default this batch makes its own.
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device | str = "cpu",
        lists: RowLists | None = None,
        places: Sequence[int] = (),
    ) -> None:
        self.rows = list(rows)
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.top_n = max([row.top_logprobs for row in rows], default=0)
        self.rows_with_lists = [(i, row) for i, row in enumerate(rows) if row.has_lists]
        self.restricted = [i for i, row in self.rows_with_lists if row.is_restricted]
        self.allowed_GW = np.full((len(self.restricted), -(-vocab_size // 32)), -1, dtype=np.int32)
        self._lists, self._numbers = lists, places
        self._table: np.ndarray | None = None  # `settings` with spans; None: not asked for yet
        self._operands: tuple[Any, ...] = ()
        self._penalised: list[int] = []
        self._histories: list[tuple[Place, list[int]]] = []

    @cached_property
    def settings(self) -> np.ndarray:
        return _table_of([row.settings for row in self.rows])

    @property
    def operands(self) -> tuple[Any, ...]:
        if self._table is None:
            self._place_rows()
        return self._operands

    def update_histories(self) -> None:
        """Take in the tokens that rows with penalties got since the last call."""
        if self._table is None:
            self._place_rows()
        elif self._histories:
            self._fill_histories(self._table)

    def _fill_histories(self, table: np.ndarray) -> None:
        ends = [place.fill(output_ids) for place, output_ids in self._histories]
        if None in ends:
            self._lists = None  # lists with more room take their place
            self._place_rows()
        else:
            table["output_end"][self._penalised] = ends

    def _place_rows(self) -> None:
        """Give every row with lists a place for them, and enter its spans."""
        lists = self._lists
        places = None if lists is None else self._placed(lists, self._numbers)
        if lists is None or places is None:
            lists = self._lists = self._own_lists()
            places = self._placed(lists, range(len(self.rows)))
            assert places is not None, "made for these rows"
        settings = [row.settings for row in self.rows]
        for (i, _), place in zip(self.rows_with_lists, places):
            settings[i] = place.settings
        self._table = table = _table_of(settings)
        table["allowed"][self.restricted] = range(len(self.restricted))
        chosen = self._enter_chosen(table)
        self._histories = [
            (place, row.output_ids) for (_, row), place in zip(self.rows_with_lists, places) if row.has_penalties
        ]
        self._penalised = [i for i, row in self.rows_with_lists if row.has_penalties]
        words = torch.from_numpy(table.view(np.int64).reshape(len(self.rows), ROW_SETTINGS.itemsize // 8))
        self._operands = (
            words,
            chosen,
            lists.bias_ids,
            lists.bias_values,
            lists.end_ids,
            lists.histories,
            torch.from_numpy(self.allowed_GW),
            self.top_n,
        )
        if self._histories:
            self._fill_histories(table)

    def _placed(self, lists: RowLists, numbers: Sequence[int]) -> list[Place] | None:
        """Return the places of the rows with lists, or None if the lists of one do not fit into its place."""
        placed, places = [], lists.places
        for i, row in self.rows_with_lists:
            place = row.place
            if place is None or places[numbers[i]] is not place:
                place = self._enter(lists, numbers[i], row)
                if place is None:
                    return None
            placed.append(place)
        return placed

    def _enter(self, lists: RowLists, number: int, row: SamplingRow) -> Place | None:
        place = row.place = lists.enter(number, row.lists(self.vocab_size), row.shared.bias_values)
        if place is not None:
            place.settings = row.settings[:_SPANS_AT] + _PACK_SPANS(0, 0, *place.spans)
        return place

    def _own_lists(self) -> RowLists:
        """Make places that are as large as the rows need, with room for the output to grow."""
        widths = [(0, 0, 0)] * len(self.rows)
        for i, row in self.rows_with_lists:
            room = max(_MIN_HISTORY, 2 * len(row.output_ids)) if row.has_penalties else 0
            bias, ends, prompt = map(len, row.lists(self.vocab_size))
            widths[i] = (bias, ends, prompt + room)
        return RowLists(widths)

    def _enter_chosen(self, table: np.ndarray) -> torch.Tensor:
        """Enter the span of each row's chosen ids in `table`, and return all chosen ids, one row after the other.

        Results have the same order and number.
        """
        rows = [i for i, row in self.rows_with_lists if row.chosen_ids]
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        arrays = [self.rows[i].shared.chosen for i in rows]
        ends = np.cumsum([len(array) for array in arrays])
        table["chosen_end"][rows] = ends
        table["chosen_begin"][rows[1:]] = ends[:-1]
        return torch.from_numpy(np.concatenate(arrays))

    # --- for plain torch ------------------------------------------------------------------------------------------

    @cached_property
    def chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and id of each chosen token, int64 [C], one row after the other."""
        rows = np.array([i for i, row in self.rows_with_lists for _ in row.chosen_ids], dtype=np.int64)
        ids = np.concatenate([_NONE, *[row.shared.chosen for _, row in self.rows_with_lists]])
        return to_device(torch.from_numpy(rows), self.device), to_device(torch.from_numpy(ids), self.device)

    @cached_property
    def plain_rows(self) -> PlainRows | None:
        """The rows as `PlainRows` where all of them are plain, else None."""
        return None if self.rows_with_lists or self.top_n else self.rows_alone

    @cached_property
    def rows_alone(self) -> PlainRows:
        """The rows as `PlainRows`, without their edits, best and chosen tokens."""
        table = self.settings
        least = table["min_p"].astype(np.float32)
        least = np.where(least < table["min_p"], np.nextafter(least, np.float32(np.inf)), least)
        top_k = np.where(table["top_k"] > 0, np.minimum(table["top_k"], self.vocab_size), self.vocab_size)
        return PlainRows(
            to_device(torch.from_numpy(table["seed"].copy().view(np.int64)), self.device),
            self.temperatures,
            self.greedy,
            to_device(torch.from_numpy(top_k), self.device),
            self._column("top_p", torch.float64),
            to_device(torch.from_numpy(least), self.device),
            self._column("wants_mask", torch.bool),
        )

    def allowed(self, row: int) -> torch.Tensor | None:
        """Return which tokens a row may sample, [V] bool on `device`; None if it is not restricted."""
        if row not in self.restricted:
            return None
        bits = np.unpackbits(self.allowed_GW[self.restricted.index(row)].view(np.uint8), bitorder="little")
        return to_device(torch.from_numpy(bits[: self.vocab_size].astype(bool)), self.device)

    @property
    def has_filters(self) -> bool:
        """True where a random row has top-k, top-p or min-p."""
        return bool(self._has_filters.any())

    @cached_property
    def temperatures(self) -> torch.Tensor:
        """Temperatures [N] float32, 1 for greedy rows."""
        return self._column("temperature", torch.float32)

    @cached_property
    def scales(self) -> bool:
        """True where any row has a temperature other than 1."""
        return bool((self.settings["temperature"] != 1.0).any())

    @cached_property
    def greedy(self) -> torch.Tensor:
        """Greedy rows: [N] bool."""
        return self._column("is_greedy", torch.bool)

    @cached_property
    def all_greedy(self) -> bool:
        return bool(self.settings["is_greedy"].all())

    @cached_property
    def wants_logprob(self) -> torch.Tensor:
        """Rows that want the log-probability of their token: [N] bool."""
        return self._column("wants_logprob", torch.bool)

    @cached_property
    def masked_rows(self) -> list[int]:
        """The rows that want the mask of the tokens that could have been sampled."""
        return [i for i, row in enumerate(self.rows) if row.wants_mask]

    @cached_property
    def top_logprobs(self) -> torch.Tensor:
        """Numbers of best tokens that the rows ask for: [N] int64."""
        return self._column("top_logprobs", torch.int64)

    @cached_property
    def filtered_rows(self) -> torch.Tensor | None:
        """Indices [F] of the random rows with top-k, top-p or min-p; None if there are none."""
        rows = np.flatnonzero(self._has_filters)
        return to_device(torch.from_numpy(rows), self.device) if len(rows) else None

    @cached_property
    def largest_top_k(self) -> int:
        """The largest `top_k` of the filtered rows; V where one has no limit."""
        top_k = self.settings["top_k"][self._has_filters]
        return int(np.where(top_k > 0, top_k, self.vocab_size).max(initial=0))

    @cached_property
    def top_k(self) -> torch.Tensor:
        """The `top_k` of the filtered rows [F] int64; V where there is no limit."""
        top_k = self._column("top_k", torch.int64)[self.filtered_rows]
        return torch.where(top_k > 0, top_k, self.vocab_size)

    @cached_property
    def top_p(self) -> torch.Tensor:
        """The `top_p` of the filtered rows [F] float64."""
        return self._column("top_p", torch.float64)[self.filtered_rows]

    @cached_property
    def min_p(self) -> torch.Tensor:
        """The `min_p` of the filtered rows [F] float64."""
        return self._column("min_p", torch.float64)[self.filtered_rows]

    @cached_property
    def _has_filters(self) -> np.ndarray:
        """Random rows with top-k, top-p or min-p: [N] bool."""
        table = self.settings
        filters = (table["top_p"] < 1.0) | (table["top_k"] > 0) | (table["min_p"] > 0.0)
        has_filters: np.ndarray = (table["is_greedy"] == 0) & filters
        return has_filters

    def _column(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.from_numpy(self.settings[name].copy()).to(dtype), self.device)
