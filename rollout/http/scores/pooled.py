"""Pooled rows of prompts, and the parts that answers of several doors share.

Shapes: N rows of a prompt, C columns, L labels.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rollout.core.errors import Unavailable
from rollout.core.specs.heads import LabelsSpec
from rollout.http.answers import Native, usage
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput
from rollout.tokenizer_manager.response import encode_json

_MANY_NUMBERS = 1 << 14
"""Numbers in an answer from which on it is encoded off the event loop."""


@dataclass(frozen=True)
class Pooled:
    """The rows of one prompt [N, C] in float32, `native`: the answer of /generate without tokens."""

    rows_NC: np.ndarray
    native: Native


async def pool(manager: TokenizerManager, wanted: GenerateReqInput) -> tuple[list[Pooled], bool]:
    """Return the rows of each prompt, and whether the prompts came as a list.

    Raises as `TokenizerManager.submit` does, and `Unavailable` for a request that was aborted.
    """
    handle = await manager.submit(wanted)
    natives = await handle.results()
    found = []
    for native, record in zip(natives, handle.records):
        assert record.finished is not None
        pooled = record.finished.pooled
        if pooled is None:
            raise Unavailable(f"the request was aborted: {record.finished.reason.message}")
        native["meta_info"]["weight_versions"] = [msgspec.structs.asdict(span) for span in pooled.versions]
        rows_NC = np.frombuffer(pooled.data, "<f4").reshape(pooled.num_rows, pooled.num_columns)
        found.append(Pooled(rows_NC, native))
    return found, handle.replies_with_list


def head(prefix: str, model: str, pooled: Sequence[Pooled]) -> dict[str, Any]:
    """Return the fields that a list of results begins with: tokens, and the versions of the weights behind it.

    `weight_versions` has spans over the positions of each prompt.
    """
    natives = [each.native for each in pooled]
    return {
        "id": f"{prefix}-{natives[0]['meta_info']['id']}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "usage": usage(natives, 1),
        "metadata": {"weight_version": natives[-1]["meta_info"]["weight_version"]},
        "weight_versions": [native["meta_info"]["weight_versions"] for native in natives],
    }


def probabilities(numbers_NL: np.ndarray, labels: LabelsSpec) -> np.ndarray:
    """Return what the labels' activation makes of rows of numbers, in float64."""
    wide_NL = numbers_NL.astype(np.float64)
    if labels.activation == "identity":
        return wide_NL
    if labels.activation == "sigmoid":
        return np.exp(-np.logaddexp(0.0, -wide_NL))
    return softmax(wide_NL)


def softmax(numbers_NL: np.ndarray) -> np.ndarray:
    """Return the softmax of each row."""
    powers_NL = np.exp(numbers_NL - numbers_NL.max(axis=-1, keepdims=True))
    shares_NL: np.ndarray = powers_NL / powers_NL.sum(axis=-1, keepdims=True)
    return shares_NL


def shown(values: np.ndarray, encoding: str) -> Any:
    """Return numbers as lists, or as base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")
    return values.tolist()


async def encoded(
    before: dict[str, Any] | None, name: str, entries: Sequence[Callable[[], Any]], num_values: int
) -> bytes:
    """Return JSON: the fields `before` and the list `name` of what the entries return, or that list alone.

    An answer of many numbers is made off the event loop, entry by entry.
    """

    def make() -> bytes:
        listed = b"[" + b",".join(encode_json(entry()) for entry in entries) + b"]"
        if before is None:
            return listed
        return encode_json(before)[:-1] + b"," + encode_json(name) + b":" + listed + b"}"

    return await asyncio.to_thread(make) if num_values > _MANY_NUMBERS else make()
