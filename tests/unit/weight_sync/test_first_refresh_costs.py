"""The cost of a first refresh for each tensor, in calls of Python: a clock would measure the machine, too.

The numbers are of the tensors that one model has more than another one.  So what a refresh costs as a whole is left
out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from examples.make_checkpoint.run import CheckpointSpec, hf_config
from rollout.core.messages.tensor_lists import decode_lists, digest_of, encode_lists
from rollout.families.registry import model_config_from_dict
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.weight_loading import WeightIndex
from tests.kernels import native_ops
from tests.model_zoo import trivial_placement
from weight_sync import manifest as manifest_module
from weight_sync.digest_plan import hex_digits
from weight_sync.fingerprint import fingerprint
from weight_sync.manifest import Manifest
from weight_sync.receivers.distributed import PIECES, DistributedSource
from weight_sync.tensor_meta import PackedBucket
from weight_sync.updater import WeightUpdater

FIRST, FOLLOWING = 105, 1.0
"""Calls a tensor at most: 97 and 0.5 as this is written.  A first refresh took 231 before."""


class Received(DistributedSource):
    """A call whose messages are in memory already."""

    def __init__(self, updater: WeightUpdater, lists: bytes, content: torch.Tensor) -> None:
        updater.groups.get = lambda _: None  # type: ignore[assignment, method-assign, return-value]
        super().__init__(lambda: decode_lists(lists), "g", updater.receiver, PIECES, key=digest_of(lists))
        self._content = content

    def receive(self) -> Iterator[PackedBucket]:
        start = 0
        for layout in self.layouts:
            yield PackedBucket(layout, self._content[start : start + layout.num_bytes])
            start += layout.num_bytes


class Trainer:
    """A model with this many experts, and the tensors that a trainer sends of it."""

    def __init__(self, experts: int) -> None:
        spec = CheckpointSpec(
            hidden_size=32, layers=1, dense_first=0, heads=2, kv_heads=1, head_dim=16, experts=experts, top_k=2,
            moe_intermediate_size=32, vocab_size=64, context_length=64,
        )  # fmt: skip
        config = model_config_from_dict(hf_config(spec, [0, 1]))
        model = DecoderForCausalLM(config, torch.bfloat16, "cpu", trivial_placement(config), native_ops())
        self.weights: WeightIndex = model.weights
        metas = list(self.weights.metas().values())
        tensors = [torch.arange(meta.numel).to(meta.dtype) for meta in metas]
        names, dtypes = [meta.name for meta in metas], [str(meta.dtype) for meta in metas]
        self.lists = encode_lists(names, dtypes, [list(meta.shape) for meta in metas])
        self.content = torch.cat(tensors).view(torch.uint8)
        self.fingerprints = hex_digits(np.array([fingerprint(tensor) for tensor in tensors], np.uint64))
        self.num_tensors = len(metas)

    def refresh(self, updater: WeightUpdater, version: str) -> None:
        key = digest_of(self.lists)
        updater.begin(version, "full", Manifest.of_lists(lambda: decode_lists(self.lists), self.fingerprints, key))
        updater.receive(Received(updater, self.lists, self.content), version)
        updater.verify()
        updater.commit()

    def updater(self) -> WeightUpdater:
        return WeightUpdater(self.weights, device="cpu", timeout_s=60.0, vote=lambda mine: mine)


def calls(work: Callable[[], object]) -> int:
    """Return how many calls of Python's functions, and from them of C's, this thread makes in `work`."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@cache
def trainers() -> tuple[Trainer, Trainer]:
    few, many = Trainer(16), Trainer(80)
    few.refresh(few.updater(), "1")  # what is worked out once in a process
    return few, many


def of_a_tensor(number: int) -> float:
    """Return the calls for each tensor of refresh number `number` of an engine."""
    found = []
    for trainer in trainers():
        updater = trainer.updater()
        for earlier in range(1, number):
            trainer.refresh(updater, str(earlier))
        found.append(calls(lambda trainer=trainer, updater=updater: trainer.refresh(updater, str(number))))  # type: ignore[misc]
    few, many = trainers()
    return (found[1] - found[0]) / (many.num_tensors - few.num_tensors)


def test_a_first_refresh_takes_few_calls_a_tensor() -> None:
    assert of_a_tensor(1) <= FIRST


def test_a_following_refresh_takes_no_call_a_tensor() -> None:
    assert of_a_tensor(3) <= FOLLOWING


def test_a_step_more_for_each_tensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = manifest_module.plan_manifest

    def slow(weights: Any, table: Any, manifest: Manifest, cast: bool) -> Any:
        for name in table.names:
            for _ in range(2):
                weights.places(name)
        return planned(weights, table, manifest, cast)

    monkeypatch.setattr("weight_sync.plan.plan_manifest", slow)
    assert of_a_tensor(1) > FIRST
