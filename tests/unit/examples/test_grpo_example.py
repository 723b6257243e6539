"""The parts of examples/grpo that need no server."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from capture.sampling_mask import SamplingMask
from examples.grpo.fp8 import fp8_checkpoint
from examples.grpo.measure import Mismatch
from examples.grpo.plots import plot_all, results_tables
from examples.grpo.policy import new_model, policy_loss
from examples.grpo.rollouts import FreshGroups, Group, advantages, make_batch
from examples.grpo.run import load_results, main
from examples.grpo.settings import SETTINGS
from examples.grpo.task import Problem, Task, running_sums, sum_of
from examples.grpo.train import Grpo, Judgement, Result, Step
from rollout.client import FinishReason, GenerationOutput, VersionSpan
from tests.fp8_reference import quantised, stored_tensors


@pytest.mark.parametrize("task", [Task("sums", 3), Task("running", 6)], ids=["sums", "running"])
def test_no_problem_is_both_trained_on_and_held_out(task: Task) -> None:
    held_out = set(islice(task.problems(1, held_out=True), 500))
    trained = {problem for seed in range(3) for problem in islice(task.problems(seed, held_out=False), 3000)}
    assert not held_out & trained
    assert all(problem.is_held_out for problem in held_out)
    assert list(islice(task.problems(5, held_out=True), 9)) == list(islice(task.problems(5, held_out=True), 9))
    assert all(len(problem.answer) < task.max_new_tokens for problem in held_out)


@pytest.mark.parametrize(("text", "reward"), [("0046", 1.0), (" 0046\n", 1.0), ("46", 0.0), ("0047", 0.0), ("", 0.0)])
def test_only_the_right_answer_is_rewarded(text: str, reward: float) -> None:
    assert sum_of(12, 34).question == "012+034="
    assert sum_of(12, 34).reward(text) == reward


def test_running_sums_are_modulo_ten() -> None:
    assert running_sums("907164") == Problem("907164=", "996737")


def test_advantages_of_a_group() -> None:
    assert advantages([1.0, 1.0]).tolist() == advantages([0.0]).tolist() * 2 == [0.0, 0.0]
    torch.testing.assert_close(advantages([0.0, 0.0, 0.0, 1.0]).sum(), torch.tensor(0.0))
    assert advantages([0.0, 1.0]).tolist() == [-1.0, 1.0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = new_model(tmp_path / "plain", replace(SETTINGS["fp8"].spec, experts=4, top_k=2), 0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_the_fp8_checkpoint_is_as_deepseek_ships_them(checkpoint: Path) -> None:
    made = fp8_checkpoint(checkpoint, checkpoint.parent / "made")
    expected = quantised(stored_tensors(checkpoint))  # by its definition, element by element
    found = stored_tensors(made)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    kept = {name for name in found if found[name].dtype == torch.bfloat16}
    assert "model.layers.0.mlp.gate.weight" in kept and "lm_head.weight" in kept
    assert not any("proj" in name for name in kept)


def test_the_loss_pushes_rewarded_tokens_up_until_they_are_clipped() -> None:
    engine, wins = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    logprobs = torch.tensor([-1.0, -0.5, -1.0, -1.5], requires_grad=True)
    policy_loss(logprobs, engine, wins).backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] < 0 < logprobs.grad[2]
    assert logprobs.grad[[1, 3]].tolist() == [0.0, 0.0]  # beyond 1.28 and below 0.8 already


def output(ids: list[int], versions: list[tuple[str, int, int]], text: str = "") -> GenerationOutput:
    return GenerationOutput(
        rid="r", text=text, output_ids=ids, finish_reason=FinishReason("stop"), prompt_tokens=2,
        completion_tokens=len(ids), cached_tokens=0, weight_version=versions[-1][0],
        weight_versions=[VersionSpan(*span) for span in versions], logprobs=[-0.5] * len(ids),
        sampling_mask=SamplingMask.from_lists([[token] for token in ids]), sampling_logprobs=[0.0] * len(ids),
    )  # fmt: skip


def test_a_batch_says_which_version_sampled_each_token() -> None:
    outputs = [output([5, 6, 7], [("3", 0, 2), ("4", 2, 3)], "0003"), output([8], [("4", 0, 1)])]
    batch = make_batch([Group(sum_of(1, 2), [1, 2], outputs)])
    assert batch.masks is not None
    assert batch.versions_NO[batch.mask_NO].tolist() == [3, 3, 4, 4]
    assert batch.input_ids_NS.tolist() == [[1, 2, 5, 6, 7], [1, 2, 8, 0, 0]]
    assert batch.rewards_N.tolist() == [1.0, 0.0] and batch.advantages_N.tolist() == [1.0, -1.0]
    assert batch.masks.to_lists() == [[5], [6], [7], [8]]
    with pytest.raises(ValueError, match="must have equal lengths"):
        make_batch([Group(sum_of(1, 2), prompt, outputs) for prompt in ([1], [1, 2])])


@pytest.mark.parametrize("corrected", [True, False])
def test_ratios_are_to_the_engine_or_to_the_trainer(corrected: bool, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = make_batch([Group(sum_of(1, 2), [1, 2], [output([5, 6, 7], [("3", 0, 3)])])])
    setting = SETTINGS["fp8"]
    plan = replace(setting.plan, corrected=corrected)
    grpo = Grpo(model, None, "", setting.task, plan, Result(0, "plain"), lambda *_: None)  # type: ignore[arg-type]
    old_T = grpo._old_logprobs(batch)
    with torch.no_grad():
        logprobs_SV = model(input_ids=batch.input_ids_NS).logits[0].log_softmax(-1)
    own_T = logprobs_SV[[1, 2, 3], [5, 6, 7]]
    torch.testing.assert_close(old_T, torch.full((3,), -0.5) if corrected else own_T)
    assert not old_T.requires_grad and not torch.allclose(own_T, torch.tensor(-0.5))


def test_without_top_p_there_are_no_masks() -> None:
    whole = replace(output([5, 6], [("3", 0, 2)]), sampling_mask=None, sampling_logprobs=None)
    batch = make_batch([Group(sum_of(1, 2), [1, 2], [whole])])
    assert batch.masks is None
    assert torch.equal(batch.masked_logprobs_NO, batch.logprobs_NO)


def test_the_freshest_groups_are_taken_and_the_others_counted() -> None:
    groups = [Group(sum_of(i, 0), [i], []) for i in range(5)]

    async def scenario() -> list[Group]:
        fresh = FreshGroups(3)
        taking = asyncio.create_task(fresh.take())
        for group in groups[:2]:
            fresh.put(group)
        await asyncio.sleep(0)
        assert not taking.done()
        for group in groups[2:]:
            fresh.put(group)
        taken = await taking
        assert fresh.num_dropped == 2
        return taken

    assert asyncio.run(scenario()) == groups[2:]


def result(variant: Any, seed: int) -> Result:
    found = Mismatch(1e-4, 0.02, False, 0.9, 1.1, [0.01, 0.02])
    step = Step(1, 1.0, 0.5, 0.1, 1.0, [0.5, 0.5], 1, 0.9, 1.1)
    return Result(seed, variant, [Judgement(0, 0.0, 0.2, found), Judgement(1, 2.0, 0.6, found)], [step])


def test_plots_of_every_variant(tmp_path: Path) -> None:
    results = [result(variant, seed) for variant in ("replay", "plain", "exact") for seed in (0, 1)]
    for path in plot_all(results, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert load_results(tmp_path) == []


@pytest.mark.parametrize("width", [80, 118])
def test_tables_have_a_line_for_each_row(width: int) -> None:
    results = [result(variant, seed) for variant in ("replay", "plain", "exact") for seed in (0, 1)]
    for table in results_tables(results):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table)
        lines = console.export_text().splitlines()
        assert len(lines) == 1 + 4 + len(results), "a title, a header, three rules and a line for each run"
        assert not any("…" in line for line in lines)


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--variants", "best"], ["--seeds"], ["--threads", "-1"]])
def test_wrong_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]
