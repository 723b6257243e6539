"""The task: `a*b+c`, too hard for the model alone, and a calculator that does one operation a call.

A problem is held out by its hash, whatever the seed of the run: no such problem is ever trained on.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HELD_OUT_SHARE = 16  # one problem in this many
OPERATION = re.compile(r"([0-9]{1,9})([+*])([0-9]{1,9})")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Add or multiply two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


@dataclass(frozen=True)
class Problem:
    a: int
    b: int
    c: int

    @property
    def question(self) -> str:
        return f"{self.a}*{self.b}+{self.c}"

    @property
    def answer(self) -> str:
        return str(self.a * self.b + self.c)

    @property
    def calls(self) -> list[str]:
        """The expressions that lead to the answer, one a call."""
        return [f"{self.a}*{self.b}", f"{self.a * self.b}+{self.c}"]

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.question.encode()) % HELD_OUT_SHARE == 0

    def reward(self, text: str | None) -> float:
        """Return 1 for the right answer, else 0."""
        return float(text is not None and text.strip() == self.answer)


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Yield problems of one of the two kinds without end.  The same seed gives the same problems."""
    generator = random.Random(seed)
    while True:
        problem = Problem(generator.randrange(10, 100), generator.randrange(10, 100), generator.randrange(10, 100))
        if problem.is_held_out is held_out:
            yield problem


def calculate(expression: str) -> str:
    """Return the result of one operation, or `error` for any other text.  Nothing is evaluated."""
    found = OPERATION.fullmatch(expression)
    if found is None:
        return "error"
    left, operator, right = int(found[1]), found[2], int(found[3])
    return str(left + right if operator == "+" else left * right)


def use_tool(name: str, arguments: str) -> str:
    """Return the answer to a tool call as a message of OpenAI has it: `arguments` is JSON, and may be any."""
    try:
        fields = json.loads(arguments)
    except ValueError:
        return "error"
    expression = fields.get("expression") if isinstance(fields, dict) else None
    return calculate(expression) if name == "calculator" and isinstance(expression, str) else "error"
