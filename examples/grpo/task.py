"""The tasks.  An answer is right or wrong.

    sums       012+345=      0357            two numbers of three digits, digit by digit
    running    314159265=    348397181       the running sums of the digits modulo ten: a longer answer

A problem is held out by its hash, whatever the seed of the run: no such problem is ever trained on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

HELD_OUT_SHARE = 16  # one problem in this many


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.question.encode()) % HELD_OUT_SHARE == 0

    def reward(self, text: str) -> float:
        """Return 1 for the right answer, else 0."""
        return float(text.strip() == self.answer)


@dataclass(frozen=True)
class Task:
    """`digits`: of each number of `sums`, of the sequence of `running`."""

    kind: Literal["sums", "running"]
    digits: int

    @property
    def max_new_tokens(self) -> int:
        """The tokens of an answer, its end, and one to spare."""
        return self.digits + (3 if self.kind == "sums" else 2)

    def problems(self, seed: int, *, held_out: bool) -> Iterator[Problem]:
        """Yield problems of one of the two kinds without end.  The same seed gives the same problems."""
        generator, end = random.Random(seed), 10**self.digits
        while True:
            if self.kind == "sums":
                problem = sum_of(generator.randrange(end), generator.randrange(end), self.digits)
            else:
                problem = running_sums(f"{generator.randrange(end):0{self.digits}d}")
            if problem.is_held_out is held_out:
                yield problem


def sum_of(a: int, b: int, digits: int = 3) -> Problem:
    """Return the problem of adding two numbers, with zeros in front."""
    return Problem(f"{a:0{digits}d}+{b:0{digits}d}=", f"{a + b:0{digits + 1}d}")


def running_sums(digits: str) -> Problem:
    """Return the problem of the running sums of the digits modulo ten."""
    return Problem(f"{digits}=", "".join(str(total % 10) for total in accumulate(map(int, digits))))
