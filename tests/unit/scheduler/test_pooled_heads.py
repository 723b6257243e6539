"""Heads and pooling against transformers, family by family, through the real scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.core.messages.pooling import PoolingParams
from rollout.core.messages.req_output import PooledRows
from tests.family_zoo import FAMILIES
from tests.head_zoo import headed_checkpoint, hidden_states, scores
from tests.scheduler_harness import Harness

PROMPTS = [[5, 9, 200, 41, 7, 3, 77], [8], list(range(20, 61))]
# Both sides compute in float32, in other orders of sums, and the logits are of size 1 to 10.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
_OFTEN = ("qwen3", "qwen3_moe", "gpt_oss")
HEADED = [
    pytest.param(name, marks=() if name in _OFTEN else pytest.mark.full)
    for name in FAMILIES
    if "," not in name  # variants
]


def rows_of(pooled: PooledRows | None) -> torch.Tensor:
    assert pooled is not None
    rows = np.frombuffer(pooled.data, "<f4").reshape(pooled.num_rows, pooled.num_columns)
    return torch.from_numpy(rows.copy())


def pooled(harness: Harness, prompts: list[list[int]], **params: Any) -> list[torch.Tensor]:
    results = harness.generate(
        prompts,
        {"max_new_tokens": 0},
        pooling=PoolingParams(**params),
        return_logprob=False,
        return_routed_experts=False,
    )
    found = []
    for result in results:
        assert result.finished is not None and result.finished.reason.type == "length"
        found.append(rows_of(result.finished.pooled))
    return found


def plain(folder: Path, **settings: Any) -> Harness:
    return Harness(folder, enable_return_routed_experts=False, **settings)


@pytest.mark.parametrize("name", HEADED)
def test_heads_and_pooled_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Sequence and token classification, and every kind of pooling of a model without a head."""
    model = headed_checkpoint(tmp_path / "sequences", name, "ForSequenceClassification")
    for prompt, got in zip(PROMPTS, pooled(plain(tmp_path / "sequences"), PROMPTS, scores=True)):
        torch.testing.assert_close(got[0], scores(model, prompt), **TOLERANCE)
    model = headed_checkpoint(tmp_path / "tokens", name, "ForTokenClassification")
    for prompt, got in zip(PROMPTS, pooled(plain(tmp_path / "tokens"), PROMPTS, scores=True, kind="all")):
        torch.testing.assert_close(got, scores(model, prompt), **TOLERANCE)
    model = headed_checkpoint(tmp_path / "bare", name, "Model")
    harness = plain(tmp_path / "bare")
    whole = [hidden_states(model, prompt) for prompt in PROMPTS]
    expected = {"last": [x[-1:] for x in whole], "cls": [x[:1] for x in whole], "all": whole}
    expected["mean"] = [x.mean(0, keepdim=True) for x in whole]
    for kind, rows in expected.items():
        for got, want in zip(pooled(harness, PROMPTS, kind=kind), rows):
            torch.testing.assert_close(got, want, **TOLERANCE)
    harness.check_idle()
