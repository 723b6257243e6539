"""The parts of examples/distillation that need no server."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.distillation import train
from examples.distillation.loss import TeacherScores, agreement, joined, reverse_kl
from examples.distillation.plots import plot_curves, results_table
from examples.distillation.run import load_results, main
from examples.distillation.student import without_layers
from examples.distillation.train import Distillation, Judgement, Plan, Result, Step
from examples.live.checkpoint import save_beside
from examples.live.progress import progress
from examples.real_model.rollouts import Group
from rollout.client import ScoredSequence
from tests.unit.examples.test_real_model_example import GROUPS, tiny_model

VOCABULARY = 40


def distributions(top_k: int) -> tuple[torch.Tensor, torch.Tensor, TeacherScores]:
    """Draw logits of a student, log-probabilities of a teacher [T, V], and the teacher's scores of its top_k tokens."""
    generator = torch.Generator().manual_seed(5)
    student_TV = torch.randn(6, VOCABULARY, generator=generator) * 2
    teacher_TV = (torch.randn(6, VOCABULARY, generator=generator) * 2).double().log_softmax(-1)
    best = teacher_TV.topk(top_k)
    return student_TV, teacher_TV, TeacherScores(best.indices, best.values.float())


def test_kl_over_all_tokens_is_the_kl() -> None:
    """With one token in the rest, the K + 1 outcomes are all tokens: a plain sum in float64 is the reference."""
    student_TV, teacher_TV, scores = distributions(VOCABULARY - 1)
    own_TV = student_TV.double().log_softmax(-1)
    wanted_T = (own_TV.exp() * (own_TV - teacher_TV)).sum(-1)
    torch.testing.assert_close(reverse_kl(student_TV, scores).double(), wanted_T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_tokens_without_a_score_count_as_one(top_k: int) -> None:
    student_TV, teacher_TV, scores = distributions(top_k)
    found = reverse_kl(student_TV, scores).double()
    own_TV, wanted = student_TV.double().softmax(-1), []
    for own, teacher, named in zip(own_TV, teacher_TV.exp(), scores.ids_TK):
        q = torch.cat([own[named], 1 - own[named].sum(0, keepdim=True)])
        p = torch.cat([teacher[named], 1 - teacher[named].sum(0, keepdim=True)])
        wanted.append((q * (q / p).log()).sum())
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-5)
    whole_T = (own_TV * (own_TV.log() - teacher_TV)).sum(-1)
    assert (found <= whole_T + 1e-6).all()


def test_gradient_is_that_of_differences() -> None:
    student_TV, _, scores = distributions(5)
    double = TeacherScores(scores.ids_TK, scores.logprobs_TK.double())
    logits_TV = student_TV.double().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda logits: reverse_kl(logits, double), (logits_TV,), atol=1e-6)


def test_equal_distributions_have_no_kl() -> None:
    _, teacher_TV, scores = distributions(20)
    logits_TV = teacher_TV.float().requires_grad_(True)
    kl_T = reverse_kl(logits_TV, scores)
    kl_T.sum().backward()
    assert kl_T.abs().max() < 1e-5 and logits_TV.grad is not None and logits_TV.grad.abs().max() < 1e-5
    assert agreement(logits_TV, scores) == 1.0
    assert agreement(-logits_TV, scores) == 0.0


def test_a_teacher_that_leaves_nothing_gives_a_finite_loss() -> None:
    scores = TeacherScores(torch.tensor([[3]]), torch.tensor([[0.0]]))
    logits_TV = torch.zeros(1, VOCABULARY, requires_grad=True)
    reverse_kl(logits_TV, scores).sum().backward()
    assert logits_TV.grad is not None and logits_TV.grad.isfinite().all()


