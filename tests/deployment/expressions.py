"""The expressions of the dashboards and rules in deploy/, and the names of metrics in them."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted(DEPLOY.glob("grafana/*.json"))
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "20s", "$__interval": "20s"}
"""Values for the variables of a dashboard."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|ignoring|without)\s*\([^)]*\)')
_WORD = re.compile(r"[A-Za-z_:][\w:]*\b(?!\s*\()")
_OPERATORS = {"or", "and", "unless", "bool", "offset", "sum", "min", "max", "avg", "count"}


@dataclass(frozen=True)
class Expression:
    """An expression and its place: a panel, or a rule."""

    place: str
    text: str

    def names(self) -> set[str]:
        """Return the names of the metrics that it reads."""
        return set(_WORD.findall(_QUOTED.sub(" ", self.text))) - _OPERATORS

    def sides(self) -> list[str]:
        """Return what stands between the words `or` outside of all brackets: each serves another kind of engine."""
        depth, start, found = 0, 0, []
        for match in re.finditer(r'"[^"]*"|[(){}\[\]]|\bor\b', self.text):
            depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(match[0], 0)
            if match[0] == "or" and depth == 0:
                found.append(self.text[start : match.start()].strip())
                start = match.end()
        return [*found, self.text[start:].strip()]


def of_dashboard(path: Path) -> list[Expression]:
    """Return the expressions of all panels and annotations, with values for the variables."""
    board = json.loads(path.read_text())
    found = [
        Expression(f"{path.name}: {panel['title']}", _filled(target["expr"]))
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    marks = [note for note in board["annotations"]["list"] if "expr" in note]
    return found + [Expression(f"{path.name}: {note['name']}", _filled(note["expr"])) for note in marks]


def of_rules(kind: str) -> list[Expression]:
    """Return the expressions of the rules of one kind: `record` or `alert`."""
    return [Expression(f"{kind} {rule[kind]}", rule["expr"]) for rule in _rules() if kind in rule]


def recorded() -> set[str]:
    """Return the names that recording rules make."""
    return {rule["record"] for rule in _rules() if "record" in rule}


@functools.cache
def _rules() -> list[dict[str, Any]]:
    files = [DEPLOY / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def _filled(text: str) -> str:
    for name in sorted(VARIABLES, key=len, reverse=True):
        text = text.replace(name, VARIABLES[name])
    assert "$" not in text, text
    return text
