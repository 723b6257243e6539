"""The check of commit messages accepts good ones, and names the rule that a bad one breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commits import main, problems

BODY = "\n\nThe old way took a second.\n"


@pytest.mark.parametrize("subject", ["Add a flag", "Pass the seed on", "Re-read a file that moved", "Merge branch 'x'"])
def test_good_messages_pass_without_problems(subject: str) -> None:
    assert problems(subject + BODY) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Add " + "x" * 69 + BODY, "73 characters"),
        ("Add a flag; mend another" + BODY, "semicolon"),
        ("Add a flag." + BODY, "period"),
        ("Added a flag" + BODY, "'Added'"),
        ("Adds a flag" + BODY, "'Adds'"),
        ("Adding a flag" + BODY, "'Adding'"),
        ("docs: a flag" + BODY, "'docs'"),
        ("Add a flag", "no body"),
        ("Add a flag\nto the server\n", "second line"),
        ("Add a flag\n\n" + "word " * 17, "over 80"),
        ("# only a comment\n", "empty"),
    ],
)
def test_bad_messages_are_named(message: str, problem: str) -> None:
    (found,) = problems(message)
    assert problem in found


def test_the_hook_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "message").write_text("Added a flag\n\nIt was missing.\n\n# a comment of git\n")
    assert main([str(tmp_path / "message")]) == 1
    assert "imperative" in capsys.readouterr().out


def test_a_path_with_two_dots_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "worktree").mkdir()
    (tmp_path / "message").write_text("Added a flag\n\nIt was missing.\n")
    assert main([str(tmp_path / "worktree" / ".." / "message")]) == 1
    assert "commit message: the subject begins with 'Added'" in capsys.readouterr().out


def test_a_range_is_read_from_git(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["HEAD..HEAD"]) == 0
    assert capsys.readouterr().out == ""
