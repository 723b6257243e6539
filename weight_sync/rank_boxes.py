"""`RankBoxes`: the parts of a sender's tensors that each rank of an engine is to be sent, in few words.

Tensors of one kind are kept alike: all experts of a rank, all `q_proj`.  So the parts are listed once for each pattern,
and each tensor has the number of its pattern: two or three characters of JSON a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_sync.boxes import Box, parse_box
from weight_sync.content import TensorTable
from weight_sync.errors import WeightRequestError
from weight_sync.paired_wire import part_of
from weight_sync.rank_cover import RankCover
from weight_sync.splitting import split_wire
from weight_sync.tensor_meta import LogicalWeights, Piece, Region, TensorMeta

Edges = list[list[int]]
"""A box: [start, stop] of each dimension."""
Pattern = list[list[Edges] | None]
"""By rank: the boxes of a tensor that it is to be sent; None: all of it."""

_NO_ANSWER = "the engine does not state which parts of these tensors its ranks keep"


@dataclass(frozen=True)
class RankBoxes:
    """`tensors`: the place in `patterns` of each tensor's."""

    patterns: list[Pattern]
    tensors: list[int]

    @classmethod
    def of(
        cls, cover: RankCover, weights: LogicalWeights, table: TensorTable, metas: Sequence[TensorMeta]
    ) -> RankBoxes:
        """Return the parts of wire tensors.

        One that the model splits, that has other parts, or whose content comes twice under two names, goes whole to all
        ranks.  Raises as `split_wire` for tensors that the model does not have.
        """
        plain = [meta for meta in metas if part_of(weights, meta) is None]
        pieces = dict(zip(plain, split_wire(weights, plain, cast=True), strict=True))
        came = Counter(piece.name for found in pieces.values() for piece in found)
        places: dict[object, int] = {}
        patterns: list[Pattern] = []
        tensors = []
        for meta in metas:
            match pieces.get(meta):
                case [Piece(name, (), False)] if came[name] == 1:
                    number = int(cover.patterns[table.number_of[name]])
                    key: object = (number, meta.shape)
                case _:
                    number, key = -1, None
            if key not in places:
                places[key] = len(patterns)
                parts = ["all"] * cover.num_ranks if key is None else cover.parts_under(number)
                patterns.append([_boxes(part, meta.shape) for part in parts])
            tensors.append(places[key])
        return cls(patterns, tensors)

    @classmethod
    def parsed(cls, answer: Mapping[str, Any], count: int) -> RankBoxes:
        """Return what an engine answers of `count` tensors.  Raises `WeightRequestError` unless it is one."""
        patterns, tensors = answer.get("patterns"), answer.get("tensors")
        if not isinstance(patterns, list) or not isinstance(tensors, list) or len(tensors) != count:
            raise WeightRequestError(_NO_ANSWER)
        are_patterns = all(isinstance(each, list) and len(each) == len(patterns[0]) for each in patterns)
        are_boxes = are_patterns and all(
            boxes is None or isinstance(boxes, list) for each in patterns for boxes in each
        )
        if not are_boxes or not all(type(number) is int and 0 <= number < len(patterns) for number in tensors):
            raise WeightRequestError(_NO_ANSWER)
        return cls(patterns, tensors)

    def parsed_tensors(self, metas: Sequence[TensorMeta]) -> Iterator[list[list[Box | None]]]:
        """Yield of each tensor, for each rank, the boxes that it is to be sent; None: all of it.

        Raises `WeightRequestError` for a box that does not lie in its tensor.
        """
        known: dict[tuple[int, tuple[int, ...]], list[list[Box | None]]] = {}
        for meta, number in zip(metas, self.tensors, strict=True):
            if (number, meta.shape) not in known:
                known[number, meta.shape] = [
                    [None] if boxes is None else [parse_box(meta.name, meta.shape, box) for box in boxes]
                    for boxes in self.patterns[number]
                ]
            yield known[number, meta.shape]

    @property
    def num_ranks(self) -> int:
        return len(self.patterns[0]) if self.patterns else 0


def _boxes(part: Region | str, shape: Sequence[int]) -> list[Edges] | None:
    if isinstance(part, str):
        return None if part == "all" else []
    dim = part.dim
    before, after = ([[0, size] for size in sizes] for sizes in (shape[:dim], shape[dim + 1 :]))
    cuts = [run.in_whole[dim] for run in part.runs()]
    return [[*before, [cut.start, cut.stop], *after] for cut in cuts if cut.start < cut.stop]
