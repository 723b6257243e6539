"""The two model shapes that are measured, and where checkpoints are kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint

REPOSITORY = Path(__file__).resolve().parents[1]
IS_CLONE = (REPOSITORY / "pyproject.toml").is_file()
CACHE = REPOSITORY / "build" / "bench" if IS_CLONE else Path.home() / ".cache" / "lockstep" / "bench"

SHAPES = {
    "S": CheckpointSpec(
        hidden_size=256, layers=4, dense_first=0, heads=8, kv_heads=4, head_dim=32, experts=32, top_k=4,
        moe_intermediate_size=128, vocab_size=4096, context_length=4096,
    ),
    "M": CheckpointSpec(
        hidden_size=1024, layers=12, dense_first=0, heads=16, kv_heads=4, head_dim=64, experts=48, top_k=8,
        moe_intermediate_size=384, vocab_size=32000, context_length=4096,
    ),
}  # fmt: skip


def checkpoint(name: str) -> Path:
    """Return the checkpoint of shape `name`, which is written on first use."""
    return cached_checkpoint(name, SHAPES[name])


def shallow_checkpoint(name: str, layers: int) -> Path:
    """Return shape `name` with at most `layers` layers: each layer does the same, in less time and memory in all."""
    spec = SHAPES[name]
    if spec.layers <= layers:
        return checkpoint(name)
    return cached_checkpoint(f"{name}-{layers}-layers", dataclasses.replace(spec, layers=layers))


def cached_checkpoint(name: str, spec: CheckpointSpec) -> Path:
    """Return a checkpoint of `spec`, which is written on first use; every spec needs a `name` of its own."""
    folder = CACHE / name
    if not (folder / "config.json").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        print(f"writing the checkpoint of shape {name} to {folder}")
        # Renamed when it is whole: what an interrupted run leaves must not look like a checkpoint.
        make_checkpoint(CACHE / f"{name}.partial", spec, force=True).rename(folder)
    return folder
