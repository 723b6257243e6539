"""Answers in msgpack, read as the values of the JSON answer: arrays become the lists that JSON has in their place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from capture.errors import CaptureError
from capture.routed_experts import RoutedExperts
from rollout.client.errors import ResponseFormatError

MEDIA_TYPE = "application/x-msgpack"
_SIDES = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
_DTYPES = frozenset({"int32", "float32", "float64", "uint8", "uint16"})


def parse_binary(body: bytes) -> Any:
    """Parse the content of an answer in msgpack.  Routes become `RoutedExperts`.  Raises `ResponseFormatError`."""
    try:
        content = msgspec.msgpack.decode(body)
        if isinstance(content, list):
            return [_plain(each) for each in content]
        return _plain(content)
    except (msgspec.DecodeError, CaptureError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResponseFormatError(f"the server's msgpack answer cannot be read: {reason}") from None


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    meta = content["meta_info"]
    content["output_ids"] = array(content["output_ids"]).tolist()
    if "prompt_token_ids" in content:
        content["prompt_token_ids"] = array(content["prompt_token_ids"]).tolist()
    if isinstance(meta.get("output_token_logprobs"), Mapping):
        _expand(meta, "output", content["output_ids"], first=0)
        if "input_token_logprobs" in meta:
            _expand(meta, "input", array(meta.pop("input_token_ids")).tolist(), first=1)
        for name in _SIDES:
            if f"output_{name}" in meta:
                meta.setdefault(f"input_{name}", [])  # as JSON has it where the prompt was not scored
    if isinstance(meta.get("routed_experts"), Mapping):
        meta["routed_experts"] = _routes(meta["routed_experts"], meta["routed_experts_start_len"])
    return content


def array(content: Mapping[str, Any]) -> np.ndarray:
    """Return the values of an array.  Raises `ValueError` if its parts contradict each other."""
    dtype, shape, data = content["dtype"], content["shape"], content["data"]
    if dtype not in _DTYPES:
        raise ValueError(f"no array has the dtype {dtype!r}")
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    if math.prod(shape) != len(values):
        raise ValueError(f"an array of {len(values)} values cannot have the shape {shape}")
    return values.reshape(shape)


def _expand(meta: dict[str, Any], side: str, ids: list[int], *, first: int) -> None:
    """Make entries of the arrays of one side; the first `first` tokens have no row among the alternatives."""
    values = array(meta[f"{side}_token_logprobs"]).tolist()
    meta[f"{side}_token_logprobs"] = [
        [None if math.isnan(value) else value, token_id, None] for value, token_id in zip(values, ids, strict=True)
    ]
    for name in (f"{side}_top_logprobs", f"{side}_token_ids_logprobs"):
        if name in meta:
            logprobs, others = array(meta[name]["logprobs"]), array(meta[name]["ids"])
            rows = zip(logprobs.tolist(), np.broadcast_to(others, logprobs.shape).tolist(), strict=True)
            entries = [[[value, token_id, None] for value, token_id in zip(*row, strict=True)] for row in rows]
            meta[name] = [None] * first + entries


def _routes(content: Mapping[str, Any], start: int) -> RoutedExperts:
    ids_TLK = array(content)
    return RoutedExperts(
        logical_ids_TLK=ids_TLK.astype(ids_TLK.dtype.newbyteorder("="), copy=False),
        num_experts=content["num_experts"],
        moe_layer_ids=tuple(content["moe_layer_ids"]),
        num_hidden_layers=content["num_hidden_layers"],
        start=start,
        weight_versions=tuple((span["version"], span["start"], span["end"]) for span in content["weight_versions"]),
    )
