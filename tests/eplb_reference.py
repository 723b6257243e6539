"""DeepSeek's published EPLB policies, written down one step at a time from their description: slow, plain, independent.

One layer after the other, one item after the other, numbers held in float32 torch scalars as the published code does.
"""

from __future__ import annotations

import torch


def pack(loads: torch.Tensor, num_packs: int, stable: bool = True) -> list[list[int]]:
    """Return the items of each pack in the order of arrival.

    The heaviest item is packed first, and each item goes to the lightest pack that has room.
    """
    size = len(loads) // num_packs
    if size == 1:
        return [[item] for item in range(len(loads))]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [torch.zeros((), dtype=torch.float32) for _ in range(num_packs)]
    for item in torch.sort(loads, descending=True, stable=stable).indices.tolist():
        with_room = [index for index in range(num_packs) if len(packs[index]) < size]
        lightest = min(with_room, key=totals.__getitem__)
        packs[lightest].append(item)
        totals[lightest] = totals[lightest] + loads[item]
    return packs


def copies_of(loads: torch.Tensor, num_slots: int) -> tuple[list[int], list[int]]:
    """Copy items until all slots have one: each further copy is of the item with the most load a copy.

    Return the item of every copy, and the number of copies of every item.
    """
    items, counts = list(range(len(loads))), torch.ones(len(loads), dtype=torch.int64)
    while len(items) < num_slots:
        per_copy = loads / counts
        chosen = int((per_copy == per_copy.max()).nonzero()[0])
        items.append(chosen)
        counts[chosen] += 1
    return items, counts.tolist()


def copy_and_pack(loads: torch.Tensor, num_slots: int, num_packs: int, stable: bool = True) -> list[int]:
    items, counts = copies_of(loads, num_slots)
    per_copy = torch.stack([loads[item] / counts[item] for item in items])
    return [items[copy] for members in pack(per_copy, num_packs, stable) for copy in members]


def reference_global(counts_LE: torch.Tensor, num_slots: int, num_ranks: int, stable: bool = True) -> list[list[int]]:
    """Place the experts of each layer.  `stable` False: equal loads come in any order, as the published code sorts."""
    return [copy_and_pack(loads, num_slots, num_ranks, stable) for loads in counts_LE.float()]


def reference_hierarchical(
    counts_LE: torch.Tensor, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> list[list[int]]:
    size = counts_LE.shape[1] // num_groups
    rows = []
    for loads in counts_LE.float():
        group_loads = torch.stack([loads[group * size : (group + 1) * size].sum() for group in range(num_groups)])
        row: list[int] = []
        for groups in pack(group_loads, num_nodes):
            experts = [group * size + index for group in groups for index in range(size)]
            local = copy_and_pack(loads[experts], num_slots // num_nodes, num_ranks // num_nodes)
            row += [experts[index] for index in local]
        rows.append(row)
    return rows
