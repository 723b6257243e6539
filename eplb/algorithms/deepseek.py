"""The two policies of DeepSeek's EPLB, slot for slot, in float32 as the published code computes.

Source: the method is that of github.com/deepseek-ai/EPLB (README: hierarchical and global load balancing).
    order     items by falling load, the first among equals first
    pack      each item goes to the lightest pack that has room, the lowest pack among equals
    copy      each further slot goes to the expert with the most load a slot
The published code sorts unstably, so where loads of a slot are equal its map is undefined; ours is what it gives with
a stable sort.
`deepseek` copies and packs over all ranks at once.  `deepseek_hierarchical` first packs expert groups onto nodes, then
copies and packs inside each node, so that the experts of a group stay on one node.
Neither knows the placement in force, and both may put two slots of one expert on one rank.

Shapes: L MoE layers, E logical experts, P physical experts (slots), N nodes, G ranks; R rows that are packed alike.
"""

from __future__ import annotations

import numpy as np

from eplb.algorithms.types import ExpertLayout, Plan, checked_counts, even_split, greedy_replica_order
from eplb.errors import LayoutError
from eplb.expert_location import replica_counts


def deepseek(counts_LE: np.ndarray, layout: ExpertLayout) -> Plan:
    """Copy and pack over all ranks.  Raises `LoadsError`."""
    loads_LE = checked_counts(counts_LE, layout).astype(np.float32)
    reason = "packs the heaviest slots first over all ranks"
    return _plan("deepseek", reason, layout, _copy_and_pack(loads_LE, layout.num_physical_experts, layout.num_ranks))


def deepseek_hierarchical(counts_LE: np.ndarray, layout: ExpertLayout) -> Plan:
    """Assign groups to nodes, then copy and pack inside each node.  Raises `LoadsError`, `LayoutError`."""
    loads_LE = checked_counts(counts_LE, layout).astype(np.float32)
    by_node_LE, nodes = experts_by_node(loads_LE, layout), layout.num_nodes
    layers, experts = loads_LE.shape
    node_loads = np.take_along_axis(loads_LE, by_node_LE, axis=1).reshape(layers * nodes, experts // nodes)
    local = _copy_and_pack(node_loads, layout.num_physical_experts // nodes, layout.num_ranks // nodes)
    physical_to_logical = experts_of_nodes(local.reshape(layers, nodes, -1), by_node_LE)
    reason = "keeps every expert group on one node, then packs inside each node"
    return _plan("deepseek_hierarchical", reason, layout, physical_to_logical)


def experts_by_node(loads_LE: np.ndarray, layout: ExpertLayout) -> np.ndarray:
    """Return the experts [L, E] of each layer, node after node: whole groups, the heaviest on the lightest node.

    Raises `LayoutError` where groups do not divide over the nodes.
    """
    groups, nodes = layout.num_groups, layout.num_nodes
    if groups % nodes:
        raise LayoutError(f"{groups} expert groups cannot be divided evenly over {nodes} nodes: use `deepseek`")
    layers, experts = loads_LE.shape
    group_loads = loads_LE.reshape(layers, groups, experts // groups).sum(axis=2, dtype=np.float32)
    position = _positions(*_pack(group_loads, nodes), groups // nodes)  # [L, groups], by node
    by_position = np.argsort(position, axis=1)
    in_order: np.ndarray = by_position[:, :, None] * (experts // groups) + np.arange(experts // groups)
    return in_order.reshape(layers, experts)


def experts_of_nodes(local: np.ndarray, by_node_LE: np.ndarray) -> np.ndarray:
    """Return the expert of every slot [L, P].

    `local` [L, N, P / N]: its number among the experts of its node in `by_node_LE` (`experts_by_node`).
    """
    layers, nodes, _ = local.shape
    numbers = local + np.arange(nodes)[:, None] * (by_node_LE.shape[1] // nodes)
    return np.take_along_axis(by_node_LE, numbers.reshape(layers, -1), axis=1)


def _plan(algorithm: str, reason: str, layout: ExpertLayout, physical_to_logical_LP: np.ndarray) -> Plan:
    split = even_split(physical_to_logical_LP, layout.num_logical_experts)
    return Plan(algorithm, reason, layout, physical_to_logical_LP, split)


def _copy_and_pack(loads_RE: np.ndarray, num_slots: int, num_packs: int) -> np.ndarray:
    """Return the expert of every slot, [R, num_slots] int64, packs one after the other."""
    rows, experts = loads_RE.shape
    extra = greedy_replica_order(loads_RE, num_slots - experts)
    copies = np.concatenate((np.broadcast_to(np.arange(experts), (rows, experts)), extra), axis=1)
    per_slot = loads_RE / replica_counts(copies, experts).astype(np.float32)
    position = _positions(*_pack(np.take_along_axis(per_slot, copies, axis=1), num_packs), num_slots // num_packs)
    return np.take_along_axis(copies, np.argsort(position, axis=1), axis=1)


def _positions(pack: np.ndarray, index_in_pack: np.ndarray, pack_size: int) -> np.ndarray:
    positions: np.ndarray = pack * pack_size + index_in_pack
    return positions


def _pack(loads_RX: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pack of each of the X items and its index in there, [R, X] int64 each; packs get X / num_packs items
    each.

    One item to a pack: item x is in pack x, whatever its load.
    """
    rows, items = loads_RX.shape
    pack_size = items // num_packs
    if pack_size == 1:
        return np.broadcast_to(np.arange(items), loads_RX.shape), np.zeros(loads_RX.shape, dtype=np.int64)
    pack, index_in_pack = np.empty((2, rows, items), dtype=np.int64)
    pack_loads = np.zeros((rows, num_packs), dtype=np.float32)  # infinite when full
    pack_items = np.zeros((rows, num_packs), dtype=np.int64)
    every = np.arange(rows)
    for item in np.argsort(-loads_RX, axis=1, kind="stable").T:
        lightest = pack_loads.argmin(axis=1)
        filled = pack_items[every, lightest]
        pack[every, item], index_in_pack[every, item] = lightest, filled
        pack_items[every, lightest] = filled + 1
        grown = pack_loads[every, lightest] + loads_RX[every, item]
        pack_loads[every, lightest] = np.where(filled + 1 == pack_size, np.float32(np.inf), grown)
    return pack, index_in_pack
