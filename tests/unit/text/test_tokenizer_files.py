"""Tokenizers as published: their files decide ids and text, and neither transformers nor a checkpoint's code does.

CI runs this file under the oldest and the newest transformers that pyproject.toml allows.
"""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from rollout.core.errors import StartupError
from rollout.text.tokenizer import Tokenizer
from rollout.text.tokenizer_files import read_tokenizer
from tests.byte_level_files import (
    CORPUS,
    QWEN2_PATTERN,
    SPECIAL,
    ranks_of,
    token,
    trained,
    write_config,
    write_moonshot,
    write_tokenizer_json,
)

TEXTS = [CORPUS[:200], "Hello world", "  two  spaces\n\n", "a<|end|>b", "1234567", "don't DON'T", "漢字and北京", ""]
UNICODE = [chr(code) for code in range(0, 0x110000, 97) if not 0xD800 <= code < 0xE000]
CONTEXT = [f"a{character}B{character}{character}漢{character}1\n" for character in UNICODE]
CLASSES = [
    *("LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"),
    *("GemmaTokenizerFast", "CohereTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchTokenizer"),
]
PLANTED = "import pathlib\npathlib.Path({mark!r}).write_text('ran')\nclass TikTokenTokenizer: pass\n"


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer._encode(texts, False)


# --- B4: tokenizer.json decides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "deepseek_v3"])
@pytest.mark.parametrize("name", CLASSES)
def test_the_class_that_a_configuration_names_changes_no_id_b4(
    tmp_path: Path, name: str, model_type: str | None
) -> None:
    """B4: prompts lost their spaces where transformers rebuilt the tokenizer of the named class."""
    reference = write_tokenizer_json(tmp_path, tokenizer_class=name)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer.load(tmp_path)
    for text in [*TEXTS, *CONTEXT[::50]]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ids_of(tokenizer, [text]) == [ids]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.eos_token_id == reference.token_to_id("<|end|>")


