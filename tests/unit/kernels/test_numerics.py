"""Errors of the compiled operators against float64, next to torch's in the same dtype on the same inputs.

The error of a row is the 2-norm of its difference from float64 over the 2-norm of the exact row.  Both sides round
where the model's dtype rounds, so the errors are of one size; the sums in between run in another order, which makes
single rows a little better or worse.

Shapes: T tokens, D hidden, O output features, E experts, K top-k, I intermediate, H query heads, Hkv key/value
heads, hd head size, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.ops import Ops, plain_ops
from tests.kernels import angles, native_ops
from tests.layer_storage import stored_experts, stored_matrix

EPS = 1e-6
TOKENS = 512
# The mean over 512 rows and more is no worse than torch's.  A sum in another order rounds one element in thousands the
# other way, for better or worse, which moves the mean by less than a thousandth.
MEAN_MARGIN = 1.001
# In attention the worst row has an unlucky rounding, which is another row in each implementation; elsewhere both have
# the same worst rows.
MAX_MARGIN = 1.1
# Sums of up to 1024 products, each sum rounded once a product: random walks of steps of 2^-24, measured up to 8e-7.
FLOAT32_TOLERANCE = 2e-6
# The relative error of e^s is the absolute error of s, and these scores are as large as 30.
LARGE_SCORES_TOLERANCE = 1e-5


@dataclass
class Errors:
    """The errors of every row, ours and torch's."""

    ours: torch.Tensor
    torch: torch.Tensor