@pytest.mark.mutant
def test_a_forward_kl_is_noticed() -> None:
    student_TV, teacher_TV, scores = distributions(VOCABULARY - 1)
    own_TV = student_TV.double().log_softmax(-1)
    forward_T = (teacher_TV.exp() * (teacher_TV - own_TV)).sum(-1)
    assert (reverse_kl(student_TV, scores).double() - forward_T).abs().max() > 0.1


def test_scores_of_sequences_are_joined_in_order() -> None:
    _, _, scores = distributions(5)
    ids, logprobs = scores.ids_TK.numpy().astype("uint16"), scores.logprobs_TK.numpy()
    parts = [
        ScoredSequence(4, logprobs[part, 0], ids[part], logprobs[part], logprobs[part, :0], [])
        for part in (slice(0, 2), slice(2, 6))
    ]
    found = joined(parts)
    assert found.ids_TK.dtype == torch.int64
    torch.testing.assert_close((found.ids_TK, found.logprobs_TK), (scores.ids_TK, scores.logprobs_TK))


def test_a_student_lacks_the_layers_and_nothing_else(tmp_path: Path) -> None:
    teacher, target = tmp_path / "teacher", tmp_path / "student"
    tiny_model(4).to(torch.bfloat16).save_pretrained(teacher)
    (teacher / "tokenizer.json").write_text("{}")
    student = without_layers(teacher, 1, 2)
    save_beside(student, teacher, target)
    whole, kept = load_file(teacher / "model.safetensors"), load_file(target / "model.safetensors")
    for name, tensor in kept.items():
        assert torch.equal(tensor, whole[name.replace("layers.1.", "layers.3.")])
    assert {name.split(".")[2] for name in kept if "layers" in name} == {"0", "1"}
    assert (target / "tokenizer.json").read_text() == "{}"
    ids = torch.tensor([[1, 2, 3, 4]])
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, trust_remote_code=False).eval()
    assert torch.equal(loaded(ids).logits, student(ids).logits)
    assert torch.equal(student(ids).logits, student(ids, use_cache=False).logits)
    for first, count in ((0, 4), (-1, 1), (3, 2), (1, 0)):
        with pytest.raises(ValueError, match="cannot be removed from 4 layers"):
            without_layers(teacher, first, count)


def test_a_judgement_keeps_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of all held-out answers would stand in memory; `torch.no_grad` does not reach other threads."""
    found: list[torch.Tensor] = []

    def recorded(*args: Any) -> torch.Tensor:
        found.append(output_logits(*args))
        return found[-1]

    async def sampled(*_: Any) -> list[Group]:
        return GROUPS

    async def scored(*_: Any) -> TeacherScores:
        num_tokens = sum(len(output.output_ids) for group in GROUPS for output in group.outputs)
        return TeacherScores(torch.zeros(num_tokens, 1, dtype=torch.int64), torch.full((num_tokens, 1), -1.0))

    output_logits = train.output_logits
    monkeypatch.setattr(train, "output_logits", recorded)
    monkeypatch.setattr(train, "sample", sampled)
    monkeypatch.setattr(Distillation, "_scored", scored)
    result, plan = Result(0, (4, 3)), Plan(first_removed=1)
    with progress(Console(file=io.StringIO())) as shown:
        run = Distillation(tiny_model(), "", "", plan, result, shown)
        asyncio.run(run._judge(None, None, 0))  # type: ignore[arg-type]
    assert found and not found[0].requires_grad
    assert result.judgements[0].kl > 0


def test_table_and_plot_of_two_runs(tmp_path: Path) -> None:
    judgements = [Judgement(0, 0.0, 2.0, 0.4, 0.1), Judgement(1, 2.0, 0.5, 0.8, 0.3)]
    results = [Result(seed, (30, 24), 0.4, 2.0, judgements, [Step(1, 1.0, 1.5, 90, 1.0)]) for seed in (0, 1)]
    assert results_table(results).row_count == 2
    assert plot_curves(results, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert load_results(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--threads", "-1"], ["--teacher", "/no/such/folder"]])
def test_wrong_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]
