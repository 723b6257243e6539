"""Parts of tensors, in any order and in different calls, which are put together before anything is made of them.

`Assembly`       boxes of wire tensors.  So come tensors that are converted as a whole (halves of FP8 pairs, weights
                 that an engine quantises), and all tensors where no plan is replayed (`plan`).
`PairedTensors`  FP8 weights and their scales (`fp8_wire`)

Memory: one copy of each such tensor or half, from its first part until its last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from weight_sync.boxes import Box, box_text, first_gap, index_of, overlapping, whole_box
from weight_sync.errors import CoverageError, DtypeMismatchError, WeightRequestError, listed
from weight_sync.fp8_blocks import QUANTISED, SCALE_SUFFIX, dequantise
from weight_sync.fp8_wire import Kind, kind_of, require_pairs, value_dtype, weight_name
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


# --- halves of FP8 pairs ----------------------------------------------------------------------------------------------


class WireTensor(NamedTuple):
    """A tensor by its wire name; `content` of a pair are its values."""

    name: str
    content: torch.Tensor
    pair: Pair | None = None


class PairedTensors:
    """Quantised weights and scales of one load or one refresh.

    The half of a pair that came first is copied and kept until the other comes.  `num_bytes`: memory of the waiting
    halves, never more than the model's.
    """

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights
        self._waiting: dict[str, tuple[Kind, torch.Tensor]] = {}  # by the weight's name
        self._paired: set[str] = set()
        self.num_bytes = 0

    @property
    def num_waiting(self) -> int:
        """The number of tensors that came without the other half of their pair."""
        return len(self._waiting)

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
            kind = self._kind_of(name, tensor)
            if kind == "plain":
                if name in self._waiting:
                    raise DtypeMismatchError(
                        f"{name} is {dtype_name(tensor.dtype)}, which has no scales, but came with {name}{SCALE_SUFFIX}"
                    )
                whole.append(WireTensor(name, tensor))
            elif (pair := self._pair(name, kind, tensor.detach())) is not None:
                whole.append(self._values(name if kind == "weight" else weight_name(name), pair))
        return whole

    def settle(self) -> None:
        """Raise `CoverageError` for the tensors that wait for the other half of their pair; it names them."""
        if not self._waiting:
            return
        by_kind: dict[Kind, set[str]] = {"weight": set(), "scale": set()}
        for name, (kind, _) in self._waiting.items():
            by_kind[kind].add(name)
        require_pairs(by_kind["weight"], by_kind["scale"])

    def clear(self) -> None:
        """Release what waits."""
        self._waiting.clear()
        self.num_bytes = 0

    def _kind_of(self, name: str, tensor: torch.Tensor) -> Kind:
        """Return `kind_of` the tensor, with a short cut for the many plain ones."""
        if tensor.dtype != QUANTISED and not name.endswith(SCALE_SUFFIX):
            return "plain"
        return kind_of(self._weights, TensorMeta(name, tensor.dtype, tuple(tensor.shape)))

    def _pair(self, name: str, kind: Kind, tensor: torch.Tensor) -> Pair | None:
        """Return the pair that this half makes whole, if it does."""
        key = name if kind == "weight" else weight_name(name)
        waiting = self._waiting.get(key)
        if key in self._paired or (waiting is not None and waiting[0] == kind):
            raise CoverageError(f"{name} came twice")
        if waiting is None:
            self._wait(key, kind, tensor)
            return None
        del self._waiting[key]
        self.num_bytes -= waiting[1].nbytes
        self._paired.add(key)
        return Pair(tensor, waiting[1]) if kind == "weight" else Pair(waiting[1], tensor)

    def _wait(self, key: str, kind: Kind, tensor: torch.Tensor) -> None:
        if self.num_bytes + tensor.nbytes > self._max_bytes:
            raise WeightRequestError(
                f"{key}: FP8 tensors that wait for their scales or weights exceed the model's "
                f"{self._max_bytes} bytes. Send scales with their weights."
            )
        self._waiting[key] = (kind, tensor.clone())
        self.num_bytes += tensor.nbytes

    def _values(self, name: str, pair: Pair) -> WireTensor:
        meta = TensorMeta(name, pair.weight.dtype, tuple(pair.weight.shape))
        dtype = value_dtype(self._weights, meta)
        assert dtype is not None, "it was found to be a weight before"
        try:
            return WireTensor(name, dequantise(pair.weight, pair.scale, dtype), pair)
        except WeightRequestError as error:
            raise type(error)(f"{name}{SCALE_SUFFIX}: {error}") from None
