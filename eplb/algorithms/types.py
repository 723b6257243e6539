"""The input and output of planners: `ExpertLayout`, checked loads and maps, `Plan` and its bytes; numbers of replicas.

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks), G ranks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from eplb.errors import LayoutError, LoadsError, MapError
from eplb.expert_location import ExpertLocationMetadata, check_cover, find_duplicate, replica_counts

T = TypeVar("T")
_DECODING = threading.Lock()
"""The process can crash if two threads make msgspec decode into a type that it does not know yet."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The sizes of a layout.  Slot p is on rank `p // slots_per_rank`, rank g on node `g // (num_ranks / num_nodes)`.

    `num_groups` is the number of expert groups of a group-limited router; 1 where there are none.
    Raises `LayoutError`.
    """

    num_logical_experts: int
    num_physical_experts: int
    num_ranks: int
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        experts, slots, ranks = self.num_logical_experts, self.num_physical_experts, self.num_ranks
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be at least 1, got {getattr(self, name)}")
        if slots < experts:
            raise LayoutError(f"{slots} slots cannot hold {experts} logical experts")
        if slots % ranks:
            raise LayoutError(f"{slots} slots cannot be divided evenly over {ranks} ranks")
        if slots > experts * ranks:
            raise LayoutError(
                f"{slots} slots are too many: each of {ranks} ranks needs at most one for each of {experts} experts"
            )
        if ranks % self.num_nodes:
            raise LayoutError(f"{ranks} ranks do not divide over {self.num_nodes} nodes")
        if experts % self.num_groups:
            raise LayoutError(f"{experts} logical experts do not divide into {self.num_groups} groups")

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical_experts // self.num_ranks

    @property
    def num_redundant_experts(self) -> int:
        return self.num_physical_experts - self.num_logical_experts


@dataclass(frozen=True)
class Plan:
    """The expert in every slot, and the division of an expert's tokens over its slots.

    `split_LP[l, p]` is the share of the tokens of its expert that slot p takes: at least 0, and 1 in all over the slots
    of an expert.  `reason` states why this algorithm, in one sentence.
    """

    algorithm: str
    reason: str
    layout: ExpertLayout
    physical_to_logical_LP: np.ndarray  # [L, P] int64
    split_LP: np.ndarray  # [L, P] float64

    def location(self) -> ExpertLocationMetadata:
        """Return the map as an engine holds it."""
        return ExpertLocationMetadata(torch.from_numpy(self.physical_to_logical_LP), self.layout.num_logical_experts)


def even_split(physical_to_logical_LP: np.ndarray, num_logical_experts: int) -> np.ndarray:
    """Return [L, P] float64: one over the number of slots of the slot's expert."""
    replicas_LE = replica_counts(physical_to_logical_LP, num_logical_experts)
    return 1.0 / np.take_along_axis(replicas_LE, physical_to_logical_LP, axis=1)


def greedy_replica_order(loads_LE: np.ndarray, num_extra: int, most: int | None = None) -> np.ndarray:
    """Return the expert that gets each of `num_extra` further slots, in order: [L, num_extra] int64.

    Each goes to the expert with the most load a slot (the lowest id among equals), which makes the largest load of a
    slot as small as any counts can.  No expert gets more than `most` slots.  Keeps the dtype of the loads throughout.
    """
    rows = np.arange(len(loads_LE))
    replicas_LE = np.ones(loads_LE.shape, dtype=np.int64)
    per_slot_LE = loads_LE.copy()
    order = np.empty((len(loads_LE), num_extra), dtype=np.int64)
    for index in range(num_extra):
        chosen = per_slot_LE.argmax(axis=1)
        order[:, index] = chosen
        replicas_LE[rows, chosen] += 1
        counts = replicas_LE[rows, chosen]
        per_slot_LE[rows, chosen] = loads_LE[rows, chosen] / counts.astype(loads_LE.dtype)
        if most is not None:
            per_slot_LE[rows, chosen] = np.where(counts >= most, -1.0, per_slot_LE[rows, chosen])
    return order


