"""The use of a fenced block: its language, and the mark in the comment above it.

docs/testing.md lists the marks.
"""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib
from pathlib import Path

import yaml

from tests.pages.markdown import ROOT, Block

RUN = ("bash", "python")
PARSED = ("json", "yaml", "toml")
NOT_RUN, RUN_BY, FILE = "not run:", "run by:", "file:"
OF_TOOLS = ("generated:", "written by", "end")
"""Comments of other tools, which may stand above a block."""


def kind(block: Block) -> str:
    """Return the mark of a block without its text, or nothing."""
    for mark in (NOT_RUN, RUN_BY, FILE):
        if block.mark.startswith(mark):
            return mark
    if not block.mark or block.mark.startswith(OF_TOOLS):
        return ""
    raise ValueError(f"{block.place}: no mark of a block is called {block.mark!r}")


def text_of(block: Block) -> str:
    """Return the text of a mark: the reason, the path of a test or of a file."""
    return block.mark.removeprefix(kind(block)).strip()


def is_run(block: Block) -> bool:
    return block.language in RUN and not kind(block)


def objection(block: Block) -> str:
    """Return the reason why a block cannot be what it is called, or nothing."""
    try:
        mark = kind(block)
        if mark == RUN_BY and not (ROOT / text_of(block)).exists():
            return f"there is no {text_of(block)}"
        if mark in (NOT_RUN, FILE) and not text_of(block):
            return f"the mark {mark!r} has no text"
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "bash":
            checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            return checked.stderr.strip()
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def path_of_file(block: Block, folder: Path) -> Path:
    """Return the path of a block that is written to a file of the page's folder."""
    path = (folder / text_of(block)).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{block.place}: {text_of(block)} is outside the page's folder")
    return path
