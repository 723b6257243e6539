"""The one path by which logical tensors enter a model, and the two places where they can land.

    named wire tensors -> validate all -> split into logical tensors -> ledger -> sink
                                                                                  |-- DirectSink: the model itself
                                                                                  `-- StagedSink: aside, in host memory

Cold load uses the direct sink, a live refresh the staged one; nothing else differs.
Knows `LogicalWeights`, the ledger and sinks.  Does not know transports or versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from weight_sync.errors import (
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    UnknownTensorError,
    WeightRequestError,
)
from weight_sync.ledger import WeightLedger, listed
from weight_sync.tensor_meta import LogicalWeights, Piece, TensorMeta, dtype_name


class WeightSink(Protocol):
    """Where logical tensors land."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Take the content of logical tensor `name`; `tensor` is the caller's and may change afterwards."""

    def read(self, name: str) -> torch.Tensor:
        """What was written under `name`, never to be written to."""


class DirectSink:
    """Straight into the model; casts to the parameter's dtype."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self._weights.write(name, tensor)

    def read(self, name: str) -> torch.Tensor:
        return self._weights.read(name)


class StagedSink:
    """A copy aside, in host memory and logical space: no placement, no sharding."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(name)

    def names(self) -> list[str]:
        return list(self._tensors)

    def pop(self, name: str) -> torch.Tensor:
        return self._tensors.pop(name)

    def clear(self) -> None:
        self._tensors.clear()


def split_wire(weights: LogicalWeights, metas: Sequence[TensorMeta], cast: bool) -> list[list[Piece]]:
    """The logical tensors inside each wire tensor.

    Raises one error that lists everything wrong with the call: `UnknownTensorError`, `ShapeMismatchError`, unless
    `cast` also `DtypeMismatchError`, or `WeightRequestError` where it is more than one kind.
    """
    expected = weights.metas()
    problems: list[WeightRequestError] = []
    split: list[list[Piece]] = []
    for meta in metas:
        try:
            pieces = weights.split(meta)
        except (UnknownTensorError, ShapeMismatchError) as error:
            problems.append(error)
            continue
        wanted = {expected[piece.name].dtype for piece in pieces}
        if not cast and wanted - {meta.dtype}:
            names = " and ".join(sorted(map(dtype_name, wanted)))
            problems.append(DtypeMismatchError(f"{meta.name}: the model has {names}, got {dtype_name(meta.dtype)}"))
        split.append(pieces)
    if problems:
        kinds = {type(problem) for problem in problems}
        kind = kinds.pop() if len(kinds) == 1 else WeightRequestError
        raise kind(listed([str(problem) for problem in problems]))
    return split


def load_weights(
    weights: LogicalWeights,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    sink: WeightSink,
    ledger: WeightLedger,
    cast: bool,
) -> None:
    """Validate wire tensors, split them, note them in the ledger and write them into the sink.

    The tensors of one call are validated together, before any of them is written.  `cast`: take a tensor of another
    dtype than the model's (the sink casts it); otherwise refuse it.

    Raises what `split_wire` raises; `CoverageError` for a tensor that came before or was not announced;
    `ContentError` for one that came before under another name with other content.
    """
    named = list(named_tensors)
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    split = split_wire(weights, metas, cast)
    refusals = ledger.refusals((meta.name, piece.name) for meta, pieces in zip(metas, split) for piece in pieces)
    if refusals:
        raise CoverageError(listed(refusals))
    expected = weights.metas()
    for (wire_name, tensor), pieces in zip(named, split, strict=True):
        for piece in pieces:
            source = tensor.detach()[piece.index]
            assert tuple(source.shape) == expected[piece.name].shape, piece
            if ledger.record(wire_name, piece.name):
                sink.write(piece.name, source)
            elif not _same_bits(sink.read(piece.name), source):
                raise ContentError(f"{piece.name} came again as {wire_name} with other content")


def _same_bits(stored: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether storing `source` would store the same bits."""
    cast = source.to(device=stored.device, dtype=stored.dtype)
    return torch.equal(
        stored.contiguous().view(-1).view(torch.uint8),
        cast.contiguous().view(-1).view(torch.uint8),
    )
