"""Replies of the verbs that bring, read and check weights outside of an update."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from rollout.core.messages.message import Reply
from rollout.core.messages.update_state import CommitReply


class PullReply(CommitReply, kw_only=True):
    """`start`: what the new version was made from; null: a full checkpoint.  `num_patched`: tensors that changed.

    `memory`: how the weights that serve were brought there, null if they were not.
    """

    version: int
    previous: int | None
    start: int | None
    num_deltas: int
    num_patched: int
    written_bytes: int
    memory: Literal["delta", "full", "unchanged"] | None


class WeightsReply(Reply, kw_only=True):
    """`parameter`: nested lists.  `staged`: as it was sent, not as it serves."""

    parameter: Any
    staged: bool


class CheckerReply(Reply, kw_only=True):
    """`checksum`: the first four.  `snapshot`: from `num_tensors` to `weight_version`.  `compare`: the next four.

    `checksums` and `held_digest` are of the tensors in memory; `digest` is of the tensors as sent, if memory holds
    their result, else the same as `held_digest`.
    """

    checksums: dict[str, str] | UnsetType = UNSET
    held_digest: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    expected_digest: str | UnsetType | None = UNSET
    num_tensors: int | UnsetType = UNSET
    num_bytes: int | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    equal: bool | UnsetType = UNSET
    num_compared: int | UnsetType = UNSET
    differing: list[dict[str, Any]] | UnsetType = UNSET
    snapshot_weight_version: str | UnsetType = UNSET
    poisoned: str | UnsetType = UNSET


class DropSnapshotReply(Reply, kw_only=True):
    """`num_bytes`: of host memory that the snapshot held on a rank."""

    num_bytes: int


class VersionReply(Reply, kw_only=True):
    new_version: str
