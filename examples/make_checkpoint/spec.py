"""The specification of a checkpoint of `lockstep make-checkpoint`: family, shape and content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.core.errors import BadRequest

# The families that can be written; the first two by `make_checkpoint` itself, the others by transformers.
OWN_FAMILIES = ("qwen3_moe", "qwen3")
FAMILIES = (
    *OWN_FAMILIES,
    *("qwen2", "qwen2_moe", "llama", "glm4_moe", "deepseek_v3", "glm4_moe_lite"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "gpt_oss"),
)
DENSE_FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_5")
# What `head_dim` must divide by: a rotated part of even size.
_HEAD_DIM_STEPS = {
    "glm4_moe": 4,
    "deepseek_v3": 4,
    "glm4_moe_lite": 4,
    "qwen3_next": 8,
    "qwen3_5": 8,
    "qwen3_5_moe": 8,
}

# Standard deviation of a router's logits: the chosen experts stand out well above rounding noise.
ROUTER_LOGIT_STD = 2.5
# Standard deviation of the output logits: far from uniform, far from certain.
OUTPUT_LOGIT_STD = 2.0


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Shape and content of a checkpoint.  The default is a Qwen3-MoE of about 15 million parameters.

    `dense_first` leading layers have a dense feed-forward block, in families that know such layers; `dense` makes a
    Qwen3-MoE a dense Qwen3, as the family `qwen3` is.  Sizes that a family has in addition follow from them.
    Token ids beyond the tokenizer's (at most 1359) are never produced by text.
    """

    family: str = _flag("qwen3_moe", f"model family: {', '.join(FAMILIES)}")
    seed: int = _flag(0, "seed of the weights")
    vocab_size: int = _flag(1024, "tokens of the model; the tokenizer has as many if its text allows")
    hidden_size: int = _flag(256, "width of the residual stream")
    layers: int = _flag(5, "hidden layers")
    dense_first: int = _flag(1, "leading layers with a dense feed-forward block")
    heads: int = _flag(8, "query heads")
    kv_heads: int = _flag(4, "key/value heads")
    head_dim: int = _flag(32, "size of a head")
    intermediate_size: int = _flag(512, "inner width of a dense feed-forward block")
    experts: int = _flag(32, "experts of a MoE layer")
    top_k: int = _flag(4, "experts that each token uses")
    moe_intermediate_size: int = _flag(128, "inner width of an expert")
    norm_topk_prob: bool = _flag(True, "divide the weights of the chosen experts by their sum")
    dense: bool = _flag(False, "write a dense Qwen3 without experts")
    tie: bool = _flag(False, "share the embedding with the output head")
    context_length: int = _flag(2048, "longest sequence")
    rope_theta: float = _flag(10000.0, "base of the rotary embedding")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = _flag("bfloat16", "dtype of the weights")
    shards: int = _flag(1, "number of safetensors files; more than one also writes an index")

    def validate(self) -> None:
        """Raise `BadRequest` for the first value that makes no model."""
        _require(self.family in FAMILIES, f"no family {self.family!r}; known are {', '.join(FAMILIES)}")
        _require(not self.dense or self.family in OWN_FAMILIES, f"{self.family} has no dense form; choose family qwen3")
        step = _HEAD_DIM_STEPS.get(self.family, 2)
        _require(self.head_dim % step == 0, f"head_dim of {self.family} must be a multiple of {step}")
        sizes = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "context_length")
        for name in (*sizes, "experts", "top_k", "moe_intermediate_size", "shards"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(self.head_dim >= 2 and self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}")
        _require(self.heads % self.kv_heads == 0, f"heads ({self.heads}) must be a multiple of kv_heads")
        _require(self.top_k <= self.experts, f"top_k ({self.top_k}) must not exceed experts ({self.experts})")
        _require(0 <= self.dense_first <= self.layers, f"dense_first must be between 0 and layers ({self.layers})")

    @property
    def is_dense(self) -> bool:
        return self.dense or self.family in DENSE_FAMILIES

    def is_moe_layer(self, layer: int) -> bool:
        return not self.is_dense and layer >= self.dense_first


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadRequest(message)
