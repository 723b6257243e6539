"""The parts of logical tensors that an engine's ranks hold, put together: sums of fingerprints, and tensors.

    rank 0   rows 0..31    share of F               rank 1   rows 32..63   share of F      their sum is F
             the same again, a replica: the same share, or one of the two is wrong

Every rank reads its own places, and one exchange shares what they found: only tensors that are asked for move, and no
rank reads what another holds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weight_sync.errors import CopiesDifferError, WeightSyncError
from weight_sync.fingerprint import combine, fingerprint, fingerprint_slice
from weight_sync.fingerprint_batch import Shard, fingerprints_of
from weight_sync.tensor_meta import Part, Region, Run, TensorMeta, tensor_bytes

Exchange = Callable[[bytes], list[bytes]]
"""All-gather of bytes, by rank: a call that all ranks make together.  It raises on all of them where one failed."""

_ALL = Run((), (slice(0, None),))
_END = b"\n"  # of what stands before the content of a part


def alone(mine: bytes) -> list[bytes]:
    """Exchange nothing: an engine of one rank has only its own."""
    return [mine]


class Held(NamedTuple):
    """The values found at one place: `copy` counts the places that a rank has of the tensor."""

    rank: int
    copy: int
    region: Region | None
    values: list[Any]

    def __str__(self) -> str:
        return f"copy {self.copy} on rank {self.rank}"


def share_of(meta: TensorMeta, part: Part) -> int:
    """Return what a part contributes to the fingerprint of its tensor."""
    if part.region is None:
        return fingerprint(part.content)
    runs = part.region.runs()
    return combine(*(fingerprint_slice(part.content[run.in_part], meta.shape, run.in_whole) for run in runs))


def shares_of(parts: Sequence[tuple[TensorMeta, Part]]) -> list[int]:
    """Return `share_of` of each part, of many small ones together."""
    shares, together = [0] * len(parts), list[tuple[int, Shard]]()
    for at, (meta, part) in enumerate(parts):
        if part.region is not None and part.region.dim:
            shares[at] = share_of(meta, part)
            continue
        row = math.prod(meta.shape[1:])
        for run in [_ALL] if part.region is None else part.region.runs():
            content = part.content[run.in_part]
            together.append((at, (content, content.dtype, run.in_whole[0].start * row)))
    for (at, _), share in zip(together, fingerprints_of(shard for _, shard in together), strict=True):
        shares[at] = combine(shares[at], share)
    return shares


def gather_places(
    mine: Iterable[Sequence[tuple[Region | None, Sequence[Any]]]], exchange: Exchange
) -> list[list[Held]]:
    """Return what all ranks found at their places of each of some tensors, in the order of the tensors.

    `mine`: of each tensor, for every place of this rank its region and JSON values.  It takes one exchange.
    """
    rows = [[(numbers_of(region), list(values)) for region, values in places] for places in mine]
    held: list[list[Held]] = [[] for _ in rows]
    for rank, data in enumerate(exchange(json.dumps(rows).encode())):
        for found, places in zip(held, json.loads(data), strict=True):
            found += [Held(rank, copy, region_of(numbers), values) for copy, (numbers, values) in enumerate(places)]
    return held


def whole_fingerprint(meta: TensorMeta, held: Sequence[Held], at: int = 0) -> int:
    """Return F of a tensor from the shares that its places hold: `values[at]` of each.

    Raises `CopiesDifferError` where two places of the same region differ, `WeightSyncError` where a part is nowhere.
    """
    if len(held) == 1 and held[0].region is None:
        return int(held[0].values[at])
    shares: dict[Region | None, list[Held]] = {}
    for place in held:
        shares.setdefault(place.region, []).append(place)
    for places in shares.values():
        (usual, _), *others = Counter(place.values[at] for place in places).most_common()
        if others:
            odd = ", ".join(str(place) for place in places if place.values[at] != usual)
            like = next(place for place in places if place.values[at] == usual)
            raise CopiesDifferError(f"{meta.name}: {odd} differs from {like}")
    return combine(*(shares[region][0].values[at] for region in covering(meta, shares)))


def first_rows(meta: TensorMeta, parts: Sequence[Part], count: int, exchange: Exchange) -> torch.Tensor:
    """Return the first `count` rows of a tensor, on the host, from what this rank (`parts`) and the others hold of it.

    One exchange.  Where several ranks hold the same, the first one's counts.  Raises `WeightSyncError` where a part is
    nowhere.
    """
    count = min(count, meta.shape[0])
    mine = b""
    for region, content in parts[:1]:
        pieces = [content[run.in_part] for run in _first_runs(region, count)]
        numbers = json.dumps(numbers_of(region)).encode()
        mine = numbers + _END + b"".join(tensor_bytes(piece).numpy().tobytes() for piece in pieces)
    found: dict[Region | None, memoryview] = {}
    for data in exchange(mine):
        numbers, end, content_bytes = data.partition(_END)
        if end:
            found.setdefault(region_of(json.loads(numbers)), memoryview(bytearray(content_bytes)))
    whole = torch.empty((count, *meta.shape[1:]), dtype=meta.dtype)
    for part in covering(meta, found):
        rest = found[part]
        for run in _first_runs(part, count):
            target = whole[run.in_whole]
            if target.numel():
                target.copy_(torch.frombuffer(rest, dtype=meta.dtype, count=target.numel()).view(target.shape))
                rest = rest[target.nbytes :]
    return whole


def _first_runs(region: Region | None, count: int) -> list[Run]:
    """Return the runs of a region within the first `count` rows."""
    found = []
    for (here, *in_part), (there, *in_whole) in (region or Region(0, 0, count)).runs():
        start, first = there.start or 0, here.start or 0
        length = max(0, (count if there.stop is None else min(there.stop, count)) - start)
        rows, rows_in_whole = slice(first, first + length), slice(start, start + length)
        found.append(Run((rows, *in_part), (rows_in_whole, *in_whole)))
    return found


def covering(meta: TensorMeta, regions: Mapping[Region | None, Any]) -> list[Region | None]:
    """Return the regions that make up the tensor, in order, each element once."""
    if None in regions:
        return [None]
    parts: list[Region | None] = []
    ends: dict[int, int] = {}
    for region in sorted(filter(None, regions), key=lambda region: (region.dim, region.start)):
        if not region.length:
            continue
        if region.start != ends.setdefault(region.dim, 0):
            at = ends[region.dim]
            raise WeightSyncError(
                f"{meta.name}: parts of dimension {region.dim} leave a gap or overlap at {at}: "
                f"the next starts at {region.start}"
            )
        ends[region.dim] += region.length
        parts.append(region)
    if meta.numel and (len(ends) != 1 or any(meta.shape[dim] != end for dim, end in ends.items())):
        raise WeightSyncError(
            f"{meta.name}: the parts on all ranks together are not the whole tensor: they end at {ends or 0}"
        )
    return parts


def numbers_of(region: Region | None) -> list[int]:
    return [] if region is None else [region.dim, region.start, region.length, *region.sections]


def region_of(numbers: Sequence[int]) -> Region | None:
    if not numbers:
        return None
    dim, start, length, *sections = numbers
    return Region(dim, start, length, tuple(sections))
