"""`Alternatives`: what the scheduler says of tokens that could have stood in the place of others."""

from __future__ import annotations

from typing import Literal

import msgspec


class Alternatives(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Log-probabilities of other tokens at the places of n tokens: little-endian rows, one after the other.

    `top_logprobs` [n, top_logprobs_num] of `dtype`, best first, and their `top_ids`, int32; `chosen_logprobs` [n, C] of
    the C ids of `token_ids_logprob`.
    """

    dtype: Literal["float32", "float64"] = "float32"
    top_logprobs: bytes = b""
    top_ids: bytes = b""
    chosen_logprobs: bytes = b""
