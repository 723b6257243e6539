"""Bytes of single tokens, in the vocabularies that models have."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout.text.token_vocabulary import TokenVocabulary
from tests.tiny_tokenizer import SPECIAL, write_model_folder


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    vocab = {"<unk>": 0, "<0xF0>": 1, "<0x9F>": 2, "▁a": 3, "b": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def test_byte_level_tokens_are_their_bytes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """B2: every byte comes back, and tokens of text are their text."""
    folder = write_model_folder(tmp_path / "model")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = TokenVocabulary(backend)
    single = [backend.token_to_id(letter) for letter in pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(vocabulary.bytes_of(token_id) for token_id in single) == [bytes([byte]) for byte in range(256)]
    text = "héllo 😀 END"
    assert b"".join(map(vocabulary.bytes_of, backend.encode(text).ids)) == text.encode()
    assert vocabulary.special_ids == vocabulary.ids_of(SPECIAL) and len(vocabulary.special_ids) == 3
    assert {vocabulary.bytes_of(token_id) for token_id in vocabulary.special_ids} == {name.encode() for name in SPECIAL}
    assert vocabulary.bytes_of(299) == b"" and vocabulary.ids_of(["no such token"]) == frozenset()


def test_tokens_that_stand_for_a_byte() -> None:
    """B2: these are byte-fallback tokens, and the space that SentencePiece writes as a letter."""
    sequence = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary = TokenVocabulary(sentencepiece(sequence))
    assert [vocabulary.bytes_of(token_id) for token_id in range(1, 6)] == [b"\xf0", b"\x9f", b" a", b"b", b" "]
    assert vocabulary.strips_first_space and vocabulary.bytes_of(6) == b"<s>"
    assert TokenVocabulary(sentencepiece(decoders.Metaspace())).bytes_of(3) == b" a"
    assert TokenVocabulary(sentencepiece(decoders.Fuse())).bytes_of(1) == b"<0xF0>"
