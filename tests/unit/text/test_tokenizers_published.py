"""Published tokenizers of Qwen3, DeepSeek, Llama 3.1 and gpt-oss: ids, text, chats and streams equal the reference's.

The reference for ids and text is `tokenizers.Tokenizer.from_file`, for chats transformers' rendering.  CI runs the
cases of the gate under the oldest and the newest transformers that pyproject.toml allows.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Iterator

import pytest
import tokenizers
import transformers

from rollout.http.openai.parsers.answer import AnswerParser
from rollout.http.openai.parsers.reasoning import REASONING_FORMATS
from rollout.http.openai.parsers.tool_calls import TOOL_CALL_READERS
from rollout.text.detokenizer import INCOMPLETE, IncrementalDetokenizer
from rollout.text.tokenizer import Tokenizer
from rollout.text.tokenizer_files import read_tokenizer
from tests.answer_texts import ANSWERS, TOOLS
from tests.conversations import conversation
from tests.published_tokenizers import published
from tests.tiers import in_the_gate

GATE = "deepseek_r1"
ALL = [GATE, "deepseek_v3", "qwen3", "llama3_1", "gptoss"]
WITH_TEMPLATE = [name for name in ALL if name != "gptoss"]
HELLO = {  # "Hello world", as each model was trained on it
    "deepseek_r1": [19923, 2058],
    "deepseek_v3": [19923, 2058],
    "qwen3": [9707, 1879],
    "llama3_1": [9906, 1917],
    "gptoss": [13225, 2375],
}
END = {"deepseek_r1": 1, "deepseek_v3": 1, "qwen3": 151645, "llama3_1": 128009, "gptoss": 200002}
PARSER = {
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "qwen3": "hermes",
    "llama3_1": "llama3",
    "gptoss": "gpt-oss",
}
SURROGATES = range(0xD800, 0xE000)
TRANSFORMERS_IS_RIGHT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)


class Published:
    """A tokenizer as the engine loads it, and the reference."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = published(name)
        self.ours = Tokenizer.load(self.folder)
        self.reference = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.step = 64 if in_the_gate() or name == GATE else 1  # of code points; V3's has the same vocabulary

    def check(self, texts: list[str]) -> None:
        """Compare the ids and the text of each of `texts`, and of some with special tokens."""
        ids = self.ours._encode(texts, False)
        expected = self.reference.encode_batch(texts, add_special_tokens=False)
        assert ids == [encoding.ids for encoding in expected]
        assert [self.ours.decode(part) for part in ids] == self.reference.decode_batch(ids)
        begun = [encoding.ids for encoding in self.reference.encode_batch(texts[:16])]
        assert self.ours._encode(texts[:16], True) == begun
        whole = [self.ours.decode(part, skip_special_tokens=False) for part in begun]
        assert whole == self.reference.decode_batch(begun, skip_special_tokens=False)


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Published:
    return Published(request.param)


each = pytest.mark.parametrize("loaded", ALL, indirect=True, scope="module")
each_with_template = pytest.mark.parametrize("loaded", WITH_TEMPLATE, indirect=True, scope="module")
gate_has_one = pytest.mark.full(but=GATE)


def code_points(step: int, size: int) -> Iterator[list[str]]:
    """Yield every `step`-th character of Unicode, in lists of `size`."""
    codes = [code for code in range(0, 0x110000, step) if code not in SURROGATES]
    for start in range(0, len(codes), size):
        yield [chr(code) for code in codes[start : start + size]]


@gate_has_one
@each
def test_a_known_text_has_its_ids_b4(loaded: Published) -> None:
    """B4: `Hello world` of DeepSeek's was 42, 6629, 10030 with transformers 5.3 to 5.15."""
    ids = HELLO[loaded.name]
    assert loaded.ours._encode(["Hello world"], False) == [ids]
    assert loaded.ours.decode(ids) == "Hello world"
    assert loaded.ours.eos_token_id == END[loaded.name]


@gate_has_one
@each
def test_all_of_unicode_alone_and_in_context(loaded: Published) -> None:
    for characters in code_points(loaded.step, 8192):
        loaded.check(characters)
        loaded.check([f"a {one}b{one}{one}\n 1{one}漢e{one}'s" for one in characters])


@gate_has_one
@each
def test_a_stream_of_all_of_unicode_is_the_whole(loaded: Published) -> None:
    """Tokens come one by one; shown text is never taken back, and never ends in half a character."""
    for characters in code_points(loaded.step, 2048):
        text = " ".join(characters)
        ids = loaded.ours._encode([text], False)[0]
        stream, shown, deltas = IncrementalDetokenizer(loaded.ours.decode), 0, []
        for token_id in ids:
            stream.feed([token_id])
            deltas.append(stream.decided[shown:])
            shown += len(deltas[-1])
        whole = loaded.reference.decode(ids)
        assert stream.complete == whole
        assert whole.startswith("".join(deltas)) and len(whole) - shown <= 1
        assert loaded.name == "qwen3" or whole == text  # Qwen's composes characters


