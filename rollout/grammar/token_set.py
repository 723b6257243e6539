"""`TokenSet`: token ids as bits.

Shapes: W words of 32 bits, one bit for each token of the vocabulary; P of these words.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

ALL = np.int32(-1)


class TokenSet:
    """Token ids of the vocabulary as the words that hold them: `places` [P] ascending, and `bits` [P] int32."""

    __slots__ = ("bits", "places")

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        """Keep those `token_ids` that are in the vocabulary: a configuration may name others."""
        words: dict[int, int] = {}  # in Python: the sets are small, and each request makes some
        for index in token_ids:
            if 0 <= index < vocab_size:
                words[index // 32] = words.get(index // 32, 0) | 1 << index % 32
        places = sorted(words)
        self.places = np.array(places, dtype=np.int64)
        self.bits = np.array([words[place] for place in places], dtype=np.uint32).view(np.int32)

    def holds(self, token_id: int) -> bool:
        place = int(np.searchsorted(self.places, token_id // 32))
        found = place < len(self.places) and self.places[place] == token_id // 32
        return bool(found and int(self.bits[place]) >> token_id % 32 & 1)

    def remove_from(self, out_W: np.ndarray) -> None:
        if len(self.places):
            out_W[self.places] &= ~self.bits

    def keep_only(self, out_W: np.ndarray) -> None:
        """Remove all other tokens."""
        kept = out_W[self.places] & self.bits
        out_W[:] = 0
        out_W[self.places] = kept


def words_of(sets: Sequence[TokenSet], places_P: np.ndarray) -> np.ndarray:
    """Return the words `places_P`, ascending, of each set: int32 [G, P].  The sets have no other words."""
    words_GP = np.zeros((len(sets), len(places_P)), dtype=np.int32)
    for row, each in enumerate(sets):
        words_GP[row, np.searchsorted(places_P, each.places)] = each.bits
    return words_GP
