"""The language check finds sentences that break its rules, and no others."""

from __future__ import annotations

import pytest

from tests import language


def rules(path: str, source: str) -> list[str]:
    judge = language.python_findings if path.endswith(".py") else language.document_findings
    return [one.rule for one in judge(path, source)]


@pytest.mark.parametrize("first", ["Of a token: nothing.", "What one commit published.", "Whether it is open."])
def test_a_docstring_must_begin_with_a_verb_or_a_name(first: str) -> None:
    assert rules("a.py", f'def f():\n    """{first}"""') == ["first word"]
    assert rules("a.py", f'class C:\n    """{first}"""') == ["first word"]
    assert rules("a.py", f'"""{first}"""') == ["first word"]


@pytest.mark.parametrize("text", ["Return whether it is open.", "The prefix tree of a model.", "`whether` is a flag."])
def test_a_verb_or_a_name_passes(text: str) -> None:
    assert rules("a.py", f'def f():\n    """{text}"""') == []


def test_phrases_are_found_in_docstrings_comments_and_documents() -> None:
    assert rules("a.py", '"""Drop the rows, and those of\nsessions."""') == ["phrase"]
    assert rules("a.py", "x = 1  # a slot that is nobody's") == ["phrase"]
    assert rules("a.py", 'message = "those of a string of the code are not judged"') == []
    assert rules("a.md", "A padding token is for nobody.") == ["phrase"]


def test_long_sentences_are_found_in_prose_and_not_in_code_or_tables() -> None:
    long = " ".join(["word"] * 26) + "."
    short = " ".join(["word"] * 25) + "."
    assert rules("a.md", f"{short} {short}") == []
    assert rules("a.md", f"# Title\n\n{short}\n* {long}\n* {short}\n") == ["long sentence"]
    assert rules("a.md", f"```\n{long}\n```\n\n| {long} |\n\n    {long}\n") == []


def test_exceptions_may_only_fall(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = language.Finding("docs/a.md", 3, "phrase", "those of a page")
    monkeypatch.setattr(language, "findings", lambda paths: [one])
    for granted, status in ((0, 1), (1, 0), (2, 1)):
        monkeypatch.setattr(language, "ALLOWED", {("phrase", "docs"): granted})
        assert language.main([]) == status
        assert ("docs/a.md:3: phrase" in capsys.readouterr().out) == bool(status)
