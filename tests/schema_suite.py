"""JSON schemas of the JSON-Schema-Test-Suite against the grammars that are made of them.

    python -m tests.schema_suite FOLDER          FOLDER has the suite's files, such as tests/draft2020-12

The suite is in the source distribution of the package `jsonschema`, under `json/tests`.  For each schema that is not
refused, texts are drawn at random under its mask, and `jsonschema` has to find them valid.  Valid documents of the
suite have to be accepted, and invalid ones not.  Documents have their outer keys in the order of the schema.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from rollout.core.errors import BadRequest
from rollout.core.grammar import Grammar
from tests.grammar_drawer import Drawer

ENDINGS = ('"', "}", "]", "0", "1", ",", ":")
DRAWS = 4


def documents(schema: Any, value: Any) -> str:
    """Return a document with the keys of its outer object in the order of the schema's properties."""
    if isinstance(value, dict) and isinstance(schema, dict):
        first = [key for key in schema.get("properties", {}) if key in value]
        value = {key: value[key] for key in (*first, *(key for key in value if key not in first))}
    return json.dumps(value, ensure_ascii=False)


def check(drawer: Drawer, schema: Any, tests: list[dict[str, Any]], draws: int = DRAWS) -> Iterator[tuple[str, str]]:
    """Yield what was found: its kind, and the document with its schema."""
    grammar = Grammar("json_schema", json.dumps(schema))
    try:
        drawer.check(grammar)
        accepted = [(test, drawer.accepts(grammar, documents(schema, test["data"]))) for test in tests]
    except BadRequest as error:
        yield "refused schema", str(error)
        return
    for test, is_accepted in accepted:
        kind = ("valid" if test["valid"] else "invalid") + (" accepted" if is_accepted else " not accepted")
        yield kind, f"{json.dumps(test['data'])} under {grammar.text}"
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for seed in range(draws):
        try:
            text = drawer.text(grammar, seed, 400)
        except AssertionError:
            yield "no end within 400 tokens", grammar.text
            continue
        is_valid = validator.is_valid(json.loads(text))
        yield ("valid draw" if is_valid else "invalid draw"), f"{text} under {grammar.text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--show", default="", help="print the lines of this kind")
    args = parser.parse_args()
    drawer, found = Drawer({}, ENDINGS), Counter[str]()
    for path in sorted(path for folder in args.folder for path in folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            for kind, line in check(drawer, group["schema"], group["tests"]):
                found[kind] += 1
                if kind == args.show:
                    print(path.stem, line)
    for kind, count in sorted(found.items()):
        print(f"{count:6} {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
