"""The compiled router and experts of GPT-OSS: biases, the softmax of the chosen, the clamped activation.

Judged by float64 written out here, by plain torch, and by wrong variants, which a comparison must notice.

Shapes: T tokens, D hidden, E experts, K top-k, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.ops import Ops, plain_ops
from tests.kernels import error, matrix, native_ops, rows_are_independent
from tests.layer_storage import stored_experts

EPS = 1e-5
LIMIT, ALPHA = 1.5, 1.702
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SIZES = pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (77, 53), (131, 40), (16, 1)])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.fixture(scope="module", autouse=True)
def native() -> Ops:
    return native_ops()


def _randn(dtype: torch.dtype, *shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@dataclass
class Block:
    """Inputs of a layer for 41 tokens: 7 experts, of which each token has 3."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    w13_bias: torch.Tensor
    w2_bias: torch.Tensor

    @classmethod
    def random(cls, dtype: torch.dtype, hidden: int, inner: int) -> Block:
        generator = torch.Generator().manual_seed(7)
        ids = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(41)])
        return cls(
            _randn(dtype, 41, hidden, seed=0),
            ids,
            torch.rand(41, 3, generator=generator).softmax(-1).to(dtype),
            _randn(dtype, 7, inner, hidden, seed=1, scale=1.5 * hidden**-0.5),
            _randn(dtype, 7, inner, hidden, seed=2, scale=1.5 * hidden**-0.5),
            _randn(dtype, 7, hidden, inner, seed=3, scale=inner**-0.5),
            _randn(dtype, 7, 2 * inner, seed=4),
            _randn(dtype, 7, hidden, seed=5),
        )

    @property
    def inner(self) -> int:
        return self.down.shape[2]

    def run(self, ops: Ops, rows: slice | torch.Tensor = slice(None), weighted: bool = True) -> torch.Tensor:
        stored = stored_experts(ops, self.gate, self.up, self.down)
        weights = self.weights[rows] if weighted else None
        extras = (self.w13_bias, self.w2_bias, LIMIT, ALPHA)
        return ops.fused_experts(self.hidden[rows], self.ids[rows], weights, *stored, self.inner, *extras)

    def exact(
        self, limit: float = LIMIT, alpha: float = ALPHA, one: float = 1.0, w2_times: float = 1.0
    ) -> torch.Tensor:
        """Compute the result in float64, token by token and expert by expert."""
        out = torch.zeros(self.hidden.shape, dtype=torch.float64)
        for token, experts in enumerate(self.ids.tolist()):
            x = self.hidden[token].double()
            for slot, e in enumerate(experts):
                gate = self.gate[e].double() @ x + self.w13_bias[e, : self.inner].double()
                up = self.up[e].double() @ x + self.w13_bias[e, self.inner :].double()
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inside = (up + one) * gate / (1 + (-alpha * gate).exp())
                whole = self.down[e].double() @ inside + w2_times * self.w2_bias[e].double()
                out[token] += self.weights[token, slot].double() * whole
        return out


@DTYPES
@SIZES
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_experts_agree_with_float64_within_rounding(
    native: Ops, dtype: torch.dtype, hidden: int, inner: int, compiled: bool
) -> None:
    block = Block.random(dtype, hidden, inner)
    assert error(block.run(native if compiled else plain_ops()), block.exact()) < TOLERANCE[dtype]


WRONG: dict[str, Callable[[Block], torch.Tensor]] = {
    "no clamp": lambda block: block.exact(limit=1e9),
    "silu": lambda block: block.exact(alpha=1.0),
    "up without one": lambda block: block.exact(one=0.0),
    "no bias of down": lambda block: block.exact(w2_times=0.0),
    "bias of down twice": lambda block: block.exact(w2_times=2.0),
    "gate and up biases exchanged": lambda block: _exchanged(block),
}


def _exchanged(block: Block) -> torch.Tensor:
    block.w13_bias = block.w13_bias.roll(block.inner, 1)
    return block.exact()


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", list(WRONG))
def test_the_comparison_notices_a_wrong_expert(native: Ops, wrong: str) -> None:
    block = Block.random(torch.bfloat16, 77, 53)
    ours = block.run(native)
    assert error(ours, WRONG[wrong](block)) > 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("form", ["biases alone", "clamp alone", "down bias alone"])
@DTYPES
def test_every_part_may_come_alone(native: Ops, dtype: torch.dtype, form: str) -> None:
    block = Block.random(dtype, 77, 53)
    extras = {
        "biases alone": (block.w13_bias, block.w2_bias),
        "clamp alone": (None, None, LIMIT, ALPHA),
        "down bias alone": (None, block.w2_bias),
    }[form]
    ours, plain, bare = (
        ops.fused_experts(
            block.hidden, block.ids, None, *stored_experts(ops, block.gate, block.up, block.down), block.inner, *given
        )
        for ops, given in ((native, extras), (plain_ops(), extras), (native, ()))
    )
    assert error(ours, plain.double()) < TOLERANCE[dtype]
    assert error(bare, plain.double()) > 4 * TOLERANCE[torch.bfloat16]


