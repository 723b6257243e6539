"""`Alternatives` made from lists, and read as lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.core.messages.req_output import Alternatives


def alternatives(
    top: Sequence[tuple[Sequence[float], Sequence[int]]] = (), chosen: Sequence[Sequence[float]] = ()
) -> Alternatives:
    """Make a message in float64 from two rows for each token: likeliest tokens (values, ids), and chosen ones."""
    return Alternatives(
        dtype="float64",
        top_logprobs=np.array([values for values, _ in top], dtype="<f8").tobytes(),
        top_ids=np.array([ids for _, ids in top], dtype="<i4").tobytes(),
        chosen_logprobs=np.array(chosen, dtype="<f8").tobytes(),
    )


def top_rows(message: Alternatives | None, count: int) -> list[tuple[list[float], list[int]]]:
    """Return (values, ids) of each of `count` tokens, or an empty list if the message has none."""
    if message is None or not message.top_ids:
        return []
    values = np.frombuffer(message.top_logprobs, message.dtype).reshape(count, -1)
    return list(zip(values.tolist(), np.frombuffer(message.top_ids, "<i4").reshape(count, -1).tolist(), strict=True))


def chosen_rows(message: Alternatives | None, count: int) -> list[Any]:
    """Return the values of chosen ids at each of `count` tokens, or an empty list if the message has none."""
    if message is None or not message.chosen_logprobs:
        return []
    return np.frombuffer(message.chosen_logprobs, message.dtype).reshape(count, -1).tolist()  # type: ignore[no-any-return]
