"""The parts of examples/real_model and examples/live that need no server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.live.layers import LastLayers
from examples.real_model import make_problems
from examples.real_model.plots import plot_rewards, results_table
from examples.real_model.policy import output_logprobs, pack
from examples.real_model.problems import Problem, load, shuffled
from examples.real_model.rollouts import Group
from examples.real_model.run import load_results, main
from examples.real_model.train import Judgement, Result, Step
from rollout.client import FinishReason, GenerationOutput, VersionSpan


def tiny_model(layers: int = 3) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def output(ids: list[int], prompt: list[int], text: str = "", versions: tuple[int, int] = (3, 3)) -> GenerationOutput:
    """Make an output whose first token has one version, and the others another."""
    spans = [VersionSpan(str(versions[0]), 0, 1), VersionSpan(str(versions[1]), 1, len(ids))]
    return GenerationOutput(
        rid="r", text=text, output_ids=ids, finish_reason=FinishReason("stop"), prompt_tokens=len(prompt),
        completion_tokens=len(ids), cached_tokens=0, weight_version=str(versions[1]),
        weight_versions=[span for span in spans if span.end > span.start],
        logprobs=[-0.5 - index for index in range(len(ids))], prompt_ids=prompt,
    )  # fmt: skip


PROBLEM = Problem(question="How many?", answer=19, kind="add", a=13, b=6)
GROUPS = [
    Group(PROBLEM, [output([5, 6, 7], [1, 2, 3, 4], "13 + 6 = 19", (3, 4)), output([8], [1, 2, 3, 4], "7")]),
    Group(PROBLEM, [output([9, 10], [11, 12], "20"), output([13, 14, 15, 16], [11, 12], "19")]),
]


@pytest.mark.parametrize("held_out", [False, True])
def test_data_files_are_what_the_templates_make(held_out: bool) -> None:
    count = make_problems.NUM_HELD_OUT if held_out else make_problems.NUM_TRAIN
    name = "held_out" if held_out else "train"
    assert (make_problems.DATA / f"{name}.jsonl").read_text() == make_problems.file_text(count, held_out=held_out)
    assert len(load(name)) == count
    for problem in load(name):
        assert make_problems.result(problem.kind, problem.a, problem.b) == problem.answer
        assert all(f" {number} " in f" {problem.question} ".replace(".", " ") for number in (problem.a, problem.b))


def test_held_out_problems_share_nothing_with_training_problems() -> None:
    def pairs(problems: list[Problem]) -> set[tuple[str, int, int]]:
        return {(problem.kind, *sorted((problem.a, problem.b))) for problem in problems}

    train, held_out = load("train"), load("held_out")
    assert not pairs(train) & pairs(held_out)
    templates = [
        set(sum(each.values(), ())) for each in (make_problems.TRAIN_TEMPLATES, make_problems.HELD_OUT_TEMPLATES)
    ]
    assert not templates[0] & templates[1]
    assert not set(make_problems.TRAIN_THINGS) & set(make_problems.HELD_OUT_THINGS)
    questions = [problem.question for problem in train + held_out]
    assert len(set(questions)) == len(questions)
    assert all(sum(problem.kind == kind for problem in held_out) >= 40 for kind in ("add", "subtract", "multiply"))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        *((right, 1.0) for right in (" 19", "13 + 6 = 19", " 13 + 6 = 19.", "19.", "6 + 13 =19", "19 = 19")),
        *((wrong, 0.0) for wrong in ("", "190", "13 + 6 = 20", "13 + 6", "19 hats", "Tim has 19", "= 19 or 20", "1 9")),
    ],
)
def test_only_a_line_that_ends_in_the_right_number_is_rewarded(text: str, reward: float) -> None:
    assert PROBLEM.reward(text, ended=True) == reward
    assert PROBLEM.reward(text, ended=False) == 0.0


def test_every_problem_comes_once_before_any_comes_again() -> None:
    problems = load("train")
    stream = shuffled(problems, 7)
    first, second = ([next(stream) for _ in problems] for _ in range(2))
    assert set(first) == set(second) == set(problems) and first != second
    assert next(shuffled(problems, 7)) == first[0]


def reference(model: Any, groups: list[Group]) -> torch.Tensor:
    """Compute the log-probabilities in float64, with a row of its own for each sample."""
    double, found = model.double(), []
    for group in groups:
        for each in group.outputs:
            ids = torch.tensor([[*group.prompt_ids, *each.output_ids]])
            logits_SV = double(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            found.append(logits_SV.log_softmax(-1).gather(-1, torch.tensor(each.output_ids)[:, None])[:, 0])
    return torch.cat(found)


def test_packed_groups_have_the_numbers_of_separate_rows() -> None:
    model = tiny_model()
    packed = output_logprobs(model, pack(GROUPS)).detach()
    wanted = reference(model, GROUPS).detach()
    torch.testing.assert_close(packed.double(), wanted, atol=2e-5, rtol=0)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["visible_GSS", "positions_GS"])
def test_answers_that_see_each_other_are_noticed(wrong: str) -> None:
    model, packed = tiny_model(), pack(GROUPS)
    size = packed.input_ids_GS.shape[1]
    value = {"visible_GSS": torch.ones(size, size, dtype=torch.bool).tril()[None].repeat(2, 1, 1),
             "positions_GS": torch.arange(size)[None].repeat(2, 1)}[wrong]  # fmt: skip
    mutant = output_logprobs(model, dataclasses.replace(packed, **{wrong: value})).detach()
    assert (mutant.double() - reference(model, GROUPS).detach()).abs().max() > 1e-4


def test_a_pack_keeps_the_engine_s_record_of_each_token() -> None:
    packed = pack(GROUPS)
    assert packed.targets_T.tolist() == [5, 6, 7, 8, 9, 10, 13, 14, 15, 16]
    assert packed.versions_T.tolist() == [3, 4, 4, 3, 3, 3, 3, 3, 3, 3]
    assert packed.engine_T.tolist() == [-0.5, -1.5, -2.5, -0.5, -0.5, -1.5, -0.5, -1.5, -2.5, -3.5]
    assert packed.advantages_T.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0]
    lost = dataclasses.replace(GROUPS[0].outputs[0], logprobs=None)
    with pytest.raises(ValueError, match="3 tokens have 0 log-probabilities"):
        pack([Group(PROBLEM, [lost])])


def test_a_group_whose_rewards_are_equal_is_not_used() -> None:
    assert all(group.differs for group in GROUPS)
    assert not Group(PROBLEM, [GROUPS[0].outputs[0]] * 3).differs


def test_only_the_last_layers_move() -> None:
    model = tiny_model().to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    layers = LastLayers(model, 2, 1e-2, 10)
    assert {name.split(".")[2] for name in layers.named} == {"1", "2"}
    output_logprobs(model, pack(GROUPS)).sum().backward()
    assert layers.step() > 0
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved and moved <= layers.named.keys() == dict(layers.tensors()).keys()
    assert all(weight.grad is None for weight in model.parameters())
    with pytest.raises(ValueError, match="has 3 layers, and 4 of them cannot be trained"):
        LastLayers(model, 4, 1e-2, 10)


def test_small_steps_add_up_in_the_masters() -> None:
    """A step of 1e-4 is below the spacing of bfloat16 at 1, and a hundred of them are not."""
    model = tiny_model().to(torch.bfloat16)
    layers = LastLayers(model, 1, 1e-4, 10**6)
    norm = model.model.layers[-1].input_layernorm.weight
    for _ in range(100):
        norm.grad = torch.ones_like(norm)
        layers.step()
    assert float(norm.detach()[0]) == pytest.approx(0.99, abs=4e-3)


def test_table_and_plot_of_two_seeds(tmp_path: Path) -> None:
    step = Step(1, 1.0, 0.5, 3, 90, 1.0, [0.5, 0.5], None)
    judgements = [Judgement(0, 0.0, 0.1, 0.4, {"add": 0.1}), Judgement(1, 2.0, 0.6, None, {"add": 0.6})]
    results = [Result(seed, 2.0, judgements, [step, dataclasses.replace(step, kl=1e-3)]) for seed in (0, 1)]
    assert results_table(results).row_count == 2
    assert plot_rewards(results, tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert load_results(tmp_path) == []


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--seeds"], ["--threads", "-1"], ["--checkpoint", "/no/such/folder"]]
)
def test_wrong_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]
