"""Schemas that the library alone would hold to only nearly: rewritten, or refused."""

from __future__ import annotations

import itertools
import json
import operator
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from rollout.core.errors import BadRequest
from rollout.core.grammar import Grammar
from rollout.grammar import embedded_schemas, source
from rollout.grammar.embedded_schemas import exact_grammar
from rollout.grammar.schema import exact_schema
from tests.grammar_drawer import Drawer

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = A | {"additionalProperties": False}
CONTROL = "\x01"


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer({"<t>": False, "</t>": False}, ())


def of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


NAMED_TWICE = [
    (A, r'{"\u0061":"x"}'),
    (A, r'{"a":1,"\u0061":"x"}'),
    ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
    ({"$defs": {"o": A}, "items": {"$ref": "#/$defs/o"}}, r'[{"\u0061":"x"}]'),
    ({"required": ["a"], "minProperties": 2}, r'{"a":1,"\u0061":1}'),
    (CLOSED | {"properties": {"\n": {"type": "integer"}}, "patternProperties": {r"\s": True}}, r'{"\u000a":"x"}'),
]


@pytest.mark.parametrize(("schema", "text"), NAMED_TWICE)
def test_a_key_cannot_pass_for_another_one_by_escapes(
    drawer: Drawer, schema: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not drawer.accepts(of(schema), text)
    monkeypatch.setattr(source, "exact_schema", lambda schema: schema)
    again = Drawer({}, ())
    assert again.accepts(of(schema), text), "the library alone, which takes it: the wrong variant"


def test_escapes_stay_where_they_confuse_no_keys(drawer: Drawer) -> None:
    closed = CLOSED | {"properties": {"a": {"type": "string"}}}
    for schema in (closed, {"minProperties": 1}, {"items": {"type": "string"}}, {"required": ["a"]}):
        value = [CONTROL] if "items" in schema else {"a": CONTROL}
        assert drawer.spelling(of(schema), value), schema
    opened = {"properties": {"a": {"type": "string"}}}
    assert drawer.spelling(of(opened), {"a": CONTROL}) is None, "stated in the documentation"
    assert drawer.spelling(of(opened), {"a": '\t\n\r\b\f"\\/é'})


def test_a_control_character_that_could_not_be_written_is_refused(drawer: Drawer) -> None:
    for text in (CONTROL, "\x7f", "a\\\x1f"):
        schema = {"properties": {"a": {"enum": ["b", text]}}}
        with pytest.raises(BadRequest, match=r"control character.*additionalProperties: false"):
            drawer.check(of(schema))
        assert drawer.spelling(of(schema | {"additionalProperties": False}), {"a": text})
    for text in ("\t", r"\u0001", "\\\t"):
        assert drawer.spelling(of({"properties": {"a": {"const": text}}}), {"a": text}), "it has a short escape"


INEXACT = [
    {"const": 2**53 + 1},
    {"enum": ["a", {"b": [12345678901234567890]}]},
    {"type": "integer", "minimum": 2**53 + 1},
    {"type": "integer", "maximum": 2**64 - 1},
    {"type": "integer", "maximum": 1e30},
    {"type": "number", "maximum": 2**63 - 1},
    {"type": "integer", "minimum": -(2**63)},
    {"type": "integer", "exclusiveMaximum": 9 * 10**18},
    {"exclusiveMaximum": 2**63 - 1, "type": "integer"},
    {"multipleOf": 1e40},
    {"properties": {"a": {"items": {"const": 1e300}}}},
    {"allOf": [{"exclusiveMinimum": float("inf")}, {"exclusiveMaximum": float("nan")}]},
    {"exclusiveMinimum": 0, "allOf": [{"maximum": 10**400}]},
]
EXACT = [
    ({"type": "integer", "maximum": 2**63 - 1}, [2**63 - 1, -(2**63)], [2**63]),
    ({"type": "integer", "exclusiveMaximum": 2**53, "exclusiveMinimum": -(2**53)}, [2**53 - 1], [2**53, -(2**53)]),
    ({"type": "integer", "maximum": 9 * 10**18}, [9 * 10**18], [9 * 10**18 + 1]),
    ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, [2**53 - 1], [2**53]),
    ({"const": 2**53}, [2**53], [2**53 + 2, 2**53 - 1]),
    ({"const": 1e18}, [10**18], [10**18 + 1]),
    ({"enum": [0.1, True, None, 1.5e-7]}, [0.1, 1.5e-7, True], [1, 0.2]),
]


