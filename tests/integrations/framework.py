"""The framework that a test file drives, and its row of docs/integrations.md.

A file defines `FRAMEWORK = Framework(...)`; each of its tests is a step, named by the test.  A file of several
frameworks defines `FRAMEWORKS`, a mapping by the names that its tests have as parameters.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Framework:
    """`packages`: distributions whose code runs, or `name version` of one that is none.  `flags`: the server's.

    `shimmed`: what had to be put in place of something.  `not_there`: what this server does not do, or a CPU cannot.
    """

    name: str
    packages: tuple[str, ...]
    flags: dict[str, Any] = field(default_factory=dict)
    shimmed: tuple[str, ...] = ()
    not_there: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for words in (self.packages, self.shimmed, self.not_there):
            if isinstance(words, str):  # would be a tuple of its letters
                raise TypeError(f"{self.name}: give a tuple of strings, not {words!r}")


@dataclass(kw_only=True)
class Row:
    """A framework and how its steps ended."""

    name: str
    versions: list[str]
    flags: list[str]
    shimmed: list[str]
    not_there: list[str]
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, framework: Framework) -> Row:
        return cls(
            name=framework.name,
            versions=[name if " " in name else f"{name} {version(name)}" for name in framework.packages],
            flags=[_flag(name, value) for name, value in framework.flags.items()],
            shimmed=list(framework.shimmed),
            not_there=list(framework.not_there),
        )


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


def load_rows(path: Path) -> list[Row]:
    return [Row(**fields) for fields in json.loads(path.read_text())]


def _flag(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"