def test_the_configuration_of_deepseek_gives_spaces_back_b4(tmp_path: Path) -> None:
    """B4: as DeepSeek-V3's, where roles are of the old form and no token is declared."""
    old_form = {"__type": "AddedToken", "normalized": True, "lstrip": False, "rstrip": False, "single_word": False}
    reference = write_tokenizer_json(tmp_path, tokenizer_class="LlamaTokenizerFast", add_bos_token=True, legacy=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"bos_token": old_form | {"content": SPECIAL[0]}, "eos_token": old_form | {"content": SPECIAL[1]}}
    write_config(tmp_path, **config)
    files = read_tokenizer(tmp_path)
    assert files.backend.encode("Hello world").ids == reference.encode("Hello world").ids
    assert files.backend.to_str() == reference.to_str()
    assert files.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_a_tokenizer_is_loaded_and_used_without_transformers(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    script = (
        "import asyncio, sys\n"
        "from rollout.text.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.load({str(tmp_path)!r})\n"
        "chat = tokenizer.render_chat([{'role': 'user', 'content': 'Hi'}], tools=None, continue_final=False,\n"
        "                             add_generation_prompt=True, extra={})\n"
        "assert tokenizer.decode(asyncio.run(chat))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('transformers', 'torch')])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == "[]"


def test_a_file_that_truncates_or_pads_does_neither_here(tmp_path: Path) -> None:
    tokenizer = write_tokenizer_json(tmp_path)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = ids_of(Tokenizer.load(tmp_path), ["Hello world, hello World!", "a"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert ids == [tokenizer.encode(text).ids for text in ("Hello world, hello World!", "a")]


def test_a_file_with_a_first_token_puts_it_before_a_prompt_and_not_before_a_chat(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = write_tokenizer_json(tmp_path)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded._encode(["Hi"], True)[0][0] == begin
    assert begin not in loaded._encode(["Hi"], False)[0]


def test_the_oldest_environment_has_the_lowest_versions_that_are_allowed() -> None:
    root = Path(__file__).resolve().parents[3]
    allowed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["engine"]
    pinned = dict(re.findall(r"^(\w+)==(\S+)$", (root / "tests/oldest/requirements.txt").read_text(), re.MULTILINE))
    for name in ("transformers", "tokenizers"):
        (lowest,) = (text.partition(">=")[2].partition(",")[0] for text in allowed if text.startswith(f"{name}>="))
        assert pinned[name] == f"{lowest}.0"


# --- tokens outside of the vocabulary --------------------------------------------------------------------------------


def test_a_declaration_makes_a_token_special_and_adds_it_where_it_is_missing(tmp_path: Path) -> None:
    tokenizer = trained(QWEN2_PATTERN)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<call>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tool, call, size = tokenizer.token_to_id("<tool>"), tokenizer.token_to_id("<call>"), tokenizer.get_vocab_size()
    write_config(tmp_path, added_tokens_decoder={str(tool): token("<tool>"), str(size): token("<new>", special=False)})
    loaded = Tokenizer.load(tmp_path)
    assert ids_of(loaded, ["a<new>"])[0][-1] == size
    assert loaded.decode([tool, call, size]) == "<call><new>"


def test_a_role_makes_a_token_special_and_adds_it_where_it_is_missing(tmp_path: Path) -> None:
    tokenizer = trained(QWEN2_PATTERN)
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, eos_token="</s>", image_token="<image>", extra_special_tokens=["<x>"], unk_token=None)
    loaded = Tokenizer.load(tmp_path)
    end, size = tokenizer.token_to_id("</s>"), tokenizer.get_vocab_size()
    assert loaded.eos_token_id == end
    assert ids_of(loaded, ["<image><x>"]) == [[size, size + 1]]
    assert loaded.decode([end, size, size + 1]) == ""


@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_map_is_read_where_the_configuration_declares_none(tmp_path: Path, name: str) -> None:
    reference = write_tokenizer_json(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|user|>", "normalized": False}, name: ["<|more|>"]})
    )
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token_id == reference.token_to_id("<|user|>")
    assert ids_of(loaded, ["<|more|>"]) == [[reference.get_vocab_size()]]
    user = reference.token_to_id("<|user|>")
    write_config(tmp_path, eos_token="<|end|>", added_tokens_decoder={str(user): token("<|user|>")})
    assert Tokenizer.load(tmp_path).eos_token_id == reference.token_to_id("<|end|>")


def test_an_id_that_the_vocabulary_contradicts_is_refused(tmp_path: Path) -> None:
    reference = write_tokenizer_json(tmp_path)
    wrong = reference.get_vocab_size() + 7
    write_config(tmp_path, added_tokens_decoder={str(wrong): token("<|late|>")})
    refused(tmp_path, f"'<|late|>' the id {wrong}, but the vocabulary gives {wrong - 7}")


# --- B6: Moonshot's files --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moonshot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("moonshot")
    reference = write_moonshot(folder)
    return Tokenizer.load(folder), reference


def test_moonshots_ranks_give_the_ids_and_text_of_tiktoken_b6(moonshot: tuple[Tokenizer, Any]) -> None:
    """B6: Kimi-K2 and Moonlight have no tokenizer.json, and a class in Python that is not run."""
    tokenizer, reference = moonshot
    texts = [*TEXTS, *UNICODE, *CONTEXT, "aaaaaaa  \t \r\n\n x", "世界世世世界世界——I'm ChatGPT. CAN'T wait 'til 2026"]
    for text, ids in zip(texts, ids_of(tokenizer, texts), strict=True):
        assert ids == reference.encode(text, allowed_special="all")
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_moonshots_special_tokens_have_their_ids_b6(moonshot: tuple[Tokenizer, Any]) -> None:
    tokenizer, reference = moonshot
    names = sorted(reference.special_tokens_set)
    assert len(names) == 256 and "[PAD]" in names and "<|tool_call_begin|>" in names
    assert ids_of(tokenizer, names) == [[reference.encode_single_token(name)] for name in names]
    assert tokenizer.eos_token_id == reference.encode_single_token("[EOS]")
    text = "[BOS]hi<|tool_call_begin|><|im_end|>"
    assert tokenizer.decode(ids_of(tokenizer, [text])[0]) == "hi<|tool_call_begin|>"


@pytest.mark.parametrize("auto_map", [["tokenization_moonshot.TikTokenTokenizer", None], None])
def test_the_class_is_known_by_either_of_its_names_b6(tmp_path: Path, auto_map: list[Any] | None) -> None:
    name = "TikTokenTokenizer" if auto_map is None else None
    reference = write_moonshot(tmp_path, auto_map={"AutoTokenizer": auto_map}, tokenizer_class=name)
    assert ids_of(Tokenizer.load(tmp_path), ["Hello world"]) == [reference.encode("Hello world")]


def plant(folder: Path, name: str, mark: Path) -> None:
    """Write Python code next to the tokenizer that leaves a mark when it runs."""
    (folder / f"{name}.py").write_text(PLANTED.format(mark=str(mark)))


@pytest.mark.parametrize("kind", ["moonshot", "tokenizer.json"])
def test_no_code_of_a_checkpoint_runs_and_nobody_is_asked_b6(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: on the main thread transformers asked whether to run the code, and a "y" ran it."""
    folder, mark = tmp_path / "model", tmp_path / "mark"
    asked: list[Any] = []
    monkeypatch.setattr(builtins, "input", lambda *prompt: asked.append(prompt) or "y")
    if kind == "moonshot":
        write_moonshot(folder)
    else:
        auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", "tokenization_kimi.TikTokenTokenizer"]}
        write_tokenizer_json(folder, tokenizer_class="TikTokenTokenizer", auto_map=auto_map)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_kimi.KimiConfig"}})
    )
    for name in ("tokenization_kimi", "configuration_kimi", "sitecustomize"):
        plant(folder, name, mark)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(ids_of(tokenizer, ["Hello world"])[0]) == "Hello world"
    assert not asked and not mark.exists()


def test_a_process_with_a_console_is_not_asked_b6(tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    write_moonshot(folder)
    plant(folder, "tokenization_kimi", mark)
    script = f"from rollout.text.tokenizer import Tokenizer\nTokenizer.load({str(folder)!r})\n"
    run = subprocess.run(
        [sys.executable, "-c", script + "import sys\nprint(repr(sys.stdin.read()))"],
        input="y\ny\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.strip() == repr("y\ny\n"), "nobody read the console"
    assert not mark.exists()


def test_an_id_far_behind_the_ranks_is_refused_before_memory_is_spent(tmp_path: Path) -> None:
    write_moonshot(tmp_path, added_tokens_decoder={str(10**12): token("<|far|>")})
    refused(tmp_path, "a token the id 1000000000000, which is far beyond")


@pytest.mark.parametrize(
    "content", [b"!!! 0\n", b"YQ== zero\n", b"YQ== 0\nYg== 2\n", b"YQ== 0\n", b"YQ==\n", b"\xff\xfe\x00"]
)
def test_a_broken_file_of_ranks_is_one_line(tmp_path: Path, content: bytes) -> None:
    write_moonshot(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(content)
    refused(tmp_path, "tiktoken.model")


# --- other files -----------------------------------------------------------------------------------------------------


def test_qwens_vocabulary_and_merges_are_read_without_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = trained(QWEN2_PATTERN)
    tokenizer.model.save(str(tmp_path))
    size = tokenizer.get_vocab_size()
    write_config(tmp_path, tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", bos_token=None)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": size, "<|im_end|>": size + 1}))
    loaded = Tokenizer.load(tmp_path)
    composed = "e\u0301 Zu\u0308rich"  # this class composes characters
    for text in [*TEXTS, *CONTEXT[::9]]:
        assert ids_of(loaded, [text]) == [tokenizer.encode(loaded.backend.normalizer.normalize_str(text)).ids]
    assert loaded.decode(ids_of(loaded, [composed])[0]) == "é Zürich"
    assert ids_of(loaded, ["<|im_start|><|im_end|>"]) == [[size, size + 1]] and loaded.eos_token_id == size + 1
    assert ranks_of(tokenizer)[b"a"] == ids_of(loaded, ["a"])[0][0]


def refused(folder: Path, words: str) -> None:
    """Check that loading `folder` fails in one line that holds `words` and names a remedy."""
    with pytest.raises(StartupError, match=re.escape(words) or None) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value) and "--skip-tokenizer-init" in str(caught.value)


@pytest.mark.parametrize(
    ("files", "config", "words"),
    [
        ([], {}, "it has no tokenizer.json"),
        (["tokenizer.model"], {"tokenizer_class": "LlamaTokenizer"}, "tokenizer.model of the class LlamaTokenizer"),
        (["tiktoken.model"], {"tokenizer_class": "OtherTokenizer"}, "tiktoken.model of the class OtherTokenizer"),
        (["vocab.json", "merges.txt"], {"tokenizer_class": "GPT2Tokenizer"}, "vocab.json of the class GPT2Tokenizer"),
        (["vocab.json", "merges.txt"], {}, "vocab.json of the class unknown"),
        (["vocab.json", "merges.txt"], {"tokenizer_class": "Qwen2Tokenizer"}, "cannot be read"),
        (["tokenizer.json"], {}, "tokenizer.json cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_read_rightly_is_refused(
    tmp_path: Path, files: list[str], config: dict[str, Any], words: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("[]")
    write_config(tmp_path, **config)
    refused(tmp_path, words)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "not json"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 5}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}'),
        ("tokenizer_config.json", '{"eos_token": {"no": "content"}}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("special_tokens_map.json", "{"),
        ("added_tokens.json", '{"a": "b"}'),
        ("chat_template.json", "\x00"),
    ],
)
def test_a_broken_file_beside_the_vocabulary_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / name).write_text(content)
    refused(tmp_path, name if name != "tokenizer_config.json" else "")
