"""JSON schemas that stand in a grammar in the library's dialect of Lark, behind `%json`."""

from __future__ import annotations

import json
import re

from rollout.grammar.schema import exact_schema

_PART = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/?|%json\s*')
"""A literal, a note or a regular expression, which may hold the letters of `%json`; or `%json` itself.

What has no end goes to the end of its line: the library refuses it, and a search from each letter of it takes long.
"""
_DECODER = json.JSONDecoder()


def exact_grammar(lark: str) -> str:
    """Return a grammar in which each schema is one for the same values that the library holds to exactly.

    Raises `BadRequest` for a schema to which no mask can hold.  The library refuses a schema that is not JSON.
    """
    parts: list[str] = []
    done = at = 0
    while found := _PART.search(lark, at):
        at = found.end()
        if not found[0].startswith("%json"):
            continue
        try:
            schema, end = _DECODER.raw_decode(lark, at)
        except (ValueError, RecursionError):
            break
        parts += [lark[done:at], json.dumps(exact_schema(schema))]
        done = at = end
    return "".join([*parts, lark[done:]])
