"""`BucketLayout`: which tensors lie where in the bytes of one message.  A sender sends the same ones again and again.

A layout is one object for as long as the same lists come, so that what was worked out for it (`plan`) is found again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from weight_sync.tensor_meta import TensorMeta


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Tensors or boxes of tensors, dense and in row-major order, each from byte `offsets` on of `num_bytes` bytes."""

    metas: Sequence[TensorMeta]
    offsets: Sequence[int]
    num_bytes: int

    def views(self, content: torch.Tensor, places: Sequence[int] | None = None) -> list[tuple[str, torch.Tensor]]:
        """Return all tensors, or the ones at some places in the list, as views of the bucket, uint8 [num_bytes].

        Of a tensor that comes as a box, the view is the box.  A tensor that its dtype cannot be read from where it
        lies is copied.
        """
        found = []
        for place in range(len(self.metas)) if places is None else places:
            meta, start = self.metas[place], self.offsets[place]
            part = content[start : start + meta.nbytes]
            if part.data_ptr() % meta.dtype.itemsize or part.storage_offset() % meta.dtype.itemsize:
                part = part.clone()
            found.append((meta.name, part.view(meta.dtype).view(meta.sizes)))
        return found


class PackedBucket(NamedTuple):
    """One message as it came, uint8 [layout.num_bytes]."""

    layout: BucketLayout
    content: torch.Tensor

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return all tensors, as `BucketLayout.views`."""
        return self.layout.views(self.content)

    def parts(self, places: Sequence[int] | None = None) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield the tensors that `BucketLayout.views` returns, each with what it is."""
        metas = self.layout.metas if places is None else [self.layout.metas[place] for place in places]
        views = self.layout.views(self.content, places)
        for meta, (_, view) in zip(metas, views, strict=True):
            yield meta, view


class Sized(Protocol):
    """A call that was read: `num_tensors` of it are kept in memory."""

    @property
    def num_tensors(self) -> int: ...


Call = TypeVar("Call", bound=Sized)


class KnownCalls(Generic[Call]):
    """Calls that were read, by a key of their arguments, such as a digest of them.

    The ones used last are kept, with at most `max_tensors` tensors together.
    """

    def __init__(self, max_tensors: int) -> None:
        self._max_tensors = max_tensors
        self._num_tensors = 0
        self._calls: OrderedDict[Hashable, Call] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Call]) -> Call:
        """Return the call, made if it is not known.  What `make` raises is not kept."""
        known = self._calls.get(key)
        if known is not None:
            self._calls.move_to_end(key)
            return known
        made = self._calls[key] = make()
        self._num_tensors += made.num_tensors
        while self._num_tensors > self._max_tensors and len(self._calls) > 1:
            _, oldest = self._calls.popitem(last=False)
            self._num_tensors -= oldest.num_tensors
        return made
