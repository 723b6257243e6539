"""A trained model as a checkpoint that a server can load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def save_beside(model: Any, checkpoint: Path, target: Path) -> None:
    """Save the model with the tokenizer and the other small files of `checkpoint`; `target` is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    model.save_pretrained(target)
