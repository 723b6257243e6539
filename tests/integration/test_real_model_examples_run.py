"""examples/real_model and examples/distillation against real servers, for two steps of a tiny model."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.distillation.run import load_results as load_distillations
from examples.distillation.run import main as distil
from examples.distillation.train import Plan as DistillationPlan
from examples.make_checkpoint.run import make_checkpoint
from examples.real_model.problems import Problem
from examples.real_model.run import load_results, main
from examples.real_model.train import Plan
from tests.interrupted_example import TRAINED

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, TRAINED, force=True)
    return folder


def parity_of_letters(_: Problem, text: str, *, ended: bool) -> float:
    """Return 1 for about half of what a random model writes, so that rewards differ."""
    return float(sum(map(ord, text)) % 2)


def test_two_steps_of_grpo(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "reward", parity_of_letters)
    plan = Plan(groups=3, samples=4, layers=2, judge_every=1, judged=3)
    arguments = ["--seeds", "3", "--steps", "2", "--checkpoint", str(checkpoint), "--out", str(tmp_path)]
    assert main([*arguments, "--save", str(tmp_path / "trained")], plan) == 0
    (result,) = load_results(tmp_path)
    assert [judgement.step for judgement in result.judgements] == [0, 1, 2]
    assert [step.step for step in result.steps] == [1, 2]
    for step in result.steps:
        assert step.groups_used and step.gradient_norm > 0
        assert sum(step.lags) == pytest.approx(1.0) and len(step.lags) <= 2  # at most one version old
    # The first samples are of the version that the trainer has: rounding alone makes a difference.
    kl = result.steps[0].kl
    assert kl is not None and 0 < kl < 0.01
    assert (tmp_path / "rewards.png").exists()
    assert (tmp_path / "trained" / "3" / "tokenizer.json").exists()


def test_two_steps_of_distillation(checkpoint: Path, tmp_path: Path) -> None:
    plan = DistillationPlan(first_removed=17, removed=1, groups=3, samples=2, top_k=16, judge_every=1, judged=3)
    assert distil(["--steps", "2", "--teacher", str(checkpoint), "--out", str(tmp_path)], plan) == 0
    (result,) = load_distillations(tmp_path)
    assert result.layers == (20, 19)
    assert [judgement.step for judgement in result.judgements] == [0, 1, 2]
    assert all(step.kl > 0 and step.gradient_norm > 0 for step in result.steps)
    assert (tmp_path / "distillation.png").exists()


@pytest.mark.parametrize("module", ["examples.real_model.run", "examples.distillation.run"])
def test_an_interrupt_ends_it(checkpoint: Path, tmp_path: Path, module: str) -> None:
    model = "--checkpoint" if module == "examples.real_model.run" else "--teacher"
    command = [sys.executable, "-m", module, model, str(checkpoint), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("[ 0:")
        running.send_signal(signal.SIGINT)
        try:
            out, _ = running.communicate(timeout=60.0)
        finally:
            running.kill()
    assert running.returncode == 130, out
    assert "interrupted" in out
