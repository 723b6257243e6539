"""Broadcast deltas, over what the model holds.

    bytes -> index checked against the model -> on every rank, for its part of each tensor: share of the fingerprint
             before and after -> one exchange: they add up to what the delta states -> changes staged, part by part

A rank needs no more of a tensor than its part, and nothing is delivered before all of a frame is proved on all ranks.
What depends on the list of tensors alone, and on where they live, is worked out once (`DeltaPlan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from weight_sync.delta.agreement import Places, RankFindings, require_agreement
from weight_sync.delta.changes import changed, share_after
from weight_sync.delta.delta_plan import DeltaPlan
from weight_sync.delta.frame import DeltaFrame, TensorDelta, read_frame
from weight_sync.delta.tensor_list import TensorList
from weight_sync.errors import DtypeMismatchError, TransactionStateError, WeightRequestError
from weight_sync.fingerprint import fingerprint
from weight_sync.fingerprint_words import words_of
from weight_sync.held_format import AS_SENT, HeldFormats
from weight_sync.homes import Homes
from weight_sync.intake import ProvenPart
from weight_sync.known_calls import KnownCalls
from weight_sync.paired_wire import part_of
from weight_sync.rank_parts import Exchange, alone, share_of
from weight_sync.receivers.base import BucketSource, KnownCall
from weight_sync.splitting import split_wire
from weight_sync.tensor_meta import LogicalWeights, PackedBucket, Part, Piece, TensorMeta, dtype_name, parts_of

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
        self._places_key = weights.places_key()
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
                frame = read_frame(content.cpu().contiguous().numpy().data, self._max_bytes, self._list)
                if self._target is not self._weights:
                    raise TransactionStateError(
                        "a delta cannot be applied while this update adopts a placement: begin with base_digest"
                    )
                yield from self._proven(frame, self._plan(frame.tensors))

    def _list(self, key: bytes, read: Callable[[], TensorList]) -> TensorList:
        """Return the list of tensors of a key, read if it is not known."""

        def make() -> KnownCall:
            found = read()
            return KnownCall(found.metas, (), [found])

        known: TensorList = self._known_calls.get((DELTA, key), make).messages[0]
        return known

    def _plan(self, tensors: TensorList) -> DeltaPlan:
        """Return the plan of these tensors, checked and made unless it is known.  Raises as `require_bases`."""

        def make() -> KnownCall:
            require_bases(tensors.metas, self._weights, self._quantised)
            # With its tensors, as a plan takes memory for each: plans of earlier places must not stay by thousands.
            return KnownCall(tensors.metas, (), [DeltaPlan.of(tensors, self._weights, self._homes)])

        key = DELTA, tensors.key, self._places_key
        plan: DeltaPlan = self._known_calls.get(key, make).messages[0]
        return plan

    def _proven(self, frame: DeltaFrame, plan: DeltaPlan) -> Iterator[ProvenPart | PackedBucket]:
        plan.require_digests(frame)
        parts, singles = plan.open(frame, lambda name: self._homes.places(name)[0].read())
        proved: PackedBucket | None = None
        values = [np.zeros((0, 2), dtype=np.uint64)]
        for part in parts:
            proved, found = part.prove()
            values.append(found)
        places = {at: self._shares(delta) for at, delta in zip(np.flatnonzero(plan.single).tolist(), singles)}
        places |= self._differing(plan, frame.tensors.names)
        is_whole = plan.planned.copy()
        is_whole[list(places)] = False
        findings = RankFindings(is_whole, np.concatenate(values)[is_whole[plan.planned]], places)
        require_agreement(frame, plan.held, findings, self._exchange)
        for part in parts:
            if proved is None or len(parts) > 1:  # several would be too much to keep
                proved = part.changed()
            yield proved
        for delta in singles:
            yield self._changed(delta)

    def _differing(self, plan: DeltaPlan, names: Sequence[str]) -> dict[int, Places]:
        """Return the fingerprints before of planned tensors whose copies on this rank differ."""
        found: dict[int, Places] = {}
        for at in plan.copied:
            contents = [place.read() for place in self._homes.places(names[at])]
            if not all(same_bits(contents[0], other) for other in contents[1:]):
                found[at] = [(None, [fingerprint(content), 0]) for content in contents]
        return found

    def _changed(self, delta: TensorDelta) -> ProvenPart:
        """Return what this rank will hold of one tensor."""
        part, meta = None, delta.entry.meta
        for region, base in parts_of(self._weights, meta.name)[:1]:
            part = Part(region, changed(base, delta.changes().within(meta.shape, region)[0]))
        return ProvenPart(meta.name, part, delta.entry.result_fingerprint)

    def _shares(self, delta: TensorDelta) -> Places:
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


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same bits."""
    return torch.equal(words_of(one), words_of(other))


def require_bases(metas: Sequence[TensorMeta], weights: LogicalWeights, quantised: HeldFormats) -> None:
    """Check that each tensor is one of the model's, and that memory holds what it is to be changed from.

    Raises `UnknownTensorError`, `ShapeMismatchError`, `DtypeMismatchError`, `WeightRequestError` for a tensor that the
    model splits, `TransactionStateError` where memory holds values of quantised tensors, or quantised ones.
    """
    for meta in metas:
        if (part := part_of(weights, meta)) is not None:
            raise TransactionStateError(f"{meta.name}: the engine holds values of {part.kind.label} tensors; {_ADVICE}")
        if (held := quantised.get(meta.name)) is not None:
            raise TransactionStateError(
                f"{meta.name}: a delta changes the sent values, but this engine holds quantised values "
                f"({held.flag}); {_ADVICE}"
            )
    for meta, pieces in zip(metas, split_wire(weights, metas, cast=False), strict=True):
        if not pieces:
            continue  # the model keeps nothing of it
        if pieces != [Piece(meta.name)]:
            raise WeightRequestError(f"{meta.name}: a delta must use the model's own tensors and names")
        if (held_dtype := weights.metas()[meta.name].dtype) != meta.dtype:
            dtypes = f"of {dtype_name(meta.dtype)}, and the engine holds {dtype_name(held_dtype)}"
            raise DtypeMismatchError(f"{meta.name} is a delta {dtypes}; {_ADVICE}")
