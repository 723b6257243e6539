"""FP8 blocks by their definition, element by element, and checkpoints and updates that have them.

Independent of `weight_sync.fp8_blocks`: codes are decoded from their bits, and rounded by a search among all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
Named = dict[str, torch.Tensor]


def decoded(code: int) -> float:
    """Decode an e4m3 code: a sign, 4 bits of exponent with bias 7, 3 bits of fraction; no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    return sign * (fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


_CODES = np.arange(127)  # of the numbers that are not negative, in their order
_NUMBERS = np.array([decoded(code) for code in range(256)])


def quantise(values: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix or stack: codes as float8_e4m3fn [R, C], scales float32 [rows of blocks, columns of blocks]."""
    if values.ndim > 2:
        weights, scales_of_each = zip(*(quantise(matrix, block) for matrix in values), strict=True)
        return torch.stack(weights), torch.stack(scales_of_each)
    x = values.to(torch.float32).numpy()
    rows, columns = x.shape
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((-(-rows // block), -(-columns // block)), np.float32)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            at = np.s_[r * block : (r + 1) * block, c * block : (c + 1) * block]
            scale = np.float32(np.abs(x[at]).max()) / np.float32(448)
            scales[r, c] = scale if scale > 0 else 1
            codes[at] = _nearest((x[at] / scales[r, c]).astype(np.float64))
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)


def _nearest(numbers: np.ndarray) -> np.ndarray:
    """Return the codes of the nearest numbers; halfway between two, the even code."""
    size = np.minimum(np.abs(numbers), 448.0)
    above = np.searchsorted(_NUMBERS[_CODES], size)
    below = np.maximum(above - 1, 0)
    to_above, to_below = _NUMBERS[above] - size, size - _NUMBERS[below]
    is_tie = to_above == to_below
    upwards = np.where(is_tie, above % 2 == 0, to_above < to_below)
    codes = np.where(upwards, above, below).astype(np.uint8)
    return codes | np.where(np.signbit(numbers), 0x80, 0).astype(np.uint8)


def dequantise(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: int = 128) -> torch.Tensor:
    """Return the values of a matrix, or of a stack of them."""
    if weight.ndim > 2:
        return torch.stack([dequantise(*pair, dtype, block) for pair in zip(weight, scales, strict=True)])
    numbers = _NUMBERS[weight.contiguous().view(torch.uint8).numpy()].astype(np.float32)
    rows, columns = weight.shape
    scale = scales.numpy().repeat(block, 0)[:rows].repeat(block, 1)[:, :columns]
    return torch.from_numpy(numbers * scale).to(dtype)


# --- checkpoints and updates -------------------------------------------------------------------------------------


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """Return whether DeepSeek quantises a tensor: matrices of layers, and stacks of them, but no router."""
    return tensor.ndim >= 2 and ".layers." in name and not name.endswith("mlp.gate.weight")


def quantised(tensors: Mapping[str, torch.Tensor], which: Callable[[str, torch.Tensor], bool] = is_quantised) -> Named:
    """Quantise the tensors as an FP8 checkpoint has them."""
    found: Named = {}
    for name, tensor in tensors.items():
        if which(name, tensor):
            found[name], found[f"{name}_scale_inv"] = quantise(tensor)
        else:
            found[name] = tensor
    return found


def values_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Named:
    """Return the values that are served of the tensors of an FP8 checkpoint."""
    found: Named = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            found[name] = dequantise(tensor, tensors[f"{name}_scale_inv"], dtype)
        elif not name.endswith("_scale_inv"):
            found[name] = tensor if "correction_bias" in name else tensor.to(dtype)
    return found


def fp8_checkpoint(folder: Path, plain: Path, change: Callable[[Named], Named] = lambda tensors: tensors) -> Path:
    """Write the checkpoint in `plain` again, in FP8 and in two files, after `change` of its tensors.

    The scale of a weight may be in the file before or behind the weight's.
    """
    folder.mkdir(parents=True)
    tensors = change(quantised(stored_tensors(plain)))
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file_name, some in halves.items():
        save_file({name: tensors[name].contiguous() for name in some}, folder / file_name, {"format": "pt"})
    weight_map = {name: file_name for file_name, some in halves.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for item in plain.iterdir():
        if item.suffix != ".safetensors" and item.is_file() and "index" not in item.name:
            (folder / item.name).write_bytes(item.read_bytes())
    set_config(folder, QUANTIZATION_CONFIG)
    return folder


def stored_tensors(folder: Path) -> Named:
    """Return every tensor of a checkpoint by the name in its file, fused or not."""
    tensors: Named = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def set_config(folder: Path, quantization_config: Mapping[str, object] | None) -> None:
    """Write the entry of `config.json`."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