def row_errors(out: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    difference, exact = (out.double() - exact).flatten(1), exact.flatten(1)
    return difference.norm(dim=1) / exact.norm(dim=1)


def _randn(dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _compare(compute: Callable[[Ops], torch.Tensor], exact: torch.Tensor) -> Errors:
    return Errors(row_errors(compute(native_ops()), exact), row_errors(compute(plain_ops()), exact))


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the RMS norm of the rows in float64."""
    rows = rows.double()
    return rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


# --- the operators ---------------------------------------------------------------------------------------------------


def linear(dtype: torch.dtype, depth: int, outputs: int) -> Errors:
    hidden, weight = _randn(dtype, TOKENS, depth), _randn(dtype, outputs, depth, seed=1, scale=depth**-0.5)
    return _compare(
        lambda ops: ops.linear(hidden, stored_matrix(ops, weight), outputs), hidden.double() @ weight.double().T
    )


def add_rms_norm(dtype: torch.dtype, size: int) -> Errors:
    residual, hidden = _randn(dtype, TOKENS, size), _randn(dtype, TOKENS, size, seed=1)
    weight = 1 + _randn(dtype, size, seed=2, scale=0.1)
    exact = _norm(residual.double() + hidden.double(), weight)
    return _compare(lambda ops: ops.add_rms_norm(residual.clone(), hidden, weight, EPS), exact)


def norm_linear(dtype: torch.dtype, depth: int, outputs: int) -> Errors:
    residual, hidden = _randn(dtype, TOKENS, depth), _randn(dtype, TOKENS, depth, seed=1)
    scale, weight = 1 + _randn(dtype, depth, seed=2, scale=0.1), _randn(dtype, outputs, depth, seed=3, scale=0.1)
    exact = _norm(residual.double() + hidden.double(), scale) @ weight.double().T

    def compute(ops: Ops) -> torch.Tensor:
        return ops.norm_linear(residual.clone(), hidden, scale, EPS, stored_matrix(ops, weight), outputs)

    return _compare(compute, exact)


def norm_route(dtype: torch.dtype, depth: int, experts: int, top_k: int) -> Errors:
    """Measure the errors of the router's weights [T, E], zero where an expert was not chosen."""
    residual, hidden = _randn(dtype, TOKENS, depth), _randn(dtype, TOKENS, depth, seed=1)
    scale = 1 + _randn(dtype, depth, seed=2, scale=0.1)
    weight = _randn(dtype, experts, depth, seed=3, scale=2.5 * depth**-0.5)
    exact = (_norm(residual.double() + hidden.double(), scale) @ weight.double().T).softmax(-1)
    weights, ids = exact.topk(top_k)
    exact = torch.zeros_like(exact).scatter(1, ids, weights / weights.sum(-1, keepdim=True))

    def compute(ops: Ops) -> torch.Tensor:
        storage = stored_matrix(ops, weight)
        _, chosen, ids = ops.norm_route(residual.clone(), hidden, scale, EPS, storage, RouterRule(experts, top_k))
        return torch.zeros(TOKENS, experts, dtype=dtype).scatter(1, ids, chosen)

    return _compare(compute, exact)


def activation(dtype: torch.dtype, inner: int) -> Errors:
    gate_up = _randn(dtype, TOKENS, 2 * inner, scale=3.0)
    gate, up = gate_up.double().chunk(2, -1)
    return _compare(lambda ops: ops.silu_and_mul(gate_up), F.silu(gate) * up)


def experts(dtype: torch.dtype, hidden_size: int, inner: int, num_experts: int, top_k: int) -> Errors:
    hidden = _randn(dtype, TOKENS, hidden_size)
    gate, up = (_randn(dtype, num_experts, inner, hidden_size, seed=s, scale=hidden_size**-0.5) for s in (1, 2))
    down = _randn(dtype, num_experts, hidden_size, inner, seed=3, scale=inner**-0.5)
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, top_k, generator=generator).softmax(-1).to(dtype)
    exact = torch.zeros(TOKENS, hidden_size, dtype=torch.float64)
    for expert in range(num_experts):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        x = hidden[tokens].double()
        inside = F.silu(x @ gate[expert].double().T) * (x @ up[expert].double().T)
        exact.index_add_(0, tokens, inside @ down[expert].double().T * weights[tokens, slots, None].double())

    def compute(ops: Ops) -> torch.Tensor:
        return ops.fused_experts(hidden, ids, weights, *stored_experts(ops, gate, up, down), inner)

    return _compare(compute, exact)


def heads_to_pool(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> Errors:
    """Measure the errors of rotated queries and keys; values must be copied exactly."""
    turning = num_heads + num_kv_heads
    qkv = _randn(dtype, TOKENS, (turning + num_kv_heads) * head_dim)
    weight = 1 + _randn(dtype, turning, head_dim, seed=1, scale=0.1)
    rotary = angles(head_dim, TOKENS, dtype, torch.arange(TOKENS))
    slots = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    heads = qkv.view(TOKENS, -1, head_dim)
    normed = _norm(heads[:, :turning], weight)
    cos, signed_sin = rotary.double()[:, :1], rotary.double()[:, 1:]
    exact = normed * cos + normed.roll(head_dim // 2, -1) * signed_sin

    def compute(ops: Ops) -> torch.Tensor:
        k_pool, v_pool = (torch.zeros(TOKENS, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
        query = ops.qk_norm_rope_store(qkv, weight, rotary, k_pool, v_pool, slots, EPS)
        assert torch.equal(v_pool[slots], heads[:, turning:])
        return torch.cat((query, k_pool[slots]), 1).reshape(-1, head_dim)

    return _compare(compute, exact.reshape(-1, head_dim))


def attention(dtype: torch.dtype, length: int, head_dim: int, scale: float) -> Errors:
    """Measure the errors of causal attention: 8 query heads over 2 of keys and values, queries of size `scale`."""
    q = _randn(dtype, length, 8, head_dim, scale=scale)
    k, v = (_randn(dtype, length, 2, head_dim, seed=seed) for seed in (1, 2))
    slots = torch.randperm(length, generator=torch.Generator().manual_seed(3))
    k_pool, v_pool = torch.empty_like(k), torch.empty_like(v)
    k_pool[slots], v_pool[slots] = k, v
    lens, row = torch.tensor([length]), torch.tensor([0])
    table = slots[None]
    ours = torch.ops.lockstep.paged_attention(q, k_pool, v_pool, table, row, lens, lens, head_dim**-0.5)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    torchs = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    query, key, value = (x.double() for x in heads_first)
    scores = query @ key.repeat_interleave(4, 1).transpose(-1, -2) * head_dim**-0.5
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    exact = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(4, 1)
    exact = exact[0].transpose(0, 1)
    return Errors(*(row_errors(x.flatten(0, 1), exact.flatten(0, 1)) for x in (ours, torchs)))


CASES: dict[str, tuple[Callable[..., Errors], tuple]] = {
    "linear": (linear, (256, 384)),
    "linear, odd": (linear, (331, 77)),
    "linear, deep": (linear, (1024, 96)),
    "norm": (add_rms_norm, (1024,)),
    "norm, odd": (add_rms_norm, (77,)),
    "norm and linear": (norm_linear, (256, 192)),
    "norm and linear, odd": (norm_linear, (91, 33)),
    "router": (norm_route, (256, 64, 8)),
    "router, odd": (norm_route, (77, 13, 3)),
    "activation": (activation, (131,)),
    "experts": (experts, (256, 128, 16, 4)),
    "experts, odd": (experts, (77, 53, 7, 3)),
    "heads": (heads_to_pool, (8, 2, 64)),
    "heads of 40": (heads_to_pool, (3, 3, 40)),
    "attention": (attention, (400, 64, 1.0)),
    "attention, small scores": (attention, (300, 32, 0.05)),
    "attention, large scores": (attention, (300, 32, 8.0)),
    "attention, long": (attention, (1100, 16, 1.0)),
}
LARGE_SCORES = {"router", "router, odd", "attention, large scores"}


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


@pytest.mark.parametrize("name", list(CASES))
def test_bfloat16_is_as_exact_as_torch(name: str) -> None:
    case, arguments = CASES[name]
    errors = case(torch.bfloat16, *arguments)
    assert errors.ours.mean() <= MEAN_MARGIN * errors.torch.mean()
    assert errors.ours.max() <= MAX_MARGIN * errors.torch.max()
    assert errors.torch.mean() > 1e-4, "bfloat16 must show"


@pytest.mark.parametrize("name", list(CASES))
def test_float32_errors_stay_within_the_tolerance(name: str) -> None:
    case, arguments = CASES[name]
    ours = case(torch.float32, *arguments).ours
    assert ours.max() < (LARGE_SCORES_TOLERANCE if name in LARGE_SCORES else FLOAT32_TOLERANCE)


@pytest.mark.mutant
def test_an_additional_rounding_is_noticed() -> None:
    """Inexact operators would keep sums in bfloat16, or round the result towards zero."""
    hidden, weight = _randn(torch.bfloat16, TOKENS, 256), _randn(torch.bfloat16, 96, 256, seed=1, scale=1 / 16)
    exact = hidden.double() @ weight.double().T
    reference = row_errors(hidden @ weight.T, exact)
    halves = (hidden[:, :128] @ weight[:, :128].T) + (hidden[:, 128:] @ weight[:, 128:].T)
    truncated = (exact.float().view(torch.int32) & ~0xFFFF).view(torch.float32)
    for wrong in (halves, truncated):
        assert row_errors(wrong, exact).mean() > 1.1 * MEAN_MARGIN * reference.mean()


@pytest.mark.mutant
def test_float32_sums_in_bfloat16_inputs_are_noticed() -> None:
    hidden, weight = _randn(torch.float32, TOKENS, 256), _randn(torch.float32, 96, 256, seed=1, scale=1 / 16)
    wrong = hidden.bfloat16().float() @ weight.T
    assert row_errors(wrong, hidden.double() @ weight.double().T).min() > 100 * FLOAT32_TOLERANCE
