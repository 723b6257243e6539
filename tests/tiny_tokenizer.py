"""A byte-level BPE tokenizer with 256 bytes, a few merges and three special tokens, as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def write_tiny_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, more_special: Sequence[str] = ()
) -> Path:
    """Write the tokenizer's files into `folder` and return it."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for left, right in (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("E", "N"), ("N", "D"), ("EN", "D")):
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *more_special])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return folder


def write_model_folder(folder: Path, *, dense: bool = False, more_special: Sequence[str] = ()) -> Path:
    """Write the tokenizer and the `config.json` of a two-layer model with a dense first layer, without weights."""
    write_tiny_tokenizer(folder, more_special=more_special)
    config = {
        "architectures": ["Qwen3ForCausalLM" if dense else "Qwen3MoeForCausalLM"],
        "model_type": "qwen3" if dense else "qwen3_moe",
        "vocab_size": 300,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 160,
        "eos_token_id": 264,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "mlp_only_layers": [0],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
