"""Inputs of `fused_experts` and their exact results, for kernels that are interpreted.

Shapes: T tokens, K slots, P experts, D hidden, I expert intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Relative to the largest exact result.  float32: sums of at most some hundred products, and exp.  float16: results of
# both products, of the activation and of the weighting are rounded to 11 bits, one after the other.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-3}


@dataclass(frozen=True)
class Case:
    """Arguments of the operator."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    w13: torch.Tensor
    w2: torch.Tensor
    inner_size: int
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    limit: float | None = None
    alpha: float = 1.0

    def arguments(self) -> list[object]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def on(self, device: str) -> Case:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)

    def rows(self, index: torch.Tensor) -> Case:
        """Return the same case for some of the tokens."""
        weights = None if self.weights is None else self.weights[index]
        return replace(self, hidden=self.hidden[index], ids=self.ids[index], weights=weights)

    def exact(self) -> torch.Tensor:
        """Compute one assignment after the other in float64: [T, D], or [T, K, D] without weights."""
        (tokens, top_k), (experts, size, inner) = self.ids.shape, self.w2.shape
        out = torch.zeros(tokens, top_k, size, dtype=torch.float64)
        for token in range(tokens):
            for slot, expert in enumerate(self.ids[token].tolist()):
                if 0 <= expert < experts:
                    gate_up = self.w13[expert].double() @ self.hidden[token].double()
                    if self.w13_bias is not None:
                        gate_up += self.w13_bias[expert]
                    out[token, slot] = self.w2[expert].double() @ self._activation(gate_up[:inner], gate_up[inner:])
                    if self.w2_bias is not None:
                        out[token, slot] += self.w2_bias[expert]
        if self.weights is None:
            return out
        filled = (self.ids >= 0) & (self.ids < experts)
        return (out * self.weights.double().masked_fill(~filled, 0.0).unsqueeze(-1)).sum(1)

    def _activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
        return gate / (1 + (-self.alpha * gate).exp()) * up

    def error(self, out: torch.Tensor) -> float:
        """Return the largest difference over the largest exact result; infinite where one is not a number."""
        exact = self.exact()
        assert out.shape == exact.shape and out.dtype == self.hidden.dtype, (out.shape, out.dtype)
        if exact.numel() == 0:
            return 0.0
        largest = exact.abs().max().item() or 1.0
        return (out.double() - exact).abs().max().div(largest).nan_to_num(float("inf")).item()

    def is_right(self, out: torch.Tensor) -> bool:
        return self.error(out) < TOLERANCE[self.hidden.dtype]


def draw(
    tokens: int,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    experts: int = 4,
    hidden: int = 72,
    inner: int = 40,
    clamped: bool = False,
    weighted: bool = True,
    seed: int = 0,
) -> Case:
    """Draw a random case.  A token's experts are distinct if there are enough of them.

    `clamped`: with biases, and with clamps that change values.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    order = torch.rand(tokens, -(-top_k // experts), experts, generator=generator).argsort(-1).flatten(1)
    return Case(
        hidden=randn(tokens, hidden),
        ids=order[:, :top_k].contiguous(),
        weights=torch.rand(tokens, top_k, generator=generator).to(dtype) if weighted else None,
        w13=randn(experts, 2 * inner, hidden, scale=hidden**-0.5),
        w2=randn(experts, hidden, inner, scale=inner**-0.5),
        inner_size=inner,
        w13_bias=randn(experts, 2 * inner) if clamped else None,
        w2_bias=randn(experts, hidden) if clamped else None,
        limit=1.1 if clamped else None,
        alpha=1.702 if clamped else 1.0,
    )


def with_empty_slots(case: Case, ids: tuple[int, ...] = (-1,), seed: int = 0) -> Case:
    """Return the case with one of these ids, and NaN as the weight, in some slots."""
    generator = torch.Generator().manual_seed(seed)
    empty = torch.rand(case.ids.shape, generator=generator) < 0.4
    empty[0] = True  # a token without any
    chosen = torch.tensor(ids)[torch.randint(len(ids), case.ids.shape, generator=generator)]
    weights = None if case.weights is None else case.weights.masked_fill(empty, float("nan"))
    return replace(case, ids=torch.where(empty, chosen, case.ids), weights=weights)
