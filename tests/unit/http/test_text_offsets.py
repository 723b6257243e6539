"""Places of tokens in a text whose vocabulary writes the space before a word."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from rollout.http.openai.format import TextOffsets
from rollout.text.token_vocabulary import TokenVocabulary


def vocabulary() -> TokenVocabulary:
    tokens = ["<unk>", "▁the", "▁end", "s", *(f"<0x{byte:02X}>" for byte in "é".encode())]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return TokenVocabulary(backend)


def test_places_in_a_text_without_its_first_space() -> None:
    """B1: the text is "the ends"; with an echo it begins with the prompt."""
    offsets = TextOffsets(vocabulary(), skips_special=True)
    assert offsets.output([1, 2]) + offsets.output([3, 6]) == [0, 3, 7, 8]
    echoed = TextOffsets(vocabulary(), skips_special=True)
    assert echoed.prompt([6, 1, 3], "thes") == [0, 0, 3]  # <s> was added, and is not in the text
    assert echoed.output([1, 4, 5, 3]) == [4, 7, 7, 8]
    shown = TextOffsets(vocabulary(), skips_special=False)
    assert shown.prompt([6, 1], "<s>the") == [0, 3] and shown.output([6, 3]) == [6, 9]
    assert TextOffsets(None, skips_special=True).output([1, 2]) == [0, 0]
