"""Answers made by chance, in every format: what is read is what was written, however the text is cut."""

from __future__ import annotations

import json
import random

import pytest

from rollout.http.openai.parsers.answer import AnswerParser
from rollout.http.openai.parsers.reasoning import REASONING_FORMATS
from rollout.http.openai.parsers.tool_calls import TOOL_CALL_READERS
from tests.answer_texts import ANSWERS, MARKERS, SCRAPS, TOOLS, Answer

COUNT = 60
REASONING = {"gpt-oss": "gpt-oss"}
Result = tuple[str, str, list[tuple[str, str]]]


def parse(name: str, pieces: list[str], *, in_thought: bool = False, reasoning: bool = True) -> Result:
    format_ = REASONING_FORMATS[REASONING.get(name, "kimi_k2")] if reasoning else None
    parser = AnswerParser(format_, TOOL_CALL_READERS[name], TOOLS, in_thought=in_thought)
    found = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    calls = [(call.name, call.arguments) for piece in found for call in piece.calls]
    return "".join(piece.reasoning for piece in found), "".join(piece.content for piece in found), calls


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(1, 8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]


def check_cuts(name: str, text: str, rng: random.Random, **options: bool) -> None:
    whole = parse(name, [text], **options)
    assert parse(name, list(text), **options) == whole, text
    assert parse(name, cuts(text, rng), **options) == whole, text


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_written_is_read(name: str) -> None:
    """B3: whatever strings hold, and every call of an answer."""
    rng = random.Random(name)
    for _ in range(COUNT):
        answer: Answer = ANSWERS[name](rng)
        reasoning, content, calls = parse(name, [answer.text])
        read = [(called, json.loads(given)) for called, given in calls]
        assert (reasoning, content, read) == (answer.reasoning, answer.content, answer.calls), answer.text
        check_cuts(name, answer.text, rng)


@pytest.mark.parametrize("name", ANSWERS)
def test_cuts_do_not_matter_in_answers_that_are_broken(name: str) -> None:
    rng = random.Random(name + "broken")
    for _ in range(COUNT):
        text = ANSWERS[name](rng).text
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(0, len(text))
            scrap = rng.choice(MARKERS + SCRAPS)
            text = rng.choice([text[:at], text[:at] + scrap + text[at:], text[:at] + text[at + rng.randint(1, 9) :]])
        for in_thought in (False, True):
            check_cuts(name, text, rng, in_thought=in_thought)
        check_cuts(name, text, rng, reasoning=False)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_cut_off_has_no_other_calls(name: str) -> None:
    """Words in a call that is cut off are not taken for a call."""
    rng = random.Random(name + "cut")
    for _ in range(COUNT):
        text = ANSWERS[name](rng).text
        whole = parse(name, [text])[2]
        cut = parse(name, [text[: rng.randint(0, len(text))]])[2]
        assert cut == whole[: len(cut)], text


@pytest.mark.parametrize("name", ANSWERS)
def test_text_made_of_markers_is_read_the_same_however_it_is_cut(name: str) -> None:
    rng = random.Random(name + "markers")
    for _ in range(COUNT):
        text = "".join(rng.choice(MARKERS if rng.random() < 0.6 else SCRAPS) for _ in range(rng.randint(0, 30)))
        check_cuts(name, text, rng, in_thought=rng.random() < 0.5)


@pytest.mark.full
@pytest.mark.parametrize("name", ANSWERS)
def test_thousands_of_random_answers_are_read_as_written(name: str) -> None:
    for seed in range(3000):
        rng = random.Random(f"{name} {seed}")
        answer = ANSWERS[name](rng)
        reasoning, content, calls = parse(name, [answer.text])
        read = [(called, json.loads(given)) for called, given in calls]
        assert (reasoning, content, read) == (answer.reasoning, answer.content, answer.calls), (seed, answer.text)
        check_cuts(name, answer.text[: rng.randint(0, len(answer.text))], rng)
