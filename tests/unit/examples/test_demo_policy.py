"""The demo's trainer in numbers: rewards, loss, mismatch, versions, and scoring with padding and forced routes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from capture.replay import record_routes
from capture.routed_experts import RoutedExperts
from examples.demo import policy
from examples.demo.mismatch import bit_agreement, logprob_mismatch, route_mismatch
from examples.demo.objective import group_advantages, load_questions, policy_gradient_loss, reward
from examples.demo.rollouts import SampleGroup, sample_group, version_problem
from rollout.client import GenerationOutput, VersionSpan
from rollout.client.types import FinishReason
from tests.model_zoo import tiny_checkpoint

PROMPT = [5, 6, 7]
OUTPUTS = [[11, 12, 13, 14], [21, 22], [31]]


# --- objective -----------------------------------------------------------------------------------------------------


def test_the_shipped_answers_are_right() -> None:
    questions = load_questions()
    assert len(questions) >= 12 and len({question for question, _ in questions}) == len(questions)
    operators = {"+": "__add__", "-": "__sub__", "times": "__mul__"}
    checked = 0
    for question, answer in questions:
        words = question.removeprefix("What is ").removesuffix("?").split()
        if question.startswith("What is "):
            assert getattr(int(words[0]), operators[words[1]])(int(words[2])) == answer
        else:
            assert sum(int(word) for word in question.split() if word.isdigit()) == answer
        checked += 1
    assert checked == len(questions)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (" 42", 42, 1 + 0.5 * 2 / 3),
        ("42 or 7", 7, 0.5 * 3 / 7),  # the first number counts
        ("-5", -5, 1 + 0.5 * 1 / 2),
        ("five", 5, 0.0),
        ("", 5, 0.0),
        ("٤٢", 42, 0.0),  # digits of other scripts are no digits here
    ],
)
def test_the_reward_follows_from_text_and_answer(text: str, answer: int, expected: float) -> None:
    assert reward(text, answer) == pytest.approx(expected)


def test_loss_falls_when_better_samples_get_likelier() -> None:
    advantages_N = group_advantages(torch.tensor([1.0, 0.0]))
    logprobs_NO = torch.tensor([[-1.0, -2.0], [-3.0, -99.0]], requires_grad=True)
    mask_NO = torch.tensor([[True, True], [True, False]])
    loss = policy_gradient_loss(logprobs_NO, mask_NO, advantages_N, num_tokens=3)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.5 * -3.0 - 0.5 * -3.0) / 3)
    assert logprobs_NO.grad is not None
    torch.testing.assert_close(logprobs_NO.grad, torch.tensor([[-0.5, -0.5], [0.5, 0.0]]) / 3)


# --- mismatch ------------------------------------------------------------------------------------------------------


def test_bit_agreement_counts_the_last_bit() -> None:
    engine = torch.tensor([-1.0, -2.0, -3.0])
    trainer = engine.clone()
    trainer[1] = torch.nextafter(trainer[1], torch.tensor(0.0))
    found = bit_agreement(engine, trainer)
    assert (found.num_tokens, found.num_equal) == (3, 2) and found.kl > 0
    assert bit_agreement(engine, engine.clone()).kl == 0


def test_logprob_mismatch_by_hand() -> None:
    found = logprob_mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.75]))
    assert found.num_tokens == 2
    assert found.mean_abs == pytest.approx(0.375) and found.max_abs == pytest.approx(0.5)
    assert found.kl == pytest.approx((math.exp(-0.5) - 1 + 0.5 + math.exp(0.25) - 1 - 0.25) / 2)


def test_kl_estimator_is_near_the_exact_kl() -> None:
    torch.manual_seed(0)
    engine_V, trainer_V = torch.randn(20).log_softmax(-1), torch.randn(20).log_softmax(-1)
    exact = (engine_V.exp() * (engine_V - trainer_V)).sum().item()
    samples = torch.multinomial(engine_V.exp(), 200_000, replacement=True)
    assert logprob_mismatch(engine_V[samples], trainer_V[samples]).kl == pytest.approx(exact, rel=0.03)
    # the other direction is another number
    samples = torch.multinomial(trainer_V.exp(), 200_000, replacement=True)
    assert logprob_mismatch(engine_V[samples], trainer_V[samples]).kl != pytest.approx(exact, rel=0.03)


def test_route_mismatch_ignores_order_and_sees_one_wrong_expert() -> None:
    engine_TLK = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    same = route_mismatch(engine_TLK, engine_TLK.flip(-1))
    assert (same.token_share, same.token_layer_share) == (0.0, 0.0)
    other_TLK = engine_TLK.clone()
    other_TLK[1, 0, 0] = 9
    found = route_mismatch(engine_TLK, other_TLK)
    assert (found.token_share, found.token_layer_share) == (0.5, 0.25)


# --- versions ------------------------------------------------------------------------------------------------------


def routes(num_rows: int, num_layers: int = 2, top_k: int = 3, experts: int = 8, seed: int = 0) -> RoutedExperts:
    generator = np.random.default_rng(seed)
    order = generator.random((num_rows, num_layers, experts)).argsort(axis=-1)
    ids_TLK = order[..., :top_k].astype(np.uint8)
    return RoutedExperts(ids_TLK, experts, tuple(range(num_layers)), num_layers, 0, (("1", 0, num_rows),))


def output(output_ids: list[int], **changes: Any) -> GenerationOutput:
    """Return a sample as the client gives it, with all tokens of version "1"."""
    result = GenerationOutput(
        rid="r",
        text="text",
        output_ids=output_ids,
        finish_reason=FinishReason("length", length=len(output_ids)),
        prompt_tokens=len(PROMPT),
        completion_tokens=len(output_ids),
        cached_tokens=0,
        weight_version="1",
        weight_versions=[VersionSpan("1", 0, len(output_ids))],
        logprobs=[-1.0] * len(output_ids),
        routed_experts=routes(len(PROMPT) + len(output_ids) - 1),
        meta_info={
            "weight_version_start": "1",
            "weight_version_end": "1",
            "prefill_weight_versions": [{"version": "1", "start": 0, "end": len(PROMPT)}],
            "kv_weight_version_oldest": "1",
        },
    )
    return replace(result, **changes)


def test_right_versions_are_no_problem() -> None:
    assert version_problem(output([1, 2, 3]), "1") is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weight_version": "0"}, "weight_version is"),
        ({"weight_versions": []}, "weight_versions"),
        ({"weight_versions": [VersionSpan("1", 0, 2)]}, "weight_versions"),
        ({"weight_versions": [VersionSpan("0", 0, 1), VersionSpan("1", 1, 3)]}, "weight_versions"),
        ({"meta_info": {}}, "kv_weight_version_oldest"),
        ({"routed_experts": replace(routes(5), weight_versions=(("0", 0, 2), ("1", 2, 5)))}, "versions of the routes"),
    ],
)
def test_wrong_versions_are_named(changes: dict[str, Any], named: str) -> None:
    problem = version_problem(output([1, 2, 3], **changes), "1")
    assert problem is not None and named in problem


def test_samples_of_another_version_are_a_problem() -> None:
    assert version_problem(output([1, 2, 3]), "0") is not None


# --- scoring -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    torch.set_num_threads(1)
    return policy.load_model(tiny_checkpoint(tmp_path_factory.mktemp("demo") / "model", "moe"))


def group_of(model: torch.nn.Module, output_ids: list[list[int]], *, own_routes: bool) -> SampleGroup:
    """Return a group whose engine is the model itself: it scores each sample alone, under its own or random routes."""
    outputs = []
    for index, ids in enumerate(output_ids):
        num_rows = len(PROMPT) + len(ids) - 1
        record = routes(num_rows, seed=index)
        if own_routes:
            with record_routes(model) as recorded, torch.no_grad():
                model(input_ids=torch.tensor([[*PROMPT, *ids]]), use_cache=False)
            record = replace(record, logical_ids_TLK=recorded.ids()[:num_rows].numpy().astype(np.uint8))
        alone = sample_group(PROMPT, [output(ids, routed_experts=record)], answer=1)
        with torch.no_grad(), policy.forced(model, alone):
            logprobs = policy.output_logprobs(model, alone)[0].tolist()
        outputs.append(output(ids, routed_experts=record, logprobs=logprobs))
    return sample_group(PROMPT, outputs, answer=1)


def test_padding_changes_no_scored_log_probability(model: torch.nn.Module) -> None:
    for own_routes in (True, False):
        group = group_of(model, OUTPUTS, own_routes=own_routes)
        assert group.mask_NO.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]
        found = policy.mismatch_forced(model, [group])
        assert found.num_tokens == 7 and found.max_abs < 1e-5


def test_own_routes_agree_with_themselves_and_not_with_others(model: torch.nn.Module) -> None:
    logprobs, own = policy.mismatch_own(model, [group_of(model, OUTPUTS, own_routes=True)])
    assert own.token_share == 0.0 and logprobs.max_abs < 1e-5
    logprobs, other = policy.mismatch_own(model, [group_of(model, OUTPUTS, own_routes=False)])
    assert other.token_share > 0.9 and logprobs.mean_abs > 0.05


def test_a_step_lowers_the_loss_and_leaves_bfloat16_weights(model: torch.nn.Module) -> None:
    trained = policy.load_model(model.name_or_path)  # type: ignore[arg-type]
    group = replace(group_of(trained, OUTPUTS, own_routes=False), rewards_N=torch.tensor([1.0, 0.0, 0.5]))
    before = policy.frozen_copy(trained)
    optimizer = policy.PolicyOptimizer(trained, learning_rate=1e-3)
    loss, norm = optimizer.step([group])
    assert norm > 0 and loss == pytest.approx(policy.loss_of(before, [group]), abs=1e-6)
    assert policy.loss_of(trained, [group]) < loss
    for weight in trained.parameters():
        assert torch.equal(weight, weight.to(torch.bfloat16).float())


def test_small_steps_add_up_in_the_masters(model: torch.nn.Module) -> None:
    """A step below bfloat16's resolution moves nothing at once, but a hundred of them do."""
    trained = policy.load_model(model.name_or_path)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in trained.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    norm_weight = trained.get_parameter("model.norm.weight")
    start = norm_weight.detach().clone()  # around 1, where neighbours are 2^-7 or 2^-8 apart
    group = replace(group_of(trained, OUTPUTS, own_routes=False), rewards_N=torch.tensor([1.0, 0.0, 0.5]))
    optimizer = policy.PolicyOptimizer(trained, learning_rate=1e-4)
    optimizer.step([group])
    assert torch.equal(norm_weight, start)
    for _ in range(60):
        optimizer.step([group])
    assert not torch.equal(norm_weight, start)
