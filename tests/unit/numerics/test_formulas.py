"""Gradients of each operator, and of log-probabilities, against differences of the plain forms in float64.

Differences are central and along a random direction in all arguments that have gradients, so that a missing or wrong
term shows in one number; every operator is also checked with a formula that lacks a term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout.core.errors import BadRequest
from rollout.core.forward_batch import ForwardBatch
from rollout.core.specs.layer_specs import FullKV, LatentKV, WindowKV
from rollout.kernels.operator import Gradient
from rollout.kernels.operators import OPERATORS
from rollout.memory.kv_pool import KVPool
from rollout.numerics import engine_logprobs, with_gradient_of
from rollout.numerics.attention import DifferentiableAttention
from rollout.numerics.operators import Call, Differentiable
from rollout.numerics.sequences import Sequences
from tests.kernels import native_ops
from tests.operators import Arguments, T, all_cases, name_of, rand

STEP, NEAR = 1e-6, 1e-6
CASES = {case: arguments for case, arguments in all_cases().items() if OPERATORS[name_of(case)].gradient is not None}


def rule_of(case: str) -> Gradient:
    rule = OPERATORS[name_of(case)].gradient
    assert rule is not None
    return rule


def formula_of(case: str) -> Callable[..., Any]:
    return rule_of(case).form or OPERATORS[name_of(case)].plain


def with_gradients(case: str) -> list[str]:
    rule = rule_of(case)
    return [name for name in (*rule.flows, *rule.weights) if CASES[case].get(name) is not None]


def results_of(case: str, formula: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    """Return the results that autograd follows under engine numerics: floats, and rows of its own pools."""
    rule, flows = rule_of(case), rule_of(case).flows
    call = Call(formula, formula, rule, arguments | dict.fromkeys(flows), flows, {}, torch.float64)
    inputs = {name: arguments[name] for name in with_gradients(case)}
    return call.recompute(inputs, None if rule.chosen is None else arguments[rule.chosen])


def slopes(case: str, formula: Callable[..., Any]) -> tuple[float, float]:
    """Return the slope of a random sum of the results along a random direction: by autograd, and by differences."""
    arguments, names, plain = CASES[case], with_gradients(case), OPERATORS[name_of(case)].plain
    weights = [rand(*result.shape, seed=2) for result in results_of(case, plain, arguments)]
    ways = {name: rand(*arguments[name].shape, seed=3) for name in names}

    def at(step: float) -> float:
        moved = arguments | {name: arguments[name] + step * way for name, way in ways.items()}
        return sum(float((x * w).sum()) for x, w in zip(results_of(case, plain, moved), weights, strict=True))

    inputs = {name: arguments[name].clone().requires_grad_() for name in names}
    results = results_of(case, formula, arguments | inputs)
    found = torch.autograd.grad(results, list(inputs.values()), weights, allow_unused=True)
    slope = sum(float((g * way).sum()) for g, way in zip(found, ways.values()) if g is not None)
    return slope, (at(STEP) - at(-STEP)) / (2 * STEP)


def is_near(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= NEAR * max(1.0, abs(wanted))


def test_every_operator_has_a_case() -> None:
    assert {name_of(case) for case in all_cases()} == set(OPERATORS)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_slopes_of_the_operator(case: str) -> None:
    assert is_near(*slopes(case, formula_of(case)))


@pytest.mark.mutant
@pytest.mark.parametrize(("case", "name"), [(case, name) for case in CASES for name in with_gradients(case)])
def test_a_missing_term_is_noticed(case: str, name: str) -> None:
    position, formula = list(CASES[case]).index(name), formula_of(case)

    def wrong(*given: Any) -> Any:
        # a part is left, so that there is a gradient
        return formula(*(0.9 * x + 0.1 * x.detach() if i == position else x for i, x in enumerate(given)))

    assert not is_near(*slopes(case, wrong))


# --- attention --------------------------------------------------------------------------------------------------------

LAYERS = {
    "full": (FullKV(2, 8), {}),
    "window": (WindowKV(2, 8, 3), {"window": 3}),
    "sinks": (FullKV(2, 8), {"sinks": rand(4)}),
    "latent": (LatentKV(16, 8), {"scale": 0.3}),
}


def written_out(
    batch: ForwardBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention, one query of one head at a time."""
    out, first = [], 0
    for length in batch.extend_lens:
        for t in range(first, first + length):
            start = first if window is None else max(first, t - window + 1)
            for head in range(q.shape[1]):
                of_head = head * k.shape[1] // q.shape[1]
                scores = k[start : t + 1, of_head] @ q[t, head] * (scale or q.shape[2] ** -0.5)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                out.append(scores.softmax(0)[: t + 1 - start] @ v[start : t + 1, of_head])
        first += length
    return torch.stack(out).view(q.shape[0], -1)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_of_attention_agree_with_attention_written_out(kind: str, wrong: bool) -> None:
    layer, options = LAYERS[kind]
    native_ops()
    lengths = [4, 1, T - 5]
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = Sequences.of(torch.zeros(1, T, dtype=torch.int64), position_ids=positions[None]).step(has_states=False)
    assert batch.extend_lens == lengths
    pool = KVPool(T, [layer], torch.float64)
    attention = DifferentiableAttention(_Backend(pool), [layer], Differentiable(native_ops(), torch.float32, None))
    attention.plan(batch)
    q, k = rand(T, 4, layer.key_size), rand(T, layer.num_heads, layer.key_size)
    v = k[..., : layer.value_size] if layer.values_in_keys else rand(T, layer.num_heads, layer.value_size, seed=5)
    sinks = options.get("sinks")
    inputs = [x.clone().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    given = [*inputs, *([] if sinks is not None else [None])]
    out = written_out(batch, given[0], given[1], given[2], options.get("scale"), options.get("window"), given[3])
    weights = rand(*out.shape)
    wanted = torch.autograd.grad(out, inputs, weights)
    formula = attention._formula(0, options.get("scale"), None if wrong else options.get("window"))
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    values = ours[2] * (0.9 if wrong else 1.0)
    found = torch.autograd.grad(
        formula(ours[0], ours[1], values, ours[3] if sinks is not None else None), ours, weights
    )
    same = all(torch.allclose(one, other, rtol=1e-6, atol=1e-9) for one, other in zip(found, wanted))
    assert same is not wrong


class _Backend:
    """A backend with only a pool, which is all that the formula needs."""

    batch_invariant = True

    def __init__(self, kv: KVPool) -> None:
        self.kv = kv

    def plan(self, batch: ForwardBatch) -> None:
        """Plan nothing."""


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_their_gradient(temperature: float, dtype: torch.dtype) -> None:
    native_ops()
    logits = (3 * rand(2, 5, 40)).to(dtype).requires_grad_()
    ids = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(1))
    exact = logits.detach().double().requires_grad_()
    wanted = (exact / temperature).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    found = engine_logprobs(logits, ids, temperature)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), wanted, atol=1e-5)
    weights = rand(2, 5)
    (of_logits,) = torch.autograd.grad(found, logits, weights.float())
    (of_exact,) = torch.autograd.grad(wanted, exact, weights)
    near = 1e-5 if dtype == torch.float32 else 5e-3
    assert (of_logits.double() - of_exact).norm() < near * of_exact.norm()
    (of_hot,) = torch.autograd.grad((exact / 2).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1), exact, weights)
    assert (of_logits.double() - of_hot).norm() > near * of_exact.norm()


