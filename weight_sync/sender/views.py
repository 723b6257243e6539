"""Contents of the trainer's tensors as views, taken anew at each refresh, and how they are packed.

A plan is kept for long, so it holds no tensor: it would keep memory that the trainer wants back, and could send what is
no longer the model's.  It holds a `Recipe` instead, which takes the views of whatever tensors are given.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch

from weight_sync.bucket import PackPlan, copy_into
from weight_sync.tensor_meta import TensorMeta


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the tensor with number `source`, as it is sent: `meta` has its name, its dtype there and its size.

    `index`: a slice for each dimension of the tensor; `transposed`: the last two dimensions are exchanged then.
    `start`: the first element, where it is one run of a contiguous tensor, else None; `is_whole`: all of that tensor.
    `dtype`, `device`: the tensor's.
    """

    source: int
    meta: TensorMeta
    index: tuple[slice, ...]
    transposed: bool
    start: int | None
    is_whole: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of its view: a whole tensor is its own."""
        return self.meta.shape if self.is_whole else (self.meta.numel,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the content as a view with the dimensions of `tensor`, in row-major order as it is sent."""
        content = tensor[self.index]
        return content.mT if self.transposed else content


class _Step(NamedTuple):
    """Views that one call takes: whole tensors `first` .. `last - 1`; or of tensor `first`, from element `start`, one
    of each of `sizes`.
    """

    first: int
    last: int
    start: int = 0
    sizes: tuple[int, ...] | None = None


class Recipe:
    """Takes views of `contents` from tensors: whole ones as they are, parts of them flat."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self._steps: list[_Step | None] = []  # None: the content is not one run
        self._scattered = {at: content for at, content in enumerate(contents) if content.start is None}
        for content in contents:
            self._steps.append(None) if content.start is None else self._add(content)

    def _add(self, content: Content) -> None:
        number, start, size = content.source, content.start or 0, content.meta.numel
        last = self._steps[-1] if self._steps else None
        if content.is_whole:
            if last is not None and last.sizes is None and last.last == number:
                self._steps[-1] = last._replace(last=number + 1)
            else:
                self._steps.append(_Step(number, number + 1))
        elif last is not None and last.sizes and last.first == number and last.start + sum(last.sizes) == start:
            self._steps[-1] = last._replace(sizes=(*last.sizes, size))
        else:
            self._steps.append(_Step(number, number + 1, start, (size,)))

    def views(self, tensors: Sequence[torch.Tensor]) -> Views:
        """Return the contents, in their order."""
        views: list[torch.Tensor | None] = []
        with torch.no_grad():
            for step in self._steps:
                if step is None:
                    views.append(None)
                elif step.sizes is None:
                    views += tensors[step.first : step.last]
                else:
                    flat = tensors[step.first].ravel()
                    views += flat.narrow(0, step.start, sum(step.sizes)).split(step.sizes)
        return Views(views, self._scattered, tensors)


class Views(Sequence[torch.Tensor]):
    """The contents, contiguous; one that is not a run is copied each time that it is asked for."""

    def __init__(
        self,
        views: list[torch.Tensor | None],
        scattered: dict[int, Content],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._views, self._scattered, self._tensors = views, scattered, tensors
        self._positions = list(scattered)

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, at: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, at: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(at, int):
            return self[at : at + 1][0]
        found = self._views[at]
        for position in self._positions[bisect.bisect_left(self._positions, at.start) :]:
            if position >= at.stop:
                break
            found[position - at.start] = self.scattered(position).reshape(-1)
        return found  # type: ignore[return-value]  # no None is left

    def scattered(self, position: int) -> torch.Tensor:
        """Return a content that is not a run, as a view."""
        content = self._scattered[position]
        return content.of(self._tensors[content.source].detach())


class _Stretch(NamedTuple):
    """Contents `first` .. `last - 1` of a packing, which go to bytes `start` .. `stop - 1`; `plan` None: one content
    that is not a run.
    """

    first: int
    last: int
    start: int
    stop: int
    dtype: torch.dtype
    plan: PackPlan | None


class Packing:
    """Packs contents end to end into bytes on `device`.  They are numbers `first` .. of the views that are given."""

    def __init__(self, contents: Sequence[Content], first: int, device: torch.device) -> None:
        self.num_bytes = 0
        self._stretches: list[_Stretch] = []
        numbered = enumerate(contents, first)
        for (dtype, source, at, is_run), run in itertools.groupby(numbered, _kind):
            group = list(run)
            for some in [group] if is_run else [[one] for one in group]:
                shapes = [content.view_shape for _, content in some]
                stop = self.num_bytes + sum(content.meta.nbytes for _, content in some)
                plan = PackPlan(shapes, source, dtype, (at, device)) if is_run else None
                begin = some[0][0]
                self._stretches.append(_Stretch(begin, begin + len(some), self.num_bytes, stop, dtype, plan))
                self.num_bytes = stop

    def pack(self, views: Views, room: torch.Tensor) -> None:
        """Pack into `room`, uint8 [num_bytes]."""
        with torch.no_grad():
            for first, last, start, stop, dtype, plan in self._stretches:
                target = room[start:stop].view(dtype)
                if plan is not None:
                    plan.pack(views[first:last], target)
                else:
                    content = views.scattered(first)
                    copy_into(target.view(content.shape), content)


def _kind(numbered: tuple[int, Content]) -> tuple[torch.dtype, torch.dtype, torch.device, bool]:
    content = numbered[1]
    return content.meta.dtype, content.dtype, content.device, content.start is not None
