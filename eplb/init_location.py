"""Reads the expert map that an engine starts with: `trivial`, or a map or counts in JSON, safetensors or a `.pt` file.

    {"physical_to_logical_map": [L, P]}            taken as it is
    {"logical_count": [L, E] or [steps, L, E]}     further slots go to the experts with the most load a slot

A dump of the load recorder is such a text or file, and names its model.  No file can execute anything: `.pt`
is read with `weights_only`.

Shapes: L MoE layers, E logical experts, P physical experts (slots).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from eplb.algorithms.types import greedy_replica_order, shares_of
from eplb.errors import EplbRequestError, LayoutError, LoadsError, MapError
from eplb.expert_location import ExpertLocationMetadata, trivial_location
from eplb.load_dump import METADATA_KEY

TRIVIAL = "trivial"
_MAP, _COUNTS = "physical_to_logical_map", "logical_count"


@dataclass(frozen=True)
class RecordedModel:
    """The model that a dump was recorded from.  `moe_layer_ids` are the hidden layers with experts."""

    architecture: str
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    num_experts_per_tok: int

    def to_header(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)} | {
            "moe_layer_ids": list(self.moe_layer_ids)
        }


def load_location(source: str, model: RecordedModel, num_redundant_experts: int) -> ExpertLocationMetadata:
    """Return the map of `source`: `trivial`, JSON text that begins with `{`, or the path of a file.

    Raises `EplbRequestError` in one line: `LayoutError`, `MapError`, `LoadsError`, or itself for what cannot be read.
    """
    layers, experts = len(model.moe_layer_ids), model.num_experts
    slots = experts + num_redundant_experts
    if num_redundant_experts < 0:
        raise LayoutError(f"the number of redundant experts must not be negative, got {num_redundant_experts}")
    if source == TRIVIAL:
        return trivial_location(layers, experts, slots)
    content = _read(source)
    _require_model(content.get("model"), model)
    if (_MAP in content) == (_COUNTS in content):
        raise EplbRequestError(f"it must have either {_MAP} or {_COUNTS}")
    if _MAP in content:
        return _of_map(_array(content, _MAP, MapError), layers, experts, slots)
    return _of_counts(_array(content, _COUNTS, LoadsError), layers, experts, slots)


def _of_map(given: np.ndarray, layers: int, experts: int, slots: int) -> ExpertLocationMetadata:
    if given.shape != (layers, slots):
        raise MapError(
            f"the map has the shape {list(given.shape)}, but {layers} MoE layers of {experts} experts and "
            f"{slots - experts} redundant ones need {[layers, slots]}"
        )
    if given.dtype.kind not in "iu":
        raise MapError(f"the map must hold integers, got {given.dtype}")
    return ExpertLocationMetadata(torch.from_numpy(given.astype(np.int64)), experts)


def _of_counts(given: np.ndarray, layers: int, experts: int, slots: int) -> ExpertLocationMetadata:
    if given.ndim == 3:
        given = given.sum(axis=0)
    if given.shape != (layers, experts):
        raise LoadsError(f"the counts have the shape {list(given.shape)}, but this model needs {[layers, experts]}")
    if given.dtype.kind not in "iuf" or not np.isfinite(given).all() or (given < 0).any():
        raise LoadsError("the counts must be finite numbers and not negative")
    extra = greedy_replica_order(shares_of(given.astype(np.float64)), slots - experts)
    own = np.broadcast_to(np.arange(experts), (layers, experts))
    located = np.concatenate((own, extra), axis=1)
    return ExpertLocationMetadata(torch.from_numpy(located), experts)


def _require_model(recorded: Any, model: RecordedModel) -> None:
    """Refuse a dump that names another model."""
    if not isinstance(recorded, Mapping):
        return
    for name, own in model.to_header().items():
        if name in recorded and recorded[name] != own:
            raise EplbRequestError(f"the dump belongs to another model: its {name} is {recorded[name]}, expected {own}")


def _array(content: Mapping[str, Any], name: str, error: type[EplbRequestError]) -> np.ndarray:
    try:
        return np.asarray(content[name])
    except (ValueError, TypeError, RuntimeError):
        raise error(f"{name} is not an array of numbers") from None


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(source: str) -> Mapping[str, Any]:
    if source.lstrip().startswith("{"):
        return _parse(source, "the text")
    path = Path(source)
    if not path.is_file():
        raise EplbRequestError(f"{source!r} must be {TRIVIAL!r}, JSON text or a file")
    try:
        content = _read_file(path)
    except EplbRequestError:
        raise
    except Exception as error:  # damaged files make torch's restricted unpickler raise all kinds of errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise EplbRequestError(f"{path} cannot be read: {reason}") from None
    if not isinstance(content, Mapping):
        raise EplbRequestError(f"{path} must hold a dictionary")
    return content


def _read_file(path: Path) -> Any:
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    return _read_safetensors(path) if path.suffix == ".safetensors" else _parse(path.read_text(), str(path))


def _parse(text: str, what: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EplbRequestError(f"{what} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise EplbRequestError(f"{what} is not a JSON object")
    return content


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    with safe_open(path, framework="numpy") as file:
        header = _parse((file.metadata() or {}).get(METADATA_KEY, "{}"), f"the metadata of {path}")
        wanted = [name for name in (_MAP, _COUNTS) if name in file.keys()]  # noqa: SIM118 - no mapping
        return {**header, **{name: file.get_tensor(name) for name in wanted}}
