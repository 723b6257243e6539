"""Memory of a sender that an engine on its machine maps."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rollout.core.messages.message import Limits


class SenderMemory(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The `num_bytes` bytes of the open file `/proc/PROCESS/fd/DESCRIPTOR`, whose number is `inode`.

    `filled`: how many of them are there when a bucket is announced, so that no notice comes of their pieces.
    """

    process: Annotated[int, Limits(ge=1, lt=2**31)]
    descriptor: Annotated[int, Limits(ge=0, lt=2**31)]
    inode: Annotated[int, Limits(ge=0, lt=2**63)]
    num_bytes: Annotated[int, Limits(ge=1, lt=2**48)]
    filled: Annotated[int, Limits(ge=0, lt=2**48)] = 0
