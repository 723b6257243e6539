"""`SlicePrints`: what shares that are not one run of their tensors add to the tensors' fingerprints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.boxes import index_of
from weight_sync.fingerprint import fingerprint_slice, word_factors
from weight_sync.fingerprint_words import UNSIGNED
from weight_sync.sender.shares import Share

_SMALL = 1 << 16
"""Words of a share up to which the factor of each word is kept: half a MiB for all shares of one form."""
_WORDS = 1 << 19
"""Words that are multiplied at a time: 4 MiB of products."""


class SlicePrints:
    """`shares`: as (number of the view that has it, its share).

    Small shares of one form are multiplied together by factors that are computed once.
    """

    def __init__(self, shares: Sequence[tuple[int, Share]]) -> None:
        self._alone: list[tuple[int, Share]] = []
        self._forms: dict[tuple[object, ...], tuple[Share, torch.Tensor, list[int]]] = {}
        for number, share in shares:
            if share.meta.numel > _SMALL:
                self._alone.append((number, share))
                continue
            form = share.meta.dtype, share.sizes, share.box
            if form not in self._forms:
                self._forms[form] = share, word_factors(share.sizes, index_of(share.box)), []
            self._forms[form][2].append(number)

    def values(self, views: Sequence[torch.Tensor]) -> dict[int, int]:
        """Return what each share adds, in [0, 2^64), by the number of its view."""
        found = {}
        for number, share in self._alone:
            content = views[number].to(share.meta.dtype).view(share.meta.shape)
            found[number] = fingerprint_slice(content, share.sizes, index_of(share.box))
        for share, factors, numbers in self._forms.values():
            step = max(_WORDS // len(factors), 1)
            for first in range(0, len(numbers), step):
                some = numbers[first : first + step]
                sums = _sums([views[number] for number in some], share.meta.dtype, factors)
                found.update(zip(some, sums.tolist(), strict=True))
        return found


def _sums(views: Sequence[torch.Tensor], dtype: torch.dtype, factors: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Return the sum of each view's words, plus one each, times `factors`, int64 [n]: uint64 [number of views]."""
    joined = torch.cat([view.reshape(-1) for view in views]).to(dtype)
    words = joined.view(UNSIGNED[dtype.itemsize]).view(len(views), -1)
    products = words.to(torch.int64).add_(1).mul_(factors.to(words.device))
    return products.sum(1).cpu().numpy().view(np.uint64)
