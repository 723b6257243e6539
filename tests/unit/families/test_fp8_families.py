"""Every family of the zoo with FP8 blocks: a start, an update in FP8, and one in bf16 that the engine quantises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.model.load import quantised_names
from tests.family_zoo import FAMILIES, family_checkpoint
from tests.fp8_reference import fp8_checkpoint, set_config, stored_tensors, values_of
from tests.loopback_updater import LoopbackUpdater
from tests.model_zoo import load_tiny
from weight_sync.checker import live_fingerprints
from weight_sync.held_format import FP8_BLOCKS

pytestmark = pytest.mark.full
DTYPE = torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ways_lead_to_the_same_bits(family: str, tmp_path: Path) -> None:
    """Every way gives the bits of a plain checkpoint of the values."""
    plain = family_checkpoint(tmp_path / "plain", family, 1, DTYPE)
    tensors = stored_tensors(fp8_checkpoint(tmp_path / "fp8", plain))
    values = fp8_checkpoint(tmp_path / "values", plain, lambda _: values_of(tensors, DTYPE))
    set_config(values, None)
    expected = live_fingerprints(load_tiny(values, DTYPE).weights)
    started = load_tiny(tmp_path / "fp8", DTYPE).weights
    assert live_fingerprints(started) == expected
    assert live_fingerprints(load_tiny(plain, DTYPE).weights) != expected
    names = quantised_names(tmp_path / "fp8", started)
    ways = [(frozenset[str](), tensors), (names, stored_tensors(plain))]
    for quantised, on_the_wire in ways if all(tensor.ndim < 3 for tensor in tensors.values()) else ways[:1]:
        updater = updater_over_other_weights(tmp_path, family, quantised)
        updater.begin("v2")
        for part in range(2):
            updater.send([(name, on_the_wire[name]) for name in sorted(on_the_wire, reverse=True)[part::2]])
        updater.verify()
        updater.commit()
        assert live_fingerprints(updater.weights) == expected


def updater_over_other_weights(folder: Path, family: str, quantised: frozenset[str]) -> LoopbackUpdater:
    path = folder / f"other {len(quantised)}"
    weights = load_tiny(family_checkpoint(path, family, 2, DTYPE), DTYPE).weights
    formats = dict.fromkeys(quantised, FP8_BLOCKS)
    return LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, quantised=formats)
