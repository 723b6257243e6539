"""`Gatherer`: a bucket's bytes on the sending rank, and the fingerprints of everything that is sent.

    whole tensors      what lies end to end in memory, in the dtype that is sent, goes from where it is (experts of a
                       fused tensor do); the rest is cast and packed
    sharded tensors    each rank casts and packs what it holds of the bucket; one collective brings it to the sender,
                       which puts every box in its place

So only the sending rank ever holds more than its own shards, and that is a bucket, never a tensor list or a model.
Fingerprints add up over shards, so each rank computes its own shards' and no tensor moves for them, but for the few
tensors that are sharded in such a way that a shard is not one run of the flat tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from weight_sync.bucket import copy_into, cut_pieces, end_to_end, plan_buckets, unpack
from weight_sync.fingerprint_batch import Shard, fingerprints_of
from weight_sync.receivers.distributed import PIECE_BYTES
from weight_sync.sender.link import split_pieces
from weight_sync.sender.plan import Part, TensorPlan
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.sender.shards import (
    Box,
    Holding,
    Picks,
    box_among,
    flat_offset,
    holdings,
    picks_of,
    size_of,
    source_index,
)
from weight_sync.tensor_meta import TensorMeta

_ALIGNMENT = 16  # at least any item size, so that a rank's bytes can be read as their dtypes


@dataclass(frozen=True)
class _Piece:
    """The piece that one rank brings of one part: `box` counts what the part picks of each dimension of its source."""

    part: Part
    rank: int
    box: Box

    @property
    def size(self) -> tuple[int, ...]:
        return size_of(self.box)

    @property
    def nbytes(self) -> int:
        return TensorMeta("", self.part.meta.dtype, self.size).nbytes

    def flat_offset(self, picks: Picks) -> int | None:
        """Return the piece's offset in the flat part; None if it is not one run there."""
        box, sizes = self.box, tuple(len(picked) for picked in picks)
        if self.part.piece.transposed:
            box, sizes = (*box[:-2], box[-1], box[-2]), (*sizes[:-2], sizes[-1], sizes[-2])
        return flat_offset(box, sizes)


