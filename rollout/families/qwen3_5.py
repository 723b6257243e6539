"""The text models of Qwen3.5 and 3.6, dense and MoE, alone or inside a checkpoint that also sees images.

Numerics as in transformers `models/qwen3_5` and `models/qwen3_5_moe`.  `Qwen3_5ForConditionalGeneration` and
`Qwen3_5MoeForConditionalGeneration` have the text model's configuration in `text_config` and its tensors under
`model.language_model.`.  Both kinds of checkpoint may use both names of a tensor.  Vision tensors are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.config_json import RotaryDefaults
from rollout.core.specs.layer_specs import DenseSpec, LayerSpec, MoESpec
from rollout.core.specs.model_config import ModelConfig
from rollout.families.qwen3_next import experts_of, hybrid_fields, mixers_of, mtp_of

ROTARY = RotaryDefaults(partial=0.25)
HAS_PARTS = True
_IGNORED = ("mtp.", "model.visual.", "visual.")


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Qwen3.5 model: Qwen3-Next with the same feed-forward block in every layer.

    The projections of gated delta layers are separate tensors.  A token of text has one position, so the sections of
    its rotation are one.
    """
    mlp: DenseSpec | MoESpec
    if "moe_intermediate_size" in raw:
        mlp = experts_of(raw, normalise=True)
    else:
        mlp = DenseSpec(inner=int(raw["intermediate_size"]))
    return ModelConfig(
        **hybrid_fields(raw, generation),
        layers=tuple(LayerSpec(attention=mixer, mlp=mlp) for mixer in mixers_of(raw, merged_by_key_head=False)),
        ignored_names=_IGNORED,
        mtp=mtp_of(raw, mlp) if int(raw.get("mtp_num_hidden_layers", 1)) else None,
        renamed_prefixes=(("model.language_model.", "model."),),
    )
