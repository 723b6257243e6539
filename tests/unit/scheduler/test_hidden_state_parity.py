"""Hidden states of every layer against transformers' `output_hidden_states`, family by family, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.core.messages.hidden import HiddenStatesParams
from tests.family_zoo import FAMILIES, family_model
from tests.scheduler_harness import Harness, Result

PROMPTS = [[5, 9, 200, 41, 7, 3, 77], [8], list(range(20, 61))]
# Both sides compute in float32, in other orders of sums.
TOLERANCE = {"rtol": 1e-4, "atol": 5e-5}
_OFTEN = ("qwen3", "qwen3_moe", "gpt_oss")
NAMES = [pytest.param(name, marks=() if name in _OFTEN else pytest.mark.full) for name in FAMILIES]


def reference(model: Any, ids: list[int]) -> np.ndarray:
    """Return the states [T, layers + 1, D] of transformers."""
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([state[0] for state in found], 1).numpy()


def rows_of(result: Result) -> np.ndarray:
    assert result.finished is not None and result.finished.hidden_states is not None
    rows = result.finished.hidden_states
    return np.frombuffer(rows.data, "<f4").reshape(rows.shape)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Rows of prompts and of sampled tokens, in chunks and in decode steps."""
    model = family_model(name, 3)
    model.save_pretrained(tmp_path)
    harness = Harness(tmp_path, enable_return_routed_experts=False, chunked_prefill_size=16)
    num_layers = harness.scheduler.runner.state.model.config.num_hidden_layers
    wanted = HiddenStatesParams(layers=tuple(range(num_layers + 1)))
    results = harness.generate(PROMPTS, {"max_new_tokens": 5}, hidden_states=wanted)
    for result in results:
        want = reference(model, result.prompt_ids + result.token_ids[:-1])
        np.testing.assert_allclose(rows_of(result), want, **TOLERANCE)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(np.roll(rows_of(result), 1, axis=1), want, **TOLERANCE)  # a layer off
    harness.check_idle()
