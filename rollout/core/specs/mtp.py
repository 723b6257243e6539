"""The layer of a checkpoint that predicts the token after the next one, as data."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.core.specs.layer_specs import LayerSpec


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """A layer that predicts one token further than the model (multi-token prediction; DeepSeek-AI, 2024).

        embedding of token p + 1 -- norm --.
                                           +-- [2 D] -- projection [D] -- layer -- norm -- head: token p + 2
        hidden state of token p  -- norm --'                                   `-- hidden state of token p + 1

    Embedding, head and the model's hidden state, which is the one after the final norm, are the served model's.  The
    layer sees positions as the model does.  Sources: DeepSeek-V3's `README_WEIGHTS.md`, `MtpModel` of transformers,
    `deepseek_nextn` and `qwen3_next_mtp` of SGLang.

    `prefix`: the begin of the names of all its tensors in checkpoints, and of no others.  `block` is the name of the
    layer, and the next four are the names of the norms and the projection.  `copies`: names of tensors that repeat one
    of the model's, and the name of that.
    """

    layer: LayerSpec
    prefix: str
    block: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: tuple[tuple[str, str], ...] = ()


def mtp_behind(layer: LayerSpec, index: int) -> MtpSpec:
    """Return the spec of a layer with the names of hidden layer `index`, which follows the last one.

    DeepSeek-V3 and GLM-4 name theirs in this way.
    """
    name = f"model.layers.{index}"
    return MtpSpec(
        layer=layer,
        prefix=f"{name}.",
        block=name,
        embedding_norm=f"{name}.enorm",
        hidden_norm=f"{name}.hnorm",
        projection=f"{name}.eh_proj",
        final_norm=f"{name}.shared_head.norm",
        copies=(
            (f"{name}.embed_tokens.weight", "model.embed_tokens.weight"),
            (f"{name}.shared_head.head.weight", "lm_head.weight"),
        ),
    )


def mtp_apart(layer: LayerSpec) -> MtpSpec:
    """Return the spec of a layer with names of its own, `mtp.*`, as Qwen3-Next and Qwen3.5 have it."""
    return MtpSpec(
        layer=layer,
        prefix="mtp.",
        block="mtp.layers.0",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        final_norm="mtp.norm",
    )
