"""The benchmark of the sender's stages, at a size that takes no time."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from benchmarks import sender_costs
from weight_sync.sender.refresh_plan import KeptPlans


def test_each_stage_of_the_sender_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_costs, "COUNTS", (300,))
    monkeypatch.setattr(sender_costs, "SHAPES", ((64,),))
    monkeypatch.setattr(sender_costs, "FOLLOWING", 1)
    rows = sender_costs.run(Console(quiet=True))
    assert [row["operators"] for row in rows] in (["torch", "compiled"], ["compiled"])  # they may be loaded already
    for row in rows:
        assert row["tensors"] == 300 and row["plan_bytes"] > 0
        assert set(row["first_us"]) == set(row["following_us"]) == set(sender_costs.STAGES)
        assert min(row["first_us"].values()) > 0


def test_a_refresh_of_the_benchmark_packs_all_tensors() -> None:
    named = [(f"t{number}", torch.full((64,), float(number + 1))) for number in range(20)]
    areas = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)]
    sender_costs._refresh(KeptPlans(), named, areas)
    packed = areas[0].view(torch.float32)
    assert sorted(set(packed.tolist()) - {0.0}) == [float(number + 1) for number in range(20)]
