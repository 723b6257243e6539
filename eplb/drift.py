"""How far apart two load distributions are, and how far apart chance alone would put them.

Knows counts.  Does not know where they come from.

Shapes: L MoE layers, E logical experts.
"""

from __future__ import annotations

import math

import torch


def total_variation(before_LE: torch.Tensor, after_LE: torch.Tensor) -> torch.Tensor:
    """Share of the choices that would have to move to make one distribution the other: [L] float64 in 0 .. 1.

    NaN for a layer that has no counts on one side.
    """
    return (_shares(before_LE) - _shares(after_LE)).abs().sum(dim=1) / 2


def expected_by_chance(before_LE: torch.Tensor, after_LE: torch.Tensor) -> torch.Tensor:
    """What `total_variation` would be on average if both counts were samples of one distribution: [L] float64.

    The difference of two sampled shares is taken as normal, and the choices of a token as independent.
    """
    totals = before_LE.sum(dim=1, dtype=torch.float64), after_LE.sum(dim=1, dtype=torch.float64)
    pooled_LE = _shares(before_LE.double() + after_LE.double())
    variance_LE = pooled_LE * (1 - pooled_LE) * (1 / totals[0] + 1 / totals[1])[:, None]
    return variance_LE.sqrt().sum(dim=1) / math.sqrt(2 * math.pi)


def _shares(counts_LE: torch.Tensor) -> torch.Tensor:
    counts_LE = counts_LE.double()
    return counts_LE / counts_LE.sum(dim=1, keepdim=True)