def test_log_probabilities_have_the_same_bits_in_either_dtype() -> None:
    native_ops()
    logits, ids = (3 * rand(6, 300)).bfloat16(), torch.arange(6)
    assert torch.equal(engine_logprobs(logits, ids), engine_logprobs(logits.float(), ids))
    assert torch.equal(engine_logprobs(logits[2], ids[2]), engine_logprobs(logits, ids)[2])


@pytest.mark.parametrize(
    ("logits", "ids", "temperature"),
    [
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), 1.0),
        (torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), 1.0),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), 0.0),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), float("nan")),
        (torch.zeros(3, 4), torch.full((3,), 4), 1.0),
        (torch.zeros(3, 4), torch.full((3,), -100), 1.0),
        (torch.zeros(3, 4), torch.zeros(3), 1.0),
    ],
)
def test_wrong_arguments_of_log_probabilities(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> None:
    native_ops()
    with pytest.raises(BadRequest):
        engine_logprobs(logits, ids, temperature)


def test_values_with_the_gradient_of_others() -> None:
    values, source = rand(2, 5).float(), rand(2, 5).float().requires_grad_()
    joined = with_gradient_of(values, source.square())
    assert torch.equal(joined, values) and joined.data_ptr() != values.data_ptr()
    weights = rand(2, 5).float()
    (found,) = torch.autograd.grad(joined, source, weights)
    assert torch.equal(found, 2 * source * weights)
    with torch.no_grad():
        assert torch.equal(with_gradient_of(values, source.detach()), values)


@pytest.mark.parametrize(
    "source",
    [torch.zeros(3, requires_grad=True), torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.zeros(2)],
)
def test_others_without_a_gradient_to_take(source: torch.Tensor) -> None:
    with pytest.raises(BadRequest):
        with_gradient_of(torch.zeros(2), source)
