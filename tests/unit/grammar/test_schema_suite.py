"""Grammars of schemas and regular expressions against `jsonschema` and `re`; the whole suite is a command."""

import random
import re

import pytest

from rollout.core.grammar import Grammar
from tests.grammar_drawer import Drawer
from tests.schema_suite import ENDINGS, check

NUMBER = {"type": "number"}
LETTERS = {"type": "string", "pattern": "^a+$"}
GROUPS = [
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", 1, None]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [({"b": "x", "a": 3}, True), ({"a": 2}, False), ({"a": 3, "c": 1}, False), ({"a": 4, "b": None}, True)],
    ),
    (
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 2, "$defs": {"n": NUMBER}},
        [([1.5], True), ([], False), ([1, 2, 3], False), ([1, -2e3], True)],
    ),
    ({"anyOf": [{"type": "boolean"}, LETTERS]}, [(True, True), ("aa", True), ("b", False)]),
    ({"allOf": [{"minLength": 2}, {"type": "string", "maxLength": 3}]}, [("ab", True), ("a", False), ("abcd", False)]),
    ({"prefixItems": [{"const": "x"}], "type": "array", "items": False}, [(["x"], True), (["y"], False)]),
]  # fmt: skip


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer({}, ENDINGS)


def kinds(drawer: Drawer, schema: dict, tests: list) -> set[str]:
    return {kind for kind, _ in check(drawer, schema, [{"data": data, "valid": is_valid} for data, is_valid in tests])}


def test_what_is_drawn_is_valid_and_what_is_valid_is_accepted(drawer: Drawer):
    for schema, tests in GROUPS:
        assert kinds(drawer, schema, tests) <= {"valid accepted", "invalid not accepted", "valid draw"}, schema


def test_the_check_sees_a_wrong_expectation_and_a_refusal(drawer: Drawer):
    schema, [(right, _), *_] = GROUPS[0]
    assert "invalid accepted" in kinds(drawer, schema, [(right, False)])
    assert kinds(drawer, {"type": "no type"}, []) == {"refused schema"}


def test_regular_expressions_accept_what_an_automaton_accepts():
    drawer, generator = Drawer({}, ("a", "b", "c", "/", "aa", "bb", "ab", "cb")), random.Random(5)
    seen = set()
    for _ in range(60):
        pattern = _pattern(generator, 3)
        for _ in range(12):
            text = "".join(generator.choice("ab/c") for _ in range(generator.randrange(6)))
            is_match = re.fullmatch(pattern, text) is not None
            seen.add(is_match)
            assert drawer.accepts(Grammar("regex", pattern), text) == is_match, (pattern, text)
        drawn = drawer.text(Grammar("regex", pattern), 1, 50_000)
        assert re.fullmatch(pattern, drawn), (pattern, drawn)
    assert seen == {False, True}


def _pattern(generator: random.Random, depth: int) -> str:
    """Return a regular expression of letters, classes, alternatives and repetitions, alike in Python and Rust."""
    if depth == 0:
        return generator.choice(["a", "b", "[ab]", "[^a]", "/", "c"])
    parts = [_pattern(generator, depth - 1) for _ in range(2)]
    form = generator.choice(["{0}{1}", "({0}|{1})", "({0})*{1}", "({0}){{1,2}}", "({0})?{1}", "({0})+"])
    return form.format(*parts)
