"""Replies about a weight update: the one that was published, and the one that is open."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rollout.core.errors import BadRequest
from rollout.core.messages.message import Name, Reply


class AdapterOfUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The adapter that an update makes a version of.  `config`: the object of PEFT's `adapter_config.json`.

    `aliases`: names of tensors that do not come, as they equal others, and the names of those.
    """

    adapter: Name
    config: dict[str, Any]
    aliases: dict[str, str] = {}


class TargetOfUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The target of an update: an adapter, with the fields of `AdapterOfUpdate`, or the `draft`."""

    adapter: Name | None = None
    config: dict[str, Any] | None = None
    aliases: dict[str, str] = {}
    draft: bool = False

    @property
    def stated_adapter(self) -> AdapterOfUpdate | None:
        """The adapter; None: the draft.  Raises `BadRequest` for both, none, or a part of an adapter."""
        if self.draft and self.adapter is None and self.config is None and not self.aliases:
            return None
        if self.draft or self.adapter is None or self.config is None:
            raise BadRequest('target is {"draft": true}, or {"adapter": ..., "config": ...}')
        return AdapterOfUpdate(adapter=self.adapter, config=self.config, aliases=self.aliases)


class DraftVersion(msgspec.Struct, kw_only=True):
    """The version of a draft: the label of the model's weights that it belongs to.

    `is_stale`: the model has other weights since.  `torn`: why its content is of no version, if so.
    `came`: the draft's tensors came in this update, alone or with the model's.
    """

    weight_version: str
    is_stale: bool
    content_digest: str | None = None
    torn: str | None = None
    came: Literal["alone", "with the model"] | None = None


class AdapterVersion(msgspec.Struct, kw_only=True):
    """A version of an adapter: `content_digest` names its tensors and scales."""

    name: str
    version: int
    content_digest: str


class CommitReply(Reply, kw_only=True):
    """The published version; unset without one.  `content_digest`: of the tensors as sent; `held_digest`: of memory.

    `adapter`: of an update whose target is one; the other versions are the ones in force.  `adapters`: the ones that
    came into force with the model's weights.  `draft`: the draft's, where a model drafts.
    """

    adapter: AdapterVersion | UnsetType = UNSET
    adapters: list[AdapterVersion] | UnsetType = UNSET
    draft: DraftVersion | UnsetType = UNSET

    weight_version: str | UnsetType = UNSET
    weight_epoch: int | UnsetType = UNSET
    content_digest: str | UnsetType | None = UNSET
    held_digest: str | UnsetType | None = UNSET
    placement_epoch: int | UnsetType = UNSET
    placement_adopted: bool | UnsetType = UNSET
    placement_note: str | UnsetType = UNSET
    num_tensors: int | UnsetType = UNSET
    num_bytes: int | UnsetType = UNSET
    prepared_seconds: float | UnsetType | None = UNSET
    staging_seconds: float | UnsetType = UNSET
    receiving_seconds: float | UnsetType = UNSET
    stall_seconds: float | UnsetType = UNSET


class EndedUpdateState(msgspec.Struct, kw_only=True):
    """The end of one of the last updates, see `weight_sync.update_book.EndedUpdate`."""

    update_id: str | None
    kind: Literal["committed", "lost", "aborted"]
    weight_version: str | None
    weight_epoch: int | None
    reason: str | None
    num_tensors: int
    num_bytes: int
    prepared_s: float | None = None
    staging_s: float
    receiving_s: float = 0.0
    stall_s: float
    steps_held: bool
    ended_at: float
    target: str = "model"


class UpdateStateReply(Reply, kw_only=True):
    """The state of the open update, `busy` to `poisoned`; or the `outcome` and `reason` of a named update.

    `unpaired`: tensors that wait for other parts of their FP8 or INT4 weights; `unpaired_bytes`: memory of them.
    For a committed update, the fields of its commit's reply are set too.
    """

    update_id: str | None
    outcome: Literal["open", "verified", "committed", "lost", "aborted", "unknown"] | UnsetType = UNSET
    reason: str | UnsetType | None = UNSET
    open: bool | UnsetType = UNSET
    implicit: bool | UnsetType = UNSET
    bound: bool | UnsetType = UNSET
    target: str | UnsetType | None = UNSET
    state: str | UnsetType | None = UNSET
    weight_version: str | UnsetType | None = UNSET
    coverage: Literal["full", "partial"] | UnsetType | None = UNSET
    received: int | UnsetType | None = UNSET
    missing: int | UnsetType | None = UNSET
    received_names: list[str] | UnsetType | None = UNSET
    missing_names: list[str] | UnsetType | None = UNSET
    num_bytes: int | UnsetType | None = UNSET
    unpaired: int | UnsetType | None = UNSET
    unpaired_bytes: int | UnsetType | None = UNSET
    lease_s: float | UnsetType | None = UNSET
    lease_left_s: float | UnsetType | None = UNSET
    failed: str | UnsetType | None = UNSET
    staging: str | UnsetType = UNSET
    last_failure: dict[str, Any] | UnsetType | None = UNSET
    busy: bool | UnsetType = UNSET
    steps_held: bool | UnsetType = UNSET
    pause_left_s: float | UnsetType | None = UNSET
    poisoned: str | UnsetType | None = UNSET
    adapter: AdapterVersion | UnsetType = UNSET
    adapters: list[AdapterVersion] | UnsetType = UNSET
    draft: DraftVersion | UnsetType = UNSET
    weight_epoch: int | UnsetType = UNSET
    content_digest: str | UnsetType | None = UNSET
    held_digest: str | UnsetType | None = UNSET
    placement_epoch: int | UnsetType = UNSET
    placement_adopted: bool | UnsetType = UNSET
    placement_note: str | UnsetType = UNSET
    num_tensors: int | UnsetType = UNSET
    prepared_seconds: float | UnsetType | None = UNSET
    staging_seconds: float | UnsetType = UNSET
    receiving_seconds: float | UnsetType = UNSET
    stall_seconds: float | UnsetType = UNSET
