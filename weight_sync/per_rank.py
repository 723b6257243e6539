"""`PerRank`: what each rank of an engine keeps of a target's weights, and is sent in an update per rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from weight_sync.homes import Homes
from weight_sync.rank_boxes import RankBoxes
from weight_sync.rank_cover import Kept, RankCover
from weight_sync.rank_parts import Exchange
from weight_sync.staging import takes_spans
from weight_sync.tensor_meta import TensorMeta
from weight_sync.update_target import UpdateTarget


class PerRank:
    """`rank`: this one.  The ranks call its methods together."""

    def __init__(self, target: UpdateTarget, rank: int, exchange: Exchange) -> None:
        self._target, self._rank, self._exchange = target, rank, exchange
        self._cover: tuple[Hashable, RankCover] | None = None

    @property
    def cover(self) -> RankCover:
        """The parts that each rank keeps now; an exchange, unless they are known.  Raises as `RankCover.gather`."""
        target = self._target
        key = target.weights.places_key()
        if self._cover is None or self._cover[0] != key:
            homes, table = target.planner.homes(target.weights), target.planner.table
            kept = (self._kept(homes, name) for name in table.names)
            self._cover = key, RankCover.gather(table, kept, self._rank, self._exchange)
        return self._cover[1]

    def boxes(self, metas: Sequence[TensorMeta]) -> RankBoxes:
        """Return the parts of a sender's tensors that each rank keeps now.

        Raises as `RankCover.gather` and `RankBoxes.of`.
        """
        return RankBoxes.of(self.cover, self._target.weights, self._target.planner.table, metas)

    def _kept(self, homes: Homes, name: str) -> Kept:
        """Return what this rank keeps of a tensor; all of it where it cannot take less."""
        places = homes.places(name)
        region = places[0].region if places else None
        if not places or (region is not None and not region.length):
            return "nothing"
        meta = self._target.weights.metas()[name]
        is_cut = takes_spans(homes) and name not in self._target.quantised and homes.moves(meta) is not None
        return region if is_cut else None
