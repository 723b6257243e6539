"""`DigestPlan`: the digest of a weight version whose names, dtypes and shapes are known: only fingerprints change.

`fingerprint.digest` hashes sorted lines, one a tensor, of which the last 16 characters are its fingerprint.  A plan
keeps the lines as one text and writes the fingerprints into it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.fingerprint import digest
from weight_sync.tensor_meta import TensorMeta, dtype_name

_DIGITS = 16
_FIELD = np.dtype((np.void, _DIGITS))


@functools.lru_cache(maxsize=1024)
def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return what a line has behind the name; many tensors have the same."""
    return f"\0{dtype_name(dtype)}\0{','.join(map(str, shape))}\0{'0' * _DIGITS}\n"


class DigestPlan:
    """`metas`: all tensors of the version, each name once."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        lines = [meta.name + _form(meta.dtype, meta.shape) for meta in metas]
        # With a zero byte inside a name, the fingerprint of one line could be compared with the name of another.
        self._odd = list(metas) if any("\0" in meta.name for meta in metas) else None
        order = sorted(range(len(lines)), key=lines.__getitem__)
        encoded = [lines[index].encode() for index in order]
        self._order = np.array(order, np.int64)
        self._places = np.cumsum([len(line) for line in encoded], dtype=np.int64) - 1 - _DIGITS
        self._text = b"".join(encoded)

    def digest(self, values: npt.NDArray[np.uint64]) -> str:
        """Return what `digest` does, of the fingerprints in the order of the tensors: uint64 [n]."""
        if self._odd is not None:
            return digest(zip(self._odd, values.tolist(), strict=True))
        text, digits = bytearray(self._text), np.frombuffer(hex_digits(values[self._order]).encode(), _FIELD)
        if digits.size:
            fields = np.ndarray((len(text) - _DIGITS + 1,), _FIELD, text, strides=(1,))  # one from each byte on
            fields[self._places] = digits
        return hashlib.sha256(text).hexdigest()


def hex_digits(values: npt.NDArray[np.uint64]) -> str:
    """Return the wire forms of fingerprints, end to end: 16 hex digits each."""
    return values.astype(">u8").tobytes().hex()


def split_digits(digits: str) -> list[str]:
    """Return the wire form of each fingerprint from the wire forms end to end."""
    return [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
