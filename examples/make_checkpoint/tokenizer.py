"""The byte-level BPE tokenizer of the checkpoints that `lockstep make-checkpoint` writes.

Trained on the text that ships with the package; every string round-trips, because every byte is a token.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollout.core.errors import BadRequest

END_OF_TEXT = "<|endoftext|>"  # also the padding
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# Turns in the ChatML layout that Qwen models use.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a tokenizer of `vocab_size` tokens, or fewer if the text has no more pairs to merge.

    The same size gives the same tokenizer.  Special tokens have the ids 0, 1 and 2.  Raises `BadRequest` for a size
    below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise BadRequest(f"a byte-level vocabulary needs at least {MIN_VOCAB_SIZE} tokens, got {vocab_size}")
    text = files("examples.make_checkpoint").joinpath("tokenizer_corpus.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so that numbers of any length are spelled alike.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as `transformers.AutoTokenizer` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "extra_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
