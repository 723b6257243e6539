"""Small checkpoints of model families, plain and quantised, whose matrices have several blocks, the last ones cut.

All experts fused in one tensor have no block's edge where the two halves of each meet.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.family_zoo import FAMILIES as ZOO
from tests.family_zoo import family_checkpoint
from tests.fp8_reference import Named, fp8_checkpoint, quantised, set_config, stored_tensors
from tests.model_zoo import logical_tensors
from tests.pair_forms import FP8_FORM, PairForm

FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
SIZES = {"hidden_size": 160, "moe_intermediate_size": 136, "intermediate_size": 200}
_HEAD_DIM = 48  # of families whose heads are of one size
DTYPE = torch.bfloat16


class QuantisedCase:
    """`plain`: bfloat16, as a trainer has it; `stored`: the same, in `form`.

    `values`: the values served of `stored`.
    """

    def __init__(self, folder: Path, family: str, seed: int = 3, form: PairForm = FP8_FORM) -> None:
        self.family, self.form = family, form
        sizes = SIZES if "qk_rope_head_dim" in ZOO[family] else {**SIZES, "head_dim": _HEAD_DIM}
        self.plain = family_checkpoint(folder / "plain", family, seed, DTYPE, **sizes)
        self.stored = self.written(folder / "stored", form.quantised(stored_tensors(self.plain)))
        self.tensors = logical_tensors(self.stored)
        self.values = form.values_of(self.tensors, DTYPE)

    def written(self, folder: Path, tensors: Named) -> Path:
        """Write a checkpoint of these tensors in this form."""
        fp8_checkpoint(folder, self.plain, lambda _: tensors)
        set_config(folder, self.form.config)
        return folder

    def newer(self, seed: int) -> tuple[Named, Named, Named]:
        """Return other weights: as a trainer has them, quantised, and the values served of these."""
        generator = torch.Generator().manual_seed(seed)
        sent = {
            name: (tensor + 0.05 * torch.randn(tensor.shape, generator=generator)).to(
                tensor.dtype if "correction_bias" in name else DTYPE
            )
            for name, tensor in logical_tensors(self.plain).items()
        }
        stored = self.form.quantised(sent)
        return sent, stored, self.form.values_of(stored, DTYPE)


def more_layers(family: str) -> Named:
    """Return FP8 tensors of layers that checkpoints have and the engine leaves out; some families have none."""
    if family == "qwen3_moe":
        return {}
    generator = torch.Generator().manual_seed(0)
    return quantised({"model.layers.3.mlp.experts.0.up_proj.weight": torch.randn(136, 160, generator=generator)})


def fused(tensors: Named) -> Named:
    """Join experts as transformers 5 fuses them: gate and up of all experts in one tensor, down in another."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        count = len({name.split(".")[5] for name in tensors if name.startswith(f"{layer}.experts.")})
        experts = [f"{layer}.experts.{number}" for number in range(count)]
        gate_up = [torch.cat([tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]]) for e in experts]
        found[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        found[f"{layer}.experts.down_proj"] = torch.stack([tensors[f"{e}.down_proj.weight"] for e in experts])
    return found