def greedy_replica_counts(loads_LE: np.ndarray, num_physical_experts: int, most: int) -> np.ndarray:
    """Return the slots of every expert [L, E] int64 under `greedy_replica_order`."""
    experts = loads_LE.shape[1]
    return 1 + replica_counts(greedy_replica_order(loads_LE, num_physical_experts - experts, most), experts)


def checked_counts(counts_LE: np.ndarray | torch.Tensor, layout: ExpertLayout) -> np.ndarray:
    """Return counts of tokens [L, E] as float64.  Raises `LoadsError`."""
    counts = np.asarray(counts_LE, dtype=np.float64)
    if counts.ndim != 2 or counts.shape[1] != layout.num_logical_experts or counts.shape[0] < 1:
        wanted = f"[layers, {layout.num_logical_experts}]"
        raise LoadsError(f"counts have the shape {list(counts.shape)}, expected {wanted}")
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise LoadsError("counts must be finite and not negative")
    return counts


def shares_of(counts_LE: np.ndarray) -> np.ndarray:
    """Return counts [L, E] divided by their sum in each layer; a layer without counts counts as uniform."""
    total_L = counts_LE.sum(axis=1, keepdims=True)
    uniform = np.full_like(counts_LE, 1.0 / counts_LE.shape[1])
    shares_LE: np.ndarray = np.divide(counts_LE, total_L, out=uniform, where=total_L > 0)
    return shares_LE


def checked_map(
    physical_to_logical_LP: np.ndarray | torch.Tensor,
    layout: ExpertLayout,
    num_layers: int,
    *,
    duplicates: bool = False,
) -> np.ndarray:
    """Return the map [L, P] as int64.  `duplicates` allows two slots of one rank to hold the same expert.

    Raises `MapError` for another shape, an id out of range, an expert without a slot or (unless allowed) with two on
    one rank.
    """
    given = np.asarray(physical_to_logical_LP)
    wanted = (num_layers, layout.num_physical_experts)
    if given.shape != wanted:
        raise MapError(f"the map has the shape {list(given.shape)}, expected {list(wanted)}")
    if given.dtype.kind not in "iu":
        raise MapError(f"the map must hold integers, got {given.dtype}")
    physical_to_logical = given.astype(np.int64)
    check_cover(physical_to_logical, layout.num_logical_experts)
    repeated = find_duplicate(physical_to_logical, layout.num_ranks)
    if repeated is not None and not duplicates:
        layer, rank, expert = repeated
        raise MapError(f"layer {layer}: rank {rank} holds expert {expert} twice")
    return physical_to_logical


def count_duplicates(physical_to_logical_LP: np.ndarray, layout: ExpertLayout) -> int:
    """Return the number of slots, over all layers, that hold an expert which another slot of the same rank holds
    already.
    """
    by_rank = np.sort(physical_to_logical_LP.reshape(-1, layout.num_ranks, layout.slots_per_rank), axis=2)
    return int((by_rank[:, :, 1:] == by_rank[:, :, :-1]).sum())


def to_bytes(value: Any) -> bytes:
    """Encode one rank's plan for the others: dataclasses with arrays.  Reading it executes nothing."""
    return msgspec.msgpack.encode(value, enc_hook=_encoded)


def from_bytes(data: bytes, kind: type[T]) -> T:
    """Return the `kind` that `to_bytes` was given."""
    with _DECODING:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decoded)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, range):
        return value.start, value.stop
    raise NotImplementedError(f"{type(value).__name__} cannot be written as JSON")


def _decoded(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, content = value
        return np.frombuffer(content, dtype).reshape(shape).copy()
    if kind is range:
        return range(*value)
    raise NotImplementedError(f"{kind.__name__} cannot be read from JSON")
