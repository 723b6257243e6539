"""Fixtures of tests of updates: two versions of a small model, and a trainer that hands in the second one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.weights import UpdateWeightsFromDistributedReqInput
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / f"v{seed}", seed=seed) for seed in (1, 2)]


@pytest.fixture
def trainer(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> LoopbackTrainer:
    trainer = LoopbackTrainer(logical_tensors(folders[1]))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    return trainer
