"""`RankCover`: the part of each logical tensor that each rank of an engine keeps, and F put together from the parts.

In an update *per rank* each rank is sent what it keeps, and not the rest:

    rank 0   experts 0..3, rows 0..31 of q_proj     F of its tensors, shares of F of its regions  --.
    rank 1   experts 4..7, rows 32..63 of q_proj    the same                                      --+-> F of all

A tensor's F is that of a rank that was sent all of it, or else the sum of the shares of its regions.  What several
ranks keep (replicas of experts, norms) they must have been sent alike.

Shapes: R ranks, T logical tensors, P patterns (what the ranks keep of one tensor), N tensors that came on a rank.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from weight_sync.boxes import Box, box_text
from weight_sync.content import TensorTable
from weight_sync.errors import CopiesDifferError, CoverageError, TransactionStateError, listed
from weight_sync.ledger import Numbers, PlannedBoxes
from weight_sync.rank_parts import Exchange, covering, numbers_of, region_of
from weight_sync.tensor_meta import Region

NOTHING, WHOLE = -1, 0
"""Parts that a rank may keep; the others are numbers of regions."""
_MAGIC = b"shares of F "
Kept = Region | Literal["nothing"] | None
"""The part that one rank keeps of a tensor, as far as it can take less than all of it: a region; None: all."""


@dataclass(frozen=True, eq=False)
class RankCover:
    """`parts_RP`: the part that each rank keeps under each pattern, int32.  `patterns` [T]: of each tensor, int64.

    `regions`: by the number of a part.  `names`: of the tensors.  `rank`: this one.  What one rank must be sent whole
    goes whole to all that keep any of it.
    """

    rank: int
    parts_RP: npt.NDArray[np.int32]
    patterns: Numbers
    regions: Sequence[Region | None]
    names: Sequence[str]

    @classmethod
    def gather(cls, table: TensorTable, parts: Iterable[Kept], rank: int, exchange: Exchange) -> RankCover:
        """Return the cover of the parts that the ranks keep of all tensors; they call it together.  One exchange.

        Raises `WeightSyncError` for a tensor of which no rank keeps some part.
        """
        numbers: dict[Region | None, int] = {None: WHOLE}
        mine = [NOTHING if part == "nothing" else numbers.setdefault(part, len(numbers)) for part in parts]
        regions: dict[Region | None, int] = {None: WHOLE}
        rows = []
        for data in exchange(json.dumps([[numbers_of(region) for region in numbers], mine]).encode()):
            its_regions, row = json.loads(data)
            renumbered = [regions.setdefault(region_of(each), len(regions)) for each in its_regions]
            rows.append(np.array([*renumbered, NOTHING], np.int32)[np.array(row, np.int64)])
        parts_RT = np.stack(rows)
        parts_RT = np.where((parts_RT == WHOLE).any(axis=0), np.minimum(parts_RT, WHOLE), parts_RT)
        parts_RP, patterns = np.unique(parts_RT, axis=1, return_inverse=True)
        cover = cls(rank, parts_RP, patterns.reshape(-1).astype(np.int64), tuple(regions), table.names)
        cover._require_all(table)
        return cover

    @property
    def num_ranks(self) -> int:
        return len(self.parts_RP)

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """The tensors of which this rank keeps anything, bool [T]."""
        kept: npt.NDArray[np.bool_] = (self.parts_RP[self.rank] != NOTHING)[self.patterns]
        return kept

    def parts_under(self, pattern: int) -> list[Region | Literal["all", "nothing"]]:
        """Return what each rank keeps of a tensor with this pattern."""
        parts = [*(region or "all" for region in self.regions), "nothing"]
        return [parts[part] for part in self.parts_RP[:, pattern].tolist()]

    @functools.cached_property
    def _holders_RP(self) -> npt.NDArray[np.int64]:
        """The first rank that keeps the same part."""
        holders: npt.NDArray[np.int64] = (self.parts_RP[:, None] == self.parts_RP[None]).argmax(axis=1)
        return holders

    def _require_all(self, table: TensorTable) -> None:
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for meta, pattern in zip(table.metas, self.patterns.tolist(), strict=True):
            if (pattern, meta.shape) not in seen:
                seen.add((pattern, meta.shape))
                kept = {part for part in self.parts_RP[:, pattern].tolist() if part != NOTHING}
                covering(meta, {self.regions[part]: part for part in kept})

    def kept_boxes(self, planned: PlannedBoxes) -> PlannedBoxes:
        """Return the boxes of a bucket with the numbers of elements that this rank keeps in place of the whole ones.

        Raises `CoverageError` for a box of which this rank does not keep all.
        """
        numels = []
        for number, box, shape in zip(planned.numbers.tolist(), planned.boxes, planned.shapes, strict=True):
            part = self.parts_RP[self.rank, self.patterns[number]]
            region = self.regions[part] if part > WHOLE else None
            if region is None or not _lies_in(box, region):
                name = self.names[number]
                raise CoverageError(f"rank {self.rank} was sent {box_text(box)} of {name}, which it does not keep")
            numels.append(math.prod(shape) // shape[region.dim] * region.length)
        return replace(planned, numels=np.array(numels, np.int64))

    def join(self, mine: RankShares, table: TensorTable, exchange: Exchange) -> RankShares:
        """Return F of all tensors that came; the ranks call it together.  It takes one exchange.

        Raises `TransactionStateError` where another rank could not bring its shares, `CoverageError` for a tensor that
        came on some of the ranks that keep it, `CopiesDifferError` where two ranks were sent different content.
        """
        everyone = [RankShares.decoded(data) for data in exchange(mine.encoded())]
        self._require_everywhere(everyone, table)
        joined = _Joined(table)
        for shares in everyone:
            joined.take_whole(shares.of(shares.is_whole))
        parts = [shares.of(~shares.is_whole) for shares in everyone]
        holders = [self._holders_RP[rank][self.patterns[shares.numbers]] for rank, shares in enumerate(parts)]
        for shares in parts:
            joined.require_parts(shares)
        for rank, shares in enumerate(parts):
            joined.add(shares.of(holders[rank] == rank))
            for holder in np.unique(holders[rank]).tolist():
                copies = shares.of(holders[rank] == holder)
                _require_equal(copies, parts[holder], table, f"ranks {holder} and {rank}")
        return joined.shares()

    def _require_everywhere(self, everyone: Sequence[RankShares], table: TensorTable) -> None:
        """Raise `CoverageError` for a tensor that came on some of the ranks that keep it, and not on others."""
        keeps_RP = self.parts_RP != NOTHING
        came, here = np.zeros(len(table), np.bool_), np.zeros(len(table), np.int64)
        for keeps_P, shares in zip(keeps_RP, everyone, strict=True):
            came[shares.numbers] = True
            here[shares.numbers] += keeps_P[self.patterns[shares.numbers]]
        lacking = np.flatnonzero(came & (here != keeps_RP.sum(axis=0)[self.patterns]))
        if lacking.size:
            names = [table.names[number] for number in lacking]
            raise CoverageError(f"tensors came on some of the ranks that keep them, and not on all: {listed(names)}")


def _lies_in(box: Box, region: Region) -> bool:
    start, stop = box[region.dim]
    cuts = [run.in_whole[region.dim] for run in region.runs()]
    return any(cut.start <= start and stop <= cut.stop for cut in cuts)


class RankShares(NamedTuple):
    """The tensors that came on one rank, by number, ascending [N]; whether all of each came, bool; its dtype as sent,
    uint8, of `DTYPE_CODES`; F as sent and as held, uint64, or shares of F.
    """

    numbers: Numbers
    is_whole: npt.NDArray[np.bool_]
    codes: npt.NDArray[np.uint8]
    sent: npt.NDArray[np.uint64]
    held: npt.NDArray[np.uint64]

    @classmethod
    def of_whole(
        cls,
        numbers: Numbers,
        codes: npt.NDArray[np.uint8],
        sent: npt.NDArray[np.uint64],
        held: npt.NDArray[np.uint64],
    ) -> RankShares:
        """Return the shares of tensors of which all came."""
        return cls(numbers, np.ones(numbers.size, np.bool_), codes, sent, held)

    def with_more(self, others: RankShares) -> RankShares:
        """Return these tensors and others."""
        mine, theirs = cast(tuple[Any, ...], self), cast(tuple[Any, ...], others)
        columns: list[Any] = [np.concatenate(both) for both in zip(mine, theirs, strict=True)]
        return RankShares(*columns).of(np.argsort(columns[0]))

    def of(self, chosen: npt.NDArray[np.bool_] | Numbers) -> RankShares:
        """Return some of the tensors, by a flag for each, or by their places."""
        numbers, is_whole, codes, sent, held = self
        return RankShares(numbers[chosen], is_whole[chosen], codes[chosen], sent[chosen], held[chosen])

    def encoded(self) -> bytes:
        """Return the wire form."""
        return _MAGIC + b"".join(column.tobytes() for column in self)

    @classmethod
    def decoded(cls, data: bytes) -> RankShares:
        """Return what `data` is the wire form of.  Raises `TransactionStateError` for anything else."""
        size = sum(np.dtype(kind).itemsize for kind in _KINDS)
        if not data.startswith(_MAGIC) or (len(data) - len(_MAGIC)) % size:
            raise TransactionStateError("another rank could not verify the weight update")
        count, at = (len(data) - len(_MAGIC)) // size, len(_MAGIC)
        columns: list[Any] = []
        for kind in _KINDS:
            columns.append(np.frombuffer(data, kind, count, at))
            at += columns[-1].nbytes
        return cls(*columns)


_KINDS = (np.int64, np.bool_, np.uint8, np.uint64, np.uint64)


class _Joined:
    """The shares of all ranks, as they are put together."""

    def __init__(self, table: TensorTable) -> None:
        count = len(table)
        self._table = table
        self._is_known = np.zeros(count, np.bool_)
        self._is_begun = np.zeros(count, np.bool_)
        self._codes = np.zeros(count, np.uint8)
        self._sent, self._held = np.zeros(count, np.uint64), np.zeros(count, np.uint64)

    def take_whole(self, shares: RankShares) -> None:
        """Take F of whole tensors, which must be what other ranks have."""
        known = self._is_known[shares.numbers]
        there = shares.of(known).numbers
        before = RankShares(there, known[known], self._codes[there], self._sent[there], self._held[there])
        _require_equal(shares.of(known), before, self._table, "two ranks")
        new = shares.of(~known)
        self._is_known[new.numbers] = True
        self._codes[new.numbers], self._sent[new.numbers] = new.codes, new.sent
        self._held[new.numbers] = new.held

    def require_parts(self, shares: RankShares) -> None:
        """Raise `CoverageError` for a tensor that came whole, of which these are parts."""
        if (wrong := shares.numbers[self._is_known[shares.numbers]]).size:
            raise CoverageError(f"{self._table.names[wrong[0]]}: one rank was sent all of it, and another a part")

    def add(self, shares: RankShares) -> None:
        """Add the shares of regions that no rank before has brought.

        Raises `CopiesDifferError` for a tensor that came in two dtypes.
        """
        at, codes = shares.numbers, self._codes
        if (wrong := at[self._is_begun[at] & (codes[at] != shares.codes)]).size:
            raise CopiesDifferError(f"{self._table.names[wrong[0]]}: two ranks were sent it in different dtypes")
        codes[at] = shares.codes
        self._sent[at] += shares.sent
        self._held[at] += shares.held
        self._is_begun[at] = True

    def shares(self) -> RankShares:
        """Return F of all tensors that came."""
        (came,) = (self._is_known | self._is_begun).nonzero()
        return RankShares.of_whole(came, self._codes[came], self._sent[came], self._held[came])


def _require_equal(copies: RankShares, first: RankShares, table: TensorTable, ranks: str) -> None:
    """Raise `CopiesDifferError` for a tensor that `first` has with other content.  It has all tensors of `copies`."""
    there = first.of(np.searchsorted(first.numbers, copies.numbers))
    same = (there.codes == copies.codes) & (there.sent == copies.sent) & (there.held == copies.held)
    if (wrong := copies.numbers[~same]).size:
        raise CopiesDifferError(f"{table.names[wrong[0]]}: {ranks} were sent different content of the same part")
