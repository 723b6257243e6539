"""`Prompt`: the token ids of a prompt, and what is derived from them, made once for all of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np


class Prompt:
    """`ids`: the tokens as they came, which do not change.  The rest is made when it is first read."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    @cached_property
    def array(self) -> np.ndarray:
        """The tokens of the prompt, int64."""
        return np.fromiter(self.ids, np.int64, len(self.ids))

    @cached_property
    def distinct(self) -> np.ndarray:
        """Each token once, ascending, int64.  Marks in a table of the vocabulary's size are faster than a sort."""
        seen = np.zeros(int(self.array.max(initial=-1)) + 1, dtype=np.bool_)
        seen[self.array] = True
        return np.flatnonzero(seen)

    @cached_property
    def key(self) -> int:
        """The same number for the same tokens."""
        return hash(tuple(self.ids))
