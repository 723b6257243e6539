"""`ShardPlan`: everything that a refresh of shards does alike each time, on one trainer rank.  Holds no tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.boxes import flat_offset, index_of, whole_box
from weight_sync.bucket import plan_buckets
from weight_sync.fingerprint import fingerprint_slice
from weight_sync.fingerprint_batch import FingerprintPlan, Form
from weight_sync.sender.layout import WholeBucket
from weight_sync.sender.lists import Contents
from weight_sync.sender.shard import ShardPart, assigned
from weight_sync.sender.views import Content, Recipe, Views
from weight_sync.tensor_meta import TensorMeta


class ShardPlan:
    """`parts`: this rank's, which is `rank`; `held`: what each rank has.  `buckets`: what this one sends.

    `contents`: the whole tensors.  `num_rounds`: the most buckets that a rank sends.  Raises as `assigned`.
    """

    def __init__(
        self,
        parts: Sequence[ShardPart],
        tensors: Sequence[torch.Tensor],
        held: Sequence[Sequence[TensorMeta]],
        rank: int,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        metas, sent = assigned(held)
        self.contents = Contents(metas)
        cut = [
            plan_buckets([mine[number] for number in numbers], bucket_bytes)
            for mine, numbers in zip(held, sent, strict=True)
        ]
        self.num_rounds = max(map(len, cut))
        by_meta = {(part.meta.name, part.meta.box): part for part in parts}
        in_order = [by_meta[meta.name, meta.box] for bucket in cut[rank] for meta in bucket if meta.numel]
        contents = [_content(part, tensors[part.source]) for part in in_order]
        self.recipe = Recipe(contents)
        self.buckets: list[WholeBucket] = []
        first = 0
        for bucket in cut[rank]:
            last = first + sum(meta.numel > 0 for meta in bucket)
            self.buckets.append(WholeBucket(bucket, contents[first:last], first, device))
            first = last
        numbers = {meta.name: number for number, meta in enumerate(metas)}
        self._numbers = np.array([numbers[part.meta.name] for part in in_order], np.int64)
        offsets = [_offset(part.meta) for part in in_order]
        self._scattered = [(at, in_order[at].meta) for at, offset in enumerate(offsets) if offset is None]
        self._prints = FingerprintPlan(
            [
                Form((0,) if offset is None else it.view_shape, it.dtype, it.meta.dtype, offset or 0, it.device)
                for it, offset in zip(contents, offsets, strict=True)
            ]
        )

    def fingerprints(self, views: Views) -> npt.NDArray[np.uint64]:
        """Return what this rank's parts contribute to F of each tensor, uint64 [n]."""
        values = np.zeros(len(self.contents.lists.names), np.uint64)
        shares = self._prints.values(views)
        for at, meta in self._scattered:
            box = meta.box or whole_box(meta.shape)
            content = views[at].to(meta.dtype).view(meta.sizes)
            shares[at] = fingerprint_slice(content, meta.shape, index_of(box))
        np.add.at(values, self._numbers, shares)
        return values


def _content(part: ShardPart, tensor: torch.Tensor) -> Content:
    """Return where a part lies in its shard."""
    index = part.index or (slice(None),) * tensor.dim()
    sent = TensorMeta(part.meta.name, part.meta.dtype, part.meta.sizes)
    box = tuple((edge.start, edge.stop) for edge in index)
    is_run = tensor.is_contiguous() and not part.transposed and all(edge.step in (None, 1) for edge in index)
    start = flat_offset(box, tensor.shape) if is_run else None
    is_whole = start is not None and sent.shape == tuple(tensor.shape)
    return Content(part.source, sent, index, part.transposed, start, is_whole, tensor.dtype, tensor.device)


def _offset(meta: TensorMeta) -> int | None:
    """Return the first element of a part in the flat tensor; None if it is not one run there."""
    return 0 if meta.box is None else flat_offset(meta.box, meta.shape)
