"""The parts of a response that are arrays where the answer is msgpack: token ids, log-probabilities and routes.

An array is an object of its `dtype`, its `shape` and its `data`: little-endian rows, one after the other.  Fields have
the names that they have in JSON.  Shapes: n tokens, K likeliest tokens at each place, C chosen ones.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from rollout.core.messages.req_output import RoutedExpertsPayload
from rollout.tokenizer_manager.sample import AlternativeArrays, SampleRecord, message_arrays

MEDIA_TYPE = "application/x-msgpack"


def encode_binary(content: Any) -> bytes:
    """Return msgpack bytes."""
    return msgspec.msgpack.encode(content)


def list_head(count: int) -> bytes:
    """Return the bytes before the elements of a list in msgpack."""
    return b"\xdd" + count.to_bytes(4, "big")


def id_array(ids: Sequence[int]) -> dict[str, Any]:
    """Return token ids [n] as an array of int32."""
    return _array(np.array(ids, dtype="<i4"))


def add_logprob_arrays(meta: dict[str, Any], record: SampleRecord) -> None:
    """Add the log-probabilities of a record [n], and of the alternatives [n, K] and [n, C], as arrays.

    The first token of a prompt has none: its value is NaN, and it has no row among the alternatives.
    `input_token_ids` are the ids of the prompt's tokens that have a value here; the others are `output_ids`.
    """
    source, count = record.source, len(record.output_ids)
    _add(meta, "output", record, record.output_logprobs, record.output_alternatives.arrays(count))
    meta["output_token_logprobs_length"] = count
    prompt = None if record.finished is None else record.finished.prompt_logprobs
    if prompt is not None:
        num_chosen = len(source.token_ids_logprob or ())
        rows = message_arrays(prompt.alternatives, len(prompt.values) - 1, source.top_logprobs_num, num_chosen)
        _add(meta, "input", record, prompt.values, rows)
        meta["input_token_ids"] = id_array(record.prompt_ids[prompt.start : prompt.start + len(prompt.values)])


def route_array(payload: RoutedExpertsPayload, num_layers: int, top_k: int) -> dict[str, Any]:
    """Return rows of logical expert ids [rows, `num_layers`, `top_k`] as an array, as the scheduler sent them."""
    return {"dtype": payload.dtype, "shape": [payload.num_rows, num_layers, top_k], "data": payload.data}


def _add(
    meta: dict[str, Any], side: str, record: SampleRecord, values: Sequence[float | None], rows: AlternativeArrays
) -> None:
    source = record.source
    meta[f"{side}_token_logprobs"] = _array(_floats(values))
    if source.top_logprobs_num:
        meta[f"{side}_top_logprobs"] = {"logprobs": _array(rows.top_logprobs), "ids": _array(rows.top_ids)}
    if source.token_ids_logprob:
        ids = id_array(source.token_ids_logprob)
        meta[f"{side}_token_ids_logprobs"] = {"logprobs": _array(rows.chosen_logprobs), "ids": ids}


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """Return log-probabilities as float32, or as float64 where that would lose bits.  None becomes NaN."""
    if None not in values:
        quick = array.array("f", cast(Sequence[float], values))
        if quick.tolist() == values:
            return np.frombuffer(quick, "<f4")
    exact = np.array(values, dtype="<f8")
    with np.errstate(over="ignore"):
        short = exact.astype("<f4")
    return short if np.array_equal(short, exact, equal_nan=True) else exact


def _array(values: np.ndarray) -> dict[str, Any]:
    return {"dtype": values.dtype.name, "shape": list(values.shape), "data": values.tobytes()}