@pytest.mark.parametrize("schema", INEXACT, ids=str)
def test_a_number_that_changes_in_the_library_is_refused(drawer: Drawer, schema: Any) -> None:
    with pytest.raises(BadRequest, match="a number that a mask cannot hold to exactly"):
        drawer.check(of(schema))


@pytest.mark.parametrize(("schema", "right", "wrong"), EXACT)
def test_numbers_that_the_library_keeps_hold(drawer: Drawer, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert drawer.spelling(of(schema), value), value
    for value in wrong:
        assert drawer.spelling(of(schema), value) is None, value


def test_bounds_hold_for_each_number() -> None:
    made, generator, seen = Drawer({}, ()), random.Random(11), Counter[bool]()
    for _ in range(50):
        schema = {"type": generator.choice(["number", "integer"])}
        for key in generator.sample(list(BOUNDS), 2):
            schema[key] = _number(generator) if key != "multipleOf" else generator.choice([0.01, 0.5, 2, 3, 2.5])
        for value in [_number(generator) for _ in range(12)]:
            exact = {key: Decimal(repr(each)) for key, each in schema.items() if key != "type"}
            number = Decimal(repr(value))
            is_valid = all(BOUNDS[key](number, bound) for key, bound in exact.items())
            is_valid &= schema["type"] == "number" or number == int(number)
            try:
                found = made.spelling(of(schema), value) is not None
            except BadRequest as error:
                assert "nsatisfiable" in str(error), (schema, str(error))
                break
            seen[is_valid] += 1
            assert found == is_valid, (schema, value)
    assert min(seen.values()) > 50, seen


BOUNDS: dict[str, Callable[[Decimal, Decimal], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda number, part: number % part == 0,
}


LOST: list[tuple[dict[str, Any], str, list[float]]] = [
    ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", [1e-20, 0.1, 0.5]),
    ({"type": ["number", "null"], "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "1", [1.0000000000000002, 1.25]),
    ({"type": ["integer", "string"], "exclusiveMinimum": 1, "maximum": 2.5}, "1.5", [2]),
    ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1", [-1.5, -1.01]),
    ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0", [-0.5, -1e-20]),
    ({"exclusiveMinimum": 0, "allOf": [{}, {"maximum": 0.5}]}, "0", [0.5, 0.01]),
    ({"maximum": 0.5, "allOf": [{"exclusiveMinimum": 0}, {"minimum": 0.25}]}, "0.2", [0.5, 0.25]),
    ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "1", [1.5, 1.1]),
    ({"minimum": -3, "exclusiveMinimum": 2, "maximum": 2.5}, "2", [2.25]),
    ({"minimum": 2.25, "exclusiveMinimum": 2, "maximum": 2.5}, "2.1", [2.25, 2.5]),
]


@pytest.mark.parametrize(("schema", "outside", "inside"), LOST)
def test_exclusive_bounds_less_than_one_from_the_other_hold(
    drawer: Drawer, schema: dict[str, Any], outside: str, inside: list[float]
) -> None:
    assert not drawer.accepts(of(schema), outside)
    for value in inside:
        assert drawer.spelling(of(schema), value), value


def test_the_library_alone_takes_an_exclusive_bound_in() -> None:
    """The wrong variant."""
    made = Drawer({}, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "exact_schema", lambda schema: schema)
        assert made.accepts(of({"exclusiveMinimum": 0, "maximum": 0.5}), "0")
        assert made.accepts(of({"minimum": -1.5, "exclusiveMaximum": -1}), "-1")


def test_exclusive_bounds_hold_at_both_ends() -> None:
    made, values = Drawer({}, ()), (-1.25, -1, -0.5, 0, 0.25, 0.5, 1, 1.25, 1.5, 2)
    for low, high, is_low, is_high in itertools.product((-1.25, -1, 0, 0.5, 1), (-1, 0, 0.5, 1.25, 2), "ox", "ox"):
        keys = "exclusiveMinimum" if is_low == "x" else "minimum", "exclusiveMaximum" if is_high == "x" else "maximum"
        schema = dict(zip(keys, (low, high), strict=True)) | {"type": "number"}
        try:
            made.check(of(schema))
        except BadRequest:
            assert low >= high, schema
            continue
        for value in values:
            is_valid = (low < value if is_low == "x" else low <= value) and (
                value < high if is_high == "x" else value <= high
            )
            assert (made.spelling(of(schema), value) is not None) == is_valid, (schema, value)


def _number(generator: random.Random) -> int | float:
    whole = generator.choice([0, 1, -1, generator.randrange(-200, 200), generator.randrange(-(10**6), 10**6)])
    return whole if generator.random() < 0.4 else round(whole / generator.choice([4, 10, 100]), 3)


def test_the_library_alone_changes_a_number() -> None:
    """The wrong variant: without the check a mask asks for another number than the schema."""
    made = Drawer({}, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "exact_schema", lambda schema: schema)
        assert made.spelling(of({"const": 2**53 + 1}), 2**53 + 1) is None
        assert made.spelling(of({"const": 2**53 + 1}), 2**53)
        assert made.spelling(of({"type": "integer", "exclusiveMaximum": 9 * 10**18}), 9 * 10**18)


def test_keys_that_nothing_keeps_apart_are_not_counted(drawer: Drawer) -> None:
    for schema in ({"minProperties": 2}, {"minProperties": 3, "required": ["a"]}, {"items": {"minProperties": 2.0}}):
        with pytest.raises(BadRequest, match="minProperties asks for two keys or more"):
            drawer.check(of(schema))
    for schema in ({"minProperties": 1}, {"minProperties": 2, "required": ["a"]}):
        assert drawer.spelling(of(schema), {"a": 1, "b": 2})
    assert not drawer.accepts(of({"minProperties": 2, "required": ["a"]}), '{"a":1,"a":2}')


def test_options_of_the_library_are_refused_and_keys_of_their_name_are_not(drawer: Drawer) -> None:
    for schema in ({"x-guidance": {"lenient": True}}, {"items": {"x-guidance": {}}}):
        with pytest.raises(BadRequest, match="x-guidance is not taken"):
            drawer.check(of(schema | {"uniqueItems": True}))
    assert drawer.spelling(of({"properties": {"x-guidance": {"type": "integer"}}}), {"x-guidance": 1})


OPEN = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
SPELLINGS = [
    (OPEN, '{"a":"","b":1,"c":2}', '{"b":1,"a":""}'),
    (OPEN, '{"a" : "" ,\n\t"b":\r1}', ' {"a":""}'),
    ({"type": "array"}, "[ 1 , 2 ]", "[1] "),
    ({"type": "integer"}, "100", "1e2"),
    ({"type": "integer"}, "-0", "1.0"),
    ({"type": "number"}, "1.0", "01"),
    ({"type": "number"}, "-1e2", "+1"),
    ({"type": "number", "minimum": -1}, "1.0", "1e2"),
    ({"type": "number", "multipleOf": 0.5}, "100.5", "1e2"),
    ({"enum": [1.5, 2.0]}, "1.5", "1.50"),
    ({"enum": [1.5, 2.0]}, "2", "2.0"),
    ({"type": "string"}, '"é😀/\u2028"', r'"\/"'),
    ({"type": "string"}, r'"\"\\\n\r\t\b\f\u0001\u007f"', r'"\u0041"'),
    ({"type": "string"}, r'"\u000a"', r'"\ud83d\ude00"'),
    ({"type": "string"}, r'"\u001F"', r'"\ud800"'),
    ({"type": "string"}, '"a"', '"\n"'),
    (OPEN, r'{"a":"\n","\"":1}', r'{"a":"\u0001"}'),
    (OPEN, '{"c":1,"c":2}', '{"a":"","a":""}'),
    ({"maxProperties": 1}, '{"c":1}', '{"c":1,"c":2}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), SPELLINGS)
def test_the_table_of_spellings_is_right(drawer: Drawer, schema: Any, right: str, wrong: str) -> None:
    assert drawer.accepts(of(schema), right)
    assert not drawer.accepts(of(schema), wrong)


def test_a_format_is_a_pattern_only_where_it_is_a_format() -> None:
    data = {"format": "date"}
    schema = {"properties": {"format": {"type": "string"}}, "const": data, "default": data, "examples": [data]}
    assert exact_schema(schema) | {"x-guidance": None} == schema | {"x-guidance": None}
    unknown = {"format": "color", "items": {"format": 3}}
    assert exact_schema(unknown) == unknown, "the library refuses it by name"
    for inner in ({"format": "date"}, {"format": "date", "pattern": "^2"}, {"format": "date", "allOf": [{}]}):
        written = exact_schema({"$defs": {"d": inner}})["$defs"]["d"]
        assert "format" not in written and "02-29" in json.dumps(written)
        assert [*written.get("allOf", [])][: len(inner.get("allOf", []))] == inner.get("allOf", [])


def test_a_format_goes_with_patterns_lengths_and_choices(drawer: Drawer) -> None:
    date = {"type": "string", "format": "date"}
    for schema, right, wrong in (
        (date | {"pattern": "^2"}, "2020-02-29", "1020-02-28"),
        (date | {"pattern": "^2", "allOf": [{"pattern": "1$"}]}, "2020-02-01", "2020-02-02"),
        (date | {"enum": ["2021-02-28", "2021-02-29"]}, "2021-02-28", "2021-02-29"),
        ({"$defs": {"d": date}, "allOf": [{"$ref": "#/$defs/d"}, {"pattern": "^2"}]}, "2020-02-29", "2021-02-29"),
        ({"format": "date"}, 5, "5"),
    ):
        assert drawer.spelling(of(schema), right) and drawer.spelling(of(schema), wrong) is None


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: Any = {}
    for _ in range(70):
        schema = {"items": schema}
    with pytest.raises(BadRequest, match="nested more than 64 deep"):
        exact_schema(schema)
    data: Any = 1
    for _ in range(70):
        data = [data]
    with pytest.raises(BadRequest, match="nested more than 64 deep"):
        exact_schema({"const": data})


def test_schemas_in_a_grammar_of_lark_are_exact_too(drawer: Drawer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("ebnf", f'start: "%json " %json {json.dumps(A)} /%json [\\/]/ // %json {{"minProperties": 5}}\n')
    right, wrong = '%json {"a":1}%json /', r'%json {"\u0061":"x"}%json /'
    assert drawer.accepts(grammar, right) and not drawer.accepts(grammar, wrong)
    with pytest.raises(BadRequest, match="minProperties"):
        drawer.check(Grammar("ebnf", 'start: %json {"minProperties": 5}'))
    monkeypatch.setattr(embedded_schemas, "exact_schema", lambda schema: schema)
    assert Drawer({}, ()).accepts(grammar, wrong), "the library alone: the wrong variant"


def test_what_is_no_schema_in_lark_stays() -> None:
    for lark in (
        'start: "%json {" /%json {/',
        'start: %json {"type" : ',
        "start: %json\n",
        '# %json {"minProperties": 5}',
        '"' + '\\"' * 10_000,  # a search that begins again behind each quote takes the square of it
        "%json {" * 9000,
    ):
        assert exact_grammar(lark) == lark


def test_schemas_of_tags_are_exact_too(drawer: Drawer) -> None:
    tag = {"structures": [{"begin": "<t>", "schema": A, "end": "</t>"}], "triggers": ["<t>"]}
    grammar = Grammar("structural_tag", json.dumps(tag))
    assert drawer.accepts(grammar, '<t>{"a":1}</t>') and not drawer.accepts(grammar, r'<t>{"\u0061":"x"}</t>')
    tag["structures"][0]["schema"] = {"minProperties": 5}
    with pytest.raises(BadRequest, match="minProperties"):
        drawer.check(Grammar("structural_tag", json.dumps(tag)))
