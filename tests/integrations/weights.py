"""Weights of a next version, and whether a server holds them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.server_process import ServerProcess
from weight_sync.fingerprint import fingerprint, fingerprint_hex

Tensors = Mapping[str, torch.Tensor]


def scaled(tensors: Tensors, factor: float) -> dict[str, torch.Tensor]:
    """Multiply every tensor by `factor`, which should be a power of two."""
    return {name: tensor * factor for name, tensor in tensors.items()}


def assert_holds(server: ServerProcess, tensors: Tensors) -> None:
    """Check that the server's tensors have the names of `tensors` and, bit for bit, their content."""
    held = server.client.weights_checker("checksum")["checksums"]
    expected = {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}
    assert held.keys() == expected.keys()
    assert [name for name in held if held[name] != expected[name]] == []


def trainer_model(checkpoint: Path) -> PreTrainedModel:
    """Load the checkpoint as a trainer holds it: transformers' model, its experts fused."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")


def scale_model(model: PreTrainedModel, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
