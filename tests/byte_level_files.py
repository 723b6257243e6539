"""Small byte-level tokenizers in each form in which checkpoints are published, with the reference for each."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Moonshot's, as its class TikTokenTokenizer gives it to tiktoken.
MOONSHOT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_DIGITS = r"\p{N}{1,3}"
CORPUS = (
    "Hello world, hello World! It's 2026: we'll see 1234567 things, don't we?\n\n    def f(x):\n        return x\n"
    "你好世界。你好北京。漢字とかな カナ。Привет, мир! Zürich naïve café 😀😀 ﬁ\r\n\t..."
) * 8
SPECIAL = ("<|begin|>", "<|end|>", "<|user|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def trained(pattern: str, vocab_size: int = 700) -> Tokenizer:
    """Train a tokenizer without special tokens on `CORPUS`, whose first 256 ids are bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def token(content: str, *, special: bool = True) -> dict[str, Any]:
    """Return a token as `added_tokens_decoder` has it."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special} | flags


def write_tokenizer_json(folder: Path, pattern: str = DEEPSEEK_DIGITS, **config: Any) -> Tokenizer:
    """Write `tokenizer.json` and `tokenizer_config.json`; return the tokenizer of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = trained(pattern)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, bos_token=SPECIAL[0], eos_token=SPECIAL[1], chat_template=TEMPLATE, **config)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_moonshot(folder: Path, **config: Any) -> tiktoken.Encoding:
    """Write a checkpoint's `tiktoken.model` and configuration as Kimi-K2 has them; returns the reference."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = ranks_of(trained(r"[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"))
    lines = [base64.b64encode(text) + b" %d\n" % rank for text, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    first = len(ranks)
    added = {
        first: token("[BOS]"),
        first + 1: token("[EOS]"),
        first + 2: token("<|im_end|>"),
        first + 3: token("<|im_user|>"),
        first + 11: token("<|tool_call_begin|>", special=False),
        first + 255: token("[PAD]"),
    }
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(index): value for index, value in added.items()},
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    write_config(folder, **settings | config)
    names = {index: value["content"] for index, value in added.items()}
    special = {names.get(index, f"<|reserved_token_{index}|>"): index for index in range(first, first + 256)}
    return tiktoken.Encoding("moonshot", pat_str=MOONSHOT_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Map the bytes of each token to its id.

    Ids are ranks: merges were learnt in the order of ids.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(256 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {bytes(letters[letter] for letter in text): index for text, index in vocab}
