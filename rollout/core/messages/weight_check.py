"""The control verb by which vLLM's trainers check weights: `/weights_checker` without a state between its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rollout.core.messages.message import ControlReqInput, Endpoint, Reply


class WeightCheckReply(Reply, kw_only=True):
    """`checksums`: of every tensor in memory, by its name.  `mismatches`: names of tensors, in alphabetical order."""

    checksums: dict[str, str] | UnsetType = UNSET
    match: bool | UnsetType = UNSET
    mismatches: list[str] | UnsetType = UNSET
    status: Literal["reset"] | UnsetType = UNSET

    def merged(self, replies: Sequence[Any]) -> WeightCheckReply:
        """Return this reply with the mismatches of all replicas."""
        if self.mismatches is UNSET:
            return self
        names = sorted({name for reply in replies for name in reply.mismatches})
        return msgspec.structs.replace(self, match=not names, mismatches=names)


class WeightCheckReqInput(ControlReqInput[WeightCheckReply]):
    """Return the checksums of all tensors, or compare them with a `baseline`, or fill the tensors with NaN.

    `baseline`: what `checksum` answered before, or a trainer computed; only `compare` takes it.
    """

    endpoint = Endpoint(path="/weight_checker", tag="weights", shape="bare")

    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


VERBS: tuple[type[ControlReqInput[Any]], ...] = (WeightCheckReqInput,)
