"""Streamed text grows, never changes, and equals the text of a single decode of all ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.text.detokenizer import IncrementalDetokenizer, final_text, longest_partial_stop
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.handle import SampleText
from rollout.tokenizer_manager.sample import SampleRecord
from tests.model_zoo import tiny_checkpoint
from tests.tiers import examples
from tests.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tiny_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._encode([text], False)[0]


# The ids 0..255 are single bytes: most sequences are broken UTF-8, which random models produce.
mixed_ids = st.lists(st.one_of(st.integers(0, 265), st.sampled_from([127, 220, 100, 101, 94, 161])), max_size=24)
broken_ids = st.lists(st.integers(94, 255), max_size=80)  # long runs in which no character is whole
token_ids = st.one_of(mixed_ids, broken_ids)


@settings(max_examples=examples(300), deadline=None)
@given(ids=token_ids, cuts=st.lists(st.integers(1, 5), max_size=24), skip=st.booleans())
def test_any_chunking_gives_the_text_of_one_decode(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    def decode(part: list[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=skip)

    detokenizer = IncrementalDetokenizer(decode)
    position, before = 0, ""
    for size in [*cuts, len(ids)]:
        detokenizer.feed(ids[position : position + size])
        position += size
        assert detokenizer.decided.startswith(before)
        before = detokenizer.decided
    assert detokenizer.complete == decode(ids)
    assert detokenizer.complete.startswith(before)


@pytest.mark.parametrize("num_silent", [0, 1, 8, 1000])
@pytest.mark.parametrize("silent_id", [265, 300])
def test_a_character_is_whole_whatever_skipped_tokens_stand_in_it(
    tokenizer: Tokenizer, silent_id: int, num_silent: int
) -> None:
    """Special tokens, and ids without a token: four of them behind half a character made two broken ones of it."""
    first, *rest = ids_of(tokenizer, "😀")
    ids = [*ids_of(tokenizer, "é")[:1] * 20, first, *[silent_id] * num_silent, *rest]
    decoded: list[int] = []

    def decode(part: list[int]) -> str:
        decoded.append(len(part))
        return tokenizer.decode(part)

    detokenizer = IncrementalDetokenizer(decode)
    for token_id in ids:
        detokenizer.feed([token_id])
    assert detokenizer.complete == tokenizer.decode(ids) == "\ufffd" * 20 + "😀"
    assert detokenizer.num_fed == len(ids)
    assert sum(decoded) < 60 * len(ids), "the work does not grow with tokens that add nothing"


SPACES = [
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
]
SMILE = [f"<0x{byte:02X}>" for byte in "😀".encode()]


@pytest.mark.parametrize("decoder", SPACES, ids=["llama", "metaspace"])
@settings(max_examples=examples(300), deadline=None)
@given(
    words=st.lists(st.sampled_from([["▁a"], ["b"], ["▁"], ["<s>"], ["<x>"], SMILE, [SMILE[0], "<s>", *SMILE[1:]]])),
    skip=st.booleans(),
    size=st.integers(1, 3),
)
@example(words=[["▁a"], ["<s>"], ["▁a"]], skip=True, size=1)
@example(words=[["▁"], ["<s>"], ["▁"], ["b"]], skip=True, size=1)
@example(words=[SMILE, SMILE, SMILE, SMILE, SMILE], skip=True, size=3)
def test_the_spaces_of_sentencepiece_survive_skipped_tokens_and_bytes(
    decoder: decoders.Decoder, words: list[list[str]], skip: bool, size: int
) -> None:
    """A skipped token between two words took the space of the second."""
    tokens = ["<unk>", *SMILE, "▁a", "b", "▁"]
    vocab = {text: index for index, text in enumerate(dict.fromkeys(tokens))}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "<x>"])
    if not skip:  # a text within a character breaks it
        words = [word if word == SMILE else word[:1] for word in words]
        words = [SMILE if word == SMILE[:1] else word for word in words]
    ids = [backend.token_to_id(text) for word in words for text in word]

    def decode(part: list[int]) -> str:
        return backend.decode(part, skip_special_tokens=skip)

    detokenizer, before = IncrementalDetokenizer(decode), ""
    for start in range(0, len(ids), size):
        detokenizer.feed(ids[start : start + size])
        assert detokenizer.decided.startswith(before)
        before = detokenizer.decided
    assert detokenizer.complete == decode(ids)


def test_half_a_character_is_not_shown(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    shown = []
    for token_id in ids_of(tokenizer, "a😀b"):
        detokenizer.feed([token_id])
        shown.append(detokenizer.shown)
    assert shown == ["a", "a", "a", "a", "a😀", "a😀b"]


def test_naive_decoding_would_show_half_a_character(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a😀b")
    assert "\ufffd" in tokenizer.decode(ids[:3])
    assert "".join(tokenizer.decode([token_id]) for token_id in ids) != "a😀b"


def test_a_possible_stop_string_is_held_back_until_it_is_decided(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer.decode, stop=["END", "\n\n"])
    shown = []
    for character in "xE\ny":
        detokenizer.feed(ids_of(tokenizer, character))
        shown.append(detokenizer.shown)
    assert shown == ["x", "x", "xE", "xE\ny"]


@given(text=st.text("ab", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_longest_partial_stop_agrees_with_its_definition(text: str, stop: list[str]) -> None:
    lengths = [k for s in stop for k in range(1, len(s)) if text.endswith(s[:k])]
    assert longest_partial_stop(text, stop) == max(lengths, default=0)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text("abEND\n é", max_size=14), stop=st.text("abEND\n é", min_size=1, max_size=4))
def test_streaming_to_a_stop_string_shows_only_prefixes_of_the_trimmed_text(
    tokenizer: Tokenizer, text: str, stop: str
) -> None:
    ids = ids_of(tokenizer, text)
    ends = [i for i in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:i])]
    ids = ids[: ends[0]] if ends else ids
    streamed = IncrementalDetokenizer(tokenizer.decode, [stop])
    shown = []
    for token_id in ids[:-1]:
        streamed.feed([token_id])
        shown.append(streamed.shown)
    matched = stop if ends else None
    final = final_text(streamed, ids[-1:], matched, trim=True)
    at_once = final_text(IncrementalDetokenizer(tokenizer.decode, [stop]), ids, matched, trim=True)
    assert final == at_once
    assert all(final.startswith(part) for part in shown)
    assert (final == tokenizer.decode(ids).partition(stop)[0]) if ends else stop not in final


@pytest.mark.parametrize(
    ("text", "matched", "trim", "expected"),
    [
        ("abcEND", "END", True, "abc"),
        ("abcEND", "END", False, "abcEND"),
        ("ENDabcEND", "END", True, "ENDabc"),  # the first one was passed over by min_new_tokens
        ("abc", None, True, "abc"),
    ],
)
def test_a_matched_stop_string_is_trimmed_if_asked_for(
    tokenizer: Tokenizer, text: str, matched: str | None, trim: bool, expected: str
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer.decode, ["END"])
    assert final_text(detokenizer, ids_of(tokenizer, text), matched, trim=trim) == expected


def test_a_matched_stop_token_gives_no_text(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "abc")
    assert final_text(IncrementalDetokenizer(tokenizer.decode), ids, ids[-1], trim=True) == "ab"
    assert final_text(IncrementalDetokenizer(tokenizer.decode), ids, ids[-1], trim=False) == "abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer ends turns with `<|im_end|>`, which its configurations do not name."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "dense", seed=1)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class CountingTokenizer:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_tokens += len(ids)
        return self._tokenizer.decode(ids, **options)


@pytest.mark.parametrize("text", [b"\x80", b"\xf0\x90\x80", b"\xe4\xb8\xad\xff", "\ufffd".encode()])
def test_engine_21_a_stream_of_broken_characters_decodes_each_token_a_few_times(
    tokenizer_folder: Path, text: bytes
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    ids = ([byte_tokens(tokenizer_folder)[value] for value in text] * 4000)[:4000]
    counting = CountingTokenizer(tokenizer)
    record = SampleRecord(TokenizedGenerateReqInput(rid="r", input_ids=[0], sampling_params=SamplingParams()), 0.0, "v")
    shown = SampleText(record, counting)  # type: ignore[arg-type]
    before = ""
    for token_id in ids:
        record.output_ids.append(token_id)
        now = shown.update()
        assert now.startswith(before)
        before = now
    assert counting.num_tokens < 100 * len(ids)
    assert tokenizer.decode(ids).startswith(before) and len(before) >= len(tokenizer.decode(ids)) - 24


def byte_tokens(folder: Path) -> list[int]:
    """Return the token id of each byte in a byte-level vocabulary.

    Printable bytes stand for themselves; the characters from 256 on stand for the others, in order.
    """
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    others = iter(range(256, 512))
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [vocabulary[chr(byte if byte in printable else next(others))] for byte in range(256)]
