"""The tensors of a Qwen3-MoE checkpoint in Hugging Face format under llama.cpp's names.

Shape legend: E logical experts.  It needs only numpy and the standard library: llama.cpp's environment has no other
package that reads bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}
EXPERT = {
    "gate_proj.weight": "ffn_gate_exps.weight",
    "up_proj.weight": "ffn_up_exps.weight",
    "down_proj.weight": "ffn_down_exps.weight",
}
FLOAT32 = ("norm.weight", "ffn_gate_inp.weight")


def read_bfloat16(path: Path) -> dict[str, np.ndarray]:
    """Return the bfloat16 tensors of a file as uint16 views of their bits.  Raises ValueError for another dtype."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}; only BF16 is converted")
        begin, end = entry["data_offsets"]
        tensors[name] = data[begin:end].view(np.uint16).reshape(entry["shape"])
    return tensors


def stacked(tensors: dict[str, np.ndarray], num_layers: int, num_experts: int) -> dict[str, np.ndarray]:
    """Return the tensors under llama.cpp's names, a layer's experts as one [E, out, in].

    Raises KeyError for a missing tensor, and ValueError for a tensor that has no place.
    """
    rest = dict(tensors)
    named = {theirs: rest.pop(ours) for ours, theirs in OUTER.items()}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for ours, theirs in LAYER.items():
            named[f"blk.{layer}.{theirs}"] = rest.pop(prefix + ours)
        for ours, theirs in EXPERT.items():
            experts = [rest.pop(f"{prefix}mlp.experts.{expert}.{ours}") for expert in range(num_experts)]
            named[f"blk.{layer}.{theirs}"] = np.stack(experts)
    if rest:
        raise ValueError(f"unexpected tensors: {sorted(rest)[:5]}")
    return named


def float32_of(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
