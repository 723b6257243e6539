"""`RefreshStatement`: everything of a refresh that must be equal on all trainer ranks, and how two of them differ.

Trainer ranks pack buckets and run collectives by their own plan.  Sizes that differ end a process in gloo, and hang one
in NCCL.  So the ranks compare their statements before the first byte moves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weight_sync.sender.meshes import SendingMeshes
from weight_sync.tensor_meta import dtype_name

_MAX_LISTED_RANKS = 16
_WHOLE = "whole"


class TensorLine(NamedTuple):
    """One of the trainer's tensors as its rank sees it."""

    name: str
    dtype: str
    shape: str
    placement: str


@dataclass(frozen=True)
class RefreshStatement:
    """`options`: the arguments of the refresh as text.  `tensors`: in the order in which they are sent."""

    options: dict[str, str]
    tensors: list[TensorLine]

    @classmethod
    def of(
        cls,
        tensors: Sequence[tuple[str, torch.Tensor]],
        sent_as: Mapping[str, torch.dtype],
        options: Mapping[str, Any],
        sending: SendingMeshes,
    ) -> RefreshStatement:
        """Describe the trainer's tensors, sent in the dtypes `sent_as` (by name), and the refresh's options."""
        meshes = _MeshTexts(sending)
        lines = [
            TensorLine(name, dtype_name(sent_as[name]), str(list(tensor.shape)), _placement(tensor, meshes))
            for name, tensor in tensors
        ]
        return cls({name: _text(value) for name, value in options.items()}, lines)

    def tensors_digest(self) -> bytes:
        """Return bits that differ where the tensors, or their order, differ."""
        return hashlib.blake2b(json.dumps(self.tensors).encode(), digest_size=32).digest()

    def encoded(self) -> bytes:
        """Return the wire form: JSON."""
        return json.dumps([self.options, self.tensors], sort_keys=True).encode()

    @classmethod
    def decoded(cls, content: bytes) -> RefreshStatement:
        """Return the statement of which `content` is the wire form."""
        options, lines = json.loads(content)
        return cls(options, [TensorLine(*line) for line in lines])

    def difference(self, rank: int, first: RefreshStatement) -> str:
        """Name the first difference between rank 0 and rank `rank`, whose statement this is; empty if there is none."""
        tensors = self._tensor_difference(rank, first)
        if tensors:
            return f"the trainer ranks do not have the same tensors: {tensors}"
        for name in sorted(self.options.keys() | first.options.keys()):
            mine, theirs = self.options.get(name, "not given"), first.options.get(name, "not given")
            if mine != theirs:
                return f"the trainer ranks request different refreshes: {_two(name, theirs, rank, mine)}"
        return ""

    def _tensor_difference(self, rank: int, first: RefreshStatement) -> str:
        mine, theirs = ({line.name: line for line in one.tensors} for one in (self, first))
        lacking = _some([name for name in theirs if name not in mine])
        extra = _some([name for name in mine if name not in theirs])
        if lacking and extra:
            return f"rank {rank} lacks {lacking}; it has {extra}, and rank 0 does not"
        if lacking:
            return f"rank {rank} lacks {lacking}"
        if extra:
            return f"rank 0 lacks {extra}, and rank {rank} has it"
        for name, line in theirs.items():
            for aspect in ("shape", "dtype", "placement"):
                here, there = getattr(mine[name], aspect), getattr(line, aspect)
                if here != there:
                    return _two(f"the {aspect} of {name}", there, rank, here)
        for position, (here, there) in enumerate(zip(mine, theirs)):
            if here != there:
                where = _two(f"tensor {position}", there, rank, here)
                return f"{where}; the order must be equal, but the order of a set differs between processes"
        return ""


def digest_of_refresh(options: Mapping[str, Any], tensors_digest: bytes) -> int:
    """Return 64 bits that differ where statements differ, from the options and `tensors_digest` of a statement."""
    texts = {name: _text(value) for name, value in options.items()}
    return digest_of(json.dumps(texts, sort_keys=True).encode() + tensors_digest)


def digest_of(content: bytes) -> int:
    """Return 64 bits that differ where statements differ."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _two(subject: str, first: str, rank: int, other: str) -> str:
    return f"{subject} is {first} on rank 0 and {other} on rank {rank}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else ""


def _text(value: Any) -> str:
    return str(value) if isinstance(value, torch.dtype) else json.dumps(value, sort_keys=True, default=repr)


class _MeshTexts(dict[DeviceMesh, str]):
    """Texts of the meshes met so far; most tensors share one."""

    def __init__(self, sending: SendingMeshes) -> None:
        self._sending = sending

    def __missing__(self, mesh: DeviceMesh) -> str:
        ranks = torch.tensor(self._sending.ranks(mesh)).view(mesh.shape).tolist()
        if mesh.size() <= _MAX_LISTED_RANKS:
            text = f"ranks {ranks}"
        else:
            shape = "x".join(str(size) for size in mesh.shape)
            text = f"a mesh of {shape} ranks ({digest_of(json.dumps(ranks).encode()):016x})"
        self[mesh] = text
        return text


def _placement(tensor: torch.Tensor, meshes: _MeshTexts) -> str:
    """Return the placement as text."""
    if not isinstance(tensor, DTensor):
        return _WHOLE
    placed = ", ".join(f"Shard({one.dim})" if type(one) is Shard else repr(one) for one in tensor.placements)
    return f"{placed} over {meshes[tensor.device_mesh]}"
