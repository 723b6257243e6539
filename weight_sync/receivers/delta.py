"""Broadcast deltas, over what the model holds.

    bytes -> index checked against the model -> on every rank, for its part of each tensor: share of the fingerprint
             before and after -> one exchange: they add up to what the delta states -> changes staged, part by part

A rank needs no more of a tensor than its part, and nothing is delivered before all of a frame is proved on all ranks.

Tensors that lie whole at one place of this rank are changed many at a time (`FramePart`), and taken by plan.  Others,
split or copied or not here, are changed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from weight_sync.delta.changes import changed, share_after
from weight_sync.delta.frame import DeltaFrame, FrameEntry, TensorDelta, read_frame
from weight_sync.delta.frame_part import FramePart, PartTables, cut_parts
from weight_sync.errors import (
    BaseMismatchError,
    CopiesDifferError,
    DtypeMismatchError,
    TransactionStateError,
    WeightRequestError,
)
from weight_sync.fingerprint import digest
from weight_sync.fp8_wire import kind_of
from weight_sync.held_format import AS_SENT, HeldFormats
from weight_sync.intake import ProvenPart
from weight_sync.plan import Homes, KnownCalls
from weight_sync.rank_parts import Exchange, Held, alone, gather_places, share_of, whole_fingerprint
from weight_sync.receivers.base import BucketSource, KnownCall
from weight_sync.splitting import split_wire
from weight_sync.tensor_meta import LogicalWeights, PackedBucket, Part, Piece, Region, TensorMeta, dtype_name, parts_of

DELTA = "delta"
_ADVICE = "send whole tensors, or publish versions and use /pull_weights"


class DeltaSource(BucketSource):
    """A delta frame that comes as the one tensor of `inner`, uint8 [bytes], over the content of `weights`.

    `target`: where it is staged, which must be where its base lies.  `exchange`: with the other ranks, once a frame.
    `quantised`: tensors that are held otherwise than they were sent, of which there is no base.  `homes`: of `weights`.
    `known_calls`: of the same weights.
    """

    def __init__(
        self,
        inner: BucketSource,
        weights: LogicalWeights,
        target: LogicalWeights | None = None,
        exchange: Exchange = alone,
        quantised: HeldFormats = AS_SENT,
        homes: Homes | None = None,
        known_calls: KnownCalls[KnownCall] | None = None,
    ) -> None:
        self._inner = inner
        self._quantised = quantised
        self._weights = weights
        self._target = weights if target is None else target
        self._exchange = exchange
        self._homes = Homes(weights) if homes is None else homes
        self._known_calls = KnownCalls(0) if known_calls is None else known_calls
        self._max_bytes = 0
        self.must_drain = inner.must_drain

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return nothing: which tensors a frame changes is known when it is here.  Raises as the inner source."""
        self._max_bytes = max_bytes
        metas = self._inner.announce(max_bytes)
        if len(metas) != 1 or metas[0].dtype != torch.uint8 or len(metas[0].shape) != 1:
            described = ", ".join(f"{dtype_name(meta.dtype)} {list(meta.shape)}" for meta in metas[:5])
            raise WeightRequestError(f"load_format {DELTA!r} takes one uint8 tensor of one dimension, got {described}")
        return ()

    def receive(self) -> Iterator[ProvenPart | PackedBucket]:
        """Yield the changed tensors, none of which is delivered before the whole frame fits what all ranks hold.

        Raises as the inner source, `ContentError`, `BaseMismatchError`, `TransactionStateError` where the update is
        staged for another placement or a base is not held, and for tensors that the model does not have what
        `split_wire` raises.
        """
        for bucket in self._inner.receive():
            assert not isinstance(bucket, ProvenPart)
            for _, content in bucket.named() if isinstance(bucket, PackedBucket) else bucket:
                frame = read_frame(content.cpu().contiguous().numpy().data, self._max_bytes)
                self._require_bases(frame)
                check_frame(frame, self._weights)
                held = self._weights.metas()
                yield from self._proven({name: delta for name, delta in frame.open().items() if name in held})

    def _require_bases(self, frame: DeltaFrame) -> None:
        """Check that memory holds what the frame's tensors are to be changed from.

        Raises `TransactionStateError` where it holds values of FP8 instead, `UnknownTensorError`.
        """
        for meta in frame.metas:
            if kind_of(self._weights, meta) != "plain":
                raise TransactionStateError(f"{meta.name}: the engine holds values of FP8 tensors; {_ADVICE}")
            if (held := self._quantised.get(meta.name)) is not None:
                raise TransactionStateError(
                    f"{meta.name}: a delta changes the sent values, but this engine holds quantised values "
                    f"({held.flag}); {_ADVICE}"
                )

    def _proven(self, deltas: Mapping[str, TensorDelta]) -> Iterator[ProvenPart | PackedBucket]:
        if self._target is not self._weights:
            raise TransactionStateError(
                "a delta cannot be applied while this update adopts a placement: begin with base_digest"
            )
        parts = self._parts([delta for delta in deltas.values() if self._is_whole(delta.entry.meta.name)])
        shares: dict[str, list[int]] = {}
        proved: PackedBucket | None = None
        for part in parts:
            proved, found = part.prove(self._held(part))
            shares.update(zip(part.names, found.tolist(), strict=True))
        mine = ([(None, shares[name])] if name in shares else self._shares(delta) for name, delta in deltas.items())
        held = gather_places(mine, self._exchange)
        for delta, places in zip(deltas.values(), held, strict=True):
            _check(delta.entry, places)
        for part in parts:
            if proved is None or len(parts) > 1:  # several would be too much to keep
                proved = part.changed(self._held(part))
            yield proved
        for name, delta in deltas.items():
            if name not in shares:
                yield self._changed(name, delta)

    def _is_whole(self, name: str) -> bool:
        places = self._homes.places(name)
        return len(places) == 1 and places[0].region is None

    def _parts(self, deltas: Sequence[TensorDelta]) -> list[FramePart]:
        """Return these deltas in parts.  Which parts they are is worked out once for the same tensors."""
        metas = [delta.entry.meta for delta in deltas]

        def cut() -> KnownCall:
            tables = cut_parts(metas)
            return KnownCall(metas, [part.layout for part in tables], tables)

        tables: Sequence[PartTables] = self._known_calls.get((DELTA, tuple(metas)), cut).messages if metas else ()
        rest = iter(deltas)
        return [FramePart(part, [next(rest) for _ in part.layout.metas]) for part in tables]

    def _held(self, part: FramePart) -> list[torch.Tensor]:
        return [self._homes.places(name)[0].read() for name in part.names]

    def _changed(self, name: str, delta: TensorDelta) -> ProvenPart:
        """Return what this rank will hold of one tensor."""
        part = None
        for region, base in parts_of(self._weights, name)[:1]:
            part = Part(region, changed(base, delta.changes().within(delta.entry.meta.shape, region)[0]))
        return ProvenPart(name, part, delta.entry.result_fingerprint)

    def _shares(self, delta: TensorDelta) -> list[tuple[Region | None, list[int]]]:
        """Return the shares of this rank's places of a tensor, before and after."""
        meta, changes, found = delta.entry.meta, delta.changes(), []
        for part in parts_of(self._weights, meta.name):
            mine, indices_N = changes.within(meta.shape, part.region)
            share = share_of(meta, part)
            found.append((part.region, [share, share_after(part.content, mine, indices_N, share)]))
        return found

    def refuse(self, reason: str) -> None:
        """Pass the reason to the inner source."""
        self._inner.refuse(reason)


