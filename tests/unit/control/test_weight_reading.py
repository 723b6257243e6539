"""The values of a tensor by name, up to a number of values."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.control import weight_reading
from rollout.core.messages.weights import GetWeightsByNameReqInput
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness


def test_engine_17_get_weights_by_name_shows_a_bounded_count_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reading, "_MAX_NUMBERS_SHOWN", 1000, raising=False)
    harness = Harness(tiny_checkpoint(tmp_path / "model"))
    name = "model.embed_tokens.weight"
    shown = harness.control(GetWeightsByNameReqInput, name=name, truncate_size=2)
    assert shown.success and len(shown.data["parameter"]) == 2
    refused = harness.control(GetWeightsByNameReqInput, name=name, truncate_size=2**31 - 1)
    assert not refused.success and refused.status_code == 413 and "truncate_size" in refused.message
