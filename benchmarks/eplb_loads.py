"""Synthetic loads of experts: how many tokens each logical expert of each MoE layer gets.

Known distributions for benchmarks, tests and examples; nothing here was recorded from a model.

Shapes: L MoE layers, E logical experts.
"""

from __future__ import annotations

import numpy as np

from eplb.errors import LoadsError

TOKENS = 10_000_000  # counts of a layer; large enough that rounding to whole tokens does not show


def zipf(num_layers: int, num_logical_experts: int, exponent: float, seed: int = 0) -> np.ndarray:
    """Return counts [L, E] int64 by Zipf's law: the k-th expert has 1 / k^exponent of the first one's tokens.

    Each layer has its experts in another order.
    """
    shares_E = np.arange(1, num_logical_experts + 1, dtype=np.float64) ** -exponent
    generator = np.random.default_rng(seed)
    return _counts(np.stack([generator.permutation(shares_E) for _ in range(num_layers)]))


def log_normal(num_layers: int, num_logical_experts: int, sigma: float, seed: int = 0) -> np.ndarray:
    """Return counts [L, E] int64 whose logarithms are normal with the standard deviation `sigma`."""
    generator = np.random.default_rng(seed)
    return _counts(np.exp(generator.normal(0.0, sigma, (num_layers, num_logical_experts))))


def drift(counts_LE: np.ndarray, sigma: float, seed: int = 1) -> np.ndarray:
    """Return later counts [L, E] int64: each expert's count is multiplied by a log-normal factor of its own."""
    generator = np.random.default_rng(seed)
    return _counts(counts_LE * np.exp(generator.normal(0.0, sigma, counts_LE.shape)))


def synthetic(spec: str, num_layers: int, num_logical_experts: int, seed: int = 0) -> np.ndarray:
    """Return counts [L, E] int64 of `zipf:EXPONENT` or `lognormal:SIGMA`.  Raises `LoadsError` for another spec."""
    name, _, number = spec.partition(":")
    makers = {"zipf": zipf, "lognormal": log_normal}
    try:
        return makers[name](num_layers, num_logical_experts, float(number), seed)
    except (KeyError, ValueError):
        raise LoadsError(f"unknown loads {spec!r}: zipf:EXPONENT or lognormal:SIGMA") from None


def _counts(weights_LE: np.ndarray) -> np.ndarray:
    counts_LE: np.ndarray = np.rint(weights_LE / weights_LE.sum(axis=1, keepdims=True) * TOKENS).astype(np.int64)
    return counts_LE
