"""The forms of quantised weights that a trainer may send in parts, by their definition, for tests that all forms pass.

FP8: blocks of 128 x 128.  INT4: compressed-tensors' `pack-quantized`, groups of 32 or 128 elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests import fp8_reference
from tests.fp8_reference import Named
from tests.held_reference import int4, int4_values, packed, unpacked

Which = Callable[[str, torch.Tensor], bool]


class PairForm(NamedTuple):
    """`suffixes`: of the parts of a weight, the one with its elements first.  `weight`: the name of a quantised weight.

    `quantised(tensors, which)` gives the tensors of a checkpoint, `values_of` the values that are served of them in a
    dtype.  `missing`: the message for a weight of which one part does not come, by the suffix of the part.
    """

    name: str
    config: Mapping[str, Any]
    weight: str
    suffixes: tuple[str, ...]
    quantised: Callable[..., Named]
    values_of: Callable[[Mapping[str, torch.Tensor], torch.dtype], Named]
    missing: Callable[[str, str], str]

    @property
    def parts(self) -> list[str]:
        """The names of the parts of `weight`."""
        return [f"{self.weight}{suffix}" for suffix in self.suffixes]

    @property
    def scale(self) -> str:
        """The name of the scales of `weight`."""
        return self.parts[1]

    def in_parts(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the weights that come in parts."""
        scales = f".weight{self.suffixes[1]}"
        return {name.removesuffix(self.suffixes[1]) for name in tensors if name.endswith(scales)}

    def firsts(self, tensors: Mapping[str, torch.Tensor]) -> Named:
        """Return the parts that have the elements of a weight."""
        names = {name + self.suffixes[0] for name in self.in_parts(tensors)}
        return {name: x for name, x in tensors.items() if name in names}


def int4_config(group: int) -> dict[str, Any]:
    """Return the `quantization_config` of Kimi-K2-Thinking, with another size of groups."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    one = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": one},
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def int4_parts(name: str, integers: torch.Tensor, scales: torch.Tensor) -> Named:
    """Return the tensors of a checkpoint for one weight."""
    return {f"{name}_packed": packed(integers), f"{name}_scale": scales, f"{name}_shape": torch.tensor(integers.shape)}


def in_int4(tensors: Mapping[str, torch.Tensor], which: Which = fp8_reference.is_quantised, group: int = 32) -> Named:
    """Quantise the matrices whose rows have whole groups.

    Their scales are ones that no rule of the engine gives, so that nothing but a copy has them.
    """
    found: Named = {}
    for name, x in tensors.items():
        if which(name, x) and x.ndim == 2 and x.shape[1] % group == 0:
            integers, scales = int4(x, group)
            found |= int4_parts(name, integers, scales.mul_(torch.linspace(1, 1.7, scales.numel()).view_as(scales)))
        else:
            found[name] = x
    return found


def int4_checkpoint(folder: Path, plain: Path, group: int = 32) -> Path:
    """Write the checkpoint in `plain` again, in INT4."""
    tensors = in_int4(fp8_reference.stored_tensors(plain), group=group)
    fp8_reference.fp8_checkpoint(folder, plain, lambda _: tensors)
    fp8_reference.set_config(folder, int4_config(group))
    return folder


def values_of_int4(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Named:
    """Return the values that are served of the tensors of an INT4 checkpoint."""
    found: Named = {}
    for name, x in tensors.items():
        if name.endswith("_packed"):
            scales, whole = tensors[f"{name.removesuffix('_packed')}_scale"], name.removesuffix("_packed")
            group = 8 * x.shape[1] // scales.shape[1]
            found[whole] = int4_values(unpacked(x), scales, group, torch.bfloat16).to(dtype)
        elif not name.endswith((".weight_scale", ".weight_shape")):
            found[name] = x if "correction_bias" in name else x.to(dtype)
    return found


def _fp8_missing(weight: str, suffix: str) -> str:
    scale = f"{weight}_scale_inv"
    return f"{weight} is float8_e4m3fn and has no {scale}" if suffix else f"{scale} has no float8_e4m3fn {weight}"


def _int4_missing(weight: str, suffix: str) -> str:
    return f"{weight}{suffix} is missing, another part of {weight}_"


FP8_FORM = PairForm(
    "fp8",
    fp8_reference.QUANTIZATION_CONFIG,
    "model.layers.1.mlp.experts.2.down_proj.weight",
    ("", "_scale_inv"),
    fp8_reference.quantised,
    fp8_reference.values_of,
    _fp8_missing,
)
INT4_FORM = PairForm(
    "int4",
    int4_config(32),
    "model.layers.1.mlp.experts.2.up_proj.weight",  # the rows of down_proj have no whole groups
    ("_packed", "_scale", "_shape"),
    in_int4,
    values_of_int4,
    _int4_missing,
)
FORMS = (FP8_FORM, INT4_FORM)
FORM_OF = {form.name: form for form in FORMS}
