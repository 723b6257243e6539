"""The adapters of a rank's routed experts in one layer, by expert and by slot.

Experts come first in every tensor, so that the rows of an expert move with it, as its weights do.

Shapes: P experts stored here, S slots, D hidden, I expert intermediate of this rank, O outputs, R greatest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.kernels.ops import ExpertPart
from rollout.layers.build import Build
from rollout.layers.lora import LoraPlace, SlotSizes, share_of
from rollout.layers.shard import Shard

_PARTS: dict[ExpertPart, int] = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}


class ExpertLoraSlots:
    """The matrices that `adapted_experts` takes: `a13`, `b13`, `a2`, `b2` and `ranks` [P, S, 3].

    They keep their places, so that a recorded forward holds for every content.  With a share `inner` of the inner
    features a rank has its columns of B of gate and up, and its rows of A of down: the product is its part of the sum.
    """

    def __init__(self, build: Build, sizes: SlotSizes, experts: int, hidden_size: int, inner: Shard) -> None:
        """Make empty slots in the model's dtype, however the weights are held."""
        self._inner = inner
        lead = (experts, sizes.slots)
        self.a13 = build.empty(*lead, 2, hidden_size, sizes.rank).zero_()
        self.b13 = build.empty(*lead, sizes.rank, 2 * inner.length).zero_()
        self.a2 = build.empty(*lead, inner.length, sizes.rank).zero_()
        self.b2 = build.empty(*lead, sizes.rank, hidden_size).zero_()
        self.ranks = torch.zeros(*lead, 3, dtype=torch.int64, device=build.device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The matrices in the operator's order, and the ranks."""
        return self.a13, self.b13, self.a2, self.b2, self.ranks

    def clear(self, slot: int) -> None:
        """Empty a slot: it adapts no expert."""
        self.ranks[:, slot] = 0

    def content(self, slot: int) -> list[torch.Tensor]:
        """Return copies of what a slot holds of each expert: its matrices, and its ranks [P, 3]."""
        return [held[:, slot].clone() for held in self.tensors]

    def restore(self, slot: int, content: Sequence[torch.Tensor]) -> None:
        """Put back what `content` returned; no expert has moved since then."""
        for held, copy in zip(self.tensors, content, strict=True):
            held[:, slot].copy_(copy)

    def write(self, slot: int, expert: int, part: ExpertPart, a_RD: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Put whole matrices of the expert that is stored at `expert`, the scale within B, into a slot."""
        is_down, rank = part == "down_proj", a_RD.shape[0]
        share_a, share_b = (share_of(a_RD, 1, self._inner), b_OR) if is_down else (a_RD, share_of(b_OR, 0, self._inner))
        for place, share in (
            (self.place_a(slot, expert, part, rank), share_a),
            (self.place_b(slot, expert, part, rank), share_b),
        ):
            place.put(place.slots, share)
        self.ranks[expert, slot, _PARTS[part]] = rank

    def place_a(self, slot: int, expert: int, part: ExpertPart, rank: int) -> LoraPlace:
        """Return the place of this rank's share of A."""
        if part == "down_proj":
            return LoraPlace(self.a2, _whole, lambda a2: a2[expert, slot, :, :rank].t())
        return LoraPlace(self.a13, _whole, lambda a13: a13[expert, slot, _PARTS[part], :, :rank].t())

    def place_b(self, slot: int, expert: int, part: ExpertPart, rank: int) -> LoraPlace:
        """Return the place of this rank's share of B."""
        if part == "down_proj":
            return LoraPlace(self.b2, _whole, lambda b2: b2[expert, slot, :rank].t())
        first = _PARTS[part] * self._inner.length
        end = first + self._inner.length
        return LoraPlace(self.b13, _whole, lambda b13: b13[expert, slot, :rank, first:end].t())


def _whole(share: torch.Tensor) -> torch.Tensor:
    return share
