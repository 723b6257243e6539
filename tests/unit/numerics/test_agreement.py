"""A Hugging Face model under engine numerics agrees with an engine bit for bit, and has the gradients of the model.

Real schedulers sample, in chunks, in batches, after prefix hits.  Every check is also made with a mistake, which it
must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from capture.replay import force_routes, record_routes
from rollout.kernels.operator import Operator
from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import Ops
from rollout.numerics import operators, use_engine_numerics
from tests.family_zoo import FAMILIES, family_checkpoint
from tests.invariance import Ask, Facts
from tests.kernels import native_ops
from tests.numerics import Batch, disagreements, gradient_errors, gradients, sampled, trainer_model

GATE = ("qwen3_moe", "glm4_moe", "gpt_oss")
EACH_FAMILY = [pytest.param(name, marks=() if name in GATE else pytest.mark.full) for name in FAMILIES]
# A loss in float32 under both, so only the order of sums differs; states of the gated delta rule run through many.
LEAST_AGREEMENT = 2e-4


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    native_ops()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


class Served:
    """A family's checkpoint, and the samples of an engine that serves it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = family_checkpoint(folder, name, 3, torch.bfloat16)
        self.asks, self.facts = sampled(self.folder, 24)

    @property
    def samples(self) -> tuple[list[Ask], list[Facts]]:
        return self.asks, self.facts

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        return trainer_model(self.folder, dtype, self.name)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("numerics") / "m", getattr(request, "param", "qwen3_moe"))


@pytest.mark.parametrize("served", EACH_FAMILY, indirect=True, scope="module")
class TestFamilies:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_log_probabilities_and_routes_are_the_engines(self, served: Served, dtype: torch.dtype) -> None:
        """They agree whether the trainer holds bfloat16 or float32 masters of it."""
        model = served.model(dtype)
        with use_engine_numerics(model) as numerics:
            assert numerics.batch_invariant
            assert disagreements(model, numerics, *served.samples) == []

    def test_gradients_are_those_of_the_model(self, served: Served) -> None:
        """They agree in float32, where the engine rounds no more than transformers does."""
        model, batch = served.model(torch.float32), Batch.of(*served.samples)
        with use_engine_numerics(model, dtype=torch.float32) as numerics:
            found = gradients(model, batch, by_engine=True)
        wanted = gradients(model, batch, numerics.routes)
        assert found.keys() == wanted.keys()
        assert max(gradient_errors(found, wanted).values()) < LEAST_AGREEMENT

    def test_gradients_in_bfloat16_are_as_near_as_a_bfloat16_trainers(self, served: Served) -> None:
        """The distance is to float32 gradients under the engine's routes; both round activations on the way."""
        exact, rounded, batch = served.model(torch.float32), served.model(), Batch.of(*served.samples)
        with use_engine_numerics(rounded) as numerics:
            found = gradients(rounded, batch, by_engine=True)
        wanted = gradients(exact, batch, numerics.routes)
        usual = gradients(rounded, batch, numerics.routes)
        ours, theirs = (median(gradient_errors(side, wanted).values()) for side in (found, usual))
        assert ours < 1.25 * theirs


def test_an_engine_of_float32_agrees_too(served: Served) -> None:
    asks, facts = sampled(served.folder, 12, "float32")
    model = served.model(torch.float32)
    with use_engine_numerics(model, dtype=torch.float32) as numerics:
        assert disagreements(model, numerics, asks, facts) == []
    rounded = served.model()
    with use_engine_numerics(rounded, dtype=torch.float32) as numerics:
        assert disagreements(rounded, numerics, asks, facts) == []
    with use_engine_numerics(model) as numerics:
        assert disagreements(model, numerics, asks, facts), "bfloat16 is another model"


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_engine_numerics_agree_at_other_temperatures(served: Served, temperature: float) -> None:
    asks, facts = sampled(served.folder, 12, temperature=temperature)
    model = served.model()
    with use_engine_numerics(model) as numerics:
        assert disagreements(model, numerics, asks, facts, temperature) == []
        assert disagreements(model, numerics, asks, facts, 1.0), "the temperature counts"


