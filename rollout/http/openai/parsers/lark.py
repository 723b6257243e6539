"""`Lark`: a grammar in the making, in the dialect of Lark that the library of grammars reads.

Its expressions are texts: tokens, literals, values of JSON, and rules that were added before.
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

_UNESCAPED_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"})
"""Keywords of a schema that bind nothing.  In the schemas of tools they are most of the text, which has a limit."""
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas under names.  A name may be the word of a note."""
_OF_DATA = frozenset({"const", "enum", "required", "dependentRequired"})
_MAX_DEPTH = 64


class Lark:
    """`token_id` returns the id of a token that the model can sample, None if there is no such token.

    `is_special`: whether a token is special to the tokenizer, so that no text of other tokens equals it.
    """

    def __init__(self, token_id: Callable[[str], int | None], is_special: Callable[[int], bool]) -> None:
        self._token_id = token_id
        self._is_special = is_special
        self._rules: list[str] = []

    def token(self, marker: str) -> str:
        """Return the expression of a marker: its token, or its text where it is not one token."""
        index = self._token_id(marker)
        return literal(marker) if index is None else f"<[{index}]>"

    def special(self, marker: str) -> str | None:
        """Return the expression of a marker that is a special token, None if it is not one."""
        index = self._token_id(marker)
        return f"<[{index}]>" if index is not None and self._is_special(index) else None

    def until(self, marker: str) -> str:
        """Return the expression of any text, and the first `marker` behind it."""
        if (token := self.special(marker)) is not None:
            return f"{self.terminal('/(?s:.*)/')} {token}"
        return self._add("text", "/(?s:.*)/", f"[suffix={literal(marker)}]")

    def without(self, markers: Iterable[str], *also: str) -> str:
        """Return the expression of any text that has none of `markers`, and does not match a pattern of `also`.

        The library loses count of many complements, so that the markers are in one.
        """
        found = "|".join(map(_escaped, markers))
        return self.terminal(" & ".join(["/(?s:.*)/", *([f"~/(?s:.*)({found})(?s:.*)/"] if found else []), *also]))

    def opened(self, marker: str, others: Iterable[str], *also: str) -> str:
        """Return the expression of any text, and the first `marker` behind it.

        The text has none of `others`, and does not match a pattern of `also`.
        """
        if (token := self.special(marker)) is not None:
            return f"{self.without([marker, *others], *also)} {token}"
        return self._add("text", self.without(others, *also), f"[suffix={literal(marker)}]")

    def terminal(self, pattern: str) -> str:
        """Add a terminal: one regular expression, or several that are joined by `&` and `~`."""
        return self._add("TEXT", pattern)

    def rule(self, expression: str) -> str:
        return self._add("part", expression)

    def written(self, start: str) -> str:
        """Return the grammar that begins with the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _add(self, kind: str, body: str, attribute: str = "") -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def literal(text: str) -> str:
    """Return the expression of a text."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Any) -> str:
    """Return the expression of a value of a JSON schema."""
    return f"%json {json.dumps(_without_notes(schema), ensure_ascii=False)}"


def _without_notes(schema: Any, depth: int = 0) -> Any:
    """Return a schema that binds the same values, and explains nothing.  Deeper levels stay as they are."""
    if depth > _MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_without_notes(each, depth + 1) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {}
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, dict):
            bare[key] = {name: _without_notes(each, depth + 1) for name, each in value.items()}
        elif key not in _NOTES:
            bare[key] = value if key in _OF_DATA else _without_notes(value, depth + 1)
    return bare


def regex(pattern: str) -> str:
    """Return the expression of a regular expression."""
    return "/" + _UNESCAPED_SLASH.sub(lambda found: found[1] or r"\/", pattern).replace("\n", r"\n") + "/"


def one_of(expressions: Iterable[str]) -> str:
    """Return the expression of any of `expressions`."""
    return "(" + " | ".join(expressions) + ")"
