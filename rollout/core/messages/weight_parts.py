"""The verb by which a sender asks which parts of tensors each rank keeps."""

from __future__ import annotations

from rollout.core.messages.message import ControlReqInput, Endpoint, Reply, Size
from rollout.core.messages.tensor_lists import WithLists


class WeightPartsReply(Reply, kw_only=True):
    """`patterns`: what each rank is to be sent of a tensor: null for all of it, or boxes, [[start, stop], ...] each.

    `tensors`: the pattern of each tensor, by its place in `patterns`.
    """

    placement_epoch: int
    patterns: list[list[list[list[list[int]]] | None]]
    tensors: list[int]


class WeightPartsReqInput(WithLists, ControlReqInput[WeightPartsReply]):
    """The parts of these tensors that each rank keeps now: what a sender is to send it.

    The answer holds as long as the expert map has this `placement_epoch`.
    """

    endpoint = Endpoint(path="/weight_parts", tag="weights", hidden=frozenset({"tensor_lists", "lists_digest"}))

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    tensor_lists: bytes | None = None
    lists_digest: bytes | None = None
