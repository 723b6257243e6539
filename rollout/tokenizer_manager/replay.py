"""`replay_routed_experts`: routes that a client gives a request, read and checked before it is queued.

They come in any wire form in which this server returns routes:

    compatible   base64 of int32 [rows, hidden layers, K]
    npy          base64 of a .npy file of the same
    dict, packed   {"data": base64, "shape": [..], "dtype": ..}, and perhaps "start"
    compact      base64 of the safetensors record, which names its first token itself

Shapes: T rows, L MoE layers, H hidden layers, K top-k.
"""

from __future__ import annotations

import asyncio
import base64
import math
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from capture.codec import NPY_MAGIC, decode_compact, decode_compatible, decode_npy
from capture.errors import CaptureError
from capture.routed_experts import RoutedExperts, id_dtype
from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.messages.io_struct import ReplayedRoutes
from rollout.tokenizer_manager.request import ExpandedRequest
from rollout.tokenizer_manager.response import RouteShape

MAX_REASON_CHARS = 400
"""Length of the reason why a record is refused: it may repeat the record."""
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Envelope(msgspec.Struct, kw_only=True):
    """The forms `dict` and `packed`."""

    data: str
    shape: tuple[_Size, _Size, _Size]  # rows, hidden layers, K
    dtype: Literal["uint8", "uint16", "int16", "int32"]
    start: _Size | None = None


async def read_replays(expanded: ExpandedRequest, start: int, shape: RouteShape) -> None:
    """Read the routes that prompts bring along, off the event loop; shared routes are read once.

    They partition the prefix cache: KV computed under them serves only requests with the same routes.  Raises
    `UnsupportedFeature` for a dense model, and as `read_replay` does.
    """
    read: dict[int, tuple[ReplayedRoutes, str]] = {}
    for message, value in zip(expanded.messages, expanded.replays, strict=True):
        if value is None:
            continue
        if not shape.moe_layer_ids:
            raise UnsupportedFeature("replay_routed_experts: this model is dense, it has no experts to route to")
        if id(value) not in read:
            read[id(value)] = await asyncio.to_thread(_named, value, start, shape)
        message.replay, name = read[id(value)]
        message.extra_key = f"{message.extra_key or ''}\x00{name}"


def read_replay(value: Any, start: int, shape: RouteShape) -> ReplayedRoutes:
    """Return the rows of `value`, for the tokens from `start` on.

    Raises `BadRequest` for a form that is not known, other layers or K than the model's, ids that it does not have, an
    expert twice in one layer of a row, and rows that are missing.
    """
    try:
        routed = _decode(value, start, shape)
    except (CaptureError, ValueError) as error:
        raise _refusal(str(error)) from None
    ids_TLK = routed.logical_ids_TLK
    layers = (routed.moe_layer_ids, routed.num_hidden_layers, ids_TLK.shape[2], routed.num_experts)
    wanted = (shape.moe_layer_ids, shape.num_hidden_layers, shape.top_k, shape.num_experts)
    if layers != wanted:
        raise _refusal(
            f"of MoE layers {list(layers[0])} of {layers[1]}, top-{layers[2]} of {layers[3]} "
            f"experts; the model has {list(wanted[0])} of {wanted[1]}, top-{wanted[2]} of {wanted[3]}"
        )
    missing = routed.missing_rows()
    if len(missing):
        raise _refusal(f"row {int(missing[0])} is missing")
    if start and routed.start != start:
        raise _refusal(f"the rows begin at token {routed.start}, replay_routed_experts_start_len is {start}")
    data = ids_TLK.astype("<u2").tobytes()
    return ReplayedRoutes(data=data, shape=ids_TLK.shape, start=routed.start)


def check_replay(replay: ReplayedRoutes, prompt_len: int, max_new_tokens: int) -> None:
    """Raise `BadRequest` for rows of tokens that the request never computes."""
    end, computed = replay.start + replay.shape[0], prompt_len + max(max_new_tokens - 1, 0)
    if end > computed:
        raise _refusal(
            f"rows for tokens {replay.start}..{end - 1}, but the request computes {computed}: "
            f"{prompt_len} prompt and up to {max_new_tokens} new, without the last"
        )


def _named(value: Any, start: int, shape: RouteShape) -> tuple[ReplayedRoutes, str]:
    """Return the routes, and a name for them."""
    replay = read_replay(value, start, shape)
    salt = replay.start.to_bytes(8, "little")
    return replay, blake2b(replay.data, digest_size=16, person=b"routes", salt=salt).hexdigest()


def _refusal(reason: str) -> BadRequest:
    return BadRequest(f"replay_routed_experts: {reason[:MAX_REASON_CHARS]}")


def _decode(value: Any, start: int, shape: RouteShape) -> RoutedExperts:
    if isinstance(value, dict):
        return _of_envelope(value, start, shape)
    if not isinstance(value, str):
        raise ValueError(f"routes are text or an object, not {type(value).__name__}")
    head = base64.b64decode(value[:16] if len(value) >= 16 else value, validate=True)
    if head.startswith(NPY_MAGIC):
        return _of_array(decode_npy(base64.b64decode(value, validate=True)), start, shape)
    # The ninth byte and the next begin a JSON header: as an id it would be beyond any model's.
    if head[8:10] == b'{"':
        return decode_compact(base64.b64decode(value, validate=True))
    return decode_compatible(
        value, shape.num_hidden_layers, shape.top_k, shape.moe_layer_ids, shape.num_experts, start=start
    )


def _of_envelope(fields: dict[str, Any], start: int, shape: RouteShape) -> RoutedExperts:
    envelope = msgspec.convert(fields, _Envelope)
    data = base64.b64decode(envelope.data, validate=True)
    dtype, size = np.dtype(envelope.dtype).newbyteorder("<"), math.prod(envelope.shape)
    if size * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are not of the shape {list(envelope.shape)} of {envelope.dtype}")
    array = np.frombuffer(data, dtype).reshape(envelope.shape)
    return _of_array(array, start if envelope.start is None else envelope.start, shape)


def _of_array(ids_THK: np.ndarray, start: int, shape: RouteShape) -> RoutedExperts:
    """Return the routes of an array of all hidden layers, dense ones zero, after the checks of the compatible form."""
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