def test_after_steps_of_an_optimiser(served: Served, tmp_path: Path) -> None:
    """Weights are read at every forward, however they were changed."""
    model, batch = served.model(torch.float32), Batch.of(*served.samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with use_engine_numerics(model) as numerics:
        for _ in range(2):
            gradients(model, batch, by_engine=True)
            optimizer.step()
        model.model.norm.weight.data.mul_(1.25)  # no counter of versions sees this
        model.save_pretrained(
            tmp_path / "m", state_dict={k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
        )
        assert disagreements(model, numerics, *served.samples), "the weights are others"
        assert disagreements(model, numerics, *sampled(tmp_path / "m", 12)) == []


def test_transformers_without_engine_numerics_disagrees(served: Served) -> None:
    model = served.model()
    with use_engine_numerics(model) as numerics:
        disagreements(model, numerics, *served.samples)
    assert disagreements(model, numerics, *served.samples), "transformers' own forward has other bits"


# --- mistakes are noticed --------------------------------------------------------------------------------------------


def one_ulp(out: torch.Tensor) -> torch.Tensor:
    """Make the middle row larger by the last bit."""
    row = out[out.shape[0] // 2]
    row.copy_(torch.nextafter(row, row.new_tensor(torch.inf)))
    return out


WRONG_OPERATORS: dict[str, Callable[[Any], Any]] = {
    "linear": one_ulp,
    "norm_linear": one_ulp,
    "silu_and_mul": one_ulp,
    "fused_experts": one_ulp,
    "norm_route": lambda result: (result[0], one_ulp(result[1]), result[2]),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG_OPERATORS)
def test_one_bit_in_one_operator_is_noticed(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle row of each of its results.  It may not reach a sampled token's logit, so that all count."""

    def wrong(ops: Ops) -> Ops:
        right = getattr(ops, name)
        changes: dict[str, Any] = {name: lambda *given: WRONG_OPERATORS[name](right(*given))}
        return ops.replace(**changes)

    model, batch = served.model(), Batch.of(*served.samples)
    with use_engine_numerics(model), torch.no_grad():
        want = model(input_ids=batch.input_ids, attention_mask=batch.mask).logits
    monkeypatch.setattr("rollout.numerics.engine.select_ops", lambda *_, **__: wrong(native_ops()))
    with use_engine_numerics(model), torch.no_grad():
        got = model(input_ids=batch.input_ids, attention_mask=batch.mask).logits
    assert not torch.equal(got, want)


def detached(operator: Operator, position: int) -> Operator:
    """Return the operator without the gradient of one of its arguments."""
    rule = operator.gradient
    assert rule is not None
    formula = rule.form or operator.plain

    def form(*given: Any) -> Any:
        return formula(*(value.detach() if i == position else value for i, value in enumerate(given)))

    return replace(operator, gradient=replace(rule, form=form))


WRONG_FORMULAS = {
    "the norm's weight": ("norm_linear", 2),
    "the weights of experts": ("fused_experts", 2),
    "the second matrix of experts": ("fused_experts", 4),
    "the router": ("norm_route", 4),
    "the activation": ("silu_and_mul", 0),
    "rotated queries and keys": ("qk_norm_rope_store", 0),
    "the embedding": ("gather_rows", 0),
}


@pytest.mark.mutant
@pytest.mark.parametrize("what", WRONG_FORMULAS)
def test_a_missing_term_of_a_gradient_is_noticed(served: Served, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, position = WRONG_FORMULAS[what]
    wrong = {**OPERATORS, name: detached(OPERATORS[name], position)}
    monkeypatch.setattr(operators, "OPERATORS", wrong)
    model, batch = served.model(torch.float32), Batch.of(*served.samples)
    with use_engine_numerics(model, dtype=torch.float32) as numerics:
        found = gradients(model, batch, by_engine=True)
    wanted = gradients(model, batch, numerics.routes)
    assert found.keys() != wanted.keys() or max(gradient_errors(found, wanted).values()) > 100 * LEAST_AGREEMENT


# --- routes ----------------------------------------------------------------------------------------------------------


def test_given_routes_are_followed_and_recorded(served: Served) -> None:
    model, batch = served.model(), Batch.of(*served.samples)
    arguments = {"input_ids": batch.input_ids, "attention_mask": batch.mask}
    with use_engine_numerics(model) as numerics, torch.no_grad():
        own = model(**arguments).logits
        routes = numerics.routes
        assert routes is not None and (routes[batch.mask == 0] == -1).all()
        with force_routes(model, routes), record_routes(model) as recorded:
            again = model(**arguments).logits
        assert torch.equal(again, own), "its own routes, forced"
        is_token = batch.mask.flatten().bool()
        assert torch.equal(recorded.ids()[is_token], routes.flatten(0, 1)[is_token])
        others = torch.where(routes >= 0, (routes + 1) % model.config.num_experts, -1)
        with force_routes(model, others):
            assert not torch.equal(model(**arguments).logits, own)
        assert torch.equal(numerics.routes, others)


def test_gradients_reach_the_router_under_given_routes(served: Served) -> None:
    model, batch = served.model(torch.float32), Batch.of(*served.samples)
    with use_engine_numerics(model, dtype=torch.float32) as numerics:
        gradients(model, batch, by_engine=True)
        assert numerics.routes is not None
        others = torch.where(numerics.routes >= 0, (numerics.routes + 1) % model.config.num_experts, -1)
        found = gradients(model, batch, others, by_engine=True)
    wanted = gradients(model, batch, others)
    assert max(gradient_errors(found, wanted).values()) < LEAST_AGREEMENT
