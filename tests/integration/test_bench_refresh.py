"""The benchmark of weight refreshes on a tiny checkpoint: every number is measured, the baselines are real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import http_lists, weight_refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "moe", context_length=2048)


def test_a_plan_sends_every_tensor_once(folder: Path) -> None:
    plan = weight_refresh.Plan.of(folder, 40_000)
    tensors = logical_tensors(folder)
    assert len(plan.buckets) > 3
    assert sorted(name for bucket in plan.buckets for name, _ in bucket) == sorted(tensors)
    assert plan.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("mode", ["host", "journal"])
def test_every_number_is_measured(folder: Path, mode: str) -> None:
    console = Console(record=True, width=200)
    (row,) = weight_refresh.run("tiny", 1, console, modes=(mode,), requests=2, folder=folder, busy_s=0.0)
    assert row["mode"] == mode and row["num_bytes"] > 100_000
    for name in ("copy_s", "broadcast_s", "stall_s", "refresh_s", "stated_s", "tokens_s", "memory_formula"):
        assert row[name] > 0, name
    assert row["steps_held"] == (mode == "journal")
    if mode == "host":
        assert row["delta_s"] > row["delta_send_s"] > 0 and row["num_bytes"] > 10 * row["delta_bytes"] > 0
    else:
        assert row["delta_s"] is None
    text = console.export_text()
    assert mode in text and "bare broadcast" in text


def test_the_http_process_is_measured_with_and_without_known_lists(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_lists, "checkpoint", lambda shape: folder)
    console = Console(record=True, width=200)
    (row,) = http_lists.run(1, console, counts=(300,))
    assert row["checkout"] == "this" and row["tensors"] == 300
    for name in ("bucket_first", "bucket_next", "call", "entries", "lists_first", "lists_next"):
        assert row[name] > 0, name
    assert "lists that came before" in console.export_text()
