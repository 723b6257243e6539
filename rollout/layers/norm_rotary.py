"""RMSNorm, the weights of the norm of queries and keys, and rotary position embedding.

Shapes: T tokens, D hidden, H query heads, Hkv key/value heads, hd head size, rd rotated elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from rollout.core.specs.layer_specs import LinearScaling, Llama3Scaling, NormSpec, RotarySpec, YarnScaling
from rollout.kernels.operators.fused_experts import ExpertOutputs
from rollout.kernels.places import Place, ViewPlace
from rollout.layers.build import Build
from rollout.layers.weight_entry import WeightEntry, WeightLayer

_ROWS_AT_ONCE = 4096

# What a norm adds to the residual stream: rows [T, D], outputs of experts whose sum is the norm's, or nothing.
Hidden = torch.Tensor | ExpertOutputs | None


class RMSNorm(WeightLayer):
    """Root mean square norm over the last dimension.

    Layers that begin with a norm take the `RMSNorm` and apply it together with their first product.
    """

    def __init__(self, size: int, spec: NormSpec, build: Build) -> None:
        self.ops = build.ops
        self.eps, self.weight_offset = spec.eps, spec.weight_offset
        self.weight = build.empty(size)

    def __call__(self, residual_TD: torch.Tensor, hidden: Hidden) -> torch.Tensor:
        """Add `hidden` to `residual` in place, unless it is None, and return the norm of `residual`."""
        if isinstance(hidden, ExpertOutputs):
            assert self.ops.deferred_sum is not None, "a layer left a sum that these operators do not take"
            return self.ops.deferred_sum.norm(residual_TD, hidden, self.weight, self.eps, self.weight_offset)
        return self.ops.add_rms_norm(residual_TD, hidden, self.weight, self.eps, self.weight_offset)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        yield WeightEntry(f"{prefix}.weight", tuple(self.weight.shape), self.weight.dtype, self._places)

    def _places(self) -> list[Place]:
        return [ViewPlace(self.weight)]


class RotaryTable:
    """Rotary embedding (Su et al., 2021): the angles of every position, computed once.

    The table has 2 * rd elements a position.  Angles are products in float32 (float64 for float64), as trainers compute
    them.  Numpy computes their cosines in float64, which are then rounded: the first cosines that torch computes in a
    process, on several threads, are now and then off by 1e-4.
    """

    def __init__(self, spec: RotarySpec, num_positions: int, build: Build) -> None:
        self.ops = build.ops
        work_dtype = torch.float64 if build.dtype == torch.float64 else torch.float32
        frequencies = _frequencies(spec, work_dtype)
        self._table = build.empty(num_positions, 2, spec.dim)
        factor = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0
        for rows in torch.arange(num_positions, dtype=work_dtype).split(_ROWS_AT_ONCE):
            angles = (rows[:, None] * frequencies).double().numpy()
            both = (torch.from_numpy(function(angles) * factor) for function in (np.cos, np.sin))
            cos, sin = (values.to(work_dtype).to(build.dtype) for values in both)
            part = torch.stack((_both(cos, cos, spec.interleaved), _both(-sin, sin, spec.interleaved)), 1)
            self._table[int(rows[0]) : int(rows[-1]) + 1] = part

    def angles(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Gather cos and sign-folded sin [T, 2, rd] of each position, each for the element that it multiplies."""
        return self.ops.gather_rows(self._table, positions_T)


def _both(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Put the factors of the first and the second element of each pair where these elements lie in a head: [n, rd]."""
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def _frequencies(spec: RotarySpec, dtype: torch.dtype) -> torch.Tensor:
    """Return by how many radians a position turns each pair of elements [rd / 2]."""
    exponents = torch.arange(0, spec.dim, 2, dtype=dtype) / spec.dim
    frequencies = 1.0 / spec.theta**exponents
    if isinstance(spec.scaling, LinearScaling):
        return frequencies / spec.scaling.factor
    if isinstance(spec.scaling, Llama3Scaling):
        return _llama3_scaled(frequencies, spec.scaling)
    return frequencies if spec.scaling is None else _yarn_scaled(frequencies, spec, spec.scaling)


def _yarn_scaled(frequencies: torch.Tensor, spec: RotarySpec, scaling: YarnScaling) -> torch.Tensor:
    """Scale as transformers `modeling_rope_utils` does: a ramp over the pairs, from unchanged to slowed down."""

    def pair_that_turns(times: float) -> float:
        length = scaling.original_max_position_embeddings
        return spec.dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    pairs = torch.arange(frequencies.shape[0], dtype=frequencies.dtype)
    ramp = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _llama3_scaled(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scale as transformers `modeling_rope_utils` does: between two wavelengths, from slowed down to unchanged."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    slowed = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    turns = scaling.original_max_position_embeddings / wavelengths
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    partly = (1 - share) * slowed / scaling.factor + share * slowed
    is_medium = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(is_medium, partly, slowed)


class QueryKeyNorm(WeightLayer):
    """The weights of the per-head RMSNorm of queries and keys.

    They live in one table of a row per head, so that both are applied by one multiplication.  Each of the first H rows
    is `q_norm.weight`, each of the others `k_norm.weight`.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, build: Build) -> None:
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.weight = build.empty(num_heads + num_kv_heads, head_dim)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        parent = prefix.rpartition(".")[0]
        for part, rows in (("q_norm", slice(0, self.num_heads)), ("k_norm", slice(self.num_heads, None))):
            places = partial(self._head_rows, rows)
            yield WeightEntry(f"{parent}.{part}.weight", (self.head_dim,), self.weight.dtype, places)

    def _head_rows(self, rows: slice) -> list[Place]:
        return [ViewPlace(row) for row in self.weight[rows]]
