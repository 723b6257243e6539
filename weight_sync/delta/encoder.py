"""`DeltaEncoder`, the sender's side: remembers what the engine has and writes what changed since.

encoder = DeltaEncoder(named_tensors)             what the engine serves now
delta = encoder.encode(named_tensors)             frames, ready to be sent or stored
... the engine has committed ...  -> encoder.advance(delta)
... it has not ...                -> nothing; the next delta starts from the same base

Tensors of one dtype are compared many at a time (`EncodedRun`).

T tensors of a run, N changed elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.bucket import PackPlan, runs_of
from weight_sync.delta.changes import Changes, find_changes
from weight_sync.delta.frame import DeltaFrame, pack_planes, write_frame
from weight_sync.delta.planes import PLANES, SizeTable, write_all_planes
from weight_sync.delta.tensor_list import TensorList
from weight_sync.digest_plan import DigestPlan
from weight_sync.errors import (
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    TransactionStateError,
    WeightRequestError,
)
from weight_sync.fingerprint import fingerprint_changes
from weight_sync.fingerprint_batch import fingerprints_of
from weight_sync.fingerprint_words import SIGNED, UNSIGNED
from weight_sync.tensor_meta import TensorMeta, dtype_name

FRAME_BYTES = 256 << 20
_RUN_BYTES = 16 << 20
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class EncodedDelta:
    """The step from one version to the next: `frames`, and what `advance` needs.

    `changes`: of the encoder's runs of tensors, positions counted in the run.  `fingerprints`: of the results, uint64.
    """

    frames: tuple[DeltaFrame, ...]
    base_digest: str
    digest: str
    full_bytes: int  # of the tensors themselves
    num_elements: int
    changes: Sequence[Changes]
    fingerprints: np.ndarray

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
        tensors = _unique(named_tensors)
        self._metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        self._frames = [(TensorList(metas), list(_runs(metas))) for metas in runs_of(self._metas, frame_bytes)]
        for _, runs in self._frames:
            for run in runs:
                run.base.copy_(run.joined(tensors))
        values = fingerprints_of((tensor, tensor.dtype, 0) for tensor in tensors.values())
        self._fingerprints = np.array(values, dtype=np.uint64)
        self._digests = DigestPlan(self._metas)
        self._level = level

    @property
    def digest(self) -> str:
        """`fingerprint.digest` of the base."""
        return self._digests.digest(self._fingerprints)

    def encode(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> EncodedDelta:
        """Return the delta from the base to these tensors, which are the same ones by name, dtype and shape.

        Raises `CoverageError`, `DtypeMismatchError`, `ShapeMismatchError`.
        """
        tensors = _unique(named_tensors)
        _require_alike(self._metas, tensors)
        found = [[run.compared(tensors) for run in runs] for _, runs in self._frames]
        added = [one.added for of_frame in found for one in of_frame]
        results = self._fingerprints + np.concatenate([np.empty(0, dtype=np.uint64), *added])
        base_digest, digest = self.digest, self._digests.digest(results)
        prints, frames, first = np.stack([self._fingerprints, results], axis=1), [], 0
        for (listed, _), of_frame in zip(self._frames, found, strict=True):
            last = first + len(listed.metas)
            packed = pack_planes([[one.planes[at] for one in of_frame] for at in range(len(PLANES))], self._level)
            sizes = SizeTable.join([one.sizes for one in of_frame])
            frames.append(DeltaFrame(listed, sizes, prints[first:last], base_digest, digest, packed))
            first = last
        full_bytes, num_elements = sum(meta.nbytes for meta in self._metas), sum(meta.numel for meta in self._metas)
        changes = [one.changes for of_frame in found for one in of_frame]
        return EncodedDelta(tuple(frames), base_digest, digest, full_bytes, num_elements, changes, results)

    def advance(self, delta: EncodedDelta) -> None:
        """Note that the engine has what `delta` leads to: the next one starts there.

        Raises `TransactionStateError` if `delta` does not start from the base held here.
        """
        if delta.base_digest != self.digest:
            raise TransactionStateError("the delta does not start from the version held here")
        runs = [run for _, runs in self._frames for run in runs]
        for run, changes in zip(runs, delta.changes, strict=True):
            run.base[torch.from_numpy(changes.positions_N)] += torch.from_numpy(changes.steps_N).to(run.base.dtype)
        self._fingerprints = delta.fingerprints


@dataclass(frozen=True)
class EncodedRun:
    """The changes of a run, positions counted in it; what is written of them; and what they add to F, uint64 [T]."""

    changes: Changes
    sizes: SizeTable
    planes: Sequence[np.ndarray]
    added: np.ndarray


class _Run:
    """Tensors of one dtype, and their base end to end, in words."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._metas = metas
        self._dtype = metas[0].dtype
        self._numels_T = np.array([meta.numel for meta in metas], dtype=np.int64)
        self._ends_T = np.cumsum(self._numels_T)
        self._plans: dict[torch.device, PackPlan] = {}
        self.base = torch.empty(int(self._ends_T[-1]), dtype=SIGNED[self._dtype.itemsize])

    def joined(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the words of the tensors of this run, end to end."""
        mine = [tensors[meta.name].detach().contiguous() for meta in self._metas]
        if len({tensor.device for tensor in mine}) > 1:
            mine = [tensor.cpu() for tensor in mine]
        device = mine[0].device
        if len(mine) == 1 and device.type == "cpu":
            return mine[0].view(-1).view(self.base.dtype)
        if device not in self._plans:
            shapes = [meta.shape for meta in self._metas]
            self._plans[device] = PackPlan(shapes, self._dtype, self._dtype, (device, _CPU))
        room = torch.empty(len(self.base), dtype=self._dtype)
        self._plans[device].pack(mine, room)
        return room.view(self.base.dtype)

    def compared(self, tensors: dict[str, torch.Tensor]) -> EncodedRun:
        """Return what changes from the base to the tensors."""
        new = self.joined(tensors)
        changes, unsigned = find_changes(self.base, new), UNSIGNED[self._dtype.itemsize]
        counts_T = np.diff(np.searchsorted(changes.positions_N, self._ends_T), prepend=0)
        within_N = changes.positions_N - np.repeat(self._ends_T - self._numels_T, counts_T)
        old_N, new_N = (words.view(unsigned).numpy()[changes.positions_N] for words in (self.base, new))
        added_T = fingerprint_changes(within_N, old_N, new_N, counts_T)
        within = Changes(within_N, changes.steps_N)
        return EncodedRun(changes, *write_all_planes(within, counts_T, self._numels_T, self._dtype.itemsize), added_T)


def _runs(metas: Sequence[TensorMeta]) -> Iterator[_Run]:
    """Yield runs of neighbours of one dtype, of at most `_RUN_BYTES` or one tensor."""
    for _, same in itertools.groupby(metas, lambda meta: meta.dtype):
        for run in runs_of(same, _RUN_BYTES):
            yield _Run(run)


def _require_alike(metas: Sequence[TensorMeta], tensors: dict[str, torch.Tensor]) -> None:
    """Raise `CoverageError`, `DtypeMismatchError` or `ShapeMismatchError` for tensors that the base does not have."""
    names = {meta.name for meta in metas}
    if tensors.keys() != names:
        odd = sorted(tensors.keys() ^ names)
        raise CoverageError(f"a delta and its base must hold the same tensors; only one of them has: {odd[:20]}")
    for meta in metas:
        tensor = tensors[meta.name]
        if tensor.dtype != meta.dtype:
            old, new = dtype_name(meta.dtype), dtype_name(tensor.dtype)
            raise DtypeMismatchError(f"a delta needs one dtype, got {old} and {new}")
        if tuple(tensor.shape) != meta.shape:
            raise ShapeMismatchError(f"a delta needs one shape, got {list(meta.shape)} and {list(tensor.shape)}")


def _unique(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise WeightRequestError(f"{name} was given twice")
        tensors[name] = tensor
    return tensors
