"""Counter-based uniform noise: a number in [0, 1) from (seed, position) alone.

The same seed gives the same tokens whatever else is in the batch, because no generator state is shared.
The mix is SplitMix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), 53 bits each, shape [N], from seeds [N] uint64 and positions [N]."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
