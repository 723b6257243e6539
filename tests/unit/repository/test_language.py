"""The language check finds sentences that break its rules, and no others."""

from __future__ import annotations

import pytest

from tests import language


def rules(path: str, source: str) -> list[str]:
    judge = language.python_findings if path.endswith(".py") else language.document_findings
    return [one.rule for one in judge(path, source)]


@pytest.mark.parametrize("first", ["Of a token: nothing.", "What one commit published.", "Whether it is open."])
def test_a_docstring_must_begin_with_a_verb_or_a_name(first: str) -> None:
    assert set(rules("a.py", f'def f():\n    """{first}"""')) == {"first word", "no verb first"}
    assert rules("a.py", f'class C:\n    """{first}"""') == ["first word"]
    assert rules("a.py", f'"""{first}"""') == ["first word"]


@pytest.mark.parametrize("text", ["Return whether it is open.", "The prefix tree of a model.", "`whether` is a flag."])
def test_a_verb_or_a_name_passes(text: str) -> None:
    assert rules("a.py", f'class C:\n    """{text}"""') == []


def test_phrases_are_found_in_docstrings_comments_and_documents() -> None:
    assert rules("a.py", '"""Drop the rows, and those of\nsessions."""') == ["phrase"]
    assert rules("a.py", "x = 1  # a slot that is nobody's") == ["phrase"]
    assert rules("tests/a.py", 'message = "those of a string of a test are not judged"') == []
    assert rules("a.md", "A padding token is for nobody.") == ["phrase"]


def test_long_sentences_are_found_in_prose_and_not_in_code_or_tables() -> None:
    long = " ".join(["word"] * 26) + "."
    short = " ".join(["word"] * 25) + "."
    assert rules("a.md", f"{short} {short}") == []
    assert rules("a.md", f"{short[:-1]}: one word more.") == ["long sentence"]
    assert rules("a.md", f"# Title\n\n{short}\n* {long}\n* {short}\n") == ["long sentence"]
    assert rules("a.md", f"```\n{long}\n```\n\n| {long} |\n\n    {long}\n") == []


@pytest.mark.parametrize("text", ["a header says why", "as it was told", "Rows beside the weights.", "as one said"])
def test_code_does_not_speak_in_docstrings_and_comments(text: str) -> None:
    assert rules("eplb/a.py", f'"""Read {text}"""') == rules("eplb/a.py", f"x = 1  # {text}") == ["phrase"]
    assert rules("tests/a.py", f'"""Read {text}"""') == ["phrase"]


@pytest.mark.parametrize("first", ["The ids", "Rows", "`ids` of a row", "Returns the ids", "[T] int64"])
def test_a_function_s_docstring_begins_with_a_verb(first: str) -> None:
    code = f'def f():\n    """{first} of a row."""\n'
    assert rules("a.py", code) == ["no verb first"]
    assert rules("a.py", code.replace(first, "Return the ids")) == []
    assert rules("a.py", "@property\n" + code) == rules("a.py", "@pytest.fixture\n" + code) == []
    assert rules("tests/a.py", code.replace("def f(", "def test_that_the_ids_are_right(")) == []


@pytest.mark.parametrize(
    "code",
    [
        'raise ValueError("an id that is no integer")',
        'raise ValueError("nobody listens at the address")',
        'raise ValueError(f"the file {path} has no size, its header says {size}")',
        'say("serves what is left")',
        'add("--size", help="whatever the model has")',
        'message = "this is the sum, and that of rank 0 differs"',
        'message = "the map is of 8 layers"',
        'message = "update_info is missing, and so is weight_dir"',
        'return f"{first}, " + f"beside {second}"',
    ],
)
def test_phrases_are_found_in_messages(code: str) -> None:
    assert set(rules("eplb/a.py", code)) == {"phrase"}
    assert rules("tests/a.py", code) == []


@pytest.mark.parametrize(
    "text",
    [
        "token ids must be integers, got 'x'",
        "there is no tokenizer here; give --tokenizer-path",
        "the server is no longer reachable",
        "What is 2 + 3?",
        "(Tensor what, Tensor that of) -> Tensor",
    ],
)
def test_plain_messages_break_no_rule(text: str) -> None:
    assert rules("eplb/a.py", f"message = {text!r}") == []


def test_long_messages_are_found_and_a_placeholder_counts_as_one_word() -> None:
    assert rules("eplb/a.py", f"say({' '.join(['word'] * 21)!r})") == ["long message"]
    assert rules("eplb/a.py", f"say({' '.join(['word'] * 20)!r})") == []
    assert rules("eplb/a.py", f"say({'. '.join(['one word'] * 20)!r})") == []
    joined = 'say("' + "word " * 15 + '"\n    f"{one + two + three + four} ' + "word " * 4 + '")'
    assert rules("eplb/a.py", joined) == []
    assert rules("eplb/a.py", joined.replace("{one", "word {one")) == ["long message"]
    assert rules("eplb/a.py", f'def f():\n    """Return {"word " * 30}."""') == []


@pytest.mark.parametrize(
    "code",
    [
        "MOST_TOKENS = 1",
        "self._most_ids = 1",
        "def f(most_new): ...",
        "def f_most_of(): ...",
        "class A:\n    most_s: int",
    ],
)
def test_a_maximum_is_named_max(code: str) -> None:
    assert rules("tests/a.py", code) == ["name"]
    assert rules("tests/a.py", code.replace("most_", "max_").replace("MOST_", "MAX_")) == []


def test_other_names_with_most_pass() -> None:
    code = "at_most = counter.most_common(2)\ndef test_most_tokens_are_not_searched_for(): ..."
    assert rules("tests/a.py", code) == []


def test_a_short_test_name_is_found() -> None:
    assert rules("tests/a.py", "def test_among_256(): ...") == ["short test name"]
    assert rules("tests/a.py", "def test_a_head_start_is_kept(): ...") == []


def test_each_finding_is_printed_as_its_file_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    def judge(path: str) -> list[language.Finding]:
        printed.append(capsys.readouterr().out)
        return [language.Finding(path, 3, "phrase", "those of a page")] if path == "docs/a.md" else []

    monkeypatch.setattr(language, "findings", judge)
    assert language.main(["docs/a.md", "docs/b.md"]) == 1
    assert printed == ["", "docs/a.md:3: phrase: those of a page\n"]
    assert language.main(["docs/b.md"]) == 0
