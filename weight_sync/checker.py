"""Proving what a refresh did: fingerprints of the live tensors, snapshots, comparison, and filling with NaN.

    snapshot -> reset_tensors -> a refresh with the same weights -> compare

finds every tensor that the refresh did not rewrite, or rewrote with something else.
Knows `LogicalWeights`.  Does not know requests, or when the weights may be read or filled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from weight_sync.errors import UnknownTensorError, WeightRequestError
from weight_sync.fingerprint import fingerprint
from weight_sync.tensor_meta import LogicalWeights, TensorMeta, dtype_name

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements compared at a time: float64 temporaries of 8 MiB


@dataclass(frozen=True)
class WeightSnapshot:
    """The content at one moment: F by canonical name, and the tensors themselves, in host memory, where kept."""

    fingerprints: Mapping[str, int]
    content: Mapping[str, torch.Tensor] | None

    @property
    def num_bytes(self) -> int:
        """Host memory of the content kept."""
        return sum(tensor.nbytes for tensor in (self.content or {}).values())


@dataclass(frozen=True)
class Difference:
    """One tensor whose content is not the snapshot's.

    The numbers are None where the snapshot kept no content; `max_abs_difference` also where an element that differs
    is not finite.
    """

    name: str
    num_elements: int | None = None
    max_abs_difference: float | None = None


def live_fingerprints(weights: LogicalWeights) -> dict[str, int]:
    """F of every logical tensor, from the memory that serves."""
    return {name: fingerprint(weights.read(name)) for name in weights.metas()}


def take_snapshot(weights: LogicalWeights, keep_content: bool) -> WeightSnapshot:
    """`keep_content`: copy all tensors to host memory too, as much as the weights themselves take."""
    if not keep_content:
        return WeightSnapshot(live_fingerprints(weights), None)
    content = {name: weights.read(name).detach().to("cpu", copy=True) for name in weights.metas()}
    return WeightSnapshot({name: fingerprint(tensor) for name, tensor in content.items()}, content)


def compare(weights: LogicalWeights, snapshot: WeightSnapshot, skip: Collection[str] = ()) -> list[Difference]:
    """The tensors that differ from the snapshot now, in the model's order.  Raises `UnknownTensorError` for `skip`."""
    return list(_differences(weights, snapshot, _without(weights, skip)))


def resettable(weights: LogicalWeights, skip: Collection[str] = ()) -> list[str]:
    """The names that `reset_tensors` may fill.

    Raises `UnknownTensorError` for `skip`, `WeightRequestError` where a tensor cannot hold NaN.
    """
    names = _without(weights, skip)
    for name in names:
        dtype = weights.metas()[name].dtype
        if not dtype.is_floating_point:
            raise WeightRequestError(f"{name} is {dtype_name(dtype)}, which has no NaN")
    return names


def reset_tensors(weights: LogicalWeights, names: Iterable[str]) -> None:
    """Fill the tensors with NaN, which no refresh can bring: what a refresh leaves out stays visible."""
    for name in names:
        weights.write(name, _not_a_number(weights.metas()[name]))
    weights.recompute_derived()


def _without(weights: LogicalWeights, skip: Collection[str]) -> list[str]:
    skipped = set(skip)
    unknown = sorted(skipped - weights.metas().keys())
    if unknown:
        raise UnknownTensorError(f"the model has no tensor {unknown[0]!r}")
    return [name for name in weights.metas() if name not in skipped]


def _differences(weights: LogicalWeights, snapshot: WeightSnapshot, names: list[str]) -> Iterator[Difference]:
    for name in names:
        live = weights.read(name)
        if fingerprint(live) == snapshot.fingerprints[name]:
            continue
        if snapshot.content is None:
            yield Difference(name)
        else:
            yield _measured(name, snapshot.content[name], live)


def _measured(name: str, old: torch.Tensor, new: torch.Tensor) -> Difference:
    count, largest = 0, torch.zeros((), dtype=torch.float64)
    old_parts, new_parts = old.reshape(-1).split(_CHUNK), new.reshape(-1).split(_CHUNK)
    for old_part, new_part in zip(old_parts, new_parts, strict=True):
        differs = (_bits(old_part) != _bits(new_part.to(old_part.device))).nonzero().view(-1)
        if len(differs):
            before, after = (part.to("cpu", torch.float64)[differs] for part in (old_part, new_part))
            count += len(differs)
            largest = torch.maximum(largest, (before - after).abs().max())  # NaN stays
    value = float(largest)
    return Difference(name, count, value if math.isfinite(value) else None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as whole numbers, so that 0.0 differs from -0.0 and a NaN equals itself."""
    return tensor.contiguous().view(_WORDS[tensor.dtype.itemsize])


def _not_a_number(meta: TensorMeta) -> torch.Tensor:
    return torch.full(meta.shape, float("nan"), dtype=torch.float32).to(meta.dtype)