class Gatherer:
    """`ranks`: None where no tensor is sharded.  All ranks call the same methods with the same arguments.

    Raises `WeightRequestError` for shards that cannot be sent.
    """

    def __init__(self, plan: TensorPlan, ranks: TrainerRanks | None) -> None:
        self._plan = plan
        self._ranks = ranks
        self._holdings: dict[str, list[Holding]] = {}
        self._pieces_of: dict[str, list[_Piece]] = {}  # by part, of all ranks
        if ranks is not None:
            self._holdings = {name: holdings(name, it, ranks.rank_of) for name, it in plan.sources.items()}

    def gather(self, metas: Sequence[TensorMeta], flat: torch.Tensor | None) -> list[torch.Tensor]:
        """Return a bucket's pieces, uint8, as `cut_pieces` cuts it; views of `flat` and of the trainer's tensors.

        `flat`: room for all of it, uint8 [total bytes], on any device; None on ranks other than the sending one, which
        get no pieces.  Raises `TransportError` if another rank failed or is late, and what packing raises here.
        """
        if self._ranks is None:
            assert flat is not None, "without other ranks this one sends"
            return self._pieces_of_whole(metas, flat)
        ranks = self._ranks
        pieces = [piece for meta in metas for piece in self._pieces(meta.name)]
        mine = ranks.jointly(lambda: self._pack_mine(metas, pieces, flat))
        sizes = [_padded(_of_rank(pieces, rank)) if rank else 0 for rank in range(ranks.world_size)]
        received = ranks.to_sender(mine, sizes)
        if received is None:
            return []
        assert flat is not None, "the sending rank has room for the bucket"
        views = dict(unpack(flat, metas))
        for rank in range(1, ranks.world_size):
            own = _of_rank(pieces, rank)
            for piece, content in zip(own, _split(received[rank], own), strict=True):
                _view_of(views, piece).copy_(content)
        return split_pieces(metas, flat)

    def fingerprints(self) -> dict[str, int]:
        """Return F by the names that are sent, of the content as it is sent; without fused tensors, which the engine
        splits.

        Complete on every rank, but for tensors whose shards are not runs: those are on the sending rank only.
        """
        parts = [part for part in self._plan.parts.values() if not part.is_fused]
        if self._ranks is None:
            values = fingerprints_of((self._whole(part), part.meta.dtype, 0) for part in parts)
            return dict(zip((part.meta.name for part in parts), values, strict=True))
        ranks = self._ranks
        by_runs = [part for part in parts if self._is_in_runs(part)]
        sums = ranks.jointly(lambda: self._own_shares(by_runs, ranks.rank))
        found = dict(zip((part.meta.name for part in by_runs), ranks.sum_over_ranks(sums), strict=True))
        rest = [part.meta for part in parts if part.meta.name not in found]
        for bucket in plan_buckets(rest, max((meta.nbytes for meta in rest), default=1) or 1):
            flat = None
            if ranks.is_sender:
                flat = torch.empty(sum(meta.nbytes for meta in bucket), dtype=torch.uint8)
            self.gather(bucket, flat)
            if flat is not None:
                views = dict(unpack(flat, bucket))
                values = fingerprints_of((view, view.dtype, 0) for view in views.values())
                found |= dict(zip(views, values, strict=True))
        return found

    # --- packing ------------------------------------------------------------------------------------------------

    def _whole(self, part: Part) -> torch.Tensor:
        """Return a view, in the source's dtype."""
        return part.piece.of(self._plan.sources[part.source])

    def _pieces_of_whole(self, metas: Sequence[TensorMeta], flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = []
        for room, cut in zip(split_pieces(metas, flat), cut_pieces(metas, PIECE_BYTES), strict=True):
            parts = [self._plan.parts[meta.name] for meta in cut]
            tensors = [part.piece.of(self._plan.sources[part.source]) for part in parts]
            there = end_to_end(tensors, cut[0].dtype, room.device) if len({meta.dtype for meta in cut}) == 1 else None
            if there is None:
                for (_, view), tensor in zip(unpack(room, cut), tensors, strict=True):
                    copy_into(view, tensor)
            pieces.append(room if there is None else there)
        return pieces

    def _pack_mine(
        self, metas: Sequence[TensorMeta], pieces: Sequence[_Piece], flat: torch.Tensor | None
    ) -> torch.Tensor:
        """Return this rank's bytes to send, uint8; the sender puts its own pieces into `flat` and sends nothing."""
        assert self._ranks is not None, "only sharded tensors come in pieces"
        own = _of_rank(pieces, self._ranks.rank)
        if flat is not None:
            views = dict(unpack(flat, metas))
            for piece in own:
                copy_into(_view_of(views, piece), self._content(piece))
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        packed = torch.empty(_padded(own), dtype=torch.uint8, device=self._ranks.device)
        for piece, target in zip(own, _split(packed, own), strict=True):
            copy_into(target, self._content(piece))
        return packed

    def _pieces(self, name: str) -> list[_Piece]:
        """Return what all ranks hold of a part; at most one piece a rank."""
        if name not in self._pieces_of:
            part = self._plan.parts[name]
            picks = self._picks(part)
            met = [(held.rank, box_among(picks, held.box)) for held in self._holdings[part.source]]
            self._pieces_of[name] = [_Piece(part, rank, box) for rank, box in met if box is not None]
        return self._pieces_of[name]

    def _picks(self, part: Part) -> Picks:
        return picks_of(part.piece, tuple(self._plan.sources[part.source].shape))

    def _content(self, piece: _Piece) -> torch.Tensor:
        """Return a view into what lives here, in the source's dtype and with its dimensions."""
        name = piece.part.source
        source = self._plan.sources[name]
        (here,) = [held.box for held in self._holdings[name] if held.rank == piece.rank]
        local = source.to_local() if isinstance(source, DTensor) else source
        return local[source_index(self._picks(piece.part), piece.box, here)]

    # --- fingerprints -------------------------------------------------------------------------------------------

    def _is_in_runs(self, part: Part) -> bool:
        """Return whether each rank's piece is one run of the flat tensor."""
        picks = self._picks(part)
        return all(piece.flat_offset(picks) is not None for piece in self._pieces(part.meta.name))

    def _own_shares(self, parts: Sequence[Part], rank: int) -> list[int]:
        """Return the share of each part's fingerprint that this rank holds; 0 where it holds nothing."""
        shares = [0] * len(parts)
        held = [(at, piece) for at, part in enumerate(parts) for piece in _of_rank(self._pieces(part.meta.name), rank)]
        for (at, _), value in zip(held, fingerprints_of(self._run(piece) for _, piece in held), strict=True):
            shares[at] += value
        return shares

    def _run(self, piece: _Piece) -> Shard:
        part = piece.part
        offset = piece.flat_offset(self._picks(part))
        assert offset is not None, "only asked for pieces that are runs"
        content = self._content(piece)
        return content.mT if part.piece.transposed else content, part.meta.dtype, offset


def _of_rank(pieces: Sequence[_Piece], rank: int) -> list[_Piece]:
    return [piece for piece in pieces if piece.rank == rank]


def _padded(pieces: Sequence[_Piece]) -> int:
    total = sum(piece.nbytes for piece in pieces)
    return -(-total // _ALIGNMENT) * _ALIGNMENT


def _split(packed: torch.Tensor, pieces: Sequence[_Piece]) -> Iterator[torch.Tensor]:
    """Yield the pieces inside a rank's bytes.  Larger item sizes come first in every bucket, so each is aligned."""
    offset = 0
    for piece in pieces:
        yield packed[offset : offset + piece.nbytes].view(piece.part.meta.dtype).view(piece.size)
        offset += piece.nbytes


def _view_of(views: dict[str, torch.Tensor], piece: _Piece) -> torch.Tensor:
    """Return the view of the bucket that the piece belongs in, with the dimensions of its source."""
    wanted = piece.part.piece
    view = views[wanted.name]
    if wanted.transposed:
        view = view.mT
    for dim, picked in enumerate(wanted.index):
        if isinstance(picked, int):
            view = view.unsqueeze(dim)
    return view[tuple(slice(start, stop) for start, stop in piece.box)]
