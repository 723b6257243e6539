"""`python -m examples.real_model.make_problems`: write data/train.jsonl and data/held_out.jsonl anew.

Problems are made from templates and small numbers with a fixed seed, so the files are the same every time.  The
held-out file has templates, names, things and pairs of numbers that the training file does not have.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
SEED = 35
NUM_TRAIN, NUM_HELD_OUT = 480, 160
HELD_OUT_SHARE = 5  # one pair of numbers in this many

TRAIN_NAMES = ("Anna", "Tom", "Mia", "Ben", "Sara", "Leo", "Emma", "Max")
HELD_OUT_NAMES = ("Nora", "Paul", "Lucy", "Sam")
TRAIN_THINGS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "eggs")
HELD_OUT_THINGS = ("marbles", "flowers", "stones", "cookies")

TRAIN_TEMPLATES = {
    "add": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "There are {a} {things} in a box. {name} puts in {b} more. How many {things} are in the box?",
        "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} find?",
        "{name} has {a} red {things} and {b} blue {things}. How many {things} does {name} have?",
        "There are {a} {things} on the table and {b} {things} on the floor. How many {things} are there?",
        "{name} had {a} {things} and bought {b} more. How many {things} does {name} have?",
        "A friend gave {name} {b} {things}. Before that {name} had {a}. How many {things} are there now?",
        "{a} {things} are in the house and {b} {things} are in the garden. How many {things} are there?",
        "{name} counted {a} {things}, and then {b} more. How many {things} did {name} count?",
    ),
    "subtract": (
        "{name} had {a} {things} and gave away {b}. How many {things} are left?",
        "There were {a} {things} in a bag. {name} took out {b}. How many {things} are still in the bag?",
        "{name} had {a} {things} and lost {b} of them. How many {things} does {name} have now?",
        "{name} has {a} {things}. A friend has {b} fewer. How many {things} does the friend have?",
        "A store had {a} {things}. It sold {b} of them. How many {things} are left in the store?",
        "{name} had {a} {things} and broke {b}. How many {things} are still whole?",
        "Of {a} {things} on a table, {b} fell down. How many {things} are still on the table?",
        "{name} took {a} {things} to school and left {b} there. How many {things} came back?",
        "There were {a} {things}. {name} used {b}. How many {things} remain?",
    ),
    "multiply": (
        "There are {a} boxes with {b} {things} each. How many {things} are there in all?",
        "{name} buys {a} bags. Each bag holds {b} {things}. How many {things} did {name} buy?",
        "{name} puts {b} {things} on each of {a} plates. How many {things} is that?",
        "Each of {a} children has {b} {things}. How many {things} do they have together?",
        "A wall has {a} shelves of {b} {things}. How many {things} are on the wall?",
        "{name} makes {a} rows with {b} {things} in each row. How many {things} are in the rows?",
        "{a} friends bring {b} {things} each. How many {things} do they bring?",
        "{name} gets {b} {things} every day for {a} days. How many {things} does {name} get?",
        "One basket holds {b} {things}. How many {things} do {a} baskets hold?",
    ),
}
HELD_OUT_TEMPLATES = {
    "add": (
        "{name} owned {a} {things} and bought {b} more at the market. How many {things} does {name} own?",
        "{a} {things} lie on the chair and {b} {things} lie under it. How many {things} are there?",
        "{name} picked {a} {things} in the morning and {b} in the evening. How many {things} is that together?",
    ),
    "subtract": (
        "{name} carried {a} {things} home and dropped {b} on the way. How many {things} came home?",
        "A shop had {a} {things} and sold {b}. How many {things} does the shop still have?",
        "{name} had {a} {things}. A brother took {b} of them. How many {things} does {name} have left?",
    ),
    "multiply": (
        "{name} fills {a} jars with {b} {things} each. How many {things} are in the jars?",
        "A garden has {a} rows of {b} {things}. How many {things} are in the garden?",
        "Every one of {a} drawers has {b} {things} in it. How many {things} are in the drawers?",
    ),
}


@dataclass(frozen=True)
class Record:
    """A line of the files.  `kind`: add, subtract or multiply."""

    question: str
    answer: int
    kind: str
    a: int
    b: int


def result(kind: str, a: int, b: int) -> int:
    return {"add": a + b, "subtract": a - b, "multiply": a * b}[kind]


def is_held_out(kind: str, a: int, b: int) -> bool:
    """Tell whether the pair of numbers belongs to the held-out file.  The order of the numbers makes no difference."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{kind} {low} {high}".encode()) % HELD_OUT_SHARE == 0


def pairs(kind: str) -> list[tuple[int, int]]:
    """Return the pairs of numbers of a kind of problem."""
    if kind == "add":
        return [(a, b) for a in range(2, 20) for b in range(2, 12)]
    if kind == "subtract":
        return [(a, b) for a in range(4, 24) for b in range(2, 12) if a > b]
    return [(a, b) for a in range(2, 10) for b in range(2, 10)]


def records(*, held_out: bool) -> Iterator[Record]:
    """Yield problems without end, kinds in turn."""
    generator = random.Random(SEED + held_out)
    templates, names, things = (
        (HELD_OUT_TEMPLATES, HELD_OUT_NAMES, HELD_OUT_THINGS)
        if held_out
        else (TRAIN_TEMPLATES, TRAIN_NAMES, TRAIN_THINGS)
    )
    while True:
        for kind, texts in templates.items():
            a, b = generator.choice([pair for pair in pairs(kind) if is_held_out(kind, *pair) is held_out])
            words = {"name": generator.choice(names), "things": generator.choice(things)}
            question = generator.choice(texts).format(a=a, b=b, **words)
            yield Record(question, result(kind, a, b), kind, a, b)


def unique(count: int, *, held_out: bool) -> list[Record]:
    """Return the first `count` problems that differ in their question."""
    found: dict[str, Record] = {}
    for record in records(held_out=held_out):
        found.setdefault(record.question, record)
        if len(found) == count:
            break
    return list(found.values())


def file_text(count: int, *, held_out: bool) -> str:
    return "".join(json.dumps(asdict(record)) + "\n" for record in unique(count, held_out=held_out))


def main() -> None:
    DATA.mkdir(exist_ok=True)
    (DATA / "train.jsonl").write_text(file_text(NUM_TRAIN, held_out=False))
    (DATA / "held_out.jsonl").write_text(file_text(NUM_HELD_OUT, held_out=True))


if __name__ == "__main__":
    main()
