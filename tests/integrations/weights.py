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
    """Every tensor times `factor`, which should be a power of two."""
    return {name: tensor * factor for name, tensor in tensors.items()}


def assert_holds(server: ServerProcess, tensors: Tensors) -> None:
    """The server's tensors have the names and, bit for bit, the content of these."""
    held = server.client.weights_checker("checksum")["checksums"]
    expected = {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}
    assert held.keys() == expected.keys()
    assert [name for name in held if held[name] != expected[name]] == []


def trainer_model(checkpoint: Path) -> PreTrainedModel:
    """The checkpoint as a trainer holds it: transformers' model, its experts fused."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")


def scale_model(model: PreTrainedModel, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
