"""examples/grpo against a real server, for a few steps: every variant runs, refreshes and measures."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.grpo.run import load_results, main
from examples.grpo.train import Plan

pytestmark = pytest.mark.full
SMALL = Plan(supervised_steps=20, groups_per_step=4, in_flight=3, judge_every=2, judged=12)


def test_every_variant_runs_a_few_steps(tmp_path: Path) -> None:
    arguments = ["--setting", "bf16", "--variants", "replay", "plain", "exact", "--steps", "4"]
    assert main([*arguments, "--seeds", "3", "--out", str(tmp_path)], SMALL) == 0
    results = {result.variant: result for result in load_results(tmp_path / "bf16")}
    assert results.keys() == {"replay", "plain", "exact"}
    for result in results.values():
        assert [judgement.step for judgement in result.judgements] == [0, 2, 4]
        assert [step.step for step in result.steps] == [1, 2, 3, 4]
        assert all(sum(step.lags) == pytest.approx(1.0) for step in result.steps)
    found = {variant: [each.mismatch for each in result.judgements] for variant, result in results.items()}
    # The server was refreshed to what the trainer has, each time: the operators are the same, and so are the bits.
    assert all(each.bits_equal and each.kl == 0.0 and not any(each.flips_by_layer) for each in found["exact"])
    assert all(0 < each.kl < 0.05 and not each.bits_equal for each in found["plain"] + found["replay"])
    assert (tmp_path / "bf16" / "rewards.png").exists() and (tmp_path / "bf16" / "mismatch.png").exists()


def test_the_server_quantises_and_a_step_has_several_updates(tmp_path: Path) -> None:
    arguments = ["--setting", "fp8", "--variants", "replay", "plain", "--steps", "2", "--out", str(tmp_path)]
    assert main(arguments, replace(SMALL, updates=2, balance=0.02, top_p=1.0, corrected=False)) == 0
    for result in load_results(tmp_path / "fp8"):
        assert [step.step for step in result.steps] == [1, 2] and [each.step for each in result.judgements] == [0, 2]
        # Weights in FP8 differ from the trainer's by more than their roundings to bfloat16.
        assert all(each.mismatch.kl > 1e-6 for each in result.judgements)


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.grpo.run", "--setting", "bf16", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        assert "supervised steps" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        try:
            out, _ = running.communicate(timeout=60.0)
        finally:
            running.kill()
    assert running.returncode == 130, out
    assert "interrupted" in out
