"""`RestrictedRows`: the tokens that the restricted rows of one step may sample, all rows together.

Shapes: G restricted rows, W words of 32 bits, one bit for each token of the vocabulary; P words that hold end tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.grammar.restriction import Restriction
from rollout.grammar.token_set import ALL, words_of


class RestrictedRows:
    """Writes the set of each row into `out_GW` int32: bit i % 32 of word i // 32 for token i.

    It is kept while the rows stay the same.  A call of the library costs some microseconds a row, and numpy as much
    for each operation on a row: so what all rows have in common is done for all of them at once.
    """

    def __init__(self, restrictions: Sequence[Restriction], out_GW: np.ndarray) -> None:
        assert out_GW.dtype == np.int32 and out_GW.flags.c_contiguous and len(out_GW) == len(restrictions)
        self._out_GW = out_GW
        self._rows = list(enumerate(restrictions))
        self._listed = [(row, each) for row, each in self._rows if each.has_lists]
        self._may_end_G = np.zeros(len(restrictions), dtype=bool)
        texts = [restriction.removed_from_texts for restriction in restrictions]
        ends = [restriction.added_at_ends for restriction in restrictions]
        self._places_P = np.unique(np.concatenate([each.places for each in texts + ends]))
        self._kept_GP = ~words_of(texts, self._places_P)
        self._ends_GP = words_of(ends, self._places_P)

    def write(self) -> None:
        """Write all rows.  All tokens before are fed; a row of which no token is left gets all, and fails."""
        out_GW, may_end_G = self._out_GW, self._may_end_G
        address, size = out_GW.ctypes.data, out_GW.shape[1] * out_GW.itemsize
        for row, restriction in self._rows:
            may_end_G[row] = restriction.write_texts(address + row * size, size, out_GW[row])
        if len(self._places_P):
            words_GP = out_GW[:, self._places_P]
            words_GP &= self._kept_GP
            words_GP |= np.where(may_end_G[:, None], self._ends_GP, 0)
            out_GW[:, self._places_P] = words_GP
        for row, restriction in self._listed:
            restriction.narrow(out_GW[row])
        for row in [row for row, restriction in self._rows if restriction.failure is not None]:
            out_GW[row] = ALL
        for row in np.flatnonzero(~out_GW.any(1)).tolist():
            self._rows[row][1].note_empty()
            out_GW[row] = ALL
