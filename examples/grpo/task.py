"""The task: sums of two numbers of three digits, spelled digit by digit.  An answer is right or wrong.

A problem is held out by its hash, whatever the seed of the run: no such problem is ever trained on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

DIGITS = 3
HELD_OUT_SHARE = 16  # one problem in this many


@dataclass(frozen=True)
class Problem:
    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a:0{DIGITS}d}+{self.b:0{DIGITS}d}="

    @property
    def answer(self) -> str:
        return f"{self.a + self.b:0{DIGITS + 1}d}"

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.question.encode()) % HELD_OUT_SHARE == 0

    def reward(self, text: str) -> float:
        """Return 1 for the right answer, else 0."""
        return float(text.strip() == self.answer)


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Yield problems of one of the two kinds without end.  The same seed gives the same problems."""
    generator, end = random.Random(seed), 10**DIGITS
    while True:
        problem = Problem(generator.randrange(end), generator.randrange(end))
        if problem.is_held_out is held_out:
            yield problem
