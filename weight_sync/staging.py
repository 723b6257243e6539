"""The one path by which logical tensors enter a model, and the places where they can land.

    named wire tensors -> validate all -> split into logical tensors -> check content -> ledger -> sink
                                                                                                   |-- DirectSink
                                                                                                   `-- a `Staging`

Cold load goes straight into the model, a live refresh into the transaction's staging; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from weight_sync.content_check import is_finite
from weight_sync.errors import (
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    UnknownTensorError,
    WeightRequestError,
)
from weight_sync.ledger import WeightLedger, listed
from weight_sync.tensor_meta import LogicalWeights, Part, Piece, TensorMeta, dtype_name, parts_of

StagingMode = Literal["host", "device", "journal", "in_place"]
HOLDING_MODES = ("journal", "in_place")
"""`write` changes the model, so that no step may run from the first write to the end."""
Content = torch.Tensor | Part
"""A whole logical tensor, or what this rank holds of it."""


@dataclass(frozen=True)
class ProvenPart:
    """What this rank will hold of logical tensor `name`; None: nothing.

    It was proved together with the other ranks' that the whole will have fingerprint `fingerprint`.
    """

    name: str
    part: Part | None
    fingerprint: int


class Arrival(NamedTuple):
    """Logical tensor `name`, out of the wire tensor `wire_name`."""

    wire_name: str
    name: str
    content: torch.Tensor


class WeightSink(Protocol):
    """Where logical tensors land."""

    def write(self, name: str, content: Content) -> None:
        """Take the content of logical tensor `name`, which is the caller's and may change afterwards."""

    def read(self, name: str) -> Sequence[Part]:
        """What was written under `name` as this rank's places hold it, or will; never to be written to."""


class Staging(WeightSink, Protocol):
    """Where a transaction keeps its tensors, and how the old ones come back.  Used once.

        write*  ->  prepare  ->  commit  ->  close
          |            |           |
          `------------+-----------`---->  undo

    `write` and `prepare` run on the I/O thread, `commit` on the thread that runs steps.
    """

    @property
    def dirty(self) -> bool:
        """Whether the model holds anything of this transaction, or may."""

    @property
    def num_bytes(self) -> int:
        """Memory, or disk, that is taken now."""

    def prepare(self) -> None:
        """All of `commit` that can be done ahead.  The model stays as it is."""

    def commit(self) -> None:
        """Put everything written into the model."""

    def undo(self) -> None:
        """Put the old content back, bit for bit, and let go of everything.

        Raises `StagingError`, or whatever a write raises, when that cannot be done: the model is torn then.
        """

    def close(self) -> None:
        """Let go of everything without touching the model."""


class DirectSink:
    """Straight into every place of this rank; casts to the parameter's dtype."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights

    def write(self, name: str, content: Content) -> None:
        if isinstance(content, Part):
            self._weights.put_back(name, content.content)
        else:
            self._weights.write(name, content)

    def read(self, name: str) -> Sequence[Part]:
        return parts_of(self._weights, name)


Announced = Mapping[TensorMeta, list[Piece]]
"""Wire tensors that were split before, and checked."""


def split_wire(
    weights: LogicalWeights, metas: Sequence[TensorMeta], cast: bool, announced: Announced | None = None
) -> list[list[Piece]]:
    """The logical tensors inside each wire tensor; those that were `announced` are not looked at again.

    Raises one error that lists everything wrong with the call: `UnknownTensorError`, `ShapeMismatchError`, unless
    `cast` also `DtypeMismatchError`, or `WeightRequestError` where it is more than one kind.
    """
    expected = weights.metas()
    problems: list[WeightRequestError] = []
    split: list[list[Piece]] = []
    for meta in metas:
        if announced is not None and meta in announced:
            split.append(announced[meta])
            continue
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

    Raises as `split_tensors` and `store`.
    """
    store(split_tensors(weights, named_tensors, ledger, cast), sink, ledger)


def split_tensors(
    weights: LogicalWeights,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    ledger: WeightLedger,
    cast: bool,
    announced: Announced | None = None,
) -> list[Arrival]:
    """The logical tensors of one call, views, validated together before any of them is written.

    `cast`: take a tensor of another dtype than the model's (the sink casts it); otherwise refuse it.  Raises as
    `split_wire`, and `CoverageError` for a tensor that came before or was not announced.
    """
    named = list(named_tensors)
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    split = split_wire(weights, metas, cast, announced)
    refusals = ledger.refusals((meta.name, piece.name) for meta, pieces in zip(metas, split) for piece in pieces)
    if refusals:
        raise CoverageError(listed(refusals))
    expected = weights.metas()
    arrivals = [
        Arrival(wire_name, piece.name, tensor.detach()[piece.index])
        for (wire_name, tensor), pieces in zip(named, split, strict=True)
        for piece in pieces
    ]
    assert all(tuple(arrival.content.shape) == expected[arrival.name].shape for arrival in arrivals)
    return arrivals


def store(arrivals: Iterable[Arrival], sink: WeightSink, ledger: WeightLedger) -> None:
    """Note logical tensors in the ledger and write them into the sink.

    Raises `CoverageError` for a tensor that came before, `ContentError` for one that came before under another name
    with other content.
    """
    for wire_name, name, content in arrivals:
        if ledger.record(wire_name, name):
            sink.write(name, content)
        elif not all(_same_bits(part, content) for part in sink.read(name)):  # other ranks check their parts
            raise ContentError(f"{name} came again as {wire_name} with other content")


def load_part(proven: ProvenPart, sink: WeightSink, ledger: WeightLedger) -> None:
    """Note a part of a logical tensor in the ledger and write it into the sink.

    Raises `CoverageError` for a tensor that came before or was not announced, `ContentError` for one that is not
    finite.
    """
    name, part = proven.name, proven.part
    if part is not None and not is_finite(part.content):
        raise ContentError(f"values that are not finite in {name}")
    if not ledger.record(name, name):
        raise CoverageError(f"{name} came before under another name")
    if part is not None:
        sink.write(name, part)


def _same_bits(part: Part, source: torch.Tensor) -> bool:
    """Whether storing `source`, a whole tensor, would store the same bits."""
    stored = part.content
    mine = source if part.region is None else part.region.of(source)
    cast = mine.to(device=stored.device, dtype=stored.dtype)
    return torch.equal(
        stored.contiguous().view(-1).view(torch.uint8),
        cast.contiguous().view(-1).view(torch.uint8),
    )