def test_bfloat16_rounds_where_transformers_does(native: Ops) -> None:
    """Products with the identity do not round, so that only the operations after them do."""
    size, dtype = 48, torch.bfloat16
    gate, up, down = torch.eye(size), 2 * torch.eye(size), torch.eye(size)
    x, biases = _randn(dtype, 64, size, seed=0, scale=2.0), _randn(dtype, 1, 2 * size, seed=1)
    w2_bias = _randn(dtype, 1, size, seed=2)
    stored = stored_experts(native, *(m.to(dtype)[None] for m in (gate, up, down)))
    ids = torch.zeros(64, 1, dtype=torch.int64)
    ours = native.fused_experts(x, ids, None, *stored, size, biases, w2_bias, LIMIT, ALPHA)[:, 0]
    g, u = x + biases[0, :size], 2 * x + biases[0, size:]
    g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
    theirs = (u + 1) * (g * torch.sigmoid(g * ALPHA)) + w2_bias
    # An exponential may be off by a unit of float32, which now and then rounds the other way.
    assert (ours == theirs).double().mean() > 0.999
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_as_in_plain_torch(native: Ops, what: float) -> None:
    block = Block.random(torch.float32, 64, 32)
    block.w13_bias[2, 5] = block.w13_bias[3, 40] = what
    ours, theirs = block.run(native), block.run(plain_ops())
    assert torch.equal(ours.isnan(), theirs.isnan())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@DTYPES
def test_rows_of_experts_and_routers_are_independent(native: Ops, dtype: torch.dtype) -> None:
    block = Block.random(dtype, 77, 53)
    assert rows_are_independent(lambda rows: block.run(native, rows), 41)
    assert rows_are_independent(lambda rows: block.run(native, rows, weighted=False), 41)
    weight, norm = matrix(native, _randn(dtype, 19, 77, seed=6)), torch.ones(77, dtype=dtype)
    bias = _randn(dtype, 19, seed=8)
    assert rows_are_independent(lambda rows: _route(native, block.hidden[rows], norm, weight, 19, bias)[1], 41)


def _route(
    ops: Ops,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    experts: int,
    bias: torch.Tensor | None,
    forced: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rule = RouterRule(experts, 4, scoring="softmax_of_chosen")
    return ops.norm_route(hidden.clone(), None, norm, EPS, weight, rule, None, forced, 0.0, bias)


@DTYPES
@pytest.mark.parametrize("experts", [4, 19, 128])
@pytest.mark.parametrize("forced", [False, True])
def test_routes_as_plain_torch(native: Ops, dtype: torch.dtype, experts: int, forced: bool) -> None:
    """Logits are exact in both dtypes: hidden states have one element each, which the norm does not change."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.eye(32).repeat(2, 1).to(dtype) * 32**0.5
    norm, bias = torch.ones(32, dtype=dtype), torch.randint(-8, 8, (experts,), generator=generator) / 4
    weight = (torch.stack([torch.randperm(experts, generator=generator) for _ in range(32)], 1) / 16).to(dtype)
    bias = bias.to(dtype)
    given = None
    if forced:
        given = torch.full((64, 4), -1)
        given[5], given[40] = torch.arange(4), torch.arange(4).flip(0)
    normed, weights, ids = _route(native, hidden, norm, matrix(native, weight), experts, bias, given)
    plain = _route(plain_ops(), hidden, norm, weight, experts, bias, given)
    torch.testing.assert_close(normed, plain[0])
    logits = torch.nn.functional.linear(plain[0], weight, bias).float()
    want = logits.argsort(descending=True, stable=True)[:, :4]
    if given is not None:
        want = torch.where(given[:, :1] >= 0, given, want)
    assert torch.equal(ids, want), "of equal logits the lowest expert"
    exact = logits.double().gather(1, want).softmax(-1)
    torch.testing.assert_close(weights.double(), exact, rtol=0.6 * torch.finfo(dtype).eps + 2e-6, atol=0)
    torch.testing.assert_close(plain[1].double(), exact.gather(1, _order(want, plain[2])), rtol=8e-3, atol=0)


def _order(want: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the place of each of `ids` in `want`; among equal weights torch picks any."""
    same = want[:, None] == ids[:, :, None]
    return torch.where(same.any(-1), same.int().argmax(-1), torch.arange(4))


@pytest.mark.mutant
def test_the_comparison_notices_another_router(native: Ops) -> None:
    hidden, weight, norm = (_randn(torch.float32, *s, seed=i) for i, s in enumerate([(40, 32), (19, 32), (32,)]))
    bias = _randn(torch.float32, 19, seed=9)
    stored = matrix(native, weight)
    ours = _route(native, hidden, norm, stored, 19, bias)
    assert not torch.equal(ours[2], _route(native, hidden, norm, stored, 19, None)[2])
    over_all = native.norm_route(hidden.clone(), None, norm, EPS, stored, RouterRule(19, 4, normalise=False))[1]
    assert (ours[1] - over_all).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("message", "bias_of", "rule"),
    [
        ("bias must be", 18, {}),
        ("is normalised", 19, {"normalise": False}),
        ("only others have a bias", 19, {"scoring": "sigmoid"}),
        ("unknown scores", 19, {"scoring": "max"}),
    ],
)
def test_routers_that_do_not_fit_are_refused(native: Ops, message: str, bias_of: int, rule: dict[str, Any]) -> None:
    weight = matrix(native, _randn(torch.float32, 19, 32, seed=0))
    wrong = RouterRule(19, 4, scoring="softmax_of_chosen")._replace(**rule)
    with pytest.raises(RuntimeError, match=message):
        native.norm_route(
            torch.ones(3, 32), None, torch.ones(32), EPS, weight, wrong, None, None, None, torch.zeros(bias_of)
        )


def test_biases_that_do_not_fit_are_refused(native: Ops) -> None:
    block = Block.random(torch.float32, 64, 32)
    for name, wrong in (("w13_bias", torch.zeros(7, 32)), ("w2_bias", torch.zeros(6, 64))):
        setattr(block, name, wrong)
        with pytest.raises(RuntimeError, match="bias of the experts"):
            block.run(native)
        block = Block.random(torch.float32, 64, 32)
