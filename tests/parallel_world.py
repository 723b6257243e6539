"""An engine of several ranks next to the truth: the right content of all tensors, and a one-rank engine that has it.

`check` looks at the ranks from inside after every operation: maps, epochs, every slot and shard, addresses, KV slots.
`compare` generates on both and compares tokens, log-probabilities and routes.  Neither asks the engine what it thinks.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.core.messages.io_struct import ContinueGenerationReqInput, ControlReqOutput, PauseGenerationReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.model_zoo import logical_tensors
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

Tensors = dict[str, torch.Tensor]
PROMPTS = [[7, 3, 9], list(range(20, 41)), [5, 5]]
PARAMS = {"max_new_tokens": 4}


class World:
    """`folder`: a float64 checkpoint.  `content`: what must be in force, by logical name."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = ParallelHarness(folder, **settings)
        self.alone = Harness(folder, dtype="float64", num_threads=1, max_total_tokens=2048)
        self.content: Tensors = logical_tensors(folder)
        self.version = "default"
        self._addresses = self._all_addresses()
        self._versions_made = 0

    def close(self) -> None:
        self.engine.close()

    # --- operations -------------------------------------------------------------------------------------------------

    def drifted(self, names: list[str] | None = None) -> Tensors:
        """Make new content of `names`, by default of all tensors, unlike any before."""
        self._versions_made += 1
        random = torch.Generator().manual_seed(self._versions_made)
        chosen = sorted(self.content) if names is None else names
        return {
            name: self.content[name]
            * (1 + 0.05 * torch.randn(self.content[name].shape, generator=random, dtype=torch.float64))
            for name in chosen
        }

    def begin(self, **fields: Any) -> ControlReqOutput:
        self.update_id = uuid.uuid4().hex
        fields |= {"weight_version": f"v{self._versions_made}", "update_id": self.update_id}
        return self.engine.control(BeginWeightUpdateReqInput, **fields)

    def abort(self) -> ControlReqOutput:
        return self.engine.control(AbortWeightUpdateReqInput, update_id=self.update_id)

    def send(self, tensors: Tensors, parts: int = 2) -> list[ControlReqOutput]:
        """Send the tensors' bytes in `parts` buckets."""
        names = sorted(tensors)
        buckets = [{name: tensors[name] for name in names[part::parts]} for part in range(parts)]
        return [
            self.engine.control(
                UpdateWeightsFromTensorReqInput,
                payload=_payload(bucket),
                format="safetensors",
                update_id=self.update_id,
            )
            for bucket in buckets
            if bucket
        ]

    def end(self, tensors: Tensors) -> ControlReqOutput:
        """End the update; if it succeeds, `tensors` are in force from now on."""
        ended = self.engine.control(EndWeightUpdateReqInput, update_id=self.update_id)
        if ended.success:
            self.committed(tensors, ended.data["weight_version"])
        return ended

    def committed(self, tensors: Tensors, version: str) -> None:
        self.content = self.content | tensors
        self.version = version
        assert self.alone.control(PauseGenerationReqInput).success
        payload = _payload(self.content)
        assert self.alone.control(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors").success
        assert self.alone.control(ContinueGenerationReqInput).success

    def rebalance(self, physical_to_logical_map: np.ndarray, **fields: Any) -> ControlReqOutput:
        return self.engine.control(
            EplbRebalanceReqInput, physical_to_logical_map=physical_to_logical_map.tolist(), **fields
        )

    def random_map(self, seed: int) -> np.ndarray:
        """Draw the experts in the slots of every layer: every expert somewhere, none twice on a rank."""
        placement = self.engine.scheduler.runner.state.placement
        layers, slots = placement.metadata.physical_to_logical_map.shape
        experts, ranks = placement.num_logical_experts, placement.ep_size
        random = np.random.default_rng(seed)
        rows = []
        while len(rows) < layers:
            more = random.choice(experts, slots - experts, replace=False)
            row = random.permutation(np.concatenate([np.arange(experts), more]))
            if all(len(set(part.tolist())) == slots // ranks for part in row.reshape(ranks, -1)):
                rows.append(row)
        return np.stack(rows)

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the invariants of every rank from inside."""
        schedulers = self.engine.schedulers
        states = [scheduler.runner.state for scheduler in schedulers]
        assert all(scheduler.serving.poisoned is None for scheduler in schedulers)
        for state in states:
            placement, epoch = state.placement, state.epoch
            placement.metadata.check_ranks(placement.ep_size)  # every expert has a slot, and at most one on a rank
            assert (epoch.weight_version, epoch.placement_epoch) == (self.version, placement.epoch)
        assert len({state.epoch for state in states}) == 1, "ranks serve different epochs"
        maps = [state.placement.metadata.physical_to_logical_map for state in states]
        assert all(torch.equal(maps[0], there) for there in maps), "ranks go by different maps"
        self._check_content()
        assert self._all_addresses() == self._addresses, "storage has moved"
        for scheduler in schedulers:
            scheduler.cache.check()

    def compare(self) -> None:
        """Require that the ranks generate what one rank generates with the same content."""
        ours, theirs = self.engine.generate(PROMPTS, PARAMS), self.alone.generate(PROMPTS, PARAMS)
        for got, want in zip(ours, theirs, strict=True):
            assert got.token_ids == want.token_ids, "other tokens"
            assert np.array_equal(got.routes, want.routes), "other routes"
            assert np.allclose(got.logprobs, want.logprobs, rtol=0, atol=1e-10), "other log-probabilities"
            assert got.finished is not None and {span.version for span in got.finished.weight_versions} == {
                self.version
            }

    def _check_content(self) -> None:
        """Check that every place of a tensor holds its part, and that an expert is in all of its slots of the map."""
        covered = dict.fromkeys(self.content, 0)
        for scheduler in self.engine.schedulers:
            weights = scheduler.runner.state.model.weights
            for name, whole in self.content.items():
                for place in weights.places(name):
                    part = place.region.of(whole) if place.region else whole
                    assert torch.equal(place.read(), part), f"{name} on {scheduler.parallel.position}"
                    covered[name] += part.numel()
        layout = self.engine.scheduler.parallel.layout
        located = self.engine.scheduler.runner.state.placement.metadata
        layer_ids = self.engine.scheduler.runner.state.model.moe_layer_ids
        for name, whole in self.content.items():
            if ".experts." in name:
                layer, expert = layer_ids.index(int(name.split(".")[2])), int(name.split(".")[5])
                copies = len(located.slots_of(layer, expert)) * layout.num_replicas
                assert covered[name] == copies * whole.numel(), f"{name} is not in all of its slots"
            else:
                assert covered[name] >= whole.numel(), f"{name} is not whole"

    def _all_addresses(self) -> list[int]:
        found = []
        for scheduler in self.engine.schedulers:
            model = scheduler.runner.state.model
            for _, layer in model.named_layers():
                found += [value.data_ptr() for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        return found


def _payload(tensors: Tensors) -> bytearray:
    return bytearray(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