@gate_has_one
@pytest.mark.parametrize("skip", [True, False])
@each
def test_a_stream_of_any_tokens_is_the_whole(loaded: Published, skip: bool) -> None:
    """Streams have bytes in any order, special tokens between them, and an end within a character."""
    ours, reference = loaded.ours, loaded.reference
    special, size = sorted(reference.get_added_tokens_decoder()), reference.get_vocab_size()
    pieces = [index for index in range(1000) if INCOMPLETE in reference.decode([index])]
    rng = random.Random(loaded.name)
    for _ in range(100 if in_the_gate() else 3000):
        choices = [rng.randrange(size), rng.choice(special), *rng.choices(pieces, k=6)]
        ids = rng.choices(choices, k=60)
        stream = IncrementalDetokenizer(lambda part: ours.decode(part, skip_special_tokens=skip))
        shown, position = "", 0
        while position < len(ids):
            count = rng.randint(1, 3)
            stream.feed(ids[position : position + count])
            position += count
            assert stream.decided.startswith(shown)
            shown = stream.decided
        assert stream.complete == reference.decode(ids, skip_special_tokens=skip)


@gate_has_one
@pytest.mark.parametrize("form", ["begins", "ends", "continues"])
@each_with_template
def test_a_hundred_conversations_with_tools(loaded: Published, form: str) -> None:
    files = read_tokenizer(loaded.folder)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(loaded.folder / "tokenizer.json"),
        chat_template=files.chat_templates["default"],
        **files.special_tokens,
    )
    begins, continues = form == "begins", form == "continues"
    for seed in range(100):
        messages, tools = conversation(seed, text_arguments=loaded.name.startswith("deepseek"))
        text = theirs.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=begins,
            continue_final_message=continues,
            enable_thinking=seed % 2 == 0,
        )
        chat = loaded.ours.render_chat(
            messages,
            tools=tools,
            continue_final=continues,
            add_generation_prompt=begins,
            extra={"enable_thinking": seed % 2 == 0},
        )
        assert asyncio.run(chat) == loaded.reference.encode(text, add_special_tokens=False).ids


@pytest.mark.full
@each
def test_transformers_own_choice_of_a_class_gives_the_same(loaded: Published) -> None:
    """Earlier versions are no reference: they lose spaces of DeepSeek's."""
    if not TRANSFORMERS_IS_RIGHT:
        return
    theirs = transformers.AutoTokenizer.from_pretrained(loaded.folder, trust_remote_code=False)
    for characters in code_points(7, 4096):
        text = "a".join(characters)
        ids = loaded.ours._encode([text], True)
        assert ids == theirs([text])["input_ids"]
        assert loaded.ours.decode(ids[0]) == theirs.decode(ids[0], skip_special_tokens=True)
    assert loaded.ours.eos_token_id == theirs.eos_token_id


@pytest.mark.mutant
def test_a_split_that_is_a_little_different_is_noticed() -> None:
    wrong = Published(GATE)
    wrong.ours.backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(AssertionError):
        wrong.check([f"a {one}b{one}{one}\n 1{one}" for one in next(code_points(64, 512))])


@gate_has_one
@each
def test_calls_are_read_from_tokens_as_they_come_n27(loaded: Published) -> None:
    """N27: the markers of a format are shown to its parser also where they are special tokens."""
    name = PARSER[loaded.name]
    reasoning = REASONING_FORMATS["gpt-oss" if name == "gpt-oss" else "kimi_k2"]
    kept = loaded.ours.vocabulary.ids_of(TOOL_CALL_READERS[name].markers)
    num_read = 0
    for seed in range(40):
        answer = ANSWERS[name](random.Random(f"{loaded.name} {seed}"))
        stream = IncrementalDetokenizer(functools.partial(loaded.ours.decode, kept_ids=kept))
        parser, shown = AnswerParser(reasoning, TOOL_CALL_READERS[name], TOOLS), 0
        pieces = []
        for token_id in loaded.ours._encode([answer.text], False)[0]:
            stream.feed([token_id])
            pieces.append(parser.feed(stream.decided[shown:]))
            shown = len(stream.decided)
        pieces += [parser.feed(stream.complete[shown:]), parser.finish()]
        if stream.complete != answer.text:
            continue  # other special tokens are skipped, and Qwen's composes characters
        num_read += 1
        assert "".join(piece.content for piece in pieces) == answer.content
        assert "".join(piece.reasoning for piece in pieces) == answer.reasoning
        calls = [(call.name, json.loads(call.arguments)) for piece in pieces for call in piece.calls]
        assert calls == answer.calls, answer.text
    assert num_read > 10


@gate_has_one
@each
def test_bytes_of_tokens_put_together_are_the_text_b2(loaded: Published) -> None:
    """B2: this holds for the bytes of every token of the vocabulary."""
    for characters in code_points(64 if in_the_gate() else 7, 8192):
        text = " ".join(characters)
        ids = loaded.ours._encode([text], False)[0]
        encoded = b"".join(map(loaded.ours.vocabulary.bytes_of, ids))
        assert encoded.decode() == loaded.ours.decode(ids, skip_special_tokens=False)
    assert all(loaded.ours.vocabulary.bytes_of(token_id) for token_id in range(loaded.reference.get_vocab_size()))
