"""examples/lora against a real server, for a few steps: both adapters are sampled, trained and refreshed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from examples.lora import run
from examples.lora.run import SETTINGS, load_results, main
from examples.lora.train import Plan
from examples.make_checkpoint.run import make_checkpoint
from examples.real_model.problems import Problem
from tests.interrupted_example import TRAINED

pytestmark = pytest.mark.full
SMALL = Plan(supervised_steps=10, groups=4, samples=4, rank=4, judge_every=2, judged=6)


def check(folder: Path, names: list[str]) -> None:
    (result,) = load_results(folder)
    assert [each.adapter for each in result.adapters] == names
    for each in result.adapters:
        assert len(each.rewards) == 3 and [step for step, _ in each.judgements] == [0, 2, 3]
        assert len(each.refresh_seconds) == 4 and 0 < each.refresh_bytes < result.full_bytes
    assert (folder / "rewards.png").exists()


def test_adapters_of_a_model_with_experts(tmp_path: Path) -> None:
    assert main(["--steps", "3", "--seeds", "3", "--out", str(tmp_path)], SMALL) == 0
    check(tmp_path / "moe", ["sums", "running"])


def test_adapters_of_a_dense_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewards are of what a random model writes, so that they differ."""
    make_checkpoint(tmp_path / "checkpoint", TRAINED)
    monkeypatch.setattr(run, "CHECKPOINT", tmp_path / "checkpoint")
    monkeypatch.setattr(Problem, "reward", lambda _, text, *, ended: float(sum(map(ord, text)) % 2))
    plan = replace(SETTINGS["real"].plan, groups=3, samples=4, rank=4, judge_every=2, judged=3)
    assert main(["--setting", "real", "--steps", "3", "--out", str(tmp_path)], plan) == 0
    check(tmp_path / "real", ["add", "subtract"])
