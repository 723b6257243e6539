"""examples/agent against a real server, for two steps: turns join to records, the trainer agrees with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.agent.run import load_results, main
from examples.agent.train import Plan

pytestmark = pytest.mark.full
# Supervision long enough for calls of the tool, whose arguments need not be right.
SMALL = Plan(supervised_steps=80, supervised_batch=16, tool_share=1.0, problems_per_step=4, group_size=4, judged=8)


def test_an_agent_takes_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--steps", "2", "--out", str(tmp_path)], SMALL) == 0, capsys.readouterr().out
    (result,) = load_results(tmp_path)
    assert [step.step for step in result.steps] == [1, 2] and [each.step for each in result.judgements] == [0, 2]
    for step in result.steps:
        assert step.calls > 0.5 and step.turns > 1.5, "episodes of one turn show nothing"
        # Every turn but the first finds the turn before in the KV cache: ids that were tokenised again would not.
        assert step.cached > 0.4
        assert 0 < step.mismatch < 0.02, "the trainer computes what the record states, from the record's ids and routes"
    assert (tmp_path / "rewards.png").exists()
    out = capsys.readouterr().out
    assert "policy gradient 2/2" in out and "Held-out reward" in out
