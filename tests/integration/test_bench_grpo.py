"""The benchmark of samples of one prompt: two checkouts by turns, on the same prompts and lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import grpo
from tests.model_zoo import tiny_checkpoint, tiny_spec

pytestmark = pytest.mark.full


def test_two_checkouts_take_turns_on_the_same_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(grpo, "checkpoint", lambda shape: folder)
    for name, value in (("SHAPES", {"S": tiny_spec()}), ("PROMPT_TOKENS", 8), ("ANSWER_TOKENS", (2, 6))):
        monkeypatch.setattr(grpo, name, value)
    console = Console(record=True, width=120)
    before, this = grpo.run("S", 2, console, against=grpo.HERE, prompts=3)
    assert (before["checkout"], this["checkout"]) == ("before", "this")
    assert before["steps"] == this["steps"] <= 7 and this["tokens a step"] == before["tokens a step"] > 20
    assert "GRPO, shape S: 3 prompts of 8 x 16 samples of 2 to 6" in " ".join(console.export_text().split())
