"""Embeddings and classes of prompts, as arrays.

Shapes: N prompts, C numbers of an embedding, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from rollout.client import generation
from rollout.client.errors import ResponseFormatError
from rollout.client.method import method
from rollout.client.wire import Call, Reply, check

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class _Embedding(msgspec.Struct):
    embedding: list[float]


class _Class(msgspec.Struct):
    label: str
    probs: list[float]


class _Metadata(msgspec.Struct):
    weight_version: str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    metadata: _Metadata


class _Classes(msgspec.Struct):
    data: list[_Class]
    metadata: _Metadata


@dataclass(frozen=True, eq=False)
class Classes:
    """The best label of each prompt, and the numbers of all labels [N, L] in float64.

    They are probabilities, or the head's own numbers where these were asked for.
    """

    labels: list[str]
    numbers: np.ndarray
    weight_version: str


class PoolingCalls:
    """The calls of all clients that pool prompts."""

    @method
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["last", "mean", "cls"] = "last",
        dimensions: int | None = None,
        normalize: bool = True,
        timeout: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Call[np.ndarray]:
        """Return the embeddings of one prompt or several, texts or token ids: float32 [N, C].

        Rows are cut to their first `dimensions` numbers, then scaled to length 1 unless `normalize` is false.
        """
        body = {"input": _plain(prompts), "pooling": pooling, "dimensions": dimensions, "normalize": normalize}

        def parse(reply: Reply) -> np.ndarray:
            return np.array(
                [each.embedding for each in _decoded(reply, "/v1/embeddings", _Embeddings).data], dtype=np.float32
            )

        return _call("/v1/embeddings", parse, body | dict(extra_body or {}), timeout)

    @method
    def classify(
        self,
        prompts: Prompts,
        *,
        raw: bool = False,
        timeout: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Call[Classes]:
        """Return the classes of one prompt or several under a model with labels, as a reward model is.

        `raw`: the head's own numbers instead of probabilities.
        """
        body = {"input": _plain(prompts), "use_activation": not raw}

        def parse(reply: Reply) -> Classes:
            answer = _decoded(reply, "/classify", _Classes)
            numbers_NL = np.array([each.probs for each in answer.data], dtype=np.float64)
            return Classes([each.label for each in answer.data], numbers_NL, answer.metadata.weight_version)

        return _call("/classify", parse, body | dict(extra_body or {}), timeout)


def _plain(prompts: Prompts) -> Any:
    """Return prompts as JSON has them; arrays of ids become lists."""
    is_text = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], str))
    return prompts if is_text else generation.plain_ids(prompts)


def _call(path: str, parse: Any, body: dict[str, Any], timeout: float | None) -> Call[Any]:
    return Call("POST", path, parse, body, timeout="generate", timeout_s=timeout, retry="refused")


def _decoded(reply: Reply, path: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(check(reply).body, type=kind)
    except msgspec.DecodeError as error:
        raise ResponseFormatError(f"the answer to {path} does not match its reply type: {error}") from None
