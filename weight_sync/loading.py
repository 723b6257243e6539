"""The one path by which logical tensors enter a model, in a cold load as in a refresh.

    named wire tensors -> split into logical tensors, validated together -> content checked -> ledger -> sink

Every logical tensor arrives exactly once.  One exception: a model may map two wire names to one logical tensor (tied
embeddings: `lm_head.weight` and `model.embed_tokens.weight`), and a tensor that came under one name may come again
under another if its content is the same.

A refresh checks content before any of it is stored: that it is finite, and has the fingerprint that was announced.
Tensors that lie end to end, as in a bucket, are checked together: a pass over many megabytes costs less than a pass
over each of a thousand tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from weight_sync.errors import ContentError, CoverageError, listed
from weight_sync.fingerprint import fingerprints_apart, fingerprints_end_to_end, wrong_fingerprint
from weight_sync.fingerprint_words import BLOCK
from weight_sync.ledger import WeightLedger
from weight_sync.splitting import Announced, split_wire
from weight_sync.staging import WeightSink
from weight_sync.tensor_meta import LogicalWeights, Part, Piece, TensorMeta

Named = Sequence[tuple[str, torch.Tensor]]


class Arrival(NamedTuple):
    """A logical tensor, which is a piece of the wire tensor `wire_name`."""

    wire_name: str
    piece: Piece
    content: torch.Tensor

    @property
    def name(self) -> str:
        """The name of the logical tensor."""
        return self.piece.name


@dataclass(frozen=True)
class ProvenPart:
    """The part that this rank will hold of logical tensor `name`; None: nothing.

    Together with the other ranks' parts it was proved that the whole will have fingerprint `fingerprint`.
    """

    name: str
    part: Part | None
    fingerprint: int


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
    """Return the logical tensors of one call, views, validated together before any of them is written.

    `cast`: see `split_wire`; content is as it came, and cast by whom takes it.  Raises as `split_wire`, and
    `CoverageError` for a tensor that came before or was not announced.
    """
    named = list(named_tensors)
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    split = split_wire(weights, metas, cast, announced)
    refusals = ledger.refusals((meta.name, piece.name) for meta, pieces in zip(metas, split) for piece in pieces)
    if refusals:
        raise CoverageError(listed(refusals))
    expected = weights.metas()
    arrivals = [
        Arrival(wire_name, piece, piece.of(tensor.detach()))
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
    for arrival in arrivals:
        wire_name, name, content = arrival.wire_name, arrival.name, arrival.content
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
        raise CoverageError(f"{name} came already under another name")
    if part is not None:
        sink.write(name, part)


def _same_bits(part: Part, source: torch.Tensor) -> bool:
    """Return whether storing `source`, a whole tensor, would store the same bits."""
    stored = part.content
    mine = source if part.region is None else part.region.of(source)
    cast = mine.to(device=stored.device, dtype=stored.dtype)
    return torch.equal(
        stored.contiguous().view(-1).view(torch.uint8),
        cast.contiguous().view(-1).view(torch.uint8),
    )


# --- content -----------------------------------------------------------------------------------------------------


class Fingerprints(Protocol):
    """Fingerprints by name, such as a dict."""

    def get(self, name: str, default: int, /) -> int: ...


def check_content(named: Named, stated: Fingerprints) -> dict[str, int]:
    """Check logical tensors of one bucket against the fingerprints stated of them, where there are any; return theirs.

    Raises `ContentError` for all that are not finite, or for the first whose fingerprint differs.
    """
    found: dict[str, int] = {}
    not_finite: list[str] = []
    for run in _runs(named):
        values, finite = _inspect(run)
        found.update(zip((name for name, _ in run), values, strict=True))
        if not finite:
            not_finite += [name for name, tensor in run if not is_finite(tensor)]
    if not_finite:
        raise ContentError(f"values that are not finite in {listed(not_finite)}")
    return matching(found, stated)


def matching(found: dict[str, int], stated: Fingerprints) -> dict[str, int]:
    """Return the fingerprints found.  Raises `ContentError` for the first that is not the one stated, where one is."""
    for name, actual in found.items():
        expected = stated.get(name, actual)
        if actual != expected:
            raise ContentError(wrong_fingerprint(name, actual, expected))
    return found


def _inspect(run: Named) -> tuple[list[int], bool]:
    """Return the fingerprints of the tensors of a run, and whether all values are finite."""
    finite: bool | None = None
    if all(tensor.numel() and tensor.numel() % BLOCK == 0 for _, tensor in run) and run[0][1].is_contiguous():
        values, finite = fingerprints_end_to_end(_flat(run).view(-1), [tensor.numel() for _, tensor in run])
    else:
        values, finite = fingerprints_apart([tensor for _, tensor in run])
    return values, is_finite(_flat(run)) if finite is None else finite


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, in one pass without temporaries: NaN propagates through min and max."""
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no min or max
        return all(bool(chunk.to(torch.float32).isfinite().all()) for chunk in tensor.reshape(-1).split(1 << 20))
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _runs(named: Named) -> Iterator[Named]:
    """Yield neighbours in the list that lie end to end in one storage, in one dtype; whole blocks apart from other
    sizes.
    """
    run: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        if run and not _follows(run[-1][1], tensor):
            yield run
            run = []
        run.append((name, tensor))
    if run:
        yield run


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.numel() > 0
        and other.is_contiguous()
        and one.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
        and (one.numel() % BLOCK == 0) == (other.numel() % BLOCK == 0)
    )


def _flat(run: Named) -> torch.Tensor:
    """Return all elements of a run as one tensor, a view."""
    first = run[0][1]
    if len(run) == 1:
        return first
    return first.as_strided((sum(tensor.numel() for _, tensor in run),), (1,))
