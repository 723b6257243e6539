"""Names of models: of a folder, and of the Hugging Face hub and its cache on this machine.

Nothing is downloaded here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHED = "models--"


def model_name(model_path: str) -> str:
    """Return the name of the model in a folder: the folder's, or in the cache the one that the hub has for it."""
    path = Path(model_path)
    path = (
        path.resolve() if path.name in ("", "..") else path.absolute()
    )  # the name of a link is better than its target
    parents = [parent.name for parent in path.parents]
    if len(parents) > 1 and parents[0] == "snapshots" and parents[1].startswith(_CACHED):
        return parents[1].removeprefix(_CACHED).replace("--", "/", 1)
    return path.name or model_path


def objection_to_folder(model_path: str) -> str | None:
    """Return why a path is not the folder of a model, and how to get one; None if it is a folder."""
    path = Path(model_path)
    if path.is_dir():
        return None
    if path.exists():
        return f"{model_path} is a file, and not a folder; give the folder that holds config.json"
    if _HUB_NAME.fullmatch(model_path) is None:
        return f"{model_path} is not a folder; write a small one with: lockstep make-checkpoint DIR"
    snapshot = cached_snapshot(model_path)
    if snapshot is not None:
        return f"{model_path} is not a folder, but the cache of Hugging Face has it; give that path: {snapshot}"
    own = model_path.partition("/")[2]
    return (
        f"{model_path} is not a folder, and not in the cache of Hugging Face. Download it with: "
        f"hf download {model_path} --local-dir {own} && lockstep serve {own}"
    )


def cached_snapshot(hub_name: str) -> Path | None:
    """Return the folder of a hub's model in the cache of this machine, of its main revision; None without one."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        home = os.environ.get("HF_HOME") or Path(cache, "huggingface")
        root = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
        folder = root / (_CACHED + hub_name.replace("/", "--"))
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        return snapshot if (snapshot / "config.json").is_file() else None
    except (OSError, RuntimeError):  # a user without a home folder, in a container
        return None
