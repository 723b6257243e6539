"""The policy: learns from samples, publishes each version in a folder, and sends it to all engines.

Published versions are for engines that come later; running engines get the weights by broadcast, in one transaction.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples.fleet.errors import FleetError
from examples.fleet.sample import Sample
from examples.minimal_trainer import logprobs_under_routes
from rollout.client import RolloutClient, RouteLayout, Timeouts
from rollout.core.errors import LockstepError
from rollout.families.registry import load_model_config
from weight_sync.delta.publisher import publish_bytes
from weight_sync.errors import WeightSyncError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.sender import WeightSender, named_tensors_of, split_fused_experts

LEARNING_RATE = 1e-3
TIMEOUT_S = 20.0


def reward(token_ids: Sequence[int]) -> float:
    """Return the share of even token ids: something to learn without a task."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


class Trainer:
    """`published`: the folder of published versions.  Version 0 is the checkpoint.

    Not thread-safe, but that `bring` may run in parallel with all the rest.
    """

    def __init__(self, checkpoint: Path, published: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, trust_remote_code=False
        ).eval()
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=LEARNING_RATE)
        self._published = published
        self._sender = WeightSender({}, timeout_s=TIMEOUT_S, on_engine_failure="leave_out")
        self._members: set[str] = set()
        self._newest = (0, self._served_tensors())

    def learn(self, samples: Sequence[Sample]) -> None:
        """Take one policy-gradient step on samples of one prompt, under the experts that the engines chose."""
        rewards_N = torch.tensor([reward(sample.output_ids) for sample in samples])
        outputs: list[Any] = list(samples)  # of which their tokens and experts are read
        logprobs_NO, mask_NO = logprobs_under_routes(self._model, samples[0].prompt.token_ids, outputs)
        advantages_N = rewards_N - rewards_N.mean()
        loss = -torch.where(mask_NO, advantages_N[:, None] * logprobs_NO, 0.0).sum() / mask_NO.sum()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def release(self) -> tuple[int, list[str]]:
        """Publish the next version and send it; return its number and the engines that do not have it.

        If no engine has it, it is in force all the same: the next engine to come will have it.
        """
        (before, old), tensors = self._newest, self._served_tensors()
        version = before + 1
        publish_bytes(self._published, version, old, tensors)
        self._newest = (version, tensors)
        try:
            return version, self._sender.refresh(tensors, str(version)).left_out
        except WeightSyncError:
            return version, sorted(self._members)

    def bring(self, client: RolloutClient, local: Path) -> int:
        """Bring an engine to the newest version from the published folder, prove it, and return the version.

        `local`: a folder of this engine.  Raises `FleetError`.
        """
        version, tensors = self._newest
        try:
            if version > 0:
                client.pull_weights(str(local), str(self._published), version, update_memory=True)
            held = client.weights_checker()["checksums"]
        except LockstepError as error:
            raise FleetError(f"an engine was not brought to version {version}: {error}") from error
        if held != {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}:
            raise FleetError(f"an engine was brought to version {version} and holds other tensors")
        return version

    def join(self, name: str, client: RolloutClient) -> None:
        """Have the engine take part in every release from now on.  Raises `FleetError`."""
        self._sender.add_engine(name, client)
        self._members.add(name)
        try:
            self._sender.connect()
        except WeightSyncError as error:
            self.leave(name)
            raise FleetError(f"{name} did not join the group of weights: {error}") from error

    def leave(self, name: str) -> None:
        """Forget an engine that is gone."""
        self._members.discard(name)
        self._sender.remove_engine(name)

    def _served_tensors(self) -> dict[str, torch.Tensor]:
        """Copy the tensors as engines hold them: bfloat16, expert by expert, under the checkpoint's names."""
        named = split_fused_experts(named_tensors_of(self._model, torch.bfloat16))
        return {name: tensor.detach().clone() for name, tensor in named}


def route_layout(checkpoint: Path) -> RouteLayout:
    """Return the layout of this model's routed experts."""
    config = load_model_config(str(checkpoint))
    return RouteLayout(config.num_hidden_layers, config.num_experts_per_tok, config.moe_layer_ids, config.num_experts)


def engine_client(url: str) -> RolloutClient:
    """Return a client for control calls, with the deadlines of this fleet."""
    return RolloutClient(url, timeouts=Timeouts(control=TIMEOUT_S, weights=2 * TIMEOUT_S))
