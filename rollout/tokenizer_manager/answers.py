"""One answer out of those of all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout.core.io_struct import SchedulerReady
from rollout.core.message import AnyReply, ControlReqOutput


def merge_answers(answers: Sequence[ControlReqOutput[AnyReply]]) -> ControlReqOutput[AnyReply]:
    """Success if all succeeded, with the replies merged; else the first refusal."""
    in_order = sorted(answers, key=lambda answer: answer.dp_rank)
    first = next((answer for answer in in_order if not answer.success), in_order[0])
    if not first.success or len(in_order) == 1:
        return first
    return msgspec.structs.replace(first, data=first.reply.merged([answer.reply for answer in in_order]))


def merge_ready(messages: Sequence[SchedulerReady]) -> SchedulerReady:
    """A request must fit on every rank."""
    slots = min(message.max_total_num_tokens for message in messages)
    return msgspec.structs.replace(messages[0], max_total_num_tokens=slots)
