"""`AlternativesBuffer`: what the `Alternatives` of a sample say, as arrays.

Shapes: n tokens, K likeliest ones at each place, C chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollout.core.messages.req_output import Alternatives


class AlternativeArrays(NamedTuple):
    """`top_logprobs` and `top_ids` [n, K], `chosen_logprobs` [n, C]; float32 or float64, int32."""

    top_logprobs: np.ndarray
    top_ids: np.ndarray
    chosen_logprobs: np.ndarray


@dataclass(slots=True)
class AlternativesBuffer:
    """Rows of the messages of a sample, one after the other; its request states K and C."""

    num_top: int
    num_chosen: int
    dtype: str = "float32"
    top_logprobs: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    chosen_logprobs: bytearray = field(default_factory=bytearray)

    def append(self, message: Alternatives) -> None:
        self.dtype = message.dtype
        self.top_logprobs += message.top_logprobs
        self.top_ids += message.top_ids
        self.chosen_logprobs += message.chosen_logprobs

    def holds(self, count: int) -> bool:
        """Return whether there are rows of exactly `count` tokens."""
        item = np.dtype(self.dtype).itemsize
        sizes = (len(self.top_logprobs), len(self.top_ids), len(self.chosen_logprobs))
        return sizes == (item * count * self.num_top, 4 * count * self.num_top, item * count * self.num_chosen)

    def arrays(self, count: int, first: int = 0) -> AlternativeArrays:
        """Return a copy of the rows of tokens `first .. count - 1`: the buffer may grow meanwhile."""
        floats = np.dtype(self.dtype).newbyteorder("<")
        return AlternativeArrays(
            _rows(self.top_logprobs, floats, first, count, self.num_top),
            _rows(self.top_ids, np.dtype("<i4"), first, count, self.num_top),
            _rows(self.chosen_logprobs, floats, first, count, self.num_chosen),
        )


def message_arrays(message: Alternatives | None, count: int, num_top: int, num_chosen: int) -> AlternativeArrays:
    """Return views of the rows of `count` tokens in one message; None holds no tokens."""
    message = message or Alternatives()
    floats = np.dtype(message.dtype).newbyteorder("<")
    return AlternativeArrays(
        np.frombuffer(message.top_logprobs, floats).reshape(count, num_top),
        np.frombuffer(message.top_ids, "<i4").reshape(count, num_top),
        np.frombuffer(message.chosen_logprobs, floats).reshape(count, num_chosen),
    )


def _rows(buffer: bytearray, dtype: np.dtype, first: int, end: int, width: int) -> np.ndarray:
    size = width * dtype.itemsize
    return np.frombuffer(buffer[first * size : end * size], dtype).reshape(end - first, width)
