"""A plan's tensors through `Gatherer`, as a refresh takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from weight_sync.bucket import plan_buckets
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import Layout, SharedBucket, WholeBucket
from weight_sync.sender.plan import TensorPlan
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.tensor_meta import TensorMeta


class Gathered:
    """`buckets`: what each bucket holds; None: one has all tensors."""

    def __init__(
        self,
        plan: TensorPlan,
        ranks: TrainerRanks | None = None,
        buckets: Sequence[Sequence[TensorMeta]] | None = None,
    ) -> None:
        buckets = plan_buckets(plan.metas, 1 << 40) if buckets is None else buckets
        layout = Layout(plan, buckets, ranks, torch.device("cpu"))
        here = [it.to_local() if isinstance(it, DTensor) else it for it in plan.sources.values()]
        self.buckets: list[WholeBucket | SharedBucket] = layout.buckets
        self._names = list(plan.parts)
        self._gatherer = Gatherer(layout, here, ranks)

    def gather(self, number: int, flat: torch.Tensor | None) -> list[torch.Tensor]:
        return list(self._gatherer.gather(self.buckets[number], flat))

    def each_piece(self, number: int, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return the pieces as the gatherer does, one by one."""
        return self._gatherer.gather(self.buckets[number], flat)

    def fingerprints(self) -> dict[str, int]:
        """Return each that is known, by name."""
        found = self._gatherer.fingerprints()
        pairs = zip(self._names, found.values.tolist(), found.known.tolist(), strict=True)
        return {name: value for name, value, known in pairs if known}
