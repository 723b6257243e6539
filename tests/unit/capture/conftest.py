"""A trainer's model whose routes the tests of this folder record and force."""

from __future__ import annotations

import pytest
from transformers import Qwen3MoeForCausalLM

from tests.trainer_moe import trainer_model


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    return trainer_model(norm_topk_prob=False)
