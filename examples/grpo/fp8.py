"""A checkpoint in FP8, as DeepSeek ships them, out of one in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from weight_sync.fp8_blocks import quantise

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def fp8_checkpoint(folder: Path, target: Path) -> Path:
    """Write the checkpoint in `folder` to the new folder `target`, and return that.

    The matrices of the layers are quantised in blocks; routers, norms, embedding and output head stay as they are.
    """
    target.mkdir()
    for path in folder.glob("*.json"):
        shutil.copy(path, target)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):
            found[name], found[f"{name}_scale_inv"] = quantise(tensor)
        else:
            found[name] = tensor
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2) + "\n")
    return target
