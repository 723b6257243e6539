"""Grammars of requests in the library's own form, and what is refused by its size alone."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from rollout.core.errors import BadRequest
from rollout.core.grammar import MAX_CHOICES, Grammar
from rollout.grammar.embedded_schemas import exact_grammar
from rollout.grammar.library import one_line
from rollout.grammar.schema import MAX_JSON_DEPTH, exact_schema

MAX_JSON_VALUES = 20_000
_ANY_OBJECT = '{"type": "object"}'
_TAG_FORMS = "structural_tag: give 'structures' and 'triggers', or a 'format' of the type triggered_tags"


def library_source(library: Any, grammar: Grammar, special_tokens: Collection[str]) -> str:
    """Return the grammar as the library reads it.  `special_tokens`: the text of the tokenizer's special tokens.

    Raises `BadRequest` for a grammar that is too large, too deep, or not of its kind.
    """
    kind, text = grammar.kind, grammar.text
    grammar.validate()
    if kind == "json_object":
        return str(library.LLMatcher.grammar_from_json_schema(_ANY_OBJECT))
    if kind == "regex":
        return str(library.LLMatcher.grammar_from_regex(text))
    if kind == "ebnf":
        return _of_ebnf(library, text)
    value = _parsed(kind, text)
    if kind == "json_schema":
        return _of_schema(library, value)
    if kind == "choice":
        return _of_choices(library, value)
    return _of_tags(library, value, special_tokens)


def _of_schema(library: Any, schema: Any) -> str:
    if not isinstance(schema, dict | bool):
        raise BadRequest("json_schema must be an object, or true")
    try:
        return str(library.LLMatcher.grammar_from_json_schema(json.dumps(exact_schema(schema))))
    except ValueError as error:
        raise BadRequest(f"json_schema: {one_line(str(error))}") from None


def _of_ebnf(library: Any, text: str) -> str:
    try:
        lark = str(library.grammar_from("ebnf", text))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"ebnf: {one_line(str(error))}") from None
    return exact_grammar(lark)


def _of_choices(library: Any, choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise BadRequest("choice must be a list of texts, with at least one and none empty")
    if len(choices) > MAX_CHOICES:
        raise BadRequest(f"choice has {len(choices)} texts, and the limit is {MAX_CHOICES}")
    rules = "\n     | ".join(json.dumps(item) for item in choices)
    return str(library.LLMatcher.grammar_from_lark(f"start: {rules}"))


def _of_tags(library: Any, value: Any, special_tokens: Collection[str]) -> str:
    """Read SGLang's and vLLM's `structures`, or xgrammar's `triggered_tags`.

    Text is free up to a trigger; from a trigger on it must be one of the tags that begin with it.
    """
    try:
        triggers, tags = _tags_of(value)
        parts = [
            library.StructTag(trigger=_trigger(begin, triggers), begin=begin, grammar=schema, end=end)
            for begin, schema, end in tags
        ]
    except (KeyError, TypeError, AttributeError, IndexError):
        raise BadRequest(_TAG_FORMS) from None
    if not parts:
        raise BadRequest("structural_tag has no tag")
    is_special = {part.trigger in special_tokens for part in parts}
    if len(is_special) > 1:
        raise BadRequest("structural_tag: the triggers must be special tokens all, or none of them")
    return str(library.StructTag.to_grammar(parts, assume_special=is_special.pop()))


def _tags_of(value: Any) -> tuple[list[str], list[tuple[str, Any, str]]]:
    """Return the triggers, and begin, schema and end of each tag."""
    if "structures" in value:
        return value["triggers"], [
            (_text(tag["begin"]), _schema(tag.get("schema", {})), _text(tag["end"])) for tag in value["structures"]
        ]
    form = value["format"]
    if form["type"] != "triggered_tags" or form.get("at_least_one") or form.get("stop_after_first"):
        raise BadRequest(_TAG_FORMS)
    return form["triggers"], [
        (_text(tag["begin"]), _schema(_json_content(tag["content"])), _text(tag["end"])) for tag in form["tags"]
    ]


def _json_content(content: Any) -> Any:
    if content["type"] != "json_schema":
        raise BadRequest("structural_tag: the content of a tag must have the type json_schema")
    return content["json_schema"]


def _schema(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest("structural_tag: the schema of a tag must be an object")
    return dict(exact_schema(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest("structural_tag: begin and end of a tag must be texts")
    return value


def _trigger(begin: str, triggers: list[str]) -> str:
    """Return the longest trigger with which the tag begins."""
    found = [_text(trigger) for trigger in triggers if trigger and begin.startswith(trigger)]
    if not found:
        raise BadRequest(f"structural_tag: the tag {begin[:40]!r} begins with none of the triggers")
    return max(found, key=len)


def _parsed(kind: str, text: str) -> Any:
    """Return the JSON value of `text`, which is neither too deep nor too large."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{kind} is not JSON: {one_line(str(error))}") from None
    num_values, level = 0, [value]
    for _ in range(MAX_JSON_DEPTH):
        num_values += len(level)
        if num_values > MAX_JSON_VALUES:
            raise BadRequest(f"{kind} has more than {MAX_JSON_VALUES} values")
        level = [item for part in level for item in _inside(part)]
        if not level:
            return value
    raise BadRequest(f"{kind} is nested more than {MAX_JSON_DEPTH} deep")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
