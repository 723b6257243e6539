"""Random schemas against `jsonschema`: a valid value has a text that is accepted, an invalid one has none.

Left out are values that a mask leaves out on purpose (control characters where keys are open), and a line feed at the
end of a text, which `$` in Python lets pass and the standard does not.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from rollout.core.errors import BadRequest
from rollout.core.grammar import Grammar
from rollout.grammar import source
from tests.grammar_drawer import Drawer

KEYS = ("a", "b", "ab", "x\n")
TEXTS = ("", "a", "b", "ab", "aa", "abc", "é", "1", "\n\t")
NUMBERS = (0, 1, 2, 3, -1, 1.5, 2.0, 10, 0.25)
PATTERNS = ("a", "^a", "b$", "^a+$", "^[ab]*$", "a|b", "^(a|b)$", "^.$", r"\d", "^a|b$")
TYPES = (
    "object",
    "object",
    "array",
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    None,
    None,
    ["string", "object"],
)
ENDINGS = ('"', "}", "]", "0", "1", ",", ":", '"a":', '"b":', r'"\u0061":')


class Maker:
    """Makes random schemas, and random values that some of them allow."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        kind = self._random.randrange(9 if depth < 2 else 6)
        if kind == 0:
            return self._random.choice([None, True, False])
        if kind < 6:
            return self._random.choice(NUMBERS if kind < 3 else TEXTS)
        if kind < 8:
            return {key: self.value(depth + 1) for key in self._some(KEYS, 3)}
        return [self.value(depth + 1) for _ in range(self._random.randrange(4))]

    def schema(self, depth: int = 0) -> Any:
        if depth > 2:
            return self._random.choice([True, {"type": "integer"}, {"type": "string"}, {}])
        kind = self._random.choice(TYPES)
        schema: dict[str, Any] = {} if kind is None else {"type": kind}
        kinds = kind if isinstance(kind, list) else ["object", "array", "string", "number"] if kind is None else [kind]
        for each in kinds:
            schema |= {"object": self._object, "array": self._array, "string": self._string}.get(each, _none)(depth)
            schema |= self._number() if each in ("integer", "number") else {}
        if depth < 2 and self._likely(0.25):
            arms = [self.schema(depth + 1) for _ in range(self._random.randrange(1, 3))]
            schema[self._random.choice(["anyOf", "allOf", "oneOf"])] = arms
        if self._likely(0.1):
            schema["enum"] = [self.value() for _ in range(self._random.randrange(1, 4))]
        return schema

    def referred(self) -> dict[str, Any]:
        """Return a schema that is named, and used under its name, or a plain one."""
        schema = self.schema()
        if self._likely(0.7) or not isinstance(schema, dict):
            return {"allOf": [schema]} if isinstance(schema, bool) else schema
        used = {"$ref": "#/$defs/r"}
        return {"$defs": {"r": schema}} | self._random.choice([used, {"type": "array", "items": used}])

    def _likely(self, share: float) -> bool:
        return self._random.random() < share

    def _some(self, names: tuple[str, ...], most: int) -> list[str]:
        return self._random.sample(names, self._random.randrange(most + 1))

    def _object(self, depth: int) -> dict[str, Any]:
        made = {
            "properties": {key: self.schema(depth + 1) for key in self._some(KEYS, 3)},
            "required": self._some(KEYS, 2),
            "additionalProperties": self._random.choice([False, True, {"type": "integer"}, self.schema(depth + 1)]),
            "patternProperties": {self._random.choice(["^a", "b$", "^a$"]): self.schema(depth + 1)},
            "minProperties": self._random.randrange(3),
            "maxProperties": self._random.randrange(3),
        }
        return self._kept(made, 0.7, 0.5, 0.5, 0.15, 0.1, 0.1)

    def _array(self, depth: int) -> dict[str, Any]:
        made = {
            "items": self.schema(depth + 1),
            "prefixItems": [self.schema(depth + 1) for _ in range(self._random.randrange(1, 3))],
            "minItems": self._random.randrange(3),
            "maxItems": self._random.randrange(4),
        }
        return self._kept(made, 0.4, 0.3, 0.3, 0.3)

    def _string(self, _depth: int) -> dict[str, Any]:
        pattern = self._random.choice(PATTERNS)
        made = {"minLength": self._random.randrange(3), "maxLength": self._random.randrange(4), "pattern": pattern}
        return self._kept(made, 0.3, 0.3, 0.3)

    def _number(self) -> dict[str, Any]:
        low, high = sorted(self._random.choices([-1, 0, 1, 1.5, 2, 0.5], k=2))
        made = {"minimum": low, "maximum": high, "exclusiveMinimum": low, "exclusiveMaximum": high}
        return self._kept(made | {"multipleOf": self._random.choice([1, 2, 0.5])}, 0.3, 0.3, 0.15, 0.15, 0.15)

    def _kept(self, parts: dict[str, Any], *shares: float) -> dict[str, Any]:
        return {key: value for (key, value), share in zip(parts.items(), shares, strict=True) if self._likely(share)}


def _none(_depth: int) -> dict[str, Any]:
    return {}


def judged(drawer: Drawer, seed: int) -> list[tuple[str, str]]:
    """Return what was found of a random schema: the kind, and the value or text with the schema."""
    maker = Maker(seed)
    schema = maker.referred()
    grammar, validator = Grammar("json_schema", json.dumps(schema)), jsonschema.Draft202012Validator(schema)
    try:
        drawer.check(grammar)
    except BadRequest as error:
        return [("refused", str(error))]
    found = []
    for value in [maker.value() for _ in range(12)]:
        kind = "valid" if validator.is_valid(value) else "invalid"
        text = drawer.spelling(grammar, value)
        found.append((f"{kind} {'refused' if text is None else 'accepted'}", f"{text or value} under {grammar.text}"))
    for draw in range(2):
        try:
            text = drawer.text(grammar, draw, 200)
        except AssertionError:
            continue  # it is long
        is_valid = validator.is_valid(json.loads(text))
        found.append((f"{'valid' if is_valid else 'invalid'} draw", f"{text} under {grammar.text}"))
    return found


WRONG = ("valid refused", "invalid accepted", "invalid draw")


@pytest.mark.parametrize("seeds", [range(80), pytest.param(range(80, 300), marks=pytest.mark.full)], ids=len)
def test_a_value_of_a_random_schema_has_a_text_if_it_is_valid(seeds: range) -> None:
    drawer, seen = Drawer({}, ENDINGS), Counter[str]()
    for seed in seeds:
        for kind, line in judged(drawer, seed):
            assert kind not in WRONG, (seed, kind, line)
            seen[kind] += 1
    assert seen["valid accepted"] > 80 and seen["invalid refused"] > 80 and seen["valid draw"] > 60, seen


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda schema: schema | {"additionalProperties": False}, "valid refused"),
        (lambda schema: {key: value for key, value in schema.items() if key != "required"}, "invalid accepted"),
    ],
    ids=["narrowed", "loosened"],
)
def test_random_schemas_show_one_that_is_changed(
    change: Callable[[Any], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong variants."""
    monkeypatch.setattr(source, "exact_schema", change)
    drawer = Drawer({}, ENDINGS)
    assert any(found == kind for seed in range(80) for found, _ in judged(drawer, seed))
