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
from weight_sync.errors import CopiesDifferError, CoverageError, LostVoteError, listed
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
        came, ranks = _together(everyone), np.repeat(np.arange(len(everyone)), [len(each.numbers) for each in everyone])
        holders = np.where(came.is_whole, -1, self._holders_RP[ranks, self.patterns[came.numbers]])
        keys = came.numbers * (self.num_ranks + 1) + holders + 1
        _, firsts, copy_of = np.unique(keys, return_index=True, return_inverse=True)
        if (wrong := np.flatnonzero(came.differs_from(came.of(firsts[copy_of])))).size:
            at = wrong[0]
            who = "two ranks" if came.is_whole[at] else f"ranks {holders[at]} and {ranks[at]}"
            name = table.names[came.numbers[at]]
            raise CopiesDifferError(f"{name}: {who} were sent different content of the same part")
        return _sums(came.of(firsts), table)

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
        both = _together([self, others])
        return both.of(np.argsort(both.numbers))

    def of(self, chosen: npt.NDArray[np.bool_] | Numbers) -> RankShares:
        """Return some of the tensors, by a flag for each, or by their places."""
        numbers, is_whole, codes, sent, held = self
        return RankShares(numbers[chosen], is_whole[chosen], codes[chosen], sent[chosen], held[chosen])

    def differs_from(self, others: RankShares) -> npt.NDArray[np.bool_]:
        """Return where the content is not that of others, which are as many, as bool."""
        differs: npt.NDArray[np.bool_] = (
            (self.codes != others.codes) | (self.sent != others.sent) | (self.held != others.held)
        )
        return differs

    def encoded(self) -> bytes:
        """Return the wire form."""
        rows = np.empty(len(self.numbers), _ROW)
        for name, column in self._asdict().items():
            rows[name] = column
        return _MAGIC + rows.tobytes()

    @classmethod
    def decoded(cls, data: bytes) -> RankShares:
        """Return what `data` is the wire form of.  Raises `LostVoteError` for anything else."""
        count, rest = divmod(len(data) - len(_MAGIC), _ROW.itemsize)
        if not data.startswith(_MAGIC) or rest:
            raise LostVoteError("another rank could not verify the weight update")
        rows = np.ndarray(count, _ROW, data, len(_MAGIC))
        return cls(**{name: rows[name] for name in cls._fields})


_ROW = np.dtype(list(zip(RankShares._fields, (np.int64, np.bool_, np.uint8, np.uint64, np.uint64), strict=True)))


def _together(shares: Sequence[RankShares]) -> RankShares:
    """Return the tensors of some ranks, one rank after the other."""
    columns: list[Any] = [np.concatenate(column) for column in zip(*cast(Any, shares), strict=True)]
    return RankShares(*columns)


def _sums(parts: RankShares, table: TensorTable) -> RankShares:
    """Return F of tensors from their parts: each part once, sorted by tensor, and the whole of a tensor first.

    Raises `CoverageError` for a tensor that came whole and in parts, `CopiesDifferError` for one in two dtypes.
    """
    numbers, starts, tensor = np.unique(parts.numbers, return_index=True, return_inverse=True)
    first = parts.of(starts[tensor])
    if (wrong := parts.numbers[first.is_whole & (np.arange(len(tensor)) != starts[tensor])]).size:
        raise CoverageError(f"{table.names[wrong[0]]}: one rank was sent all of it, and another a part")
    if (wrong := parts.numbers[first.codes != parts.codes]).size:
        raise CopiesDifferError(f"{table.names[wrong[0]]}: two ranks were sent it in different dtypes")
    sent, held = np.zeros(len(numbers), np.uint64), np.zeros(len(numbers), np.uint64)
    np.add.at(sent, tensor, parts.sent)
    np.add.at(held, tensor, parts.held)
    return RankShares.of_whole(numbers, parts.codes[starts], sent, held)