def _check(entry: FrameEntry, held: Sequence[Held]) -> None:
    try:
        before, after = (whole_fingerprint(entry.meta, held, at) for at in (0, 1))
    except CopiesDifferError as error:
        raise BaseMismatchError(str(error)) from None
    entry.check(before, after)


def check_frame(frame: DeltaFrame, weights: LogicalWeights) -> None:
    """Check that every tensor of a frame is one of the model's, and that the digests of a whole version are right.

    Raises `UnknownTensorError`, `ShapeMismatchError`, `DtypeMismatchError`, `WeightRequestError` for a tensor that the
    model splits, `BaseMismatchError` for a digest.
    """
    split = split_wire(weights, frame.metas, cast=False)
    for meta, pieces in zip(frame.metas, split, strict=True):
        if not pieces:
            continue  # the model keeps nothing of it
        if pieces != [Piece(meta.name)]:
            raise WeightRequestError(f"{meta.name}: a delta must use the model's own tensors and names")
        if (held := weights.metas()[meta.name].dtype) != meta.dtype:
            dtypes = f"of {dtype_name(meta.dtype)}, and the engine holds {dtype_name(held)}"
            raise DtypeMismatchError(f"{meta.name} is a delta {dtypes}; {_ADVICE}")
    if frame.metas and {meta.name for meta in frame.metas} >= weights.metas().keys():
        for stated, values in (
            (frame.base_digest, [(entry.meta, entry.base_fingerprint) for entry in frame.entries]),
            (frame.digest, [(entry.meta, entry.result_fingerprint) for entry in frame.entries]),
        ):
            if digest(values) != stated:
                raise BaseMismatchError(f"the delta's fingerprints do not add up to its digest {stated}")
