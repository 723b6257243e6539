"""The lists of ids that rows bring along, as arrays: `SharedLists` of the samples of a prompt, and places of rows.

The lists of a row keep their place, each in a flat tensor with the lists of other rows:

    bias_ids    | row 0        | row 1        | ..
    histories   | row 0: distinct prompt, output ->      | row 1: ..

So the lists of other rows are not copied when a row joins or leaves a batch, however long their prompts and biases are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np
import torch

from rollout.core.host_copy import to_device
from rollout.core.prompt import Prompt
from rollout.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

_MAX_CONFIGURED_ENDS = 64  # end tokens of a model's configuration; with more, each batch has its own lists


class SharedLists:
    """Lists that samples of one prompt have in common.

    An array is made when it is first read.  Its dtype is int64, but for `bias_values`.
    """

    def __init__(
        self, prompt: Prompt, end_ids: Sequence[int], logit_bias: Mapping[int, float], chosen_ids: Sequence[int]
    ) -> None:
        self.prompt = prompt
        self._end_ids, self._logit_bias, self._chosen_ids = end_ids, logit_bias, chosen_ids
        self._ends: tuple[int, np.ndarray] | None = None  # the size of the vocabulary, and the end tokens inside it
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}

    @cached_property
    def bias_ids(self) -> np.ndarray:
        return np.fromiter(self._logit_bias, np.int64, len(self._logit_bias))

    @cached_property
    def bias_values(self) -> np.ndarray:
        """Bias of each of `bias_ids`, float32."""
        return np.fromiter(self._logit_bias.values(), np.float32, len(self._logit_bias))

    @cached_property
    def chosen(self) -> np.ndarray:
        return np.array(self._chosen_ids, dtype=np.int64)

    @property
    def distinct(self) -> np.ndarray:
        """Each token of the prompt once, ascending."""
        return self.prompt.distinct

    def ends(self, vocab_size: int) -> np.ndarray:
        """Return the end tokens inside the vocabulary: a configuration may name others."""
        if self._ends is None or self._ends[0] != vocab_size:
            ends = np.array(self._end_ids, dtype=np.int64)
            self._ends = vocab_size, ends[ends < vocab_size]
        return self._ends[1]

    def on(self, name: Literal["bias_ids", "bias_values", "distinct"], device: torch.device) -> torch.Tensor:
        """Return the array of this name on `device`, copied there once."""
        found = self._on_device.get((name, device))
        if found is None:
            found = self._on_device[name, device] = to_device(torch.from_numpy(getattr(self, name)), device)
        return found


class _Column:
    """One list of each row, in the flat tensor `ids` int64.  The list of row i lies in `bounds[i] : bounds[i + 1]`."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.bounds = [0, *accumulate(widths)]
        self.ids = torch.empty(self.bounds[-1], dtype=torch.int64)
        self.array = self.ids.numpy()

    def enter(self, index: int, ids: np.ndarray) -> tuple[int, int] | None:
        """Copy the list to its place, and return its begin and end, or None if it does not fit."""
        begin, last = self.bounds[index : index + 2]
        end = begin + len(ids)
        if end > last:
            return None
        self.array[begin:end] = ids
        return begin, end


class Place:
    """The place of one row's lists: `spans` are begin and end of its bias, its end tokens, its prompt and its output.

    The span of the output is empty, and grows in `fill`.  `settings` is free for the caller, who knows the row.
    """

    __slots__ = ("_array", "_last", "_num_filled", "settings", "spans")

    def __init__(self, spans: tuple[int, ...], array: np.ndarray, last: int) -> None:
        self.spans = spans
        self.settings = b""
        self._array = array
        self._last = last
        self._num_filled = 0

    def fill(self, output_ids: list[int]) -> int | None:
        """Enter the new tokens of the output, and return its end, or None if there is no room for them."""
        count, filled, begin = len(output_ids), self._num_filled, self.spans[-1]
        if count != filled:
            if begin + count > self._last:
                return None
            self._array[begin + filled : begin + count] = output_ids[filled:]
            self._num_filled = count
        return begin + count


class RowLists:
    """Flat tensors that hold the lists of rows: `bias_ids`, `end_ids` and `histories` int64, `bias_values` float32.

    A history is the distinct prompt, then the output.  Row i has room for `widths[i]` entries of each of the three.
    Entries that no row uses take no memory.  The next row overwrites the lists of one that has left.
    """

    def __init__(self, widths: Sequence[tuple[int, int, int]]) -> None:
        self._bias, self._ends, self._history = [_Column([row[kind] for row in widths]) for kind in range(3)]
        self.bias_ids, self.end_ids, self.histories = self._bias.ids, self._ends.ids, self._history.ids
        self.bias_values = torch.empty(len(self.bias_ids), dtype=torch.float32)
        self._values = self.bias_values.numpy()
        self.places: list[Place | None] = [None] * len(widths)  # the place last entered for each row
        self.is_used = False

    @classmethod
    def of_engine(cls, num_requests: int, context_length: int) -> RowLists:
        """Return places for the lists of any requests: a prompt and its output are no longer than the context."""
        return cls([(MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS + _MAX_CONFIGURED_ENDS, context_length)] * num_requests)

    def enter(self, index: int, lists: tuple[np.ndarray, np.ndarray, np.ndarray], values: np.ndarray) -> Place | None:
        """Enter the `lists` of row `index` (bias, end tokens, distinct prompt), and the `values` of its bias.

        Returns their place, or None if they do not fit.
        """
        bias, ends, prompt = lists
        of_bias, of_ends = self._bias.enter(index, bias), self._ends.enter(index, ends)
        of_prompt = self._history.enter(index, prompt)
        if of_bias is None or of_ends is None or of_prompt is None:
            return None
        self._values[slice(*of_bias)] = values
        output = of_prompt[1]
        spans = (*of_bias, *of_ends, *of_prompt, output, output)
        self.is_used = True
        place = self.places[index] = Place(spans, self._history.array, self._history.bounds[index + 1])
        return place
