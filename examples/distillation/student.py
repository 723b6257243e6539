"""The student: the teacher without some of its middle layers, as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples.live.layers import LayersError


def without_layers(checkpoint: Path, first: int, count: int) -> Any:
    """Load the model in bfloat16, without the `count` decoder layers from `first` on.

    Raises `LayersError` if the model does not have those layers.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, trust_remote_code=False).eval()
    layers = list(model.model.layers)
    if not 0 <= first < first + count < len(layers):
        raise LayersError(f"layers {first} to {first + count - 1} cannot be removed from {len(layers)} layers")
    kept = layers[:first] + layers[first + count :]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    return model
