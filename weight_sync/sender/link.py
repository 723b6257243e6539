"""One engine as the sender sees it: control calls in threads, and the group that both are in.  What a bucket is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.bucket import cut_pieces
from weight_sync.engine_control import EngineControl
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.receivers.distributed import PIECE_BYTES
from weight_sync.sender.lists import Manifest, TensorLists
from weight_sync.sender.rank_groups import EngineRanks, RankPiece
from weight_sync.tensor_meta import TensorMeta
from weight_sync.waiting import in_thread

if TYPE_CHECKING:
    from weight_sync.sender.group import SenderGroup

GRACE_S = 2.0
"""Over a deadline, for the engine's own error, which states more than that the deadline passed."""


@dataclass(frozen=True)
class Bucket:
    """The tensors that one call sends, end to end, broadcast in `pieces`, uint8, as `split_pieces` cuts them.

    `more`: further fields of the call.
    """

    lists: TensorLists
    pieces: Sequence[torch.Tensor] | Sequence[RankPiece]
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


def split_pieces(metas: Sequence[TensorMeta], content: torch.Tensor) -> list[torch.Tensor]:
    """Return the content of a bucket, uint8 [bytes], as it is broadcast: views."""
    sizes = [sum(meta.nbytes for meta in piece) for piece in cut_pieces(metas, PIECE_BYTES)]
    return list(content.split(sizes)) if sizes else []


class EngineLink:
    """`timeout_s`: deadline of the rendezvous, of each bucket and of each call.

    `per_rank`: what each rank of the engine keeps, which is what it is sent; None: all ranks are sent all.
    """

    def __init__(
        self, name: str, control: EngineControl, timeout_s: float, per_rank: EngineRanks | None = None
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.per_rank = per_rank
        self.group: SenderGroup | None = None
        self.rejoins = False
        """Its group ended through the failure of another engine: it joins the next one by itself."""
        self._control = control

    def require_group(self) -> SenderGroup:
        """Return the joined group.  Raises `TransactionStateError`."""
        if self.group is None:
            raise TransactionStateError(f"engine {self.name} is not connected; connect first")
        return self.group

    def num_ranks(self, expected: int | None) -> int:
        """Ask the engine for the number of its ranks.

        Raises `WeightRequestError` if others are expected, or if it does not state what its ranks keep and has to.
        """
        if self.per_rank is not None and getattr(self._control, "weight_parts", None) is None:
            raise WeightRequestError("per_rank needs an engine with weight_parts")
        if getattr(self._control, "get_world_size", None) is None:
            return 1 if expected is None else expected
        asked = self.call("get_world_size")
        wait([asked], timeout=self.timeout_s + GRACE_S)
        if not asked.done():
            raise TransportError(f"the engine did not report its number of ranks within {self.timeout_s:g} s")
        if isinstance(asked.exception(), AttributeError):  # a wrapper of a control that has no such call
            return 1 if expected is None else expected
        num_ranks = int(asked.result())
        if expected not in (None, num_ranks):
            raise WeightRequestError(
                f"engine_world_size is {expected}, but the engine has {num_ranks} ranks; leave it out"
            )
        return num_ranks

    def call(self, verb: str, **fields: Any) -> Future[Any]:
        """Start a control call.  An engine that does not take `prepared_s` does not get it; one that does not take
        lists gets the entries of a manifest.
        """
        control = getattr(self._control, verb)
        manifest = fields.get("manifest")
        if isinstance(manifest, Manifest):
            takes_lists = getattr(self._control, "takes_lists", False) is True  # a wrapper may have any attribute
            fields["manifest"] = manifest.as_lists() if takes_lists else manifest.as_entries()
        if verb == "begin_weight_update" and self.per_rank is not None:
            fields |= self.per_rank.begin_fields
        if "prepared_s" in fields and "prepared_s" not in inspect.signature(control).parameters:
            del fields["prepared_s"]
        return in_thread(control, **fields)
