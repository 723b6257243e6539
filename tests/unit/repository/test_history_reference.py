"""The checker's reference against the plain one, and against itself where versions mix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.families.registry import load_model_config
from tests.history.reference import MixedReference
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.reference import reference_forward

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module", params=["moe_dense_first", "moe"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), request.param, seed=seed, dtype="float64") for seed in (1, 2)]


def test_one_version_is_the_plain_forward(folders: list[Path]) -> None:
    config, contents = load_model_config(folders[0]), [logical_tensors(folder) for folder in folders]
    for version, content in enumerate(contents):
        got = MixedReference(config, contents).forward(IDS, [version] * len(IDS))
        want = reference_forward(config, content, IDS)
        assert torch.allclose(got.logits.log_softmax(-1), want.log_probs, rtol=0, atol=1e-12)
        assert torch.equal(got.routes, want.routes)


def test_a_token_sees_earlier_versions_only_through_their_keys_and_values(folders: list[Path]) -> None:
    config, contents = load_model_config(folders[0]), [logical_tensors(folder) for folder in folders]
    reference = MixedReference(config, contents)
    old, new = (reference.forward(IDS, [version] * len(IDS)).logits for version in (0, 1))
    mixed = reference.forward(IDS, [0] * 5 + [1] * 3).logits
    assert torch.allclose(mixed[:5], old[:5], rtol=0, atol=1e-12), "the past does not depend on the future"
    assert not torch.allclose(mixed[5:], new[5:], rtol=0, atol=1e-3), "older keys and values are seen"
    assert not torch.allclose(mixed[5:], old[5:], rtol=0, atol=1e-3)
    first_new = reference.forward(IDS, [1] + [0] * 7).logits
    assert torch.allclose(first_new[:1], new[:1], rtol=0, atol=1e-12)
