"""The table "what fits where": the one in docs/models.md, and sizes that the models' cards state."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.what_fits import CLUSTERS, MODELS, Published, table

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
CARDS = {
    "DeepSeek-V3": 671,
    "Kimi-K2": 1026,
    "GLM-4.5": 355,
    "Qwen3-235B-A22B": 235,
    "Qwen3-30B-A3B": 30.5,
    "gpt-oss-120b": 117,
    "gpt-oss-20b": 21,
}
"""Billions of weights."""


def weights_of(model: Published) -> float:
    return (model.expert_weights + model.other_weights) / 1e9


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_size_that_their_cards_state(name: str) -> None:
    """Within a hundredth: cards round, and GLM-4.5's counts a layer that predicts a further token."""
    assert weights_of(MODELS[name]) == pytest.approx(CARDS[name], rel=0.01)


def test_fewer_bits_and_more_ranks_leave_more() -> None:
    for model in MODELS.values():
        for cluster in CLUSTERS:
            lefts = [model.left_gb(each, *cluster) for each in ("bf16", "fp8", "int4")]
            assert lefts == sorted(lefts)
        assert model.left_gb("fp8", 16, 80) > model.left_gb("fp8", 8, 80)


def test_a_token_of_kv_has_the_bytes_that_the_documentation_states() -> None:
    of_layers = {name: model.layers * model.attention.token_bytes(1) for name, model in MODELS.items()}
    assert of_layers["DeepSeek-V3"] == of_layers["Kimi-K2"] == 70272
    assert of_layers["Qwen3-30B-A3B"] == 98304 and of_layers["GLM-4.5"] == 376832


def test_the_documentation_has_the_table() -> None:
    assert table() in DOCS.read_text(encoding="utf-8")
