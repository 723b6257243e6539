"""Tiny random checkpoints with the layer that predicts several tokens at once, and transformers' model of it.

Names are as the families' published checkpoints have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.family_zoo import family_checkpoint, family_model, in_dtype, random_weights
from weight_sync.sender import split_fused_experts

# transformers takes the class of the layer's norms from the model's last layer, which attends in published models.
_ATTENDS_LAST = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}

# family -> changes to its settings
MTP_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v3, Moonlight": {},
    "deepseek_v3, all sparse": {},
    "glm4_moe": {},
    "glm4_moe, no QK norm": {},
    "glm4_moe_lite": {},
    "qwen3_next": _ATTENDS_LAST,
    "qwen3_5": _ATTENDS_LAST,
    "qwen3_5_moe": {},
    "qwen3_5_moe that sees": {},
}

_BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
_APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def mtp_models(name: str, seed: int) -> tuple[Any, MtpModel]:
    """Make transformers' models of a family and of the layer, in float32, with random weights."""
    model = family_model(name, seed, **MTP_FAMILIES[name])
    text = model.config.get_text_config()
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None):
        text.mtp_layer_types = ["full_attention"]
    if getattr(text, "mlp_layer_types", None):
        text.mtp_mlp_layer_types = ["sparse"]
    head = MtpModel(model, 1).float().eval()
    random_weights(head.layers, seed + 100)  # embedding and output head are the model's
    return model, head


def mtp_tensors(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the layer under their published names."""
    model, head = mtp_models(name, seed)
    behind = not name.startswith("qwen")
    prefix = f"model.layers.{model.config.get_text_config().num_hidden_layers}." if behind else "mtp."
    block, parts = (prefix, _BEHIND) if behind else (f"{prefix}layers.0.", _APART)
    tensors = {}
    for key, tensor in head.layers[0].state_dict().items():
        first, _, rest = key.partition(".")
        tensors[block + rest if first == "mtp_block" else f"{prefix}{parts[first]}.{rest}"] = tensor.clone()
    if behind:
        tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
        return dict(split_fused_experts(tensors.items()))
    return tensors


def mtp_checkpoint(folder: Path, name: str, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write the family's checkpoint with the layer into `folder`, and return it."""
    family_checkpoint(folder, name, seed, dtype, **MTP_FAMILIES[name])
    path = folder / "model.safetensors"
    save_file({**load_file(path), **in_dtype(mtp_tensors(name, seed), dtype)}, path, metadata={"format": "pt"})
    return folder
