"""`SamplingMask`: the token ids that top-k, top-p and min-p left at each sampled token, and its wire forms.

A trainer that renormalises over them computes the distribution that the token was drawn from (`capture.replay`,
`masked_logprobs`).  A trainer that does not renormalise has biased importance ratios.

    offsets    [0, 2, 3, 6]            token 0 was one of {7, 9}, token 1 of {9}, token 2 of {1, 7, 8}
    token_ids  [7, 9, 9, 1, 7, 8]

Shapes: T sampled tokens, M kept ids of all of them together.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from capture.errors import MaskFormatError, MaskValueError


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The ids of T tokens' masks: `token_ids` [M] int32, and `offsets` [T + 1] int64.

    Token t has `token_ids[offsets[t] : offsets[t + 1]]`, at least one id.  Raises `MaskValueError` if no sampler can
    have produced them.
    """

    token_ids: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        ids, offsets = np.asarray(self.token_ids).view(), np.asarray(self.offsets).view()
        if ids.dtype != np.int32 or ids.ndim != 1 or offsets.dtype != np.int64 or offsets.ndim != 1:
            raise MaskValueError(f"token_ids {ids.dtype} {ids.shape} and offsets {offsets.dtype} {offsets.shape}")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 1).any():
            raise MaskValueError(f"offsets of {len(ids)} token ids must ascend from 0 to their number")
        if len(ids) and ids.min() < 0:
            raise MaskValueError(f"token id {int(ids.min())}")
        if _has_repeats(ids, offsets):
            raise MaskValueError("the mask of a token names an id twice")
        for name, array in (("token_ids", ids), ("offsets", offsets)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.token_ids, other.token_ids) and np.array_equal(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, token: int) -> np.ndarray:
        """Return the ids of one token's mask, int32 [m]."""
        token = range(len(self))[token]
        return self.token_ids[self.offsets[token] : self.offsets[token + 1]]

    def tokens(self, begin: int, end: int) -> SamplingMask:
        """Return the masks of the tokens `begin .. end - 1`."""
        begin, end, _ = slice(begin, end).indices(len(self))
        offsets = self.offsets[begin : max(begin, end) + 1]
        return SamplingMask(self.token_ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    @classmethod
    def from_lists(cls, kept: Sequence[Sequence[int]]) -> SamplingMask:
        """Build the masks from a list of ids for each token, SGLang's and vLLM's form.  Raises `MaskFormatError`."""
        try:
            offsets = np.cumsum([0, *map(len, kept)], dtype=np.int64)
            flat = [token_id for ids in kept for token_id in ids]
            if odd := [token_id for token_id in flat if type(token_id) is not int]:
                raise TypeError(f"token ids must be integers, got {str(odd[0])[:80]!r}")
            return cls(np.array(flat, dtype=np.int32), offsets)
        except (TypeError, OverflowError) as error:
            raise MaskFormatError(f"a sampling mask must be a list of token ids for each token: {error}") from None

    def to_lists(self) -> list[list[int]]:
        """Return a list of ids for each token."""
        flat, ends = self.token_ids.tolist(), self.offsets.tolist()
        return [flat[begin:end] for begin, end in pairwise(ends)]

    def encode_csr(self) -> tuple[str, str]:
        """Encode ids and offsets as base64 of little-endian int32, slime's form.

        Raises `MaskValueError` for more ids than int32 counts.
        """
        if len(self.token_ids) >= 1 << 31:
            raise MaskValueError(f"{len(self.token_ids)} ids are too many for int32 offsets")
        columns = (self.token_ids.astype("<i4"), self.offsets.astype("<i4"))
        ids, offsets = (base64.b64encode(column.tobytes()).decode("ascii") for column in columns)
        return ids, offsets

    @classmethod
    def decode_csr(cls, token_ids: Any, offsets: Any) -> SamplingMask:
        """Invert `encode_csr`.  Raises `MaskFormatError` for text that is not such a column."""
        return cls(_column(token_ids), _column(offsets).astype(np.int64))

    @classmethod
    def joined(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Join the masks of all parts, one part after the other."""
        counts = [np.diff(part.offsets) for part in parts]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), *counts]).cumsum()
        return cls(np.concatenate([np.empty(0, dtype=np.int32), *(part.token_ids for part in parts)]), offsets)

    def require(self, sampled_ids: Sequence[int]) -> None:
        """Raise `MaskValueError` unless each of `sampled_ids` [T] has a mask that holds it."""
        sampled = np.asarray(sampled_ids, dtype=np.int64).reshape(-1)
        if len(sampled) != len(self):
            raise MaskValueError(f"there are masks for {len(self)} tokens, but {len(sampled)} tokens were sampled")
        held = np.logical_or.reduceat(self.token_ids == np.repeat(sampled, np.diff(self.offsets)), self.offsets[:-1])
        if len(sampled) and not held.all():
            token = int(held.argmin())
            raise MaskValueError(f"token {token}: {int(sampled[token])} was sampled, but its mask does not hold it")


def _has_repeats(ids: np.ndarray, offsets: np.ndarray) -> bool:
    """Return whether a token has an id twice; sorting is needed only where ids do not ascend."""
    inside = np.ones(max(len(ids) - 1, 0), dtype=bool)
    inside[offsets[1:-1] - 1] = False  # pairs of neighbours that belong to one token
    if (np.diff(ids.astype(np.int64))[inside] > 0).all():
        return False
    token_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((ids, token_of))
    ids, token_of = ids[order], token_of[order]
    return bool(((ids[1:] == ids[:-1]) & (token_of[1:] == token_of[:-1])).any())


def _column(text: Any) -> np.ndarray:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise MaskFormatError(f"a column of a sampling mask is not base64: {error}") from None
    if len(content) % 4:
        raise MaskFormatError(f"a column of int32 needs a multiple of 4 bytes, got {len(content)}")
    return np.frombuffer(content, dtype="<i4").astype(np.int32)
