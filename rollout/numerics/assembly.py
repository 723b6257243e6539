"""Assemble the engine's matrices from the tensors of a trainer's model, and split their gradients by tensor.

The engine keeps its matrices packed, which no gradient reads.  A template of the same model, row-major and without
memory, shows where each of the trainer's tensors would lie in each row-major matrix.  By the template a matrix is
assembled when a gradient needs it, and the gradient of a matrix is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rollout.kernels.places import ViewPlace
from rollout.layers.layer import Layer
from rollout.model.decoder import DecoderForCausalLM
from weight_sync.tensor_meta import Piece, Place, TensorMeta


@dataclass(frozen=True)
class _Part:
    """`piece` of a trainer's tensor, and its place in the template."""

    piece: Piece
    place: Place

    def lies_in(self, matrix: torch.Tensor) -> Place:
        view = self.place.storage
        return self.place.rebind(matrix.as_strided(view.size(), view.stride(), view.storage_offset()))


@dataclass(frozen=True)
class _Source:
    """One tensor of the trainer in a matrix: its parts, or only its start if the tensor lies there in one run."""

    name: str
    shape: torch.Size
    parts: tuple[_Part, ...]
    start: int | None


class Assembly:
    """A row-major matrix of `shape`, made of the trainer's tensors `names`, which come in this order."""

    def __init__(self, shape: torch.Size, sources: Sequence[_Source]) -> None:
        self.shape = shape
        self._sources = tuple(sources)
        self.names = tuple(source.name for source in sources)

    def matrix(self, tensors: Sequence[torch.Tensor], rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        """Build the matrix in `dtype`, of values rounded to the engine's dtype.  It may share the tensors' memory."""
        values = [tensor.detach().to(rounded_to).to(dtype) for tensor in tensors]
        if len(values) == 1 and self._sources[0].start == 0 and values[0].numel() == self.shape.numel():
            return values[0].reshape(self.shape)
        matrix = torch.empty(self.shape, dtype=dtype, device=values[0].device)
        for source, value in zip(self._sources, values, strict=True):
            if source.start is not None:
                matrix.view(-1)[source.start : source.start + value.numel()] = value.reshape(-1)
                continue
            for part in source.parts:
                part.lies_in(matrix).write(part.piece.of(value))
        return matrix

    def gradients(self, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return the gradient of each wanted tensor, in the dtype of `gradient`, the matrix's own."""
        gradient = gradient.contiguous()
        pairs = zip(self._sources, wanted, strict=True)
        return [self._gradient(source, gradient) if is_wanted else None for source, is_wanted in pairs]

    def _gradient(self, source: _Source, gradient: torch.Tensor) -> torch.Tensor:
        if source.start is not None:
            return gradient.view(-1)[source.start : source.start + source.shape.numel()].view(source.shape)
        found = gradient.new_zeros(source.shape)
        for part in source.parts:
            part.piece.of(found).add_(part.lies_in(gradient).read())
        return found


def assemblies_of(
    engine: DecoderForCausalLM, template: DecoderForCausalLM, shapes: Mapping[str, torch.Size]
) -> dict[int, Assembly]:
    """Return the assembly of each tensor of `engine` that holds weights, by the tensor's id.

    `shapes` are the shapes of the trainer's tensors, by name.  `template` is the same model, row-major, on the device
    "meta".  Raises `UnknownTensorError`, `ShapeMismatchError`.
    """
    weights = template.weights
    by_storage: dict[int, dict[str, list[_Part]]] = {}
    for name, shape in shapes.items():
        for piece in weights.split(TensorMeta(name, torch.float32, tuple(shape))):
            for place in weights.places(piece.name):
                parts = by_storage.setdefault(_storage(place.storage), {}).setdefault(name, [])
                parts.append(_Part(piece, place))
    found = {}
    for held, like in _tensor_pairs(engine, template):
        if sources := by_storage.get(_storage(like)):
            each = [_source(name, shapes[name], parts) for name, parts in sources.items()]
            found[id(held)] = Assembly(like.shape, each)
    return found


def _source(name: str, shape: torch.Size, parts: Sequence[_Part]) -> _Source:
    whole = torch.empty(shape, device="meta")
    shifts = set()
    for part in parts:
        inside, there = part.piece.of(whole), part.place.storage
        as_it_is = type(part.place) is ViewPlace and (inside.size(), inside.stride()) == (there.size(), there.stride())
        shifts.add(int(there.storage_offset() - inside.storage_offset()) if as_it_is else None)
    start = shifts.pop() if len(shifts) == 1 and sum(map(_numel, parts)) == shape.numel() else None
    return _Source(name, shape, tuple(parts) if start is None else (), start)


def _numel(part: _Part) -> int:
    return part.place.num_bytes // part.place.storage.itemsize


def _tensor_pairs(one: Layer, other: Layer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the pairs of tensors that two models of the same layers hold under the same names."""
    for (name, mine), (same, its) in zip(one.named_layers(), other.named_layers(), strict=True):
        assert name == same, (name, same)
        for attribute, value in vars(mine).items():
            if isinstance(value, torch.Tensor):
                yield value, vars(its)[attribute]


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
