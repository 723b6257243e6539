"""The formats of logical tensors that are not held as they are sent: quantised when they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from weight_sync.fp8_blocks import requantised
from weight_sync.int8_blocks import held_values


@dataclass(frozen=True)
class HeldFormat:
    """`values` gives what is held of a tensor, in its dtype.  `of_pairs`: also of one that came quantised otherwise.

    `flag`: what asks for it, for refusals.
    """

    values: Callable[[torch.Tensor], torch.Tensor]
    of_pairs: bool
    flag: str


FP8_BLOCKS = HeldFormat(requantised, of_pairs=False, flag="--quantize-weight-updates")
INT8_BLOCKS = HeldFormat(held_values, of_pairs=True, flag="--cpu-weight-format w8")
HeldFormats = Mapping[str, HeldFormat]
"""By the names of logical tensors; the others are held as they were sent."""
AS_SENT: HeldFormats = MappingProxyType({})
