"""Word problems, the prompt that asks one, and the reward of an answer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

DATA = Path(__file__).resolve().parent / "data"
EXAMPLE = "Question: Tim has 13 hats and gets 6 more. How many hats does Tim have now?\nAnswer: 13 + 6 = 19\n\n"
# A number, or an equation that ends in a number, and a full stop or not.
ANSWER = re.compile(r"(?:[0-9+\-*x/ ]+=)? *(\d+)\.?")


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the data files.  `kind`: add, subtract or multiply, of the numbers `a` and `b`."""

    question: str
    answer: int
    kind: str
    a: int
    b: int

    @property
    def prompt(self) -> str:
        """One worked example, then the question."""
        return f"{EXAMPLE}Question: {self.question}\nAnswer:"

    def reward(self, text: str, *, ended: bool) -> float:
        """Return 1 for a line that ended and consists of an equation or a number with the right result, else 0."""
        found = ANSWER.fullmatch(text.strip())
        return float(ended and found is not None and int(found.group(1)) == self.answer)


def load(name: str) -> list[Problem]:
    """Load `train` or `held_out`."""
    lines = (DATA / f"{name}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Problem) for line in lines]


def shuffled(problems: list[Problem], seed: int) -> Iterator[Problem]:
    """Yield the problems without end, in a new order each time round."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(problems, len(problems))
