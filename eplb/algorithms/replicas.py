"""How many slots each logical expert gets.  Knows loads only, not where slots are.

Shapes: L rows (MoE layers, or layers times nodes), E logical experts.
"""

from __future__ import annotations

import numpy as np


def greedy_replica_order(loads_LE: np.ndarray, num_extra: int, most: int | None = None) -> np.ndarray:
    """The expert that gets each of `num_extra` further slots, in order: [L, num_extra] int64.

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
    """Slots of every expert [L, E] int64 under `greedy_replica_order`."""
    layers, experts = loads_LE.shape
    order = greedy_replica_order(loads_LE, num_physical_experts - experts, most)
    flat = (order + np.arange(layers)[:, None] * experts).ravel()
    return 1 + np.bincount(flat, minlength=layers * experts).reshape(layers, experts)
