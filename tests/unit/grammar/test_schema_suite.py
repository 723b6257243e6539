"""Grammars of schemas and regular expressions against `jsonschema` and `re`; the whole suite is a command."""

import json
import random
import re
from collections import Counter

import pytest

from rollout.core.grammar import Grammar
from rollout.grammar import schema
from tests.grammar_drawer import Drawer
from tests.schema_suite import ENDINGS, Group, check, drawn, judged

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


def kinds(drawer: Drawer, form: dict, tests: list) -> set[str]:
    documents = [{"description": "", "data": data, "valid": is_valid} for data, is_valid in tests]
    return {kind for kind, _ in check(drawer, [Group("", "", form, documents)])}


def test_what_is_drawn_is_valid_and_what_is_valid_is_accepted(drawer: Drawer):
    for form, tests in GROUPS:
        assert kinds(drawer, form, tests) <= {"valid accepted", "invalid not accepted", "valid draw"}, form


def test_the_check_sees_a_wrong_expectation_and_a_refusal(drawer: Drawer):
    form, [(right, _), *_] = GROUPS[0]
    assert "invalid accepted" in kinds(drawer, form, [(right, False)])
    assert kinds(drawer, {"type": "no type"}, []) == {"refused schema"}


LEAP = "a leap second is taken in UTC alone, as a pattern of all offsets takes 120 ms to compile"
SPACE = r"\s is that of Unicode in the library, and has no U+FEFF"
UNLIKE = {
    ("valid not accepted", "date-time: validation of date-time strings: a valid date-time with a leap second, "
     "with minus offset"): LEAP,
    ("valid not accepted", "time: validation of time strings: valid leap second, positive time-offset"): LEAP,
    ("valid not accepted", "time: validation of time strings: valid leap second, large positive time-offset"): LEAP,
    ("valid not accepted", "time: validation of time strings: valid leap second, negative time-offset"): LEAP,
    ("valid not accepted", "time: validation of time strings: valid leap second, large negative time-offset"): LEAP,
    ("valid not accepted", r"ecmascript-regex: ECMA 262 \s matches whitespace: zero-width whitespace matches"): SPACE,
    ("invalid accepted", r"ecmascript-regex: ECMA 262 \S matches everything but whitespace: zero-width whitespace "
     "does not match"): SPACE,
}  # fmt: skip
"""Documents of the sample that are judged unlike the suite, with the reason: there are no others."""


def test_each_valid_document_of_the_suite_has_a_text_and_no_invalid_one_has(drawer: Drawer):
    found = [each for group in Group.sampled() for each in judged(drawer, group)]
    assert {each for each in found if each[0] in ("valid not accepted", "invalid accepted")} == UNLIKE.keys()
    assert Counter(kind for kind, _ in found) == {
        "valid accepted": 552,
        "valid not accepted": 6,
        "invalid accepted": 1,
        "invalid not accepted": 434,
    }


def test_what_is_drawn_under_the_schemas_of_the_suite_is_valid(drawer: Drawer):
    found = Counter(kind for group in Group.sampled() for kind, _ in drawn(drawer, group.schema, draws=1))
    assert found["invalid draw"] == 0 and found["valid draw"] > 190, found


def test_the_sample_sees_a_schema_that_is_narrowed_and_one_that_is_loosened(monkeypatch: pytest.MonkeyPatch):
    """Wrong variants: the library's own formats do both."""
    monkeypatch.setattr(schema, "pattern_of", lambda name: None)
    groups = [group for group in Group.sampled() if group.file in ("ipv6", "date")]
    found = {each for group in groups for each in judged(Drawer({}, ()), group)}
    assert ("valid not accepted", "ipv6: validation of IPv6 addresses: mixed format with double colons between the "
            "sections") in found  # fmt: skip
    assert ("invalid accepted", "date: validation of date strings: 2021 is not a leap year") in found


def test_a_value_is_spelled_in_each_way_that_its_type_has(drawer: Drawer):
    numbers, keys = Grammar("json_schema", '{"type": "integer"}'), {"b": 1, "a": {"d": [2.0], "c": 1e3}}
    assert [drawer.spelling(numbers, value) for value in (1.0, -2, 1e3, 1.5)] == ["1", "-2", "1000", None]
    inner = {"properties": {"c": {"const": 1000}, "d": {"items": {"type": "integer"}}}, "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps({"properties": {"a": inner}, "required": ["b"]}))
    assert drawer.spelling(grammar, keys) == '{"a":{"c":1000,"d":[2]},"b":1}'
    assert drawer.spelling(grammar, keys | {"a": {"e": 1}}) is None


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
