"""The benchmark of the sender's stages, at a size that takes no time."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import sender_costs


def test_each_stage_of_the_sender_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_costs, "COUNTS", (300,))
    monkeypatch.setattr(sender_costs, "SHAPES", ((64,),))
    monkeypatch.setattr(sender_costs, "FOLLOWING", 1)
    (row,) = sender_costs.run(Console(quiet=True))
    assert row["tensors"] == 300 and row["plan_bytes"] > 0
    assert set(row["first_us"]) == set(row["following_us"]) == set(sender_costs.STAGES)
    assert min(row["first_us"].values()) > 0
