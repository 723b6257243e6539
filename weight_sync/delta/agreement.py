"""The proof of a frame: all ranks together found the fingerprints that it states, before and after its changes.

A rank has the fingerprints of whole tensors in arrays, and of others the shares of its places.  One exchange brings
them together.  Where arrays agree with the frame nothing else is done; other tensors are looked at one by one.

T tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weight_sync.delta.frame import DeltaFrame, FrameEntry
from weight_sync.errors import BaseMismatchError, CopiesDifferError
from weight_sync.rank_parts import Exchange, Held, numbers_of, region_of, whole_fingerprint
from weight_sync.tensor_meta import Region

_END = b"\n"  # of what stands before the arrays

Places = Sequence[tuple[Region | None, Sequence[int]]]
"""The region of each place of a rank, and its shares before and after."""


class RankFindings(NamedTuple):
    """The findings of one rank.

    `whole`: tensors that it has all of, bool [T]; `values`: of these, F before and after, uint64.  `places`: of other
    tensors, by number.
    """

    whole: np.ndarray
    values: np.ndarray
    places: Mapping[int, Places]

    def pack(self) -> bytes:
        """Return the findings as bytes."""
        rows = {at: [(numbers_of(region), list(shares)) for region, shares in each] for at, each in self.places.items()}
        arrays = np.packbits(self.whole).tobytes() + self.values.astype("<u8").tobytes()
        return json.dumps(rows).encode() + _END + arrays

    @classmethod
    def unpack(cls, data: bytes, count: int) -> RankFindings:
        """Read what `pack` wrote of `count` tensors."""
        rows, _, arrays = data.partition(_END)
        num_bytes = -(-count // 8)
        whole = np.unpackbits(np.frombuffer(arrays, np.uint8, num_bytes), count=count).astype(np.bool_)
        values = np.frombuffer(arrays, "<u8", offset=num_bytes).reshape(-1, 2)
        places = {
            int(at): [(region_of(numbers), shares) for numbers, shares in each] for at, each in json.loads(rows).items()
        }
        return cls(whole, values, places)

    def held(self, rank: int, at: int) -> list[Held]:
        """Return what it found of one tensor."""
        if self.whole[at]:
            return [Held(rank, 0, None, self.values[np.count_nonzero(self.whole[:at])].tolist())]
        return [Held(rank, copy, region, list(each)) for copy, (region, each) in enumerate(self.places.get(at, ()))]


def require_agreement(frame: DeltaFrame, held: np.ndarray, mine: RankFindings, exchange: Exchange) -> None:
    """Compare what all ranks found with what the frame states of the tensors that are `held`, bool [T].

    Raises `BaseMismatchError`, `ContentError`, and `WeightSyncError` where a part of a tensor is nowhere.
    """
    count = len(held)
    ranks = [RankFindings.unpack(data, count) for data in exchange(mine.pack())]
    is_proved = np.zeros(count, dtype=np.bool_)
    for found in ranks:
        is_proved |= found.whole
    for found in ranks:
        (numbers,) = found.whole.nonzero()
        is_proved[numbers[(found.values != frame.fingerprints[numbers]).any(1)]] = False
        is_proved[list(found.places)] = False
    for at in np.flatnonzero(held & ~is_proved).tolist():
        _check(frame.entry(at), [place for rank, found in enumerate(ranks) for place in found.held(rank, at)])


def _check(entry: FrameEntry, held: Sequence[Held]) -> None:
    try:
        before, after = (whole_fingerprint(entry.meta, held, at) for at in (0, 1))
    except CopiesDifferError as error:
        raise BaseMismatchError(str(error)) from None
    entry.check(before, after)
