"""Drafts as the target of weight updates: layers of a second small model, under names of their own or the model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eplb.placement import ExpertPlacement
from rollout.core.messages.update_state import TargetOfUpdate
from rollout.core.specs.model_config import ModelConfig
from rollout.engine import build
from rollout.layers.layer import Layer
from rollout.model.adapters import AdapterTable
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.draft_state import DraftState
from rollout.model.load import load_model
from rollout.model.model_state import ModelState
from rollout.model.weight_loading import WeightIndex
from tests.faults.transports import Named

DRAFT = TargetOfUpdate(draft=True)
PREFIX = "mtp."


class _Prefixed(Layer):
    """Layers whose names begin with `PREFIX`."""

    def __init__(self, layers: Layer) -> None:
        setattr(self, PREFIX[:-1], layers)


def tensors_of(checkpoint: Path, prefix: str = "") -> Named:
    return [(prefix + name, tensor) for name, tensor in load_file(checkpoint / "model.safetensors").items()]


def give_drafts(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, *, is_published: bool) -> None:
    """Have engines that are built from now on hold the model in `checkpoint` as a draft.

    `is_published`: under names that the model ignores, so that it may come with the model's.
    """

    drafts: dict[int, DecoderForCausalLM] = {}

    def load_both(path: Path, config: ModelConfig, *parts: Any) -> DecoderForCausalLM:
        if is_published:
            config = replace(config, ignored_names=(PREFIX,))
        model = load_model(path, config, *parts)
        dtype, device, placement, ops = parts[:4]
        drafts[id(model)] = load_model(checkpoint, config, dtype, device, placement, ops)
        return model

    def with_draft(
        model: DecoderForCausalLM, placement: ExpertPlacement, version: str, adapters: AdapterTable, _: None
    ) -> ModelState:
        draft = drafts[id(model)]
        weights = WeightIndex(_Prefixed(draft), {}) if is_published else draft.weights
        of_draft = DraftState(weights, version, None if is_published else model.config)
        return ModelState(model, placement, version, adapters, of_draft)

    monkeypatch.setattr(build, "load_model", load_both)
    monkeypatch.setattr(build, "ModelState", with_draft)


def holds(state: ModelState, named: Named) -> bool:
    """Return whether the draft has this content, bit for bit."""
    assert state.draft is not None
    weights = state.draft.weights
    return all(torch.equal(place.read(), tensor) for name, tensor in named for place in weights.places(name))


def fail_write(monkeypatch: pytest.MonkeyPatch, state: ModelState) -> None:
    """Have the next write into this draft fail."""
    assert state.draft is not None
    failures, layers = iter(["this rank has no memory for it"]), state.draft.weights._layers

    def write(self: WeightIndex) -> None:
        if self._layers is layers and (failure := next(failures, None)) is not None:
            raise OSError(failure)

    monkeypatch.setattr(WeightIndex, "recompute_derived", write)
