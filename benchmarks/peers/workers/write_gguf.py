"""A GGUF file for llama.cpp from a Qwen3-MoE checkpoint in Hugging Face format: `write_gguf.py FOLDER FILE`.

Matrices keep their bfloat16 bits; norms and routers become float32, which holds every bfloat16 exactly.  The
vocabulary has a size and no words.
Run by llama.cpp's environment, which has `gguf` and numpy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers.workers.gguf_tensors import FLOAT32, float32_of, read_bfloat16, stacked


def write(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = read_bfloat16(folder / "model.safetensors")
    writer = gguf.GGUFWriter(target, "qwen3moe")
    _describe(writer, config)
    for name, bits in stacked(tensors, config["num_hidden_layers"], config["num_experts"]).items():
        if name.endswith(FLOAT32):
            writer.add_tensor(name, float32_of(bits))
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
