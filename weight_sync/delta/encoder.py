"""`DeltaEncoder`, the sender's side: remembers what the engine has and writes what changed since.

encoder = DeltaEncoder(named_tensors)             what the engine serves now
delta = encoder.encode(named_tensors)             frames, ready to be sent or stored
... the engine has committed ...  -> encoder.advance(delta)
... it has not ...                -> nothing; the next delta starts from the same base
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weight_sync.bucket import runs_of
from weight_sync.delta.changes import Changes, apply_changes, find_changes
from weight_sync.delta.frame import DeltaFrame, make_frame, write_frame
from weight_sync.errors import CoverageError, TransactionStateError, WeightRequestError
from weight_sync.fingerprint import digest, fingerprint_update
from weight_sync.fingerprint_batch import fingerprints_of
from weight_sync.tensor_meta import TensorMeta

FRAME_BYTES = 256 << 20


@dataclass(frozen=True)
class EncodedDelta:
    """The step from one version to the next: `frames`, and what `advance` needs."""

    frames: tuple[DeltaFrame, ...]
    base_digest: str
    digest: str
    full_bytes: int  # of the tensors themselves
    num_elements: int
    changes: Mapping[str, Changes]

    @property
    def num_changes(self) -> int:
        return sum(frame.num_changes for frame in self.frames)

    def payloads(self) -> list[bytes]:
        """Return the bytes of each frame."""
        return [write_frame(frame) for frame in self.frames]


class DeltaEncoder:
    """Holds a copy of every tensor, in host memory.  `frame_bytes`: of tensors in one frame, at most (or one tensor).

    `level`: zstd's.  Every tensor is in every delta, unchanged ones too, at some twenty bytes: so a delta proves the
    whole version.  Raises `WeightRequestError` for a name that comes twice.
    """

    def __init__(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, frame_bytes: int = FRAME_BYTES, level: int = 1
    ) -> None:
        self._base = {name: _copied(tensor) for name, tensor in _unique(named_tensors).items()}
        values = fingerprints_of((tensor, tensor.dtype, 0) for tensor in self._base.values())
        self._fingerprints = dict(zip(self._base, values, strict=True))
        self._frame_bytes = frame_bytes
        self._level = level

    @property
    def digest(self) -> str:
        """`fingerprint.digest` of the base."""
        return self._digest(self._fingerprints)

    def encode(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> EncodedDelta:
        """Return the delta from the base to these tensors, which are the same ones by name, dtype and shape.

        Raises `CoverageError`, `DtypeMismatchError`, `ShapeMismatchError`.
        """
        tensors = _unique(named_tensors)
        if tensors.keys() != self._base.keys():
            odd = sorted(tensors.keys() ^ self._base.keys())
            raise CoverageError(f"a delta and its base must hold the same tensors; only one of them has: {odd[:20]}")
        changes: dict[str, Changes] = {}
        results: dict[str, int] = {}
        for name, tensor in tensors.items():
            base = self._base[name]
            new = tensor.detach().to("cpu").contiguous()
            changes[name] = find_changes(base, new)
            at = torch.from_numpy(changes[name].positions_N)
            old_value = self._fingerprints[name]
            results[name] = fingerprint_update(old_value, at, base.view(-1)[at], new.view(-1)[at])
        base_digest, result_digest = self.digest, self._digest(results)
        frames = []
        metas = [self._meta(name) for name in self._base]
        for run in runs_of(metas, self._frame_bytes):
            parts = [(meta, changes[meta.name], self._fingerprints[meta.name], results[meta.name]) for meta in run]
            frames.append(make_frame(parts, base_digest, result_digest, self._level))
        full_bytes, num_elements = sum(meta.nbytes for meta in metas), sum(meta.numel for meta in metas)
        return EncodedDelta(tuple(frames), base_digest, result_digest, full_bytes, num_elements, changes)

    def advance(self, delta: EncodedDelta) -> None:
        """Note that the engine has what `delta` leads to: the next one starts there.

        Raises `TransactionStateError` if `delta` does not start from the base held here.
        """
        if delta.base_digest != self.digest:
            raise TransactionStateError("the delta does not start from the version held here")
        for name, changes in delta.changes.items():
            self._base[name], self._fingerprints[name] = apply_changes(
                self._base[name], changes, self._fingerprints[name]
            )

    def _meta(self, name: str) -> TensorMeta:
        return TensorMeta(name, self._base[name].dtype, tuple(self._base[name].shape))

    def _digest(self, fingerprints: Mapping[str, int]) -> str:
        return digest((self._meta(name), value) for name, value in fingerprints.items())


def _unique(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise WeightRequestError(f"{name} was given twice")
        tensors[name] = tensor
    return tensors


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
