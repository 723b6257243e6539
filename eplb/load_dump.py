"""`LoadDump`: what a load recorder recorded, and its three forms: a message, JSON, a safetensors file.

    header    plain JSON: mode, model, segments, windows, drift
    tensors   by name; `logical_count` [L, E] is all that a planner needs

In JSON the tensors are nested lists next to the header's fields; in a safetensors file the header is JSON in the
metadata under `load_dump`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import save

METADATA_KEY = "load_dump"


@dataclass(frozen=True)
class LoadDump:
    """Names of header and tensors do not meet."""

    header: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def num_numbers(self) -> int:
        """Elements of all tensors: what JSON would spell out."""
        return sum(tensor.size for tensor in self.tensors.values())

    def to_message(self) -> dict[str, Any]:
        """Return plain values and bytes."""
        tensors = {
            name: {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "data": tensor.tobytes()}
            for name, tensor in self.tensors.items()
        }
        return {"header": self.header, "tensors": tensors}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> LoadDump:
        """Read the result of `to_message`; tensors are read-only views of the message's bytes."""
        tensors = {
            name: np.frombuffer(item["data"], dtype=item["dtype"]).reshape(item["shape"])
            for name, item in message["tensors"].items()
        }
        return cls(message["header"], tensors)

    def to_json(self) -> dict[str, Any]:
        return self.header | {name: tensor.tolist() for name, tensor in self.tensors.items()}

    def to_safetensors(self) -> bytes:
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()}
        return save(contiguous, metadata={METADATA_KEY: json.dumps(self.header)})
