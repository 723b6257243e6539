"""Grammars: what the text of an answer must match, and the fields of requests that ask for one.

The fields are SGLang's, vLLM's and OpenAI's.  A request has at most one grammar, under whichever name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from rollout.core.errors import BadRequest, UnsupportedFeature

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag", "choice"]
MAX_GRAMMAR_BYTES = 64 << 10
"""Size of a grammar's text in UTF-8."""
MAX_CHOICES = 1024
ANY_JSON = "$$ANY$$"
"""SGLang's `json_schema` for any object."""


class Grammar(msgspec.Struct, frozen=True):
    """A grammar by its content, which is also its key in caches.

    `text`: a schema as JSON, a regular expression, a grammar in EBNF or Lark, a structural tag as JSON, or a JSON list
    of choices; empty for `json_object`.
    """

    kind: GrammarKind
    text: str = ""

    def validate(self) -> None:
        """Raise `BadRequest` for a text that is too large, or is missing."""
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise BadRequest(f"a grammar has at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
        if any("\ud800" <= letter <= "\udfff" for letter in self.text):
            raise BadRequest("a grammar must not hold half of a character (a lone surrogate)")
        if not self.text and self.kind != "json_object":
            raise BadRequest(f"a grammar of kind {self.kind} is empty")

    def structured_outputs(self) -> dict[str, Any]:
        """Return the grammar as vLLM's `structured_outputs`, which `grammar_in` reads."""
        if self.kind == "json_object":
            return {"json_object": True}
        if self.kind == "choice":
            return {"choice": msgspec.json.decode(self.text)}
        return {_AS_STRUCTURED_OUTPUT[self.kind]: self.text}


GRAMMAR_FIELDS = frozenset(
    {
        *("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs", "response_format"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
"""The fields of `sampling_params`, and of bodies that have sampling parameters among their fields."""
_IN_STRUCTURED_OUTPUTS = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
    "structural_tag": "structural_tag",
}

_AS_STRUCTURED_OUTPUT = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


def grammar_in(fields: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that `GRAMMAR_FIELDS` ask for, None if they ask for none.

    Raises `BadRequest` for a value of a wrong kind and for two grammars, `UnsupportedFeature` for a kind of grammar
    that is not known here.
    """
    found: dict[str, Grammar] = {}
    for name in GRAMMAR_FIELDS & fields.keys():
        if fields[name] is not None and fields[name] != "":  # SGLang's clients send empty texts for no grammar
            found |= _asked(name, fields[name])
    if len(found) > 1:
        first, second, *_ = sorted(found)
        raise BadRequest(f"a request has one grammar; it names {first} and {second}")
    for grammar in found.values():
        grammar.validate()
        return grammar
    return None


def _asked(name: str, value: Any) -> dict[str, Grammar]:
    """Return the grammars that one field asks for, by the paths that name them."""
    if name == "structured_outputs":
        return _in_structured_outputs(value)
    if name == "response_format":
        grammar = _response_format(value)
        return {} if grammar is None else {name: grammar}
    return {name: _READERS[name](value, name)}


def _in_structured_outputs(value: Any) -> dict[str, Grammar]:
    """Return the grammars in vLLM's `structured_outputs`."""
    if not isinstance(value, dict):
        raise BadRequest("structured_outputs must be an object")
    found: dict[str, Grammar] = {}
    for key, part in value.items():
        path = f"structured_outputs.{key}"
        if part is None or part is False:
            continue
        if key == "json_object":
            _require(part is True, f"{path} must be true or false")
            found[path] = Grammar("json_object")
        elif key in _IN_STRUCTURED_OUTPUTS:
            found[path] = _READERS[_IN_STRUCTURED_OUTPUTS[key]](part, path)
        elif key != "disable_fallback":  # there is no other backend to fall back to
            raise UnsupportedFeature(
                f"structured_outputs: {ascii(str(key)[:80])[1:-1]} is not supported by this server"
            )
    _require(bool(found), "structured_outputs names no grammar")
    return found


def _response_format(value: Any) -> Grammar | None:
    """Return the grammar of OpenAI's `response_format`; None for plain text.

    The schema stands in `json_schema.schema` for chats, and next to the type for the Responses API.
    """
    if not isinstance(value, dict):
        raise BadRequest("response_format must be an object")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "structural_tag":
        return _json("structural_tag", value, "response_format")
    if kind != "json_schema":
        raise UnsupportedFeature(
            f"response_format.type must be text, json_object, json_schema or structural_tag, got {str(kind)[:80]!a}"
        )
    holder, path = value, "response_format"
    if "json_schema" in value:
        holder, path = value["json_schema"], "response_format.json_schema"
        _require(isinstance(holder, dict), f"{path} is not an object")
    schema = holder.get("schema")
    _require(isinstance(schema, dict), f"{path}.schema must be an object")
    return schema_grammar(schema)


def schema_grammar(schema: Any) -> Grammar:
    """Return the grammar of a JSON schema.  Raises `BadRequest` if it cannot be written as JSON."""
    return Grammar("json_schema", _written(schema))


def _json(kind: GrammarKind, value: Any, path: str) -> Grammar:
    """Return a grammar whose text is JSON, from an object or from its text."""
    if isinstance(value, str):
        return Grammar(kind, value)
    _require(isinstance(value, dict), f"{path} must be an object, or the text of one")
    return Grammar(kind, _written(value))


def _schema(value: Any, path: str) -> Grammar:
    return Grammar("json_object") if value == ANY_JSON else _json("json_schema", value, path)


def _regex(value: Any, path: str) -> Grammar:
    _require(isinstance(value, str), f"{path} must be a text")
    return Grammar("regex", value)


def _ebnf(value: Any, path: str) -> Grammar:
    _require(isinstance(value, str), f"{path} must be a text")
    return Grammar("ebnf", value)


def _tag(value: Any, path: str) -> Grammar:
    return _json("structural_tag", value, path)


def _choice(value: Any, path: str) -> Grammar:
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    _require(
        is_list and all(isinstance(each, str) and each for each in value),
        f"{path} must be a list of 1 to {MAX_CHOICES} texts",
    )
    return Grammar("choice", _written(value))


_READERS: dict[str, Callable[[Any, str], Grammar]] = {
    "json_schema": _schema,
    "guided_json": _schema,
    "regex": _regex,
    "guided_regex": _regex,
    "ebnf": _ebnf,
    "guided_grammar": _ebnf,
    "structural_tag": _tag,
    "guided_choice": _choice,
}


def _written(value: Any) -> str:
    """Return JSON, whose keys keep their order.  Raises `BadRequest` for half of a character."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, msgspec.EncodeError, TypeError, RecursionError):
        raise BadRequest("a grammar must be JSON, without half of a character (a lone surrogate)") from None


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise BadRequest(rule)
