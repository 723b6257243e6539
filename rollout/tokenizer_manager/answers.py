"""One answer out of those of all data-parallel ranks.

Knows which numbers add up.  Does not know verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout.core.io_struct import ControlReqOutput, SchedulerReady

_ADD_UP = {
    "gen_throughput", "kv_bytes", "max_total_num_tokens", "model_bytes", "num_aborted", "num_cached_tokens",
    "num_generated_tokens", "num_paused_requests", "num_pinned_tokens", "num_prompt_tokens", "num_prompt_tokens_reused",
    "num_released_tokens", "num_retracted_reqs", "num_running", "num_running_reqs", "num_running_sessions",
    "num_total_tokens", "num_used_tokens", "num_waiting", "num_waiting_reqs",
}  # fmt: skip


def merge_answers(answers: Sequence[ControlReqOutput]) -> ControlReqOutput:
    """Success if all succeeded, else the first refusal.

    `data` is the first rank's, with counts added up and, where there are any, `dp_ranks`: the data of each.
    """
    in_order = sorted(answers, key=lambda answer: answer.dp_rank)
    if len(in_order) == 1:
        return in_order[0]
    first = next((answer for answer in in_order if not answer.success), in_order[0])
    data = dict(first.data)
    for name in _ADD_UP & data.keys():
        data[name] = sum(answer.data.get(name, 0) for answer in in_order)
    if "paused" in data:
        data["paused"] = any(answer.data.get("paused") for answer in in_order)
    if "token_usage" in data:
        data["token_usage"] = data["num_used_tokens"] / data["max_total_num_tokens"]
    if _ADD_UP & data.keys():
        data["dp_ranks"] = [answer.data for answer in in_order]
    return msgspec.structs.replace(first, data=data)


def by_dp_rank(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What each data-parallel rank said, of the `data` of a merged answer."""
    return data.get("dp_ranks") or [data]


def merge_ready(messages: Sequence[SchedulerReady]) -> SchedulerReady:
    """A request must fit on every rank."""
    slots = min(message.max_total_num_tokens for message in messages)
    return msgspec.structs.replace(messages[0], max_total_num_tokens=slots)
