"""Parts of tensors, in any order and in different calls, which are put together before anything is made of them.

`Assembly`       boxes of wire tensors.  So come tensors that are converted as a whole (parts of quantised weights,
                 weights that an engine quantises), and all tensors where no plan is replayed (`plan`).
`PairedTensors`  quantised weights and their scales (`paired_wire`)

Memory: one copy of each such tensor or part, from its first part until its last.  At a start parts are not copied.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

from weight_sync.boxes import Box, box_text, first_gap, index_of, overlapping, whole_box
from weight_sync.errors import CoverageError, DtypeMismatchError, WeightRequestError, listed
from weight_sync.pair_kinds import PairKind
from weight_sync.paired_wire import GatheredParts, WirePart, part_of, value_dtype
from weight_sync.tensor_meta import LogicalWeights, Pair, TensorMeta, dtype_name


@dataclass
class _Waiting:
    content: torch.Tensor
    boxes: list[Box] = field(default_factory=list)
    missing: int = 0


class Assembly:
    """The boxes of one refresh whose tensors are not whole yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._whole: set[str] = set()

    def take(self, sent: Iterable[tuple[TensorMeta, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Take tensors and boxes, which stay the caller's; return what is whole now.

        Raises `CoverageError` for boxes that overlap, `DtypeMismatchError` for boxes of one tensor in two dtypes.
        """
        whole = []
        for meta, content in sent:
            if meta.box is None and meta.name not in self._waiting:
                whole.append((meta.name, content))
                continue
            waiting = self._waiting.get(meta.name)
            if waiting is None:
                if meta.name in self._whole:
                    raise CoverageError(f"{meta.name} came twice: a box of it comes after all of it")
                area = torch.empty(meta.shape, dtype=meta.dtype, device=content.device)
                waiting = self._waiting[meta.name] = _Waiting(area, missing=area.numel())
            self._add(waiting, meta, content)
            if not waiting.missing:
                del self._waiting[meta.name]
                self._whole.add(meta.name)
                whole.append((meta.name, waiting.content))
        return whole

    def settle(self) -> None:
        """Raise `CoverageError` for tensors of which a box is missing."""
        found = [
            f"{name} lacks {box_text(first_gap(waiting.content.shape, waiting.boxes) or ())}"
            for name, waiting in sorted(self._waiting.items())
        ]
        if found:
            raise CoverageError(f"{len(found)} tensors came in part: {listed(found)}")

    def clear(self) -> None:
        """Release what waits."""
        self._waiting.clear()

    @staticmethod
    def _add(waiting: _Waiting, meta: TensorMeta, content: torch.Tensor) -> None:
        area = waiting.content
        if meta.dtype != area.dtype:
            raise DtypeMismatchError(
                f"{meta.name}: its boxes come as {dtype_name(area.dtype)} and {dtype_name(meta.dtype)}"
            )
        box = meta.box or whole_box(meta.shape)
        both = next((met for other in waiting.boxes if (met := overlapping([other, box]))), None)
        if both is not None:
            raise CoverageError(f"{meta.name}: the boxes {box_text(both[0])} and {box_text(both[1])} overlap")
        area[index_of(box)] = content
        waiting.boxes.append(box)
        waiting.missing -= content.numel()


# --- parts of quantised weights ---------------------------------------------------------------------------------------


class WireTensor(NamedTuple):
    """A tensor by its wire name; `content` of a quantised weight are its values.

    Such a weight has its `pair`, and its `parts` as they came, by suffix (`paired_wire`).
    """

    name: str
    content: torch.Tensor
    pair: Pair | None = None
    parts: Mapping[str, torch.Tensor] = MappingProxyType({})


class PairedTensors(GatheredParts[torch.Tensor]):
    """The quantised weights of one load or one refresh.

    Parts that come before the last one are copied and kept until it comes.  `num_bytes`: memory of the waiting parts,
    never more than the model's.

    `at_start`: tensors are views of files, and stay.  So parts are not copied, and of a weight that lives on other
    ranks alone nothing is read: it gets no values, but zeros.
    """

    def __init__(self, weights: LogicalWeights, *, at_start: bool = False) -> None:
        super().__init__()
        self._weights = weights
        self._at_start = at_start
        self.num_bytes = 0

    def take_rest(self, present: Mapping[str, tuple[PairKind, Collection[str]]]) -> list[tuple[str, torch.Tensor]]:
        """Return parts that waited, as `GatheredParts.take_rest`."""
        found = super().take_rest(present)
        self.num_bytes -= sum(part.nbytes for _, part in found)
        return found

    @functools.cached_property
    def _max_bytes(self) -> int:
        return sum(meta.nbytes for meta in self._weights.metas().values())

    def take(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[WireTensor]:
        """Take tensors and return what is now whole: plain tensors, still the caller's, and values of pairs.

        Raises `CoverageError` for a tensor that came twice, `DtypeMismatchError`, `ShapeMismatchError`, `ContentError`,
        `WeightRequestError` where more would wait than the model has.
        """
        whole = []
        for name, tensor in named:
            part = self._part_of(name, tensor)
            if part is None:
                if name in self:
                    raise DtypeMismatchError(
                        f"{name} is {dtype_name(tensor.dtype)}, which has no scales, but came with "
                        f"{self.found(name)[0]}"
                    )
                whole.append(WireTensor(name, tensor))
            elif (parts := self._gathered(part, tensor.detach())) is not None:
                whole.append(self._values(part, parts))
        return whole

    def clear(self) -> None:
        """Release what waits."""
        super().clear()
        self.num_bytes = 0

    def _part_of(self, name: str, tensor: torch.Tensor) -> WirePart | None:
        return part_of(self._weights, TensorMeta(name, tensor.dtype, tuple(tensor.shape)))

    def _gathered(self, part: WirePart, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Return the parts of the weight that this one makes whole, if it does; else keep a copy of it."""
        if self._at_start:
            return self.add(part, tensor, lambda view: view)
        parts = self.add(part, tensor, functools.partial(self._copied, part.name))
        if parts is not None:
            self.num_bytes -= sum(other.nbytes for suffix, other in parts.items() if suffix != part.suffix)
        return parts

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.num_bytes + tensor.nbytes > self._max_bytes:
            raise WeightRequestError(
                f"{name}: tensors that wait for other parts of their weights exceed the model's "
                f"{self._max_bytes} bytes. Send scales with their weights."
            )
        self.num_bytes += tensor.nbytes
        return tensor.clone()

    def _values(self, part: WirePart, parts: Mapping[str, torch.Tensor]) -> WireTensor:
        suffix, first = next(iter(parts.items()))
        shape = part.kind.value_shape(TensorMeta(part.name + suffix, first.dtype, tuple(first.shape)))
        meta = TensorMeta(part.name, first.dtype, shape)
        if self._at_start and not any(self._weights.places(piece.name) for piece in self._weights.split(meta)):
            return WireTensor(part.name, torch.zeros((), dtype=torch.bfloat16).expand(shape))
        values, pair = part.kind.put_together(part.name, parts, value_dtype(self._weights, meta) or torch.bfloat16)
        return WireTensor(part.name, values, pair, parts)
