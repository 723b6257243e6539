"""An update of one call: the fields with which its bucket begins and ends it, and the reply that states that it may."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rollout.core.messages.message import Limits, Reply

Seconds = Annotated[float, Limits(ge=0, le=86400)]


class WholeUpdate(msgspec.Struct, kw_only=True):
    """An update that has one bucket begins, and ends, in the call of the bucket: the fields that begin it.

    `coverage`, `prepared_s`: as at begin.  `fingerprints`: 16 hex digits for each tensor of the call, end to end: they
    and its lists are the manifest; null: there is none.  A partial update must have them: without a manifest an end
    would take one whose bucket came too late.
    """

    coverage: Literal["full", "partial"] = "full"
    fingerprints: str | None = None
    prepared_s: Seconds | None = None


class JoinedReply(Reply, kw_only=True):
    """The reply of a rendezvous.  `whole_updates`: a bucket may have `whole_update`.

    `memory_token`: in the memory that the call names, if every rank has read the same there; else `memory_refused`.
    """

    whole_updates: bool
    memory_token: str | UnsetType = UNSET
    memory_refused: str | UnsetType = UNSET
