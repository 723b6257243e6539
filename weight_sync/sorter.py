"""`Sorter`: finds whose tensors come in an update that has several targets.

    a manifest, a bucket, a layout  ->  its tensors by target: number 0 is the update's first one

A part of a packed bucket is the same bytes under a layout of its own.  That layout is kept with the whole one, so that
the plans of each target are found again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.intake import ProvenPart
from weight_sync.manifest import Manifest
from weight_sync.tensor_meta import BucketLayout, PackedBucket, TensorMeta

Owner = Callable[[TensorMeta], int]
"""Returns the number of the target that a tensor is of.  Raises `WeightRequestError` where that is not clear."""


def as_sent(meta: TensorMeta) -> TensorMeta:
    """Return the tensor itself: its target knows it by the name that was sent."""
    return meta


Bucket = Iterable[tuple[str, torch.Tensor]] | PackedBucket | ProvenPart
KnownParts = weakref.WeakKeyDictionary[BucketLayout, tuple[Hashable, list[BucketLayout]]]
"""The layouts of the parts of a layout, by target, and the rule by which it was sorted.

`_WHOLE` stands for the layout itself, which would never be freed if it were in its own entry.
"""
_WHOLE = BucketLayout((), (), 0)


@dataclass(frozen=True)
class Sorter:
    """`count`: of the targets.  `rule`: equal for sorters whose `owner` is.  `known`: layouts that were sorted.

    `named`: gives a tensor the name by which its target knows it.
    """

    count: int
    owner: Owner
    rule: Hashable
    known: KnownParts
    named: Callable[[TensorMeta], TensorMeta] = as_sent

    def metas(self, metas: Sequence[TensorMeta]) -> list[list[TensorMeta]]:
        """Return tensors by target.  Raises as `owner`."""
        found: list[list[TensorMeta]] = [[] for _ in range(self.count)]
        for meta in metas:
            found[self.owner(meta)].append(self.named(meta))
        return found

    def manifests(self, manifest: Manifest) -> list[Manifest]:
        """Return the part of a manifest of each target; an empty one where it has none.  Raises as `owner`."""
        metas = manifest.metas()
        owners = np.array([self.owner(meta) for meta in metas], dtype=np.int64)
        return [self._part(manifest, metas, np.flatnonzero(owners == number), number) for number in range(self.count)]

    def _part(self, manifest: Manifest, metas: Sequence[TensorMeta], places: np.ndarray, number: int) -> Manifest:
        def fingerprints(_: int) -> tuple[np.ndarray, np.ndarray]:
            values, is_stated = manifest.fingerprints(len(metas))
            return values[places], is_stated[places]

        key = None if manifest.key is None else (manifest.key, self.rule, number)
        return Manifest(lambda: [self.named(metas[place]) for place in places], fingerprints, key)

    def layouts(self, layouts: Sequence[BucketLayout]) -> list[list[BucketLayout]]:
        """Return the layouts of each target's parts of some buckets.  Raises as `owner`."""
        parts = [self._layouts_of(layout) for layout in layouts]
        return [[part[number] for part in parts if part[number].metas] for number in range(self.count)]

    def bucket(self, bucket: Bucket) -> list[Bucket | None]:
        """Return the part of a bucket of each target; None where it has none.  Raises as `owner`."""
        if isinstance(bucket, ProvenPart):
            return [bucket, *[None] * (self.count - 1)]  # of a delta, which changes the first target alone
        if isinstance(bucket, PackedBucket):
            parts = self._layouts_of(bucket.layout)
            return [PackedBucket(part, bucket.content) if part.metas else None for part in parts]
        named: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(self.count)]
        for name, tensor in bucket:
            meta = TensorMeta(name, tensor.dtype, tuple(tensor.shape))
            named[self.owner(meta)].append((self.named(meta).name, tensor))
        return [part or None for part in named]

    def _layouts_of(self, layout: BucketLayout) -> list[BucketLayout]:
        rule, parts = self.known.get(layout, (None, []))
        if not parts or rule != self.rule:
            owners = [self.owner(meta) for meta in layout.metas]
            parts = [self._part_of(layout, owners, number) for number in range(self.count)]
            self.known[layout] = self.rule, parts
        return [layout if part is _WHOLE else part for part in parts]

    def _part_of(self, layout: BucketLayout, owners: Sequence[int], number: int) -> BucketLayout:
        places = [place for place, owner in enumerate(owners) if owner == number]
        metas, offsets = (
            [self.named(layout.metas[place]) for place in places],
            [layout.offsets[place] for place in places],
        )
        if places and metas == list(layout.metas):
            return _WHOLE
        return BucketLayout(metas, offsets, layout.num_bytes)
