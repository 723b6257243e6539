"""Sequences for the gated delta rule: random inputs, run through an operator in steps of any kind.

Shapes: T tokens, N sequences, Hk key heads, H value heads, dk and dv their sizes, C channels over w tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

Operator = Callable[..., torch.Tensor]
Chunk = tuple[int, int]  # a sequence, and how many of its next tokens


class Sizes(NamedTuple):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def columns(self) -> int:
        return self.channels + self.heads * self.value_dim + 2 * self.heads


@dataclass
class Results:
    """Results by sequence: what was read [T, H dv]; states and inputs of the convolution after the last token."""

    read: list[torch.Tensor]
    state: list[torch.Tensor]
    conv: list[torch.Tensor]

    def equals(self, other: Results) -> bool:
        pairs = zip((*self.read, *self.state, *self.conv), (*other.read, *other.state, *other.conv), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


class Sequences:
    """Random weights, and `lens[n]` tokens of each sequence; states remember over hundreds of tokens."""

    def __init__(self, sizes: Sizes, lens: Sequence[int], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.sizes, self.dtype = sizes, dtype
        self.projected = [randn(count, sizes.columns).to(dtype) for count in lens]
        self.conv_weight = randn(sizes.taps, sizes.channels).to(dtype)
        self.a_log, self.dt_bias = (randn(sizes.heads) - 4).to(dtype), (0.5 * randn(sizes.heads)).to(dtype)
        self.norm_weight = (1 + 0.1 * randn(sizes.value_dim)).to(dtype)

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Sequences:
        """Return the same numbers in `dtype`, on `device`."""
        other = object.__new__(Sequences)
        other.sizes, other.dtype = self.sizes, dtype
        other.projected = [rows.to(device, dtype) for rows in self.projected]
        for name in ("conv_weight", "a_log", "dt_bias", "norm_weight"):
            setattr(other, name, getattr(self, name).to(device, dtype))
        return other

    @property
    def lens(self) -> list[int]:
        return [len(rows) for rows in self.projected]

    def pools(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make pools of convolution and state with `rows` rows, full of NaN."""
        sizes, state = self.sizes, torch.promote_types(self.dtype, torch.float32)
        device, of_state = self.conv_weight.device, (rows, sizes.heads, sizes.key_dim, sizes.value_dim)
        conv = torch.full((rows, sizes.taps - 1, sizes.channels), torch.nan, dtype=self.dtype, device=device)
        return conv, torch.full(of_state, torch.nan, dtype=state, device=device)

    def call(
        self,
        operator: Operator,
        projected: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        lens: Sequence[int],
        rows: Sequence[int],
        sources: Sequence[int],
        snapshots: Sequence[tuple[int, int, int]] = (),
    ) -> torch.Tensor:
        of_step: dict[str, Any] = {"dtype": torch.int64, "device": projected.device}
        lists = [torch.tensor(list(values), **of_step) for values in (lens, rows, sources)]
        copies = torch.tensor(list(snapshots), **of_step).view(-1, 3)
        weights = (self.conv_weight, self.a_log, self.dt_bias, self.norm_weight, 1e-6)
        return operator(projected, *weights, *pools, *lists, copies)

    def run(self, operator: Operator, steps: Sequence[Sequence[Chunk]]) -> Results:
        """Run steps that each have the next tokens of some sequences; sequence n keeps its state in row N - 1 - n."""
        count = len(self.projected)
        pools, done = self.pools(count), [0] * count
        read: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for step in steps:
            parts = [self.projected[n][done[n] : done[n] + size] for n, size in step]
            rows = [count - 1 - n for n, _ in step]
            sources = [row if done[n] else -1 for row, (n, _) in zip(rows, step, strict=True)]
            sizes = [size for _, size in step]
            out = self.call(operator, torch.cat(parts), pools, sizes, rows, sources)
            for (n, size), part in zip(step, out.split(sizes), strict=True):
                done[n] += size
                read[n].append(part)
        assert done == self.lens, "all tokens go through"
        conv, state = (list(pool.flip(0)) for pool in pools)
        return Results([torch.cat(parts) for parts in read], state, conv)

    def at_once(self) -> list[list[Chunk]]:
        return [list(enumerate(self.lens))]

    def alone(self) -> list[list[Chunk]]:
        return [[chunk] for chunk in enumerate(self.lens)]

    def chunks(self, size: int) -> list[list[Chunk]]:
        """Divide all sequences into steps: at most `size` tokens of each sequence that still has some."""
        steps = []
        for start in range(0, max(self.lens), size):
            steps.append([(n, min(size, count - start)) for n, count in enumerate(self.lens) if count > start])
        return steps

    def through_snapshots(self, operator: Operator, cuts: Sequence[int]) -> Results:
        """Run sequence 0 at once, copying its state at every cut; then run every part of it again from these copies."""
        (rows,) = self.projected
        pools = self.pools(len(cuts) + 3)
        at = list(range(len(cuts)))
        copies = [(0, cut, row) for row, cut in zip(at, cuts, strict=True)]
        first = self.call(operator, rows, pools, [len(rows)], [len(cuts)], [-1], copies[::-1])
        ends = [0, *cuts, len(rows)]
        again, spare = [], len(cuts) + 1
        for source, (start, end) in zip([-1, *at], pairwise(ends), strict=True):
            again.append(self.call(operator, rows[start:end], pools, [end - start], [spare], [source]))
        assert torch.equal(torch.cat(again), first)
        conv, state = pools
        return Results([torch.cat(again)], [state[spare]], [conv[spare]])
