"""The questions of the demo."""

from __future__ import annotations

from importlib.resources import files


def load_questions() -> list[tuple[str, int]]:
    """Load the arithmetic questions that ship with the package, with their answers."""
    text = files("examples.demo").joinpath("questions.txt").read_text(encoding="utf-8")
    pairs = [line.split("\t") for line in text.splitlines() if line]
    return [(question, int(answer)) for question, answer in pairs]
