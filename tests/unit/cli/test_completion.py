"""The script that completes words, in a real bash."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from rollout.cli import completion
from rollout.cli.main import COMMANDS, main, parser_of


@pytest.fixture(scope="module")
def script() -> str:
    return completion.script({command: parser_of(command) for command in COMMANDS})


def completed(script: str, line: str) -> list[str]:
    """Return the completions of the last word of a line."""
    words = line.split(" ")
    code = f"{script}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _lockstep\n"
    done = subprocess.run(["bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("lockstep ", list(COMMANDS)),
        ("lockstep se", ["serve"]),
        ("lockstep serve --dty", ["--dtype"]),
        ("lockstep serve --dtype b", ["bfloat16"]),
        ("lockstep serve m --tensor", ["--tensor-parallel-size"]),
        ("lockstep serve --no-disable", []),
        ("lockstep demo --si", ["--size"]),
        ("lockstep demo --size ", ["standard", "tiny"]),
        ("lockstep serve README.m", ["README.md"]),
        ("lockstep serve --config pyproject", ["pyproject.toml"]),
    ],
)
def test_words_are_completed_n16(script: str, line: str, words: list[str]) -> None:
    """N16: there was no completion."""
    assert completed(script, line) == words


def test_the_command_prints_the_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    assert capsys.readouterr().out == script
