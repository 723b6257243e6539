"""Proves what a refresh did: fingerprints of the live tensors, snapshots, comparison, and filling with NaN.

    snapshot -> reset_tensors -> a refresh with the same weights -> compare

finds every place on every rank that the refresh did not rewrite, or rewrote with something else.  Each rank reads its
own places, and one exchange shares the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weight_sync.bucket import runs_of
from weight_sync.errors import CopiesDifferError, UnknownTensorError, WeightRequestError, listed
from weight_sync.fingerprint_words import words_of
from weight_sync.held_format import AS_SENT, HeldFormats
from weight_sync.rank_parts import Exchange, Held, alone, gather_places, shares_of, whole_fingerprint
from weight_sync.tensor_meta import LogicalWeights, Part, Region, TensorMeta, dtype_name, parts_of

_CHUNK = 1 << 20  # elements compared at a time: float64 temporaries of 8 MiB
_BATCH_BYTES = 64 << 20
"""The size of tensors that are read together; of weights in blocks of 8 bits each read makes a copy."""

_Measure = Callable[[str, Part, int], Sequence[object]]
"""More values of a place, by the tensor's name and the place's share."""


@dataclass(frozen=True)
class WeightSnapshot:
    """The content at one moment: F by canonical name and the shares of its regions, the same on all ranks; and what
    the first place of each tensor on this rank held, in host memory, where kept."""

    fingerprints: Mapping[str, int]
    shares: Mapping[str, Mapping[Region | None, int]]
    content: Mapping[str, Part] | None

    @property
    def num_bytes(self) -> int:
        """Host memory of the content kept on this rank."""
        return sum(part.content.nbytes for part in (self.content or {}).values())


@dataclass(frozen=True)
class Difference:
    """One tensor whose content is not the snapshot's.

    The numbers are None where the snapshot kept no content of a place that differs; `max_abs_difference` also where an
    element that differs is not finite.  `places`: the places that differ, if other places of the tensor do not.
    """

    name: str
    num_elements: int | None = None
    max_abs_difference: float | None = None
    places: tuple[str, ...] = ()


def live_fingerprints(weights: LogicalWeights, exchange: Exchange = alone) -> dict[str, int]:
    """Return F of every logical tensor, from the memory that serves: every place on every rank is read.

    Raises `CopiesDifferError` that names the tensors and places, where places of the same content differ.
    """
    return _whole(weights, _held(weights, list(weights.metas()), exchange))


def take_snapshot(weights: LogicalWeights, keep_content: bool, exchange: Exchange = alone) -> WeightSnapshot:
    """Take a snapshot.  `keep_content`: copy what this rank holds to host memory too.  Raises `CopiesDifferError`."""
    held = _held(weights, list(weights.metas()), exchange)
    fingerprints = _whole(weights, held)
    shares = {name: {place.region: place.values[0] for place in places} for name, places in held.items()}
    content = None
    if keep_content:
        content = {name: _copied(part) for name in weights.metas() for part in parts_of(weights, name)[:1]}
    return WeightSnapshot(fingerprints, shares, content)


def compare(
    weights: LogicalWeights, snapshot: WeightSnapshot, skip: Collection[str] = (), exchange: Exchange = alone
) -> list[Difference]:
    """Return the tensors that differ from the snapshot now, in the model's order.  Raises `UnknownTensorError` for
    `skip`.
    """

    def measure(name: str, part: Part, share: int) -> Sequence[object]:
        kept = (snapshot.content or {}).get(name)
        if share == snapshot.shares[name].get(part.region) or kept is None or kept.region != part.region:
            return (None, None)
        return _measured(kept.content, part.content)

    held = _held(weights, _without(weights, skip), exchange, measure)
    found = (_difference(name, places, snapshot.shares[name]) for name, places in held.items())
    return [difference for difference in found if difference is not None]


def resettable(weights: LogicalWeights, skip: Collection[str] = ()) -> list[str]:
    """Return the names that `reset_tensors` may fill.

    Raises `UnknownTensorError` for `skip`, `WeightRequestError` where a tensor cannot hold NaN.
    """
    names = _without(weights, skip)
    for name in names:
        dtype = weights.metas()[name].dtype
        if not dtype.is_floating_point:
            raise WeightRequestError(f"{name} is {dtype_name(dtype)}, which has no NaN")
    return names


def reset_tensors(weights: LogicalWeights, names: Iterable[str], held: HeldFormats = AS_SENT) -> None:
    """Fill the tensors with NaN, which no refresh can bring: what a refresh leaves out stays visible.

    `held`: formats of tensors that the model quantises as they are written.  Where a format has no NaN, its tensors get
    the largest number.
    """
    for name in names:
        meta, form = weights.metas()[name], held.get(name)
        weights.write(name, _not_a_number(meta) if form is None else form.unsent(meta.shape, meta.dtype))
    weights.recompute_derived()


def _held(
    weights: LogicalWeights, names: Sequence[str], exchange: Exchange, measure: _Measure = lambda *_: ()
) -> dict[str, list[Held]]:
    """Return by name what all ranks hold of the tensors: shares of fingerprints, and the `measure` of each place."""

    metas = weights.metas()

    def read() -> Iterator[list[tuple[Region | None, Sequence[object]]]]:
        for batch in runs_of(map(metas.__getitem__, names), _BATCH_BYTES):
            found = [(meta, parts_of(weights, meta.name)) for meta in batch]
            shares = iter(shares_of([(meta, part) for meta, parts in found for part in parts]))
            for meta, parts in found:
                here = zip(parts, [next(shares) for _ in parts])
                yield [(part.region, (share, *measure(meta.name, part, share))) for part, share in here]

    return dict(zip(names, gather_places(read(), exchange), strict=True))


def _whole(weights: LogicalWeights, held: Mapping[str, Sequence[Held]]) -> dict[str, int]:
    found: dict[str, int] = {}
    differing: list[str] = []
    metas = weights.metas()
    for name, places in held.items():
        try:
            found[name] = whole_fingerprint(metas[name], places)
        except CopiesDifferError as error:
            differing.append(str(error))
    if differing:
        raise CopiesDifferError(listed(differing))
    return found


def _difference(name: str, held: Sequence[Held], shares: Mapping[Region | None, int]) -> Difference | None:
    wrong = [place for place in held if place.values[0] != shares.get(place.region)]
    if not wrong:
        return None
    counts: dict[Region | None, int] = {}  # of each region the place that differs most
    for place in wrong:
        counts[place.region] = max(counts.get(place.region, 0), place.values[1] or 0)
    values = [place.values[2] for place in wrong]
    is_measured = all(place.values[1] is not None for place in wrong)
    return Difference(
        name,
        sum(counts.values()) if is_measured else None,
        max(values) if None not in values else None,
        tuple(map(str, wrong)) if len(wrong) < len(held) else (),
    )


def _without(weights: LogicalWeights, skip: Collection[str]) -> list[str]:
    skipped = set(skip)
    unknown = sorted(skipped - weights.metas().keys())
    if unknown:
        raise UnknownTensorError(f"the model has no tensor {unknown[0]!r}")
    return [name for name in weights.metas() if name not in skipped]


def _copied(part: Part) -> Part:
    return Part(part.region, part.content.detach().to("cpu", copy=True))


def _measured(old: torch.Tensor, new: torch.Tensor) -> tuple[int, float | None]:
    """Return how many elements differ, and the largest difference; None for a difference that is not finite."""
    count, largest = 0, torch.zeros((), dtype=torch.float64)
    old_parts, new_parts = old.reshape(-1).split(_CHUNK), new.reshape(-1).split(_CHUNK)
    for old_part, new_part in zip(old_parts, new_parts, strict=True):
        # As whole numbers 0.0 differs from -0.0, and a NaN equals itself.
        differs = (words_of(old_part) != words_of(new_part.to(old_part.device))).nonzero().view(-1)
        if len(differs):
            before, after = (part.to("cpu", torch.float64)[differs] for part in (old_part, new_part))
            count += len(differs)
            largest = torch.maximum(largest, (before - after).abs().max())  # NaN stays
    value = float(largest)
    return count, value if math.isfinite(value) else None


def _not_a_number(meta: TensorMeta) -> torch.Tensor:
    return torch.full(meta.shape, float("nan"), dtype=torch.float32).to(meta.dtype)
