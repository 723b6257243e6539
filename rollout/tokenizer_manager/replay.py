"""`replay_routed_experts`: routes that a client gives a request, read and checked before it is queued.

They come in any wire form in which this server returns routes:

    compatible   base64 of int32 [rows, hidden layers, K]
    npy          base64 of a .npy file of the same
    dict, packed   {"data": base64, "shape": [..], "dtype": ..}, and perhaps "start"
    compact      base64 of the safetensors record, which names its first token itself

Shapes: T rows, L MoE layers, H hidden layers, K top-k.
"""

from __future__ import annotations

import base64
import binascii
import io
from hashlib import blake2b
from typing import Any

import numpy as np

from capture.codec import decode_compact, decode_compatible
from capture.errors import CaptureError
from capture.routed_experts import RoutedExperts, id_dtype
from rollout.core.errors import BadRequest
from rollout.core.io_struct import ReplayedRoutes
from rollout.tokenizer_manager.response import RouteShape

_NPY = b"\x93NUMPY"
_ENVELOPE_DTYPES = ("uint8", "uint16", "int16", "int32")


def read_replay(value: Any, start: int, shape: RouteShape) -> ReplayedRoutes:
    """The rows of `value`, for the tokens from `start` on.

    Raises `BadRequest` for a form that is not known, other layers or K than the model's, ids that it does not have, an
    expert twice in one layer of a row, and rows that are missing.
    """
    try:
        routed = _decode(value, start, shape)
    except (CaptureError, ValueError, KeyError, TypeError, binascii.Error) as error:
        raise BadRequest(f"replay_routed_experts: {error}") from None
    ids_TLK = routed.logical_ids_TLK
    layers = (routed.moe_layer_ids, routed.num_hidden_layers, ids_TLK.shape[2], routed.num_experts)
    wanted = (shape.moe_layer_ids, shape.num_hidden_layers, shape.top_k, shape.num_experts)
    if layers != wanted:
        raise BadRequest(
            f"replay_routed_experts: of MoE layers {list(layers[0])} of {layers[1]}, top-{layers[2]} of {layers[3]} "
            f"experts; the model has {list(wanted[0])} of {wanted[1]}, top-{wanted[2]} of {wanted[3]}"
        )
    missing = routed.missing_rows()
    if len(missing):
        raise BadRequest(f"replay_routed_experts: row {int(missing[0])} is missing")
    if start and routed.start != start:
        raise BadRequest(
            f"replay_routed_experts: the rows begin at token {routed.start}, replay_routed_experts_start_len is {start}"
        )
    data = ids_TLK.astype("<u2").tobytes()
    return ReplayedRoutes(data=data, shape=ids_TLK.shape, start=routed.start)


def check_replay(replay: ReplayedRoutes, prompt_len: int, max_new_tokens: int) -> None:
    """Raise `BadRequest` for rows of tokens that the request never computes."""
    end, computed = replay.start + replay.shape[0], prompt_len + max(max_new_tokens - 1, 0)
    if end > computed:
        raise BadRequest(
            f"replay_routed_experts: rows for tokens {replay.start}..{end - 1}, but the request computes {computed} "
            f"({prompt_len} prompt, up to {max_new_tokens} new, of which the last is not computed)"
        )


def cache_key(extra_key: str | None, replay: ReplayedRoutes) -> str:
    """Partitions the prefix cache by the routes too: KV computed under them is no other request's."""
    digest = blake2b(replay.data, digest_size=16, person=b"routes", salt=replay.start.to_bytes(8, "little"))
    return f"{extra_key or ''}\x00{digest.hexdigest()}"


def _decode(value: Any, start: int, shape: RouteShape) -> RoutedExperts:
    if isinstance(value, dict):
        return _of_envelope(value, start, shape)
    if not isinstance(value, str):
        raise ValueError(f"routes are text or an object, not {type(value).__name__}")
    head = base64.b64decode(value[:16] if len(value) >= 16 else value, validate=True)
    if head.startswith(_NPY):
        array = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
        return _of_array(array, start, shape)
    # The ninth byte and the next begin a JSON header: as an id it would be beyond any model's.
    if head[8:10] == b'{"':
        return decode_compact(base64.b64decode(value, validate=True))
    return decode_compatible(
        value, shape.num_hidden_layers, shape.top_k, shape.moe_layer_ids, shape.num_experts, start=start
    )


def _of_envelope(fields: dict[str, Any], start: int, shape: RouteShape) -> RoutedExperts:
    dtype, size = fields["dtype"], fields["shape"]
    if dtype not in _ENVELOPE_DTYPES:
        raise ValueError(f"dtype {dtype!r}; expected one of {', '.join(_ENVELOPE_DTYPES)}")
    if not isinstance(size, list) or len(size) != 3 or not all(isinstance(n, int) and n >= 0 for n in size):
        raise ValueError("shape must be [rows, hidden layers, K]")
    data = base64.b64decode(fields["data"], validate=True)
    array = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))
    if array.size != size[0] * size[1] * size[2]:
        raise ValueError(f"{array.size} ids are not of the shape {size}")
    first = fields.get("start", start)
    if not isinstance(first, int):
        raise ValueError("start must be an integer")
    return _of_array(array.reshape(size), first, shape)


def _of_array(ids_THK: np.ndarray, start: int, shape: RouteShape) -> RoutedExperts:
    """Of all hidden layers, dense ones zero; the checks are those of the compatible form."""
    wanted = (shape.num_hidden_layers, shape.top_k)
    if ids_THK.ndim != 3 or ids_THK.dtype.kind not in "iu" or ids_THK.shape[1:] != wanted:
        raise ValueError(f"{ids_THK.dtype} {list(ids_THK.shape)} is not of integers [rows, {wanted[0]}, {wanted[1]}]")
    layers = list(shape.moe_layer_ids)
    if np.delete(ids_THK, layers, axis=1).any():
        raise ValueError("a dense layer has expert ids")
    ids_TLK = ids_THK[:, layers]
    if ids_TLK.size and (ids_TLK.min() < 0 or ids_TLK.max() >= shape.num_experts):
        raise ValueError(f"expert ids span {ids_TLK.min()}..{ids_TLK.max()}, outside 0..{shape.num_experts - 1}")
    narrow = np.ascontiguousarray(ids_TLK.astype(id_dtype(shape.num_experts)))
    return RoutedExperts(narrow, shape.num_experts, shape.moe_layer_ids, shape.num_hidden_layers, start)
