"""`Gatherer`: a bucket's bytes on the sending rank, and the fingerprints of everything that is sent.

    whole tensors      what lies end to end in memory, in the dtype that is sent, goes from where it is (experts of a
                       fused tensor do); the rest is cast and packed
    sharded tensors    each rank casts and packs what it holds of the bucket; one collective brings it to the sender,
                       which puts every share in its place

So only the sending rank ever holds more than its own shards, and that is a bucket, never a tensor list or a model.
Fingerprints add up over shards, so each rank computes its own shards' and no tensor moves for them.

Where all this comes from and goes to is planned once (`layout`); what is done at each refresh takes no step of Python a
tensor, but for contents that are not one run of a tensor (transposed, or shards of an inner dimension).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.sender.layout import Layout, SharedBucket, WholeBucket
from weight_sync.sender.lists import Fingerprints
from weight_sync.sender.ranks import TrainerRanks


class Gatherer:
    """Gathers what `layout` plans from `tensors`, in the order of its plan: the local ones of sharded tensors.

    `ranks`: as in the layout.  All ranks call the same methods with the same arguments.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], ranks: TrainerRanks | None) -> None:
        self._layout, self._tensors, self._ranks = layout, tensors, ranks
        self._views = layout.recipe.views(tensors)

    def gather(self, bucket: WholeBucket | SharedBucket, flat: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Return the pieces of a bucket of the layout, uint8; views of `flat` and of the trainer's tensors.

        A piece of whole tensors is packed when it is asked for.  `flat`: room for all of it, uint8 [total bytes], on
        any device; None on ranks other than the sending one, which get no pieces.  Raises `TransportError` if another
        rank failed or is late, and what packing raises here.
        """
        if isinstance(bucket, WholeBucket):
            assert flat is not None, "without other ranks this one sends"
            return bucket.pieces(self._views, flat)
        ranks = self._ranks
        assert ranks is not None, "the layout is for ranks"
        mine = ranks.jointly(lambda: self._pack_mine(bucket))
        sent = torch.empty(0, dtype=torch.uint8, device=ranks.device) if ranks.is_sender else mine
        received = ranks.to_sender(sent, [size if rank else 0 for rank, size in enumerate(bucket.sizes)])
        if received is None:
            return iter(())
        assert flat is not None, "the sending rank has room for the bucket"
        return bucket.assemble([mine, *received[1:]], flat)

    def fingerprints(self) -> Fingerprints:
        """Return F of the content as it is sent, in the order of the layout's names, on every rank; without fused
        tensors, which the engine splits.
        """
        ranks = self._ranks
        values = self._own_prints() if ranks is None else ranks.sum_over_ranks(ranks.jointly(self._own_prints))
        return Fingerprints(values, self._layout.printed)

    def _own_prints(self) -> npt.NDArray[np.uint64]:
        """Return the shares of the fingerprints that this rank holds, uint64 [n], in the order of the names."""
        layout = self._layout
        values, shares = np.zeros(len(layout.printed), np.uint64), layout.prints.values(self._views)
        for number, value in layout.slices.values(self._views).items():
            shares[number] = value
        np.add.at(values, layout.numbers, shares)
        return values

    def _pack_mine(self, bucket: SharedBucket) -> torch.Tensor:
        """Return this rank's bytes of a bucket, uint8."""
        assert self._ranks is not None, "only sharded tensors come in shares"
        packed = torch.empty(bucket.sizes[self._ranks.rank], dtype=torch.uint8, device=self._ranks.device)
        bucket.packing.pack(self._views, packed)
        return packed
