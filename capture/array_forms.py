"""The wire forms of routed experts in vLLM's family: one array of every hidden layer, dense layers zero.

Pure functions from `RoutedExperts` to what JSON holds.  Each form carries its shape and dtype; none says which weights
made a row.  Raise `MissingRowsError` if a row is MISSING: these forms cannot say so.

Shapes: T rows, H hidden layers, K top-k.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from capture.codec import all_layers
from capture.routed_experts import RoutedExperts


def encode_npy(routed: RoutedExperts) -> str:
    """Base64 of a .npy file [T, H, K], uint8 up to 256 experts and else uint16: vLLM's own form."""
    file = io.BytesIO()
    np.save(file, all_layers(routed, _model_dtype(routed)))
    return base64.b64encode(file.getbuffer()).decode("ascii")


def encode_dict(routed: RoutedExperts) -> dict[str, Any]:
    """`data` (base64 of the array's bytes), `shape`, `start`, `dtype`: prime-rl's form; its clients cut `data` out."""
    fields = _envelope(all_layers(routed, _model_dtype(routed)))
    return {"data": fields["data"], "shape": fields["shape"], "start": routed.start, "dtype": fields["dtype"]}


def encode_packed(routed: RoutedExperts) -> dict[str, Any]:
    """`data`, `shape` and `dtype`, the narrowest of uint8, int16 and int32 that holds these very ids: SkyRL's form."""
    highest = int(routed.logical_ids_TLK.max(initial=0))
    dtype = np.uint8 if highest < 2**8 else np.int16 if highest < 2**15 else np.int32
    return _envelope(all_layers(routed, np.dtype(dtype)))


def _model_dtype(routed: RoutedExperts) -> np.dtype:
    """One for all samples of a model, so that a trainer can join them."""
    return np.dtype(np.uint8 if routed.num_experts <= 2**8 else np.uint16)


def _envelope(ids_THK: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(ids_THK.data if ids_THK.size else b"").decode("ascii")
    return {"data": data, "shape": list(ids_THK.shape), "dtype": ids_THK.dtype.name}
