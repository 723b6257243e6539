"""JSON schemas of the JSON-Schema-Test-Suite against the grammars that are made of them.

    python -m tests.schema_suite FOLDER...                    such as tests/draft2020-12 of the suite
    python -m tests.schema_suite FOLDER... --write FILE       keep the groups whose schema is not refused

The suite is in the source distribution of the package `jsonschema`, under `json/tests`.  For each schema that is not
refused, texts are drawn at random under its mask, and `jsonschema` has to find them valid.  A schema is about values,
and a value has many texts: a valid document has to have one that is accepted, and an invalid one must have none.  Keys
are tried in each order, numbers with and without an exponent.

`format` is an annotation by the standard, and holds here.  The documents that the suite calls valid for that alone are
judged the other way; those in its folders `optional/format` are judged as they stand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from rollout.core.errors import BadRequest
from rollout.core.grammar import Grammar
from tests.grammar_drawer import Drawer

ENDINGS = ('"', "}", "]", "0", "1", ",", ":")
DRAWS = 4
SAMPLE = Path(__file__).parent / "data" / "json_schema_suite.jsonl"
_ANNOTATION = "is only an annotation by default"


class Group(NamedTuple):
    """A schema of the suite and its documents.  `file`: the name of its file, without the ending."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Iterator[Group]:
        """Yield the groups of the files in a folder."""
        for path in sorted(folder.glob("*.json")):
            for group in json.loads(path.read_text()):
                yield cls(path.stem, group["description"], group["schema"], group["tests"])

    @classmethod
    def sampled(cls, path: Path = SAMPLE) -> list[Group]:
        """Return the groups that `written` wrote, each in a line."""
        return [cls(*json.loads(line)) for line in path.read_text().splitlines()]

    def written(self) -> str:
        """Return the group in a line."""
        tests = [{key: test[key] for key in ("description", "data", "valid")} for test in self.tests]
        return json.dumps(self._replace(tests=tests), separators=(",", ":"))


def is_valid(test: dict[str, Any]) -> bool:
    """Return whether a document is valid where formats hold."""
    return bool(test["valid"]) and not test["description"].endswith(_ANNOTATION)


def judged(drawer: Drawer, group: Group) -> Iterator[tuple[str, str]]:
    """Yield the kind of each document, and its name.

    Raises `BadRequest` for a schema that is refused.
    """
    grammar = Grammar("json_schema", json.dumps(group.schema))
    drawer.check(grammar)
    for test in group.tests:
        kind = "valid" if is_valid(test) else "invalid"
        found = "accepted" if drawer.spelling(grammar, test["data"]) is not None else "not accepted"
        yield f"{kind} {found}", f"{group.file}: {group.description}: {test['description']}"


def drawn(drawer: Drawer, schema: Any, draws: int = DRAWS) -> Iterator[tuple[str, str]]:
    """Yield the kind of each text that is drawn under the mask of a schema, and the text with its schema."""
    grammar = Grammar("json_schema", json.dumps(schema))
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker()
    )
    for seed in range(draws):
        try:
            text = drawer.text(grammar, seed, 400)
        except AssertionError:
            yield "no end within 400 tokens", grammar.text
            continue
        try:
            kind = "valid draw" if validator.is_valid(json.loads(text)) else "invalid draw"
        except re.error:
            kind = "draw with a pattern that Python does not read"
        yield kind, f"{text} under {grammar.text}"


def check(drawer: Drawer, groups: Iterable[Group], draws: int = DRAWS) -> Iterator[tuple[str, str]]:
    """Yield what was found of some groups: its kind, and what it is."""
    for group in groups:
        try:
            yield from judged(drawer, group)
        except BadRequest as error:
            yield "refused schema", f"{group.file}: {group.description}: {error}"
            continue
        yield from drawn(drawer, group.schema, draws)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--show", default="", help="print the lines of this kind")
    parser.add_argument("--write", type=Path, help="write the groups whose schema is not refused to this file")
    args = parser.parse_args()
    drawer, found, kept = Drawer({}, ENDINGS), Counter[str](), list[str]()
    for group in (group for folder in args.folder for group in Group.read(folder)):
        kinds = list(check(drawer, [group]))
        found.update(kind for kind, _ in kinds)
        for line in [line for kind, line in kinds if kind == args.show]:
            print(line)
        if all(kind != "refused schema" for kind, _ in kinds):
            kept.append(group.written() + "\n")
    if args.write is not None:
        args.write.write_text("".join(kept))
    for kind, count in sorted(found.items()):
        print(f"{count:6} {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
