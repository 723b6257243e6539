"""`HiddenStates`: hidden states of chosen layers at consecutive tokens of a sequence.

Numbers are the model's own, bit for bit.  On the wire they are little-endian rows, one after the other.

Shapes: T tokens, L chosen layers, D hidden.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from capture.errors import HiddenStatesError
from capture.routed_experts import VersionSpan, add_spans

_RAW: dict[str, np.dtype] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}


def number_bytes(dtype: str) -> int:
    """Return the bytes of a number of a dtype's name."""
    return _RAW[dtype].itemsize


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden states of the tokens at positions `start ..` of their sequence: row t belongs to token `start + t`.

    `layers` [L] are numbered as transformers' `output_hidden_states`: 0 is the embedding, n the residual stream after n
    layers, and the number of layers is the output of the final norm.  `raw_TLD` holds numbers of `dtype`, bfloat16 as
    its bits in uint16.  `weight_versions` are spans (version, first row, end) over rows: the weights that computed
    them.  Raises `HiddenStatesError` for parts that do not fit.
    """

    raw_TLD: np.ndarray
    dtype: str
    layers: tuple[int, ...]
    start: int = 0
    weight_versions: tuple[VersionSpan, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in _RAW or self.raw_TLD.dtype != _RAW[self.dtype]:
            raise HiddenStatesError(f"hidden states of {self.dtype} cannot be held in {self.raw_TLD.dtype}")
        if self.raw_TLD.ndim != 3 or self.raw_TLD.shape[1] != len(self.layers):
            raise HiddenStatesError(f"{len(self.layers)} layers cannot have the shape {list(self.raw_TLD.shape)}")

    def __len__(self) -> int:
        return len(self.raw_TLD)

    def __eq__(self, other: object) -> bool:
        """Compare bits and facts: NaN equals itself."""
        if not isinstance(other, HiddenStates):
            return NotImplemented
        return self._facts() == other._facts() and self.raw_TLD.tobytes() == other.raw_TLD.tobytes()

    def _facts(self) -> tuple[tuple[int, ...], str, tuple[int, ...], int, tuple[VersionSpan, ...]]:
        return self.raw_TLD.shape, self.dtype, self.layers, self.start, self.weight_versions

    @property
    def values(self) -> np.ndarray:
        """The numbers [T, L, D] as float32, or as float64 from an engine that computes in it.  No bit is lost."""
        if self.dtype == "bfloat16":
            return (self.raw_TLD.astype(np.uint32) << 16).view(np.float32)
        return self.raw_TLD.astype(np.float64 if self.dtype == "float64" else np.float32, copy=False)

    @classmethod
    def of_bytes(
        cls,
        data: bytes,
        dtype: str,
        shape: Sequence[int],
        layers: Sequence[int],
        start: int = 0,
        weight_versions: Sequence[VersionSpan] = (),
    ) -> HiddenStates:
        """Return views of `data`.  Raises `HiddenStatesError` for data of another size than its shape."""
        is_shape = dtype in _RAW and len(shape) == 3 and min(shape) >= 0
        if not is_shape or math.prod(shape) * number_bytes(dtype) != len(data):
            raise HiddenStatesError(
                f"hidden states of {dtype!r} and the shape {list(shape)} do not have {len(data)} bytes"
            )
        raw_TLD = np.frombuffer(data, _RAW[dtype]).reshape(shape)
        return cls(raw_TLD, dtype, tuple(layers), start, tuple(weight_versions))

    @classmethod
    def of_text(
        cls,
        text: str,
        dtype: str,
        shape: Sequence[int],
        layers: Sequence[int],
        start: int = 0,
        weight_versions: Sequence[VersionSpan] = (),
    ) -> HiddenStates:
        """Read the rows of `of_bytes` out of base64.  Raises `HiddenStatesError`."""
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise HiddenStatesError(f"hidden states are not base64: {error}") from None
        return cls.of_bytes(data, dtype, shape, layers, start, weight_versions)

    @staticmethod
    def joined(parts: Sequence[HiddenStates]) -> HiddenStates:
        """Join records of consecutive token ranges of one model.

        Raises `HiddenStatesError` for no parts, other layers, or a gap or an overlap between the ranges.
        """
        if not parts:
            raise HiddenStatesError("there are no hidden states to join")
        first, spans, rows = parts[0], list[VersionSpan](), 0
        for part in parts:
            if (part.layers, part.dtype, part.raw_TLD.shape[2]) != (first.layers, first.dtype, first.raw_TLD.shape[2]):
                raise HiddenStatesError("the hidden states come from different models or layers")
            if part.start != first.start + rows:
                raise HiddenStatesError(f"hidden states start at token {part.start}, expected {first.start + rows}")
            add_spans(spans, part.weight_versions, rows)
            rows += len(part)
        raw_TLD = np.concatenate([part.raw_TLD for part in parts])
        return HiddenStates(raw_TLD, first.dtype, first.layers, first.start, tuple(spans))
