"""A sample of the fleet, and how it comes out of an answer of `/inference/v1/generate`."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from capture.errors import CaptureError
from capture.routed_experts import RoutedExperts, id_dtype
from examples.fleet.errors import FleetError
from rollout.client import RouteLayout


class Span(NamedTuple):
    """Output tokens `[start, end)` that weights of `version` sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """The question of a sample.  `index` tells samples apart, and is the seed."""

    index: int
    token_ids: tuple[int, ...]
    max_tokens: int

    def body(self) -> dict[str, Any]:
        """Return the body of `/inference/v1/generate`; the same each time it is sent."""
        sampling = {"temperature": 1.0, "max_tokens": self.max_tokens, "logprobs": 0, "seed": self.index}
        return {"token_ids": list(self.token_ids), "sampling_params": sampling}


@dataclass(frozen=True, eq=False)
class Sample:
    """An answer.  `routed_experts`: what the routers chose, a row for every token but the last.

    `asked_at_version`: what all engines served when it was sent, the last time.  `attempts`: how often it was sent.
    """

    prompt: Prompt
    output_ids: list[int]
    logprobs: list[float]
    routed_experts: RoutedExperts
    spans: list[Span]
    engine: str
    asked_at_version: int
    attempts: int = 1


def parse_sample(
    answer: Mapping[str, Any], prompt: Prompt, layout: RouteLayout, asked_at_version: int, attempts: int
) -> Sample | None:
    """Return the sample of an answer; None if the engine gave it up.  Raises `FleetError` if it is no sample."""
    try:
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            return None
        rows_THK = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        routed = RoutedExperts(
            rows_THK[:, list(layout.moe_layer_ids)].astype(id_dtype(layout.num_experts)),
            layout.num_experts,
            layout.moe_layer_ids,
            layout.num_hidden_layers,
        )
        return Sample(
            prompt=prompt,
            output_ids=list(choice["token_ids"]),
            logprobs=[float(entry["logprob"]) for entry in choice["logprobs"]["content"]],
            routed_experts=routed,
            spans=[Span(int(span["version"]), span["start"], span["end"]) for span in choice["weight_versions"]],
            engine=answer["model"],
            asked_at_version=asked_at_version,
            attempts=attempts,
        )
    except (KeyError, IndexError, TypeError, ValueError, EOFError, binascii.Error, CaptureError) as error:
        raise FleetError(f"sample {prompt.index}: malformed answer: {type(error).__name__}: {error}") from None
