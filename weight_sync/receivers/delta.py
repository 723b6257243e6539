"""Deltas over what the model holds: of a broadcast, and of published folders.

    bytes -> index checked against the model -> for each tensor: base fingerprint -> changes applied aside -> result
             fingerprint -> a full tensor, which goes the way of every other

Knows deltas and how to read a model's tensors.  Does not know transactions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from weight_sync.delta.frame import DeltaFrame, read_frame
from weight_sync.delta.version_dir import TensorPatch
from weight_sync.errors import BaseMismatchError, WeightRequestError
from weight_sync.fingerprint import digest
from weight_sync.receivers.base import BucketSource, refuse
from weight_sync.staging import split_wire
from weight_sync.tensor_meta import LogicalWeights, Piece, TensorMeta, dtype_name

DELTA = "delta"


class DeltaSource:
    """A delta frame that comes as the one tensor of `inner`, uint8 [bytes]."""

    def __init__(self, inner: BucketSource, weights: LogicalWeights) -> None:
        self._inner = inner
        self._weights = weights
        self._max_bytes = 0

    @property
    def must_drain(self) -> bool:
        return self._inner.must_drain

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Nothing: which tensors a frame changes is known when it is here.  Raises as the inner source."""
        self._max_bytes = max_bytes
        metas = self._inner.announce(max_bytes)
        if len(metas) != 1 or metas[0].dtype != torch.uint8 or len(metas[0].shape) != 1:
            described = ", ".join(f"{dtype_name(meta.dtype)} {list(meta.shape)}" for meta in metas[:5])
            raise WeightRequestError(f"load_format {DELTA!r} takes one uint8 tensor of one dimension, got {described}")
        return ()

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        """A bucket for each tensor, nothing of which is given before the whole frame fits the model.

        Raises as the inner source, `ContentError`, `BaseMismatchError`, and for tensors that the model does not have
        what `split_wire` raises.
        """
        for bucket in self._inner.receive():
            for _, content in bucket:
                frame = read_frame(content.cpu().contiguous().numpy().data, self._max_bytes)
                check_frame(frame, self._weights)
                for name, tensor in frame.decode(self._weights.read):
                    yield [(name, tensor)]

    def refuse(self, reason: str) -> None:
        """As the inner source."""
        refuse(self._inner, reason)


class PatchSource:
    """Patches of published versions, applied one after the other to what the model holds.

    `patches`: of each tensor, by its name in the checkpoint, in the order in which they are to be applied.
    `logical_names`: see `whole_tensors`.
    """

    must_drain = False

    def __init__(
        self,
        patches: Mapping[str, Sequence[TensorPatch]],
        logical_names: Mapping[str, str],
        weights: LogicalWeights,
    ) -> None:
        self._patches = patches
        self._logical_names = logical_names
        self._weights = weights

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """The tensors that change.  They are as many bytes as the model has of them, whatever `max_bytes` is."""
        metas = [self._weights.metas()[self._logical_names[name]] for name in self._patches]
        return [TensorMeta(name, meta.dtype, meta.shape) for name, meta in zip(self._patches, metas, strict=True)]

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        """A bucket for each tensor.  Raises `ContentError`, `BaseMismatchError`, `TransportError`."""
        for name, patches in self._patches.items():
            content = self._weights.read(self._logical_names[name])
            for patch in patches:
                content = patch.apply(content)
            yield [(name, content)]


def whole_tensors(weights: LogicalWeights, metas: Sequence[TensorMeta]) -> dict[str, str] | None:
    """The model's own tensor behind each tensor of a checkpoint, by name; None unless each is one, bit for bit.

    It is not where the model splits a tensor, or holds it in another dtype.  Raises `UnknownTensorError`,
    `ShapeMismatchError`.
    """
    names = {}
    for meta in metas:
        pieces = weights.split(meta)
        if len(pieces) != 1 or pieces[0].index != () or weights.metas()[pieces[0].name].dtype != meta.dtype:
            return None
        names[meta.name] = pieces[0].name
    return names


def check_frame(frame: DeltaFrame, weights: LogicalWeights) -> None:
    """Whether every tensor of a frame is one of the model's, and the digests of a whole version are what they say.

    Raises `UnknownTensorError`, `ShapeMismatchError`, `DtypeMismatchError`, `WeightRequestError` for a tensor that the
    model splits, `BaseMismatchError` for a digest.
    """
    split = split_wire(weights, frame.metas, cast=False)
    for meta, pieces in zip(frame.metas, split, strict=True):
        if pieces != [Piece(meta.name)]:
            raise WeightRequestError(f"{meta.name}: a delta is of the model's own tensors, by their own names")
    if frame.metas and {meta.name for meta in frame.metas} == set(weights.metas()):
        for stated, values in (
            (frame.base_digest, [(entry.meta, entry.base_fingerprint) for entry in frame.entries]),
            (frame.digest, [(entry.meta, entry.result_fingerprint) for entry in frame.entries]),
        ):
            if digest(values) != stated:
                raise BaseMismatchError(f"the delta's fingerprints do not make up the digest {stated} that it states")
